"""Reading tokens by map and by pread, and writing them whole or not at all."""

import gc
import mmap
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch

from npydata import TokenFileError, open_tokens, write_tokens
from npydata.dataset.access import window_pages
from npydata.system.page_cache import evict

IDS = np.arange(10_000, dtype=np.uint16)
BOTH_ACCESSES = pytest.mark.parametrize("access", ["mmap", "pread"])


@pytest.fixture
def path(tmp_path):
    write_tokens(tmp_path / "a.npy", [IDS])
    return tmp_path / "a.npy"


@BOTH_ACCESSES
def test_read_returns_the_ids_asked_for_and_stops_at_the_end(path, access):
    tokens = open_tokens(path, access=access)
    assert np.array_equal(tokens.read(5, 10), IDS[5:15])
    assert np.array_equal(tokens.read(9_990, 100), IDS[9_990:])
    assert tokens.read(20_000, 5).tolist() == []
    for start, count in ((-1, 5), (0, -1)):
        with pytest.raises(IndexError, match=rf"read\({start}, {count}\)"):
            tokens.read(start, count)


@BOTH_ACCESSES
def test_gather_returns_one_window_a_row(path, access):
    starts = np.array([0, 9_990, 17, 17])
    windows = open_tokens(path, access=access).gather(starts, 10)
    assert windows.dtype == np.uint16
    assert np.array_equal(windows, IDS[starts[:, None] + np.arange(10)])


@BOTH_ACCESSES
def test_tokens_cannot_be_written_through_the_map(path, access):
    if access == "mmap":
        with pytest.raises(ValueError, match="read-only"):
            open_tokens(path).read(0, 5)[0] = 1
    assert np.array_equal(open_tokens(path, access=access).read(0, 10_000), IDS)


@BOTH_ACCESSES
def test_a_pickled_file_is_small_and_reopens(path, access):
    tokens = open_tokens(path, access=access)
    pickled = pickle.dumps(tokens)
    assert len(pickled) < 1000
    assert np.array_equal(pickle.loads(pickled).read(0, 10_000), IDS)


@BOTH_ACCESSES
@pytest.mark.parametrize("new", [IDS[:-1], IDS.astype(np.uint32)])
def test_a_file_that_changed_is_refused_when_reopened(path, access, new):
    pickled = pickle.dumps(open_tokens(path, access=access))
    write_tokens(path, [new])
    with pytest.raises(TokenFileError, match=r"a.npy: changed since it was opened"):
        pickle.loads(pickled)


SHRUNK = """
    import os, sys, numpy as np
    from npydata import TokenFileError, open_tokens
    tokens = open_tokens(sys.argv[1], access=sys.argv[2])
    os.truncate(sys.argv[1], 4096)
    try:
        tokens.gather(np.array([9_000]), 100)
    except TokenFileError as error:
        print(error)
"""


@BOTH_ACCESSES
def test_a_file_of_other_ids_in_as_many_bytes_is_refused_when_reopened(path, access):
    pickled = pickle.dumps(open_tokens(path, access=access))
    write_tokens(path, [IDS.astype(np.int16)])
    with pytest.raises(TokenFileError, match=r"of int16 .*expected .* of uint16"):
        pickle.loads(pickled)


@BOTH_ACCESSES
def test_a_headerless_file_is_reopened_with_the_dtype_it_was_given(tmp_path, access):
    IDS.tofile(tmp_path / "a.bin")
    tokens = open_tokens(tmp_path / "a.bin", dtype="uint16", access=access)
    again = pickle.loads(pickle.dumps(tokens))
    assert again.dtype == np.uint16
    assert np.array_equal(again.read(0, 10_000), IDS)


def test_files_with_and_without_rows_are_seen_without(path):
    write_tokens(path.with_name("b.npy"), [IDS[:20]], row_len=10)
    both = open_tokens([path.with_name("b.npy"), path])
    assert both.shape == (10_020,)


@BOTH_ACCESSES
def test_a_file_that_shrank_gives_an_error_and_no_crash(path, access):
    child = [sys.executable, "-c", textwrap.dedent(SHRUNK), path, access]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    assert done.returncode == 0  # a page beyond the end is SIGBUS: -7
    assert "a.npy: changed since it was opened" in done.stdout


@BOTH_ACCESSES
def test_reading_on_in_a_file_that_shrank_is_refused(path, access):
    tokens = open_tokens(path, access=access)
    os.truncate(path, 4096)
    with pytest.raises(TokenFileError, match=r"a.npy: changed since it was opened"):
        tokens.read(9_000, 100)


