# %% [markdown] tags=["opening"]
"""
# 04 · How fast is it, and how would you know?

[03 The next batch is ready before you ask](03_async_loader.ipynb) · **04** · next: [05 A pickle is a program](05_pickle_program.ipynb)

**Why you should care.** A loader has two knobs, workers and prefetch factor, and the advice on them is folklore: "more is faster". Here you measure without fooling yourself, let the numbers choose a setting, and then write a model that says *why* it is fast or slow.

**The idea in five lines.**

```python
idle_share(busy)                            # how much of the time somebody stands still
in_turn(methods, repeats)                   # A B, A B, A B, and never the first round
cheapest(rates, step_s)                     # twice as fast as the step, and no more
diagnose(follow(fetch, step, workers, window))    # who waits for whom, and so what helps
with_hints(data, batches, ahead)            # the disk reads while you compute
```

**Three questions** on lesson 03:

1. What can a second thread do while the first one runs Python code: a Python loop, a gather, a read from the disk?
2. With 2 workers and a prefetch factor of 2, how many batches can exist beyond the one you hold?
3. Why does a worker claim a place *before* it makes the batch?

<details><summary>Answers</summary>

1. The gather and the read. Both release the GIL; the loop needs it.
2. Four.
3. Otherwise it could end up holding a batch with no room for it.

</details>

**You need** lessons 00 and 03. Terms: [glossary](../materials/course/glossary.md).

**About 40 to 50 min**, estimated, in two sittings. Where you see `...`, write your code; it is checked at once. Until yours is right, the solution is used, so every cell runs.

| sitting | what you do | minutes |
|---|---|---|
| 1 | measure a loader, plot it over its settings, and choose one | 30 |
| 2 | a model that says why; a file that is not in memory | 20 |
"""

# %%
import sys

sys.path.append("../materials")

from course.lab import begin, card, check, earlier, predict, promises, reveal, sliders, write
from course.play import nb04 as play

begin("04")
first_loader, Loader = earlier("00", "Loader"), earlier("03", "Loader")

# %% tags=["given", "file:tuning.py"]
from typing import NamedTuple

# %% [markdown]
"""
## Sitting 1 · Your first loader, on a real disk · core

The first cell brought back two loaders: `first_loader` from lesson 00, with one thread and a queue, and `Loader` from lesson 03. Now a realistic disk: *uneven*. Most batches take 2 ms, but every fourth takes 14. A step takes 4 ms. Sixty batches, and room for one in the queue.

Bars are steps; a gap is time in which the model stands still.
"""

# %% tags=["nbval-ignore-output"]
busy = play.watch(first_loader(play.UnevenDisk(), 1, prefetch=1))
play.draw_steps(busy)

# %% [markdown] tags=["takeaway"]
"""
The steps come in bursts, with a gap before each, where the model waits for a slow batch.
"""

# %% tags=["prediction:idle"]
predict("idle", "What percentage of the time does the model stand still?", unit="%", mine=...)

# %% [markdown]
"""
**Write `idle_share`**, the number this lesson is about. `busy` is a list of pairs `(begin, end)`, in order: when the model was working. Return the share of the time, from the first begin to the last end, when it was not: 0 for never idle, 0.5 for half of the time. With `[(10, 12), (13, 14)]` it is 1 of 4, so 0.25.
"""

# %% [markdown] tags=["hint:idle_share"]
"""
<details><summary>Hint</summary>

How long was it busy? How long did it all take, from `busy[0]` to `busy[-1]`?

</details>
"""


# %% tags=["exercise:idle_share", "file:tuning.py"]
@check
def idle_share(busy):
    """Return the share of the time, 0 to 1, between the first begin and the last end, that is idle."""
    ### BEGIN SOLUTION
    worked = sum(end - begin for begin, end in busy)
    return 1 - worked / (busy[-1][1] - busy[0][0])
    ### END SOLUTION


# %% [markdown] tags=["solution:idle_share"]
"""
A share has no unit, so it can be compared across machines.
"""

# %% tags=["nbval-ignore-output", "reveal:idle"]
before = idle_share(busy)
reveal("idle", round(100 * before))  # as measured above

