"""Lesson 07: a snapshot that is the file, and a thread whose errors are heard."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from course.grading.compare import kind
from course.grading.exercise import Exercise
from course.grading.observers import threads
from course.lesson import solution
from course.play.pieces import Training, save_torn

# A save of one moment


def file_seen(answer: Any, moment: int) -> dict[str, Any]:
    training = Training(moment)
    answer(training.weights, training.memory, training.write)
    return {
        "steps of the pieces on the disk": training.file,
        "written from": sorted(training.came_from),
        "the weights are of step": sorted({int(one) for w in training.ours[0] for one in w}),
    }


def copied_in_turn(weights: Any, memory: Any, write: Any) -> None:
    for place, weight in zip(memory, weights, strict=True):
        write(place.copy_(weight))


def new_memory(weights: Any, memory: Any, write: Any) -> None:
    for copy in [weight.clone() for weight in weights]:
        write(copy)


SAVE_HEADLESS = Exercise(
    solution("07", "save_headless"),
    [(6,), (0,), (11,), (4,)],
    file_seen,
    """
    place.copy_(weight) >> weight.copy_(place) | You copy from the memory into the weights: `copy_` fills the tensor in front of the dot.
    write(place) >> pass | Nothing reaches the disk.
    """,
    others={
        "You write the weights themselves, and training changes them meanwhile.": save_torn,
        "You copy a weight when its turn comes; by then the step may have changed it.": (
            copied_in_turn
        ),
        "Your copies are new memory; `memory` is there to be used.": new_memory,
    },
    show=lambda moment: (
        f"save_headless(weights, memory, write)  # step 2 comes when {moment} pieces are written"
    ),
)


# Where tensors go


def slots_seen(answer: Any, tensors: dict[str, torch.Tensor]) -> Any:
    slots = answer(tensors)
    if not isinstance(slots, list):
        return slots
    facts = {name: (str(dtype), tuple(shape), *rest) for name, dtype, shape, *rest in slots}
    return {"order": list(facts)} | facts


SLOTS_FOR = Exercise(
    solution("07", "slots_for"),
    [
        ({"weight": torch.ones(2, 3)},),
        ({"b": torch.ones(2), "a": torch.ones(3)},),
        ({"a": torch.ones(2), "b": torch.ones(3)},),
        ({"mask": torch.ones(3).bool(), "weight": torch.ones(2)},),
        ({"ids": torch.ones(40).byte(), "step": torch.tensor(1)},),
        (
            {
                "half": torch.ones(5).half(),
                "mask": torch.ones(7).bool(),
                "big": torch.ones(2).double(),
            },
        ),
    ],
    slots_seen,
    """
    sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize) >> tensors | In the order of the state a mask of 3 bytes may stand before 4-byte numbers, which then begin at no multiple of 4.
    -tensors[name].dtype.itemsize >> tensors[name].dtype.itemsize | The smallest elements come first: what follows an odd number of bytes begins anywhere.
    .dtype.itemsize >> .nbytes | You sort by the size of the whole tensor; what counts is the size of one element.
    : -tensors[name].dtype.itemsize >> : (-tensors[name].dtype.itemsize, name) | Tensors with elements of one size keep the order that they have in the state.
    begin += tensor.nbytes >> begin += tensor.numel() | You count elements; a slot begins at a byte.
    begin, tensor.nbytes >> begin, begin + tensor.nbytes | The last field is a length; yours is an end.
    """,
    show=lambda tensors: "slots_for({{{}}})".format(
        ", ".join(f"{n}: {str(t.dtype)[6:]} {tuple(t.shape)}" for n, t in tensors.items())
    ),
)

# What training waits for

SOURCES = {
    "numbers": lambda: torch.arange(6.0).reshape(2, 3) / 8,
    "a transposed tensor": lambda: torch.arange(6.0).reshape(2, 3).T / 8,
    "a parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "2-byte floats": lambda: torch.arange(5).bfloat16() / 4,
    "a single number": lambda: torch.tensor(2.5),
}


def copy_seen(answer: Any, kind: str, non_blocking: bool) -> dict[str, Any]:
    source, seen, real = SOURCES[kind](), [], torch.Tensor.copy_

    def copy_(target: Any, other: Any, non_blocking: bool = False) -> Any:
        real(target, other, non_blocking=non_blocking)
        seen.append((non_blocking, target.requires_grad))
        return target

    slot = torch.full((source.nbytes,), 255, dtype=torch.uint8)
    with patch.object(torch.Tensor, "copy_", copy_):
        answer(SimpleNamespace(source=source, slot=slot), non_blocking=non_blocking)
    return {
        "in the slot": slot.view(source.dtype).reshape(source.shape).tolist(),
        "non_blocking came to copy_": non_blocking and any(flag for flag, _ in seen),
        "the copy has a gradient": any(grad for _, grad in seen),
    }


def as_it_lies(self: Any, *, non_blocking: bool = False) -> None:
    source = self.source.detach()
    flat = source.as_strided((source.numel(),), (1,))
    self.slot.view(source.dtype).copy_(flat, non_blocking=non_blocking)


METHOD = solution("07", "run")
RUN = Exercise(
    replace(METHOD, source=METHOD.source.partition("\nCopy.")[0]),
    [(kind, flag) for flag in (False, True) for kind in SOURCES],
    copy_seen,
    """
    self.source.detach() >> self.source | The copy of a parameter becomes part of a graph of gradients.
    , non_blocking=non_blocking >> | `non_blocking` doesn't reach `copy_`: a copy from a GPU would stop Python.
    self.slot.view(source.dtype).view(source.shape) >> self.slot[: source.numel()].view(source.shape) | The slot is still bytes: `copy_` squeezes each number into one of them.
    target.copy_(source, non_blocking=non_blocking) >> target = source | That gives the tensor another name; nothing gets into the slot.
    """,
    others={
        "You copy the numbers as they lie in memory; those of a transposed tensor lie in another "
        "order.": as_it_lies,
    },
    show=lambda kind, flag: f"Copy({kind}, slot).run({'non_blocking=True' * flag})",
)


# An error that is heard

SLOW_S = 0.05


def came_of(call: Any, *given: Any) -> str:
    try:
        value = call(*given)
        return "returns" if value is None else f"returns {kind(value)}"
    except BaseException as error:
        return f"raises {type(error).__name__}"


def task_seen(answer: Any, error: type[BaseException] | None) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    begun, done = threading.Event(), []

    def work() -> None:
        begun.wait(1)
        threading.Event().wait(SLOW_S)  # a slow disk: who doesn't wait for it is back first
        done.append(1)
        if error:
            raise error("no space left")

    with threads() as count, patch("threading.excepthook", lambda _: None):
        task = answer(work)
        begun.set()
        for number in ("first", "second"):
            seen[f"{number} result()"] = came_of(task.result)
            seen.setdefault("it returns when the work is done", bool(done))
        seen |= count()
    return seen


TASK = Exercise(
    solution("07", "Task"),
    [(None,), (OSError,), (SystemExit,)],
    task_seen,
    """
    except BaseException >> except Exception | `sys.exit()` is no Exception: it ends the thread, and nobody hears of it.
    self.error = error >> raise | The error ends the thread, and only a log hears of it: keep it.
    self.thread.join() >> pass | You ask for the result before there is one.
    error, self.error = self.error, None >> error = self.error | A second call raises the same error again: every later save would fail.
    raise error >> return error | An error that is returned is easily overlooked: raise it.
    """,
    show=lambda error: (
        f"task = Task(work); task.result(); task.result()"
        f"  # work {f'raises {error.__name__}' if error else 'succeeds'}"
    ),
)


# The saver


def saver_seen(answer: Any, saves: int, full: int | None) -> dict[str, Any]:
    """Save weights that change as soon as `save` is back; the write of save `full` fails."""
    back, begun = ([threading.Event() for _ in range(saves + 1)] for _ in range(2))
    writing = threading.Lock()
    written, places, seen = {}, set(), {"writes at once": 1}
    current: list[threading.Event] = []

    class Late(solution("07", "Saver").names["Task"]):
        """A task whose thread is so late that the weights have changed."""

        def __init__(self, work: Any) -> None:
            self.back = current[-1]
            super().__init__(work)

        def attempt(self, work: Any) -> None:
            self.back.wait(0.3)
            super().attempt(work)

    def write_image(image: Any, folder: str, commit: Any) -> None:
        if not writing.acquire(blocking=False):
            seen["writes at once"] = 2
        number = int(folder)
        seen["save returns before it is written"] = back[number].wait(0.3)
        begun[number].set()
        begun[number + 1].wait(SLOW_S)  # a slow disk: a save that doesn't wait begins meanwhile
        written[folder] = image[-8:].view(torch.float32).tolist()
        places.add(image.data_ptr())
        writing.locked() and writing.release()
        if number == full:
            raise OSError("no space left")

    state = {"w": torch.zeros(2)}
    with (
        threads() as count,
        patch.dict(answer.save.__globals__, write_image=write_image, Task=Late),
    ):
        saver = answer()
        seen["a wait before"] = came_of(saver.wait)
        for number in range(saves):
            current.append(back[number])
            state["w"].fill_(number)
            seen[f"save {number}"] = came_of(saver.save, str(number), state)
            state["w"].fill_(-1)
            back[number].set()
            begun[number].wait(0.3)
        seen["wait"] = came_of(saver.wait)
        if seen["writes at once"] == 1:  # else what is written is chance
            seen |= {"written": dict(written), "places in memory": len(places)}
        seen["a second wait"] = came_of(saver.wait)
        return seen | count()


SAVER = Exercise(
    solution("07", "Saver"),
    [(1, None), (2, None), (1, 0), (3, 0), (0, None)],
    saver_seen,
    """
    self.wait() >> pass | The next save fills the memory while the one before is still being written.
    Task(lambda: write_image(image, folder, self.commit)) >> Task(lambda: ([copy.run() for copy in copies], write_image(image, folder, self.commit))) | The thread copies, when the weights may have changed: copy before it starts.
    copy.run() >> pass | Nothing is copied: the file holds whatever was in the memory.
    lay_out(state, self.memory) >> lay_out(state, Memory()) | New memory for each save: every page of it is a page fault.
    Task(lambda: write_image(image, folder, self.commit)) >> Task(write_image(image, folder, self.commit)) | These parentheses call `write_image` at once, in the loop: the task gets only its result.
    self.task.result() >> self.task.thread.join() | You wait for the thread, but don't ask for its error.
    if self.task is not None: >> if True: | Before the first save there is no task to wait for.
    """,
    show=lambda saves, full: (
        f"{saves} x: w = 0, 1, ...; saver.save(folder, {{'w': w}}); w = -1.  Then wait() twice"
        + (f"  # the write of save {full} fails" if full is not None else "")
    ),
)
