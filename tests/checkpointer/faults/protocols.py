"""What promises to survive a power cut: how it is written, and what must hold afterwards."""

from dataclasses import dataclass

import numpy as np
from ranks import on_ranks, states

from faults.film import Camera
from faults.saving import holds, resume, save_step, saved, saves_again
from npydata import (
    AsyncCheckpointer,
    latest_checkpoint,
    open_tokens,
    write_tokens,
)

ELEMENTS = 1500
"""Of the saved model: some 12 sectors on two pages."""


class Filmed:
    """A protocol whose saves are filmed in this process."""

    def film(self, folder, film, unsynced=None):
        """Save, and film it."""
        with Camera(folder, film, unsynced).running() as camera:
            self.act(folder, camera.confirm)


@dataclass(frozen=True)
class Checkpoints(Filmed):
    """Saves into a root, one after the other."""

    before: tuple[str, ...] = ()
    """Folders that hold the checkpoints 1, 2, ... when the saves begin."""
    names: tuple[str, ...] = ("a",)
    """Folders of the saves, in their order."""
    keep_last: int | None = None
    root: str = "run"
    save = staticmethod(save_step)

    def prepare(self, folder):
        for step, name in enumerate(self.before, 1):
            saved(folder / self.root / name, step)

    def act(self, folder, confirm):
        """Save, and call ``confirm(step)`` when a step must be on the disk."""
        resume(folder / self.root)
        with AsyncCheckpointer(keep_last=self.keep_last) as keeper:
            for step, name in enumerate(self.names, len(self.before) + 1):
                self.save(keeper, folder / self.root / name, step, ELEMENTS)
                keeper.wait()
                confirm(step)

    def check(self, folder, confirmed):
        """Raise if something is lost of what was confirmed, or of what was there before."""
        root, confirmed = folder / self.root, max(confirmed, len(self.before))
        if latest_checkpoint(root) is None:
            assert confirmed == 0, "no checkpoint is left"
        else:
            holds(root, confirmed)

    def go_on(self, folder):
        """Check that the next save works, and clears away what the power cut left."""
        resume(folder / self.root)
        root = folder / self.root
        saves_again(root, "next", 100, self.keep_last or 100, of_the_living=True)


class Distributed(Checkpoints):
    """The same by two ranks, each of which films what it does."""

    def film(self, folder, film, unsynced=None):
        on_ranks(2, film_rank, self, folder, film, unsynced)

    save = staticmethod(states.save_step)


def film_rank(protocol, folder, film, unsynced):
    Filmed.film(protocol, folder, film, unsynced)


class TokenFile(Filmed):
    """A file is written, then replaced; a reader finds the old or the new one."""

    def prepare(self, folder):
        write_ids(folder / "a.npy", 1)

    def act(self, folder, confirm):
        write_ids(folder / "a.npy", 2)
        confirm(2)
        write_ids(folder / "b.npy", 3)
        confirm(3)

    def check(self, folder, confirmed):
        assert read_ids(folder / "a.npy") in ([2] if confirmed >= 2 else [1, 2])
        other = folder / "b.npy"
        assert read_ids(other) == 3 if other.exists() else confirmed < 3

    def go_on(self, folder):
        write_ids(folder / "a.npy", 4)
        assert read_ids(folder / "a.npy") == 4


def write_ids(path, step):
    write_tokens(path, (np.full(700, step, np.uint16) for _ in range(3)))


def read_ids(path):
    tokens = open_tokens(path)
    assert tokens.num_tokens == 2100
    (step,) = set(tokens.read(0, 2100).tolist())
    return step


PROTOCOLS = {
    "the first save into a root that is not there": Checkpoints(root="deep/run"),
    "a folder is replaced": Checkpoints(("a", "b"), ("a",)),
    "new folders, old ones go": Checkpoints(("a", "b"), ("c", "d"), keep_last=1),
    "latest moves to and fro": Checkpoints(("a",), ("b", "a", "b"), keep_last=2),
    "two ranks, the first save": Distributed(),
    "two ranks, an old folder goes": Distributed(("a",), ("b",), keep_last=1),
    "two ranks, a folder is replaced": Distributed(("a", "b"), ("b",)),
    "a token file": TokenFile(),
}