# %% [markdown] tags=["takeaway"]
"""
A consumer that waits for its batches is **starved**. Remember the number; at the end of this sitting it has to be close to 0.

## How not to fool yourself · core

You will try many settings, and measure each. Measure something twice and you get two results. Three habits keep you honest.

First: *throw the beginning away*. During its **warm-up** a program starts threads and touches memory for the first time. Training runs for days; you want to know what comes after.

Second: *take turns*. A machine slows down while you measure: it heats up, or a neighbour starts a job. If you measure all of A and then all of B, you compare two different machines. So measure A B, A B, A B.

**Predict.** A and B are *the same loader*. The machine slows down steadily, from 100 to 60 batches a second. You measure all of A, then all of B, and compare their medians.
"""

# %% tags=["prediction:win"]
predict("win", "By how many percent does A win?", unit="%", mine=...)

# %% [markdown]
"""
**Write `in_turn`.** `methods` is a dictionary from names to functions without arguments. Call each of them once, in order: that is a round. Run `repeats` rounds, and one more before them that doesn't count. Return a dictionary from each name to the list of its results, without the first round's.
"""

# %% [markdown] tags=["hint:in_turn"]
"""
<details><summary>Hint</summary>

Make a list of rounds, each a dictionary `{name: result}`. Then collect, for each name, its result in every round but the first.

</details>
"""


# %% tags=["exercise:in_turn", "file:tuning.py"]
@check
def in_turn(methods, repeats):
    """Call A B, A B, ... and return the results by name, those of the first round left out."""
    ### BEGIN SOLUTION
    rounds = [{name: method() for name, method in methods.items()} for _ in range(repeats + 1)]
    return {name: [results[name] for results in rounds[1:]] for name in methods}
    ### END SOLUTION


# %% [markdown] tags=["solution:in_turn"]
"""
`rounds[1:]` is the whole first habit.
"""

# %% tags=["reveal:win"]
reveal("win", play.win_of_a(in_turn))

# %% [markdown] tags=["term:warm-up", "term:spread"]
"""
Third: *say how far apart the repeats are*, from the smallest to the largest. That is the **spread**. In the first line the spreads don't overlap, yet A and B are the same: a spread can't save you from the wrong order. In the second line both cover nearly the same range, and the few percent between them mean nothing.

While two spreads overlap, you have not shown a difference. This is how every verdict in this lesson is reached:
"""


# %% tags=["given", "file:tuning.py"]
def compare(a, b):
    """Say whether the rates `a` are above the rates `b`, as far as their spreads can tell."""
    if min(a) > max(b):
        return "faster"
    return "slower" if max(a) < min(b) else "can't tell"


# %% [markdown]
"""
## Workers times prefetch factors · core

Three loaders read a 134 MB file that is in memory, as fast as they can:

- *ours*, the library's loader;
- a stock `DataLoader` over *our* dataset, which is asked for whole batches;
- the *naive* `DataLoader`, which collects single windows.

Each gets 0, 1 and 2 workers, with a prefetch factor of 2 and of 16; with 0 workers the loop makes its batches itself. For ours a worker is a thread, for the other two a process. Each setting is measured three times, in turn, after a round that doesn't count. This takes about ten seconds.
"""

# %% tags=["prediction:processes"]
predict(
    "processes",
    "The naive DataLoader gets worker processes. How does its speed change?",
    "faster",
    "slower",
    "can't tell",
    mine=...,
)

# %% tags=["nbval-ignore-output", "reveal:processes"]
spread = play.swept()
doubled = [2 * rate for rate in spread["ours", 1]]
print("2 workers of ours, beside twice 1 worker:", compare(spread["ours", 2], doubled))
alone, *processes = (spread["naive DataLoader", workers] for workers in (0, 1, 2))
reveal("processes", compare(max(processes), alone))

