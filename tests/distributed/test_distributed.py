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


@pytest.mark.nightly
def test_two_hosts_with_networks_of_their_own_share_the_stream_save_and_load(tmp_path, tokens):
    """Each process is in a network namespace of its own; they share the file system."""
    if why := cannot_have_hosts():
        pytest.skip(why)
    script = Path(__file__).with_name("ranks") / "under_torchrun.py"
    on_ranks(3, save_everything, tmp_path / "other" / "a", tokens)
    with two_hosts() as hosts:
        runs = []
        for rank, host in enumerate(hosts):
            words = [*host.prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", 2,
                     "--nproc-per-node", 1, "--node-rank", rank, "--master-port", 29531,
                     "--master-addr", hosts[0].address, script, tmp_path, tokens]  # fmt: skip
            env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            env |= {**os.environ, **env, "GLOO_SOCKET_IFNAME": host.interface}
            runs.append(subprocess.Popen([*map(str, words)], env=env))
        assert [run.wait(240) for run in runs] == [0, 0]
    taken = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert in_turn(taken) == the_stream(tokens)[: SAMPLES - SAMPLES % 2]
    verify_checkpoint(tmp_path / "run" / "a")
    assert latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "a"


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


@pytest.mark.parametrize("how", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("keys", ["numbers", "names"])
def test_every_element_is_written_once_and_whole(tmp_path, how, keys):
    saved = on_ranks(4, save_spread, tmp_path / "a", how, keys)
    assert all(one == saved[0] for one in saved)
    model, optimizer, _ = load_checkpoint(tmp_path / "a", verify=True)
    assert bitwise([model, optimizer]) == saved[0]
    for part in ("model", "optimizer"):
        with open_checkpoint(tmp_path / "a" / part) as checkpoint:
            wanted = {name: tensor.numel() for name, tensor in checkpoint.items()}
        places = stored(tmp_path / "a", part)
        written = {n: sum(math.prod(size) for _, size in places[n]) for n in places}
        assert written == wanted


def test_a_shard_is_written_by_the_rank_that_has_it(tmp_path):
    on_ranks(4, save_spread, tmp_path / "a", "fsdp")
    for part, prefix in (("model", ["first.weight", "second.weight"]),
                         ("optimizer", ["state.0.exp_avg", "state.1.exp_avg"])):  # fmt: skip
        found = stored(tmp_path / "a", part)
        rows = [[2, 5], [2, 5], [2, 5], [1, 5]], [[1, 7]] * 3  # of that the fourth has nothing
        for name, sizes in zip(prefix, rows, strict=True):
            assert found[name] == [(f"rank_{k}.safetensors", size) for k, size in enumerate(sizes)]


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


PLACED = {"s0": [Shard(0)], "s1": [Shard(1)], "s2": [Shard(2)], "r": [Replicate()],
          "s0s1": [Shard(0), Shard(1)], "s1s0": [Shard(1), Shard(0)], "s0s0": [Shard(0)] * 2,
          "rs1": [Replicate(), Shard(1)], "s1r": [Shard(1), Replicate()]}  # fmt: skip
"""How a tensor is spread, on a line of ranks or a grid of them; anything else is not."""


def all_kinds():
    """Return every tensor that ranks spread in some way, whole; its name ends with how."""
    tensors = {}
    for seed, dtype in enumerate(DTYPES):
        text = str(dtype).removeprefix("torch.")
        for name, shape in SHAPES.items():
            for dim in range(len(shape)):
                tensors[f"{text}.{name}.s{dim}"] = filled(shape, dtype, seed)
            tensors[f"{text}.{name}.r"] = filled(shape, dtype, seed)
        tensors[f"{text}.scalar.plain"] = filled((), dtype, seed)
        tensors[f"{text}.slanted.plain"] = filled((4, 6), dtype, seed).t()[::2]
    for seed, how in enumerate(PLACED):
        if len(PLACED[how]) == 2:
            tensors[f"grid.{how}"] = filled((5, 7), torch.float32, seed)
            tensors[f"small.{how}"] = filled((1, 2), torch.float32, seed)
    return tensors


def some_kinds():
    return {name: one for name, one in all_kinds().items() if name.startswith("float32")}


def save_kinds(folder):
    """Save all kinds as a model, and a few as an optimizer."""
    world = group()[1]
    line = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2) if world % 2 == 0 else (1, world))

    def here(name, tensor):
        places = PLACED.get(name.rsplit(".", 1)[1], [])
        if len(places) == 2:
            return distribute_tensor(tensor, grid, places)
        return part_of(tensor, line, places) if places else tensor

    model = {name: here(name, one) for name, one in all_kinds().items()}
    some = {name: model[name] for name in some_kinds()}
    nested = {"state": {3: some, "x": (1, None, float("nan"))}, "param_groups": [{"lr": 0.1}]}
    with AsyncCheckpointer() as keeper:
        keeper.save_distributed(folder, model, nested, TrainingState(step=1))


