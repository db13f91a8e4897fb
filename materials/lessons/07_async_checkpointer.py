# %% [markdown] tags=["opening"]
"""
# 07 · Save without stopping

[06 One tensor out of a large file](06_lazy_checkpoint.ipynb) · **07** · next: [08 Survive the crash](08_survive_the_crash.ipynb)

**Why you should care.** Each save stops training. Your `Saver` from lesson 00 shortened that: it copies, and a thread writes. But it loses every error in that thread, and it asks the system for new memory at each save. Here you break it, and then write one that stops training for a single copy in memory and never loses an error.

**The idea in five lines.** Everything else makes these lines work for every state:

```python
image, copies = lay_out(state, memory)   # where each tensor will stand in the file
for copy in copies:
    copy.run()                           # training waits for this, and for nothing else
task = Task(write)                       # the disk works, and training goes on
task.result()                            # at the next save: wait, and hear of errors
```

**Three questions** on earlier lessons:

1. One thread runs Python code, another writes to a disk. Which of them lets the training loop run?
2. An error happens in a worker thread. Where should it be raised?
3. What are the three parts of a safetensors file?

<details><summary>Answers</summary>

1. The one that writes: it releases the GIL.
2. Where the result is waited for: the caller gets the error instead.
3. Eight bytes that give the header's length, the header in JSON, and the tensors' bytes.

</details>

**You need** lessons 00 and 03. Terms: [glossary](../materials/course/glossary.md).

**About 40 to 50 min**, estimated, in two sittings. Write where you see `...`; each piece is checked as soon as you run its cell. Until yours is right, the solution is used, so every cell runs.

| sitting | what you do | minutes |
|---|---|---|
| 1 | break your saver; a copy that is already the file | 20 |
| 2 | errors that are heard; the saver; copying while training reads | 25 |
| afterwards | the same on a GPU's streams (optional) | 5 |
"""

# %%
import sys

sys.path.append("../materials")

import safetensors.torch

from course.lab import begin, card, check, earlier, predict, promises, reveal, write
from course.play import nb07 as play

from npydata import AsyncCheckpointer, open_checkpoint

begin("07")
FirstSaver = earlier("00", "Saver")

# %% tags=["given", "file:saver.py"]
import json
import mmap
import os
import threading
from pathlib import Path
from typing import NamedTuple

import torch

# %% [markdown]
"""
## Sitting 1 · Break your saver · core

The first cell brought back your `Saver` from lesson 00 (or the solution, if you have none). We test it in three ways. A step changes the weights while it saves. The disk is full. And it saves 48 MiB a second time, while the system counts how much new memory it takes (a *page fault* is one new page of 4 KiB).
"""

# %% tags=["nbval-ignore-output"]
faults = play.three_ways(FirstSaver)

# %% [markdown] tags=["takeaway"]
"""
The first goes well. The other two are the list for this lesson; at the end you call `three_ways` again.

Your `Saver` copies all weights before it starts its thread, and training waits for that copy. Is it needed? Let's remove it: the next cell runs your own `Saver` with a `clone` that copies nothing. Each step sets every element of twelve weights to the step's number, so the file shows which steps it was written from.
"""

# %% tags=["prediction:steps"]
predict(
    "steps",
    "A thread writes the weights themselves, and training goes on. How many steps are in the file?",
    "one",
    "several",
    mine=...,
)

# %% tags=["reveal:steps"]
reveal("steps", play.steps_without_copy(FirstSaver))

# %% [markdown] tags=["term:torn", "term:snapshot"]
"""
That is a **torn** checkpoint: a state that the model was never in. It loads without an error, and the resumed run is a little worse. Nothing you do to the file later can repair it. So *all* weights are copied before the thread starts, however soon the next step may come. Such a copy of a whole state at one moment is a **snapshot**.

| save | training waits for | the file |
|---|---|---|
| only a thread | nothing | is torn |
| a snapshot, then the disk | the copy | holds one step |

## Memory that was used before · core

So the copy stays; what you can do is make it cheap. The system promises new memory before it provides any. When you first write to a page of it, the processor interrupts your program. That is the page fault: the system finds 4 KiB, clears them, and lets you continue. The 48 MiB of our weights are 12,288 pages, and your first `Saver` writes to three times as many.

A checkpointer should keep its memory. The first given class does: it asks the system for more only when a state has grown.
"""


