"""One of the processes that ``npydata bench checkpoint --distributed`` measures.

``python -m npydata.bench.distributed_worker RANK PORT`` asks the store that the bench holds at that
port what to do, does it in step with the other ranks, and leaves there how long it took them all.
"""

import json
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from npydata.bench.checkpoint import COPY, DIRECT_WRITE, timed, write_directly
from npydata.bench.distributed_savers import REPLICATED, SHARDED, WAYS, Way, state_of
from npydata.bench.measure import take_turns
from npydata.bench.savers import TENSOR_BYTES, Saver, State

JOB, DONE, RESULT = "job", "done", "result"
"""What the store holds: what to measure, how many measurements are made, what they gave."""
LIMITS: tuple[Way, ...] = ((COPY, ""), (DIRECT_WRITE, ""))
CASES = SHARDED, REPLICATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the processes are to measure."""

    world_size: int
    nbytes: int
    """Of the sharded state, all ranks' parts together."""
    repeats: int
    folder: str

    @property
    def rounds(self) -> int:
        """Measurements of all ways and limits, those that warm up included."""
        return len(CASES) * (self.repeats + 1) * (len(WAYS) + len(LIMITS))

    def nbytes_of(self, case: str) -> int:
        """Return the bytes of a state.

        Each rank holds all of a replicated one, which is therefore a quarter of the size.
        """
        return self.nbytes if case == SHARDED else self.nbytes // 4

    def to_json(self) -> str:
        """Return it as the store holds it."""
        return json.dumps(asdict(self))


def main(rank: int, port: int) -> None:
    """Measure what the store asks for."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    job = Job(**json.loads(store.get(JOB)))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.world_size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size)
    taken = {case: measure_case(case, job, lambda: tick(store)) for case in CASES}
    if rank == 0:
        store.set(RESULT, json.dumps(taken))
    dist.barrier()
    dist.destroy_process_group()


def tick(store: Any) -> None:
    """Count a measurement, once for all ranks."""
    if dist.get_rank() == 0:
        store.add(DONE, 1)


def measure_case(case: str, job: Job, on_sample: Callable[[], object]) -> list[Any]:
    """Measure every way and every limit in turn; return pairs of a way and its measurements.

    Each measurement is a list of milliseconds, of the rank that took longest.
    """
    nbytes, folder = job.nbytes_of(case), Path(job.folder)
    state = state_of(case, nbytes, min(TENSOR_BYTES, max(4096, nbytes // 8)))
    share = nbytes // job.world_size
    ways: dict[Way, Callable[[], list[float]]] = {
        way: partial(save_twice, start, state, folder, nbytes) for way, start in WAYS.items()
    }
    ways |= dict(zip(LIMITS, limits(share, folder), strict=True))
    taken = take_turns(list(ways.values()), job.repeats, lambda way: way(), on_sample)
    found = torch.tensor(taken_flat(taken), dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    slowest = iter(found.tolist())
    return [
        [way, [[next(slowest) for _ in one] for one in results]]
        for way, results in zip(ways, taken, strict=True)
    ]


def taken_flat(taken: list[list[list[float]]]) -> list[float]:
    """Return all measurements in one list."""
    return [ms for results in taken for one in results for ms in one]


def save_twice(
    start: Callable[[State], Saver], state: State, folder: Path, nbytes: int
) -> list[float]:
    """Save twice with a new saver; return this rank's stall and time to the disk of each save."""
    saver = start(state)
    times: list[float] = []
    try:
        for k in range(2):
            target = folder / f"saved-{k}"
            dist.barrier()
            begin = time.perf_counter()
            saver.save(target)
            times.append(1e3 * (time.perf_counter() - begin))
            saver.finish()
            times.append(1e3 * (time.perf_counter() - begin))
            dist.barrier()
            if dist.get_rank() == 0:
                require_written(target, nbytes)
                for path in folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            dist.barrier()
    finally:
        saver.close()
    return times


def require_written(folder: Path, nbytes: int) -> None:
    """Refuse to time what did not save everything."""
    found = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if found < nbytes:
        raise RuntimeError(f"{found} bytes were saved, expected {nbytes}")


def limits(nbytes: int, folder: Path) -> list[Callable[[], list[float]]]:
    """Return what a save can't beat: all ranks copy their bytes at once, and write them at once."""
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    source, memory = torch.ones(nbytes, dtype=torch.uint8), mmap.mmap(-1, nbytes)
    target = torch.frombuffer(memory, dtype=torch.uint8)
    path = folder / f"direct-{dist.get_rank()}"

    def together(work: Callable[[], float]) -> list[float]:
        dist.barrier()
        return [work()]

    return [
        partial(together, partial(timed, lambda: target.copy_(source))),
        partial(together, partial(write_directly, path, memory)),
    ]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
