"""What is filled in place of new memory: all of it, or nothing, and torch learns of it."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
from loader_tools import run_child
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from npydata import CheckpointError, open_checkpoint
from npydata.reader import load as loading
from npydata.reader import parallel_read
from npydata.reader.in_flight import THREADS


def saved(folder, **tensors):
    torch.save(tensors, path := folder / "a.pt")
    return path


class Alone(torch.Tensor):
    """A tensor that takes values of its own kind only."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and not isinstance(args[1], cls):
            raise TypeError("no plain values here")
        return super().__torch_function__(func, types, args, kwargs)


def shortened():
    """A tensor of which the end of the memory is gone, seen across."""
    (across := torch.zeros(3, 3).t()).untyped_storage().resize_(16)
    return across


def fake():
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.zeros(3, 3)


def distributed():
    return distribute_tensor(torch.zeros(3, 3), init_device_mesh("cpu", (1,)))


TARGETS = {
    "distributed": (distributed, "is a DTensor, which takes no values of a plain tensor"),
    "of a class that refuses": (lambda: torch.zeros(3, 3).as_subclass(Alone), "no plain values"),
    "fake": (fake, "it is fake"),
    "zero": (lambda: torch._efficientzerotensor(3, 3).t(), "it is fake"),
    "overlapping": (lambda: torch.zeros(5).unfold(0, 3, 1), "overlaps itself"),
    "shortened": (shortened, "its storage has 16 of 36 bytes"),
}


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", TARGETS)
def test_what_cannot_be_filled_is_refused_with_its_name_before_any_is(tmp_path, kind):
    make, why = TARGETS[kind]
    into = {"a": torch.zeros(3, 3), "w": make(), "z": torch.zeros(3, 3)}
    path = saved(tmp_path, a=torch.ones(3, 3), w=torch.ones(3, 3), z=torch.ones(3, 3))
    with open_checkpoint(path) as checkpoint:
        with pytest.raises(CheckpointError, match=f"w: into has a tensor that.*{why}") as error:
            checkpoint.load(into=into)
        with pytest.raises(CheckpointError, match=why):
            checkpoint.require_fits(into)
    assert "\n" not in str(error.value)
    assert not into["a"].any()
    assert not into["z"].any()


@pytest.mark.parametrize("strides", [(3, 1), (1, 3), (7, 2), (1, 1000)])
def test_targets_with_gaps_and_turned_ones_are_filled(tmp_path, strides):
    target = torch.zeros(5000).as_strided((3, 3), strides)
    with open_checkpoint(saved(tmp_path, w=torch.arange(9.0).view(3, 3))) as checkpoint:
        checkpoint.load(into={"w": target})
    assert torch.equal(target, torch.arange(9.0).view(3, 3))


def test_an_expanded_tensor_without_elements_is_filled(tmp_path):
    with open_checkpoint(saved(tmp_path, w=torch.zeros(3, 0))) as checkpoint:
        checkpoint.load(into={"w": torch.zeros(1, 0).expand(3, 0)})


class OfItsOwn(torch.Tensor):
    pass


def as_another_class(module, state, prefix, metadata):
    state[f"{prefix}weight"] = state[f"{prefix}weight"].clone().as_subclass(OfItsOwn)


def test_what_a_state_dict_makes_anew_of_another_class_is_refused(tmp_path):
    layer = torch.nn.Linear(2, 2)
    path = saved(tmp_path, **layer.state_dict())
    layer.register_state_dict_post_hook(as_another_class)
    before = layer.weight.clone()
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(CheckpointError, match=r"the state_dict\(\) of a Linear makes it anew"),
    ):
        checkpoint.load(into=layer)
    assert torch.equal(layer.weight, before)


