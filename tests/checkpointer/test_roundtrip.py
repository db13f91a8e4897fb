"""What was saved comes back to the bit, through our loader and through others."""

import math
import random
from dataclasses import asdict

import pytest
import torch
from checkpoint_tools import bitwise
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from safetensors_codes import known
from state_strategies import quickly, states

from npydata import AsyncCheckpointer, TrainingState, load_checkpoint
from npydata import save_checkpoint as save

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32,
    torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
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
    "another dtype": lambda t: t.view(torch.int32),
    "negative by a flag": torch._neg_view,
    "expanded": lambda t: t[:1].expand(6, 7),
    "permuted": lambda t: t.reshape(2, 3, 7).permute(2, 0, 1),
    "channels last": lambda t: t.reshape(1, 2, 3, 7).to(memory_format=torch.channels_last),
    "needs a gradient": lambda t: t.clone().requires_grad_() * 2,
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_comes_back_with_its_values_and_is_not_tied_to_what_shares_its_memory(
    tmp_path, view
):
    tensor = torch.arange(42.0).reshape(6, 7)
    state = {"whole": tensor, "view": VIEWS[view](tensor)}
    assert bitwise(loaded(tmp_path, state)) == bitwise(state)


@pytest.mark.parametrize("mmap", [True, False])
def test_tied_tensors_share_memory_again(tmp_path, mmap):
    weight = torch.ones(3, 4)
    model = loaded(tmp_path, {"wte": weight, "head": weight, "other": weight.clone()}, mmap=mmap)
    assert model["head"] is model["wte"]
    model["wte"][0, 0] = 5
    assert model["head"][0, 0] == 5
    assert model["other"][0, 0] == 1


def test_numbers_of_four_bits_come_back_two_to_a_byte(tmp_path):
    bits = torch.arange(8, dtype=torch.uint8).view(2, 4)
    found = loaded(tmp_path, {"w": bits.view(torch.float4_e2m1fn_x2)})["w"]
    assert found.dtype == torch.float4_e2m1fn_x2
    assert torch.equal(found.view(torch.uint8), bits)


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
TRAINING = TrainingState(
    step=7,
    epoch=2,
    tokens=2**40,
    loss=math.nan,
    lr=1e-4,
    rng={"python": (3, (1, 2), None)},
    loader={"samples": 5},
    extra={"a": (1, b"x", {2: None}), "seen": {*map(str, range(30_000))}},
)


def test_values_of_every_kind_come_back_with_their_types(tmp_path):
    save(tmp_path / "c", {}, OPTIMIZER, TRAINING)
    _, optimizer, training = load_checkpoint(tmp_path / "c")
    assert bitwise(optimizer) == bitwise(OPTIMIZER)
    assert bitwise(asdict(training)) == bitwise(asdict(TRAINING))


def test_every_dtype_comes_back_in_every_shape(tmp_path):
    rng = random.Random(1)
    made = [random_bits(rng, dtype, shape) for dtype in DTYPES for shape in SHAPES]
    state = {"model": made, "turned": [one.t() for one in made if one.ndim == 2]}
    assert bitwise(loaded(tmp_path, state)) == bitwise(state)


@pytest.fixture(scope="module")
def checkpointer():
    """One for all: the memory of a save is used again for states of other sizes."""
    with AsyncCheckpointer() as checkpointer:
        yield checkpointer


@quickly
@given(
    model=states(),
    optimizer=states(),
    large=st.sampled_from([1, 5000, 70_000]),
    mmap=st.booleans(),
)
def test_any_state_comes_back(tmp_path_factory, checkpointer, model, optimizer, large, mmap):
    folder = tmp_path_factory.mktemp("any") / "c"
    model["large"] = torch.ones(large)
    checkpointer.save(folder, model, optimizer)
    checkpointer.wait()
    back = load_checkpoint(folder, verify=True, mmap=mmap)
    assert bitwise(back[:2]) == bitwise((model, optimizer))


def test_safetensors_reads_the_same_bits_and_a_tied_tensor_by_its_first_name(tmp_path):
    rng = random.Random(5)
    state = {str(dtype): random_bits(rng, dtype, (3, 2)) for dtype in DTYPES if known(dtype)}
    state |= {"zero": torch.empty(0, 4), "scalar": torch.tensor(2.0), "t": torch.eye(3)[1:].t()}
    save(tmp_path / "c", state | {"head": state["t"]})
    found = load_file(tmp_path / "c" / "model.safetensors")
    assert found.keys() == state.keys()
    for name, one in state.items():  # what the format has no code for is stored as pairs
        wanted = torch.view_as_real(one) if one.dtype in AS_PAIRS else one
        assert bitwise(found[name]) == bitwise(wanted.contiguous()), name


@pytest.mark.parametrize("kind", ["SGD", "LBFGS", "Adafactor", "RMSprop", "Adam"])
def test_the_state_of_an_optimizer_and_of_its_schedule_comes_back(tmp_path, kind):
    model = torch.nn.Linear(4, 6)
    optimizer = getattr(torch.optim, kind)(model.parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(5, 4)).square().mean()
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(loss)
        schedule.step()
    training = TrainingState(extra=schedule.state_dict())
    save(tmp_path / "c", model.state_dict(), optimizer.state_dict(), training)
    _, moments, training = load_checkpoint(tmp_path / "c")
    assert bitwise(moments) == bitwise(optimizer.state_dict())
    assert bitwise(training.extra) == bitwise(schedule.state_dict())
