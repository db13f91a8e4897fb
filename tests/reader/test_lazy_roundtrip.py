"""What torch.save writes for plain tensors comes back exactly: values, views, ties and marks."""

import gc
import itertools
import json
import random
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch

from npydata import CheckpointError, open_checkpoint

UNPACKED = re.compile(r"torch\.(bool|u?int(8|16|32|64)|b?float.*|complex.*)")
DTYPES = sorted(
    {one for one in vars(torch).values()
     if isinstance(one, torch.dtype) and UNPACKED.fullmatch(str(one)) and "x2" not in str(one)},
    key=str,
)  # fmt: skip
"""All but those that pack several numbers into a byte."""
FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def random_bits(rng, dtype, shape):
    """A tensor of any dtype whose every byte is drawn; for bool, only true and false are values."""
    count = int(np.prod(shape, dtype=np.int64))
    raw = rng.randbytes(count * dtype.itemsize)
    if dtype == torch.bool:
        raw = bytes(one & 1 for one in raw)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def same(a, b):
    """Whether two tensors are alike to the bit, in value, shape, strides and marks."""
    assert type(a) is type(b)
    assert (a.dtype, a.shape, a.stride(), a.storage_offset()) == (
        b.dtype, b.shape, b.stride(), b.storage_offset())  # fmt: skip
    assert (a.requires_grad, a.is_conj(), a.is_neg()) == (b.requires_grad, b.is_conj(), b.is_neg())
    return bits(a) == bits(b)


def bits(tensor):
    """A tensor's elements in order, as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(
        torch.uint8
    ).numpy().tobytes()  # fmt: skip


def saved(folder, value, zipped, **options):
    path = folder / ("new.pt" if zipped else "old.pt")
    torch.save(value, path, _use_new_zipfile_serialization=zipped, **options)
    return path


def loaded_by_torch(path, value):
    """What torch reads; it can't read some of the legacy files it writes, then what was saved."""
    try:
        return torch.load(path, weights_only=False)
    except (AttributeError, RuntimeError):
        return value


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (5,), (3, 4)], ids=str)
def test_every_dtype_and_shape_comes_back(tmp_path, dtype, shape, zipped):
    tensor = random_bits(random.Random(str((dtype, shape))), dtype, shape)
    path = saved(tmp_path, {"t": tensor, "after": torch.arange(3)}, zipped)
    with open_checkpoint(path) as checkpoint:
        assert same(checkpoint["t"], tensor)
        assert torch.equal(checkpoint["after"], torch.arange(3))


def random_tensor(rng, dtypes, held):
    """A tensor as training code makes them: new, a view, of an earlier one's storage, or tied."""
    if held and rng.random() < 0.15:
        return rng.choice(held)
    if held and rng.random() < 0.3:
        base = rng.choice(held).detach()
        flat = base.reshape(-1) if base.is_contiguous() else base
        return random_view(rng, flat)
    shape = tuple(rng.randint(0, 5) for _ in range(rng.randint(0, 4)))
    tensor = random_view(rng, random_bits(rng, rng.choice(dtypes), shape))
    if tensor.dtype.is_complex and rng.random() < 0.5:
        tensor = tensor.conj()
        tensor = tensor.imag if rng.random() < 0.3 and tensor.dtype != torch.complex32 else tensor
    if tensor.is_floating_point() and rng.random() < 0.3:
        tensor = tensor.detach().requires_grad_()
    if rng.random() < 0.3:
        tensor = torch.nn.Parameter(tensor.detach(), tensor.requires_grad)
    held.append(tensor)
    return tensor


def random_view(rng, tensor):
    for _ in range(rng.randint(0, 2)):
        choice = rng.random()
        if choice < 0.4 and tensor.ndim > 1:
            tensor = tensor.transpose(*rng.sample(range(tensor.ndim), 2))
        elif choice < 0.7 and tensor.ndim:
            dim = rng.randrange(tensor.ndim)
            begin = rng.randint(0, tensor.shape[dim])
            index = [slice(None)] * tensor.ndim
            index[dim] = slice(begin, None, rng.randint(1, 2))
            tensor = tensor[tuple(index)]
        elif tensor.ndim and tensor.shape[0]:
            tensor = tensor[:1].expand(rng.randint(1, 4), *tensor.shape[1:])
    return tensor


PLAIN = [None, True, 0, -7, 2**40, 1.5, "text", "ä", b"raw", 2j, torch.float16, torch.Size([1, 2]),
         torch.device("cpu"), {1, 2}, [], {}, (1, 2)]  # fmt: skip


