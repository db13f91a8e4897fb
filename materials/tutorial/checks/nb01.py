"""What lesson 01 lets the learner build, and the wrong answers that people give."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from npydata import TokenFileError
from npydata.dataset.access import MappedAccess, require_unchanged
from npydata.dataset.datasets import NpyTokensDataset, TokenDataset, fresh_seed, shifted_pair
from npydata.dataset.hashing import hash_of
from npydata.dataset.layout import TokenLayout
from npydata.dataset.token_windows import require_vocabulary
from npydata.dataset.windows import num_windows, pages_touched, random_windows, window_offsets
from tutorial.building import Build, returned
from tutorial.frames.dataset import MyAccess, MyDataset
from tutorial.grading import text_of
from tutorial.promised.dataset import CARDS, PROMISES, file_of  # noqa: F401

PART = "dataset"


def with_method(owner, name, method):
    """A class of its own for an answer that is a method."""
    return type(owner.__name__, (owner,), {name: method})


def array_returned(answer, *case):
    """What a call returns; a list is not enough where arrays go in and come out."""
    value = returned(answer, *case)
    return {"kind": type(value).__name__, "value": np.asarray(value)}


# Windows and pages


def count_cases(rng):
    small = [(n, t, s) for n in range(0, 12) for t in (1, 3) for s in (1, 2, 3, 4, 5)]
    return small + [tuple(map(int, rng.integers(1, high))) for high in [(500, 20, 20)] * 40]


def page_cases(rng):
    edges = [
        (16, 1, 1, 0),
        (0, 4, 4, 2),
        (0, 8, 2, 0),
        (0, 9, 2, 0),
        (7, 1, 2, 0),
        (8, 8, 2, 0),
        (3, 4, 4, 8),
    ]
    drawn = rng.integers((0, 1, 1, 0), (10_000, 3_000, 9, 300), (40, 4)).tolist()
    return [(*args, 16) for args in edges] + [(*args, 4096) for args in drawn]


COUNT = Build(
    name="num_windows",
    reference=num_windows,
    cases=count_cases,
    wrong={
        "You count a window as seq_len tokens; what does the last position predict?": (
            lambda n, t, s: max(0, (n - t) // s + 1)
        ),
        "You count the strides between the windows, so one window is missing.": (
            lambda n, t, s: max(0, (n - t - 1) // s)
        ),
        "A file too short for one window gets a negative number of them.": (
            lambda n, t, s: (n - t - 1) // s + 1
        ),
        "You count windows that would hang over the end of the file.": lambda n, t, s: n // s,
        "You lay the windows side by side, whatever the stride is.": lambda n, t, s: n // (t + 1),
        "You round down and lose a window: one begins in the last stride too, though the stride "
        "is cut short.": lambda n, t, s: max(0, (n - t) // s),
        "You round down, though a window begins in a last stride that is cut short; and where a "
        "file is too short, you count below zero.": lambda n, t, s: (n - t) // s,
        "Windows are counted whole; / leaves a fraction of one.": (
            lambda n, t, s: (n - t - 1) / s + 1 if n > t else 0
        ),
    },
)


def offset_cases(rng):
    edges = [(np.arange(2), 2, 9, 4), (np.arange(4), 2, 9, 4), (np.arange(3), 3, 10, 3)]
    drawn = rng.integers(1, 20, (20, 3)).tolist()
    return edges + [
        (rng.integers(0, 50, 5), per_row, per_row * stride + left, stride)
        for per_row, stride, left in drawn
    ]


OFFSETS = Build(
    name="window_offsets",
    reference=window_offsets,
    cases=offset_cases,
    observe=array_returned,
    compare_dtype=True,
    wrong={
        "Your windows cross from one row into the next.": lambda w, n, r, s: w * s,
        "You count rows, and forget where in its row the window lies.": (
            lambda w, n, r, s: w // n * r
        ),
        "You count every row's windows from its beginning, and forget the rows before.": (
            lambda w, n, r, s: w % n * s
        ),
        "An offset is a whole number of tokens.": lambda w, n, r, s: w / n // 1 * r + w % n * s,
        "You count parts of rows; a row is passed as a whole or not at all.": (
            lambda w, n, r, s: w * s + w / n * (r - n * s)
        ),
        "You let windows begin at every token of a row; the stride says how far apart they are.": (
            lambda w, n, r, s: w // n * r + w % n
        ),
        "What a row has left over comes once for each row before, not once for all.": (
            lambda w, n, r, s: w * s + (r - n * s)
        ),
        "Row and place have changed places: // gives the row, and % the window in it.": (
            lambda w, n, r, s: w % n * r + w // n * s
        ),
        "A row has `per_row` windows; you divide by its tokens.": (
            lambda w, n, r, s: w // r * r + w % r * s
        ),
        "The row is right; within it you count by the row's tokens, not by its windows.": (
            lambda w, n, r, s: w // n * r + w % r * s
        ),
        "In 32 bits an offset beyond 2^31 becomes negative.": (
            lambda w, n, r, s: (w // n * r + w % n * s).astype(np.int32)
        ),
        "You return a list; arrays go in, and an array should come out.": (
            lambda w, n, r, s: [k // n * r + k % n * s for k in w.tolist()]
        ),
    },
)

PAGES = Build(
    name="pages_touched",
    reference=pages_touched,
    cases=page_cases,
    wrong={
        "You take the first byte after the window for its last one.": (
            lambda s, c, i, o, p: ((o + s * i) // p, (o + (s + c) * i) // p)
        ),
        "You count tokens as if each were one byte.": (
            lambda s, c, i, o, p: ((o + s) // p, (o + s + c - 1) // p)
        ),
        "You let the tokens begin at the first byte of the file, where the header is.": (
            lambda s, c, i, o, p: (s * i // p, ((s + c) * i - 1) // p)
        ),
        "The offset is in bytes already; you multiply it by the size of a token.": (
            lambda s, c, i, o, p: ((o + s) * i // p, ((o + s + c) * i - 1) // p)
        ),
        "You return a page beyond the last one, as a range would.": (
            lambda s, c, i, o, p: ((o + s * i) // p, (o + (s + c) * i - 1) // p + 1)
        ),
        "// comes before + and -: you divide a part of the sum only.": (
            lambda s, c, i, o, p: (o + s * i // p, o + (s + c) * i - 1 // p)
        ),
        "A token may lie across two pages: you ask where the last one begins.": (
            lambda s, c, i, o, p: ((o + s * i) // p, (o + (s + c - 1) * i) // p)
        ),
        "The second number is the last page, not how many there are.": (
            lambda s, c, i, o, p: (
                (o + s * i) // p,
                pages_touched(s, c, i, o, p)[1] - (o + s * i) // p + 1,
            )
        ),
        "You add whole pages to the first one; the window may begin in the middle of it.": (
            lambda s, c, i, o, p: ((o + s * i) // p, (o + s * i) // p + (c * i - 1) // p)
        ),
        "You add whole pages to the first one, and take the byte after the window for its last.": (
            lambda s, c, i, o, p: ((o + s * i) // p, (o + s * i) // p + c * i // p)
        ),
        "Pages have whole numbers; / leaves a fraction of one.": (
            lambda s, c, i, o, p: ((o + s * i) / p, (o + (s + c) * i - 1) / p)
        ),
    },
)


# One gather


def gather_cases(rng):
    small = [(np.arange(10, 18, dtype=np.uint16), np.array([0, 4]), 4)]
    drawn = [(rng.integers(0, 60_000, 200, dtype=np.uint16), rng.integers(0, 180, 6), 20)]
    return small + drawn


class Asked(np.ndarray):
    """An array that notes how often it is asked for an element or a slice."""

    times = 0

    def __getitem__(self, index):
        Asked.times += np.ndim(index) == 0  # a number or a slice; not an array of them
        return super().__getitem__(index)

    def __iter__(self):
        Asked.times += len(self)
        return iter(np.asarray(self))

    def tolist(self):
        Asked.times += len(self)
        return np.asarray(self).tolist()


def gather_seen(answer, tokens, starts, width):
    """What a gather returns, and how often Python is asked for it."""
    Asked.times = 0
    windows = answer(tokens.view(Asked), starts.view(Asked), width)
    if Asked.times >= len(starts):
        return {"Python is asked": "once for each window"}
    none = answer(tokens.copy(), starts[:0].copy(), width)
    return {
        "Python is asked": "once for all windows",
        "windows": None if windows is None else np.asarray(windows),
        "shape of the windows at no starts": np.shape(none),
    }


def one_by_one(tokens, starts, width):
    return np.stack([tokens[start : start + width] for start in starts])


def gather_unguarded(tokens, starts, width):
    return sliding_window_view(tokens, width)[starts]


GATHER_UNGUARDED = Build(
    name="gather_unguarded",
    reference=gather_unguarded,
    cases=gather_cases,
    observe=gather_seen,
    compare_dtype=True,
    kept=False,
    wrong={
        "You still ask Python once for each window.": one_by_one,
        "A row has one token too many.": lambda t, s, w: sliding_window_view(t, w + 1)[s],
        "You cut the windows out one after the other, side by side; starts say where.": (
            lambda t, s, w: t[: len(s) * w].reshape(len(s), w)
        ),
        "You cast already; the gather should move as few bytes as it can.": (
            lambda t, s, w: sliding_window_view(t, w)[s].astype(np.int64)
        ),
        "You return the first tokens only, one for each start.": lambda t, s, w: t[s],
    },
)


def pair_seen(answer, tokens, with_out):
    """The pair, and where it lies."""
    out = np.full((2, len(tokens), tokens.shape[1] - 1), -1) if with_out else None
    x, y = answer(tokens, out)
    tensors = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    ready = tensors and x.is_contiguous() and y.is_contiguous()
    return {
        "x": np.asarray(x),
        "y": np.asarray(y),
        "kind": f"{x.dtype}, {type(x).__name__}",
        "contiguous": ready,
        "written into out": with_out and np.array_equal(out, [np.asarray(x), np.asarray(y)]),
        "share memory": np.shares_memory(np.asarray(x), np.asarray(y)),
    }


def pair_cases(rng):
    small = np.arange(10, 18, dtype=np.uint16).reshape(2, 4)
    wide = rng.integers(2**31, 2**32, (1, 5), dtype=np.uint32)
    return [(small, False), (small, True), (wide, False), (wide, True)]


def pair_as(tokens, out=None, *, x=np.s_[:, :-1], y=np.s_[:, 1:], dtype=np.int64, into=True):
    """A pair made in a way that may be wrong."""
    if out is None or not into:
        out = np.empty((2, *tokens[x].shape), dtype)
    out[0], out[1] = tokens[x], tokens[y]
    return torch.from_numpy(out[0]), torch.from_numpy(out[1])


def slices_of_one(tokens, out=None):
    both = torch.from_numpy(tokens.astype(np.int64))
    return both[:, :-1], both[:, 1:]


def contiguous_slices(tokens, out=None):
    return tuple(half.contiguous() for half in slices_of_one(tokens))


def copies_where_it_must(tokens, out=None):
    """Fills the caller's memory, and returns something else."""
    halves = contiguous_slices(tokens)
    if out is not None:
        out[0], out[1] = halves
    return halves