# %% [markdown] tags=["takeaway"]
"""
The picture has a line for each loader, each at its best prefetch factor, with the spread as a band, on a logarithmic scale. The table has every setting; compare spreads there, not the last digits. If most of your spreads are wider than their medians, your machine is busy with something else: close what you can, and run the cell again.

A worker *process* has its own memory. Each of its batches is copied into a new block of shared memory and announced by a message; for a small batch that costs more than making it. A thread passes a reference. Processes pay off when a sample costs milliseconds of *Python*, such as decoding an image.

And ours? Compare the spreads of its settings. Where they overlap, you have shown nothing. Where a prefetch factor of 16 is clearly ahead, it is because the loader then makes several of these small batches in one go. And two workers are hardly ever twice as fast as one (the line below the table compares their spreads; *can't tell* means that they are too wide to show it): cheap batches don't need workers, they need a gather.

## Which setting? · core

So which do you pick? For most runs the answer is boring: a step takes milliseconds, a batch from memory takes microseconds, and anything will do. How would you *know*? Measure a few settings, and pick the **cheapest that is twice as fast as your step needs**. Twice, because a loader that is just fast enough starves its consumer whenever the machine is busy.

`cheapest` below does that. `rates` maps each setting to its batches per second, the cheapest setting first; a step of `step_s` seconds uses `1 / step_s` batches a second. If no setting has the headroom, it returns the first that reaches 0.95 of the best rate.
"""


# %% tags=["given", "file:tuning.py"]
def cheapest(rates, step_s):
    """Return the first setting with headroom for a step; if none has, the first of the fastest."""
    needed, best = 2 / step_s, max(rates.values())
    target = needed if best >= needed else 0.95 * best
    return next(setting for setting, rate in rates.items() if rate >= target)


# %% [markdown]
"""
Now let your numbers decide for the uneven disk. Nine settings of *your* `Loader` from lesson 03, measured in turn by your `in_turn`:
"""

# %% tags=["nbval-ignore-output"]
rates = play.rates_of(Loader, in_turn)
workers, prefetch = cheapest(rates, step_s=0.004)
print(f"for a step of 4 ms: workers={workers}, prefetch={prefetch}")

# %% tags=["nbval-ignore-output"]
busy_now = play.watch(Loader(play.UnevenDisk(), 1, prefetch=prefetch, workers=workers))
play.draw_steps(busy_now)

# %% [markdown] tags=["takeaway"]
"""
The same disk and the same step, and hardly a gap.
"""

# %%
after = idle_share(busy_now)
print("the model stands still for less than half as long as before:", after < before / 2)

# %% [markdown]
"""
You measured, the numbers chose, and you can show it. **This is a good place to stop.** When you come back, run the cells from the top; what you wrote is checked again and runs.

## Sitting 2 · A model of the loader · core

You know *that* a setting is fast. To know *why*, follow the batches: a worker *begins* a batch, it is *made*, the consumer *takes* it, and is *done* with it a step later. That is arithmetic on four times. No thread, no clock.
"""


# %% tags=["given", "file:tuning.py"]
class Trip(NamedTuple):
    """The life of one batch: who made it, and when each thing happened."""

    worker: int
    begun: float
    made: float
    taken: float
    done: float


# %% [markdown] tags=["term:pipeline"]
"""
**Write `follow`.** `fetch` is a list: how long each batch takes a worker. `step` is how long the consumer computes on one. `window` is the capacity from lesson 03: how many batches may be in progress or ready. For batch `k`:

1. The worker that is free first makes it; in a tie, the one with the smallest number. At the start all are free, at 0.0.
2. There is room when batch `k - window` was *taken*. The first `window` batches have room at 0.0.
3. It is begun when the worker is free *and* there is room, and made `fetch[k]` later. Only then is its worker free again.
4. It is taken when it is made *and* the consumer is done with the previous batch; and done a `step` later.

Return the list of all trips.
"""

# %% [markdown] tags=["hint:follow"]
"""
<details><summary>Hint</summary>

Keep a list `free` with a time for each worker; `free.index(min(free))` is the first free one. "This *and* that" is a `max` of two times. `trips[-1].done` is when the consumer is done with the previous batch, if there is one.

</details>
"""


