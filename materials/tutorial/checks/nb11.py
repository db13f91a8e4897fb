"""What lesson 11 lets the learner build, and the wrong answers that people give."""

import sys
from functools import partial

import numpy as np
import torch

from npydata.dataset.documents import ends_behind
from npydata.dataset.hashing import stream_key
from npydata.dataset.interleaving import Run
from npydata.dataset.mixture import shuffled_samples
from npydata.dataset.packed import IGNORE_INDEX, sequence_bounds
from npydata.dataset.packing import within_groups
from npydata.dataset.permutation import Permutation
from tutorial import documents
from tutorial.building import Build
from tutorial.frames.documents import MyRun
from tutorial.promised.documents import CARDS, PROMISES  # noqa: F401
from tutorial.symbols import ROOT

sys.path.append(str(ROOT / "examples"))
from masks import document_mask

PART = "documents"


# Rows


ENDS_BEHIND = Build(
    name="ends_behind",
    reference=ends_behind,
    cases=[
        (np.array([5, 6, 0, 7, 0], np.uint16), 0),
        (np.array([0, 0, 4, 0], np.uint16), 0),
        (np.array([5, 6, 7], np.uint16), 0),
        (np.array([5, 2, 0, 2, 2], np.uint16), 2),
    ],
    wrong={
        "This is where the token stands; the document ends behind it.": lambda tokens, eot_id: (
            np.flatnonzero(tokens == eot_id)
        ),
        "These are lengths; asked is where documents end.": lambda tokens, eot_id: np.diff(
            np.flatnonzero(tokens == eot_id) + 1, prepend=0
        ),
        "For each token you say whether it ends a document; asked is where.": (
            lambda tokens, eot_id: tokens == eot_id
        ),
        "The token that ends a document isn't always 0.": lambda tokens, eot_id: (
            np.flatnonzero(tokens == 0) + 1
        ),
        "What follows the last end is no document of these tokens.": lambda tokens, eot_id: (
            np.unique(np.append(np.flatnonzero(tokens == eot_id) + 1, len(tokens)))
        ),
    },
)


def mask_seen(answer, rows):
    """The mask row by row, as what each position may see."""
    mask = answer(torch.tensor(rows))
    if not isinstance(mask, torch.Tensor):
        return {"kind": f"a {type(mask).__name__}, not a tensor"}
    seen = {"shape": tuple(mask.shape), "dtype": str(mask.dtype)}
    if mask.dim() == 4:
        for k in range(len(rows[0])):
            see = [one[0, k].nonzero().ravel().tolist() for one in mask]
            seen[f"position {k} sees"] = see[0] if len(see) == 1 else see
    return seen


def same_document(document_ids):
    return document_ids[:, None, :, None] == document_ids[:, None, None, :]


DOCUMENT_MASK = Build(
    name="document_mask",
    reference=document_mask,
    cases=[
        ([[0, 0, 1]],),
        ([[3, 3, 1, 1, 1]],),
        ([[4, 4, 4, 4]],),
        ([[0, 0, 1, 1], [5, 6, 6, 6]],),
    ],
    observe=mask_seen,
    show=lambda case: f"document_mask(torch.tensor({case[0]}))",
    wrong={
        "A position sees what comes after it.": same_document,
        "A position sees the documents before its own.": lambda document_ids: torch.ones_like(
            same_document(document_ids)
        ).tril(),
        "Rows and columns are exchanged: a position sees what comes after it, not before.": (
            lambda document_ids: same_document(document_ids).triu()
        ),
        "A position doesn't see itself.": lambda document_ids: same_document(document_ids).tril(-1),
        "The second dimension is missing: it stands for the heads.": lambda document_ids: (
            same_document(document_ids).tril()[:, 0]
        ),
        "All rows have the mask of the first.": lambda document_ids: same_document(
            document_ids[:1].expand_as(document_ids)
        ).tril(),
        "The mask is boolean: it says yes or no for each pair of positions.": (
            lambda document_ids: same_document(document_ids).tril().float()
        ),
    },
)

