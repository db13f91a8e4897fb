"""Every error npydata raises on purpose.

A message is one line: the file, the value found, the value expected.
"""


class NpyDataError(Exception):
    """Root of all errors raised by npydata."""


class TokenFileError(NpyDataError, ValueError):
    """A token file is malformed or too short, has changed, or holds an id out of range."""


class LoaderError(NpyDataError, ValueError):
    """A loader was configured or resumed in a way it cannot honour."""


class CheckpointError(NpyDataError):
    """A checkpoint is missing, malformed, or damaged."""


class UnsafeCheckpointError(CheckpointError):
    """Reading this entry would require running code from the file."""
