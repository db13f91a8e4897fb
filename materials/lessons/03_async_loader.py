# %% [markdown] tags=["opening"]
"""
# 03 · The next batch is ready before you ask

[02 An order without a list](02_order_without_a_list.ipynb) · **03** · next: [04 How fast is it, and how would you know?](04_throughput.ipynb)

**Why you should care.** A GPU that waits for a batch costs as much as one that works. Your `Loader` from lesson 00 fetches ahead, with one thread and a queue, and it works as long as nothing goes wrong. Here you break it in three ways, and then write one that survives all three: it keeps the order with any number of threads, raises every error where you can see it, and lets you leave at any time.

**The idea in five lines.** Everything else makes these lines safe when they run at the same time:

```python
number = buffer.claim()            # a worker asks for a number, and waits while there is no room
buffer.put(number, make(number))   # it makes that batch, however long it takes
batch = buffer.take_next()         # the training loop waits for its turn, not for any batch
work(buffer, make)                 # the first two lines, until there are no numbers left
buffer.close()                     # it is over: everybody wakes up, and ends
```

**Three questions** on lesson 00:

1. With the next batch fetched while the model computes, how long does a step take?
2. What does a queue's `put` do while the queue is full?
3. After a crash, which batch does a run resume with?

<details><summary>Answers</summary>

1. As long as the slower of the two.
2. It waits until something is taken out.
3. With the first one that the checkpoint has not been trained on.

</details>

**You need** lesson 00. Terms: [glossary](../materials/course/glossary.md).

**About 45 to 55 min**, estimated, in two sittings. Where you see `...`, write your code; it is checked at once. Until yours is right, the solution is used, so every cell runs.

| sitting | what you do | minutes |
|---|---|---|
| 1 | break your loader; a buffer that keeps the order | 30 |
| 2 | close it, and write the loader around it | 25 |
"""

# %%
import sys

sys.path.append("../materials")

from course.lab import begin, card, check, earlier, predict, promises, reveal, sliders, write
from course.play import nb03 as play

begin("03")
Loader = earlier("00", "Loader")

# %% tags=["given", "file:loader.py"]
import threading

# %% [markdown]
"""
## Sitting 1 · Break your loader · core

The first cell brought back your `Loader` from lesson 00 (or the solution, if you have none). Its thread is called `produce`. Here is a dataset in which one sample can't be read: batch 3 raises a `ValueError`, inside `produce`.

**Predict.** What does the training loop notice?
"""

# %% tags=["prediction:bad sample"]
predict(
    "bad sample",
    "Batch 3 can't be read. The training loop gets ...",
    "the error",
    "the end of the epoch",
    "nothing: it waits",
    mine=...,
)

# %% tags=["reveal:bad sample"]
reveal("bad sample", play.three_ways(Loader))

# %% [markdown] tags=["takeaway", "term:thread", "term:GIL"]
"""
The error ended the thread, so nothing more is put into the queue. The loop is stuck in `get`, forever: it gets no exception, and the GPU is at 0 %.

The other two lines of the table show what else is wrong. *Leaving*: you leave the loop with `break`, and the thread is stuck in `put`, because nothing empties the queue. *One thread*: if one is too slow, you want two, and then the batches must still come in order.

That is the list for this lesson. At the end you call `three_ways` again.

## Two things at once · core

First, why threads at all? A **thread** is a second line of execution in your program. It shares all memory with the first, so its batches need no copying. Nothing gets faster; one wait hides behind the other, as in lesson 00: the slower of the two sets the pace.

Python has a catch, the **GIL** (global interpreter lock). Only the thread that holds it can run Python code. A thread has to offer it to the others every 5 ms. Long calls into numpy and torch, such as a gather, release it while they run, and so do disk reads.

In the next cell a second thread runs one of these jobs. Meanwhile the main thread counts 1, 2, 3, ... and offers the lock before each number. We stretch the 5 ms to 30 seconds, so that no thread is *forced* to release the lock.
"""

# %%
import numpy as np

