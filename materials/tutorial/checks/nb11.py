"""What lesson 11 lets the learner build, and the wrong answers that people give."""

import sys
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from npydata.dataset.documents import ends_behind
from npydata.dataset.packed import IGNORE_INDEX, sequence_bounds
from npydata.dataset.packing import within_groups
from npydata.dataset.windows import stream_key
from tutorial import documents
from tutorial.blending import Run, shuffled_samples
from tutorial.building import Build, untouched
from tutorial.frames.documents import MyRun
from tutorial.promised.documents import CARDS, PROMISES  # noqa: F401
from tutorial.slips import slip
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
        "This is where the token stands; the document ends behind it.": slip(
            ends_behind, " + 1", ""
        ),
        "These are lengths; asked is where documents end.": lambda tokens, eot_id: np.diff(
            ends_behind(tokens, eot_id), prepend=0
        ),
        "These are the places where documents begin; asked is where they end.": (
            lambda tokens, eot_id: np.append(0, ends_behind(tokens, eot_id))[:-1]
        ),
        "At 0 the first document begins; none ends there.": lambda tokens, eot_id: np.append(
            0, ends_behind(tokens, eot_id)
        ),
        "For each token you say whether it ends a document; asked is where.": slip(
            ends_behind, "np.flatnonzero(tokens == eot_id) + 1", "tokens == eot_id"
        ),
        "For each token you count the documents that have ended; asked is where they end.": slip(
            ends_behind, "np.flatnonzero(tokens == eot_id) + 1", "np.cumsum(tokens == eot_id)"
        ),
        "There is a dimension too many: each end is one number.": slip(
            ends_behind, "flatnonzero", "argwhere"
        ),
        "These lie behind all the other tokens, and end nothing.": slip(ends_behind, "==", "!="),
        "The token that ends a document isn't always 0.": slip(ends_behind, "== eot_id", "== 0"),
        "What follows the last end is no document of these tokens.": (
            lambda tokens, eot_id: np.unique(np.append(ends_behind(tokens, eot_id), len(tokens)))
        ),
        "A document may hold nothing but the token that ends it.": lambda tokens, eot_id: (
            ends_behind(tokens, eot_id)[np.diff(ends_behind(tokens, eot_id), prepend=0) > 1]
        ),
    },
)


def mask_seen(answer, rows):
    """The mask row by row, as what each position may see."""
    mask, places = untouched(answer)(torch.tensor(rows)), len(rows[0])
    seen = {"kind": kind_of(mask)}
    if isinstance(mask, torch.Tensor):
        seen |= {"shape": tuple(mask.shape), "boolean": mask.dtype == torch.bool}
        if mask.dim() == 4 and mask.shape[2:] == (places, places):
            for k in range(places):
                see = [one[0, k].nonzero().ravel().tolist() for one in mask]
                seen[f"position {k} sees"] = see[0] if len(see) == 1 else see
    return seen


def kind_of(value):
    """What somebody gave who was asked for something else: 'a tuple of 2'."""
    size = f" of {len(value)}" if isinstance(value, tuple) else ""
    return f"a {type(value).__name__}{size}"


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
        "A position sees what comes after it.": slip(document_mask, ".tril()", ""),
        "A position sees the documents before its own.": slip(
            document_mask, "same.tril()", "torch.ones_like(same).tril()"
        ),
        "Rows and columns are exchanged: a position sees what comes after it, not before.": slip(
            document_mask, "tril", "triu"
        ),
        "A position doesn't see itself.": slip(document_mask, "tril()", "tril(-1)"),
        "True is for what a position may look at, not for what is hidden.": slip(
            document_mask, "same.tril()", "~same.tril()"
        ),
        "Documents needn't stand in the order of their numbers, and a larger one says nothing.": (
            slip(document_mask, "==", ">=", ".tril()", "")
        ),
        "The second dimension is missing: it stands for the heads.": slip(
            document_mask, ".tril()", ".tril()[:, 0]"
        ),
        "The rows come first; the dimension for the heads is the second.": slip(
            document_mask, ".tril()", ".tril().transpose(0, 1)"
        ),
        "All rows have the mask of the first.": slip(
            document_mask, "same.tril()", "same[:1].tril().expand_as(same)"
        ),
        "The mask is boolean: it says yes or no for each pair of positions.": slip(
            document_mask, ".tril()", ".tril().float()"
        ),
        "Zeros and -inf would be added to the scores; asked is yes or no.": slip(
            document_mask, "same.tril()", "torch.where(same.tril(), 0.0, float('-inf'))"
        ),
    },
)