# %% tags=["exercise:follow", "file:tuning.py"]
@check
def follow(fetch, step, workers, window):
    """Return the trips of batches that take a worker `fetch` and the consumer `step`."""
    ### BEGIN SOLUTION
    free, trips = [0.0] * workers, []
    for k in range(len(fetch)):
        worker = free.index(min(free))
        room = trips[k - window].taken if k >= window else 0.0
        begun = max(free[worker], room)
        made = free[worker] = begun + fetch[k]
        taken = max(made, trips[-1].done) if trips else made
        trips.append(Trip(worker, begun, made, taken, taken + step))
    return trips
    ### END SOLUTION


# %% [markdown] tags=["solution:follow"]
"""
That is a whole loader in nine lines: two waits, two calls to `max`.
"""

# %% [markdown]
"""
The uneven disk again, as a model. (Your first loader's queue of 1 is a window of 2 here: one batch is in the queue, and the worker holds another.) Move the sliders. With one worker, does any window close the consumer's gaps? And with two?
"""

# %% tags=["play", "nbval-ignore-output"]
sliders(play.model_of, follow, workers=(1, [1, 2, 3, 4]), window=(2, [1, 2, 4, 8, 16]))

# %% [markdown] tags=["takeaway", "term:starved"]
"""
<details><summary>Answer</summary>

With one worker, none: a batch takes its worker 5 ms on average (with little room it waits as well, so the line says more), and the step uses one every 4. With two workers a window of 4 closes nearly all of them, and a window of 2 does not.

</details>

Bars are work, gaps are waits. *Workers raise the average. Room gets you over the slow batches.* So there are two reasons to be starved, and two remedies, and you can tell which you need by who else waits:

| | the consumer waits | a worker waits | what helps |
|---|---|---|---|
| fed | no | yes or no | nothing needed |
| too slow | yes | no | more workers, or cheaper batches |
| no room | yes | yes | a larger prefetch factor |

**Write `diagnose`.** It gets the trips of a run and returns `"fed"`, `"too slow"` or `"no room"`. The consumer is busy from `taken` to `done` of each trip, a worker from `begun` to `made` of each of its own trips; look at worker 0. To *wait* means to be idle, by your `idle_share`, for more than `least` of the time.
"""

# %% [markdown] tags=["hint:diagnose"]
"""
<details><summary>Hint</summary>

Make two lists of pairs, one for the consumer and one for worker 0. Whose wait decides first?

</details>
"""


# %% tags=["exercise:diagnose", "file:tuning.py"]
@check
def diagnose(trips, least=0.05):
    """Say whether the consumer of some trips is "fed", or else "too slow" or "no room"."""
    ### BEGIN SOLUTION
    consumer = idle_share([(trip.taken, trip.done) for trip in trips])
    worker = idle_share([(trip.begun, trip.made) for trip in trips if trip.worker == 0])
    if consumer <= least:
        return "fed"
    return "no room" if worker > least else "too slow"
    ### END SOLUTION


# %% [markdown] tags=["solution:diagnose"]
"""
A worker that waits while the consumer is fed is no waste: it is ahead.
"""

# %% [markdown]
"""
**Predict.** Three loaders on the uneven disk, with a step of 4 ms. *a* has one worker and a window of 1. *b* has one worker and a window of 16. *c* has two workers and a window of 16.
"""

# %% tags=["prediction:wait"]
predict("wait", "Which of them has no room?", "a", "a and b", "a and b and c", mine=...)

# %% tags=["reveal:wait"]
loaders = {"a": (1, 1), "b": (1, 16), "c": (2, 16)}
verdicts = {name: diagnose(follow([2, 2, 2, 14] * 15, 4, *one)) for name, one in loaders.items()}
print(verdicts)
reveal("wait", " and ".join(name for name in loaders if verdicts[name] == "no room"))

# %% [markdown]
"""
## The model against the measurement · core

Is the model any good? In sitting 1 you measured nine settings of your real `Loader`, with real threads, on the uneven disk. There the consumer took batches as fast as it got them: a step of 0. What does the model say? It knows the disk's times and nothing else.
"""

# %% tags=["nbval-ignore-output"]
for (count, factor), rate in rates.items():
    trips = follow([2, 2, 2, 14] * 10, 0, count, window=count * factor)
    model = 1000 * len(trips) / trips[-1].done
    print(f"workers {count}, prefetch {factor}: {rate:4.0f} batches/s, the model says {model:.0f}")

