# %% [markdown] tags=["opening"]
"""
# 06 · One tensor out of a large file

[05 A pickle is a program](05_pickle_program.ipynb) · **06** · next: [07 Save without stopping](07_async_checkpointer.ipynb)

**Why you should care.** You want one tensor, and `torch.load`, the way most people call it, reads 20 GB to get it. In this lesson you find a tensor's bytes in its file, check what the file says about them, and read nothing else: first from a disk, then from a server.

**The idea in five lines.** The rest of the lesson finds `begin`, and refuses files that lie about it:

```python
stored = describe(pickle_of(file))["layer.7"]            # lesson 05
begin = where_it_lies(file, stored.storage)              # a few bytes of headers
memory = file.map(begin, storage_bytes)                  # nothing is read yet
tensor = view(memory, dtype, (shape, strides, offset))   # nothing is copied
tensor[2:5, :10]                                         # now a few pages are read
```

**Three questions** on earlier lessons:

1. What are the `data_offsets` in a safetensors header counted from?
2. What does a pickle hold in place of a tensor's numbers?
3. You map a file of 20 GB. What does that cost, and when do you pay the rest?

<details><summary>Answers</summary>

1. The end of the header.
2. A persistent id: the key of a storage. The storage is a separate entry in the file.
3. Next to nothing at first; then one page each time you touch one that is not in memory.

</details>

**You need** lessons 00 and 05. Terms: [glossary](../materials/course/glossary.md).

**About 45 to 60 minutes**, estimated, in two sittings; 15 to read. You write four short functions. Each is checked as soon as you run its cell. Until yours is right, the solution is used, so every cell runs.

| sitting | what you do | minutes |
|---|---|---|
| 1 | a header that lies; where the bytes begin | 25 |
| 2 | slices; files from before 2020; a file of 2 GB on a server | 30 |
"""

# %%
import inspect
import sys
import zipfile

sys.path.append("../materials")

from course.lab import begin, card, check, earlier, predict, promises, reveal, sliders, write
from course.play import nb06 as play

begin("06")
read_tensor = earlier("00", "read_tensor")
describe = earlier("05", "describe")

# %% tags=["given", "file:checkpoint.py"]
import json

import torch
from files import DTYPES, LEGACY, ZIP, File, directory, first_pickles, slice_view, tensors_in
from opcodes import Storage, Stored

from npydata import CheckpointError

# %% [markdown]
"""
## Sitting 1 · Break it: a header that lies · core

Back to `read_tensor` from lesson 00. It trusts the header: it goes where `data_offsets` point, and takes what it finds. Here is a file with two tensors, whose header somebody has changed.
"""

# %%
liar = play.false_header()
for name, entry in play.header_of(liar)[0].items():
    print(name, entry)

# %% tags=["prediction:lie"]
predict(
    "lie",
    'What does read_tensor(liar, "b") give?',
    "an error",
    "the numbers of b",
    "the numbers of a",
    mine=...,
)

# %% tags=["reveal:lie"]
numbers = read_tensor(liar, "b").tolist()
print(numbers)
reveal("lie", "the numbers of a" if numbers[0] == 0 else "the numbers of b")

# %% [markdown]
"""
A model would train on with another tensor's weights, and nothing raises an error. Now a second file. It begins as the safetensors file of a tensor `w`, and somebody has appended a `.pt` file to it:
"""

# %%
both = play.two_in_one()
print("read_tensor:", read_tensor(both, "w").tolist())
print("is_zipfile:", zipfile.is_zipfile(both))

# %% [markdown]
"""
A zip file is read from its *end*. So to a program that reads from the beginning, this file is harmless weights; to one that looks for a zip directory, it is something else.

Those are two things to fix. The third is what `torch.load` costs. A file of 50 MB holds twelve matrices, and you want one of them, or a corner of one:
"""

# %%
before = play.exam(lambda path, name: torch.load(path)[name])
play.compare(before)

# %% [markdown]
"""
## No gaps · core

safetensors has one rule against both: the tensors fill the file after the header, and *each byte belongs to exactly one of them*. Nothing overlaps, nothing is left over.

**Write `check_no_gaps`.** `places` is a list of pairs: where a tensor begins in the file and where it stops, one byte after its last. They come in any order, and there may be none at all. Together they must fill the file from byte `begin` to byte `end`. Where they don't, raise a `CheckpointError` (with what you found and what you expected).
"""

