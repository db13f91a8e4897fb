"""Batches get to the device whole and in order; the GPU's part is played by a fake without one."""

import contextlib
import ctypes
import threading

import numpy as np
import pytest
import torch
from loader_tools import Numbers, all_workers_end, values, workers_alive

import npydata.loader.loader
from npydata import (
    AsyncDataLoader,
    CheckpointError,
    LoaderError,
    MmapDataset,
    load_checkpoint,
    open_checkpoint,
    write_tokens,
)
from npydata.loader.buffer_pool import BufferPool
from npydata.loader.device_transfer import HostTransfer, StreamTransfer, transfer_to
from npydata.system.accelerator import why_unusable

CUDA = torch.device("cuda")


class FakeCuda:
    """The parts of torch.cuda that copies need. A copy happens when somebody waits for it."""

    def __init__(self):
        self.log, self.active, self.streams = [], "current", []

    def Stream(self, device):  # noqa: N802
        self.streams.append(f"side of {device}")
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.active = self.active, stream
        yield
        self.active = before

    def current_stream(self, device):
        return f"{self.active} of {device}"

    def Event(self, blocking):  # noqa: N802
        return FakeEvent(self, blocking)

    def calls(self, *names):
        return [call for call in self.log if call[0] in names]


class FakeEvent:
    def __init__(self, cuda, blocking):
        self.cuda, self.blocking, self.copies = cuda, blocking, []

    def record(self, stream):
        self.cuda.log.append(("record", stream))
        self.copies = Tensor.queued.pop(stream, [])

    def synchronize(self):
        self.cuda.log.append(("synchronize", self.blocking))
        for target, source, size in self.copies:
            ctypes.memmove(target.data_ptr(), source, size)


class Tensor(torch.Tensor):
    """A CPU tensor that says it is pinned, and whose copies to the device take their time."""

    cuda, queued, pinned = None, {}, True

    def is_pinned(self):
        return self.pinned

    def pin_memory(self):
        self.cuda.log.append(("pin",))
        twin = self.clone().as_subclass(Tensor)
        twin.pinned = True
        Tensor.queued.setdefault("kept", []).append(twin)  # as CUDA's own allocator would
        return twin

    def to(self, device, *, non_blocking=False):
        self.cuda.log.append(("copy", self.cuda.active, str(device), non_blocking))
        target = torch.full(self.shape, -1, dtype=self.dtype).as_subclass(Tensor)
        job = target, self.data_ptr(), self.nbytes  # no reference: a copy keeps nothing alive
        Tensor.queued.setdefault(self.cuda.active, []).append(job)
        return target

    def record_stream(self, stream):
        self.cuda.log.append(("used on", stream))


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(Tensor, "cuda", fake)
    monkeypatch.setattr(Tensor, "queued", {})
    return fake


@pytest.fixture
def tokens(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(20_000, dtype=np.uint16)])
    return tmp_path / "a.npy"


def tensor(*numbers):
    return torch.tensor(numbers).as_subclass(Tensor)


def test_without_a_device_nothing_is_done():
    assert not transfer_to(None, pin_memory=False).moves
    assert isinstance(transfer_to("cpu", pin_memory=False), HostTransfer)


def test_host_copies_go_through_nested_batches_and_leave_other_things_alone():
    batch = {"a": torch.ones(2), "b": [torch.zeros(1), "text", 3]}
    moved = HostTransfer(torch.device("meta")).send(batch)
    assert moved["a"].device.type == moved["b"][0].device.type == "meta"
    assert moved["b"][1:] == ["text", 3]


def test_host_copies_pin_what_is_not_pinned(cuda):
    pinned, plain = tensor(1), tensor(2)
    plain.pinned = False
    sent = HostTransfer(pinned=True).send((pinned, plain))
    assert len(cuda.calls("pin")) == 1
    assert sent[0] is pinned
    assert [part.is_pinned() for part in sent] == [True, True]


