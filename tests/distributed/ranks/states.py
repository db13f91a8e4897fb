"""What ranks save and load: a small model in every way of spreading it, and a stream of tokens."""

from functools import cache

import torch
import torch.distributed as dist
from faults.saving import model_at, optimizer_at
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from npydata import AsyncDataLoader, MmapDataset, ShardingConfig, TrainingState

SEQ_LEN = 8


class Small(torch.nn.Module):
    """Of its sizes, 7 gives uneven shards on 2, 3 and 4 ranks; 3 gives an empty one on 4."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.second = torch.nn.Linear(7, 3, bias=False)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(4))

    def forward(self, inputs):
        return self.second(self.first(inputs).relu())


def group():
    """Return this process's rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def spread(how, seed=0, make=Small):
    """Return a model and its optimizer, spread over the ranks in one of the known ways."""
    torch.manual_seed(seed)
    model = make()
    world = group()[1]
    if how == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif how == "hsdp":
        names = ("replicate", "shard")
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names))
    elif how == "ddp":
        model = DistributedDataParallel(model)
    elif how == "compiled":
        model = torch.compile(model, backend="eager")
    weights = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def train(model, optimizer, steps, first=0):
    """Take steps, on numbers that are the same on all ranks."""
    for step in range(first, first + steps):
        numbers = torch.Generator().manual_seed(step)
        model(torch.randn(6, 5, generator=numbers)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_state(model, optimizer, keys):
    """Return an optimizer's state by numbers or by names."""
    if keys == "names":
        return get_optimizer_state_dict(model, optimizer)
    return optimizer.state_dict()


def part_of(tensor, mesh, places):
    """Return a tensor as this rank has it; no rank sends it: gloo can't send every dtype."""
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, places)
    ends = zip(offsets, sizes, strict=True)
    local = tensor[tuple(slice(first, first + size) for first, size in ends)].clone()
    size = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(local, mesh, places, run_check=False, **size)


@cache
def mesh():
    """Return all ranks, as a line; the first call is one that all make."""
    return init_device_mesh("cpu", (group()[1],))


def save_step(keeper, folder, step, elements, timeout_s=60):
    """Save a step's state, of which every rank has a part."""
    model, optimizer = model_at(step, elements), optimizer_at(step)
    model["weight"] = part_of(model["weight"], mesh(), [Shard(0)])
    state = optimizer["state"][0]
    state["exp_avg"] = part_of(state["exp_avg"], mesh(), [Shard(0)])
    training = TrainingState(step=step, rng={"rank": group()[0]})
    sharding = ShardingConfig(timeout_s=timeout_s)
    keeper.save_distributed(folder, model, optimizer, training, sharding=sharding)


def whole(value):
    """Return a nested state with whole tensors of their own; all ranks take part."""
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(one) for one in value)
    return value


def stream(path):
    """Return a loader whose rank and world size are the process group's."""
    data = MmapDataset(path, SEQ_LEN)
    return AsyncDataLoader(data, batch_size=3, seed=5, num_workers=1)


def starts(batches):
    """Return the first token of every sample, which says which one it is."""
    return [inputs[:, 0].tolist() for inputs, _ in batches]
