"""Feed and save language-model training.

Four parts, each built step by step in ``notebooks/``: a memory-mapped token dataset, a prefetching
loader, a lazy checkpoint reader and an async checkpointer. Names are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npydata.checkpoint.checkpointer import AsyncCheckpointer as AsyncCheckpointer
    from npydata.checkpoint.checkpointer import save_checkpoint as save_checkpoint
    from npydata.checkpoint.load import latest_checkpoint as latest_checkpoint
    from npydata.checkpoint.load import load_checkpoint as load_checkpoint
    from npydata.checkpoint.load import verify_checkpoint as verify_checkpoint
    from npydata.checkpoint.state import TrainingState as TrainingState
    from npydata.checkpoint.state import capture_rng as capture_rng
    from npydata.checkpoint.state import restore_rng as restore_rng
    from npydata.dataset import MmapDataset as MmapDataset
    from npydata.dataset import NpyTokensDataset as NpyTokensDataset
    from npydata.distributed.load import load_distributed as load_distributed
    from npydata.distributed.meeting import ShardingConfig as ShardingConfig
    from npydata.errors import CheckpointError as CheckpointError
    from npydata.errors import LoaderError as LoaderError
    from npydata.errors import NpyDataError as NpyDataError
    from npydata.errors import TokenFileError as TokenFileError
    from npydata.errors import UnsafeCheckpointError as UnsafeCheckpointError
    from npydata.lazy.checkpoint import LazyCheckpoint as LazyCheckpoint
    from npydata.lazy.checkpoint import open_checkpoint as open_checkpoint
    from npydata.lazy.source import LazyDataSource as LazyDataSource
    from npydata.loader import AsyncDataLoader as AsyncDataLoader
    from npydata.loader import AsyncDataLoaderConfig as AsyncDataLoaderConfig
    from npydata.tokens import open_tokens as open_tokens
    from npydata.tokens import write_tokens as write_tokens
    from npydata.windows import Permutation as Permutation

__version__ = "0.1.0"

HOMES = {
    "AsyncCheckpointer": "checkpoint.checkpointer",
    "TrainingState": "checkpoint.state",
    "capture_rng": "checkpoint.state",
    "restore_rng": "checkpoint.state",
    "save_checkpoint": "checkpoint.checkpointer",
    "latest_checkpoint": "checkpoint.load",
    "load_checkpoint": "checkpoint.load",
    "verify_checkpoint": "checkpoint.load",
    "ShardingConfig": "distributed.meeting",
    "load_distributed": "distributed.load",
    "AsyncDataLoader": "loader",
    "AsyncDataLoaderConfig": "loader",
    "LazyCheckpoint": "lazy.checkpoint",
    "LazyDataSource": "lazy.source",
    "MmapDataset": "dataset",
    "NpyTokensDataset": "dataset",
    "open_checkpoint": "lazy.checkpoint",
    "open_tokens": "tokens",
    "write_tokens": "tokens",
    "Permutation": "windows",
    "NpyDataError": "errors",
    "TokenFileError": "errors",
    "LoaderError": "errors",
    "CheckpointError": "errors",
    "UnsafeCheckpointError": "errors",
}

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'npydata' has no attribute {name!r}")
    return getattr(import_module(f"npydata.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*HOMES, "__version__"]
