"""A checkpoint holds what the state was at ``save``, though the GPU is far behind the program.

Before each save the GPU is kept busy, and a step follows at once. So the copies of the snapshot, if
nothing orders them, meet memory that has changed.
"""

import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from checkpoint_tools import bitwise
from device_cases import OPTIMIZERS, SNAPSHOTS
from torch.nn.functional import cross_entropy

from npydata import (
    AsyncCheckpointer,
    TrainingState,
    capture_rng,
    latest_checkpoint,
    load_checkpoint,
    open_checkpoint,
    restore_rng,
)

ROOT = Path(__file__).resolve().parents[2]


class Run:
    """A small model of many sizes of tensors, trained in mixed precision with a scaler."""

    def __init__(self, device, make=OPTIMIZERS["AdamW foreach"]):
        torch.manual_seed(1)
        self.device = device
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(5000, 512),
            torch.nn.Linear(512, 700),
            torch.nn.LayerNorm(700),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(700, 5000, bias=False),
        ).to(device)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.optimizer = make(self.model.parameters())
        self.scaler = torch.amp.GradScaler(device.type)
        self.ids = torch.randint(5000, (16, 33), device=device)

    def step(self):
        with torch.autocast(self.device.type, torch.float16):
            logits = self.model(self.ids[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1).float(), self.ids[:, 1:].flatten())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.model)
        return loss.detach()

    def states(self):
        both = {"model": self.model.state_dict(), "average": self.average.state_dict()}
        return both, {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load(self, states):
        self.model.load_state_dict(states[0]["model"])
        self.average.load_state_dict(states[0]["average"])
        self.optimizer.load_state_dict(states[1]["optimizer"])
        self.scaler.load_state_dict(states[1]["scaler"])


@pytest.mark.parametrize("own_stream", [False, True], ids=["current stream", "own stream"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_a_snapshot_is_the_state_at_the_save(
    tmp_path, device, keep_busy, snapshot, name, own_stream
):
    run = Run(device, OPTIMIZERS[name])
    stream = torch.Stream(device) if own_stream else None
    torch.accelerator.synchronize()
    with AsyncCheckpointer(snapshot=snapshot, keep_last=2) as keeper, stream or nullcontext():
        if snapshot == "overlap":
            keeper.protect(run.optimizer)
        run.step()
        for k in range(3):
            torch.accelerator.synchronize()
            states = run.states()
            if snapshot == "overlap":  # the average is no protected optimizer's
                del states[0]["average"]
            wanted = bitwise(states)
            keep_busy()
            keeper.save(tmp_path / str(k), *states, TrainingState(step=k))
            run.step()
            keeper.wait()
            assert bitwise(load_checkpoint(tmp_path / str(k), mmap=False)[:2]) == wanted, k


@pytest.mark.parametrize("snapshot", ["host", "device"])
def test_a_step_that_is_a_cuda_graph(tmp_path, device, keep_busy, snapshot):
    """Its changes are none that torch counts; the streams alone order them."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs need CUDA")
    weights = {f"w{k}": torch.zeros(3_000_000, device=device) for k in range(5)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights.values():
            weight.add_(1)
    with AsyncCheckpointer(snapshot=snapshot) as keeper:
        for step in range(4):
            keep_busy()
            keeper.save(tmp_path / str(step), weights)
            graph.replay()
            keeper.wait()
            held = load_checkpoint(tmp_path / str(step))[0]
            assert all((one == step).all() for one in held.values()), step


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_save_returns_while_the_gpu_is_still_busy(tmp_path, device, keep_busy, snapshot):
    weights = {f"w{k}": torch.ones(1_000_000, device=device) for k in range(8)}
    with AsyncCheckpointer(snapshot=snapshot) as keeper:
        optimizer = torch.optim.SGD(weights.values())
        keeper.protect(optimizer)
        keeper.prepare(weights)
        keeper.save(tmp_path / "first", weights)
        keeper.wait()
        for _ in range(20):
            keep_busy()
        before = torch.accelerator.current_stream().record_event()
        keeper.save(tmp_path / "second", weights)
        assert not before.query(), "save waited until the GPU had done all that was queued"


def test_a_full_gpu_falls_back_to_the_host(tmp_path, device, keep_busy):
    if device.type != "cuda":
        pytest.skip("needs a limit on the memory of the GPU")
    weight = torch.full((64 << 20,), 1.0, device=device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(1.2 * weight.nbytes / total)
    try:
        with AsyncCheckpointer(snapshot="device") as keeper:
            keep_busy()
            with pytest.warns(RuntimeWarning, match="no memory for a copy on the device"):
                keeper.save(tmp_path / "a", {"w": weight})
            weight.sub_(1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (load_checkpoint(tmp_path / "a")[0]["w"] == 1).all()


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_training_goes_on_bit_for_bit(tmp_path, device, snapshot):
    """With dropout, mixed precision, a scaler and a moving average; loaded in three ways."""
    whole = Run(device)
    losses = [whole.step().item() for _ in range(12)]
    first = Run(device)
    with AsyncCheckpointer(snapshot=snapshot) as keeper:
        if snapshot == "overlap":
            keeper.protect(first.optimizer)
        for _ in range(6):
            first.step()
        both, rest = first.states()
        keeper.save(tmp_path / "a", both, rest, TrainingState(step=6, rng=capture_rng()))
        if snapshot == "overlap":
            keeper.wait()  # the average is not protected
        first.step()
    for way in ("device=", "on the CPU", "into="):
        second = Run(device)
        second.step()
        into = (second.states()[0], None) if way == "into=" else None
        loaded = load_checkpoint(
            tmp_path / "a", into=into, device=device if way == "device=" else "cpu"
        )
        second.load(loaded[:2])
        restore_rng(loaded[2].rng)
        assert [second.step().item() for _ in range(6)] == losses[6:], way


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_file_of_torchs_that_holds_tensors_of_the_gpu(tmp_path, device, legacy):
    run = Run(device)
    run.step()
    path = tmp_path / "a.pt"
    torch.save(run.model.state_dict(), path, _use_new_zipfile_serialization=not legacy)
    wanted = {name: one.cpu() for name, one in run.model.state_dict().items()}
    with open_checkpoint(path) as checkpoint:
        assert all(torch.equal(checkpoint[name], one) for name, one in wanted.items())
        loaded = checkpoint.load(device=device)
    assert all(one.device.type == device.type for one in loaded.values())
    assert bitwise(dict(loaded)) == bitwise(wanted)


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_the_example_is_killed_and_goes_on_with_the_same_losses(tmp_path, device, snapshot):
    if device.type != "cuda":
        pytest.skip("the example trains on CUDA")

    def command(out):
        return [
            sys.executable,
            str(ROOT / "examples/train.py"),
            "--device",
            "cuda",
            "--tokens",
            str(ROOT / "materials/train_smoke.npy"),
            "--steps",
            "300",
            "--snapshot",
            snapshot,
            "--out",
            str(tmp_path / out),
        ]

    subprocess.run(command("whole"), check=True, capture_output=True)
    with subprocess.Popen(command("cut"), stderr=subprocess.DEVNULL) as child:
        deadline = time.monotonic() + 60
        while latest_checkpoint(tmp_path / "cut") is None and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
    subprocess.run(command("cut"), check=True, capture_output=True)
    wanted, found = (
        dict(line.split(",") for line in (tmp_path / out / "losses.csv").open())
        for out in ("whole", "cut")
    )
    assert found == wanted
