# %% [markdown] tags=["opening"]
"""
# 08 · Survive the crash

[07 Save without stopping](07_async_checkpointer.ipynb) · **08** · next: [10 Train, crash, resume](10_train_crash_resume.ipynb), or first [09 Scale out](09_scale_out.ipynb) if you have several GPUs

**Why you should care.** A checkpoint is worth what is left of it after the worst moment. Here your own save from lesson 00 is killed after each of its calls, and then you cut the power. Does it survive both? Then you write the commit: whatever dies, and whenever, a whole checkpoint loads, the new one or the previous one.

**The idea in five lines.** Two are blank; you fill them in during the first sitting. Everything else makes the five work for many files, and finds the result again:

```python
write(temporary)                # no reader looks there
...                             # what must be sure before the next line?
rename(temporary, checkpoint)   # in one step, it has the name
...                             # and before the last?
remove(old)                     # and only now
```

**Three questions** on earlier lessons:

1. `write` has returned, and the process dies. Are the bytes lost?
2. A checkpoint was copied while training went on. What is wrong with it?
3. Why does lesson 00 write into a folder that ends in `.tmp`?

<details><summary>Answers</summary>

1. No: they are in the page cache, which belongs to the system and not to the process.
2. It is torn: it mixes several steps, a state that the model was never in.
3. So that a name without `.tmp` means complete.

</details>

**You need** lessons 00 and 07. Terms: [glossary](../materials/course/glossary.md).

**About 45 to 55 min**, estimated, in two sittings. Write where you see `...`; each piece is checked as soon as you run its cell. Until yours is right, the solution is used, so every cell runs.

| sitting | what you do | minutes |
|---|---|---|
| 1 | kill your save, cut the power; four actions in the only order | 25 |
| 2 | a real folder: which checkpoint loads, which may go, the commit | 30 |
"""

# %%
import sys
from functools import partial

sys.path.append("../materials")

from course.lab import begin, card, check, earlier, predict, promises, reveal, write
from course.play import nb08 as play
from course.play.toy_disk import ToyDisk

begin("08")
write_checkpoint, latest, read_tensor = earlier("00", "write_checkpoint", "latest", "read_tensor")
Saver = earlier("07", "Saver")

# %% tags=["given", "file:commit.py"]
import json
import os
import shutil

# %% [markdown]
"""
## Sitting 1 · Kill your save · core

The first cell brought back `write_checkpoint` and `latest` from lesson 00 (yours, or the solutions). Step 10 is saved. Now you save step 20, and `play.film` records what the folder holds after each call that makes a folder, renames or syncs: that is what `kill -9` would leave at that moment. (A kill between two writes leaves part of a file, under a name that no reader looks for.) For each of these moments your `latest` says which checkpoint to load:
"""

# %%
first = play.first_saver(write_checkpoint, latest, read_tensor)
kills, cuts = play.film(*first)
play.table(killed=kills)

# %% [markdown]
"""
Your rename does its job: until the last call the folder has a name that `latest` skips, and then it is complete. It is safe however often you kill the *process*.

Now the *machine* dies. Whatever was only in memory is gone, and that includes the page cache.

**Predict.**
"""

# %% tags=["prediction:power"]
predict(
    "power",
    "The power fails after one of these calls. What is the worst that may be left?",
    "a whole checkpoint",
    "a damaged checkpoint",
    mine=...,
)

# %% tags=["reveal:power"]
play.table(killed=kills, power_cut=cuts)
reveal("power", f"a {'damaged' if 'an error' in str(cuts) else 'whole'} checkpoint")

# %% [markdown] tags=["takeaway"]
"""
The folder may have its final name while the file in it is missing. Then `latest` picks it, and the restart fails with an error, although step 10 is still there beside it. This can happen even after your save has *returned*: nothing makes the system write the folder soon.

That is the list for today. First, on a small model of a disk, you find out what it must be told. Then you do the same on a real folder, and at the end you repeat both attacks.

## A disk that shows every moment · core

`ToyDisk` is a folder in memory. `disk.write(name, content)` takes three steps. `disk.seen()` is what programs see, and so what a killed process leaves behind.
"""