def empty_forgotten(counts):
    steps = np.ones(counts.sum(), int)
    steps[0] = 0
    steps[np.cumsum(counts)[:-1]] -= counts[:-1]
    return np.cumsum(steps)


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
        "You count from 1.": slip(within_groups, "counts, counts)", "counts, counts) + 1"),
        "This says which group each place is of; asked is its place in the group.": lambda counts: (
            np.repeat(np.arange(len(counts)), counts)
        ),
        "This says where each place's group begins; asked is its place in the group.": slip(
            within_groups, "np.arange(int(counts.sum())) - ", ""
        ),
        "You take off where each group ends: its places come out below 0.": slip(
            within_groups, "ends - counts", "ends"
        ),
        "You take off a group's own size; before it lie the others.": slip(
            within_groups, "ends - counts", "counts"
        ),
        "You take off the size of the group before, not all that lies before.": slip(
            within_groups, "ends - counts", "np.append(0, counts)[:-1]"
        ),
        "The remainder is 0 at multiples of a size; groups begin elsewhere, too.": slip(
            within_groups, "- np.repeat(ends - counts, counts)", "% np.repeat(counts, counts)"
        ),
        "Groups differ in size; the first is not the measure of all.": slip(
            within_groups, "- np.repeat(ends - counts, counts)", "% counts[0]"
        ),
        "There is one number for each group here, and many places in each.": slip(
            within_groups, "np.repeat(ends - counts, counts)", "(ends - counts)"
        ),
        "The places of a group are numbered from 0, so its last one is less than its size.": (
            lambda counts: np.concatenate([np.arange(count + 1) for count in counts])
        ),
        "A group of size 0 begins where the next one does; both count.": empty_forgotten,
        "You give an array for each group; asked is one of all places.": lambda counts: [
            np.arange(count) for count in counts
        ],
    },
)


def bounds_seen(answer, positions):
    """The bounds, and what they are made of."""
    bounds = untouched(answer)(torch.tensor(positions))
    seen = {"kind": kind_of(bounds)}
    if isinstance(bounds, torch.Tensor):
        seen |= {"bounds": bounds.tolist(), "dtype": str(bounds.dtype)}
    return seen


def falls(position_ids):
    flat = position_ids.reshape(-1)
    behind = (flat.diff() < 0).nonzero()[:, 0] + 1
    return torch.cat([torch.zeros(1), behind, torch.tensor([flat.numel()])]).to(torch.int32)


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
        "The last bound is missing: where the last sequence ends.": slip(
            sequence_bounds,
            "torch.cat([begins, begins.new_tensor([position_ids.numel()])])",
            "begins",
        ),
        "The first sequence begins at 0: that is a bound, too.": slip(
            sequence_bounds, "[begins,", "[begins[1:],"
        ),
        "These are lengths; a kernel wants where sequences begin.": slip(
            sequence_bounds, "(torch.int32)", "(torch.int32).diff()"
        ),
        "This is where last tokens stand; a bound is where a sequence begins.": (
            lambda position_ids: sequence_bounds(position_ids)[1:] - 1
        ),
        "In the second row you begin at 0 again; the kernel sees one flat row.": slip(
            sequence_bounds, ".reshape(-1)", "", "[:, 0]", "[:, 1]"
        ),
        "Each row has bounds from 0 to its length here; the kernel sees one long sequence.": (
            lambda position_ids: torch.cat([sequence_bounds(row[None]) for row in position_ids])
        ),
        "The last bound is the length of all rows, not of one.": slip(
            sequence_bounds, "numel()", "shape[-1]"
        ),
        "`len` of a tensor says how many rows it has, not how many elements.": slip(
            sequence_bounds, "position_ids.numel()", "len(position_ids)"
        ),
        "The last bound lies behind the last token, not at it.": slip(
            sequence_bounds, "numel()", "numel() - 1"
        ),
        "Only the first row is there; the long sequence has them all.": lambda position_ids: (
            sequence_bounds(position_ids[:1])
        ),
        "Behind a sequence of one token the position is 0 again, without a fall.": falls,
        "The kernels take 32-bit integers.": slip(sequence_bounds, ".to(torch.int32)", ""),
    },
)


