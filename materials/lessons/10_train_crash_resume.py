# %% [markdown] tags=["opening"]
"""
# 10 · Train, crash, resume

[08 Survive the crash](08_survive_the_crash.ipynb) · [09 Scale out](09_scale_out.ipynb) (optional) · **10** · [11 Documents and mixtures](11_documents_and_mixtures.ipynb) (optional)

**Why you should care.** A run of days is killed sooner or later. Most scripts then go on *nearly* as if nothing had happened: with different data, different random numbers, and losses that you can't compare with anything. Here you find out what a resume forgot, and fix it until a run that was killed twice ends with exactly the same bits as one that was left alone.

**The idea in five lines.** Starting and resuming are the same command:

```python
first, name = resume_from(out, model, optimizer, loader)            # step 0 at the first start
for step, batch in ...:                                             # from there on
    do_step(step, batch)
    if step % every == 0 or asked.save:                             # a signal may ask, too
        save(model, optimizer, training_state(step, loader))        # all that decides the next step
```

**Three questions** on earlier lessons:

1. Why does a window come from a hash of seed, epoch and index, and not from the next draw of a generator?
2. What does a resume count: the samples of batches that were made, or of those that were delivered?
3. A process is killed while it writes a checkpoint. What does it leave, and under which name?

<details><summary>Answers</summary>

1. So that it can be made again: by another worker, in another order, in another process.
2. Those that were delivered. Some batches are made but still in the buffer, and the model never saw them.
3. Some of the files, under a temporary name that no reader takes for a checkpoint.

</details>

**You need** lessons 00, 02, 03 and 08; what you built there is used here. Terms: [glossary](../materials/course/glossary.md).

**About 40 to 50 min**, estimated, in two sittings. Write where you see `...`; each piece is checked as soon as you run its cell. Until yours is right, the solution is used, so every cell runs.

| sitting | what you do | minutes |
|---|---|---|
| 1 | find what a resume forgets; write one that forgets nothing | 25 |
| 2 | listen to signals; your package trains, is killed twice, and resumes three times | 25 |
"""

# %%
import sys

sys.path.append("../materials")

from course.lab import begin, card, check, earlier, predict, promises, reveal
from course.play import nb10 as play

begin("10")
train_of_00 = earlier("00", "train")
MyWindows, Loader = earlier("01", "MyWindows"), earlier("03", "Loader")
MyShuffle, epoch_seed = earlier("02", "MyShuffle", "epoch_seed")

# %% tags=["given", "file:run.py"]
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from model import new_model, train_step  # given in lesson 00

import npydata
from npydata import TrainingState

# %% [markdown] tags=["term:dropout"]
"""
## Sitting 1 · Break it: one more line in the model · core

Your script from lesson 00 was killed with `kill -9` and came back with the same losses. Now its model gets one more line, one that many models have:

```python
model.mlp.insert(2, torch.nn.Dropout(0.1))
```

**Dropout** sets a tenth of the numbers that flow through it to 0, chosen at random at each step.

The script runs twice, 60 steps each: once undisturbed, and once killed after step 35. It saves every ten steps, so it resumes from step 30.
"""

# %% tags=["prediction:differ"]
predict(
    "differ",
    "How many of the 60 losses differ from those of the undisturbed run?",
    unit="losses",
    within=1,
    mine=...,
)

# %% tags=["nbval-ignore-output", "reveal:differ"]
runs = play.lesson_00_with_dropout(train_of_00)  # trains 120 steps, a few seconds
reveal("differ", play.compare(*runs))

# %% [markdown] tags=["takeaway"]
"""
Above, both curves look alike, and nobody would notice. Below is the difference: from the first step after the resume, it is a different run. If you compare two models, or hunt a bug that appears at step 50,000, that run is worthless.

That number is this lesson's counter. At the end it has to be 0.

## A detective · core

Something decides the next step, and the resume did not restore it. What is it? Instead of guessing, look at *one* step. Two runs do step 7: one goes straight on, the other was stopped after step 6 and resumed. Four things are noted, in the order in which they arise:

| note | what it is |
|---|---|
| `weights` | a checksum of the weights before the step |
| `batch` | a checksum of the batch |
| `loss` | what the step computes from weights, batch and random numbers |
| `after` | a checksum of the weights after the optimizer's step |

**Write `missing_part`.** `whole` and `resumed` are dictionaries with these four keys, and one or more parts may not have been restored. Return the first: `"weights"`, `"loader"`, `"generators"` (of random numbers) or `"optimizer"`; or `"nothing"` if the notes agree.
"""

