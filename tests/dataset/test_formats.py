"""Every format of token file, written here by an independent few lines, and its malformed kin."""

import io
import os
import pickle
import struct
import textwrap
import zipfile

import numpy as np
import pytest

from npydata import MmapDataset, NpyDataError, TokenFileError, open_tokens
from npydata.dataset import formats
from npydata.dataset.inspect import inspect_tokens

IDS = np.arange(100, 400)


def write_llmc(path, magic=20240520, version=1, dtype="<u2", ids=IDS, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + ids.astype(dtype).tobytes())
    return path


def write_megatron(
    path,
    lengths=(100, 50, 150),
    documents=(0, 2, 3),
    code=8,
    dtype="<u2",
    magic=b"MMIDIDX\0\0",
    version=1,
    pointers=None,
):
    path.with_suffix(".bin").write_bytes(IDS.astype(dtype).tobytes())
    itemsize = np.dtype(dtype).itemsize
    if pointers is None:
        pointers = [sum(lengths[:i]) * itemsize for i in range(len(lengths))]
    path.with_suffix(".idx").write_bytes(
        magic
        + struct.pack("<QBQQ", version, code, len(lengths), len(documents))
        + np.array(lengths, "<i4").tobytes()
        + np.array(pointers, "<i8").tobytes()
        + np.array(documents, "<i8").tobytes()
    )
    return path.with_suffix(".bin")


def write_datatrove(path, ends=(100, 100, 300), dtype="<u2"):
    path.write_bytes(IDS.astype(dtype).tobytes())
    (path.parent / f"{path.name}.index").write_bytes(np.array(ends, "<u8").tobytes())
    return path


def write_npy(path, array, version=(1, 0)):
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array, version=version, allow_pickle=True)
    return path


@pytest.mark.parametrize("dtype", ["u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", ">u2"])
def test_npy_of_any_integer_dtype_is_recognised(tmp_path, dtype):
    ids = np.arange(100).astype(dtype)
    tokens = open_tokens(write_npy(tmp_path / "a.npy", ids))
    assert (tokens.format, tokens.dtype, tokens.shape) == ("npy", np.dtype(dtype), (100,))
    assert tokens.read(0, 100).tolist() == list(range(100))


def test_npy_version_2_is_read_and_version_3_is_refused(tmp_path):
    ids = IDS.astype("<u2")
    assert open_tokens(write_npy(tmp_path / "a.npy", ids, (2, 0))).num_tokens == 300
    with pytest.raises(TokenFileError, match=r"version \(3, 0\), expected 1.0 or 2.0"):
        open_tokens(write_npy(tmp_path / "b.npy", ids, (3, 0)))


def test_npy_with_two_dimensions_keeps_its_shape(tmp_path):
    tokens = open_tokens(write_npy(tmp_path / "a.npy", IDS.astype("<u2").reshape(3, 100)))
    assert (tokens.shape, tokens.num_tokens, tokens.rows, tokens.row_len) == ((3, 100), 300, 3, 100)


def test_an_npy_file_is_recognised_under_any_name(tmp_path):
    assert open_tokens(write_npy(tmp_path / "a.dat", IDS.astype("<u2"))).format == "npy"


