"""Token files: every format recognised or refused in one line, read exactly, written whole."""

# ruff: noqa: E501  (tables of data)

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile

import numpy as np
import pytest
from token_builders import (
    IDS,
    write_datatrove,
    write_llmc,
    write_megatron,
    write_npy,
    write_raw,
)

from npydata import MmapDataset, NpyDataError, TokenFileError, open_tokens, write_tokens

ACCESS = pytest.mark.parametrize("access", ["mmap", "pread"])
U2 = IDS.astype("<u2")

# name -> (make, options of open_tokens, what it is: format, dtype, shape, document ends)
GOOD = {
    **{f"npy {d}": (lambda p, d=d: write_npy(p / "a.npy", U2.astype(d)), {}, ("npy", d, (300,), None))
       for d in ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", ">u2")},
    "npy 2.0": (lambda p: write_npy(p / "a.npy", U2, (2, 0)), {}, ("npy", "<u2", (300,), None)),
    "npy 2-D": (lambda p: write_npy(p / "a.npy", U2.reshape(3, 100)), {}, ("npy", "<u2", (3, 100), None)),
    "npy, other name": (lambda p: write_npy(p / "a.dat", U2), {}, ("npy", "<u2", (300,), None)),
    "npy, empty": (lambda p: write_npy(p / "a.npy", U2[:0]), {}, ("npy", "<u2", (0,), None)),
    "raw uint32": (lambda p: write_raw(p / "a.bin", IDS, "<u4"), {}, ("raw", "<u4", (300,), None)),
    "raw uint16": (lambda p: write_raw(p / "a.bin"), {"dtype": "uint16"}, ("raw", "<u2", (300,), None)),
    "raw, other name": (lambda p: write_raw(p / "a.tok"), {"dtype": np.uint16}, ("raw", "<u2", (300,), None)),
    "raw, by name": (lambda p: write_raw(p / "a.x", IDS, "<u4"), {"format": "raw"}, ("raw", "<u4", (300,), None)),
    "raw, empty": (lambda p: write_raw(p / "a.bin", []), {}, ("raw", "<u4", (0,), None)),
    "llm.c v1": (lambda p: write_llmc(p / "a.bin"), {}, ("llm.c", "<u2", (300,), None)),
    "llm.c v7": (lambda p: write_llmc(p / "a.bin", 20240801, 7, "<u4"), {}, ("llm.c", "<u4", (300,), None)),
    **{f"megatron {given}": (lambda p, given=given: (write_megatron(p / "a.bin"), p / given)[1], {},
                             ("megatron", "<u2", (300,), [150, 300])) for given in ("a.bin", "a.idx", "a")},
    **{f"megatron code {code}": (lambda p, c=code, d=d: write_megatron(p / "a", code=c, dtype=d), {},
                                 ("megatron", d, (300,), [150, 300]))
       for code, d in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()},
    "megatron, no documents": (lambda p: write_megatron(p / "a", (), (0,), ids=IDS[:0]), {},
                               ("megatron", "<u2", (0,), [])),
    "datatrove u2": (lambda p: write_datatrove(p / "a.ds"), {}, ("datatrove", "<u2", (300,), [100, 100, 300])),
    "datatrove u4": (lambda p: write_datatrove(p / "a.ds", dtype="<u4"), {},
                     ("datatrove", "<u4", (300,), [100, 100, 300])),
    "olmo": (lambda p: write_raw(p / "a.npy"), {"dtype": "uint16"}, ("raw", "<u2", (300,), None)),
}  # fmt: skip


@ACCESS
@pytest.mark.parametrize("name", GOOD)
def test_every_format_is_recognised_and_read(tmp_path, name, access):
    make, options, (format_, dtype, shape, ends) = GOOD[name]
    tokens = open_tokens(make(tmp_path), access=access, **options)
    assert (tokens.format, tokens.dtype, tokens.shape) == (format_, np.dtype(dtype), shape)
    assert tokens.num_tokens == np.prod(shape)
    expected = IDS[: tokens.num_tokens].astype(dtype)
    assert np.array_equal(tokens.read(0, 10**9), expected)
    assert np.array_equal(tokens.read(17, 5), expected[17:22])
    found = tokens.document_ends
    assert found is ends or (np.asarray(found).dtype == np.int64 and list(found) == ends)
    again = pickle.loads(pickle.dumps(tokens))
    assert (again.format, again.dtype, again.shape) == (format_, np.dtype(dtype), shape)


def cut(path, size):
    os.truncate(path, size)
    return path


def text(path, content):
    path.write_bytes(content)
    return path


def header(text):
    """An .npy 1.0 file with this header."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def zipped(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a", "b")
    return path


# name -> (make, options of open_tokens, a part of the message)
BAD = {
    "npy 3.0": (lambda p: write_npy(p / "a.npy", U2, (3, 0)), {}, r"version \(3, 0\), expected"),
    "npy floats": (lambda p: write_npy(p / "a.npy", U2.astype("f4")), {}, "float32, expected an integer"),
    "npy objects": (lambda p: write_npy(p / "a.npy", np.array([print, 1])), {}, "object, expected an integer"),
    "npy 3-D": (lambda p: write_npy(p / "a.npy", U2.reshape(3, 10, 10)), {}, r"shape \(3, 10, 10\), expected"),
    "npy 0-D": (lambda p: write_npy(p / "a.npy", np.array(1)), {}, r"shape \(\), expected"),
    "npy Fortran": (lambda p: write_npy(p / "a.npy", np.asfortranarray(U2.reshape(3, 100))), {}, "C order"),
    "npy cut": (lambda p: cut(write_npy(p / "a.npy", U2), 500), {}, "500 bytes, but its header promises 728"),
    "npy too long": (lambda p: text(p / "a.npy", write_npy(p / "b", U2).read_bytes() + b"x"), {}, "729 bytes"),
    "npy cut header": (lambda p: cut(write_npy(p / "a.npy", U2), 20), {}, "bad .npy header"),
    "npy code": (lambda p: text(p / "a.npy", header(b"__import__('os').mkdir('x')\n")), {}, "bad .npy header"),
    "npy negative": (lambda p: text(p / "a.npy", header(
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (-1,)}\n")), {}, "shape|header"),
    "raw odd": (lambda p: text(p / "a.bin", bytes(5)), {}, "5 bytes is not a multiple of 4"),
    "raw odd u2": (lambda p: text(p / "a.bin", bytes(5)), {"dtype": "uint16"}, "5 bytes is not a multiple of 2"),
    "raw floats": (lambda p: write_raw(p / "a.bin"), {"dtype": "float32"}, "float32, expected an integer"),
    "raw nonsense": (lambda p: write_raw(p / "a.bin"), {"dtype": "uint17"}, "'uint17' is not a dtype"),
    "unknown": (lambda p: text(p / "a.xyz", b"whatever"), {}, "cannot tell its format"),
    "zip": (lambda p: zipped(p / "a.bin"), {}, "zip archive"),
    "zip, dtype": (lambda p: zipped(p / "a.npz"), {"dtype": "u1"}, "zip archive"),
    "llm.c eval": (lambda p: write_llmc(p / "a.bin", 20240522), {}, "eval file"),
    "llm.c version": (lambda p: write_llmc(p / "a.bin", version=2), {}, "20240520 version 2, expected"),
    "llm.c magic": (lambda p: write_llmc(p / "a.bin", 1), {"format": "llm.c"}, "magic 1 version 1"),
    "llm.c short": (lambda p: cut(write_llmc(p / "a.bin"), 100), {}, "100 bytes, expected a header of 1024"),
    "llm.c cut": (lambda p: cut(write_llmc(p / "a.bin"), 1600), {}, "1600 bytes, but its header promises 1624"),
    "llm.c negative": (lambda p: write_llmc(p / "a.bin", count=-1), {}, "1624 bytes, but its header promises"),
    "megatron magic": (lambda p: write_megatron(p / "a", magic=b"MMIDIDX\0\1"), {}, "a.idx: starts with"),
    "megatron version": (lambda p: write_megatron(p / "a", version=2), {}, "a.idx: version 2, expected 1"),
    "megatron code": (lambda p: write_megatron(p / "a", code=9), {}, "dtype code 9, expected 1 to 8"),
    "megatron floats": (lambda p: write_megatron(p / "a", code=7, dtype="<f4"), {}, "float32, expected an integer"),
    "megatron lengths": (lambda p: write_megatron(p / "a", lengths=(100, -50, 250)), {}, "a.idx: sequence 1"),
    "megatron pointers": (lambda p: write_megatron(p / "a", pointers=(0, 200, 301)), {}, "sequence 2 points at byte"),
    "megatron documents": (lambda p: write_megatron(p / "a", documents=(0, 2, 1)), {}, "document index"),
    "megatron beyond": (lambda p: write_megatron(p / "a", documents=(0, 2, 4)), {}, "document index"),
    "megatron first": (lambda p: write_megatron(p / "a", documents=(1, 2, 3)), {}, "document index"),
    "megatron short": (lambda p: write_megatron(p / "a", lengths=(100, 50, 100)), {}, "sequences end at token 250"),
    "megatron cut": (lambda p: (write_megatron(p / "a"), cut(p / "a.idx", 60), p / "a.bin")[2], {}, "a.idx: 60 bytes"),
    "megatron empty": (lambda p: (write_megatron(p / "a"), cut(p / "a.idx", 0), p / "a.bin")[2], {}, "a.idx: starts"),
    "megatron odd": (lambda p: cut(write_megatron(p / "a"), 599), {}, "599 bytes is not a multiple"),
    "datatrove falling": (lambda p: write_datatrove(p / "a.ds", (100, 50, 300)), {}, "must rise"),
    "datatrove short": (lambda p: write_datatrove(p / "a.ds", (100, 200)), {}, "end at token 200, but"),
    "datatrove long": (lambda p: write_datatrove(p / "a.ds", (100, 1 << 63)), {}, "a.ds.index"),
    "datatrove odd": (lambda p: (write_datatrove(p / "a.ds"), cut(p / "a.ds.index", 9), p / "a.ds")[2], {}, "9 bytes"),
    "datatrove alone": (lambda p: write_raw(p / "a.ds"), {}, "has no a.ds.index"),
    "olmo": (lambda p: write_raw(p / "a.npy"), {}, "headerless ids .OLMo., give dtype="),
    "other dtype": (lambda p: write_npy(p / "a.npy", U2), {"dtype": "uint32"}, "uint16 tokens, but dtype=uint32"),
    "other format": (lambda p: write_npy(p / "a.npy", U2), {"format": "parquet"}, "'parquet', expected auto or one"),
    "folder": (lambda p: p, {}, "is a folder"),
    "pipe": (lambda p: (os.mkfifo(p / "a.npy"), p / "a.npy")[1], {}, "pipe, expected a file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_malformed_is_refused_in_one_line_that_names_the_file(tmp_path, name):
    make, options, message = BAD[name]
    path = make(tmp_path)
    with pytest.raises(TokenFileError, match=message) as error:
        _ = open_tokens(path, **options).document_ends
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, NpyDataError | ValueError)


def test_a_missing_file_is_named_and_an_unknown_access_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.npy"):
        open_tokens(tmp_path / "nowhere.npy")
    with pytest.raises(ValueError, match="access='fast', expected"):
        open_tokens(write_npy(tmp_path / "a.npy", U2), access="fast")


RNG = np.random.default_rng(0)
GPT2, WIDE = RNG.integers(0, 50_257, 40_000), RNG.integers(0, 200_000, 40_000)


def test_raw_uint16_ids_read_as_uint32_are_warned_about_where_the_user_stands(tmp_path):
    path = write_raw(tmp_path / "train.bin", GPT2)
    os.truncate(path, 2**40)  # only a few blocks are looked at
    write_raw(tmp_path / "b.bin", GPT2)
    for each in (tmp_path / "b.bin", tmp_path / "b.bin"):
        with pytest.warns(UserWarning, match=r'b.bin: .*dtype="uint16"') as warned:
            assert MmapDataset(each, 1).num_samples
        assert [one.filename for one in warned] == [__file__]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ids", [GPT2, WIDE, WIDE[:1], WIDE[:0], np.zeros(9), np.arange(300_000)])
def test_true_uint32_ids_and_a_given_dtype_raise_no_doubt(tmp_path, ids):
    assert open_tokens(write_raw(tmp_path / "a.bin", ids, "<u4")).num_tokens == len(ids)
    for dtype in ("uint16", "uint32"):
        open_tokens(write_raw(tmp_path / "b.bin", GPT2), dtype=dtype)


@ACCESS
def test_reads_are_exact_read_only_and_shared_by_threads(tmp_path, access):
    ids = RNG.integers(0, 65_536, 10_000).astype("<u2")
    tokens = open_tokens(write_npy(tmp_path / "a.npy", ids), access=access)
    wrong = []

    def check(seed):
        for start in np.random.default_rng(seed).integers(0, 10_000, 200).tolist():
            if not np.array_equal(tokens.read(start, 50), ids[start : start + 50]):
                wrong.append(start)

    threads = [threading.Thread(target=check, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert tokens.read(20_000, 5).tolist() == []
    for start, count in ((-1, 5), (0, -1)):
        with pytest.raises(IndexError):
            tokens.read(start, count)
    if access == "mmap":
        with pytest.raises(ValueError, match="read-only"):
            tokens.read(0, 5)[0] = 1


@ACCESS
@pytest.mark.parametrize("change", ["cut", "grown", "cut and grown", "other dtype"])
def test_a_file_that_changed_is_an_error_and_no_crash(tmp_path, access, change):
    ids = np.arange(100_000, dtype="<u2")
    path = write_npy(tmp_path / "a.npy", ids)
    dataset, size = MmapDataset(path, 16, access=access), path.stat().st_size
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 4096
    if change == "other dtype":
        write_npy(path, ids.astype("<i2"))
    else:
        os.truncate(path, 1000 if "cut" in change else size + 2)
        if change == "cut and grown":
            os.truncate(path, size + 4096)
        with pytest.raises(TokenFileError, match="changed since it was opened"):
            dataset.fetch([len(dataset) - 1])
    with pytest.raises(TokenFileError, match=r"a\.npy"):
        pickle.loads(pickled)


def test_no_descriptor_is_left_open(tmp_path):
    path = write_npy(tmp_path / "a.npy", U2)
    before = len(os.listdir("/proc/self/fd"))
    for access in ("mmap", "pread") * 3:
        MmapDataset(path, 4, access=access).fetch([0])
    assert len(os.listdir("/proc/self/fd")) == before


# Writing


def test_chunks_of_any_shape_are_written_one_after_the_other(tmp_path):
    chunks = [U2[:7], U2[7:297].reshape(2, 5, 29), [], [397, 398, 399]]
    written = write_tokens(tmp_path / "a.npy", iter(chunks))
    assert (written.dtype, written.num_tokens) == (np.uint16, 300)
    assert np.array_equal(np.load(tmp_path / "a.npy"), U2)
    assert write_tokens(tmp_path / "b.npy", [[1, 2]]).dtype == np.uint32
    assert write_tokens(tmp_path / "c.npy", [], dtype="u1").shape == (0,)


def test_rows_are_filled_across_chunks_and_an_incomplete_one_is_reported(tmp_path):
    with pytest.warns(UserWarning, match="last 6 tokens"):
        rows = write_tokens(tmp_path / "a.npy", [U2[:10], U2[10:]], row_len=42)
    assert rows.shape == (7, 42)
    assert np.array_equal(np.load(tmp_path / "a.npy"), U2[:294].reshape(7, 42))
    with pytest.raises(ValueError, match="row_len=0"):
        write_tokens(tmp_path / "b.npy", [U2], row_len=0)


@pytest.mark.parametrize(("chunks", "dtype", "message"), [
    ([[1, 2], [3, 70_000]], "uint16", "id 70000 at token 3 does not fit uint16"),
    ([[1, -2]], "uint16", "id -2 at token 1"),
    ([np.array([2**63], "<u8")], "int64", f"id {2**63} at token 0"),
    ([[1.5]], None, "expected integers"),
    ([["a"]], None, "expected integers"),
    ([[True]], None, "expected integers"),
    ([[1]], "float32", "expected an integer dtype"),
])  # fmt: skip
def test_what_is_no_id_of_the_dtype_is_refused_and_nothing_written(
    tmp_path, chunks, dtype, message
):
    with pytest.raises(TokenFileError, match=message):
        write_tokens(tmp_path / "a.npy", chunks, dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_a_stream_that_breaks_leaves_the_old_file_alone(tmp_path):
    path = write_npy(tmp_path / "a.npy", U2)

    def chunks():
        yield U2[:10]
        raise RuntimeError("the tokenizer broke")

    with pytest.raises(RuntimeError, match="the tokenizer broke"):
        write_tokens(path, chunks())
    assert np.array_equal(np.load(path), U2)
    assert os.listdir(tmp_path) == ["a.npy"]


def test_a_killed_writer_leaves_no_file_and_the_next_one_cleans_up(tmp_path):
    script = """
        import sys, numpy as np
        from npydata import write_tokens
        def chunks():
            while True:
                yield np.arange(100_000, dtype=np.uint32)
                print("writing", flush=True)
        write_tokens(sys.argv[1], chunks())
    """
    target = tmp_path / "a.npy"
    command = [sys.executable, "-c", textwrap.dedent(script), target]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"writing\n"
        (partial,) = tmp_path.glob(".a.npy.*")
        assert partial.stat().st_mode & 0o777 == 0o600
        child.send_signal(signal.SIGKILL)
    assert not target.exists()
    write_tokens(target, [U2])
    assert os.listdir(tmp_path) == ["a.npy"]


@pytest.mark.parametrize("name", ["a.bin", "a.npz", "a.ds", "a.pt", "a.npy.txt"])
def test_tokens_are_not_written_under_the_name_of_another_format(tmp_path, name):
    with pytest.raises(TokenFileError, match=name):
        write_tokens(tmp_path / name, [[1]])
    assert not list(tmp_path.iterdir())


def test_memory_stays_at_one_chunk_however_long_the_stream(tmp_path):
    script = """
        import resource, sys, numpy as np
        from npydata import write_tokens
        chunk = np.zeros(1_000_000, np.uint16)
        write_tokens(sys.argv[1], (chunk for _ in range(3)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        write_tokens(sys.argv[1], (chunk for _ in range(50)))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), tmp_path / "a.npy"]
    grown_kb = int(subprocess.run(command, capture_output=True, check=True).stdout)
    assert grown_kb < 8 * 1024  # the file is 100 MB
