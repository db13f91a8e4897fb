"""Your reader: a pickle machine that calls nothing, and one tensor out of a file of any size."""

# ruff: noqa: F401, F821 - the builds stand behind this text
import pickle
from pathlib import Path

import torch

from npydata import CheckpointError
from tutorial.kept.reader.archive import Archive, Extent
from tutorial.kept.reader.call_opcodes import load_reduce, name_global
from tutorial.kept.reader.containers import container_of, safetensors
from tutorial.kept.reader.containers import zip as zips
from tutorial.kept.reader.containers.legacy import (
    COUNT_BYTES,
    in_file_order,
    require_count,
    require_end,
)
from tutorial.kept.reader.files import OpenFile
from tutorial.kept.reader.in_flight import in_parallel
from tutorial.kept.reader.load import Plan
from tutorial.kept.reader.naming import name_entries
from tutorial.kept.reader.opcodes import HANDLERS, collect_tuple, mark, push_number, push_text
from tutorial.kept.reader.parallel_read import (
    GAP_BYTES,
    REQUEST_BYTES,
    cut,
    finish_request,
    read_request,
)
from tutorial.kept.reader.pickle_machine import PickleMachine
from tutorial.kept.reader.stored import StoredTensor
from tutorial.kept.reader.strides import slice_view
from tutorial.kept.reader.tensors import Entry, TensorReader, require_readable
from tutorial.kept.reader.torch_rebuild import Rebuilder


class MyMachine(PickleMachine):
    """Runs the opcodes of a pickle."""


class MyRebuilder(Rebuilder):
    """Says what names, ids and calls in a torch pickle stand for."""


class MyReader(TensorReader):
    """Makes tensors from what a file says of them."""

    def read(self, stored):
        memory = self.memory(require_readable(stored), stored.dtype)
        return view(memory, stored.dtype, (stored.shape, stored.stride, stored.offset))

    def read_slice(self, stored, index):
        extent = self.extent(require_readable(stored))
        chosen = slice_view((stored.shape, stored.stride, stored.offset), index)
        span = byte_span(*chosen, stored.dtype.itemsize)
        return self.copied(extent, stored.dtype, chosen, span)


def my_handlers():
    """Return the library's table of opcodes, with yours in it."""
    return HANDLERS | {
        pickle.BININT: push_number("<i"), pickle.BININT1: push_number("<B"),
        pickle.BININT2: push_number("<H"), pickle.BINFLOAT: push_number(">d"),
        pickle.BINUNICODE: push_text("<I"), pickle.SHORT_BINUNICODE: push_text("<B"),
        pickle.MARK: mark, pickle.TUPLE: collect_tuple,
        pickle.GLOBAL: name_global, pickle.REDUCE: load_reduce,
    }  # fmt: skip


def read_pickle(data, at=0):
    """Return what a pickle describes, the byte after it, and what was met on the way."""
    met = MyRebuilder(len(data))
    machine = MyMachine(data, my_handlers(), find_class=met.find_class,
                        persistent_load=met.persistent_load, reduce=met.reduce, at=at)  # fmt: skip
    return machine.run(), machine.at, met


def open_file(path):
    """Return an archive: what a file describes, and where its storages lie."""
    file = OpenFile(path)
    return OPENERS[container_of(file).format](file)


def open_zip(file):
    records, end = zips.read_directory(file)
    stops = [*(record.header for record in records[1:]), end]
    extents = {}
    for record, stop in zip(records, stops, strict=True):
        header = file.read(record.header, 30)
        begin = payload_begin(header, record.header)
        if begin + record.nbytes > stop:
            raise CheckpointError(f"record {record.name!r} reaches into the next")
        extents[record.name] = Extent(file, begin, record.nbytes)
    prefix = zips.find_prefix(list(extents))
    where = extents[f"{prefix}/data.pkl"]
    root, _, met = read_pickle(file.read(where.offset, where.nbytes))
    data = {name.removeprefix(f"{prefix}/data/"): one for name, one in extents.items()}
    return Archive("zip", file, data, root, met.storages)


def open_legacy(file):
    at = 0
    with file.view() as data:
        for _ in range(4):  # a magic number, a version, the writer's machine, the object
            root, at, met = read_pickle(data, at)
        keys, at, _ = read_pickle(data, at)
    extents = scan_storages(file, at, in_file_order(keys, met.storages))
    return Archive("legacy", file, extents, root, met.storages)


def open_safetensors(file):
    header, begin = safetensors.read_header(file)
    header.pop(safetensors.RESERVED, None)
    root, extents = {}, {}
    for name, entry in header.items():
        root[name], (first, end) = safetensors.read_entry(name, entry)
        extents[name] = Extent(file, begin + first, end - first)
    check_no_gaps(list(extents.values()), begin, file.size)
    return Archive("safetensors", file, extents, root, is_checked=True)


MAX_NAMES = 1 << 20
OPENERS = {"zip": open_zip, "legacy": open_legacy, "safetensors": open_safetensors}


class MyCheckpoint:
    """The tensors of a file by name, each read when it is asked for."""

    def __init__(self, path):
        archive = open_file(Path(path))
        self.reader = MyReader(archive)
        self.tensors = {
            name: value
            for name, value in name_entries(archive.root, MAX_NAMES).items()
            if isinstance(value, StoredTensor)
        }
        for stored in self.tensors.values():
            self.reader.check(stored)

    def __iter__(self):
        return iter(self.tensors)

    def __getitem__(self, name):
        return self.reader.read(self.tensors[name])

    def slice(self, name, index):
        """Return a slice of a tensor, from the bytes it spans."""
        return self.reader.read_slice(self.tensors[name], index)

    def load(self):
        """Return all tensors: each run of them is a request, and several are under way."""
        entries = {name: Entry(self.reader, one) for name, one in self.tensors.items()}
        plan = Plan(list(entries.values()))
        finish = {name: plan.new(entry, ...) for name, entry in entries.items()}
        self.requests = runs([part for read in plan.reads for part in cut(read)])
        self.loaded = sum(in_parallel(read_request, finish_request, self.requests))
        return {name: tensor() for name, tensor in finish.items()}
