"""Many ranks: the stream they share, the checkpoint they write together, and who can read it.

The ranks are forked processes with a gloo group of their own (see ``ranks/``), and meet at a store
in this process as under ``torchrun``; some tests start ``torchrun`` itself.
"""

import math
import os
import random
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_tools import bitwise
from ranks import Ranks, on_ranks, states
from ranks.hosts import ADDRESSES, INTERFACE, cannot_have_hosts, on_host, two_hosts
from ranks.states import group, optimizer_state, part_of, spread, starts, stream, train, whole
from safetensors import safe_open
from test_roundtrip import random_bits
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


def whole_state(model, optimizer, keys):
    """Return the whole state to the bit; all ranks take part."""
    return bitwise([whole(model.state_dict()), whole(optimizer_state(model, optimizer, keys))])


def save_everything(folder, tokens):
    """Train, take some batches, save; return the whole state, and the samples that were taken."""
    model, optimizer = spread("fsdp")
    train(model, optimizer, 2)
    loader = stream(tokens)
    batches = iter(loader)
    taken = starts(next(batches) for _ in range(BEFORE))
    place = loader.state_dict()
    training = TrainingState(step=2, tokens=7, rng=capture_rng(), loader=place, extra={"a": (1,)})
    saved = whole_state(model, optimizer, "names")
    with AsyncCheckpointer() as keeper:
        state = optimizer_state(model, optimizer, "names")
        keeper.save_distributed(folder, model.state_dict(), state, training)
        train(model, optimizer, 1)  # goes on while the disk works
    return saved, taken, starts(batches)


def load_everything(folder, tokens):
    """Load what any number of ranks saved into other weights; return it, and the next samples."""
    model, optimizer = spread("fsdp", seed=9)
    training = load_distributed(folder, model, optimizer)
    with (
        open_checkpoint(folder / "model") as saved,
        pytest.raises(CheckpointError, match="DTensor"),
    ):
        saved.load(into=model)
    loaded = whole_state(model, optimizer, "names")
    loader = stream(tokens)
    loader.load_state_dict(training.loader)
    facts = training.step, training.tokens, training.extra, training.rng is not None
    return loaded, starts(loader), facts


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
            assert in_turn([batches for _, batches, _ in found]) == rest
            for loaded, _, facts in found:
                assert loaded == saved[before]
                assert facts == (2, 7, {"a": (1,)}, world == before)


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
            words = [
                *on_host(host),
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                2,
                "--nproc-per-node",
                1,
                "--node-rank",
                rank,
                "--master-port",
                29531,
                "--master-addr",
                ADDRESSES[0],
                script,
                tmp_path,
                tokens,
            ]
            env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            env |= {**os.environ, **env, "GLOO_SOCKET_IFNAME": INTERFACE}
            runs.append(subprocess.Popen([*map(str, words)], env=env))
        assert [run.wait(240) for run in runs] == [0, 0]
    taken = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert in_turn(taken) == the_stream(tokens)[: SAMPLES - SAMPLES % 2]
    verify_checkpoint(tmp_path / "run" / "a")
    assert latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "a"


# Who writes what


def save_spread(folder, how, keys):
    """Save a model that is spread in some way; return its whole state."""
    model, optimizer = spread(how)
    train(model, optimizer, 1)
    state = optimizer_state(model, optimizer, keys)
    with AsyncCheckpointer() as keeper:
        keeper.save_distributed(folder, model.state_dict(), state, TrainingState(step=1))
    return whole_state(model, optimizer, keys)


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
        places = {}
        for path in sorted((tmp_path / "a" / part).iterdir()):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    shape = file.get_slice(name).get_shape()
                    places.setdefault(name, []).append((path.name, shape))
        written = {n: sum(math.prod(size) for _, size in places[n]) for n in places}
        assert written == wanted
        if how == "fsdp":  # each shard by the rank that has it
            name = {"model": "first.weight", "optimizer": "state.0.exp_avg"}[part]
            name = name if keys == "numbers" or part == "model" else "state.first.weight.exp_avg"
            rows = enumerate([2, 2, 2, 1])
            assert places[name] == [(f"rank_{k}.safetensors", [n, 5]) for k, n in rows]


# Every kind of tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64,
          torch.uint8, torch.complex64, torch.complex128, torch.float8_e4m3fn)  # fmt: skip
