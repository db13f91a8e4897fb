"""Token files: every format recognised or refused in one line, read exactly, written whole."""

import os
import pickle
import signal
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from token_builders import IDS, write

from npydata import MmapDataset, TokenFileError, open_tokens, write_tokens

ACCESS = pytest.mark.parametrize("access", ["mmap", "pread"])
U2 = IDS.astype("<u2")
CODE = b"\x93NUMPY\1\0\x1a\0__import__('os').abort()\n\n"
NAMES = {"npy": "a.npy", "raw": "a.bin", "llm.c": "a.bin", "megatron": "a", "datatrove": "a.ds"}
ENDS = {"megatron": [150, 300], "datatrove": [100, 100, 300]}


def opened(folder, kind, about, **options):
    """Write a file, under the usual name of its kind if ``about`` has none, and open it."""
    written = {"name": NAMES[kind], "opened": {}, **about}
    name, options = written.pop("name"), options | written.pop("opened")
    return open_tokens(write(folder / name, kind, **written), **options)


# By kind: what is written, under which name and how it is opened if that matters. A row is read
# back as "<u2" unless it says its dtype
GOOD = {
    "npy": [
        *({"dtype": f"{order}{sign}{n}"} for order in "<>" for sign in "ui" for n in (1, 2, 4, 8)),
        {"version": (2, 0)}, {"shape": (3, 100)}, {"name": "a.dat"}, {"ids": IDS[:0]},
    ],
    "raw": [
        {"dtype": "<u4"},
        {"dtype": "<u4", "name": "a.x", "opened": {"format": "raw"}},
        {"name": "a.tok", "opened": {"dtype": np.uint16}},
        {"name": "a.npy", "opened": {"dtype": "uint16"}},  # OLMo's
    ],
    "llm.c": [{}, {"magic": 20240801, "version": 7, "dtype": "<u4"}],
    "megatron": [
        *({"code": code, "dtype": dtype}
          for code, dtype in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()),
        {"lengths": (), "documents": (0,), "ids": IDS[:0]},
    ],
    "datatrove": [{}, {"dtype": "<u4"}],
}  # fmt: skip


@ACCESS
@pytest.mark.parametrize(("kind", "about"), [(kind, one) for kind in GOOD for one in GOOD[kind]])
def test_every_format_is_recognised_and_read_without_a_descriptor_left(
    tmp_path, kind, about, access
):
    before = len(os.listdir("/proc/self/fd"))
    tokens = opened(tmp_path, kind, about, access=access)
    expected = about.get("ids", IDS).astype(about.get("dtype", "<u2"))
    shape = about.get("shape", expected.shape)
    for found in (tokens, pickle.loads(pickle.dumps(tokens))):
        assert (found.format, found.dtype, found.shape) == (kind, expected.dtype, shape)
        assert found.num_tokens == len(expected)
        assert np.array_equal(found.read(0, 10**9), expected)
    ends = tokens.document_ends
    if kind in ENDS:
        assert (ends.dtype, ends.tolist()) == (np.int64, ENDS[kind] if len(expected) else [])
    else:
        assert ends is None
    del tokens, found
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["a.bin", "a.idx", "a"])
def test_a_megatron_pair_is_named_by_either_file_or_their_prefix(tmp_path, name):
    write(tmp_path / "a", "megatron")
    assert open_tokens(tmp_path / name).document_ends.tolist() == ENDS["megatron"]


