"""What a checkpoint holds is what the state was when ``save`` was called, whatever comes next."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from faults.layer import failing
from faults.saving import PATIENCE
from loader_tools import run_child

from npydata import AsyncCheckpointer, CheckpointError, load_checkpoint
from npydata.checkpointer import staging
from npydata.checkpointer.background import BackgroundTask
from npydata.checkpointer.device_copy import DeviceCopier
from npydata.checkpointer.staging import Copy, PendingCopies

pytestmark = pytest.mark.timeout(120)

IN_PLACE = """
import sys, tempfile
import torch
from npydata import AsyncCheckpointer, load_checkpoint

torch.set_num_threads(2)
times, elements = int(sys.argv[1]), 300_000
weights = {"w": torch.zeros(elements), "t": torch.zeros(300, 700).t(), "b": torch.zeros(9)}
with tempfile.TemporaryDirectory() as folder, AsyncCheckpointer(keep_last=1) as keeper:
    for step in range(times):
        for tensor in weights.values():
            tensor.fill_(step)
        keeper.save(f"{folder}/{step % 2}", weights)
        while not keeper.done():
            for tensor in weights.values():
                tensor.add_(1)
        keeper.wait()
        model, _, _ = load_checkpoint(f"{folder}/{step % 2}")
        for name, tensor in model.items():
            assert (tensor == step).all(), (name, step)
"""


@pytest.mark.parametrize(
    "times", [20, pytest.param(1000, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])]
)
def test_weights_changed_right_after_save_never_reach_the_file(times):
    child = run_child(IN_PLACE, times, seconds=60 + times // 2)
    assert child.returncode == 0, child.stderr


OVERLAP = """
import sys, tempfile
import torch
from npydata import AsyncCheckpointer, load_checkpoint

