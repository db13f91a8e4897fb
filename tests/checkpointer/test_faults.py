"""Every system call of a save fails, or is the one at which the process dies."""

import errno
import itertools
import os
import shutil

import pytest
from faults.layer import Layer, failing
from faults.saving import holds, save_step, saved

from npydata import AsyncCheckpointer, CheckpointError

pytestmark = pytest.mark.timeout(280)

CASES = {"a new folder, an old one goes": "new", "a folder is replaced": "b"}
"""The folder that is saved to, by what it does."""
ERRORS = [
    errno.ENOSPC,
    pytest.param(errno.EIO, marks=pytest.mark.nightly),
    pytest.param(errno.EACCES, marks=pytest.mark.nightly),
]


@pytest.fixture
def roots(memory_folder):
    """New roots with the checkpoints ``a`` and ``b``, of steps 1 and 2, of one run."""
    for step, one in enumerate("ab", 1):
        saved(memory_folder / "first" / one, step)
    return copies_of(memory_folder / "first")


def copies_of(root):
    """Yield copies of a root; each goes when the next is asked for."""
    for number in itertools.count():
        copy = root.with_name(f"root{number}")
        shutil.copytree(root, copy)
        yield copy
        shutil.rmtree(copy, ignore_errors=True)


@pytest.mark.filterwarnings("ignore:.*could not be removed")
@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("name", CASES.values(), ids=list(CASES))
def test_a_call_that_fails_costs_the_new_checkpoint_at_most(roots, name, number):
    with Layer().installed() as layer:
        saved(next(roots) / name, 3, keep_last=2)
    steps = layer.calls
    assert {"mkdir", "open", "pwrite", "fsync", "chmod", "replace", "rename"} <= set(steps)
    assert steps.count("pwrite") == 5  # model, optimizer, training state, manifest, latest
    for when, step in enumerate(steps):
        root, place = next(roots), f"{step}, call {when} of {len(steps)}"
        keeper = AsyncCheckpointer(keep_last=2)
        with Layer(when, failing(number)).installed():
            save_step(keeper, root / name, 3)
            error = raised_by(keeper.wait)
        holds(root, 2 if error else 3, ["b"])  # an error after the rename: step 3 may stand
        if error is not None:
            assert isinstance(error, OSError | CheckpointError), place
            assert str(root) in str(error), f"{place}: {error}"
        assert raised_by(keeper.wait) is None, f"{place}: raised twice"
        save_step(keeper, root / name, 4)
        keeper.wait()
        assert holds(root, 4) == 4


def raised_by(call):
    try:
        call()
    except Exception as error:
        return error
    return None


def test_an_error_that_was_not_waited_for_is_raised_by_the_next_save_which_saves_nothing(
    tmp_path, monkeypatch
):
    saved(tmp_path / "a", 1)
    keeper = AsyncCheckpointer()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: failing(errno.ENOSPC)())
        save_step(keeper, tmp_path / "b", 2)
        with pytest.raises(OSError, match=r"No space left.*model\.safetensors"):
            save_step(keeper, tmp_path / "c", 3)
    keeper.wait()
    assert not (tmp_path / "c").exists()
    assert holds(tmp_path, 1) == 1
