# %% [markdown] tags=["opening"]
"""
# 11 · Documents and mixtures

[10 Train, crash, resume](10_train_crash_resume.ipynb) · **11** (optional) · [the map in 00](00_start_here.ipynb)

**Why you should care.** A window cut out of a token file often holds the end of one document and the beginning of another. The model reads both as one text, and learns what nobody wrote. And where data comes from several sources by weight, usually a die picks each sample's source, and a resumed run can't repeat the rolls. In this lesson you keep documents apart, and compute what others draw.

**The idea in five lines.** Everything else makes these lines exact:

```python
mask = same_document & not_later               # no document sees another
positions = 0, 1, 2, ... in each document      # or counts the tokens of another
targets[last_of_each_document] = IGNORE        # or predicts another
rows = best_fit(lengths, room)                 # whole documents that fill a row
source = the_one_whose_count_goes_up(sample)   # shares that hold at every sample
```

**Three questions** on earlier lessons:

1. What does a window from lesson 00 know about documents?
2. How does a shuffle from lesson 02 know where it is?
3. What does a resume need to know?

<details><summary>Answers</summary>

1. Nothing. It holds whatever tokens are there. (Lesson 01's windows stay within their row; here most documents are shorter than a window.)
2. It doesn't. Each position is computed from its number alone.
3. One number: how many samples were delivered.

</details>

**You need** lessons 00 and 02, and should have seen attention in a transformer. This lesson is **optional**: no other depends on it. No GPU. Terms: [glossary](../materials/course/glossary.md).

**About 40 to 55 minutes**, estimated, in two sittings; 15 to read. You write five short functions. Each is checked as soon as you run its cell; until yours is right, the solution is used, so every cell runs.
"""

# %%
import sys

sys.path.append("../materials")

from course.lab import begin, card, check, earlier, predict, promises, reveal, sliders, write
from course.play import nb11 as play

begin("11")
Windows = earlier("00", "Windows")

# %% tags=["given", "file:documents.py"]
import numpy as np
import torch

from npydata.dataset.packed import IGNORE_INDEX  # a target that the loss leaves out
from npydata.dataset.permutation import Permutation  # a shuffle, as in lesson 02
from npydata.dataset.windows import stream_key  # one key out of several numbers

# %% [markdown]
"""
## Sitting 1 · Break it: what your windows hold · core

Our file has 400 short documents, of 4 to 64 tokens, 27 on average, one after another. Each ends with a token that is used for nothing else: the *end-of-text token*, here 0. Your `Windows` from lesson 00 cuts the file every 64 tokens, and knows nothing of it.

**Predict.** In such a window, a token sees all those before it.
"""

# %% tags=["prediction:seeing"]
predict(
    "seeing",
    "Of 100 tokens, how many can see another document in their window?",
    unit="tokens",
    within=1.2,
    mine=...,
)

# %% tags=["reveal:seeing"]
reveal("seeing", play.score_windows(Windows))

# %% [markdown]
"""
Every place in the windows is used, but most tokens see text that misleads them. And a document that is cut continues in the next window, where no token can see how it began.

## The leak · core

How bad is it? Take one row of three documents, and a small model with one layer of attention and, like any transformer, a position id for each token. Its weights are set by hand: it attends equally to everything it may see, and expects the same words again. That is a good guess, since each of our documents is made of only four words. (A model that knows nothing gives each of the 64 words a probability of 1/64. Its loss is -ln(1/64) = 4.16.)

**Predict.** The third document is read twice: alone, and after the other two.
"""

# %% tags=["prediction:loss"]
predict(
    "loss",
    "How does the third document's loss in the row compare with its loss alone?",
    "lower",
    "the same",
    "higher",
    mine=...,
)

# %% tags=["reveal:loss"]
row = play.three_documents()
reveal("loss", play.measure_leak(row))

# %% [markdown] tags=["term:block-diagonal mask"]
"""
More context, and a worse guess: of the 45 to 64 tokens that the third document sees, 44 are about something else.

The cure is a mask. A **block-diagonal mask** lets each position see itself and those before it in its own document. For a row of two documents, of 3 and 2 tokens, it looks like this; line `q` has a 1 for each position that position `q` sees:

```
1 0 0 0 0
1 1 0 0 0
1 1 1 0 0
0 0 0 1 0
0 0 0 1 1
```

**Write `document_mask`.** `document_ids`, of shape `(B, T)`, says which document each position of `B` rows belongs to: above, `[[0, 0, 0, 1, 1]]`. Return a boolean tensor of shape `(B, 1, T, T)`. The 1 stands for the attention heads, which share the mask.
"""

