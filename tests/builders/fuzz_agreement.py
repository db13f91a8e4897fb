"""A differential fuzzer: mutated honest files, each shown as torch loads it, or refused.

A case is known by its seed and number, and can be looked at again::

    python tests/builders/fuzz_agreement.py --seed 7 --case 1234
    python tests/builders/fuzz_agreement.py --seed 7 --cases 100000
"""

import argparse
import io
import json
import mmap
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from agreement import answer, we_show
from checkpoint_files import checkpoint_records, payload, stored_zip
from fuzz_checkpoints import case_file, good_files, mutate, mutate_opcodes
from odd_calls import odd_call

ADDRESS_SPACE = 12 << 30
"""torch makes what a file asks for; more than this is an error in it."""
HANG_SECONDS = 60
"""After so long a fork is ended, as if it had crashed."""
PER_FORK = 2_000
"""Cases after which a fresh fork goes on, so that what torch keeps of some is let go."""
CALLED = 0.2
"""The share of cases that are a call with odd arguments."""
SAVED = 0.4
"""The share of cases that begin as a file of ``torch.save``."""
EXPLAINED = {
    "weights_only takes no tar file, and the plain loader was given harmless names": "not harmless",
    "a location that another machine may have says nothing of the bytes": "restore data location",
    "a device that is not here says nothing of the bytes": "device module is not registered",
    "torch saves untyped storages in legacy files and does not load them": "attribute 'dtype'",
    "text of Python 2 that is not UTF-8 comes as bytes": "'utf-8' codec",
    "torch can't load what it saves: a late dtype that requires a gradient": "a leaf Variable that",
    "how a zip file pads its storages is found here, not read": "invalid literal for int",
    "a compressed record that nothing refers to is not unpacked": "reading file .data/",
    "what is made and dropped again is not looked at": "is not callable",
    "a tensor that is made and dropped again need not fit": "size calculation overflowed",
    "a dtype that is not known hides its own tensor only": "unknown variant",
}
"""Why something is shown that torch does not load, by words of torch's error."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case: say what it does and keep its file")
    parser.add_argument("--child", action="store_true")
    chosen = parser.parse_args()
    cases = range(chosen.first, chosen.first + chosen.cases)
    if chosen.case is not None:
        folder = Path(tempfile.mkdtemp())
        path, content = agreement_case(good_files(folder), chosen.seed, chosen.case, folder)
        path.write_bytes(content)
        print(path, json.dumps(answer(path), indent=1))
    elif chosen.child:
        try_cases(chosen.seed, cases)
    else:
        print(json.dumps(fuzz(chosen.seed, cases)))


def fuzz(seed: int, cases: range) -> dict[str, object]:
    """Try the cases in a child, and count how they ended."""
    ends: Counter[str] = Counter()
    failures: list[dict[str, object]] = []
    child = subprocess.Popen(
        [sys.executable, __file__, "--child", "--seed", str(seed), "--first", str(cases.start),
         "--cases", str(len(cases))],
        stdout=subprocess.PIPE, text=True)  # fmt: skip
    for line in child.stdout:
        number, one = json.loads(line)
        ends[one["end"]] += 1
        if one["end"] not in ("agree", "refused", "torch crashed") and not explained(one):
            failures.append({"seed": seed, "case": number, **one})
    if status := child.wait():
        raise RuntimeError(f"seed {seed} ended after {ends.total():,} cases with status {status}")
    return {"seed": seed, "cases": ends.total(), "ends": ends, "failures": failures}


def explained(one: dict[str, str]) -> str | None:
    """The rule by which a difference is right: something is shown that torch does not load."""
    if one["end"] != "alone":
        return None
    if one["unsafe"]:
        return "what only code could make is listed"
    if one["in_part"]:
        return "what torch refuses is refused here in part, and what lies beside it is shown"
    return next((rule for rule, words in EXPLAINED.items() if words in one["why"]), None)


def try_cases(seed: int, cases: range) -> None:
    """Answer the cases in forks of this process, of which torch may take one with each case."""
    torch.set_num_threads(1)
    now = mmap.mmap(-1, 8)
    """The number of the case that a fork is at."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        tempfile.tempdir = name  # where torch looks whether a file is a tar file
        files = good_files(folder)
        saved_files()
        left = cases
        while left:
            status = forked(partial(answer_cases, files, seed, left[:PER_FORK], folder, now))
            at = struct.unpack("<q", now[:])[0]
            if status:  # torch may have broken its process, before it crashed or without that
                path = agreement_case(files, seed, at, folder)[0]
                alone = forked(partial(we_show, path))
                if alone > 0:
                    sys.exit(f"case {at} of seed {seed} raised what is no CheckpointError")
                end = "crashed" if alone else "torch crashed"
                print(json.dumps([at, {"end": end, "why": f"status {status}"}]), flush=True)
            left = range(at + 1, cases.stop)