# %% [markdown] tags=["hint:missing_part"]
"""
<details><summary>Hint</summary>

Everything after the first difference differs as well. Which part is used for the first time where the two runs diverge?

</details>
"""


# %% tags=["exercise:missing_part"]
@check
def missing_part(whole, resumed):
    """Return which part was not put back, from the notes of one step in two runs."""
    ### BEGIN SOLUTION
    parts = {"weights": "weights", "batch": "loader", "loss": "generators", "after": "optimizer"}
    for note, part in parts.items():
        if whole[note] != resumed[note]:
            return part
    return "nothing"
    ### END SOLUTION


# %% [markdown] tags=["solution:missing_part"]
"""
A dictionary keeps its order, so the earliest difference is found first.
"""

# %% [markdown]
"""
Now a run to examine: the model with its dropout, and batches from *your* dataset, *your* shuffle and *your* loader (or the solutions). `Batches` puts these together. It is all given; look at its `state_dict`, the two numbers that say where it is.
"""


# %% tags=["given", "file:run.py"]
class Batches:
    """The batches of a run, one epoch after the other, without end."""

    def __init__(self, data, batch_size, seed):
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self.epoch = self.samples = 0

    def __len__(self):
        return len(self.data)

    def fetch(self, positions):
        """Return the samples at some positions of this epoch, in the order of your shuffle."""
        shuffle = MyShuffle(len(self.data), epoch_seed(self.seed, self.epoch))
        return self.data.fetch(shuffle(positions), self.epoch)

    def __iter__(self):
        while True:
            loader = Loader(self, self.batch_size, prefetch=4)
            loader.given = self.samples // self.batch_size
            for batch in loader:
                self.samples += self.batch_size
                yield batch
            self.epoch, self.samples = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "samples": self.samples}

    def load_state_dict(self, state):
        self.epoch, self.samples = state["epoch"], state["samples"]


SETTINGS = {"batch_size": 64, "seq_len": 32, "seed": 0}


def new_run(tokens):
    """Make model, optimizer and batches as a new process does."""
    random.seed(SETTINGS["seed"]), np.random.seed(SETTINGS["seed"])
    model, optimizer = new_model(pairs=16_384)  # of lesson 00, smaller; it seeds torch
    model.mlp.insert(2, torch.nn.Dropout(0.1))
    data = MyWindows(tokens, SETTINGS["seq_len"], SETTINGS["seed"])
    return model, optimizer, Batches(data, SETTINGS["batch_size"], SETTINGS["seed"])


# %% [markdown]
"""
`lab/mine/run.py`, which this notebook writes later, has three lines that import what you built:
"""

# %% tags=["shown", "file:run.py"]
from dataset import MyWindows  # your files of lessons 01, 02 and 03
from loader import Loader
from order import MyShuffle, epoch_seed

# %% [markdown]
"""
First a script that restores its weights, and nothing else. (`weights`, `moments` and `state` are what was saved of the stopped run; the moments are the optimizer's.)
"""

# %% tags=["prediction:weights only"]
predict(
    "weights only",
    "The first step after such a resume: what is the first thing to differ?",
    "the batch",
    "the loss",
    "the weights after it",
    mine=...,
)


# %% tags=["reveal:weights only"]
def only_weights(model, optimizer, loader, weights, moments, state):
    model.load_state_dict(weights)


print("it lacks:", missing_part(*play.next_step(new_run, only_weights)))
reveal("weights only", "the batch")  # the first note above that says "other"

# %% [markdown]
"""
The batches started from the first one again. So their position is restored as well:
"""


# %%
def weights_and_place(model, optimizer, loader, weights, moments, state):
    model.load_state_dict(weights)
    loader.load_state_dict(state.loader)


print("it lacks:", missing_part(*play.next_step(new_run, weights_and_place)))

# %% [markdown]
"""
The same weights, the same batch, and a different loss: that is the dropout. Random numbers come from a *generator*, and in a new process all generators start from the beginning. There are several: dropout uses torch's, or on a GPU the GPU's, a shuffle may use Python's, an augmentation numpy's. `npydata.capture_rng()` returns the states of all of them as plain values that a checkpoint can hold, and `npydata.restore_rng(...)` restores them.

Now three parts are restored: weights, loader, generators.
"""