rows, order = np.ones((1_000, 250)), np.random.permutation(1_000)


def python_loop():
    total = 0
    for number in range(2_000_000):
        total += number


def numpy_gathers():
    for _ in range(400):
        rows[order]


# %% tags=["prediction:beside"]
predict(
    "beside",
    "How far does the main thread count beside the Python loop?",
    "0",
    "to about 10",
    "beyond 1,000",
    mine=...,
)

# %% tags=["reveal:beside"]
print("beside the gathers it counts beyond 10:", play.counted_beside(numpy_gathers) > 10)
reveal("beside", str(play.counted_beside(python_loop)))

# %% [markdown]
"""
The main thread never gets to 1. It offers the lock so that the other thread can begin, and gets it back only when the loop is done.

| one thread is | the other one |
|---|---|
| in a Python loop | waits |
| in a gather, or a read from the disk | runs |

Your batches are gathers and reads, so threads will do. (A transform written in Python needs *processes*: each has its own GIL, and passes copies.)

## A queue is not enough · core

A *worker* is a thread that makes batches. The *consumer* is your training loop. Two workers share one queue with room for 4 batches. The consumer took one batch, and is computing. A worker that finds the queue full waits in `put`.
"""

# %% tags=["prediction:made"]
predict(
    "made",
    "How many batches have been made when nothing moves any more?",
    unit="batches",
    within=1,
    mine=...,
)

# %% tags=["reveal:made"]
reveal("made", play.made_with(play.shared_queue))

# %% [markdown]
"""
The consumer has one, four are in the queue, and each worker waits in `put`, holding one more. The queue bounds what is *ready*. What costs memory is what *exists*. And it returns batches in the order in which they were finished.

Two rules fix both. *Claim a place before you make the batch.* And *what comes early waits its turn*. A buffer that follows them is a **reorder buffer**.

### Waiting for something to change

Workers wait for room, and the consumer waits for its batch. They need a place to sleep until something changes. That is a *condition*. It belongs to a lock, and `with self.lock:` means: while I am in here, nobody else is.

Think of a café with one reservation book: whoever holds it (the lock) may read and write it. A guest who wants a table does this:

```python
with cafe.lock:               # alone in here
    while cafe.tables == 0:   # look, and after each call look again
        cafe.freed.wait()     # gives the lock back, sleeps until called, takes the lock again
    cafe.tables -= 1          # still alone: nobody can take that table in between
```

and a guest who leaves does this:

```python
with cafe.lock:
    cafe.tables += 1
    cafe.freed.notify()       # wakes one sleeper; notify_all() wakes all of them
```

It is `while` and not `if`, because being called is no guarantee: between the call and the moment you have the lock again, somebody else may have taken the table. And `wait` and `notify` work only while you hold the lock; without it they raise a `RuntimeError`.

### The buffer

This is the shell of your buffer. You write two methods now, a third in the second sitting. Read `put`, which is given: a worker has finished a batch, perhaps before its turn. It stores the batch under its number and wakes the consumer, which checks whether this is the batch that it needs.
"""


# %% tags=["given", "file:loader.py"]
class Buffer:
    """Results by number: claimed in order, taken in order, at most `capacity` in between."""

    def __init__(self, count, capacity):
        self.count = count  # the numbers are 0 to count - 1
        self.capacity = capacity  # how many results may exist that were not taken yet
        self.claimed = 0  # how many numbers were claimed so far
        self.taken = 0  # how many results were taken so far
        self.results = {}  # number -> result: what is finished and was not taken
        self.closed = False  # whether somebody has called close
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)  # here workers wait for room
        self.ready = threading.Condition(self.lock)  # here the consumer waits for its batch

    def has_room(self):
        return self.claimed - self.taken < self.capacity

    def put(self, number, result):
        """Leave the result of a claimed number; a closed buffer takes none."""
        with self.lock:
            if not self.closed:
                self.results[number] = result
                self.ready.notify()


