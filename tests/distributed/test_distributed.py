"""Many ranks: the stream they share, the checkpoint they write together, and who can read it.

The ranks are forked processes with a gloo group of their own (see ``ranks/``), and meet at a store
in this process as under ``torchrun``; some tests start ``torchrun`` itself.
"""

import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_tools import bitwise
from ranks import Ranks, on_ranks, states
from ranks.hosts import cannot_have_hosts, two_hosts
from ranks.states import group, optimizer_state, part_of, spread, starts, stream, train, whole
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from npydata import (
    AsyncCheckpointer,
    CheckpointError,
    ShardingConfig,
    TrainingState,
    capture_rng,
    latest_checkpoint,
    load_checkpoint,
    load_distributed,
    open_checkpoint,
    restore_rng,
    save_checkpoint,
    verify_checkpoint,
    write_tokens,
)
from npydata.cli import main

pytestmark = pytest.mark.timeout(280)

WORLDS = (1, 2, 3, 4)
SAMPLES = 101
BEFORE = 4
"""Batches that each rank takes before it saves."""


@pytest.fixture
def tokens(tmp_path):
    """A file whose windows begin with tokens that differ from each other."""
    count = SAMPLES * (states.SEQ_LEN + 1)
    write_tokens(tmp_path / "tokens.npy", [np.arange(count, dtype=np.uint16)])
    return tmp_path / "tokens.npy"


def save_everything(folder, tokens, keys="names"):
    """Train, take some batches, save; return the whole state, and the samples that were taken."""
    model, optimizer = spread("fsdp")
    train(model, optimizer, 2)
    loader = stream(tokens)
    batches = iter(loader)
    taken = starts(next(batches) for _ in range(BEFORE))
    place = loader.state_dict()
    training = TrainingState(step=2, tokens=7, rng=capture_rng(), loader=place, extra={"a": (1,)})
    saved = bitwise([whole(model.state_dict()), whole(optimizer_state(model, optimizer, keys))])
    with AsyncCheckpointer() as keeper:
        state = optimizer_state(model, optimizer, keys)
        keeper.save_distributed(folder, model.state_dict(), state, training)
        train(model, optimizer, 1)  # goes on while the disk works
    return saved, taken, starts(batches)


def load_everything(folder, tokens, keys="names"):
    """Load what any number of ranks saved into other weights; return it, and the next samples."""
    model, optimizer = spread("fsdp", seed=9)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        training = load_distributed(folder, model, optimizer)
    loaded = bitwise([whole(model.state_dict()), whole(optimizer_state(model, optimizer, keys))])
    loader = stream(tokens)
    loader.load_state_dict(training.loader)
    facts = training.step, training.tokens, training.extra, training.rng is not None
    messages = [str(one.message) for one in warned if "random generators" in str(one.message)]
    return loaded, starts(loader), facts, messages


def load_many(folders, tokens):
    return [load_everything(folder, tokens) for folder in folders]


def the_stream(tokens):
    """Return the samples of an epoch as one process without a group gets them."""
    return [one for batch in starts(stream(tokens)) for one in batch]


def in_turn(ranks):
    """Return the samples of all ranks in the order of the epoch; they have equally many batches."""
    assert len({len(batches) for batches in ranks}) == 1
    return [one for batches in zip(*ranks, strict=True) for batch in batches for one in batch]


def test_what_any_number_of_ranks_saved_any_number_loads_and_the_samples_go_on(tmp_path, tokens):
    """All 16 pairs: bit-identical whole tensors, the next samples; disjoint and complete."""
    expected = the_stream(tokens)
    assert len(expected) == len(set(expected)) == SAMPLES
    folders, saved = {}, {}
    for world in WORLDS:
        folders[world] = tmp_path / f"of_{world}" / "a"
        ranks = on_ranks(world, save_everything, folders[world], tokens)
        saved[world] = ranks[0][0]
        assert all(one[0] == saved[world] for one in ranks)
        given = in_turn([[*taken, *rest] for _, taken, rest in ranks])
        assert given == expected[: SAMPLES - SAMPLES % world]
        model, optimizer, _ = load_checkpoint(folders[world], verify=True)
        assert bitwise([model, optimizer]) == saved[world]
    for world in WORLDS:
        ranks = on_ranks(world, load_many, list(folders.values()), tokens)
        for before, found in zip(WORLDS, zip(*ranks, strict=True), strict=True):
            first = BEFORE * 3 * before
            rest = expected[first : SAMPLES - (SAMPLES - first) % world]
            assert in_turn([batches for _, batches, _, _ in found]) == rest
            for loaded, _, facts, warned in found:
                assert loaded == saved[before]
                assert facts == (2, 7, {"a": (1,)}, world == before)
                assert len(warned) == (world != before)


@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=pytest.mark.nightly) for world in (1, 2, 3, 4)]
)
def test_torchrun_shares_the_stream_saves_and_loads(tmp_path, tokens, world):
    before = on_ranks(3, save_everything, tmp_path / "other" / "a", tokens)[0][0]
    end(torchrun(tmp_path, tokens, "--standalone", "--nproc-per-node", world))
    check_run(tmp_path, tokens, world, before)


