"""The checkpointer at the door: of one process, and of many that save together.

Built in ``notebooks/09_scale_out``.
"""

import os
from collections.abc import Mapping
from typing import Any

from tutorial.kept.checkpointer import checkpointer
from tutorial.kept.checkpointer.destination import destination
from tutorial.kept.checkpointer.training_state import TrainingState
from tutorial.kept.distributed.group import ShardingConfig
from tutorial.kept.distributed.save import begin_saving


class AsyncCheckpointer(checkpointer.AsyncCheckpointer):
    __doc__ = checkpointer.AsyncCheckpointer.__doc__

    @checkpointer.in_turn
    def save_distributed(
        self,
        dir: str | os.PathLike[str],
        model_state: Mapping[str, Any],
        optimizer_state: Mapping[str, Any] | None = None,
        training_state: TrainingState | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        sharding: ShardingConfig | None = None,
    ) -> None:
        """Save as :meth:`save` does, together with the other ranks of a process group.

        Every rank calls it, with its own shards of the state: replicated tensors are written once,
        shards of a ``DTensor`` (FSDP2, tensor parallel) by a rank that has them. All ranks write
        into one folder, on a file system that they share. ``dir`` then holds ``model/`` and
        ``optimizer/``, each readable by :func:`npydata.open_checkpoint` and by torch's
        ``HuggingFaceStorageReader``, and ``rng/rank_N.json`` if ``training_state.rng`` is given;
        the rest of the training state is rank 0's. :func:`npydata.load_distributed` loads it on any
        number of ranks.

        All or nothing: if a rank fails or dies before the commit, ``dir`` and ``latest`` stay what
        they were, and each other rank raises within the time-outs of ``sharding``: here, or in
        :meth:`wait` and the next save. ``rank`` and ``world_size`` are only compared with those of
        the process group.

        Raises:
            CheckpointError: A rank's state can't be stored, the ranks don't save the same, or one
                gave no word in time; the message names it.
            OSError: The previous save failed on this rank; nobody began this one.
        """
        folder = destination(dir)
        saving = begin_saving(folder, sharding, rank, world_size)
        with saving.coordinator.abort_on_error("plan"):
            self._wait()
        clear = folder.parent not in self._roots
        states = model_state, optimizer_state, training_state
        files, writer, strategy = saving.plan(*states, self._buffers, self.keep_last, clear)
        self._roots.add(folder.parent)
        with strategy.cancelled_on_error():
            self._start(files, writer)
