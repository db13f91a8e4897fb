# %% [markdown] tags=["opening"]
"""
# 01 · A token file larger than memory

[00 Start here](00_start_here.ipynb) · **01** · next: [02 An order without a list](02_order_without_a_list.ipynb)

**Why you should care.** In lesson 00 you wrote `Windows`, which cuts a whole batch out of a file on disk with one indexing operation. It is fast. But it dies in the middle of a run when somebody tokenises the text again. It glues the end of one document to the start of the next. And it shows the model the same few windows in every epoch. Here you break it in these three ways, then fix all three, and it stays fast.

**The idea in five lines.** The rest makes these lines safe and repeatable:

```python
tokens = np.load("tokens.npy", mmap_mode="r")          # nothing is read
windows = sliding_window_view(tokens, seq_len + 1)     # every window, and no copy
starts = hash_of(indices, seed, epoch) % len(windows)  # random, yet repeatable
batch = windows[starts]                                # one gather
x, y = batch[:, :-1], batch[:, 1:]                     # y is x, one token on
```

**Three questions** on lesson 00:

1. Which part of the bar belongs to the dataset?
2. `x` and `y` hold the same ids, except for one at each end. Why?
3. `fetch` makes a batch with one indexing operation. What did the naive script do instead?

<details><summary>Answers</summary>

1. The data wait: the time the loop waits for the next batch.
2. The model predicts the next token. So the target of each position is the id that follows it.
3. It opened the file 64 times, read 64 times, and glued 128 small tensors together.

</details>

**You need** lesson 00, Python, and a little NumPy (slices, dtypes). Terms: [glossary](../materials/course/glossary.md).

**About 40 to 55 minutes**, estimated, in two sittings; 15 to read. You write five short functions. Each is checked as soon as you run its cell; until yours is right, the solution is used, so every cell runs.
"""

# %%
import sys

sys.path.append("../materials")

from course.lab import begin, card, check, earlier, predict, promises, reveal, write
from course.play import nb01 as play

begin("01")
Windows = earlier("00", "Windows")

# %% [markdown]
"""
That is all this lesson needs from lesson 00: your `Windows`, or the solution if you start here. The file that you build today begins with the next cell.
"""

# %% tags=["given", "file:dataset.py"]
import os

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from npydata import TokenFileError
from npydata.dataset.windows import hash_of

# %% [markdown] tags=["term:memory map", "term:page", "term:page cache"]
"""
## Sitting 1 · Break it: the file shrinks · core

`np.load(path, mmap_mode="r")` reads nothing. It makes a **memory map**: addresses in your process that stand for the bytes of the file. Touch one of them, and the system fetches the **page** it is on: 4,096 bytes. Pages that were read stay in the **page cache** as long as nothing else needs the memory, and the next touch needs no disk read. So a 100 GB map opens instantly, and you pay only for what you touch.

Now somebody runs the tokeniser again while you train. The file that you have mapped is suddenly shorter, and your `Windows` is asked for a window that is no longer there.

**Predict.** The cell after your prediction does this to your own code.
"""

# %% tags=["prediction:shrinks"]
predict(
    "shrinks",
    "Your Windows touches a part of the file that has gone. What happens?",
    "it returns garbage",
    "it raises an error",
    "the process dies",
    mine=...,
)

# %% tags=["reveal:shrinks"]
reveal("shrinks", play.after_it_shrinks(lambda path: Windows(path, 32).fetch, range(100, 164)))

# %% [markdown]
"""
No exception, no traceback. `SIGBUS` is the signal for an address with no page behind it, and it kills the process. (The cell ran in its own process, or this notebook would be gone.) On a cluster, all you get is a line like *exit code 135*.

That is the first of three things to count. Here are all of them, on a file of 64 rows of 1,024 tokens, each row a document, with `seq_len` 32. So a window can begin at 992 places in each row, 63,488 in the file:
"""

# %%
before = play.exam(Windows)
play.compare(before)

# %% [markdown]
"""
You will come back to these three lines at the end. Start with the first.

### One gather, behind a guard

Lesson 00 made a table of positions, one for each token. NumPy has something better. `sliding_window_view(tokens, 4)` shows an array as if all its windows of 4 were written out, one per row. They have no memory of their own: they overlap in the memory of `tokens`.
"""

