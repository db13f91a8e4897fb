"""Text becomes a token file: which files, where they are cut, what is kept, what a kill leaves."""

import os
import pty
import random
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from npydata import NpyDataError, PackedDataset
from npydata.dataset import prepare as prepare_module
from npydata.dataset import text as text_module
from npydata.dataset.documents import document_ends
from npydata.dataset.inspect import inspect_tokens
from npydata.dataset.prepare import BEGIN_OF_TEXT, END_OF_TEXT, load_tokenizer, prepare
from npydata.dataset.text import (
    HEAD_BYTES,
    Source,
    cut_point,
    list_sources,
    python_corpus,
    read_text,
    sample_text,
    text_pieces,
)
from npydata.dataset.token_file import open_tokens

POEM = "The owl said: naïve café! 😀\n\n  twice\tas much,\r\nas 1234567 — 東京 and so on\n"


@pytest.fixture
def folder(tmp_path):
    """A folder of texts, in which some entries are no texts."""
    root = tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "a.txt").write_text("first\n")
    (root / "b" / "z.txt").write_text("second\n")
    (root / "b.txt").write_text("third\n")
    (root / "empty.txt").touch()
    (root / "image.png").write_bytes(b"\x89PNG\0\0")
    (root / ".hidden").write_text("not read\n")
    (root / ".git" / "config").write_text("not read\n")
    (tmp_path / "outside.txt").write_text("not read\n")
    (root / "link.txt").symlink_to(tmp_path / "outside.txt")
    (root / "up").symlink_to(tmp_path, target_is_directory=True)
    return root


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """A small tokenizer trained once for the tests that only need one."""
    root = tmp_path_factory.mktemp("tokenizer")
    (root / "text.txt").write_text(POEM * 50)
    return prepare([root / "text.txt"], root / "t.npy", vocab_size=400).tokenizer_path


def names(sources):
    return [source.path.name for source in sources.files]


def ids_of(path):
    tokens = open_tokens(path)
    return tokens.read(0, tokens.num_tokens).tolist()


def text_of(report):
    """Decode a token file back, with the end-of-text tokens in it."""
    bpe = load_tokenizer(report.tokenizer_path)
    return bpe.decode(ids_of(report.path), skip_special_tokens=False)


# Sources


def test_a_folder_is_read_sorted_without_hidden_linked_binary_and_empty_entries(folder):
    sources = list_sources([folder])
    assert names(sources) == ["a.txt", "z.txt", "b.txt"]  # a.txt, b/z.txt, b.txt
    assert sources.binary == 1
    assert sources.nbytes == len("first\nsecond\nthird\n")


@pytest.mark.parametrize(
    "given, suffix, expected",
    [
        (["{}/b.txt", "{}", "{}/a.txt"], "", "b.txt a.txt z.txt c[1].txt code.py"),
        (["{}/[ab].txt"], "", "a.txt b.txt"),
        (["{}/b*"], "", "z.txt b.txt"),
        (["{}/link.txt", "{}/c[1].txt"], "", "link.txt c[1].txt"),
        (["{}", "{}/*"], ".py", "code.py"),
        (["{}/a.txt"], ".py", "a.txt"),
    ],
    ids=["each once", "pattern", "enters folders", "named", "suffix", "named without suffix"],
)
def test_names_stand_for_files_in_their_order(folder, given, suffix, expected):
    (folder / "c[1].txt").write_text("a file named like a pattern\n")
    (folder / "code.py").write_text("pass\n")
    found = list_sources([one.format(folder) for one in given], suffix=suffix)
    assert names(found) == expected.split()


def test_excluded_files_and_skipped_folders_are_not_read(folder):
    sources = list_sources([folder], exclude=[folder / "a.txt"], skip_folders=["b"])
    assert names(sources) == ["b.txt"]


def test_a_missing_name_a_dangling_link_and_an_empty_pattern_are_errors(folder):
    (folder / "dangling").symlink_to(folder / "nowhere")
    for missing in (folder / "nothing.txt", folder / "dangling"):
        with pytest.raises(FileNotFoundError):
            list_sources([missing])
    with pytest.raises(NpyDataError, match="no file matches"):
        list_sources([f"{folder}/*.md"])


