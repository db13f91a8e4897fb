"""Try attacks in this process, one after the other, and write down how each went.

``python -m attacks FAMILY FOLDER`` reads names from its input and answers each with a line of JSON.
A crash or a hang ends the process; the last name that was asked is then the one to blame.
"""

import faulthandler
import gc
import json
import re
import shutil
import sys
import time
from pathlib import Path

from checkpoint_files import PAYLOAD
from checkpoint_reading import Reading, bytes_of, read_everything

from attacks import Attack, family

HANG_SECONDS = 90
"""By the clock on the wall; what a reader takes is counted on its processor, as others may be busy
on the same machine."""


def main(family_name: str, folder: Path) -> None:
    attacks = {attack.name: attack for attack in family(family_name)}
    read_everything(folder.parent / "warm")  # what is imported once is no attack's doing
    gc.freeze()
    for line in sys.stdin:
        name = line.strip()
        where = folder / name
        where.mkdir()
        print(json.dumps(tried(attacks[name], where)), flush=True)
        shutil.rmtree(where)


def tried(attack: Attack, folder: Path) -> dict[str, object]:
    """The worst of an attack's files: how it ended, seconds, and MiB beyond what was in use."""
    written = attack.write(folder)
    seconds, ends = 0.0, set()
    gc.collect()
    before = reset_peak()
    for path in [written] if isinstance(written, Path) else written:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        begin = time.process_time()
        ends.add(end_of(path))
        seconds = max(seconds, time.process_time() - begin)
        faulthandler.cancel_dump_traceback_later()
    mebibytes = (kibibytes("VmHWM") - before) / 1024
    return {"seconds": seconds, "mebibytes": mebibytes, "ends": sorted(ends)}


def end_of(path: Path) -> tuple[str, str]:
    """How reading a file ended: ``opening`` or ``reading`` (refused there), ``read``, or wrong."""
    try:
        reading = read_everything(path)
    except OSError as error:
        return "OSError", f"{type(error).__name__}: {error}"[:300]
    except BaseException as error:
        return "raised", f"{type(error).__name__}: {error}"[:300]
    if leak := foreign_bytes(reading):
        return "leaked", leak
    if not reading.refused:
        return "read", ""
    for error in reading.refused:
        message = str(error)
        named = path.name[:50] in message or path.parent.name in message
        if not named or len(message) > 1000 or not re.fullmatch(r"[^\n\0\x1b]*", message):
            return "unclear", message[:300]
    return reading.stage, str(reading.refused[0])[:300]


def foreign_bytes(reading: Reading) -> str:
    for name, tensor in reading.tensors.items():
        if strange := set(bytes_of(tensor)) - {PAYLOAD}:
            return f"{name} has bytes {sorted(strange)[:8]}"
    return ""


def reset_peak() -> int:
    """KiB in use now, from which the next peak is counted."""
    Path("/proc/self/clear_refs").write_text("5")
    return kibibytes("VmRSS")


def kibibytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
