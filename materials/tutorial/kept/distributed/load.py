"""Load a checkpoint into a model and an optimizer, however either of them is spread.

Each rank reads the slices that it needs, and no others, from whichever files hold them. Used in
``notebooks/09_scale_out``.
"""

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from npydata.errors import CheckpointError
from npydata.system.progress import NoBar
from tutorial.kept.checkpointer.file_layout import is_dtensor
from tutorial.kept.checkpointer.load import (
    check,
    hold_checkpoint,
    open_part,
    read_metadata,
    require_unchanged,
    training_state_of,
)
from tutorial.kept.checkpointer.manifest import (
    MAX_STATE_BYTES,
    Manifest,
    check_file,
    rng_file,
)
from tutorial.kept.checkpointer.runs import continue_run
from tutorial.kept.checkpointer.training_state import TrainingState
from tutorial.kept.distributed.coordinator import coordinate
from tutorial.kept.distributed.group import Group, ShardingConfig
from tutorial.kept.reader.checkpoint import LazyCheckpoint
from tutorial.kept.reader.files import naming_errors
from tutorial.kept.reader.held_folder import HeldFolder, saying_replaced
from tutorial.kept.reader.targets import require_kept
from tutorial.kept.reader.typed_json import Named, decode, with_named

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")
"""What compiling and wrapping put into the names of a model's parameters."""


def load_distributed(
    dir: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    sharding: ShardingConfig | None = None,
) -> TrainingState:
    """Load a checkpoint folder into a model and its optimizer, on any number of ranks.

    Every rank calls it. The folder may be from ``save_distributed`` on another number of ranks, or
    from ``save``. Tensors are filled in place, each rank's own part; names may differ in what DDP,
    FSDP and ``torch.compile`` put before them. The optimizer's state may have been saved as
    ``optimizer.state_dict()`` or as torch's ``get_optimizer_state_dict(model, optimizer)``.

    Returns:
        The training state, with this rank's random generators in ``rng`` if as many ranks saved as
        load now; else ``rng`` is ``None``, with a warning.

    Raises:
        CheckpointError: The folder is no complete checkpoint, it does not fit the model or the
            optimizer (then nothing was changed), or the ranks don't load the same one.
    """
    group = Group.of(sharding or ShardingConfig())
    root = Path(os.path.abspath(dir)).parent  # noqa: PTH100
    coordinator = coordinate(group, f"loads from {root}")
    with ExitStack() as opened:
        with coordinator.abort_on_error("plan"):
            folder = hold_checkpoint(dir)
        with coordinator.abort_on_error("plan"), reading(folder):
            manifest = check(folder, content=False)
            metadata = read_metadata(folder, manifest)
            training = training_state_of(folder.path, metadata)
            tensors = opened.enter_context(open_part(folder, manifest, "model"))
            targets, extra = plan_model(model, decode(metadata["model"]), tensors)
            moments = None if optimizer is None else plan_optimizer(metadata, model, optimizer)
        coordinator.require_same(
            "checkpoint", f"{folder.path.name} of step {manifest.step}, commit {manifest.sequence}"
        )
        with reading(folder):
            if optimizer is not None:
                load_optimizer(folder, manifest, moments, optimizer)
            if extra:
                model.load_state_dict(extra, strict=False)
            read_into(targets, tensors)
            require_unchanged(folder, manifest)
    continue_run(folder.path, manifest.run)
    return with_rng(training, folder, manifest, metadata.get("world_size", 1), group)


@contextmanager
def reading(folder: HeldFolder) -> Iterator[None]:
    """Put the folder before an error's message, and say if it was taken away."""
    with saying_replaced(folder), naming_errors(str(folder.path)):
        yield