def targets_in_row(tokens, bounds):
    targets = tokens.roll(-1)
    targets[bounds[1:] - 1] = IGNORE_INDEX
    return targets


def targets_seen(answer, tokens, bounds):
    """The targets that come back."""
    targets = untouched(answer)(torch.tensor(tokens), torch.tensor(bounds, dtype=torch.int32))
    seen = {"kind": kind_of(targets)}
    if isinstance(targets, torch.Tensor):
        seen["targets"] = targets.tolist()
    return seen


def last_left_out(tokens, bounds):
    targets = tokens[1:].clone()
    targets[bounds[1:-1] - 1] = IGNORE_INDEX
    return targets


def round_the_document(tokens, bounds):
    ends = bounds.tolist()
    return torch.cat([tokens[begin:end].roll(-1) for begin, end in pairwise(ends)])


TARGETS_IN_ROW = Build(
    name="targets_in_row",
    reference=targets_in_row,
    kept=False,
    cases=[
        ([5, 6, 0, 7, 0], [0, 3, 5]),
        ([5, 6, 0], [0, 3]),
        ([0, 7, 8, 0], [0, 1, 4]),
        ([0, 5, 6, 7], [0, 2, 4]),
        ([5, 6, 0, 7, 8, 9, 0, 0], [0, 3, 7, 8]),
    ],
    observe=targets_seen,
    show=lambda case: f"targets_in_row(torch.tensor({case[0]}), torch.tensor({case[1]}))",
    wrong={
        "The last token of a document still has to predict the first of the next.": slip(
            targets_in_row, "bounds[1:]", "bounds[-1:]"
        ),
        "The last token of a document would have to predict its first.": round_the_document,
        "Behind the very last token there is nothing to predict either.": slip(
            targets_in_row, "bounds[1:]", "bounds[1:-1]"
        ),
        "Each token has a target, the last one too: one that the loss leaves out.": last_left_out,
        "Targets that the loss leaves out stay where they are; these are gone.": slip(
            targets_in_row, "return targets", "return targets[targets != IGNORE_INDEX]"
        ),
        "A bound is where the next document begins; the last token stands one place before.": slip(
            targets_in_row, " - 1", ""
        ),
        "What comes before a document's last token can be predicted: it is that token.": slip(
            targets_in_row, " - 1", " - 2"
        ),
        "You leave out the first token of each document; its target is the second.": slip(
            targets_in_row, "bounds[1:] - 1", "bounds[:-1]"
        ),
        "The target is the next token, not the one before.": slip(
            targets_in_row, "roll(-1)", "roll(1)"
        ),
        "The target of a token is itself: the model would copy.": slip(
            targets_in_row, "roll(-1)", "clone()"
        ),
        "`bounds` say where documents end; a token 0 may stand elsewhere.": slip(
            targets_in_row, "bounds[1:] - 1", "tokens == 0"
        ),
        "0 is a token like any other; the loss leaves out IGNORE_INDEX.": slip(
            targets_in_row, "= IGNORE_INDEX", "= 0"
        ),
        "The loss leaves out IGNORE_INDEX and nothing else, -1 neither.": slip(
            targets_in_row, "= IGNORE_INDEX", "= -1"
        ),
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
    rows = untouched(answer)(list(sizes), room)
    if not isinstance(rows, list) or not all(isinstance(row, list | tuple) for row in rows):
        inner = {type(row).__name__ for row in rows} if isinstance(rows, list) else ()
        return {"kind": " of ".join([kind_of(rows), *sorted(inner)])}
    items = [item for row in rows for item in row]
    whole = all(type(item) in (int, np.int64) and 0 <= item < len(sizes) for item in items)
    seen = {
        "kind": "rows",
        "each item is in one row": whole and sorted(items) == [*range(len(sizes))],
    }
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


def never_looked_back(sizes, room):
    order = sorted(range(len(sizes)), key=lambda item: -sizes[item])
    return [[order[k] for k in row] for row in next_fit([sizes[item] for item in order], room)]


def fullest_row(sizes, room):
    rows, left = [], []
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        fitting = [k for k in range(len(rows)) if sizes[item] <= left[k]]
        if not fitting:
            rows, left, fitting = [*rows, []], [*left, room], [len(rows)]
        k = min(fitting, key=left.__getitem__)
        rows[k].append(item)
        left[k] -= sizes[item]
    return rows


def only_two(sizes, room):
    """What fits begins to be looked for in all rows, and ends after the second document."""
    return slip(fit_slowly, "while fitting :=", "while len(row) < 2 and (fitting :=",
                "in waiting):", "in waiting)):")(sizes, room)  # fmt: skip


def taken_by(sizes, room, first=-1, then=0):
    """The first of a row by one end of what fits, the others by the other."""
    waiting, rows = sorted(range(len(sizes)), key=lambda item: sizes[item]), []
    while waiting:
        row, left = [], room
        while fitting := [item for item in waiting if sizes[item] <= left]:
            row.append(fitting[then if row else first])
            waiting.remove(row[-1])
            left -= sizes[row[-1]]
        rows.append(row)
    return rows


def skipping(sizes, room):
    waiting, rows = sorted(range(len(sizes)), key=lambda item: -sizes[item]), []
    while waiting:
        row, left = [], room
        for item in waiting:
            if sizes[item] <= left:
                row.append(item)
                waiting.remove(item)
                left -= sizes[item]
        rows.append(row)
    return rows


FIT_SLOWLY = Build(
    name="fit_slowly",
    reference=fit_slowly,
    kept=False,
    cases=[
        ([3, 5, 2], 8),
        ([4, 4, 4], 8),
        ([6, 1, 5, 3, 2], 8),
        ([1, 7, 4, 5], 10),
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
        "You leave a row when the next one is too long; a shorter one may still fit.": (
            never_looked_back
        ),
        "A row begins with the longest that is left, wherever it stands.": slip(
            fit_slowly,
            "sorted(range(len(sizes)), key=lambda item: sizes[item])",
            "list(range(len(sizes)))[::-1]",
            "sum(sizes[item] <= left for item in waiting)",
            "max((k + 1 for k, item in enumerate(waiting) if sizes[item] <= left), default=0)",
        ),
        "You take the shortest that fits; the long ones find no room afterwards.": partial(
            taken_by, first=0
        ),
        "Behind the longest you take the shortest that fits.": taken_by,
        "You look for the fullest row for each document; here each row looks for documents.": (
            fullest_row
        ),
        "A row takes more than two, as long as any fits.": only_two,
        "You take out of a list while you go through it: the loop passes over the next one.": (
            skipping
        ),
        "What fits exactly fits.": slip(
            fit_slowly, "sizes[item] <= left", "sizes[item] < left + (not row)"
        ),
        "Several may share a row; here each has its own.": lambda sizes, room: [
            [item] for item in np.argsort(sizes)[::-1].tolist()
        ],
        "A row holds more than there is room for.": slip(
            fit_slowly, "            left -= sizes[row[-1]]\n", ""
        ),
        "The last row is missing.": lambda sizes, room: fit_slowly(sizes, room)[:-1],
        "These are sizes; asked are the numbers of the documents.": lambda sizes, room: [
            [sizes[item] for item in row] for row in fit_slowly(sizes, room)
        ],
        "`index` finds the first of several documents of one size, again and again.": (
            lambda sizes, room: [
                [sizes.index(sizes[item]) for item in row] for row in fit_slowly(sizes, room)
            ]
        ),
        "You give one list of all; asked is a list for each row.": lambda sizes, room: [
            item for row in fit_slowly(sizes, room) for item in row
        ],
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
    sources = [int(one) for one in untouched(answer)(owed.copy(), unit)]
    seen = {"samples": len(sources)}
    if len(sources) != len(owed) or not set(sources) <= set(range(owed.shape[1])):
        return seen | {"sources": sources}
    away = np.abs(documents.distance(sources, owed, unit)).max(axis=1)
    late = np.flatnonzero(away >= 1)
    far = f"after {late[0] + 1} samples, at most {away.max():.1f}" if len(late) else "never"
    return seen | {"a sample or more from a share": far}


def table_text(case):
    said = ", then ".join(f"{samples} samples of weights {list(w)}" for samples, w in case[0])
    return f"sources_by_table(owed, {sum(case[0][0][1])})  # {said}"


def furthest_behind(owed, unit):
    counts, sources = np.zeros(owed.shape[1], int), []
    for row in owed:
        sources.append(int(np.argmax(row - counts * unit)))
        counts[sources[-1]] += 1
    return sources


def late_if_not_open(owed, unit):
    """Every source is asked; the row behind the table stands for one that has no open turn."""
    counts, sources = np.zeros(owed.shape[1], int), []
    for row in owed:
        closes = [np.searchsorted(owed[:, k], (counts[k] + 1) * unit) for k in range(len(row))]
        ends = np.where(row > counts * unit, closes, len(owed))
        sources.append(int(np.argmin(ends)))
        counts[sources[-1]] += 1
    return sources


def at_random(owed, unit):
    return documents.drawn(np.diff(owed, axis=0, prepend=0)).tolist()


def block_by_block(owed, unit):
    """A pattern of one unit, source after source."""
    first = np.repeat(np.arange(owed.shape[1]), owed[0])
    return np.resize(first, len(owed)).tolist()


def in_turn(owed, unit):
    return [n % owed.shape[1] for n in range(len(owed))]


OPEN, CLOSES = "row[k] > counts[k] * unit", "np.searchsorted(owed[:, k], (counts[k] + 1) * unit)"
CHOSEN = "waiting[np.argmin(ends)]"
table_as = partial(slip, sources_by_table)

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
        ([(4, (0, 1, 2)), (4, (2, 0, 1))],),
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
        "A source came without an open turn: one that closes behind the table is open, too.": (
            late_if_not_open
        ),
        "You draw: chance keeps to the weights only in the long run.": at_random,
        "One source after the other: within a period the first is far ahead.": block_by_block,
        "You take the sources in turn, whatever they are owed.": in_turn,
        "What a source has given is never counted, so its first turn stays open.": table_as(
            "counts[sources[-1]] += 1", "pass"
        ),
        "A source may come only when it is owed more than it has given.": table_as(OPEN, "True"),
        "A turn isn't open yet when a source has given just what it is owed.": table_as(
            OPEN, "row[k] >= counts[k] * unit"
        ),
        "A turn opens before a whole sample is owed.": table_as(
            OPEN, "row[k] >= (counts[k] + 1) * unit"
        ),
        "You take the turn that closes last.": table_as("argmin", "argmax"),
        "You take the turn that opened first; another one may close before it.": table_as(
            CLOSES, "np.searchsorted(owed[:, k], counts[k] * unit)"
        ),
        "You take the first of the open turns, whenever they close.": table_as(
            CHOSEN, "waiting[0]"
        ),
        "A turn closes as soon as a whole sample is owed, not when it is more.": table_as(
            "+ 1) * unit)", "+ 1) * unit, side='right')"
        ),
        "When it closes is counted in parts, too: a sample is `unit` of them.": table_as(
            CLOSES, "np.searchsorted(owed[:, k], counts[k] + 1)"
        ),
        "The source that is owed most in all has also been given most.": lambda owed, unit: [
            int(np.argmax(row)) for row in owed
        ],
        "A turn that doesn't close in this table is less urgent than all others.": table_as(
            CLOSES, "np.argmax(owed[:, k] >= (counts[k] + 1) * unit)"
        ),
        "Some turns don't close in this table: none of its rows is found.": table_as(
            CLOSES, "np.flatnonzero(owed[:, k] >= (counts[k] + 1) * unit)[0]"
        ),
        "You look along a row; when a turn closes stands in the source's column.": table_as(
            "owed[:, k]", "row"
        ),
        "That is a place in the list of open turns, not the source that stands there.": table_as(
            CHOSEN, "np.argmin(ends)"
        ),
        "That says when the turn closes; asked is whose turn it is.": table_as(CHOSEN, "min(ends)"),
    },
)


def run_seen(method):
    """What a method of a run gives: the run is made of its pattern."""

    def observe(answer, begin, pattern, before, samples):
        kind = type("MyRun", (MyRun,), {method: untouched(answer)})
        run = documents.run_of(kind, begin, pattern, before)
        asked = np.array(samples) if isinstance(samples, list) else samples
        found = getattr(run, method)(asked)
        if method == "counts_at":
            return {"counts": np.asarray(found).tolist()}
        seen = {"kind": kind_of(found)}
        if seen["kind"] == "a tuple of 2":
            names = ("sources", "of each so many came before")
            seen |= {name: np.asarray(one).tolist() for name, one in zip(names, found, strict=True)}
        return seen

    return observe


def run_text(case, method):
    begin, pattern, before, samples = case
    asked = f"np.array({samples})" if isinstance(samples, list) else samples
    call = f"run.{method}({asked})"
    return f"{call}  # begin {begin}, pattern {pattern}, before {before}"


sources_as = partial(slip, Run.sources_at)
WHOLE = "repetition * self.per_pattern[found]"


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
        "The run begins at `self.begin`, not at 0.": sources_as("samples - self.begin", "samples"),
        "`divmod` gives the whole patterns first, and then what is left.": sources_as(
            "repetition, slot =", "slot, repetition ="
        ),
        "The pattern comes again; behind its end a sample's place in it isn't its number.": (
            sources_as("divmod(samples - self.begin, len(self.pattern))", "0, samples - self.begin")
        ),
        "Within a pattern, a source comes several times.": sources_as(" + self.ranks[slot]", ""),
        "`ranks` has a number for each place of the pattern, not for each source.": sources_as(
            "self.ranks[slot]", "self.ranks[found]"
        ),
        "`before` has a number for each source, not for each place of the pattern.": sources_as(
            "self.before[found]", "self.before[slot]"
        ),
        "`per_pattern` has a number for each source, not for each place of the pattern.": (
            sources_as("self.per_pattern[found]", "self.per_pattern[slot]")
        ),
        "`per_pattern` has a number for each source, not for each sample that is asked for.": (
            sources_as("self.per_pattern[found]", "self.per_pattern")
        ),
        "What a source gave before the run is forgotten: its samples come again.": sources_as(
            "self.before[found] + ", ""
        ),
        "The whole patterns that went by gave samples, too.": sources_as(" + " + WHOLE, ""),
        "A whole pattern takes `per_pattern` samples of a source, not one.": sources_as(
            WHOLE, "repetition"
        ),
        "A whole pattern takes `per_pattern` samples of a source, not as many as it is long.": (
            sources_as(WHOLE, "repetition * len(self.pattern)")
        ),
        "A sample doesn't come before itself.": sources_as(WHOLE, WHOLE + " + 1"),
        "You return only the sources.": sources_as("return found, ", "return found  # "),
        "The pair is the other way round: the sources come first.": lambda self, samples: (
            Run.sources_at(self, samples)[::-1]
        ),
    },
)


