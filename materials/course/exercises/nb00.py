"""Lesson 00: four parts of a training run, and going on after a kill."""

import os
import queue
import threading
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
import safetensors.torch
import torch
from hypothesis import strategies as st

from course.grading.exercise import Exercise
from course.grading.observers import Batches, bytes_read, files, threads
from course.lesson import solution

# Windows


class Watched(np.ndarray):
    """Tokens that count how often they are looked at, as if there were too many to convert."""

    looks = 0

    def astype(self, *args, **options):
        raise MemoryError("you convert the whole file to keep a few windows")

    def __getitem__(self, key):
        Watched.looks += 1
        return np.asarray(self)[key]


def windows_seen(Windows, count, seq_len, indices):
    with files():
        np.save("tokens.npy", np.arange(10, 10 + count, dtype=np.uint16))
        windows = Windows("tokens.npy", seq_len)
        seen = {"len": len(windows)}
        if indices:
            windows.tokens, Watched.looks = np.asarray(windows.tokens).view(Watched), 0
            x, y = windows.fetch(indices)
            seen |= {"x": x, "y": y, "one look into the file": Watched.looks <= 1}
    return seen


@st.composite
def files_of_windows(draw):
    seq_len = draw(st.integers(2, 4))
    count = draw(st.integers(1, 20))
    whole = (count - 1) // seq_len
    indices = draw(st.lists(st.integers(0, whole - 1), min_size=1, max_size=3)) if whole else []
    return count, seq_len, indices


WINDOWS = Exercise(
    solution("00", "Windows"),
    given=files_of_windows(),
    observe=windows_seen,
    show=lambda count, seq_len, indices: (
        f"windows = Windows(path of {[*range(10, 10 + count)]}, seq_len={seq_len})"
        f"; len(windows)" + (f"; windows.fetch({indices})" if indices else "")
    ),
    misconceptions="""
(len(self.tokens) - 1) >> len(self.tokens) | The last window needs one token more: its last target.
// self.seq_len >> // (self.seq_len + 1)   | Neighbouring windows share a token.
np.arange(self.seq_len + 1) >> np.arange(self.seq_len) | A window has one token more than x, or the last target is missing.
windows[:, 1:] >> windows[:, :-1] | y is x one token on; yours is x again.
.astype(np.int64) >> | The tokens are still 2-byte numbers; the model wants int64.
""",
)


# Loader


LOOKS_S = 0.1
"""Seconds that the first batch waits until the loop has looked into the empty queue."""


class Numbers:
    """A dataset whose windows are their own numbers."""

    def __init__(self, size):
        self.size, self.asked, self.in_loop, self.looked = size, [], False, threading.Event()

    def __len__(self):
        return self.size

    def fetch(self, indices):
        if 0 in indices:
            self.looked.wait(LOOKS_S)
        self.asked.append(list(indices))
        self.in_loop |= threading.current_thread() is threading.main_thread()
        if not all(0 <= index < self.size for index in self.asked[-1]):
            raise IndexError(f"window {max(self.asked[-1])} of {self.size}")
        return self.asked[-1]


def loader_seen(Loader, size, batch_size):
    data, get = Numbers(size), queue.Queue.get

    def look(*given, **how):
        data.looked.set()
        return get(*given, **how)

    with threads() as count, patch.object(queue.Queue, "get", look):
        loader = Loader(data, batch_size, 2)
        batches = iter(loader)
        first = list(islice(batches, 1))
        all_at_once = len(data.asked) >= size // batch_size > 4  # the queue holds two of them
        seen = {"batches": first + list(batches)}
        data.looked.clear()
        seen |= {"batches, a second time": list(loader)} | count()
    return seen | {
        "the loop fetches by itself": data.in_loop,
        "all are fetched before the first is handed on": all_at_once,
    }


