"""Load a checkpoint into a model and an optimizer, however they are sharded.

Each rank first plans, which changes nothing: it matches what it has with what was saved. Once all
ranks have succeeded, each reads the slices that it needs, and no others, from whichever files hold
them.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
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
    encode,
    read_small,
)
from npydata.system.progress import warn_caller

EXTRA_STATE = "_extra_state"
"""The end of the name of what a module's ``get_extra_state()`` returns, often anew each time."""
WRAPPERS = re.compile(r"_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")
"""What compiling and wrapping add to the names of a model's parameters, besides DDP's "module."."""


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
    ``optimizer.state_dict()`` or as torch's ``get_optimizer_state_dict(model, optimizer)``; of
    several optimizers as ``get_optimizer_state_dict(model, (a, b))``, loaded once for each. In the
    first, parameters have no names: as in torch, they are matched by their place in the groups, and
    their shapes are not compared.

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
    extra = with_tensors(extra, parts["model"], targets)
    read_into(targets, parts["model"])
    if extra:
        model.load_state_dict(extra, strict=False)
    continue_run(folder, planned["manifest"])
    return planned["training"]  # type: ignore[no-any-return]


def plan_model(
    model: torch.nn.Module, saved: Any, tensors: LazyCheckpoint
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the model's tensors to fill, keyed by the checkpoint's names for them.

    Also return the saved values that are not to be filled in place (extra state), keyed by the
    model's own names.

    Raises:
        CheckpointError: The model has other names or shapes, or its ``state_dict()`` returns
            copies.
    """
    if not isinstance(saved, dict):
        raise CheckpointError(f"its model state is of type {type(saved).__name__}, expected a dict")
    wanted, again = model.state_dict(), model.state_dict()
    in_place = {
        name: tensor
        for name, tensor in wanted.items()
        if isinstance(tensor, torch.Tensor) and not name.endswith(EXTRA_STATE)
    }
    for name, tensor in in_place.items():
        if local(tensor).data_ptr() != local(again[name]).data_ptr():
            raise CheckpointError(
                f"{name}: the state_dict() of a {type(model).__name__} returns a copy of it, which "
                "can't be filled"
            )
    here, there = ({plain: name for name, plain in plain_names(s).items()} for s in (wanted, saved))
    for names, text in (
        (here.keys() - there, "has no {}, which the model has"),
        (there.keys() - here, "has {}, which the model lacks"),
    ):
        if names:
            some = ", ".join(repr(name) for name in sorted(names)[:5])
            raise CheckpointError(text.format(f"{some}{', ...' * (len(names) > 5)}"))
    targets, extra = {}, {}
    for plain, name in here.items():
        key, target = there[plain], in_place.get(name)
        value = saved[key]
        if not isinstance(value, Named) or target is None:
            extra[name] = value
            continue
        # Tied tensors share a name in ``saved``, but each has its own in ``tensors``. This model's
        # may not be tied.
        stored = key if key in tensors else value.name
        targets[stored] = target
        if (shape := tuple(tensors.info(stored).shape)) != tuple(target.shape):
            raise CheckpointError(
                f"{stored}: has shape {list(shape)}, expected {list(target.shape)}"
            )
    return targets, extra


def plain_names(names: Iterable[Any]) -> dict[Any, str]:
    """Return each parameter's name without what wrappers add to it.

    DDP puts ``module.`` before every name; before some of them, it is the model's own.
    """
    plain = {name: WRAPPERS.sub("", str(name)) for name in names}
    while plain and all(one.startswith("module.") for one in plain.values()):
        plain = {name: one.removeprefix("module.") for name, one in plain.items()}
    return plain


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
    names = {id(one): name for name, one in model.named_parameters()}
    ours = [
        [names.get(id(one), "a parameter not in the model") for one in group["params"]]
        for group in optimizer.param_groups
    ]
    here = plain_names(chain(*ours))
    there = plain_names(chain(*(group["params"] for group in saved["param_groups"])))
    numbers = {here[name]: k for k, name in enumerate(chain(*ours))}
    groups = []
    for group in ours:
        mine = [here[name] for name in group]
        found = [
            one
            for one in saved["param_groups"]
            if {there[name] for name in one["params"]} == set(mine)
        ]
        if len(found) != 1:
            raise CheckpointError(f"no group of its optimizer has these parameters: {mine[:5]}")
        groups.append({**found[0], "params": [numbers[name] for name in mine]})
    state = {  # the file may have that of several optimizers
        numbers[there[name]]: one for name, one in saved["state"].items() if there[name] in numbers
    }
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
            warn_caller(
                f"{folder}: {ranks} ranks saved and {coordinator.world_size} load: random "
                "generators are not restored",
                RuntimeWarning,
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
    state = {
        number: with_tensors(one, tensors, targets, parameters[number])
        for number, one in numbered["state"].items()
    }
    others = with_tensors({**numbered, "state": {}}, tensors, targets)
    read_into(targets, tensors)
    try:
        optimizer.load_state_dict({**others, "state": state})
    except ValueError as error:
        raise CheckpointError(f"its optimizer state does not fit: {error}") from None


def with_tensors(
    value: Any, tensors: LazyCheckpoint, targets: dict[str, torch.Tensor], owner: Any = None
) -> Any:
    """Return a nested value with a tensor of ``targets`` in place of each ``Named``.

    What ``targets`` lacks is added, to be filled later; one with the shape of ``owner`` is sharded
    like it, and has its strides, as fused optimizers need.
    """

    def make(name: str) -> torch.Tensor:
        if name not in targets:
            info = tensors.info(name)
            if owner is not None and tuple(owner.shape) == tuple(info.shape):
                device = None if is_dtensor(owner) else "cpu"
                made = torch.empty_like(owner, dtype=info.dtype, device=device, requires_grad=False)
            else:
                made = torch.empty(info.shape, dtype=info.dtype, device="cpu")
            targets[name] = made
        return targets[name]

    return decode(encode(value), make)


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
