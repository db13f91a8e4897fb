"""What a worker thread is told about itself: ``get_worker_info()`` and ``worker_init_fn``.

torch answers ``torch.utils.data.get_worker_info()`` from a variable of the process, because its
workers are processes. Ours are threads: here the same function looks first at the thread that asks.
"""

import itertools
import threading
from collections.abc import Callable
from typing import Any

from torch.utils.data._utils import worker as torch_worker

from npydata.dataset.hashing import MASK64

_npydata_thread = threading.local()
_worker_info = None  # torch's own variable of that name, where the function below is put to work


def get_worker_info() -> Any:
    """Return what this thread is, or what torch says of the process."""
    return getattr(_npydata_thread, "info", None) or _worker_info


def let_torch_ask_threads() -> None:
    """Let torch's ``get_worker_info`` answer in our threads as well; elsewhere nothing changes.

    The function gets another body rather than a successor: ``from torch.utils.data import
    get_worker_info`` may have been run before.
    """
    vars(torch_worker)["_npydata_thread"] = _npydata_thread
    torch_worker.get_worker_info.__code__ = get_worker_info.__code__


class AsWorker:
    """Fetches as a function does, in threads that know which worker they are.

    The first thread that asks is worker 0. ``init_fn`` is called once in each, with that number.
    """

    def __init__(
        self,
        fetch: Callable[[int], Any],
        dataset: Any,
        num_workers: int,
        seed: int,
        init_fn: Callable[[int], Any] | None = None,
    ) -> None:
        self.fetch, self.dataset, self.num_workers = fetch, dataset, num_workers
        self.seed, self.init_fn = seed, init_fn
        self._numbers = itertools.count()
        let_torch_ask_threads()

    def __call__(self, number: int) -> Any:
        """Return batch ``number``."""
        if getattr(_npydata_thread, "info", None) is None:
            self._begin(next(self._numbers))
        return self.fetch(number)

    def _begin(self, worker: int) -> None:
        _npydata_thread.info = torch_worker.WorkerInfo(
            id=worker,
            num_workers=self.num_workers,
            seed=(self.seed + worker) & MASK64,
            dataset=self.dataset,
        )
        try:
            if self.init_fn:
                self.init_fn(worker)
        except BaseException:
            _npydata_thread.info = None
            raise


def as_no_worker(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that runs as if in no worker.

    ``default_collate`` takes a worker for a process, and would copy its batch into shared memory.
    """

    def outside(value: Any) -> Any:
        info = getattr(_npydata_thread, "info", None)
        if info is None:
            return function(value)
        _npydata_thread.info = None
        try:
            return function(value)
        finally:
            _npydata_thread.info = info

    return outside
