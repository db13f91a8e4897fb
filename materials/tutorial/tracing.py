"""Watch real threads: who has the interpreter, who stands where, which batch was where when.

with long_turns(): ...                          # a thread gives its turn away only if it must
until_waiting(ready.not_full, threads=2)        # until two threads wait there, and stay
draw_run(MyPrefetcher)                          # workers, window and consumer over time
draw_steps(MyBuffer)                            # a reorder buffer, event by event
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

from tutorial.figures import PALETTE, WIDTH, _cell, ink_on, lanes, use_style
from tutorial.sliders import with_sliders

PATIENCE = 10.0
LONG_TURN = 30.0
ENDED_BY: dict[str, BaseException] = {}
"""The error that ended a thread of `started`, by its name."""
SHORTEST_SEEN = 0.3  # ms; a bar below this is thinner than its outline


@contextmanager
def long_turns() -> Iterator[None]:
    """Let a thread keep the interpreter for 30 seconds; usually it must offer it after 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(LONG_TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def counted_beside(job: Callable[[], object]) -> int:
    """How far the main thread counts, 1, 2, 3, ..., while another thread does a job."""
    done: list[object] = []
    count = 0
    thread = threading.Thread(target=lambda: done.append(job()))
    with long_turns():
        thread.start()
        while not done:
            count += 1
            time.sleep(0)  # offer the interpreter's lock to the other thread
    return count


def draw_turns(waits: Callable[[], object], runs: Callable[[], object]) -> None:
    """Two threads at a job that keeps the interpreter, and two at one that gives it away."""
    rows = []
    for job, role in ((waits, "naive"), (runs, "ours")):
        with long_turns():
            for k, (start, end) in enumerate(intervals(job, threads=2)):
                rows.append((f"{job.__name__} {k + 1}", start, end, role))
    _, ax = plt.subplots(figsize=(WIDTH, 2.7))
    lanes(ax, rows)
    ax.set_title("When each of two threads was at work")
    plt.show()


def intervals(job: Callable[[], object], threads: int = 2) -> list[tuple[float, float]]:
    """Run a job in several threads at once; (start, end) of each in ms since the first start."""
    seen: list[tuple[float, float]] = []

    def timed() -> None:
        start = time.perf_counter()
        job()
        seen.append((start, time.perf_counter()))

    started = [threading.Thread(target=timed) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    begin = min(start for start, _ in seen)
    return sorted((1000 * (start - begin), 1000 * (end - begin)) for start, end in seen)


def standing(name: str) -> list[str]:
    """The functions that a thread is in, outermost first; empty when there is no such thread."""
    frames = sys._current_frames()
    frame = next((frames.get(t.ident or 0) for t in threading.enumerate() if t.name == name), None)
    names: list[str] = []
    while frame:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[::-1]


def started(name: str, job: Callable[..., object], *args: Any) -> threading.Thread:
    """A thread under way; an error that ends it is noted in `ENDED_BY`, and told to nobody."""

    def run() -> None:
        try:
            job(*args)
        except BaseException as error:
            ENDED_BY[name] = error

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def until_waiting(condition: threading.Condition, threads: int) -> None:
    """Return once that many threads wait on a condition, and none of them was called."""
    until(lambda: len(condition._waiters) == threads)  # type: ignore[attr-defined]


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Return once a condition holds; an error if that takes longer than a reader would wait."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"did not come true within {seconds:.0f} seconds")
        threading.Event().wait(0.001)


# Which batch was where when


@dataclass(slots=True)
class Trace:
    """What workers and a consumer did, in seconds of one clock."""

    made: list[tuple[str, int, float, float]] = field(default_factory=list)
    """(worker, batch, begin, arrival)."""
    taken: list[tuple[int, float, float, float]] = field(default_factory=list)
    """(batch, asked for, delivered, computed)."""

    def making(self, seconds: Sequence[float]) -> Callable[[int], int]:
        """A `make` whose batch k takes so many seconds, as one that waits for a disk would."""

        def make(number: int) -> int:
            begin = time.perf_counter()
            time.sleep(seconds[number])
            name = threading.current_thread().name
            self.made.append((name, number, begin, time.perf_counter()))
            return number

        return make

    def consume(self, take: Callable[[], Any], count: int, step: float) -> None:
        """Take that many batches and compute on each for `step` seconds."""
        for _ in range(count):
            asked = time.perf_counter()
            number = take()
            delivered = time.perf_counter()
            time.sleep(step)
            self.taken.append((number, asked, delivered, time.perf_counter()))

    def rows(self) -> tuple[list[tuple[str, float, float, str]], dict[int, str]]:
        """What `figures.lanes` draws: workers, what is ready, the consumer; and the numbers."""
        rows = [(worker.split("-", 1)[-1].replace("-", " "), begin, end, "cpu", number)
                for worker, number, begin, end in sorted(self.made)]  # fmt: skip
        rows += [
            (" " * place or "ready", *times, "touched", k) for place, *times, k in self._ready()
        ]
        for number, asked, delivered, computed in self.taken:
            rows.append(("consumer", asked, delivered, "data wait", None))
            rows.append(("consumer", delivered, computed, "gpu", number))
        zero = min(row[1] for row in rows)
        kept = [
            (lane, 1000 * (a - zero), 1000 * (b - zero), role, k) for lane, a, b, role, k in rows
        ]
        kept = [row for row in kept if row[2] - row[1] > SHORTEST_SEEN]
        return [row[:4] for row in kept], {i: f"{row[4]}" for i, row in enumerate(kept)
                                           if row[4] is not None}  # fmt: skip

    def _ready(self) -> list[tuple[int, float, float, int]]:
        """(place, arrival, delivery, batch): the first place that is free at the arrival."""
        delivered = {number: at for number, _, at, _ in self.taken}
        free: list[float] = []
        found = []
        for arrival, number in sorted((row[3], row[1]) for row in self.made):
            place = next((p for p, gone in enumerate(free) if gone <= arrival), len(free))
            free[place : place + 1] = [delivered[number]]
            found.append((place, arrival, delivered[number], number))
        return sorted(found)

    def lasted(self) -> float:
        """Seconds from the first begin to the end of the last step."""
        return max(row[3] for row in self.taken) - min(row[2] for row in self.made)

    def draw(self, ax: Axes) -> None:
        """Arrival above delivery; a number is a batch, wherever it is."""
        rows, numbers = self.rows()
        lanes(ax, rows, labels=numbers)
        names = {"cpu": "being made", "touched": "lies ready", "gpu": "is computed on",
                 "data wait": "the consumer waits"}  # fmt: skip
        used = dict.fromkeys(row[3] for row in rows)
        handles = [
            Patch(facecolor=PALETTE[role], label=names[role]) for role in names if role in used
        ]
        ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=4,
                  handlelength=1.1, columnspacing=1.4, borderaxespad=0.2)  # fmt: skip


MADE_IN = (0.02, 0.03, 0.02, 0.01, 0.01, 0.06, 0.02, 0.02, 0.02, 0.005, 0.01, 0.03)
"""Seconds that each of twelve batches takes a worker, as it may with a disk behind it."""
STEP_S = 0.02


def draw_run(make_prefetcher: Callable[..., Any]) -> None:
    """Turn workers and capacity: a real run of twelve batches, as swim lanes."""

    def draw(workers: float, capacity: float) -> None:
        use_style()
        trace = Trace()
        make = trace.making(MADE_IN)
        prefetcher = make_prefetcher(make, len(MADE_IN), int(workers), int(capacity))
        trace.consume(prefetcher.next, len(MADE_IN), step=STEP_S)
        prefetcher.close()
        height = 2.2 + 0.3 * (int(workers) + int(capacity))
        _, ax = plt.subplots(figsize=(WIDTH, height))
        trace.draw(ax)
        title = f"Twelve batches: workers {int(workers)}, capacity {int(capacity)}"
        ax.set_title(title, pad=28)
        plt.show()
        waited = sum(delivered - asked for _, asked, delivered, _ in trace.taken)
        print("delivered:", *(number for number, *_ in trace.taken))
        print(f"the consumer waited {1000 * waited:.0f} ms of {1000 * trace.lasted():.0f}")

    with_sliders(draw, workers=(2, 1, 4, 1), capacity=(4, 1, 8, 1))


# A buffer, event by event

STEPPED = (3, 1, 4, 2, 2, 1, 3, 1, 2, 1)
"""How long each of ten batches takes, in rounds; the consumer needs two for each."""


def draw_steps(make_buffer: Callable[[int, int], Any]) -> None:
    """Turn the step and the capacity: what a buffer does for two workers and a consumer."""

    def draw(step: float, capacity: float) -> None:
        use_style()
        buffer = make_buffer(len(STEPPED), int(capacity))
        texts = list(islice(events(buffer), int(step)))
        states = [_state(buffer, number) for number in range(buffer.count)]
        _, ax = plt.subplots(figsize=(WIDTH, 1.7))
        for number, state in enumerate(states):
            fill = STATES[state]
            ax.add_patch(_cell(number, 0, fill))
            ax.text(number + 0.5, 0, str(number), ha="center", va="center", color=ink_on(fill))
        ax.set_xlim(-0.1, buffer.count + 0.1)
        ax.set_ylim(0.6, -0.6)
        ax.axis("off")
        ax.set_title(f"Batches after step {len(texts)}: {texts[-1]}", pad=28)
        handles = [Patch(facecolor=STATES[s], edgecolor="#9ca3af", lw=0.8, label=s) for s in STATES]
        ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4,
                  handlelength=1.1, columnspacing=1.4, borderaxespad=0.2)  # fmt: skip
        plt.show()
        room = "there is room" if buffer.has_room() else "no room: the next claim would wait"
        print(f"claimed {buffer.claimed}, taken {buffer.taken}, released {buffer.released}: {room}")

    with_sliders(draw, step=(4, 1, 40, 1), capacity=(3, 1, 8, 1))


