"""A pickle is a program: every way in which one can call something, and nothing is called here.

Each file holds two good tensors around a value that a program has to make. The standard unpickler
runs the program (one test shows it). Here the file opens, the name is listed, the tensors are
right, and reading the value says which name it needs. An audit hook watches in a child process.
"""

import json
from functools import cache

import pytest
from checkpoint_files import (
    TarTensor,
    checkpoint_records,
    legacy_file,
    payload,
    stored_zip,
    tar_file,
    tar_members,
)
from children import run_child
from pickle_code import (
    ADDITEMS,
    APPEND,
    APPENDS,
    BUILD,
    EMPTY_TUPLE,
    MARK,
    NEWOBJ,
    NEWOBJ_EX,
    NONE,
    REDUCE,
    SETITEM,
    SETITEMS,
    Code,
    build,
    call,
    name,
    ordered_dict,
    persistent,
    program,
    stack_name,
    storage,
    tensor,
    unicode,
    value,
)

from npydata import CheckpointError, open_checkpoint

FORMS = ("zip", "legacy", "tar")
SYSTEM = name("os", "system")
TOUCH = "touch ran"
"""Run in the child's folder; that the file is there is the proof that something ran."""
IMPORT = name("builtins", "__import__")
BLANK = call(name("types", "SimpleNamespace"))
OPEN = "open('ran', 'w')"


def with_method(method: str) -> Code:
    """An object whose method of this name is ``os.system``."""
    return build(BLANK, {method: SYSTEM})


def made(kind: Code, *arguments: object) -> Code:
    """What NEWOBJ makes."""
    return Code(kind + value(arguments) + NEWOBJ)


def later() -> Code:
    """``functools.partial``, made by NEWOBJ_EX: called when it is given to REDUCE."""
    partial = name("functools", "partial")
    return Code(partial + value((SYSTEM, TOUCH)) + value({}) + NEWOBJ_EX)


