"""What must hold of the reader of lesson 06, and one-line changes that break it."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from course.exercises import nb06
from course.lab import Card, earlier
from course.play.nb06 import File, with_header
from course.promises.nb01 import expect
from course.promises.nb05 import refused

PATH = Path("file.pt")


def opened(mine: Any) -> Any:
    return mine.MyCheckpoint(File(PATH), earlier("05", "describe"))


def example() -> dict[str, torch.Tensor]:
    base = torch.arange(40, dtype=torch.int32).reshape(5, 8)
    return {"a": torch.arange(12.0).reshape(3, 4), "b": base[1:4, ::3], "turned": base.t(),
            "one": torch.tensor(7.0), "half": torch.ones(5).half(),
            "none": torch.empty(0, 3)}  # fmt: skip


def reads_as_saved(mine: Any) -> None:
    found = opened(mine)
    expect(sorted(found.tensors), sorted(example()), "names")
    for name, tensor in example().items():
        expect(tuple(found[name].shape), tuple(tensor.shape), f"shape of {name}")
        expect(torch.equal(found[name], tensor), True, f"{name} is as saved")


def zip_files_are_read(mine: Any) -> None:
    """Every tensor of a .pt file is as it was saved"""
    torch.save(example(), PATH)
    reads_as_saved(mine)


def old_files_are_read(mine: Any) -> None:
    """Every tensor of a file from before 2020 is as it was saved"""
    torch.save(example(), PATH, _use_new_zipfile_serialization=False)
    reads_as_saved(mine)


def safetensors_are_read(mine: Any) -> None:
    """Every tensor of a safetensors file is as it was saved"""
    save_file({name: one.contiguous().clone() for name, one in example().items()}, PATH)
    reads_as_saved(mine)


def slices_are_torchs(mine: Any) -> None:
    """A slice is the one that torch would give"""
    whole = torch.arange(80.0).reshape(10, 8)[1:].t()
    torch.save({"w": whole}, PATH)
    for index in (1, slice(1, 3), (slice(None), 2), (slice(0, 5, 2), slice(1, 8, 3)), (2, 5)):
        found = opened(mine).slice("w", index)
        expect(found.tolist(), whole[index].tolist(), f"w[{index}]")


def the_file_stays(mine: Any) -> None:
    """A tensor may be written to; the file stays as it is"""
    torch.save({"w": torch.ones(100_000)}, PATH)
    before = PATH.read_bytes()
    opened(mine)["w"].mul_(5)
    expect(PATH.read_bytes() == before, True, "the file is unchanged")


def a_false_count_is_an_error(mine: Any) -> None:
    """A storage whose count is not the pickle's is refused"""
    torch.save({"w": torch.ones(5), "v": torch.ones(3)}, PATH, _use_new_zipfile_serialization=False)
    data = PATH.read_bytes()
    at = data.rindex((3).to_bytes(8, "little"))
    PATH.write_bytes(data[:at] + (2).to_bytes(8, "little") + data[at + 8 :])
    refused(lambda: opened(mine), "a count of 2 for 3 elements")


def no_byte_is_hidden_or_shared(mine: Any) -> None:
    """Bytes of a safetensors file that belong to no tensor, or to two, are refused"""
    for places, size in [([(0, 8)], 9), ([(1, 9)], 9), ([(0, 8), (4, 12)], 12),
                         ([(0, 8), (9, 17)], 17), ([(0, 8)], 7)]:  # fmt: skip
        entry = {"dtype": "F32", "shape": [2]}
        header = {str(k): entry | {"data_offsets": place} for k, place in enumerate(places)}
        with_header(PATH, header, bytes(size))
        refused(lambda: opened(mine), f"tensors at {places} of {size} bytes")


PROMISES = [
    zip_files_are_read,
    old_files_are_read,
    safetensors_are_read,
    slices_are_torchs,
    the_file_stays,
    a_false_count_is_an_error,
    no_byte_is_hidden_or_shared,
]

CARDS = {
    "no padding": Card(
        nb06.PAYLOAD_BEGIN,
        "+ extra_length >>",
        zip_files_are_read,
        {
            "the file does not open: its pickle begins with padding": "",
            "all tensors are shifted by a few numbers, and nobody notices": "The pickle is an "
            "entry like the others, and it is read before any tensor.",
            "nothing: torch's files have no padding": "They have: the bytes of each entry begin at "
            "a multiple of 64.",
        },
    ),
    "room at the end": Card(
        nb06.CHECK_NO_GAPS,
        "at != end >> at > end",
        no_byte_is_hidden_or_shared,
        {
            "nothing, until somebody hides a second file after the tensors": "",
            "the last tensor is cut off": "The check moves no tensor; it only refuses less.",
            "a file with bytes after its tensors is refused, though all tensors are there": "That "
            "is what happens without the change.",
        },
    ),
    "eight bytes short": Card(
        nb06.SCAN_STORAGES,
        "at = first + >> at = at +",
        old_files_are_read,
        {
            "the second count is read out of weights, and refused": "",
            "every tensor after the first is shifted by two numbers": "No tensor is read yet: the "
            "second count comes first, and it fails.",
            "the last tensor is missing": "The scan fails at the second count, however many "
            "follow.",
        },
    ),
}