# %%
tokens = np.arange(10, 18)
windows = sliding_window_view(tokens, 4)
print(windows)
print("windows 0 and 3, copied:", windows[[0, 3]].tolist())

# %% [markdown]
"""
Indexing this view with an array of starts copies exactly those rows, in one call that loops in C. This is a **gather**. Here it copies two windows out of five.

**Write `gather`**, in a plain class. `self.size` is the size of the file in bytes when it was opened, and `os.path.getsize(self.path)` is its size now.

- If they differ, raise a `TokenFileError`. Someone will read its message at three in the morning, so it names the file, the size found and the size expected.
- Otherwise return the windows of `width` tokens at `starts`, one per row, with one gather. Keep the file's own dtype, so that as few bytes as possible are moved.
"""

# %% [markdown] tags=["hint:TokenFile"]
"""
<details><summary>Hint</summary>

The guard comes first, and at *every* gather: the file may change after any of them. Is a file that grew still the file you opened? Then: how wide are the rows of the view, and which of its rows do you want?

</details>
"""


# %% tags=["exercise:TokenFile", "file:dataset.py"]
@check
class TokenFile:
    """The tokens of a file, mapped into memory."""

    def __init__(self, path):
        self.path = path
        self.size = os.path.getsize(path)
        rows = np.load(path, mmap_mode="r")
        self.row_len = rows.shape[-1]
        self.tokens = rows.reshape(-1)

    def gather(self, starts, width):
        ### BEGIN SOLUTION
        size = os.path.getsize(self.path)
        if size != self.size:
            raise TokenFileError(f"{self.path}: {size} bytes, expected {self.size}")
        return sliding_window_view(self.tokens, width)[starts]
        ### END SOLUTION


# %% [markdown] tags=["solution:TokenFile"]
"""
One system call before each gather, which is negligible next to the gather itself. A file that grew is refused too: its tokens have changed.
"""

# %%
print(play.after_it_shrinks(lambda path: TokenFile(path).gather, np.array([50_000]), 9))

# %% [markdown]
"""
A named error instead of a dead process. It isn't perfect: a file that is rewritten with exactly the same size still passes, and one that shrinks between guard and gather still kills the process. The library has the same guard, and it can also read without a map: `access="pread"`.

### From windows to `x` and `y`

The model wants 64-bit ids, and the file holds 16-bit ones. A common version of this dataset ends with `.astype(np.int64, copy=False)`, and its author calls that zero-copy.

**Predict.**
"""

# %% tags=["prediction:cast"]
predict("cast", "Does that cast share memory with the file?", "yes", "no", mine=...)

# %% tags=["reveal:cast"]
tokens = np.load(play.TOKENS, mmap_mode="r").reshape(-1)
cast = tokens[1000:1009].astype(np.int64, copy=False)
reveal("cast", "yes" if np.shares_memory(cast, tokens) else "no")

# %% [markdown]
"""
`copy=False` means *don't copy if you don't need to*. An array of 16-bit ids can't serve as one of 64-bit ids, so it is copied. You can't avoid the copy, but you can choose *when* and *where* it happens. Gather first, in 16 bits; then cast once, straight into the memory where the batch will live.

A window of `seq_len + 1` tokens holds both `x` and `y`:

| a window, `seq_len` 5 | the | clever | fox | sings | under | it |
|---|---|---|---|---|---|---|
| `x`, what the model reads | the | clever | fox | sings | under | |
| `y`, what it predicts | clever | fox | sings | under | it | |

`x` is the window without its last token, `y` the window without its first: each token has the one to predict right below it.

**Write `shifted_pair`.** `tokens` are gathered windows, an array of shape `(B, T + 1)`. Return two int64 tensors of shape `(B, T)`.

They must be contiguous, because people write `y.view(-1)`, which raises an error on a slice of a wider array. So the caller passes in memory for both: `out`, an int64 array of shape `(2, B, T)`. Fill its two halves, and return *them* as tensors. (A loader reuses memory: that is cheaper than allocating it.)
"""

# %% [markdown] tags=["hint:shifted_pair"]
"""
<details><summary>Hint</summary>

Assigning into `out[0][:]` casts on the way. `torch.from_numpy` makes a tensor from an array without copying it.

</details>
"""