@pytest.mark.nightly
def test_two_hosts_with_networks_of_their_own_share_the_stream_save_and_load(tmp_path, tokens):
    """Each process is in a network namespace of its own; they share the file system."""
    if why := cannot_have_hosts():
        pytest.skip(why)
    before = on_ranks(3, save_everything, tmp_path / "other" / "a", tokens)[0][0]
    with two_hosts() as hosts:
        runs = []
        for rank, host in enumerate(hosts):
            place = ["--node-rank", rank, "--master-addr", hosts[0].address, "--master-port", 29531]
            options = ["--nnodes", 2, "--nproc-per-node", 1, *place]
            env = {"GLOO_SOCKET_IFNAME": host.interface}
            runs.append(torchrun(tmp_path, tokens, *options, within=host.prefix, **env))
        for run in runs:
            end(run)
    check_run(tmp_path, tokens, 2, before)


def torchrun(folder, tokens, *options, within=(), **env):
    """Start ``ranks/under_torchrun.py``."""
    script = Path(__file__).with_name("ranks") / "under_torchrun.py"
    words = [*options, script, folder, folder / "run" / "a", tokens]
    path = os.pathsep.join(sys.path)
    return subprocess.Popen(
        [*within, sys.executable, "-m", "torch.distributed.run", *map(str, words)],
        stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env},
    )  # fmt: skip


def end(run):
    """Wait for a run's end, which must be a good one."""
    try:
        _, printed = run.communicate(timeout=240)
    finally:
        run.kill()
    assert run.returncode == 0, printed[-5000:]


def check_run(tmp_path, tokens, world, before):
    """Check what each rank has seen, and the checkpoint that is there."""
    folder = tmp_path / "run" / "a"
    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(world)]
    expected = the_stream(tokens)
    given = in_turn([[*taken, *rest] for (_, taken, rest), *_ in found])
    assert given == expected[: SAMPLES - SAMPLES % world]
    model, optimizer, _ = load_checkpoint(folder, verify=True)
    for (saved, *_), (again, *_), (of_three, *_) in found:
        assert again == saved == bitwise([model, optimizer])
        assert of_three == before
    assert latest_checkpoint(folder.parent) == folder


# Who writes what


def save_spread(folder, how, keys="numbers", steps=1):
    """Save a model that is spread in some way; return its whole state."""
    model, optimizer = spread(how)
    train(model, optimizer, steps)
    state = optimizer_state(model, optimizer, keys)
    with AsyncCheckpointer() as keeper:
        keeper.save_distributed(folder, model.state_dict(), state, TrainingState(step=steps))
    return bitwise([whole(model.state_dict()), whole(state)])


def stored(folder, part):
    """Return each tensor of each file of a part: ``{name: [(file, shape), ...]}``."""
    found = {}
    for path in sorted((folder / part).iterdir()):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found.setdefault(name, []).append((path.name, file.get_slice(name).get_shape()))
    return found


def nbytes(state):
    """Return the bytes of a nested state's tensors."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(map(nbytes, state.values() if isinstance(state, dict) else [])) + sum(
        map(nbytes, state if isinstance(state, list | tuple) else [])
    )


def data_bytes(path):
    """Return the bytes of a safetensors file's tensors."""
    length = int.from_bytes(path.read_bytes()[:8], "little")
    return path.stat().st_size - 8 - length


@pytest.mark.parametrize("how", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("keys", ["numbers", "names"])
def test_no_byte_is_written_twice(tmp_path, how, keys):
    saved = on_ranks(4, save_spread, tmp_path / "a", how, keys)
    assert all(one == saved[0] for one in saved)
    model, optimizer, _ = load_checkpoint(tmp_path / "a", verify=True)
    assert bitwise([model, optimizer]) == saved[0]
    for part, state in (("model", model), ("optimizer", optimizer)):
        files = (tmp_path / "a" / part).iterdir()
        assert sum(map(data_bytes, files)) == nbytes(state)


def test_a_replicated_tensor_is_in_one_file(tmp_path):
    on_ranks(3, save_spread, tmp_path / "a", "ddp")
    found = {**stored(tmp_path / "a", "model"), **stored(tmp_path / "a", "optimizer")}
    assert {len(places) for places in found.values()} == {1}
    assert len(found) == 5 + 3 * 3


def test_a_shard_is_written_by_the_rank_that_has_it(tmp_path):
    on_ranks(4, save_spread, tmp_path / "a", "fsdp")
    for part, prefix in (("model", ""), ("optimizer", "state.")):
        found = stored(tmp_path / "a", part)
        name = "first.weight" if part == "model" else "state.0.exp_avg"
        sizes = [[2, 5], [2, 5], [2, 5], [1, 5]]
        assert found[name] == [(f"rank_{k}.safetensors", size) for k, size in enumerate(sizes)]
        name = "second.weight" if part == "model" else "state.1.exp_avg"
        sizes = [[1, 7]] * 3  # the fourth rank has nothing of it
        assert found[name] == [(f"rank_{k}.safetensors", size) for k, size in enumerate(sizes)]
        assert all(name.startswith(prefix) for name in found)


def test_of_each_replica_of_a_shard_one_is_written(tmp_path):
    on_ranks(4, save_spread, tmp_path / "a", "hsdp")
    places = stored(tmp_path / "a", "model")["first.weight"]
    assert sorted(size for _, size in places) == [[3, 5], [4, 5]]


# Every kind of tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64,
          torch.uint8, torch.complex64, torch.complex128, torch.float8_e4m3fn)  # fmt: skip