# %% [markdown]
"""
**Write `claim`**, which a worker calls for its next number. This is where memory is bounded. Three things end the wait: there is room, all numbers are handed out, or the buffer is closed. In the first case return the next number, from 0 on; otherwise return `None`. Hold the lock throughout.
"""

# %% [markdown] tags=["hint:claim"]
"""
<details><summary>Hint</summary>

Three things end the wait: room, the end of the numbers, and a close. Check for all three in the `while`. Afterwards ask which it was. `claimed` is both how many were claimed and the next number.

</details>
"""


# %% tags=["exercise:claim", "file:loader.py"]
@check
def claim(self):
    """Return the next number once there is room for its result; None when there is none left."""
    ### BEGIN SOLUTION
    with self.lock:
        while not (self.closed or self.claimed == self.count or self.has_room()):
            self.room.wait()
        if self.closed or self.claimed == self.count:
            return None
        self.claimed += 1
        return self.claimed - 1
    ### END SOLUTION


Buffer.claim = claim

# %% [markdown] tags=["solution:claim"]
"""
Under the lock no other thread can claim between your check and your increment. So no two workers get the same number. And `put` never has to wait: its place is already claimed. The queue could not promise that.
"""

# %% [markdown]
"""
**Write `take_next`**: this restores the order. Wait in `self.ready` until the *next* result is there, even if later ones are ready. Count it as taken, wake a worker that waits for room, and return the result: it must not stay in `self.results`. A closed buffer gets no more results: if yours isn't there then, raise a `RuntimeError`.
"""

# %% [markdown] tags=["hint:take_next"]
"""
<details><summary>Hint</summary>

`self.taken` results were taken; so which number is next? `self.results.pop(number)` removes and returns.

</details>
"""


# %% tags=["exercise:take_next", "file:loader.py"]
@check
def take_next(self):
    """Return the next result in order, and wait for it if need be."""
    ### BEGIN SOLUTION
    with self.lock:
        while self.taken not in self.results:
            if self.closed:
                raise RuntimeError("the buffer was closed")
            self.ready.wait()
        self.taken += 1
        self.room.notify()
        return self.results.pop(self.taken - 1)
    ### END SOLUTION


Buffer.take_next = take_next

# %% [markdown] tags=["solution:take_next"]
"""
The consumer asks for one number and no other. That is all it takes to keep the order.
"""

# %% [markdown]
"""
Run it step by step: your buffer between two workers and a consumer, with a capacity of 3. Move the slider, and see batches become ready out of order and leave in order. Which batch does batch 1 wait for?
"""

# %% tags=["play", "nbval-ignore-output"]
sliders(play.steps_of, Buffer, step=(4, list(range(1, 18))))

# %% [markdown] tags=["takeaway"]
"""
<details><summary>Answer</summary>

For batch 0.

</details>

What is being made and what is ready form one window, which moves to the right. It is never wider than the capacity.

| after step 4, capacity 3 | |
|---|---|
| being made | 0 and 2 |
| ready | 1, but it is not its turn |
| room | no |

The order is back, and the memory is bounded. **This is a good place to stop.** When you come back, run the cells from the top; what you wrote is checked again and runs.

## Sitting 2 · The way out · core

You leave an epoch early: with a `break`, an error in your own code, or Ctrl-C. With a queue, the worker is then stuck in `put`. Many loaders try this: make room, so that the worker can go on, and then *join* it, that is, wait until it has ended.
"""


# %%
def drain_and_join(ready, worker):
    while not ready.empty():
        ready.get()  # make room, so that the worker can go on
    worker.join()  # and wait until it has ended


# %% tags=["prediction:leaving"]
predict(
    "leaving",
    "The consumer took one batch, and leaves like this. Does it get out?",
    "yes",
    "no",
    mine=...,
)

# %% tags=["reveal:leaving"]
reveal("leaving", play.left_by(drain_and_join))

