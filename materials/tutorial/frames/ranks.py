"""Your part of many ranks: whose samples, who writes what, slices across files, one commit."""

# ruff: noqa: F401
import numpy as np

from npydata.checkpointer.commit import commit, new_manifest
from npydata.distributed.replicas import validate_equal
from npydata.distributed.save import entries_seen
from npydata.distributed.save_plan import planned, validate_replicas
from npydata.reader.strides import expand_index, steps_of
from tutorial.lesson_loader import BatchSampler


class MySampler(BatchSampler):
    """How an epoch is cut into batches, for one rank; lesson 02 built the rest of it."""
