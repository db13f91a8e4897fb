"""What lesson 07 breaks, measures and draws."""

import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import safetensors.torch
import torch

from course.lab import scratch
from npydata.system.page_cache import page_faults


def steps_in(folder):
    """Return the steps that the weights of a saved file come from."""
    state = safetensors.torch.load_file(folder / "state.safetensors")
    return sorted({int(one) for tensor in state.values() for one in torch.aminmax(tensor)})


# Three ways to break a saver


def three_ways(saver_type):
    """Print what becomes of a change, of a full disk, and of a second save's memory; return the
    page faults of that."""
    saver, weights, root = saver_type(), {"weight": torch.ones(12 << 20)}, scratch()
    saver.save(root / "1", weights)
    weights["weight"].fill_(2)
    saver.wait()
    print("a step meanwhile     the file holds step", *steps_in(root / "1"))
    heard, _ = on_a_full_disk(saver_type())
    print("a full disk          errors heard in 3 saves:", heard)
    before = page_faults()
    saver.save(root / "2", weights)
    saver.wait()
    faults = page_faults() - before
    print(f"saved a second time  page faults: {faults:,}")
    return faults


def on_a_full_disk(saver):
    """Save three times; return how many errors reach the loop, and those that ended a thread."""
    heard, ended = 3 * 2, []
    with patch("threading.excepthook", ended.append):
        for number in range(3):
            folder = scratch() / f"step-{number}"
            Path(f"{folder}.tmp").mkdir()
            Path(f"{folder}.tmp", "state.safetensors").symlink_to("/dev/full")
            for call in (partial(saver.save, folder, {"w": torch.ones(9)}), saver.wait):
                with suppress(OSError):
                    call()
                    heard -= 1
    return heard, ended


def errors_unheard(saver_type):
    """Show where the errors of a full disk go."""
    heard, ended = on_a_full_disk(saver_type())
    print(f"3 saves, {heard} errors in the loop; {len(ended)} tracebacks in a log:")
    for one in ended:
        print(f"  Exception in thread: {one.exc_type.__name__}: {one.exc_value}")


def steps_without_copy(saver_type):
    """Train while a saver saves whose copy was taken out; say how many steps the file mixes.

    A very quick disk may get away with it once: then it is tried again.
    """
    weights = {f"layer{k}": torch.zeros(1 << 20) for k in range(12)}
    for _ in range(5):
        saver, root, number = saver_type(), scratch(), 1
        with patch.multiple(
            torch.Tensor, clone=lambda tensor: tensor, __deepcopy__=lambda tensor, memo: tensor
        ):
            saver.save(root / "1", weights)
            while not (root / "1").exists():
                number += 1
                for weight in weights.values():
                    weight.fill_(number)
        if len(steps_in(root / "1")) > 1:
            return "several"
    return "one"


# What a save costs


def stalls(**savers):
    """Save 48 MiB with some savers, in turn; print how long training waits."""
    weights, root = {"weight": torch.zeros(12 << 20)}, scratch()
    waits = {name: [] for name in savers}
    for number in range(6):
        for name, saver in savers.items():
            start = time.perf_counter()
            saver.save(root / f"{number}-{name}", weights)
            waits[name].append(1000 * (time.perf_counter() - start))
            saver.wait()
    for name, times in waits.items():
        print(f"{name:<14} {median(times):4.0f} ms ({min(times):.0f} to {max(times):.0f})")
