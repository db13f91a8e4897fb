"""Tensors in chunks: the pure functions on every small case, and sets of files written by hand."""

import itertools
import json
import math
import random
import time

import numpy as np
import pytest
import torch
from checkpoint_tools import bitwise
from safetensors import safe_open
from safetensors.torch import save_file

from npydata import CheckpointError, open_checkpoint
from npydata.reader import convert as convert_module
from npydata.reader.sharded import chosen_of, halves, in_rows, overlap, tile, validate_chunks

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.uint8)


def cuts_of(size, chance):
    """Return places that cut a dimension into chunks, some of them empty."""
    inner = sorted(chance.randint(0, size) for _ in range(chance.randint(0, 3)))
    return [0, *inner, size]


def chunks_of(shape, chance):
    """Return chunks, offsets and sizes, that make up a tensor: a grid with places of its own."""
    sides = [list(itertools.pairwise(cuts_of(size, chance))) for size in shape]
    return [
        (tuple(a for a, _ in chunk), tuple(b - a for a, b in chunk))
        for chunk in itertools.product(*sides)
    ]


def numbers(shape, dtype=torch.float32):
    """Return a tensor whose elements differ, as far as its dtype lets them."""
    flat = torch.arange(math.prod(shape)) % (2 if dtype == torch.bool else 251)
    return flat.to(dtype).reshape(shape)


def part_of(tensor, chunk):
    """Return the elements of a chunk."""
    return tensor[tuple(slice(o, o + n) for o, n in zip(*chunk, strict=True))].clone()


def write_set(folder, files, wholes=None, **metadata):
    """Write files of parts: each is ``{name: (offsets, tensor)}``; ``wholes`` are noted shapes."""
    folder.mkdir(exist_ok=True)
    for k, parts in enumerate(files):
        info = {name: {"saved_offsets": list(offsets)} for name, (offsets, _) in parts.items()}
        texts = {"DCP_SHARDING_INFO": json.dumps(info)}
        if wholes is not None:
            texts["npydata"] = json.dumps({"shapes": wholes})
        tensors = {name: tensor for name, (_, tensor) in parts.items()}
        save_file(tensors, folder / f"rank_{k}.safetensors", {**texts, **metadata})
    return folder


def write_parts(folder, tensors, chance, files=3, noted_shapes=True):
    """Write tensors in parts that lie in any order in some files."""
    content = [{} for _ in range(files)]
    for name, tensor in tensors.items():
        found = chunks_of(tensor.shape, chance) if tensor.ndim else [((), ())]
        for number, chunk in enumerate(chance.sample(found, len(found))):
            while number >= len(content):
                content.append({})
            order = chance.sample(range(len(content)), len(content))
            place = next((k for k in order if name not in content[k]), None)
            if place is None:
                content.append({})
                place = len(content) - 1
            content[place][name] = (chunk[0], part_of(tensor, chunk))
    wholes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    return write_set(folder, content, wholes if noted_shapes else None)


def random_index(shape, chance):
    """Return an index of any form that a slice takes."""
    index = []
    for size in shape[: chance.randint(0, len(shape))]:
        kind = chance.random()
        if kind < 0.25 and size:
            index.append(chance.randrange(-size, size))
        elif kind < 0.35:
            index.append(slice(None))
        else:
            ends = [chance.choice([None, chance.randint(-size - 2, size + 2)]) for _ in "ab"]
            index.append(slice(*ends, chance.choice([None, 1, 1, 2, 3, 7])))
    if chance.random() < 0.3 and len(index) < len(shape):
        index.insert(chance.randint(0, len(index)), ...)
        # what stands behind the dots counts from the end
        behind = len(index) - index.index(...) - 1
        for k in range(behind):
            if isinstance(index[-1 - k], int):
                size = shape[-1 - k]
                index[-1 - k] = chance.randrange(-size, size) if size else slice(None)
    return tuple(index) if len(index) != 1 or chance.random() < 0.5 else index[0]