# %% tags=["given", "file:saver.py"]
class Memory:
    """Bytes that are kept from save to save."""

    def __init__(self):
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def first(self, nbytes):
        if nbytes > len(self.bytes):
            self.bytes = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        return self.bytes[:nbytes]


# %% [markdown]
"""
## The snapshot is the file · core

Your `Saver` calls `safetensors.torch.save` in its thread. That copies everything twice more, finally into one large `bytes`, and holds the GIL for part of the time.

It needn't. The header of a safetensors file gives each tensor's name, dtype, shape and position, and all of that is known *before* anything is copied. So lay the file out first, and copy each tensor straight into its place. Then **the snapshot is the file**, and all that is left is to write it.

Two rules decide where each tensor goes. The format allows no gaps between tensors. And each tensor must begin at a multiple of the size of its *elements*: anywhere else torch refuses to view bytes as numbers. A mask of 3 bytes followed by a weight of 4-byte floats breaks the second rule. Sort by the size of an element, the largest first, and both rules hold: each tensor ends where the next may begin.

**Write `slots_for`.** It returns a list of `Slot`s in the order of the file, the first one at `begin` 0. `tensors` is the state, a dictionary from name to tensor. A tensor has a `dtype` (with an `itemsize`), a `shape` and `nbytes`. Tensors with elements of the same size keep their order.
"""


# %% tags=["given", "file:saver.py"]
class Slot(NamedTuple):
    """Where a tensor stands among the tensors' bytes of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple
    begin: int  # in bytes
    nbytes: int


# %% [markdown] tags=["hint:slots_for"]
"""
<details><summary>Hint</summary>

`sorted(tensors, key=...)` sorts the names, upwards, and keeps the order of equals. The key is a function of a name. How do you reverse the order of numbers?

</details>
"""


# %% tags=["exercise:slots_for", "file:saver.py"]
@check
def slots_for(tensors):
    """Return a slot for each tensor, without gaps, each at a multiple of its element's size."""
    ### BEGIN SOLUTION
    slots, begin = [], 0
    for name in sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize):
        tensor = tensors[name]
        slots.append(Slot(name, tensor.dtype, tensor.shape, begin, tensor.nbytes))
        begin += tensor.nbytes
    return slots
    ### END SOLUTION


# %% [markdown] tags=["solution:slots_for"]
"""
Elements have 16, 8, 4, 2 or 1 bytes: each size is a multiple of the next. That's why it works.
"""

# %% [markdown]
"""
The header is given: read it once. It is padded with blanks to the end of a page, so that the tensors' bytes begin at a multiple of every element size. `lay_out` puts the pieces together: it takes memory, writes the header into it, and returns the bytes of the whole file, with a `Copy` for each tensor (you write that class next). It doesn't touch a tensor, but it does write the new header into the memory.
"""

# %% tags=["given", "file:saver.py"]
CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def header_for(slots):
    """Return the beginning of the file: the header's length, the header, and blanks."""
    entries = {
        slot.name: {
            "dtype": CODES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [slot.begin, slot.begin + slot.nbytes],
        }
        for slot in slots
    }
    text = json.dumps(entries).encode()
    length = len(text) + -(8 + len(text)) % mmap.PAGESIZE
    return length.to_bytes(8, "little") + text.ljust(length)


