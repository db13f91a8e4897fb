"""What a short file could ask for again and again is counted, and token indexes are files."""

import os

import pytest
import torch
from checkpoint_files import entry, safetensors_file
from safetensors.torch import load_file, save_file

from npydata import CheckpointError, TokenFileError, open_checkpoint, open_tokens
from npydata.reader import convert
from npydata.reader.containers.safetensors import PACKED
from npydata.reader.typed_json import encode


def test_expanded_tensors_are_not_written_out_unless_that_is_asked_for(tmp_path):
    torch.save({"w": torch.ones(1).expand(1 << 20)}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        with pytest.raises(CheckpointError, match="allow_larger"):
            checkpoint.to_safetensors(tmp_path / "a.safetensors")
        assert not (tmp_path / "a.safetensors").exists()
        checkpoint.to_safetensors(tmp_path / "a.safetensors", allow_larger=True)
    assert (tmp_path / "a.safetensors").stat().st_size > 4 << 20


def test_a_list_under_many_names_is_written_out_as_often_as_its_file_is_long(tmp_path):
    shared = [1] * 60_000
    torch.save({"w": torch.ones(1)} | {str(k): shared for k in range(1000)}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        left_out = checkpoint.to_safetensors(tmp_path / "a.safetensors").left_out
    source = (tmp_path / "a.pt").stat().st_size
    assert len(left_out) > 900
    assert (tmp_path / "a.safetensors").stat().st_size < (1 << 16) + 9 * source


def test_texts_that_grow_in_json_are_not_tried_for_ever(tmp_path, monkeypatch):
    long = "\0" * 100_000
    state = {str(k): [long] for k in range(1000)} | {"w": torch.ones(1)}
    torch.save(state, tmp_path / "a.pt")
    asked = []
    monkeypatch.setattr(convert, "encode", lambda value: asked.append(1) or encode(value))
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        checkpoint.to_safetensors(tmp_path / "a.safetensors")
    assert len(asked) < 50


@pytest.mark.parametrize("code, shape", [("F4", [32, 1]), ("F6_E2M3", [16]), ("F6_E3M2", [16])])
def test_a_dtype_that_torch_has_none_for_comes_as_bytes_and_is_named(tmp_path, code, shape):
    nbytes = shape[0] * (4 if code == "F4" else 6) // 8
    header = {"w": entry(code, shape, 0, nbytes), "x": entry("U8", [2], nbytes, nbytes + 2)}
    path = safetensors_file(tmp_path / "a.safetensors", header, bytes(range(nbytes + 2)))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.info("w").kind == code
        assert checkpoint["w"].tolist() == list(range(nbytes))
        assert checkpoint["x"].tolist() == [nbytes, nbytes + 1]
        with pytest.raises(CheckpointError, match=f"w: .*{code}"):
            checkpoint.to_safetensors(tmp_path / "b.safetensors")


@pytest.mark.skipif(not PACKED, reason="this torch has no float4")
def test_numbers_of_four_bits_are_those_of_safetensors_and_torch(tmp_path):
    whole = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4).view(torch.float4_e2m1fn_x2)
    save_file({"w": whole}, tmp_path / "a.safetensors")
    torch.save({"w": whole}, tmp_path / "a.pt")
    for path in (tmp_path / "a.safetensors", tmp_path / "a.pt"):
        with open_checkpoint(path) as checkpoint:
            checkpoint.to_safetensors(out := tmp_path / "b.safetensors")
            part = checkpoint.get_slice("w")[1:, :, 2:]
            made = [checkpoint["w"], checkpoint.load()["w"], load_file(out)["w"]]
        for one in made:
            assert (one.dtype, one.shape) == (whole.dtype, whole.shape)
            assert torch.equal(one.view(torch.uint8), whole.view(torch.uint8))
        assert torch.equal(part.view(torch.uint8), whole.view(torch.uint8)[1:, :, 2:])


@pytest.mark.parametrize("name", ["a.idx", "a.ds.index"])
@pytest.mark.timeout(20)
def test_an_index_of_tokens_is_a_file(tmp_path, name):
    tokens = tmp_path / ("a.bin" if name == "a.idx" else "a.ds")
    tokens.write_bytes(bytes(64))
    os.mkfifo(tmp_path / name)
    with pytest.raises(TokenFileError, match="expected a file"):
        open_tokens(tokens)


@pytest.mark.parametrize(
    "value, parts",
    [
        (torch.eye(2).to_sparse(), {"indices": [[0, 1], [0, 1]], "values": [1, 1]}),
        (torch.eye(2).to_sparse_csr(),
         {"crow_indices": [0, 1, 2], "col_indices": [0, 1], "values": [1, 1]}),
        (torch.quantize_per_tensor(torch.ones(2), 0.5, 3, torch.qint8), {"int_repr": [5, 5]}),
    ],
)  # fmt: skip
def test_a_tensor_that_is_not_dense_gives_its_parts(tmp_path, value, parts):
    torch.save({"w": value}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        assert {name: checkpoint[f"w.{name}"].tolist() for name in parts} == parts
        assert not checkpoint.unsafe_globals
