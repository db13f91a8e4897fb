"""What lessons 05 and 06 teach, piece by piece."""

import itertools
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch

from npydata.errors import CheckpointError
from npydata.reader.archive import Extent
from npydata.reader.files import OpenFile
from npydata.reader.torch_rebuild import STORAGES

SHAPES = [(), (1,), (5,), (0,), (3, 4), (2, 0, 3), (2, 3, 4), (1, 5, 1)]


def handlers(taught):
    """A small table of opcodes."""
    return {
        pickle.PROTO: taught.check_protocol,
        pickle.STOP: taught.stop,
        pickle.EMPTY_DICT: taught.push_empty(dict),
        pickle.EMPTY_TUPLE: taught.push_constant(()),
        pickle.NEWFALSE: taught.push_constant(False),
        pickle.BININT1: taught.push_number("<B"),
        pickle.BININT2: taught.push_number("<H"),
        pickle.BININT: taught.push_number("<i"),
        pickle.BINFLOAT: taught.push_number(">d"),
        pickle.BINUNICODE: taught.push_text("<I"),
        pickle.BINPUT: taught.memo_put(taught.packed("<B")),
        pickle.BINGET: taught.memo_get(taught.packed("<B")),
        pickle.MARK: taught.mark,
        pickle.TUPLE: taught.collect_tuple,
        pickle.TUPLE1: taught.collect_last(1),
        pickle.TUPLE2: taught.collect_last(2),
        pickle.TUPLE3: taught.collect_last(3),
        pickle.SETITEM: taught.store_one,
        pickle.SETITEMS: taught.store_many,
        pickle.GLOBAL: taught.name_global,
        pickle.REDUCE: taught.load_reduce,
        pickle.BUILD: taught.build,
        pickle.BINPERSID: taught.load_persistent_id,
    }


def machine_for(taught, data, table=None, **readers):
    refused = dict.fromkeys(("find_class", "persistent_load", "reduce"), _refuse)
    table = handlers(taught) if table is None else table
    return taught.PickleMachine(data, table, **(refused | readers))


def _refuse(*_):
    raise AssertionError("this pickle names nothing")


def load_storage(taught):
    def load(saved):
        _, kind, key, _, numel = saved
        return taught.Storage(key, STORAGES[str(kind)], taught.count(numel, "elements"))

    return load


def call_known(taught):
    def call(function, args):
        if str(function) == "torch._utils._rebuild_tensor_v2":
            return taught.tensor(None, *args)
        if str(function) == "collections.OrderedDict":
            return OrderedDict()
        return taught.Opaque(function, args)

    return call


class Caller:
    """Pickles as a call that would fail the test."""

    def __init__(self, function, *args):
        self.called = function, args

    def __reduce__(self):
        return self.called


@pytest.fixture
def saved(tmp_path):
    """Return a writer of torch files: the path, and the bytes of the pickle in it."""

    def save(content, name="file.pt"):
        path = tmp_path / name
        torch.save(content, path)
        with zipfile.ZipFile(path) as archive:
            return path, archive.read(f"{path.stem}/data.pkl")

    return save


