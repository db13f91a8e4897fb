"""What lesson 01 breaks, counts and draws."""

import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

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
    lines = [("tokens, in memory once", [(10 + k, "token") for k in range(count)])]
    for row in range(windows):
        fill = "chosen" if row in starts else "token"
        cut = [(10 + k, fill) if row <= k < row + width else None for k in range(count)]
        lines.append((f"window {row}" + ", copied" * (row in starts), cut))
    title = f"All windows of {width}; a gather at {list(starts)}"
    text = f"{windows} windows of {width} in {count} tokens; the gather copies {len(starts)}."
    lab.picture(cells.rows(lines, title), text)


def draw_shift() -> None:
    """Draw a window, and x and y below it."""
    words = ["the", "clever", "fox", "sings", "under", "it"]
    lines = [
        ("a window: seq_len + 1 tokens", [(word, "token") for word in words]),
        ("x: what the model reads", [(word, "x") for word in words[:-1]]),
        ("y: what it predicts", [(word, "y") for word in words[1:]]),
    ]
    text = "x = the clever fox sings under; y = clever fox sings under it"
    lab.picture(cells.rows(lines, "One window, shifted: seq_len is 5"), text)


def draw_rows(row_len: int, seq_len: int, stride: int, rows: int) -> None:
    """Draw rows of tokens, their windows, and what is left over; no two windows overlap."""
    per_row = (row_len - seq_len - 1) // stride + 1
    fills = [("window", "read ahead")[k // stride % 2] for k in range(per_row * stride)]
    fills += ["left over"] * (row_len - len(fills))
    lines = []
    for row in range(rows):
        first, tokens = row * per_row, range(row * row_len, (row + 1) * row_len)
        label = f"row {row}: windows {first} to {first + per_row - 1}"
        lines.append((label, list(zip(tokens, fills, strict=True))))
    title = f"Windows of {seq_len + 1} in rows of {row_len}; numbers are tokens of the file"
    named = {"one window": COLOURS["window"], "the next": COLOURS["read ahead"]}
    named["left over"] = COLOURS["left over"]
    left = row_len - per_row * stride
    text = f"each row: {per_row} windows, {left} token left over"
    lab.picture(cells.rows(lines, title, named), text)


def pages(pages_touched: Callable[..., tuple[int, int]]) -> Callable[..., tuple[Any, str]]:
    """Return what the sliders draw: which pages three windows need, and which are read."""

    def draw(tokens_in_a_window: int, pages_read_ahead: int) -> tuple[Any, str]:
        needed, read = set(), set()
        for start in STARTS:
            first, last = pages_touched(start, tokens_in_a_window)
            needed |= {*range(first, min(last + 1, PAGES))}
            read |= {*range(first, min(last + pages_read_ahead + 1, PAGES))}
        kinds = [
            "needed" if k in needed else "read ahead" if k in read else "not read"
            for k in range(PAGES)
        ]
        fills = {kind: COLOURS[kind] for kind in ("needed", "read ahead", "not read")}
        line = [("", kind) for kind in kinds]
        figure = cells.rows([("", line)], f"Three windows in a file of {PAGES} pages", fills, 10)
        counts = f"{len(needed)} pages needed, {len(read)} read"
        return figure, f"windows of {tokens_in_a_window:,} tokens: {counts}"

    return draw


def draw_waits(Windows: Any, MyWindows: Any) -> None:
    """Draw the data wait of the naive script, of lesson 00's dataset, and of this lesson's."""
    batches = {
        "naive": nb00.naive_batches(),
        "Windows": nb00.one_after_the_other(Windows(TOKENS, SEQ_LEN)),
        "MyWindows": nb00.one_after_the_other(MyWindows(TOKENS, SEQ_LEN)),
    }
    nb00.draw(**{what: nb00.measure("data wait", batches=made) for what, made in batches.items()})