def test_a_binary_file_given_by_name_is_an_error_that_says_where_the_nul_is(folder):
    with pytest.raises(NpyDataError, match=r"image\.png: byte 4 is NUL"):
        list_sources([folder / "image.png"])


def test_only_the_head_of_a_file_decides_whether_it_is_binary(tmp_path):
    (tmp_path / "late.txt").write_bytes(b"x" * HEAD_BYTES + b"\0")
    (tmp_path / "early.txt").write_bytes(b"x" * (HEAD_BYTES - 1) + b"\0")
    assert names(list_sources([tmp_path])) == ["late.txt"]


def test_a_pipe_is_refused_by_name_and_passed_over_in_a_folder(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(NpyDataError, match="not a regular file"):
        list_sources([folder / "pipe"])
    assert "pipe" not in names(list_sources([folder]))


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_a_gap(folder, monkeypatch):
    scandir = os.scandir

    def refusing(path):
        if os.path.basename(path) == "b":  # noqa: PTH119
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError):
        list_sources([folder])


def test_the_python_corpus_is_two_folders_of_source_text():
    stdlib, torch = python_corpus()
    assert (stdlib / "argparse.py").is_file()
    assert (torch / "nn" / "__init__.py").is_file()


# Decoding and cutting


def test_pieces_joined_are_the_text_and_none_is_too_long():
    for piece_chars in (1, 2, 7, 64, 1000):
        pieces = list(text_pieces([POEM * 20], piece_chars))
        assert "".join(pieces) == POEM * 20
        assert all(0 < len(piece) <= piece_chars for piece in pieces)


def test_pieces_do_not_depend_on_how_the_text_arrives():
    text, draw = POEM * 20, random.Random(0)
    expected = list(text_pieces([text], 50))
    for _ in range(20):
        cuts = sorted(draw.sample(range(len(text)), 15))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert list(text_pieces(parts, 50)) == expected


@pytest.mark.parametrize(
    "text, limit, head",
    [
        ("one\ntwo three", 12, "one\n"),  # a line end wins over the later space
        ("one two\n  three", 12, "one"),  # the line end has white space beside it
        ("one\n\n  two", 7, "one\n\n"),  # any line end is better than none
        ("unbroken", 5, "unbro"),
        ("a\nb c\nd", 4, "a\n"),
        ("😀😀😀", 2, "😀😀"),  # characters are not cut
    ],
)
def test_a_piece_ends_at_a_line_end_or_a_space_between_words_if_there_is_one(text, limit, head):
    assert text[: cut_point(text, 0, limit)] == head


@pytest.mark.parametrize(
    "data, text",
    [
        (POEM.encode(), POEM),
        (b"caf\xe9 au lait", "caf\ufffd au lait"),
        (b"cut \xe6\x9d", "cut \ufffd"),  # a character's last byte is missing
        (b"a\r\nb\rc\n", "a\r\nb\rc\n"),
    ],
)
def test_a_file_is_read_as_utf8_whatever_its_faults_and_line_ends(
    tmp_path, monkeypatch, data, text
):
    (tmp_path / "f").write_bytes(data)
    for block_chars in (1, 2, 1000):
        monkeypatch.setattr(text_module, "BLOCK_CHARS", block_chars)
        blocks = list(read_text(tmp_path / "f"))
        assert "".join(blocks) == text
        assert max(map(len, blocks)) <= block_chars


# The training sample


def sample(folder, texts, budget):
    """Return the sample of some texts, each a letter repeated."""
    sources = []
    for letter, size in texts.items():
        (folder / letter).write_text(letter * size)
        sources.append(Source(folder / letter, size))
    count, spans = sample_text(sources, budget)
    spans = list(spans)
    assert count == len(spans)
    return "".join(spans)


