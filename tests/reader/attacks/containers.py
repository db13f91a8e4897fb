"""One hostile pickle in each of the three formats that hold one."""

from collections.abc import Callable
from functools import cache

from checkpoint_files import legacy_file, tar_file, tar_members, zip_file

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
