# %% [markdown] tags=["opening"]
"""
# 02 · An order without a list

[01 A token file larger than memory](01_memmap_dataset.ipynb) · **02** · next: [03 The next batch is ready before you ask](03_async_loader.ipynb)

**Why you should care.** A run over a trillion samples should see each of them once, in an unpredictable order. It should run on 8 GPUs today, crash, and resume on 6 tomorrow. What you have so far can't: random windows miss a third of the file in every epoch, and lesson 00's `steps` finds its place by fetching everything again. In this lesson you write an order that is computed, not stored.

**The idea in five lines.** The rest makes these lines fast, shared and resumable:

```python
shuffle = permutation(num_samples, hash(seed, epoch))  # nothing is stored
begin = samples_given                                  # by all ranks together
mine = range(begin + rank * B, begin + rank * B + B)   # the slice of one rank
batch = dataset.fetch(shuffle(mine))                   # any part, at any time
samples_given += B * ranks                             # all that a resume needs
```

**Three questions** on lesson 01:

1. Why does one gather beat a loop over 64 windows, if both copy the same bytes?
2. Why is a random window `hash_of(index, seed, epoch)`, and not the next draw of a generator?
3. Two workers ask for sample 5 of epoch 2. Do they get the same window?

<details><summary>Answers</summary>

1. One call instead of hundreds. The copying itself is cheap.
2. What a generator draws depends on earlier draws. A hash gives everyone the same.
3. Yes: it is a function of three numbers, the seed among them.

</details>

**You need** lessons 00 and 01. Terms: [glossary](../materials/course/glossary.md).

**About 45 to 55 minutes**, estimated, in two sittings; 15 to read. You write five short functions. Each is checked as soon as you run its cell; until yours is right, the solution is used, so every cell runs.
"""

# %%
import sys

sys.path.append("../materials")

from course.lab import begin, card, check, earlier, predict, promises, reveal, sliders, write
from course.play import nb02 as play

begin("02")
Loader, steps = earlier("00", "Loader", "steps")
random_windows = earlier("01", "random_windows")

# %% tags=["given", "file:order.py"]
import math
from itertools import count

import numpy as np

from npydata.dataset.windows import hash_of

# %% [markdown]
"""
## Sitting 1 · Break it: an epoch of random windows · core

Your `random_windows` draws each window by a hash. Say an epoch draws as many windows as the file has. Some come twice, so others don't come at all.

**Predict.**
"""

# %% tags=["prediction:never"]
predict(
    "never",
    "How many of the windows are never drawn in that epoch?",
    unit="%",
    within=1.2,
    mine=...,
)

# %% tags=["reveal:never"]
drawn = random_windows(np.arange(play.WINDOWS), play.WINDOWS, seed=0, epoch=0)
never = play.never_drawn(drawn)
reveal("never", never)

# %% [markdown]
"""
More than a third. (One draw misses a given window with probability `1 - 1/n`; all `n` draws miss it with probability close to `1/e`.) That is the first of two numbers to fix in this lesson.

To see each sample once, you need an *order* of them: a shuffle.

## A shuffle that stores nothing · core

The common version asks a generator for a list: `np.random.default_rng(seed).permutation(n)`. For 10^12 samples the list takes 8 TB.

A hash needs no list, but it may send two positions to the same sample. A shuffle must not. So build it from moves that can be *undone*: if you can walk back from each sample to its position, no two positions share a sample.

Write the numbers from 0 into a grid, row by row. Then shift each row by some amount, with wraparound: what leaves on the right comes back in on the left. Then shift each column in the same way.

```
0 1 2    rows by      2 0 1    columns by    3 8 1
3 4 5    1, 0, 2      3 4 5    2, 1, 0       7 0 5
6 7 8    --------->   7 8 6    ---------->   2 4 6
```

Row 0 is shifted by 1: its 2 leaves on the right, and comes in on the left. A whole row moves by the same amount, so no two cells collide; and if you know the amounts, you can shift everything back. The randomness is in the amounts: a hash of the row's number, then a hash of the column's.

**Write `shift`**, the one move that everything is built from. `values` are places below `bound`. Move each one forward by its hash, wrapping around at `bound`. A hash is far larger than `bound`: make it small with `%`. All arrays hold `uint64` (left out in the example), and `bound` is one, too. The result says where each number *goes*: 0 to place 1, 1 to place 2, 2 to place 0. (The grid above shows the reverse, which number is in each place: 2 0 1.)

```python
shift(np.array([0, 1, 2]), np.array([7, 7, 7]), 3)      # [1, 2, 0]: 7 is 2 * 3 + 1, so all move by 1
```
"""