WAYS: dict[str, tuple[Code, str]] = {
    "reduce": (call(SYSTEM, TOUCH), "os.system"),
    "stack_global": (call(stack_name("os", "system"), TOUCH), "os.system"),
    "dotted_stack_global": (call(stack_name("shutil", "os.system"), TOUCH), "shutil.os.system"),
    "inst": (Code(MARK + unicode(TOUCH) + b"ios\nsystem\n"), "os.system"),
    "obj": (Code(MARK + SYSTEM + unicode(TOUCH) + b"o"), "os.system"),
    "newobj": (call(name("builtins", "list"), made(name("builtins", "map"), SYSTEM, [TOUCH])), ""),
    "newobj_ex": (Code(later() + EMPTY_TUPLE + REDUCE), "functools.partial"),
    "build": (Code(with_method("__setstate__") + unicode(TOUCH) + BUILD), "types.SimpleNamespace"),
    "append": (Code(with_method("append") + unicode(TOUCH) + APPEND), "types.SimpleNamespace"),
    "appends": (
        Code(with_method("append") + MARK + unicode(TOUCH) + APPENDS),
        "types.SimpleNamespace",
    ),
    "additems": (
        Code(with_method("add") + MARK + unicode(TOUCH) + ADDITEMS),
        "types.SimpleNamespace",
    ),
    "setitem": (
        Code(call(name("shelve", "open"), "ran") + unicode("a") + b"K\1" + SETITEM),
        "shelve.open",
    ),
    "setitems": (
        Code(call(name("shelve", "open"), "ran") + MARK + unicode("a") + b"K\1" + SETITEMS),
        "shelve.open",
    ),
    "ext1": (Code(b"\x82\xf0" + value((TOUCH,)) + REDUCE), "extension"),
    "ext2": (Code(b"\x83\xf0\x00" + value((TOUCH,)) + REDUCE), "extension"),
    "ext4": (Code(b"\x84\xf0\x00\x00\x00" + value((TOUCH,)) + REDUCE), "extension"),
    "reconstructor": (
        call(
            name("copyreg", "_reconstructor"),
            name("logging", "FileHandler"),
            name("logging", "FileHandler"),
            "ran",
        ),
        "copyreg._reconstructor",
    ),
    "python_2_reconstructor": (
        call(
            name("copy_reg", "_reconstructor"),
            name("logging", "FileHandler"),
            name("logging", "FileHandler"),
            "ran",
        ),
        "_reconstructor",
    ),
    "getattr_chain": (
        call(
            call(
                name("builtins", "getattr"),
                call(name("importlib", "import_module"), "os"),
                "system",
            ),
            TOUCH,
        ),
        "importlib.import_module",
    ),
    "attrgetter_chain": (
        call(
            call(call(name("operator", "attrgetter"), "system"), call(IMPORT, "os")),
            TOUCH,
        ),
        "builtins.__import__",
    ),
    "eval": (call(name("builtins", "eval"), OPEN), "builtins.eval"),
    "python_2_eval": (call(name("__builtin__", "eval"), OPEN), "eval"),
    "exec": (call(name("builtins", "exec"), OPEN), "builtins.exec"),
    "open": (call(name("builtins", "open"), "ran", "w"), "builtins.open"),
    "posix": (call(name("posix", "system"), TOUCH), "posix.system"),
    "subprocess": (call(name("subprocess", "check_output"), ["touch", "ran"]), "subprocess.check"),
    "timeit": (
        call(name("timeit", "timeit"), OPEN, "pass", name("time", "perf_counter"), 1),
        "timeit.timeit",
    ),
    "runpy": (call(name("runpy", "_run_code"), OPEN, {}), "runpy._run_code"),
    "pickle_in_a_pickle": (
        call(name("_pickle", "loads"), program(call(SYSTEM, TOUCH))),
        "_pickle.loads",
    ),
    "in_a_set": (call(name("builtins", "frozenset"), [call(SYSTEM, TOUCH)]), "os.system"),
    "as_a_key": (value({call(SYSTEM, TOUCH): 1}), "os.system"),
    "in_a_list": (value([1, [2, call(SYSTEM, TOUCH)]]), "os.system"),
    "in_an_ordered_dict": (ordered_dict({"a": call(SYSTEM, TOUCH)}), "os.system"),
}  # fmt: skip

TORCH_WAYS: dict[str, tuple[Code, str]] = {
    "rebuild_from_type": (
        call(name("torch._tensor", "_rebuild_from_type_v2"), SYSTEM, SYSTEM, (TOUCH,), NONE),
        "os.system",
    ),
    "hooks": (tensor(None, 0, (4,), (1,), False, call(SYSTEM, TOUCH)), "os.system"),
    "shape": (tensor(None, 0, (call(SYSTEM, TOUCH),), (1,)), "os.system"),
    "storage": (tensor(call(SYSTEM, TOUCH)), "os.system"),
    "storage_type": (tensor(storage("0", 4, call(SYSTEM, TOUCH))), "os.system"),
    "storage_key": (tensor(storage(call(SYSTEM, TOUCH), 4)), "os.system"),
    "persistent_id": (persistent(call(SYSTEM, TOUCH)), "os.system"),
    "persistent_id_of_another_kind": (persistent((call(SYSTEM, TOUCH), 1)), "os.system"),
    "parameter": (
        call(name("torch._utils", "_rebuild_parameter"), call(SYSTEM, TOUCH), True, NONE),
        "os.system",
    ),
    "tensor_subclass": (
        call(
            name("torch._tensor", "_rebuild_from_type_v2"),
            name("torch._utils", "_rebuild_tensor_v2"),
            name("evil", "Tensor"),
            (storage(), 0, (4,), (1,), False, NONE),
            {"a": 1},
        ),
        "evil.Tensor",
    ),
    "torch_load": (call(name("torch", "load"), "ran.pt"), "torch.load"),
    "torch_hub": (call(name("torch.hub", "load"), "evil/repo", "model"), "torch.hub.load"),
    "typed_storage_from_bytes": (
        call(name("torch.storage", "_load_from_bytes"), program(call(SYSTEM, TOUCH))),
        "torch.storage._load_from_bytes",
    ),
}
MAY_BE_REFUSED = {"storage_key", "persistent_id", "persistent_id_of_another_kind", "inst", "ext1",
                  "ext2", "ext4"}  # fmt: skip