SHAPES = {
    "even": (4, 6),
    "uneven": (7, 3),
    "one": (1, 3),
    "deep": (3, 5, 2),
    "vector": (11,),
    "nothing": (0, 4),
}


PLACED = {"s0": [Shard(0)], "s1": [Shard(1)], "s2": [Shard(2)], "r": [Replicate()],
          "s0s1": [Shard(0), Shard(1)], "s1s0": [Shard(1), Shard(0)], "s0s0": [Shard(0)] * 2,
          "rs1": [Replicate(), Shard(1)], "s1r": [Shard(1), Replicate()]}  # fmt: skip
"""How a tensor is spread, on a line of ranks or a grid of them; anything else is not."""


def all_kinds():
    """Return every tensor that ranks spread in some way, whole; its name ends with how."""
    tensors, chance = {}, random.Random(0)
    for dtype in DTYPES:
        text = str(dtype).removeprefix("torch.")
        for name, shape in SHAPES.items():
            for how in (*(f"s{dim}" for dim in range(len(shape))), "r"):
                tensors[f"{text}.{name}.{how}"] = random_bits(chance, dtype, shape)
        tensors[f"{text}.scalar.plain"] = random_bits(chance, dtype, ())
        tensors[f"{text}.slanted.plain"] = random_bits(chance, dtype, (4, 6)).t()[::2]
    for how, places in PLACED.items():
        if len(places) == 2:
            tensors[f"grid.{how}"] = random_bits(chance, torch.float32, (5, 7))
    tensors["float32.twin.s0"] = random_bits(chance, torch.float32, SHAPES["one"])
    return tensors


def some_kinds():
    return {name: one for name, one in all_kinds().items() if name.startswith("float32")}


def save_kinds(folder):
    """Save all kinds as a model, and a few as an optimizer."""
    world = group()[1]
    line = DeviceMesh("cpu", range(world)[::-1])  # so that rank 0 has empty shards
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


# Models in wrappers, ties, optimizers


def load_spread(folder, how):
    """Load into a model that is spread in some way; return its whole state, before and later."""
    model, optimizer = spread(how, seed=9)
    load_distributed(folder, model, optimizer)
    state = {states_name(name): one for name, one in whole(model.state_dict()).items()}
    numbered = whole(optimizer.state_dict()["state"])
    train(model, optimizer, 1, first=1)
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
        return getattr(self, "seen", None)

    def set_extra_state(self, state):
        self.seen = state


def save_tied(folder, how):
    model, optimizer = spread(how, make=Tied)
    model(torch.arange(6)).square().mean().backward()
    optimizer.step()
    model.seen = {"seen": (5, "x"), "rate": math.inf}
    with AsyncCheckpointer() as keeper:
        state = get_optimizer_state_dict(model, optimizer)
        keeper.save_distributed(folder, model.state_dict(), state)
    return bitwise(whole([model.embedding.weight.detach(), optimizer.state_dict()["state"]]))


def load_tied(folder, how):
    model, optimizer = spread(how, seed=4, make=Tied)
    load_distributed(folder, model, optimizer)
    assert model.out.weight is model.embedding.weight
    loaded = [model.embedding.weight.detach(), optimizer.state_dict()["state"]]
    return bitwise(whole(loaded)), model.seen


@pytest.mark.parametrize("how", ["plain", "fsdp"])
def test_tied_tensors_have_each_name_and_are_one_again_with_their_optimizer(tmp_path, how):
    saved = on_ranks(2, save_tied, tmp_path / "a", how)[0]
    model, _, _ = load_checkpoint(tmp_path / "a")
    assert model["embedding.weight"] is model["out.weight"]
    seen = model["_extra_state"]
    assert seen == {"seen": (5, "x"), "rate": math.inf}
    with open_checkpoint(tmp_path / "a" / "model") as checkpoint:
        assert bitwise(checkpoint["out.weight"]) == bitwise(model["out.weight"])
    for world, how_there in ((1, "plain"), (3, "fsdp")):
        found = on_ranks(world, load_tied, tmp_path / "a", how_there)
        assert found == [(saved, seen)] * world


def untied():
    model = Tied()
    model.out = torch.nn.Linear(5, 6, bias=False)
    return model


def with_a_module():
    """Return a model whose names look as if a part of it were wrapped."""
    model = torch.nn.Linear(3, 3)
    model.module = torch.nn.Linear(3, 3)
    return model


