"""Every way of reading a checkpoint shows what torch loads from it."""

import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pickle_code as code
import pytest
import torch
from checkpoint_files import zip_file
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from state_strategies import DTYPES, base, quickly, resolved, seen, states, tensors_of

from npydata import CheckpointError, LazyDataSource, open_checkpoint
from npydata.system.page_cache import evict

INDICES = [
    (),
    0,
    -1,
    slice(1, 3),
    slice(5, 2, 2),
    slice(7, 3),
    (slice(None), slice(None, None, 2)),
    (..., slice(1, 4)),
    (1, slice(0, 6, 3)),
    (slice(0, 0), 2),
]


def saved(state, path, *, zipped=True):
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    return path


def test_elements_of_16_bytes_begin_where_torch_can_copy_them(tmp_path):
    state = {f"w{k}": torch.randn(3, 5, dtype=torch.complex128) for k in range(6)}
    path = saved(state, tmp_path / "a.pt", zipped=False)  # every second one is 8 bytes off
    with open_checkpoint(path) as checkpoint:
        for tensors in (checkpoint.load(), checkpoint):
            assert all(tensors[name].data_ptr() % 16 == 0 for name in state)
            assert all(torch.equal(tensors[name], state[name]) for name in state)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("mmap", [True, False])
@quickly
@given(state=states())
def test_each_way_of_reading_agrees_with_torch(tmp_path_factory, zipped, mmap, state):
    path = saved(state, tmp_path_factory.mktemp("state") / "a.pt", zipped=zipped)
    try:
        expected = tensors_of(torch.load(path, weights_only=True))
    except AttributeError:  # torch saves late dtypes in legacy files, and can't load them
        assert not zipped
        expected = tensors_of(state)
    with open_checkpoint(path, mmap=mmap) as checkpoint:
        names = list(checkpoint)
        whole = checkpoint.load()
        assert [seen(checkpoint[name]) for name in names] == [seen(one) for one in expected]
        assert list(whole) == names
        for name, one in zip(names, expected, strict=True):
            info = checkpoint.info(name)
            assert seen(whole[name]) == seen(one)
            assert (info.dtype, info.shape, info.stride) == (
                one.dtype,
                tuple(one.shape),
                one.stride(),
            )
            plain = one.detach()
            assert seen(checkpoint.get_slice(name)[...], strides=False) == seen(
                plain, strides=False
            )
            target = torch.zeros_like(plain, memory_format=torch.contiguous_format)
            assert checkpoint.load([name], into={name: target})[name] is target
            assert seen(target, strides=False) == seen(resolved(plain), strides=False)
        for (name, one), (other, two) in combinations(zip(names, expected, strict=True), 2):
            if one.numel() and two.numel():
                shared = one.data_ptr() == two.data_ptr()
                assert (whole[name].data_ptr() == whole[other].data_ptr()) == shared


@quickly
@given(
    numbers=st.lists(st.integers(0, len(DTYPES) - 1), min_size=1, max_size=5),
    index=st.sampled_from(INDICES),
)
def test_slices_are_those_of_the_tensor(tmp_path_factory, numbers, index):
    folder = tmp_path_factory.mktemp("slices")
    state = {f"t{k}": base(number) for k, number in enumerate(numbers)}
    state = {name: one for name, one in state.items() if one.dtype is not torch.complex128}
    if not state:
        return
    save_file(state, folder / "a.safetensors")
    for path in (folder / "a.safetensors", saved(state, folder / "a.pt")):
        with open_checkpoint(path) as checkpoint:
            planned = checkpoint.load(dict.fromkeys(state, index))
            for name, one in state.items():
                expected = seen(one[index].clone(), strides=False)
                assert seen(checkpoint.get_slice(name)[index], strides=False) == expected
                assert seen(planned[name], strides=False) == expected


def test_safetensors_are_read_as_their_own_library_does(tmp_path):
    state = {str(one): base(n) for n, one in enumerate(DTYPES) if not one.is_complex}
    metadata = {"none": "hides no tensor", "note": "x"}
    save_file({**state, "none": torch.empty(0, 3)}, tmp_path / "a.safetensors", metadata)
    with (
        safe_open(tmp_path / "a.safetensors", "pt") as theirs,
        open_checkpoint(tmp_path / "a.safetensors") as ours,
    ):
        assert sorted(ours.metadata.values()) == sorted(theirs.metadata().values())
        assert ours.metadata["note"] == "x"
        for name in theirs.keys():  # noqa: SIM118
            assert seen(ours[name]) == seen(theirs.get_tensor(name))


