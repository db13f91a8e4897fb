"""Legacy files: five pickles and, per storage, a count and the data."""

from checkpoint_files import MAGIC, SYS_INFO, legacy_file, payload, small_legacy
from pickle_code import (
    EMPTY_LIST,
    call,
    name,
    persistent,
    program,
    storage,
    string_line,
    tensor,
    value,
)

from attacks import attack, damaged_everywhere, register
from attacks.zip import SECRET

GOOD = [("0", 4, payload(16))]


def one_tensor(*view, key="0", numel=4, kind="FloatStorage") -> bytes:
    view = view or (None,)
    return program(tensor(storage(key, numel, kind, "cpu", *view)))


def legacy(title: str, tries: str, caught: str = "opening", storages=GOOD, **changes) -> None:
    """Register a file of one tensor with these parts replaced."""
    pickle = changes.pop("pickle", one_tensor())

    def write(folder):
        return legacy_file(folder / "a.pt", pickle, storages, **changes)

    register(write, title, tries, caught)


legacy("a_good_legacy_file", "control: nothing, this file is good", "harmless")
legacy("magic_off_by_one", "be another format", magic=MAGIC + 1)
legacy("magic_of_text", "be another format", magic="magic")
legacy("magic_of_a_call", "run before the format is known", magic=call(name("os", "system"), "x"))
legacy("version_1002", "be of a future version", version=1002)
legacy("version_of_text", "have text for a version", version="1001")
legacy("version_of_a_call", "run in the version", version=call(name("os", "system"), "x"))
legacy("sys_info_of_a_call", "run in the system's sizes", "harmless",
       sys_info=call(name("os", "system"), "x"))  # fmt: skip
legacy("sys_info_is_a_number", "have no sizes", "harmless", sys_info=7)
legacy(
    "sys_info_is_big_endian",
    "have counts swapped",
    "harmless",
    sys_info={**SYS_INFO, "little_endian": False},
)
legacy("sys_info_endian_of_text", "be of no byte order", "harmless",
       sys_info={**SYS_INFO, "little_endian": "x"})  # fmt: skip
legacy("sys_info_of_tensors", "name storages too early", "harmless",
       sys_info=tensor(storage("0", 4, "FloatStorage", "cpu", None)))  # fmt: skip

COUNTS = {
    "0": 0, "3": 3, "5": 5, "minus_1": -1, "minus_4": -4, "2_to_31": 2**31, "2_to_61": 2**61,
    "2_to_62": 2**62, "2_to_63_minus_1": 2**63 - 1, "minus_2_to_63": -(2**63),
}  # fmt: skip
for title, count in COUNTS.items():
    legacy(f"count_of_{title}", "have another length read", storages=[("0", count, payload(16))])
    legacy(
        f"count_of_{title}_in_the_pickle_too",
        "have another length read",
        storages=[("0", count, payload(16))],
        pickle=one_tensor(numel=count),
    )

legacy("data_one_byte_short", "read beyond the end", storages=[("0", 4, payload(15))])
legacy("data_missing", "read beyond the end", storages=[("0", 4, b"")])
legacy("bytes_after_the_data", "hide bytes after the end", after=SECRET)
legacy("one_byte_after_the_data", "hide a byte after the end", after=b"\0")
legacy("zip_after_the_data", "be a zip to who reads from the end", after=b"PK\5\6" + bytes(18))
legacy("storage_of_another_key", "lack the storage", storages=[("7", 4, payload(16))])
legacy("more_keys_than_storages", "read a count beyond the end", keys=["0", "1"])
legacy("fewer_keys_than_storages", "leave a storage out", keys=[])
legacy("one_key_twice", "fill one storage twice", storages=[*GOOD, ("0", 4, SECRET[:16])])
legacy("key_that_no_tensor_has", "have a storage of no type",
       storages=[*GOOD, ("1", 16, SECRET)])  # fmt: skip