# %% [markdown] tags=["takeaway", "term:deadlock"]
"""
The worker used the room for more batches, and waits in `put` again. Follow the last column of the table: the waits form a circle. Threads that wait for each other, and so forever, are in a **deadlock**. There is no error, and nothing in any log.

| who | is in | waits for |
|---|---|---|
| worker | `put` | room in the queue |
| queue | full | the consumer, to take a batch |
| consumer | `join` | the worker, to end |

You can't make enough room for a worker that fills it again. You have to *say* that it is over, and wake every sleeper. `claim`, `put` and `take_next` already check `self.closed`.

**Write `close`**: mark the buffer as closed, drop all results, and wake everybody.
"""

# %% [markdown] tags=["hint:close"]
"""
<details><summary>Hint</summary>

Who may be asleep in `room`? And who in `ready`? A dictionary has a method `clear`.

</details>
"""


# %% tags=["exercise:close", "file:loader.py"]
@check
def close(self):
    """Let go of every result, and wake every thread that waits here."""
    ### BEGIN SOLUTION
    with self.lock:
        self.closed = True
        self.results.clear()
        self.room.notify_all()
        self.ready.notify_all()
    ### END SOLUTION


Buffer.close = close

# %% [markdown] tags=["solution:close"]
"""
No queue has to be drained. Each worker ends at its next `claim`, wherever it is now.
"""

# %% [markdown]
"""
## An error in its place · core

Back to the sample that can't be read. The error belongs to a batch, and the consumer waits for exactly that batch. So send it *as a result*, in place of its batch, wrapped so that it can't be mistaken for one:
"""


# %% tags=["given", "file:loader.py"]
class Failed:
    """What a worker raised, on its way to the consumer. The traceback travels in the error."""

    def __init__(self, error):
        self.error = error


# %% [markdown]
"""
**Write `work`**, everything a worker does: claim a number, make its batch with `make(number)`, put it; and repeat until `claim` returns `None`. If `make` raises anything at all, put `Failed(error)` instead, and go on. `BaseException` covers every error: a `sys.exit()` in somebody's dataset doesn't raise an `Exception`.
"""

# %% [markdown] tags=["hint:work"]
"""
<details><summary>Hint</summary>

The first number is 0. What does `while 0:` do? And `try` only what may fail.

</details>
"""


# %% tags=["exercise:work", "file:loader.py"]
@check
def work(buffer, make):
    """Make batches until there is no number left; an error takes the place of its batch."""
    ### BEGIN SOLUTION
    while (number := buffer.claim()) is not None:
        try:
            result = make(number)
        except BaseException as error:
            result = Failed(error)
        buffer.put(number, result)
    ### END SOLUTION


# %% [markdown] tags=["solution:work"]
"""
`:=` gives a value a name and returns the value. The worker carries on after an error: it doesn't know whether the consumer will stop there.
"""

# %% [markdown] tags=["term:prefetch factor"]
"""
## The loader around it · core

Now the part that your training loop sees. The given `batches` and `make` are as in lesson 00: batch `k` starts at sample `k * batch_size`. The **prefetch factor**, `prefetch`, is how many batches you want ahead *per worker*; so the capacity is `workers * prefetch`.

`self.given` counts the batches that the loop was given. It is where a resume begins. It doesn't begin at the last claim: up to `capacity` batches exist that the model has never seen, and a resume would skip them.

**Write `__iter__`.**

1. Make a `Buffer` for the batches that are left: all but the first `self.given`.
2. Start `self.workers` threads that run `work`, as `daemon=True`. The buffer counts from 0; the given `make` adds `first`, so you don't have to.
3. Take as many results as there are batches left. For a `Failed`, raise its error. Otherwise count it as given, then `yield` it. After the last one, `self.given` is 0 again: the next loop is a new epoch.
4. However the loop is left, close the buffer. In a generator, `try: ... finally:` does this: its `finally` runs at the end, on an error, and after a `break`.
"""

# %% [markdown] tags=["hint:Loader"]
"""
<details><summary>Hint</summary>

`threading.Thread(target=work, args=(buffer, make), daemon=True).start()`, in a loop. What should `self.given` be in a state saved inside the training loop, after this batch?

</details>
"""


