"""An exercise: the solution, cases, what counts of an answer, and misconceptions one a row.

A misconception is a change of the solution's text and the sentence that names the belief:

    self.has_room() >> True | You hand out a number although there is no room.

The wrong answer that holds this belief is made from the row.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, combinations
from typing import Any

import hypothesis
from hypothesis.strategies import SearchStrategy

from course.grading.compare import text_of
from course.grading.observers import returned
from course.lesson import ROOT, Solution

# Where it caches, whatever the database; by default beside the notebook that is open.
hypothesis.configuration.set_hypothesis_home_dir(ROOT / "build" / "hypothesis")

Case = tuple[Any, ...]
ROW = re.compile(r"(.+?)\s*>>\s*(.*?)\s*\|\s*([^|]+)")
SETTINGS = hypothesis.settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@dataclass(frozen=True)
class Row:
    """One misconception: in the solution's text, `old` becomes `new`."""

    old: str
    new: str
    sentence: str


@dataclass(frozen=True, eq=False)
class Exercise:
    """What a learner builds, and how an answer to it is judged.

    `reference` is a function or class of the library, or the lesson's own `solution(...)`. `given`
    lists argument tuples, or is a hypothesis strategy of them. `observe(answer, *case)` is what
    counts of an answer: by default what a call returns. `others` are wrong answers with another
    algorithm, by their sentence. `show(*case)` writes a case as a call.
    """

    reference: Any
    given: Sequence[Case] | SearchStrategy[Case]
    observe: Callable[..., Any] = returned
    misconceptions: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)
    show: Callable[..., str] | None = None

    def __post_init__(self) -> None:
        for row in self.rows:  # a row that can't be made fails here
            self.mutant(row)

    @property
    def name(self) -> str:
        return self.solution.name

    @property
    def right(self) -> Any:
        """The reference as something to call."""
        return self.mutant()

    @cached_property
    def solution(self) -> Solution:
        one = self.reference
        if isinstance(one, Solution):
            return one
        source = textwrap.dedent(inspect.getsource(one))
        return Solution(one.__name__, source, one.__globals__)

    @cached_property
    def rows(self) -> list[Row]:
        found = []
        for line in filter(None, map(str.strip, self.misconceptions.splitlines())):
            if not (row := ROW.fullmatch(line)):
                raise ValueError(f"{self.name}: expected 'old >> new | sentence', found {line!r}")
            found.append(Row(*row.groups()))
        return found

    def mutant(self, *rows: Row) -> Any:
        """Return the wrong answer that some misconceptions lead to; without any, the right one."""
        source = self.solution.source
        for row in rows:
            if (times := source.count(row.old)) != 1:
                raise ValueError(
                    f"{self.name}: {row.old!r} occurs {times} times in the solution, expected once"
                )
            source = source.replace(row.old, row.new)
        return self.solution.define(source)

    def wrong(self) -> Iterator[tuple[list[str], Callable[[], Any]]]:
        """Yield (sentences, how to make the wrong answer): one mistake each, then two."""
        for sentence, answer in self.others.items():
            yield [sentence], lambda answer=answer: answer
        for rows in chain(combinations(self.rows, 1), combinations(self.rows, 2)):
            yield [row.sentence for row in rows], partial(self.mutant, *rows)

    def cases(self) -> list[Case]:
        """Return the cases, the shortest first; the same at every call."""
        if not isinstance(self.given, SearchStrategy):
            return list(self.given)
        found: list[Case] = []

        @SETTINGS
        @hypothesis.given(self.given)
        def collect(case: Case) -> None:
            found.append(case)

        collect()
        return sorted(found, key=lambda case: len(self.call(case)))

    def smallest(self, fails: Callable[[Case], bool], case: Case) -> Case:
        """Return the smallest case that fails, beginning the search with one that does."""
        if not isinstance(self.given, SearchStrategy):
            return case
        try:
            return hypothesis.find(self.given, fails, settings=SETTINGS)
        except hypothesis.errors.HypothesisException:  # none, or one that comes and goes
            return case

    def call(self, case: Case) -> str:
        """Return a case as the learner would write it."""
        if self.show:
            return self.show(*case)
        return f"{self.name}({', '.join(map(text_of, case))})"