def row_by_row(tokens, out=None):
    ids = tokens.astype(np.int64)
    return torch.from_numpy(ids[:-1].copy()), torch.from_numpy(ids[1:].copy())


SHIFTED_PAIR = Build(
    name="shifted_pair",
    reference=shifted_pair,
    cases=pair_cases,
    observe=pair_seen,
    compare_dtype=True,
    show=lambda case: f"shifted_pair({text_of(case[0])}, {'out' if case[1] else 'None'})",
    wrong={
        "y is x itself: nothing is left to predict.": partial(pair_as, y=np.s_[:, :-1]),
        "You return y before x.": partial(pair_as, x=np.s_[:, 1:], y=np.s_[:, :-1]),
        "A float loses ids above 2^24; a tensor of ids is int64.": partial(
            pair_as, dtype=np.float32, into=False
        ),
        "Ids above 2^24 don't survive a float32, not even on the way to int64.": (
            lambda tokens, out=None: pair_as(tokens.astype(np.float32), out)
        ),
        "The caller brought memory, and you didn't write into it.": partial(pair_as, into=False),
        "These are slices of one array, and the caller's memory stays as it was.": slices_of_one,
        "`contiguous` copies only where it must, and never into the caller's memory.": (
            contiguous_slices
        ),
        "Tensors are asked for; these are arrays.": (
            lambda tokens, out=None: tuple(half.numpy() for half in pair_as(tokens, out))
        ),
        "An id needs an int64, whatever the file has: 32 bits end before 2^32.": partial(
            pair_as, dtype=np.int32, into=False
        ),
        "`contiguous` copies only where it must: of one row, x and y still share their memory.": (
            copies_where_it_must
        ),
        "The tokens of a row follow each other; you shift from row to row.": row_by_row,
        "These are slices of two arrays; y.view(-1) will fail on them.": lambda tokens, out=None: (
            torch.from_numpy(tokens.astype(np.int64))[:, :-1],
            torch.from_numpy(tokens.astype(np.int64))[:, 1:],
        ),
    },
)