# %% [markdown] tags=["hint:check_no_gaps"]
"""
<details><summary>Hint</summary>

Sort them. Where must the first one begin? And each one after it?

</details>
"""


# %% tags=["exercise:check_no_gaps", "file:checkpoint.py"]
@check
def check_no_gaps(places, begin, end):
    """Refuse tensors that overlap, leave a hole, or don't reach exactly to the end."""
    ### BEGIN SOLUTION
    at = begin
    for first, stop in sorted(places):
        if first != at:
            raise CheckpointError(f"a tensor begins at byte {first}, expected {at}")
        at = stop
    if at != end:
        raise CheckpointError(f"the tensors end at byte {at}, the file at {end}")
    ### END SOLUTION


# %% [markdown] tags=["solution:check_no_gaps"]
"""
It is not enough that the sizes add up: an overlap and a hole may cancel out. (Pairs are sorted by where they begin, then by where they stop, so an empty tensor comes before another that begins at the same byte.)
"""

# %%
for path in (liar, both):
    print(path.name, play.what_happens(lambda path=path: check_no_gaps(*play.places_in(path))))

# %% [markdown]
"""
## Where the bytes begin · core

Now the files of `torch.save`. Since 2020 they are zip archives. Each entry has a *local header*: a fixed part of 30 bytes, the entry's name, and an *extra field*. Then come its bytes. At the end of the file a *directory* lists all entries: name, size, and where its local header is. It has an extra field for each entry as well, but a separate one.

**Predict.** A small file holds the numbers 0 to 5, as 64-bit integers. We take the position of the local header, and add 30, the length of the name, and the length of the *directory's* extra field.
"""

# %% tags=["prediction:place"]
predict(
    "place",
    "What do we find there?",
    "the numbers",
    "other bytes",
    mine=...,
)

# %% tags=["reveal:place"]
small = play.six_numbers()
reveal("place", play.where_the_directory_leads(small))

# %% [markdown]
"""
Wrong bytes, and no error. The two extra fields differ. torch pads the local one with the letter Z, so that each storage begins at a multiple of 64 bytes; the directory doesn't mention it.

**Write `payload_begin`**: where do the bytes of an entry begin in the file? `header` is the fixed part, 30 bytes, which begins at byte `at` of the file. Its bytes 26 and 27 hold the length of the name, 28 and 29 that of the extra field, the low byte first (*little-endian*).
"""

# %% [markdown] tags=["hint:payload_begin"]
"""
<details><summary>Hint</summary>

`int.from_bytes(two_bytes, "little")` turns two bytes into a number. Which three things lie between byte `at` and the entry's bytes?

</details>
"""


# %% tags=["exercise:payload_begin", "file:checkpoint.py"]
@check
def payload_begin(header, at):
    """Return where the bytes after a local header begin."""
    ### BEGIN SOLUTION
    name_length = int.from_bytes(header[26:28], "little")
    extra_length = int.from_bytes(header[28:30], "little")
    return at + 30 + name_length + extra_length
    ### END SOLUTION


# %% [markdown] tags=["solution:payload_begin"]
"""
No rounding to 64: the padding *is* the extra field. A zip file written by another program has no padding, and works the same way.
"""

# %%
file = File(small)
for name, (at, nbytes) in directory(file).items():
    begin = payload_begin(file.read(at, 30), at)
    print(f"{name:<24} local header at {at:>5}, bytes {begin:>5} to {begin + nbytes:>5}")

# %% [markdown]
"""
The entries of a `torch.save` file: the bytes of each begin at a multiple of 64. `data/0` holds a storage's numbers, the *payload*; `data.pkl` says what they are, and is what your machine from lesson 05 reads.

You can find a storage in a `.pt` file without reading the rest, and **this is a good place to stop**. When you come back, run the cells from the top; what you wrote is checked again and runs.

## Sitting 2 · A tensor over bytes · core

The bytes of a storage are one long row of elements. Three things say how a matrix is laid out in it, and lesson 05 found them in the pickle:

- its *shape*, say `(4, 6)`: 4 rows of 6;
- its *strides*, `(6, 1)`: one row further is 6 elements further, one column further is 1;
- its *offset*: which element of the storage is its first, 0 here.

So row `r`, column `c` is element `offset + 6 * r + 1 * c`. A slice is only another shape, other strides and another offset. `matrix[1:3, ::2]` has shape `(2, 3)`, strides `(6, 2)` and offset 6: every second column is a step of 2. The transpose has shape `(6, 4)` and strides `(1, 6)`. Nothing is copied for any of them.

`view` is given. It makes a tensor over memory from these three. (It goes through an untyped storage, because `torch.frombuffer` refuses memory of 0 bytes, and a tensor may have none.)
"""


