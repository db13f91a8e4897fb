"""Documents, rows and sources to look at: what lesson 11 shows of them.

    tokens = documents.corpus()         # some hundred documents, one behind the other
    row = documents.three_documents()   # three of them in one row, whose losses are compared
    documents.draw_rows(fit)            # rows as coloured documents, cut and packed
    documents.draw_shares(sources)      # what each source has given, against its weight

The documents are made up: each has four words of its own out of 63, so that what a model sees of
another document misleads it, and by how much can be measured.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes

from npydata import AsyncDataLoader
from tutorial import figures
from tutorial.sliders import with_sliders
from tutorial.symbols import ROOT

sys.path.append(str(ROOT / "examples"))
import masks

EOT = 0
WORDS, OWN_WORDS = 64, 4
ROW = 64
"""Tokens in a row; no document is longer."""
SURE = 8.0
"""What all of its attention adds to the logit of a word."""
FILLS = ("#0f766e", "#fbdca0", "#1b4f72", "#cfe3f5")
SOURCES = {"web": "gpu", "books": "ours", "code": "naive"}
"""The sources of the mixture, and the colour of each."""


# Documents


def corpus(count: int = 400, seed: int = 0) -> np.ndarray:
    """Documents of 4 to 64 tokens, one behind the other; the token 0 ends each."""
    chance = np.random.default_rng(seed)
    lengths = np.exp(chance.normal(3.2, 0.6, count)).astype(int).clip(4, ROW)
    return np.concatenate([document(length, chance) for length in lengths]).astype(np.uint16)


def document(length: int, chance: np.random.Generator) -> np.ndarray:
    """A document of four words, in any order, and the token that ends it."""
    words = chance.choice(np.arange(1, WORDS), OWN_WORDS, replace=False)
    return np.append(chance.choice(words, length - 1), EOT)


@dataclass(frozen=True, slots=True)
class Row:
    """Documents that share a row; all tensors `(1, T)`."""

    tokens: torch.Tensor
    document_ids: torch.Tensor
    lengths: np.ndarray

    def parts(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """What each document has of a tensor `(1, T)`."""
        bounds = np.append(0, np.cumsum(self.lengths)).tolist()
        return (values[:, begin:end] for begin, end in pairwise(bounds))


def three_documents() -> Row:
    """A row of 20, 24 and 20 tokens."""
    lengths, chance = np.array([20, 24, 20]), np.random.default_rng(5)
    tokens = np.concatenate([document(length, chance) for length in lengths])
    documents = np.repeat(np.arange(len(lengths)), lengths)
    return Row(torch.from_numpy(tokens)[None], torch.from_numpy(documents)[None], lengths)


# The leak


@cache
def model() -> masks.TinyModel:
    """A model with weights set by hand: it expects the words that it sees, the more so the more.

    Its attention goes to all it may see alike, and a little depends on the position.
    """
    torch.manual_seed(0)
    reader = masks.TinyModel(WORDS, ROW, width=WORDS, heads=1).double().requires_grad_(False)
    for bias in (reader.project.bias, reader.head.bias):
        bias.zero_()
    reader.tokens.weight.copy_(torch.eye(WORDS))
    reader.positions.weight.mul_(0.02)
    reader.project.weight.zero_()[-WORDS:].copy_(torch.eye(WORDS))
    reader.head.weight.copy_(SURE * torch.eye(WORDS))
    return reader


def causal(length: int) -> torch.Tensor:
    """The mask of ordinary training: a position sees all that come before it in its row."""
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


def losses_alone(row: Row) -> list[torch.Tensor]:
    """The losses of each document as if it were the only one; behind its last token is nothing."""
    found = []
    for tokens in row.parts(row.tokens):
        positions = torch.arange(tokens.shape[1])[None]
        logits = model()(tokens, positions, causal(tokens.shape[1]))
        found.append(masks.losses(logits[:, :-1], tokens[:, 1:])[0])
    return found


def losses_in_row(
    row: Row, mask: torch.Tensor | None = None, position_ids: Any = None
) -> list[torch.Tensor]:
    """The losses of the same positions in a row: seen through a mask, counted by position ids."""
    length = row.tokens.shape[1]
    mask = causal(length) if mask is None else mask
    positions = torch.as_tensor(np.arange(length) if position_ids is None else position_ids)
    logits = model()(row.tokens, positions.reshape(1, -1), mask)
    targets = row.tokens.roll(-1)
    return [one[0, :-1] for one in row.parts(masks.losses(logits, targets))]


def measure_leak(row: Row) -> None:
    """Print the loss of each document, alone and in the row without a mask; and where it looks."""
    pairs = zip(losses_alone(row), losses_in_row(row), abroad(row), strict=True)
    for k, (alone, packed, share) in enumerate(pairs):
        print(f"document {k}: loss alone {alone.mean():.2f}, in the row {packed.mean():.2f}; "
              f"{share:.0%} of its attention goes to others")  # fmt: skip


def changed(row: Row, **options: Any) -> list[int]:
    """How many losses of each document are not what they are alone."""
    pairs = zip(losses_alone(row), losses_in_row(row, **options), strict=True)
    return [int((~torch.isclose(a, b, rtol=1e-9, atol=1e-12)).sum()) for a, b in pairs]


def abroad(row: Row) -> list[float]:
    """The share of each document's attention that goes to others, without a mask."""
    other = row.document_ids[:, :, None] != row.document_ids[:, None, :]
    seen = causal(row.tokens.shape[1])[0]
    shares = (seen & other).sum(-1) / seen.sum(-1)
    return [one.mean().item() for one in row.parts(shares)]