SHAPES = {
    "even": (4, 6),
    "uneven": (7, 3),
    "two": (2, 5),
    "one": (1, 3),
    "deep": (3, 5, 2),
    "vector": (11,),
    "nothing": (0, 4),
    "no_columns": (4, 0),
}


def filled(shape, dtype, seed):
    """Return a tensor of random bits of its dtype, NaNs and all."""
    numbers = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=numbers).bool()
    numel = math.prod(shape)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=numbers, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def all_kinds(world):
    """Return every tensor that ranks spread in some way, whole; the key says how."""
    tensors = {}
    for seed, dtype in enumerate(DTYPES):
        text = str(dtype).removeprefix("torch.")
        for name, shape in SHAPES.items():
            for dim in range(len(shape)):
                tensors[f"{text}.{name}.s{dim}"] = filled(shape, dtype, seed)
        tensors[f"{text}.even.r"] = filled((2, 3), dtype, seed)
        tensors[f"{text}.scalar.r"] = filled((), dtype, seed)
        tensors[f"{text}.scalar.plain"] = filled((), dtype, seed)
        tensors[f"{text}.nothing.plain"] = filled((0,), dtype, seed)
        tensors[f"{text}.slanted.plain"] = filled((4, 6), dtype, seed).t()[::2]
    for k, name in enumerate(("s0s1", "s1s0", "s0s0", "rs1", "s1r")):
        tensors[f"mesh.{name}"] = filled((5, 7), torch.float32, k)
        tensors[f"mesh.small.{name}"] = filled((1, 2), torch.float32, k)
    return tensors


PLACED = {"s0": Shard(0), "s1": Shard(1), "s2": Shard(2), "r": Replicate()}


def spread_out(tensors):
    """Return tensors as this rank has them."""
    world = group()[1]
    line = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2) if world % 2 == 0 else (1, world))
    found = {}
    for name, tensor in tensors.items():
        how = name.rsplit(".", 1)[1]
        if how == "plain":
            found[name] = tensor
        elif name.startswith("mesh"):
            pair = [how[:-2], how[-2:]] if how[0] == "s" and how != "s1r" else [how[:1], how[1:]]
            pair = ["s1", "r"] if how == "s1r" else pair
            found[name] = distribute_tensor(tensor, grid, [PLACED[one] for one in pair])
        else:
            found[name] = part_of(tensor, line, [PLACED[how]])
    return found


def save_kinds(folder):
    """Save all kinds as a model, and a few as an optimizer."""
    tensors = all_kinds(group()[1])
    here = spread_out(tensors)
    some = {name: one for name, one in here.items() if name.startswith("float32")}
    nested = {"state": {3: some, "x": (1, None, float("nan"))}, "param_groups": [{"lr": 0.1}]}
    with AsyncCheckpointer() as keeper:
        keeper.save_distributed(folder, here, nested, TrainingState(step=1))


@pytest.mark.parametrize("world", [1, 3, 4])
def test_every_kind_of_tensor_comes_back_whole_to_every_reader(tmp_path, world):
    folder = tmp_path / "a"
    on_ranks(world, save_kinds, folder)
    expected = all_kinds(world)
    model, optimizer, _ = load_checkpoint(folder, verify=True)
    assert bitwise(model) == bitwise(expected)
    some = {name: one for name, one in expected.items() if name.startswith("float32")}
    assert bitwise(optimizer["state"][3]) == bitwise(some)
    assert optimizer["state"]["x"][:2] == (1, None)
    verify_checkpoint(folder)
    assert bitwise(load_checkpoint(folder, mmap=False)[0]) == bitwise(expected)
    with open_checkpoint(folder / "model") as checkpoint:
        assert set(checkpoint) == set(expected)
        assert bitwise({name: checkpoint[name] for name in expected}) == bitwise(expected)
        assert all(checkpoint.info(name).shape == one.shape for name, one in expected.items())
    with open_checkpoint(folder) as checkpoint:
        assert bitwise({name: checkpoint[f"model.{name}"] for name in expected}) == bitwise(
            expected
        )
        assert bitwise(checkpoint["optimizer.state.3.float32.deep.s2"]) == bitwise(
            some["float32.deep.s2"]
        )


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_torchs_own_hugging_face_reader_loads_the_folders(tmp_path, part):
    import torch.distributed.checkpoint as dcp

    on_ranks(3, save_kinds, tmp_path / "a")
    expected = all_kinds(3)
    if part == "optimizer":
        some = {name: one for name, one in expected.items() if name.startswith("float32")}
        expected = {f"state.3.{name}": one for name, one in some.items()}
    there = {name: stored_form(one) for name, one in expected.items()}
    room = {name: torch.zeros_like(one) for name, one in there.items()}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "a" / part))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(room, storage_reader=reader, no_dist=True)
    for name, tensor in there.items():
        assert bitwise(room[name]) == bitwise(tensor), name


