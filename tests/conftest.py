"""What all tests share: the tutorial package on the path, and the `taught` symbols."""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "materials"))

import notebook_tools as tools  # noqa: E402
from notebook_promises import FromModules, FromNotebooks  # noqa: E402


def pytest_sessionstart(session: pytest.Session) -> None:
    """A mutation run must import the mutated copy: another one on the path would prove nothing."""
    expected = os.environ.get("NPYDATA_UNDER_TEST")
    if expected:
        import npydata

        found = str(npydata.__file__)
        if not Path(found).is_relative_to(expected):
            pytest.exit(f"npydata came from {found}, expected it under {expected}", returncode=3)


@pytest.fixture(params=os.environ.get("NPYDATA_TAUGHT", "module notebook").split())
def taught(request: pytest.FixtureRequest) -> Any:
    """The taught symbols by name, twice: as the modules have them, and as notebooks build them."""
    return _taught(request.param)


@cache
def _taught(source: str) -> Any:
    if source == "module":
        return FromModules(tools.PACKAGE)
    return FromNotebooks(tools.read_lessons())
