"""What becomes of an attack: how each of its files ended, what that cost, and what ran."""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from agreement import answer
from checkpoint_files import PAYLOAD, small_zip
from checkpoint_reading import bytes_of, measured, read_everything

from attacks import OTHER_READERS, family
from npydata import CheckpointError, open_checkpoint
from npydata.reader.inspect import as_table, inspect_checkpoint

FORBIDDEN = {"os.system", "exec", "compile", "import", "subprocess.Popen", "os.exec", "os.fork",
             "os.posix_spawn", "os.putenv", "os.remove", "os.rename", "os.mkdir", "os.chmod",
             "pickle.find_class", "socket.connect", "socket.__new__", "code.__new__",
             "marshal.loads", "shutil.rmtree", "webbrowser.open", "urllib.Request"}  # fmt: skip
MANY = 50
"""Files, as one cut off at every byte: torch isn't asked of each."""
EVENTS = []


def watch(event, args):
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    if event in FORBIDDEN or writes:
        EVENTS.append(f"{event} {str(args)[:200]}")


def outcome(question):
    """How an attack's files ended, by ``"FAMILY NAME"``.

    Also what ran, the seconds, the MiB, and how torch and we see each file.
    """
    (attack,) = (one for one in family(question.split()[0]) if str(one) == question)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # where a program's file would be
        paths = list(attack.files(Path(folder)))
        (ends, events), seconds, mebibytes = measured(lambda: read_all(paths))
        events += map(str, Path().glob("ran"))
        for path in paths if attack.family in ("bombs", "recipes") else ():
            _, more, peak = measured(lambda path=path: use(path))
            seconds, mebibytes = seconds + more, max(mebibytes, peak)
        asks_torch = attack.family not in OTHER_READERS and len(paths) < MANY
        seen = [answer(path) for path in paths] if asks_torch else []
        os.chdir("/")
    return {
        "ends": ends,
        "events": events,
        "seconds": seconds,
        "mebibytes": mebibytes,
        "seen": seen,
    }


def read_all(paths):
    """How reading the files ended, and what ran in it."""
    EVENTS.clear()
    return sorted({end_of(path) for path in paths}), EVENTS.copy()


def use(path):
    """Inspect a file and convert it."""
    with suppress(CheckpointError):
        list(as_table(inspect_checkpoint(path)))
        with open_checkpoint(path) as checkpoint:
            checkpoint.to_safetensors(Path("out.safetensors"))


def end_of(path):
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
        if not named or len(message) > 1000 or not message.isprintable():
            return "unclear", message[:300]
    return reading.stage, str(reading.refused[0])[:300]


def foreign_bytes(reading):
    for name, tensor in reading.tensors.items():
        if strange := set(bytes_of(tensor)) - {PAYLOAD}:
            return f"{name} has bytes {sorted(strange)[:8]}"
    return ""


with tempfile.TemporaryDirectory() as warm:  # what is imported once is no attack's doing
    read_everything(small_zip(Path(warm) / "a.pt"))
    "".encode("cp437")
sys.addaudithook(watch)
