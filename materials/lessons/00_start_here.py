# %% [markdown] tags=["opening"]
"""
# 00 · Start here: a training run in an evening

**00** · next: [01 A token file larger than memory](01_memmap_dataset.ipynb)

**Why you should care.** An idle GPU costs as much as a busy one, and a training script does not tell you which one you have. Tonight you take an ordinary script, see where its time goes, and replace the four parts that make it wait. Then you kill your own training with `kill -9`, start it again, and it resumes as if nothing had happened.

**What you will have at the end** is `lab/mine/train.py`, a training script that runs on its own. Four parts of it are yours:

```python
class Windows:                    # a batch in one look into the file
class Loader:                     # the next batch is ready before you ask
class Saver:                      # a checkpoint is written while training goes on
def read_tensor(path, name):      # one tensor out of a checkpoint, without the rest
```

Most of each is given; you write three to six lines. They are small, and every later lesson begins by breaking one of them.

**You need** Python and a little PyTorch: you have seen a `Dataset`, a `DataLoader` and an optimizer. Nothing about threads, files or operating systems. No GPU and no network. Terms: [glossary](../materials/course/glossary.md).

**Core: about 75 to 90 min**, estimated, in three sittings; after each there is a good place to stop. Where you see `...`, write your code; it is checked at once. Until yours is right, the solution is used, so every cell runs.

| sitting | what you do | minutes |
|---|---|---|
| 1 | see where the time goes; `Windows` | 25 |
| 2 | `Loader` and `Saver` | 30 |
| 3 | `read_tensor`; kill the run, and resume | 30 |
| afterwards | what a faster part is worth; count, don't clock (optional) | 10 |

**How it goes on.** Each later lesson takes one part and makes it fit for real work.

| lesson | what you build | minutes |
|---|---|---|
| **00 start here** | all four parts, small; a run that survives `kill -9` | 90 |
| [01 A token file larger than memory](01_memmap_dataset.ipynb) | training samples from a file larger than memory | 40 to 55 |
| [02 An order without a list](02_order_without_a_list.ipynb) | every sample once, in a computed order | 45 to 55 |
| [03 The next batch is ready before you ask](03_async_loader.ipynb) | a loader that keeps the order with any number of threads | 45 to 55 |
| [04 How fast is it, and how would you know?](04_throughput.ipynb) | measurements that you can trust | 40 to 50 |
| [05 A pickle is a program](05_pickle_program.ipynb) | a checkpoint from somebody else, read without running it | 45 to 55 |
| [06 One tensor out of a large file](06_lazy_checkpoint.ipynb) | one tensor out of 20 GB, without reading 20 GB | 45 to 60 |
| [07 Save without stopping](07_async_checkpointer.ipynb) | saving while the model trains | 40 to 50 |
| [08 Survive the crash](08_survive_the_crash.ipynb) | a commit that leaves the old checkpoint or the new one, whenever a kill or a power cut hits | 45 to 55 |
| [09 Scale out](09_scale_out.ipynb) | the same on several GPUs (optional) | 30 to 40 |
| [10 Train, crash, resume](10_train_crash_resume.ipynb) | all of it in one run that is killed and resumed | 40 to 50 |
| [11 Documents and mixtures](11_documents_and_mixtures.ipynb) | rows of whole documents, and several sources by weight (optional) | 40 to 55 |
"""

# %%
import sys

sys.path.append("../materials")

from course.lab import begin, card, check, predict, promises, reveal, sliders, write
from course.play import nb00 as play

begin("00")

# %% [markdown]
"""
Run cells with Shift+Enter, from top to bottom.

The next cell only imports what your parts may use. Your file will begin with it, too. If a part of yours needs a helper or another import, write it into the cell of that part: of your code, only these cells go into the file.
"""

# %% tags=["given", "file:train.py"]
import json
import os
import queue
import threading
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from model import Stopwatch, main, new_model, resume, state_of, train_step  # given

