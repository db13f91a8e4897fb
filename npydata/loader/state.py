"""Where a loader stands in its data: the cursor, and what a saved state must hold."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from npydata.errors import LoaderError

STATE_VERSION = 1


@dataclass(slots=True)
class Cursor:
    """Where an epoch stands: the next sample that will be delivered."""

    epoch: int = 0
    samples: int = 0
    """Samples of the epoch that all ranks together were given."""
    begun: bool = False
    """Whether an iterator gave a batch of this epoch; the next one then begins another."""
    after_failure: "Cursor | None" = None
    """Where the next iterator begins because a batch could not be made: behind that batch."""

    def for_next_iterator(self) -> "Cursor":
        """Return where the next iterator begins: here, unless the last one gave a batch."""
        if self.after_failure is not None:
            return self.after_failure
        return Cursor(self.epoch + 1) if self.begun else Cursor(self.epoch, self.samples)

    def advance(self, samples: int) -> None:
        """Stand behind a batch that was delivered."""
        self.samples, self.begun = samples, True

    def fail(self, behind: int, *, was_last: bool) -> None:
        """Stand before a batch that could not be made; the next iterator begins behind it.

        It might fail again for ever. But a state has it to come: a run that resumes may be lucky.
        """
        self.after_failure = Cursor(self.epoch + 1) if was_last else Cursor(self.epoch, behind)

    def move_to_next_epoch(self) -> None:
        """Stand before the first batch of the next epoch."""
        self.epoch, self.samples, self.begun = self.epoch + 1, 0, False


def validate_state(
    state: dict[str, Any],
    fingerprint_at: Callable[[Cursor], str],
    num_samples: int | None,
    differences: Callable[[Any], str] = lambda about: "",
) -> None:
    """Raise unless a state is a loader's, and of this dataset; ``None`` where it has no length.

    ``differences`` says how this dataset differs from what the state says of its own.
    """
    wanted = {"version", "seed", "epoch", "samples", "fingerprint"}
    if not isinstance(state, dict) or not wanted <= state.keys():
        raise LoaderError(f"not a loader's state: expected the keys {', '.join(sorted(wanted))}")
    if state["version"] != STATE_VERSION:
        raise LoaderError(f"state of version {state['version']}, expected {STATE_VERSION}")
    if type(state["seed"]) is not int:
        raise LoaderError(f"state has seed={state['seed']!r}, expected an integer")
    if type(state["epoch"]) is not int or state["epoch"] < 0:
        raise LoaderError(f"state has epoch={state['epoch']!r}, expected an integer of 0 or more")
    samples = state["samples"] if type(state["samples"]) is int else None
    fingerprint = fingerprint_at(Cursor(state["epoch"], samples or 0))
    if state["fingerprint"] != fingerprint:
        raise LoaderError(
            f"the state belongs to other data: fingerprint {state['fingerprint']}, "
            f"expected {fingerprint}{differences(state.get('data'))}"
        )
    most = math.inf if num_samples is None else num_samples
    if samples is None or not 0 <= samples <= most:
        raise LoaderError(
            f"state has samples={state['samples']!r}, expected an integer "
            + ("of 0 or more" if num_samples is None else
               f"from 0 to {num_samples}, the length of the dataset")
        )  # fmt: skip


def validate_order(state: dict[str, Any], kind: str, shuffle: bool) -> None:
    """Raise unless a state's order is of a kind: ``"index"``, where a seed decides, or a given one.

    A state in which nothing was given yet fits every loader of the dataset. States of versions
    before don't say whether the order was shuffled.
    """
    order = state.get("order")
    if order is None and state["samples"] == 0:
        return
    if order is None and kind == "index":
        if (was := state.get("shuffle", shuffle)) != shuffle:
            raise LoaderError(
                f"the state is of a loader with shuffle={was}, this one has shuffle={shuffle}: the "
                "rest of the epoch would repeat some samples and lack others"
            )
        return
    found = order.get("of") if isinstance(order, dict) else "index"
    if found != kind:
        names = {"index": "no sampler=", "sampler": "sampler=", "batch_sampler": "batch_sampler=",
                 "stream": "an iterable-style dataset"}  # fmt: skip
        raise LoaderError(f"the state is of a loader with {names.get(str(found), found)}, this one "
                          f"has {names[kind]}")  # fmt: skip
    assert isinstance(order, dict)
    wanted = {"of", "resumes_by", "given", "ended"}
    if not wanted <= order.keys() or type(order["given"]) is not int or order["given"] < 0:
        raise LoaderError(f"state has order={order!r}, expected {', '.join(sorted(wanted))}")