def stored_form(tensor):
    """Return a tensor as a reader sees it that knows no complex128."""
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor)
    return tensor.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("cast", [None, "bfloat16"])
@pytest.mark.parametrize("what", ["model", "all"])
def test_a_stated_command_makes_one_file_of_it(tmp_path, capsys, what, cast):
    folder, out = tmp_path / "a", tmp_path / "out.safetensors"
    on_ranks(3, save_kinds, folder)
    words = ["convert", folder / "model" if what == "model" else folder, out]
    assert main([*map(str, words), *(["--dtype", cast] if cast else [])]) == 0
    capsys.readouterr()
    expected = all_kinds(3)
    prefix = "" if what == "model" else "model."
    with safe_open(out, "pt") as file:
        for name, tensor in expected.items():
            wanted = stored_form(tensor)
            if cast and tensor.dtype.is_floating_point:
                wanted = wanted.to(torch.bfloat16)
            assert bitwise(file.get_tensor(prefix + name)) == bitwise(wanted), name
        assert ("optimizer.state.3.float32.deep.s2" in file.keys()) == (what == "all")  # noqa: SIM118
    if cast is None:
        with open_checkpoint(out) as checkpoint:
            again = {name: checkpoint[prefix + name] for name in expected}
        assert bitwise(again) == bitwise({k: v.contiguous() for k, v in expected.items()})


def test_inspect_and_verify_tell_of_a_folder_that_ranks_wrote(tmp_path, capsys):
    folder = tmp_path / "a"
    on_ranks(2, save_spread, folder, "fsdp")
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["inspect", str(folder)]) == 0
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert "\n first.\n weight [7, 5] float32 140 B\n" in shown
    assert "\n 1.\n step [] float32 4 B\n exp_avg [3, 7] float32 84 B\n" in shown
    file = folder / "model" / "rank_1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank_1\.safetensors: damaged"):
        verify_checkpoint(folder)
    assert main(["verify", str(folder)]) == 2
    assert "rank_1" in capsys.readouterr().err


def asked_of_files():
    """Return the bytes that this process has asked files for; maps are not counted."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def save_large(folder):
    weight = part_of(torch.zeros(1 << 20), init_device_mesh("cpu", (group()[1],)), [Shard(0)])
    with AsyncCheckpointer() as keeper:
        keeper.save_distributed(folder, {"w": weight})


@pytest.mark.parametrize("world", [None, 2])
def test_verifying_reads_everything_once(tmp_path, monkeypatch, world):
    monkeypatch.setenv("NPYDATA_NO_MMAP", "1")  # what is read through a map is not counted
    if world:
        on_ranks(world, save_large, tmp_path / "a")
    else:
        save_checkpoint(tmp_path / "a", {"w": torch.zeros(1 << 20)})
    verify_checkpoint(tmp_path / "a")  # imports what it needs, which are files as well
    before = asked_of_files()
    verify_checkpoint(tmp_path / "a")
    assert 4 << 20 <= asked_of_files() - before < 5 << 20


# Models in wrappers, ties, optimizers


def load_spread(folder, how, steps=1):
    """Load into a model that is spread in some way; return its whole state, before and later."""
    model, optimizer = spread(how, seed=9)
    load_distributed(folder, model, optimizer)
    state = {states_name(name): one for name, one in whole(model.state_dict()).items()}
    numbered = whole(optimizer.state_dict()["state"])
    train(model, optimizer, steps, first=1)
    later = [one.flatten().tolist() for one in whole(dict(model.named_parameters())).values()]
    groups = [one["lr"] for one in optimizer.param_groups]
    return bitwise([state, numbered]), groups, np.concatenate(later)


def states_name(name):
    return name.removeprefix("module.").replace("_orig_mod.", "")


@pytest.mark.parametrize("keys", ["numbers", "names"])
def test_names_of_wrappers_and_keys_of_the_optimizer_do_not_matter(tmp_path, keys):
    """Each way of spreading saves, each loads, and trains on alike."""
    ways = ["plain", "ddp", "fsdp", "compiled"]
    for how in ways:
        on_ranks(2, save_spread, tmp_path / how, how, keys)
    found = on_ranks(2, load_all, [tmp_path / how for how in ways])
    states_found = [one for some in found for one in some]
    first = states_found[0]
    assert first[1] == [0.01, 0.02]
    assert all(one[:2] == first[:2] for one in states_found)
    assert all(np.allclose(later, first[2], atol=1e-5) for *_, later in states_found)


def load_all(folders):
    return [load_spread(folder, how) for folder in folders for how in ("ddp", "fsdp", "plain")]


class Tied(torch.nn.Module):
    """Its output is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(6, 5)
        self.out = torch.nn.Linear(5, 6, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids):
        return self.out(self.embedding(ids))

    def get_extra_state(self):
        return {"seen": getattr(self, "seen", (0,)), "rate": float("inf")}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def save_tied(folder, sharded):
    torch.manual_seed(3)
    model = Tied()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (group()[1],)))
    model.seen = (5, "x")
    with AsyncCheckpointer() as keeper:
        keeper.save_distributed(folder, model.state_dict())
    return bitwise(whole(model.embedding.weight.detach()))