# %% [markdown] tags=["term:token", "term:window", "term:step", "term:data wait", "term:stall"]
"""
## Sitting 1 · Where does the time go? · core

Three terms first.

- A **token** is a piece of text, stored as a number. Our data file holds 262,144 of them: sentences like *these clever foxes rarely sing under the cliff*. Each word is a 2-byte number from 0 to 63.
- A **window** is a run of consecutive tokens, cut out of the file as one training sample. The model reads all but the last (`x`), and learns to predict all but the first (`y`).
- A **step** is one round of the training loop: get a batch of windows, compute the loss, update the weights.

This is a typical script. No line of it is wrong:

```python
for step, (x, y) in enumerate(DataLoader(dataset, batch_size=64), start=1):
    loss = train_step(model, optimizer, x, y)
    if step % 10 == 0:
        torch.save(state, folder / f"step_{step:02d}.pt")     # a checkpoint: 25 MB
for file in sorted(folder.glob("step_*.pt")):
    weight = torch.load(file)["model.mlp.0.weight"]           # 8 KB of it
```

It takes 60 steps and saves 6 *checkpoints*: files from which training can resume. At the end it reads one small weight out of each, as an evaluation would. So its time has four parts:

- **data wait**: the loop stands still until the next batch arrives;
- compute: `train_step`, the part you want;
- save **stall**: the loop stands still until a checkpoint is written. A stall is any wait that stops training for something that is not training;
- load: checkpoints are read back.

**Draw your own bar first.** A wrong guess teaches more than none.
"""

# %% tags=["play", "prediction:bar"]
predict("data wait", "What share of the run is data wait, in percent?", unit="%", mine=...)
predict("compute", "And compute?", unit="%", mine=...)
predict("save stall", "And the save stall?", unit="%", mine=...)
predict("load", "And the load?", unit="%", mine=...)

# %% [markdown]
"""
Now measure it: 30 steps, which take a few seconds. The script trains for real, and one CPU core plays the GPU. Times are in milliseconds per step. They are illustrative; yours will differ.
"""

# %% tags=["nbval-ignore-output", "reveal:bar"]
before = play.measure()
play.draw_beside_guess(before)

# %% [markdown] tags=["takeaway"]
"""
Nothing in the script complains, yet a good part of the bar is not compute. The bar splits one run into four parts: what the loop was doing, or waiting for.

| part | what the loop does meanwhile | what shortens it |
|---|---|---|
| data wait | waits for 64 windows, 60 times | `Windows`, `Loader` |
| compute | trains | nothing: this is what you pay for |
| save stall | waits for 25 MB to be written, 6 times | `Saver` |
| load | waits for 25 MB to be read, 6 times | `read_tensor` |

## `Windows`: a batch in one look · core

The data wait hides in the `for` line. The script's dataset is asked for one window at a time, so this runs 64 times per batch:

```python
def __getitem__(self, index):
    tokens = np.load(self.path, mmap_mode="r").reshape(-1)      # open the file
    window = tokens[index * 32 : index * 32 + 33]               # one small read
    window = torch.from_numpy(window.astype(np.int64))          # one small tensor
    return window[:-1], window[1:]
```

Then the `DataLoader` glues 64 pairs of small tensors together. Your `Windows` opens the file once, and gets all windows of a batch with *one* indexing operation: NumPy accepts a whole table of positions. With `tokens = [10, 11, 12, 13, 14, 15, 16]`,

```python
tokens[np.array([[0, 1, 2], [4, 5, 6]])]        # [[10, 11, 12], [14, 15, 16]]
```

`mmap_mode="r"` makes the file look like an array without reading it; lesson 01 explains how.

**Write two bodies.** Window `k` begins at token `k * seq_len` and takes `seq_len + 1` tokens: `seq_len` to read and one more, since the targets are shifted by one. So neighbouring windows share a token.

- `len(windows)`: how many whole windows are in the file? With 9 tokens and `seq_len = 4` there are two: tokens 0 to 4, and 4 to 8. With 8 tokens there is one.
- `fetch(indices)`: the windows of a batch, as two tensors `x` and `y` of dtype int64, each of shape `(len(indices), seq_len)`.
"""