# A file that shrinks


def refusal_seen(answer, opened, now):
    """What a guard says about a file of another size."""
    layout = TokenLayout(Path("tokens.npy"), "npy", np.dtype("<u2"), (4,), 128, opened)
    try:
        answer(layout, now)
    except TokenFileError as error:
        text = str(error)
        facts = {"file": "tokens.npy", "size found": str(now), "size expected": str(opened)}
        said = {f"names the {what}": fact in text for what, fact in facts.items()}
        return {"raised": "TokenFileError", **said}
    return {"raised": "nothing"}


def refuse(layout, size, when=lambda size, expected: size != expected, text="{0}: {1}, not {2}"):
    if when(size, layout.file_size):
        raise TokenFileError(text.format(layout.path, size, layout.file_size))


def raises_a_value_error(layout, size):
    if size != layout.file_size:
        raise ValueError(f"{layout.path}: {size} bytes, expected {layout.file_size}")


def asserts(layout, size):
    assert size == layout.file_size


REQUIRE_UNCHANGED = Build(
    name="require_unchanged",
    reference=require_unchanged,
    cases=[(4096, 4096), (4096, 128), (128, 4096), (136, 135), (136, 137)],
    observe=refusal_seen,
    show=lambda case: f"require_unchanged(layout, {case[1]})  # with layout.file_size {case[0]}",
    wrong={
        "A file that grew was written again too; its tokens are others.": partial(
            refuse, when=lambda size, expected: size < expected
        ),
        "You return whether it changed; who would look?": lambda layout, size: (
            size == layout.file_size
        ),
        "Who catches it waits for a TokenFileError.": raises_a_value_error,
        "An assert is gone under `python -O`; raise the error yourself.": asserts,
        "You refuse the file that is as it was.": partial(
            refuse, when=lambda size, expected: size == expected
        ),
        "The message should name the file, the size found and the size expected.": partial(
            refuse, text="the file changed"
        ),
        "The message should give both sizes: the one found and the one expected.": partial(
            refuse, text="{0} changed"
        ),
    },
)