def load_tied(folder, sharded):
    torch.manual_seed(4)
    model = Tied()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (group()[1],)))
    load_distributed(folder, model)
    weights = [whole(one.weight.detach()) for one in (model.embedding, model.out)]
    return [bitwise(one) for one in weights], model.seen, model.out.weight is model.embedding.weight


@pytest.mark.parametrize("sharded", [False, True])
def test_tied_tensors_have_each_name_and_are_one_again(tmp_path, sharded):
    weight = on_ranks(2, save_tied, tmp_path / "a", sharded)[0]
    model, optimizer, _ = load_checkpoint(tmp_path / "a")
    assert optimizer is None
    assert model["embedding.weight"] is model["out.weight"]
    assert bitwise(model["out.weight"]) == weight
    assert model["_extra_state"] == {"seen": (5, "x"), "rate": float("inf")}
    with open_checkpoint(tmp_path / "a" / "model") as checkpoint:
        assert (
            bitwise(checkpoint["out.weight"]) == bitwise(checkpoint["embedding.weight"]) == weight
        )
    for world, spread_there in ((1, False), (3, True)):
        for weights, seen, one in on_ranks(world, load_tied, tmp_path / "a", spread_there):
            assert weights == [weight] * 2
            assert (seen, one) == ((5, "x"), True)


