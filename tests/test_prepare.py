"""Text becomes a token file: which files, where they are cut, what is kept, what a kill leaves."""

import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from npydata import NpyDataError
from npydata import prepare as prepare_module
from npydata.prepare import END_OF_TEXT, load_tokenizer, prepare
from npydata.text import (
    HEAD_BYTES,
    Source,
    cut_point,
    decode_blocks,
    list_sources,
    python_corpus,
    read_blocks,
    read_span,
    sample_spans,
    text_pieces,
)
from npydata.tokens import open_tokens

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
    assert (sources.binary, sources.empty) == (1, 1)
    assert sources.nbytes == len("first\nsecond\nthird\n")


def test_names_keep_their_order_and_a_file_named_twice_is_read_once(folder):
    sources = list_sources([folder / "b.txt", folder, folder / "a.txt"])
    assert names(sources) == ["b.txt", "a.txt", "z.txt"]


def test_a_pattern_is_sorted_and_enters_folders(folder):
    assert names(list_sources([f"{folder}/[ab].txt"])) == ["a.txt", "b.txt"]
    assert names(list_sources([f"{folder}/b*"])) == ["z.txt", "b.txt"]


def test_a_pattern_may_name_a_link_and_a_file_may_be_named_like_a_pattern(folder):
    (folder / "c[1].txt").write_text("brackets\n")
    assert names(list_sources([folder / "link.txt", folder / "c[1].txt"])) == [
        "link.txt",
        "c[1].txt",
    ]


def test_suffix_narrows_folders_and_patterns_but_not_named_files(folder):
    (folder / "code.py").write_text("pass\n")
    assert names(list_sources([folder, f"{folder}/*"], suffix=".py")) == ["code.py"]
    assert names(list_sources([folder / "a.txt"], suffix=".py")) == ["a.txt"]


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


def test_text_is_decoded_the_same_wherever_the_blocks_end():
    data = POEM.encode()
    for block_bytes in range(1, 9):
        blocks = [data[at : at + block_bytes] for at in range(0, len(data), block_bytes)]
        decoded = list(decode_blocks(blocks))
        assert "".join(text for text, _ in decoded) == POEM
        assert sum(bad for _, bad in decoded) == 0


@pytest.mark.parametrize(
    "data, text, undecodable",
    [
        (b"caf\xe9 au lait", "caf\ufffd au lait", 1),
        (b"\xff\xfe", "\ufffd\ufffd", 2),
        (b"cut \xe6\x9d", "cut \ufffd\ufffd", 2),  # a character's last byte is missing
        (b"\xed\xb2\x80", "\ufffd\ufffd\ufffd", 3),  # a surrogate, which UTF-8 forbids
        ("kept \ufffd".encode(), "kept \ufffd", 0),  # a replacement character of the text's own
    ],
)
def test_each_byte_that_is_not_utf8_becomes_one_replacement_and_is_counted(data, text, undecodable):
    for blocks in ([data], [data[at : at + 1] for at in range(len(data))]):
        decoded = list(decode_blocks(blocks))
        assert "".join(part for part, _ in decoded) == text
        assert sum(bad for _, bad in decoded) == undecodable


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


def test_reading_in_blocks_gives_the_whole_file(tmp_path):
    (tmp_path / "f").write_bytes(bytes(range(256)) * 10)
    blocks = list(read_blocks(tmp_path / "f", 1000))
    assert [len(block) for block in blocks] == [1000, 1000, 560]
    assert b"".join(blocks) == bytes(range(256)) * 10


# The training sample


def test_the_sample_is_everything_when_that_fits_the_budget():
    assert sample_spans([5, 0, 7], 12) == [(0, 0, 5), (2, 0, 7)]


def test_the_sample_stays_in_budget_in_bounds_and_takes_no_byte_twice():
    draw = random.Random(1)
    for _ in range(200):
        sizes = [draw.choice([0, 1, 10, 500, 4000]) for _ in range(draw.randint(1, 30))]
        budget = draw.randint(1, 5000)
        taken = set()
        for index, start, length in sample_spans(sizes, budget, span=100):
            assert 0 <= start < start + length <= sizes[index]
            span = {(index, at) for at in range(start, start + length)}
            assert not taken & span
            taken |= span
        assert len(taken) <= budget
        assert len(taken) > budget - 100 or len(taken) == sum(sizes)


