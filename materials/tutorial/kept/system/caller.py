"""Warnings that point at the line of the user's that led to them, however deep they arise."""

import sys
import warnings


def warn_caller(message: str) -> None:
    """Warn at the innermost line that is not in this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == "npydata":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