# %% [markdown] tags=["hint:shift"]
"""
<details><summary>Hint</summary>

A hash can be as large as 2^64 - 1. What is 2^64 - 1 + 5 in 64 bits? Make the hash small *before* you add.

</details>
"""


# %% tags=["exercise:shift", "file:order.py"]
@check
def shift(values, hashes, bound):
    ### BEGIN SOLUTION
    half = np.uint64(32)
    moved = values + ((hashes >> half) * bound >> half)
    return moved - bound * (moved >= bound)
    ### END SOLUTION


# %% [markdown] tags=["solution:shift"]
"""
Two remainders, `(values + hashes % bound) % bound`, are just as good; they give a different order. The library avoids them, because dividing 64-bit numbers is slow: the upper half of the hash, times `bound`, divided by 2^32, is spread evenly below `bound`.
"""

# %% [markdown]
"""
Two shifts, rows and then columns, make a **round**. Three rounds make the shuffle: after two, neighbours in a row still end up side by side twice as often as by chance.

**Write `scramble`**: where does each cell of the grid go? `cells` is an array of cell numbers, counted row by row. `keys` has a pair of numbers for each round, `(across, down)`; they make each seed give its own order. In each round,

- first `column` moves by `hash_of(row, across)`, which gives 64 scrambled bits for each row;
- then `row` moves by `hash_of(column, down)`, where `column` is already the new one.
"""

# %% [markdown] tags=["hint:scramble"]
"""
<details><summary>Hint</summary>

`row, column = np.divmod(cells, columns)` gives the row and the column of each cell. Columns wrap at `columns`, rows at `rows`. At the end: what number does the cell in row r and column c have?

</details>
"""


# %% tags=["exercise:scramble", "file:order.py"]
@check
def scramble(cells, rows, columns, keys):
    ### BEGIN SOLUTION
    row, column = np.divmod(cells, columns)
    for across, down in keys:
        column = shift(column, hash_of(row, across), columns)
        row = shift(row, hash_of(column, down), rows)
    return row * columns + column
    ### END SOLUTION


# %% [markdown] tags=["solution:scramble"]
"""
Each shift depends only on the part that it leaves alone. So it can be undone. Ciphers that change two halves in turn are named after Horst Feistel.
"""

# %% [markdown]
"""
**Try it.** Your `scramble`, after 0 to 3 rounds. The numbers are positions in an epoch, and the cell that a number has moved to is its sample. 22 samples need a grid of 25, so the last three cells are not samples: a number that lands there is red. In JupyterLab, change the number of samples: when is nothing red?
"""

# %% tags=["play", "nbval-ignore-output"]
sliders(play.rounds, scramble, samples=(22, list(range(2, 43))))

# %% [markdown] tags=["takeaway"]
"""
Nothing is red when the samples fill the grid. Otherwise some positions may lead to no sample. The white numbers in brackets, 22 to 24, are not positions; for each red number, one of them is in a cell that *is* a sample.

### Break it: cells to spare

A colleague fixes the red cells with a remainder, `cell % n`. There is no error; but some samples now come twice, and others never, as with random windows.

**Write `shuffled`**, for a single position. `scrambled[k]` is the cell that number `k` has moved to; no two share a cell. If `scrambled[position]` is a sample, below `n`, that is the answer. If not, say it is cell 23. Number 23 is not a position. Where has *it* moved to? (Don't go through the whole list: a real `scrambled` has 10^12 entries and is computed, not stored.)
"""

# %% [markdown] tags=["hint:shuffled"]
"""
<details><summary>Hint</summary>

No other position needs the cell that number 23 has moved to. If that isn't a sample either, do the same again.

</details>
"""


# %% tags=["exercise:shuffled"]
@check
def shuffled(position, n, scrambled):
    ### BEGIN SOLUTION
    cell = scrambled[position]
    while cell >= n:
        cell = scrambled[cell]
    return cell
    ### END SOLUTION


# %% [markdown] tags=["solution:shuffled"]
"""
Follow the moves until you are below `n` again. Draw an arrow from each number to the cell it moves to: every cell has one arrow in and one out, so the arrows form closed loops. A walk that began below `n` comes back below `n`, and two walks never meet.
"""

# %% [markdown]
"""
Here is your shuffle as a class. It is given: it picks a nearly square grid, makes the keys, and does your walk for a whole array at once. Only those still outside walk on.
"""