# %% [markdown] tags=["hint:Windows"]
"""
<details><summary>Hint</summary>

Write down the table of positions for `indices = [0, 1]` and `seq_len = 4`: it has two rows of five numbers. A column of starts plus a row of offsets gives it: `np.array([0, 4])[:, None] + np.arange(5)`. Then index `self.tokens` with it, `.astype(np.int64)`, `torch.from_numpy`. Then `x` is all columns but the last.

</details>
"""


# %% tags=["exercise:Windows", "file:train.py"]
@check
class Windows:
    def __init__(self, path, seq_len):
        self.tokens = np.load(path, mmap_mode="r").reshape(-1)
        self.seq_len = seq_len

    def __len__(self):
        ### BEGIN SOLUTION
        return (len(self.tokens) - 1) // self.seq_len
        ### END SOLUTION

    def fetch(self, indices):
        ### BEGIN SOLUTION
        starts = np.asarray(indices) * self.seq_len
        table = starts[:, None] + np.arange(self.seq_len + 1)
        windows = torch.from_numpy(self.tokens[table].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]
        ### END SOLUTION


# %% [markdown] tags=["solution:Windows"]
"""
The first window needs `seq_len + 1` tokens, and each further one `seq_len` more. `fetch` runs a handful of Python-level operations per batch instead of hundreds.
"""

# %% [markdown]
"""
The same run again, with your `Windows`. Batches now come from `fetch`, one after the other; everything else is unchanged.
"""

# %% tags=["nbval-ignore-output"]
windows = Windows(play.TOKENS, 32)
print(len(windows), "windows; a batch:", *(tuple(part.shape) for part in windows.fetch(range(64))))
now = before | play.measure("data wait", batches=play.one_after_the_other(windows))
play.draw(before=before, now=now)

# %% [markdown] tags=["takeaway"]
"""
Only the part that you replaced is measured again; the other three are drawn as before. The data wait is almost gone: 64 opens, 64 reads and 128 small tensors have become one indexing operation.

That was the largest wait of this run, and you wrote five lines. **This is a good place to stop.** When you come back, run the cells from the top; what you wrote is checked again and runs.

## Sitting 2 · `Loader`: ready before you ask · core

Our file is small and fits in memory. A terabyte file does not: its batches may have to come from a disk, or over a network. So take a slower source: the same windows, but each batch has a wait nearly as long as a step's compute.

Nothing forces the loop to stand still meanwhile. The next batch does not depend on the result of this step, so it can be fetched *while the model computes*, in a **thread**: a function that runs alongside the rest of your program. These three lines of Python are all you need:

```python
threading.Thread(target=produce, daemon=True).start()   # produce() now runs beside us
ready = queue.Queue(maxsize=4)                          # a line of at most 4 things
ready.put(batch); ready.get()                           # put waits while it is full, get while it is empty
```

The queue is what makes it safe: one side puts batches in, the other takes them out in the same order, and neither needs to know about the other. Its `maxsize` makes it *bounded*: a fast producer can't fill your memory.

**Predict.** Fetching a batch now takes 0.8 times as long as a step's compute.
"""

# %% tags=["prediction:pace"]
predict(
    "pace",
    "With the next batch fetched while the model computes, how long does a step take?",
    "as long as both together",
    "as long as the slower of the two",
    "as long as the faster of the two",
    mine=...,
)

