"""Rules of form that a notebook breaks until its lesson is rewritten: one list, meant to empty.

An entry is "NN: some words of the problem", under the name of the rule's function; under `numbers`
it is a lesson.
"""

EXEMPT: dict[str, set[str]] = {"numbers": set()}


def remaining(rule: str, problems: list[str]) -> list[str]:
    """Return the problems that no entry excuses; each begins with its notebook's name."""
    entries = [entry.split(": ", 1) for entry in EXEMPT.get(rule, ())]
    return [
        problem
        for problem in problems
        if not any(problem.startswith(number) and words in problem for number, words in entries)
    ]
