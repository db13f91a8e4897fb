"""The hostile files of ``attacks/`` once more, in this process, where a debugger stops at each end.

Time and memory are measured in ``test_attacks``, in children that a crash may take with it.
Refusing is most of what some of the reader's modules do, and lines are counted in this process.
"""

from pathlib import Path

import pytest
from attacks import FAMILIES, family
from attacks.__main__ import end_of
from test_attacks import ALLOWED, each

HEAVY = {"bombs", "places"}
"""Families whose files are to exhaust a process, or the system."""


@pytest.mark.parametrize(
    "attack", [each(one) for name in FAMILIES if name not in HEAVY for one in family(name)]
)
def test_a_hostile_file_is_refused_where_it_should_be(tmp_path, attack):
    written = attack.write(tmp_path)
    for path in [written] if isinstance(written, Path) else written:
        end, detail = end_of(path)
        assert end in ALLOWED[attack.caught], f"{end}: {detail}"