@pytest.mark.promise
class TestPromises:
    def test_plain_values_are_read_as_pickle_reads_them(self, taught):
        deep = {"a": (1, 300, 70_000, 0.5), "b": {"c": ("x", "x"), 5: False}, "d": ()}
        assert machine_for(taught, pickle.dumps(deep, protocol=2)).run() == deep

    def test_the_machine_stands_behind_the_pickle_and_reads_the_next_one(self, taught):
        data = pickle.dumps(300, protocol=2) + pickle.dumps({"a": 1}, protocol=2)
        machine = machine_for(taught, data)
        assert machine.run() == 300
        following = taught.PickleMachine(
            data,
            handlers(taught),
            find_class=_refuse,
            persistent_load=_refuse,
            reduce=_refuse,
            at=machine.at,
        )
        assert following.run() == {"a": 1}
        assert following.at == len(data)

    def test_an_opcode_without_a_handler_is_named_with_its_place(self, taught):
        table = {pickle.PROTO: taught.check_protocol, pickle.STOP: taught.stop}
        with pytest.raises(CheckpointError, match="byte 2 of the pickle is b'M', expected an opc"):
            machine_for(taught, pickle.dumps(300, protocol=2), table).run()

    def test_a_pickle_that_is_cut_off_anywhere_is_refused(self, taught):
        data = pickle.dumps({"a": (1, "text"), "b": 300}, protocol=2)
        for length in range(len(data)):
            with pytest.raises(CheckpointError):
                machine_for(taught, data[:length]).run()

    def test_whatever_a_handler_trips_over_is_a_checkpoint_error(self, taught):
        for wrong in (b"s.", b"K\x01s.", b"h\x07.", b"t.", b"\x86.", b"R.", b"(.", b"K\x01K\x02.",
                      b"\x80\x7f.", b"X\xff\xff\xff\xffab.", b"}K\x01u.", b"b."):  # fmt: skip
            with pytest.raises(CheckpointError):
                machine_for(taught, wrong).run()

    def test_a_memo_place_beyond_the_file_is_refused(self, taught):
        with pytest.raises(CheckpointError, match="index 200 of the memo"):
            machine_for(taught, b"K\x01q\xc8.").run()

    def test_keys_whose_hash_could_take_for_ever_are_refused(self, taught):
        nested = b"K\x01" + b"\x85" * 40
        with pytest.raises(CheckpointError, match="a key of more than 32 parts"):
            machine_for(taught, b"}" + nested + b"K\x01s.").run()

    def test_names_are_read_and_calls_noted_but_nothing_is_imported_or_called(
        self, taught, tmp_path
    ):
        import os

        touched = tmp_path / "made"
        data = pickle.dumps({"note": Caller(os.makedirs, str(touched)), "step": 3}, protocol=2)
        read = machine_for(taught, data, find_class=taught.Global, reduce=taught.Opaque).run()
        assert read["step"] == 3
        assert read["note"].cause == "os.makedirs"
        assert read["note"].args == (str(touched),)
        assert not touched.exists()

    def test_what_would_be_done_to_an_object_is_noted_on_it(self, taught):
        data = b"cmodule\nClass\n)RK\x05K\x06s}K\x01K\x02sb."
        read = machine_for(taught, data, find_class=taught.Global, reduce=taught.Opaque).run()
        assert (read.pairs, read.state) == ([(5, 6)], {1: 2})

    def test_a_state_dict_becomes_descriptions_of_its_tensors(self, taught, saved):
        state = torch.nn.Linear(3, 2).state_dict()
        state["turned"] = torch.arange(12).reshape(3, 4).t()[1:]
        _, data = saved({"model": state, "step": 300})
        readers = {"persistent_load": load_storage(taught), "reduce": call_known(taught)}
        read = machine_for(taught, data, find_class=taught.Global, **readers).run()
        assert read["step"] == 300
        for name, tensor in state.items():
            kept = read["model"][name]
            seen = (kept.dtype, kept.shape, kept.stride, kept.offset)
            saved_as = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
            assert seen == saved_as, name

    def test_a_count_is_an_integer_from_0_to_the_largest_of_64_bits(self, taught):
        assert [taught.count(n, "n") for n in (0, 7, 2**63 - 1)] == [0, 7, 2**63 - 1]
        for wrong in (-1, -(2**70), 2**63, 1.0, True, "1", None, (1,)):
            with pytest.raises(CheckpointError, match=r"n is .*, expected an integer from 0"):
                taught.count(wrong, "n")

    def test_counts_are_one_for_each_dimension(self, taught):
        assert taught.counts((2, 3), "size") == taught.counts([2, 3], "size") == (2, 3)
        for wrong in (5, "23", {2: 3}, (2, -3), (2, 3.0), (1,) * 65):
            with pytest.raises(CheckpointError, match="size is"):
                taught.counts(wrong, "size")

    def test_a_tensor_is_made_of_a_storage_and_of_nothing_else(self, taught):
        storage = taught.Storage("0", torch.float32, 6)
        assert taught.tensor(None, storage, 0, (2, 3), (3, 1), False, None).dtype is torch.float32
        with pytest.raises(CheckpointError, match=r"storage .* of a tensor"):
            taught.tensor(None, "0", 0, (2, 3), (3, 1), False, None)

    # Where the bytes lie

    def located(self, taught, path):
        with zipfile.ZipFile(path) as archive:
            found = [
                taught.Record(
                    one.filename,
                    one.file_size,
                    one.header_offset,
                    one.compress_size,
                    one.compress_type,
                    one.CRC,
                )
                for one in archive.infolist()
            ]
            found.sort(key=lambda one: one.header)
            return taught.locate(OpenFile(path), found, archive.start_dir)

    def test_a_record_begins_behind_its_own_header_and_padding(self, taught, saved):
        path, _ = saved({f"t{k}": torch.full((k + 1,), k) for k in range(5)})
        data = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            for one, extent in self.located(taught, path):
                here = data[extent.offset : extent.offset + extent.nbytes]
                assert here == archive.read(one.name), one.name
                if "/data/" in one.name:
                    assert extent.offset % 64 == 0

    def test_a_record_that_reaches_into_the_next_one_is_refused(self, taught, saved):
        path, _ = saved(torch.arange(6))
        found = [one for one, _ in self.located(taught, path)]
        longer = replace(found[0], nbytes=10_000, packed=10_000)
        with pytest.raises(CheckpointError, match=r"'file/data\.pkl'"):
            taught.payload_offset(OpenFile(path), longer, found[1].header)
        with pytest.raises(CheckpointError, match="the next is at"):
            taught.payload_offset(OpenFile(path), found[0], found[0].header + 100)

    def test_headers_that_do_not_agree_are_refused(self, taught, saved):
        path, _ = saved(torch.arange(6))
        whole = path.read_bytes()
        one = self.located(taught, path)[0][0]
        for place, value in ((0, b"XX"), (6, b"\x01"), (8, b"\x08"), (26, b"\x01"), (31, b"x")):
            begin = one.header + place
            path.write_bytes(whole[:begin] + value + whole[begin + len(value) :])
            with pytest.raises(CheckpointError, match=r"its two headers|its own header"):
                taught.payload_offset(OpenFile(path), one, len(whole))

    def legacy_tail(self, path, sizes, at=24):
        content = bytes(at)
        for numel in sizes:
            content += struct.pack("<q", numel) + bytes([7]) * 4 * numel
        path.write_bytes(content)
        return OpenFile(path)

    def test_each_count_leads_to_the_next_storage(self, taught, tmp_path):
        sizes = (3, 0, 5, 1)
        file = self.legacy_tail(tmp_path / "tail", sizes)
        storages = [taught.Storage(f"{k}", torch.float32, n) for k, n in enumerate(sizes)]
        places = taught.scan_storages(file, 24, storages)
        begins = [32, 52, 60, 88]
        assert [(one.offset, one.nbytes) for one in places.values()] == [
            (begin, 4 * n) for begin, n in zip(begins, sizes, strict=True)
        ]

    def test_a_count_that_differs_from_the_pickles_is_refused(self, taught, tmp_path):
        file = self.legacy_tail(tmp_path / "tail", (3, 2))
        for numels in ((3, 3), (2, 2), (4, 1)):
            storages = [taught.Storage(f"{k}", torch.int32, n) for k, n in enumerate(numels)]
            with pytest.raises(CheckpointError, match=r"storage '\d' has \d elements"):
                taught.scan_storages(file, 24, storages)

    def test_bytes_behind_the_last_storage_are_refused(self, taught, tmp_path):
        file = self.legacy_tail(tmp_path / "tail", (3, 2))
        storages = [taught.Storage("0", torch.int32, 3)]
        with pytest.raises(CheckpointError, match="its storages end at byte"):
            taught.scan_storages(file, 24, storages)

    # Slices

    def test_the_byte_span_is_from_the_first_to_the_last_byte_of_a_view(self, taught):
        for shape, seed in itertools.product(SHAPES, range(20)):
            rng = np.random.default_rng(seed)
            stride = tuple(rng.integers(0, 9, len(shape)).tolist())
            offset = int(rng.integers(0, 9))
            first, end = taught.byte_span(shape, stride, offset, 4)
            numbers = torch.arange(400).as_strided(shape, stride, offset)
            assert first == 4 * offset
            assert end == (4 * (int(numbers.max()) + 1) if numbers.numel() else first)

    def indices(self, shape, seed):
        rng = np.random.default_rng(seed)
        chosen = []
        for size in shape:
            begin, end = sorted(rng.integers(-size - 1, size + 2, 2).tolist())
            step = int(rng.integers(1, 4))
            whole = bool(rng.integers(0, 3)) or not size
            chosen.append(slice(begin, end, step) if whole else int(rng.integers(-size, size)))
        return tuple(chosen[: int(rng.integers(0, len(shape) + 1))])

    def test_any_slice_is_an_offset_sizes_and_strides(self, taught):
        for shape, seed in itertools.product(SHAPES, range(30)):
            tensor = torch.arange(400)[: int(np.prod(shape))].reshape(shape)
            index = self.indices(shape, seed)
            found = taught.slice_view((shape, taught.contiguous_stride(shape), 0), index)
            assert torch.equal(torch.arange(400).as_strided(*found), tensor[index]), (shape, index)

    def test_an_index_out_of_range_or_a_step_backwards_is_refused(self, taught):
        view = ((3, 4), (4, 1), 0)
        for wrong, error in (
            (3, IndexError),
            (-4, IndexError),
            (slice(None, None, -1), ValueError),
        ):
            with pytest.raises(error):
                taught.slice_view(view, wrong)

    def test_the_elements_of_a_view_are_gathered_in_order(self, taught):
        storage = torch.arange(400)
        content = storage.numpy().view(np.uint8)
        for shape, seed in itertools.product(SHAPES, range(10)):
            rng = np.random.default_rng(seed)
            stride = tuple(rng.integers(0, 9, len(shape)).tolist())
            picked = taught.gather(content, (shape, stride, 5), 8)
            seen = (shape, taught.contiguous_stride(shape), 0)
            expected = storage.as_strided(shape, stride, 5)
            assert torch.equal(taught.view(picked, torch.int64, seen), expected)

    # safetensors

    def test_an_entry_has_as_many_bytes_as_elements_need(self, taught):
        entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]}
        kept, place = taught.read_entry("w", entry)
        assert (kept.dtype, kept.shape, kept.stride) == (torch.float32, (2, 3), (3, 1))
        assert place == (8, 32)
        for change in ({"data_offsets": [8, 31]}, {"shape": [2, 4]}, {"dtype": "F64"},
                       {"dtype": "X"}, {"shape": [-2, -3]}, {"data_offsets": [32, 8]}):  # fmt: skip
            with pytest.raises(CheckpointError, match="tensor 'w'"):
                taught.read_entry("w", entry | change)

    def test_a_header_is_json_without_tricks(self, taught, tmp_path):
        path = tmp_path / "x.safetensors"
        for wrong in (b"[]", b"{", b'{"a":1,"a":2}', b'{"a":NaN}', b"\xff{}"):
            path.write_bytes(struct.pack("<Q", len(wrong)) + wrong)
            with pytest.raises(CheckpointError, match="header"):
                taught.read_header(OpenFile(path))
        path.write_bytes(struct.pack("<Q", 10) + b'{"a": 1}  ' + bytes(4))
        assert taught.read_header(OpenFile(path)) == ({"a": 1}, 18)

    def test_bytes_that_belong_to_no_tensor_are_refused(self, taught):
        def extents(*places):
            return [Extent(None, begin, end - begin) for begin, end in places]

        taught.check_no_gaps(extents((30, 50), (10, 30), (50, 50)), 10, 50)
        for wrong in ([(10, 30), (31, 50)], [(10, 31), (30, 50)], [(10, 30)], [(11, 50)], []):
            with pytest.raises(CheckpointError, match="byte"):
                taught.check_no_gaps(extents(*wrong), 10, 50)
        with pytest.raises(CheckpointError, match="begins at byte 31, the one before ends at 30"):
            taught.check_no_gaps(extents((10, 30), (31, 50)), 10, 49)  # whose sizes add up