WITHIN_GROUPS = Build(
    name="within_groups",
    reference=within_groups,
    cases=[
        (np.array([3, 2]),),
        (np.array([4]),),
        (np.array([1, 1, 2]),),
        (np.array([2, 0, 3, 1]),),
        (np.array([20, 24, 20]),),
    ],
    wrong={
        "You go on counting; each group begins at 0.": lambda counts: np.arange(counts.sum()),
        "You count from 1.": lambda counts: within_groups(counts) + 1,
        "This says which group each place is of; asked is its place in the group.": lambda counts: (
            np.repeat(np.arange(len(counts)), counts)
        ),
        "You take off where each group ends; take off where it begins.": lambda counts: (
            np.arange(counts.sum()) - np.repeat(np.cumsum(counts), counts)
        ),
        "You take off the size of a group, not all that lies before it.": lambda counts: (
            np.arange(counts.sum()) - np.repeat(np.append(0, counts)[: len(counts)], counts)
        ),
    },
)


def bounds_seen(answer, positions):
    """The bounds, and what they are made of."""
    bounds = answer(torch.tensor(positions))
    if not isinstance(bounds, torch.Tensor):
        return {"kind": f"a {type(bounds).__name__}, not a tensor"}
    return {"bounds": bounds.tolist(), "dtype": str(bounds.dtype)}


def begins(position_ids):
    return (position_ids.reshape(-1) == 0).nonzero()[:, 0]


SEQUENCE_BOUNDS = Build(
    name="sequence_bounds",
    reference=sequence_bounds,
    cases=[
        ([[0, 1, 2, 0]],),
        ([[0, 0, 1]],),
        ([[0, 1], [0, 0]],),
        ([[0, 1, 2, 3]],),
        ([[0, 1, 0, 1], [0, 1, 2, 0], [0, 0, 0, 0]],),
    ],
    observe=bounds_seen,
    show=lambda case: f"sequence_bounds(torch.tensor({case[0]}))",
    wrong={
        "The last bound is missing: where the last sequence ends.": lambda position_ids: begins(
            position_ids
        ).to(torch.int32),
        "These are lengths; a kernel wants where sequences begin.": lambda position_ids: (
            sequence_bounds(position_ids).diff()
        ),
        "In the second row you begin at 0 again; the kernel sees one flat row.": (
            lambda position_ids: torch.cat(
                [(position_ids == 0).nonzero()[:, 1], torch.tensor([position_ids.numel()])]
            ).to(torch.int32)
        ),
        "The last bound is the length of all rows, not of one.": lambda position_ids: torch.cat(
            [begins(position_ids), torch.tensor([position_ids.shape[-1]])]
        ).to(torch.int32),
        "Only the first row is there; the long sequence has them all.": lambda position_ids: (
            sequence_bounds(position_ids[:1])
        ),
        "The kernels take 32-bit integers.": lambda position_ids: sequence_bounds(position_ids).to(
            torch.int64
        ),
    },
)


def targets_in_row(tokens, bounds):
    targets = tokens.roll(-1)
    targets[bounds[1:] - 1] = IGNORE_INDEX
    return targets


def targets_seen(answer, tokens, bounds):
    """The targets, and whether the tokens are as they were."""
    given = torch.tensor(tokens)
    targets = answer(given, torch.tensor(bounds, dtype=torch.int32))
    if not isinstance(targets, torch.Tensor):
        return {"kind": f"a {type(targets).__name__}, not a tensor"}
    return {"targets": targets.tolist(), "tokens": given.tolist()}


def ignored_at(places, shift=-1):
    def answer(tokens, bounds):
        targets = tokens.roll(shift)
        targets[places(bounds.long())] = IGNORE_INDEX
        return targets

    return answer


def in_place(tokens, bounds):
    tokens[:-1] = tokens[1:].clone()
    tokens[bounds[1:].long() - 1] = IGNORE_INDEX
    return tokens


def zeros(tokens, bounds):
    targets = targets_in_row(tokens, bounds)
    return targets.where(targets != IGNORE_INDEX, 0)