def access_seen(answer, size, starts, width, then, again=False):
    """What a gather returns, of a file that may change before, or between two of one width."""
    with file_of(np.arange(size)) as path:
        dataset = NpyTokensDataset(path, 1)
        access = with_method(MyAccess, "gather", answer)(dataset.files[0].layout)
        access.gather(np.array([0]), width - 1)
        if again:
            access.gather(np.array(starts), width)
        if then:
            os.truncate(path, then)
        try:
            windows = access.gather(np.array(starts), width)
        except TokenFileError:
            return "TokenFileError"
        own = not np.shares_memory(windows, access.tokens)
        return {"windows": windows, "a copy": own, "views kept": sorted(access.views)}


def gather_as(self, starts, width, guard=True, cast=None, view=True):
    if guard:
        require_unchanged(self.layout, self.map.size())
    windows = sliding_window_view(self.tokens, width)
    if view:
        self.views[width] = windows
    return windows[starts] if cast is None else windows[starts].astype(cast)


def loses_the_width(self, starts, width):
    require_unchanged(self.layout, self.map.size())
    if not self.views:
        self.views[width] = sliding_window_view(self.tokens, width)
    return next(iter(self.views.values()))[starts]


def guards_each_width_once(self, starts, width):
    if width not in self.views:
        require_unchanged(self.layout, self.map.size())
        self.views[width] = sliding_window_view(self.tokens, width)
    return self.views[width][starts]