def test_a_budget_below_one_span_is_still_used():
    assert sample_spans([1000], 30, span=100) == [(0, 0, 30)]


def test_every_large_file_has_its_share_of_the_sample():
    sizes = [10_000, 30_000, 60_000]
    shares = [0, 0, 0]
    for index, _, length in sample_spans(sizes, 10_000, span=100):
        shares[index] += length
    assert shares == [1000, 3000, 6000]


def test_a_span_loses_the_broken_lines_at_its_ends_only(tmp_path):
    path = tmp_path / "f"
    path.write_text("one\ntwo\nthree\nfour")
    assert read_span(path, 0, 18) == "one\ntwo\nthree\nfour"
    assert read_span(path, 1, 17) == "two\nthree\nfour"
    assert read_span(path, 0, 10) == "one\ntwo\n"
    path.write_text("é" * 10)
    assert read_span(path, 1, 6) == "éé"


# The whole way


def test_the_tokens_decode_to_the_text_with_an_end_after_every_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(POEM.encode())
    (tmp_path / "b.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "c.txt").write_bytes(b"\xff")
    report = prepare([tmp_path], tmp_path / "out.npy", vocab_size=300)
    assert (
        text_of(report) == POEM + END_OF_TEXT + "caf\ufffd\n" + END_OF_TEXT + "\ufffd" + END_OF_TEXT
    )
    assert (report.files, report.undecodable_bytes) == (3, 2)
    assert report.first_undecodable == tmp_path / "b.txt"
    assert report.nbytes == len(POEM.encode()) + 6
    assert report.num_tokens == len(ids_of(report.path))


def test_end_of_text_written_in_a_text_does_not_end_a_document(tmp_path):
    (tmp_path / "a.txt").write_text(f"before{END_OF_TEXT}after\n" * 9)
    report = prepare([tmp_path / "a.txt"], tmp_path / "out.npy", vocab_size=300)
    end = load_tokenizer(report.tokenizer_path).token_to_id(END_OF_TEXT)
    assert ids_of(report.path).count(end) == 1
    assert text_of(report) == f"before{END_OF_TEXT}after\n" * 9 + END_OF_TEXT


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
    (tmp_path / "b.txt").write_text("zqzqzqzqzq\n" * 30_000)
    whole = prepare([tmp_path], tmp_path / "w.npy", vocab_size=270)
    first_only = prepare([tmp_path], tmp_path / "s.npy", vocab_size=270, sample_mb=0.065536)
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


def test_a_tokenizer_that_cannot_encode_every_text_is_refused(tmp_path):
    word_level(tmp_path / "t.json", unk_token="missing")
    with pytest.raises(NpyDataError, match=r"t\.json: the tokenizer cannot encode every text: "):
        load_tokenizer(tmp_path / "t.json")


def test_a_text_that_a_tokenizer_cannot_encode_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "UNUSUAL_TEXT", ("text",))
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
    with pytest.raises(NpyDataError, match="1 empty files, 1 binary files"):
        prepare([tmp_path / "in"], tmp_path / "o.npy")


def test_a_source_that_breaks_in_mid_read_leaves_the_old_files(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(POEM)
    report = prepare([tmp_path / "a.txt"], tmp_path / "o.npy", vocab_size=300)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def breaking(path):
        yield b"some of it "
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(prepare_module, "read_blocks", breaking)
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
    from npydata import prepare as module

    def read_then_die(path):
        yield b"some text " * (module.BATCH_CHARS // 5)
        yield b"more text " * (module.BATCH_CHARS // 5)
        os.kill(os.getpid(), signal.SIGKILL)

    module.read_blocks = read_then_die
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
        for piece in prepare_module._pieces(sources, prepare_module._Tally(None), bar):
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
    for part in ("o.npy", "tokens", "1 file", "70 B", "bytes/token", "tok/s", "10 undecodable"):
        assert part in line
    assert "\n" not in line
