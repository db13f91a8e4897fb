"""Values in a pickle that are no plain tensors: numpy's, DTensors, subclasses, by their parts."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from checkpoint_files import checkpoint_records, stored_zip
from pickle_code import build, call, name, program, value

from npydata import CheckpointError, UnsafeCheckpointError, open_checkpoint
from npydata.reader.dtensor import attributes

ARRAYS = {
    "floats": np.arange(6.0).reshape(2, 3),
    "in_columns": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    "big_endian": np.arange(3, dtype=">u4"),
    "complex": np.array([1 + 2j], np.complex64),
    "bytes": np.array([b"ab", b"c"]),
    "bools": np.array([True, False]),
    "none": np.zeros((0, 3)),
    "scalar": np.array(5, np.int8),
}
NUMBERS = [np.float32(2.5), np.int64(-7), np.bool_(True), np.complex128(1j), np.float16(0.5)]


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_what_numpy_made_comes_as_data(tmp_path, protocol, zipped):
    path = tmp_path / "a.pt"
    saved = {"arrays": ARRAYS, "numbers": NUMBERS, "dtype": np.dtype(">f4")}
    torch.save(saved, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    with open_checkpoint(path) as checkpoint:
        assert not checkpoint.unsafe_globals
        for title, array in ARRAYS.items():
            found = checkpoint.metadata[f"arrays.{title}"]
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)
            assert found is checkpoint.tree()["arrays"][title]
        found = checkpoint.metadata["numbers"]
        assert [(type(one), one) for one in found] == [(type(one), one) for one in NUMBERS]
        assert checkpoint.metadata["dtype"] == np.dtype(">f4")


def test_an_array_shares_the_bytes_of_the_pickle_and_is_not_written_to(tmp_path):
    torch.save({"a": np.arange(3)}, tmp_path / "a.pt", pickle_protocol=5)
    array = open_checkpoint(tmp_path / "a.pt").metadata["a"]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize("array", [np.array([None]), np.array(["text"]), np.zeros(1, "i4,f4"),
                                   np.array(["2020"], "M8[s]")])  # fmt: skip
def test_an_array_that_is_more_than_its_bytes_is_listed(tmp_path, array):
    torch.save({"a": array, "b": 7}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.metadata["b"] == 7
        with pytest.raises(UnsafeCheckpointError, match=r"numpy\.ndarray"):
            checkpoint.metadata["a"]


RECONSTRUCT = name("numpy._core.multiarray", "_reconstruct")
EMPTY = call(RECONSTRUCT, name("numpy", "ndarray"), (0,), b"b")
F4 = build(call(name("numpy", "dtype"), "f4", False, True), (3, "<", None, None, None, -1, -1, 0))


@pytest.mark.parametrize(
    "code",
    [
        build(EMPTY, (1, (3,), F4, False, bytes(8))),
        build(EMPTY, (1, (2**62,), F4, False, bytes(8))),
        build(EMPTY, (1, (0, 2**62, 2**62), F4, False, b"")),
        build(EMPTY, (1, (-1,), F4, False, b"")),
        build(EMPTY, (1, (2,), F4, 7, bytes(8))),
        build(EMPTY, (1, (2,), F4, False, "text")),
        build(EMPTY, 7),
        build(build(EMPTY, (1, (1,), F4, False, bytes(4))), (1, (1,), F4, False, bytes(4))),
        build(F4, (3, ">", None, None, None, -1, -1, 0)),
        call(name("numpy._core.multiarray", "scalar"), F4, bytes(8)),
    ],
)
def test_an_array_that_does_not_fit_its_bytes_is_refused(tmp_path, code):
    path = stored_zip(tmp_path / "a.pt", checkpoint_records(program(value([code])), {}))
    with pytest.raises(CheckpointError):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "dtype, state",
    [
        ("f4", (3, "<", None, None, None, 400, -1, 0)),
        ("f4", (3, "<", None, None, None, -1, -1, 63)),
        ("f4", (3, "|", None, None, None, -1, -1, 0)),
        ("f4", (4, "<", None, None, None, -1, -1, 0)),
        ("S0", None),
        ("S2", (3, "|", None, None, None, 3, 1, 0)),
        ("f4,f4", None),
    ],
)
def test_a_dtype_that_is_not_as_numpy_writes_it_is_listed(tmp_path, dtype, state):
    made = call(name("numpy", "dtype"), dtype, False, True)
    code = made if state is None else build(made, state)
    path = stored_zip(tmp_path / "a.pt", checkpoint_records(program(value([code])), {}))
    with open_checkpoint(path) as checkpoint, pytest.raises(UnsafeCheckpointError, match="dtype"):
        checkpoint.metadata["0"]


class Subclass(torch.Tensor):
    """A plain subclass, as ``as_subclass`` makes."""


class Scaled(torch.Tensor):
    """A wrapper subclass like those of torchao: its elements are in tensors inside it."""

    @staticmethod
    def __new__(cls, inner, scale):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner, scale):
        self.inner, self.scale = inner, scale

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


def test_a_subclass_shows_its_inner_tensors_and_is_named(tmp_path):
    scaled = Scaled(torch.arange(3, dtype=torch.int8), torch.tensor(0.5))
    torch.save({"a": torch.ones(2).as_subclass(Subclass), "b": scaled}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        shown = {one: checkpoint[one].tolist() for one in checkpoint}
        assert shown == {"a.tensor": [1, 1], "b.inner": [0, 1, 2], "b.scale": 0.5}
        named = {one.rpartition(".")[2] for one in checkpoint.unsafe_globals}
        assert named == {"Scaled", "Subclass"}
        with pytest.raises(UnsafeCheckpointError, match="Scaled"):
            checkpoint["b"]


SAVE_DTENSOR = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
local = torch.arange(6.0).reshape(2, 3)
whole = DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False)
torch.save({"w": whole, "p": torch.nn.Parameter(whole)}, sys.argv[1])
"""


