"""A pickle is a program. The standard unpickler runs it; here it is listed, and nothing is called.

The files are ``attacks/programs.py``; ``test_attacks`` has them read under an audit hook.
"""

import re

import pytest
from attacks.programs import CASES, TORCH_WAYS, WAYS, whole, written
from checkpoint_files import PAYLOAD
from checkpoint_reading import bytes_of, read_everything
from children import run_child

from npydata import UnsafeCheckpointError

MAY_BE_REFUSED = {"storage_key", "persistent_id", "persistent_id_of_another_kind", "inst", "obj",
                  "ext1", "ext2", "ext4"}  # fmt: skip
"""A persistent id that is none of torch's, and opcodes that no checkpoint has, are malformed."""
NOT_READ = {"hooks", "as_a_key"}
"""On which nothing depends that has a name."""


def listed(way, unsafe):
    """What the file is said to name, of the names in the way's code."""
    code = (WAYS | TORCH_WAYS)[way]
    if "stack_global" in way:
        return [one for one in unsafe if one.endswith("os.system")]
    names = {found.decode() for found in re.findall(rb"[ci][\w.]+\n([\w.]+)\n", code)}
    return [one for one in unsafe if one.rpartition(".")[2] in names]


@pytest.mark.parametrize("form, way", [case for case in CASES if case[1] not in MAY_BE_REFUSED])
def test_what_would_run_is_listed_and_named_and_the_tensors_beside_it_are_read(tmp_path, form, way):
    reading = read_everything(written(tmp_path, (form, way)))
    named = listed(way, reading.unsafe)
    assert named, reading.unsafe
    assert {*bytes_of(reading.tensors["first"]), *bytes_of(reading.tensors["last"])} == {PAYLOAD}
    errors = [str(one) for one in reading.refused if isinstance(one, UnsafeCheckpointError)]
    assert way in NOT_READ or any(one in error for one in named for error in errors), errors


OBEYS = """
import copyreg, io, os, pickle, sys
copyreg.add_extension("os", "system", 0xf0)

class Unpickler(pickle._Unpickler):
    def persistent_load(self, saved):
        return None

for line in open(sys.argv[1], "rb").read().split(b"--next--"):
    try:
        Unpickler(io.BytesIO(line), encoding="latin1").load()
    except Exception as error:
        print(type(error).__name__, error, file=sys.stderr)
    ran = [name for name in os.listdir() if name.startswith("ran")]
    print(bool(ran))
    for name in ran:
        os.remove(name)
"""


def test_the_standard_unpickler_would_run_it(tmp_path):
    """Or else the tests above would prove nothing."""
    raw = b"--next--".join(whole("tar", way) for way in WAYS)
    (tmp_path / "programs").write_bytes(raw)
    (tmp_path / "here").mkdir()
    script = f"import os; os.chdir({str(tmp_path / 'here')!r})\n" + OBEYS
    child = run_child(script, tmp_path / "programs")
    ran = dict(zip(WAYS, child.stdout.split(), strict=True))
    assert [way for way, it in ran.items() if it != "True"] == [], child.stderr