def forgets_the_guard(self, starts, width):
    return gather_as(self, starts, width, guard=False)


def casts_early(self, starts, width):
    return gather_as(self, starts, width, cast=np.int64)


def makes_a_view_each_time(self, starts, width):
    return gather_as(self, starts, width, view=False)


GATHER = Build(
    name="gather",
    reference=MappedAccess.gather,
    owner="MyAccess",
    cases=[
        (20, (0, 8, 3), 4, None),
        (20, (16,), 4, None),
        (50_000, (40_000, 10), 9, 4096),
        (50_000, (40_000, 10), 9, 200_000),
        (50_000, (40_000, 10), 9, 4096, True),
    ],
    observe=access_seen,
    compare_dtype=True,
    show=lambda case: (
        f"access.gather({list(case[1])}, {case[2]})  # {case[0]} tokens"
        + (f", and the file is cut or grown to {case[3]} bytes before" if case[3] else "")
        + ("; another such gather went well before that" if case[4:] else "")
    ),
    wrong={
        "The file shrank, and you touch a page that is no longer there.": forgets_the_guard,
        "You ask only when a view is made; the file may change after that, too.": (
            guards_each_width_once
        ),
        "You cast already; the gather should move as few bytes as it can.": casts_early,
        "You make the view anew for every batch; `self.views` is there to keep it.": (
            makes_a_view_each_time
        ),
        "You keep one view, whatever the width is.": loses_the_width,
    },
)


# The random draw


def draw_seen(answer, count, seed, epoch, indices=1000):
    """What a draw must be, whatever the hash."""
    asked = np.arange(indices)
    drawn = np.asarray(answer(asked, count, seed, epoch))
    shuffled = np.random.default_rng(1).permutation(indices)

    def another(seed, epoch):
        return bool(np.array_equal(answer(asked, count, seed, epoch), drawn))

    return {
        "dtype and shape": f"{drawn.dtype} {drawn.shape}",
        "smallest and largest": [int(drawn.min()), int(drawn.max())] if count < 100 else None,
        "inside": bool((drawn >= 0).all() and (drawn < count).all()),
        "same in another order": np.array_equal(
            answer(shuffled, count, seed, epoch), drawn[shuffled]
        ),
        "same when asked again": another(seed, epoch),
        "same when asked alone": all(
            int(answer(np.array([index]), count, seed, epoch)[0]) == drawn[index]
            for index in range(70, 100)  # so many, that a few windows don't agree by chance
        ),
        "in order": bool((np.diff(drawn.astype(np.int64)) >= 0).mean() > 0.9),
        "same for another seed": another(seed + 1, epoch),
        "same for another epoch": another(seed, epoch + 1),
        "same for seed and epoch exchanged": another(seed + 1, max(epoch - 1, 0)),
        "different windows": len(np.unique(drawn)) > min(count, indices) // 2,
    }


def global_draw(indices, count, seed, epoch):
    return np.random.randint(0, count, len(indices))


def seeded_generator(indices, count, seed, epoch):
    return np.random.default_rng([seed % 2**32, epoch]).integers(0, count, len(indices))


def generator_of_a_sum(indices, count, seed, epoch):
    return np.random.default_rng(seed + epoch).integers(0, count, len(indices))