@pytest.fixture
def short_spans(monkeypatch):
    """Take the training sample in spans of 100 bytes."""
    monkeypatch.setattr(text_module, "SPAN_BYTES", 100)


def test_the_sample_is_everything_when_that_fits_the_budget(tmp_path, short_spans):
    assert sample(tmp_path, {"a": 250, "b": 7}, 257) == "a" * 250 + "b" * 7


def test_every_large_file_has_its_share_of_the_sample(tmp_path, short_spans):
    taken = sample(tmp_path, {"a": 10_000, "b": 30_000, "c": 60_000}, 10_000)
    assert [taken.count(letter) for letter in "abc"] == [1000, 3000, 6000]


def test_a_budget_below_one_span_is_still_used(tmp_path, short_spans):
    assert sample(tmp_path, {"a": 1000}, 30) == "a" * 30


def test_a_span_that_cuts_a_character_leaves_it_out(tmp_path, short_spans):
    (tmp_path / "f").write_text("é" * 100)
    _, spans = sample_text([Source(tmp_path / "f", 200)], 67)
    assert "".join(spans) == "é" * 33


def test_the_bar_of_the_training_knows_its_end(tmp_path):
    """The tokenizers package draws it, in a terminal only."""
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("some words, and some words again. " * 9000)
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "npydata", "prepare", "a.txt", "--out", "a.npy"]
    shown = b""
    with subprocess.Popen(command, cwd=tmp_path, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        with suppress(OSError), open(terminal, "rb", buffering=0) as file:  # EIO: it has ended
            while part := file.read(1 << 16):
                shown += part
    assert child.returncode == 0
    ends = re.findall(rb"sequences.*?/ +([0-9]+)", shown)
    assert set(ends) == {b"5"}


# The whole way


def test_the_tokens_decode_to_the_text_with_an_end_after_every_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(POEM.encode())
    (tmp_path / "b.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "c.txt").write_bytes(b"\xff")
    report = prepare([tmp_path], tmp_path / "out.npy", vocab_size=300)
    assert (
        text_of(report) == POEM + END_OF_TEXT + "caf\ufffd\n" + END_OF_TEXT + "\ufffd" + END_OF_TEXT
    )
    assert (report.files, report.replaced) == (3, 2)
    assert report.nbytes == len(POEM.encode()) + 6
    assert report.num_tokens == len(ids_of(report.path))


def test_end_of_text_written_in_a_text_does_not_end_a_document(tmp_path):
    (tmp_path / "a.txt").write_text(f"before{END_OF_TEXT}after\n" * 9)
    report = prepare([tmp_path / "a.txt"], tmp_path / "out.npy", vocab_size=300)
    end = load_tokenizer(report.tokenizer_path).token_to_id(END_OF_TEXT)
    assert ids_of(report.path).count(end) == 1
    assert text_of(report) == f"before{END_OF_TEXT}after\n" * 9 + END_OF_TEXT


@pytest.mark.parametrize(("documents", "expected"), [
    ("file", ["one\r\n\ntwo 2\n \nthree", "four"]), ("line", ["one", "two 2", "three", "four"]),
])  # fmt: skip
@pytest.mark.parametrize("begin", [False, True])
def test_documents_are_files_or_lines_and_an_index_says_where_they_end(
    tmp_path, monkeypatch, documents, expected, begin
):
    monkeypatch.setattr(text_module, "BLOCK_CHARS", 4)
    (tmp_path / "a.txt").write_bytes(b"one\r\n\ntwo 2\n \nthree")
    (tmp_path / "b.txt").write_text("four")
    report = prepare([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "t.npy", vocab_size=300,
                     documents=documents, begin=begin)  # fmt: skip
    assert report.documents == len(expected)
    monkeypatch.setattr("npydata.dataset.documents.find_ends", None)  # the index is enough
    bpe, file = load_tokenizer(report.tokenizer_path), open_tokens(report.path)
    ends = [0, *document_ends([file], eot_id=bpe.token_to_id(END_OF_TEXT))]
    found = [file.read(a, b - a).tolist() for a, b in pairwise(ends)]
    assert all(one.pop() == bpe.token_to_id(END_OF_TEXT) for one in found)
    if begin:
        assert all(one.pop(0) == bpe.token_to_id(BEGIN_OF_TEXT) for one in found)
    assert [bpe.decode(one) for one in found] == expected


def test_a_tokenizer_without_begin_of_text_is_refused_if_it_is_asked_for(tmp_path, tokenizer_file):
    (tmp_path / "a.txt").write_text(POEM)
    with pytest.raises(NpyDataError, match=r"has no token <\|begin_of_text\|>"):
        prepare([tmp_path / "a.txt"], tmp_path / "t.npy", tokenizer=tokenizer_file, begin=True)


def test_the_same_text_gives_the_same_bytes_in_another_process(tmp_path):
    (tmp_path / "text").mkdir()
    for k in range(5):
        (tmp_path / "text" / f"{k}.txt").write_text(POEM * (20 + k))
    made = []
    for seed in ("1", "2"):
        out = tmp_path / f"run{seed}.npy"
        command = [sys.executable, "-m", "npydata", "prepare", tmp_path / "text", "-q", "-o", out]
        command += ["--vocab-size", "400"]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": seed})
        made.append((out.read_bytes(), out.with_suffix(".tokenizer.json").read_bytes()))
    assert made[0] == made[1]


def test_where_a_text_is_cut_changes_no_token(tmp_path, tokenizer_file, monkeypatch):
    (tmp_path / "text.txt").write_text("    indented, and\n\n  ragged \n(text) of x's\nlines " * 99)
    runs = []
    for piece_chars in (40, 333, 100_000):
        monkeypatch.setattr(prepare_module, "PIECE_CHARS", piece_chars)
        monkeypatch.setattr(prepare_module, "BATCH_CHARS", 5 * piece_chars)
        report = prepare([tmp_path / "text.txt"], tmp_path / "o.npy", tokenizer=tokenizer_file)
        runs.append(ids_of(report.path))
    assert runs[0] == runs[1] == runs[2]


def test_training_reads_no_more_than_the_sample(tmp_path):
    (tmp_path / "a.txt").write_text("aaaa bbbb\n" * 30_000)
    (tmp_path / "b.txt").write_text("zqzqzqzqzq\n" * 10)
    whole = prepare([tmp_path], tmp_path / "w.npy", vocab_size=270)
    first_only = prepare([tmp_path], tmp_path / "s.npy", vocab_size=270, sample_mb=0.01)
    assert "zqzq" in load_tokenizer(whole.tokenizer_path).get_vocab()
    assert "zqzq" not in load_tokenizer(first_only.tokenizer_path).get_vocab()


def test_small_vocabularies_are_stored_in_two_bytes_and_large_ones_in_four(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("ab")
    for largest, dtype in ((65_535, "uint16"), (65_536, "uint32")):
        bpe = tokenizers.Tokenizer(
            tokenizers.models.BPE(vocab={"a": 0, "b": largest, END_OF_TEXT: 1}, merges=[])
        )
        bpe.save(str(tmp_path / "t.json"))
        report = prepare([tmp_path / "a.txt"], tmp_path / "o.npy", tokenizer=tmp_path / "t.json")
        assert report.dtype == dtype
        assert ids_of(report.path) == [0, largest, 1]


def test_a_loaded_tokenizer_that_truncates_still_keeps_all_of_the_text(tmp_path, tokenizer_file):
    bpe = load_tokenizer(tokenizer_file)
    bpe.enable_truncation(5)
    bpe.enable_padding(length=1000)
    bpe.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_bytes(POEM.encode())
    report = prepare([tmp_path / "a.txt"], tmp_path / "o.npy", tokenizer=tmp_path / "t.json")
    assert text_of(report) == POEM + END_OF_TEXT


def test_rows_are_whole_and_the_rest_is_dropped_and_counted(tmp_path, tokenizer_file, monkeypatch):
    monkeypatch.setattr(prepare_module, "PIECE_CHARS", 100)
    monkeypatch.setattr(prepare_module, "BATCH_CHARS", 300)  # rows go on across batches
    (tmp_path / "a.txt").write_text(POEM * 30)
    flat = prepare([tmp_path / "a.txt"], tmp_path / "f.npy", tokenizer=tokenizer_file)
    rows = prepare([tmp_path / "a.txt"], tmp_path / "r.npy", tokenizer=tokenizer_file, row_len=97)
    count = flat.num_tokens // 97
    assert open_tokens(rows.path).shape == (count, 97)
    assert rows.dropped_tokens == flat.num_tokens - 97 * count > 0
    assert ids_of(rows.path) == ids_of(flat.path)[: 97 * count]
    assert "dropped" in str(rows)


def test_too_little_text_for_one_row_leaves_no_file(tmp_path, tokenizer_file):
    (tmp_path / "a.txt").write_text("few")
    with pytest.raises(NpyDataError, match="do not fill a row of 1000"):
        prepare([tmp_path / "a.txt"], tmp_path / "o.npy", tokenizer=tokenizer_file, row_len=1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def test_output_inside_the_input_folder_is_not_read_the_next_time(tmp_path):
    (tmp_path / "a.txt").write_text(POEM)
    first = prepare([tmp_path], tmp_path / "out.npy", vocab_size=300)
    tokens = first.path.read_bytes()
    again = prepare([tmp_path], tmp_path / "out.npy", vocab_size=300)
    assert (again.files, again.binary_files) == (1, 0)
    assert again.path.read_bytes() == tokens


def test_a_source_is_never_overwritten(tmp_path):
    text = tmp_path / "a.npy"
    text.write_text("text")
    with pytest.raises(NpyDataError, match="both a source and what would be written"):
        prepare([text], text)
    assert text.read_text() == "text"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"vocab_size": 256}, "vocabulary size 256: expected 257 to 16,777,216"),
        ({"vocab_size": 2**64}, "vocabulary size 18446744073709551616: expected 257 to"),
        ({"vocab_size": 99_999_999_999_999}, "vocabulary size 99999999999999: expected 257 to"),
        ({"sample_mb": 1e-9}, "sample of 1e-09 MB: expected at least a byte"),
        ({"sample_mb": 0}, "sample of 0 MB"),
        ({"sample_mb": float("nan")}, "sample of nan MB"),
        ({"row_len": 0}, "row length 0"),
        ({"tokenizer": __file__}, r"not a tokenizer\.json"),
    ],
)
def test_options_out_of_range_are_named(tmp_path, options, message):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(NpyDataError, match=message):
        prepare([tmp_path / "a.txt"], tmp_path / "o.npy", **options)
    assert not (tmp_path / "o.npy").exists()


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "t.json"))
    with pytest.raises(NpyDataError, match="has no token"):
        load_tokenizer(tmp_path / "t.json")