def test_raw_files_are_uint32_unless_said_otherwise(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(IDS.astype("<u4").tobytes())
    assert (open_tokens(path).dtype, open_tokens(path).num_tokens) == (np.dtype("u4"), 300)
    as_u2 = open_tokens(path, dtype="uint16")
    assert (as_u2.dtype, as_u2.num_tokens) == (np.dtype("u2"), 600)
    assert open_tokens(path, dtype=np.uint16).read(0, 3).tolist() == [100, 0, 101]


RNG = np.random.default_rng(0)
GPT2 = RNG.integers(0, 50_257, 40_000)
WIDE = RNG.integers(0, 200_000, 40_000)
LLAMA3 = np.minimum(RNG.zipf(1.2, 40_000), 128_255)


@pytest.mark.parametrize(
    "ids, message",
    [
        (GPT2.astype("<u2"), "far above any vocabulary"),
        (np.arange(65, dtype="<u2").repeat(20)[:1300], "far above any vocabulary"),
        (RNG.integers(0, 65, 40_000).astype("<u2"), "far above any vocabulary"),
        (np.tile(np.array([5, 7], "<u2"), 4), "almost never 0"),
        (np.arange(10, dtype="<u2"), "almost never 0"),
        (RNG.integers(1, 12, 40_000).astype("<u2"), "almost never 0"),
        (RNG.integers(0, 12, 40_000).astype("<u2"), "low halves of its ids are all below 12"),
        (np.where(np.arange(40_000) < 39_000, 0, GPT2).astype("<u2"), "far above any vocabulary"),
    ],
)
def test_a_raw_file_that_is_hardly_uint32_is_not_read_as_such_in_silence(tmp_path, ids, message):
    path = tmp_path / "train.bin"
    ids.tofile(path)
    with pytest.warns(UserWarning, match=rf"train\.bin: read as uint32.*{message}.*dtype=.uint16"):
        assert open_tokens(path).dtype == np.uint32
    with pytest.warns(UserWarning, match="read as uint32") as told:
        MmapDataset(path, 1)
    assert [one.filename for one in told] == [__file__]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "ids", [GPT2, WIDE, LLAMA3, WIDE[:1], WIDE[:0], np.zeros(9), np.arange(300_000)]
)
def test_true_uint32_ids_and_given_dtypes_raise_no_doubt(tmp_path, ids):
    ids.astype("<u4").tofile(tmp_path / "a.bin")
    assert open_tokens(tmp_path / "a.bin").num_tokens == len(ids)
    GPT2.astype("<u2").tofile(tmp_path / "b.bin")
    for dtype in ("uint16", "uint32"):
        pickle.loads(pickle.dumps(open_tokens(tmp_path / "b.bin", dtype=dtype)))


def test_a_raw_file_is_not_read_whole_to_judge_its_dtype(tmp_path):
    GPT2.astype("<u2").tofile(tmp_path / "a.bin")
    os.truncate(tmp_path / "a.bin", 2**40)
    with pytest.warns(UserWarning, match="far above any vocabulary"):
        open_tokens(tmp_path / "a.bin")


def test_inspect_says_which_dtype_was_assumed(tmp_path):
    GPT2.astype("<u4").tofile(tmp_path / "a.bin")
    assert "uint32 (assumed: no dtype was given)" in inspect_tokens(tmp_path / "a.bin").to_table()
    assert "assumed:" not in inspect_tokens(tmp_path / "a.bin", dtype="uint32").to_table()


