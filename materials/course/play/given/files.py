"""The given half of lesson 06: a file that is read at a place, on a disk or on a server."""

import io
import mmap
import os
import urllib.request
import zipfile

import numpy as np
import torch
from opcodes import Stored

from npydata import CheckpointError

ZIP, LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""How files of torch.save begin: since 2020, and before."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32}  # fmt: skip


class File:
    """A file on a disk."""

    def __init__(self, path):
        self.descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.descriptor).st_size
        if hasattr(os, "posix_fadvise"):  # no reading ahead: only what is asked for
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, at, nbytes):
        """Return bytes from a place on."""
        return os.pread(self.descriptor, nbytes, at)

    def map(self, at, nbytes):
        """Return an array over bytes of the file. A page is read when it is first touched."""
        if not nbytes:
            return np.empty(0, np.uint8)
        before = at % mmap.ALLOCATIONGRANULARITY  # a map begins at a page
        pages = mmap.mmap(
            self.descriptor, before + nbytes, access=mmap.ACCESS_COPY, offset=at - before
        )
        if hasattr(mmap, "MADV_RANDOM"):
            pages.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(pages, np.uint8, nbytes, before)

    def __del__(self):
        os.close(self.descriptor)


class Remote:
    """A file on a server that gives out ranges of it."""

    def __init__(self, url):
        self.url = url
        self.size = int(self.ask(0, 0)[1].rpartition("/")[2])

    def ask(self, first, last):
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={first}-{last}"})
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=10) as answer:
            return answer.read(), answer.headers["Content-Range"]

    def read(self, at, nbytes):
        """Return bytes from a place on: one request."""
        last = min(at + nbytes, self.size) - 1
        return self.ask(at, last)[0] if last >= at else b""

    def map(self, at, nbytes):
        """Return an array of bytes of the file; over a network they are fetched at once."""
        return np.frombuffer(bytearray(self.read(at, nbytes)), np.uint8)


def directory(file):
    """Return (place of its header, size) of each entry of a torch file, by its name."""
    found, nbytes, entries = {}, 1 << 13, None
    while entries is None:  # the directory is at the end; Python's zipfile counts from `begin`
        begin = max(0, file.size - nbytes)
        try:
            entries = zipfile.ZipFile(io.BytesIO(file.read(begin, nbytes))).infolist()
        except zipfile.BadZipFile as error:
            if not begin:
                raise ValueError(error) from None
        nbytes *= 4  # cut off, perhaps: read more of it
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{entry.filename!r:.80} is compressed")
        name = entry.filename.partition("/")[2]
        if name in found:
            raise ValueError(f"{name!r:.80} is there twice")
        found[name] = begin + entry.header_offset, entry.file_size
    return found


def first_pickles(file, number, describe):
    """Return what the pickles at a file's beginning describe, and where the last one ends."""
    nbytes = 1 << 16
    while True:
        data, at, values = file.read(0, nbytes), 0, []
        try:
            for _ in range(number):
                value, at = describe(data, at)
                values.append(value)
            return values, at
        except CheckpointError:
            if nbytes >= file.size:
                raise
        nbytes *= 4  # cut off, perhaps: read more of it


def slice_view(view, index):
    """Return the shape, strides and offset of a slice; nothing is read for that."""
    shape, stride, offset = view
    seen = torch.empty_strided(shape, stride, device="meta")[index]
    return tuple(seen.shape), seen.stride(), offset + seen.storage_offset()


def tensors_in(value, prefix=""):
    """Return the tensors of nested dictionaries by their dotted names."""
    if isinstance(value, Stored):
        return {prefix: value}
    found = {}
    for key, one in value.items() if isinstance(value, dict) else ():
        found |= tensors_in(one, f"{prefix}.{key}" if prefix else str(key))
    return found
