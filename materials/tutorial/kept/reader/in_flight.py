"""Requests to a disk that has several at a time, each with memory of its own, handled in order."""

from collections.abc import Callable, Generator, Iterable
from queue import SimpleQueue
from threading import Semaphore
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tutorial.kept.reader.private_memory import PAGE, Bytes
from tutorial.kept.system.huge_pages import HUGE_PAGE, huge_memory
from tutorial.kept.system.wait_group import WaitGroup

Job = TypeVar("Job")
Brought = TypeVar("Brought")
Result = TypeVar("Result")
REQUEST_BYTES = 2 * HUGE_PAGE
"""As much as the disk that it was measured on takes at once (its ``max_sectors_kb``)."""
IN_FLIGHT = 4
"""Requests at a time."""
THREADS = 2 * IN_FLIGHT
"""As many handle what was brought meanwhile. A virtual disk may report its requests only when it
has done all that it was given: threads that then copied first, and read again afterwards, leave it
idle."""


def in_parallel(
    read: Callable[[Job, Bytes], Brought],
    handle: Callable[[Job, Brought, Bytes], Result],
    jobs: Iterable[Job],
) -> Generator[Result, None, None]:
    """Yield what ``handle(job, read(job, buffer), buffer)`` returns, in order.

    Several run at a time, and reading never waits for handling while a buffer is free. Each job has
    one to itself, which begins with a page and holds a request. The first error ends all of it.
    Where there are no threads to be had, this one does it.
    """
    if not (todo := list(jobs)):
        return
    buffers = list(request_buffers(min(THREADS, len(todo))))  # the last used is in the cache
    group, results = WaitGroup(), SimpleQueue[tuple[int, Any]]()
    numbered, requests = iter(enumerate(todo)), Semaphore(IN_FLIGHT)

    def work() -> None:
        while True:
            with group.running() as allowed:
                if not (allowed and do_one()):
                    return

    def do_one() -> bool:
        """Read and handle the next job; say whether there was one."""
        buffer = None
        try:
            with requests:
                if group.stopped or (following := next(numbered, None)) is None:
                    return False
                number, job = following
                buffer = buffers.pop()
                brought = read(job, buffer)
            results.put((number, handle(job, brought, buffer)))
        except BaseException as error:  # raised in its turn by the thread that waits
            results.put((number, error))
        finally:
            if buffer is not None:
                buffers.append(buffer)
        return True

    try:
        # of one job, a thread would take longer to start than a few bytes to read
        threads = group.start(work, len(buffers) if len(todo) > 1 else 0, "npydata-read")
        if not threads:
            for job in todo:
                yield handle(job, read(job, buffers[0]), buffers[0])
            return
        come: dict[int, Any] = {}
        for number in range(len(todo)):
            while number not in come:
                come.update([results.get()])
            if isinstance(result := come.pop(number), BaseException):
                raise result
            yield result
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C, or nobody wants the rest
        group.stop()
        raise


def request_buffers(count: int) -> npt.NDArray[np.uint8]:
    """Return memory for some requests, each with the pages that it begins and ends in."""
    return huge_memory(count * (REQUEST_BYTES + 2 * PAGE)).reshape(count, -1)
