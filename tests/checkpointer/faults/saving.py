"""What is saved under faults, and what must hold of a root after each of them."""

import itertools
import json
import zlib
from pathlib import Path

import torch

from npydata import AsyncCheckpointer, TrainingState, latest_checkpoint, load_checkpoint
from npydata import verify_checkpoint as verify

PATIENCE = 20.0
"""Seconds after which a test that waits for an event has failed."""
ELEMENTS = 10_000


def model_at(step, elements=ELEMENTS):
    """Return a model's state of which every element says what step it is from."""
    return {"weight": torch.full((elements,), float(step)), "bias": torch.full((7,), step)}


def optimizer_at(step):
    return {"state": {0: {"exp_avg": torch.full((33,), step / 2), "step": step}}}


def save_step(checkpointer, folder, step, elements=ELEMENTS):
    """Save a step's state."""
    training = TrainingState(step=step)
    checkpointer.save(folder, model_at(step, elements), optimizer_at(step), training)


def save_for_ever(report, root, first, elements=ELEMENTS):
    """Save one step after the other, into new folders and into old ones, and report each."""
    resume(root)
    keeper = AsyncCheckpointer(keep_last=2)
    for step in itertools.count(first):
        name = f"step{step}" if step % 3 == 0 else f"reused{step % 2}"
        save_step(keeper, root / name, step, elements)
        keeper.wait()
        report(step)


def saved(folder, step, **options):
    """Save a step's state and wait until it is on the disk."""
    with AsyncCheckpointer(**options) as checkpointer:
        save_step(checkpointer, folder, step)


def loaded_step(folder):
    """Load and verify a checkpoint; return its step, which every element must be from."""
    verify(folder)
    model, optimizer, training = load_checkpoint(folder, verify=True)
    wanted = model_at(training.step, model["weight"].numel())
    assert all(torch.equal(model[name], wanted[name]) for name in wanted), folder
    held, wanted = optimizer["state"][0], optimizer_at(training.step)["state"][0]
    assert held["step"] == training.step
    assert torch.equal(held["exp_avg"], wanted["exp_avg"])
    return training.step


STEPS = {}
"""What came of loading a folder, by its files: most faults change one folder of a root."""


def step_of(folder):
    """Return what :func:`loaded_step` does; folders that hold the same are loaded once."""
    files = (path for path in folder.rglob("*") if path.is_file())
    key = frozenset((path.relative_to(folder), hash(path.read_bytes())) for path in files)
    if key not in STEPS:
        try:
            STEPS[key] = loaded_step(folder)
        except Exception as error:
            STEPS[key] = error
    if isinstance(STEPS[key], Exception):
        raise STEPS[key]
    return STEPS[key]


def rewrite_manifest(folder, **changes):
    """Change a checkpoint's manifest as another program could have written it."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text()) | changes
    del data["crc32"]
    data["crc32"] = zlib.crc32(json.dumps(data).encode())
    path.write_text(json.dumps(data, indent=1))


def unfinished(root):
    """Return the names of a root that no reader may see, and that the next save clears away."""
    return [entry.name for entry in Path(root).iterdir() if entry.name.startswith(".")]


def holds(root, confirmed, names=()):
    """Check a root: the newest loads and is no older than what was confirmed; all seen is whole.

    ``names`` are folders that held a checkpoint before: each must still load. Returns the newest
    step.
    """
    newest = latest_checkpoint(root)
    assert newest is not None, sorted(entry.name for entry in Path(root).iterdir())
    step = step_of(newest)
    assert step >= confirmed, f"{newest.name} is of step {step}, {confirmed} was confirmed"
    for entry in Path(root).iterdir():
        if not entry.name.startswith(".") and entry.name not in ("latest", "lost+found"):
            step_of(entry)
    for name in names:
        loaded_step(Path(root) / name)
    return step


def resume(root):
    """Begin as another process does that goes on with a run: it loads the newest checkpoint."""
    if newest := latest_checkpoint(root):
        load_checkpoint(newest)


def saves_again(root, name, step, keep_last=2, *, of_the_living=False):
    """Check that a new checkpointer saves, and clears away what the fault left.

    That of a living process stays: where a power cut is only played, its saver lives.
    """
    saved(Path(root) / name, step, keep_last=keep_last)
    assert latest_checkpoint(root) == Path(root) / name
    assert holds(root, step) == step
    assert of_the_living or unfinished(root) == [], "temporaries are left"
    held = [one.name for one in Path(root).iterdir() if one.is_dir() and one.name[0] != "."]
    assert len(held) <= keep_last, held
