"""`examples/train_fsdp.py` and `train_ddp.py`: killed, and resumed on any number of ranks."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_tools import bitwise
from ranks import Ranks, on_ranks

from npydata import latest_checkpoint, load_checkpoint, write_tokens

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS, SAVE_EVERY, BATCH, CONTEXT = 12, 4, 12, 8
PATIENCE = 240


def train_watched(script, tokens, out, steps, die_after=None):
    """Be a rank of an example; return the windows of each step by the token they begin with.

    Rank 1 dies when it has done a given step.
    """
    sys.path.insert(0, str(EXAMPLES))
    import train_ddp
    import train_fsdp

    seen = []

    def note(step, x):
        seen.append(x[:, 0].tolist())
        if step == die_after and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    spread = {"fsdp": train_fsdp.sharded, "ddp": train_ddp.replicated}[script]
    options = {"batch_size": BATCH, "context": CONTEXT, "save_every": SAVE_EVERY, "seen": note}
    train_fsdp.train(spread, tokens, out, device=torch.device("cpu"), steps=steps, **options)
    return seen


def run(world_size, script, tokens, out, steps=STEPS):
    """Train on so many ranks; return the set of samples of each step, of all ranks together."""
    seen = on_ranks(world_size, train_watched, script, tokens, out, steps)
    return [sorted(one for part in parts for one in part) for parts in zip(*seen, strict=True)]


def torchrun(world_size, script, tokens, out):
    """Start an example as a person would."""
    words = [
        "--tokens",
        tokens,
        "--out",
        out,
        "--steps",
        STEPS,
        "--save-every",
        SAVE_EVERY,
        "--batch-size",
        BATCH,
        "--context",
        CONTEXT,
    ]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world_size]
    done = subprocess.run(
        [sys.executable, *map(str, [*start, EXAMPLES / script, *words])],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def final(out):
    """Return the weights and moments of the end of a run to the bit, and its training state."""
    newest = latest_checkpoint(out)
    assert newest.name == f"step-{STEPS:06}"
    *states, training = load_checkpoint(newest)
    return bitwise(states), training


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Tokens of which each occurs once, so that the first of a window says which one it is."""
    path = tmp_path_factory.mktemp("tokens") / "each_once.npy"
    write_tokens(path, [range(2048)], dtype="uint16")
    return path


@pytest.fixture(scope="module")
def whole(tokens, tmp_path_factory):
    """A run on 2 ranks that nobody interrupted: the samples of its steps, and its end."""
    out = tmp_path_factory.mktemp("whole")
    return run(2, "fsdp", tokens, out), final(out)


@pytest.fixture(scope="module")
def left_behind(tokens, tmp_path_factory):
    """What a run leaves whose rank 1 was killed between two checkpoints."""
    out = tmp_path_factory.mktemp("killed")
    ranks = Ranks(2, train_watched, "fsdp", tokens, out, STEPS, 7)
    try:
        assert ranks.outcome(1)[0] == "killed"
        assert ranks.outcome(0)[0] == "error"  # the next sum with the dead one
    finally:
        ranks.kill_all()
    assert latest_checkpoint(out).name == "step-000004"
    return out


@pytest.fixture
def killed(left_behind, tmp_path):
    """A copy of it, to go on from."""
    return shutil.copytree(left_behind, tmp_path / "killed")


def test_killed_and_resumed_it_ends_with_the_same_bits(killed, tokens, whole):
    samples, (states, training) = whole
    assert run(2, "fsdp", tokens, killed) == samples[4:]
    resumed, state = final(killed)
    assert resumed == states
    assert (state.loss, state.loader) == (training.loss, training.loader)


@pytest.mark.parametrize("world, script", [(1, "fsdp"), (3, "ddp")])
def test_on_another_world_size_it_goes_on_with_the_same_samples(
    killed, tokens, whole, world, script
):
    samples, (_, training) = whole
    assert run(world, script, tokens, killed) == samples[4:]
    assert final(killed)[1].loader == training.loader


@pytest.mark.nightly
def test_torchrun_starts_it_as_its_first_lines_say(tokens, tmp_path, whole):
    done = torchrun(2, "train_fsdp.py", tokens, tmp_path)
    assert "step 12 of 12" in done.stderr
    assert final(tmp_path)[0] == whole[1][0]
