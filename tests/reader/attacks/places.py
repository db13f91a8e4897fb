"""Paths that aren't checkpoints, or not files at all."""

import os
import socket
from pathlib import Path

from checkpoint_files import payload

from attacks import attack, register


def content(title: str, tries: str, raw: bytes) -> None:
    """Register a file of these bytes."""

    def write(folder: Path) -> Path:
        path = folder / "a.pt"
        path.write_bytes(raw)
        return path

    register(write, title, tries, "opening")


content("empty_file", "be nothing", b"")
content("one_byte", "be a byte", b"\x80")
content("letters", "be text", b"these are not the weights you are looking for\n" * 100)
content("zeros", "be zeros", bytes(10_000))
content("payload_alone", "be only data", payload(10_000))
content("zip_head_alone", "look like a zip", b"PK\3\4" + bytes(1000))
content("zip_end_alone", "look like a zip's end", bytes(1000) + b"PK\5\6" + bytes(18))
content("pickle_head_alone", "look like a pickle", b"\x80\x02")
content("numpy_file", "be a numpy file", b"\x93NUMPY\1\0v\0{'descr': '<f4', 'shape': (4,)}")
content("gzip_file", "be a gzip file", b"\x1f\x8b\x08\0" + bytes(100))
content("html_page", "be an error page, downloaded", b"<!DOCTYPE html><html>404</html>")
content("git_lfs_pointer", "be a pointer to a checkpoint",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")  # fmt: skip
content("hdf5_file", "be an HDF5 file", b"\x89HDF\r\n\x1a\n" + bytes(100))
content("ones", "be bytes of 255", b"\xff" * 10_000)


@attack("not be there", caught="system")
def missing_file(folder):
    return folder / "missing.pt"


@attack("lie under a file", caught="system")
def path_under_a_file(folder):
    (folder / "a").write_bytes(b"")
    return folder / "a" / "b.pt"


@attack("have a longer name than files have", caught="system")
def path_too_long(folder):
    return folder / ("a" * 5_000)


@attack("be a folder of nothing")
def empty_folder(folder):
    return folder


@attack("make the reader wait for a writer")
def pipe_without_a_writer(folder):
    os.mkfifo(folder / "a.pt")
    return folder / "a.pt"


@attack("never end")
def endless_device(folder):
    (folder / "a.pt").symlink_to("/dev/zero")
    return folder / "a.pt"


@attack("be empty for ever")
def null_device(folder):
    (folder / "a.pt").symlink_to("/dev/null")
    return folder / "a.pt"


@attack("be the reader's own memory")
def own_memory(folder):
    (folder / "a.pt").symlink_to("/proc/self/mem")
    return folder / "a.pt"


@attack("be a socket", caught="system")
def bound_socket(folder):
    before = Path.cwd()
    os.chdir(folder)  # a socket's path may only have 108 letters
    try:
        socket.socket(socket.AF_UNIX).bind("a.pt")
    finally:
        os.chdir(before)
    return folder / "a.pt"


@attack("go round in circles", caught="system")
def link_to_itself(folder):
    (folder / "a.pt").symlink_to("a.pt")
    return folder / "a.pt"


@attack("be a terabyte of nothing")
def terabyte_of_zeros(folder):
    path = folder / "a.pt"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    return path
