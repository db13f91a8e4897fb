"""What all tests share: where helpers lie, what a crash run counts, a folder in memory."""

import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
FOLDERS = [ROOT, ROOT / "materials", TESTS]
FOLDERS += [
    TESTS / name
    for name in ("builders", "cli", "dataset", "loader", "reader", "checkpointer", "distributed")
]
PATHS = [str(folder) for folder in FOLDERS]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)  # children find the package and the helpers, too

BEGUN = pytest.StashKey[float]()
FRAMEWORKS = ("transformers", "accelerate", "lightning", "torchdata")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", type=float, metavar="MINUTES", help="begin no test after that")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEGUN] = time.monotonic()
    if coverage := sys.modules.get("coverage"):  # children killed on purpose leave half a data file
        half = "Data file|Couldn't use data file"
        warnings.filterwarnings("ignore", half, coverage.exceptions.CoverageWarning)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of a folder that is a run of its own with the folder's name."""
    for item in items:
        if (folder := item.path.parent.name) in ("accelerator", "gpu", "clients"):
            item.add_marker(folder)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Name what the time budget leaves out."""
    minutes = item.config.getoption("--budget")
    if minutes and time.monotonic() - item.config.stash[BEGUN] > 60 * minutes:
        pytest.skip(f"{item.name}: the budget of {minutes:g} minutes is used up")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which frameworks the clients' tests run with, and which are absent."""
    if config.option.markexpr != "clients":
        return []
    found = {name: find_spec(name) and version(name) for name in ("torch", *FRAMEWORKS)}
    return ["clients: " + ", ".join(f"{name} {found[name] or 'ABSENT'}" for name in found)]


FAULTS = ("kills", "replayed power cuts", "power cuts of a disk")
"""What tests count with ``record_property``."""


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say in one line how much was broken on purpose, what that cost, and what was not tried."""
    stats, counts = terminalreporter.stats, Counter[str]()
    for report in [*stats.get("passed", ()), *stats.get("failed", ())]:
        found = Counter({name: n for name, n in report.user_properties if name in FAULTS})
        counts += found
        if found:
            counts["lost"] += max(dict(report.user_properties).get("lost", 0), report.failed)
    if not any(counts[name] for name in FAULTS):
        return
    broken = ", ".join(f"{counts[name]:,} {name}" for name in FAULTS)
    not_run = len(stats.get("skipped", ()))  # named, with the reason, in the summary above
    terminalreporter.write_line(f"{broken}: {counts['lost']} lost; {not_run} tests not run")


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder in memory if possible, for tests that make thousands of small files."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="npydata-test-") as folder:
        yield Path(folder)
