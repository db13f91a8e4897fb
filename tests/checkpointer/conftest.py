"""Gates that hold a save at a moment at which no public call comes."""

import threading

import pytest
from faults.saving import PATIENCE

from npydata.checkpointer import commit, snapshot


class Gate:
    """Holds whoever passes until it is opened."""

    def __init__(self):
        self._reached, self._opened = threading.Event(), threading.Event()
        self.open = self._opened.set

    def wait(self):
        """Wait until somebody stands before it."""
        assert self._reached.wait(PATIENCE)

    def pass_through(self):
        self._reached.set()
        assert self._opened.wait(PATIENCE)


@pytest.fixture
def gate(monkeypatch):
    """Holds every save at its rename."""
    held, whole = Gate(), commit.put_in_place

    def put_in_place(*args):
        held.pass_through()
        whole(*args)

    monkeypatch.setattr(commit, "put_in_place", put_in_place)
    yield held
    held.open()


@pytest.fixture
def copy_gate(monkeypatch):
    """Holds the copies of every save; ``error`` is what they raise then."""
    held, whole = Gate(), snapshot.jobs_of
    held.error = None

    def run(job):
        held.pass_through()
        if held.error is not None:
            raise held.error
        job()

    def jobs_of(copies):
        for end, job in whole(copies):
            yield end, lambda job=job: run(job)

    monkeypatch.setattr(snapshot, "jobs_of", jobs_of)
    yield held
    held.open()