# %% tags=["exercise:Loader", "file:loader.py"]
@check
class Loader:
    """Batches in order, made ahead by threads; leave the loop whenever you like."""

    def __init__(self, data, batch_size, prefetch, workers=2):
        self.data, self.batch_size = data, batch_size
        self.workers, self.capacity = workers, workers * prefetch
        self.batches = len(data) // batch_size
        self.given = 0  # how many batches the loop was given

    def __iter__(self):
        first = self.given

        def make(number):
            start = (first + number) * self.batch_size
            return self.data.fetch(range(start, start + self.batch_size))

        ### BEGIN SOLUTION
        buffer = Buffer(self.batches - first, self.capacity)
        for _ in range(self.workers):
            threading.Thread(target=work, args=(buffer, make), daemon=True).start()
        try:
            for _ in range(buffer.count):
                batch = buffer.take_next()
                if isinstance(batch, Failed):
                    raise batch.error
                self.given += 1
                yield batch
            self.given = 0  # the next loop is a new epoch
        finally:
            buffer.close()
        ### END SOLUTION


# %% [markdown] tags=["solution:Loader"]
"""
It counts before `yield`: while your loop works on a batch, that batch has been given. `finally` needs no `join`. The threads end by themselves, at their next `claim`.
"""

# %% [markdown]
"""
## Watch it work · core

Twelve batches, real threads, your code. A batch takes a worker between 5 and 60 ms; the consumer computes for 20 ms on each. The line below the picture says how long the same batches take without a worker, one after the other. What is the smallest setting at which the consumer waits only at the start?
"""

# %% tags=["play", "nbval-ignore-output"]
sliders(play.run_of, Loader, workers=(2, [1, 2, 3, 4]), prefetch=(2, [1, 2, 3, 4]))

# %% [markdown] tags=["takeaway"]
"""
<details><summary>Answer</summary>

On paper, two workers with a prefetch factor of 2.

</details>

Find batch 5, the slow one. Later batches are ready before it, but the consumer gets it in its turn.

| to see | look for |
|---|---|
| order | the numbers in the lowest row |
| prefetching | no gap between the dark bars, except perhaps before batch 5 |

The queue let 7 batches exist at once. Your loader has the same two workers, and room for 4.
"""

# %% tags=["prediction:now"]
predict(
    "now",
    "The consumer holds one batch, and nothing moves. How many have been made?",
    unit="batches",
    within=1,
    mine=...,
)

# %% tags=["reveal:now"]
reveal("now", play.made_with(Loader))

# %% [markdown]
"""
The one you hold, and four others: no more batches exist than promised.

## What broke, once more · core
"""

# %%
print("the loop gets", play.three_ways(Loader))

# %%
script = write("loader.py")
promises()

# %% [markdown]
"""
**What would you notice?** Each card changes one line. Pick what you would see; then it runs with that line.
"""

# %% tags=["play"]
card("a look too few", mine=...)

# %% tags=["play"]
card("counted where it was claimed", mine=...)

# %% [markdown] tags=["closing"]
"""
**You can now explain**

- why threads are enough for batches that are made in C;
- why a bounded queue holds more than its bound, and loses the order;
- why a thread that wakes up has to check again;
- why an error travels in place of its batch;
- why draining a queue before `join` can hang forever;
- why a resume counts what was given, not what was made.

**The number to remember**: with 2 workers and a prefetch factor of 2, at most **4** batches are in memory beyond the one you hold.

**Yours to keep**: `lab/mine/loader.py`. The library's [loader](../npydata/loader) is built around the same buffer, in which a number may stand for several small batches; it adds pinned memory, a shuffle, ranks, and a state that can be saved.

**The next pain.** How many workers, and which prefetch factor? And how would you know, when every measurement comes out differently? Lesson 04 measures.

[02 An order without a list](02_order_without_a_list.ipynb) · **03** · next: [04 How fast is it, and how would you know?](04_throughput.ipynb)
"""
