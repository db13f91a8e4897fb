"""What the learner's reader must keep, and one-line changes that break it."""

import json
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from course.grading.child import in_one_line

from npydata import CheckpointError
from tutorial.mutation import Card
from tutorial.promised import expect


@contextmanager
def a_folder():
    with TemporaryDirectory() as folder:
        yield Path(folder)


def refused(call, what):
    """Raise unless a call ends in the reader's own error; any other is a broken promise."""
    found = "accepted"
    try:
        call()
    except CheckpointError:
        return
    except Exception as error:
        found = in_one_line(error)
    raise AssertionError(f"{what}: {found}, expected a CheckpointError")


def accepted(call, what):
    """Return what a call gives; an error is a broken promise."""
    try:
        return call()
    except Exception as error:
        raise AssertionError(f"{what}: {in_one_line(error)}") from error


def saved(folder, content, old=False):
    path = folder / ("old.pt" if old else "new.pt")
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    return path


# Places in files


def example():
    torch.manual_seed(0)
    base = torch.arange(40, dtype=torch.int32).reshape(5, 8)
    return {"a": torch.randn(3, 4), "b": base[1:4, ::3], "half": torch.ones(5).bfloat16(),
            "turned": base.t(), "one": torch.tensor(7.0), "none": torch.empty(0, 3)}  # fmt: skip


def reads_as_saved(mine, path, content):
    found = accepted(lambda: mine.MyCheckpoint(path), path.name)
    expect(sorted(found), sorted(content), "names")
    for name, tensor in content.items():
        expect(torch.equal(found[name], tensor), True, f"{name} is as saved")
        expect(tuple(found[name].shape), tuple(tensor.shape), f"shape of {name}")


def zip_files_are_read(mine):
    """Every tensor of a zip file is as it was saved"""
    with a_folder() as folder:
        reads_as_saved(mine, saved(folder, example()), example())


def old_files_are_read(mine):
    """Every tensor of a file from before 2020 is as it was saved"""
    with a_folder() as folder:
        reads_as_saved(mine, saved(folder, example(), old=True), example())


def safetensors_are_read(mine):
    """Every tensor of a safetensors file is as it was saved"""
    from safetensors.torch import save_file

    content = {name: one.contiguous() for name, one in example().items()}
    with a_folder() as folder:
        save_file({name: one.clone() for name, one in content.items()}, folder / "x.safetensors")
        reads_as_saved(mine, folder / "x.safetensors", content)


INDICES = [(), 1, -1, slice(1, 3), (slice(None), 2), (slice(0, 5, 2), slice(1, 8, 3)),
           (..., -2), (slice(4, 2),), (2, 5), (slice(None, None, 4), ...)]  # fmt: skip


def slices_are_torchs(mine):
    """A slice is the one that torch would give"""
    whole = torch.arange(80.0).reshape(10, 8)[1:].t()
    with a_folder() as folder:
        found = mine.MyCheckpoint(saved(folder, {"w": whole}))
        for index in INDICES:
            expect(found.slice("w", index).tolist(), whole[index].tolist(), f"w[{index}]")


def spans_are_tight(mine):
    """A view spans from its first byte to its last, and no further"""
    for shape, stride, offset in [((2, 3), (6, 2), 6), ((), (), 3), ((4,), (0,), 2),
                                  ((3, 0), (1, 1), 5), ((5, 1), (7, 90), 1)]:  # fmt: skip
        seen = torch.arange(100).as_strided(shape, stride, offset).flatten().tolist()
        span = (min(seen) * 4, max(seen) * 4 + 4) if seen else (offset * 4, offset * 4)
        expect(tuple(mine.byte_span(shape, stride, offset, 4)), span, f"span of {shape}, {stride}")


def the_file_stays(mine):
    """A tensor may be written to; the file stays as it is"""
    with a_folder() as folder:
        path = saved(folder, {"w": torch.ones(100_000)})
        before = path.read_bytes()
        mine.MyCheckpoint(path)["w"].mul_(5)
        expect(path.read_bytes() == before, True, "the file is unchanged")


def ties_are_kept(mine):
    """Two tensors over one storage share memory"""
    weight = torch.ones(50_000)
    with a_folder() as folder:
        found = mine.MyCheckpoint(saved(folder, {"a": weight, "b": weight[5:]}))
        a, b = found["a"], found["b"]
        a[5] = 9
        expect(b[0].item(), 9.0, "what was written through the other")


