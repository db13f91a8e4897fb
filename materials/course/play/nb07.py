"""What lesson 07 breaks, measures and draws."""

import mmap
import tempfile
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import safetensors.torch
import torch

from course import lab
from course.play.charts import bars, strips
from course.play.pieces import PIECES, WEIGHTS, Training, rows_of_pieces, save_torn
from npydata.system.page_cache import page_faults

MATRIX = torch.ones(512, 512)
SLOTS = {"header": "#ffffff", "mask": "#0f766e", "seen": "#cfe3f5", "weight": "#b45309",
         "scale": "#9aa5b1"}  # fmt: skip


@cache
def _scratch():
    return tempfile.TemporaryDirectory(prefix="npydata-saves-")


def scratch():
    """Return a fresh folder that goes when the kernel ends."""
    return Path(tempfile.mkdtemp(dir=_scratch().name))


def steps_in(folder):
    """Return the steps that the weights of a saved file come from."""
    state = safetensors.torch.load_file(folder / "state.safetensors")
    return sorted({int(one) for tensor in state.values() for one in torch.aminmax(tensor)})


# Three ways to break a saver


def three_ways(saver_type):
    """Print what becomes of a change, of a full disk, and of a second save's memory."""
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
    print(f"saved a second time  page faults: {page_faults() - before:,}")


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


def steps_without_copy(saver_type, tries=5):
    """Train while a saver saves whose copy was taken out; say how many steps the file mixes.

    A very quick disk may get away with it once: then it is tried again.
    """
    weights = {f"layer{k}": torch.zeros(1 << 20) for k in range(12)}
    steps = []
    while len(steps) < 2 and (tries := tries - 1) >= 0:
        saver, root, number = saver_type(), scratch(), 1
        with patch.object(torch.Tensor, "clone", lambda tensor: tensor):
            saver.save(root / "1", weights)
            while saver.thread.is_alive():
                number += 1
                for weight in weights.values():
                    weight.fill_(number)
        steps = steps_in(root / "1")
    return "several" if len(steps) > 1 else "one"


# What the sliders turn


def tear(save_headless):
    """Return what the slider draws: of which step each piece of two files is."""

    def draw(step_2_after):
        rows, lines = {}, []
        for name, save in {"save_torn": save_torn, "save_headless": save_headless}.items():
            training = Training(step_2_after)
            save(training.weights, training.memory, training.write)
            rows[name] = training.file
            lines.append(f"{name:<14} {training.file.count(2)} pieces from step 2")
        marks = [f"weight {k}, in {PIECES} pieces" for k in range(WEIGHTS)]
        title = f"Training takes step 2 when the disk has {step_2_after} pieces"
        return rows_of_pieces(rows, title, marks), "\n".join(lines)

    return draw


# Memory, and where tensors go


def draw_file(state, slots, header):
    """Show the tensors of a state, and below them the file."""
    above, at = [], len(header)
    for name, tensor in state.items():
        above.append((at, at + tensor.nbytes, name))
        at += tensor.nbytes
    places = [(len(header) + slot.begin, slot) for slot in slots]
    below = [(begin, begin + slot.nbytes, slot.name) for begin, slot in places]
    rows = {"the state": above, "the file": [(0, len(header), "header"), *below]}
    figure = strips(rows, SLOTS, "Where each tensor goes in the file", "byte of the file")
    lines = [f"{name:<8} bytes {begin:>5,} to {end:>5,}" for begin, end, name in below]
    lab.picture(figure, "\n".join(lines))


def faults_of_two_copies():
    """Copy 48 MiB into new memory, then into the same; print the page faults of both."""
    weights = torch.ones(12 << 20)
    memory = torch.frombuffer(mmap.mmap(-1, weights.nbytes), dtype=weights.dtype)
    counts = [page_faults()]
    for _ in range(2):
        memory.copy_(weights)
        counts.append(page_faults())
    first, second = counts[1] - counts[0], counts[2] - counts[1]
    print(f"page faults: {first:,} in the first copy, {second:,} in the second")
    return "hardly any" if second < first / 10 else "about half"


# What a save costs


def stalls(first, new, rounds=6):
    """Save 48 MiB in three ways, in turn; draw what training waits for, and say what costs more.

    Between two saves are some steps, and the wait until nothing is written any more.
    """
    weights, root = {"weight": torch.zeros(12 << 20)}, scratch()
    waits = {}
    for number in range(rounds):
        saves = {
            "torch.save": lambda: torch.save(weights, root / "all.pt"),
            "your first Saver": partial(first.save, root / f"first-{number}", weights),
            "your Saver": partial(new.save, root / f"new-{number}", weights),
        }
        for name, save in saves.items():
            for _ in range(8):
                MATRIX @ MATRIX
            start = time.perf_counter()
            save()
            waits.setdefault(name, []).append(1000 * (time.perf_counter() - start))
            first.wait()
            new.wait()
    kept = {name: times[1:] for name, times in waits.items()}  # the first may wait for memory
    rows = {name: {"wait": median(times)} for name, times in kept.items()}
    title = "What training waits for at a save of 48 MiB"
    lines = [
        f"{name:<17} {min(times):4.0f} to {max(times):4.0f} ms" for name, times in kept.items()
    ]
    lab.picture(bars(rows, {"wait": "#0f766e"}, title, "median wait (ms)"), "\n".join(lines))
    share = 1 - rows["your Saver"]["wait"] / rows["your first Saver"]["wait"]
    print(f"your Saver waits {share:.0%} less than your first one, for a copy of the same bytes")
    return "the page faults" if share > 0.5 else "the copy"
