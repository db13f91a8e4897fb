"""What torch makes of a file, what we make of it, and whether the two show the same.

torch's own loaders are asked in a throwaway child: first ``weights_only=True``, then, for content
that it does not take, the plain loader with a ``pickle`` that knows harmless names only. A file may
be refused here, in whole or in part; it may not be shown otherwise than torch shows it.
"""

import io
import json
import math
import pickle
import struct
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint_reading import bytes_of

from npydata import CheckpointError, open_checkpoint

NODES = 20_000
"""Of a value that is larger only so much is compared."""
HARMLESS = {
    "collections": {"OrderedDict", "Counter", "defaultdict"},
    "torch": {"Size", "device", "Tensor"},
    "torch._tensor": {"_rebuild_from_type_v2", "Tensor"},
    "torch.nn.parameter": {"Parameter", "Buffer"},
    "torch.serialization": {"_get_layout"},
    "_codecs": {"encode"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "builtins": {"set", "frozenset", "bytearray", "bytes", "complex", "list", "dict", "int"},
}
REFUSED = ("refused",)


def is_harmless(module: str, name: str) -> bool:
    """Whether the plain loader may have what a name stands for: what only makes values."""
    if name in HARMLESS.get(module, ()):
        return True
    if module == "torch._utils":
        return name.startswith("_rebuild_") and "device_tensor" not in name
    known = getattr(torch, name, None) if module in ("torch", "torch.storage") else None
    return isinstance(known, torch.dtype) or (isinstance(known, type) and "Storage" in name)


class HarmlessUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        if module == "torch" and name != "Tensor" and name.endswith("Tensor"):
            return object  # tar files name the type of each tensor, and nothing is made of it
        if not is_harmless(module, name):
            raise pickle.UnpicklingError(f"not harmless: {module}.{name}")
        return super().find_class(module, name)


HARMLESS_PICKLE = types.SimpleNamespace(
    __name__="harmless_pickle",
    Unpickler=HarmlessUnpickler,
    load=lambda file, **options: HarmlessUnpickler(file, **options).load(),
    loads=lambda data, **options: HarmlessUnpickler(io.BytesIO(data), **options).load(),
)
"""Like the module ``pickle``, but only harmless names can be looked up in it."""


def torch_shows(path: Path) -> tuple[Any, str]:
    """What torch's loaders make of a file, in a form to be compared; or why none takes it."""
    why = []
    for options in ({"weights_only": True}, {"weights_only": False}):
        if not options["weights_only"]:
            options["pickle_module"] = HARMLESS_PICKLE
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return Shown().of(torch.load(path, **options)), ""
        except Exception as error:
            why.append(f"{type(error).__name__}: {error}"[:80] + str(error)[-220:])
    return REFUSED, " | ".join(why)


def safetensors_shows(path: Path) -> tuple[Any, str]:
    """What the safetensors library makes of a file."""
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        return REFUSED, f"{type(error).__name__}: {error}"[:300]
    shown = Shown()
    return shown.of(dict(sorted(tensors.items()))), ""


def we_show(path: Path) -> tuple[Any, str]:
    """What npydata makes of a file."""
    try:
        with open_checkpoint(path) as checkpoint:
            if checkpoint.format == "safetensors":
                own = set(checkpoint) - checkpoint.ties().keys()  # ties are words of ours
                tensors = {name: checkpoint.info(name) for name in sorted(own)}
                return Shown(checkpoint).of(tensors), ""
            shown = Shown(checkpoint).of(checkpoint.tree())
            why = f"names {checkpoint.unsafe_globals}" if checkpoint.unsafe_globals else ""
            return shown, why
    except CheckpointError as error:
        return REFUSED, str(error)


class Shown:
    """Turns a value into lists and texts that JSON holds, equal where the values are."""

    def __init__(self, checkpoint: Any = None) -> None:
        self.checkpoint, self.nodes, self.inside = checkpoint, 0, set()

    def of(self, value: Any) -> Any:
        self.nodes += 1
        if self.nodes > NODES:
            return ["more"]
        if isinstance(value, dict | list | tuple):
            if id(value) in self.inside:
                return ["itself"]
            self.inside.add(id(value))
            shown = self.of_container(value)
            self.inside.discard(id(value))
            return shown
        if type(value).__name__ == "TensorInfo":
            try:
                value = self.checkpoint[value.name]
            except CheckpointError:
                return REFUSED
        if type(value).__module__.startswith("npydata"):  # described: a key, or what code makes
            return REFUSED
        if isinstance(value, torch.TypedStorage | torch.UntypedStorage):
            if vars(value).keys() - {"dtype", "_untyped_storage"}:
                raise TypeError("a storage with attributes")
            dtype = getattr(value, "dtype", torch.uint8)
            value = torch.empty(0, dtype=dtype).set_(getattr(value, "_untyped_storage", value))
        return self.of_plain(value)

    def of_container(self, value: Any) -> Any:
        if isinstance(value, dict):
            pairs = [["pair", [self.of(key), self.of(one)]] for key, one in dict.items(value)]
            return ["dict", pairs]
        return ["tuple" if isinstance(value, tuple) else "list", [self.of(one) for one in value]]

    def of_plain(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return shown_tensor(value)
        if isinstance(value, float):
            return ["float", struct.pack("<d", value).hex()]
        if isinstance(value, complex):
            return ["complex", struct.pack("<2d", value.real, value.imag).hex()]
        if isinstance(value, set | frozenset):
            members = [self.of(one) for one in value]
            if REFUSED in members:  # and so is the set, where it is read
                return REFUSED
            return [type(value).__name__, sorted(map(json.dumps, members))]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            native = value.astype(value.dtype.newbyteorder("="))  # numpy swaps some on loading
            return ["ndarray", native.dtype.str, list(value.shape), native.tobytes().hex()]
        if isinstance(value, torch.layout):
            return ["str", repr(str(value))]
        return [type(value).__name__, repr(value)[:1000]]


def shown_tensor(value: torch.Tensor) -> Any:
    """A tensor with all that a user may see of it."""
    shape = [] if value.is_nested else list(value.shape)
    head = [str(value.dtype), shape, value.requires_grad, isinstance(value, torch.nn.Parameter)]
    if value.is_meta or value.layout is not torch.strided or value.is_quantized or value.is_nested:
        kind = "meta" if value.is_meta else str(value.layout)
        return ["tensor", kind, *head]
    flags = [list(value.stride()), value.is_conj(), value.is_neg()]
    spanned = math.prod(value.shape) <= 1 << 20
    with torch.no_grad():
        plain = torch._neg_view(value) if value.is_neg() else value
        plain = plain.conj() if plain.is_conj() else plain
        content = bytes_of(plain.detach()).hex() if spanned else "large"
    return ["tensor", "dense", *head, *flags, content]


def differences(ours: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """Where we show something that torch does not; what we refuse is no difference."""
    if ours == ["refused"] or ours == theirs:
        return
    both = isinstance(ours, list) and isinstance(theirs, list)
    nested = both and ours[:1] == theirs[:1] and ours[0] in ("dict", "list", "tuple", "pair")
    if nested and len(ours[1]) == len(theirs[1]):
        for number, pair in enumerate(zip(ours[1], theirs[1], strict=True)):
            yield from differences(*pair, f"{at}/{number}")
        return
    yield f"{at}: {str(ours)[:300]} and {str(theirs)[:300]}"


def has_two_dtypes(path: Path) -> bool:
    """Whether one storage is seen in two dtypes: torch up to 2.14 sees all in the first."""
    dtypes: dict[str | None, set[torch.dtype]] = {}
    with open_checkpoint(path) as checkpoint:
        for name in checkpoint:
            info = checkpoint.info(name)
            dtypes.setdefault(info.storage, set()).add(info.dtype)
    return any(len(one) > 1 for one in dtypes.values())


def answer(path: Path | str) -> dict[str, Any]:
    """How the two see a file: ``agree``, ``refused``, ``differ``, or ``alone`` (torch refuses).

    ``two dtypes`` is a difference that is meant, and ``unsafe`` and ``in_part`` say why we may be
    alone.
    """
    path = Path(path)
    ours, our_why = we_show(path)
    if ours == REFUSED:
        return {"end": "refused", "why": our_why}
    theirs, their_why = (REFUSED, "") if path.suffix == ".safetensors" else torch_shows(path)
    if theirs == REFUSED:  # a mutation may make safetensors of a file of torch
        theirs, why = safetensors_shows(path)
        their_why = f"{their_why} | {why}"
    if theirs == REFUSED:
        in_part = "refused" if '["refused"]' in json.dumps(ours) else ""
        return {"end": "alone", "why": their_why, "unsafe": our_why, "in_part": in_part}
    ours, theirs = json.loads(json.dumps([ours, theirs]))
    if not (found := list(differences(ours, theirs))):
        return {"end": "agree"}
    end = "two dtypes" if has_two_dtypes(path) else "differ"
    return {"end": end, "why": "; ".join(found)[:1000]}