# Rows


def cut_rows(lengths: Sequence[int], room: int) -> list[list[tuple[int, int, int]]]:
    """Rows of a file cut wherever a row is full: of each piece its document, start and length."""
    rows: list[list[tuple[int, int, int]]] = [[]]
    left = room
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            size = min(left, length - start)
            rows[-1].append((number, start, size))
            start, left = start + size, left - size
            if not left:
                rows, left = [*rows, []], room
    return [row for row in rows if row]


def whole_rows(rows: list[list[int]], lengths: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Rows of whole documents, in the same form."""
    return [[(int(item), 0, int(lengths[item])) for item in row] for row in rows]


def score(name: str, rows: list[list[tuple[int, int, int]]], *, masked: bool = False) -> int:
    """Print a line of this lesson's scoreboard; return what percent can see another document."""
    used = sum(size for row in rows for _, _, size in row)
    seeing = sum(size for row in rows for _, _, size in row[1:]) * (not masked)
    headless = sum(size for row in rows for _, start, size in row if start)
    print(f"{name:<16}{used / (ROW * len(rows)):>4.0%} filled; of the tokens {seeing / used:>3.0%} "
          f"see another document, {headless / used:>3.0%} not the beginning of theirs")  # fmt: skip
    return round(100 * seeing / used)


def score_cut(tokens: np.ndarray) -> int:
    """The scoreboard's line of rows that are cut out of a file wherever they are full."""
    lengths = np.diff(np.flatnonzero(tokens == EOT) + 1, prepend=0)
    return score("cut when full", cut_rows(lengths.tolist(), ROW))


def scoreboard(
    tokens: np.ndarray, ends_behind: Callable[..., Any], fit: Callable[..., Any]
) -> None:
    """Print all lines: rows that are cut, a row for each document, and packed by the learner."""
    lengths = np.diff(ends_behind(tokens, EOT), prepend=0)
    score_cut(tokens)
    score("a row for each", whole_rows([[k] for k in range(len(lengths))], lengths))
    score("packed, masked", whole_rows(fit(lengths.tolist(), ROW), lengths), masked=True)


def draw_rows(fit: Callable[[Any, int], list[list[int]]]) -> None:
    """Turn how many documents, and the row's length: rows as coloured documents, cut and packed."""
    figures.use_style()
    every = np.diff(np.flatnonzero(corpus() == EOT) + 1, prepend=0)

    def draw(together: float, row_len: float) -> None:
        lengths, room = np.minimum(every[: int(together)], int(row_len)).tolist(), int(row_len)
        cut, packed = cut_rows(lengths, room), whole_rows(fit(lengths, room), lengths)
        most = max(len(cut), len(packed))
        _, panels = plt.subplots(1, 2, figsize=(10, 1.6 + 0.26 * most), sharey=True)
        for ax, rows, title in zip(
            panels, (cut, packed), ("Cut when a row is full", "Packed by your code"), strict=True
        ):
            _draw_panel(ax, rows, room, title)
        panels[0].set_ylim(most - 0.4, -0.6)
        panels[0].set_ylabel("row")
        plt.show()
        headless = len({number for row in cut for number, start, _ in row if start})
        padded = 1 - sum(lengths) / (room * len(packed))
        print(f"cut: {len(cut)} rows, {headless} of {len(lengths)} documents in pieces")
        print(f"packed: {len(packed)} rows, none in pieces, {padded:.1%} padded")

    with_sliders(draw, together=(32, 4, 96, 4), row_len=(ROW, 32, 128, 8))


def _draw_panel(ax: Axes, rows: list[list[tuple[int, int, int]]], room: int, title: str) -> None:
    for y, row in enumerate(rows):
        left = 0
        for number, start, size in row:
            fill = FILLS[number % len(FILLS)]
            ink = figures.ink_on(fill)
            ax.barh(y, size, left=left, height=0.8, color=fill,
                    ec="#6b7280" if start and ink == figures.INK else "white", lw=1.2,
                    hatch="//" if start else None)  # fmt: skip
            if size >= room / 12:
                ax.text(left + size / 2, y, str(number), ha="center", va="center", color=ink,
                        fontsize=9, bbox={"facecolor": fill, "ec": "none", "pad": 1})  # fmt: skip
            left += size
        if left < room:
            ax.barh(y, room - left, left=left, height=0.8, color="white", ec="#9ca3af", lw=0.8)
    ax.set_xlim(0, room)
    ax.set_xlabel("position in the row (tokens)")
    ax.set_title(title)
    ax.tick_params(length=0)


# Sources


def weights_of(phases: Sequence[tuple[int, Sequence[int]]]) -> np.ndarray:
    """The weights in force at each sample, `(samples, sources)`: phases of (samples, weights)."""
    return np.concatenate([np.tile(weights, (samples, 1)) for samples, weights in phases])


def distance(sources: Sequence[int], owed: np.ndarray, unit: int) -> np.ndarray:
    """How far each source is from its share, in samples, after each sample."""
    given = np.cumsum(np.asarray(sources)[:, None] == np.arange(owed.shape[1]), axis=0)
    return given - owed / unit


def drawn(weights: np.ndarray, seed: int = 0) -> np.ndarray:
    """Sources drawn by their weights, as by a die."""
    chance = np.random.default_rng(seed)
    edges = np.cumsum(weights, axis=1)
    return (chance.random((len(weights), 1)) * edges[:, -1:] >= edges).sum(axis=1)


def drawn_away(samples: int, weights: Sequence[int]) -> int:
    """How many too many or too few a source has when a die decides, at most."""
    every = weights_of([(samples, weights)])
    away = distance(drawn(every), np.cumsum(every, axis=0), sum(weights))
    return int(np.abs(away[-1]).max())


def draw_shares(by_table: Callable[[np.ndarray, int], Sequence[int]]) -> None:
    """Turn the weight of the first source and the sample at which weights change."""
    figures.use_style()

    def draw(web: float, change_at: float) -> None:
        other, at = 10 - int(web), int(change_at)
        first = [int(web), other - other // 3, other // 3]
        weights = weights_of([(at, first), (200 - at, [2, 2, 6])])
        owed = np.cumsum(weights, axis=0)
        after, names = np.arange(1, 201), list(SOURCES)
        exact, chance = by_table(owed, 10), drawn(weights)
        _, panels = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
        for ax, sources, title in zip(
            panels, (chance, exact), ("Drawn by a die", "Computed by your code"), strict=True
        ):
            shares = (distance(sources, owed, 10) + owed / 10) / after[:, None]
            for k, name in enumerate(names):
                color = figures.PALETTE[SOURCES[name]]
                ax.plot(after, owed[:, k] / 10 / after, color=color, lw=5, alpha=0.3)
                ax.plot(after, shares[:, k], color=color, lw=1.6)
            ax.axvline(at, color=figures.PALETTE["limit"], lw=1, ls=":")
            ax.set_title(title)
            ax.set_xlabel("samples so far")
        heights = figures.apart(owed[-1] / 2000, 0.08)
        for name, height in zip(names, heights, strict=True):
            figures.label(panels[1], 200, height, name, SOURCES[name])
        panels[0].set_ylabel("share so far")
        panels[0].set_ylim(-0.02, 1.02)
        plt.show()
        for title, sources in (("drawn", chance), ("computed", exact)):
            worst = np.abs(distance(sources, owed, 10)).max()
            print(f"{title}: at most {worst:.1f} samples from its share")

    with_sliders(draw, web=(7, 1, 9, 1), change_at=(100, 20, 180, 20))


def run_of(kind: type, begin: int, pattern: Any, before: Any) -> Any:
    """A run of samples that repeat a pattern from one on; `before` is what sources gave earlier."""
    pattern = np.asarray(pattern)
    ranks = [int((pattern[:k] == one).sum()) for k, one in enumerate(pattern)]
    per_pattern = np.bincount(pattern, minlength=len(before))
    return kind(begin, pattern, np.array(ranks), np.asarray(before), per_pattern)


def repeated(first: Any, second: Any, more: int) -> int:
    """How many of the samples that a second run gives the first one gave already."""
    given = np.stack(first.sources_at(np.arange(second.begin)), axis=1).tolist()
    then = np.arange(second.begin, second.begin + more)
    return sum(one in given for one in np.stack(second.sources_at(then), axis=1).tolist())


def stopped(mixture: Any, batches: int, size: int, later: int) -> tuple[int, list[list[int]]]:
    """Stop a run after some batches, and go on: what its state counts, and all samples."""
    first = loader(mixture, size)
    given = [one for batch in islice(first, batches) for one in batch.tolist()]
    state = first.state_dict()
    second = loader(mixture, later)
    second.load_state_dict(state)
    return state["samples"], given + [one for batch in second for one in batch.tolist()]


def loader(mixture: Any, batch_size: int) -> AsyncDataLoader:
    """A loader that keeps the mixture's order."""
    return AsyncDataLoader(mixture, batch_size=batch_size, shuffle=False, seed=0, num_workers=1)