@pytest.mark.parametrize("seed", range(12))
def test_any_slice_of_any_tensor_in_parts_is_that_of_the_whole(tmp_path, seed):
    chance = random.Random(seed)
    tensors = {}
    for k in range(8):
        shape = tuple(chance.randint(0 if k == 7 else 1, 9) for _ in range(chance.randint(0, 4)))
        tensors[f"t{k}"] = numbers(shape, chance.choice(DTYPES))
    folder = write_parts(tmp_path / "set", tensors, chance, noted_shapes=seed % 2 == 0)
    with open_checkpoint(folder) as checkpoint:
        assert set(checkpoint) == set(tensors)
        for name, tensor in tensors.items():
            assert bitwise(checkpoint[name]) == bitwise(tensor)
            for _ in range(40):
                index = random_index(tensor.shape, chance)
                found = checkpoint.get_slice(name)[index]
                assert bitwise(found) == bitwise(tensor[index]), (name, index)
                assert found.is_contiguous()


@pytest.mark.parametrize("bad", [(5,), (-6,), (0, 0, 0), (slice(None, None, -1),), (True,), ("a",)])
def test_a_wrong_index_is_refused_as_by_a_tensor(tmp_path, bad):
    tensors = {"t": numbers((5, 4))}
    folder = write_parts(tmp_path / "set", tensors, random.Random(3))
    with open_checkpoint(folder) as checkpoint, pytest.raises((IndexError, TypeError, ValueError)):
        checkpoint.get_slice("t")[bad]


def test_what_is_read_may_be_written_to_and_the_files_stay_as_they_are(tmp_path):
    folder = write_parts(tmp_path / "set", {"t": numbers((5, 4))}, random.Random(3))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with open_checkpoint(folder) as checkpoint:
        checkpoint["t"].fill_(7)
        assert bitwise(checkpoint["t"]) == bitwise(numbers((5, 4)))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_only_the_parts_that_a_slice_touches_are_read(tmp_path):
    rows = [{"t": ((4 * k, 0), numbers((4, 3)) + k)} for k in range(3)]
    folder = write_set(tmp_path / "set", rows, {"t": [12, 3]})
    with open_checkpoint(folder) as checkpoint:
        (folder / "rank_2.safetensors").unlink()
        checkpoint._contents.archives[2].file.close()
        assert checkpoint.get_slice("t")[3:8].shape == (5, 3)
        with pytest.raises(CheckpointError):
            checkpoint.get_slice("t")[3:9]


# Pure functions


def small_slices(size):
    """Return every slice of a small dimension that steps forwards."""
    ends = [None, *range(-size - 1, size + 2)]
    return [slice(a, b, s) for a in ends for b in ends for s in (None, 1, 2, 3)]


@pytest.mark.parametrize("size", range(6))
def test_an_overlap_is_where_chosen_elements_lie_in_a_box(size):
    whole = np.arange(size)
    for one in [*small_slices(size), *range(-size, size)]:
        chosen = chosen_of((size,), one)
        wanted = np.atleast_1d(whole[one])
        for offset in range(size + 1):
            for length in range(size - offset + 1):
                chunk = whole[offset : offset + length]
                inside = [k for k, value in enumerate(wanted) if value in chunk]
                both = overlap(chosen, ((offset,), (length,)))
                if both is None:
                    assert not inside
                else:
                    (there,), (here,) = both
                    assert list(range(size)[there]) == inside
                    assert chunk[here].tolist() == wanted[inside].tolist()


def test_an_overlap_in_two_dimensions_is_that_of_each():
    chosen = chosen_of((6, 5), (slice(1, None, 2), -2))
    assert overlap(chosen, ((2, 0), (4, 4))) == (
        (slice(1, 3), slice(0, 1)),
        (slice(1, 4, 2), slice(3, 4, 1)),
    )
    assert overlap(chosen, ((2, 0), (4, 3))) is None
    assert overlap(chosen, ((2, 0), (1, 4))) is None
    assert overlap([], ((), ())) == ((), ())