def draw_as(indices, count, key, less=0):
    return (hash_of(indices, *key) % np.uint64(count - less)).astype(np.int64)


RANDOM_WINDOWS = Build(
    name="random_windows",
    reference=random_windows,
    cases=[(7, 0, 1), (10, 5, 3), (1000, 7, 0), (10**6, 7, 3), (2**40, 2**62, 1)],
    observe=draw_seen,
    show=lambda case: "random_windows(indices, {}, seed={}, epoch={})".format(*case),
    wrong={
        "This depends on who asked before: a resumed run can't draw it again.": global_draw,
        "The window of an index depends on its place in the batch.": seeded_generator,
        "The window of an index depends on its place in the batch; and seed 1 in epoch 0 draws "
        "what seed 0 draws in epoch 1.": generator_of_a_sum,
        "Every epoch draws the same windows.": lambda i, n, s, e: draw_as(i, n, (s,)),
        "Every seed draws the same windows.": lambda i, n, s, e: draw_as(i, n, (e,)),
        "The last window is never drawn.": lambda i, n, s, e: draw_as(i, n, (s, e), less=1),
        "Seed 1 in epoch 0 draws what seed 0 draws in epoch 1.": lambda i, n, s, e: draw_as(
            i, n, (s + e,)
        ),
        "Windows count from 0: yours begin at 1, and end one too far.": lambda i, n, s, e: (
            draw_as(i, n, (s, e)) + 1
        ),
        "`&` is a remainder only for powers of 2: of other files few windows are drawn.": (
            lambda i, n, s, e: (hash_of(i, s, e) & np.uint64(n - 1)).astype(np.int64)
        ),
        "The windows come in order: nothing is random.": lambda i, n, s, e: (i + s + e) % n,
        "You return uint64; together with an int64 it turns into a float.": lambda i, n, s, e: (
            hash_of(i, s, e) % np.uint64(n)
        ),
        "These are hashes; they don't stop at `count`.": lambda i, n, s, e: hash_of(i, s, e).view(
            np.int64
        ),
    },
)


def choice_seen(answer, own_seed, seed, epoch):
    """How a dataset chooses seed and epoch."""
    with file_of(range(50_000)) as path:
        dataset = with_method(MyDataset, "windows_of", answer)(path, 16, seed=own_seed)
        dataset.set_epoch(3)
        asked = np.array([5, 9, 5, 1000])
        first, again = (dataset.windows_of(asked, seed, epoch) for _ in range(2))
        seeds, epochs = {5, 7, seed} - {None}, {1, 3, epoch} - {None}  # 0 only where it is given
        alike = {
            f"as seed {s}, epoch {e}": np.array_equal(dataset.windows_of(asked, s, e), first)
            for s in sorted(seeds)
            for e in sorted(epochs)
        }
        fits = bool(max(first) < dataset.windows.count) and len(first) == len(asked)
        return {
            "inside": fits,
            "again the same": np.array_equal(first, again),
            "one index, one window": bool(first[0] == first[2]),
            "uses the whole file": bool(
                dataset.windows_of(np.arange(500), 1, 1).max() > dataset.windows.count * 0.9
            ),
            **(alike if own_seed is not None or seed is not None else {}),
        }


def choose_as(self, indices, seed, epoch, fresh=True):
    if seed is None and fresh:
        indices, seed = np.arange(len(indices)), fresh_seed()
    return random_windows(indices, self.windows.count, seed or 0, epoch)


def treats_zero_as_none(self, indices, seed, epoch):
    return choose_as(self, indices, seed or self.seed, epoch or self.epoch)


def ignores_what_is_given(self, indices, seed, epoch):
    return choose_as(self, indices, self.seed, self.epoch)


def invents_a_seed(self, indices, seed, epoch):
    return choose_as(self, indices, seed or 0, epoch or 0)


def forgets_its_own(self, indices, seed, epoch):
    return choose_as(self, indices, seed, 0 if epoch is None else epoch)


def seedless_is_seed_zero(self, indices, seed, epoch):
    seed = self.seed if seed is None else seed
    return choose_as(self, indices, seed, self.epoch if epoch is None else epoch, fresh=False)


