"""What lesson 07 lets the learner build, and the wrong answers that people give."""

import copy
import math
import mmap
import operator
from collections import Counter
from functools import partial
from types import SimpleNamespace

import torch

from tutorial.building import SLIPS, Build, ChangedInPlaceError
from tutorial.kept import CheckpointError
from tutorial.kept.checkpointer.background import BackgroundTask, Watermark
from tutorial.kept.checkpointer.file_layout import TensorSlot, slots_for, stored_as
from tutorial.kept.checkpointer.overlap import tensors_of
from tutorial.kept.checkpointer.staging import Copy
from tutorial.kept.reader.containers.safetensors import LENGTH_BYTES, page_header
from tutorial.promised.snapshot import CARDS, PROMISES  # noqa: F401
from tutorial.saving import PIECES, WEIGHTS, Training, save_torn

PART = "snapshot"


def with_method(owner, name, method):
    """A class of its own for an answer that is a method."""
    return type(f"My{owner.__name__}", (owner,), {name: method})


# A save that is of one moment


def file_seen(answer, moment):
    """What the disk has been given, when training takes a step in the middle."""
    training = Training(moment)
    given = training.memory
    answer(training.weights, given, training.write)
    weights, memory = training.ours
    return {
        "the pieces on the disk are of step": training.file,
        "they came from": sorted(training.came_from),
        "`memory` still lists its own tensors": all(map(operator.is_, given, memory)),
        "the weights are of step": sorted({int(one) for weight in weights for one in weight}),
    }


def save_headless(weights, memory, write):
    for place, weight in zip(memory, weights, strict=True):
        place.copy_(weight)
    for place in memory:
        write(place)


def copies_in_turn(weights, memory, write):
    for place, weight in zip(memory, weights, strict=True):
        place.copy_(weight)
        write(place)


def gives_another_name(weights, memory, write):
    for k in range(len(weights)):
        memory[k] = weights[k]
    save_torn(memory, memory, write)


def lists_others(weights, memory, write):
    memory[:] = [one.clone() for one in weights]
    save_torn(memory, memory, write)


def copies_the_wrong_way(weights, memory, write):
    save_headless(memory, weights, write)


SAVE_HEADLESS = Build(
    name="save_headless",
    reference=save_headless,
    kept=False,
    cases=[(moment,) for moment in range(WEIGHTS * PIECES)],
    observe=file_seen,
    show=lambda case: (
        f"save_headless(weights, memory, write)  # step 2 comes when the disk has {case[0]} pieces"
    ),
    wrong={
        "You write the weights themselves, and training goes on changing them.": save_torn,
        "Assigning gives the weights a second name; it copies nothing.": gives_another_name,
        "You copy a weight when its turn comes; by then training has moved on.": copies_in_turn,
        "All of one step, but in memory that is new at every save.": (
            lambda weights, memory, write: save_torn([w.clone() for w in weights], memory, write)
        ),
        "You copy the memory over the weights: the model forgets what it learned.": (
            copies_the_wrong_way
        ),
        "You write memory into which nothing was copied.": (
            lambda weights, memory, write: save_torn(memory, memory, write)
        ),
        "Everything is copied, and nothing is written.": (
            lambda weights, memory, write: save_headless(weights, memory, lambda place: None)
        ),
        "`memory` lists other tensors now: copy into those that are there.": (lists_others),
        "You put new tensors behind those that are there.": (
            lambda weights, memory, write: save_torn(
                memory + [one.clone() for one in weights], memory, write
            )
        ),
        "`write` takes one tensor, not a list of them.": (
            lambda weights, memory, write: save_headless(
                weights, memory, lambda place: write(memory)
            )
        ),
    },
)


# Where each tensor goes


def tensors_like(spec):
    return {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in spec.items()}


def slots_seen(answer, spec):
    tensors = tensors_like(spec)
    stored = {name: stored_as(name, tensor) for name, tensor in tensors.items()}
    given = dict(tensors)
    found = answer(given, stored)
    if given.keys() != tensors.keys():
        raise ChangedInPlaceError("tensors")
    slots = [] if found is None else list(found)
    if not slots or not all(isinstance(one, TensorSlot) for one in slots):
        kinds = sorted({type(one).__name__ for one in slots})
        return {"returned": f"a {type(found).__name__} of {' and '.join(kinds) or 'nothing'}"}
    return {
        "returned": "a list of TensorSlot",
        "tensors begin at": {slot.name: slot.begin for slot in slots},
        "in this order": [slot.name for slot in slots],
        "their bytes": [slot.nbytes for slot in slots],
        "stored as": [(str(slot.dtype).removeprefix("torch."), slot.shape) for slot in slots],
    }


