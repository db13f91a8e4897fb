"""What a damaged or hostile folder says, and where the tensors go."""

import json
import random
import zlib
from functools import partial

import pytest
import torch
from checkpoint_tools import FILES, bitwise
from faults.saving import rewrite_manifest

from npydata import (
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from npydata.reader.formats import training


@pytest.fixture
def saved(tmp_path):
    optimizer = {"state": {0: {"m": torch.arange(5.0)}}}
    save_checkpoint(tmp_path / "c", {"w": torch.arange(3000.0), "b": torch.ones(3)}, optimizer)
    return tmp_path / "c"


def link_elsewhere(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit": flip,
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "missing": lambda path: path.unlink(),
    "a link": link_elsewhere,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


VERIFIED = [
    verify_checkpoint,
    partial(load_checkpoint, verify=True),
    partial(load_checkpoint, verify=True, mmap=False),
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", sorted(FILES))
def test_verifying_names_the_file_that_is_damaged(saved, name, damage):
    verify_checkpoint(saved)
    DAMAGE[damage](saved / name)
    for read in VERIFIED:
        with pytest.raises((CheckpointError, OSError), match=name.replace(".", r"\.")):
            read(saved)
    if damage != "a flipped bit":  # sizes and headers are always checked
        with pytest.raises((CheckpointError, OSError)):
            load_checkpoint(saved)


def test_any_flipped_bit_is_found_and_piece_and_tensors_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "PIECE_BYTES", 8192)
    monkeypatch.setattr("npydata.checkpointer.snapshot.PIECE_BYTES", 8192)
    state = {name: torch.full((2000,), float(k)) for k, name in enumerate("abcd")}
    save_checkpoint(tmp_path / "c", state)
    path, chance = tmp_path / "c" / "model.safetensors", random.Random(1)
    whole = path.read_bytes()
    for at in [*chance.sample(range(len(whole)), 30), len(whole) - 1]:
        path.write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :]
        )
        other = {name: torch.zeros(2000, dtype=torch.float64) for name in "abcd"}
        for read in (*VERIFIED, partial(load_checkpoint, verify=True, into=other)):
            with pytest.raises(CheckpointError) as caught:
                read(tmp_path / "c")
            message = str(caught.value)
            if at >= 4096:
                begin = at - at % 8192
                assert f"damaged between bytes {begin:,} and" in message
                assert "abcd"[(at - 4096) // 8000] in message.rpartition("where")[2]
    with open_checkpoint(tmp_path / "c") as damaged:  # in its last piece
        assert torch.equal(damaged.load("model.a", verify=True)["model.a"], state["a"])
        with pytest.raises(CheckpointError, match=r"model\.d is"):
            damaged.load("model.d", verify=True)


HOSTILE = {
    "a list": b"[1]", "deep": b"[" * 100_000, "nothing": b"",
    "a name outside": {"files": {"../x": {"size": 1, "crc32": [1]}}},
    "a negative size": {"files": {"model.safetensors": {"size": -1, "crc32": []}}},
    "too few checksums": {"files": {"model.safetensors": {"size": 1 << 30, "crc32": [1]}}},
    "no files": {"files": {}}, "a float": {"sequence": 1.5}, "true": {"step": True},
    "2**64": {"step": 1 << 64}, "text": {"files": "x"},
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused_in_one_short_line(saved, case):
    if isinstance(change := HOSTILE[case], dict):
        rewrite_manifest(saved, **change)
    else:
        (saved / "manifest.json").write_bytes(change)
    with pytest.raises(
        CheckpointError, match=r"manifest\.json: is not a manifest of ours"
    ) as caught:
        load_checkpoint(saved)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


VALUES = {
    "an unknown tag": {"$eval": "1"}, "two tags": {"$tuple": [], "$set": []},
    "a list in a set": {"$set": [[1]]}, "bad base64": {"$bytes": "?"},
    "a dtype that is none": {"$dtype": "torch.nn"}, "a huge size": {"$size": [1 << 70]},
    "pairs that are none": {"$dict": [[1]]}, "a tensor that is not there": {"$tensor": "nope"},
    "a class": {"$numpy": ["object", 1]}, "deep": None,
    "one hash": {"$dict": [[k * (2**61 - 1), 0] for k in range(30_000)]},
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_a_training_state_made_to_deceive_is_refused(saved, case):
    path = saved / "training_state.json"
    data = json.loads(path.read_text())
    data["model"] = {"w": VALUES[case]}
    text = json.dumps(data) if case != "deep" else '{"model": ' + "[" * 5000 + "]" * 5000 + "}"
    path.write_text(text)
    files = json.loads((saved / "manifest.json").read_text())["files"]
    entry = {"size": len(text), "crc32": [zlib.crc32(text.encode())]}
    rewrite_manifest(saved, files={**files, path.name: entry})
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved)
    assert len(str(caught.value)) < 500


def test_into_fills_the_models_own_tensors(tmp_path):
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c", model.state_dict(), optimizer.state_dict())
    wanted = bitwise(model.state_dict()), bitwise(optimizer.state_dict())
    with torch.no_grad():
        for tensor in (*model.parameters(), *optimizer.state[model.weight].values()):
            tensor.fill_(7)
    found, _, _ = load_checkpoint(tmp_path / "c", into=(model, optimizer), verify=True)
    assert (bitwise(model.state_dict()), bitwise(optimizer.state_dict())) == wanted
    assert found["weight"].data_ptr() == model.weight.data_ptr()


MISFITS = {
    "another shape": (lambda: torch.nn.Linear(3, 5), "shape|weight"),
    "an optimizer that is not there": (lambda: (torch.nn.Linear(3, 4), {"m": torch.ones(1)}),
                                       "has no optimizer"),
    "three": (lambda: (torch.nn.Linear(3, 4), 2, 3), "3 values"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_into_that_does_not_fit_is_refused_and_nothing_is_filled(tmp_path, case):
    make, message = MISFITS[case]
    save_checkpoint(tmp_path / "c", torch.nn.Linear(3, 4).state_dict())
    into = make()
    model = into[0] if isinstance(into, tuple) else into
    before = bitwise(dict(model.state_dict()))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "c", into=into)
    assert bitwise(dict(model.state_dict())) == before


MISTAKES = {
    "none": (lambda root: latest_checkpoint(root / "none"), "is not None: load_checkpoint"),
    "nothing": (lambda root: root / "none", "no such folder"),
    "a root": (lambda root: root, r"has no manifest.*latest_checkpoint\("),
    "a file": (lambda root: root / "c" / "model.safetensors", "read by open_checkpoint"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_what_is_no_checkpoint_s_folder_says_what_to_write(saved, case):
    make, message = MISTAKES[case]
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(make(saved.parent))
