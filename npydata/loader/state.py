"""Where a loader stands in its data, and what a saved state must hold."""

from collections.abc import Callable
from typing import Any, NamedTuple

from npydata.errors import LoaderError

STATE_VERSION = 2


class Position(NamedTuple):
    """A position between two batches."""

    epoch: int = 0
    samples: int = 0
    """Samples of the epoch that all ranks together have received."""
    order: dict[str, Any] | None = None
    """What restores a sampler or a stream to this position; ``None`` where a seed decides the
    order, and where the source simply begins again."""


class Cursor:
    """Where an iterator began, and where it stands now: after the last batch it delivered."""

    def __init__(self, start: Position) -> None:
        self.start = self.at = start
        self.delivered = 0
        self.source_in_position = False
        """Whether a sampler or stream is already at ``at``, because its epoch has ended."""

    def advance(self, position: Position) -> bool:
        """Move past a delivered batch; return whether that ended the epoch."""
        is_over = position.epoch != self.at.epoch
        self.at, self.delivered = position, self.delivered + 1
        if is_over:
            self.start, self.delivered, self.source_in_position = position, 0, True
        return is_over

    def next_start(self) -> Position:
        """Return where the next iterator begins.

        That is the next epoch, once a second batch was delivered. An iterator that gave no batch,
        or only a first one to look at, used up no epoch.
        """
        return self.start if self.delivered < 2 else Position(self.at.epoch + 1)


def require_state(
    state: Any, now: dict[str, Any], fingerprint: Callable[[int, int], str], num_samples: int | None
) -> None:
    """Raise unless a state is from a loader like ours.

    Args:
        state: The loaded state.
        now: Our own state, to compare with.
        fingerprint: Takes an epoch and its samples so far; returns that of our data up to there.
        num_samples: Samples in the dataset; ``None`` if unknown.
    """
    wanted = {"version", "seed", "epoch", "samples", "fingerprint", "shuffle", "order"}
    if not isinstance(state, dict) or not wanted <= state.keys():
        raise LoaderError(
            f"{state!r:.40} is not a loader's state: expected the keys {', '.join(sorted(wanted))}"
        )
    if state["version"] != STATE_VERSION:
        raise LoaderError(f"state of version {state['version']}, expected {STATE_VERSION}")
    for name in ("seed", "epoch", "samples"):
        value = state[name]
        if type(value) is not int or (name != "seed" and value < 0):
            raise LoaderError(f"state has {name}={value!r:.60}, expected an integer of 0 or more")
    expected = fingerprint(state["epoch"], state["samples"])
    if state["fingerprint"] != expected:
        raise LoaderError(
            f"the state belongs to other data, or to files that changed: {state.get('data')}, "
            f"fingerprint {state['fingerprint']}; expected {now['data']}, fingerprint {expected}"
        )
    if num_samples is not None and state["samples"] > num_samples:
        raise LoaderError(
            f"state has samples={state['samples']}, expected at most {num_samples}, "
            "the length of the dataset"
        )
    if state["epoch"] == state["samples"] == 0 and state["order"] is None:
        return  # nothing was delivered yet: it fits every loader of the dataset
    if state["shuffle"] != now["shuffle"]:
        raise LoaderError(
            f"the state is of a loader with shuffle={state['shuffle']}, this one has "
            f"shuffle={now['shuffle']}: the rest of the epoch would repeat some samples and lack "
            "others"
        )
