"""Folders of torch.distributed.checkpoint: opened, read in parts, and nothing in them runs."""

import io
import os
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fuzz import saved_values
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from npydata import CheckpointError, UnsafeCheckpointError, open_checkpoint

WHOLE = torch.arange(24.0).reshape(4, 6)
CUTS = {"__0_0.distcp": [(0, 0, 2, 6)], "__1_0.distcp": [(2, 0, 2, 2), (2, 2, 2, 4)]}
"""Of each file: first row and column of a chunk, rows and columns."""


class InChunks:
    """A folder as three ranks write it: one tensor in chunks, and a value."""

    def __init__(self, folder):
        self.folder, self.places, self.chunks = folder, {}, []
        folder.mkdir()
        for path, cuts in CUTS.items():
            for row, column, rows, columns in cuts:
                part = WHOLE[row : row + rows, column : column + columns].clone()
                begin = torch.Size((row, column))
                self.chunks.append(ChunkStorageMetadata(begin, part.shape))
                self.append(path, MetadataIndex("w", begin), part)
        tensor = TensorStorageMetadata(TensorProperties(), WHOLE.shape, self.chunks)
        self.described = {"w": tensor}
        self.value("step", 7)
        self.more = {}

    def append(self, path, index, value):
        content = io.BytesIO()
        torch.save(value, content)
        with (self.folder / path).open("ab") as file:
            self.places[index] = _StorageInfo(path, file.tell(), file.write(content.getvalue()))

    def value(self, name, value):
        self.append("__0_0.distcp", MetadataIndex(name), value)
        self.described[name] = BytesStorageMetadata()

    def append_empty(self, names, chunks):
        """Tensors of no elements, each of so many chunks; the list of them is said once."""
        begin = torch.Size((0, 0))
        for name in names:
            self.append("__0_0.distcp", MetadataIndex(name, begin), torch.zeros(0, 0))
            self.described[name] = TensorStorageMetadata(
                TensorProperties(torch.float32), begin, chunks
            )

    def move(self, name, begin, /, **changes):
        """Say something else of the place of an item."""
        index = MetadataIndex(name, begin)
        self.places[index] = replace(self.places[index], **changes)

    def write(self):
        metadata = Metadata(self.described, storage_data=self.places, **self.more)
        (self.folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return self.folder


@pytest.fixture
def made(tmp_path):
    return InChunks(tmp_path / "dcp")


def opened(state, folder):
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return open_checkpoint(folder / "dcp")


def test_what_torch_saved_opens_as_it_was_and_is_converted(tmp_path):
    saved = saved_values()
    model, optimizer = saved["model"], saved["optimizer"]
    state = {
        "model": model,
        "optimizer": optimizer,
        "step": 7,
        "turned": torch.arange(6.0).reshape(2, 3).t(),
    }
    with opened(state, tmp_path) as checkpoint:
        assert checkpoint.format == "dcp"
        assert not checkpoint.unsafe_globals
        assert checkpoint.metadata["step"] == 7
        assert checkpoint.metadata["optimizer.param_groups.0.betas"] == (0.9, 0.999)
        for name, tensor in model.items():
            assert torch.equal(checkpoint[f"model.{name}"], tensor)
        assert checkpoint.info("model.weight").shape == (2, 3)
        assert checkpoint.info("turned").stride == checkpoint["turned"].stride() == (2, 1)
        assert torch.equal(checkpoint["turned"], state["turned"])
        checkpoint.to_safetensors(tmp_path / "a.safetensors")
        with open_checkpoint(tmp_path / "a.safetensors") as converted:
            for key, tensor in optimizer["state"][0].items():  # the step is a scalar
                for one in (checkpoint, checkpoint.load(), converted):
                    assert torch.equal(one[f"optimizer.state.0.{key}"], tensor)


class Settings:
    """What only code can make, with a tensor in it."""

    def __init__(self):
        self.rate, self.mean = 0.1, torch.ones(2)


def test_a_folder_of_torchs_hugging_face_writer_is_converted(tmp_path):
    state = {"w": torch.ones(3, 3), "v": torch.ones(2)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "hf"), {"w": 1, "v": 2})
    dcp.save(state, storage_writer=writer, no_dist=True)
    with open_checkpoint(tmp_path / "hf") as checkpoint:
        checkpoint.to_safetensors(tmp_path / "out", shard_size=10)
    with open_checkpoint(tmp_path / "out") as made:
        assert all(torch.equal(made[name], one) for name, one in state.items())