def shuffled_seen(answer, ranks, length, seed):
    """Facts of the order: any good shuffle of an epoch is right."""
    asked, answer = np.array(ranks), untouched(answer)
    found = answer(asked.copy(), length, seed)
    if kind_of(found) != "a tuple of 2":
        return {"kind": kind_of(found)}
    epochs, samples = (np.asarray(one).tolist() for one in found)
    seen = {"kind": kind_of(found), "epochs": epochs}
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
        seen["the next seed's first order is another"] = (
            other[:length] != samples[length : 2 * length]
        )
        seen["the order of the file"] = samples[:20] == list(range(20))
    return seen


def with_a_generator(ranks, length, seed):
    epochs = ranks // length
    chance = np.random.default_rng(seed)
    return epochs, chance.permutation(length)[np.arange(len(ranks)) % length]


def epoch_behind_epoch(ranks, length, seed):
    epochs, samples = shuffled_samples(ranks, length, seed)
    return epochs, samples[np.argsort(epochs, kind="stable")]


def sorted_by_epoch(ranks, length, seed):
    epochs, samples = epoch_behind_epoch(ranks, length, seed)
    return np.sort(epochs), samples


def drawn_again(ranks, length, seed):
    keys = [int(stream_key(seed, rank)) % length for rank in ranks.tolist()]
    return ranks // length, np.array(keys)


