"""What lesson 01 breaks, counts and draws."""

import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from course import lab
from course.grading.child import what_happens
from course.grading.observers import files
from course.play import cells, nb00
from course.play.cells import COLOURS
from npydata.system.page_cache import evict, resident_pages

TOKENS = nb00.TOKENS
ROWS, ROW_LEN, SEQ_LEN, EPOCHS = 64, 1024, 32, 10
PAGE, PAGES = 4096, 64
STARTS = (3_000, 40_300, 98_000)
"""Tokens at which three windows begin, for the picture of pages."""
SAVED_LOOK = 131_072
"""Bytes for one look where the usual 128 KiB are read ahead."""


# Breaking and counting


def numbered_tokens() -> Path:
    """Write a file of rows whose tokens are their own numbers, into the working directory."""
    np.save("tokens.npy", np.arange(ROWS * ROW_LEN, dtype=np.uint16).reshape(ROWS, ROW_LEN))
    return Path("tokens.npy")


def after_it_shrinks(Data: Any) -> str:
    """Fetch from a file that another program has cut off; say which of three things happens."""

    def fetch() -> str:
        path = numbered_tokens()
        data = Data(path, SEQ_LEN)
        os.truncate(path, PAGE)
        data.fetch(range(100, 164))
        return "it returns garbage"

    ended = what_happens(fetch)
    return f"it raises an error: {ended}" if "Error" in ended else ended


def gather_after_it_shrinks(TokenFile: Any) -> None:
    def gather() -> str:
        path = numbered_tokens()
        file = TokenFile(path)
        os.truncate(path, PAGE)
        return str(file.gather(np.array([50_000]), 9))

    print(what_happens(gather))


