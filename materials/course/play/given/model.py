"""The given half of lesson 00's training: a tiny model, its state as tensors, and the stopwatch."""

import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

PAIRS = 65_536
PARTS = {"data wait": "░", "compute": "█", "save stall": "▓", "load": "▒"}


class TinyLM(nn.Module):
    """Predicts the next word from this one and the one before."""

    def __init__(self, vocab=64, pairs=PAIRS):
        super().__init__()
        self.pairs = nn.Embedding(pairs, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, vocab))

    def forward(self, x):
        previous = nn.functional.pad(x, (1, 0))[:, :-1]
        return self.mlp(self.pairs((1009 * previous + x) % self.pairs.num_embeddings))


def new_model(pairs=PAIRS):
    """The same weights at every call. One core plays the GPU; the others are for the rest."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = TinyLM(pairs=pairs)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model, optimizer, x, y):
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def state_of(model, optimizer, step):
    """All that training needs to go on: a dictionary of tensors, 25 MB."""
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{index}.{key}": tensor for key, tensor in values.items()}
    return state | {"step": torch.tensor(step)}


def resume(model, optimizer, checkpoint, read_tensor):
    """Put back the state that a checkpoint holds; returns how many steps are done."""
    if checkpoint is None:
        return 0

    def read(name):
        return read_tensor(checkpoint / "state.safetensors", name)

    model.load_state_dict({name: read(f"model.{name}") for name in model.state_dict()})
    groups, keys = optimizer.state_dict()["param_groups"], ("step", "exp_avg", "exp_avg_sq")
    state = {i: {k: read(f"optimizer.{i}.{k}") for k in keys} for i in groups[0]["params"]}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    print(f"resumed from {checkpoint.name}, which has {read('step').item()} steps", flush=True)
    return read("step").item()


class Stopwatch:
    """Seconds of each part: `with watch("compute"): ...`"""

    def __init__(self):
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def __call__(self, part):
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start

    def each(self, part, items):
        """Go through an iterable and time the wait for each item."""
        items = iter(items)
        while True:
            with self(part):
                item = next(items, None)
            if item is None:
                return
            yield item

    def ms_a_step(self, steps):
        return {part: 1000 * spent / max(steps, 1) for part, spent in self.seconds.items()}


def show_bars(**rows):
    """Print one bar a row, in letters; the longest takes 60."""
    compute = next(iter(rows.values()))["compute"]
    rows = {name: parts | {"compute": compute} for name, parts in rows.items()}
    longest = max(sum(parts.values()) for parts in rows.values()) or 1
    for name, parts in rows.items():
        bar = "".join(PARTS[part] * round(60 * ms / longest) for part, ms in parts.items())
        print(f"{name:>7} {bar} {sum(parts.values()):.1f} ms a step")
    for part, letter in PARTS.items():
        print(f"{letter} {part:<10}", *(f"{parts[part]:7.1f}" for parts in rows.values()))
    print(
        "(compute is the same code in each: drawn as first measured, however busy the machine is)"
    )


def main(train):
    """Train in the folder that is named on the command line, and show both bars."""
    here = Path(sys.argv[0]).resolve().parent
    settings = json.loads((here / "settings.json").read_text())
    root = here / (sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
    now = train(settings["tokens"], root)
    if now["compute"]:
        show_bars(before=settings["before"], now=now)
    else:
        print(f"Nothing left to train: all steps are done. Delete {root} to begin anew.")
