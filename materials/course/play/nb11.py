"""What lesson 11 breaks, counts and draws.

The documents are made up: each has four words of its own out of 63, so that what a model sees of
another document misleads it, and by how much can be measured.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from torch.nn.functional import cross_entropy, one_hot

from course.play import cells
from course.play.charts import axes

EOT, WORDS, OWN_WORDS = 0, 64, 4
ROW = 64
"""Tokens in a row; no document is longer."""
SURE = 8.0
"""What all of its attention adds to the logit of a word."""
CAUSAL = torch.ones(ROW, ROW).tril()
"""The mask of ordinary training: a position sees all that come before it."""
POSITIONS = 0.02 * torch.randn(ROW, WORDS, generator=torch.Generator().manual_seed(0))
FILLS = ("#ffffff", "#1b4f72", "#fbdca0", "#0f766e", "#cfe3f5")
"""Empty, and the documents of a row in turn."""

# Documents


def corpus():
    """Return 400 documents of 4 to 64 tokens, one after the other; the token 0 ends each."""
    chance = np.random.default_rng(0)
    lengths = np.exp(chance.normal(3.2, 0.6, 400)).astype(int).clip(4, ROW)
    return np.concatenate([document(length, chance) for length in lengths]).astype(np.uint16)


def document(length, chance):
    """Return a document of four words, in any order, and the token that ends it."""
    words = chance.choice(np.arange(1, WORDS), OWN_WORDS, replace=False)
    return np.append(chance.choice(words, length - 1), EOT)


def lengths_of(tokens):
    return np.diff(np.flatnonzero(tokens == EOT) + 1, prepend=0).tolist()


def three_documents():
    """Return a row of 20, 24 and 20 tokens, and which document each token is of."""
    lengths, chance = np.array([20, 24, 20]), np.random.default_rng(5)
    tokens = np.concatenate([document(length, chance) for length in lengths])
    ids = torch.from_numpy(np.arange(3).repeat(lengths))[None]
    return SimpleNamespace(tokens=torch.from_numpy(tokens), document_ids=ids, lengths=lengths)


# The leak


def losses_of(tokens, mask, positions=None):
    """Return the loss of a model at each position; the last has no next token, and no meaning.

    The model attends alike to all that it may see, and expects those words again, the more so the
    more often it sees them. A little depends on the position.
    """
    positions = torch.arange(len(tokens)) if positions is None else positions
    sees = one_hot(tokens, WORDS).double() + POSITIONS[positions]
    attention = mask.reshape(len(tokens), -1).double()
    logits = SURE * attention / attention.sum(1, keepdim=True) @ sees
    return cross_entropy(logits, tokens.roll(-1), reduction="none")


def compared(row, mask, positions=None):
    """Yield the losses of each document as if it were the only one, and where it is."""
    lengths = row.lengths.tolist()
    here = losses_of(row.tokens, mask, positions).split(lengths)
    for tokens, losses in zip(row.tokens.split(lengths), here, strict=True):
        yield losses_of(tokens, CAUSAL[: len(tokens), : len(tokens)])[:-1], losses[:-1]


def measure_leak(row):
    """Print the loss of each document, alone and in the row; say what the last one's is."""
    for k, (alone, here) in enumerate(compared(row, CAUSAL)):
        print(f"document {k}: loss alone {alone.mean():.2f}, in the row {here.mean():.2f}")
    return "higher" if here.mean() > alone.mean() else "lower"


def changed(row, mask, positions=None):
    """Return how many losses of each document are not what they are alone."""
    return [
        int((~torch.isclose(alone, here, rtol=1e-9, atol=1e-12)).sum())
        for alone, here in compared(row, mask, positions)
    ]


def who_is_as_alone(row, mask, positions=None):
    """Print how many losses differ from those alone; say for which documents none does."""
    differ = changed(row, mask, positions)
    print("losses that differ, by document:", differ)
    return "all of them" if not any(differ) else "none" if differ[0] else "only the first"


# Rows: the number of the document that each token is of, -1 where a row is empty


def documents_in(rows, lengths, room=ROW):
    """Return rows of whole documents."""
    table = np.full((len(rows), room), -1)
    for line, row in zip(table, rows, strict=True):
        ids = np.repeat(row, [lengths[item] for item in row])
        line[: len(ids)] = ids
    return table


def score(name, rows, masked=False):
    """Print a line of the scoreboard; return what percent can see another document."""
    used = rows >= 0
    seeing = 0 if masked else (used & (rows != rows[:, :1])).sum() / used.sum()
    print(f"{name:<18}{used.mean():>4.0%} filled; {seeing:>4.0%} of tokens see another document")
    return round(100 * seeing)


def score_windows(Windows):
    """Print and return what the learner's windows hold."""
    with TemporaryDirectory() as folder:
        np.save(path := Path(folder) / "tokens.npy", corpus())
        windows = Windows(path, ROW)
        x, _ = windows.fetch(range(len(windows)))
    ends = x.flatten().numpy() == EOT
    return score("windows", (np.cumsum(ends) - ends).reshape(x.shape))


def scoreboard(Windows, fit):
    """Print windows, a row for each document, and what the learner packed."""
    lengths = lengths_of(corpus())
    score_windows(Windows)
    score("a row for each", documents_in([[k] for k in range(len(lengths))], lengths))
    score("packed and masked", documents_in(fit(lengths, ROW), lengths), masked=True)


def rows(fit, documents):
    """Return what the slider draws: rows as coloured documents, cut and packed."""
    lengths = lengths_of(corpus())[:documents]
    in_line = documents_in([range(documents)], lengths, -(-sum(lengths) // ROW) * ROW)
    cut, packed = in_line.reshape(-1, ROW), documents_in(fit(lengths, ROW), lengths)
    figure = cells.new_figure(9, 1.2 + 0.2 * len(packed))
    titles = {"Cut into windows": cut, "Packed by your code": packed}
    for ax, (title, ids) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        begins = np.diff(ids, axis=1, prepend=ids[:, :1]) != 0
        fills = np.where(ids < 0, 0, 1 + np.cumsum(begins, axis=1) % 4)
        ax.imshow(fills, ListedColormap(FILLS), vmin=0, vmax=4, aspect="auto")
        ax.set(title=title, xlabel="position in the row (tokens)", ylabel="row")
        ax.yaxis.get_major_locator().set_params(integer=True)
    pieces = sum(len({*row} - {-1}) for row in cut.tolist())
    return figure, (
        f"cut: {len(cut)} rows, {documents} documents in {pieces} pieces\n"
        f"packed: {len(packed)} rows, none in pieces, {(packed < 0).mean():.1%} empty"
    )


# Sources


def shares(counts_after, web):
    """Return what the slider draws: how far each source is from its share, drawn and computed."""
    weights = [3 * web, 2 * (10 - web), 10 - web]  # books: twice code
    share, after = np.array(weights) / sum(weights), range(1, 201)
    owed = np.outer(after, share)
    counts = {
        "Drawn by a die": np.random.default_rng(0).multinomial(1, share, 200).cumsum(axis=0),
        "Computed by your code": np.array([counts_after(n, weights) for n in after]),
    }
    title, lines = "How far the worst source is from its share", []
    figure, ax = axes(3, title, xlabel="samples so far", ylabel="samples")
    for (name, given), style in zip(counts.items(), ("--", "-"), strict=True):
        away = abs(given - owed).max(axis=1)
        ax.plot(after, away, style, label=name)
        lines.append(f"{name}: at most {away.max():.1f} samples")
    ax.legend()
    return figure, "\n".join(lines)
