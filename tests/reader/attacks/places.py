"""Paths that aren't checkpoints, or not files at all; ``test_refusals`` has more of them."""

import os
import socket
from functools import partial
from pathlib import Path

from checkpoint_files import payload

from attacks import of_family, register

refused, harmless = of_family(__name__)
system = partial(register, "places", "system")


def content(folder, raw):
    path = folder / "a.pt"
    path.write_bytes(raw)
    return path


refused(
    content,
    {
        "one_byte": b"\x80",  # be a byte
        "zeros": bytes(10_000),  # be zeros
        "payload_alone": payload(10_000),  # be only data
        "zip_head_alone": b"PK\3\4" + bytes(1000),  # look like a zip
        "zip_end_alone": bytes(1000) + b"PK\5\6" + bytes(18),  # look like a zip's end
        "pickle_head_alone": b"\x80\x02",  # look like a pickle
        "numpy_file": b"\x93NUMPY\1\0v\0{'descr': '<f4', 'shape': (4,)}",  # be a numpy file
        "hdf5_file": b"\x89HDF\r\n\x1a\n" + bytes(100),  # be an HDF5 file
        "ones": b"\xff" * 10_000,  # be bytes of 255
    },
)


@system
def path_under_a_file(folder):
    """Lie under a file."""
    (folder / "a").write_bytes(b"")
    return folder / "a" / "b.pt"


@system
def path_too_long(folder):
    """Have a longer name than files have."""
    return folder / ("a" * 5_000)


def linked(folder, target):
    (folder / "a.pt").symlink_to(target)
    return folder / "a.pt"


refused(linked, [
    "/dev/zero", "/dev/null", "/proc/self/mem",
])  # fmt: skip


@refused
def pipe_without_a_writer(folder):
    """Make the reader wait for a writer."""
    os.mkfifo(folder / "a.pt")
    return folder / "a.pt"


@system
def bound_socket(folder):
    """Be a socket."""
    before = Path.cwd()
    os.chdir(folder)  # a socket's path may only have 108 letters
    try:
        socket.socket(socket.AF_UNIX).bind("a.pt")
    finally:
        os.chdir(before)
    return folder / "a.pt"


@system
def link_to_itself(folder):
    """Go round in circles."""
    (folder / "a.pt").symlink_to("a.pt")
    return folder / "a.pt"


@refused
def terabyte_of_zeros(folder):
    """Be a terabyte of nothing."""
    path = folder / "a.pt"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    return path
