# %% [markdown] tags=["opening"]
"""
# 05 · A pickle is a program

[04 How fast is it, and how would you know?](04_throughput.ipynb) · **05** · next: [06 One tensor out of a large file](06_lazy_checkpoint.ipynb)

**Why you should care.** Most checkpoints that people send you are `.pt` files, and a `.pt` file contains a program. `torch.load` may run it. In this lesson you write the machine that such programs run on. Yours understands what training scripts save, and never calls what the file names.

**The idea in five lines.** The rest of the lesson says what `handlers` holds, and makes it safe:

```python
while running:
    code = data[at]              # one byte: what to do
    at += 1
    handlers[code](machine)      # a value goes onto the stack, or comes off it
# where Python would call something, the handler writes down who asked for what
```

**Three questions** on earlier lessons:

1. What does your `read_tensor` from lesson 00 read, and in which order?
2. Reading 8 KB with `torch.load` took 25 MB. Why?
3. A worker can't read a sample. Where should the training loop see the error?

<details><summary>Answers</summary>

1. Eight bytes, then a header in JSON, then the bytes of one tensor.
2. It rebuilds everything in the file, and you keep one tensor.
3. In place of the batch, with the original traceback.

</details>

**You need** lesson 00. Terms: [glossary](../materials/course/glossary.md).

**About 45 to 55 minutes**, estimated, in two sittings; 15 to read. You write five short pieces. Each is checked as soon as you run its cell. Until yours is right, the solution is used, so every cell runs.

| sitting | what you do | minutes |
|---|---|---|
| 1 | a file with a surprise; a machine that reads plain values | 25 |
| 2 | errors with a place; names and calls that are only noted | 25 |
"""

# %%
import sys

sys.path.append("../materials")

import os
import pickletools

import torch

from course.lab import begin, card, check, earlier, predict, promises, reveal, write
from course.play import nb05 as play

begin("05")
read_tensor = earlier("00", "read_tensor")

# %% tags=["given", "file:reader.py"]
import pickle
import struct

from opcodes import CALLS, MALFORMED, PLAIN, Handlers, Name, Note, check_call, first_note

from npydata import CheckpointError

# %% [markdown]
"""
## Sitting 1 · Break it: a file with a surprise · core

A colleague sends you weights. The file holds one more thing, an object of a class that you have never seen:
"""


# %%
class Surprise:
    def __reduce__(self):  # what Python should call to make the object again
        return os.makedirs, (str(play.SCRATCH / "surprise"), 0o700, True)


sent = play.saved({"weight": torch.arange(6.0).reshape(2, 3), "note": Surprise()})
print("read_tensor:", play.what_happens(lambda: read_tensor(sent, "weight")))

# %% [markdown]
"""
Your `read_tensor` can't read it: this isn't a safetensors file, and its first eight bytes, read as a header length, ask for more memory than there is. So you load it as countless scripts do, with `torch.load(path, weights_only=False)`.

**Predict.**
"""

# %% tags=["prediction:called"]
predict(
    "called",
    "Does the folder `surprise` exist after the load?",
    "yes",
    "no",
    mine=...,
)

# %% tags=["reveal:called"]
torch.load(sent, weights_only=False)
reveal("called", "yes" if (play.SCRATCH / "surprise").exists() else "no")

# %% [markdown]
"""
No line of your script mentions `makedirs`. It could have done anything that your account may do. Since version 2.6, `torch.load` refuses such a file unless you say `weights_only=False`. But it refuses the whole file: you don't get the harmless weights either. That is why many scripts do say it. And there is the waste from lesson 00. Here is a second file, of 50 MB. What does it cost to find out what it holds?
"""

# %%
large = play.twelve_matrices()
print("the file with the surprise:", play.what_happens(lambda: torch.load(sent)).split(":")[0])
print(f"the file of 50 MB: {play.kilobytes(lambda: torch.load(large)):,} KB are read")

# %% [markdown]
"""
So there are three things to fix: a file runs what it likes; if it is refused, you lose its weights too; and the whole file is read just to see what is in it. A `.pt` file is a zip archive with an entry for each tensor's numbers, and one short entry, `data.pkl`, that says what they are. If you could read that entry alone, the numbers could stay where they are. It is a *pickle*.

## A machine with a stack · core

A pickle is a program for a small machine. Python can disassemble it:
"""

