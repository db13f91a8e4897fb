"""The keys of a file's dictionaries, and the members of its sets: none takes long to find.

A file chooses its keys, and of numbers and tuples the hash can be foreseen. Many may have the same
one, and be compared with each other: that is counted. Or they may differ and have their places
where others are already: no count shows that, as it depends on Python's tables, so it is measured.
Where only this library looks, such as in tables of storages, numbers are keys as text, the hash of
which nobody can foresee.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from time import thread_time
from typing import Any

import numpy as np

from npydata.errors import CheckpointError

MAX_KEY_PARTS = 32
"""The parts of a tuple are looked through each time that it is a key, and a file says it once."""
MAX_COMPARED = 1 << 23
"""Parts of keys with the same hash that are compared with each other, in some 20 ns each."""
NUMPY_WORK = 50
"""To compare numpy's scalars takes as long as so many parts."""
MAX_KEY_INTEGER = sys.hash_info.modulus
"""Integers below it are their own hash."""
SMALL = 1 << 11
"""A table with so few keys takes no time, wherever they are."""
PORTION = 64
"""So many keys are put into a larger one before somebody looks at the clock."""
MAX_SECONDS, USUAL_SECONDS = 0.25, 1e-6
"""Processor time that all keys of a file may take, and each one more: usual are 0.04 to 0.14 us."""
MAX_PAUSE = 0.05
"""So much of what a portion takes counts: something else may have been done meanwhile."""


class KeysError(CheckpointError, ValueError):
    """Keys of a file take far longer to find than others."""


class Insertion:
    """Puts the keys of a file into dictionaries and sets, and gives up if that takes long.

    Whoever makes tables of what may have been in several, or in none, does it with one of these.

    Raises:
        KeysError: These keys take far longer than others.
        TypeError: One cannot be a key at all.
    """

    def __init__(self) -> None:
        self._keys, self._seconds = 0, 0.0

    def store_all(self, made: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        """Return a dictionary with more keys and values."""
        # a Counter's own update would add to what it has
        self._put(dict.update if isinstance(made, Counter) else type(made).update, made, pairs)
        return made

    def add_all(self, made: set[Any], items: Iterable[Any]) -> set[Any]:
        """Return a set with more members."""
        self._put(set.update, made, items)
        return made

    def _put(self, update: Callable[[Any, Any], None], made: Any, entries: Iterable[Any]) -> None:
        entries = iter(entries)
        while portion := list(islice(entries, PORTION)):
            if len(made) < SMALL:
                update(made, portion)
                continue
            begin = thread_time()
            update(made, portion)
            self._keys += len(portion)
            self._seconds += min(thread_time() - begin, MAX_PAUSE)
            if self._seconds > MAX_SECONDS + USUAL_SECONDS * self._keys:
                raise KeysError(
                    f"keys that take far longer to find than others: {self._keys:,} took "
                    f"{self._seconds:.1f} s"
                )


class Keys:
    """What a file has as keys, in all its dictionaries and sets.

    Nested tuples could take forever to hash, and a key is compared with all that have the same
    hash: what is compared is counted.
    """

    def __init__(self) -> None:
        self._insertion = Insertion()
        self._known: dict[int, Any] = {}
        """Those that were looked at, by where they are: a file may refer to one again and again."""
        self._first: dict[str, Any] = {}
        """A key of each hash; and the other ones, which few have."""
        self._others: dict[str, set[Any]] = {}
        self._compared = 0

    def safe(self, key: Any) -> Any:
        """Return a key.

        Raises:
            ValueError: It has too many parts, or there are too many with its hash.
            TypeError: It cannot be a key at all.
        """
        if is_plain_key(key):
            return key
        known = self._known.get(id(key)) is key
        if not known and count_parts(key) > MAX_KEY_PARTS:
            raise ValueError(f"a key of more than {MAX_KEY_PARTS} parts, or numbers as long")
        self._known[id(key)] = key
        if known and not self._others:
            return key
        code = str(hash(key))
        first = self._first.setdefault(code, key)
        if first is not key and first != key:
            self._others.setdefault(code, set()).add(key)
        if code in self._others:
            self._compared += work_of(key) * len(self._others[code])
            if self._compared > MAX_COMPARED:
                raise ValueError("too many keys that have the same hash")
        return key

    def store_all(self, made: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        """Return a dictionary with more keys and values."""
        return self._insertion.store_all(made, ((self.safe(key), one) for key, one in pairs))

    def add_all(self, made: set[Any], items: Iterable[Any]) -> set[Any]:
        """Return a set with more members."""
        return self._insertion.add_all(made, map(self.safe, items))


def is_plain_key(key: Any) -> bool:
    """Whether a key is text, or an integer small enough to have a hash of its own."""
    return type(key) is str or (type(key) is int and abs(key) < MAX_KEY_INTEGER)


def count_parts(key: Any, most: int = MAX_KEY_PARTS) -> int:
    """Return of how many parts a key is made, as long integers are of shorter ones; or more."""
    if isinstance(key, int):
        return 1 + key.bit_length() // 64
    parts = 1
    for one in key if isinstance(key, tuple | frozenset) else ():
        parts += count_parts(one, most - parts)
        if parts > most:
            break
    return parts


def work_of(key: Any) -> int:
    """Return how much there is to compare in a key: parts, texts by length, numpy's are slow."""
    if isinstance(key, tuple | frozenset):
        return 1 + sum(map(work_of, key))
    if isinstance(key, str | bytes):
        return 1 + len(key) // 512
    return NUMPY_WORK if isinstance(key, np.generic) else count_parts(key)