@pytest.fixture
def large(tmp_path):
    """A file with a tensor that is mapped, and one that is read."""
    state = {"w": torch.arange(1 << 18, dtype=torch.float32).view(512, 512), "b": torch.arange(4.0)}
    return saved(state, tmp_path / "a.pt"), state


def test_writing_to_a_tensor_changes_neither_the_file_nor_another_reader(large):
    path, state = large
    before = path.read_bytes()
    with open_checkpoint(path) as one, open_checkpoint(path) as other:
        for name in state:
            mine, theirs = one[name], other[name]
            mine.zero_()
            assert torch.equal(theirs, state[name])
            assert torch.equal(open_checkpoint(path)[name], state[name])
    assert path.read_bytes() == before


def test_tensors_outlive_the_checkpoint(large):
    path, state = large
    with open_checkpoint(path) as checkpoint:
        kept = {name: checkpoint[name] for name in state}
        loaded = checkpoint.load()
    path.unlink()
    for name, one in state.items():
        assert torch.equal(kept[name], one)
        assert torch.equal(loaded[name], one)


def test_tied_tensors_read_one_after_the_other_share_memory(tmp_path):
    weight = torch.randn(300, 300)
    path = saved({"a": weight, "b": weight, "c": weight[10:20]}, tmp_path / "a.pt")
    with open_checkpoint(path) as checkpoint:
        a, b, c = (checkpoint[name] for name in "abc")
        a[10] = 7
        assert b[10, 0] == c[0, 0] == 7
        del a, b, c
        assert torch.equal(checkpoint["a"], weight)  # writes are gone with the tensors
        assert checkpoint.ties() == {"b": "a"}


def test_many_threads_read_at_once(large):
    path, state = large
    with open_checkpoint(path) as checkpoint, ThreadPoolExecutor(4) as pool:

        def read(name):
            return torch.equal(checkpoint[name], state[name]) and torch.equal(
                checkpoint.load([name])[name], state[name]
            )

        assert all(pool.map(read, [*state] * 200))


def model():
    torch.manual_seed(0)
    made = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
    )
    made[2].weight = made[0].weight
    return made


@pytest.mark.parametrize("name", ["a.pt", "legacy.pt", "a.safetensors"])
def test_what_is_not_in_memory_is_read_from_the_disk_to_its_place(tmp_path, name):
    sizes = [5, 4_096, 300_001, 1 << 20, 3_000_000, (1 << 23) + 4_099, 1 << 23]
    state = {f"w{k}": torch.randint(0, 256, (n,), dtype=torch.uint8) for k, n in enumerate(sizes)}
    path = tmp_path / name
    if path.suffix == ".pt":
        saved(state, path, zipped=name == "a.pt")
    else:
        save_file(state, path)
    for before in (0, 1, 64):  # where in their memory targets begin
        into = {
            key: torch.zeros(len(w) + 100, dtype=torch.uint8)[before : before + len(w)]
            for key, w in state.items()
        }
        with open_checkpoint(path) as checkpoint:
            if evict(path):
                pytest.skip("files stay in memory here")
            checkpoint.load(into=into)
            evict(path)
            found = checkpoint.load()
        for key, w in state.items():
            assert torch.equal(into[key], w)
            assert torch.equal(found[key], w)
            memory = into[key]._base
            assert memory[:before].sum() == memory[before + len(w) :].sum() == 0