# %% [markdown] tags=["hint:document_mask"]
"""
<details><summary>Hint</summary>

Compare two views of the ids, one as a column and one as a row: `ids[:, None, :, None]` has the shape `(B, 1, T, 1)`. Which part of the result must go? `tensor.tril()` keeps the lower triangle, including the diagonal.

</details>
"""


# %% tags=["exercise:document_mask", "file:documents.py"]
@check
def document_mask(document_ids):
    ### BEGIN SOLUTION
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same.tril()
    ### END SOLUTION


# %% [markdown] tags=["solution:document_mask"]
"""
The ids needn't start at 0: all that matters is which are equal.
"""

# %%
print(document_mask(torch.tensor([[0, 0, 0, 1, 1]]))[0, 0].int())

# %% [markdown]
"""
**Predict.** The row again, through your mask.
"""

# %% tags=["prediction:exactly"]
predict(
    "exactly",
    "Which of the three documents now have exactly the losses that they have alone?",
    "all of them",
    "only the first",
    "none",
    mine=...,
)

# %% tags=["reveal:exactly"]
mask = document_mask(row.document_ids)
reveal("exactly", play.who_is_as_alone(row, mask))

# %% [markdown] tags=["term:position id"]
"""
The neighbours are out of sight, but their lengths still show. A model knows where a token is from its **position id**. Here the ids run from 0 to 63 through the whole row, so the third document appears to begin at 44.

**Write `within_groups`.** `counts` is an array of the documents' lengths. Return each token's position in its own document, one document after another: `[3, 2]` gives `[0, 1, 2, 0, 1]`. A length may be 0, and there may be no documents at all: then the answer is an empty array.
"""

# %% [markdown] tags=["hint:within_groups"]
"""
<details><summary>Hint</summary>

Number all tokens from 0. What must be subtracted in each document? `np.cumsum(counts)` says where documents end, and `np.repeat(values, counts)` gives each token the value of its document.

</details>
"""


# %% tags=["exercise:within_groups", "file:documents.py"]
@check
def within_groups(counts):
    ### BEGIN SOLUTION
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    ### END SOLUTION


# %% [markdown] tags=["solution:within_groups"]
"""
Each token counts from where its document begins. The library's `PackedDataset` has this very function.
"""

# %%
positions = torch.from_numpy(within_groups(row.lengths))
print("exactly as alone:", play.who_is_as_alone(row, mask, positions))

# %% [markdown]
"""
Not one loss differs, to nine digits.

(The mask has 64 x 64 entries for a row, most of them False. The fast attention kernels take no mask; they take the places where documents begin, called `cu_seqlens`. You can read those off the positions: wherever one is 0.)

One leak is left, in the *targets*. After the last token of a document comes the first of the next. The model is asked to predict it, and can't know it.

**Write `targets_in_row`.** `tokens` and `position_ids` are two tensors of the same length: all tokens of a row, and their positions in their documents. Return the target of each token, which is the next token; for the last token of each document, and for the last of the row, it is `IGNORE_INDEX`, which the loss skips. Leave `tokens` unchanged. (Go by the positions, not by the end-of-text token.)
"""

# %% [markdown] tags=["hint:targets_in_row"]
"""
<details><summary>Hint</summary>

`tokens.roll(-1)` is a copy in which each token has moved one place to the left, and the first has become the last. What is special about the *position* that follows the last token of a document?

</details>
"""


# %% tags=["exercise:targets_in_row", "file:documents.py"]
@check
def targets_in_row(tokens, position_ids):
    ### BEGIN SOLUTION
    targets = tokens.roll(-1)
    targets[position_ids.roll(-1) == 0] = IGNORE_INDEX
    return targets
    ### END SOLUTION


# %% [markdown] tags=["solution:targets_in_row"]
"""
Every row begins with a position 0, so after `roll` the last token of the row is covered, too. (If a document continues in another row, its next token is not in this one: the library reads it from the file.)
"""

# %%
targets = targets_in_row(row.tokens, positions)
print("targets in the row:", int((targets != IGNORE_INDEX).sum()), "of", len(targets))
print("of the documents alone:", sum(row.lengths - 1))

