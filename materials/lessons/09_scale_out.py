# %% [markdown] tags=["opening"]
"""
# 09 · Scale out: the same run on many GPUs

[08 Survive the crash](08_survive_the_crash.ipynb) · **09** (optional) · next: [10 Train, crash, resume](10_train_crash_resume.ipynb)

**Why you should care.** A model that has outgrown one GPU is trained by several processes at once. Then samples, weights and checkpoints have several owners, and three new mistakes are possible: two do the same work, some of the work is missing, or one dies and the others wait for it all night.

**The idea in five lines.** Everything else makes these lines work for any number of processes:

```python
mine = order[begin + rank * size :][:size]       # one order for all; each takes its slice
write(share_out(what_everybody_has)[rank])       # everything once, and nothing is sent around
read(overlap(my_rows, rows_in_that_file))        # others may have written in other pieces
notes.leave(rank, "I have written this")         # a note, not a meeting
temporary.rename(folder)                         # by one of them, once all notes are there
```

**Three questions** on earlier lessons:

1. Why does a resume count *samples*, and not batches?
2. What may a reader of a safetensors file skip?
3. Why is a checkpoint written under a temporary name first?

<details><summary>Answers</summary>

1. The next run may use another batch size.
2. Everything but the rows it wants. The header says where each tensor begins.
3. A name that says "complete" must never be seen on half a checkpoint.

</details>

**You need** lessons 02 and 06; lesson 10 doesn't depend on this one. No GPU: the processes are small, and run right here. Terms: [glossary](../materials/course/glossary.md).

**About 30 to 40 min**, estimated, in two sittings. Write where you see `...`; each piece is checked as soon as you run its cell. Until yours is right, the solution is used, so every cell runs.

| sitting | what you do | minutes |
|---|---|---|
| 1 | who writes what; three ranks read what two wrote | 15 |
| 2 | all or nothing, even if one is killed | 15 |
"""

# %%
import sys

sys.path.append("../materials")

from course.lab import begin, card, check, predict, promises, reveal, write
from course.play import nb09 as play

begin("09")

# %% tags=["given", "file:ranks.py"]
import json
import os
import time
from collections import Counter

import safetensors.torch
import torch
import torch.distributed as dist

import npydata

# %% [markdown] tags=["term:rendezvous", "term:collective"]
"""
## Sitting 1 · Several processes · core

You don't start the processes yourself. `torchrun --nproc-per-node 3 train.py` starts the script three times. Environment variables tell each one which it is (its *rank*, as in lesson 02), how many there are, and an address. There they find each other: the **rendezvous**.

Then they can call *collectives*. A **collective** is a call that every rank makes, and that returns for none of them until all have made it. `all_reduce` is one: it sums a tensor over all ranks; training averages gradients that way. Here `play.start` does what `torchrun` does:
"""


# %%
def hello(rank, ranks):
    total = torch.tensor(rank)
    dist.all_reduce(total)  # add up over all ranks; each gets the sum
    return f"rank {rank} of {ranks}, the sum of all ranks: {total}"


for end in play.start(3, hello):
    print(end.value)

# %% [markdown]
"""
Lesson 02 settled who gets which *sample*: one order for all, and each rank takes its slice of every step. Two common mistakes there raise no error, and the run trains on. If every rank shuffles with the same seed and takes no slice, the second one does nothing new. If each of two has its own seed, each takes half of *all* samples: both miss a given sample with a chance of one in four.

## Who writes what · core

Now the model. In the simplest case each rank has all of it, and they average their gradients: *DDP*. A model too large for that is sharded. With *FSDP2* each rank keeps some rows of every weight; before a layer computes, its rows are gathered from all ranks, and afterwards they are freed. Such a part of a tensor is a **shard**. Here it is `(name, first_row, rows)`:
"""

# %% tags=["term:shard"]
every = play.spread(2)
for rank, shards in enumerate(every):
    print(f"rank {rank} has", shards)

# %% [markdown]
"""
Each has half of `up`. `mean`, `scale` and `table` are on both: here they aren't sharded. A checkpoint should hold everything once, and no rank should send weights to another just for a save.

`share_out` is given. A shard that only one rank has is written by that rank. The others are on all ranks, and are dealt out: each to the rank with the fewest rows to write so far.
"""


# %% tags=["given", "file:ranks.py"]
def share_out(every):
    """Return for each rank the shards that it writes: each shard once, by one who has it."""
    have = Counter(shard for shards in every for shard in shards)
    writes = [[shard for shard in shards if have[shard] == 1] for shards in every]
    for shard in every[0]:
        if have[shard] > 1:
            min(writes, key=lambda own: sum(rows for _, _, rows in own)).append(shard)
    return writes


# %%
for rank, shards in enumerate(share_out(every)):
    print(f"rank {rank} writes", shards)

