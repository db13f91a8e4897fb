"""What reading a checkpoint may cost: one budget for all of its pickles.

A short file could refer to a long list, or a long text, again and again. Each byte that was read
allows a little more.
"""

import threading

from npydata.reader.file import FormatError

FREE_UNITS, FREE_SECONDS = 1 << 21, 2.0
"""What a file of any size may cost."""
UNITS_PER_BYTE, S_PER_BYTE = 16, 2e-6
"""What each byte of a pickle allows. Honest ones took up to 4e-7 seconds a byte where that was
measured."""
UNITS_PER_ENTRY = 16
"""What a name costs, without its characters: each of these costs one unit, and so does a copy of a
value, or a member of a set."""


class Budget(threading.local):
    """What the checkpoint that this thread opened last may still cost.

    Time counts where a file can choose the hashes of keys so that they collide: a dictionary then
    compares each with all others.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin with another checkpoint."""
        self.units, self.seconds = FREE_UNITS, FREE_SECONDS
        self.deadline = 0.0
        """When this thread's CPU time ends, while a pickle runs."""

    def allow(self, nbytes: int) -> None:
        """Add what these bytes allow."""
        self.units += UNITS_PER_BYTE * nbytes
        self.seconds += S_PER_BYTE * nbytes

    def spend(self, units: int) -> None:
        """Count what a file asks for.

        Raises:
            FormatError: It is more than its size allows.
        """
        self.units = left = self.units - units
        if left < 0:
            raise FormatError("has far more entries, copies or longer names than its size allows")


BUDGET = Budget()
