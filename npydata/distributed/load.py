"""Load a checkpoint into a model and an optimizer, however they are sharded.

Each rank first plans, which changes nothing: it matches what it has with what was saved. Once all
ranks have succeeded, each reads the slices that it needs, and no others, from whichever files hold
them.
"""

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from npydata.checkpointer.load import opened, training_state
from npydata.checkpointer.snapshot import is_dtensor, local
from npydata.checkpointer.state import TrainingState
from npydata.distributed.coordinator import Coordinator, ShardingConfig
from npydata.errors import CheckpointError
from npydata.reader.checkpoint import LazyCheckpoint
from npydata.reader.formats.training import (
    MAX_STATE_BYTES,
    Manifest,
    Named,
    checksums,
    continue_run,
    decode,
    read_small,
)

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")
"""What compiling and wrapping add to the names of a model's parameters."""


def load_distributed(
    dir: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    sharding: ShardingConfig | None = None,
) -> TrainingState:
    """Load a checkpoint folder into a model and its optimizer, on any number of ranks.

    Every rank calls it. The folder may be from ``save_distributed`` on another number of ranks, or
    from ``save``. Tensors are filled in place, each rank's own part; names may differ in the
    prefixes that DDP, FSDP and ``torch.compile`` add. The optimizer's state may have been saved as
    ``optimizer.state_dict()`` or as torch's ``get_optimizer_state_dict(model, optimizer)``.

    Returns:
        The training state, with this rank's random generators in ``rng`` if as many ranks saved as
        load now; else ``rng`` is None, with a warning.

    Raises:
        CheckpointError: The folder is not a complete checkpoint, it does not fit the model or the
            optimizer (then nothing was changed), or the ranks don't load the same one.
    """
    folder = Path(dir).absolute()
    coordinator = Coordinator(sharding)

    planned: dict[str, Any] = {}

    def plan() -> dict[str, Any]:
        manifest, values, parts = opened(folder)
        try:
            planned["model"] = plan_model(model, decode(values["model"]), parts["model"])
            if optimizer is not None:
                planned["optimizer"] = plan_optimizer(values, model, optimizer)
            training = training_state(folder, values)
            planned["training"] = with_rng(training, folder, manifest, values, coordinator)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        planned.update(manifest=manifest, parts=parts)
        return {"does": f"loads {folder.name} of commit {manifest.sequence}"}

    coordinator.agree(plan, lambda plans: [{}] * len(plans))
    parts, (targets, extra) = planned["parts"], planned["model"]
    if optimizer is not None:
        load_optimizer(parts["optimizer"], planned["optimizer"], optimizer)
    if extra:
        model.load_state_dict(extra, strict=False)
    read_into(targets, parts["model"])
    continue_run(folder, planned["manifest"])
    return planned["training"]  # type: ignore[no-any-return]


