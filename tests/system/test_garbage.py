"""The garbage collector is as it was once a checkpoint is open, whatever came in between."""

import gc
import threading

import pytest
import torch
from children import run_child
from faults.children import Child
from safetensors.torch import save_file

from npydata.system.threads import without_collecting


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("error", [None, ValueError])
def test_it_is_paused_and_left_as_it_was(enabled, error):
    @without_collecting
    def work():
        assert not gc.isenabled()
        if error is not None:
            raise error

    (gc.enable if enabled else gc.disable)()
    try:
        if error is None:
            work()
        else:
            with pytest.raises(error):
                work()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_a_forked_process_collects_whatever_other_threads_of_its_parent_did():
    begun, go_on = threading.Event(), threading.Event()

    @without_collecting
    def work():
        begun.set()
        go_on.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(10)
    child = Child(lambda report: report(str(gc.isenabled())))
    assert child.lines() == ["True"]
    child.close()
    go_on.set()
    thread.join()
    assert gc.isenabled()


def test_what_forks_while_it_is_paused_goes_on_without():
    @without_collecting
    def work():
        child = Child(lambda report: report(str(gc.isenabled())))
        lines = child.lines()
        child.close()
        return lines

    assert work() == ["False"]
    assert gc.isenabled()


INTERRUPTED = """
import gc, signal, sys, time
from npydata import open_checkpoint

armed, interrupts, off = False, 0, 0

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
end = time.monotonic() + 3
while time.monotonic() < end:
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-6 * (interrupts % 300))
        open_checkpoint(sys.argv[1]).load()
        armed = False
    except KeyboardInterrupt:
        armed = False
        interrupts += 1
    off += not gc.isenabled()
print(interrupts > 100, off)
"""


def test_an_interrupted_load_leaves_it_on(tmp_path, monkeypatch):
    # Coverage has a lock of its own, which an interrupt could leave locked.
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    save_file({"w": torch.ones(3)}, path := tmp_path / "a.safetensors")
    child = run_child(INTERRUPTED, path)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["True", "0"]