# The same, and the message
BAD = {
    "npy": [
        ({"version": (3, 0)}, r"version \(3, 0\), expected"),
        ({"dtype": "f4"}, "float32, expected an integer"),
        ({"shape": (3, 10, 10)}, r"shape \(3, 10, 10\), expected"),
        ({"cut": 500}, "500 bytes, but its header promises 728"),
        ({"opened": {"dtype": "uint32"}}, "uint16 tokens, but dtype=uint32"),
    ],
    "raw": [
        ({"name": "a.npy"}, "headerless ids .as OLMo's .npy., give their type, such as dtype="),
        ({"name": "a.npy", "ids": np.frombuffer(CODE, "<u2")}, "bad .npy header"),
        ({"cut": 5}, "5 bytes is not a multiple of 4"),
        ({"opened": {"dtype": "float32"}}, "float32, expected an integer"),
        ({"name": "a.ds"}, "has no a.ds.index"),
    ],
    "llm.c": [
        ({"magic": 20240522}, "eval file"),
        ({"version": 2}, "20240520 version 2, expected"),
        ({"magic": 1, "opened": {"format": "llm.c"}}, "magic 1 version 1"),
        ({"cut": 100}, "100 bytes, expected a header of 1024"),
        ({"count": -1}, "1624 bytes, but its header promises"),
    ],
    "megatron": [
        ({"magic": b"MMIDIDX\0\1"}, "a.idx: starts with"),
        ({"version": 2}, "a.idx: version 2, expected 1"),
        ({"code": 7, "dtype": "<f4"}, "dtype code 7, expected 1 to 5 or 8"),
        ({"lengths": (100, -50, 250)}, "a.idx: sequence 1"),
        ({"pointers": (0, 200, 301)}, "sequence 2 points at byte"),
        ({"lengths": (100, 50, 100)}, "sequences end at token 250"),
        *(({"documents": wrong}, "document index") for wrong in ((0, 2, 1), (0, 2, 4), (1, 2, 3))),
        ({"cut_index": 60}, "a.idx: 60 bytes"),
        ({"cut": 599}, "599 bytes is not a multiple"),
    ],
    "datatrove": [
        ({"ends": (100, 50, 300)}, "must rise"),
        ({"ends": (100, 200)}, "end at token 200, but"),
        ({"ends": (1 << 63, 300)}, "must rise"),
        ({"cut_index": 9}, "documents end at token"),
    ],
}


@pytest.mark.parametrize(("kind", "about", "message"),
                         [(kind, *row) for kind, rows in BAD.items() for row in rows])  # fmt: skip
def test_what_is_malformed_is_refused_in_one_line_that_names_the_file(
    tmp_path, kind, about, message
):
    with pytest.raises(TokenFileError, match=message) as error:
        _ = opened(tmp_path, kind, about).document_ends
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_plain_token_file_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe.npy")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("a", "b")
    np.save(tmp_path / "f.npy", np.asfortranarray(U2.reshape(3, 100)))
    for name, options, error, message in (
        ("pipe.npy", {}, TokenFileError, "pipe, expected a file"),
        ("a.npz", {"dtype": "u1"}, TokenFileError, "zip archive"),
        ("f.npy", {}, TokenFileError, "C order"),
        ("nowhere.npy", {}, FileNotFoundError, "nowhere"),
    ):
        with pytest.raises(error, match=message):
            open_tokens(tmp_path / name, **options)


RNG = np.random.default_rng(0)
GPT2, WIDE = RNG.integers(0, 50_257, 40_000), RNG.integers(0, 200_000, 40_000)


def test_raw_uint16_ids_read_as_uint32_are_warned_about_where_the_user_stands(tmp_path):
    path = write(tmp_path / "train.bin", "raw", ids=GPT2)
    for make in (open_tokens, lambda path: MmapDataset(path, 1)):
        with pytest.warns(UserWarning, match=r'train.bin: .*dtype="uint16"') as warned:
            make(path)
        assert [one.filename for one in warned] == [__file__]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ids", [GPT2, WIDE, WIDE[:0], np.zeros(9)])
def test_true_uint32_ids_and_a_given_dtype_raise_no_doubt(tmp_path, ids):
    path = write(tmp_path / "a.bin", "raw", ids=ids, dtype="<u4")
    assert open_tokens(path).num_tokens == len(ids)
    write(path, "raw", ids=GPT2)
    for dtype in ("uint16", "uint32"):
        open_tokens(path, dtype=dtype)


@ACCESS
def test_reads_are_exact_read_only_and_shared_by_threads(tmp_path, access):
    ids = RNG.integers(0, 65_536, 10_000).astype("<u2")
    tokens = open_tokens(write(tmp_path / "a.npy", ids=ids), access=access)

    def is_exact(seed):
        starts = np.random.default_rng(seed).integers(0, 10_000, 200).tolist()
        return all(np.array_equal(tokens.read(at, 50), ids[at : at + 50]) for at in starts)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_exact, range(4)))
    for start, count in ((-1, 5), (0, -1)):
        with pytest.raises(IndexError):
            tokens.read(start, count)
    if access == "mmap":
        with pytest.raises(ValueError, match="read-only"):
            tokens.read(0, 5)[0] = 1