def keeps_the_indices(self, indices, seed, epoch):
    seed = self.seed if seed is None else seed
    seed = fresh_seed() if seed is None else seed
    return choose_as(self, indices, seed, self.epoch if epoch is None else epoch)


WINDOWS_OF = Build(
    name="windows_of",
    reference=NpyTokensDataset.windows_of,
    owner="MyDataset",
    cases=[(7, None, None), (None, 7, 0), (7, 0, None), (7, None, 0), (5, 7, 3), (None, None, 0)],
    observe=choice_seen,
    show=lambda case: (
        f"MyDataset(path, 16, seed={case[0]}).windows_of([5, 9, 5, 1000], {case[1]}, {case[2]})"
    ),
    wrong={
        "A seed or an epoch of 0 counts as well; you take it for none.": treats_zero_as_none,
        "The loader gives seed and epoch, and you use the dataset's own.": ignores_what_is_given,
        "`or 0` invents a seed and an epoch that nobody gave.": invents_a_seed,
        "Nothing given means the dataset's own seed and epoch.": forgets_its_own,
        "Without any seed, two calls must draw different windows.": seedless_is_seed_zero,
        "Without any seed, the same index twice must give two windows.": keeps_the_indices,
    },
)


def batch_seen(answer, ids, dtype, vocab_size, with_out):
    """A batch, or the id that is refused."""
    with file_of(ids, dtype) as path:
        dataset = with_method(MyDataset, "fetch_windows", answer)(
            path, 3, seed=0, vocab_size=vocab_size
        )
        out = np.full((2, 2, 3), -1) if with_out else None
        try:
            x, y = dataset.fetch_windows(np.array([0, 2]), out=out)
        except TokenFileError:
            return {"refused": True}
        written = with_out and np.array_equal(out, [x.numpy(), y.numpy()])
        return {"refused": False, "x": x.numpy(), "y": y.numpy(), "written into out": written}


def batch_as(self, windows, out=None, check=True):
    tokens = self.windows.gather(windows)
    if check and self.vocab_size is not None:
        require_vocabulary(tokens, self.vocab_size, self.files)
    return shifted_pair(tokens, out)


def checks_nothing(self, windows, *, out=None):
    return batch_as(self, windows, out, check=False)


def checks_too_little(self, windows, *, out=None):
    return batch_as(self, windows, out)


def drops_out(self, windows, *, out=None):
    tokens = self.windows.gather(windows)
    if self.vocab_size is not None or tokens.dtype == np.uint64:
        require_vocabulary(tokens, self.vocab_size, self.files)
    return shifted_pair(tokens)


FETCH_WINDOWS = Build(
    name="fetch_windows",
    reference=TokenDataset.fetch_windows,
    owner="MyDataset",
    cases=[
        (range(10, 18), np.uint16, None, False),
        (range(10, 18), np.uint16, None, True),
        (range(10, 18), np.uint16, 18, False),
        (range(10, 18), np.uint16, 13, False),
        (range(10, 18), np.uint64, None, False),
        ([5, 2**63 + 1, 6, 7, 8, 9], np.uint64, None, False),
    ],
    observe=batch_seen,
    show=lambda case: (
        f"fetch_windows([0, 2]{', out=out' * case[3]})  # windows of 4 of the ids "
        f"{list(case[0])}, {np.dtype(case[1])}, vocab_size={case[2]}"
    ),
    wrong={
        "No id is checked, whatever the vocabulary.": checks_nothing,
        "An id above 2^63 becomes negative in an int64; check uint64 in any case.": (
            checks_too_little
        ),
        "The caller brought memory, and you didn't pass it on.": drops_out,
    },
)

BUILDS = [
    COUNT,
    OFFSETS,
    PAGES,
    GATHER_UNGUARDED,
    SHIFTED_PAIR,
    REQUIRE_UNCHANGED,
    GATHER,
    RANDOM_WINDOWS,
    FETCH_WINDOWS,
    WINDOWS_OF,
]