@BOTH_ACCESSES
def test_a_file_that_was_cut_and_grew_again_is_refused(path, access):
    tokens = open_tokens(path, access=access)
    os.truncate(path, 128)
    os.truncate(path, 50_000)
    with pytest.raises(TokenFileError, match=r"a.npy: changed since it was opened: 50000 bytes"):
        tokens.gather(np.array([9_000]), 100)


@BOTH_ACCESSES
@pytest.mark.parametrize("start", [-1, 9_991])
def test_a_window_that_leaves_the_file_is_refused(path, access, start):
    with pytest.raises(IndexError, match=r"a.npy: windows of 10 tokens .* inside 0 to 10000"):
        open_tokens(path, access=access).gather(np.array([0, start]), 10)


def test_a_read_that_comes_in_pieces_is_put_together(path, monkeypatch):
    preadv = os.preadv
    tokens = open_tokens(path, access="pread")
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:7]], at))
    assert np.array_equal(tokens.read(100, 50), IDS[100:150])


@BOTH_ACCESSES
def test_a_file_of_no_bytes_opens_and_holds_nothing(tmp_path, access):
    (tmp_path / "empty.bin").touch()
    tokens = open_tokens(tmp_path / "empty.bin", access=access)
    assert (tokens.num_tokens, tokens.read(0, 5).tolist()) == (0, [])
    assert tokens.gather(np.zeros(0, np.int64), 5).shape == (0, 5)
    assert tokens.will_need(np.zeros(0, np.int64), 5) is True


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["a.npy", "a.bin", "a.ds"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path, make, name):
    make(tmp_path / name)
    with pytest.raises(TokenFileError, match=f"{name}: is a folder"):
        open_tokens(tmp_path / name, dtype="uint16")


def test_a_pickle_does_not_grow_with_the_number_of_documents(tmp_path):
    np.arange(50_000, dtype="<u2").tofile(tmp_path / "a.ds")
    np.arange(1, 50_001, dtype="<u8").tofile(tmp_path / "a.ds.index")
    pickled = pickle.dumps(open_tokens(tmp_path / "a.ds"))
    assert len(pickled) < 1000
    assert len(pickle.loads(pickled).document_ends) == 50_000


@BOTH_ACCESSES
def test_an_empty_file_opens_and_holds_nothing(tmp_path, access):
    write_tokens(tmp_path / "empty.npy", [])
    tokens = open_tokens(tmp_path / "empty.npy", access=access)
    assert tokens.num_tokens == 0
    assert tokens.read(0, 5).tolist() == []


@pytest.fixture
def shards(tmp_path):
    """Three files of 10, 0 and 7 tokens, and of different dtypes."""
    write_tokens(tmp_path / "s0.npy", [np.arange(10, dtype=np.uint16)])
    write_tokens(tmp_path / "s1.npy", [np.empty(0, np.uint16)])
    write_tokens(tmp_path / "s2.npy", [np.arange(10, 17, dtype=np.uint32)])
    return [tmp_path / f"s{k}.npy" for k in range(3)]


@BOTH_ACCESSES
@pytest.mark.parametrize("given", ["list", "glob"])
def test_several_files_are_seen_one_after_the_other(shards, access, given):
    paths = shards if given == "list" else shards[0].parent / "s*.npy"
    opened = open_tokens(paths, access=access)
    for tokens in (opened, pickle.loads(pickle.dumps(opened))):
        assert (len(tokens), tokens.shape, tokens.dtype) == (17, (17,), np.uint32)
        for start, count in [(0, 17), (3, 5), (8, 5), (12, 100), (10, 0), (99, 1)]:
            found = tokens.read(start, count)
            assert found.tolist() == list(range(17))[start : start + count]
            assert found.dtype == np.uint32
        starts = np.array([13, 0, 8, 6, 10, 9])  # 8 and 9 reach over the end of the first file
        tokens.will_need(starts, 4)
        windows = tokens.gather(starts, 4)
        assert np.array_equal(windows, starts[:, None] + np.arange(4))
        assert windows.dtype == np.uint32
        with pytest.raises(IndexError, match="inside 0 to 17"):
            tokens.gather(np.array([14]), 4)


def test_rows_of_several_files_are_counted_through(tmp_path):
    for name, rows, row_len in (("a", 2, 5), ("b", 1, 5), ("c", 2, 4)):
        ids = np.arange(rows * row_len, dtype=np.uint16)
        write_tokens(tmp_path / f"{name}.npy", [ids], row_len=row_len)
    assert open_tokens([tmp_path / "a.npy", tmp_path / "b.npy"]).shape == (3, 5)
    assert open_tokens(tmp_path / "?.npy").shape == (23,)


