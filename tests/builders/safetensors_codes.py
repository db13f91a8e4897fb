"""Which dtypes the installed release of safetensors reads; npydata reads and writes them all."""

from importlib.metadata import version

from npydata.reader.formats.safetensors import CODES

SINCE = {"F8_E8M0": "0.6", "C64": "0.7", "F8_E4M3FNUZ": "0.8", "F8_E5M2FNUZ": "0.8"}
"""Codes that older releases refuse."""


def known(dtype):
    """Whether the installed release reads tensors of this dtype, which may be stored as pairs."""
    since = SINCE.get(CODES.get(dtype), "0.0")
    return _numbers(version("safetensors")) >= _numbers(since)


def _numbers(release):
    return [int(number) for number in release.split(".")[:2]]
