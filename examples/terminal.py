"""What the examples say while they train, and how they read numbers from a command line."""

import argparse
import sys
import time
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Progress:
    """Where a run stands after a step."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    wait_share: float
    """Share of the time that training waited for data."""
    saved: str
    """The newest checkpoint; in brackets while it is being written."""

    def __str__(self) -> str:
        speed = f"{self.tokens_per_s / 1000:,.1f} ktok/s, waits for data {self.wait_share:.1%}"
        loss = f"step {self.step:,} of {self.steps:,} · loss {self.loss:.4f}"
        return f"{loss} · {speed} · checkpoint {self.saved}"


class ProgressLine:
    """Shows progress on stderr: in one line of a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self.pause = 0.1 if sys.stderr.isatty() else 10.0
        self.next = time.monotonic() + self.pause

    def __call__(self, progress: Progress) -> None:
        """Show it, unless it is too soon."""
        last = progress.step == progress.steps
        if last or time.monotonic() >= self.next:
            start, end = ("\r\x1b[K", "\n" if last else "") if sys.stderr.isatty() else ("", "\n")
            print(f"{start}{progress}", end=end, file=sys.stderr, flush=True)
            self.next = time.monotonic() + self.pause


def positive(text: str) -> int:
    """Return an integer of 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return int(text)


def usable_device(text: str) -> str:
    """Return the name of a device that this machine has."""
    try:
        torch.empty(1, device=text)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {str(error).splitlines()[0]}") from None
    return text