# %%
pickletools.dis(pickle.dumps({"step": 300}, protocol=2))

# %% [markdown] tags=["term:opcode"]
"""
Each line is one instruction. It begins with a byte that says what to do, the **opcode**. The machine has a *stack*: values are pushed onto its end and popped off its end. Here an empty dictionary goes onto the stack, then a string, then a number; `SETITEM` takes the last two and stores them in the first. (`BINPUT` keeps a value for later use. `protocol=2` is the version that torch writes.)

Here is the machine. It has everything except the step itself.
"""


# %% tags=["given", "file:reader.py"]
class Machine:
    """What a pickle runs on: its bytes, a table of opcodes, and a stack."""

    def __init__(self, data, handlers, reduce=None, at=0):
        self.data = data
        self.at = at  # the place of the next byte
        self.handlers = Handlers((code[0], handler) for code, handler in handlers.items())
        self.stack = []  # values, the newest at the end
        self.below = []  # stacks that were put aside, the newest at the end (section "Marks")
        self.memo = {}  # values kept for later use, by number
        self.reduce = reduce  # what to push in place of a call (sitting 2)
        self.running = True  # until the opcode STOP

    def take(self, count):
        """Return the next `count` bytes, and move past them."""
        begin, self.at = self.at, self.at + count
        if self.at > len(self.data):  # a slice would only get shorter
            raise ValueError(f"needs {count:,} bytes, {len(self.data) - begin:,} are left")
        return self.data[begin : self.at]

    def number(self, format):
        """Return the next number, and move past it. "<H" is two bytes, the low one first."""
        (number,) = struct.unpack_from(format, self.data, self.at)
        self.at += struct.calcsize(format)
        return number

    def line(self):
        """Return the bytes up to the next newline, and move past it."""
        return self.take(self.data.index(b"\n", self.at) + 1 - self.at)[:-1]

    def run(self, step):
        while self.running:
            step(self)
        return self.result


# %% [markdown]
"""
**Write `step_unguarded`**: run one opcode. Look at the byte at `machine.at`, move the machine past it, and call its handler with the machine. An opcode's argument comes right after it, and its handler reads it from `machine.at` on. (An element of `bytes` is an int, and so are the keys of `machine.handlers`. For any other opcode `machine.handlers[...]` raises a `ValueError`, and so should you.)
"""

# %% [markdown] tags=["hint:step_unguarded"]
"""
<details><summary>Hint</summary>

Three lines. The handler of `BININT2` reads two bytes from `machine.at` on. What must `machine.at` be when the handler is called?

</details>
"""


# %% tags=["exercise:step_unguarded", "file:reader.py"]
@check
def step_unguarded(machine):
    """Run one opcode."""
    ### BEGIN SOLUTION
    code = machine.data[machine.at]
    machine.at += 1
    machine.handlers[code](machine)
    ### END SOLUTION


# %% [markdown] tags=["solution:step_unguarded"]
"""
That is the whole machine: this step, again and again. The table decides what it can do.
"""

# %% [markdown]
"""
Now for the table. Three opcodes push an integer, of one, two or four bytes, and one function makes the handlers of all three: `push_number("<H")` returns a function that is called later, with the machine. A string is stored as its length, followed by that many bytes of UTF-8. Both are given, and so is `PLAIN`, a table of the simplest handlers ([opcodes.py](../materials/course/play/given/opcodes.py)).
"""


# %% tags=["given", "file:reader.py"]
def push_number(format):
    """Return the handler of an opcode whose argument is a number."""
    return lambda machine: machine.stack.append(machine.number(format))


def push_text(length):
    """Return the handler of an opcode with a text; `length` is the format of its length."""

    def handler(machine):
        text = machine.take(machine.number(length))
        machine.stack.append(text.decode("utf-8", "surrogatepass"))

    return handler


HANDLERS = PLAIN | {
    pickle.BININT: push_number("<i"),
    pickle.BININT1: push_number("<B"),
    pickle.BININT2: push_number("<H"),
    pickle.BINFLOAT: push_number(">d"),
    pickle.BINUNICODE: push_text("<I"),
}

# %%
print(Machine(pickle.dumps({"step": 300}, protocol=2), HANDLERS).run(step_unguarded))