legacy("keys_are_text", "have letters for keys", keys="0")
legacy("keys_are_a_dict", "have a dict for keys", "harmless", keys={"0": "0"})
legacy("keys_are_a_number", "have a number for keys", keys=1)
legacy("keys_are_a_call", "run in the keys", keys=call(name("os", "system"), "x"))
legacy("keys_are_a_storage", "have a storage for keys",
       keys=[storage("0", 4, "FloatStorage", "cpu", None)])  # fmt: skip
legacy("keys_hold_a_list", "have an unhashable key", keys=[[]])
legacy("keys_are_numbers", "have numbers for keys", keys=[0])
legacy(
    "a_million_keys", "pass over a million storages", keys=call(name("builtins", "list"), "0" * 10)
)
legacy("keys_hold_themselves", "have endless keys",
       keys=value([])[:0] + EMPTY_LIST + b"q\0h\0a")  # fmt: skip

VIEWS = {
    "beyond_the_end": ("v", 2, 4), "before_the_start": ("v", -1, 4),
    "of_negative_size": ("v", 2, -2),
    "at_2_to_63": ("v", 2**63, 4), "at_2_to_64": ("v", 2**64, 4), "of_2_to_64": ("v", 0, 2**64 + 4),
    "by_two_halves": ("v", 2**62, 2**62), "at_a_float": ("v", value(0.0), 4), "of_text": ("v", 0,
    "4"),
    "of_none": ("v", None, None), "of_two_fields": ("v", 0), "of_four_fields": ("v", 0, 4, 1),
    "as_a_list": ["v", 0, 4], "as_a_number": 7, "as_text": "v04", "keyed_by_a_list": ([], 0, 4),
    "shorter_than_the_tensor": ("v", 0, 3),
}  # fmt: skip
for title, triple in VIEWS.items():
    caught = "harmless" if title in ("as_a_list", "keyed_by_a_list") else "reading"
    legacy(f"view_{title}", "look beyond the storage", caught, pickle=one_tensor(triple))

legacy("view_with_its_root_key", "be a view of itself", "harmless", pickle=one_tensor(("0", 0, 4)))
legacy("five_fields_in_the_id", "be an id of the zip format", "harmless",
       pickle=program(tensor(storage())))  # fmt: skip
legacy("seven_fields_in_the_id", "have a field too many", pickle=one_tensor(None, 7))
legacy("module_of_nothing", "be a module", pickle=program(persistent(("module",))))
legacy("module_of_a_number", "be a module", "harmless",
       pickle=program(persistent(("module", 7, None, None))))  # fmt: skip
legacy(
    "module_of_a_path",
    "have a source file opened",
    "harmless",
    pickle=program(persistent(("module", name("os", "system"), "/etc/passwd", "source"))),
)
legacy("same_key_two_types", "have one storage counted in two sizes", "reading",
       pickle=program(value([
           tensor(storage("0", 4, "FloatStorage", "cpu", None)),
           tensor(storage("0", 4, "DoubleStorage", "cpu", None)),
       ])))  # fmt: skip
legacy("same_view_key_two_places", "be one view at two places", "harmless",
       pickle=program(value([
           tensor(storage("0", 4, "FloatStorage", "cpu", ("v", 0, 2)), 0, (2,)),
           tensor(storage("0", 4, "FloatStorage", "cpu", ("v", 2, 2)), 0, (2,)),
       ])))  # fmt: skip
legacy("untyped_storage", "count bytes as floats", pickle=one_tensor(kind="UntypedStorage"))


damaged_everywhere("legacy", small_legacy, needed=3)  # a pickle may do without its first two bytes


@attack("have 10,000 pickles before the object")
def many_pickles(folder):
    path = folder / "a.pt"
    path.write_bytes(program(value(MAGIC)) * 10_000)
    return path


@attack("begin with an opcode line a megabyte long")
def magic_of_a_long_line(folder):
    path = folder / "a.pt"
    path.write_bytes(b"\x80\x02" + string_line("a" * 10**6))
    return path
