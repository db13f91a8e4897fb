"""Who writes what is decided once for a state, and again as soon as a rank sends another one."""

import json

import torch

from npydata.distributed import save_plan as plan
from npydata.distributed.save_plan import LocalState, Shard, dedup_cached, dedup_save_plans


def text_of(shards):
    return json.dumps([shard.to_json() for shard in shards])


def replicas(*names):
    return [Shard(name, (0,), (4,), (4,), "torch.float32", "TENSOR") for name in names]


def test_plans_sent_as_json_are_deduplicated_as_their_shards_are():
    every = [replicas("a", "b", "c"), replicas("a", "b", "c"), replicas("c")]
    assert dedup_cached(tuple(map(text_of, every))) == dedup_save_plans(every)


def test_an_unchanged_state_is_planned_once_and_a_changed_one_again(monkeypatch):
    asked = []
    monkeypatch.setattr(
        plan, "dedup_save_plans", lambda every: asked.append(every) or dedup_save_plans(every)
    )
    dedup_cached.cache_clear()
    first, other = (text_of(replicas(*names)) for names in ("ab", "abc"))
    assert dedup_cached((first, first)) == dedup_cached((first, first)) == [[0], [1]]
    assert len(asked) == 1
    assert dedup_cached((other, other)) != [[0], [1]]
    assert len(asked) == 2


def test_the_shard_of_a_parameter_needs_no_gradient():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert LocalState({"w": parameter}).local_tensor(0).data_ptr() == parameter.data_ptr()


def test_tensors_of_one_kind_have_the_same_shards_and_each_its_own_name():
    state = {"a": torch.ones(2, 3), "c": torch.ones(3, 2), "d": torch.ones(2)}
    state |= {"b": torch.zeros(2, 3).double(), "e": torch.full((2, 3), 5.0)}
    local = LocalState(state)
    shards = {shard.name: (shard.sizes, shard.dtype) for shard in local.shards}
    assert list(shards) == list(state)
    assert shards["a"] == shards["e"] == ((2, 3), "torch.float32")
    assert shards["b"] == ((2, 3), "torch.float64")
    for k, shard in enumerate(local.shards):
        assert local.local_tensor(k).data_ptr() == state[shard.name].data_ptr()