def plan_model(
    model: torch.nn.Module, saved: Any, tensors: LazyCheckpoint
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the model's tensors by the names that the checkpoint has for them.

    With them, by the model's own names, what is saved beside tensors, as extra state.
    """
    if not isinstance(saved, dict):
        raise CheckpointError(f"its model state is a {type(saved).__name__}, expected a dict")
    wanted = model.state_dict()
    require_kept(model, wanted)
    here = {plain_name(name): name for name in wanted}
    there = {plain_name(str(name)): name for name in saved}
    validate_names("the model", set(here), set(there))
    values = {here[plain]: saved[there[plain]] for plain in here}
    targets = {
        value.name: wanted[name] for name, value in values.items() if isinstance(value, Named)
    }
    validate_shapes(targets, tensors)
    extra = {name: value for name, value in values.items() if not isinstance(value, Named)}
    return targets, extra


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "") if wrapper[0] == "_" else name.removeprefix(wrapper)
    return name


def validate_names(what: str, here: set[str], there: set[str]) -> None:
    """Refuse names that only one side has."""
    for names, text in ((here - there, "lacks"), (there - here, "has beyond")):
        if names:
            some = ", ".join(repr(name) for name in sorted(names)[:5])
            raise CheckpointError(f"{text} {what}: {some}{', ...' * (len(names) > 5)}")


def validate_shapes(targets: Mapping[str, torch.Tensor], tensors: LazyCheckpoint) -> None:
    """Refuse a tensor of another shape."""
    for name, target in targets.items():
        if tensors.info(name).shape != tuple(target.shape):
            shapes = list(tensors.info(name).shape), list(target.shape)
            raise CheckpointError(f"{name}: has shape {shapes[0]}, expected {shapes[1]}")


def read_into(targets: dict[str, torch.Tensor], tensors: LazyCheckpoint) -> None:
    """Read into each tensor the part that this rank has; torch's planner says which that is."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, metadata_of(targets, tensors))
    for item in planner.create_local_plan().items:
        name = item.storage_index.fqn
        begins = zip(item.storage_offsets, item.lengths, strict=True)
        index = tuple(slice(begin, begin + length) for begin, length in begins)
        out = planner.resolve_tensor(item)
        out.copy_(tensors.read_slice(name, index))
        planner.commit_tensor(item, out)


def metadata_of(targets: dict[str, torch.Tensor], tensors: LazyCheckpoint) -> "Metadata":
    """Return the tensors for torch's planner: each in one chunk, as our reader shows it."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, Any] = {}
    for name in targets:
        info = tensors.info(name)
        size = torch.Size(info.shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        described[name] = TensorStorageMetadata(TensorProperties(dtype=info.dtype), size, [chunk])
    return Metadata(described)


def plan_optimizer(
    metadata: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Any:
    """Return an optimizer's saved state by the numbers of its parameters.

    Raises:
        CheckpointError: There is none, or it is not one for this optimizer.
    """
    if "optimizer" not in metadata:
        raise CheckpointError("has no optimizer state")
    try:
        return by_number(decode(metadata["optimizer"]), model, optimizer)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise CheckpointError(
            f"its optimizer state is not one of torch's: {error!r:.200}"
        ) from None


def load_optimizer(
    folder: HeldFolder, manifest: Manifest, numbered: Any, optimizer: torch.optim.Optimizer
) -> None:
    """Read an optimizer's state, each tensor spread as the parameter it belongs to, and set it."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    owners = {
        value.name: parameters[number]
        for number, state in numbered["state"].items()
        for value in state.values() if isinstance(value, Named)
    }  # fmt: skip
    with open_part(folder, manifest, "optimizer") as tensors:
        targets = {name: empty_for(tensors, name, owners.get(name)) for name in tensors}
        read_into(targets, tensors)
    try:
        optimizer.load_state_dict(with_named(numbered, targets.__getitem__))
    except ValueError as error:
        raise CheckpointError(f"its optimizer state does not fit: {error}") from None


def empty_for(tensors: LazyCheckpoint, name: str, owner: torch.Tensor | None) -> torch.Tensor:
    """Return memory for a tensor, spread as the parameter that it belongs to."""
    info = tensors.info(name)
    if is_dtensor(owner) and owner is not None and tuple(owner.shape) == info.shape:
        return torch.empty_like(owner, dtype=info.dtype, requires_grad=False)
    return torch.empty(info.shape, dtype=info.dtype, device="cpu")


def by_number(saved: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return an optimizer's state by the numbers of its parameters, as its own ``state_dict``.

    Raises:
        CheckpointError: Its groups are not those of this optimizer.
    """
    if all(isinstance(key, int) for group in saved["param_groups"] for key in group["params"]):
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        mine_too = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != mine_too or not set(saved["state"]) <= set(range(sum(sizes))):
            raise CheckpointError(
                f"its optimizer has groups of {sizes} parameters, expected {mine_too}"
            )
        return saved
    names = {id(one): plain_name(name) for name, one in model.named_parameters()}
    numbers: dict[str, int] = {}
    groups = []
    for group in optimizer.param_groups:
        mine = [names.get(id(one), "a parameter that the model has not") for one in group["params"]]
        found = [
            one for one in saved["param_groups"] if set(map(plain_name, one["params"])) == set(mine)
        ]
        if len(found) != 1:
            raise CheckpointError(
                f"no group of its optimizer has just these parameters: {mine[:5]}"
            )
        numbers |= {name: len(numbers) + k for k, name in enumerate(mine)}
        groups.append({**found[0], "params": [numbers[name] for name in mine]})
    state = {numbers[plain_name(name)]: one for name, one in saved["state"].items()}
    return {"state": state, "param_groups": groups}


def with_rng(
    training: TrainingState, folder: HeldFolder, manifest: Manifest, ranks: int, group: Group
) -> TrainingState:
    """Return the training state with this rank's random generators, if as many ranks saved."""
    name = rng_file(group.rank)
    saved = training.rng is not None or any(one.startswith("rng/") for one in manifest.files)
    if ranks != group.world_size:
        if saved:
            warnings.warn(
                f"{folder.path}: {ranks} ranks saved and {group.world_size} load: random "
                "generators are not restored",
                RuntimeWarning,
                stacklevel=3,
            )
        return replace(training, rng=None)
    if name not in manifest.files:
        return training
    with reading(folder):
        check_file(folder, manifest, name, NoBar())
        content = folder.read(name, MAX_STATE_BYTES)
    try:
        return replace(training, rng=decode(json.loads(content)))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{folder.path / name}: is not a state of generators: {error}"
        ) from None