"""A persistent id that is none of torch's, and opcodes that no checkpoint has, are malformed."""

CASES = [(form, way) for form in FORMS for way in WAYS]
CASES += [(form, way) for form in ("zip", "legacy") for way in TORCH_WAYS]

READS = """
import json, os, sys
from pathlib import Path
import torch
from checkpoint_files import PAYLOAD
from checkpoint_reading import bytes_of, read_everything
from npydata import CheckpointError, UnsafeCheckpointError, open_checkpoint

paths = sys.argv[1:]
read_everything(Path(paths[0]))  # what is imported once is no file's doing
loaded, events, watching = set(sys.modules), [], [False]
FORBIDDEN = ("os.system", "exec", "compile", "import", "subprocess.Popen", "os.exec", "os.fork",
             "os.posix_spawn", "os.putenv", "os.remove", "os.rename", "os.mkdir", "os.chmod",
             "pickle.find_class", "socket.connect", "socket.__new__", "code.__new__",
             "marshal.loads", "shutil.rmtree", "webbrowser.open", "urllib.Request")

def watch(event, args):
    if not watching[0]:
        return
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    if event in FORBIDDEN or writes:
        events.append(f"{event} {str(args)[:200]}")

sys.addaudithook(watch)
for path in paths:
    events.clear()
    watching[0] = True
    answer = {"errors": [], "good": {}}
    try:
        with open_checkpoint(path) as checkpoint:
            answer["unsafe"] = checkpoint.unsafe_globals
            for name in ("first", "last"):
                answer["good"][name] = sorted(set(bytes_of(checkpoint[name])))
            for name in [*checkpoint, *checkpoint.metadata]:
                try:
                    checkpoint[name] if name in checkpoint else checkpoint.metadata[name]
                except UnsafeCheckpointError as error:
                    answer["errors"].append(str(error))
            repr(checkpoint.tree())
    except CheckpointError as error:
        answer["refused"] = str(error)
    watching[0] = False
    answer["events"] = list(events)
    answer["imported"] = sorted(set(sys.modules) - loaded)
    answer["ran"] = os.listdir()
    print(json.dumps(answer))
"""

OBEYS = """
import copyreg, io, os, pickle, sys
copyreg.add_extension("os", "system", 0xf0)

class Unpickler(pickle._Unpickler):
    def persistent_load(self, saved):
        return None

for line in open(sys.argv[1], "rb").read().split(b"--next--"):
    try:
        Unpickler(io.BytesIO(line), encoding="latin1").load()
    except Exception as error:
        print(type(error).__name__, error, file=sys.stderr)
    ran = [name for name in os.listdir() if name.startswith("ran")]
    print(bool(ran))
    for name in ran:
        os.remove(name)
"""


def whole(form: str, way: str) -> bytes:
    """The pickle of a checkpoint with ``bad`` between two good tensors."""
    bad, _ = (WAYS | TORCH_WAYS)[way]
    protocol = 2 if "python_2" in way else 4  # where the standard unpickler knows old names
    if form == "tar":
        good = persistent("30", python=2)
        return program(value({"first": good, "bad": bad, "last": good}), protocol=protocol)
    view = (None,) if form == "legacy" else ()
    good = tensor(storage("0", 4, "FloatStorage", "cpu", *view))
    if form == "legacy":
        bad = Code(bad.replace(storage()[:-2], storage("0", 4, "FloatStorage", "cpu", None)[:-2]))
    return program(value({"first": good, "bad": bad, "last": good}), protocol=protocol)


