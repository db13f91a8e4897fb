"""What a dataset is, in a few plain values: for ``repr``, and for whoever meets another one."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from npydata.dataset.tokens import TokenFile


class Described:
    """A dataset that says what it is, from what it knows: no file is read for it."""

    files: Sequence[TokenFile]
    described_as = ""
    """The name of its kind; that of its class if there is none."""
    described_by: tuple[str, ...] = ("seq_len",)
    """Which of its attributes decide its samples."""

    def __len__(self) -> int:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return kind, files, dtype, settings and number of samples, as values that JSON holds."""
        return {
            "kind": self.described_as or type(self).__name__,
            **describe_files(self.files),
            **{name: getattr(self, name) for name in self.described_by},
            "samples": len(self),
        }

    def __repr__(self) -> str:
        about = self.describe()
        others = f" and {about['files'] - 1:,} more files" if about["files"] > 1 else ""
        settings = "".join(f", {name}={about[name]!r}" for name in self.described_by)
        return (
            f"{about['kind']}({about['path']!r}{others}, {about['tokens']:,} tokens of "
            f"{about['dtype']}{settings}, {about['samples']:,} samples)"
        )


def describe_files(files: Sequence[TokenFile]) -> dict[str, Any]:
    """Return the first file's path, how many there are, their tokens, and how these are stored."""
    dtypes = sorted({str(file.dtype) for file in files})
    return {
        "path": os.fsencode(files[0].path).decode(errors="replace"),
        "files": len(files),
        "tokens": sum(file.num_tokens for file in files),
        "dtype": " and ".join(dtypes),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say what differs between two descriptions; a moved file alone is no difference."""
    found = dict(compare(before, now))
    moved = [found.pop(name) for name in list(found) if name.split(".")[-1] == "path"]
    if not found:
        moved = ["the tokens are others, in files that are alike in all else", *moved]
    return ", ".join([*found.values(), *moved])


def compare(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the dotted names of what differs, each with a text; of two kinds, what both have."""
    names = list(dict.fromkeys([*now, *before]))
    if before.get("kind") != now.get("kind"):
        names = [name for name in names if name in before and name in now]
    for name in names:
        full, old, new = f"{prefix}{name}", before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from compare(old, new, f"{full}.")
        elif name not in now:
            yield full, f"{full} is gone"
        elif name not in before:
            yield full, f"{full} is new"
        elif old != new:
            yield full, f"{full} was {old!r}, is {new!r}"
