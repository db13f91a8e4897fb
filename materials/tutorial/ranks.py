"""Start a few ranks from a notebook, and what they do there: the workers of lesson 09.

    for end in ranks.start(2, "hello"):
        print(end.told)

`start` does what torchrun does: it starts processes, tells each who it is, and waits for them.
They are forked from one that has imported torch, which saves the time to import it in each.  None
of them outlives its time-out.  They run what the learner has built, and the library beside it.
"""

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tutorial import figures, killed_writer
from tutorial import kept as npydata
from tutorial.sliders import with_sliders

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

    import tutorial.kept.distributed.checkpointer  # noqa: F401 - once, for all of them

    use_what_was_built()
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


def use_what_was_built() -> None:
    """Give the library the learner's functions, where some were accepted."""
    from tutorial.kept.distributed import save, save_plan
    from tutorial.kept.reader import sharded
    from tutorial.lesson_loader import BatchSampler

    path = Path(os.environ.get("NPYDATA_LAB", "")) / "mine" / "ranks.py"
    if not path.exists():
        return
    mine: dict[str, Any] = {"__name__": "mine.ranks"}
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), mine)
    for module, names in [
        (save, ("gather_entries", "commit_global")),
        (save_plan, ("dedup_save_plans",)),
        (sharded, ("chosen_of", "overlap")),
    ]:
        for name in names:
            setattr(module, name, mine[name])
    BatchSampler.positions_of = mine["MySampler"].positions_of


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


# In the notebook's own process


_scratch = cache(partial(TemporaryDirectory, prefix="npydata-ranks-"))  # by who needs it


def folder(name: str) -> Path:
    """A place for a run, empty; it goes with the notebook."""
    place = Path(_scratch().name) / name
    shutil.rmtree(place, ignore_errors=True)
    return place


def coverage(*settings: dict[str, int]) -> str:
    """Which of the samples the loaders of two ranks give in 20 steps, in words."""
    times: Counter[int] = Counter()
    for own in settings:
        loader = npydata.AsyncDataLoader(Numbers(), batch_size=6, num_workers=1, **own)
        for x in islice(loader, 20):
            times.update(x[:, 0].int().tolist())
    twice = sum(n > 1 for n in times.values())
    return f"{len(times)} of {SAMPLES} samples seen, {twice} of them twice"


def print_rows(ends: Sequence[End]) -> None:
    """The shapes that each of two ranks has."""
    for name, shape in ends[0].told["rows"].items():
        print(f"{name:<12} rank 0: {shape!s:<8} rank 1: {ends[1].told['rows'][name]}")


def patience() -> str:
    """How long a collective waits if nobody says otherwise."""
    from torch.distributed.distributed_c10d import default_pg_timeout

    return f"{default_pg_timeout.seconds // 60} minutes"


def a_shard(name: str, first_row: int, rows: int, of: int) -> Any:
    """What a rank has of a tensor: some of its rows, or all."""
    from tutorial.kept.distributed.save_plan import Shard

    kind = "SHARD" if rows < of else "TENSOR"
    return Shard(name, (first_row,), (rows,), (of,), "torch.float32", kind)


def two_states() -> list[list[Any]]:
    """Two ranks: four tensors that both have, and a half each of a fifth."""
    copies = [a_shard(name, 0, 8, 8) for name in ("mean", "variance", "scale", "shift")]
    return [[*copies, a_shard("up", 5 * rank, 5, 10)] for rank in range(2)]


def print_files(folder: Path) -> None:
    """What each rank wrote: the tensors of each file, and where in the whole they belong."""
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        offsets = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
        for name, entry in sorted(header.items()):
            where = offsets[name]["saved_offsets"]
            print(f"{path.name}  {name:<12}{entry['shape']!s:<8} at {where}")


def compare(three: Sequence[End], two: Sequence[End]) -> None:
    """Three ranks that went on from what two had saved, beside the two that went on themselves."""
    loaded = {end.told["loaded"] for end in three}
    print("rows of up.weight:", [end.told["rows"]["up.weight"][0] for end in three])
    print("loaded what 2 ranks had saved, bit for bit:", loaded == {two[0].told["saved"]})
    print("steps 5 and 6 had the same samples:", last_samples(three) == last_samples(two))


def last_samples(ends: Sequence[End]) -> list[list[int]]:
    """The samples of the last two steps, whoever had them."""
    steps = zip(*(end.told["samples"][-2:] for end in ends), strict=True)
    return [sorted(sample for part in step for sample in part) for step in steps]