LOADER = Exercise(
    solution("00", "Loader"),
    given=[(4, 2), (5, 2), (2, 2), (1, 2), (12, 4), (6, 1)],
    observe=loader_seen,
    show="list(Loader(data of {} windows, batch_size={}, prefetch=2))".format,
    misconceptions="""
- self.batch_size + 1 >> | The last batch isn't whole: some of its windows don't exist.
self.batch_size + 1 >> self.batch_size | One whole batch is left, and you leave it out.
, self.batch_size): >> ): | Batches follow each other: the next begins where this one ends.
ready.put(None) >> pass | Nobody tells the loop that it was the last batch: it waits for the next one for good.
(batch := ready.get()) >> not ready.empty() and (batch := ready.get()) | An empty queue isn't the end: the thread may still be fetching.
yield batch >> yield ready.get() | You take a batch from the queue and hand on the next one: every other batch is lost.
""",
)


# write_checkpoint


def checkpoint_seen(write_checkpoint, value):
    at_fsync, real = [], os.fsync

    def fsync(descriptor):
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if not Path("step-000010").exists():
            at_fsync.append(os.fstat(number).st_size)
        real(number)

    with files() as left, patch("os.fsync", fsync):
        write_checkpoint("step-000010", {"w": torch.full((300,), float(value))})
        found, path = left(), Path("step-000010/state.safetensors")
        return {
            "files": list(found),
            "in the file": safetensors.torch.load_file(path)["w"][:2]
            if str(path) in found
            else None,
            "at fsync": f"{max(at_fsync)} bytes are in the file"
            if at_fsync
            else "it is never called, or after the rename",
        }


WRITE_CHECKPOINT = Exercise(
    solution("00", "write_checkpoint"),
    given=[(1,), (2,)],
    observe=checkpoint_seen,
    show='write_checkpoint("step-000010", {{"w": 300 times {}.0}})'.format,
    misconceptions="""
temporary.rename(folder) >> pass | It is still called .tmp: nobody will take it for a checkpoint.
file.flush() >> pass | Python still holds bytes back when you ask for the disk.
os.fsync(file.fileno()) >> pass | Nothing makes sure that the bytes are on the disk before the name says so.
""",
)


# Saver


WAIT_S = 0.25
"""Seconds of patience for what must not happen in a right answer."""


def saver_seen(Saver, saves):
    """Save through a writer that waits for whatever might go wrong, and so sees it."""
    returned, begun, done = ([threading.Event() for _ in range(saves)] for _ in range(3))
    files, looked, seen = {}, threading.Event(), {}
    if saves:
        seen = {"save returns first": True, "the next save writes already": False}

    def write(folder, state):
        k = int(folder)
        begun[k].set()
        in_loop = threading.current_thread() is threading.main_thread()
        seen["written by"] = "the loop itself" if in_loop else "a thread"
        seen["save returns first"] &= returned[k].wait(WAIT_S)
        if k + 1 < saves:
            seen["the next save writes already"] |= begun[k + 1].wait(WAIT_S)
        else:
            looked.wait(WAIT_S)
        if k:
            done[k - 1].wait(WAIT_S)
        seen["what is written is a copy"] = state["w"] is not live["w"]
        files[folder] = state["w"].tolist()
        done[k].set()

    turns, real = iter(returned), threading.Thread.run

    def run_late(thread):  # what a thread copies is what the loop has made of it by then
        next(turns, looked).wait(WAIT_S)
        real(thread)

    live = {"w": torch.zeros(2)}
    with (
        threads() as count,
        patch.dict(Saver.save.__globals__, write_checkpoint=write),
        patch.object(threading.Thread, "run", run_late),
    ):
        saver = Saver()
        saver.wait()
        for number in range(saves):
            live["w"].fill_(number)
            saver.save(str(number), live)
            live["w"].fill_(-1)
            returned[number].set()
            begun[number].wait(WAIT_S)
        saver.wait()
        seen["all is written when wait() returns"] = len(files) == saves
        looked.set()
        seen |= count()
    return seen | {"in the files": dict(sorted(files.items()))}