def test_a_model_and_its_optimizer_are_filled_in_place(tmp_path):
    one = model()
    optimizer = torch.optim.AdamW(one.parameters())
    one(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    state = {"model": one.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    path = saved(state, tmp_path / "a.pt")
    other = model()
    other(torch.randn(4, 8)).sum().backward()
    again = torch.optim.AdamW(other.parameters())
    again.step()
    for parameter in other.parameters():
        parameter.data.zero_()
    with open_checkpoint(path) as checkpoint:
        checkpoint.load(into={"model": other, "optimizer": again})
        bare = checkpoint.load(prefix="model.")
        third = model()
        checkpoint.load(prefix="model.", into=third)
    for made in (other, third):
        for name, right in one.state_dict().items():
            assert torch.equal(made.state_dict()[name], right)
            assert torch.equal(bare[name], right)
    assert other[2].weight is other[0].weight
    for mine, theirs in zip(again.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@quickly
@given(
    state=states(views=("whole", "columns", "turned", "corner", "flat"), dtypes=4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    turned=st.booleans(),
)
def test_targets_of_other_dtypes_and_strides_are_filled(tmp_path_factory, state, dtype, turned):
    path = saved(state, tmp_path_factory.mktemp("into") / "a.pt")
    with open_checkpoint(path) as checkpoint:
        targets = {}
        for name in checkpoint:
            shape = checkpoint.info(name).shape
            targets[name] = (
                torch.full(shape[::-1], 9, dtype=dtype).permute(*range(len(shape))[::-1])
                if turned
                else torch.full(shape, 9, dtype=dtype)
            )
        checkpoint.load(into=targets)
        for name, target in targets.items():
            expected = checkpoint[name].detach().to(dtype)
            assert seen(target, strides=False) == seen(expected, strides=False)


UNTYPED = code.call(
    "torch._utils._rebuild_tensor_v3",
    code.storage("0", 16, code.name("torch.storage.UntypedStorage")),
    0,
    (4,),
    (1,),
    False,
    None,
    code.name("torch.uint32"),
)


@pytest.mark.parametrize(
    "made, dtype, torchs",
    # torch is wrong: it swaps by the storage, which is of bytes, and the dtype comes later
    [(code.tensor(), ">f4", [0, 1, 2, 3]), (UNTYPED, ">u4", [0, 1 << 24, 2 << 24, 3 << 24])],
)
def test_numbers_of_the_other_byte_order_are_swapped(tmp_path, made, dtype, torchs):
    numbers = {"0": np.arange(4, dtype=dtype).tobytes()}
    path = zip_file(tmp_path / "a.pt", code.program(made), numbers, byteorder="big")
    with open_checkpoint(path) as checkpoint:
        for one in (checkpoint["tensor"], checkpoint.load()["tensor"]):
            assert one.tolist() == [0, 1, 2, 3]
        assert checkpoint.get_slice("tensor")[1:3].tolist() == [1, 2]
    assert torch.load(path, weights_only=True).tolist() == torchs


def test_whatever_nests_plain_tensors_is_a_container_of_them(tmp_path):
    sparse = torch.eye(3).to_sparse()
    path = saved({"s": sparse, "w": torch.ones(2)}, tmp_path / "a.pt")
    with open_checkpoint(path) as checkpoint:
        inner = [name for name in checkpoint if name.startswith("s.")]
        assert [tuple(checkpoint[name].shape) for name in inner] == [(2, 3), (3,)]
        assert checkpoint["w"].tolist() == [1, 1]
        with pytest.raises(CheckpointError, match="sparse"):
            checkpoint["s"]


def test_a_pickled_module_has_the_names_of_its_state_dict(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.BatchNorm1d(2))
    model[0].register_buffer("frequencies", torch.ones(2), persistent=False)
    with open_checkpoint(saved(model, tmp_path / "a.pt")) as checkpoint:
        assert list(checkpoint) == list(model.state_dict())
        assert not checkpoint.metadata


class Index:
    """A key, as the metadata of ``torch.distributed.checkpoint`` has one for each chunk."""


class Node:
    """An object that leads back to itself, as those of OmegaConf do."""

    def __init__(self):
        self.weight, self.children = torch.ones(2), [self]
        self._parent = {"other": torch.ones(4)}


def test_tensors_in_objects_that_lead_back_to_themselves_are_read(tmp_path):
    with open_checkpoint(saved({"config": Node(), "w": torch.ones(3)}, tmp_path / "a.pt")) as found:
        assert {name: len(one) for name, one in found.items()} == {"config.weight": 2, "w": 3}
        assert found.tree()["w"].shape == (3,)
    peers = [Node() for _ in range(150)]
    for one in peers[:9]:
        one.children = peers[:9]
    for one, after in pairwise(peers[9:]):
        one.children = [after]
    path = saved({"all": peers[0], "first": peers[9], "w": torch.ones(3)}, tmp_path / "b.pt")
    with open_checkpoint(path) as found:
        assert sum(name.startswith("all") for name in found) == 9
        assert found["w"].shape == (3,)


def test_an_empty_view_may_begin_beyond_its_storage(tmp_path):
    state = {"empty": torch.ones(4, 5)[4:][:, 3:], "w": torch.ones(1)}
    with open_checkpoint(saved(state, tmp_path / "a.pt")) as checkpoint:
        assert checkpoint.load()["empty"].shape == checkpoint.get_slice("empty")[:].shape == (0, 2)
        checkpoint.load(into={name: value.clone() for name, value in state.items()})


def test_files_that_are_gone_close_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (60, 60))
    path, other = (saved({"w": torch.ones(2)}, tmp_path / name) for name in ("a.pt", "b.pt"))
    with open_checkpoint(path) as checkpoint:
        path.unlink()
        for _ in range(20):
            open_checkpoint(other).close()
        assert checkpoint["w"].tolist() == [1, 1]


def test_text_of_numpy_is_data(tmp_path):
    state = {"names": np.array(["naïve"]), "best": np.str_("epoch3"), "3": 0.5}
    renamed = {np.int64(3) if key == "3" else key: value for key, value in state.items()}
    with open_checkpoint(saved(renamed, tmp_path / "a.pt")) as found:
        assert dict(found.metadata) == state


KEYS = [lambda _: Index(), lambda k: (str(k), k), lambda k: k << 30]


@pytest.mark.parametrize("key", KEYS)
def test_a_dictionary_may_have_many_keys(tmp_path, key):
    values = {key(number): number for number in range(60_000)}
    with open_checkpoint(saved({"values": values}, tmp_path / "a.pt")) as checkpoint:
        assert [*checkpoint.tree()["values"].values()] == [*range(60_000)]


def test_the_level_of_storages_gives_bytes(tmp_path):
    weight = torch.arange(10, dtype=torch.int16)
    for zipped, opener in (
        (True, LazyDataSource.from_zip),
        (False, LazyDataSource.from_legacy_multi_storage),
    ):
        with opener(
            saved({"w": weight, "v": weight[3:]}, tmp_path / "a.pt", zipped=zipped)
        ) as source:
            (key,) = source.keys()
            assert source.contains(key)
            assert source.contains(f"data/{key}")
            assert not source.contains("nothing")
            assert source.read(key) == weight.numpy().tobytes()
            assert source.read_range(key, 4, 6) == weight.numpy().tobytes()[4:10]
            with pytest.raises(CheckpointError, match=r"a\.pt"):
                source.read_range(key, 15, 10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a callback
def test_an_interrupted_load_leaves_no_thread_that_writes(tmp_path):
    path = saved({"w": torch.ones(1 << 24)}, tmp_path / "a.pt")
    target, interrupted = torch.zeros(1 << 24), 0

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with open_checkpoint(path) as checkpoint:
            for _ in range(30):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.004)
                    checkpoint.load(into={"w": target})
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
                alive = [one.name for one in threading.enumerate() if one.is_alive()]
                assert not [name for name in alive if name.startswith("npydata")]
            checkpoint.load(into={"w": target})
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted
    assert torch.equal(target, torch.ones(1 << 24))


def test_reading_from_a_handler_and_from_del_in_the_middle_of_a_load(tmp_path):
    path = saved({f"w{k}": torch.full((1 << 16,), float(k)) for k in range(20)}, tmp_path / "a.pt")
    with open_checkpoint(path) as checkpoint:
        right = []

        class Reads:
            def __del__(self):
                right.append(float(checkpoint["w3"][0]) == 3)

        def handler(*_):
            Reads()
            right.append(float(checkpoint.load(["w5"])["w5"][0]) == 5)

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            for _ in range(20):
                assert all(float(one[0]) == k for k, one in enumerate(checkpoint.load().values()))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert right
    assert all(right)


FEW_DESCRIPTORS = """
import json, resource, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from npydata import open_checkpoint
folder, shards, allowed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for k in range(shards):
    save_file({f"w{k}": torch.full((20_000,), float(k))}, folder / f"s{k:05d}.safetensors")
where = {f"w{k}": f"s{k:05d}.safetensors" for k in range(shards)}
(folder / "m.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
with open_checkpoint(folder) as checkpoint:
    assert all(float(checkpoint[f"w{k}"][0]) == k for k in range(shards))
    assert all(float(one[0]) == k for k, one in enumerate(checkpoint.load().values()))
"""


@pytest.mark.parametrize(
    "shards, allowed", [(120, 48), pytest.param(2000, 256, marks=pytest.mark.soak)]
)
def test_a_set_may_have_more_files_than_a_process_may_open(tmp_path, shards, allowed):
    subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS, str(tmp_path), str(shards), str(allowed)],
        check=True,
    )


@pytest.mark.soak
@pytest.mark.parametrize("format", ["zip", "safetensors"])
def test_300_000_tensors_are_read_with_few_maps(tmp_path, format):
    state = {f"layers.{k}.weight": torch.full((2,), float(k)) for k in range(300_000)}
    path = tmp_path / f"a.{format}"
    torch.save(state, path) if format == "zip" else save_file(state, path)
    with open_checkpoint(path) as checkpoint:
        kept = {name: checkpoint[name] for name in state}
        for tensors in (kept, checkpoint.load()):
            assert all(float(tensors[name][1]) == float(state[name][1]) for name in state)
        assert len(Path("/proc/self/maps").read_text().splitlines()) < 10_000


def test_a_forked_child_reads_too(large):
    path, state = large
    with open_checkpoint(path) as checkpoint:
        checkpoint["w"]
        child = os.fork()  # where OpenMP, and so torch.equal, may hang
        if child == 0:
            same = np.array_equal(checkpoint["w"].numpy(), state["w"].numpy())
            os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