# %% tags=["exercise:shifted_pair", "file:dataset.py"]
@check
def shifted_pair(tokens, out):
    ### BEGIN SOLUTION
    inputs, targets = out[0], out[1]
    inputs[:] = tokens[:, :-1]
    targets[:] = tokens[:, 1:]
    return torch.from_numpy(inputs), torch.from_numpy(targets)
    ### END SOLUTION


# %% [markdown] tags=["solution:shifted_pair"]
"""
Two casts, no further copies, and both halves share one block of memory.
"""

# %%
windows = TokenFile(play.TOKENS).gather(np.array([7, 2_000]), 9)
x, y = shifted_pair(windows, np.empty((2, 2, 8), np.int64))
print(f"x of two windows of your file:\n{x}\ny:\n{y}")

# %% [markdown] tags=["term:stride"]
"""
The first of your three lines is fixed: a file that changes raises an error that names it. And a batch is one gather and two casts, wherever the windows begin.

**This is a good place to stop.** When you come back, run the cells from the top; what you wrote is checked again and runs. What is left is to choose *which* windows.

## Sitting 2 · Break it: the wrong windows · core

Your `Windows` ignores the rows of the file: it flattens them and keeps counting. So at the end of each document it teaches the model to predict the first word of another one. And its windows start only at multiples of `seq_len`: most windows of the file are never shown.

Here is the fix on a small file: rows of 9 tokens, windows of 4 (so `seq_len` is 3), and a **stride** of 4. The stride is the distance from one window's start to the next. Windows are numbered consecutively, row after row. The numbers are token positions:

```
row 0     0  1  2  3  |  4  5  6  7  |  8        windows 0 and 1
row 1     9 10 11 12  | 13 14 15 16  | 17        windows 2 and 3
```

Each row holds two windows, and one token is left over. Window 2 begins at token 9, not 8: it skips row 0's leftover token. (With a stride of 4, neighbours share no token; lesson 00's stride was `seq_len`.)

With a stride of 1 you get every window there is.

**Write `num_windows`**: how many windows of `seq_len + 1` tokens fit into `num_tokens` tokens, if they begin at 0, `stride`, `2 * stride`, and so on? It is 0 if not even one fits. One too few silently loses the end of every row.
"""

# %% [markdown] tags=["hint:num_windows"]
"""
<details><summary>Hint</summary>

Where does the last window that fits begin, at the latest? How many whole strides is that from 0? And how many windows do you have after 0 strides?

</details>
"""


# %% tags=["exercise:num_windows", "file:dataset.py"]
@check
def num_windows(num_tokens, seq_len, stride):
    ### BEGIN SOLUTION
    width = seq_len + 1
    if num_tokens < width:
        return 0
    return (num_tokens - width) // stride + 1
    ### END SOLUTION


# %% [markdown] tags=["solution:num_windows"]
"""
The latest start is `num_tokens - width`; the `+ 1` counts the window at 0.
"""

# %% [markdown]
"""
**Write `window_offsets`**: the position in the file, in tokens, at which each window begins, without a loop. `windows` is an array of window numbers; `per_row` is how many windows a row holds, and `row_len` how many tokens. In the small file above, `window_offsets(np.array([0, 1, 2, 3]), 2, 9, 4)` is `[0, 4, 9, 13]`.
"""

# %% [markdown] tags=["hint:window_offsets"]
"""
<details><summary>Hint</summary>

Which row is window `w` in, and which window of that row is it? A quotient and a remainder.

</details>
"""


# %% tags=["exercise:window_offsets", "file:dataset.py"]
@check
def window_offsets(windows, per_row, row_len, stride):
    ### BEGIN SOLUTION
    left_over = row_len - per_row * stride
    return windows * stride + windows // per_row * left_over
    ### END SOLUTION


# %% [markdown] tags=["solution:window_offsets"]
"""
Each row that was passed adds its leftover tokens. `windows // per_row * row_len + windows % per_row * stride` gives the same, with one more division.
"""

# %% [markdown]
"""
### Random, yet repeatable

Random windows should look random, and yet be the same when you ask again: after a crash, in another worker, in another order. A random generator can't do that: what it draws depends on earlier draws. A **hash** can. It scrambles a number, always in the same way: `hash_of(indices, seed, epoch)` gives 64 scrambled bits, a `uint64`, for each index. (Pass the seed and the epoch by position.) A different seed or epoch gives different bits.

So there is nothing to save: sample 5 of epoch 2 is a function of three numbers.

**Write `random_windows`**: for each index one of the windows `0` to `count - 1`, namely the remainder of its hash divided by `count`, as int64.
"""