TARGETS_IN_ROW = Build(
    name="targets_in_row",
    reference=targets_in_row,
    kept=False,
    cases=[
        ([5, 6, 0, 7, 0], [0, 3, 5]),
        ([5, 6, 0], [0, 3]),
        ([0, 7, 8, 0], [0, 1, 4]),
        ([5, 6, 0, 7, 8, 9, 0, 0], [0, 3, 7, 8]),
    ],
    observe=targets_seen,
    show=lambda case: f"targets_in_row(torch.tensor({case[0]}), torch.tensor({case[1]}))",
    wrong={
        "The last token of a document still has to predict the first of the next.": ignored_at(
            lambda bounds: bounds[-1:] - 1
        ),
        "Behind the very last token there is nothing to predict either.": ignored_at(
            lambda bounds: bounds[1:-1] - 1
        ),
        "Bounds say where documents end; the last token stands one place before.": ignored_at(
            lambda bounds: bounds[1:]
        ),
        "You leave out the first token of each document; its target is the second.": ignored_at(
            lambda bounds: bounds[:-1]
        ),
        "The target is the next token, not the one before.": ignored_at(
            lambda bounds: bounds[1:] - 1, shift=1
        ),
        "The target of a token is itself: the model would copy.": ignored_at(
            lambda bounds: bounds[1:] - 1, shift=0
        ),
        "You write into the tokens, which the model still has to read.": in_place,
        "0 is a token like any other; the loss leaves out IGNORE_INDEX.": zeros,
    },
)


# Packing


def fit_slowly(sizes, room):
    waiting, rows = sorted(range(len(sizes)), key=lambda item: sizes[item]), []
    while waiting:
        row, left = [], room
        while fitting := sum(sizes[item] <= left for item in waiting):
            row.append(waiting.pop(fitting - 1))
            left -= sizes[row[-1]]
        rows.append(row)
    return rows


def fit_seen(answer, sizes, room):
    """What lies in each row: sizes, so that of equal ones any will do."""
    rows = answer(list(sizes), room)
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return {"kind": f"a {type(rows).__name__}, not a list of lists"}
    items = [item for row in rows for item in row]
    whole = all(type(item) in (int, np.int64) and 0 <= item < len(sizes) for item in items)
    seen = {"each item is in one row": whole and sorted(items) == list(range(len(sizes)))}
    if not whole:
        return seen | {"rows": rows}
    return seen | {"sizes in each row": [[sizes[item] for item in row] for row in rows]}


def next_fit(sizes, room):
    rows, left = [], 0
    for item, size in enumerate(sizes):
        if size > left:
            rows, left = [*rows, []], room
        rows[-1].append(item)
        left -= size
    return rows


def first_in_order(sizes, room):
    waiting, rows = list(range(len(sizes))), []
    while waiting:
        row, left = [waiting.pop(0)], room
        left -= sizes[row[0]]
        while fitting := [item for item in waiting if sizes[item] <= left]:
            row.append(fitting[0])
            waiting.remove(row[-1])
            left -= sizes[row[-1]]
        rows.append(row)
    return rows


def smallest_first(sizes, room):
    waiting = sorted(range(len(sizes)), key=lambda item: sizes[item])
    rows = []
    while waiting:
        row, left = [], room
        while fitting := [item for item in waiting if sizes[item] <= left]:
            row.append(fitting[0])
            waiting.remove(row[-1])
            left -= sizes[row[-1]]
        rows.append(row)
    return rows


def never_full(sizes, room):
    return fit_slowly(sizes, room - 1) if max(sizes, default=0) < room else fit_slowly(sizes, room)


def one_each(sizes, room):
    return [[item] for item in np.argsort(sizes)[::-1].tolist()]


def all_in_one(sizes, room):
    return [sorted(range(len(sizes)), key=lambda item: -sizes[item])]


def by_sizes(sizes, room):
    return [[sizes[item] for item in row] for row in fit_slowly(sizes, room)]


FIT_SLOWLY = Build(
    name="fit_slowly",
    reference=fit_slowly,
    kept=False,
    cases=[
        ([3, 5, 2], 8),
        ([4, 4, 4], 8),
        ([6, 1, 5, 3, 2], 8),
        ([7], 8),
        ([], 8),
        ([2, 7, 3, 4, 1, 6, 5], 9),
        ([9, 1, 4, 4, 6, 2, 2, 1], 10),
    ],
    observe=fit_seen,
    wrong={
        "You take them in the order of the file, and leave a row when the next one is too long.": (
            next_fit
        ),
        "A row begins with the longest that is left, wherever it stands.": first_in_order,
        "You take the shortest that fits; the long ones find no room afterwards.": smallest_first,
        "What fits exactly fits.": never_full,
        "Several may share a row; here each has its own.": one_each,
        "You don't look whether it fits.": all_in_one,
        "These are sizes; asked are the numbers of the documents.": by_sizes,
    },
)


# Sources


def sources_by_table(owed, unit):
    counts, sources = [0] * owed.shape[1], []
    for row in owed:
        waiting = [k for k in range(len(row)) if row[k] > counts[k] * unit]
        ends = [np.searchsorted(owed[:, k], (counts[k] + 1) * unit) for k in waiting]
        sources.append(waiting[np.argmin(ends)])
        counts[sources[-1]] += 1
    return sources