# %% [markdown]
"""
Your machine has read its first pickle.

## Marks · core

How many values does a tuple take off the stack? Its opcode doesn't say. Instead, a *mark* is set before the first value, and the opcode takes everything that came after it: `MARK, 2, 3, TUPLE` leaves `(2, 3)`.

A mark could be a special value on the stack, but then the opcode would have to search for it. There is a better way. At a mark, put the *whole* stack aside, the list itself and not a copy, and begin an empty one. Since marks can nest, `machine.below` is a list of the stacks that were put aside:

| after | `stack` | `below` |
|---|---|---|
| `1` | `[1]` | `[]` |
| `1, MARK` | `[]` | `[[1]]` |
| `1, MARK, 2, 3` | `[2, 3]` | `[[1]]` |
| and `pop_to_mark()` returns `[2, 3]` | `[1]` | `[]` |

**Write `mark` and `pop_to_mark`.** `pop_to_mark` returns what was pushed since the last mark, and restores the old stack. If no mark was set, it raises a `ValueError`: the pickle is wrong.
"""

# %% [markdown] tags=["hint:MarkMachine"]
"""
<details><summary>Hint</summary>

The list that you put aside must stay as it is, whatever happens to the new one. In `pop_to_mark` two lists change places, and no value is moved.

</details>
"""


# %% tags=["exercise:MarkMachine", "file:reader.py"]
@check
class MarkMachine(Machine):
    def mark(self):
        """Begin to collect: what follows goes onto a stack of its own."""
        ### BEGIN SOLUTION
        self.below.append(self.stack)
        self.stack = []
        ### END SOLUTION

    def pop_to_mark(self):
        """Return what was pushed since the last mark, and take the mark away."""
        ### BEGIN SOLUTION
        if not self.below:
            raise ValueError("no mark was set")
        values, self.stack = self.stack, self.below.pop()
        return values
        ### END SOLUTION


# %% [markdown] tags=["solution:MarkMachine"]
"""
A new list, not a cleared one: `clear()` would empty the list that was just put aside.
"""

# %% [markdown]
"""
With `pop_to_mark` each collecting opcode is two lines. `collect_tuple` pops first and looks up `machine.stack` afterwards; in one line, `machine.stack.append(tuple(machine.pop_to_mark()))`, Python would look it up first, and append to the list that has just been taken away.
"""


# %% tags=["given", "file:reader.py"]
def collect_tuple(machine):
    values = machine.pop_to_mark()
    machine.stack.append(tuple(values))


HANDLERS |= {pickle.MARK: MarkMachine.mark, pickle.TUPLE: collect_tuple}

# %% [markdown]
"""
**Try it.** Your machine reads `{"sizes": (1, 2, 3, 4), "rate": 0.5}`. In JupyterLab, move the slider, and say what the next opcode will do to the stack before you see it.
"""

# %% tags=["play", "nbval-ignore-output"]
whole = pickle.dumps({"sizes": (1, 2, 3, 4), "rate": 0.5}, protocol=2)
play.show_stack(play.steps(MarkMachine(whole, HANDLERS), step_unguarded))

# %% [markdown] tags=["takeaway"]
"""
Read downwards. Green is the newest value, and an orange bar is a mark: what is to its left is `below`. `TUPLE` takes what came after the last mark, and `SETITEMS` the keys and values after the first. (Opcodes that only keep a value for later are left out.)

Your machine reads plain values, and **this is a good place to stop**. When you come back, run the cells from the top; what you wrote is checked again and runs.

## Sitting 2 · Break it: a download that was cut off · core

**Predict.** A pickle is cut off after each of its bytes in turn, and your machine reads what is left.
"""

# %% tags=["prediction:cut"]
predict(
    "cut",
    "How many kinds of errors do you get?",
    unit="kinds",
    within=1,
    mine=...,
)

# %% tags=["reveal:cut"]
ends = play.endings(lambda data: MarkMachine(data, HANDLERS).run(step_unguarded), whole)
print("cut off after each byte:", dict(ends))
reveal("cut", len(ends))

# %% [markdown]
"""
None of them names the instruction that failed. And a script that catches `CheckpointError` to fall back on an older checkpoint catches none of these.

**Write `step`**: the same as `step_unguarded`, but any of `MALFORMED` becomes a `CheckpointError`. `MALFORMED` is given: a tuple of the errors that a malformed file can cause in a handler. The message begins with the place of the opcode that failed, and says why: `byte 7: ` and the text of the error.
"""

