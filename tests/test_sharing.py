"""Who writes what is decided once for a state, and again as soon as a rank tells another one."""

import json

import torch

from npydata.distributed import plan
from npydata.distributed.plan import LocalState, Piece, share_out, share_told


def text_of(pieces):
    return json.dumps([piece.to_json() for piece in pieces])


def replicas(*names):
    return [Piece(name, (0,), (4,), (4,), "torch.float32", "TENSOR") for name in names]


def test_what_ranks_tell_is_shared_out_as_their_pieces_are():
    every = [replicas("a", "b", "c"), replicas("a", "b", "c"), replicas("c")]
    assert share_told(tuple(map(text_of, every))) == share_out(every)


def test_an_unchanged_state_is_shared_out_once_and_a_changed_one_again(monkeypatch):
    asked = []
    monkeypatch.setattr(plan, "share_out", lambda every: asked.append(every) or share_out(every))
    share_told.cache_clear()
    first, other = (text_of(replicas(*names)) for names in ("ab", "abc"))
    assert share_told((first, first)) == share_told((first, first)) == [[0], [1]]
    assert len(asked) == 1
    assert share_told((other, other)) != [[0], [1]]
    assert len(asked) == 2


def test_the_part_of_a_parameter_needs_no_gradient():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert LocalState({"w": parameter}).part(0).data_ptr() == parameter.data_ptr()


def test_tensors_of_one_kind_have_the_same_pieces_and_each_its_own_name():
    state = {"a": torch.ones(2, 3), "c": torch.ones(3, 2), "d": torch.ones(2)}
    state |= {"b": torch.zeros(2, 3).double(), "e": torch.full((2, 3), 5.0)}
    local = LocalState(state)
    pieces = {piece.name: (piece.sizes, piece.dtype) for piece in local.pieces}
    assert list(pieces) == list(state)
    assert pieces["a"] == pieces["e"] == ((2, 3), "torch.float32")
    assert pieces["b"] == ((2, 3), "torch.float64")
    for k, piece in enumerate(local.pieces):
        assert local.part(k).data_ptr() == state[piece.name].data_ptr()