def table_seen(answer, phases):
    """Whether each source keeps to its share; many orders do."""
    weights = documents.weights_of(phases)
    owed, unit = np.cumsum(weights, axis=0), int(weights[0].sum())
    sources = [int(one) for one in answer(owed.copy(), unit)]
    seen = {"samples": len(sources)}
    if len(sources) != len(owed) or not set(sources) <= set(range(owed.shape[1])):
        return seen | {"sources": sources}
    away = np.abs(documents.distance(sources, owed, unit)).max(axis=1)
    late = np.flatnonzero(away >= 1)
    return seen | {
        "a sample or more from a share": f"after {late[0] + 1} samples" if len(late) else "never",
        "of each source": np.bincount(sources, minlength=owed.shape[1]).tolist(),
    }


def table_text(case):
    said = ", then ".join(f"{samples} samples of weights {list(w)}" for samples, w in case[0])
    return f"sources_by_table(owed, {sum(case[0][0][1])})  # {said}"


def furthest_behind(owed, unit):
    counts, sources = np.zeros(owed.shape[1], int), []
    for row in owed:
        sources.append(int(np.argmax(row - counts * unit)))
        counts[sources[-1]] += 1
    return sources


def at_random(owed, unit):
    return documents.drawn(np.diff(owed, axis=0, prepend=0)).tolist()


def block_by_block(owed, unit):
    """A pattern of one unit, source after source."""
    first = np.repeat(np.arange(owed.shape[1]), owed[0])
    return np.resize(first, len(owed)).tolist()


def never_counted(owed, unit):
    return [int(np.argmin([np.searchsorted(one, unit) for one in owed.T])) for _ in owed]


def in_turn(owed, unit):
    return [n % owed.shape[1] for n in range(len(owed))]


def not_yet_open(owed, unit):
    counts, sources = [0] * owed.shape[1], []
    for _ in owed:
        ends = [np.searchsorted(owed[:, k], (counts[k] + 1) * unit) for k in range(owed.shape[1])]
        sources.append(int(np.argmin(ends)))
        counts[sources[-1]] += 1
    return sources


def table_as(owed, unit, opens=np.greater, choose=lambda waiting, ends: waiting[np.argmin(ends)]):
    """As it is right, but for what is given."""
    counts, sources = [0] * owed.shape[1], []
    for row in owed:
        waiting = [k for k in range(len(row)) if opens(row[k], counts[k] * unit)]
        ends = [np.searchsorted(owed[:, k], (counts[k] + 1) * unit) for k in waiting]
        sources.append(int(choose(waiting, ends)))
        counts[sources[-1]] += 1
    return sources


SOURCES_BY_TABLE = Build(
    name="sources_by_table",
    reference=sources_by_table,
    kept=False,
    cases=[
        ([(4, (1, 1))],),
        ([(10, (7, 2, 1))],),
        ([(30, (5, 3, 2))],),
        ([(49, (20, 20, 5, 3, 1))],),
        ([(12, (0, 4, 6))],),
        ([(30, (9, 1, 0)), (30, (1, 1, 8))],),
        ([(5, (5, 1, 1, 3)), (8, (0, 0, 5, 5))],),
        ([(40, (4, 3, 2, 1)), (40, (1, 2, 3, 4)), (20, (10, 0, 0, 0))],),
        ([(40, (10, 10, 10, 10))],),
    ],
    observe=table_seen,
    show=table_text,
    wrong={
        "The source that is furthest behind is not always the most urgent: with many sources, or "
        "when weights change, another one runs late.": furthest_behind,
        "You draw: chance keeps to the weights only in the long run.": at_random,
        "One source after the other: within a period the first is far ahead.": block_by_block,
        "You take the sources in turn, whatever they are owed.": in_turn,
        "What a source has given is never counted, so its first turn stays open.": never_counted,
        "A source may come only when it is owed more than it has given.": not_yet_open,
        "You take the turn that closes last.": partial(
            table_as, choose=lambda waiting, ends: waiting[np.argmax(ends)]
        ),
        "A turn isn't open yet when a source has given just what it is owed.": partial(
            table_as, opens=np.greater_equal
        ),
        "That is a place in the list of open turns, not the source that stands there.": partial(
            table_as, choose=lambda waiting, ends: np.argmin(ends)
        ),
    },
)