@ACCESS
@pytest.mark.parametrize("sizes", [(1000,), (200_130,), (1000, 204_000), ()])
def test_a_file_that_changed_is_an_error_and_no_crash(tmp_path, monkeypatch, access, sizes):
    ids = np.arange(100_000)
    path = write(tmp_path / "a.npy", ids=ids)
    monkeypatch.chdir(tmp_path)
    dataset = MmapDataset("a.npy", 16, access=access)
    monkeypatch.chdir("/")
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 4096
    for size in sizes:
        os.truncate(path, size)
    if sizes:
        with pytest.raises(TokenFileError, match="changed since it was opened"):
            dataset.fetch([len(dataset) - 1])
    else:
        write(path, ids=ids, dtype="<i2")
    with pytest.raises(TokenFileError, match=r"a\.npy"):
        pickle.loads(pickled)


# Writing


def test_chunks_of_any_shape_are_written_one_after_the_other(tmp_path):
    chunks = [U2[:7], U2[7:297].reshape(2, 5, 29), [], [397, 398, 399]]
    written = write_tokens(tmp_path / "a.npy", iter(chunks))
    assert written.dtype == np.uint16
    assert np.array_equal(np.load(tmp_path / "a.npy"), U2)
    assert write_tokens(tmp_path / "b.npy", [[1, 2]]).dtype == np.uint32
    for whole in (U2, torch.from_numpy(U2)):  # no list of ids
        assert write_tokens(tmp_path / "b.npy", whole).dtype == np.uint16
    assert write_tokens(tmp_path / "c.npy", [], dtype="u1").shape == (0,)
    with pytest.warns(UserWarning, match="last 6 tokens"):
        write_tokens(tmp_path / "d.npy", [U2[:10], U2[10:]], row_len=np.int64(42))
    assert np.array_equal(np.load(tmp_path / "d.npy"), U2[:294].reshape(7, 42))


@pytest.mark.parametrize(("name", "chunks", "options", "message"), [
    ("a.npy", [[1, 2], [3, 70_000]], {"dtype": "u2"}, "id 70000 at token 3 does not fit uint16"),
    ("a.npy", [[1, -2]], {"dtype": "u2"}, "id -2 at token 1"),
    ("a.npy", [np.array([2**63], "<u8")], {"dtype": "i8"}, f"id {2**63} at token 0"),
    ("a.npy", [[1.5]], {}, "expected integers"),
    ("a.npy", [[True]], {}, "expected integers"),
    ("a.npy", [[1]], {"dtype": "f4"}, "expected an integer dtype"),
    ("a.npy", [[1]], {"row_len": 0}, "row_len=0"),
    ("a.npy.txt", [[1]], {}, "a.npy.txt"),
])  # fmt: skip
def test_what_cannot_be_stored_is_refused_and_nothing_written(
    tmp_path, name, chunks, options, message
):
    with pytest.raises(ValueError, match=message):
        write_tokens(tmp_path / name, chunks, **options)
    assert not list(tmp_path.iterdir())


def test_a_stream_that_breaks_leaves_the_old_file_alone(tmp_path):
    path = write(tmp_path / "a.npy")

    def chunks():
        yield U2[:10]
        raise RuntimeError("the tokenizer broke")

    with pytest.raises(RuntimeError, match="the tokenizer broke"):
        write_tokens(path, chunks())
    assert np.array_equal(np.load(path), U2)
    assert os.listdir(tmp_path) == ["a.npy"]


STREAM = """
import resource, sys, numpy as np
from npydata import write_tokens
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def chunks():
    for k in range(10**9):
        yield np.zeros(1_000_000, np.uint16)
        if k in (3, 50):
            print(peak(), flush=True)
write_tokens(sys.argv[1], chunks())
"""


def test_a_killed_writer_held_one_chunk_leaves_no_file_and_the_next_one_cleans_up(tmp_path):
    target = tmp_path / "a.npy"
    command = [sys.executable, "-c", STREAM, target]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        early, late = (int(child.stdout.readline()) for _ in range(2))
        (partial,) = tmp_path.glob(".*.npydata-tmp")
        assert partial.stat().st_mode & 0o777 == 0o600
        child.send_signal(signal.SIGKILL)
    assert late - early < 8 << 10  # KiB; 100 MB were written
    assert not target.exists()
    write_tokens(target, [U2])
    assert os.listdir(tmp_path) == ["a.npy"]