# %% [markdown] tags=["hint:random_windows"]
"""
<details><summary>Hint</summary>

`%` gives the remainders of a whole array at once. Combined with an int64, a uint64 array may turn into floats, so write `np.uint64(count)`. `.astype(np.int64)` comes last.

</details>
"""


# %% tags=["exercise:random_windows", "file:dataset.py"]
@check
def random_windows(indices, count, seed, epoch):
    ### BEGIN SOLUTION
    hashes = hash_of(indices, seed, epoch)
    return (hashes % np.array(count, np.uint64)).view(np.int64)
    ### END SOLUTION


# %% [markdown] tags=["solution:random_windows"]
"""
`view` reads the same bits as int64. A remainder is not perfectly uniform, but its bias is `count / 2**64`, far too small to notice.
"""

# %% [markdown]
"""
## Put it together · core

The dataset itself is given: it only calls what you wrote. Read it once, and follow an index through `fetch` until it is a row of `x`.
"""


# %% tags=["given", "file:dataset.py"]
class MyWindows:
    """Random windows of a token file; none crosses from one row into the next."""

    def __init__(self, path, seq_len, seed=0):
        self.file = TokenFile(path)
        self.seq_len, self.seed = seq_len, seed
        self.rows = len(self.file.tokens) // self.file.row_len
        self.per_row = num_windows(self.file.row_len, seq_len, stride=1)

    def __len__(self):
        """Return how many windows an epoch has: as many as fit side by side."""
        return self.rows * num_windows(self.file.row_len, self.seq_len, stride=self.seq_len)

    def fetch(self, indices, epoch=0):
        """Return x and y, (B, seq_len) int64 each, for the samples of an epoch with these numbers."""
        indices = np.asarray(indices, np.int64)
        windows = random_windows(indices, self.rows * self.per_row, self.seed, epoch)
        starts = window_offsets(windows, self.per_row, self.file.row_len, stride=1)
        tokens = self.file.gather(starts, self.seq_len + 1)
        return shifted_pair(tokens, np.empty((2, len(indices), self.seq_len), np.int64))


# %%
write("dataset.py")
promises()

# %% [markdown]
"""
**What would you notice?** Each card changes one line of a solution. Pick what you would see in a training run; then the card runs with that line.
"""

# %% tags=["play"]
card("a window lost", mine=...)

# %% tags=["play"]
card("an easy target", mine=...)

# %% [markdown]
"""
## Count again

The three lines from the beginning, with your dataset in place of `Windows`. Ten epochs draw 10 x 1,984 windows, some of them twice: seeing every window takes more epochs.
"""

# %%
play.compare(before, play.exam(MyWindows, by_epoch=True))

# %% [markdown]
"""
And it is still fast: a batch is one gather, as in lesson 00, and the guard, the hash and the rows add a few cheap operations per batch.

One cost is left that no counter here shows, because the file is in memory: a disk reads whole pages. A window of 1,025 tokens of 2 bytes is half a page, and half of all windows run into the next page. That makes 1.5 pages on average, 6,144 bytes for 2,050 useful ones: **three bytes read for each one used**. On top of that, the system reads past what you touch, on the guess that you will read on (*readahead*). The guess is good for a video and bad for random windows; in lesson 04 you tell the system which windows you want.
"""

# %% [markdown] tags=["closing"]
"""
**You can now explain**

- why a map larger than RAM costs nothing to open, and what a cast costs;
- what a map does when its file shrinks, and what to check before each gather;
- how to count windows without losing the last one or crossing a row;
- why a hash of (index, seed, epoch) beats a generator.

**The number to remember: 3.** With 2-byte tokens and `seq_len` 1,024, windows that begin anywhere make a disk deliver at least 3 bytes for each useful one.

**Yours to keep**: `lab/mine/dataset.py`. The library's [datasets.py](../npydata/dataset/datasets.py) does the same for lists of files, five more formats and cold files.

**The next pain.** Some random windows come twice, and others never. Lesson 02 deals out every sample once per epoch, without a list.

[00 Start here](00_start_here.ipynb) · **01** · next: [02 An order without a list](02_order_without_a_list.ipynb)
"""