def test_document_ends_of_several_files_go_on_from_file_to_file(tmp_path):
    for name in "ab":
        np.arange(10, dtype="<u2").tofile(tmp_path / f"{name}.ds")
        np.array([4, 10], "<u8").tofile(tmp_path / f"{name}.ds.index")
    assert open_tokens(tmp_path / "*.ds").document_ends.tolist() == [4, 10, 14, 20]
    write_tokens(tmp_path / "c.npy", [[1, 2]])
    assert open_tokens([tmp_path / "a.ds", tmp_path / "c.npy"]).document_ends is None


def test_a_list_or_glob_of_one_file_is_that_file(path):
    for given in ([path], path.with_name("?.npy")):
        tokens = open_tokens(given)
        assert tokens.path == path
        assert repr(tokens) == repr(open_tokens(path))
    assert "2 files, uint16, shape=(20000,)" in repr(open_tokens([path, path]))


def test_a_file_may_be_named_like_a_glob(path):
    named = path.rename(path.with_name("a[1].npy"))
    assert open_tokens(named).num_tokens == len(IDS)


def test_a_list_or_glob_of_no_file_is_refused(tmp_path):
    for given, message in (
        ([], "no token file given"),
        (tmp_path / "*.bin", "no file matches"),
        ("", "an empty path was given"),
        ([tmp_path], "is a folder, expected a file or a glob"),
    ):
        with pytest.raises(TokenFileError, match=message):
            open_tokens(given)


@pytest.mark.parametrize("given", [None, 5, b"a", [None], [5, "a.npy"]])
def test_what_is_no_path_is_named(given):
    culprit = given[0] if isinstance(given, list) else given
    with pytest.raises(TypeError, match=f"^{culprit!r}: expected a path or a glob"):
        open_tokens(given)


def test_files_of_several_formats_are_seen_as_one(path, tmp_path):
    np.array([7, 8], "<u2").tofile(tmp_path / "b.bin")
    tokens = open_tokens([path, tmp_path / "b.bin"], dtype="uint16")
    assert tokens.read(9_999, 5).tolist() == [9_999, 7, 8]
    tokens = open_tokens([path, tmp_path / "b.bin"])  # two ids of 16 bits are one of 32
    assert (tokens.dtype, tokens.read(10_000, 5).tolist()) == (np.uint32, [8 << 16 | 7])


@BOTH_ACCESSES
def test_advice_changes_nothing_but_what_is_in_memory(path, access):
    tokens = open_tokens(path, access=access)
    starts = np.array([0, 5_000, 9_000])
    before = tokens.gather(starts, 100)
    evict(path)
    tokens.will_need(starts, 100)
    tokens.will_need(np.zeros(0, np.int64), 100)
    assert np.array_equal(tokens.gather(starts, 100), before)


def test_advice_is_about_the_pages_that_hold_the_windows(path):
    layout = open_tokens(path).layout
    first_of_page_1 = (mmap.PAGESIZE - layout.offset) // 2
    begins, lengths = window_pages(layout, np.array([first_of_page_1]), 10)
    assert (begins.tolist(), lengths.tolist()) == ([mmap.PAGESIZE], [mmap.PAGESIZE])