# %% [markdown]
"""
**Write the two sides of the queue.** `produce` runs in the thread; the lines after `.start()` run in the training loop.

- `produce` fetches batch after batch, in order, with `self.data.fetch(indices)`, and puts each into `ready` as soon as it has it: windows 0 to `batch_size - 1`, then the next `batch_size`, and so on. If too few are left for a whole batch, it stops. At the end it puts `None`, to tell the other side.
- The loop's side takes batches out and hands each to the training loop with `yield`, until it gets `None`.
"""

# %% [markdown] tags=["hint:Loader"]
"""
<details><summary>Hint</summary>

`range(first, first + self.batch_size)` are the indices of a batch, and `fetch` takes a range. Which values does `first` take? `range(start, stop, step)` can count in steps of `batch_size`; `stop` is just beyond the last `first` for which a whole batch is left.

The other side: `batch = ready.get()`, in a loop that ends at `None`.

</details>
"""


# %% tags=["exercise:Loader", "file:train.py"]
@check
class Loader:
    def __init__(self, data, batch_size, prefetch):
        self.data, self.batch_size, self.prefetch = data, batch_size, prefetch

    def __iter__(self):
        ready = queue.Queue(maxsize=self.prefetch)

        def produce():
            ### BEGIN SOLUTION
            for first in range(0, len(self.data) - self.batch_size + 1, self.batch_size):
                ready.put(self.data.fetch(range(first, first + self.batch_size)))
            ready.put(None)
            ### END SOLUTION

        threading.Thread(target=produce, daemon=True).start()
        ### BEGIN SOLUTION
        while (batch := ready.get()) is not None:
            yield batch
        ### END SOLUTION


# %% [markdown] tags=["solution:Loader"]
"""
`daemon=True` means that the thread does not keep your program alive when the rest of it is done. What happens to the loop if `produce` dies with an error? Lesson 03 opens with that question.
"""

# %% tags=["nbval-ignore-output", "reveal:pace"]
slow = play.SlowDisk(windows, ms=0.8 * before["compute"])
in_turns = play.measure("data wait", "compute", batches=play.one_after_the_other(slow))
beside = play.measure("data wait", "compute", batches=Loader(slow, 64, prefetch=4))
play.draw(**{"in turns": in_turns, "with Loader": beside})
hidden = 1 - beside["data wait"] / in_turns["data wait"]
print(f"{hidden:.0%} of the wait for the disk is hidden behind the computing")
reveal("pace", "as long as " + ("the slower of the two" if hidden > 0 else "both together"))

# %% [markdown] tags=["takeaway"]
"""
The disk takes as long as before, but the loop no longer waits for it: the thread does, while the model computes. If the disk were slower than the model, it would set the pace. The slower of the two always does.

There are two ways to shorten a run, and you have now used both. *Make a part shorter*: `Windows`. *Hide a part behind another*: `Loader`. Saving will use the second again.

**What would you notice?** The next cell changes one line of a `Loader`. Pick what you would see; then it runs with that line.
"""

# %% tags=["play"]
card("a queue without an end", mine=...)

# %% [markdown]
"""
## `Saver`: first make it safe · core

A checkpoint left half-written by a power cut is worse than none if its name says that it is complete. So a careful program never writes under the final name:

1. write to a *temporary* name, here `step-000020.tmp` (a checkpoint is a folder from now on);
2. ask the system to put the bytes on the disk: `file.flush()` hands them from Python to the system, `os.fsync(file.fileno())` waits until they are on the disk;
3. *rename* it: `temporary.rename(folder)`. A rename happens entirely or not at all.

So if a folder has the name `step-000020`, it is complete. (Lesson 08 explains why, and what is still missing.)

The format is *safetensors*: `safetensors.torch.save(state)` turns a dictionary of tensors into bytes.

**Write the four lines:** three inside the `with`, and the rename after it.
"""

# %% [markdown] tags=["hint:write_checkpoint"]
"""
<details><summary>Hint</summary>

`file.write(...)` takes bytes: what turns `state` into bytes? Then the two calls of step 2, in that order.

</details>
"""


