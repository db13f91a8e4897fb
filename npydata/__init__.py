"""Feed and save language-model training.

Four parts, each built step by step in ``notebooks/``: a memory-mapped token dataset, a prefetching
loader, a lazy checkpoint reader and an async checkpointer. Names are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npydata.checkpointer.checkpointer import save_checkpoint as save_checkpoint
    from npydata.checkpointer.commit import latest_checkpoint as latest_checkpoint
    from npydata.checkpointer.load import load_checkpoint as load_checkpoint
    from npydata.checkpointer.load import verify_checkpoint as verify_checkpoint
    from npydata.checkpointer.state import TrainingState as TrainingState
    from npydata.checkpointer.state import capture_rng as capture_rng
    from npydata.checkpointer.state import restore_rng as restore_rng
    from npydata.dataset.datasets import MmapDataset as MmapDataset
    from npydata.dataset.datasets import NpyTokensDataset as NpyTokensDataset
    from npydata.dataset.mixture import MixtureDataset as MixtureDataset
    from npydata.dataset.packed import PackedBatch as PackedBatch
    from npydata.dataset.packed import PackedDataset as PackedDataset
    from npydata.dataset.permutation import Permutation as Permutation
    from npydata.dataset.token_file import open_tokens as open_tokens
    from npydata.dataset.token_file import write_tokens as write_tokens
    from npydata.distributed.coordinator import ShardingConfig as ShardingConfig
    from npydata.distributed.load import load_distributed as load_distributed
    from npydata.distributed.save import AsyncCheckpointer as AsyncCheckpointer
    from npydata.errors import CheckpointError as CheckpointError
    from npydata.errors import LoaderError as LoaderError
    from npydata.errors import NpyDataError as NpyDataError
    from npydata.errors import TokenFileError as TokenFileError
    from npydata.errors import UnsafeCheckpointError as UnsafeCheckpointError
    from npydata.loader.loader import AsyncDataLoader as AsyncDataLoader
    from npydata.loader.loader import AsyncDataLoaderConfig as AsyncDataLoaderConfig
    from npydata.loader.tuning import plot_sweep as plot_sweep
    from npydata.loader.tuning import recommend as recommend
    from npydata.loader.tuning import sweep as sweep
    from npydata.reader.checkpoint import LazyCheckpoint as LazyCheckpoint
    from npydata.reader.open import open_checkpoint as open_checkpoint
    from npydata.reader.source import LazyDataSource as LazyDataSource

__version__ = "0.2.0"

HOMES = {
    "AsyncCheckpointer": "distributed.save",
    "TrainingState": "checkpointer.state",
    "capture_rng": "checkpointer.state",
    "restore_rng": "checkpointer.state",
    "save_checkpoint": "checkpointer.checkpointer",
    "latest_checkpoint": "checkpointer.commit",
    "load_checkpoint": "checkpointer.load",
    "verify_checkpoint": "checkpointer.load",
    "ShardingConfig": "distributed.coordinator",
    "load_distributed": "distributed.load",
    "AsyncDataLoader": "loader.loader",
    "AsyncDataLoaderConfig": "loader.loader",
    "recommend": "loader.tuning",
    "sweep": "loader.tuning",
    "plot_sweep": "loader.tuning",
    "LazyCheckpoint": "reader.checkpoint",
    "LazyDataSource": "reader.source",
    "MmapDataset": "dataset.datasets",
    "NpyTokensDataset": "dataset.datasets",
    "MixtureDataset": "dataset.mixture",
    "PackedDataset": "dataset.packed",
    "PackedBatch": "dataset.packed",
    "open_checkpoint": "reader.open",
    "open_tokens": "dataset.token_file",
    "write_tokens": "dataset.token_file",
    "Permutation": "dataset.permutation",
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
