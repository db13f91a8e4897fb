"""What lesson 11 breaks, counts and draws.

The documents are made up: each has four words of its own out of 63, so that what a model sees of
another document misleads it, and by how much can be measured.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from course.lesson import ROOT

sys.path.append(str(ROOT / "examples"))
import masks

EOT = 0
WORDS, OWN_WORDS = 64, 4
ROW = 64
"""Tokens in a row; no document is longer."""
SURE = 8.0
"""What all of its attention adds to the logit of a word."""
FILLS = ("#1b4f72", "#fbdca0", "#0f766e", "#cfe3f5", "#9ca3af")
"""Of the documents in a row, in turn; the last is for one that has lost its beginning."""
SOURCES = {"web": "#1b4f72", "books": "#c2410c", "code": "#0f766e"}
"""The sources of the mixture, and the colour of each in every line."""

Pieces = list[list[tuple[int, int, int]]]
"""Rows; of each piece in them its document, where in the document it begins, and its length."""


# Documents


def corpus() -> np.ndarray:
    """Return 400 documents of 4 to 64 tokens, one after the other; the token 0 ends each."""
    chance = np.random.default_rng(0)
    lengths = np.exp(chance.normal(3.2, 0.6, 400)).astype(int).clip(4, ROW)
    return np.concatenate([document(length, chance) for length in lengths]).astype(np.uint16)


def document(length: int, chance: np.random.Generator) -> np.ndarray:
    """Return a document of four words, in any order, and the token that ends it."""
    words = chance.choice(np.arange(1, WORDS), OWN_WORDS, replace=False)
    return np.append(chance.choice(words, length - 1), EOT)


def lengths_of(tokens: np.ndarray) -> list[int]:
    return np.diff(np.flatnonzero(tokens == EOT) + 1, prepend=0).tolist()


class Row(NamedTuple):
    """Documents that share a row; both tensors are `(1, T)`."""

    tokens: torch.Tensor
    document_ids: torch.Tensor
    lengths: np.ndarray

    def parts(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield what each document has of a tensor `(1, T)`."""
        for begin, end in pairwise([0, *np.cumsum(self.lengths).tolist()]):
            yield values[:, begin:end]


def three_documents() -> Row:
    """Return a row of 20, 24 and 20 tokens."""
    lengths, chance = np.array([20, 24, 20]), np.random.default_rng(5)
    tokens = np.concatenate([document(length, chance) for length in lengths])
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return Row(torch.from_numpy(tokens)[None], torch.from_numpy(ids)[None], lengths)


# The leak


@cache
def model() -> masks.TinyModel:
    """Return a model that expects the words that it sees, the more so the more often it sees them.

    Its attention goes to all that it may see alike, and a little depends on the position.
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
    """Return the mask of ordinary training: a position sees all that come before it."""
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


def losses_alone(row: Row) -> list[torch.Tensor]:
    """Return the losses of each document as if it were the only one."""
    return [losses_of(tokens, causal(tokens.shape[1]))[0, :-1] for tokens in row.parts(row.tokens)]


def losses_of(tokens: torch.Tensor, mask: torch.Tensor, positions: Any = None) -> torch.Tensor:
    """Return the loss at each position; the last has no next token, and its loss no meaning."""
    if positions is None:
        positions = torch.arange(tokens.shape[1])
    return masks.losses(model()(tokens, positions.reshape(1, -1), mask), tokens.roll(-1))


def measure_leak(row: Row) -> str:
    """Print the loss of each document, alone and in the row; say what the last one's is."""
    seen = causal(row.tokens.shape[1])
    packed = row.parts(losses_of(row.tokens, seen))
    other = row.document_ids[:, :, None] != row.document_ids[:, None, :]
    shares = row.parts((seen[0] & other).sum(-1) / seen[0].sum(-1))
    alone, here = torch.empty(0), torch.empty(0)
    for k, (own, loss, share) in enumerate(zip(losses_alone(row), packed, shares, strict=True)):
        alone, here = own.mean(), loss[0, :-1].mean()
        print(f"document {k}: loss alone {alone:.2f}, in the row {here:.2f}; "
              f"{share.mean():.0%} of its attention goes to others")  # fmt: skip
    return "higher" if here > alone else "lower" if here < alone else "the same"


def changed(row: Row, mask: torch.Tensor, positions: Any = None) -> list[int]:
    """Return how many losses of each document are not what they are alone."""
    packed = row.parts(losses_of(row.tokens, mask, positions))
    return [
        int((~torch.isclose(alone, here[0, :-1], rtol=1e-9, atol=1e-12)).sum())
        for alone, here in zip(losses_alone(row), packed, strict=True)
    ]


def who_is_as_alone(row: Row, mask: torch.Tensor, positions: Any = None) -> str:
    """Print how many losses differ from those alone; say for which documents none does."""
    differ = changed(row, mask, positions)
    print("losses that differ, by document:", differ)
    return "all of them" if not any(differ) else "none" if differ[0] else "only the first"


# Rows


def cut_rows(lengths: Sequence[int], room: int) -> Pieces:
    """Return the rows of a file that is cut wherever a row is full."""
    rows: Pieces = []
    at = 0
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            if at % room == 0:
                rows.append([])
            size = min(room - at % room, length - start)
            rows[-1].append((number, start, size))
            start, at = start + size, at + size
    return rows