# %% [markdown]
"""
Mask, positions, targets: with these three, documents can share a row and know nothing of each other. **This is a good place to stop.**

## Sitting 2 · Rows that are full · core

Three documents that make exactly 64 tokens: that was luck. A row for each document would be safe, too, but more than half empty. **Packing** means filling rows with several whole documents each. A simple way, hard to beat, is *best fit*. A row begins with the longest document left, since that is the hardest to place. Then it takes the longest that still fits, again and again, until none does.

**Write `fit_slowly`.** `sizes` holds the lengths of some documents, none larger than `room`. Return the rows: for each row the list of its documents' numbers, in the order in which it took them. With `room = 8`:

```python
fit_slowly([3, 6, 2, 5], 8)       # [[1, 2], [3, 0]]: 6 and 2 fill a row, 5 and 3 another
```

(*Slowly*, because it looks through all remaining documents each time. The library doesn't.)
"""

# %% [markdown] tags=["hint:fit_slowly"]
"""
<details><summary>Hint</summary>

Sort the documents' numbers by size, longest first: `sorted(range(len(sizes)), key=..., reverse=True)`. For each row, go through a copy of that list: what still fits goes into the row and out of the list, with `waiting.remove(item)`.

</details>
"""


# %% tags=["exercise:fit_slowly", "file:documents.py"]
@check
def fit_slowly(sizes, room):
    ### BEGIN SOLUTION
    waiting, rows = sorted(range(len(sizes)), key=lambda item: sizes[item]), []
    while waiting:
        row, left = [], room
        while fitting := sum(sizes[item] <= left for item in waiting):
            row.append(waiting.pop(fitting - 1))
            left -= sizes[row[-1]]
        rows.append(row)
    return rows
    ### END SOLUTION


# %% [markdown] tags=["solution:fit_slowly"]
"""
Long documents go first, because short ones fit anywhere.
"""

# %% [markdown]
"""
**Try it.** On the left, windows cut the file; on the right, your code packs it. In JupyterLab, change how many documents are packed together. How much stays empty with 4 documents, and how much with 96?
"""

# %% tags=["play", "nbval-ignore-output"]
sliders(play.rows, fit_slowly, documents=(32, [4, 8, 16, 32, 48, 64, 96]))

# %% [markdown] tags=["takeaway"]
"""
Each stretch of one colour is a document, and white is empty. On the left, many documents are cut where a row ends. With 4 documents 14 % stays empty, with 96 about 5 %, and with all 400 about 1 %: the more there are to choose from, the better they fit.

A corpus has billions of documents. The library shuffles them, and packs them in blocks of 4,096. Where a row can't be filled, it may cut off the end of a document, and it counts what is lost.

## Sources by weight · core

Training data has several sources: 70 % web, 20 % books, 10 % code. The usual way is a die: for each sample, a random number says where it comes from.

**Predict.** 10,000 samples are drawn that way. One source ends up furthest from its share.
"""

# %% tags=["prediction:die"]
predict(
    "die",
    "By how many samples does that source miss its share?",
    unit="samples",
    within=3,
    mine=...,
)

# %% tags=["reveal:die"]
drawn = np.random.default_rng(0).multinomial(10_000, [0.7, 0.2, 0.1])
print("web, books, code:", drawn)
reveal("die", max(abs(drawn - [7000, 2000, 1000])))

# %% [markdown]
"""
That matters little for a large source, but a lot for a rare one. Worse, the run's position is hidden in the generator.

The source can be computed. Decide how many of the first `n` samples come from each source, for *every* `n`. Then sample `n` comes from the source whose count goes up from `n` to `n + 1`; nothing needs to be remembered.

So the counts have to add up to `n`, and from `n` to `n + 1` exactly one may go up. If you round each source's share by itself, they don't. The trick is to *pass on what is left*. With weights 7, 2 and 1, and `n = 4`:

| source | its share of what is left | rounded | left for the others |
|---|---|---|---|
| web | 4 x 7/10 = 2.8 | 3 | 1 |
| books | 1 x 2/3 = 0.67 | 1 | 0 |
| code | 0 x 1/1 = 0 | 0 | 0 |

With the web served, 1 sample is left for books and code, whose weights are 2 and 1: so books get a share of 2 of 3.

**Write `counts_after`.** `samples` is the `n`, and `weights` a list of whole numbers above 0. Return the list of counts: `counts_after(4, [7, 2, 1])` is `[3, 1, 0]`. Where a share ends in exactly .5, round up.
"""