# %% [markdown] tags=["hint:step"]
"""
<details><summary>Hint</summary>

You may call `step_unguarded`. By the time an error arrives, the machine has moved on. So note the place first. `except MALFORMED as error` catches any error in the tuple.

</details>
"""


# %% tags=["exercise:step", "file:reader.py"]
@check
def step(machine):
    """Run one opcode; if the file is wrong, raise a CheckpointError that names the place."""
    ### BEGIN SOLUTION
    begin = machine.at
    try:
        step_unguarded(machine)
    except MALFORMED as error:
        raise CheckpointError(f"byte {begin}: {error}") from None
    ### END SOLUTION


# %% [markdown] tags=["solution:step"]
"""
One `except` covers all handlers, including those that you haven't written. `from None` leaves the inner error out of the traceback: it would only say how Python noticed.
"""

# %%
print(dict(play.endings(lambda data: MarkMachine(data, HANDLERS).run(step), whole)))

# %% [markdown] tags=["term:persistent id", "term:storage"]
"""
Every cut now gives the same error.

## A tensor is a call · core

So far there were only plain values. Here is the pickle of a file that holds one small tensor, as the finished machine will read it. Two terms first. A tensor's **storage** is its run of raw numbers, in its own entry. A **persistent id** is a reference in the pickle to something that is kept elsewhere: here, which storage.

Most opcodes only move values. Three kinds could do more; they are tinted. Move the slider to the end, and watch for them.
"""

# %% tags=["play", "nbval-ignore-output"]
play.show_stack(play.steps_of_a_tensor())

# %% [markdown] tags=["takeaway"]
"""
A tensor is a *call* to `_rebuild_tensor_v2`. Its arguments are a storage, an offset, a shape and strides; the last three say where in the storage the elements are. The tinted opcodes:

| opcode | Python's machine | yours will |
|---|---|---|
| `GLOBAL` | imports the module, which already runs code | note the name |
| `BINPERSID` | has torch read the storage | note which storage |
| `REDUCE` | calls the function | describe the call, or note it |

## Names and calls · core

`GLOBAL` is followed by two lines: the module and the name. `self.line()` gives a line's bytes. Python would import; you push `Name("os.makedirs")`. A `Name` is a string with its own type.

`REDUCE` finds two things on the stack: a name, and above it a tuple of arguments. Python would call; you pop both, and push what `self.reduce(function, args)` returns. (You write that function next.)

**Write `name_global` and `load_reduce`.**
"""

# %% [markdown] tags=["hint:NoteMachine"]
"""
<details><summary>Hint</summary>

`.decode()` turns bytes into text. For `load_reduce`: which of the two was pushed last, so which comes off first?

</details>
"""


# %% tags=["exercise:NoteMachine", "file:reader.py"]
@check
class NoteMachine(MarkMachine):
    def name_global(self):
        """Push the name in the next two lines; nothing is imported."""
        ### BEGIN SOLUTION
        module, name = self.line().decode(), self.line().decode()
        self.stack.append(Name(f"{module}.{name}"))
        ### END SOLUTION

    def load_reduce(self):
        """Where Python would call a function with arguments: push what stands for the call."""
        ### BEGIN SOLUTION
        args, function = self.stack.pop(), self.stack.pop()
        self.stack.append(self.reduce(function, args))
        ### END SOLUTION


# %% [markdown] tags=["solution:NoteMachine"]
"""
The file can name a function, but never gets it. `load_reduce` is the one place where a file could run anything, and it decides nothing: it passes on what it finds.
"""