# %% tags=["exercise:write_checkpoint", "file:train.py"]
@check
def write_checkpoint(folder, state):
    temporary = Path(f"{folder}.tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    with open(temporary / "state.safetensors", "wb") as file:
        ### BEGIN SOLUTION
        file.write(safetensors.torch.save(state))
        file.flush()
        os.fsync(file.fileno())
        ### END SOLUTION
    ### BEGIN SOLUTION
    temporary.rename(folder)
    ### END SOLUTION


# %% [markdown] tags=["solution:write_checkpoint"]
"""
If the process dies anywhere before the last line, it leaves a folder that ends in `.tmp`, which can't be mistaken for a checkpoint.
"""

# %% [markdown]
"""
## `Saver`: then hide it · core

Writing 25 MB takes a while, and training could go on meanwhile if a thread did the writing. But there is a trap. What you hand over isn't a snapshot: it is the *live* weights. While the thread writes them, the next step changes them.

**Predict.**
"""

# %% tags=["prediction:torn"]
predict(
    "torn",
    "A thread writes the live weights while training goes on. Which step is in the file?",
    "the step at which it was saved",
    "a later step",
    "some weights of one step, some of another",
    mine=...,
)

# %% tags=["nbval-ignore-output", "reveal:torn"]
reveal("torn", play.save_live_weights())

# %% [markdown]
"""
So take a copy first. Copying 25 MB in memory takes a few milliseconds; that is all the loop waits for.

**Write `save` and `wait`.**

- `save(folder, state)`: wait until the previous save is done; copy each tensor of the dictionary (`tensor.clone()`); start a thread that calls `write_checkpoint(folder, copy)` (`Thread` takes the arguments as `args=(...)`), and keep it in `self.thread`. `start()` returns nothing.
- `wait()`: wait until the thread is done, if there is one. `thread.join()` does that. (An error in the thread is lost here; lesson 07 opens with it.)
"""

# %% [markdown] tags=["hint:Saver"]
"""
<details><summary>Hint</summary>

`{name: tensor.clone() for name, tensor in state.items()}` copies. `threading.Thread(target=write_checkpoint, args=(folder, copy))` makes the thread; it runs once it is started. Why no `daemon=True` here?

</details>
"""


# %% tags=["exercise:Saver", "file:train.py"]
@check
class Saver:
    def __init__(self):
        self.thread = None

    def save(self, folder, state):
        ### BEGIN SOLUTION
        self.wait()
        copy = {name: tensor.clone() for name, tensor in state.items()}
        self.thread = threading.Thread(target=write_checkpoint, args=(folder, copy))
        self.thread.start()
        ### END SOLUTION

    def wait(self):
        ### BEGIN SOLUTION
        if self.thread is not None:
            self.thread.join()
        ### END SOLUTION


# %% [markdown] tags=["solution:Saver"]
"""
Without `daemon=True` Python waits for the thread before the program ends: the last checkpoint is written completely.
"""

# %% tags=["nbval-ignore-output"]
now |= play.measure("save stall", batches=Loader(windows, 64, prefetch=4), saver=Saver())
play.draw(before=before, now=now)

# %% [markdown] tags=["takeaway"]
"""
The save stall is now the copy, plus a wait if the previous save hasn't finished ten steps later. The writing itself runs alongside training.

**What would you notice?** One line of `Saver` changed.
"""

# %% tags=["play"]
card("no copy", mine=...)

# %% [markdown]
"""
Two of the waits are gone, and **this is a good place to stop**. What is left: one read, and the kill.

## Sitting 3 · `read_tensor`: only what you need · core

`torch.load` reads a whole checkpoint to give you 8 KB of it. The safetensors format is designed so that you don't have to. It is simple enough to read by hand:

| bytes | what they are |
|---|---|
| 8 | a number `n`, little-endian: how long the header is |
| `n` | the header: JSON, for each tensor its `dtype`, its `shape` and its `data_offsets` |
| the rest | the tensors' bytes; `data_offsets` `[begin, end]` count from the start of this part |

Here is one header, shortened:
"""

# %% tags=["nbval-ignore-output"]
path = play.one_checkpoint(write_checkpoint)
play.show_header(path)

# %% [markdown]
"""
**Write the middle of `read_tensor`**: from the open file get `info`, the header's entry for `name`, and `data`, this tensor's bytes. Read no other tensor's: a checkpoint may be 20 GB. `int.from_bytes(eight_bytes, "little")` turns bytes into a number, `json.loads` parses a header, and `file.seek(place)` goes to a place in the file, counted from its beginning.
"""

# %% [markdown] tags=["hint:read_tensor"]
"""
<details><summary>Hint</summary>

Read 8 bytes: that is `n`. Read `n` bytes: that is the header. The tensors' part begins at `8 + n`. With `begin, end = info["data_offsets"]`, where does this tensor begin in the *file*, and how many bytes is it?

</details>
"""


# %% tags=["exercise:read_tensor", "file:train.py"]
@check
def read_tensor(path, name):
    with open(path, "rb") as file:
        ### BEGIN SOLUTION
        n = int.from_bytes(file.read(8), "little")
        info = json.loads(file.read(n))[name]
        begin, end = info["data_offsets"]
        file.seek(8 + n + begin)
        data = file.read(end - begin)
        ### END SOLUTION
    dtype = {"F32": torch.float32, "I64": torch.int64}[info["dtype"]]
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(info["shape"])


# %% [markdown] tags=["solution:read_tensor"]
"""
Three reads and a seek, whatever the size of the file. `torch.frombuffer` uses the bytes as they are.
"""

# %% tags=["prediction:bytes"]
predict(
    "bytes",
    "The weight has 8,192 bytes, the checkpoint 25 million. How many bytes does read_tensor read?",
    unit="bytes",
    within=1.5,
    mine=...,
)

# %% tags=["nbval-ignore-output", "reveal:bytes"]
reveal("bytes", play.bytes_read(lambda: read_tensor(path, "model.mlp.0.weight")))

# %% [markdown]
"""
The tensor, the header, and a little that Python's file buffer reads ahead. The naive script read 25 MB. From a 20 GB checkpoint it would have read 20 GB; yours would read the same few KB.
"""

# %% tags=["nbval-ignore-output"]
now |= play.measure(
    "load", batches=Loader(windows, 64, prefetch=4), saver=Saver(), read=read_tensor
)
play.draw(before=before, now=now)

# %% [markdown] tags=["takeaway"]
"""
What is left is compute, and little else. That was the bar; now the run has to survive.

## Go on where it stopped · core

After a crash there are two questions: resume from *which checkpoint*, and *with which batch*?

**Write `latest`.** The folder `root` holds finished checkpoints, `step-000010`, `step-000020`, and perhaps one that was cut off, `step-000030.tmp`. Return the path of the newest finished one, or `None` if there is none; before the first save the folder itself isn't there yet. `root.glob("step-*")` gives the paths, in no particular order; paths compare by name.
"""

# %% [markdown] tags=["hint:latest"]
"""
<details><summary>Hint</summary>

`path.suffix` is `".tmp"` for the ones that don't count. `max(list_of_paths, default=None)` copes with an empty list.

</details>
"""


# %% tags=["exercise:latest", "file:train.py"]
@check
def latest(root):
    ### BEGIN SOLUTION
    finished = [path for path in root.glob("step-*") if path.suffix != ".tmp"]
    return max(finished, default=None)
    ### END SOLUTION


# %% [markdown] tags=["solution:latest"]
"""
The leading zeros in `step-000010` make name order the same as step order.
"""

# %% [markdown]
"""
**Write `steps`.** It goes through the loader's batches and numbers them: the first batch is step 1. It yields `(step, batch)` for each step after `done`, up to and including `total`, and then it ends: nothing more is fetched. Batches that were trained on before the crash are fetched and dropped; with `done = 0` there are none. (Dropping is slow when `done` is a million. Lesson 02 has a better way.)
"""

# %% [markdown] tags=["hint:steps"]
"""
<details><summary>Hint</summary>

`enumerate(loader, start=1)` numbers the batches. If 30 steps are done, the first pair to yield is `(31, the 31st batch)`.

</details>
"""


# %% tags=["exercise:steps", "file:train.py"]
@check
def steps(loader, done, total):
    ### BEGIN SOLUTION
    for step, batch in enumerate(loader, start=1):
        if step > total:
            return
        if step > done:
            yield step, batch
    ### END SOLUTION


# %% [markdown] tags=["solution:steps"]
"""
One step too early, and a batch is trained on twice; one too late, and a batch is never seen. Neither raises an error. You will compare losses to be sure.
"""

# %% [markdown]
"""
## Your training script · core

The rest is given: a tiny model, and the loop, which you know. `resume` restores a checkpoint's tensors by calling your `read_tensor` for each, and returns how many steps are done (0 if there is no checkpoint). `watch` is the stopwatch behind the bars. Read `train` once: every name that doesn't come from the model's file is yours.
"""


# %% tags=["given", "file:train.py"]
def train(tokens, root, total=60):
    model, optimizer = new_model()
    watch, saver = Stopwatch(), Saver()
    done = resume(model, optimizer, latest(root), read_tensor)
    loader = Loader(Windows(tokens, 32), 64, prefetch=4)
    for step, (x, y) in watch.each("data wait", steps(loader, done, total)):
        with watch("compute"):
            loss = train_step(model, optimizer, x, y)
        print(f"step {step:2d}  loss {loss:.7f}", flush=True)
        if step % 10 == 0:
            with watch("save stall"):
                saver.save(root / f"step-{step:06d}", state_of(model, optimizer, step))
    saver.wait()
    for checkpoint in sorted(root.glob("step-??????")):
        with watch("load"):
            read_tensor(checkpoint / "state.safetensors", "model.mlp.0.weight")
    return watch.ms_a_step(total - done)


# %% [markdown]
"""
Two lines end the file. `main` says where the data and the checkpoints are, calls `train`, and prints both bars:
"""

# %% tags=["shown", "file:train.py"]
if __name__ == "__main__":
    main(train)

# %% tags=["nbval-ignore-output"]
script = write("train.py")
play.write_the_rest(before)

# %% [markdown]
"""
## Kill it · core

The next cell starts your script in its own process, as `.venv/bin/python lab/mine/train.py` would. You see it train. Once it has printed 30 steps or a few more, it is killed; the save of step 30 comes after the print, so its folder may be missing.
"""

# %% tags=["nbval-ignore-output"]
import signal

training = play.start(script, fresh=True)
killed = play.losses(training, until=30)
os.kill(training.pid, signal.SIGKILL)  # kill -9: no warning, no last words
killed |= play.losses(training)  # what it had printed before the kill came
print("It ended by signal", -training.wait(), "and has left:")
print(*sorted(os.listdir(script.with_name("checkpoints"))))

# %% [markdown]
"""
The process had no chance to tidy up. If it left a folder that ends in `.tmp`, it was killed in the middle of a save.

**Predict.** You start the same script again.
"""

# %% tags=["prediction:resume"]
predict(
    "resume",
    "What does it do first?",
    "begin again at step 1",
    "go on after the newest finished checkpoint",
    "go on at the very step it was killed in",
    mine=...,
)

# %% tags=["nbval-ignore-output", "reveal:resume"]
resumed = play.losses(play.start(script))
began_anew = "begin again at step 1" if 1 in resumed else None
reveal("resume", began_anew or "go on after the newest finished checkpoint")

# %% [markdown]
"""
That is your training, resumed, and below it the bars that your script prints. It measures its own three waits; `compute` is the same code in both, so it is drawn as measured before. (To see it again, run the cell with the kill first; a run that is finished has nothing left to train.) But is it the *same* training? We run the script once more, undisturbed, in another folder, and compare every digit of each loss.
"""

# %% tags=["nbval-ignore-output"]
undisturbed = play.undisturbed(script)
print("step 60, undisturbed", undisturbed.get(60), "and resumed", resumed.get(60))

# %%
both = killed.items() | resumed.items()
print(f"{len(both)} losses; they are those of the undisturbed run:", both == undisturbed.items())

# %% [markdown]
"""
**That's it.** You have a training script that hardly waits, and that you can kill. Try it in a terminal, in the folder that holds `lab`: delete `lab/mine/checkpoints` to start over, run `.venv/bin/python lab/mine/train.py`, and in a second terminal `kill -9 $(pgrep -f lab/mine/train.py)`, as often as you like.

### Prove it

Each line below is a promise, tested on your code.
"""

# %%
promises()

# %% tags=["play"]
card("a folder that only looks finished", mine=...)

# %% [markdown]
"""
## Afterwards: what is a faster part worth? · optional

Say you can cut the naive script's data wait to a tenth, or a hundredth. How much faster is the *whole run*? Move the slider (in JupyterLab; elsewhere the picture shows one setting).
"""

# %% tags=["play", "nbval-ignore-output"]
sliders(play.faster, before, data_wait_is_faster_by=(2, [1, 2, 5, 10, 20, 50, 100]))

# %% [markdown] tags=["takeaway"]
"""
The bar shrinks quickly at first, and hardly at all later: the other parts remain. Speeding up a part that takes a share `s` of the time makes the whole at most `1 / (1 - s)` times as fast. This is *Amdahl's law*, and the reason to look at the bar first.

| a part that takes | can make the whole faster by at most |
|---|---|
| a tenth of the time | 1.11 x |
| a third | 1.5 x |
| half | 2 x |

## Afterwards: count, don't clock · optional

Times tell you *that* something is slow. They seldom tell you why, and they change with each run. A counter tells you what happened. Linux counts the bytes that a process asks the system to read (`rchar` in `/proc/self/io`).

**Predict.** A batch is 64 windows of 33 tokens at 2 bytes: 4,224 bytes.
"""

# %% tags=["prediction:asked"]
predict(
    "asked",
    "How many bytes does the naive dataset ask for to make one batch?",
    unit="bytes",
    within=2,
    mine=...,
)

# %% tags=["nbval-ignore-output", "reveal:asked"]
reveal("asked", play.bytes_read(lambda: next(iter(play.naive_batches()))))
print("your Windows asks for:", play.bytes_read(lambda: windows.fetch(range(64))))

# %% [markdown]
"""
Each of the 64 samples opens the file again, and each open reads its first kilobytes through Python's file buffer, to get a 128-byte header. Yours asks for nothing at all: the file is mapped into memory, and lesson 01 shows what happens there.
"""

# %% [markdown] tags=["closing"]
"""
**You can now explain**

- how to cut a run's time into data wait, compute, save stall and load;
- the two remedies: make a part shorter, or hide it behind another;
- why a batch is one indexing operation, and a save is a copy, a thread, and a rename;
- what a run needs to resume after `kill -9`: a finished checkpoint, and the number of the next batch.

**The number to remember: 1 / (1 - share).** It is the most you can gain from one part. So look at the bar before you make anything faster.

**Yours to keep**: `lab/mine/train.py`, which trains, survives, and draws its own bar.

**The next pain.** Your four parts work, but they trust the world. What if the file shrinks while you read it? What if `produce` dies, or the disk is full, or the power fails right after the rename? Each later lesson opens by breaking one of them.

Next: [01 A token file larger than memory](01_memmap_dataset.ipynb)
"""