def plan_model(
    model: torch.nn.Module, saved: Any, tensors: LazyCheckpoint
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the model's tensors to fill, keyed by the checkpoint's names for them.

    Also return the saved values that are not tensors (extra state), keyed by the model's own names.

    Raises:
        CheckpointError: The model has other names or shapes, or its ``state_dict()`` returns
            copies.
    """
    if not isinstance(saved, dict):
        raise CheckpointError(f"its model state is of type {type(saved).__name__}, expected a dict")
    wanted, again = model.state_dict(), model.state_dict()
    for name, tensor in wanted.items():
        if isinstance(tensor, torch.Tensor) and (
            local(tensor).data_ptr() != local(again[name]).data_ptr()
        ):
            raise CheckpointError(
                f"{name}: the state_dict() of a {type(model).__name__} returns a copy of it, which "
                "can't be filled"
            )
    here = {plain_name(name): name for name in wanted}
    there = {plain_name(str(name)): name for name in saved}
    for names, text in (
        (here.keys() - there, "has no {}, which the model has"),
        (there.keys() - here, "has {}, which the model lacks"),
    ):
        if names:
            some = ", ".join(repr(name) for name in sorted(names)[:5])
            raise CheckpointError(text.format(f"{some}{', ...' * (len(names) > 5)}"))
    targets, extra = {}, {}
    for plain, name in here.items():
        value = saved[there[plain]]
        if not isinstance(value, Named):
            extra[name] = value
            continue
        target = targets[value.name] = wanted[name]
        if (shape := tuple(tensors.info(value.name).shape)) != tuple(target.shape):
            raise CheckpointError(
                f"{value.name}: has shape {list(shape)}, expected {list(target.shape)}"
            )
    return targets, extra


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers add to it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "") if wrapper[0] == "_" else name.removeprefix(wrapper)
    return name


def plan_optimizer(
    values: Mapping[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Any:
    """Return an optimizer's saved state, keyed by parameter number.

    Raises:
        CheckpointError: There is none, or it does not fit this optimizer.
    """
    if "optimizer" not in values:
        raise CheckpointError("has no optimizer state")
    try:
        return by_number(decode(values["optimizer"]), model, optimizer)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise CheckpointError(
            f"its optimizer state is not one of torch's: {error!r:.200}"
        ) from None


def by_number(saved: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return an optimizer's state keyed by parameter number, as in its ``state_dict()``.

    A state saved by name (``get_optimizer_state_dict``) gets this optimizer's numbers.

    Raises:
        CheckpointError: Its groups are not those of this optimizer.
    """
    if all(isinstance(key, int) for group in saved["param_groups"] for key in group["params"]):
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        expected = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != expected or not set(saved["state"]) <= set(range(sum(sizes))):
            raise CheckpointError(
                f"its optimizer has groups of {sizes} parameters, expected {expected}"
            )
        return saved
    names = {id(one): plain_name(name) for name, one in model.named_parameters()}
    numbers: dict[str, int] = {}
    groups = []
    for group in optimizer.param_groups:
        mine = [names.get(id(one), "a parameter not in the model") for one in group["params"]]
        found = [
            one for one in saved["param_groups"] if set(map(plain_name, one["params"])) == set(mine)
        ]
        if len(found) != 1:
            raise CheckpointError(f"no group of its optimizer has these parameters: {mine[:5]}")
        numbers |= {name: len(numbers) + k for k, name in enumerate(mine)}
        groups.append({**found[0], "params": [numbers[name] for name in mine]})
    state = {numbers[plain_name(name)]: one for name, one in saved["state"].items()}
    return {"state": state, "param_groups": groups}


def with_rng(
    training: TrainingState,
    folder: Path,
    manifest: Manifest,
    values: Mapping[str, Any],
    coordinator: Coordinator,
) -> TrainingState:
    """Return the training state with this rank's random generators, if as many ranks saved."""
    name, ranks = f"rng/rank_{coordinator.rank}.json", values.get("world_size", 1)
    if ranks != coordinator.world_size:
        if training.rng is not None or any(one.startswith("rng/") for one in manifest.files):
            warnings.warn(
                f"{folder}: {ranks} ranks saved and {coordinator.world_size} load: random "
                "generators are not restored",
                RuntimeWarning,
                stacklevel=6,
            )
        return replace(training, rng=None)
    if name not in manifest.files:
        return training
    content = read_small(folder / name, MAX_STATE_BYTES)
    try:
        if checksums(content) != manifest.files[name].crc32:
            raise ValueError("its checksum differs from the manifest's")
        return replace(training, rng=decode(json.loads(content)))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: is not a state of generators: {error}") from None


def load_optimizer(
    tensors: LazyCheckpoint, numbered: Any, optimizer: torch.optim.Optimizer
) -> None:
    """Read an optimizer's state into new tensors, each sharded like its parameter; load it."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    targets: dict[str, torch.Tensor] = {}

    def target_of(number: int, value: Any) -> Any:
        if not isinstance(value, Named):
            return value
        if value.name not in targets:
            info, owner = tensors.info(value.name), parameters[number]
            if is_dtensor(owner) and tuple(owner.shape) == tuple(info.shape):
                made = torch.empty_like(owner, dtype=info.dtype, requires_grad=False)
            else:
                made = torch.empty(info.shape, dtype=info.dtype, device="cpu")
            targets[value.name] = made
        return targets[value.name]

    state = {
        number: {key: target_of(number, value) for key, value in one.items()}
        for number, one in numbered["state"].items()
    }
    read_into(targets, tensors)
    try:
        optimizer.load_state_dict({**numbered, "state": state})
    except ValueError as error:
        raise CheckpointError(f"its optimizer state does not fit: {error}") from None


def read_into(targets: Mapping[str, Any], tensors: LazyCheckpoint) -> None:
    """Read into each tensor the part of it that this rank has."""
    slices: dict[str, Any] = {}
    into = {}
    for name, target in targets.items():
        slices[name], into[name] = ..., local(target).detach()
        if is_dtensor(target):
            (chunk,) = target.__create_chunk_list__()
            begins = zip(chunk.offsets, chunk.sizes, strict=True)
            slices[name] = tuple(slice(begin, begin + length) for begin, length in begins)
    tensors.load(slices, into=into)