def load_tied_and_optimizer(folder):
    """Load with an optimizer, which the checkpoint lacks."""
    model = Tied()
    before = bitwise(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    message = refused(lambda: load_distributed(folder, model, optimizer))
    return message, bitwise(model.state_dict()) == before, hasattr(model, "seen")


def test_without_the_optimizers_state_the_extra_state_is_not_taken_either(tmp_path):
    on_ranks(1, save_tied, tmp_path / "a", False)
    message, same, seen = on_ranks(1, load_tied_and_optimizer, tmp_path / "a")[0]
    assert "has no optimizer state" in message
    assert (same, seen) == (True, False)


class Counted(torch.nn.Linear):
    """A layer whose extra state is a tensor that is made anew each time."""

    def get_extra_state(self):
        return torch.tensor(5)

    def set_extra_state(self, state):
        raise AssertionError


def load_counted(folder):
    """Save a layer; load into one that gives a copy out."""
    with AsyncCheckpointer() as keeper:
        keeper.save_distributed(folder, Counted(3, 2).state_dict())
    model = Counted(3, 2)
    before = bitwise(model.state_dict())
    message = refused(lambda: load_distributed(folder, model))
    return message, bitwise(model.state_dict()) == before


def test_what_a_state_dict_makes_anew_cannot_be_filled(tmp_path):
    message, same = on_ranks(1, load_counted, tmp_path / "a")[0]
    assert "_extra_state: the state_dict() of a Counted makes it anew" in message
    assert same


def train_tied(folder):
    """Save a tied FSDP model with its optimizer; load it into another one."""
    torch.manual_seed(3)
    states_of = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        model = Tied()
        fully_shard(model, mesh=init_device_mesh("cpu", (group()[1],)))
        optimizer = torch.optim.AdamW(model.parameters())
        if seed == 3:
            model(torch.arange(6)).square().mean().backward()
            optimizer.step()
            with AsyncCheckpointer() as keeper:
                state = get_optimizer_state_dict(model, optimizer)
                keeper.save_distributed(folder, model.state_dict(), state)
        else:
            load_distributed(folder, model, optimizer)
        states_of.append(bitwise(whole([model.state_dict(), optimizer.state_dict()["state"]])))
    return states_of


def test_the_optimizer_of_tied_tensors_finds_its_state(tmp_path):
    for saved, loaded in on_ranks(2, train_tied, tmp_path / "a"):
        saved[1][0][1][-1:] = []  # the extra state, which each model has of its own
        loaded[1][0][1][-1:] = []
        assert loaded == saved


def save_singly(folder):
    """Save in this process alone, with generators."""
    model, optimizer = spread("plain")
    train(model, optimizer, 1)
    training = TrainingState(step=4, rng=capture_rng())
    save_checkpoint(folder, model.state_dict(), optimizer.state_dict(), training)
    return bitwise([model.state_dict(), optimizer.state_dict()["state"]])


def load_rng(folder, how):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model, optimizer = spread(how, seed=9)
        training = load_distributed(folder, model, optimizer)
    state = bitwise([whole(model.state_dict()), whole(optimizer.state_dict()["state"])])
    drawn = None
    if training.rng is not None:
        restore_rng(training.rng)
        drawn = torch.rand(3).tolist(), np.random.rand(), np.random.rand()
    return state, drawn, [str(one.message) for one in warned if "generators" in str(one.message)]


def test_what_one_process_saved_many_load(tmp_path):
    (saved,) = (Ranks(1, save_singly, tmp_path / "a", meet="").result(0),)
    for world in (1, 2, 3):
        for state, drawn, warned in on_ranks(world, load_rng, tmp_path / "a", "fsdp"):
            assert state == saved
            assert (drawn is None) == (world > 1)
            assert len(warned) == (world > 1)
            assert all("1 ranks saved and" in one for one in warned)


def test_a_process_without_a_group_saves_and_loads_as_one_rank(tmp_path):
    saved = Ranks(1, save_spread, tmp_path / "a", "plain", meet="").result(0)
    assert (tmp_path / "a" / "model" / "rank_0.safetensors").is_file()
    state, *_ = Ranks(1, load_rng, tmp_path / "a", "plain", meet="").result(0)
    assert state[1][0] == saved[1][0]


def save_rng(folder):
    torch.manual_seed(100 + group()[0])
    np.random.seed(group()[0])
    model, optimizer = spread("plain")
    torch.manual_seed(100 + group()[0])
    training = TrainingState(step=1, rng=capture_rng())
    with AsyncCheckpointer() as keeper:
        keeper.save_distributed(folder, model.state_dict(), optimizer.state_dict(), training)
    return torch.rand(3).tolist(), np.random.rand(), np.random.rand()


def test_each_rank_gets_its_own_generators_back_on_as_many_ranks(tmp_path):
    drawn = on_ranks(3, save_rng, tmp_path / "a")
    assert len({one[1] for one in drawn}) == 3
    found = on_ranks(3, load_rng, tmp_path / "a", "plain")
    assert [one[1] for one in found] == drawn
    assert [one[2] for one in found] == [[]] * 3
    (_, nothing, warned), _ = on_ranks(2, load_rng, tmp_path / "a", "plain")
    assert nothing is None
    assert len(warned) == 1
    assert "3 ranks saved and 2 load" in warned[0]


# Refusals


def refused(call):
    """Return the message with which something is refused."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "not refused"


class Other(torch.nn.Module):
    """A model that differs from the small one in the way that its name says."""

    def __init__(self, how):
        super().__init__()
        small = states.Small()
        self.first, self.second = small.first, small.second
        self.register_buffer("flags", small.flags)
        if how != "lacks":
            self.register_buffer("count", small.count)
        if how == "more":
            self.more = torch.nn.Linear(2, 2)
        if how == "shape":
            self.second = torch.nn.Linear(7, 4, bias=False)

    forward = states.Small.forward


def load_misfits(folder, modest):
    """Try to load into what doesn't fit; return the messages, and whether anything changed."""
    sharding = ShardingConfig(timeout_s=30)
    messages, changed = {}, []
    for how in ("lacks", "more", "shape"):
        model, _ = spread("fsdp", make=lambda how=how: Other(how))
        before = bitwise(whole(model.state_dict()))
        messages[how] = refused(lambda: load_distributed(folder, model, sharding=sharding))  # noqa: B023
        changed.append(bitwise(whole(model.state_dict())) != before)
    model, optimizer = spread("fsdp", seed=9)
    before = bitwise(whole(model.state_dict()))
    messages["no optimizer"] = refused(lambda: load_distributed(modest, model, optimizer))
    weights = [one for one in model.parameters() if one.ndim > 1]
    others = {
        "one group": torch.optim.AdamW(model.parameters()),
        "fewer": torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:]}]),
    }
    for key, optimizer in others.items():
        messages[key] = refused(lambda: load_distributed(folder, model, optimizer))  # noqa: B023
    messages["nothing there"] = refused(lambda: load_distributed(f"{folder}-no", model))
    theirs = modest if group()[0] else folder
    messages["two"] = refused(lambda: load_distributed(theirs, model, sharding=sharding))
    changed.append(bitwise(whole(model.state_dict())) != before)
    return messages, changed


