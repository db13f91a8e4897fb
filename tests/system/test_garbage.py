"""The garbage collector is as it was once a checkpoint is open, whatever came in between."""

import gc

import pytest
import torch
from children import run_child
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