def random_value(rng, dtypes, held, depth=0):
    kinds = ["tensor"] * 5 + ["plain"] * 3 + ([] if depth > 2 else ["dict", "list", "tuple"])
    kind = rng.choice(kinds)
    if kind == "tensor":
        return random_tensor(rng, dtypes, held)
    if kind == "plain":
        return rng.choice(PLAIN)
    size = rng.randint(1, 4)
    members = [random_value(rng, dtypes, held, depth + 1) for _ in range(size)]
    if kind == "dict":
        keys = rng.sample(["a", "b", "a.b", "layer.0.weight", 0, 1, "0", "ü", "with space"], size)
        return rng.choice([dict, OrderedDict])(zip(keys, members, strict=True))
    return members if kind == "list" else tuple(members)


def walk(value):
    """Every tensor in plain containers, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from walk(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from walk(member)


def plain_values(value):
    """Everything that is not a tensor, as the metadata lists it: lists of plain values whole."""
    if isinstance(value, dict) and value:
        for member in value.values():
            yield from plain_values(member)
    elif isinstance(value, list | tuple) and any(
        isinstance(one, list | tuple | dict | torch.Tensor) for one in value
    ):
        for member in value:
            yield from plain_values(member)
    elif not isinstance(value, torch.Tensor):
        yield value


@FORMATS
@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_saved_comes_back(tmp_path, seed, zipped):
    rng = random.Random(seed)
    value = {"root": [random_value(rng, DTYPES, []) for _ in range(6)]}
    if not zipped:
        value = one_dtype_per_storage(value)
    path = saved(tmp_path, value, zipped, pickle_protocol=rng.choice([2, 2, 2, 3, 4, 5]))
    wanted = list(walk(loaded_by_torch(path, value)))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.unsafe_globals == ()
        read = [checkpoint[name] for name in checkpoint]
        assert len(read) == len(wanted)
        assert all(map(same, read, wanted))
        assert list(map(repr, checkpoint.metadata.values())) == [*map(repr, plain_values(value))]
    pairs = [pair for pair in zip(read, wanted, strict=True) if pair[0].numel()]
    for one, other in itertools.combinations(pairs, 2):
        assert share(one[0], other[0]) == share(one[1], other[1])


def share(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def one_dtype_per_storage(value):
    """The legacy format has no two dtypes over one storage: such tensors are saved as copies."""
    seen = {}

    def own(member):
        if isinstance(member, torch.Tensor):
            place = member.untyped_storage().data_ptr()
            alike = seen.setdefault(place, member.dtype) == member.dtype
            return member if alike else member.detach().clone()
        if isinstance(member, dict):
            return type(member)((key, own(inner)) for key, inner in member.items())
        return type(member)(map(own, member)) if type(member) in (list, tuple) else member

    return own(value)


@FORMATS
def test_a_model_and_its_optimizer_come_back(tmp_path, zipped):
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False),
                                torch.nn.BatchNorm1d(7))  # fmt: skip
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    with open_checkpoint(saved(tmp_path, value, zipped)) as checkpoint:
        for name, tensor in model.state_dict().items():
            assert same(checkpoint[f"model.{name}"], tensor.detach())
        assert checkpoint.info("model.0.weight").aliases == ("model.1.weight",)
        exp_avg = optimizer.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(checkpoint["optimizer.state.0.exp_avg"], exp_avg)
        assert checkpoint.metadata["optimizer.param_groups.0.betas"] == (0.9, 0.999)
        assert checkpoint.metadata["step"] == 1
        assert checkpoint.tree()["optimizer"]["param_groups"][0]["lr"] == 0.001
        fresh = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False),
                                    torch.nn.BatchNorm1d(7))  # fmt: skip
        prefix = "model."
        fresh.load_state_dict({n.removeprefix(prefix): checkpoint[n] for n in checkpoint
                               if n.startswith(prefix)})  # fmt: skip
        assert torch.equal(fresh[0].weight, model[0].weight)


@FORMATS
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_a_whole_module_gives_its_tensors_under_the_names_of_its_state(tmp_path, zipped):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    with open_checkpoint(saved(tmp_path, model, zipped)) as checkpoint:
        assert list(checkpoint) == list(model.state_dict())
        for name, tensor in model.state_dict().items():
            assert torch.equal(checkpoint[name], tensor)
        assert "torch.nn.modules.linear.Linear" in checkpoint.unsafe_globals


@FORMATS
def test_a_single_tensor_has_a_name(tmp_path, zipped):
    with open_checkpoint(saved(tmp_path, torch.arange(4), zipped)) as checkpoint:
        assert list(checkpoint) == ["tensor"]
        assert torch.equal(checkpoint["tensor"], torch.arange(4))


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.eye(3).to_sparse_csr(), "sparse"),
        (torch.empty(2, 3, device="meta"), "meta"),
    ],
    ids=["coo", "csr", "meta"],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_other_kinds_of_tensors_are_listed_and_refused_by_name(tmp_path, tensor, kind):
    path = saved(tmp_path, {"odd": tensor, "plain": torch.ones(2)}, True)
    with open_checkpoint(path) as checkpoint:
        info = checkpoint.info("odd")
        assert (info.kind, info.shape, info.dtype) == (kind, tensor.shape, tensor.dtype)
        assert torch.equal(checkpoint["plain"], torch.ones(2))
        with pytest.raises(CheckpointError, match=f"odd: a {kind} tensor"):
            checkpoint["odd"]


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_is_listed_and_refused_by_name(tmp_path):
    tensor = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    with open_checkpoint(saved(tmp_path, {"q": tensor}, True)) as checkpoint:
        assert (checkpoint.info("q").kind, checkpoint.info("q").dtype) == ("quantized", torch.qint8)
        with pytest.raises(CheckpointError, match="q: a quantized tensor"):
            checkpoint["q"]


def test_a_tensor_may_be_written_to_and_the_file_does_not_change(tmp_path):
    path = saved(tmp_path, {"t": torch.ones(5000)}, True)
    before = path.read_bytes()
    with open_checkpoint(path) as checkpoint:
        checkpoint["t"].zero_()
        assert torch.equal(checkpoint["t"], torch.ones(5000))
    assert path.read_bytes() == before


def test_tensors_outlive_the_checkpoint_and_reading_ends_with_it(tmp_path):
    path = saved(tmp_path, {"t": torch.arange(9), "u": torch.ones(2)}, True)
    with open_checkpoint(path) as checkpoint:
        tensor = checkpoint["t"]
    path.unlink()
    assert torch.equal(tensor, torch.arange(9))
    with pytest.raises(CheckpointError, match=r"u: .*is closed"):
        checkpoint["u"]


def test_a_name_that_is_not_there_is_a_key_error(tmp_path):
    with open_checkpoint(saved(tmp_path, {"t": torch.ones(2), "n": 3}, True)) as checkpoint:
        with pytest.raises(KeyError, match="no tensor 'x'"):
            checkpoint["x"]
        with pytest.raises(KeyError, match="is not a tensor"):
            checkpoint["n"]
        assert "x" not in checkpoint
        assert checkpoint.get("x") is None


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "none.pt")


@pytest.mark.parametrize("content", [b"", b"hello world", b"\x80\x02N.", b"PK", b"\x00" * 600])
def test_what_is_no_checkpoint_is_refused_by_name(tmp_path, content):
    path = tmp_path / "odd.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"odd\.pt: "):
        open_checkpoint(path)


def test_a_pipe_or_folder_is_refused_and_does_not_hang(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="expected a file"):
        open_checkpoint(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="holds no"):
        open_checkpoint(tmp_path)


@FORMATS
def test_a_bare_storage_is_a_tensor_of_one_dimension_also_in_the_tree(tmp_path, zipped):
    storage = torch.arange(3.0).storage()
    with open_checkpoint(saved(tmp_path, {"held": [storage, 5]}, zipped)) as checkpoint:
        assert checkpoint["held.0"].tolist() == [0, 1, 2]
        assert checkpoint.tree() == {"held": [checkpoint.info("held.0"), 5]}


def test_the_tree_of_an_index_shows_what_it_names(tmp_path):
    torch.save({"w": torch.ones(2), "step": 3}, tmp_path / "a.bin")
    index = {"weight_map": {"w": "a.bin", "step": "a.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tree() == {"w": checkpoint.info("w"), "step": 3}
        assert dict(checkpoint.metadata) == {"step": 3}


@pytest.mark.parametrize("enabled", [True, False])
def test_opening_leaves_the_garbage_collector_as_it_was(tmp_path, enabled):
    path, damaged = saved(tmp_path, {"w": torch.ones(2)}, True), tmp_path / "damaged"
    damaged.write_bytes(path.read_bytes()[:-1])
    (gc.enable if enabled else gc.disable)()
    try:
        open_checkpoint(path)
        assert gc.isenabled() == enabled
        with pytest.raises(CheckpointError):
            open_checkpoint(damaged)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["w" * n for n in range(1, 260, 7)], ids=len)
def test_a_header_of_any_length_opens(tmp_path, name):
    """Its length is the file's first byte, and as an opcode that may be anything."""
    for blanks in range(7):
        text = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        text += b" " * blanks
        path = tmp_path / "m.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes([7]))
        with open_checkpoint(path) as checkpoint:
            assert checkpoint[name].tolist() == [7]


def test_a_dtype_of_a_later_format_hides_its_own_tensor_and_no_other(tmp_path):
    header = {"later": {"dtype": "F5_E2M2", "shape": [3], "data_offsets": [0, 2]},
              "now": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}  # fmt: skip
    text = json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes([0, 0, 7, 9]))
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint) == ["later", "now"]
        assert checkpoint["now"].tolist() == [7, 9]
        assert checkpoint.info("later").kind == "F5_E2M2"
        with pytest.raises(CheckpointError, match="later: a F5_E2M2 tensor can be listed here"):
            checkpoint["later"]
