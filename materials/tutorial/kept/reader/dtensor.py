"""A DTensor in a pickle: what this rank had of it, and how the whole was placed.

torch writes a wrapper subclass with two attributes: ``_local_tensor``, and ``_spec``, which has the
mesh and a placement for each of its dimensions (``torch/distributed/tensor/_dtensor_spec.py``).
"""

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import torch

from npydata.errors import CheckpointError
from tutorial.kept.reader.plain_calls import brief, count, counts, flag
from tutorial.kept.reader.stored import Opaque, StoredTensor, states_of
from tutorial.kept.reader.strides import MAX_DIMS

PACKAGES = ("torch.distributed.tensor", "torch.distributed._tensor")
DTENSORS = {
    f"{package}{module}.DTensor" for package in PACKAGES for module in ("", ".api", "._api")
}
PLACEMENTS = {
    f"{package}.placement_types.{name}": fields
    for package in PACKAGES
    for name, fields in {
        "Shard": ("dim",), "Replicate": (), "Partial": ("reduce_op",), "_Partial": ("reduce_op",),
        "_StridedShard": ("dim", "split_factor"),
    }.items()
}  # fmt: skip
"""The attributes of each placement."""
DTENSOR_PARTS = {
    *PLACEMENTS,
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._mesh_layout._MeshLayout",
    "torch.distributed._mesh_layout._FlatLayout",
    *(f"{package}.{module}.{name}" for package in PACKAGES
      for module in ("_dtensor_spec", "placement_types")
      for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
}  # fmt: skip
MESH = ("device_type", "mesh_dim_names", "mesh", "rank_map")
"""Attributes of a mesh, by name or with an underscore before it: what kind of devices, what its
dimensions are called, and which rank is where."""


def dtensor(args: Any, state: Any) -> StoredTensor | None:
    """Return the description of a DTensor, or ``None`` if it is not as torch writes one.

    It has the dtype, shape and strides of the whole; its parts are ``local_tensor``,
    ``placements`` and ``device_mesh``.
    """
    held = attributes(state)
    local, spec = held.get("_local_tensor"), held.get("_spec")
    if not isinstance(local, StoredTensor) or not isinstance(spec, Opaque) or len(args) != 8:
        return None
    _, dtype, size, stride, _, _, _, requires_grad = args
    if not isinstance(dtype, torch.dtype) or dtype != local.dtype:
        raise CheckpointError(f"a DTensor of dtype {brief(dtype)}, its shard has {local.dtype}")
    said = attributes(spec.state)
    placements = said.get("placements")
    if not isinstance(placements, tuple) or len(placements) > MAX_DIMS:
        return None
    parts = {
        "local_tensor": local,
        "placements": [placement(one) for one in placements],
        "device_mesh": mesh(said.get("mesh")),
    }
    return StoredTensor(
        None, dtype, counts(size, "size"), counts(stride, "stride"), 0, kind="dtensor",
        requires_grad=flag(requires_grad, "requires_grad"), parts=parts,
    )  # fmt: skip


def attributes(state: Any) -> Mapping[Any, Any]:
    """Return the attributes that a state sets; many objects may share a long one: no copy."""
    return ChainMap(*(one for one in reversed(states_of(state)) if isinstance(one, dict)))


def placement(made: Any) -> str:
    """Return a placement as torch shows it: ``Shard(dim=0)``."""
    if not isinstance(made, Opaque) or (fields := PLACEMENTS.get(made.cause)) is None:
        raise CheckpointError(f"a DTensor placed as {brief(made)}")
    held = attributes(made.state)
    values = [held.get(name) for name in fields]
    if not all(isinstance(value, int | str) for value in values):
        raise CheckpointError(f"a DTensor placed as {brief(made)} of {brief(tuple(values))}")
    shown = ", ".join(f"{name}={brief(value)}" for name, value in zip(fields, values, strict=True))
    return f"{made.cause.rpartition('.')[2]}({shown})"


def mesh(made: Any) -> dict[str, Any]:
    """Return what is said of a mesh of devices."""
    held = attributes(made.state) if isinstance(made, Opaque) else {}
    found = {name: held.get(name, held.get(f"_{name}")) for name in MESH}
    shape = mesh_shape(held.get("_layout"))
    return {"shape": shape} | {name: one for name, one in found.items() if one is not None}


def mesh_shape(layout: Any) -> list[int] | None:
    """Return the sizes of a mesh, of which torch writes strides as well since 2.10."""
    axes = attributes(layout.state).get("axes") if isinstance(layout, Opaque) else None
    if not isinstance(axes, tuple) or len(axes) > MAX_DIMS:
        return None
    shapes = [attributes(one.state).get("shape") for one in axes if isinstance(one, Opaque)]
    sizes = [size for shape in shapes if isinstance(shape, tuple) for size in shape[:MAX_DIMS]]
    return [count(size, "size of a mesh") for size in sizes]
