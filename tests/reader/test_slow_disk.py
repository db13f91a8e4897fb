"""A slow and jittery disk: several reads in flight hide each other's latency, and change no byte.

The disk is simulated, with a clock of its own, so that no machine is too fast or too busy for it.
"""

import random
import threading

import pytest
import torch
from safetensors.torch import save_file

from npydata import open_checkpoint
from npydata.reader import checksums, parallel_read
from npydata.reader import in_flight as flights
from npydata.reader.record import verify_record, write_record

MS = {"network": [20.0], "jittery": [*[2.0] * 19, 300.0], "spread": [*range(1, 40)]}
"""What a request takes, in the disk's own time: one of these, drawn anew each time."""
PATIENCE_S = 6


class SlowDisk:
    """Serves reads in the order in which their latencies end; the clock moves only then.

    A read that is asked for begins at once, however many others are under way. None ends before
    as many are waiting as the loader keeps in flight, or are left.
    """

    def __init__(self, latencies, in_flight, requests=None):
        self.draw, self.latencies = random.Random(5), latencies
        self.in_flight, self.requests = in_flight, requests
        self.now, self.served, self.busy = 0.0, 0, []
        self.changed = threading.Condition()
        self.real = parallel_read.read_direct

    def read(self, file, memory, begin, end):
        """Take the place of ``read_direct``."""
        with self.changed:
            ends = self.now + self.draw.choice(self.latencies)
            self.busy.append(ends)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.may_end(ends), PATIENCE_S), (
                f"{len(self.busy)} reads in flight, expected {self.in_flight}"
            )
            self.now = ends
            self.served += 1
            self.busy.remove(ends)
        done = self.real(file, memory, begin, end)
        with self.changed:
            self.changed.notify_all()
        return done

    def may_end(self, ends):
        left = self.in_flight if self.requests is None else self.requests - self.served
        return ends == min(self.busy) and len(self.busy) >= min(self.in_flight, left)


@pytest.fixture
def path(tmp_path):
    state = {"w": torch.randn(400, 2048), "b": torch.randn(7),
             **{f"n.{k}": torch.randn(k, 99) for k in range(40)}}  # fmt: skip
    save_file(state, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def loaded(path, **options):
    with open_checkpoint(path) as checkpoint:
        return checkpoint.load(**options)


WORK = {
    "load": loaded,
    "load into": lambda path: loaded(path, into={
        name: torch.zeros_like(one) for name, one in dict(open_checkpoint(path)).items()}),
    "load, verified": lambda path: loaded(path, verify=True),
    "verify": lambda path: verify_record(path).nbytes,
}  # fmt: skip


@pytest.mark.parametrize("disk", MS)
@pytest.mark.parametrize("work", WORK)
def test_reads_in_flight_hide_each_others_latency_and_change_no_byte(path, monkeypatch, work, disk):
    wanted = dict(open_checkpoint(path))
    for module in (parallel_read, checksums):
        monkeypatch.setattr(module, "REQUEST_BYTES", 1 << 16)
    monkeypatch.setattr(checksums, "PIECE_BYTES", 1 << 16)
    write_record(path)
    for question in ("is_copied", "is_in_memory"):
        monkeypatch.setattr(parallel_read, question, lambda *_: False)
    in_flight, requests, took = flights.IN_FLIGHT, None, {}
    for count in (1, in_flight):
        slow = SlowDisk(MS[disk], count, requests)
        monkeypatch.setattr(flights, "IN_FLIGHT", count)
        monkeypatch.setattr(parallel_read, "read_direct", slow.read)
        found = WORK[work](path)
        monkeypatch.setattr(parallel_read, "read_direct", slow.real)
        requests, took[count] = slow.served, slow.now
        if work != "verify":
            assert all(torch.equal(found[name], one) for name, one in wanted.items())
    assert requests > 8 * in_flight
    assert took[in_flight] < took[1] / (0.6 * in_flight)