SAVER = Exercise(
    solution("00", "Saver"),
    given=[(0,), (1,), (2,)],
    observe=saver_seen,
    show=lambda saves: (
        "saver = Saver(); saver.wait()"
        + "".join(f"; w = {k}; saver.save('{k}', {{'w': w}}); w = -1" for k in range(saves))
        + "; saver.wait()" * bool(saves)
    ),
    misconceptions="""
tensor.clone() >> tensor | No copy is written: what the file has is what the weights have become meanwhile.
target=write_checkpoint, args=(folder, copy) >> target=lambda: write_checkpoint(folder, {"w": state["w"].clone()}) | The copy is made in the thread, after save has returned: the weights may have changed by then.
self.thread.start() >> pass | A thread does nothing until it is started.
target=write_checkpoint, args=(folder, copy) >> target=write_checkpoint(folder, copy) | These parentheses call write_checkpoint at once, in the loop: the thread gets only its result.
self.thread.start() >> self.thread.start(); self.thread.join() | save waits for its own thread: the loop stands still as if there were none.
self.wait() >> pass | Two saves at once: the next one begins before the one before is done.
self.thread.join() >> pass | wait() may come back before the file is written.
""",
)


# read_tensor

LARGE = 1_000_000
"""Bytes of a tensor that nobody asks for; Python's file buffer is far smaller."""


def tensor_seen(read_tensor, name):
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7), "long name": torch.ones(4)}
    found = []
    with files():
        safetensors.torch.save_file(state | {"aa": torch.zeros(LARGE // 4)}, "state.safetensors")
        asked = bytes_read(lambda: found.append(read_tensor("state.safetensors", name)))
    value = found[0]
    return {
        "values": value.tolist(),
        "shape": list(value.shape),
        "reads other tensors, too": asked > LARGE / 2,
    }


READ_TENSOR = Exercise(
    solution("00", "read_tensor"),
    given=[("a",), ("b",), ("long name",), ("c",)],
    observe=tensor_seen,
    show='read_tensor(path of a file with "a", "b", "long name" and a large "aa", "{}")'.format,
    misconceptions="""
8 + n + begin >> n + begin | The header's own length, 8 bytes, comes before the header.
8 + n + begin >> begin | data_offsets count from the end of the header, not of the file's beginning.
file.seek(8 + n + begin) >> pass | You read on where the header ends; this tensor may lie further on.
file.seek(8 + n + begin) >> data = file.read(); file.seek(8 + n + begin) | You read the whole rest of the file to keep one piece.
file.read(end - begin) >> file.read() | You read up to the end of the file: other tensors, too.
""",
)


# Going on


def latest_seen(latest, names):
    with files():
        for name in names:
            Path("root", name).mkdir(parents=True)
            Path("root", name, "state.safetensors").touch()
        return latest(Path("root"))


LATEST = Exercise(
    solution("00", "latest"),
    given=[
        ((),),
        (("step-000010",),),
        (("step-000010.tmp",),),
        (("step-000020", "step-000010", "step-000030"),),
        (("step-000060", "step-000050", "step-000070.tmp"),),
    ],
    observe=latest_seen,
    show=lambda names: (
        f"latest(folder {'with ' * bool(names)}{', '.join(names) or 'that is not there yet'})"
    ),
    misconceptions="""
if path.suffix != ".tmp" >> | A save that was cut off isn't finished: training can't go on from it.
, default=None >> | In a new run there is no checkpoint yet.
""",
)


def steps_seen(steps, batches, done, total):
    loader = Batches(batches)
    pairs = iter(steps(loader, done, total))
    first = list(islice(pairs, 1))
    seen = {"batches taken for the first pair": loader.taken} if first else {}
    seen["pairs"] = first + list(pairs)
    return seen | {"fetches on after step `total`": loader.taken > total + 1}


STEPS = Exercise(
    solution("00", "steps"),
    given=st.builds(
        lambda done, more, spare: (done + more + spare, done, done + more),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(0, 3),
    ).filter(lambda case: case[2] > 0),  # a run of no steps is none
    observe=steps_seen,
    show="list(steps(loader, done={1}, total={2}))  # batches in the loader: {0}".format,
    misconceptions="""
start=1 >> start=0 | The first batch is step 1.
step > done >> step >= done | The batch of step `done` was trained on already.
start=1 >> start=done + 1 | After a resume the loader begins at the first batch again: its number stays 1.
step > total >> False | The steps end with `total`.
return >> continue | You go on fetching after step `total`.
enumerate(loader, start=1) >> list(enumerate(loader, start=1)) | You fetch all the batches before the first step: the training waits for them.
""",
)