@pytest.fixture(scope="module")
def dtensor_file(tmp_path_factory):
    """A file with DTensors; it takes a process group to make some."""
    path = tmp_path_factory.mktemp("dtensor") / "a.pt"
    subprocess.run([sys.executable, "-c", SAVE_DTENSOR, path], check=True, capture_output=True)
    return path


def test_a_dtensor_gives_its_shard_and_where_that_belongs(dtensor_file):
    with open_checkpoint(dtensor_file) as checkpoint:
        assert not checkpoint.unsafe_globals
        info = checkpoint.info("w")
        assert (info.kind, info.shape, info.requires_grad) == ("dtensor", (4, 3), False)
        assert checkpoint.info("p").requires_grad
        assert checkpoint["w.local_tensor"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert checkpoint.metadata["w.placements"] == ["Shard(dim=0)", "Replicate()"]
        assert checkpoint.metadata["w.device_mesh.mesh_dim_names"] == ("dp", "tp")
        assert checkpoint.metadata["w.device_mesh.device_type"] == "cpu"
        with pytest.raises(CheckpointError, match="local_tensor, placements"):
            checkpoint["w"]


def test_the_attributes_of_a_state_are_found_in_it_and_not_copied():
    class Long(dict):
        def __iter__(self):
            raise AssertionError("looked through")

        keys = values = items = __iter__

    held = attributes((Long(a=1, b=2), Long(b=3)))
    assert (held["a"], held.get("b"), held.get("c")) == (1, 3, None)
    assert attributes(Long(a=1)).get("a") == 1
    assert attributes((1, 2, 3)).get("a") is None


def test_a_dtensor_that_is_placed_by_something_else_is_refused(dtensor_file, tmp_path):
    raw = dtensor_file.read_bytes()
    bad = raw.replace(b"placement_types\nReplicate\n", b"placement_types\nReplicatf\n")
    assert bad != raw
    path = tmp_path / "bad.pt"
    path.write_bytes(bad)
    with pytest.raises(CheckpointError, match=r"placed as .*Replicatf"):
        open_checkpoint(path)
