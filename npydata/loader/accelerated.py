"""What accelerate asks of a loader, so that ``accelerator.prepare(loader)`` takes it as it is.

accelerate would rebuild a ``DataLoader`` with a sampler for its rank, a look ahead for the end of
the epoch, and copies to the device. This loader does all that itself: it says that it is prepared,
and tells accelerate what it wants to know. Nothing of accelerate is imported before somebody else
has.
"""

import sys
import weakref
from functools import partial
from typing import Any

import torch

from npydata.loader.config import AsyncDataLoaderConfig
from npydata.loader.iterator import PrefetchIterator
from npydata.loader.ranks import rank_and_world_size, shared_seed


class Accelerated:
    """The attributes of a prepared loader, as accelerate reads them."""

    config: AsyncDataLoaderConfig
    dataset: Any
    rank: int
    world_size: int
    seed: int
    device: torch.device | str | None
    accelerator_device: torch.device | None = None
    """Where the accelerator wants batches; a loader's own ``device`` goes first."""
    end_of_dataloader = False
    """Whether the batch that was given last is the last one: gradients are not held back then."""
    remainder = 0
    """No rank's last batch is filled up with samples that came before: none is to be cut off."""
    use_stateful_dataloader = True
    """``accelerator.save_state`` saves ``state_dict()``, and ``load_state`` gives it back."""

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Say that nothing is left to do; ``accelerator.prepare`` asks first."""
        state = sys.modules.get("accelerate.state")
        if state is not None and state.PartialState._shared_state:
            self._join(state.PartialState().device)
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        pass

    def _join(self, device: torch.device) -> None:
        """Take up the ranks and the device of an accelerator, which may be younger than we."""
        self.accelerator_device = device
        before = self.world_size
        self.rank, self.world_size = rank_and_world_size(self.config)
        if self.world_size != before:
            self.seed = shared_seed(self.config.seed, self.world_size, partial(int, self.seed))

    def tracked(self, batches: PrefetchIterator) -> "PrefetchIterator | TrackedBatches":
        """Return an iterator whose progress accelerate follows, if it prepared the loader."""
        return batches if self.accelerator_device is None else TrackedBatches(batches, self)

    @property
    def device_wanted(self) -> torch.device | str | None:
        """Where batches are brought; ``None`` leaves them where they were made."""
        if self.device is not None or self.accelerator_device is None:
            return self.device
        return None if self.accelerator_device.type == "cpu" else self.accelerator_device

    @property
    def total_batch_size(self) -> int:
        """Samples per batch of all ranks together."""
        return self.config.samples_per_batch * self.world_size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset."""
        return len(self.dataset)


class TrackedBatches:
    """A :class:`~npydata.loader.iterator.PrefetchIterator` of which accelerate knows the end."""

    def __init__(self, batches: PrefetchIterator, loader: Accelerated) -> None:
        state: Any = sys.modules["accelerate.state"]
        self.batches, self.loader = batches, loader
        loader.end_of_dataloader = False
        gradients = state.GradientState()
        gradients._add_dataloader(loader)
        self._remove = weakref.finalize(self, remove, gradients, weakref.ref(loader))

    def __iter__(self) -> "TrackedBatches":
        return self

    def __len__(self) -> int:
        return len(self.batches)

    def __next__(self) -> Any:
        try:
            batch = next(self.batches)
        except BaseException:
            self._remove()
            raise
        self.loader.end_of_dataloader = self.batches.is_last()
        return batch

    def __enter__(self) -> "TrackedBatches":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def is_last(self) -> bool:
        """Whether the batch that was delivered last is the epoch's last one."""
        return self.batches.is_last()

    def close(self) -> None:
        """Stop every worker."""
        self._remove()
        self.batches.close()


def remove(gradients: Any, loader: "weakref.ref[Accelerated]") -> None:
    """Let accelerate forget a loader whose epoch is over."""
    if (known := loader()) is not None:
        gradients._remove_dataloader(known)