def layout_cases(rng):
    wide, float32, half, flag = torch.int64, torch.float32, torch.bfloat16, torch.bool
    fixed = [
        {"a": (float32, (2,))},
        {"a": (flag, (3,)), "b": (float32, ())},
        {"b": (half, (3,)), "a": (half, (1,)), "c": (wide, (1,))},
        {"a": (flag, (5,)), "b": (half, (9,)), "c": (float32, (3, 0)), "d": (wide, (2,))},
        {"z": (torch.float64, (3,)), "c": (torch.complex128, (2,))},
        {"bias": (float32, (3,)), "mask": (flag, (5,)), "step": (wide, ()), "w": (half, (2, 3))},
    ]
    kinds = [wide, float32, half, flag]
    drawn = [
        {
            f"t{k}": (kinds[rng.integers(4)], tuple(rng.integers(0, 4, rng.integers(3)).tolist()))
            for k in range(size)
        }
        for size in (4, 5, 6, 7)
    ]
    return [(spec,) for spec in fixed + drawn]


def spec_text(case):
    def one(dtype, shape):
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"

    return f"slots_for({', '.join(f'{name}: {one(*kind)}' for name, kind in case[0].items())})"


def placed(tensors, stored, key=None, gaps=False, size=None):
    slots, at = [], 0
    for name in sorted(tensors, key=key or (lambda one: -tensors[one].dtype.itemsize)):
        dtype, shape = stored[name]
        nbytes = size(tensors[name]) if size else math.prod(shape) * dtype.itemsize
        at = -(-at // dtype.itemsize) * dtype.itemsize if gaps else at
        slots.append(TensorSlot(name, dtype, shape, at, nbytes))
        at += nbytes
    return slots


def of_two_minds(tensors, stored):
    slots, at = [], 0
    for slot in slots_for(tensors, stored):
        nbytes = math.prod(slot.shape) * tensors[slot.name].dtype.itemsize
        slots.append(slot._replace(begin=at, nbytes=nbytes))
        at += nbytes
    return slots


def counts_those_of_the_tensor(tensors, stored):
    slots, at = [], 0
    for slot in slots_for(tensors, stored):
        nbytes = tensors[slot.name].numel() * slot.dtype.itemsize
        slots.append(slot._replace(begin=at, nbytes=nbytes))
        at += nbytes
    return slots


def moves_on_first(tensors, stored):
    return [slot._replace(begin=slot.begin + slot.nbytes) for slot in slots_for(tensors, stored)]


def rounds_up(tensors, stored, to):
    slots, at = [], 0
    for slot in slots_for(tensors, stored):
        at = -(-at // to) * to
        slots.append(slot._replace(begin=at))
        at += slot.nbytes
    return slots


def adds_an_element(tensors, stored):
    slots, at = [], 0
    for slot in slots_for(tensors, stored):
        at += slot.dtype.itemsize - at % slot.dtype.itemsize
        slots.append(slot._replace(begin=at))
        at += slot.nbytes
    return slots


def moves_by_elements(tensors, stored):
    slots, at = [], 0
    for slot in slots_for(tensors, stored):
        slots.append(slot._replace(begin=at))
        at += math.prod(slot.shape)
    return slots


def counts_elements(tensors, stored):
    return [
        slot._replace(nbytes=math.prod(slot.shape)) for slot in moves_by_elements(tensors, stored)
    ]


def slots_with(change):
    return lambda tensors, stored: [change(slot) for slot in slots_for(tensors, stored)]


def place_by(rank, **options):
    return lambda tensors, stored: placed(
        tensors, stored, key=lambda name: rank(name, tensors[name]), **options
    )


def to_the_end(tensors, stored):
    return [
        TensorSlot(slot.name, slot.dtype, slot.shape, slot.begin, slot.begin + slot.nbytes)
        for slot in slots_for(tensors, stored)
    ]


def as_in_the_state(tensors, stored):
    return [
        TensorSlot(slot.name, tensors[slot.name].dtype, tuple(tensors[slot.name].shape),
                   slot.begin, slot.nbytes)
        for slot in slots_for(tensors, stored)
    ]  # fmt: skip


SLOTS_FOR = Build(
    name="slots_for",
    reference=slots_for,
    cases=layout_cases,
    observe=slots_seen,
    show=spec_text,
    wrong={
        "You keep the order of the state: a tensor can begin where its elements don't fit.": (
            place_by(lambda name, tensor: 0)
        ),
        "You leave gaps between tensors, and safetensors allows none.": (
            place_by(lambda name, tensor: 0, gaps=True)
        ),
        "You sort by the bytes of a whole tensor, not of one element.": (
            place_by(lambda name, tensor: -tensor.nbytes)
        ),
        "You begin with the small elements, which leaves the large ones at odd places.": (
            place_by(lambda name, tensor: tensor.dtype.itemsize)
        ),
        "You count elements where the file counts bytes.": partial(
            placed, size=lambda tensor: tensor.numel()
        ),
        "The shape is that in the file, and so must the element be: both are in `stored`.": (
            of_two_minds
        ),
        "The last number is how many bytes a slot has, not where it ends.": to_the_end,
        "Tensors with elements of one size have lost the order of the state.": (
            place_by(lambda name, tensor: (-tensor.dtype.itemsize, name))
        ),
        "A slot says how the tensor is stored: dtype and shape come from `stored`.": (
            as_in_the_state
        ),
        "Sort by the element of the tensor; that in the file may be smaller.": (
            lambda tensors, stored: placed(
                tensors, stored, key=lambda name: -stored[name][0].itemsize
            )
        ),
        "Count the elements of the shape in the file; the tensor itself may have fewer.": (
            counts_those_of_the_tensor
        ),
        "Turned around, tensors with elements of one size come in the opposite order.": (
            lambda tensors, stored: placed(dict(reversed(tensors.items())), stored)
        ),
        "You move on before you note where a slot begins.": moves_on_first,
        "You sort by name; what counts is the size of an element.": (
            lambda tensors, stored: placed(tensors, stored, key=str)
        ),
        "Where the place is right already, you add a whole element: 0 bytes are missing.": (
            adds_an_element
        ),
        "You begin with the small elements, and leave gaps to mend it: safetensors allows none.": (
            place_by(lambda name, tensor: tensor.dtype.itemsize, gaps=True)
        ),
        "`math.prod(shape)` counts elements; a slot and the way to the next have bytes.": (
            counts_elements
        ),
        "The place is in bytes, and yet `nbytes` counts elements.": slots_with(
            lambda slot: slot._replace(nbytes=math.prod(slot.shape))
        ),
        "You know the bytes, and move on by the number of elements.": moves_by_elements,
        "`tensors` is a dictionary: what you sort are names, which have no dtype.": (
            lambda tensors, stored: placed(tensors, stored, key=lambda name: -name.dtype.itemsize)
        ),
        "Each slot is a `TensorSlot`; a bare tuple has no names for its parts.": (
            lambda tensors, stored: [tuple(slot) for slot in slots_for(tensors, stored)]
        ),
        "A list is asked for: it has the order of the file.": (
            lambda tensors, stored: {slot.name: slot for slot in slots_for(tensors, stored)}
        ),
    }
    | {
        f"You pad to {to:,} bytes: sorted, each tensor ends where the next may begin.": partial(
            rounds_up, to=to
        )
        for to in (4, 8, 16, 64, 4096)
    },
)


# A header that ends on a page


def header_seen(answer, length):
    text = (b'{"w":' + b"1" * length)[: length - 1] + b"}"
    header = answer(text)
    if not isinstance(header, bytes | bytearray):
        return {"it is": type(header).__name__}
    stated = int.from_bytes(header[:LENGTH_BYTES], "little")
    return {
        "it is": "bytes",
        "bytes in all": len(header),
        "the first 8 bytes say": stated,
        "then comes": "the text" if header[LENGTH_BYTES:].startswith(text) else "something else",
        "and then": sorted(set(header[LENGTH_BYTES + len(text) :].decode("latin-1"))),
    }


def header_as(text, order="little", fill=b" ", counts=None, room=LENGTH_BYTES, extra=0):
    padding = -(room + len(text) + extra) % mmap.PAGESIZE + extra
    length = len(text) + padding if counts is None else counts(len(text), padding)
    return length.to_bytes(LENGTH_BYTES, order) + text + fill * padding


def on_the_first_page(text):
    padded = text.ljust(mmap.PAGESIZE - LENGTH_BYTES)
    return len(padded).to_bytes(LENGTH_BYTES, "little") + padded


def what_lacks_to_one_page(text):
    padding = mmap.PAGESIZE - LENGTH_BYTES - len(text)
    return (len(text) + padding).to_bytes(LENGTH_BYTES, "little") + text + b" " * padding


def blanks_first(text):
    header = page_header(text)
    return header[:LENGTH_BYTES] + header[LENGTH_BYTES:].removeprefix(text) + text


PAGE_HEADER = Build(
    name="page_header",
    reference=page_header,
    cases=[(length,) for length in (2, 70, 4087, 4088, 4089, 4096, 9000)],
    observe=header_seen,
    show=lambda case: f"page_header(text)  # of {case[0]:,} bytes",
    wrong={
        "`text` is `bytes` already: there is nothing to encode.": (
            lambda text: header_as(text.encode())
        ),
        "You don't count the blanks: a reader takes them for data.": partial(
            header_as, counts=lambda length, padding: length
        ),
        "Your length lacks the blanks, and your page the 8 bytes before the text.": partial(
            header_as, counts=lambda length, padding: length, room=0
        ),
        "The length is not part of the header: it counts what comes behind it.": partial(
            header_as, counts=lambda length, padding: LENGTH_BYTES + length + padding
        ),
        "Your text ends on a page, and the 8 bytes before it push it off.": partial(
            header_as, room=0
        ),
        "A header that ends on a page needs no other page.": partial(header_as, extra=1),
        "Padding stands in the JSON text: only blanks are allowed there.": partial(
            header_as, fill=b"\0"
        ),
        "The format has the lowest byte of the length first.": partial(header_as, order="big"),
        "There is no padding: the data begins where the text happens to end.": (
            lambda text: len(text).to_bytes(LENGTH_BYTES, "little") + text
        ),
        "The text is `bytes`, and so must the blanks be.": partial(header_as, fill=" "),
        "A text may be longer than a page: it ends on a later one.": on_the_first_page,
        "A text may be longer than a page: what it lacks to the first one is negative.": (
            what_lacks_to_one_page
        ),
        "The text comes first, and the blanks behind it.": blanks_first,
        "The length comes first: where else does a reader learn how long the header is?": (
            lambda text: page_header(text)[LENGTH_BYTES:]
        ),
        "One row of bytes is asked for: the length, the text, the blanks.": (
            lambda text: (page_header(text)[:LENGTH_BYTES], page_header(text)[LENGTH_BYTES:])
        ),
    },
)


# One tensor into its slot

TENSORS = {
    "torch.arange(6.)": lambda: torch.arange(6.0),
    "torch.tensor(2.5)": lambda: torch.tensor(2.5),
    "torch.zeros(0, 3)": lambda: torch.zeros(0, 3),
    "torch.arange(6.).reshape(2, 3).T": lambda: torch.arange(6.0).reshape(2, 3).T,
    "torch.arange(6)[::2]": lambda: torch.arange(6)[::2],
    "torch.arange(6).bfloat16()": lambda: torch.arange(6).bfloat16(),
    "torch.tensor([1 + 2j]).conj()": lambda: torch.tensor([1 + 2j]).conj(),
    "torch.nn.Parameter(torch.ones(3))": lambda: torch.nn.Parameter(torch.ones(3)),
}


def slot_seen(answer, kind):
    """What is in the slot after the copy, and whether it may be written to the disk."""
    tensor = TENSORS[kind]()
    memory = torch.full((tensor.nbytes + 8,), 7, dtype=torch.uint8)
    slot = memory[: tensor.nbytes]
    with_method(Copy, "run", answer)(slot, tensor, tensor.nbytes).run()
    held = memory[: tensor.nbytes].view(tensor.dtype)
    return {
        "the slot holds": [str(one) for one in held.tolist()],
        "the tensor holds": [str(one) for one in tensor.detach().reshape(-1).tolist()],
        "bytes behind the slot": memory[tensor.nbytes :].tolist(),
    }


def as_it_lies(self, *, non_blocking=False):
    source = self.source.detach()
    flat = source.untyped_storage()[: self.slot.numel()]
    self.slot.copy_(torch.tensor(list(flat), dtype=torch.uint8))


def as_bytes(self, *, non_blocking=False):
    self.slot.copy_(self.source.detach().flatten().view(torch.uint8))


def seen_flat(self, *, non_blocking=False):
    source = self.source.detach()
    self.slot.view(source.dtype).copy_(source.view(-1))


def seen_flat_as_bytes(self, *, non_blocking=False):
    self.slot.copy_(self.source.detach().view(-1).view(torch.uint8))


def as_numbers(self, *, non_blocking=False):
    source = self.source.detach().reshape(-1)
    self.slot[: len(source)] = source.real.to(torch.uint8)


def upside_down(self, *, non_blocking=False):
    source = self.source.detach()
    source.copy_(self.slot.view(source.dtype).view(source.shape))


def another_slot(self, *, non_blocking=False):
    self.slot = self.source.detach().clone()


def into_the_bytes(self, *, non_blocking=False):
    self.slot.copy_(self.source.detach())


def into_a_flat_slot(self, *, non_blocking=False):
    source = self.source.detach()
    self.slot.view(source.dtype).copy_(source)


def shape_before_dtype(self, *, non_blocking=False):
    source = self.source.detach()
    self.slot.view(source.shape).view(source.dtype).copy_(source)


RUN = Build(
    name="run",
    reference=Copy.run,
    owner="MyCopy",
    cases=[(kind,) for kind in TENSORS],
    observe=slot_seen,
    show=lambda case: f"MyCopy(slot, {case[0]}, ...).run()",
    wrong={
        "You take the elements as they lie in memory, not in the order of the tensor.": as_it_lies,
        "The tensor lies scattered: it can't be seen flat; see the *slot* in its shape.": seen_flat,
        "Elements that lie scattered can't be seen as bytes; the slot can be seen as elements.": (
            seen_flat_as_bytes
        ),
        "A conjugated tensor can't be seen as bytes; the slot can be seen as elements.": as_bytes,
        "Each element becomes one byte: the slot has to be seen with the tensor's dtype.": (
            as_numbers
        ),
        "You copy the slot over the tensor.": upside_down,
        "You give `self.slot` another tensor; the place in the file stays empty.": another_slot,
        "You copy elements into bytes: see the slot in the tensor's dtype first.": (into_the_bytes),
        "The slot is still flat: it needs the shape of the tensor, too.": into_a_flat_slot,
        "As bytes the slot has too many elements for the shape: the dtype comes first.": (
            shape_before_dtype
        ),
    },
)


# Work in another thread

WORKS = {
    "nothing goes wrong": None,
    "OSError: the disk is full": OSError("the disk is full"),
    "MemoryError": MemoryError(),
    "SystemExit": SystemExit(1),
}


class Noted:
    """Stands for an event, and notes what is known when it is set."""

    def __init__(self, task):
        self.task, self.told = task, []

    def set(self):
        error = self.task().error
        self.told.append("nothing" if error is None else type(error).__name__)

    def is_set(self):
        return bool(self.told)


def attempt_seen(answer, how):
    calls, error = [], WORKS[how]

    def work():
        calls.append(how)
        if error is not None:
            raise error

    task = with_method(BackgroundTask, "attempt", answer)(work, "a save")
    task._ended = Noted(lambda: task)
    raised = "nothing"
    try:
        task.attempt(work)
    except BaseException as found:
        raised = type(found).__name__
    kept = "nothing" if task.error is None else type(task.error).__name__
    return {
        "the work was done, times": len(calls),
        "kept as the error": kept,
        "raised in the thread": raised,
        "when it was said to be over, the error was": task._ended.told,
    }


def attempts(catch=BaseException, keep=True, say="always", then=None):
    def attempt(self, work):
        try:
            work()
        except catch as error:
            if say == "first":
                self._ended.set()
            if keep:
                self.error = error
            if then == "raise":
                self._ended.set()
                raise
            if say == "when it went well":
                return
        if say != "first" or self.error is None:
            self._ended.set()

    return attempt


def without_a_net(self, work):
    work()
    self._ended.set()


def never_says(self, work):
    try:
        work()
    except BaseException as error:
        self.error = error


def says_why(self, work):
    try:
        work()
    except BaseException as error:
        self.error = CheckpointError(f"could not save: {error}")
    finally:
        self._ended.set()


def keeps_the_text(self, work):
    try:
        work()
    except BaseException as error:
        self.error = str(error)
    finally:
        self._ended.set()


def attempts_os_error(self, work):
    try:
        work()
    except OSError as error:
        self.error = error
    finally:
        self._ended.set()


def replaces_the_event(self, work):
    try:
        work()
    except BaseException as error:
        self.error = error
    finally:
        self._ended = True


ATTEMPT = Build(
    name="attempt",
    reference=BackgroundTask.attempt,
    owner="MyTask",
    cases=[(how,) for how in WORKS],
    observe=attempt_seen,
    show=lambda case: f"task.attempt(work)  # {case[0]}",
    wrong={
        "An error leaves the thread, where nobody catches it, and whoever waits waits for ever.": (
            without_a_net
        ),
        "You catch the error and throw it away.": attempts(keep=False),
        "After an error nobody is told that it is over: whoever waits waits for ever.": (
            attempts(say="when it went well")
        ),
        "Nobody is ever told that it is over: whoever waits waits for ever.": never_says,
        "You say that it is over before the error is kept: who waits may find none.": (
            attempts(say="first")
        ),
        "You keep the error, and raise it in the thread as well.": attempts(then="raise"),
        "Not every error is an `Exception`: the SystemExit of a `sys.exit()` gets away.": (
            attempts(catch=Exception)
        ),
        "Keep the error itself: another one hides what happened.": says_why,
        "Keep the error itself: its text can't be raised.": keeps_the_text,
        "You name the work, and never call it.": lambda self, work: self._ended.set(),
        "`self._ended` is an event: set it, and put nothing in its place.": replaces_the_event,
        "Not every error is an `OSError`: any other one gets away.": attempts_os_error,
    },
)


def result_seen(answer, error):
    """What two calls raise, and whether they waited."""

    class Task(BackgroundTask):
        result = answer
        joined = 0

        def join(self):
            self.joined += 1
            if self.joined == 1:
                self.error = error and {"OSError": OSError, "SystemExit": SystemExit}[error]("full")

    task, raised = Task(int, "a save"), []
    for _ in range(3):
        try:
            task.result()
        except BaseException as found:
            raised.append(type(found).__name__)
        else:
            raised.append("nothing")
    return {"three calls raise": raised, "it waited": task.joined > 0}


def raises_always(self):
    self.join()
    if self.error is not None:
        raise self.error


def never_waits(self):
    error, self.error = self.error, None
    if error is not None:
        raise error


def returns_it(self):
    self.join()
    error, self.error = self.error, None
    return error


def wraps_it(self):
    self.join()
    error, self.error = self.error, None
    if error is not None:
        raise CheckpointError("could not save") from error


def raises_another(self):
    self.join()
    error, self.error = self.error, None
    if error is not None:
        raise RuntimeError(str(error))


def raises_nothing(self):
    self.join()
    error, self.error = self.error, None
    raise error


def deletes_it(self):
    self.join()
    error = self.error
    if error is not None:
        del self.error
        raise error


RESULT = Build(
    name="result",
    reference=BackgroundTask.result,
    owner="MyTask",
    cases=[(None,), ("OSError",), ("SystemExit",)],
    observe=result_seen,
    show=lambda case: f"task.result()  # the work {'went well' if not case[0] else case[0]}",
    wrong={
        "The error is raised at every call: one full disk, and no later save ever works.": (
            raises_always
        ),
        "You look for the error while the work still runs.": never_waits,
        "Nothing is raised: an error that is dropped or returned is one nobody hears of.": (
            returns_it
        ),
        "Raise the error itself: `except OSError` should catch a full disk.": wraps_it,
        "Another error hides the kind of the first: raise the one that was kept.": (raises_another),
        "Where no error was kept, there is nothing to raise.": raises_nothing,
        "A deleted attribute is missing at the next call; None says that nothing went wrong.": (
            deletes_it
        ),
    },
)


# Close behind the copies


class Script:
    """Stands for a condition: each wait lets the next thing happen, and after the last it hangs."""

    def __init__(self, watermark, events):
        self.watermark, self.events, self.held = watermark, list(events), False
        self.seen = 0

    def __enter__(self):
        self.held = True

    def __exit__(self, *error):
        self.held = False

    def wait(self, timeout=None):
        if not self.held:
            raise RuntimeError("cannot wait on un-acquired lock")
        if not self.events:
            raise RecursionError("it waits for ever")
        self.seen += 1
        event = self.events.pop(0)
        if isinstance(event, int):
            self.watermark._upto = event
        else:
            self.watermark._error = MemoryError(event)

    def wait_for(self, predicate, timeout=None):
        while not predicate():
            self.wait()
        return True


def wait_seen(answer, upto, before, later):
    watermark = with_method(Watermark, "wait_for", answer)()
    watermark._changed = script = Script(watermark, [before])
    script.held = True
    script.wait()
    script.held, script.seen, script.events = False, 0, list(later)
    raised = cause = "nothing"
    try:
        watermark.wait_for(upto)
    except RecursionError:
        raised = "it waits for ever"
    except SLIPS:
        raise
    except Exception as error:
        raised, cause = type(error).__name__, type(error.__cause__).__name__
    there = f"{watermark._upto} bytes there" if raised == "nothing" else f"raised {raised}"
    return {"ends with": there, "after it heard of": script.seen, "cause": cause}


def waits(until, then=None):
    def wait_for(self, upto):
        with self._changed:
            self._changed.wait_for(lambda: until(self, upto))
            if then:
                then(self)

    return wait_for


def raise_from(self):
    if self._error is not None:
        raise CheckpointError("the snapshot was not completed") from self._error


def raise_itself(self):
    if self._error is not None:
        raise self._error


def reached(self, upto):
    return self._upto >= upto or self._error is not None


def no_wait(self, upto):
    with self._changed:
        raise_from(self)


def one_wait(self, upto):
    with self._changed:
        if self._upto < upto and self._error is None:
            self._changed.wait()
        raise_from(self)


def raise_bare(self):
    if self._error is not None:
        raise CheckpointError("the snapshot was not completed")


def not_held(self, upto):
    self._changed.wait_for(lambda: reached(self, upto))
    raise_from(self)


def gives_an_answer(self, upto):
    with self._changed:
        self._changed.wait_for(reached(self, upto))
        raise_from(self)


def looks_before(self, upto):
    with self._changed:
        raise_from(self)
        self._changed.wait_for(lambda: reached(self, upto))


def looks_before_and_waits_on(self, upto):
    with self._changed:
        raise_from(self)
        self._changed.wait_for(lambda: self._upto >= upto)


def raise_runtime(self):
    if self._error is not None:
        raise RuntimeError("the snapshot was not completed") from self._error


WAIT_FOR = Build(
    name="wait_for",
    reference=Watermark.wait_for,
    owner="MyWatermark",
    cases=[
        (8, 8, ()),
        (8, 9, ()),
        (8, 0, (8,)),
        (8, 4, (6, 12)),
        (8, 7, (8, 9)),
        (8, "no memory", ()),
        (8, 4, ("no memory",)),
        (8, 9, ("no memory",)),
    ],
    observe=wait_seen,
    show=lambda case: (
        f"wait_for({case[0]})  # copied: "
        + ", then ".join(
            f"{one} bytes" if isinstance(one, int) else "a copy fails" for one in case[1:2]
        )
        + "".join(
            f", then {one} bytes" if isinstance(one, int) else ", then a copy fails"
            for one in case[2]
        )
    ),
    wrong={
        "You don't wait: the disk gets what lay in the memory before.": no_wait,
        "You wait once: the next word may be that there is a little more, and not yet enough.": (
            one_wait
        ),
        "`upto` bytes are enough: you wait for one more.": (
            waits(lambda self, upto: self._upto > upto or self._error is not None, raise_from)
        ),
        "A copy has failed, and nobody will ever say that the rest is there.": (
            waits(lambda self, upto: self._upto >= upto, raise_from)
        ),
        "A copy has failed, and you go on as if all were there.": waits(reached),
        "The writer's own error is that the rest won't come; the copy's error is its cause.": (
            waits(reached, raise_itself)
        ),
        "Your error doesn't say what went wrong in the copy: that is its cause.": (
            waits(reached, raise_bare)
        ),
        "Who waits for a condition has to hold it, or may miss the word.": not_held,
        "A wait asks again and again: it needs a function, and you give it one answer.": (
            gives_an_answer
        ),
        "You look for an error before the wait; it may come while you wait.": looks_before,
        "You look for an error before the wait, and nothing ends the wait when one comes.": (
            looks_before_and_waits_on
        ),
        "Who waits for a save catches a CheckpointError, and no RuntimeError.": (
            waits(reached, raise_runtime)
        ),
    },
)


# What may be copied later


KEPT = {
    "SGD": {"momentum_buffer": None},
    "SGD with momentum": {"momentum_buffer": torch.zeros(2)},
    "SGD of two groups": {"momentum_buffer": torch.zeros(2)},
    "AdamW": {"step": torch.tensor(1.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)},
    "one that counts": {"rounds": 3, "mean": torch.ones(2)},
}
"""What optimizers keep for each parameter."""


def stepped(kind):
    """An optimizer after a step, and the names of its tensors by their places in memory."""
    parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("weight", "bias")}
    apart = kind.endswith("two groups")
    groups = [[one] for one in parameters.values()] if apart else [list(parameters.values())]
    state = {one: copy.deepcopy(KEPT[kind]) for one in parameters.values()}
    names = {one.data_ptr(): name for name, one in parameters.items()}
    for name, parameter in parameters.items():
        for key, value in state[parameter].items():
            if isinstance(value, torch.Tensor):
                names[value.data_ptr()] = f"{key} of {name}"
    return SimpleNamespace(param_groups=[{"params": one} for one in groups], state=state), names


def owned_seen(answer, kind):
    """What the list lacks, and what is too much in it."""
    optimizer, places = stepped(kind)

    def named(tensors):
        return Counter(
            places.get(one.data_ptr(), "unknown") if isinstance(one, torch.Tensor) else repr(one)
            for one in tensors
        )

    made = answer(optimizer)
    wanted, found = named(tensors_of(optimizer)), named(() if made is None else made)
    lacking, extra = (sorted(both.elements()) for both in (wanted - found, found - wanted))
    return {"lacks": ", ".join(lacking) or "nothing", "too much": ", ".join(extra) or "nothing"}


def changed_by(optimizer, groups=slice(None), parameters=True, state=True, every=False):
    chosen = optimizer.param_groups[groups]
    found = [one for group in chosen for one in group["params"]] if parameters else []
    for kept in optimizer.state.values() if state else ():
        found += [one for one in kept.values() if every or isinstance(one, torch.Tensor)]
    return found


def nests(optimizer):
    return [*(group["params"] for group in optimizer.param_groups),
            *changed_by(optimizer, parameters=False)]  # fmt: skip


def takes_names(optimizer):
    names = [name for kept in optimizer.state.values() for name in kept]
    return changed_by(optimizer, state=False) + names


def goes_through_keys(optimizer):
    found = changed_by(optimizer, state=False)
    for kept in optimizer.state:
        found += kept.values()
    return found


TENSORS_OF = Build(
    name="tensors_of",
    reference=tensors_of,
    cases=[(kind,) for kind in KEPT],
    observe=owned_seen,
    show=lambda case: f"tensors_of(optimizer)  # {case[0]}, after a step",
    wrong={
        "The parameters alone: what else does a step change?": partial(changed_by, state=False),
        "A step changes the parameters first of all.": partial(changed_by, parameters=False),
        "There may be several groups of parameters.": partial(changed_by, groups=slice(1)),
        "The parameters of one group: what else does a step change?": partial(
            changed_by, groups=slice(1), state=False
        ),
        "Not all of an optimizer's state is a tensor.": partial(changed_by, every=True),
        "These are dictionaries and groups; what is asked for is the tensors in them.": (
            lambda optimizer: list(optimizer.state.values())
        ),
        "A list of parameters is no parameter: one flat list is asked for.": nests,
        "You take the names in the state; the tensors are its values.": takes_names,
        "You go through the keys of `state`: these are the parameters themselves.": (
            goes_through_keys
        ),
        "The keys of `state` are the parameters: you have each of them twice.": (
            lambda optimizer: [*changed_by(optimizer), *optimizer.state]
        ),
        "What is not None may still be a number.": (
            lambda optimizer: [one for one in changed_by(optimizer, every=True) if one is not None]
        ),
        "A copy doesn't change with the step: these very tensors are asked for.": (
            lambda optimizer: [one.detach().clone() for one in tensors_of(optimizer)]
        ),
    },
)

HAPPENED = {
    "nothing": lambda weight: None,
    "weight.add_(1)": lambda weight: weight.add_(1),
    "weight.add_(1); weight.sub_(1)": lambda weight: weight.add_(1).sub_(1),
    "weight[0] = 5": lambda weight: weight.__setitem__(0, 5),
    "weight + 1": lambda weight: weight + 1,
    "two steps before the save": lambda weight: None,
    "weight.data.add_(1)": lambda weight: weight.data.add_(1),
    "a weight without a counter": lambda weight: None,
}


def change_seen(answer, what):
    weight = torch.zeros(3)
    if what.startswith("two steps"):
        weight.add_(1).add_(1)
    if what.endswith("a counter"):
        with torch.inference_mode():
            weight = torch.zeros(3)
    version = None if weight.is_inference() else weight._version
    slot = torch.zeros(12, dtype=torch.uint8)
    copy = with_method(Copy, "is_changed", answer)(slot, weight, 12, "weight", version)
    HAPPENED[what](weight)
    found = copy.is_changed()
    return found if found is None and version is not None else bool(found)


IS_CHANGED = Build(
    name="is_changed",
    reference=Copy.is_changed,
    owner="MyCopy",
    cases=[(what,) for what in HAPPENED],
    observe=change_seen,
    show=lambda case: f"copy.is_changed()  # since the save began: {case[0]}",
    wrong={
        "Not every tensor has a counter: then `version` is None, and nobody can tell.": (
            lambda self: self.source._version != self.version
        ),
        "A weight that was changed before the save began is not changed since.": (
            lambda self: self.version is not None and self.source._version > 0
        ),
        "That is the answer to the opposite question.": (
            lambda self: self.version is not None and self.source._version == self.version
        ),
        "You say that nothing ever changes.": lambda self: False,
        "Without a counter nobody can tell: that is no reason to refuse a save.": (
            lambda self: self.version is None or self.source._version != self.version
        ),
        "Both must hold: there is a counter, and it has moved.": (
            lambda self: self.version is not None or self.source._version != self.version
        ),
        "Looking at the values reads all of them, and misses a change that was taken back.": (
            lambda self: not torch.equal(self.source, torch.full((3,), self.source.min().item()))
        ),
    },
)

BUILDS = [
    SAVE_HEADLESS,
    SLOTS_FOR,
    PAGE_HEADER,
    RUN,
    ATTEMPT,
    RESULT,
    WAIT_FOR,
    TENSORS_OF,
    IS_CHANGED,
]
