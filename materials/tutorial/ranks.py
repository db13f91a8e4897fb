"""Start a few ranks from a notebook, and what they do there: the workers of notebook 09.

    for end in ranks.start(2, "hello"):
        print(end.told)

`start` does what torchrun does: it starts processes, tells each who it is, and waits for them.
They are forked from one that has imported torch, which saves the time to import it in each.  None
of them outlives its time-out.
"""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import npydata
from tutorial import figures, killed_writer

PATIENCE = 90
"""Seconds after which ranks that have not ended are ended."""
SAMPLES, BATCH, WIDTH = 240, 12, 8
ROWS = 10


# What torchrun does


@dataclass(frozen=True, slots=True)
class End:
    """What became of a rank: its exit code, negative for a signal, and what its job returned."""

    code: int
    told: Any


def start(world_size: int, job: str, *args: Any, patience: float = PATIENCE) -> list[End]:
    """Run a function of this module in so many processes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting_place = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process holds the store, as torchrun does
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        meeting_place.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with TemporaryDirectory() as folder:
        words = [folder, str(patience), job, *map(str, args)]
        process = subprocess.Popen(
            [sys.executable, __file__, *words],
            env=os.environ | meeting_place,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=patience)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            raise RuntimeError(f"the ranks failed:\n{errors[-2000:]}")
        return [End(**json.loads(_report(folder, rank))) for rank in range(world_size)]


def _report(folder: str, rank: int) -> str:
    return (Path(folder) / f"{rank}.json").read_text()


def _main(folder: Path, patience: int, job: str, args: Sequence[str]) -> int:
    """Fork the ranks and wait for them; leave how each ended, and what it told."""
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    import npydata.distributed.checkpointer  # noqa: F401 - once, for all of them

    torch.set_num_threads(1)
    children = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        child = os.fork()
        if child == 0:
            signal.alarm(patience)
            os._exit(_be(rank, folder, job, args))
        children[rank] = child
    failed = 0
    for rank, child in children.items():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        path = folder / f"{rank}.told"
        told = json.loads(path.read_text()) if path.exists() else None
        (folder / f"{rank}.json").write_text(json.dumps({"code": code, "told": told}))
        failed += code > 0
    return failed


def _be(rank: int, folder: Path, job: str, args: Sequence[str]) -> int:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    try:
        dist.init_process_group("gloo")
        told = globals()[job](*args)
        (folder / f"{rank}.told").write_text(json.dumps(told))
    except BaseException as error:
        print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
        return 1
    return 0


# Jobs


def hello() -> dict[str, int]:
    rank = dist.get_rank()
    total = torch.tensor(rank)
    dist.all_reduce(total)  # add up over all ranks; each gets the sum
    return {"rank": rank, "of": dist.get_world_size(), "sum of all ranks": int(total)}


class Numbers(torch.utils.data.Dataset):
    """Sample `i` is a row of the number `i`, so that a batch says which samples it has."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((WIDTH,), float(i))


class Small(nn.Module):
    """Ten rows, which don't go round on 3 ranks; one row, which stays with rank 0; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, ROWS), nn.Linear(ROWS, 1)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x / SAMPLES - self.mean).relu())


def train(run: str, steps: str, save_at: str) -> dict[str, Any]:
    model, optimizer, loader = begin()
    first, loaded = 0, None
    if newest := npydata.latest_checkpoint(run):
        state = npydata.load_distributed(newest, model, optimizer)
        loader.load_state_dict(state.loader)
        first, loaded = state.step, digest(model)
    seen = []
    with npydata.AsyncCheckpointer() as checkpointer:
        for step, x in enumerate(islice(loader, int(steps) - first), first + 1):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            seen.append(x[:, 0].int().tolist())
            if step == int(save_at):
                saved = digest(model)
                state = npydata.TrainingState(step=step, loader=loader.state_dict())
                parts = model.state_dict(), optimizer.state_dict(), state
                checkpointer.save_distributed(f"{run}/step-{step}", *parts)
    return {"samples": seen, "rows": held(model), "saved": saved, "loaded": loaded}


def begin() -> tuple[nn.Module, torch.optim.Optimizer, npydata.AsyncDataLoader]:
    """A model that all ranks share, its optimizer, and this rank's part of the samples."""
    from torch.distributed.fsdp import fully_shard

    model = Small()
    fully_shard(model)
    each = BATCH // dist.get_world_size()
    loader = npydata.AsyncDataLoader(Numbers(), batch_size=each, seed=0, num_workers=1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), loader