class Wrapped:
    """An optimizer in another object, which has its state."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return self.optimizer.state_dict()


def stepped(kind, **settings):
    layer = torch.nn.Linear(3, 3)
    optimizer = kind(layer.parameters(), **settings)
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    return layer, optimizer


def test_a_wrapped_optimizer_is_filled_and_a_schedule_is_refused(tmp_path):
    layer, optimizer = stepped(torch.optim.Adam, lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"m": layer.state_dict(), "o": optimizer.state_dict(), "s": schedule.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    other, its = stepped(torch.optim.Adam, lr=1e-1)
    into = {"m": other, "o": Wrapped(its)}
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        before = its.state[other.weight]["exp_avg"].clone()
        later = torch.optim.lr_scheduler.StepLR(its, 1)
        with pytest.raises(CheckpointError, match="is int, not a tensor, in the StepLR of into"):
            checkpoint.load(into={**into, "s": later})
        assert torch.equal(its.state[other.weight]["exp_avg"], before)
        checkpoint.load(into=into)
    moments = optimizer.state[layer.weight]["exp_avg"]
    assert torch.equal(its.state[other.weight]["exp_avg"], moments)


def used_in_a_graph():
    """A tensor, one of the same memory that counts its changes by itself, and a graph of each."""
    one = torch.nn.Parameter(torch.zeros(3))
    other = torch.nn.Parameter(one.data)
    return (one, (one * one).sum()), (other, (other * other).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("names", [None, ["p"], ["q"]])
def test_torch_counts_the_change_of_each_tensor_that_is_the_same_memory(tmp_path, names, dtype):
    path = saved(tmp_path, p=torch.ones(3, dtype=dtype), q=torch.ones(3, dtype=dtype))
    (p, of_p), (q, of_q) = used_in_a_graph()
    with open_checkpoint(path) as checkpoint:
        checkpoint.load(names, into={"p": p, "q": q})
    for graph in (of_p, of_q):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()


def test_torch_counts_the_change_of_what_was_filled_before_an_error(tmp_path, monkeypatch):
    path = saved(tmp_path, p=torch.ones(3))
    (p, graph), _ = used_in_a_graph()

    def read_and_fail(reads, bar):
        next(iter(reads)).target[:] = 1
        raise CheckpointError("no more")

    monkeypatch.setattr(loading, "read_all", read_and_fail)
    with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match="no more"):
        checkpoint.load(into={"p": p})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()


def with_threads(monkeypatch, most):
    """Let so many threads start and no more; return those that did."""
    started, start = [], threading.Thread.start

    def start_one(thread):
        if len(started) == most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    return started


@pytest.fixture
def thirty(tmp_path):
    """A file, what is in it, and what it may fill."""
    state = {f"w{k}": torch.full((70_000,), k + 1.0) for k in range(30)}
    save_file(state, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors", state, {name: torch.zeros(70_000) for name in state}


@pytest.mark.parametrize(("copied", "most"), [
    *[(True, most) for most in range(4)], *[(False, most) for most in range(9)]
])  # fmt: skip
def test_with_no_more_threads_those_that_are_there_fill_all(thirty, monkeypatch, copied, most):
    path, state, into = thirty
    monkeypatch.setattr(parallel_read, "is_copied", lambda _: copied)
    for piece in ("COPIED_BYTES", "REQUEST_BYTES"):
        monkeypatch.setattr(parallel_read, piece, 1 << 17)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    with open_checkpoint(path) as checkpoint:
        started = with_threads(monkeypatch, most)
        checkpoint.load(into=into)
    assert all(torch.equal(into[name], one) for name, one in state.items())
    assert len(started) == min(most, 3 if copied else THREADS)
    assert not any(thread.is_alive() for thread in started)


WHEN = {
    "atexit": "atexit.register(load)",
    "behind the main thread": """
def later():
    threading.main_thread().join()
    load()
threading.Thread(target=later).start()""",
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("copied", [True, False])
def test_a_program_that_ends_loads_a_checkpoint(thirty, when, copied):
    """The pools of the standard library take nothing more then."""
    code = f"""
import atexit, os, threading
from npydata import open_checkpoint
from npydata.reader import parallel_read
os.cpu_count = lambda: 8
parallel_read.COPIED_BYTES, parallel_read.is_copied = 1 << 17, lambda _: {copied}
def load():
    print(sum(one.mean() for one in open_checkpoint({str(thirty[0])!r}).load().values()))
{WHEN[when]}
"""
    end = run_child(code)
    assert (end.stdout, end.stderr) == ("tensor(465.)\n", "")


def test_names_that_share_memory_share_it_on_another_device(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "ON_THE_WAY_BYTES", 100)
    weight = torch.nn.Parameter(torch.randn(8, 8))
    state = {"a": weight, "far": torch.ones(100), "b": weight, "part": weight.detach()[2:, ::2],
             "turned": torch.randn(9, 5).t()}  # fmt: skip
    with open_checkpoint(saved(tmp_path, **state)) as checkpoint:
        loaded = checkpoint.load(device="meta")
    assert list(loaded) == list(state)
    storages = {name: one.untyped_storage()._cdata for name, one in loaded.items()}
    assert storages["a"] == storages["b"] == storages["part"]
    assert len(set(storages.values())) == 3
    for name, one in loaded.items():
        assert type(one) is type(state[name])
        assert (one.shape, one.stride()) == (state[name].shape, state[name].stride())