@pytest.mark.parametrize("world", [1, 3, 4])
def test_every_kind_of_tensor_comes_back_whole_to_every_reader(tmp_path, world):
    folder, expected, some = tmp_path / "a", all_kinds(), some_kinds()
    on_ranks(world, save_kinds, folder)
    for mmap in (True, False):
        model, optimizer, _ = load_checkpoint(folder, mmap=mmap, verify=True)
        assert bitwise(model) == bitwise(expected)
        assert bitwise(optimizer["state"][3]) == bitwise(some)
        assert optimizer["state"]["x"][:2] == (1, None)
    with open_checkpoint(folder / "model") as checkpoint:
        assert bitwise({name: checkpoint[name] for name in expected}) == bitwise(expected)
        assert all(checkpoint.info(name).shape == one.shape for name, one in expected.items())
    with open_checkpoint(folder) as checkpoint:
        assert bitwise({n: checkpoint[f"optimizer.state.3.{n}"] for n in some}) == bitwise(some)


def test_torchs_own_hugging_face_reader_loads_the_folders(tmp_path):
    import torch.distributed.checkpoint as dcp

    on_ranks(3, save_kinds, tmp_path / "a")
    optimizer = {f"state.3.{name}": one for name, one in some_kinds().items()}
    for part, expected in (("model", all_kinds()), ("optimizer", optimizer)):
        there = {name: stored_form(one) for name, one in expected.items()}
        found = {name: torch.zeros_like(one) for name, one in there.items()}
        reader = dcp.HuggingFaceStorageReader(str(tmp_path / "a" / part))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(found, storage_reader=reader, no_dist=True)
        assert bitwise(found) == bitwise(there)


def stored_form(tensor):
    """Return a tensor as a reader sees it that knows no complex128."""
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor)
    return tensor.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("what", ["model", ""])
def test_convert_makes_one_file_of_it(tmp_path, capsys, what):
    on_ranks(3, save_kinds, tmp_path / "a")
    assert main(["convert", str(tmp_path / "a" / what), str(tmp_path / "out.safetensors")]) == 0
    capsys.readouterr()
    expected = {("" if what else "model.") + name: one for name, one in all_kinds().items()}
    with open_checkpoint(tmp_path / "out.safetensors") as checkpoint:
        found = {name: checkpoint[name] for name in expected}
    assert bitwise(found) == bitwise({k: v.contiguous() for k, v in expected.items()})
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert bitwise({k: file.get_tensor(k) for k in expected}) == bitwise(
            {name: stored_form(one) for name, one in expected.items()}
        )
        assert ("optimizer.state.3.float32.deep.s2" in file.keys()) == (not what)  # noqa: SIM118


def test_inspect_and_verify_name_the_tensors_and_files_of_ranks(tmp_path, capsys):
    folder = tmp_path / "a"
    on_ranks(2, save_spread, folder, "fsdp")
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["inspect", str(folder)]) == 0
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert "\nmodel.first.weight [7, 5] float32 140 B\n" in shown
    assert "\noptimizer.state.1.exp_avg [3, 7] float32 84 B\n" in shown
    file = folder / "model" / "rank_1.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert main(["verify", str(folder)]) == 2
    assert "rank_1" in capsys.readouterr().err


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


def tied(seed, sharded):
    """Return a model and its optimizer."""
    torch.manual_seed(seed)
    model = Tied()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (group()[1],)))
    return model, torch.optim.AdamW(model.parameters())


def save_tied(folder, sharded):
    model, optimizer = tied(3, sharded)
    model(torch.arange(6)).square().mean().backward()
    optimizer.step()
    model.seen = (5, "x")
    with AsyncCheckpointer() as keeper:
        state = get_optimizer_state_dict(model, optimizer)
        keeper.save_distributed(folder, model.state_dict(), state)
    return bitwise(whole([model.embedding.weight.detach(), optimizer.state_dict()["state"]]))