def lay_out(state, memory):
    """Return the bytes of a file, header included, and the copies that fill it."""
    slots = slots_for(state)
    header = header_for(slots)
    image = memory.first(len(header) + sum(slot.nbytes for slot in slots))
    image[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    data = image[len(header) :]
    return image, [
        Copy(state[slot.name], data[slot.begin : slot.begin + slot.nbytes]) for slot in slots
    ]


# %% [markdown]
"""
Here is an awkward state: a mask with an odd number of bytes, a transposed weight, whose rows are scattered in memory, and a vector of 2-byte floats. Where does each tensor go?
"""

# %%
state = {
    "mask": torch.ones(901).bool(),
    "seen": torch.arange(150),
    "weight": torch.randn(24, 32).T,
    "scale": torch.randn(600).bfloat16(),
}
print("header:", len(header_for(slots_for(state))), "bytes, and then")
for slot in slots_for(state):
    print(f"{slot.name:<8}{slot.dtype!s:<16}{slot.begin:>6} to {slot.begin + slot.nbytes:>6}")

# %% [markdown]
"""
Each tensor of the state has a slot, and the next slot begins where it ends. Wide elements come first: int64, float32, bfloat16, and last the mask.

| in the file | for |
|---|---|
| a header, padded to a full page | whoever reads it |
| slots in order of element size, largest first | elements at multiples of their size |
| nothing between them | safetensors, and one long write |

**Write `run`**, the method of `Copy`: this is what training waits for. `source` is a tensor, `slot` the bytes of its slot in memory. View the slot, which is bytes, with the dtype and then the shape of the tensor. Then copy into it with `copy_`, which follows the order of the elements, even where they are scattered. Start from `self.source.detach()`: a parameter belongs to the autograd graph, and the copy should not.
"""

# %% [markdown] tags=["hint:Copy"]
"""
<details><summary>Hint</summary>

`slot.view(dtype)` reads the same bytes as other numbers. A second `view(shape)` gives them a shape. A view has no memory of its own: what you copy into it lands in the slot.

</details>
"""


# %% tags=["exercise:Copy", "file:saver.py"]
@check
class Copy:
    """A tensor, and the bytes of its slot in memory."""

    def __init__(self, source, slot):
        self.source, self.slot = source, slot

    def run(self):
        """Copy the elements into the slot, in order and without gaps."""
        ### BEGIN SOLUTION
        source = self.source.detach()
        target = self.slot.view(source.dtype).view(source.shape)
        target.copy_(source)
        ### END SOLUTION


# %% [markdown] tags=["solution:Copy"]
"""
The library's `run` has the same three lines, and a little more for GPUs. The first view changes what the bytes mean, the second how they are arranged.
"""

# %% [markdown]
"""
Now fill it, and let another library read the memory as if it were a file.
"""

# %%
image, copies = lay_out(state, Memory())
for copy in copies:
    copy.run()
found = safetensors.torch.load(image.numpy().tobytes())
print("read:", {name: torch.equal(found[name], state[name]) for name in state})

# %% [markdown]
"""
That is a complete checkpoint, and not a byte of it is on disk yet. All that is left for a thread to do is write it: one long call into C, which leaves the GIL to training. **This is a good place to stop.** When you come back, run the cells from the top; what you wrote is checked again and runs.

## Sitting 2 · An error that is heard · core

At three in the morning the disk is full. `/dev/full` is a file for this case: whatever you write to it, it reports that no space is left.

You have seen that none of three errors reached the loop. Where did they go?
"""

# %%
play.errors_unheard(FirstSaver)

# %% [markdown]
"""
Three tracebacks in a log that nobody reads at three in the morning, and training goes on. A week later somebody looks for a checkpoint.

The cure is the one from lesson 03: an error is a result. The thread stores it, and whoever waits for the thread raises it.

**Write both methods.** `attempt` runs in the thread: it calls `work()`, and if that raises anything at all, it stores the error in `self.error`. `result` waits until the thread ends, and raises the error if there was one, but only once: when the disk has room again, the next save should work.
"""

# %% [markdown] tags=["hint:Task"]
"""
<details><summary>Hint</summary>

`BaseException` is the base of all errors, `sys.exit()` included. In `result`: where does a second call look, and what should it find there?

</details>
"""


# %% tags=["exercise:Task", "file:saver.py"]
@check
class Task:
    """Work in a thread; whoever waits for it hears of its error, once."""

    def __init__(self, work):
        self.error = None
        self.thread = threading.Thread(target=self.attempt, args=(work,))
        self.thread.start()

    def attempt(self, work):
        ### BEGIN SOLUTION
        try:
            work()
        except BaseException as error:
            self.error = error
        ### END SOLUTION

    def result(self):
        ### BEGIN SOLUTION
        self.thread.join()
        error, self.error = self.error, None
        if error is not None:
            raise error
        ### END SOLUTION


# %% [markdown] tags=["solution:Task"]
"""
The first caller gets the error. After that it is gone, and `result` returns at once.
"""

# %% [markdown]
"""
## The saver · core

You have all the parts but one, which is given: it writes the image under a temporary name, as in lesson 00, and then calls `commit`, which makes it a checkpoint. For now that is a rename; lesson 08 shows what is wrong with it.
"""


# %% tags=["given", "file:saver.py"]
def write_image(image, folder, commit):
    """Write the bytes of a file, make sure the disk has them, and make them a checkpoint."""
    temporary = Path(f"{folder}.tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    with open(temporary / "state.safetensors", "wb") as file:
        file.write(image.numpy())
        file.flush()
        os.fsync(file.fileno())
    commit(temporary, folder)


# %% [markdown]
"""
**Write `save` and `wait`.**

- `save(folder, state)`: wait for the previous save, since both use the same memory; lay out the file in `self.memory`; make the copies; start a task that calls `write_image(image, folder, self.commit)`, and keep it in `self.task`.
- `wait()`: if there is a task, wait for its result. An error of the save is raised here.
"""

# %% [markdown] tags=["hint:Saver"]
"""
<details><summary>Hint</summary>

A `Task` takes a function without arguments: `lambda: write_image(...)`. It starts by itself. Which lines must be done before it starts?

</details>
"""


# %% tags=["exercise:Saver", "file:saver.py"]
@check
class Saver:
    """Saves while training goes on; an error is raised by the next `save` or `wait`."""

    def __init__(self, commit=os.rename):
        self.memory, self.commit = Memory(), commit
        self.task = None

    def save(self, folder, state):
        ### BEGIN SOLUTION
        self.wait()
        image, copies = lay_out(state, self.memory)
        for copy in copies:
            copy.run()
        self.task = Task(lambda: write_image(image, folder, self.commit))
        ### END SOLUTION

    def wait(self):
        ### BEGIN SOLUTION
        if self.task is not None:
            self.task.result()
        ### END SOLUTION


# %% [markdown] tags=["solution:Saver"]
"""
If the previous save failed, `save` raises its error and starts nothing. The next call starts afresh.
"""

# %% [markdown]
"""
What broke, once more. The first `Saver` caused more than 36,000 page faults when it saved a second time.
"""

# %% tags=["prediction:second"]
predict(
    "second",
    "How many does the new one cause?",
    "about 36,000",
    "about 12,000",
    "hardly any",
    mine=...,
)

# %% tags=["nbval-ignore-output", "reveal:second"]
now = play.three_ways(Saver)
reveal("second", "hardly any" if now < faults / 10 else "about 12,000")

# %% [markdown]
"""
And the time? Your `Saver` from lesson 00 and the new one take turns with 48 MiB. Both copy the same bytes before they return.
"""

# %% tags=["nbval-ignore-output"]
play.stalls(your_first=FirstSaver(), your_new_one=Saver())

# %% [markdown]
"""
That is how long training waits at each save. The first copies into new memory: much of its wait goes to page faults. What is left is one copy, into memory that you already have.

## Copy while training reads · core

Can the copy be hidden, too? Look at a step. The forward and backward passes only *read* the weights. They change in `optimizer.step()`. So a thread may copy while they run, if the step waits for it. Your `Saver` would need to know about the optimizer. The library's does, with `snapshot="overlap"`; run it once:
"""

# %% tags=["nbval-ignore-output"]
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
folder = play.scratch()

saver = AsyncCheckpointer(snapshot="overlap")
saver.protect(optimizer)  # from now on its step waits for copies
saver.save(folder / "overlap", model.state_dict())
step_1 = model.weight.clone()

model(torch.randn(8, 1024)).sum().backward()  # reads the weights, beside the copy
optimizer.step()  # waits until they are copied, then changes them
saver.wait()

# %%
held = open_checkpoint(folder / "overlap" / "model.safetensors")["weight"]
print("the file holds step 1:", torch.equal(held, step_1))
print("the file holds step 2:", torch.equal(held, model.weight))

# %% [markdown]
"""
What does *not* wait is a change outside the step. torch counts such changes: a tensor's `_version` grows with every in-place change. The library notes the counts when a save begins and compares them before it commits; its test is one line:

```python
if copy.version is not None and copy.source._version != copy.version:
```

If you add 1 to a weight yourself before the next step, `model.weight.add_(1)`, you don't get a torn checkpoint: the save fails, and the message names the tensor, `weight`, and what is allowed to change it.

But there are changes that torch doesn't count: those through `weight.data`, and those through a numpy array that shares its memory. So with overlap, change weights in the step and nowhere else.

| a change | tears the copy | is noticed |
|---|---|---|
| in place | yes | yes: the save fails |
| through `.data`, or numpy | yes | no |
| in the step of a protected optimizer | no: the step waits | |

### Prove it

Each line below is a promise, tested on your `saver.py`. All four of your builds are in it.
"""

# %%
write("saver.py")
promises()

# %% [markdown]
"""
**What would you notice?** The card changes one line of the *solution* (yours may use other names). Pick what you would see; then the solution runs with that line.
"""

# %% tags=["play"]
card("an error for ever", mine=...)

# %% [markdown]
"""
**This is a good place to stop.** What follows is for those who train on a GPU.

## Afterwards: a GPU's streams · optional

A GPU works through *streams*: queues that run side by side. Python puts work in, and goes on. Copies to the *host*, the CPU's memory, get their own stream. Between two streams there is no order unless one waits for the other. This is a save with the four waits it needs; only the last one stops Python:

```python
step(weights, 1)
average = weights[0] * 1               # made for this save alone
side.wait_stream(training)             # wait 1
with side:
    copy_all([*weights, average], memory)
    copied = side.record_event()
average.record_stream(side)            # wait 2: until then its memory is given to no other tensor
del average
forward(weights)                       # takes memory that is free
training.wait_event(copied)            # wait 3
step(weights, 2)
copied.synchronize()                   # wait 4
write(memory)
```

Leave one out, and the file may be right many times before it is wrong. Cover the right column: what could each omission let through?

| without | the file may hold |
|---|---|
| 1 | the weights of the previous step, and an average that was not computed yet |
| 2 | an average whose memory another tensor has overwritten |
| 3 | the next step's weights |
| 4 | what the previous save left in memory |
"""

# %% [markdown] tags=["closing"]
"""
**You can now explain**

- why a thread alone saves a state that the model was never in;
- why a copy into new memory is slower than one into memory you already have;
- how a file is laid out before a tensor is copied;
- where an error of a background thread is raised, and how often;
- what may be copied while training continues.

**The number to remember**: **1** copy in memory is all that training waits for.

**Yours to keep**: `lab/mine/saver.py`. Lesson 10 compares it with the naive save and the library's. The library's [snapshot.py](../npydata/checkpointer/snapshot.py) is built on the same layout and the same `run`. It also splits large copies among several cores, starts writing while the rest is still being copied, and writes tied weights once.

**The next pain.** While the thread writes, the process may die, or the power fail. What is left of the last checkpoint then? In lesson 08 you write what makes it safe.

[06 One tensor out of a large file](06_lazy_checkpoint.ipynb) · **07** · next: [08 Survive the crash](08_survive_the_crash.ipynb)
"""