@pytest.mark.parametrize("keys", ["numbers", "names"])
def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing(tmp_path, keys):
    on_ranks(2, save_spread, tmp_path / "a", "fsdp", keys)
    small = states.Small().state_dict()
    save_checkpoint(tmp_path / "b", small, training_state=TrainingState(step=3))
    for messages, changed in on_ranks(2, load_misfits, tmp_path / "a", tmp_path / "b"):
        assert "has beyond the model: 'count'" in messages["lacks"]
        assert "lacks the model: 'more.bias', 'more.weight'" in messages["more"]
        assert "second.weight: has shape [3, 7], expected [4, 7]" in messages["shape"]
        assert "has no optimizer state" in messages["no optimizer"]
        for key in ("one group", "fewer"):
            assert "optimizer" in messages[key]
            assert "not refused" not in messages[key]
        assert "there is no such folder" in messages["nothing there"]
        assert str(tmp_path) in messages["shape"]
        assert str(tmp_path) in messages["no optimizer"]
        assert "rank 1 has checkpoint b of commit 2, rank 0 a of commit 1" in messages["two"]
        assert not any(changed)


def save_misfits(folder):
    """Try to save what the ranks don't agree on, one after the other; then save."""
    rank, world = group()
    mesh = init_device_mesh("cpu", (world,))
    good = {"x": torch.ones(3)}
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    tries = {
        "shape": {"x": torch.ones(3 + rank)},
        "dtype": {"x": torch.ones(3, dtype=torch.float64 if rank else torch.float32)},
        "partial": {"y": partial},
        "hook": {"deep": {"hook": print if rank == 1 else 1}},
        "sparse": {"x": torch.ones(3).to_sparse() if rank else torch.ones(3)},
        "no dict": [1] if rank else good,
    }
    messages = {}
    sharding = ShardingConfig(timeout_s=30)
    with AsyncCheckpointer() as keeper:
        for key, model in tries.items():
            messages[key] = refused(
                lambda: keeper.save_distributed(folder, model, sharding=sharding)  # noqa: B023
            )
        for key, mine in {
            "folder": (f"{folder}{rank}", good, None, TrainingState()),
            "step": (folder, good, None, TrainingState(step=rank)),
            "parts": (folder, good, {"state": {}} if rank else None, TrainingState()),
            "training": (folder, good, None, TrainingState(extra={"x": print if rank else 1})),
            "rng": (folder, good, None, TrainingState(rng={"x": print if rank else 1})),
        }.items():
            short = ShardingConfig(timeout_s=3) if key == "folder" else sharding
            messages[key] = refused(lambda: keeper.save_distributed(*mine, sharding=short))  # noqa: B023
        for key, place in {"rank": {"rank": rank + 1}, "world": {"world_size": 7}}.items():
            messages[key] = refused(lambda: keeper.save_distributed(folder, good, **place))  # noqa: B023
        messages["singly"] = refused(
            lambda: keeper.save(folder, {"x": distribute_tensor(torch.ones(4), mesh, [Shard(0)])})
        )
        keeper.save_distributed(folder, good, rank=rank, world_size=world)
    return messages


def test_what_the_ranks_do_not_agree_on_is_refused_on_all_and_the_next_save_works(tmp_path):
    expected = {
        "shape": "x: float32 [3] on rank 0, float32 [4] on rank 1",
        "dtype": "x: float32 [3] on rank 0, float64 [3] on rank 1",
        "partial": "y: is a partial sum",
        "hook": "model_state: ['deep']['hook']: a builtin_function_or_method has no place in JSON",
        "sparse": "model_state: x: a torch.sparse_coo tensor, expected a dense one",
        "no dict": "model_state is a list, expected a dict",
        "step": "rank 1 saves step 1, rank 0 step 0",
        "parts": "rank 1 saves parts ['model', 'optimizer'], rank 0 parts ['model']",
        "training": "training_state: ['extra']['x']",
        "rng": "training_state: ['rng']['x']: a builtin_function_or_method",
        "world": "world_size=7, expected 3",
        "singly": "x: is sharded over processes; save it with save_distributed",
    }
    found = on_ranks(3, save_misfits, tmp_path / "a")
    for rank, messages in enumerate(found):
        for key, text in expected.items():
            assert text in messages[key], (rank, key)
        assert messages["rank"].startswith(f"rank={rank + 1}, expected {rank}")
        assert "not refused" not in messages["folder"]
        if rank != 1:
            assert messages["hook"].startswith("rank 1: ")
    assert set(load_checkpoint(tmp_path / "a", verify=True)[0]) == {"x"}
    assert {path.name for path in tmp_path.iterdir()} == {"a", "latest"}


DIFFERING = {
    "all of it": torch.zeros(5000),
    "one element in fifty": torch.zeros(50_000),
    "one of a few elements": torch.zeros(1000),
    "a scalar": torch.tensor(0.0),
    "slanted": torch.zeros(40, 60).t(),
    "float8": torch.zeros(3000).to(torch.float8_e4m3fn),
    "complex": torch.zeros(3000, dtype=torch.complex128).conj(),
}


