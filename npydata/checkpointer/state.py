"""What decides the next step besides weights and optimizer: counters, generators, the loader."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from npydata.errors import CheckpointError
from npydata.reader.formats.training import MAX_STATE_BYTES, encode
from npydata.system.accelerator import accelerator_with_streams


@dataclass(slots=True)
class TrainingState:
    """Where training stands; everything in it is stored as typed JSON.

    Args:
        step: Completed optimizer steps.
        epoch: Completed epochs.
        tokens: Tokens trained on so far.
        loss: The loss of the last step; None if not known.
        lr: The learning rate of the last step; None if not known.
        rng: What :func:`capture_rng` returned.
        loader: What the loader's ``state_dict()`` returned.
        extra: Anything else that JSON can hold, such as ``{"schedule": scheduler.state_dict()}``:
            numbers, text, bytes, tuples, sets, lists, dicts. Each comes back as it was; numpy's
            scalars become Python's. A subclass comes back as its base: a member of an ``IntEnum``
            or ``StrEnum`` as its int or str, a ``defaultdict`` as a dict.
    """

    step: int = 0
    epoch: int = 0
    tokens: int = 0
    loss: float | None = None
    lr: float | None = None
    # ``Any`` for None, as in ``Loaded`` of load.py.
    rng: dict[str, Any] | Any = None
    loader: dict[str, Any] | Any = None
    extra: dict[str, Any] = field(default_factory=dict)


def capture_rng() -> dict[str, Any]:
    """Return the state of all random generators: Python's, numpy's, torch's, each accelerator's."""
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tobytes(), *rest),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if (found := accelerator_with_streams()) is not None:
        module = torch.get_device_module(found)
        devices = range(torch.accelerator.device_count())
        state[found.type] = [module.get_rng_state(one).numpy().tobytes() for one in devices]
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set all random generators to what :func:`capture_rng` returned.

    Accelerators that were not captured are left alone; states of absent ones are ignored.

    Raises:
        CheckpointError: It is not such a state; no generator is changed.
    """
    before = capture_rng()
    try:
        set_generators(state)
    except Exception as error:
        set_generators(before)
        raise CheckpointError(f"is not what capture_rng() returned: {error!r}") from None


def set_generators(state: Mapping[str, Any]) -> None:
    """Set one generator after the other."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
    torch.set_rng_state(as_byte_tensor(state["torch"]))
    if (found := accelerator_with_streams()) is not None:
        module = torch.get_device_module(found)
        devices = range(torch.accelerator.device_count())
        for device, one in zip(devices, state.get(found.type, []), strict=False):
            module.set_rng_state(as_byte_tensor(one), device)


def as_byte_tensor(content: bytes) -> torch.Tensor:
    """Return bytes as the tensor that torch's generators take."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def encode_training(training: Any) -> Any:
    """Return the training state as typed JSON.

    Raises:
        CheckpointError: Something in it can't be stored; the message names its place.
    """
    if not isinstance(training, TrainingState):
        kind = type(training).__name__
        raise CheckpointError(f"training_state of type {kind}, expected a TrainingState")
    step = training.step
    if type(step) is not int or not 0 <= step < 1 << 63:
        raise CheckpointError(f"training_state: ['step']: {step!r:.40} is not a count")
    try:
        return encode({one.name: getattr(training, one.name) for one in fields(training)})
    except CheckpointError as error:
        raise CheckpointError(f"training_state: {error}") from None


def serialized(values: Any) -> bytes:
    """Return values as the JSON that is written."""
    try:
        content = json.dumps(values).encode()  # with an indent it takes three times as long
    except ValueError as error:  # an integer of thousands of digits
        raise CheckpointError(f"a value that JSON can't hold: {error}") from None
    if len(content) > MAX_STATE_BYTES:
        raise CheckpointError(
            f"values beside the tensors make {len(content):,} bytes, at most {MAX_STATE_BYTES:,}"
        )
    return content