@pytest.mark.parametrize("magic, version, dtype", [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_llmc_files_are_recognised(tmp_path, magic, version, dtype):
    tokens = open_tokens(write_llmc(tmp_path / "a.bin", magic, version, dtype))
    assert (tokens.format, tokens.dtype, tokens.num_tokens) == ("llm.c", np.dtype(dtype), 300)
    assert tokens.read(0, 3).tolist() == [100, 101, 102]


@pytest.mark.parametrize("given", ["corpus.bin", "corpus.idx", "corpus"])
def test_megatron_files_are_recognised_by_bin_idx_or_prefix(tmp_path, given):
    write_megatron(tmp_path / "corpus")
    tokens = open_tokens(tmp_path / given)
    assert (tokens.format, tokens.path.name, tokens.num_tokens) == ("megatron", "corpus.bin", 300)
    assert tokens.document_ends.tolist() == [150, 300]


@pytest.mark.parametrize(
    "code, dtype", [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")]
)
def test_megatron_dtype_codes(tmp_path, code, dtype):
    tokens = open_tokens(write_megatron(tmp_path / "corpus", code=code, dtype=dtype))
    assert tokens.dtype == np.dtype(dtype)
    assert np.array_equal(tokens.read(0, 300), IDS.astype(dtype))


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_datatrove_files_are_recognised_and_their_dtype_inferred(tmp_path, dtype):
    tokens = open_tokens(write_datatrove(tmp_path / "a.ds", dtype=dtype))
    assert (tokens.format, tokens.dtype, tokens.num_tokens) == ("datatrove", np.dtype(dtype), 300)
    assert tokens.document_ends.tolist() == [100, 100, 300]


def test_olmo_files_named_npy_are_read_raw_when_a_dtype_is_given(tmp_path):
    path = tmp_path / "part-0.npy"
    path.write_bytes(IDS.astype("<u2").tobytes())
    assert open_tokens(path, dtype="uint16").read(0, 2).tolist() == [100, 101]
    assert open_tokens(path, dtype="uint16", format="olmo").num_tokens == 300
    with pytest.raises(TokenFileError, match=r"not with the .npy magic .* give dtype="):
        open_tokens(path)


def test_olmo_files_need_a_dtype_even_when_the_format_is_given(tmp_path):
    (tmp_path / "part-0.npy").write_bytes(IDS.astype("<u2").tobytes())
    refused(tmp_path / "part-0.npy", "give dtype=", format="olmo")


A_FORMAT_OF_BYTES = """
    from npydata.dataset.layout import Evidence, TokenFormat, TokenLayout, integer_dtype

    def evidence(file):
        return Evidence.MAGIC if file.head.startswith(b"BYTES") else Evidence.NONE

    def read_layout(path, dtype):
        size = path.stat().st_size
        return TokenLayout(path, "bytes", integer_dtype(path, "u1"), (size - 5,), 5, size)

    FORMAT = TokenFormat(
        name="bytes", evidence=evidence, read_layout=read_layout, companions=(".notes",)
    )
"""


def test_a_new_format_is_one_new_module(tmp_path, monkeypatch):
    (tmp_path / "formats").mkdir()
    (tmp_path / "formats" / "bytes.py").write_text(textwrap.dedent(A_FORMAT_OF_BYTES))
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path / "formats")])
    for name, one in formats.find_formats().items():
        monkeypatch.setitem(formats.FORMATS, name, one)
    (tmp_path / "a.bin").write_bytes(b"BYTES\1\2\3")
    (tmp_path / "a.bin.notes").touch()
    assert open_tokens(tmp_path / "a.bin", format="bytes").read(0, 9).tolist() == [1, 2, 3]
    assert MmapDataset(tmp_path / "a.bin*", 2)[0][1].tolist() == [2, 3]
    refused(tmp_path / "a.bin", "expected auto or one of .*, npy, .*bytes", format="arrow")


def npy_beside_an_index(path):
    write_megatron(path)
    return write_npy(path.with_suffix(".bin"), IDS.astype("<u2"))


def llmc_magic_as_ids(path):
    """Token ids that begin with what is also llm.c's magic, and an index beside them."""
    ids = np.concatenate((np.array([20240520], "<i4").view("<u2"), IDS[2:].astype("<u2")))
    write_megatron(path).write_bytes(ids.tobytes())
    return path.with_suffix(".bin")


@pytest.mark.parametrize(
    "write, format",
    [
        (npy_beside_an_index, "npy"),
        (llmc_magic_as_ids, "megatron"),
        (lambda path: write_llmc(path.with_suffix(".npy")), "llm.c"),
        (lambda path: write_npy(path.with_suffix(".ds"), IDS.astype("<u2")), "npy"),
    ],
)
def test_where_two_formats_claim_a_file_the_stronger_evidence_wins(tmp_path, write, format):
    assert open_tokens(write(tmp_path / "a")).format == format


@pytest.mark.parametrize("suffix", ["txt", "parquet", "json"])
def test_a_file_that_could_be_anything_is_not_guessed(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"just some text..")
    with pytest.raises(TokenFileError, match="cannot tell its format"):
        open_tokens(path)
    assert open_tokens(path, dtype="uint16").num_tokens == 8


def malformed_npy(array=None, header=None, cut=0, extra=b""):
    buffer = io.BytesIO()
    if header is None:
        np.lib.format.write_array(buffer, array, allow_pickle=True)
    else:
        text = header.encode().ljust(117) + b"\n"
        buffer.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    content = buffer.getvalue()
    return content[: len(content) - cut] + extra


