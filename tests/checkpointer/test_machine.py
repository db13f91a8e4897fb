"""Long random stories of checkpointers in one root, each beside a simple model of it."""

import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from faults.children import Child
from faults.layer import Layer, be_killed
from faults.saving import save_step, step_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from npydata import AsyncCheckpointer, CheckpointError, latest_checkpoint

KEPT = 2
ELEMENTS = 300
NAMES = st.sampled_from("abc")


class Checkpoints(RuleBasedStateMachine):
    """Saves into one root, by this process, its children and another job; kills, users, damage.

    ``order`` holds the folders in the order of their commits, each with its step: the newest two
    must load, whatever happens; what else is there loads as what it was, or says that it is
    damaged. ``newest`` are the folders of which one must be the latest.
    """

    def __init__(self):
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="npydata-test-"))
        self.root, self.step = self.base / "run", 0
        self.order, self.newest, self.damaged = {}, set(), set()
        self.begin_again()

    def teardown(self):
        shutil.rmtree(self.base)

    def next_step(self):
        self.step += 1
        return self.step

    def committed(self, name, step):
        """Take it that a save was committed."""
        self.order.pop(name, None)
        self.order[name] = step
        self.damaged.discard(name)
        self.newest = {name}

    @rule()
    def begin_again(self):
        """Go on with a checkpointer that knows of nothing, as a job that resumes."""
        self.keeper = AsyncCheckpointer(keep_last=KEPT)

    @rule(name=NAMES)
    def save(self, name):
        save_step(self.keeper, self.root / name, step := self.next_step(), ELEMENTS)
        self.keeper.wait()
        self.committed(name, step)

    @rule(name=st.sampled_from("xy"))
    def save_by_another_job(self, name):
        with AsyncCheckpointer(keep_last=KEPT) as other:
            save_step(other, self.root / name, step := self.next_step(), ELEMENTS)
        self.committed(name, step)

    @rule(name=st.sampled_from("defg"), call=st.integers(0, 45))
    def save_and_be_killed(self, name, call):
        """Another process resumes, saves, and dies at some call."""
        step, layer = self.next_step(), Layer(call, be_killed, everywhere=True)

        def work(report):
            with layer.installed(), AsyncCheckpointer(keep_last=KEPT) as keeper:
                save_step(keeper, self.root / name, step, ELEMENTS)
            report("saved")

        child = Child(work)
        lines = child.lines()
        child.close()
        assert child.code == (0 if lines else -signal.SIGKILL)
        before = set(self.newest)
        if lines or steps_in(self.root).get(name) == step:
            self.committed(name, step)
        if not lines:
            self.newest |= before

    @rule(number=st.integers(0, 1000), cut=st.booleans())
    def damage(self, number, cut):
        """Damage a checkpoint, if there is one; how many a kill left is nothing to draw by."""
        names = sorted(steps_in(self.root).keys() - self.damaged)
        if not names:
            return
        self.damaged.add(name := names[number % len(names)])
        model = self.root / name / "model.safetensors"
        content = bytearray(model.read_bytes())
        content[-1] ^= 1
        model.write_bytes(content[:-1] if cut else content)

    @invariant()
    def the_newest_are_there_and_all_are_what_they_were(self):
        held = steps_in(self.root)
        for name in [*self.order][-KEPT:]:
            assert name in held, f"{name} is gone; there are {held}"
        for name, step in held.items():
            assert step == (None if name in self.damaged else self.order[name]), name
        found = latest_checkpoint(self.root)
        if found is None:
            assert set(held.values()) <= {None}, held
        elif not self.newest & self.damaged:
            assert found.name in self.newest


def steps_in(root):
    """Return the step of each checkpoint that is seen in a root; ``None`` if it is damaged."""
    found = {}
    for folder in root.iterdir() if root.exists() else ():
        if folder.is_dir() and not folder.name.startswith("."):
            try:
                found[folder.name] = step_of(folder)
            except CheckpointError:
                found[folder.name] = None
    return found


@pytest.mark.filterwarnings("ignore:.*none of its")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "stories, steps", [(6, 12), pytest.param(300, 50, marks=pytest.mark.nightly)]
)
def test_whatever_is_done_to_a_root_its_newest_checkpoints_load(stories, steps):
    run_state_machine_as_test(
        Checkpoints,
        settings=settings(
            max_examples=stories,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
