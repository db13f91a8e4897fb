"""What the tests of the checkpointer share: states, bits, and a training run to stop and resume."""

import random
from pathlib import Path

import torch

from npydata import (
    AsyncCheckpointer,
    AsyncDataLoader,
    MmapDataset,
    TrainingState,
    capture_rng,
    load_checkpoint,
    restore_rng,
)

TOKENS = Path(__file__).resolve().parents[2] / "materials" / "train_smoke.npy"
FILES = {"model.safetensors", "optimizer.safetensors", "training_state.json", "manifest.json"}


def small_state(fill=1.0):
    """A state like the seed's: two layers, the first begins with ``fill``."""
    return {
        "layers.0.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) + fill,
        "layers.0.bias": torch.full((3,), fill),
    }


def bits(tensor):
    """A tensor's elements in order, as bytes."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(
        torch.uint8
    ).numpy().tobytes()  # fmt: skip


def bitwise(value):
    """A nested value as something that ``==`` compares to the bit, NaN and types included."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, tuple(value.shape), bits(value)
    if isinstance(value, dict):
        return "dict", [(bitwise(key), bitwise(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [bitwise(one) for one in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(map(repr, value))
    return type(value).__name__, repr(value)


def tree_of(folder):
    """Every file below a folder with its content, and every link with its target."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


class Run:
    """A small training run in which everything has a state: optimizer, schedule, dropout, data."""

    def __init__(self):
        torch.manual_seed(1)
        random.seed(1)
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(256, 8), torch.nn.Dropout(0.3), torch.nn.Flatten(),
            torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4),
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        data = MmapDataset(TOKENS, 8)
        self.loader = AsyncDataLoader(data, batch_size=4, seed=3, num_workers=2)
        self.batches = iter(self.loader)
        self.step = 0

    def train(self, until):
        """Take steps up to the given number."""
        while self.step < until:
            inputs, targets = next(self.batches)
            scale = 1 + random.random() / 10
            loss = torch.nn.functional.cross_entropy(self.model(inputs % 256), targets[:, 0] % 4)
            self.optimizer.zero_grad()
            (loss * scale).backward()
            self.optimizer.step()
            self.schedule.step()
            self.step += 1

    def save(self, checkpointer: AsyncCheckpointer, folder):
        """Save everything in the background."""
        state = TrainingState(step=self.step, rng=capture_rng(), loader=self.loader.state_dict(),
                              extra={"schedule": self.schedule.state_dict()})  # fmt: skip
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        checkpointer.save(folder, model, optimizer, state)

    def load(self, folder):
        """Continue from a checkpoint."""
        model, optimizer, state = load_checkpoint(folder)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.schedule.load_state_dict(state.extra["schedule"])
        self.loader.load_state_dict(state.loader)
        self.batches = iter(self.loader)
        restore_rng(state.rng)
        self.step = state.step

    def weights(self):
        """Every weight and every number of the optimizer, to the bit."""
        return bitwise([dict(self.model.state_dict()), self.optimizer.state_dict()])