def test_threads_share_a_file(path):
    tokens, wrong = open_tokens(path, access="pread"), []

    def reader(start):
        for _ in range(200):
            if tokens.gather(np.array([start]), 50)[0, 0] != start:
                wrong.append(start)

    threads = [threading.Thread(target=reader, args=(100 * k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_reads_leave_no_descriptor_behind(path):
    gc.collect()  # what other tests left open
    before = len(os.listdir("/proc/self/fd"))
    for access in ("mmap", "pread") * 50:
        open_tokens(path, access=access).read(0, 10)
    assert len(os.listdir("/proc/self/fd")) == before


def test_write_tokens_streams_chunks_of_any_shape(tmp_path):
    chunks = (
        chunk for chunk in (IDS[:10], IDS[10:70].reshape(3, 20), [70, 71], torch.tensor([72]))
    )
    tokens = write_tokens(tmp_path / "a.npy", chunks)
    assert tokens.dtype == np.uint16
    assert np.array_equal(np.load(tmp_path / "a.npy"), IDS[:73])


def test_lists_are_stored_as_uint32(tmp_path):
    assert write_tokens(tmp_path / "a.npy", [[1, 2], [2**32 - 1]]).dtype == np.uint32


def test_rows_are_filled_across_chunks_and_an_incomplete_one_is_reported(tmp_path):
    with pytest.warns(
        UserWarning, match="left out the last 3 tokens, which do not fill a row of 4"
    ):
        tokens = write_tokens(tmp_path / "a.npy", [IDS[:5], IDS[5:11]], row_len=4)
    assert tokens.shape == (2, 4)
    assert np.array_equal(np.load(tmp_path / "a.npy"), IDS[:8].reshape(2, 4))


def test_an_id_that_does_not_fit_is_named_with_its_position(tmp_path):
    chunks = [np.arange(100), np.array([1, 70_000, 2])]
    with pytest.raises(TokenFileError, match=r"id 70000 at token 101 does not fit uint16"):
        write_tokens(tmp_path / "a.npy", chunks, dtype="uint16")
    with pytest.raises(TokenFileError, match=r"id -1 at token 0 does not fit uint32"):
        write_tokens(tmp_path / "a.npy", [[-1]])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("chunk", [[1.5], ["a"], [True]])
def test_what_is_no_id_is_refused(tmp_path, chunk):
    with pytest.raises(TokenFileError, match="expected integers"):
        write_tokens(tmp_path / "a.npy", [chunk])


def test_a_failure_in_the_stream_leaves_the_old_file_and_nothing_else(path):
    def chunks():
        yield IDS[:10]
        raise RuntimeError("the tokenizer broke")

    with pytest.raises(RuntimeError, match="the tokenizer broke"):
        write_tokens(path, chunks())
    assert np.array_equal(np.load(path), IDS)
    assert os.listdir(path.parent) == [path.name]


def test_a_killed_writer_leaves_no_file_and_the_next_one_cleans_up(tmp_path):
    script = """
        import sys, numpy as np
        from npydata import write_tokens
        def chunks():
            for k in range(10**9):
                yield np.arange(100_000, dtype=np.uint32)
                if k == 20:
                    print("writing", flush=True)
        write_tokens(sys.argv[1], chunks())
    """
    target = tmp_path / "a.npy"
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), target], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"writing\n"
        write_tokens(tmp_path / "b.npy", [IDS])
        assert not target.exists()
        (partial,) = tmp_path.glob(".a.npy.*")
        assert partial.stat().st_mode & 0o777 == 0o600
        child.send_signal(signal.SIGKILL)
    assert not target.exists()
    write_tokens(target, [IDS])
    assert sorted(os.listdir(tmp_path)) == ["a.npy", "b.npy"]


def test_a_live_writers_file_is_not_taken_for_stale(tmp_path):
    def outer():
        yield [1, 2, 3]
        write_tokens(tmp_path / "a.npy", [[7]])
        yield [4]

    write_tokens(tmp_path / "a.npy", outer())
    assert np.load(tmp_path / "a.npy").tolist() == [1, 2, 3, 4]


def test_the_finished_file_has_the_modes_any_new_file_has(tmp_path):
    old = os.umask(0o027)
    try:
        write_tokens(tmp_path / "a.npy", [[1]])
    finally:
        os.umask(old)
    assert (tmp_path / "a.npy").stat().st_mode & 0o777 == 0o640


def test_writing_over_a_folder_or_into_none_is_refused_before_any_work(tmp_path):
    def never():
        raise AssertionError("the stream was started")
        yield

    with pytest.raises(IsADirectoryError, match="is a folder"):
        write_tokens(tmp_path, never(), dtype="uint16")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_tokens(tmp_path / "nowhere" / "a.npy", never(), dtype="uint16")


@pytest.mark.parametrize("name", ["a.bin", "a.idx", "a.BIN", "a.npz", "a.ds", "a.pt", "a.npy.txt"])
def test_tokens_are_not_written_under_the_name_of_another_format(tmp_path, name):
    def never():
        raise AssertionError("the stream was started")
        yield

    with pytest.raises(TokenFileError, match=f"{name}: a numpy array would .* end in .npy$"):
        write_tokens(tmp_path / name, never())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.npy", "a.NPY", "a", "part-0.5", "a.tokens"])
def test_tokens_are_written_under_a_name_that_says_nothing_else(tmp_path, name):
    assert write_tokens(tmp_path / name, [[1, 2]]).path == tmp_path / name


def test_memory_stays_at_one_chunk_however_long_the_stream(tmp_path):
    script = """
        import resource, sys, numpy as np
        from npydata import write_tokens
        chunk = np.zeros(1_000_000, np.uint16)
        write_tokens(sys.argv[1], (chunk for _ in range(3)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        write_tokens(sys.argv[1], (chunk for _ in range(100)))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), tmp_path / "a.npy"]
    grown_kb = int(subprocess.run(command, capture_output=True, check=True).stdout)
    assert grown_kb < 8 * 1024  # the file is 200 MB
