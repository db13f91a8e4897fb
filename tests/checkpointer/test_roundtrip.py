"""What was saved comes back to the bit, through our loader and through others."""

import itertools
import math
import random

import pytest
import torch
from checkpoint_tools import bitwise
from safetensors.torch import load_file
from safetensors_codes import known

from npydata import AsyncCheckpointer, TrainingState, load_checkpoint
from npydata import save_checkpoint as save

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32,
    torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # not in torch 2.6
]  # fmt: skip
SHAPES = [(), (0,), (1,), (5,), (2, 0, 3), (3, 4)]
AS_PAIRS = {torch.complex32: torch.float16, torch.complex128: torch.float64}


def random_bits(rng, dtype, shape):
    """A tensor whose every byte is drawn; for bool only 0 and 1."""
    raw = bytearray(rng.randbytes(math.prod(shape) * dtype.itemsize))
    if dtype == torch.bool:
        raw = bytearray(one & 1 for one in raw)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


def loaded(folder, model, optimizer=None, **options):
    save(folder / "c", model, optimizer)
    return load_checkpoint(folder / "c", verify=True, **options)[0]


VIEWS = {
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[::2, 1::3],
    "expanded": lambda t: t[:1].expand(6, 7),
    "one element": lambda t: t[3, 4],
    "permuted": lambda t: t.reshape(2, 3, 7).permute(2, 0, 1),
    "channels last": lambda t: t.reshape(1, 2, 3, 7).to(memory_format=torch.channels_last),
    "conjugated": lambda t: t.to(torch.complex64).conj(),
    "conjugated double": lambda t: t.to(torch.complex128).conj().t(),
    "negated": lambda t: torch.complex(t, t).conj().imag,
    "parameter": lambda t: torch.nn.Parameter(t.clone()),
    "needs a gradient": lambda t: t.clone().requires_grad_() * 2,
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_any_kind_comes_back_with_its_values(tmp_path, view):
    tensor = VIEWS[view](torch.arange(42.0).reshape(6, 7))
    state = {"head": torch.ones(3), "t": tensor}
    assert bitwise(loaded(tmp_path, state)) == bitwise(state)


@pytest.mark.parametrize("options", [{}, {"mmap": False}], ids=str)
def test_tied_tensors_share_memory_again(tmp_path, options):
    weight = torch.ones(3, 4)
    model = loaded(tmp_path, {"wte": weight, "head": weight, "other": weight.clone()}, **options)
    assert model["head"] is model["wte"]
    model["wte"][0, 0] = 5
    assert model["head"][0, 0] == 5
    assert model["other"][0, 0] == 1


@pytest.mark.parametrize("same", [
    lambda t: t[:3], lambda t: t.view(torch.int32), lambda t: t.reshape(2, 3), lambda t: t[1::2],
    lambda t: torch.view_as_complex(t.view(3, 2)).conj(),
], ids=["shorter", "other dtype", "other shape", "every other", "conjugated"])  # fmt: skip
def test_what_only_shares_memory_is_not_tied(tmp_path, same):
    tensor = torch.arange(6.0)
    state = {"a": tensor, "b": same(tensor)}
    assert bitwise(loaded(tmp_path, state)) == bitwise(state)


NAMES = [
    "a.b.c", ".", "..", "a..b", "ä", "层.权重", "\U0001f600", "", " ", 'quo"te', "back\\slash",
    "new\nline", "\x00", "\x1b[31m", "__metadata__", "__metadata__'", "x" * 100_000, "../../etc",
    "_orig_mod.layer.weight", "module.layer.weight", "format", "npydata", "$tensor", "1",
]  # fmt: skip


def test_every_name_comes_back_and_safetensors_reads_the_file(tmp_path):
    state = {name: torch.tensor([k]) for k, name in enumerate(NAMES)}
    assert bitwise(loaded(tmp_path, state)) == bitwise(state)
    found = load_file(tmp_path / "c" / "model.safetensors")
    assert sorted(one.item() for one in found.values()) == [*range(len(NAMES))]


OPTIMIZER = {
    "state": {0: {"step": torch.tensor(3.0), "m": torch.ones(2)}, "0": {"m": torch.zeros(2)}},
    "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0, 1], "foreach": None,
                      "eps": math.nan, "max": math.inf, "min": -math.inf, "zero": -0.0,
                      "lr_now": torch.tensor(0.1)}],
    "raw": b"\0\xff", "set": {1, 2}, "big": 2**70, "flag": True, "empty": [{}, [], ()],
    (1, "a"): None, None: 1, 2.5: "x",
}  # fmt: skip


def test_optimizer_values_of_every_kind_come_back_with_their_types(tmp_path):
    save(tmp_path / "c", {}, OPTIMIZER)
    assert bitwise(load_checkpoint(tmp_path / "c")[1]) == bitwise(OPTIMIZER)


def test_every_field_of_the_training_state_comes_back(tmp_path):
    state = TrainingState(step=7, epoch=2, tokens=2**40, loss=math.nan, lr=1e-4,
                          rng={"python": (3, (1, 2), None)}, loader={"samples": 5},
                          extra={"a": (1, b"x", {2: None})})  # fmt: skip
    save(tmp_path / "c", {}, None, state)
    back = load_checkpoint(tmp_path / "c")[2]
    fields = TrainingState.__dataclass_fields__
    assert {name: bitwise(getattr(back, name)) for name in fields} == {
        name: bitwise(getattr(state, name)) for name in fields
    }