# %%
disk = ToyDisk({"checkpoint": b"step 100"})
disk.did = lambda step: print(f"{step:<13}", disk.seen())
disk.write("checkpoint", b"step 200")

# %% [markdown]
"""
For two moments there is no checkpoint: neither the old one nor the new one.

A *rename* takes a name from one file and gives it to another, in one step. A reader finds one or the other, never a mixture, never nothing.

**Write `save_unsynced`**: save `content` under the name `checkpoint`, so that a kill at any step leaves the old one or the new one. You have `disk.write(name, content)` and `disk.rename(old, new)`, and need nothing else. At the end only `checkpoint` is left.
"""

# %% [markdown] tags=["hint:save_unsynced"]
"""
<details><summary>Hint</summary>

Under what name could the file be written, so that no reader looks at it while it is incomplete?

</details>
"""


# %% tags=["exercise:save_unsynced"]
@check
def save_unsynced(disk, content):
    """Save as `checkpoint`; a kill at any step leaves the old one or the new one."""
    ### BEGIN SOLUTION
    disk.write("checkpoint.new", content)
    disk.rename("checkpoint.new", "checkpoint")
    ### END SOLUTION


# %% [markdown] tags=["solution:save_unsynced"]
"""
A half-written file has a name that no reader looks for.
"""

# %% [markdown] tags=["term:durable", "term:fsync"]
"""
## The power fails · core

Data guaranteed to survive a power cut is **durable**. The call that makes it so is **fsync**: it returns when the disk itself has the bytes of a file. A *name* is kept in the folder, and a folder is another file, with its own fsync.

Whatever you did not fsync, the system may write at any time, on its own and in any order: a name before its bytes, or the second half before the first. `disk.power_cuts()` returns everything you might find.

**Predict.** `save_unsynced` has returned, and the power fails. Of the old checkpoint, the new one, an empty file, and half a file:
"""

# %% tags=["prediction:found"]
predict(
    "found", "How many of these four may you find?", "one", "two", "three", "all four", mine=...
)

# %% tags=["reveal:found"]
disk = ToyDisk({"checkpoint": b"step 100"})
save_unsynced(disk, b"step 200")
found = {files.get("checkpoint") for files in disk.power_cuts()}
print(*sorted(found), sep=", ")
reveal("found", ("one", "two", "three", "all four")[len(found) - 1])

# %% [markdown]
"""
Every test that kills a process says that `save_unsynced` is safe. Then the power fails, and people find a file of length 0 with the right name and the last save's date.

**Write `save_committed`.** You have two more calls: `disk.fsync(name)` for the bytes of a file, and `disk.fsync_folder()` for the names. At every moment the old or the new checkpoint must load, and once you have returned, always the new one.
"""

# %% [markdown] tags=["hint:save_committed"]
"""
<details><summary>Hint</summary>

What must be on the disk before the bytes get their final name? And what is not yet there when the rename returns?

</details>
"""


# %% tags=["exercise:save_committed"]
@check
def save_committed(disk, content):
    """Save as `checkpoint`; a power cut at any step leaves the old one or the new one."""
    ### BEGIN SOLUTION
    disk.write("checkpoint.new", content)
    disk.fsync("checkpoint.new")
    disk.rename("checkpoint.new", "checkpoint")
    disk.fsync_folder()
    ### END SOLUTION


# %% [markdown] tags=["solution:save_committed"]
"""
Bytes, then name: each made durable in turn. There is no other order.
"""

# %% [markdown]
"""
Now look at all moments of three saves at once, under kills and power cuts. Which of the three are safe if only the process can die?
"""


# %% tags=["nbval-ignore-output"]
def save_in_place(disk, content):
    disk.write("checkpoint", content)


play.crash_matrix(save_in_place, save_unsynced, save_committed)