# %% [markdown]
"""
That is 13 rows and 16. With DDP all ranks have everything: if rank 0 wrote it all, a save on 1,024 ranks would take as long as on one.

## Another number of ranks reads it · core

Each rank writes its shards into its own file. Now *three* ranks want to resume. Of the 10 rows of `up`, they want 0 to 4, 4 to 8 and 8 to 10 (the end is not included, as in a slice). The files have 0 to 5 and 5 to 10. So the middle rank reads both.

**Write `overlap`.** `wanted` and `held` are ranges of rows: those a rank wants, and those a file holds. Return None if they have nothing in common, else two slices:

- where the common rows go, counted from the first *wanted* one;
- where they are, counted from the first one in the *file*.

With `wanted = range(4, 8)` and `held = range(5, 10)` these are rows 5, 6 and 7: `slice(1, 4)` of the wanted ones, `slice(0, 3)` of the file's.
"""

# %% [markdown] tags=["hint:overlap"]
"""
<details><summary>Hint</summary>

The first common row is the later of the two starts, and the end is the earlier of the two ends.

</details>
"""


# %% tags=["exercise:overlap", "file:ranks.py"]
@check
def overlap(wanted, held):
    """Return where rows that a file holds go, and where in the file they are; None without any."""
    ### BEGIN SOLUTION
    begin, end = max(wanted.start, held.start), min(wanted.stop, held.stop)
    if begin >= end:
        return None
    there = slice(begin - wanted.start, end - wanted.start)
    here = slice(begin - held.start, end - held.start)
    return there, here
    ### END SOLUTION


# %% [markdown] tags=["solution:overlap"]
"""
The library does the same in every dimension, and with steps.
"""

# %% [markdown]
"""
No rank reads more than its own part, and no process ever holds the whole model.

Now for real. `save` and `load` are given, and call what you wrote. A shard's name in a file is `name@first_row`.
"""


# %% tags=["given", "file:ranks.py"]
def write_share(temporary, rank, ranks, state):
    """Write this rank's share of a save; return the file's name and size."""
    every = [None] * ranks
    dist.all_gather_object(every, list(state))  # a collective: everybody learns what all have
    own = {
        f"{name}@{first}": state[name, first, rows] for name, first, rows in share_out(every)[rank]
    }
    temporary.mkdir(parents=True, exist_ok=True)
    path = temporary / f"rank_{rank}.safetensors"
    with open(path, "wb") as file:
        file.write(safetensors.torch.save(own))
        file.flush()
        os.fsync(file.fileno())
    return {path.name: path.stat().st_size}


def load(folder, wanted):
    """Return the wanted rows of each tensor, `{name: range}`, from the files of all ranks."""
    found = {}
    for path in sorted(folder.glob("rank_*.safetensors")):
        with npydata.open_checkpoint(path) as file:
            for key in file:
                name, first = key.split("@")
                begin, (rows, *rest) = int(first), file.info(key).shape
                if both := overlap(wanted[name], range(begin, begin + rows)):
                    whole = found.setdefault(name, torch.empty(len(wanted[name]), *rest))
                    whole[both[0]] = file.get_slice(key)[both[1]]  # reads these rows only
    return found


# %%
saved = play.save_on(2, write_share)
play.load_on(3, load, saved)

# %% [markdown]
"""
Three ranks have what two saved, to the last bit. **This is a good place to stop.** When you come back, run the cells from the top; what you wrote is checked again and runs. One thing is still missing: what happens if one of them dies?

## Sitting 2 · All or nothing, on every rank · core

One process that dies during a save leaves the old checkpoint: that was lesson 08. Now there are many, and each writes a part. If one part is missing, the whole is worthless.

The obvious way is a collective. All write, then comes a *barrier*: a collective that only waits until all have reached it. Then rank 0 renames. But a killed rank never reaches the barrier, and the others wait there until `torch.distributed` gives up: by default after 10 to 30 minutes.

It gets worse. Files are written by a background thread, and training calls its own collectives. If one rank enters the barrier first and another `all_reduce`, nothing moves again.

So the ranks leave each other notes instead, in the small store that the rendezvous set up: *I have written this*, or *I give up, because ...*. Nobody has to meet, and each wait has an end.
"""


# %% tags=["given", "file:ranks.py"]
class Notes:
    """What the ranks tell each other; a note is a dictionary."""

    def __init__(self, store):
        self.store, self.begun = store, time.monotonic()

    @property
    def seconds(self):
        return time.monotonic() - self.begun

    def leave(self, rank, note):
        self.store.set(f"note/{rank}", json.dumps(note))

    def read(self, rank):
        key = f"note/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def sleep(self):
        time.sleep(0.01)


# %% [markdown]
"""
**Write `gather`**, which rank 0 calls: wait for the notes of ranks 0 to `ranks - 1`, and return them as a list.

- `notes.read(rank)` returns a note, or None while there is none. Check all ranks, and if you have to wait, call `notes.sleep()` and check again.
- A note with the key `"error"` means that its rank has given up. Then raise a `RuntimeError` with the rank's number in its text, at once, whichever others are missing.
- If any are still missing when `notes.seconds` has reached `patience`, raise a `RuntimeError` with the numbers of all that are missing.
"""

# %% [markdown] tags=["hint:gather"]
"""
<details><summary>Hint</summary>

`while True:` and in each round four things, in this order: read all notes, look for errors, return if none is missing, check whether your patience is up.

</details>
"""