# %% [markdown]
"""
What does a call become? Three calls and what `reduce` should return for each:

| `function` | `args` | becomes |
|---|---|---|
| `torch._utils._rebuild_tensor_v2` | `(storage '0', 0, (2, 3), (3, 1))`, shortened | what *our* function for it returns: `<float32 [2, 3] in storage '0'>` |
| `os.makedirs` | `("surprise", 448, True)` | `Note("os.makedirs", ("surprise", 448, True))`, which prints as `<os.makedirs: not called>` |
| `torch._utils._rebuild_parameter` | `(<os.makedirs: not called>, True)` | `Note("os.makedirs", args)`: one of its parts was not made, so this can't be made either. The note names that part, and keeps the `args` of this call |

For example, in the third row, `first_note` returns the note that is the first argument; so `reduce` calls nothing, and returns a note with that note's name.

You have four helpers, and need them in this order:

| given | what it does |
|---|---|
| `check_call(function, args)` | raises an error if this can't be a call: `function` is not a `Name`, or `args` is not a tuple; returns nothing |
| `first_note(function, args)` | returns the first part that is itself a note, or `None`; its `.name` says what was not called |
| `CALLS` | a dictionary from the names of calls that torch writes to functions of ours, each called as `ours(*args)` |
| `Note(name, args)` | a note of a call that was not made |

**Write `reduce`.** A file may name anything; most names are not in `CALLS`.
"""

# %% [markdown] tags=["hint:reduce"]
"""
<details><summary>Hint</summary>

Four questions in a row: can it be a call at all, was a part of it not made, do we know the function, and what if we don't? Our functions take the arguments one by one, as torch's would: `ours(*args)`.

</details>
"""


# %% tags=["exercise:reduce", "file:reader.py"]
@check
def reduce(function, args):
    """Return our description of a call that we know, else a note that it was not made."""
    ### BEGIN SOLUTION
    check_call(function, args)
    missing = first_note(function, args)
    if missing is not None:
        return Note(missing.name, args)
    ours = CALLS.get(function)
    return Note(function, args) if ours is None else ours(*args)
    ### END SOLUTION


# %% [markdown] tags=["solution:reduce"]
"""
All our trust is in this table, and every function in it is ours. A file can *choose* from the table, but add nothing to it.
"""


# %% tags=["given", "file:reader.py"]
HANDLERS |= {
    pickle.GLOBAL: NoteMachine.name_global,
    pickle.REDUCE: NoteMachine.load_reduce,
    pickle.NEWOBJ: NoteMachine.load_reduce,  # makes an object of a class: a call, too
}


def describe(data, at=0):
    """Return what a pickle describes, and the place after it. Nothing in it is called."""
    machine = NoteMachine(data, HANDLERS, reduce, at)
    return machine.run(step), machine.at


# %%
found, _ = describe(play.record(sent, "data.pkl"))
print(*found.items(), sep="\n")

# %% [markdown]
"""
You have the weight's description, and a note instead of the surprise. Not one number of the weight was read.

## What broke, once more · core

**Predict.** The file of 50 MB again: your machine reads its `data.pkl`, and lists the tensors.
"""

# %% tags=["prediction:listed"]
predict(
    "listed",
    "How many KB are read to list what is in a file of 50 MB?",
    unit="KB",
    within=3,
    mine=...,
)

# %% tags=["reveal:listed"]
reveal("listed", play.kilobytes(lambda: describe(play.record(large, "data.pkl"))))

# %% [markdown]
"""
It was 50,000 KB. The numbers stay where they are, however many there are.
"""

# %%
write("reader.py")
promises()

# %% [markdown]
"""
**What would you notice?** The card changes one line of the *solution* (yours may use other names). Pick what you would see; then the solution runs with that line.
"""

# %% tags=["play"]
card("not every error", mine=...)

# %% [markdown] tags=["closing"]
"""
**You can now explain**

- why a pickle is a program, and what its machine is made of;
- what `weights_only=False` allows, and why the default refuses a whole file;
- how to read a pickle without running it, and where the one dangerous place is;
- why any damage should end in one kind of error, with its place.

**The number to remember**: **3** kinds of opcodes can do more than move values: they name something, fetch something, or call something. Your machine only writes down what they ask for.

**Yours to keep**: `lab/mine/reader.py`. The library's [machine](../npydata/reader/pickle/machine.py) inherits the opcodes that push plain values from Python's own unpickler, and handles names, calls and containers as yours does; it has the opcodes of protocols 2 to 5, and limits on what a file may ask for.

**The next pain.** You know what is in the file, but not where. `zipfile` would find the numbers for you, but it copies the whole storage. Lesson 06 finds the place in the file itself, even in files that aren't archives, and reads a corner of a matrix from that corner's bytes alone.

[04 How fast is it, and how would you know?](04_throughput.ipynb) · **05** · next: [06 One tensor out of a large file](06_lazy_checkpoint.ipynb)
"""
