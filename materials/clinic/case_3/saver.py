"""Save beside training, a file for each tensor, slowly enough not to disturb others on the disk."""

import json
import threading
import time
import zlib

import numpy as np
import torch

PAUSE_S = 0.005  # between two files


def flat(optimizer):
    """The optimizer's tensors by name, such as `0.exp_avg`."""
    state = optimizer.state_dict()["state"]
    return {f"{k}.{name}": value for k, kept in state.items() for name, value in kept.items()}


def snapshot(model, optimizer):
    """The tensors of this step, out of reach of those that follow."""
    weights = {f"model.{name}": weight.clone() for name, weight in model.state_dict().items()}
    moments = {f"optimizer.{name}": value.detach() for name, value in flat(optimizer).items()}
    return moments | weights


def write(tensors, folder):
    """Write a file for each tensor; the list of them, with checksums, comes last."""
    checksums = {}
    for name, tensor in tensors.items():
        np.save(folder / f"{name}.npy", tensor.numpy())
        checksums[name] = zlib.crc32((folder / f"{name}.npy").read_bytes())
        time.sleep(PAUSE_S)
    (folder / "list.json").write_text(json.dumps(checksums, indent=1))


def save(model, optimizer, folder):
    """Return a thread that is writing; training may go on meanwhile."""
    folder.mkdir()
    thread = threading.Thread(target=write, args=(snapshot(model, optimizer), folder))
    thread.start()
    return thread


def load(model, optimizer, folder):
    """Bring a model, and an optimizer that has made a step, to what was saved."""
    for kept, prefix in [(model.state_dict(), "model."), (flat(optimizer), "optimizer.")]:
        for name, tensor in kept.items():
            tensor.copy_(torch.from_numpy(np.load(folder / f"{prefix}{name}.npy")))