# %% tags=["prediction:three parts"]
predict(
    "three parts",
    "Is the loss of the next step the same?",
    "yes, and so are the weights after it",
    "yes, but not the weights after it",
    "no",
    mine=...,
)


# %% tags=["reveal:three parts"]
def three_parts(model, optimizer, loader, weights, moments, state):
    weights_and_place(model, optimizer, loader, weights, moments, state)
    npydata.restore_rng(state.rng)


missing = missing_part(*play.next_step(new_run, three_parts))
print("it lacks:", missing)
reveal("three parts", "yes, but not the weights after it" if missing == "optimizer" else "no")

# %% [markdown] tags=["takeaway"]
"""
This one is treacherous. AdamW keeps running averages for each weight, its *moments*. The loss is computed before they are used. So a test that compares only the first loss after a resume passes a script that forgot its optimizer.

| forgotten | it shows in | on the curve you would see |
|---|---|---|
| weights | the first loss, hugely | a jump |
| the loader's place | the first loss | nothing: a different batch, a similar loss |
| generators | the first loss | nothing |
| optimizer | the second loss | nothing, or a small bump |

## Put it all back · core

Weights and moments are tensors, and a checkpointer takes them as they are. The rest goes into a `TrainingState`, all captured at one moment, between two steps:
"""


# %% tags=["given", "file:run.py"]
def training_state(step, loader):
    """Return what decides the next step beside weights and moments."""
    return TrainingState(step=step, rng=npydata.capture_rng(), loader=loader.state_dict())


# %% [markdown]
"""
**Write `restore`**, which puts it all back. Model, optimizer and loader have `load_state_dict(...)`; the generators have `npydata.restore_rng(state.rng)`. A checkpoint from another program may hold nothing but weights: then `moments`, `state.loader` or `state.rng` is None, and that part stays as it is.
"""

# %% [markdown] tags=["hint:restore"]
"""
<details><summary>Hint</summary>

Which of these calls may draw random numbers while loading? Which one must therefore come last?

</details>
"""


# %% tags=["exercise:restore", "file:run.py"]
@check
def restore(model, optimizer, loader, weights, moments, state):
    """Put back what a checkpoint holds; it may lack all but the weights."""
    ### BEGIN SOLUTION
    model.load_state_dict(weights)
    if moments is not None:
        optimizer.load_state_dict(moments)
    if state.loader is not None:
        loader.load_state_dict(state.loader)
    if state.rng is not None:
        npydata.restore_rng(state.rng)  # last: what came before may draw numbers
    ### END SOLUTION


# %% [markdown] tags=["solution:restore"]
"""
The generators come last: nothing may draw between them and the next step.
"""

# %% [markdown]
"""
Call the detective. A run is stopped after step 6, everything is created anew, and *your* `restore` puts it back:
"""

# %%
print("your restore lacks:", missing_part(*play.next_step(new_run, restore)))

# %% [markdown]
"""
Four notes, all the same: nothing was forgotten.

Something has to decide *what* to load. This is given, and is called at every start, even the very first:
"""


# %% tags=["given", "file:run.py"]
def resume_from(out, model, optimizer, loader):
    """Go on from the newest checkpoint, if there is one; return its step and its name."""
    newest = npydata.latest_checkpoint(out)
    if newest is None:
        return 0, "none"
    weights, moments, state = npydata.load_checkpoint(newest)
    restore(model, optimizer, loader, weights, moments, state)
    return state.step, newest.name


# %% [markdown]
"""
Nobody has to think at four in the morning: the same command starts and resumes a run.

**This is a good place to stop.** When you come back, run the cells from the top; what you wrote is checked again and runs. What is left is the real thing: processes, and `kill -9`.

## Sitting 2 · Asked to end · core

A cluster that wants its machine back sends the signal SIGTERM, and half a minute later kills your process. You yourself may send SIGUSR1: save now, and go on. Half a minute is enough for a last checkpoint, if your script listens.

A *handler* is a function that is called when a signal arrives, between two instructions, wherever that is: in the middle of a step, with half of the weights updated. Anything saved there would be torn. So it only sets flags, and the training loop checks them after each step:
"""