def listed_backwards(folder, content):
    """Write a safetensors file whose header lists the last tensor first."""
    header, at = {}, 0
    for name, tensor in content.items():
        place = [at, at := at + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(dict(reversed(header.items()))).encode()
    path = folder / "x.safetensors"
    data = b"".join(tensor.numpy().tobytes() for tensor in content.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def all_of_it_in_few_requests(mine):
    """Everything at once is as it was saved, in requests that go forward and are not too large"""
    content = {"small": torch.arange(12.0)}
    content |= {f"layer.{k}": torch.full((1 << 20,), float(k)) for k in range(3)}
    with a_folder() as folder:
        found = mine.MyCheckpoint(listed_backwards(folder, content))
        state = accepted(found.load, "load")
        for name, tensor in content.items():
            expect(torch.equal(state[name], tensor), True, f"{name} is as saved")
        places = [(run[0].offset, run[-1].end) for run in found.requests]
    expect(places, sorted(places), "the order of the requests")
    expect(max(end - begin for begin, end in places) <= 4 << 20, True, "all have 4 MiB at most")
    expect(len(places), 4, "requests for 12 MiB and their header")


def a_false_count_is_an_error(mine):
    """A storage whose count is not the pickle's is refused"""
    with a_folder() as folder:
        path = saved(folder, {"w": torch.ones(10), "v": torch.ones(3)}, old=True)
        data = path.read_bytes()
        at = data.rindex((3).to_bytes(8, "little"))
        path.write_bytes(data[:at] + (2).to_bytes(8, "little") + data[at + 8 :])
        refused(lambda: mine.MyCheckpoint(path), "a count of 2 for 3 elements")


def hidden_bytes_are_an_error(mine):
    """Bytes of a safetensors file that belong to no tensor, or to two, are refused"""
    entry = {"dtype": "F32", "shape": [2]}
    for places, size in [([(0, 8)], 9), ([(1, 9)], 9), ([(0, 8), (4, 12)], 12),
                         ([(0, 8), (9, 17)], 17), ([(0, 8)], 7)]:  # fmt: skip
        names = {str(k): entry | {"data_offsets": place} for k, place in enumerate(places)}
        header = json.dumps(names).encode()
        with a_folder() as folder:
            path = folder / "x.safetensors"
            path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
            refused(lambda path=path: mine.MyCheckpoint(path), f"tensors at {places} of {size}")


FILE_PROMISES = [
    zip_files_are_read,
    old_files_are_read,
    safetensors_are_read,
    slices_are_torchs,
    spans_are_tight,
    the_file_stays,
    ties_are_kept,
    all_of_it_in_few_requests,
    a_false_count_is_an_error,
    hidden_bytes_are_an_error,
]

FILE_CARDS = [
    Card(
        name="no padding",
        symbol="tutorial.kept.reader.containers.zip.payload_begin",
        line="return at + 30 + name_length + extra_length",
        mutant="return at + 30 + name_length",
        promise=zip_files_are_read,
        symptoms=(
            "The file does not open: its pickle begins with the letter F, or with a Z.",
            "All tensors are shifted by a few numbers, and nobody notices.",
            "Nothing: torch's files have no padding.",
        ),
        right=1,
        reasons={
            2: "The pickle is an entry like the others, and it is read before any tensor.",
            3: "They have: each entry's bytes begin at a multiple of 64.",
        },
    ),
    Card(
        name="eight bytes short",
        symbol="tutorial.kept.reader.containers.legacy.scan_storages",
        line="at += COUNT_BYTES + extents[storage.key].nbytes",
        mutant="at += extents[storage.key].nbytes",
        promise=old_files_are_read,
        symptoms=(
            "Every tensor after the first is shifted by two numbers.",
            "The second count is read out of weights, and refused.",
            "The last tensor is missing.",
        ),
        right=2,
        reasons={
            1: "No tensor is read yet: the second count comes first, and it fails.",
            3: "The scan already fails at the second count, however many follow.",
        },
    ),
    Card(
        name="room at the end",
        symbol="tutorial.kept.reader.containers.safetensors.check_no_gaps",
        line="if at != end:",
        mutant="if at > end:",
        promise=hidden_bytes_are_an_error,
        symptoms=(
            "The last tensor is cut off.",
            "A file with bytes behind its tensors is refused, though all tensors are there.",
            "Nothing, until somebody hides a second file behind the tensors.",
        ),
        right=3,
        reasons={
            1: "The check moves no tensor; it only refuses less.",
            2: "Such a file is refused without the change. With it, it passes.",
        },
    ),
]