torch.set_num_threads(2)
times = int(sys.argv[1])
model = torch.nn.Sequential(
    torch.nn.Linear(500, 500), torch.nn.BatchNorm1d(500), torch.nn.Linear(500, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = torch.randn(8, 500)
keeper = AsyncCheckpointer(keep_last=1, snapshot="overlap")
keeper.protect(optimizer)

def step():
    model(data).tanh().mean().backward()  # the batch norm's statistics change here
    optimizer.step()
    optimizer.zero_grad()

def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other

def copied(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {k: copied(v) for k, v in value.items()} if isinstance(value, dict) else value

step()
with tempfile.TemporaryDirectory() as folder, keeper:
    for number in range(times):
        wanted = copied(model.state_dict()), copied(optimizer.state_dict())
        keeper.save(f"{folder}/{number % 2}", model.state_dict(), optimizer.state_dict())
        if number % 2:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()  # at once
        while not keeper.done():
            step()
        keeper.wait()
        held = load_checkpoint(f"{folder}/{number % 2}")
        assert same(wanted[0], held[0]), number
        assert same(wanted[1], held[1]), number
"""


@pytest.mark.parametrize(
    "times", [10, pytest.param(1000, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])]
)
def test_with_overlap_a_protected_step_that_comes_at_once_never_reaches_the_file(times):
    child = run_child(OVERLAP, times, seconds=60 + times // 2)
    assert child.returncode == 0, child.stderr


class Gate:
    """Holds the copies of a save until it is opened; ``reached`` says that the first began."""

    def __init__(self, monkeypatch, error=None):
        self.reached, self.open, self.error = threading.Event(), threading.Event(), error
        self.whole = staging.run_all
        monkeypatch.setattr(staging, "run_all", self.run_all)

    def run_all(self, copies, watermark, go_on):
        self.reached.set()
        assert self.open.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        self.whole(copies, watermark, go_on)


@pytest.fixture
def trained():
    """A weight and an optimizer that takes a step's length off it."""
    weight = torch.nn.Parameter(torch.zeros(5000))
    weight.grad = torch.ones(5000)
    return weight, torch.optim.SGD([weight], lr=1.0)


def test_a_protected_step_waits_for_the_copies(tmp_path, trained, monkeypatch):
    weight, optimizer = trained
    gate = Gate(monkeypatch)
    with AsyncCheckpointer(snapshot="overlap") as keeper:
        keeper.protect(optimizer)
        keeper.save(tmp_path / "a", {"w": weight})
        assert gate.reached.wait(PATIENCE)
        stepped = threading.Thread(target=optimizer.step)
        stepped.start()
        stepped.join(0.05)
        assert stepped.is_alive()
        assert not weight.any(), "the step did not wait"
        gate.open.set()
        stepped.join(PATIENCE)
        assert (weight == -1).all()
    assert not load_checkpoint(tmp_path / "a")[0]["w"].any()


@pytest.mark.parametrize("times", [1, 2])
def test_a_save_that_was_interrupted_fills_no_memory_of_the_next(tmp_path, monkeypatch, times):
    """Twice: within the wait for its copies, and where it waits for them to end."""
    interrupts, join = [KeyboardInterrupt] * times, BackgroundTask.join

    def interrupted(task):
        if interrupts:
            raise interrupts.pop()
        join(task)

    monkeypatch.setattr(BackgroundTask, "join", interrupted)
    gate = Gate(monkeypatch)
    opening = threading.Timer(0.2, gate.open.set)
    keeper = AsyncCheckpointer()
    opening.start()
    with pytest.raises(KeyboardInterrupt):
        keeper.save(tmp_path / "a", {"w": torch.zeros(5000)})
    assert gate.open.is_set() == (times == 1)
    keeper.save(tmp_path / "b", {"w": torch.ones(5000)})
    keeper.wait()
    assert gate.open.is_set()
    assert (load_checkpoint(tmp_path / "b")[0]["w"] == 1).all()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("snapshot", ["host", "overlap"])
def test_a_save_that_is_done_keeps_nothing_of_the_state(tmp_path, trained, snapshot):
    """The next call may be far."""
    weight, optimizer = trained
    keeper = AsyncCheckpointer(snapshot=snapshot)
    keeper.protect(optimizer)
    gathered = torch.zeros(5000)
    known = weakref.ref(gathered)
    keeper.save(tmp_path / "a", {"w": weight, "gathered": gathered})
    ended = time.monotonic() + PATIENCE
    while not keeper.done() and time.monotonic() < ended:
        time.sleep(0.01)
    del gathered
    gc.collect()
    assert known() is None


def test_copies_go_on_where_the_write_has_failed_and_the_next_save_waits(
    tmp_path, trained, monkeypatch
):
    weight, optimizer = trained
    keeper = AsyncCheckpointer(snapshot="overlap")
    keeper.protect(optimizer)
    with monkeypatch.context() as patch:
        gate = Gate(patch)
        patch.setattr("npydata.checkpointer.writer.open_direct", lambda _: failing(28)())
        keeper.save(tmp_path / "a", {"w": weight})
        threading.Timer(0.2, gate.open.set).start()
        with pytest.raises(OSError, match="No space"):
            keeper.wait()
        assert gate.open.is_set()


def test_save_returns_before_the_copies_that_may_wait(tmp_path, trained, monkeypatch):
    weight, optimizer = trained
    gate = Gate(monkeypatch)
    with AsyncCheckpointer(snapshot="overlap") as keeper:
        keeper.protect(optimizer)
        keeper.save(tmp_path / "a", {"w": weight})
        assert not keeper.done()
        gate.open.set()
    assert keeper.done()


def test_buffers_are_copied_before_save_returns(tmp_path, monkeypatch):
    model = torch.nn.BatchNorm1d(3000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gate = Gate(monkeypatch)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with AsyncCheckpointer(snapshot="overlap") as keeper:
        keeper.protect(optimizer)
        keeper.save(tmp_path / "a", model.state_dict())
        model(torch.randn(16, 3000) * 9)
        gate.open.set()
    held, _, _ = load_checkpoint(tmp_path / "a")
    assert not torch.equal(model.running_mean, wanted["running_mean"])
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


def test_overlap_without_a_protected_optimizer_is_refused_and_saves_nothing(tmp_path):
    keeper = AsyncCheckpointer(snapshot="overlap")
    with pytest.raises(CheckpointError, match="protect"):
        keeper.save(tmp_path / "a", {"w": torch.zeros(3)})
    assert keeper.done()
    assert not (tmp_path / "a").exists()


def test_an_optimizer_is_protected_once_however_often_that_is_asked(tmp_path, trained):
    _, optimizer = trained
    keeper = AsyncCheckpointer(snapshot="overlap")
    before = len(optimizer._optimizer_step_pre_hooks)
    for _ in range(3):
        keeper.protect(optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == before + 1


def test_two_checkpointers_protect_the_same_optimizer(tmp_path, trained):
    weight, optimizer = trained
    with AsyncCheckpointer(snapshot="overlap") as one, AsyncCheckpointer(snapshot="overlap") as two:
        for k, keeper in enumerate((one, two)):
            keeper.protect(optimizer)
            keeper.save(tmp_path / str(k), {"w": weight})
        optimizer.step()
    for k in range(2):
        assert not load_checkpoint(tmp_path / str(k))[0]["w"].any()


def test_an_error_in_a_copy_that_may_wait_lets_the_step_go_on_and_is_raised_once(
    tmp_path, trained, monkeypatch
):
    weight, optimizer = trained
    keeper = AsyncCheckpointer(snapshot="overlap")
    keeper.protect(optimizer)
    with monkeypatch.context() as patch:
        gate = Gate(patch, MemoryError("no room"))
        keeper.save(tmp_path / "a", {"w": weight})
        gate.open.set()
        optimizer.step()
        with pytest.raises(CheckpointError, match="not completed") as caught:
            keeper.wait()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert not (tmp_path / "a").exists()
    keeper.save(tmp_path / "a", {"w": weight})
    optimizer.step()
    keeper.wait()
    assert (load_checkpoint(tmp_path / "a")[0]["w"] == -1).all()


def test_a_step_after_a_save_that_could_not_begin_does_not_wait(tmp_path, trained, monkeypatch):
    weight, optimizer = trained
    keeper = AsyncCheckpointer(snapshot="overlap")
    keeper.protect(optimizer)
    start = threading.Thread.start

    def no_more(thread):
        if thread.name.endswith("-staging"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        with pytest.raises(RuntimeError, match="can't start"):
            keeper.save(tmp_path / "a", {"w": weight})
    optimizer.step()
    keeper.wait()
    keeper.save(tmp_path / "a", {"w": weight})
    keeper.wait()
    assert (load_checkpoint(tmp_path / "a")[0]["w"] == -1).all()


def renormed_embedding():
    """Renormed in the forward pass."""
    embedding = torch.nn.Embedding(9, 500, max_norm=0.1)
    return embedding, lambda: embedding(torch.arange(9))


def buffer_over_a_parameter():
    """A buffer that shares its storage with a parameter, and changes in the forward pass."""
    layer = torch.nn.Linear(500, 1)
    layer.register_buffer("row", layer.weight.data[0])
    return layer, lambda: layer.row.add_(1)


def perturbed_weights():
    """As SAM perturbs them, before it computes the gradients of its second step."""
    layer = torch.nn.Linear(500, 1)
    return layer, lambda: torch._foreach_add_([one.detach() for one in layer.parameters()], 1)


def swapped_weights():
    layer = torch.nn.Linear(500, 1)
    average = {name: tensor + 1 for name, tensor in layer.state_dict().items()}
    return layer, lambda: layer.load_state_dict(average)


CHANGES = [renormed_embedding, buffer_over_a_parameter, perturbed_weights, swapped_weights]


@pytest.mark.parametrize("make", CHANGES)
def test_with_overlap_a_change_outside_of_the_protected_step_fails_the_save_by_name(
    tmp_path, monkeypatch, make
):
    model, change = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    keeper = AsyncCheckpointer(snapshot="overlap")
    keeper.protect(optimizer)
    with monkeypatch.context() as patch:
        gate = Gate(patch)
        keeper.save(tmp_path / "a", model.state_dict())
        assert gate.reached.wait(PATIENCE)
        change()
        gate.open.set()
        optimizer.step()
        with pytest.raises(CheckpointError, match=f"{'|'.join(model.state_dict())}: was changed"):
            keeper.wait()
    assert list(tmp_path.iterdir()) == []
    keeper.save(tmp_path / "a", model.state_dict())
    keeper.wait()
    held, _, _ = load_checkpoint(tmp_path / "a")
    assert all(torch.equal(held[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("make", CHANGES)
def test_what_another_thread_changes_while_it_is_copied_fails_the_save_by_name(
    tmp_path, monkeypatch, make
):
    model, change = make()
    whole = staging.run_all

    def run_all(copies, watermark, go_on):
        thread = threading.Thread(target=change)
        thread.start()
        whole(copies, watermark, go_on)
        thread.join()

    with AsyncCheckpointer() as keeper:
        with monkeypatch.context() as patch:
            patch.setattr(staging, "run_all", run_all)
            with pytest.raises(CheckpointError, match="was changed before its copy"):
                keeper.save(tmp_path / "a", model.state_dict())
        assert list(tmp_path.iterdir()) == []
        keeper.save(tmp_path / "a", model.state_dict())
    held, _, _ = load_checkpoint(tmp_path / "a")
    assert all(torch.equal(held[name], tensor) for name, tensor in model.state_dict().items())


def test_with_overlap_a_buffer_that_changes_while_it_is_copied_fails_the_save(
    tmp_path, monkeypatch
):
    model = torch.nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    real = staging.Copy.run

    def run(copy, **options):
        real(copy, **options)
        if "running_mean" in copy.name:
            copy.source.add_(1)

    with AsyncCheckpointer(snapshot="overlap") as keeper:
        keeper.protect(optimizer)
        monkeypatch.setattr(staging.Copy, "run", run)
        with pytest.raises(CheckpointError, match="running_mean"):
            keeper.save(tmp_path / "a", model.state_dict())
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_whose_changes_torch_does_not_count_is_saved(tmp_path):
    with torch.inference_mode():
        weight = torch.ones(5)
    with AsyncCheckpointer() as keeper:
        keeper.save(tmp_path / "a", {"w": weight})
    assert load_checkpoint(tmp_path / "a")[0]["w"].eq(1).all()


TORN = """
import sys, tempfile, threading
import torch
from npydata import AsyncCheckpointer, CheckpointError, load_checkpoint

torch.set_num_threads(2)
times = int(sys.argv[1])
weights = [torch.nn.Parameter(torch.zeros(100_000)) for _ in range(20)]
state = {f"w{k}": weight for k, weight in enumerate(weights)}
optimizer, over, refused, torn = torch.optim.SGD(weights, lr=1.0), threading.Event(), 0, 0

@torch.no_grad()
def change():
    while not over.is_set():
        for weight in weights:
            weight.add_(1)

thread = threading.Thread(target=change)
thread.start()
with tempfile.TemporaryDirectory() as folder, AsyncCheckpointer(snapshot="overlap") as keeper:
    keeper.protect(optimizer)
    for number in range(times):
        try:
            keeper.save(f"{folder}/a", state)
            keeper.wait()
        except CheckpointError as error:
            assert "was changed" in str(error), error
            refused += 1
            continue
        held = [int(one[0]) for one in load_checkpoint(f"{folder}/a")[0].values()]
        if not all((one == one[0]).all() for one in load_checkpoint(f"{folder}/a")[0].values()):
            torn += 1
            continue
        assert max(held) - min(held) <= 1 and held == sorted(held, reverse=True), held
    over.set()
    thread.join()
    keeper.save(f"{folder}/b", state)
print(refused, torn)
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_with_overlap_a_thread_that_goes_on_changing_the_weights_tears_no_checkpoint():
    """But for a change that the system halts in its midst, for longer than the whole save takes.

    torch counts a change when it ends, so nobody can see that one. On a busy machine it was seen
    up to five times in a thousand saves; without the check, in most of them.
    """
    child = run_child(TORN, 1000, seconds=500)
    assert child.returncode == 0, child.stderr
    refused, torn = map(int, child.stdout.split())
    assert refused > 900
    assert torn <= 10


class Log(list):
    """Streams that write down what they are asked, and tensors that do."""

    def Stream(self, device):  # noqa: N802
        return Stream(self, "side")

    def current_stream(self, device):
        return Stream(self, "current")

    def stream(self, stream):
        return stream


class Stream:
    def __init__(self, log, name):
        self.log, self.name, self.events = log, name, 0

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self):
        self.events += 1
        self.log.append(f"event {self.events}")
        return Event(self.log, f"event {self.events}")

    def __enter__(self):
        self.log.append(f"on {self.name}")

    def __exit__(self, *_):
        self.log.append("back")


class Event:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def synchronize(self):
        self.log.append(f"host waits for {self.name}")


class Source:
    """A tensor on a GPU, as far as a snapshot looks."""

    device, dtype, shape = "cuda:0", torch.uint8, (4,)

    def __init__(self, log, name, room=True):
        self.log, self.name, self.room = log, name, room

    def detach(self):
        return self

    resolve_conj = resolve_neg = detach

    def untyped_storage(self):
        return self

    def data_ptr(self):
        return id(self)

    def clone(self):
        if not self.room:
            raise torch.OutOfMemoryError("no memory left")
        self.log.append(f"clone {self.name}")
        return Source(self.log, f"{self.name}'")


class Slot:
    def view(self, _):
        return self

    def copy_(self, source, non_blocking):
        assert non_blocking
        source.log.append(f"copy {source.name}")


def a_copy(log, name, **options):
    return Copy(Slot(), Source(log, name, **options), 4)


def test_the_side_stream_waits_for_training_and_training_for_the_copies():
    log = Log()
    pending = DeviceCopier(log).start([a_copy(log, "w")])
    pending.order(log)
    assert log == [
        "side waits for current", "on side", "copy w", "event 1", "back",
        "current waits for event 1",
    ]  # fmt: skip
    log.clear()
    pending.wait()
    assert log == ["host waits for event 1"]
    assert pending.held == []


def test_on_the_device_training_waits_for_the_clones_only():
    log = Log()
    DeviceCopier(log).start([a_copy(log, "w"), a_copy(log, "v")], on_device=True)
    assert log == [
        "side waits for current", "on side", "clone w", "clone v", "event 1",
        "copy w'", "copy v'", "event 2", "back",
        "current waits for event 1",
    ]  # fmt: skip


def test_on_a_full_device_training_waits_for_the_copies_with_a_warning():
    log = Log()
    with pytest.warns(RuntimeWarning, match="no memory for a copy on the device"):
        DeviceCopier(log).start([a_copy(log, "w", room=False)], on_device=True)
    assert log == [
        "side waits for current", "on side", "copy w", "event 1", "back",
        "current waits for event 1",
    ]  # fmt: skip


def begun(snapshot, log, monkeypatch, owned=()):
    """Begin the device copies of an owned ``w`` and of a buffer ``mean``; return them, pending."""
    keeper = AsyncCheckpointer(snapshot=snapshot)
    keeper._copier = DeviceCopier(log)
    copies = [a_copy(log, "w"), a_copy(log, "mean")]
    places = {(copy.source.device, copy.source.data_ptr()) for copy in copies[:1]}
    return keeper._begin_on_device(copies, places if snapshot == "overlap" else set())


def test_from_the_host_mode_training_waits_for_everything_at_once(monkeypatch):
    log = Log()
    begun("host", log, monkeypatch)
    assert log.index("copy mean") < log.index("current waits for event 1")
    assert log.count("side waits for current") == 1


def test_with_overlap_training_waits_at_once_for_buffers_and_at_its_step_for_the_rest(monkeypatch):
    log = Log()
    pending = begun("overlap", log, monkeypatch)
    waits = log.index("current waits for event 1")
    assert log.index("copy mean") < waits < log.index("copy w")
    assert log.count("current waits for event 1") == 1
    assert "current waits for event 2" not in log
    pending.order(log)
    assert log[-1] == "current waits for event 2"
    assert [source.name for source in pending.held] == ["mean", "w"]


def test_nothing_pending_is_nothing_to_wait_for():
    log = Log()
    PendingCopies().wait()
    PendingCopies().order(log)
    assert log == []


@pytest.mark.gpu
@pytest.mark.parametrize("snapshot", ["host", "overlap", "device"])
def test_on_a_gpu_later_updates_never_reach_the_file(tmp_path, snapshot):
    """The update is queued behind long work and behind the copy, before the copy has run."""
    weights = [torch.nn.Parameter(torch.zeros(1 << 24, device="cuda")) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    mean = torch.zeros(1 << 22, device="cuda")
    optimizer = torch.optim.SGD(weights, lr=1.0)
    with AsyncCheckpointer(snapshot=snapshot, keep_last=1) as keeper:
        keeper.protect(optimizer)
        for step in range(20):
            torch.cuda._sleep(20_000_000)  # training is behind the host, as it is in earnest
            state = {f"w{k}": weight for k, weight in enumerate(weights)} | {"mean": mean}
            keeper.save(tmp_path / str(step % 2), state)
            mean.add_(1)
            optimizer.step()
            keeper.wait()
            held, _, _ = load_checkpoint(tmp_path / str(step % 2))
            for name, tensor in held.items():
                assert (tensor == (step if name == "mean" else -step)).all(), (name, step)


@pytest.mark.gpu
def test_on_a_gpu_the_image_is_pinned_and_used_again(tmp_path):
    state = {"w": torch.arange(1 << 22, device="cuda")}
    with AsyncCheckpointer() as keeper:
        keeper.prepare(state)
        buffer = keeper._buffers["model.safetensors"]
        assert buffer.pinned
        at = buffer.bytes.data_ptr()
        for k in range(3):
            keeper.save(tmp_path / str(k), state)
        keeper.wait()
        assert buffer.bytes.data_ptr() == at
        assert torch.equal(load_checkpoint(tmp_path / "2")[0]["w"], state["w"].cpu())


@pytest.mark.gpu
def test_on_a_gpu_save_returns_while_training_still_computes(tmp_path):
    state = {"w": torch.zeros(1 << 26, device="cuda")}
    with AsyncCheckpointer() as keeper:
        keeper.save(tmp_path / "a", state)
        keeper.wait()
        torch.cuda._sleep(2_000_000_000)
        busy = torch.cuda.Event()
        busy.record()
        keeper.save(tmp_path / "a", state)
        assert not busy.query(), "save waited for the device"
        assert not keeper.done()


@pytest.mark.gpu
def test_on_a_gpu_strided_and_conjugated_tensors_arrive_as_they_are(tmp_path):
    values = torch.randn(300, 500, dtype=torch.complex64, device="cuda")
    state = {
        "t": values.t(),
        "c": values.conj(),
        "s": values.real[::2],
        "b": values.real.bfloat16(),
    }
    with AsyncCheckpointer(snapshot="device") as keeper:
        keeper.save(tmp_path / "a", state)
    held, _, _ = load_checkpoint(tmp_path / "a")
    assert all(torch.equal(held[name], tensor.cpu()) for name, tensor in state.items())


def test_a_snapshot_of_arrays_that_share_memory_with_numpy_is_taken_too(tmp_path):
    array = np.zeros(9000, np.float32)
    with AsyncCheckpointer() as keeper:
        keeper.save(tmp_path / "a", {"w": torch.from_numpy(array)})
        array += 1
    assert not load_checkpoint(tmp_path / "a")[0]["w"].any()
