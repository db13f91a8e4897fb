"""What a lesson calls: build, check, prove, predict, break. How to write one: README.md here.

    num_windows = checked("num_windows", num_windows)   # after each stub
    @method_of(MyAccess)                                # above a stub that is a method
    promises("dataset")                                 # the part's promises, on the learner's code
    predict("copy", "yes", "no", mine=...); reveal("copy", "no")
    card("one window lost", mine=...)                   # a mutant; the learner says what it does
    mine("dataset").MyDataset(path, 16)                 # the learner's package

All are plain calls: they work without widgets, under nbval, and when nothing was written yet.
"""

from collections.abc import Callable
from typing import Any

from course.grading.child import in_child, what_happens

from tutorial import keeping
from tutorial.building import judge
from tutorial.lessons import PARTS, Part, build_named
from tutorial.mutation import diff, infect
from tutorial.predictions import predict, reveal

__all__ = [
    "card",
    "checked",
    "method_of",
    "mine",
    "predict",
    "promises",
    "reveal",
    "what_happens",
]

YOURS = "Yours runs from here on."
OURS = "The library's runs from here on."
PRACTICE = "(Practice: it is no piece of your package.)"
EARLIER = "Your earlier answer, which was right, stays in your package; promises tests that one."
AGAIN = "{}: the name stands for the library's by now. Run the cell with your code again."
REFUSED: set[str] = set()
"""Builds whose last answer was not right, though an earlier one lies in the package."""


def checked(name: str, answer: Any) -> Any:
    """Judge an answer; return it when it is right, else the library's, so that the page goes on."""
    part, build = build_named(name)
    if answer is build.reference:
        print(AGAIN.format(name))
        return answer
    verdict = judge(build, answer)
    if verdict.printed:
        print(f"your code printed, at first:\n{verdict.printed}\n")
    print(verdict.text, end="\n" if verdict.right is False else " ")
    print(YOURS if verdict.right else OURS)
    REFUSED.discard(name)
    if verdict.right:
        keeping.keep(part, build, answer)
        if not build.kept:
            print(PRACTICE)
    elif name in keeping.pieces(part):
        REFUSED.add(name)
        print(EARLIER)
    chosen = answer if verdict.right else build.reference
    if owner := getattr(answer, "owner", None):
        setattr(owner, name, chosen)
    return chosen


def method_of(owner: type) -> Callable[[Any], Any]:
    """Mark a function as a method of `owner`: what `checked` returns is put there."""

    def mark(method: Any) -> Any:
        method.owner = owner
        return method

    return mark


def promises(part: str) -> None:
    """Test each promise of a part on the learner's package, and print what holds and what broke."""
    chosen = PARTS[part]
    broken = {sentence(promise): kept_by(chosen, promise) for promise in chosen.promises}
    lines = [f"✗ {text}\n    {why}" if why else f"✓ {text}" for text, why in broken.items()]
    holding = sum(why is None for why in broken.values())
    print(*lines, f"{holding} of {len(broken)} promises hold.", sep="\n", end=" ")
    print(keeping.owned_by(chosen))
    if earlier := [build.name for build in chosen.kept() if build.name in REFUSED]:
        print(f"Of {', '.join(earlier)} an earlier answer of yours was tested, not your last one.")


def mine(part: str) -> Any:
    """The part's module of the learner's package, with what was accepted so far."""
    return keeping.load(PARTS[part], keeping.pieces(PARTS[part]))


def kept_by(part: Part, promise: Callable[[Any], None]) -> str | None:
    """What breaks a promise on the learner's package; None where it holds."""
    return in_child(lambda at: promise(keeping.load(part))).why


def sentence(promise: Callable[[Any], None]) -> str:
    return (promise.__doc__ or "").split("\n", 1)[0].rstrip(".")


def card(name: str, mine: Any = ...) -> None:
    """Show a change of one line; once a symptom was picked, run it against the promise."""
    part, found = next(
        (part, one) for part in PARTS.values() for one in part.cards if one.name == name
    )
    print(found.symbol)
    print("\n".join(diff(found.symbol, found.line, found.mutant)))
    for number, symptom in enumerate(found.symptoms, start=1):
        print(f"  {number}. {symptom}")
    if mine is ...:
        print("Write the number in place of the dots, then run the cell.\n")
        return
    numbers = [str(number) for number in range(1, len(found.symptoms) + 1)]
    if str(mine).strip() not in numbers:
        print(f"{mine!r} is no answer here, expected one of {', '.join(numbers)}\n")
        return
    picked = int(mine)
    if picked == found.right:
        print(f"You say {picked}: right.")
    else:
        reason = found.reasons.get(picked, "")
        print(f"You say {picked}: not so, it is {found.right}. {reason}".rstrip())
    why = in_child(lambda at: run_card(part, found)).why
    print(f"Run with that line: '{sentence(found.promise)}' {'broke' if why else 'held'}")
    print(f"    {why or 'nothing was noticed'}\n")


def run_card(part: Part, found: Any) -> None:
    """In a child: infect the library, then test the promise on it."""
    infect(found)
    found.promise(keeping.load(part, {}))