STATES = {
    "taken": "#d1d5db",
    "lies ready": "#0f766e",
    "being made": "#7fb2e5",
    "to come": "#ffffff",
}


def _state(buffer: Any, number: int) -> str:
    if number < buffer.taken:
        return "taken"
    if number in buffer.results:
        return "lies ready"
    return "being made" if number < buffer.claimed else "to come"


def events(buffer: Any) -> Iterator[str]:
    """What two workers and a consumer do with a buffer, in rounds; each step in words."""
    busy: dict[int, int] = {}
    computing = 0
    while buffer.taken < buffer.count or computing:
        while len(busy) < 2 and buffer.claimed < buffer.count and buffer.has_room():
            number = buffer.claim()
            busy[number] = STEPPED[number]
            yield f"a worker claims {number}"
        busy = {number: left - 1 for number, left in busy.items()}
        computing -= computing > 0
        for number in sorted(n for n, left in busy.items() if not left):
            del busy[number]
            buffer.put(number, number)
            yield f"a worker puts {number}"
        if not computing and buffer.taken in buffer.results:
            number = buffer.take_next()
            yield f"the consumer takes {number}"
            buffer.release()
            computing = 2
            yield f"the consumer releases the slot of {number}"


# The queue at the deadlock


def draw_deadlock(ax: Axes, held: int, queued: Sequence[int]) -> None:
    """A worker that waits for room, a full queue, and a consumer that waits for the worker."""
    ax.set_xlim(0, 10)
    ax.set_ylim(0, 3.6)
    ax.axis("off")
    ax.set_title("Who waits for whom")
    _box(ax, 0.1, 2.5, "cpu", f"worker\nin put({held})")
    _box(ax, 7.6, 2.3, "gpu", "consumer\nin join()")
    for i, number in enumerate(reversed(queued)):
        _box(ax, 3.7 + 0.65 * i, 0.58, "touched", str(number), height=0.9)
    ax.text(5.0, 2.9, "queue: full", ha="center", fontweight="bold")
    _arrow(ax, (2.65, 2.0), (3.65, 2.0), "waits\nfor room", (3.13, 2.45), PALETTE["warm"])
    _arrow(ax, (8.6, 1.3), (1.3, 1.3), "waits for the worker to end", (5.0, 0.28), PALETTE["warm"],
           bend=-0.22)  # fmt: skip
    _arrow(ax, (6.35, 2.0), (7.55, 2.0), "waits to\nbe emptied", (6.94, 2.45), PALETTE["warm"])


def _box(ax: Axes, x: float, width: float, role: str, text: str, height: float = 1.3) -> None:
    shape = "round,pad=0,rounding_size=0.1"
    corner = (x, 2.0 - height / 2)
    ax.add_patch(FancyBboxPatch(corner, width, height, boxstyle=shape, facecolor=PALETTE[role],
                                edgecolor="#6b7280", linewidth=0.8))  # fmt: skip
    ax.text(x + width / 2, 2.0, text, ha="center", va="center", color=ink_on(PALETTE[role]))


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], text: str,
           place: tuple[float, float], color: str, bend: float = 0.0) -> None:  # fmt: skip
    style = f"arc3,rad={bend}"
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=16, linewidth=2,
                                 color=color, connectionstyle=style))  # fmt: skip
    ax.text(*place, text, ha="center", va="center", color=color, fontsize=11)
