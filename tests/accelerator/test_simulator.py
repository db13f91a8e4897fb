"""The simulator does what a real device may do: late, in another order, and with memory reused.

That the proofs of this folder notice a missing wait, each by itself, shows test_dependencies.py.
"""

from functools import partial

import pytest
import torch

N = 5000


def pinned(tensor):
    found = tensor.pin_memory()
    assert found.is_pinned()
    return found


def on_side(make, after=True):
    """Make something on a stream of its own; ``after`` what the current one has been given."""
    side = torch.Stream("sim")
    if after:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        return side, make()


def test_a_copy_to_pinned_memory_is_late_until_somebody_waits(sim):
    source, target = torch.ones(N, device="sim"), pinned(torch.zeros(N))
    target.copy_(source, non_blocking=True)
    assert (target == 0).all()
    torch.accelerator.synchronize()
    assert (target == 1).all()


def test_another_stream_runs_beside_and_reads_what_is_not_there_yet(sim):
    made = torch.ones(N, device="sim")
    side, copied = on_side(lambda: made.clone(), after=False)
    side.synchronize()
    target = pinned(torch.zeros(N))
    with side:
        target.copy_(copied, non_blocking=True)
    side.synchronize()
    assert (target < -1e10).all()  # poison


@pytest.mark.parametrize("by", ["stream", "event", "host"])
def test_a_wait_puts_streams_in_order(sim, by):
    made = torch.ones(N, device="sim")
    current, side = torch.accelerator.current_stream(), torch.Stream("sim")
    if by == "stream":
        side.wait_stream(current)
    elif by == "event":
        side.wait_event(current.record_event())
    else:
        current.synchronize()
    with side:
        copied = made + 1
        assert (copied.cpu() == 2).all()


@pytest.mark.parametrize("recorded", [False, True])
def test_a_block_that_another_stream_still_reads_is_reused_unless_that_was_recorded(sim, recorded):
    made = torch.ones(N, device="sim")
    at = made.data_ptr()
    side, twice = on_side(partial(torch.mul, made, 2))
    if recorded:
        made.record_stream(side)
    del made
    other = torch.zeros(N, device="sim")
    assert (other.data_ptr() == at) is not recorded
    torch.accelerator.current_stream().synchronize()  # the reader is still held back
    with side:
        assert (twice.cpu() == 2).all() == recorded
    del other
    again = [torch.empty(N, device="sim") for _ in range(4)]
    assert at in [one.data_ptr() for one in again]


def test_pinned_memory_is_not_handed_out_while_a_copy_reads_it(sim):
    source = pinned(torch.ones(N))
    at = source.data_ptr()
    target = source.to("sim", non_blocking=True)
    del source
    other = torch.empty(N, pin_memory=True)
    assert other.data_ptr() != at
    assert (target.cpu() == 1).all()
    del other
    both = [torch.empty(N, pin_memory=True) for _ in range(2)]
    assert at in [one.data_ptr() for one in both]


def test_an_error_on_the_device_is_raised_by_the_next_wait_once(sim):
    sim.fail_next("aten::mul")
    product = torch.ones(3, device="sim") * 2
    with pytest.raises(RuntimeError, match=r"sim:0 stream 0: aten::mul: made to fail"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    assert product.shape == (3,)