def run_seen(method):
    """What a method of a run gives: the run is made of its pattern."""

    def observe(answer, begin, pattern, before, samples):
        kind = type("MyRun", (MyRun,), {method: answer})
        run = documents.run_of(kind, begin, pattern, before)
        asked = np.array(samples) if isinstance(samples, list) else samples
        found = getattr(run, method)(asked)
        if method == "counts_at":
            return {"counts": np.asarray(found).tolist()}
        if not isinstance(found, tuple) or len(found) != 2:
            return {"kind": f"a {type(found).__name__}, not a pair"}
        names = ("sources", "of each so many came before")
        return {name: np.asarray(one).tolist() for name, one in zip(names, found, strict=True)}

    return observe


def run_text(case, method):
    begin, pattern, before, samples = case
    asked = f"np.array({samples})" if isinstance(samples, list) else samples
    call = f"run.{method}({asked})"
    return f"{call}  # begin {begin}, pattern {pattern}, before {before}"


def sources_as(self, samples, begin=None, ranks=True, before=True, times=True):
    """As it is right, but for what is given."""
    begin = self.begin if begin is None else begin
    repetition, slot = np.divmod(samples - begin, len(self.pattern))
    found = self.pattern[slot]
    rank = self.ranks[slot] * ranks + self.before[found] * before
    return found, rank + repetition * (self.per_pattern[found] if times else 1)


def by_repetition(self, samples):
    repetition, slot = np.divmod(samples - self.begin, len(self.pattern))
    found = self.pattern[slot]
    return found, self.before[found] + self.ranks[slot] + repetition * len(self.pattern)


SOURCES_AT = Build(
    name="sources_at",
    reference=Run.sources_at,
    owner="MyRun",
    cases=[
        (0, [0, 1, 0], [0, 0], [0, 1, 2]),
        (0, [0, 1, 0], [0, 0], [3, 4, 5, 9]),
        (0, [0, 0, 1, 0, 2], [0, 0, 0], [12, 3]),
        (6, [1, 0], [4, 2], [6, 7, 8, 9]),
        (7, [2, 1, 2, 0], [1, 5, 3], [7, 12, 18]),
        (0, [0, 1, 0], [0, 0], [3 * 10**12 + 1]),
    ],
    observe=run_seen("sources_at"),
    show=partial(run_text, method="sources_at"),
    wrong={
        "The run begins at `self.begin`, not at 0.": lambda self, samples: sources_as(
            self, samples, begin=0
        ),
        "Within a repetition, a source comes several times.": lambda self, samples: sources_as(
            self, samples, ranks=False
        ),
        "What a source gave before the run is forgotten: its samples come again.": (
            lambda self, samples: sources_as(self, samples, before=False)
        ),
        "A repetition takes `per_pattern` samples of a source, not one.": lambda self, samples: (
            sources_as(self, samples, times=False)
        ),
        "A repetition takes `per_pattern` samples of a source, not the whole pattern.": (
            by_repetition
        ),
        "You return only the sources.": lambda self, samples: sources_as(self, samples)[0],
        "The pair is the other way round: the sources come first.": lambda self, samples: (
            sources_as(self, samples)[::-1]
        ),
    },
)


def shuffled_as(ranks, length, seed, key=stream_key):
    """As it is right, but for what is given."""
    found, samples = np.divmod(ranks, length)
    for epoch in np.unique(found).tolist():
        order = Permutation(length, int(key(seed, epoch)))
        samples[found == epoch] = order(samples[found == epoch])
    return found, samples


def shuffled_seen(answer, ranks, length, seed):
    """Facts of the order: any good shuffle of an epoch is right."""
    asked = np.array(ranks)
    found = answer(asked.copy(), length, seed)
    if not isinstance(found, tuple) or len(found) != 2:
        return {"kind": f"a {type(found).__name__}, not a pair"}
    epochs, samples = (np.asarray(one).tolist() for one in found)
    seen = {"epochs": epochs}
    other = np.asarray(answer(asked.copy(), length, seed + 1)[1]).tolist()
    again = np.asarray(answer(asked[-1:].copy(), length, seed)[1]).tolist()
    pairs = list(zip(epochs, samples, strict=True))
    seen["all are samples of the source"] = all(0 <= one < length for one in samples)
    seen["in an epoch none comes twice"] = len(set(pairs)) == len(pairs)
    seen["the last one alone is the same"] = again == samples[-1:]
    if length > 20 and len(ranks) > length:
        by_epoch = {e: [s for one, s in pairs if one == e] for e in set(epochs)}
        orders = [tuple(order[:20]) for order in by_epoch.values() if len(order) >= 20]
        seen["each epoch has an order of its own"] = len(set(orders)) == len(orders)
        seen["another seed, another order"] = other != samples
        seen["the order of the file"] = samples[:20] == list(range(20))
    return seen