def held(model: nn.Module) -> dict[str, list[int]]:
    """The shape of what this rank holds of each tensor."""
    state = model.state_dict().items()
    return {
        name: list(getattr(one, "to_local", lambda one=one: one)().shape) for name, one in state
    }


def digest(model: nn.Module) -> str:
    """The whole weights, in 12 letters that change with any bit."""
    state = model.state_dict().values()
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in state]
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in whole)).hexdigest()[:12]


def killed_in_a_save(run: str, timeout_s: str) -> dict[str, Any]:
    """Save step 1; of the save of step 2, rank 1 does not live to see the end."""
    model, optimizer, _ = begin()
    sharding = npydata.ShardingConfig(timeout_s=float(timeout_s))
    checkpointer = npydata.AsyncCheckpointer()

    def save(step: int) -> None:
        state = npydata.TrainingState(step=step)
        parts = model.state_dict(), optimizer.state_dict(), state
        checkpointer.save_distributed(f"{run}/step-{step}", *parts, sharding=sharding)
        checkpointer.wait()

    save(1)
    if dist.get_rank() == 1:
        killed_writer.after_each_call(die_when_it_writes)
    begun = time.monotonic()
    try:
        save(2)
    except npydata.CheckpointError as error:
        return {"error": str(error), "seconds": time.monotonic() - begun}
    return {"error": None}


def die_when_it_writes(call: str) -> None:
    if call.startswith("pwrite"):
        os.kill(os.getpid(), signal.SIGKILL)


# Figures


SHADES = ("gpu", "naive", "ours", "cold")
"""The colour of each rank, by its role in the palette."""


def draw_grid(
    ax: Any, rows: Sequence[Sequence[range]], title: str, names: Sequence[str] = ()
) -> None:
    """Draw who owns what: a row for each step, a cell for each sample, coloured by rank.

    `rows` has, for each row, the places of each rank; where the owners change, they are named.
    """
    y, ticks, before = 0.0, [], []
    for of_ranks in rows:
        ends = [places.stop - of_ranks[0].start for places in of_ranks]
        if ends != before:
            y += 0.55
            _name_ranks(ax, y - 0.6, [0, *ends])
        _draw_row(ax, y, of_ranks)
        ticks.append(y)
        y, before = y + 1, ends
    ax.set_xlim(-0.1, before[-1] + 0.1)
    ax.set_ylim(y - 0.4, -0.35)
    ax.set_yticks(ticks, names or [f"step {k + 1}" for k in range(len(rows))])
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.set_title(title)


def _name_ranks(ax: Any, y: float, ends: Sequence[int]) -> None:
    for rank, (begin, end) in enumerate(pairwise(ends)):
        ax.text((begin + end) / 2, y, f"rank {rank}", ha="center", va="center", fontsize=10)


def _draw_row(ax: Any, y: float, of_ranks: Sequence[range]) -> None:
    from matplotlib.patches import Rectangle

    first = of_ranks[0].start
    for role, places in zip(SHADES, of_ranks, strict=False):
        color = figures.PALETTE[role]
        for place in places:
            x = place - first
            ax.add_patch(Rectangle((x + 0.04, y - 0.42), 0.92, 0.84, facecolor=color))
            ink = figures.ink_on(color)
            ax.text(x + 0.5, y, str(place), ha="center", va="center", color=ink, fontsize=10)


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), math.ceil(float(sys.argv[2])), sys.argv[3], sys.argv[4:]))