def test_pin_memory_without_a_gpu_is_left_out(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert not transfer_to(None, pin_memory=True).moves
    assert len(list(AsyncDataLoader(Numbers(64), pin_memory=True))) == 2


def test_a_device_named_in_words_is_understood(cuda):
    loader = AsyncDataLoader(Numbers(8), batch_size=8, shuffle=False, device="cpu")
    assert values(next(iter(loader))) == list(range(8))


@pytest.mark.parametrize(
    "device, words",
    [
        ("gpu", "device='gpu': Expected one of cpu, cuda, .*; available: cpu"),
        ("cuda:", "device='cuda:': .*; available: cpu"),
        (3.5, "device=3.5: .*; available: cpu"),
        ("xpu", "device='xpu': there is none here; available: cpu"),
        (torch.device("mps"), "mps.*: there is none here; available: cpu"),
        ("fpga", "device='fpga': there is none here; available: cpu"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_made(tmp_path, device, words):
    with pytest.raises(LoaderError, match=words) as caught:
        AsyncDataLoader(Numbers(8), device=device)
    assert "\n" not in str(caught.value)
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    checkpoint = open_checkpoint(tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(device=device)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(tmp_path / "not there", device=device)


def test_a_number_of_a_device_beyond_the_last_is_refused(monkeypatch):
    module = type("Module", (), {"is_available": lambda: True, "device_count": lambda: 2})
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert why_unusable("cuda:1") is why_unusable("cuda") is why_unusable("meta") is None
    assert "device='cuda:2': there are 2 of its kind, counted from 0" in why_unusable("cuda:2")


def test_send_copies_on_the_side_stream_and_returns_when_the_copy_is_done(cuda):
    moved = StreamTransfer(CUDA, cuda).send((tensor(1, 2), {"y": tensor(3)}))
    side = cuda.streams[0]
    assert cuda.log == [
        ("copy", side, "cuda", True),
        ("copy", side, "cuda", True),
        ("record", side),
        ("synchronize", True),
    ]
    assert moved[0].tolist() == [1, 2]
    assert moved[1]["y"].tolist() == [3]
    assert cuda.active == "current"


def test_memory_that_is_not_pinned_is_pinned_first(cuda):
    plain = tensor(5)
    plain.pinned = False
    moved = StreamTransfer(CUDA, cuda).send(plain)
    assert [call[0] for call in cuda.log] == ["pin", "copy", "record", "synchronize"]
    assert moved.tolist() == [5]


def test_receive_tells_the_allocator_that_the_current_stream_uses_every_tensor(cuda):
    batch = (tensor(1), [tensor(2), "text"])
    received = StreamTransfer(CUDA, cuda).receive(batch)
    assert cuda.log == [("used on", "current of cuda")] * 2
    assert received[0] is batch[0]
    assert received[1][1] == "text"


@pytest.mark.parametrize("workers, factor", [(0, 0), (0, 2), (1, 3), (2, 2), (4, 8)])
def test_recycled_pinned_memory_is_not_written_before_its_copy_is_done(
    cuda, monkeypatch, tokens, workers, factor
):
    class Pinned(MmapDataset):
        def fetch_windows(self, windows, *, out=None):
            x, y = super().fetch_windows(windows, out=out)
            return x.as_subclass(Tensor), y.as_subclass(Tensor)

    others = workers_alive()  # of tests before this one
    settings = {"batch_size": 8, "seed": 1}
    wanted = list(AsyncDataLoader(MmapDataset(tokens, 9), **settings))
    monkeypatch.setattr(
        npydata.loader.loader, "transfer_to", lambda *_, **__: OneAtATime(CUDA, cuda)
    )
    monkeypatch.setattr(npydata.loader.loader, "require_device", lambda device: device)
    memory = []  # a real pinned block stays mapped, too

    def allocate(pool):
        assert pool.pinned
        memory.append(np.empty(pool.shape, np.int64))
        return memory[-1].view()

    monkeypatch.setattr(BufferPool, "_allocate", allocate)
    loader = AsyncDataLoader(
        Pinned(tokens, 9), device="cuda", num_workers=workers, prefetch_factor=factor, **settings
    )
    for got, batch in zip(loader, wanted, strict=True):
        assert [part.tolist() for part in got] == [part.tolist() for part in batch]
    assert len(memory) < len(wanted) or loader.config.capacity < 3  # some of it was used again
    assert len(cuda.calls("used on")) == 2 * len(wanted)
    assert all_workers_end(besides=others)


class OneAtATime(StreamTransfer):
    """Copies of one worker at a time, because the fake has one active stream for all threads."""

    def __init__(self, device, cuda):
        super().__init__(device, cuda)
        self.turn = threading.Lock()

    def send(self, batch):
        with self.turn:
            return super().send(batch)


@pytest.mark.gpu
class TestGpu:
    """On a real GPU."""

    @pytest.fixture(autouse=True)
    def _gpu(self):
        if not torch.cuda.is_available():
            pytest.skip("needs CUDA")

    @pytest.mark.parametrize("workers, factor", [(0, 0), (0, 1), (2, 2), (4, 8)])
    def test_batches_are_right_while_the_current_stream_is_busy(self, tokens, workers, factor):
        settings = {"batch_size": 64, "seed": 1, "num_workers": workers, "prefetch_factor": factor}
        wanted = list(AsyncDataLoader(MmapDataset(tokens, 9), **settings))
        loader, sums = AsyncDataLoader(MmapDataset(tokens, 9), device="cuda", **settings), []
        for x, y in loader:
            assert x.device.type == y.device.type == "cuda"
            torch.cuda._sleep(2_000_000)  # x and y are let go before what follows runs
            sums.append((x.clone(), y * 2))
        torch.cuda.synchronize()
        assert len(sums) == len(wanted)
        for (x, twice_y), (x_wanted, y_wanted) in zip(sums, wanted, strict=True):
            assert torch.equal(x.cpu(), x_wanted)
            assert torch.equal(twice_y.cpu(), 2 * y_wanted)

    def test_batches_are_right_on_a_stream_of_the_callers(self, tokens):
        settings = {"batch_size": 64, "seed": 1}
        wanted = list(AsyncDataLoader(MmapDataset(tokens, 9), **settings))
        mine, kept = torch.cuda.Stream(), []
        with torch.cuda.stream(mine):
            for x, _ in AsyncDataLoader(MmapDataset(tokens, 9), device="cuda", **settings):
                torch.cuda._sleep(1_000_000)
                kept.append(x + 1)
        mine.synchronize()
        for got, (x, _) in zip(kept, wanted, strict=True):
            assert torch.equal(got.cpu(), x + 1)

    def test_kept_batches_stay_over_many_steps_with_recycled_pinned_memory(self, tokens):
        settings = {"batch_size": 8, "seed": 1, "num_workers": 2, "prefetch_factor": 2}
        loader = AsyncDataLoader(MmapDataset(tokens, 9), device="cuda", **settings)
        plain = AsyncDataLoader(MmapDataset(tokens, 9), **settings)
        for _ in range(8):
            for got, wanted in zip(list(loader), plain, strict=True):
                assert all(torch.equal(a.cpu(), b) for a, b in zip(got, wanted, strict=True))

    def test_pinned_batches_stay_on_the_host_and_are_pinned(self, tokens):
        loader = AsyncDataLoader(MmapDataset(tokens, 9), pin_memory=True, seed=1)
        assert all(x.is_pinned() and y.is_pinned() for x, y in loader)
        images = AsyncDataLoader(Numbers(64), pin_memory=True)
        assert all(batch.is_pinned() for batch in images)

    def test_dicts_go_to_the_gpu_and_text_stays(self):
        dataset = [{"n": torch.tensor(k), "text": str(k)} for k in range(8)]
        batch = next(iter(AsyncDataLoader(dataset, batch_size=8, shuffle=False, device="cuda:0")))
        assert batch["n"].device == torch.device("cuda", 0)
        assert batch["n"].tolist() == list(range(8))
        assert batch["text"] == [str(k) for k in range(8)]

    def test_leaving_early_with_copies_under_way_leaves_no_thread(self, tokens):
        for _ in range(50):
            next(iter(AsyncDataLoader(MmapDataset(tokens, 9), device="cuda", num_workers=4)))
            assert all_workers_end()
