"""Lesson 07: a snapshot that is the file, and a thread whose errors are heard."""

import threading
from contextlib import suppress
from unittest.mock import patch

import safetensors.torch
import torch

from course.grading.compare import kind
from course.grading.exercise import Exercise
from course.grading.observers import threads
from course.lesson import solution

# Where tensors go


def slots_seen(answer, dtypes):
    """Lay out tensors of these dtypes: the second has most elements, the third none."""
    items = enumerate(dtypes.items(), 1)
    tensors = {name: torch.ones(k % 3 * 99, dtype=dtype) for k, (name, dtype) in items}
    slots = answer(tensors)
    facts = {getattr(slot, "name", slot): slot for slot in slots}
    returned = "a list" if isinstance(slots, tuple) else kind(slots)
    return {"returned": returned, "order": list(facts)} | facts


SLOTS_FOR = Exercise(
    solution("07", "slots_for"),
    [
        ({"weight": torch.float32},),
        ({"b": torch.float32, "a": torch.float32},),
        ({"mask": torch.bool, "weight": torch.float32},),
        ({"ids": torch.uint8, "step": torch.int64},),
        ({"half": torch.float16, "mask": torch.bool, "big": torch.float64},),
    ],
    slots_seen,
    """
    sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize) >> tensors | In the order of the state, a mask can push 4-byte numbers off a multiple of 4.
    -tensors[name].dtype.itemsize >> tensors[name].dtype.itemsize | The smallest elements come first: what follows an odd number of bytes begins anywhere.
    .dtype.itemsize >> .nbytes | You sort by the size of the whole tensor; what counts is the size of one element.
    -tensors[name].dtype.itemsize >> (-tensors[name].dtype.itemsize, name) | Tensors with elements of one size keep the order that they have in the state.
    begin += tensor.nbytes >> begin += tensor.numel() | You count elements; a slot begins at a byte.
    begin, tensor.nbytes >> begin, begin + tensor.nbytes | The last field is a length; yours is an end.
    """,
)

# What training waits for

SOURCES = {
    "numbers": lambda: torch.arange(6.0).reshape(2, 3) / 8,
    "a transposed tensor": lambda: torch.arange(6.0).reshape(2, 3).T / 8,
    "a parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "a single 2-byte float": lambda: torch.tensor(2.5).bfloat16(),
}


def copy_seen(answer, kind):
    source, with_gradient, new, real = SOURCES[kind](), [], [], torch.Tensor.copy_

    def copy_(target, given, **options):
        real(target, given, **options)
        with_gradient.append(target.requires_grad)
        new.append(given.untyped_storage().data_ptr() != source.untyped_storage().data_ptr())
        return target

    slot = torch.full((source.nbytes,), 255, dtype=torch.uint8)
    with patch.object(torch.Tensor, "copy_", copy_):
        answer(source, slot).run()
    return {
        "in the slot": slot.view(source.dtype).reshape(source.shape).tolist(),
        "the copy has a gradient": True in with_gradient,
        "what is copied into the slot lies in new memory": True in new,
    }


COPY = Exercise(
    solution("07", "Copy"),
    [(kind,) for kind in SOURCES],
    copy_seen,
    """
    self.source.detach() >> self.source | The copy of a parameter becomes part of a graph of gradients.
    self.slot.view(source.dtype).view(source.shape) >> self.slot[: source.numel()].view(source.shape) | The slot is still bytes: `copy_` squeezes each number into one of them.
    self.source.detach() >> self.source.detach().clone() | You make a whole copy first, in new memory.
    target.copy_(source) >> target = source | That gives the tensor another name; nothing gets into the slot.
    """,
    show="Copy({}, slot).run()".format,
)


# An error that is heard

SLOW_S = 0.05


def came_of(call, *given):
    try:
        value = call(*given)
        return "returns" if value is None else f"returns {kind(value)}"
    except BaseException as error:
        return f"raises {type(error).__name__}"


def task_seen(answer, error):
    seen = {}
    begun, done = threading.Event(), []

    def work():
        begun.wait(1)
        threading.Event().wait(SLOW_S)  # a slow disk: who doesn't wait for it is back first
        done.append(1)
        if error:
            raise error("no space left")

    with patch("threading.excepthook", lambda _: None), threads() as ended:
        task = answer(work)
        begun.set()
        for number in ("first", "second"):
            seen[f"{number} result()"] = came_of(task.result)
            seen.setdefault("it returns when the work is done", bool(done))
        ended()
        seen["the work is done in the end"] = bool(done)
    return seen