@pytest.mark.parametrize("before, now", [(Tied, untied), (with_a_module, with_a_module)])
@pytest.mark.parametrize("seen", [torch.ones(2), [torch.ones(2)]])
def test_a_model_gets_every_tensor_whatever_was_tied_and_wherever_it_is(
    tmp_path, before, now, seen
):
    saved, loaded = before(), now()
    saved.seen = seen
    save_checkpoint(tmp_path / "a", saved.state_dict())
    load_distributed(tmp_path / "a", loaded)
    assert bitwise(loaded.state_dict()) == bitwise(saved.state_dict())


def test_a_model_with_a_part_called_module_is_known_inside_a_wrapper(tmp_path):
    plain, wrapped = (
        torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in ("module", "head")})
        for _ in range(2)
    )
    save_checkpoint(tmp_path / "a", torch.nn.ModuleDict({"module": wrapped}).state_dict())
    load_distributed(tmp_path / "a", plain)
    assert bitwise(plain.state_dict()) == bitwise(wrapped.state_dict())


def test_moments_have_the_strides_of_their_parameter_as_fused_steps_need(tmp_path):
    def made():
        model = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    model, optimizer = made()
    model(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "a", model.state_dict(), optimizer.state_dict())
    other, loaded = made()
    load_distributed(tmp_path / "a", other, loaded)
    assert loaded.state[other.weight]["exp_avg"].stride() == other.weight.stride()