# %% tags=["given", "file:checkpoint.py"]
def view(memory, dtype, seen):
    """Return a tensor over memory, as (shape, strides, offset) say; nothing is copied."""
    shape, stride, offset = seen
    storage = torch.from_numpy(memory).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


# %% [markdown] tags=["term:byte span"]
"""
Which bytes do we need for a view? Those from the first element it touches to the last, and everything in between: its **byte span**. That is all that has to be mapped or fetched.

**Write `byte_span`.** `view` is `(shape, strides, offset)`: strides and offset count *elements*. `itemsize` is the number of bytes in an element. Return a pair of *bytes*, both counted from the beginning of the storage: the first byte of the span, and the byte after its last. There may be any number of dimensions, including none. No stride is negative. A view without elements begins and stops at its offset, in bytes.

```python
byte_span(((2, 3), (6, 2), 6), 4)      # (24, 68): from element 6 to element 16
```
"""

# %% [markdown] tags=["hint:byte_span"]
"""
<details><summary>Hint</summary>

Which element is the last one? In each dimension, how many steps is it from the first to the last, and how long is a step?

</details>
"""


# %% tags=["exercise:byte_span", "file:checkpoint.py"]
@check
def byte_span(view, itemsize):
    """Return the first byte of its storage that a view touches, and the one after the last."""
    ### BEGIN SOLUTION
    shape, stride, offset = view
    if 0 in shape:
        return offset * itemsize, offset * itemsize
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return offset * itemsize, (last + 1) * itemsize
    ### END SOLUTION


# %% [markdown] tags=["solution:byte_span"]
"""
The number of elements doesn't matter: a column spans far more than it holds. The library runs these very lines.
"""

# %% [markdown]
"""
**Try it.** A slice of the 4 × 6 matrix, and below it the storage. In JupyterLab, change its rows and the step of its columns. Which slices span much more than they hold?
"""

# %% tags=["play", "nbval-ignore-output"]
sliders(
    play.slices,
    byte_span,
    rows=(2, [1, 2, 3]),
    column_step=(2, [1, 2, 3, 4, 5, 6]),
)

# %% [markdown] tags=["takeaway"]
"""
Dark elements are wanted, light green ones lie in between. Whole rows span nothing else; a single column spans most of its rows.

Now put it together. `File` is given: `file.read(at, nbytes)` returns bytes, and `file.map(at, nbytes)` an array over bytes that are not read until you touch them ([files.py](../materials/course/play/given/files.py)). This class is given, too. Read `slice` and `in_entry`: they call your functions.
"""


