"""One hostile pickle in each of the three formats that hold one."""

from collections.abc import Callable
from functools import cache, partial

from checkpoint_files import legacy_file, tar_file, tar_members, zip_file
from pickle_code import program

Pickle = bytes | Callable[[], bytes]


def in_zip(folder, pickle):
    return zip_file(folder / "a.pt", pickle)


def in_legacy(folder, pickle):
    return legacy_file(folder / "a.pt", pickle, [])


def in_tar(folder, pickle):
    return tar_file(folder / "a.tar", tar_members(pickle, [], []))


FORMS = {"zip": in_zip, "legacy": in_legacy, "tar": in_tar}


def pickles(register, cases, forms=FORMS):
    """Register each pickle, or function that makes one, once for each format."""
    makers = {
        title: cache(one) if callable(one) else lambda one=one: one for title, one in cases.items()
    }
    for form in forms:
        write = FORMS[form]
        register(lambda folder, make, write=write: write(folder, make()), makers, f"{{}}_in_{form}")


def programs(register, cases, forms=FORMS, protocol=2):
    """Register opcodes, or functions that give some, each as a whole program of a protocol."""
    pickles(register, {t: partial(whole, code, protocol) for t, code in cases.items()}, forms)


def whole(code, protocol):
    return program(code() if callable(code) else code, protocol=protocol)