def fills(shape, chunks):
    """Whether chunks hold each element of a tensor once, by counting."""
    count = np.zeros(shape, int)
    for offsets, sizes in chunks:
        if any(o + n > m for o, n, m in zip(offsets, sizes, shape, strict=True)) and all(sizes):
            return False
        count[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    return bool((count == 1).all())


@pytest.mark.parametrize("shape", [(4,), (2, 2), (0,), (0, 2), (3, 2)])
def test_boxes_make_up_a_tensor_if_each_element_is_in_one(shape):
    """All sets of up to three chunks of a small tensor, some of which reach beyond it."""
    spans = [[(o, n) for o in range(size + 1) for n in range(size + 2 - o)] for size in shape]
    chunks = [(tuple(o for o, _ in b), tuple(n for _, n in b)) for b in itertools.product(*spans)]
    chance, held = random.Random(0), 0
    sets = [list(some) for count in (1, 2) for some in itertools.product(chunks, repeat=count)]
    sets += [chance.choices(chunks, k=3) for _ in range(5000)]
    for some in sets if len(sets) < 20_000 else chance.sample(sets, 20_000):
        assert (validate_chunks(shape, some) is None) == fills(shape, some), some
        held += fills(shape, some)
    assert held


def test_grids_fit_until_a_box_is_moved_or_left_out():
    chance = random.Random(5)
    for _ in range(300):
        shape = tuple(chance.randint(1, 6) for _ in range(chance.randint(1, 3)))
        chunks = chunks_of(shape, chance)
        chance.shuffle(chunks)
        assert validate_chunks(shape, chunks) is None
        full = [k for k, (_, sizes) in enumerate(chunks) if all(sizes)]
        k = chance.choice(full)
        assert "elements, expected" in validate_chunks(shape, chunks[:k] + chunks[k + 1 :])
        dim = chance.randrange(len(shape))
        moved = [o + (d == dim) for d, o in enumerate(chunks[k][0])]
        assert validate_chunks(shape, [*chunks[:k], (tuple(moved), chunks[k][1]), *chunks[k + 1 :]])
        other = chance.choice([one for one in full if chunks[one][1] == chunks[k][1]])
        if other != k:
            assert "overlap" in validate_chunks(
                shape, [*chunks[:k], chunks[other], *chunks[k + 1 :]]
            )


def test_chunks_tile_a_tensor_if_each_element_is_in_one():
    """Chunks that miss some elements and overlap in others, or lie outside, in any number."""
    chance, held = random.Random(1), 0
    for _ in range(3000):
        shape = tuple(chance.randint(1, 3) for _ in range(chance.randint(1, 3)))
        chunks = chunks_of(shape, chance)
        for _ in range(chance.choice([0, 1, 2])):
            k, dim = chance.randrange(len(chunks)), chance.randrange(len(shape))
            offsets, sizes = map(list, chunks[k])
            chance.choice([offsets, sizes])[dim] += 1
            chunks[k] = tuple(offsets), tuple(sizes)
        assert tile(shape, chunks) == fills(shape, chunks), (shape, chunks)
        held += fills(shape, chunks)
    assert 500 < held < 2500


@pytest.mark.parametrize("rows, columns", [(100_000, 1), (1, 100_000), (300, 300)])
def test_a_hundred_thousand_chunks_are_not_compared_each_with_each(rows, columns):
    """Which would take minutes, in a grid."""
    chunks = [((row, 2 * column), (1, 2)) for row in range(rows) for column in range(columns)]
    random.Random(0).shuffle(chunks)
    shape = rows, 2 * columns
    overlapping = [*chunks[:-1], chunks[0]]
    begin = time.process_time()
    assert validate_chunks(shape, chunks) is None
    assert validate_chunks(shape, overlapping) == "two of its chunks overlap"
    assert time.process_time() - begin < 4


@pytest.mark.parametrize(
    "shape", [(), (5,), (0, 3), (3, 0), (4, 3), (2, 3, 4), (1, 7, 2), (3, 1, 5)]
)
@pytest.mark.parametrize("nbytes", [1, 4, 8, 12, 20, 48, 100])
def test_blocks_are_the_elements_in_order_each_of_few_bytes(shape, nbytes):
    whole = np.arange(math.prod(shape)).reshape(shape)
    found = [whole[block].ravel() for block in halves(shape, 4, nbytes, ())]
    assert np.concatenate([np.empty(0, int), *found]).tolist() == whole.ravel().tolist()
    assert all(block.size * 4 <= max(nbytes, 4) for block in found)
    if math.prod(shape) * 4 <= nbytes and math.prod(shape):
        assert len(found) == 1


def test_offsets_near_2_to_the_63_do_not_wrap_round():
    most = 2**63 - 1
    for far in (most, most - 1, 2**62):
        assert "beyond" in validate_chunks((4,), [((0,), (2,)), ((far,), (2,))])
    assert validate_chunks((most,), [((0,), (most - 1,)), ((most - 1,), (1,))]) is None
    for shape in ((2**32, 2**32), (0, 2**62, 2)):  # as torch counts: as if no size were 0
        assert "2^63" in validate_chunks(shape, [((0,) * len(shape), shape)])
    assert validate_chunks((most, 0), [((most, 0), (most, 0))]) is None


# From many files to one


@pytest.mark.parametrize("dims", ["rows", "columns", "grid"])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_set_becomes_one_file_in_chunks_of_any_size(tmp_path, monkeypatch, dims, dtype):
    monkeypatch.setattr(convert_module, "CHUNK_BYTES", 32)
    tensors = {"f": numbers((6, 8)), "i": numbers((6, 8), torch.int64), "c": numbers((6, 4, 2)),
               "z": numbers((6, 8), torch.complex64), "e": numbers((0, 8))}  # fmt: skip
    cut = {"rows": [(0, 2), (2, 6)], "columns": [(0, 3), (3, 4)], "grid": [(0, 3), (3, 4)]}[dims]
    files = [{} for _ in range(4)]
    for name, tensor in tensors.items():
        dim = 0 if dims == "rows" else 1
        sides = [[(0, size)] for size in tensor.shape]
        sides[dim] = [(cut[0][0], cut[0][1]), (cut[1][0], tensor.shape[dim])]
        if tensor.shape[dim] == 0:
            sides[dim] = [(0, 0)]
        elif dims == "grid" and tensor.shape[0]:
            sides[0] = [(0, 1), (1, tensor.shape[0])]
        for k, chunk in enumerate(itertools.product(*sides)):
            spot = tuple(a for a, _ in chunk), tuple(b - a for a, b in chunk)
            files[3 - k][name] = (spot[0], part_of(tensor, spot))
    with open_checkpoint(write_set(tmp_path / "set", files)) as checkpoint:
        stored = checkpoint._entry("f").value
        assert in_rows(stored) == (dims == "rows")
        checkpoint.to_safetensors(tmp_path / "one.safetensors", dtype=dtype)
    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        for name, tensor in tensors.items():
            wanted = tensor.to(dtype) if dtype and tensor.dtype.is_floating_point else tensor
            assert bitwise(file.get_tensor(name)) == bitwise(wanted), name


# Sets that don't fit: see attacks/shards.py for hostile ones


def good():
    return [{"a": ((0, 0), numbers((2, 3)))}, {"a": ((2, 0), numbers((2, 3)))}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one, two: (one, {}), "a: its files hold 6 elements, expected 12: \\[4, 3\\]"),
        (lambda one, two: (one, {"a": ((1, 0), two["a"][1])}), "a: two of its chunks overlap"),
        (lambda one, two: (one, {"a": ((3, 0), two["a"][1])}), "beyond its sizes, \\[4, 3\\]"),
        (lambda one, two: (one, {"a": ((2, 0), two["a"][1].double())}), "different dtypes"),
        (lambda one, two: (one, {"a": ((2,), two["a"][1][0])}), "different dtypes or dimensions"),
        (lambda one, two: (one, {"a": ((2, 1), two["a"][1])}), "beyond its sizes"),
    ],
)
def test_parts_that_do_not_make_a_tensor_are_refused(tmp_path, change, message):
    files = change(*good())
    folder = write_set(tmp_path / "set", files, {"a": [4, 3]})
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)


def test_without_noted_shapes_the_parts_say_how_large_a_tensor_is(tmp_path):
    with open_checkpoint(write_set(tmp_path / "set", good())) as checkpoint:
        assert checkpoint.info("a").shape == (4, 3)
        assert checkpoint.format == "sharded"


def test_a_file_without_sharding_in_a_set_is_refused(tmp_path):
    folder = write_set(tmp_path / "set", good())
    save_file({"b": torch.ones(2)}, folder / "zz.safetensors")
    with pytest.raises(CheckpointError, match=r"zz\.safetensors does not say where its tensors"):
        open_checkpoint(folder)


def test_one_shard_alone_opens_as_the_file_that_it_is(tmp_path):
    folder = write_set(tmp_path / "set", good(), {"a": [4, 3]})
    with open_checkpoint(folder / "rank_1.safetensors") as checkpoint:
        assert checkpoint["a"].shape == (2, 3)