# %% tags=["given", "file:checkpoint.py"]
class MyCheckpoint:
    """The tensors of a file by name; each is read when it is asked for.

    `describe` is the pickle machine of lesson 05.
    """

    def __init__(self, file, describe):
        self.file, self.describe = file, describe
        start = file.read(0, len(LEGACY))
        try:
            if start.startswith(ZIP):
                self.open_zip()
            elif start == LEGACY:
                self.open_legacy()
            else:
                self.open_safetensors()
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"not a checkpoint that can be read: {error}") from None

    def __getitem__(self, name):
        return self.slice(name, ...)

    def slice(self, name, index):
        """Return a slice of a tensor, from the bytes it spans."""
        stored = self.tensors[name]
        dtype = stored.storage.dtype
        shape, stride, offset = slice_view((stored.shape, stored.stride, stored.offset), index)
        first, stop = byte_span((shape, stride, offset), dtype.itemsize)
        begin, end = self.place(stored.storage.key)
        if begin + stop > end:
            raise CheckpointError(f"{name!r} needs {stop} bytes of a storage of {end - begin}")
        memory = self.file.map(begin + first, stop - first)
        return view(memory, dtype, (shape, stride, 0))

    def open_zip(self):
        self.entries = directory(self.file)
        begin, end = self.in_entry("data.pkl")
        value, _ = self.describe(self.file.read(begin, end - begin))
        self.tensors = tensors_in(value)
        self.place = lambda key: self.in_entry(f"data/{key}")

    def in_entry(self, name):
        at, nbytes = self.entries[name]
        begin = payload_begin(self.file.read(at, 30), at)
        return begin, begin + nbytes

    def open_safetensors(self):
        begin = 8 + int.from_bytes(self.file.read(0, 8), "little")
        header = json.loads(self.file.read(8, min(begin - 8, self.file.size)))
        header.pop("__metadata__", None)
        self.tensors, places = {}, {}
        for name, entry in header.items():
            storage = Storage(name, DTYPES[entry["dtype"]], torch.Size(entry["shape"]).numel())
            steps = torch.empty(entry["shape"], device="meta").stride()
            self.tensors[name] = Stored(storage, tuple(entry["shape"]), steps, 0)
            first, stop = entry["data_offsets"]
            if stop - first != storage.numel * storage.dtype.itemsize:
                raise ValueError(f"{stop - first} bytes for {storage.numel} elements")
            places[name] = begin + first, begin + stop
        check_no_gaps(list(places.values()), begin, self.file.size)
        self.place = places.__getitem__

    def open_legacy(self):
        # a magic number, a version, the writer's machine, the object, the keys of its storages
        (*_, value, keys), at = first_pickles(self.file, 5, self.describe)
        self.tensors = tensors_in(value)
        storages = {one.storage.key: one.storage for one in self.tensors.values()}
        places = scan_storages(self.file, at, [storages[key] for key in keys])
        self.place = places.__getitem__


# %%
ckpt = MyCheckpoint(File(play.twelve_matrices()), describe)
same = torch.equal(ckpt["layer.7"], torch.load(play.twelve_matrices())["layer.7"])
print(len(ckpt.tensors), "tensors; layer.7 is as torch.load has it:", same)

# %% [markdown]
"""
## Files from before 2020 · core

Older files aren't archives but five pickles, one after another, followed by the storages. There is no directory. So `torch.load` reads such a file whole, and refuses `mmap=True`.

**Predict.** A file holds two storages of six 32-bit numbers each, 48 bytes in all.
"""

# %% tags=["prediction:after"]
predict(
    "after",
    "How many bytes follow the fifth pickle?",
    unit="bytes",
    within=1,
    mine=...,
)

# %% tags=["reveal:after"]
tail = play.after_the_pickles(describe)
reveal("after", len(tail))
print("the first 8 bytes, as a number:", int.from_bytes(tail[:8], "little"))

# %% [markdown]
"""
Before each storage is an 8-byte number, little-endian, which says how many elements it has. So the boundaries *are* in the file: each count leads to the next.

**Write `scan_storages`**: find each storage, and read no element. The first count is at byte `at`, and `file.read(at, 8)` reads it. `storages` lists them in the file's order. Each has a `key`, a `dtype` (with an `itemsize`), and `numel`, how many elements the pickle says it has. If the count in the file is not `numel`, raise a `CheckpointError`. Return a dictionary from each key to a pair of places in the file: the byte at which the storage's elements begin, and the byte after their last.
"""

# %% [markdown] tags=["hint:scan_storages"]
"""
<details><summary>Hint</summary>

Draw two storages, each with its count before it. `int.from_bytes(eight_bytes, "little")` turns them into a number.

</details>
"""


# %% tags=["exercise:scan_storages", "file:checkpoint.py"]
@check
def scan_storages(file, at, storages):
    """Return (first byte, byte after the last) of each storage by its key."""
    ### BEGIN SOLUTION
    places = {}
    for storage in storages:
        count = int.from_bytes(file.read(at, 8), "little")
        if count != storage.numel:
            raise CheckpointError(f"storage {storage.key}: {count} elements, not {storage.numel}")
        first = at + 8
        at = first + count * storage.dtype.itemsize
        places[storage.key] = first, at
    return places
    ### END SOLUTION


# %% [markdown] tags=["solution:scan_storages"]
"""
To reach the thousandth storage you read a thousand counts, and not one element. That is enough to map any of them.
"""