def answer_cases(
    files: dict[str, bytes], seed: int, cases: range, folder: Path, now: mmap.mmap
) -> None:
    for number in cases:
        now[:] = struct.pack("<q", number)
        signal.alarm(HANG_SECONDS)
        path, content = agreement_case(files, seed, number, folder)
        path.write_bytes(content)
        print(json.dumps([number, answer(path)]), flush=True)


def forked(work: Callable[[], object]) -> int:
    """Do something in a fork of this process; return how that ended, a signal as its negative."""
    if not (child := os.fork()):
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def agreement_case(files: dict[str, bytes], seed: int, number: int, folder: Path):
    """The file of a case, which follows from its seed and number alone."""
    dice = random.Random(f"agreement/{seed}/{number}")
    kind = dice.random()
    if kind < CALLED:
        records = checkpoint_records(odd_call(dice), {"0": payload(16), "1": payload(16)})
        path = stored_zip(folder / "case.pt", records)
        return path, path.read_bytes()
    if kind >= CALLED + SAVED:
        return case_file(files, seed, number, folder)
    title = dice.choice(sorted(saved_files()))
    whole, pickle, storages = saved_files()[title]
    if pickle and dice.random() < 0.8:
        mutated = mutate_opcodes(dice, pickle)
        path = stored_zip(folder / "case.pt", checkpoint_records(mutated, storages))
        return path, path.read_bytes()
    return folder / "case.pt", bytes(mutate(dice, bytearray(whole), files))


@cache
def saved_files() -> dict[str, tuple[bytes, bytes, dict[str, bytes]]]:
    """Files of ``torch.save``: whole, and of zip files the pickle and the storages."""
    torch.manual_seed(0)
    made = {}
    for title, value in saved_values().items():
        for zipped in (True, False):
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                path = Path(folder) / "a.pt"
                torch.save(value, path, _use_new_zipfile_serialization=zipped)
                pickle, storages = taken_apart(path) if zipped else (b"", {})
                made[f"{title}.{'zip' if zipped else 'legacy'}"] = (
                    path.read_bytes(),
                    pickle,
                    storages,
                )
                if zipped:
                    made[f"{title}.again"] = (zipped_again(path), b"", {})
    return made


def zipped_again(path: Path) -> bytes:
    """A zip file with compressed records, as programs that zip a folder write it."""
    content = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as new:
        new.mkdir(old.namelist()[0].partition("/")[0])
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return content.getvalue()


def taken_apart(path: Path) -> tuple[bytes, dict[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    storages = {k.removeprefix("data/"): v for k, v in records.items() if k.startswith("data/")}
    return records["data.pkl"], storages


def saved_values() -> dict[str, object]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    base = torch.arange(12.0)
    marked = torch.ones(3)
    marked.note = "own"
    pairs = torch.ones(3, dtype=torch.complex64)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": [base, base[2:5], base.reshape(3, 4).t(), base[:0]],
        "flags": [pairs, pairs.conj(), torch.nn.Parameter(torch.ones(2), False)],
        "neg": torch.ones(3, dtype=torch.complex64).conj().imag,
        "attributes": {"marked": marked, "bf16": torch.ones(2, dtype=torch.bfloat16)},
        "numpy": {"a": np.arange(6.0).reshape(2, 3), "f": np.ones((2, 2), ">i2", order="F"),
                  "n": [np.float32(1.5), np.int64(7), np.bool_(True)], "s": np.array([b"ab"])},
        "late_dtypes": [torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3, dtype=torch.uint16)],
        "kinds": [torch.eye(2).to_sparse(), torch.empty(2, device="meta"), torch.float16],
        "values": {"a": [1, -1, 2**40, 2**70, 1.5, None, True], "b": ("x", b"y", {1, 2}, 1 + 2j),
                   "c": OrderedDict(a=1), "d": Counter("abca"), "e": torch.Size([1, 2]),
                   "f": bytearray(b"abc"), "g": torch.device("cpu")},
    }  # fmt: skip


if __name__ == "__main__":
    main()