def print_kill(ends: Sequence[End], run: Path) -> None:
    """How two ranks ended of which one was killed, and what is left."""
    survivor, killed = ends
    print("rank 1 ended with signal", -killed.code)
    print("rank 0:", survivor.told["error"].replace(f"{run}/", ""))
    newest = npydata.latest_checkpoint(run)
    print("newest:", newest.name, "of step", npydata.verify_checkpoint(newest).step)


def in_slow_motion(commit_global: Callable[..., None]) -> None:
    """Two ranks in one process, in a save of step 1: what is in the folder after it.

    Rank 0 has written its share. Rank 1 says nothing for half a second; then it has, too.
    """
    for speaks in (False, True):
        left = committed_by(commit_global, folder(f"slow-{speaks}"), speaks=speaks)
        print(f"rank 1 has {'written' if speaks else 'said nothing'}; in the folder: {left}")


def committed_by(commit_global: Callable[..., None], root: Path, *, speaks: bool) -> str:
    from tutorial.kept.checkpointer.commit import temporary_beside
    from tutorial.kept.checkpointer.manifest import checksums
    from tutorial.kept.distributed.coordinator import Coordinator
    from tutorial.kept.distributed.group import Group

    root.mkdir()
    store = dist.HashStore()
    ranks = [Coordinator(Group(store, rank, 2, 0.5, None), "step-1") for rank in (0, 1)]
    with temporary_beside(root / "step-1") as temporary:
        for rank in ranks[: 1 + speaks]:
            path = temporary / f"rank_{rank.group.rank}.safetensors"
            path.write_bytes(b"the weights of a rank")
            wrote = [path.stat().st_size, checksums(path.read_bytes())]
            rank.send("done", {"files": {path.name: wrote}, "replicas": []})
        try:
            commit_global(root / "step-1", temporary, ranks[0], 1, None)
        except npydata.CheckpointError as error:
            print("rank 0:", error)
    return ", ".join(sorted(path.name for path in root.iterdir())) or "nothing"


def draw_moved(make: Callable[..., Any]) -> None:
    """Four steps on 2 ranks; and the same steps where a third rank comes in the middle."""
    figures.use_style()
    stay = places(make, 2, 6, 0, 4)
    move = places(make, 2, 6, 0, 2) + places(make, 3, 4, 24, 2)
    _, (above, below) = figures.plt.subplots(2, 1, figsize=(figures.WIDTH, 6.2))
    draw_grid(above, stay, "2 ranks, batch size 6")
    draw_grid(below, move, "the same; after step 2 on 3 ranks, batch size 4")
    figures.plt.show()
    same = [sorted(k for one in step for k in one) for step in stay] == [
        sorted(k for one in step for k in one) for step in move
    ]
    print("each step has the same positions in both:", same)


def places(
    make: Callable[..., Any], ranks: int, batch_size: int, start: int, steps: int
) -> list[list[range]]:
    """For each step, the positions of each rank."""
    of_ranks = []
    for rank in range(ranks):
        sampler = make(SAMPLES, batch_size, rank=rank, world_size=ranks, start=start)
        found = sampler.positions_of(range(steps)).reshape(steps, batch_size).tolist()
        of_ranks.append([range(row[0], row[-1] + 1) for row in found])
    return [list(step) for step in zip(*of_ranks, strict=True)]


def rows_of(ranks: int, rows: int) -> list[range]:
    """The rows of each rank, as FSDP2 spreads them: equally many, and the last ones fewer."""
    each = -(-rows // ranks)
    return [range(min(r * each, rows), min((r + 1) * each, rows)) for r in range(ranks)]


def draw_readers(chosen_of: Callable[..., Any], overlap: Callable[..., Any]) -> None:
    """Turn who wrote and who reads: which rows of a tensor come out of which file."""
    figures.use_style()

    def draw(writers: float, readers: float, rows: float) -> None:
        files, needed = rows_of(int(writers), int(rows)), rows_of(int(readers), int(rows))
        _, ax = figures.plt.subplots(figsize=(figures.WIDTH, 3.0))
        draw_grid(
            ax,
            [files, needed],
            f"{int(rows)} rows of a tensor, and who has them",
            ["written by", "needed by"],
        )
        figures.plt.show()
        for rank, wanted in enumerate(needed):
            chosen = chosen_of((int(rows),), slice(wanted.start, wanted.stop))
            found = [(k, overlap(chosen, ((f.start,), (len(f),)))) for k, f in enumerate(files)]
            text = [
                f"{both[0][0].stop - both[0][0].start} from file {k}" for k, both in found if both
            ]
            print(f"rank {rank}, rows: {', '.join(text) or 'none'}")

    with_sliders(draw, writers=(2, 1, 4, 1), readers=(3, 1, 4, 1), rows=(10, 4, 24, 1))


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
        if begin < end:
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