# %% tags=["exercise:gather", "file:ranks.py"]
@check
def gather(notes, ranks, patience):
    """Return the notes of all ranks; raise if one gave up, or is silent for too long."""
    ### BEGIN SOLUTION
    while True:
        found = [notes.read(rank) for rank in range(ranks)]
        for rank, note in enumerate(found):
            if note is not None and "error" in note:
                raise RuntimeError(f"rank {rank}: {note['error']}")
        missing = [rank for rank, note in enumerate(found) if note is None]
        if not missing:
            return found
        if notes.seconds >= patience:
            raise RuntimeError(f"no word from rank {missing}")
        notes.sleep()
    ### END SOLUTION


# %% [markdown] tags=["solution:gather"]
"""
The library waits ten minutes by default. A disk may be slow, and that is no reason to lose a save.
"""

# %% [markdown]
"""
`commit_all` is the line between *nothing* and *all*. Rank 0 calls it. A note's `"files"` are the files that its rank wrote into `temporary`, and their sizes. Checking the files catches a common mistake with two machines: each has a folder of that name, and they don't share one.
"""


# %% tags=["given", "file:ranks.py"]
def commit_all(temporary, folder, notes, ranks, patience):
    """Make a checkpoint of what all ranks wrote, or raise and leave none."""
    for note in gather(notes, ranks, patience):
        for name, size in note["files"].items():
            path = temporary / name
            if not path.is_file() or path.stat().st_size != size:
                raise RuntimeError(f"{name} is not here, or not whole")
    temporary.rename(folder)


# %% [markdown]
"""
Two ranks save step 1. In the save of step 2, rank 1 is killed by `kill -9` after it has written its file, but before it says so. Your patience is 2 seconds.
"""


# %% tags=["given", "file:ranks.py"]
def save(root, step, rank, ranks, state, store, patience=600.0):
    """Save a step on all ranks; on rank 0, return when it is a checkpoint."""
    folder, temporary = root / f"step-{step}", root / f"step-{step}.tmp"
    notes = Notes(dist.PrefixStore(f"step-{step}", store))
    try:
        notes.leave(rank, {"files": write_share(temporary, rank, ranks, state)})
    except OSError as error:  # the others hear of it, and don't wait in vain
        notes.leave(rank, {"error": str(error)})
    if rank == 0:
        commit_all(temporary, folder, notes, ranks, patience)


# %% tags=["prediction:the other"]
predict(
    "the other",
    "What does rank 0 get?",
    "nothing",
    "an error that names rank 1",
    "it hangs",
    mine=...,
)

# %% tags=["reveal:the other"]
reveal("the other", play.killed_in_a_save(save, patience=2.0))

# %% [markdown] tags=["takeaway"]
"""
| who dies, and when | rank 0 gets | the newest checkpoint |
|---|---|---|
| another rank, before its note | an error that names it | the old one |
| another rank, after its note | no error: its part is on the disk | the new one |
| rank 0, before the rename | it is dead | the old one |

And the others, in the last row? They need a note from rank 0 as well: *done*, or *not done*. In the library, they wait for it.

## Prove it · core

Each line below is a promise, tested on your code.
"""

# %%
write("ranks.py")
promises()

# %% [markdown]
"""
**What would you notice?** The card changes one line of the *solution* (yours may use other names). Pick what you would see; then the solution runs with that line.
"""

# %% tags=["play"]
card("no patience", mine=...)

# %% [markdown] tags=["closing"]
"""
**With the library**, it is two calls around the training loop you know, and behind them are the parts you wrote: [plan.py](../npydata/distributed/plan.py) shares out, [coordinator.py](../npydata/distributed/coordinator.py) gathers, [save.py](../npydata/distributed/save.py) commits.

```python
state = npydata.load_distributed(newest, model, optimizer)
...
checkpointer.save_distributed(folder, model.state_dict(), optimizer.state_dict(), state)
```

On many machines nothing in your script changes. Run the same command on each of them, here on 16 with 8 GPUs each. The checkpoints need a file system that they all share.

```
torchrun --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id my_run \
         --rdzv-endpoint first-machine:29500 train.py --out /shared/run
```

`make run-distributed` runs [train_fsdp.py](../examples/train_fsdp.py): two ranks here, then one that resumes; finally all shards go into one file.

**You can now explain**

- why two ranks with their own seeds miss a quarter of the samples;
- who writes a shard, and who writes a tensor that all ranks have;
- how three ranks read what two wrote, without any one reading all of it;
- why a save across ranks must not wait in a collective, and what the survivors of a crash see.

**The number to remember: 1.** Each sample has one owner per epoch, each shard one writer, each save one rank that commits it.

**Yours to keep**: `lab/mine/ranks.py`.

**The next pain.** Every part survives by itself. Does the whole run? Lesson 10 kills it, twice.

[08 Survive the crash](08_survive_the_crash.ipynb) · **09** (optional) · next: [10 Train, crash, resume](10_train_crash_resume.ipynb)
"""