def test_values_are_named_as_in_a_file(tmp_path):
    state = {"settings": Settings(), "w": torch.zeros(3), "note": "text", "one": torch.Size((2,))}
    torch.save(state, tmp_path / "a.pt")
    with opened(state, tmp_path) as folder, open_checkpoint(tmp_path / "a.pt") as file:
        assert {*folder} == {*file} == {"settings.mean", "w"}
        assert {*folder.metadata} == {*file.metadata}
        assert folder.metadata["settings.rate"] == 0.1
        with pytest.raises(UnsafeCheckpointError, match=r"settings needs .*\.Settings"):
            folder.metadata["settings"]


def test_names_that_are_taken_are_numbered(tmp_path):
    state = {"settings": Settings(), "settings.rate": torch.ones(2), "": 5, "tensor": 6}
    with opened(state, tmp_path) as checkpoint:
        assert torch.equal(checkpoint["settings.rate"], torch.ones(2))
        (rate,) = [name for name in checkpoint.metadata if "rate'" in name]
        assert checkpoint.metadata[rate] == 0.1
        others = [name for name in checkpoint.metadata if "settings" not in name]
        assert sorted(checkpoint.metadata[name] for name in others) == [5, 6]


def test_a_file_that_is_gone_is_named(made):
    folder = made.write()
    gone = next(folder.glob("*.distcp"))
    gone.unlink()
    with pytest.raises(CheckpointError, match=rf"\.metadata names {gone.name}"):
        open_checkpoint(folder)


def test_chunks_are_joined_and_converted(made, tmp_path):
    folder = made.write()
    expected = {"w": torch.zeros_like(WHOLE)}
    dcp.load(expected, checkpoint_id=folder, no_dist=True)  # torch reads it as well
    assert torch.equal(expected["w"], WHOLE)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.metadata["step"] == 7
        assert torch.equal(checkpoint["w"], WHOLE)
        assert torch.equal(checkpoint.load()["w"], WHOLE)
        checkpoint.to_safetensors(tmp_path / "a.safetensors")
    with open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
        assert torch.equal(checkpoint["w"], WHOLE)


@pytest.fixture(scope="module")
def chunked(tmp_path_factory):
    return InChunks(tmp_path_factory.mktemp("chunked") / "dcp").write()


def test_a_slice_looks_into_the_chunks_that_it_touches_and_no_other(made):
    folder = made.write()
    path = folder / "__1_0.distcp"
    path.write_bytes(b"damaged".ljust(path.stat().st_size))
    with open_checkpoint(folder) as checkpoint:
        assert torch.equal(checkpoint.get_slice("w")[:2], WHOLE[:2])
        with pytest.raises(CheckpointError, match=r"__1_0\.distcp: item at byte 0: "):
            checkpoint.get_slice("w")[1:3]


def ranges(size):
    return st.builds(
        slice, st.integers(-size, size), st.integers(-size, size + 1), st.integers(1, 3)
    )


