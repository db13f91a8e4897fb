"""Writing past the page cache: whole, in place, with the checksums of what was written."""

import errno
import fcntl
import gc
import mmap
import os
import random
import stat
import threading
import zlib

import pytest

from npydata.checkpointer import writer
from npydata.checkpointer.staging import StagingBuffer
from npydata.checkpointer.writer import DIRECT, PAGE, write_durably

PIECE = 4 * PAGE
SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 777]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(writer, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(writer, "WRITE_BYTES", PIECE)


def page_memory(nbytes, seed=1):
    """Random bytes in page-aligned memory, up to the end of a page."""
    buffer = StagingBuffer()
    memory = buffer.reserve(-(-nbytes // PAGE) * PAGE).numpy()
    memory[:] = memoryview(random.Random(seed).randbytes(len(memory)))
    return memory.data


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_file_of_any_size_has_exactly_the_bytes(tmp_path, nbytes):
    memory = page_memory(nbytes)
    write_durably(tmp_path / "f", memory, nbytes)
    assert (tmp_path / "f").read_bytes() == memory[:nbytes].tobytes()


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_checksums_are_those_of_the_files_pieces(tmp_path, nbytes):
    sums = write_durably(tmp_path / "f", page_memory(nbytes), nbytes)
    content = (tmp_path / "f").read_bytes()
    assert sums == [zlib.crc32(content[k : k + PIECE]) for k in range(0, nbytes, PIECE)]


def test_each_piece_is_waited_for_before_it_is_read(tmp_path):
    memory = page_memory(2 * PIECE + 5)
    filled = memory.tobytes()
    memory[:] = bytes(len(memory))

    def fill(end):
        memory[:end] = filled[:end]

    write_durably(tmp_path / "f", memory, 2 * PIECE + 5, fill)
    assert (tmp_path / "f").read_bytes() == filled[: 2 * PIECE + 5]


def test_the_file_is_private(tmp_path):
    write_durably(tmp_path / "f", page_memory(5), 5)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600


@pytest.mark.parametrize("make", [
    lambda path: path.write_bytes(b"old"), lambda path: path.symlink_to("elsewhere"),
], ids=["file", "link"])  # fmt: skip
def test_what_is_there_already_is_refused_and_stays(tmp_path, make):
    make(tmp_path / "f")
    before = os.lstat(tmp_path / "f")
    with pytest.raises(FileExistsError) as caught:
        write_durably(tmp_path / "f", page_memory(9), 9)
    assert caught.value.filename == str(tmp_path / "f")
    after = os.lstat(tmp_path / "f")
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("most", [511, PAGE, PAGE + 1, 3 * PAGE])
def test_short_writes_are_continued(tmp_path, monkeypatch, most):
    def short(descriptor, piece, offset):
        with open(tmp_path / "f", "r+b") as file:
            file.seek(offset)
            return file.write(piece[:most])

    monkeypatch.setattr(os, "pwrite", short)
    memory = page_memory(PIECE + 77)
    write_durably(tmp_path / "f", memory, PIECE + 77)
    assert (tmp_path / "f").read_bytes() == memory[: PIECE + 77].tobytes()


def test_after_a_write_that_ended_inside_a_page_the_next_is_not_direct(tmp_path, monkeypatch):
    real, seen = os.pwrite, []

    def short(descriptor, piece, offset):
        seen.append(is_direct(descriptor))
        return 100 if len(seen) == 1 else real(descriptor, piece, offset)

    monkeypatch.setattr(os, "pwrite", short)
    write_durably(tmp_path / "f", page_memory(PAGE), PAGE)
    assert seen[1:] == [False]


def is_direct(descriptor):
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT)


def test_a_disk_that_refuses_direct_writes_gets_ordinary_ones(tmp_path, monkeypatch):
    real, refused = os.pwrite, []

    def picky(descriptor, piece, offset):
        if is_direct(descriptor):
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, piece, offset)

    monkeypatch.setattr(os, "pwrite", picky)
    memory = page_memory(PIECE + 5)
    write_durably(tmp_path / "f", memory, PIECE + 5)
    assert (tmp_path / "f").read_bytes() == memory[: PIECE + 5].tobytes()
    assert len(refused) <= 1


def test_a_file_system_that_refuses_to_open_for_direct_writes_gets_ordinary_ones(
    tmp_path, monkeypatch
):
    real = os.open

    def picky(path, flags, *args, **options):
        if flags & DIRECT:
            os.close(real(path, flags & ~DIRECT, *args, **options))  # some create it nevertheless
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", picky)
    memory = page_memory(100)
    write_durably(tmp_path / "f", memory, 100)
    assert (tmp_path / "f").read_bytes() == memory[:100].tobytes()
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600


def test_a_refusal_that_has_another_cause_is_raised(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        write_durably(tmp_path / "f", page_memory(5), 5)


@pytest.mark.parametrize("name, code", [("pwrite", errno.ENOSPC), ("fsync", errno.EIO),
                                        ("ftruncate", errno.EIO)])  # fmt: skip
def test_an_error_of_the_disk_names_the_file(tmp_path, monkeypatch, name, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        write_durably(tmp_path / "f", page_memory(5), 5)
    assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path / "f"))


def test_a_disk_that_takes_nothing_is_an_error_and_no_endless_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="took no bytes"):
        write_durably(tmp_path / "f", page_memory(5), 5)


def test_a_failed_write_leaves_no_descriptor_open(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "broken")

    gc.collect()  # what other tests left open
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="broken"):
        write_durably(tmp_path / "f", page_memory(5), 5)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_data_is_on_the_disk_before_the_call_returns(tmp_path, monkeypatch):
    calls = []
    for name in ("pwrite", "ftruncate", "fsync", "close"):
        real = getattr(os, name)

        def noted(*args, name=name, real=real):
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, noted)
    write_durably(tmp_path / "f", page_memory(5), 5)
    assert calls[-4:] == ["pwrite", "ftruncate", "fsync", "close"]


def test_no_checksum_is_computed_before_everything_is_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PIECE_BYTES", 4096)
    monkeypatch.setattr(writer, "WRITE_BYTES", 4096)
    begun, early = threading.Event(), []
    real = writer.crc32_of

    def crc32_of(content, lengths):
        begun.set()
        yield from real(content, lengths)

    def wait_for(upto):
        if upto == 3 * 4096 and threading.current_thread() is threading.main_thread():
            early.append(begun.wait(0.2))  # the first two pieces are written: is one added up?
            filled.set()
        elif upto == 3 * 4096:
            filled.wait()

    filled = threading.Event()
    monkeypatch.setattr(writer, "crc32_of", crc32_of)
    memory = memoryview(mmap.mmap(-1, 3 * 4096))
    sums = writer.write_durably(tmp_path / "file", memory, 3 * 4096, wait_for)
    assert early == [False]
    assert sums == [zlib.crc32(bytes(4096))] * 3