def load_tied(folder, sharded):
    model, optimizer = tied(4, sharded)
    load_distributed(folder, model, optimizer)
    assert model.out.weight is model.embedding.weight
    loaded = [model.embedding.weight.detach(), optimizer.state_dict()["state"]]
    return bitwise(whole(loaded)), model.seen


@pytest.mark.parametrize("sharded", [False, True])
def test_tied_tensors_have_each_name_and_are_one_again_with_their_optimizer(tmp_path, sharded):
    saved = on_ranks(2, save_tied, tmp_path / "a", sharded)[0]
    model, _, _ = load_checkpoint(tmp_path / "a")
    assert model["embedding.weight"] is model["out.weight"]
    assert model["_extra_state"] == {"seen": (5, "x"), "rate": float("inf")}
    with open_checkpoint(tmp_path / "a" / "model") as checkpoint:
        assert bitwise(checkpoint["out.weight"]) == bitwise(model["out.weight"])
    for world, spread_there in ((1, False), (3, True)):
        found = on_ranks(world, load_tied, tmp_path / "a", spread_there)
        assert found == [(saved, (5, "x"))] * world


def save_rng(folder, alone=False):
    """Save with generators that are this rank's own; return what they give next."""
    model, optimizer = spread("plain")
    train(model, optimizer, 1)
    torch.manual_seed(100 + group()[0])
    np.random.seed(group()[0])
    training = TrainingState(step=1, rng=capture_rng())
    states_of = model.state_dict(), optimizer.state_dict()
    with AsyncCheckpointer() as keeper:
        (keeper.save if alone else keeper.save_distributed)(folder, *states_of, training)
    state = bitwise([states_of[0], states_of[1]["state"]])
    return state, (torch.rand(3).tolist(), np.random.rand())


def load_rng(folder, how):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model, optimizer = spread(how, seed=9)
        training = load_distributed(folder, model, optimizer)
    state = bitwise([whole(model.state_dict()), whole(optimizer.state_dict()["state"])])
    drawn = None
    if training.rng is not None:
        restore_rng(training.rng)
        drawn = torch.rand(3).tolist(), np.random.rand()
    messages = [str(one.message) for one in warned]
    return state, drawn, [one for one in messages if "generators" in one]


@pytest.mark.parametrize(
    "world, grouped, alone", [(1, False, True), (1, False, False), (3, True, False)]
)
def test_each_rank_gets_its_own_generators_back_on_as_many_ranks(tmp_path, world, grouped, alone):
    saved = Ranks(world, save_rng, tmp_path / "a", alone, grouped=grouped).results()
    assert len({drawn for _, (_, drawn) in saved}) == world
    for count in (1, 2, 3):
        found = on_ranks(count, load_rng, tmp_path / "a", "fsdp")
        for rank, (state, drawn, warned) in enumerate(found):
            assert state == saved[0][0]
            assert drawn == (saved[rank][1] if count == world else None)
            assert [f"{world} ranks saved and {count} load" in one for one in warned] == (
                [True] * (count != world)
            )
    if world == 1:
        (found,) = Ranks(1, load_rng, tmp_path / "a", "plain", grouped=False).results()
        assert found == (*saved[0], [])


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
        self.how = how

    forward = states.Small.forward

    def state_dict(self, *args, **options):
        state = super().state_dict(*args, **options)
        if self.how == "anew":
            state["count"] = state["count"].clone()
        return state


def load_misfits(folder, modest):
    """Try to load into what doesn't fit; return the messages, and whether anything changed."""
    sharding = ShardingConfig(timeout_s=30)
    messages, changed = {}, []
    for how in ("lacks", "more", "shape", "anew"):
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
        assert "count: the state_dict() of a" in messages["anew"]
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
    """Save, load and be refused; return what is left in the store beyond what was there."""
    before = number_of_keys()
    save_often(folder, 1)
    model = torch.nn.Module()
    model.register_buffer("x", torch.zeros(50, dtype=torch.int64))
    for _ in range(3):
        load_distributed(folder / "2", model)
    with AsyncCheckpointer() as keeper:
        refused(lambda: keeper.save_distributed(folder / "3", {"x": torch.zeros(group()[0])}))
    dist.barrier()
    return number_of_keys() - before


def test_the_store_does_not_fill_up(tmp_path):
    counts = on_ranks(2, keys_left, tmp_path)
    assert counts[0] < 30, "10 meetings left more than a few keys each"