# %% tags=["given", "file:order.py"]
class MyShuffle:
    """A shuffle of 0 to n - 1 that is computed: `MyShuffle(n, seed)(positions)` gives samples."""

    def __init__(self, n, seed, rounds=3):
        columns = math.isqrt(n - 1) + 1  # the square root, rounded up; exact, unlike floats
        self.n, self.rows, self.columns = n, np.uint64(-(-n // columns)), np.uint64(columns)
        self.keys = hash_of(np.arange(2 * rounds), seed).reshape(rounds, 2).tolist()

    def __call__(self, positions):
        samples = scramble(np.array(positions, np.uint64), self.rows, self.columns, self.keys)
        while (outside := samples >= self.n).any():
            samples[outside] = scramble(samples[outside], self.rows, self.columns, self.keys)
        return samples.astype(np.int64)


# %%
print("10 samples:           ", MyShuffle(10, seed=1)(range(10)))
print("three of a trillion:  ", MyShuffle(10**12, seed=1)([0, 1, 2]))

# %% [markdown]
"""
Any three of a trillion, and no list. (Yours may print other numbers: any correct `shift` will do.)

The first number is fixed: an epoch sees every sample once. **This is a good place to stop.** When you come back, run the cells from the top. What is left is to share the order, and to resume in the middle of it.

## Sitting 2 · Every epoch its own order · core

The shuffle takes one seed; a run has two numbers, its seed and the epoch. Many scripts shuffle by `seed + epoch`. Then the first epoch of seed 1 has the same order as the second epoch of seed 0: three runs of three epochs each, with seeds 0, 1 and 2, see five orders, not nine.

Runs that share orders are not independent, so averaging them tells you less than you think. A hash of both numbers gives nine:
"""


# %% tags=["given", "file:order.py"]
def epoch_seed(seed, epoch):
    """Return the seed of one epoch's shuffle."""
    return int(hash_of(np.array([epoch]), seed)[0])


# %% [markdown] tags=["term:rank", "term:world size"]
"""
## Shared by several processes · core

Several processes may train together. Each is a **rank**, numbered from 0, and the number of ranks is the **world size**. In each step every rank has its own batch, and at the end they wait for each other. So a rank with one batch more than the others would wait forever.

The epoch's order is one line of positions. In each step the ranks together take the next `batch_size * world_size` of them: rank 0 the first slice, rank 1 the next one. Here are 11 positions for two ranks with batches of 4:

| step | rank 0 | rank 1 | |
|---|---|---|---|
| 0 | 0 1 2 3 | 4 5 6 7 | |
| 1 | 8 | 9 | 10 is dropped |

In the last step the rest is shared evenly, and fewer than `world_size` positions are dropped.

**Write `rank_slice`**: the positions of batch number `batch` of one rank, as a `range`. `start` is how many positions of this epoch all ranks together were given before; it is 0 unless a run was resumed. When nothing is left, the range is empty.
"""

# %% [markdown] tags=["hint:rank_slice"]
"""
<details><summary>Hint</summary>

Three questions, in this order. At which position does this step begin? How many positions does each rank get in it, if the epoch ends soon? And where in the step is this rank's slice?

</details>
"""


# %% tags=["exercise:rank_slice", "file:order.py"]
@check
def rank_slice(batch, start, num_samples, batch_size, rank, world_size):
    ### BEGIN SOLUTION
    begin = start + batch * batch_size * world_size
    size = min(batch_size, (num_samples - begin) // world_size)
    return range(begin + rank * size, begin + (rank + 1) * size)
    ### END SOLUTION


# %% [markdown] tags=["solution:rank_slice"]
"""
The ranks never communicate: each computes its own slice. Past the end `size` is 0 or negative, and a `range` that runs backwards is empty.
"""

# %% [markdown]
"""
**Try it.** 30 positions, dealt out by your `rank_slice`, one step per line. Change the batch size and the ranks. How many positions can be dropped at most?
"""

# %% tags=["play", "nbval-ignore-output"]
sliders(play.dealt, rank_slice, batch_size=(4, [3, 4, 5, 6]), ranks=(4, [1, 2, 3, 4]))

# %% [markdown] tags=["takeaway"]
"""
At most one fewer than there are ranks. After each step, the positions given out are one range, from 0 up to some position, whatever the batch size and the number of ranks. So an epoch's progress is *one number*.

## Break it: resume with another batch size · core

Your `steps` from lesson 00 doesn't keep that number. It counts *batches*. A run with batches of 4 is killed after 6 of them. The new GPU has room for batches of 8, so the run resumes with `steps(loader, done=6, ...)`.

**Predict.**
"""

# %% tags=["prediction:skipped"]
predict(
    "skipped",
    "How many of the 96 samples does the model never see in that epoch?",
    unit="samples",
    within=1,
    mine=...,
)

# %% tags=["reveal:skipped"]
missed = play.skipped(Loader, steps)
reveal("skipped", missed)

# %% [markdown]
"""
A batch count means nothing without the batch size. And there is a second trap: a loader makes batches *ahead*. When the run was killed, some had been made but never given to the model.

**Write `resumed`**, everything that a resume has to get right. An epoch's samples come in the order `order`, cut into batches of `batch_size`; the last may be shorter. When the run was killed, `made` batches had been made, and `delivered` of them given to the model. Return the list of batches still to come, each a slice of `order`, in batches of `new_batch_size`.
"""

# %% [markdown] tags=["hint:resumed"]
"""
<details><summary>Hint</summary>

How many *samples* has the model seen? That number means the same before and after.

</details>
"""


# %% tags=["exercise:resumed"]
@check
def resumed(order, batch_size, made, delivered, new_batch_size):
    ### BEGIN SOLUTION
    begin = delivered * batch_size
    return [order[k : k + new_batch_size] for k in range(begin, len(order), new_batch_size)]
    ### END SOLUTION


# %% [markdown] tags=["solution:resumed"]
"""
`made` doesn't matter. The number of samples that were *delivered*, to all ranks together, is what a checkpoint has to keep. It is the `start` of your `rank_slice`.
"""

# %% [markdown]
"""
## Put it together · core

An epoch, for one rank, from wherever it stopped. The class is given; it calls your functions. `given` is what all ranks together were given before. (The file takes three of your five functions: `shuffled` and `resumed` only showed the idea, and `MyShuffle` and `MyOrder` do the same with whole arrays.)
"""


# %% tags=["given", "file:order.py"]
class MyOrder:
    """The samples of each batch that is still to come in an epoch, for one rank."""

    def __init__(self, num_samples, batch_size, seed=0, epoch=0, given=0, rank=0, world_size=1):
        self.shuffle = MyShuffle(num_samples, epoch_seed(seed, epoch))
        self.slice = given, num_samples, batch_size, rank, world_size

    def __iter__(self):
        for batch in count():
            positions = rank_slice(batch, *self.slice)
            if not positions:
                return
            yield self.shuffle(positions)


# %%
write("order.py")
promises()

# %% [markdown]
"""
**What would you notice?** Each card changes one line of a solution. Pick what you would see in a training run; then the card runs with that line.
"""

# %% tags=["play"]
card("one order for all", mine=...)

# %% tags=["play"]
card("from the beginning", mine=...)

# %% [markdown]
"""
## Count again

Both numbers, before and with your order:
"""

# %%
epoch = np.concatenate(list(MyOrder(play.WINDOWS, 64)))
print(f"windows never seen in an epoch: {never} % -> {play.never_drawn(epoch)} %")
seen = np.concatenate([*list(MyOrder(96, 4))[:6], *MyOrder(96, 8, given=24)])
print(f"samples skipped, if batches of 4 become 8: {missed} of 96 -> {96 - len({*seen})} of 96")

# %% [markdown] tags=["closing"]
"""
**You can now explain**

- why random draws miss more than a third of the windows;
- why a shuffle must be reversible, and which moves of a grid are;
- what to do with cells that are not samples, and why a remainder is wrong;
- why `seed + epoch` makes runs share their orders;
- why a resume counts samples that were *delivered*, not batches and not what was made.

**The number to remember: 1.** One number, the samples that all ranks were given, is all that a resume needs to know about an epoch.

**Yours to keep**: `lab/mine/order.py`. The library's [permutation.py](../npydata/dataset/permutation.py) and [sampler.py](../npydata/loader/sampler.py) do the same, 8,192 samples at a time; their saved state also names the data it belongs to, and is refused on any other.

**The next pain.** Every batch is still made while the model stands still, or by a thread that you can't rely on. Lesson 03 makes the next ones ahead, in order; your shuffle comes back in lesson 10.

[01 A token file larger than memory](01_memmap_dataset.ipynb) · **02** · next: [03 The next batch is ready before you ask](03_async_loader.ipynb)
"""