U2 = np.arange(40, dtype="<u2")
MALFORMED_NPY = {
    "float array": (malformed_npy(U2.astype("f4")), "tokens are float32, expected an integer"),
    "bool array": (malformed_npy(U2 > 3), "tokens are bool, expected an integer"),
    "object array": (malformed_npy(U2.astype(object)), "tokens are object, expected an integer"),
    "structured array": (malformed_npy(np.zeros(3, "u2,u2")), "expected an integer"),
    "fortran order": (malformed_npy(np.asfortranarray(U2.reshape(4, 10))), "Fortran order"),
    "three dimensions": (malformed_npy(U2.reshape(2, 4, 5)), r"shape \(2, 4, 5\), expected"),
    "no dimension": (malformed_npy(np.array(3, "<u2")), r"shape \(\), expected"),
    "cut in the data": (malformed_npy(U2, cut=1), "207 bytes, but its header promises 208"),
    "cut in the header": (malformed_npy(U2)[:50], "bad .npy header"),
    "cut in the magic": (b"\x93NUMPY\x01", "bad .npy header"),
    "trailing bytes": (malformed_npy(U2, extra=b"xx"), "210 bytes, but its header promises 208"),
    "count larger than the file": (
        malformed_npy(header="{'descr': '<u2', 'fortran_order': False, 'shape': (10**9,), }"),
        "bad .npy header",
    ),
    "huge shape": (
        malformed_npy(header=f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({2**62},), }}"),
        "its header promises",
    ),
    "negative shape": (
        malformed_npy(header="{'descr': '<u2', 'fortran_order': False, 'shape': (-1,), }"),
        r"shape \(-1,\), expected",
    ),
    "code in the header": (malformed_npy(header="__import__('os').abort()"), "bad .npy header"),
    "deep nesting in the header": (malformed_npy(header="(" * 100), "bad .npy header"),
}


@pytest.mark.parametrize("name", MALFORMED_NPY)
def test_a_malformed_npy_file_gives_one_clear_line(tmp_path, name):
    content, message = MALFORMED_NPY[name]
    path = tmp_path / "bad.npy"
    path.write_bytes(content)
    refused(path, message)


def refused(path, message, **options):
    with pytest.raises(TokenFileError, match=message) as caught:
        open_tokens(path, **options)
    assert "\n" not in str(caught.value)
    assert str(path.with_suffix("")) in str(caught.value)


MALFORMED_LLMC = {
    "truncated header": (
        lambda p: p.write_bytes(np.int32([20240520, 1, 5]).tobytes()),
        "12 bytes, expected a header of 1024",
    ),
    "eval file": (lambda p: write_llmc(p, 20240522), "an llm.c eval file"),
    "unknown version": (lambda p: write_llmc(p, 20240520, 2), "magic 20240520 version 2"),
    "count larger than the file": (
        lambda p: write_llmc(p, count=301),
        "1624 bytes, but its header promises 1626",
    ),
    "count smaller than the file": (lambda p: write_llmc(p, count=299), "promises 1622"),
    "negative count": (lambda p: write_llmc(p, count=-1), "promises 1022"),
    "dtype of the other version": (lambda p: write_llmc(p, 20240801, 7, "<u2"), "promises 2224"),
}


@pytest.mark.parametrize("name", MALFORMED_LLMC)
def test_a_malformed_llmc_file_gives_one_clear_line(tmp_path, name):
    write, message = MALFORMED_LLMC[name]
    write(tmp_path / "bad.bin")
    refused(tmp_path / "bad.bin", message)


def test_a_wrong_llmc_magic_is_refused_when_the_format_is_given(tmp_path):
    path = write_llmc(tmp_path / "bad.bin", magic=7)
    refused(path, "magic 7 version 1, expected one of", format="llm.c")


MALFORMED_MEGATRON = {
    "wrong magic": ({"magic": b"MMIDIDY\0\0"}, "expected b'MMIDIDX"),
    "wrong version": ({"version": 2}, "version 2, expected 1"),
    "unknown dtype": ({"code": 9}, "dtype code 9"),
    "float dtype": ({"code": 7}, "tokens are float32, expected an integer"),
    "pointer outside": ({"pointers": [0, 200, 10**9]}, "sequence 2 points at byte 1000000000"),
    "negative pointer": ({"pointers": [-2, 200, 300]}, "sequence 0 points at byte -2"),
    "too many tokens": ({"lengths": (100, 50, 151)}, "end at token 301, but the .bin holds 300"),
    "too few tokens": ({"lengths": (100, 50, 149)}, "end at token 299, but the .bin holds 300"),
    "negative length": ({"lengths": (400, -150, 50)}, "sequence 1 has a negative length"),
    "document outside": ({"documents": (0, 4)}, "not a rising list from 0 to 3"),
    "documents fall": ({"documents": (0, 2, 1)}, "not a rising list from 0 to 3"),
    "documents begin late": ({"documents": (1, 3)}, "not a rising list from 0 to 3"),
}


