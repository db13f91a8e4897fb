"""What a dataset is, in a few plain values: for ``repr``, and for whoever meets another one."""

import os
from collections.abc import Mapping, Sequence
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
    old, new = flat(before), flat(now)
    texts = {
        name: f"{name} was {old.get(name)!r}, is {new.get(name)!r}"
        for name in [*new, *(one for one in old if one not in new)]
        if old.get(name) != new.get(name)
    }
    moved = [texts.pop(name) for name in list(texts) if name.split(".")[-1] == "path"]
    if not texts:
        moved = ["the tokens are others, in files that are alike in all else", *moved]
    return ", ".join([*texts.values(), *moved])


def flat(about: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested description with dotted names."""
    found = {}
    for name, value in about.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