def word_level(path, **options):
    """Save a tokenizer of whole words that knows only two of them."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {END_OF_TEXT: 0, "text": 1, "[UNK]": 2}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, **options)).save(str(path))


def test_a_text_that_a_tokenizer_cannot_encode_leaves_no_file(tmp_path):
    word_level(tmp_path / "t.json", unk_token="missing")
    (tmp_path / "a.txt").write_text("other")
    with pytest.raises(NpyDataError, match="cannot encode every text"):
        prepare([tmp_path / "a.txt"], tmp_path / "o.npy", tokenizer=tmp_path / "t.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "t.json"]


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    for names in ([""], ["a.txt", ""]):
        with pytest.raises(NpyDataError, match="an empty name was given"):
            prepare(names, tmp_path / "o.npy")


@pytest.mark.parametrize("out", ["", "."])
def test_an_output_without_a_name_is_refused(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(NpyDataError, match=r"name ends in \.npy"):
        prepare(["a.txt"], out)


def test_input_without_text_is_an_error(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "empty.txt").touch()
    (tmp_path / "in" / "binary").write_bytes(b"\0")
    with pytest.raises(NpyDataError, match="no text to read: 1 binary files"):
        prepare([tmp_path / "in"], tmp_path / "o.npy")


def test_a_source_that_breaks_in_mid_read_leaves_the_old_files(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(POEM)
    report = prepare([tmp_path / "a.txt"], tmp_path / "o.npy", vocab_size=300)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def breaking(path):
        yield "some of it "
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(prepare_module, "read_text", breaking)
    with pytest.raises(OSError, match="Input/output error"):
        prepare([tmp_path / "a.txt"], report.path, vocab_size=280)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_without_the_tokenizers_package_the_message_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(NpyDataError, match=r"pip install 'npydata\[prepare\]'"):
        prepare([tmp_path / "a.txt"], tmp_path / "o.npy")


KILLED_IN_MID_RUN = """
    import os, signal, sys
    from npydata.dataset import prepare as module

    def read_then_die(path):
        yield "some text " * (module.BATCH_CHARS // 5)
        yield "more text " * (module.BATCH_CHARS // 5)
        os.kill(os.getpid(), signal.SIGKILL)

    module.read_text = read_then_die
    module.prepare([sys.argv[1]], sys.argv[2], tokenizer=sys.argv[3])
"""


def test_a_kill_in_mid_run_leaves_no_file_and_the_next_run_cleans_up(tmp_path, tokenizer_file):
    (tmp_path / "a.txt").write_text(POEM)
    out = tmp_path / "out" / "o.npy"
    out.parent.mkdir()
    arguments = [tmp_path / "a.txt", out, tokenizer_file]
    child = [sys.executable, "-c", textwrap.dedent(KILLED_IN_MID_RUN), *map(str, arguments)]
    assert subprocess.run(child, check=False).returncode == -signal.SIGKILL
    left = [path for path in out.parent.iterdir() if path.stat().st_size]
    assert left, "the run was killed before it wrote anything, which would prove nothing"
    assert not out.exists()
    assert not out.with_suffix(".tokenizer.json").exists()
    prepare([tmp_path / "a.txt"], out, tokenizer=tokenizer_file)
    assert sorted(path.name for path in out.parent.iterdir()) == ["o.npy", "o.tokenizer.json"]


def test_memory_does_not_grow_with_the_text(tmp_path, tokenizer_file):
    """What is held between reading and writing is bounded, whatever the length of a line."""
    held, largest = 0, 0
    (tmp_path / "line.txt").write_bytes(b"x" * (6 << 20))

    def counted(sources):
        nonlocal held, largest
        bar = prepare_module.progress_bar("", 0, "", show=False)
        for piece in prepare_module._pieces(
            sources, prepare_module._Marks(0, None), prepare_module._Tally(None, False), bar
        ):
            held += len(piece or "")
            largest = max(largest, held)
            yield piece

    source = Source(tmp_path / "line.txt", 6 << 20)
    for _ in prepare_module._batches(counted([source])):
        held = 0
    assert largest <= prepare_module.BATCH_CHARS + prepare_module.PIECE_CHARS


def test_report_names_what_was_read_and_written(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text \xff\n" * 10)
    line = str(prepare([Path(tmp_path / "a.txt")], tmp_path / "o.npy", vocab_size=300))
    for part in ("o.npy", "tokens", "1 file", "70 B", "bytes/token", "tok/s", "10 U+FFFD"):
        assert part in line
    assert "\n" not in line


@pytest.mark.parametrize("documents", ["file", "line"])
def test_the_documents_that_prepare_recorded_are_found_without_the_id_that_ends_them(
    tmp_path, documents
):
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    report = prepare([tmp_path / "a.txt"], tmp_path / "t.npy", vocab_size=300, documents=documents)
    assert f"end-of-text id {report.eot_id}," in str(report)
    told = PackedDataset(report.path, 8, eot_id=report.eot_id)
    found = PackedDataset(report.path, 8)
    assert found.ends.tolist() == told.ends.tolist()
    assert found.fingerprint() == told.fingerprint()
    assert inspect_tokens(report.path).documents == len(found.ends) == report.documents