# %% [markdown] tags=["takeaway"]
"""
A dot is a step that this save doesn't take. *Nothing* means that nothing loads: the file is missing, empty, or only half there. Read the lower half row by row. In place, every step is a risk. Unsynced, the risk begins with the rename, and never ends. Committed: old, then old or new, then new.

| save | killed | power cut |
|---|---|---|
| in place | half a file while it writes | half a file, or none, even later |
| unsynced | safe | a name without its bytes |
| committed | safe | safe |

Four actions in the only order that works: write, sync, rename, sync the folder. **This is a good place to stop.** When you come back, run the cells from the top; what you wrote is checked again and runs.

## Sitting 2 · A real folder · core

On a real disk a file is synced with `os.fsync(file.fileno())`. Python has no single call that syncs a folder; these few lines are given. A folder can't be opened with `open`, but `os.open` gives a *descriptor*, the number by which the system knows an open file or folder.
"""


# %% tags=["given", "file:commit.py"]
def sync_folder(folder):
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_small(path, content):
    """Write a short file and make its bytes durable."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# %% [markdown] tags=["term:manifest"]
"""
A checkpoint is often more than one file: the model, the optimizer, the state of the run. So all of them go into a temporary *folder*, and the folder is renamed. How does a reader know that nothing is missing? From a list that is written last: the **manifest**. It holds the size of every file (the library's has checksums, too), and a `sequence`, which counts the commits: clocks can be wrong, and steps go back when a run does.

These are given, too. Read what each one does; you will call three of them.
"""

# %% tags=["given", "file:commit.py"]
MANIFEST = "manifest.json"


def write_manifest(temporary, root):
    """Write down what is in a folder that becomes the next checkpoint of a root."""
    before = [read_manifest(folder)["sequence"] for folder in committed(root)]
    files = {path.name: path.stat().st_size for path in temporary.iterdir()}
    manifest = {"sequence": max(before, default=0) + 1, "files": files}
    write_small(temporary / MANIFEST, json.dumps(manifest).encode())


def read_manifest(folder):
    """Return the manifest of a folder; None where there is none, or half of one."""
    try:
        return json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None


def committed(root):
    """Return the folders with a manifest, newest first. It looks at no other file."""
    found = {
        folder: manifest["sequence"]
        for folder in root.iterdir()
        if folder.suffix != ".tmp" and (manifest := read_manifest(folder))
    }
    return sorted(found, key=found.get, reverse=True)


def is_complete(folder):
    """Return whether a folder has every file of its manifest, with its size."""
    manifest = read_manifest(folder)
    return manifest is not None and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in manifest["files"].items()
    )


# %% [markdown]
"""
## Which one loads · core

The root also has a file `latest`, which holds one name: that of the checkpoint to load. You may write another name into it, to go back a few steps. And it may be wrong: the folder it names was damaged later, or removed by hand.
"""


# %% tags=["given", "file:commit.py"]
def name_latest(folder):
    """Let `latest` name a checkpoint; it names the old one or the new one at any moment."""
    new = folder.with_name("latest.tmp")
    write_small(new, folder.name.encode())
    new.replace(folder.with_name("latest"))


def named_latest(root):
    """Return the folder that `latest` names, whether it is there or not; None without `latest`."""
    try:
        return root / (root / "latest").read_text().strip()
    except OSError:
        return None


# %% [markdown]
"""
**Write `latest_in`**: at the next start it decides what your week of training is worth. Return the folder that `latest` names if it is a complete checkpoint; else the newest complete one; else `None`.
"""

# %% [markdown] tags=["hint:latest_in"]
"""
<details><summary>Hint</summary>

`committed(root)` returns the newest first, and hasn't looked at sizes yet. `next(iterator, None)` gives the first item, or None.

</details>
"""


# %% tags=["exercise:latest_in", "file:commit.py"]
@check
def latest_in(root):
    """Return the checkpoint to load, or None."""
    ### BEGIN SOLUTION
    named = named_latest(root)
    if named is not None and is_complete(named):
        return named
    return next(filter(is_complete, committed(root)), None)
    ### END SOLUTION


# %% [markdown] tags=["solution:latest_in"]
"""
`latest` chooses among whole checkpoints. If it names anything else, it is wrong.
"""

# %% [markdown]
"""
## What may go · core

A checkpoint for each step fills any disk. *Retention* is the rule that says which ones stay: here the newest few. A removal is a commit, too: in one step the folder gets a name that no reader looks for, and only then are its files deleted.
"""


# %% tags=["given", "file:commit.py"]
def remove_checkpoint(folder):
    """Remove a checkpoint; nobody meets half of one."""
    doomed = folder.with_suffix(".tmp")
    folder.rename(doomed)
    shutil.rmtree(doomed)


# %% [markdown]
"""
**Write `remove_old`**, the only function in this lesson that destroys something. Of the *complete* checkpoints, the first `keep_last` stay, counted from the newest, and the others go. Damaged ones are neither counted nor removed: somebody may want to look at them. `newest`, which was just saved, is never removed, wherever it is in the list, and whatever `keep_last` is. Remove with `remove_checkpoint`, and only what `committed(root)` returns: a folder that another process is about to commit is not in it.
"""

# %% [markdown] tags=["hint:remove_old"]
"""
<details><summary>Hint</summary>

First list the complete ones. A slice skips the first few.

</details>
"""


# %% tags=["exercise:remove_old", "file:commit.py"]
@check
def remove_old(root, keep_last, newest):
    """Remove all but the newest complete checkpoints, and never `newest`."""
    ### BEGIN SOLUTION
    whole = [folder for folder in committed(root) if is_complete(folder)]
    for folder in whole[keep_last:]:
        if folder != newest:
            remove_checkpoint(folder)
    ### END SOLUTION


# %% [markdown] tags=["solution:remove_old"]
"""
If damaged checkpoints counted, `keep_last=2` could keep one in place of your last good one.
"""

# %% [markdown]
"""
## The commit · core

You have all the parts. The save has written its files into `temporary`, and synced each. You make it the checkpoint `folder`, in the order from the first sitting:

| call | what it does |
|---|---|
| `write_manifest(temporary, root)` | writes the manifest into the folder, and syncs its bytes |
| `sync_folder(any_folder)` | makes the names in it durable |
| `temporary.rename(folder)` | gives it the final name |
| `name_latest(folder)` | makes `latest` name it; that is not durable yet |
| `remove_old(root, keep_last, folder)` | removes the old ones |

**Write `commit`.** The root is `folder.parent`. No folder of that name exists yet. At every moment the old or the new checkpoint must load; when you return, the new one must. With `keep_last=None` nothing is removed.
"""

# %% [markdown] tags=["hint:commit"]
"""
<details><summary>Hint</summary>

Which name is added last to the temporary folder, and what makes its names durable? After the rename and `latest`: in which folder have names changed? And when may an old one go?

</details>
"""


# %% tags=["exercise:commit", "file:commit.py"]
@check
def commit(temporary, folder, keep_last=None):
    """Make a temporary folder the checkpoint `folder`, and the latest of its root."""
    ### BEGIN SOLUTION
    root = folder.parent
    write_manifest(temporary, root)
    sync_folder(temporary)
    temporary.rename(folder)
    name_latest(folder)
    sync_folder(root)
    if keep_last is not None:
        remove_old(root, keep_last, folder)
    ### END SOLUTION


# %% [markdown] tags=["solution:commit"]
"""
The four actions occur twice, for the folder and for `latest`; one sync of the root serves both names. Old checkpoints are removed last, once the new one is durable, bytes and names.
"""

# %% [markdown]
"""
Now attack your own commit. Step 10 was saved; two files of step 20 are written and synced, and your commit makes them a checkpoint. With `keep_last=1` it removes step 10. The process is killed after each of its calls.

**Predict.** After which call does step 20 load?
"""

# %% tags=["prediction:first"]
predict(
    "first",
    "Killed after which call does step 20 load for the first time?",
    "fsync step-20.tmp/manifest.json",
    "rename step-20.tmp",
    "replace latest.tmp",
    mine=...,
)

# %% tags=["reveal:first"]
mine = play.saver_of(commit, latest_in)
kills, cuts = play.film(*mine)
play.table(killed=kills)
reveal("first", next(call[3:] for call, what in kills.items() if what == "step 20"))

# %% [markdown]
"""
From the rename on, step 20 is whole and has its name. But `latest` still names step 10, which is whole, too: so step 10 loads until `latest` is replaced. There is something to load at every moment.

Now the power fails after each call. On the left, with your syncs; on the right, the same commit, but each sync returns without doing anything. (There are disks and containers like that.)
"""

# %%
_, unsynced = play.film(*mine, syncs=False)
play.table(with_your_syncs=cuts, without=unsynced)

# %% [markdown] tags=["takeaway"]
"""
With the syncs: step 10, then either, then step 20 for certain, as in the last row of the matrix. Either is possible from the moment `latest` is replaced until the root is synced, since the system may or may not have written that name on its own. Without: you can never be sure of keeping step 20, and once step 10 is removed you may be left with nothing.

### Prove it

The line below is a promise, tested on your `commit.py`: three of your five builds are in it; the two for the toy disk have done their job.
"""

# %%
write("commit.py")
promises()

# %% [markdown]
"""
**What would you notice?** The card changes one line of the *solution* (yours may use other names). Pick what you would see; then the solution runs with that line.
"""

# %% tags=["play"]
card("no sync before the name", mine=...)

# %% [markdown]
"""
Your `Saver` from lesson 07 takes any function as its commit. Give it yours, and you have a checkpointer: it stops training for one copy, loses no error, and survives a crash.
"""

# %%
root = play.scratch()
saver = Saver(partial(commit, keep_last=2))
for step in (10, 20, 30):
    saver.save(root / f"step-{step}", play.step_state(step))
saver.wait()
print("in the root:", *sorted(path.name for path in root.iterdir()))
print("to load:", latest_in(root).name)

# %% [markdown]
"""
## The page of verdicts · core

The library's benchmark attacks other savers in the same two ways, at many moments ([survival.md](../materials/results/survival.md)).

**Predict.** `torch.save` overwrites the last checkpoint, as many scripts do, and the power fails at some moment while it does.
"""

# %% tags=["prediction:survivors"]
predict(
    "survivors",
    "After what share of the moments does a complete checkpoint load?",
    unit="%",
    within=3,
    mine=...,
)

# %% tags=["nbval-ignore-output", "reveal:survivors"]
rows = play.verdicts(kills, cuts)
reveal("survivors", rows[play.SAVERS[0]]["power cut"])

# %% [markdown] tags=["takeaway"]
"""
A moment is one change that the save makes to a file or folder, so a tool that overwrites its last checkpoint spends nearly every moment doing so. *Loads* means: what the tool itself takes for the last checkpoint is complete. *Ours* is the library's `AsyncCheckpointer`. The last row is yours, from the two tables above; the others are from the saved run of the benchmark, where they were attacked harder: sector by sector, with every order of writes that the standard allows. Survival takes no library: ten careful lines around `torch.save` do just as well. The HF Trainer keeps two checkpoints and still does badly, because it resumes from the newest folder even if that one is half written. Once that folder is deleted by hand, the older one loads.
"""

# %% [markdown] tags=["closing"]
"""
**You can now explain**

- what a kill leaves, and what a power cut leaves;
- which of the two each fsync and each rename guards against;
- why a folder has its own fsync;
- why the manifest is written last, and when `latest` is ignored;
- what a save may remove, and when.

**The number to remember**: a durable replacement takes **4** actions in one order: write, sync, rename, sync the folder.

**Yours to keep**: `lab/mine/commit.py`. In lesson 10 your `Saver` commits with it, beside the library's. The library's [commit.py](../npydata/checkpointer/commit.py) follows the same order; it also replaces a checkpoint of the same name, cleans up after dead writers, and tells one run's checkpoints from another's.

**The next pain.** You have all the parts. Do they resume a killed run so that nobody can tell? That takes the random generators, the loader's position and the optimizer as well. Lesson 10 puts it all together, and kills it. Or test yourself first: [three bugs you haven't seen](../materials/clinic/README.md).

[07 Save without stopping](07_async_checkpointer.ipynb) · **08** · next: [10 Train, crash, resume](10_train_crash_resume.ipynb), or first [09 Scale out](09_scale_out.ipynb) if you have several GPUs
"""
