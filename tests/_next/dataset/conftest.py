"""Runs this suite on ``npydata/_next/dataset`` where ``NPYDATA_NEXT=1`` asks for it."""

import os
import sys
from importlib import import_module

import npydata

NEXT = {
    "token_file": ["open_tokens", "write_tokens"],
    "datasets": ["NpyTokensDataset", "MmapDataset"],
    "packed": ["PackedDataset", "PackedBatch"],
    "mixture": ["MixtureDataset"],
    "permutation": ["Permutation"],
}
if os.environ.get("NPYDATA_NEXT"):
    for module, names in NEXT.items():
        npydata.HOMES.update(dict.fromkeys(names, f"_next.dataset.{module}"))
    for module in ("prepare", "inspect", "fingerprint"):
        sys.modules[f"npydata.dataset.{module}"] = import_module(f"npydata._next.dataset.{module}")