def exam(Data: Any) -> dict[str, str]:
    """Count three ways in which a dataset can go wrong; print and return them."""
    found = {"when the file shrinks": after_it_shrinks(Data).removeprefix("it raises an error: ")}
    with files():
        data = Data(numbered_tokens(), SEQ_LEN)
        count, starts, crossing = len(data), set(), 0
        by_epoch = "epoch" in inspect.signature(data.fetch).parameters
        for epoch in range(EPOCHS):
            x, y = data.fetch(range(count), **({"epoch": epoch} if by_epoch else {}))
            first, last = x[:, 0].numpy(), y[:, -1].numpy()
            crossing += int((first // ROW_LEN != last // ROW_LEN).sum())
            starts |= set(first.tolist())
    every = ROWS * (ROW_LEN - SEQ_LEN)
    found["windows across two rows, in an epoch"] = f"{crossing / EPOCHS:.0f} of {count:,}"
    found[f"different windows, in {EPOCHS} epochs"] = f"{len(starts):,} of {every:,}"
    for what, value in found.items():
        print(f"{what:<38}{value}")
    return found


def compare(before: dict[str, str], after: dict[str, str]) -> None:
    print("\nbefore -> now")
    for what, value in before.items():
        print(f"{what:<38}{value.split(': ')[0]} -> {after[what].split(': ')[0]}")


def bytes_for_one_look() -> int:
    """Bytes of a cold file that are in memory after a look at one token of it."""
    with files():
        path = Path("cold.npy").resolve()
        np.save(path, np.resize(np.load(TOKENS, mmap_mode="r").ravel(), 1 << 22))
        tokens = np.load(path, mmap_mode="r")
        if evict(path):
            print("(This system keeps the file in memory: a figure from another machine.)")
            return SAVED_LOOK
        tokens[2_000_000].item()
        here, before = resident_pages(path).sum(), -1
        while here != before:  # what is read ahead arrives a little later
            time.sleep(0.05)
            before, here = here, resident_pages(path).sum()
        print(f"{here:,} of the file's {len(resident_pages(path)):,} pages are in memory now.")
        return int(here) * PAGE


# Drawing


def draw_overlap(starts: tuple[int, ...], width: int, count: int = 10) -> None:
    """Draw an array, all its windows below it, and which of them a gather copies."""
    windows = count - width + 1
    figure, (ax,) = cells.panels(1, 8, 3.6)
    for k in range(count):
        cells.cell(ax, k, 0, 10 + k)
    for row in range(windows):
        for k in range(width):
            fill = COLOURS["chosen" if row in starts else "token"]
            cells.cell(ax, row + k, row + 1.2, 10 + row + k, fill)
        arrow = "  copied" if row in starts else ""
        cells.name(ax, count + 0.3, row + 1.2, f"window {row}{arrow}")
    cells.name(ax, count + 0.3, 0, "tokens, in memory once")
    cells.frame(
        ax, count + 4.2, windows + 1.4, f"All windows of {width}; a gather at {list(starts)}"
    )
    lab.picture(
        figure, f"{windows} windows of {width} in {count} tokens; the gather copies {len(starts)}."
    )


def draw_shift() -> None:
    """Draw a window, and x and y below it."""
    words = ["the", "clever", "fox", "sings", "under", "it"]
    figure, (ax,) = cells.panels(1, 8, 1.9)
    for k, word in enumerate(words):
        cells.cell(ax, k, 0, word)
        if k < len(words) - 1:
            cells.cell(ax, k, 1.2, word, COLOURS["x"])
            cells.cell(ax, k, 2.2, words[k + 1], COLOURS["y"])
    for y, text in (
        (0, "a window: seq_len + 1 tokens"),
        (1.2, "x: what the model reads"),
        (2.2, "y: what it predicts"),
    ):
        cells.name(ax, len(words) + 0.2, y, text)
    cells.frame(ax, len(words) + 3.4, 3.3, "One window, shifted: seq_len is 5")
    lab.picture(figure, "x = the clever fox sings under; y = clever fox sings under it")


def show_batch(TokenFile: Any, shifted_pair: Callable[..., Any]) -> None:
    """Draw x and y of two windows of the lesson's file, made by the learner's code."""
    tokens = TokenFile(TOKENS).gather(np.array([7, 2_000]), 13)
    pair = shifted_pair(tokens, np.empty((2, 2, 12), np.int64))
    figure, (ax,) = cells.panels(1, 8, 2.6)
    for row in range(2):
        for half, part in enumerate(pair):
            y = 2.6 * row + half
            cells.name(ax, -0.2, y, f"{'xy'[half]}[{row}]", ha="right")
            for k, token in enumerate(part[row].tolist()):
                cells.cell(ax, k, y, token, COLOURS["xy"[half]])
    cells.frame(ax, 12, 4.7, "Two samples of your file, made by your gather and your shifted_pair")
    ax.set_xlim(-1, 12.1)
    x, y = pair
    ready = all(one.is_contiguous() and one.dtype == torch.int64 for one in pair)
    lab.picture(figure, f"shape {tuple(x.shape)}; contiguous int64 tensors: {ready}")


def draw_rows(row_len: int, seq_len: int, stride: int, rows: int) -> None:
    """Draw rows of tokens, their windows, and what is left over."""
    figure, (ax,) = cells.panels(1, 8, 2.0)
    per_row = (row_len - seq_len - 1) // stride + 1
    for row in range(rows):
        for k in range(row_len):
            number, within = divmod(k, stride)
            inside = number < per_row and within <= seq_len
            fill = COLOURS["window" if inside else "left over"]
            cells.cell(ax, k, 1.8 * row + 0.5, row * row_len + k, fill)
        for number in range(per_row):
            at = number * stride
            ax.plot([at + 0.1, at + seq_len + 0.9], [1.8 * row - 0.05] * 2, color=cells.INK, lw=1.5)
            middle = at + (seq_len + 1) / 2
            cells.name(
                ax, middle, 1.8 * row - 0.35, f"window {row * per_row + number}", ha="center"
            )
        cells.name(ax, row_len + 0.3, 1.8 * row + 0.5, f"row {row}")
    cells.frame(
        ax,
        row_len + 1.5,
        1.8 * rows + 0.2,
        "Windows of 4 in rows of 9; numbers are tokens of the file",
    )
    ax.set_ylim(1.8 * rows - 0.7, -0.7)
    cells.legend(ax, {"left over": COLOURS["left over"]})
    left = row_len - per_row * stride
    lab.picture(figure, f"each row: {per_row} windows, {left} token left over")


def pages(pages_touched: Callable[..., tuple[int, int]]) -> Callable[..., tuple[Any, str]]:
    """Return what the sliders draw: which pages three windows need, and which are read."""

    def draw(tokens_in_a_window: int, pages_read_ahead: int) -> tuple[Any, str]:
        needed, read = ["not read"] * PAGES, ["not read"] * PAGES
        for start in STARTS:
            first, last = pages_touched(start, tokens_in_a_window)
            for page in range(first, min(last + pages_read_ahead, PAGES - 1) + 1):
                read[page] = "read ahead" if read[page] == "not read" else read[page]
            for page in range(first, min(last, PAGES - 1) + 1):
                needed[page] = read[page] = "needed"
        figure, (ax,) = cells.panels(1, 10, 1.5)
        for y, row in enumerate((needed, read)):
            cells.name(ax, -0.6, y, ("needed", "read")[y], ha="right")
            for page, state in enumerate(row):
                cells.cell(ax, page, y, fill=COLOURS[state])
        cells.frame(ax, PAGES, 2, "Three windows in a file of 64 pages")
        cells.legend(ax, {what: COLOURS[what] for what in ("needed", "read ahead", "not read")})
        counts = [sum(state != "not read" for state in row) for row in (needed, read)]
        text = (
            f"windows of {tokens_in_a_window:,} tokens: {counts[0]} pages needed, {counts[1]} read"
        )
        return figure, text

    return draw


def draw_waits(Windows: Any, MyWindows: Any) -> None:
    """Draw the data wait of the naive script, of lesson 00's dataset, and of this lesson's."""
    batches = {
        "naive": nb00.naive_batches(),
        "Windows": nb00.one_after_the_other(Windows(TOKENS, SEQ_LEN)),
        "MyWindows": nb00.one_after_the_other(MyWindows(TOKENS, SEQ_LEN)),
    }
    nb00.draw(**{what: nb00.measure("data wait", batches=made) for what, made in batches.items()})
