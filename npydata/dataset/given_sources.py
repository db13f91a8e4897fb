"""What a mixture is given: datasets by name and a weight for each, or a clear refusal."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Weights = Mapping[str, Any] | Sequence[Any]


def require_sources(sources: Any) -> None:
    """Raise unless sources are datasets by name, each with a sample at least."""
    if not isinstance(sources, Mapping):
        raise TypeError(f"sources is a {type(sources).__name__}, expected a dictionary of datasets "
                        'by name, as {"web": web, "code": code}')  # fmt: skip
    if not sources:
        raise ValueError("no sources, expected a dictionary of datasets")
    for name, source in sources.items():
        is_dataset = hasattr(source, "__len__") and hasattr(source, "__getitem__")
        if not is_dataset or isinstance(source, str | bytes | os.PathLike | tuple):
            raise TypeError(f"source {name!r} is a {type(source).__name__}, expected a map-style "
                            "dataset; of token files, NpyTokensDataset(path, seq_len)")  # fmt: skip
        if len(source) < 1:
            raise ValueError(f"source {name!r} has {len(source)} samples, expected 1 or more")


def weights_in_order(weights: Any, names: Sequence[str]) -> list[Any]:
    """Return weights, by name or in a row, in the order of the sources' names."""
    if isinstance(weights, Mapping):
        if unknown := sorted(weights.keys() ^ set(names), key=str):
            raise ValueError(f"weights by name: {unknown[0]!r} is in only one of the two, "
                             f"expected {', '.join(names)}")  # fmt: skip
        return [weights[name] for name in names]
    if isinstance(weights, str) or not isinstance(weights, Sequence | np.ndarray):
        raise TypeError(f"weights={weights!r}, expected one for each of {', '.join(names)}")
    if len(weights) != len(names):
        raise ValueError(f"{len(weights)} weights, expected {len(names)}, one a source")
    return list(weights)