def whole_rows(rows: list[list[int]], lengths: Sequence[int]) -> Pieces:
    """Return rows of whole documents, in the same form."""
    return [[(item, 0, lengths[item]) for item in row] for row in rows]


def score(name: str, rows: Pieces, masked: bool = False) -> int:
    """Print a line of the scoreboard; return what percent can see another document."""
    used = sum(size for row in rows for _, _, size in row)
    seeing = sum(size for row in rows for _, _, size in row[1:]) * (not masked)
    headless = sum(size for row in rows for _, start, size in row if start)
    print(f"{name:<18}{used / (ROW * len(rows)):>4.0%} filled; of the tokens {seeing / used:>3.0%} "
          f"see another document, {headless / used:>3.0%} not the beginning of theirs")  # fmt: skip
    return round(100 * seeing / used)


def score_windows(Windows: Any) -> int:
    """Print and return what the learner's windows hold."""
    tokens = corpus()
    with TemporaryDirectory() as folder:
        np.save(path := Path(folder) / "tokens.npy", tokens)
        windows = Windows(path, ROW)
        x, _ = windows.fetch(range(len(windows)))
    ends = np.minimum(np.cumsum(lengths_of(tokens)), x.numel())  # the last window may end earlier
    return score("windows", cut_rows(np.diff(ends, prepend=0).tolist(), ROW))


def scoreboard(Windows: Any, fit: Callable[..., Any]) -> None:
    """Print windows, a row for each document, and what the learner packed."""
    lengths = lengths_of(corpus())
    score_windows(Windows)
    score("a row for each", whole_rows([[k] for k in range(len(lengths))], lengths))
    score("packed and masked", whole_rows(fit(lengths, ROW), lengths), masked=True)


def rows(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Return what the sliders draw: rows as coloured documents, cut and packed."""
    every = lengths_of(corpus())

    def draw(documents: int, row_length: int) -> tuple[Figure, str]:
        lengths = [min(length, row_length) for length in every[:documents]]
        cut, packed = cut_rows(lengths, row_length), whole_rows(fit(lengths, row_length), lengths)
        most = max(len(cut), len(packed))
        figure = Figure(figsize=(9, 1.2 + 0.2 * most), layout="constrained")
        titles = {"Cut into windows": cut, "Packed by your code": packed}
        for ax, (title, pieces) in zip(figure.subplots(1, 2), titles.items(), strict=True):
            fills = np.zeros((most, row_length))  # 0 is empty
            for y, row in enumerate(pieces):
                ends = np.cumsum([size for *_, size in row])
                for k, (end, (_, start, size)) in enumerate(zip(ends, row, strict=True)):
                    fills[y, end - size : end] = len(FILLS) if start else 1 + k % (len(FILLS) - 1)
            colours = ListedColormap(["#ffffff", *FILLS])
            ax.imshow(fills, cmap=colours, vmax=len(FILLS), aspect="auto", interpolation="none")
            ax.set(title=title, xlabel="position in the row (tokens)", ylabel="row")
        broken = len({number for row in cut for number, start, _ in row if start})
        empty = 1 - sum(lengths) / (row_length * len(packed))
        return figure, (
            f"cut: {len(cut)} rows, {broken} of {documents} documents in pieces\n"
            f"packed: {len(packed)} rows, none in pieces, {empty:.1%} empty"
        )

    return draw


# Sources


def drawn(weights: np.ndarray) -> np.ndarray:
    """Return how many samples of each source a die has given; weights `(samples, sources)`."""
    shares = weights / weights.sum(axis=1, keepdims=True)
    return np.cumsum(np.random.default_rng(0).multinomial(1, shares), axis=0)


def drawn_away(samples: int, weights: Sequence[int]) -> int:
    """Return how many too many or too few one source has when a die decides, at most."""
    given = drawn(np.tile(weights, (samples, 1)))[-1]
    return round(max(abs(given - np.array(weights) * samples / sum(weights))))


def shares(Mixture: Any) -> Callable[..., Any]:
    """Return what the sliders draw: what each source has given, drawn and computed."""

    def draw(web: int, change_at: int) -> tuple[Figure, str]:
        first = [3 * web, 2 * (10 - web), 10 - web]  # books twice what code has
        phases = {0: first, change_at: [2, 2, 6]}
        weights = np.repeat([first, [2, 2, 6]], [change_at, 200 - change_at], axis=0)
        owed = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=0)
        mixture, after = Mixture([100] * 3, phases), np.arange(1, 201)
        panels = {
            "Drawn by a die": drawn(weights),
            "Computed by your code": np.array([mixture.given(int(n)) for n in after]),
        }
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for ax, (title, given) in zip(axes, panels.items(), strict=True):
            for k, (name, colour) in enumerate(SOURCES.items()):
                ax.plot(after, owed[:, k] / after, color=colour, lw=6, alpha=0.25)
                ax.plot(after, given[:, k] / after, color=colour, lw=3 - k, label=name)
            ax.axvline(change_at, color="#6b7280", ls=":")
            ax.set(title=title, xlabel="samples so far", ylabel="share so far")
        axes[0].legend()
        return figure, "\n".join(
            f"{title}: at most {abs(given - owed).max():.1f} samples from its share"
            for title, given in panels.items()
        )

    return draw