# %% [markdown]
"""
The measured rates are a little lower, since the model treats waking a thread as free; on a busy machine they are much lower.

Where is it wrong? In the plot over workers and prefetch factors, a fetch was a gather from memory. There the model says: two workers, twice as fast. The line below that table compared two workers with twice one, and unless your spreads were too wide to tell, they were slower than that. The model ignores *cores*, and a gather needs one; a sleeping disk doesn't. It ignores *contention*: threads that want the same lock, or the same memory, queue up. A model that fails tells you where to look.

## A file that is not in memory · core

A real disk has one more surprise. Reading a few windows of a *cold* file, one that is not in memory, makes the system read far more than you asked for, since it bets that you will read on. With random windows it loses every bet.

You know better. `data.will_need(indices)` is a *hint*: it says which pages you will need, and that you need no others. It returns at once, and the disk begins to read. Then `data.fetch(indices)` finds them in memory. Sixteen threads could wait for sixteen reads; with hints, one thread has a hundred reads in flight and waits for none.

The hint has to come early, or the disk has no time. `with_hints` gives the hint for each batch `ahead` batches before fetching it:
"""


# %% tags=["given", "file:tuning.py"]
def with_hints(data, batches, ahead):
    """Yield the batches; each is asked for `ahead` batches before it is fetched."""
    for indices in batches[:ahead]:
        data.will_need(indices)
    for k, indices in enumerate(batches):
        if k + ahead < len(batches):
            data.will_need(batches[k + ahead])
        yield data.fetch(indices)


# %% [markdown]
"""
The next cell evicts a 134 MB file from memory, and fetches 16 batches of 8 windows from it: first without hints, then with them, `ahead=4`. A window of this file is 2 KiB, so it spans one or two 4 KiB pages. Readahead fetches 128 KiB around each on many machines, 1 MiB and more on others: 32 to 300 pages.
"""

# %% tags=["prediction:pages"]
predict(
    "pages",
    "How many times fewer pages of the file come into memory with hints?",
    unit="times",
    within=3,
    mine=...,
)

# %% tags=["nbval-ignore-output", "reveal:pages"]
without = play.pages_read(lambda data, batches: map(data.fetch, batches))
hinted = play.pages_read(lambda data, batches: with_hints(data, batches, ahead=4))
print(f"pages of the file in memory: {without:,} without hints, {hinted:,} with them")
reveal("pages", round(without / hinted))

# %% [markdown] tags=["takeaway"]
"""
Without hints, whole stretches of the file came into memory. With hints, the disk reads the pages that hold the windows and hardly any others, many at a time. The library's loader gives such hints itself. For a file that turns out to be in memory, where a hint costs time and gains nothing, it checks less and less often whether they are needed.

## Prove it · core
"""

# %%
write("tuning.py")
promises()

# %% [markdown]
"""
**What would you notice?** The next cell changes one line. Pick what you would see; then it runs with that line.
"""

# %% tags=["play"]
card("a hasty consumer", mine=...)

# %% [markdown]
"""
And the number we began with: how long the model stands still, on the same disk.
"""

# %% tags=["nbval-ignore-output"]
print(f"lesson 00's loader {before:.0%} of the time, yours {after:.0%}")

# %% [markdown] tags=["closing"]
"""
**You can now explain**

- why you throw the beginning away, take turns, and report the spread;
- why more worker processes can make a loader slower;
- how to tell a loader that is too slow from one that has no room, and what helps each;
- what a wrong model is good for;
- why a hint needs no thread, and why it has to come early.

**The number to remember**: a loader should be **2** times as fast as the step that it feeds. More doesn't help; less starves the step on a busy day.

**Yours to keep**: `lab/mine/tuning.py`. The library's [tuning.py](../npydata/loader/tuning.py) has `sweep`, `plot_sweep` and `recommend`, which choose a setting for your own data in the same way.

**The next pain.** The batches come. But the run was killed last night, and to resume it reads a checkpoint from somebody else. What can such a file do to you? Lesson 05 takes one apart, byte by byte.

[03 The next batch is ready before you ask](03_async_loader.ipynb) · **04** · next: [05 A pickle is a program](05_pickle_program.ipynb)
"""