# %% [markdown] tags=["hint:counts_after"]
"""
<details><summary>Hint</summary>

Two numbers change from line to line of the table: how many samples are left, and which weights. In the second line, why is it 2/3 and not 2/10? And Python's `round` rounds 0.5 down to 0: add a half, and round down.

</details>
"""


# %% tags=["exercise:counts_after", "file:documents.py"]
@check
def counts_after(samples, weights):
    ### BEGIN SOLUTION
    counts, total = [], sum(weights)
    for weight in weights:
        counts.append((samples * weight + total // 2) // total)
        samples, total = samples - counts[-1], total - weight
    return counts
    ### END SOLUTION


# %% [markdown] tags=["solution:counts_after"]
"""
`(a + b // 2) // b` is `a / b`, rounded, in whole numbers, so it is exact for sample 10^15, too. Why does exactly one count go up? With one more sample, a rounded share of `samples` goes up by one or stays; if it stays, what is passed on goes up by one. The last source takes what is left.
"""

# %% [markdown]
"""
The library's `MixtureDataset` does the same for whole batches. Here is what it makes of the counts; read it once. A source that reaches its end begins its next epoch, in another order, with a shuffle as in lesson 02.
"""


# %% tags=["given", "file:documents.py"]
class Mixture:
    """Sample i as (source, the source's epoch, its sample there): computed from i alone."""

    def __init__(self, lengths, weights, seed=0):
        self.lengths, self.weights, self.seed = lengths, weights, seed

    def __getitem__(self, i):
        before, after = (np.array(counts_after(n, self.weights)) for n in (i, i + 1))
        source = int(np.argmax(after > before))
        epoch, position = divmod(int(before[source]), self.lengths[source])
        key = int(stream_key(self.seed, source, epoch))
        return source, epoch, Permutation(self.lengths[source], key)(position)


# %%
mixture = Mixture([700, 400, 300], [7, 2, 1])
print("the first ten come from", [mixture[i][0] for i in range(10)])
print("sample 10^12 is", mixture[10**12])

# %% [markdown]
"""
**Try it.** 200 samples of web, books and code. In JupyterLab, change the weight of the web, in tenths; of the rest, books get twice as much as code. The lines show how far the worst source is from what it is owed, in samples too many or too few.
"""

# %% tags=["play", "nbval-ignore-output"]
sliders(play.shares, counts_after, web=(7, list(range(1, 10))))

# %% [markdown] tags=["takeaway"]
"""
The die wanders off. The computed counts stay within one sample. And since sample `n` is computed from `n` alone, a run that resumes at sample `n` continues as if nothing had happened.

In a long run you may want other weights towards the end: more code, say. Don't start a new mixture for that: it would repeat the first samples of each source. The library's `MixtureDataset` takes a *schedule* of weights, and keeps counting from what was delivered before the change.
"""

# %% [markdown]
"""
### Prove it

Each line below is a promise, tested on your code.
"""

# %%
write("documents.py")
promises()

# %% [markdown]
"""
**What would you notice?** Each card changes one line of a solution. Pick what you would see; then the card runs with that line.
"""

# %% tags=["play"]
card("one count for the whole row", mine=...)

# %% tags=["play"]
card("each by itself", mine=...)

# %% [markdown]
"""
## Count again

The count from the start, for your windows and for your rows:
"""

# %%
play.scoreboard(Windows, fit_slowly)

# %% [markdown] tags=["closing"]
"""
Your rows are almost as full as the windows were, and no token sees what it should not.

**You can now explain**

- what a model sees in a window that holds two documents, and why more context can mean a higher loss;
- which three things keep documents apart: the mask, the position ids, the targets;
- why best fit begins with the longest documents;
- how counts that pass on what is left keep the shares at every sample, without a die;
- why a resumed mixture needs no generator, only a number.

**The number to remember: 1.** Of three sources, none is ever more than one sample off its share.

**Yours to keep**: `lab/mine/documents.py`. The library's [packed.py](../npydata/dataset/packed.py), [packing.py](../npydata/dataset/packing.py) and [mixture.py](../npydata/dataset/mixture.py) do the same, with files, blocks and any number of sources: `PackedDataset` and `MixtureDataset`. The mask is in [masks.py](../examples/masks.py), with another for `flex_attention`.

**Where to go from here.** Put a `PackedDataset` into [train.py](../examples/train.py), with `document_mask` in its model. [The clinic](../materials/clinic/README.md) has three bugs.

[10 Train, crash, resume](10_train_crash_resume.ipynb) · **11** (optional) · [the map in 00](00_start_here.ipynb)
"""