def with_a_generator(ranks, length, seed):
    epochs = ranks // length
    chance = np.random.default_rng(seed)
    return epochs, chance.permutation(length)[np.arange(len(ranks)) % length]


def drawn_again(ranks, length, seed):
    keys = [int(stream_key(seed, rank)) % length for rank in ranks.tolist()]
    return ranks // length, np.array(keys)


SHUFFLED_SAMPLES = Build(
    name="shuffled_samples",
    reference=shuffled_samples,
    cases=[
        (list(range(5)), 5, 0),
        (list(range(7)), 3, 1),
        (list(range(120)), 40, 2),
        (list(range(95, 150)), 25, 3),
        ([79, 3, 41, 0], 40, 4),
    ],
    observe=shuffled_seen,
    wrong={
        "Every epoch has the same order.": partial(
            shuffled_as, key=lambda seed, epoch: stream_key(seed)
        ),
        "The order doesn't depend on the seed.": partial(
            shuffled_as, key=lambda seed, epoch: stream_key(epoch)
        ),
        "The samples come in the order of the file.": lambda ranks, length, seed: (
            ranks // length,
            ranks % length,
        ),
        "A sample depends on what else is asked for; it should depend on its number alone.": (
            with_a_generator
        ),
        "You draw with replacement: in an epoch some come twice, and others never.": drawn_again,
        "You return only the samples, not their epochs.": lambda ranks, length, seed: (
            shuffled_samples(ranks, length, seed)[1]
        ),
        "The whole shuffle is as long as one epoch; the epochs are missing.": (
            lambda ranks, length, seed: (ranks * 0, shuffled_samples(ranks, length, seed)[1])
        ),
    },
)


def counts_as(self, samples, begin=None, before=True, inclusive=0, slots=True):
    """As it is right, but for what is given."""
    begin = self.begin if begin is None else begin
    repetition, slot = divmod(samples - begin, len(self.pattern))
    begun = np.bincount(self.pattern[: slot + inclusive], minlength=len(self.before))
    return self.before * before + repetition * self.per_pattern + begun * slots


COUNTS_AT = Build(
    name="counts_at",
    reference=Run.counts_at,
    owner="MyRun",
    cases=[
        (0, [0, 1, 0], [0, 0], 0),
        (0, [0, 1, 0], [0, 0], 2),
        (0, [0, 1, 0], [0, 0], 7),
        (0, [0, 0, 1, 0, 2], [0, 0, 0], 11),
        (6, [1, 0], [4, 2], 9),
        (7, [2, 1, 2, 0], [1, 5, 3], 20),
        (0, [0, 1, 0], [0, 0], 3 * 10**12 + 1),
    ],
    observe=run_seen("counts_at"),
    show=partial(run_text, method="counts_at"),
    wrong={
        "The run begins at `self.begin`, not at 0.": lambda self, samples: counts_as(
            self, samples, begin=0
        ),
        "What the sources gave before the run is forgotten.": lambda self, samples: counts_as(
            self, samples, before=False
        ),
        "The first 5 samples are the numbers 0 to 4: you count one more.": lambda self, samples: (
            counts_as(self, samples, inclusive=1)
        ),
        "The repetition that has begun counts, too.": lambda self, samples: counts_as(
            self, samples, slots=False
        ),
        "A source that hasn't come yet has a count as well: 0.": lambda self, samples: (
            np.bincount(
                np.resize(self.pattern, min(samples - self.begin, 99)).astype(int),
            )
            if samples < 99
            else counts_as(self, samples)
        ),
    },
)

BUILDS = [
    ENDS_BEHIND,
    DOCUMENT_MASK,
    WITHIN_GROUPS,
    SEQUENCE_BOUNDS,
    TARGETS_IN_ROW,
    FIT_SLOWLY,
    SOURCES_BY_TABLE,
    SOURCES_AT,
    SHUFFLED_SAMPLES,
    COUNTS_AT,
]