@given(
    index=st.tuples(ranges(4) | st.integers(-4, 3), ranges(6) | st.integers(-6, 5)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_part_is_read_alike_alone_with_others_and_into_what_is_there(chunked, index, dtype):
    expected = WHOLE[index]
    with open_checkpoint(chunked) as checkpoint:
        assert torch.equal(checkpoint.get_slice("w")[index], expected)
        assert torch.equal(checkpoint.load({"w": index})["w"], expected)
        target = torch.full_like(expected, -1, dtype=dtype)
        checkpoint.load({"w": index}, into={"w": target})
        assert torch.equal(target, expected.to(dtype))


class Runs:
    """Code in a metadata: what a loader that obeys would call."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_the_metadata_is_listed_and_does_not_run(made, tmp_path):
    made.more = {"planner_data": Runs(tmp_path / "ran")}
    made.append("__0_0.distcp", MetadataIndex("code"), Runs(tmp_path / "ran"))
    made.described["code"] = BytesStorageMetadata()
    with open_checkpoint(made.write()) as checkpoint:
        assert checkpoint.unsafe_globals == ("posix.mkdir",)
        assert torch.equal(checkpoint["w"], WHOLE)
        with pytest.raises(UnsafeCheckpointError, match=r"posix\.mkdir"):
            checkpoint.metadata["code"]
    assert not (tmp_path / "ran").exists()


def chunk(begin, sizes):
    return ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes))


def place_chunk(made, *bounds):
    made.chunks[0] = chunk(*bounds)
    made.places[MetadataIndex("w", bounds[0])] = made.places.pop(MetadataIndex("w", (0, 0)))


FIRST = ("w", (0, 0))
PATHS = {
    "that_leads_out": "../__0_0.distcp",
    "that_is_absolute": "/etc/a.distcp",
    "that_no_file_has": "\0.distcp",
    "of_half_a_character": "\ud800.distcp",
    "that_is_too_long": "a" * 9999 + ".distcp",
    "of_another_kind": "a.pt",
}
WRONG = {
    **{f"path_{which}": lambda m, path=path: m.move(*FIRST, relative_path=path)
       for which, path in PATHS.items()},
    "items_that_overlap": lambda m: m.move("step", None, offset=8),
    "item_read_twice": lambda m: m.move("w", (2, 2), offset=0),
    "item_beyond_its_file": lambda m: m.move("step", None, length=1 << 40),
    "item_before_its_file": lambda m: m.move(*FIRST, offset=-1),
    "item_that_is_compressed": lambda m: m.move(*FIRST, transform_descriptors=["zstd"]),
    "item_without_a_place": lambda m: m.places.pop(MetadataIndex(*FIRST)),
    "value_without_a_place": lambda m: m.places.pop(MetadataIndex("step")),
    "chunk_that_is_missing": lambda m: m.chunks.pop(),
    "chunk_that_comes_twice": lambda m: m.chunks.append(m.chunks[0]),
    "empty_chunks_said_again": lambda m: m.chunks.extend([chunk((0, 0), (0, 6))] * 20_000),
    "empty_chunks_of_many_names": lambda m: m.append_empty(
        "abcdefgh", [chunk((0, 0), (0, 0))] * 2_000),
    "chunks_of_many_dimensions_said_again": lambda m: m.described.update(
        w=TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([0] * 64),
                                [chunk([0] * 64, [0] * 64)] * 2_000)),
    "chunks_that_overlap": lambda m: place_chunk(m, (1, 0), (2, 6)),
    "chunk_beyond_the_tensor": lambda m: place_chunk(m, (3, 0), (2, 6)),
    "chunk_of_other_dimensions": lambda m: place_chunk(m, (0,), (12,)),
    "negative_size": lambda m: m.chunks.__setitem__(0, chunk((0, 0), (-2, 6))),
    "chunks_that_are_no_list": lambda m: setattr(m.described["w"], "chunks", 7),
    "tensor_of_another_class": lambda m: m.described.update(w=ChunkStorageMetadata(1, 2)),
    "dtype_that_is_none": lambda m: setattr(m.described["w"].properties, "dtype", "float32"),
    "no_places": lambda m: setattr(m, "places", None),
    "no_description": lambda m: setattr(m, "described", None),
    "parts_of_many_items": lambda m: [
        m.value(f"v{k}", [[[]] * 290] * 290) for k in range(9)],
    "long_name_of_many_parts": lambda m: m.value("n" * 50_000, [[]] * 60_000),
    "name_that_is_a_text_again_and_again": lambda m: m.described.update(
        {("a" * 100_000,) * 2_000: BytesStorageMetadata()}),
    "name_that_is_a_number": lambda m: m.described.update({7: BytesStorageMetadata()}),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_metadata_that_does_not_fit_is_refused(made, wrong):
    WRONG[wrong](made)
    with pytest.raises(CheckpointError):
        open_checkpoint(made.write())


def test_other_files_beside_the_metadata_are_refused(made):
    folder = made.write()
    (folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="not as torch writes it"):
        open_checkpoint(folder)
    (made.write() / "__1_0.distcp").rename(folder.parent / "hidden")
    (folder / "__1_0.distcp").symlink_to(folder.parent / "hidden")
    with pytest.raises(CheckpointError, match="is a link"):
        open_checkpoint(folder)


@pytest.mark.parametrize("held", [torch.zeros(2, 6, dtype=torch.int32), torch.zeros(6, 2), 7,
                                  torch.zeros(1).expand(2, 6),
                                  torch.zeros(2, 6).to_sparse()])  # fmt: skip
def test_a_chunk_that_is_not_what_the_metadata_says_is_refused(made, held):
    made.append("__2_0.distcp", MetadataIndex("w", (0, 0)), held)
    with (
        open_checkpoint(made.write()) as checkpoint,
        pytest.raises(CheckpointError, match=r"__2_0\.distcp has"),
    ):
        checkpoint["w"]


def test_a_tensor_that_is_lazily_conjugated_is_read(tmp_path):
    state = {"c": torch.tensor([1 + 2j, 3 - 1j]).conj()}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    with open_checkpoint(tmp_path / "a") as checkpoint:
        assert torch.equal(checkpoint["c"], state["c"])
        assert torch.equal(checkpoint.load()["c"], state["c"])


def test_a_tensor_of_no_elements_may_have_no_chunks(made):
    made.described["none"] = TensorStorageMetadata(
        TensorProperties(torch.float32), torch.Size((0, 3)), []
    )
    with open_checkpoint(made.write()) as checkpoint:
        shapes = [one.shape for one in (checkpoint["none"], checkpoint.get_slice("none")[:])]
    assert shapes == [(0, 3)] * 2