# %% tags=["given", "file:run.py"]
class Asked:
    """What signals have asked for: to save, and to end."""

    save = end = False

    def listen(self):
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self.note)

    def note(self, number, frame):
        self.save = True
        self.end |= number == signal.SIGTERM  # once True it stays so, whatever comes later


# %% [markdown]
"""
**Write `keep_training`**, the loop. `first` is the number of steps already done; `last` is the last one's number. `do_step(step, batch)` trains on a batch, `save(step)` saves. `batches` is your `Batches`: a `for` over it has no end.

- Do the steps `first + 1` to `last`, each on the next batch.
- Save after each step whose number is a multiple of `every`, after a step in which a signal asked for it, and after the very last step. Save a step only once, however many reasons there are.
- Once it has seen a request to save, the loop sets `asked.save` back to False. A signal may arrive *while* it saves; that request must not get lost.
- A step after which `asked.end` is True is the last one, whatever its number.
"""

# %% [markdown] tags=["hint:keep_training"]
"""
<details><summary>Hint</summary>

`for step, batch in zip(range(...), batches)` numbers the batches and ends with the range. Work out first whether this step is the last one, then whether to save, then whether to return. Reset `asked.save` before you save, not after.

</details>
"""


# %% tags=["exercise:keep_training", "file:run.py"]
@check
def keep_training(first, last, batches, do_step, save, asked, every):
    """Do steps first + 1 to last; save every so many steps, when asked, and at the end."""
    ### BEGIN SOLUTION
    for step, batch in zip(range(first + 1, last + 1), batches):
        do_step(step, batch)
        is_last = step == last or asked.end
        if is_last or asked.save or step % every == 0:
            asked.save = False
            save(step)
        if is_last:
            return
    ### END SOLUTION


# %% [markdown] tags=["solution:keep_training"]
"""
The flags are read in one place. With the range first, `zip` takes no batch that isn't trained on.
"""

# %% [markdown]
"""
## Your own package · core

The rest of the script is given. `AsyncCheckpointer` is the library's; inside, it works like what you built in lessons 07 and 08. Read `train` once: it uses your `restore` and `keep_training`.
"""


# %% tags=["given", "file:run.py"]
def train(tokens, out, steps=100, every=20):
    asked = Asked()
    asked.listen()
    model, optimizer, loader = new_run(tokens)
    first, name = resume_from(out, model, optimizer, loader)
    print(f"from {name}: the next step is {first + 1}", flush=True)
    with npydata.AsyncCheckpointer(keep_last=2) as saver:

        def do_step(step, batch):
            loss = train_step(model, optimizer, *batch)
            print(f"step {step} loss {loss!r}", flush=True)  # every digit, and a line at a time

        def save(step):
            state = training_state(step, loader)
            saver.save(out / f"step-{step:06}", model.state_dict(), optimizer.state_dict(), state)

        keep_training(first, steps, loader, do_step, save, asked, every)
    return 128 + signal.SIGTERM if asked.end else 0


# %% [markdown]
"""
The file ends with a command line: `python lab/mine/run.py TOKENS OUT`.
"""

# %% tags=["shown", "file:run.py"]
if __name__ == "__main__":
    sys.exit(train(sys.argv[1], Path(sys.argv[2])))

# %% [markdown]
"""
Now `lab/mine` becomes a package that trains: the files of lessons 01 to 03, and today's.
"""

# %% tags=["nbval-ignore-output"]
play.write_package()

# %% [markdown]
"""
## Kill it twice · core

Both runs do 100 steps and save every 20. One is left alone. The other gets `kill -9`, which no program can catch, once it has printed step 55. Each start is its own process, so the next cell takes up to half a minute.
"""

# %% tags=["prediction:goes on"]
predict("goes on", "From which step will the killed run go on?", "0", "20", "40", "55", mine=...)

# %% tags=["nbval-ignore-output", "reveal:goes on"]
whole, killed = play.Run("undisturbed"), play.Run("killed")
whole.start()
killed.start(after=55)
reveal("goes on", str(killed.newest()))

# %% [markdown]
"""
It is 40, unless the disk was so busy that step 40 was still on its way: a save counts when it is complete.

Started again from 40, it dies in the middle of its second save, at step 80, right after the optimizer's file has reached the disk. Model and optimizer are written, but nothing yet says that they belong together: the next save will clear them away.
"""

