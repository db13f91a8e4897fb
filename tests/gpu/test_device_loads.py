"""Batches arrive on a GPU whole and in order, though it is far behind the program."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from device_cases import same

from npydata import AsyncDataLoader, MmapDataset, PackedDataset, write_tokens

BATCHES, BATCH_SIZE, SEQ_LEN = 24, 64, 512


@pytest.fixture
def tokens(tmp_path):
    rng = np.random.default_rng(0)
    count = BATCHES * BATCH_SIZE * (SEQ_LEN + 1)
    write_tokens(tmp_path / "a.npy", [rng.integers(1 << 16, size=count, dtype=np.uint16)])
    return tmp_path / "a.npy"


class Floats:
    """A map-style dataset whose batches are not made in the loader's own memory."""

    def __len__(self):
        return BATCHES * 4

    def __getitem__(self, index):
        return {"x": torch.full((200_000,), float(index)), "k": index}


def load(dataset, batch_size=BATCH_SIZE, **settings):
    return AsyncDataLoader(dataset, batch_size=batch_size, seed=1, **settings)


def tensors_of(batch):
    return batch.values() if isinstance(batch, dict) else batch


SETTINGS = [{"prefetch_factor": 0}, {"num_workers": 1}, {"num_workers": 4, "prefetch_factor": 2}]
IDS = ["in turn", "one", "four"]


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_batches_that_are_let_go_at_once_are_read_whole(device, keep_busy, tokens, settings):
    dataset = MmapDataset(tokens, SEQ_LEN)
    wanted, sums = list(load(dataset)), []
    for x, y in load(dataset, device=device, **settings):
        if len(sums) % 8 == 0:
            keep_busy()
        sums.append((x + 1, y * 2))
        del x, y
    assert all(same((x - 1, y), (a, b * 2)) for (x, y), (a, b) in zip(sums, wanted, strict=True))


@pytest.mark.parametrize("windows", [True, False], ids=["windows", "samples"])
def test_pinned_batches_dropped_while_their_copy_is_queued_arrive_whole(
    device, keep_busy, tokens, windows
):
    dataset, size = (MmapDataset(tokens, SEQ_LEN), BATCH_SIZE) if windows else (Floats(), 4)
    wanted, moved = list(load(dataset, size)), []
    for batch in load(dataset, size, pin_memory=True, num_workers=2):
        assert all(one.is_pinned() for one in tensors_of(batch))
        if len(moved) % 8 == 0:
            keep_busy()
        moved.append([one.to(device, non_blocking=True) for one in tensors_of(batch)])
        del batch
    torch.accelerator.synchronize()
    assert all(same(a, tensors_of(b)) for a, b in zip(moved, wanted, strict=True))


def test_packed_rows_come_to_the_gpu(device, tmp_path):
    documents = [np.array([*range(1, length), 0], np.uint16) for length in range(2, 90)]
    write_tokens(tmp_path / "a.npy", documents)
    rows = PackedDataset(tmp_path / "a.npy", seq_len=128, eot_id=0)
    for got, wanted in zip(load(rows, 4, device=device), load(rows, 4), strict=True):
        for name in ("inputs", "targets", "cu_seqlens", "documents", "position_ids"):
            value = getattr(got, name)
            assert value.device.type == device.type, name
            assert torch.equal(value.cpu(), getattr(wanted, name)), name


SCRIPT = """
import sys
import torch
from npydata import AsyncCheckpointer, AsyncDataLoader, NpyTokensDataset, load_checkpoint
torch.set_default_device("cuda")
data = NpyTokensDataset(sys.argv[1], 512, seed=0)
loader = AsyncDataLoader(data, batch_size=64, num_workers=2, device="cuda")
model = torch.nn.Embedding(1 << 16, 64)
for x, y in loader:
    assert x.device.type == y.device.type == "cuda"
    assert torch.equal(x[:, 1:], y[:, :-1])
    model(x).sum().backward()
assert data[0][0].device.type == "cpu"
with AsyncCheckpointer() as keeper:
    keeper.save(sys.argv[2], model.state_dict())
held = load_checkpoint(sys.argv[2])[0]
assert torch.equal(held["weight"], model.weight.detach().cpu())
"""


def test_cuda_as_the_default_device(device, tokens, tmp_path):
    if device.type != "cuda":
        pytest.skip("the script is written for CUDA")
    subprocess.run([sys.executable, "-c", SCRIPT, tokens, tmp_path / "saved"], check=True)


def test_a_loader_in_a_process_that_has_not_touched_the_gpu_begins_nothing_on_it(device, tokens):
    if device.type != "cuda":
        pytest.skip("asks CUDA")
    script = (
        "import sys, torch; from npydata import AsyncDataLoader, NpyTokensDataset; "
        "next(iter(AsyncDataLoader(NpyTokensDataset(sys.argv[1], 512), batch_size=4))); "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", script, tokens], check=True)