def written(form: str, way: str, folder):
    raw = whole(form, way)
    if form == "zip":
        return stored_zip(folder / f"{way}.pt", checkpoint_records(raw, {"0": payload(16)}))
    if form == "legacy":
        return legacy_file(folder / f"{way}.pt", raw, [("0", 4, payload(16))])
    tensors = [TarTensor(key=30, storage=10, size=(4,), stride=(1,))]
    members = tar_members(raw, [(10, "FloatStorage", 4, payload(16))], tensors)
    return tar_file(folder / f"{way}.tar", members)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the child says of every file of a format."""

    @cache
    def of(form: str) -> dict[str, dict[str, object]]:
        folder, empty = tmp_path_factory.mktemp(form), tmp_path_factory.mktemp("empty")
        ways = [way for one, way in CASES if one == form]
        paths = [written(form, way, folder) for way in ways]
        child = run_child(f"import os; os.chdir({str(empty)!r})\n" + READS, *paths)
        lines = child.stdout.splitlines()
        assert len(lines) == len(ways), child.stderr
        return dict(zip(ways, map(json.loads, lines), strict=True))

    return of


@pytest.mark.parametrize("form, way", CASES)
def test_nothing_runs(answers, form, way):
    answer = answers(form)[way]
    assert answer["events"] == []
    assert answer["imported"] == []
    assert answer["ran"] == []


@pytest.mark.parametrize("form, way", [case for case in CASES if case[1] not in MAY_BE_REFUSED])
def test_the_file_opens_and_lists_what_it_would_run(answers, form, way):
    answer, (_, cause) = answers(form)[way], (WAYS | TORCH_WAYS)[way]
    assert "refused" not in answer, answer["refused"]
    assert any(cause in one for one in answer["unsafe"]), answer["unsafe"]


@pytest.mark.parametrize("form, way", [case for case in CASES if case[1] not in MAY_BE_REFUSED])
def test_the_tensors_beside_it_are_read(answers, form, way):
    assert answers(form)[way]["good"] == {"first": [0x11], "last": [0x11]}


@pytest.mark.parametrize(
    "form, way", [case for case in CASES if case[1] not in MAY_BE_REFUSED | {"hooks", "as_a_key"}]
)
def test_reading_what_depends_on_it_names_it(answers, form, way):
    answer, (_, cause) = answers(form)[way], (WAYS | TORCH_WAYS)[way]
    named = [one for one in answer["unsafe"] if any(one in error for error in answer["errors"])]
    assert named or any(cause in error for error in answer["errors"]), answer["errors"]


def test_the_standard_unpickler_would_run_it(tmp_path):
    """Or else the tests above would prove nothing."""
    raw = b"--next--".join(whole("tar", way) for way in WAYS)
    (tmp_path / "programs").write_bytes(raw)
    (tmp_path / "here").mkdir()
    script = f"import os; os.chdir({str(tmp_path / 'here')!r})\n" + OBEYS
    child = run_child(script, tmp_path / "programs")
    ran = dict(zip(WAYS, child.stdout.split(), strict=True))
    assert [way for way, it in ran.items() if it != "True"] == [], child.stderr


@pytest.mark.parametrize("held", [storage(), tensor()], ids=["storage", "tensor"])
def test_a_tensor_in_a_set_is_refused_where_the_set_is_read(tmp_path, held):
    code = value({"odd": call(name("builtins", "frozenset"), [held]), "n": 7})
    records = checkpoint_records(program(code), {"0": payload(16)})
    with open_checkpoint(stored_zip(tmp_path / "a.pt", records)) as checkpoint:
        assert checkpoint.metadata["n"] == 7
        with pytest.raises(CheckpointError, match="odd is a set that holds a tensor"):
            checkpoint.metadata["odd"]