def save_differing(folder):
    """Save what differs on rank 1 in one way after the other, and what differs for good reasons."""
    rank, world = group()
    mesh = init_device_mesh("cpu", (world,))
    messages = {}
    for key, zeros in DIFFERING.items():
        mine = zeros.clone(memory_format=torch.preserve_format)
        if rank == 1:
            every = {"one of a few elements": 1000, "one element in fifty": 50}.get(key, 1)
            places = torch.arange(mine.numel()).view(mine.shape) % every == 0
            mine.copy_(places.float())
        model = {"same": torch.ones(3), "x": mine}
        messages[key] = refused(lambda: save_and_wait(folder, model))  # noqa: B023
    optimizer = {"state": {0: {"exp_avg": torch.full((3,), rank)}}}
    messages["optimizer"] = refused(lambda: save_and_wait(folder, {}, optimizer))
    spread_out = part_of(torch.full((2 * world,), rank), mesh, [Shard(0)])
    fine = {"norm.running_mean": torch.full((3,), rank), "own": spread_out, "none": torch.ones(0)}
    messages["fine"] = refused(lambda: save_and_wait(folder, fine))
    return messages


def save_and_wait(folder, *states, **options):
    with AsyncCheckpointer() as keeper:
        keeper.save_distributed(folder, *states, sharding=ShardingConfig(**options))


def test_a_time_out_of_nothing_is_refused():
    for seconds in (0, -1, float("nan")):
        with pytest.raises(CheckpointError, match="timeout_s"):
            ShardingConfig(timeout_s=seconds)


def save_in_halves(folder):
    """Two groups of two ranks each save a checkpoint of their own, at the same time."""
    rank = group()[0]
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    sharding = ShardingConfig(process_group=halves[rank // 2], timeout_s=30)
    other = ShardingConfig(process_group=halves[1 - rank // 2])
    with AsyncCheckpointer() as keeper:
        refusal = refused(lambda: keeper.save_distributed(folder / "c", {}, sharding=other))
        for step in (1, 2):
            model = {"x": torch.full((3,), rank // 2 + step)}
            training = TrainingState(step=step, rng={"x": rank})
            target = folder / "ab"[rank // 2]
            keeper.save_distributed(target, model, None, training, sharding=sharding)
    loaded = torch.nn.Module()
    loaded.register_buffer("x", torch.zeros(3, dtype=torch.int64))
    return refusal, load_distributed(target, loaded, sharding=sharding).rng, loaded.x.tolist()


def test_groups_save_apart(tmp_path):
    found = on_ranks(4, save_in_halves, tmp_path)
    assert [one[1] for one in found] == [{"x": rank} for rank in range(4)]
    assert [one[2] for one in found] == [[2] * 3] * 2 + [[3] * 3] * 2
    assert all("not in the given process group" in one[0] for one in found)
    for name in "ab":
        assert verify_checkpoint(tmp_path / name).step == 2


def save_stages(folder):
    """Each rank has layers of its own, as in a pipeline, and one that all have."""
    rank = group()[0]
    model = {"shared": torch.ones(2), f"stage{rank}": {"w": torch.full((3,), rank)}, "n": 1}
    with AsyncCheckpointer() as keeper:
        keeper.save_distributed(folder, model)


def test_ranks_may_have_different_layers(tmp_path):
    on_ranks(3, save_stages, tmp_path / "a")
    model, _, _ = load_checkpoint(tmp_path / "a", verify=True)
    assert set(model) == {"shared", "stage0", "stage1", "stage2", "n"}
    assert [model[f"stage{k}"]["w"].tolist() for k in range(3)] == [[k] * 3 for k in range(3)]


def save_often(folder, keep_last):
    """Save again and again into two names, without waiting."""
    with AsyncCheckpointer(keep_last=keep_last) as keeper:
        for step in range(6):
            training = TrainingState(step=step, rng={"a": 1} if step < 5 else None)
            name = folder / f"{step % 3}"
            keeper.save_distributed(name, {"x": torch.full((50,), step)}, None, training)


def test_saves_follow_each_other_replace_each_other_and_old_ones_go(tmp_path):
    on_ranks(2, save_often, tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "latest"}
    assert latest_checkpoint(tmp_path) == tmp_path / "2"
    model, _, _ = load_checkpoint(tmp_path / "2", verify=True)
    assert model["x"].tolist() == [5] * 50
    assert not any((tmp_path / "2" / "rng").iterdir())
    mode = (tmp_path / "1").stat().st_mode
    assert all((path.stat().st_mode & 0o444) == (mode & 0o444) for path in tmp_path.rglob("*"))


def number_of_keys():
    return dist.distributed_c10d._get_default_store().num_keys()


def keys_left(folder):
    """Save and load; return what is left in the store."""
    save_often(folder, 1)
    model = torch.nn.Module()
    model.register_buffer("x", torch.zeros(50, dtype=torch.int64))
    for _ in range(3):
        load_distributed(folder / "2", model)
    dist.barrier()
    return dist.distributed_c10d._get_default_store().num_keys()


def test_the_store_does_not_fill_up(tmp_path):
    counts = []
    for _ in range(2):
        before = on_ranks(2, number_of_keys)[0]
        counts.append(on_ranks(2, keys_left, tmp_path)[0] - before)
    assert counts[0] < 30, "9 meetings left more than a few keys each"