@pytest.mark.parametrize("name", MALFORMED_MEGATRON)
def test_a_malformed_megatron_index_gives_one_clear_line(tmp_path, name):
    options, message = MALFORMED_MEGATRON[name]
    refused(write_megatron(tmp_path / "bad", **options), message)


@pytest.mark.parametrize("size", [0, 8, 33, 40, 80])
def test_a_cut_megatron_index_gives_one_clear_line(tmp_path, size):
    path = write_megatron(tmp_path / "bad")
    os.truncate(path.with_suffix(".idx"), size)
    refused(path, "expected b'MMIDIDX" if size < 34 else f"{size} bytes, but its header promises")


def test_a_cut_megatron_bin_gives_one_clear_line(tmp_path):
    path = write_megatron(tmp_path / "bad")
    os.truncate(path, 599)
    refused(path, "599 bytes is not a multiple of 2")


MALFORMED_DATATROVE = {
    "end outside": ((100, 1000), "stay inside the token file"),
    "falling ends": ((200, 100, 300), "must rise"),
    "too few tokens": ((100, 299), "end at token 299, but the .ds holds 300"),
}


@pytest.mark.parametrize("name", MALFORMED_DATATROVE)
def test_a_malformed_datatrove_index_gives_one_clear_line(tmp_path, name):
    ends, message = MALFORMED_DATATROVE[name]
    refused(write_datatrove(tmp_path / "bad.ds", ends), message)


def test_a_datatrove_file_without_an_index_or_with_a_cut_one_is_refused(tmp_path):
    path = write_datatrove(tmp_path / "bad.ds")
    os.truncate(tmp_path / "bad.ds.index", 15)
    refused(path, "15 bytes is not a multiple of 8")
    (tmp_path / "bad.ds.index").unlink()
    refused(path, "has no bad.ds.index beside it")


def test_a_raw_file_with_a_cut_token_is_refused(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(bytes(10))
    refused(path, r"10 bytes is not a multiple of 4 .uint32 tokens.*no dtype.*dtype=.uint16")
    path.write_bytes(bytes(11))
    refused(path, r"11 bytes is not a multiple of 2 \(uint16 tokens\)", dtype="uint16")


@pytest.mark.parametrize("name, dtype", [("a.npz", None), ("a.npz", "uint8"), ("a.bin", None)])
def test_a_zip_archive_is_not_a_token_file(tmp_path, name, dtype):
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("a.npy", malformed_npy(U2))
    refused(tmp_path / name, "is a zip archive", dtype=dtype)


@pytest.mark.parametrize("dtype", ["uint32", "int16", "uint8"])
def test_a_dtype_that_contradicts_the_file_is_refused(tmp_path, dtype):
    path = write_npy(tmp_path / "a.npy", IDS.astype("<u2"))
    refused(path, f"holds uint16 tokens, but dtype={dtype} was given", dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "no such dtype", bool])
def test_a_dtype_that_holds_no_ids_is_refused(tmp_path, dtype):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(8))
    with pytest.raises(TokenFileError, match=r"a\.bin: .*dtype"):
        open_tokens(path, dtype=dtype)


def test_an_unknown_format_or_access_is_refused(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(8))
    refused(path, "unknown format 'arrow', expected auto or one of", format="arrow")
    with pytest.raises(ValueError, match="access='http', expected one of mmap, pread"):
        open_tokens(path, access="http")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_tokens(tmp_path / "nowhere.npy")


class Bomb:
    exploded = False

    def __reduce__(self):
        return explode, ()


def explode():
    Bomb.exploded = True


def test_an_object_array_never_unpickles(tmp_path):
    path = write_npy(tmp_path / "bomb.npy", np.array([Bomb()], dtype=object))
    refused(path, "tokens are object")
    assert not Bomb.exploded
    pickle.loads(path.read_bytes()[128:])
    assert Bomb.exploded, "the file would have run code"


def test_every_refusal_can_be_caught_as_a_value_error_or_as_ours(tmp_path):
    assert issubclass(TokenFileError, ValueError)
    assert issubclass(TokenFileError, NpyDataError)
