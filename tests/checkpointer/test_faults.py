"""Every system call of a save fails, or is the one at which the process dies."""

import errno
import itertools
import shutil

import pytest
from faults.children import Child
from faults.layer import Layer, die, failing
from faults.saving import holds, save_step, saved, saves_again, unfinished
from faults.tracing import TracedSave, calls_of, cannot_trace, run_traced

from npydata import AsyncCheckpointer, CheckpointError

pytestmark = pytest.mark.timeout(280)

CASES = {"a new folder, an old one goes": "new", "a folder is replaced": "b"}
ERRORS = [
    errno.ENOSPC,
    pytest.param(errno.EIO, marks=pytest.mark.nightly),
    pytest.param(errno.EACCES, marks=pytest.mark.nightly),
]


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def name(request):
    """The folder that is saved to."""
    return request.param


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


def steps_of(root, name):
    """Return the names of the calls that a save makes, in their order."""
    with Layer().installed() as layer:
        saved(root / name, 3, keep_last=2)
    return layer.calls


@pytest.mark.filterwarnings("ignore:.*could not be removed")
@pytest.mark.parametrize("number", ERRORS)
def test_a_call_that_fails_costs_the_new_checkpoint_at_most(roots, name, number):
    steps = steps_of(next(roots), name)
    assert {"mkdir", "open", "pwrite", "fsync", "chmod", "replace", "rename"} <= set(steps)
    for when, step in enumerate(steps):
        root, place = next(roots), f"{step}, call {when} of {len(steps)}"
        keeper = AsyncCheckpointer(keep_last=2)
        with Layer(when, failing(number)).installed():
            save_step(keeper, root / name, 3)
            error = raised_by(keeper.wait)
        holds(root, 2 if error else 3, ["b"])
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


def test_a_process_that_dies_before_any_call_leaves_the_newest_checkpoint(
    roots, name, record_property
):
    steps = steps_of(next(roots), name)
    record_property("kills", len(steps))
    for when in range(len(steps)):
        root = next(roots)

        def save(report, root=root, when=when):
            with Layer(when, die).installed():
                saved(root / name, 3, keep_last=2)

        child = Child(save)
        assert child.lines() == []
        assert child.code == 9, f"call {when} of {len(steps)} was not made"
        child.close()
        holds(root, 2, ["b"])
        saves_again(root, name, 4)


def test_an_error_that_was_not_waited_for_is_raised_by_the_next_save_which_saves_nothing(tmp_path):
    keeper = AsyncCheckpointer()
    for step, name in enumerate("abc", 1):
        with Layer().installed() as layer:
            save_step(keeper, tmp_path / name, step)
            keeper.wait()
    with Layer(layer.calls.index("pwrite"), failing(errno.ENOSPC)).installed():
        save_step(keeper, tmp_path / "d", 4)
        with pytest.raises(OSError, match=r"No space left.*model\.safetensors"):
            save_step(keeper, tmp_path / "e", 5)
    keeper.wait()
    assert not (tmp_path / "e").exists()
    assert holds(tmp_path, 3) == 3


@pytest.fixture
def traced():
    if why := cannot_trace():
        pytest.skip(why)


def traced_calls(root, name):
    """Return the calls that a save makes, as the kernel sees them."""
    save = TracedSave(root / name, 3)
    report, seen = run_traced(save)
    save.close()
    assert report == ["fine", "fine"]
    return calls_of(seen)


def only(calls, count):
    """Return some of the calls: all renames and a few others, from everywhere."""
    renames = [call for call in calls if call[0].startswith("rename")]
    return calls if count is None else renames + calls[:: len(calls) // count]


def at_night(value):
    return pytest.param(value, marks=pytest.mark.nightly)


HOW_MANY = [2, pytest.param(None, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])]


@pytest.mark.parametrize("count", HOW_MANY)
def test_killed_at_a_system_call_the_newest_checkpoint_is_there(
    roots, name, traced, count, record_property
):
    calls = only(traced_calls(next(roots), name), count)
    record_property("kills", len(calls))
    for call, when in calls:
        root = next(roots)
        save = TracedSave(root / name, 3)
        report, seen = run_traced(save, "-e", f"inject={call}:signal=KILL:when={when}")
        save.close()
        assert save.code == -9, f"{call} {when}: {report}\n{seen[-500:]}"
        holds(root, 2, ["b"])
        saves_again(root, name, 4)


@pytest.mark.parametrize("count", HOW_MANY)
@pytest.mark.parametrize(
    "error",
    [
        "ENOSPC",
        *(pytest.param(one, marks=pytest.mark.nightly) for one in ("EIO", "EACCES", "EINTR")),
    ],
)
def test_a_system_call_that_fails_is_reported_once(roots, name, traced, error, count):
    for call, when in only(traced_calls(next(roots), name), count):
        root, what = next(roots), f"{call} {when} {error}"
        save = TracedSave(root / name, 3)
        report, _ = run_traced(save, "-e", f"inject={call}:error={error}:when={when}")
        save.close()
        assert save.code == 0, f"{what}: {report}"
        first, second = report
        assert second == "fine", f"{what}: raised twice: {report}"
        if first == "fine":
            assert holds(root, 3, ["b"]) == 3, what
        else:
            assert str(root) in first, f"{what}: {first}"
            assert "without a path" not in first or first.startswith("CheckpointError"), what
            holds(root, 2, ["b"])
        saves_again(root, name, 4)


def test_temporaries_of_the_dead_go_with_the_next_save_and_those_of_the_living_stay(tmp_path):
    saved(tmp_path / "a", 1)
    child = Child(lambda report: die_in_a_save(tmp_path / "b"))
    child.lines()
    child.close()
    assert len(unfinished(tmp_path)) == 1
    saved(tmp_path / "c", 2)
    assert unfinished(tmp_path) == []


def die_in_a_save(folder):
    with Layer(12, die).installed():
        saved(folder, 9)