# %% [markdown]
"""
## What broke, once more · core

**Predict.** The file of twelve matrices, 50 MB, has 12,289 pages, and the system drops them all from memory. Then we open it and copy `ckpt["layer.7"][2:5, :10]`: 10 columns of 3 rows. A row of this matrix is 4,096 bytes, and so is a page.
"""

# %% tags=["prediction:pages"]
predict(
    "pages",
    "How many of the 12,289 pages come from the disk?",
    unit="pages",
    within=2,
    mine=...,
)


# %% tags=["reveal:pages", "nbval-ignore-output"]
def read(path, name):
    return MyCheckpoint(File(path), describe)[name]


after = play.exam(read)
play.compare(before, after)
reveal("pages", after["pages read for 10 columns of 3 rows"])

# %% [markdown]
"""
The first page holds the bytes that say what the file is, and the pickle. The last pages hold the directory. In between are the local header of one entry, and the rows that you touched. The other eleven matrices don't matter, however large they are.
"""

# %%
write("checkpoint.py")
promises()

# %% [markdown]
"""
**What would you notice?** The card changes one line of the *solution* (yours may use other names). Pick what you would see; then the solution runs with that line.
"""

# %% tags=["play"]
card("room at the end", mine=...)

# %% [markdown]
"""
## A file of 2 GB on a server · core

A reader that knows every position can also plan: the library's `load()` sorts them and fetches neighbours together, in file order. That matters most when each read is a request.

Asked for `Range: bytes=100-199`, a server sends those 100 bytes and no others. So `read(at, nbytes)` becomes a request, and nothing else in your code has to change:
"""

# %%
from files import Remote

print(inspect.getsource(Remote.read))

# %% [markdown]
"""
The next cells start a server on this machine. It serves one `.pt` file of 2 GB, 64 matrices of 32 MB (the file is *sparse*: it takes almost no space on your disk). You ask for 10 columns of 3 rows of one matrix; a row is 16 KB. Before that, your reader has to open the file: what does it look at?

**Predict.** How many requests does your reader make, and how much does the server send?
"""

# %% tags=["prediction:requests"]
predict("requests", "How many requests?", unit="requests", within=1.5, mine=...)

# %% tags=["prediction:sent"]
predict(
    "sent",
    "How much of the 2 GB is sent?",
    "less than 100 KB",
    "about 1 MB",
    "a whole matrix, 32 MB",
    mine=...,
)

# %% tags=["reveal:requests", "nbval-ignore-output"]
served = play.over_http(MyCheckpoint, describe)
reveal("requests", len(served))

# %% tags=["reveal:sent"]
reveal("sent", "less than 100 KB" if sum(served) < 100_000 else "about 1 MB")

# %% [markdown] tags=["closing"]
"""
| requests | what they ask for |
|---|---|
| 1 and 2 | the file's size; its first bytes, which say what kind of file it is |
| 3 | the end of the file, where the directory is |
| 4 and 5 | the local header of `data.pkl`, and the pickle |
| 6 and 7 | the local header of one storage, and the span of your slice: two rows and 10 columns |

The rest of the 2 GB never left the server. The library asks for more at once, and so less often: `open_checkpoint("https://...")`.

**You can now explain**

- why a header must be checked before it is trusted, and why safetensors allows no gaps;
- why a zip directory doesn't say where an entry's bytes begin;
- how any slice is a shape, strides and an offset, and what its byte span is;
- why files from before 2020 can be read lazily, although they have no directory;
- what a reader asks a server for when it wants one tensor of a large file.

**The number to remember**: a few pages, or a few requests, to open a file of any size; after that, the bytes you touch.

**Yours to keep**: `lab/mine/checkpoint.py`. The library's `open_checkpoint` reads sharded sets and folders as well. `npydata convert FILE OUT.safetensors` gets the weights out of a pickle.

**The next pain.** Loading is fast now, but every save stops training until the last byte is written. Lesson 07 saves in the background. It begins with the layout of a safetensors file: if you know where every byte goes, the copy that you make in memory can *be* the file.

[05 A pickle is a program](05_pickle_program.ipynb) · **06** · next: [07 Save without stopping](07_async_checkpointer.ipynb)
"""