shuffled_as = partial(slip, shuffled_samples)

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
        "Every epoch has the same order.": shuffled_as("(seed, epoch)", "(seed)"),
        "The order doesn't depend on the seed.": shuffled_as("(seed, epoch)", "(epoch)"),
        "A seed's second epoch comes in the order of the next seed's first.": shuffled_as(
            "int(stream_key(seed, epoch))", "seed + epoch"
        ),
        "The samples come in the order of the file.": shuffled_as(
            "order(samples[epochs == epoch])", "samples[epochs == epoch]"
        ),
        "A permutation is of positions, from 0 to below `length` in each epoch.": shuffled_as(
            "order(samples[epochs == epoch])", "order(ranks[epochs == epoch])"
        ),
        "Each epoch's order shuffles the samples of all; its own are meant.": shuffled_as(
            "samples[epochs == epoch] = order(samples[epochs == epoch])", "samples = order(samples)"
        ),
        "The first epoch that is asked for gives its order to all.": shuffled_as(
            "(seed, epoch)", "(seed, epochs[0])"
        ),
        "You number the epochs that are asked for; an epoch has a number of its own.": shuffled_as(
            "in np.unique(epochs).tolist()",
            "in np.unique(epochs).tolist()",
            "(seed, epoch)",
            "(seed, np.unique(epochs).tolist().index(epoch))",
        ),
        "A sample depends on what else is asked for; it should depend on its number alone.": (
            with_a_generator
        ),
        "You put epoch behind epoch: each sample belongs where its number was asked for.": (
            epoch_behind_epoch
        ),
        "You return them epoch by epoch; they were asked for in another order.": sorted_by_epoch,
        "You draw with replacement: in an epoch some come twice, and others never.": drawn_again,
        "You return only the samples, not their epochs.": shuffled_as(
            "return epochs, samples", "return samples"
        ),
        "The pair is the other way round: the epochs come first.": shuffled_as(
            "return epochs, samples", "return samples, epochs"
        ),
        "The whole shuffle is as long as one epoch; the epochs are missing.": shuffled_as(
            "return epochs, samples", "return epochs * 0, samples"
        ),
    },
)