def random_state(rng):
    """A nested state with views, ties, and every dtype."""
    held = []

    def tensor():
        if held and rng.random() < 0.15:
            return rng.choice(held)
        made = random_bits(rng, rng.choice(DTYPES), rng.choice(SHAPES))
        if made.ndim == 2 and rng.random() < 0.5:
            made = made.t()
        if made.dtype.is_complex and rng.random() < 0.5:
            made = made.conj()
        if made.ndim and made.shape[0] > 2 and rng.random() < 0.3:
            made = made[1:]
        held.append(made)
        return made

    def value(depth):
        kind = rng.random()
        if kind < 0.5 or depth > 3:
            return tensor()
        if kind < 0.65:
            return rng.choice([None, 1, 2.5, "a", b"b", (), True, math.inf, 2**65])
        many = range(rng.randrange(4))
        if kind < 0.85:
            return {rng.choice(["a.b", "a", 1, "1", (1, 2), None]): value(depth + 1) for _ in many}
        return rng.choice([list, tuple])([value(depth + 1) for _ in many])

    return {f"k{k}": value(0) for k in range(rng.randrange(8))}


@pytest.mark.parametrize("seed", range(60))
def test_any_state_comes_back(tmp_path, seed):
    rng = random.Random(seed)
    model, optimizer = random_state(rng), random_state(rng)
    save(tmp_path / "c", model, optimizer)
    back = load_checkpoint(tmp_path / "c", verify=True, mmap=seed % 2 == 0)
    assert bitwise(back[:2]) == bitwise((model, optimizer))


def as_others_see(tensor):
    """What the format has no code for is stored as pairs."""
    return torch.view_as_real(tensor) if tensor.dtype in AS_PAIRS else tensor


def test_safetensors_reads_the_same_bits_and_a_tied_tensor_by_its_first_name(tmp_path):
    rng = random.Random(5)
    state = {str(dtype): random_bits(rng, dtype, (3, 2)) for dtype in DTYPES if known(dtype)}
    state |= {"zero": torch.empty(0, 4), "scalar": torch.tensor(2.0), "t": torch.eye(3)[1:].t()}
    save(tmp_path / "c", state | {"head": state["t"]})
    wanted = {name: torch.view_as_real(one) if one.dtype in AS_PAIRS else one.contiguous()
              for name, one in state.items()}  # fmt: skip
    assert bitwise(dict(sorted(load_file(tmp_path / "c" / "model.safetensors").items()))) == (
        bitwise(dict(sorted(wanted.items())))
    )


schedules = torch.optim.lr_scheduler
RUNS = {
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.1), lambda o: schedules.CosineAnnealingLR(o, 7)),
    "amsgrad": (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
                  lambda o: schedules.MultiStepLR(o, [2, 4])),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
            lambda o: schedules.OneCycleLR(o, 0.5, total_steps=9)),
    "LBFGS": (lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
              lambda o: schedules.ConstantLR(o)),
    "Adafactor": (lambda p: torch.optim.Adafactor(p, lr=0.1), lambda o: schedules.StepLR(o, 2)),
    "groups": (lambda p: torch.optim.RMSprop([{"params": list(p), "lr": 0.3}], lr=0.1),
               lambda o: schedules.ExponentialLR(o, 0.9)),
}  # fmt: skip


class Trained:
    """A model after some steps, with its optimizer and its schedule."""

    def __init__(self, name, steps=0):
        torch.manual_seed(steps)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        make, schedule = RUNS[name]
        self.optimizer = make(self.model.parameters())
        self.schedule = schedule(self.optimizer)
        self.train(steps)

    def loss(self):
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(5, 4)).square().mean()
        loss.backward()
        return loss

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.step(self.loss)
            self.schedule.step()


@pytest.mark.parametrize("name", RUNS)
def test_an_optimizer_and_its_schedule_go_on_as_if_never_stopped(tmp_path, name):
    run, other = Trained(name, 3), Trained(name)
    training = TrainingState(extra={"schedule": run.schedule.state_dict()})
    save(tmp_path / "c", run.model.state_dict(), run.optimizer.state_dict(), training)
    weights, moments, training = load_checkpoint(tmp_path / "c")
    assert bitwise(moments) == bitwise(run.optimizer.state_dict())
    other.model.load_state_dict(weights)
    other.optimizer.load_state_dict(moments)
    other.schedule.load_state_dict(training.extra["schedule"])
    for one in (run, other):
        one.train(2)
    assert bitwise(other.model.state_dict()) == bitwise(run.model.state_dict())


@pytest.mark.parametrize("sizes", list(itertools.permutations([1, 5000, 70_000])), ids=str)
def test_a_buffer_used_again_for_other_sizes_gives_the_right_files(tmp_path, sizes):
    states = [{"w": torch.full((size,), float(size)), "i": torch.arange(3)} for size in sizes]
    with AsyncCheckpointer() as checkpointer:
        for k, state in enumerate(states):
            checkpointer.save(tmp_path / f"{k}", state, {"m": state["w"]})
    for k, state in enumerate(states):
        model, optimizer, _ = load_checkpoint(tmp_path / f"{k}", verify=True)
        assert bitwise((model, optimizer)) == bitwise((state, {"m": state["w"]}))