# %% tags=["nbval-ignore-output"]
killed.start(play.KILLED, 2, "fsync optimizer.safetensors")
print("it would go on from step", killed.newest())

# %% [markdown]
"""
The last save that is complete counts. Started a third time, the run gets SIGTERM once it has printed step 85. 85 isn't a multiple of 20.
"""

# %% tags=["prediction:again"]
predict("again", "How many steps must the fourth start repeat?", unit="steps", within=1, mine=...)

# %% tags=["reveal:again"]
killed.start(after=85, number=signal.SIGTERM)
reveal("again", killed.lives[-1][-1][0] - killed.newest())

# %% [markdown] tags=["term:bit-identical"]
"""
The flags were set, and your loop saved what it had. The fourth start runs to the end.

Two runs are **bit-identical** if every number in them is the same to its last bit: not close, equal. `==` decides, without a tolerance. Some steps were done twice, by two different processes. All of them have to agree.
"""

# %% tags=["nbval-ignore-output"]
killed.start()
differ = play.compare(*whole.lives, *killed.lives)

# %% [markdown] tags=["takeaway"]
"""
The coloured lines lie on the grey one, and where two of them overlap, steps were done twice. The flat line below is a difference of exactly 0. And the files, to the last byte:
"""

# %%
print("losses that are not those of the undisturbed run:", differ)
print("every byte of the last checkpoint is the same:", killed.files() == whole.files())

# %% [markdown]
"""
That is this lesson's counter: it was 30.

## Prove it · core

The line below is a promise, tested on your `run.py`, in a miniature run that is stopped several times. (`missing_part` was your detective; it is not in the file.)
"""

# %%
promises()

# %% [markdown]
"""
**What would you notice?** The card changes one line of the *solution* (yours may use other names). Pick what you would see; then the solution runs with that line.
"""

# %% tags=["play"]
card("the moments stay behind", mine=...)

# %% [markdown]
"""
Finally the bar from lesson 00, three times: the naive script, your parts, and the library's in their place. This trains 30 steps three times, a few seconds.
"""

# %% tags=["nbval-ignore-output"]
play.draw_last_bar(Batches, MyWindows)

# %% [markdown] tags=["takeaway"]
"""
What is left is compute. And the scripts are not equally good: the naive one leaves files that may not be on the disk yet, and from which no run can resume bit for bit.

**How often should you save?** A short interval between saves costs many stalls, a long one much lost work. With all times in seconds, the least is lost with a save every `sqrt(2 * stall * between_crashes) / step` steps (Young, 1974). With a crash every 8 hours, steps of half a second and a stall of 18 s, as with `torch.save` and fsync for a model of 20 GB, that is every 2,036 steps. With a tenth of that stall it is 3.2 times as often, and a third as much time is lost.
"""

# %% [markdown] tags=["closing"]
"""
**You can now explain**

- which parts decide the next step, and which can be missing without a trace in the curve;
- why the optimizer's absence shows one step later than the others;
- why the generators are restored last;
- what a signal handler may do, and what it must leave to the loop;
- why "the same" is checked with `==`, and where that holds: on the same machine, with the same software and number of threads.

**The number to remember: 4.** Weights, optimizer, generators, the loader's place. Leave one out, and the run continues as a different run.

**Yours to keep**: `lab/mine`, a package that trains, and `lab/mine/run.py`, which you can kill. [train.py](../examples/train.py) is the same with more options, and refuses a checkpoint that was made with other settings. Copy it, replace `GPT` with your model, and give it your tokens: `npydata prepare your_text.txt -o tokens.npy`, then `python examples/train.py --tokens tokens.npy --out build/run`.

**Where to go from here.** [The clinic](../materials/clinic/README.md) has three bugs that you haven't seen. If you have several GPUs, [09 Scale out](09_scale_out.ipynb) is next. If your data has documents, or several sources, see [11 Documents and mixtures](11_documents_and_mixtures.ipynb).

[08 Survive the crash](08_survive_the_crash.ipynb) · [09 Scale out](09_scale_out.ipynb) (optional) · **10** · [11 Documents and mixtures](11_documents_and_mixtures.ipynb) (optional) · [the map in 00](00_start_here.ipynb)
"""