counts_as = partial(slip, Run.counts_at)


def one_by_one(self, samples):
    counts = self.before.copy()
    for sample in range(self.begin, samples):
        counts[self.pattern[(sample - self.begin) % len(self.pattern)]] += 1
    return counts


def all_at_once(self, samples):
    found, _ = self.sources_at(np.arange(self.begin, samples))
    return self.before + np.bincount(found, minlength=len(self.before))


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
        "The run begins at `self.begin`, not at 0.": counts_as("samples - self.begin", "samples"),
        "`divmod` gives the whole patterns first, and then what is left.": counts_as(
            "repetition, slot =", "slot, repetition ="
        ),
        "What the sources gave before the run is forgotten.": counts_as("self.before + ", ""),
        "The whole patterns that went by gave samples, too.": counts_as(
            "repetition * self.per_pattern + ", ""
        ),
        "A whole pattern takes `per_pattern` samples of a source, not as many as it is long.": (
            counts_as("self.per_pattern", "len(self.pattern)")
        ),
        "The first 5 samples are the numbers 0 to 4: you count one more.": counts_as(
            "[:slot]", "[: slot + 1]"
        ),
        "The pattern that has begun counts, too.": counts_as(" + begun", ""),
        "Of the pattern that has begun you count one place, the one that comes next.": counts_as(
            "self.pattern[:slot]", "[self.pattern[slot]]"
        ),
        "Of the pattern that has begun you count what hasn't come yet.": counts_as(
            "[:slot]", "[slot:]"
        ),
        "You count the pattern that has begun as a whole one.": counts_as(
            "repetition * self.per_pattern + begun", "(repetition + 1) * self.per_pattern"
        ),
        "That is a share, rounded; what has come of a pattern depends on its order.": counts_as(
            "repetition * self.per_pattern + begun",
            "(samples - self.begin) * self.per_pattern // len(self.pattern)",
        ),
        "`ranks` is of one source at each place; asked is how many came of all.": counts_as(
            " + begun", " + self.ranks[slot]"
        ),
        "A source that hasn't come yet has a count as well: 0.": counts_as(
            ", minlength=len(self.before)", ""
        ),
        "To go through 10^12 samples one by one takes days.": one_by_one,
        "An array of 10^12 samples is larger than the memory.": all_at_once,
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
