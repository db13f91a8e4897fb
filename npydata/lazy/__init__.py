"""Open any PyTorch checkpoint in milliseconds, read one tensor or a slice, run nothing in it.

Built in ``notebooks/04_lazy_checkpoint``.
"""

from npydata.lazy.checkpoint import LazyCheckpoint as LazyCheckpoint
from npydata.lazy.checkpoint import open_checkpoint as open_checkpoint
from npydata.lazy.source import LazyDataSource as LazyDataSource
