"""Requests to a disk that has several at a time, each with memory of its own, handled in order."""

import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from queue import LifoQueue, SimpleQueue
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from npydata.reader.private_memory import PAGE, Bytes
from npydata.system.huge_pages import HUGE_PAGE, huge_memory
from npydata.system.wait_group import WaitGroup

Job = TypeVar("Job")
Brought = TypeVar("Brought")
Result = TypeVar("Result")
REQUEST_BYTES = 2 * HUGE_PAGE
"""As much as the disk that it was measured on takes at once (its ``max_sectors_kb``)."""
IN_FLIGHT = 4
"""Requests at a time, each by a thread that does nothing but read."""
BUFFERS = 2 * IN_FLIGHT
"""As many are emptied meanwhile. A virtual disk may report its requests only when it has done all
that it was given: threads that then copied first, and read again afterwards, leave it idle."""


def in_parallel(
    read: Callable[[Job, Bytes], Brought],
    handle: Callable[[Job, Brought, Bytes], Result],
    jobs: Iterable[Job],
) -> Generator[Result, None, None]:
    """Yield what ``handle(job, read(job, buffer), buffer)`` returns, in order.

    Several run at a time, and reading never waits for handling while a buffer is free. Each job has
    one to itself, which begins with a page and holds a request. The first error ends all of it.
    """
    jobs = iter(jobs)
    first = list(islice(jobs, 2))
    room = BUFFERS if len(first) > 1 else 1
    buffers: LifoQueue[Bytes] = LifoQueue()  # one that was used is in memory, and in the cache
    for buffer in request_buffers(room):
        buffers.put(buffer)
    if len(first) <= 1:  # a thread takes longer to start than a few bytes to read
        for job in first:
            yield handle(job, read(job, buffer), buffer)
        return
    group, results = WaitGroup(), SimpleQueue[Result | BaseException | None]()

    def bring(job: Job) -> Future[Result | None]:
        buffer = buffers.get()
        try:
            brought = None if group.stopped else read(job, buffer)
            if brought is not None:
                return handlers.submit(finish, job, brought, buffer)
        except BaseException:
            group.stopped = True
            buffers.put(buffer)
            raise
        (done := Future[Result | None]()).set_result(finish(job, None, buffer))
        return done

    def finish(job: Job, brought: Any, buffer: Bytes) -> Result | None:
        try:
            return None if group.stopped else handle(job, brought, buffer)
        except BaseException:
            group.stopped = True
            raise
        finally:
            buffers.put(buffer)

    handlers = ThreadPoolExecutor(IN_FLIGHT, "npydata-handle")
    readers = ThreadPoolExecutor(IN_FLIGHT, "npydata-read")

    def coordinate() -> None:
        """Wait for the pools: an interrupt, which only the main thread gets, could break them."""
        with group.running() as allowed:
            if not allowed:
                return
            try:
                with handlers, readers:
                    start_all(handlers)
                    start_all(readers)
                    for handled in readers.map(bring, chain(first, jobs)):
                        if (result := handled.result()) is not None:
                            results.put(result)  # and if not, the error is that of a later one
                results.put(None)
            except BaseException as error:
                results.put(error)

    coordinator = threading.Thread(target=coordinate, name="npydata-coordinate")
    try:
        coordinator.start()
        while (result := results.get()) is not None:
            if isinstance(result, BaseException):
                raise result
            yield result
        coordinator.join()
    except BaseException:  # Ctrl-C, or nobody wants the rest
        group.stop()
        raise


def request_buffers(count: int) -> npt.NDArray[np.uint8]:
    """Return memory for some requests, each with the pages that it begins and ends in."""
    return huge_memory(count * (REQUEST_BYTES + 2 * PAGE)).reshape(count, -1)


def start_all(pool: ThreadPoolExecutor) -> None:
    """Start the threads of a pool, or say that there are no more before anything is read."""
    gate = threading.Event()  # none is idle before all are there
    try:
        for _ in range(IN_FLIGHT):
            pool.submit(gate.wait)
    finally:
        gate.set()