TASK = Exercise(
    solution("07", "Task"),
    [(None,), (OSError,), (SystemExit,)],
    task_seen,
    """
    BaseException >> Exception | `sys.exit()` is no Exception: it ends the thread, and nobody hears of it.
    self.error = error >> raise | The error ends the thread, and only a log hears of it.
    work() >> work | `work` is named, not called.
    self.thread.join() >> pass | You ask for the result while the thread may still be at work.
    error, self.error = self.error, None >> error = self.error | A second call raises the same error again: every later save would fail.
    raise error >> return error | An error that is returned is easily overlooked.
    """,
    show=lambda error: (
        f"task = Task(work); task.result(); task.result()"
        f"  # work {f'raises {error.__name__}' if error else 'succeeds'}"
    ),
)


# The saver


class Late:
    """A task that does its work when somebody waits for it, and no sooner."""

    def __init__(self, work):
        self.work, self.thread = work, self

    def result(self):
        work, self.work = self.work, lambda: None
        work()

    def join(self):
        with suppress(Exception):
            self.result()


class Early(Late):
    """A task that has done its work before anything else happens."""

    def __init__(self, work):
        super().__init__(work)
        self.join()


def saver_seen(answer, saves, full, task=Late):
    """Save weights that change as soon as `save` is back; the write of save `full` fails."""
    written, images, seen, saving = {}, [], {"written by": "its task"}, ""

    def write_image(image, folder, commit):
        if saving == folder and task is Late:
            seen["written by"] = "`save` itself"
        try:
            found = safetensors.torch.load(image.numpy().tobytes())
            written[folder] = {name: one.tolist() for name, one in found.items()}
        except safetensors.SafetensorError:
            written[folder] = "no file that can be read"
        seen["the commit"] = "is the one it was given" if commit is came_of else "is another"
        images.append(image)
        if folder == str(full):
            raise OSError("no space left")

    with patch.dict(answer.save.__globals__, write_image=write_image, Task=task):
        saver = answer(came_of)
        seen["a wait before"] = came_of(saver.wait)
        for saving in map(str, range(1, saves + 1)):
            weight = torch.full((2,), float(saving))
            seen[f"save {saving}"] = came_of(saver.save, saving, {f"w{saving}": weight})
            weight.fill_(-1)
        saving = ""  # what is written from here on, no `save` writes itself
        seen["wait"] = came_of(saver.wait)
        seen["a second wait"] = came_of(saver.wait)
    places = {image.data_ptr() for image in images}
    return seen | {"written": written, "places in memory": len(places)}


SAVER = Exercise(
    solution("07", "Saver"),
    [(1, 0), (2, 0), (1, 1), (3, 1), (0, 0), (1, 0, Early)],
    saver_seen,
    """
    self.wait() >> pass | The next save fills the memory while the one before is still being written.
    Task(lambda: write_image(image, folder, self.commit)) >> Task(lambda: ([copy.run() for copy in copies], write_image(image, folder, self.commit))) | The thread copies, when the weights may have changed.
    self.wait() >> lay_out(state, self.memory); self.wait() | `lay_out` writes the new header into memory that is still being written.
    self.wait() >> [copy.run() for copy in lay_out(state, self.memory)[1]]; self.wait() | You copy into memory that is still being written.
    lay_out(state, self.memory) >> lay_out(state, Memory()) | New memory for each save: every page of it is a page fault.
    lambda: write_image >> write_image | These parentheses call `write_image` at once, in the loop: the task gets only its result.
    self.commit)) >> self.commit)); self.wait() | You wait for this save; training should go on.
    if self.task is not None: >> if True: | Before the first save there is no task to ask.
    self.task.result() >> self.task.thread.join() | You wait for the thread, but don't ask for its error.
    """,
    show=lambda saves, full, task=Late: (
        f"{saves} x: w = 1, 2, ...; saver.save(folder, {{'w1': w}}); w = -1.  Then wait() twice"
        + f"  # the write of save {full} fails" * bool(full)
        + "  # the disk is quick" * (task is Early)
    ),
)