def test_each_of_several_optimizers_finds_its_own_state(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    pairs = [[torch.optim.Adam(part.parameters()) for part in model] for _ in range(2)]
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    for one in pairs[0]:
        one.step()
    both = get_optimizer_state_dict(model, pairs[0])
    save_checkpoint(tmp_path / "a", model.state_dict(), both)
    for saved, loaded in zip(*pairs, strict=True):
        load_distributed(tmp_path / "a", model, loaded)
        assert bitwise(loaded.state_dict()) == bitwise(saved.state_dict())


class Counted(torch.nn.Linear):
    """A layer whose extra state is a tensor, made anew each time."""

    calls = 0

    def get_extra_state(self):
        return torch.tensor([self.calls])

    def set_extra_state(self, state):
        self.calls = int(state)


def test_extra_state_that_is_a_tensor_is_set_and_not_filled(tmp_path):
    saved, loaded = Counted(2, 2), Counted(2, 2)
    saved.calls = 7
    save_checkpoint(tmp_path / "a", saved.state_dict())
    load_distributed(tmp_path / "a", loaded)
    assert bitwise(loaded.state_dict()) == bitwise(saved.state_dict())


@pytest.mark.parametrize("keys", ["numbers", "names"])
def test_an_optimizer_gets_every_tensor_wherever_it_is(tmp_path, keys):
    model = with_a_module()
    saved, loaded = (torch.optim.SGD(model.parameters(), torch.tensor(0.1)) for _ in range(2))
    for parameter in model.parameters():
        saved.state[parameter] = {"history": [(torch.rand(3),)]}
    save_checkpoint(tmp_path / "a", model.state_dict(), optimizer_state(model, saved, keys))
    load_distributed(tmp_path / "a", model, loaded)
    assert bitwise(loaded.state_dict()) == bitwise(saved.state_dict())


def drawn():
    return torch.rand(3).tolist(), np.random.rand()


def save_rng(folder, alone):
    """Save with generators that are this rank's own; return what they give next."""
    torch.manual_seed(100 + group()[0])
    np.random.seed(group()[0])
    state, training = states.Small().state_dict(), TrainingState(rng=capture_rng())
    with AsyncCheckpointer() as keeper:
        (keeper.save if alone else keeper.save_distributed)(folder, state, None, training)
    return drawn()


def load_rng(folder):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        training = load_distributed(folder, states.Small())
    if training.rng is None:
        return None, [str(one.message) for one in warned]
    restore_rng(training.rng)
    return drawn(), []


@pytest.mark.parametrize(
    "world, grouped, alone", [(1, False, True), (1, False, False), (3, True, False)]
)
def test_each_rank_gets_its_own_generators_back_on_as_many_ranks(tmp_path, world, grouped, alone):
    saved = Ranks(world, save_rng, tmp_path / "a", alone, grouped=grouped).results()
    assert len(set(map(str, saved))) == world
    for count in (1, 2, 3):
        found = Ranks(count, load_rng, tmp_path / "a", grouped=count > 1 or grouped).results()
        if count == world:
            assert found == [(one, []) for one in saved]
        for numbers, warned in found if count != world else ():
            assert numbers is None
            assert f"{world} ranks saved and {count} load" in warned[0]


# Refusals


def refused(call):
    """Return the message with which something is refused."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "not refused"


def misfit(how):
    """Return a model that differs from the small one as told."""
    model = states.Small()
    if how == "lacks":
        del model.count
    elif how == "more":
        model.more = torch.nn.Linear(2, 2)
    elif how == "shape":
        model.second = torch.nn.Linear(7, 4, bias=False)
    else:
        anew = lambda _, state, *rest: state.update(count=state["count"].clone())  # noqa: E731
        model.register_state_dict_post_hook(anew)
    return model


def load_misfits(folder, modest):
    """Try to load into what doesn't fit; return the messages, and whether anything changed."""
    model, optimizer = spread("fsdp", seed=9)
    weights = [one for one in model.parameters() if one.ndim > 1]
    fewer = [{"params": weights[:1]}, {"params": weights[1:]}]
    tries = {
        how: (folder, spread("fsdp", make=partial(misfit, how))[0])
        for how in ("lacks", "more", "shape", "anew")
    } | {
        "no optimizer": (modest, model, optimizer),
        "one group": (folder, model, torch.optim.AdamW(model.parameters())),
        "fewer": (folder, model, torch.optim.AdamW(fewer)),
        "nothing there": (f"{folder}-no", model),
        "two": (modest if group()[0] else folder, model),
    }

    def contents():
        return bitwise(whole([one.state_dict() for _, one, *_ in tries.values()]))

    before = contents()
    sharding = ShardingConfig(timeout_s=30)
    messages = {
        key: refused(lambda: load_distributed(*args, sharding=sharding))  # noqa: B023
        for key, args in tries.items()
    }
    return messages, contents() != before


@pytest.mark.parametrize("keys", ["numbers", "names"])
def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing(tmp_path, keys):
    on_ranks(2, save_spread, tmp_path / "a", "fsdp", keys)
    small = states.Small().state_dict()
    save_checkpoint(tmp_path / "b", small, training_state=TrainingState(step=3))
    for messages, changed in on_ranks(2, load_misfits, tmp_path / "a", tmp_path / "b"):
        assert "has 'count', which the model lacks" in messages["lacks"]
        assert "has no 'more.bias', 'more.weight', which the model has" in messages["more"]
        assert "second.weight: has shape [3, 7], expected [4, 7]" in messages["shape"]
        assert "count: the state_dict() of a" in messages["anew"]
        assert "has no optimizer state" in messages["no optimizer"]
        assert all("its optimizer" in messages[key] for key in ("one group", "fewer"))
        assert "there is no such folder" in messages["nothing there"]
        assert str(tmp_path) in messages["shape"]
        assert str(tmp_path) in messages["no optimizer"]
        assert "rank 1 loads b of commit 2, rank 0 loads a of commit 1" in messages["two"]
        assert not changed


def save_misfits(folder):
    """Try to save what the ranks don't agree on, one after the other; then save."""
    rank, world = group()
    mesh, good = states.mesh(), torch.ones(3)
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    tries = {
        "shape": {"model_state": {"x": torch.ones(3 + rank)}},
        "dtype": {"model_state": {"x": good.double() if rank else good}},
        "partial": {"model_state": {"y": partial}},
        "hook": {"model_state": {"deep": {"hook": print if rank == 1 else 1}}},
        "no dict": {"model_state": [1] if rank else {}},
        "folder": {"dir": f"{folder}{rank}", "sharding": ShardingConfig(timeout_s=3)},
        "step": {"training_state": TrainingState(step=rank)},
        "parts": {"optimizer_state": {"state": {}} if rank else None},
        "training": {"training_state": TrainingState(extra={"x": print if rank else 1})},
        "numbers": {"model_state": {f"layer{rank}": good}, "optimizer_state": {"state": {0: {}}}},
        "rank": {"rank": rank + 1},
        "world": {"world_size": 7},
    }
    usual = {"dir": folder, "model_state": {"x": good}, "sharding": ShardingConfig(timeout_s=30)}
    with AsyncCheckpointer() as keeper:
        messages = {
            key: refused(lambda: keeper.save_distributed(**usual | mine))  # noqa: B023
            for key, mine in tries.items()
        }
        sharded = {"x": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}
        messages["singly"] = refused(lambda: keeper.save(folder, sharded))
        keeper.save_distributed(**usual, rank=rank, world_size=world)
    return messages


def test_what_the_ranks_do_not_agree_on_is_refused_on_all_and_the_next_save_works(tmp_path):
    expected = {
        "shape": "x: float32 [3] on rank 0, float32 [4] on rank 1",
        "dtype": "x: float32 [3] on rank 0, float64 [3] on rank 1",
        "partial": "y: is a DTensor with a Partial",
        "hook": "model_state: ['deep']['hook']: of type builtin_function_or_method",
        "no dict": "model_state of type list, expected a dict",
        "step": "rank 1 saves step 1 of model into",
        "parts": "rank 1 saves step 0 of model and optimizer into",
        "training": "training_state: ['extra']['x']",
        "numbers": "numbers its parameters, and the ranks have different ones",
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
        model = {"x": torch.full((3,), rank // 2)}
        training = TrainingState(step=2, rng={"x": rank})
        target = folder / "ab"[rank // 2]
        keeper.save_distributed(target, model, None, training, sharding=sharding)
    loaded = torch.nn.Module()
    loaded.register_buffer("x", torch.zeros(3, dtype=torch.int64))
    return refusal, load_distributed(target, loaded, sharding=sharding).rng, loaded.x[0].item()


def test_groups_save_apart(tmp_path):
    found = on_ranks(4, save_in_halves, tmp_path)
    assert [one[1] for one in found] == [{"x": rank} for rank in range(4)]
    assert [one[2] for one in found] == [0, 0, 1, 1]
    assert all("not in the given process group" in one[0] for one in found)
    for name in "ab":
        assert verify_checkpoint(tmp_path / name).step == 2


def save_stages(folder):
    """Each rank has layers of its own, as in a pipeline, and some that all have."""
    rank = group()[0]
    norms = {f"mean{k}": torch.full((2,), rank) for k in range(3)}  # as of BatchNorms under DDP
    model = {"shared": norms, f"stage{rank}": {"w": torch.full((3,), rank)}, "n": 1}
    with AsyncCheckpointer() as keeper:
        keeper.save_distributed(folder, model)


def test_ranks_may_have_different_layers(tmp_path):
    on_ranks(3, save_stages, tmp_path / "a")
    model, _, _ = load_checkpoint(tmp_path / "a", verify=True)
    assert set(model) == {"shared", "stage0", "stage1", "stage2", "n"}
    assert [model[f"stage{k}"]["w"].tolist() for k in range(3)] == [[k] * 3 for k in range(3)]
    assert all(mean.tolist() == [0, 0] for mean in model["shared"].values())


def save_often(folder):
    """Save into a few names without waiting, load, be refused; return the keys left in the store.

    That is beyond those that were there before.
    """
    keys = dist.distributed_c10d._get_default_store().num_keys
    before = keys()
    with AsyncCheckpointer(keep_last=2) as keeper:
        for step in range(6):
            training = TrainingState(step=step, rng={"a": 1} if step < 5 else None)
            name = folder / f"{step % 3}"
            keeper.save_distributed(name, {"x": torch.full((50,), step)}, None, training)
        refused(lambda: keeper.save_distributed(folder / "3", {"x": torch.zeros(group()[0])}))
    model = torch.nn.Module()
    model.register_buffer("x", torch.zeros(50, dtype=torch.int64))
    for _ in range(3):
        load_distributed(folder / "2", model)
    dist.barrier()
    return keys() - before


def test_saves_follow_and_replace_each_other_old_ones_go_and_the_store_does_not_fill(tmp_path):
    left = on_ranks(2, save_often, tmp_path)
    assert left[0] < 30, "10 meetings left more than a few keys each"
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "latest"}
    assert latest_checkpoint(tmp_path) == tmp_path / "2"
    model, _, _ = load_checkpoint(tmp_path / "2", verify=True)
    assert model["x"].tolist() == [5] * 50
    assert not any((tmp_path / "2" / "rng").iterdir())
