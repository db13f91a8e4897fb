"""A pickle is a program: every way in which one can call something, and nothing is called here.

Each file holds two good tensors around a value that a program has to make. The standard unpickler
runs the program (one test shows it). Here the file opens, the name is listed, the tensors are
right, and reading the value says which name it needs. An audit hook watches in a child process.
"""

import json
import re
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
    EMPTY_TUPLE,
    MARK,
    NEWOBJ_EX,
    NONE,
    REDUCE,
    SETITEM,
    SETITEMS,
    Code,
    build,
    call,
    name,
    newobj,
    ordered_dict,
    persistent,
    program,
    stack_name,
    storage,
    tensor,
    value,
)

FORMS = ("zip", "legacy", "tar")
SYSTEM, HANDLER = name("os.system"), name("logging.FileHandler")
TOUCH = "touch ran"
"""Run in the child's folder; that the file is there is the proof that something ran."""
RUN = call(SYSTEM, TOUCH)
OPEN = "open('ran', 'w')"


def with_method(method):
    """An object whose method of this name is ``os.system``, and its argument."""
    return build(call("types.SimpleNamespace"), {method: SYSTEM})


WAYS = {
    "reduce": RUN,
    "stack_global": call(stack_name("os", "system"), TOUCH),
    "dotted_stack_global": call(stack_name("shutil", "os.system"), TOUCH),
    "inst": MARK + value(TOUCH) + b"ios\nsystem\n",
    "obj": MARK + SYSTEM + value(TOUCH) + b"o",
    "newobj": call("builtins.list", newobj("builtins.map", SYSTEM, [TOUCH])),
    "newobj_ex": name("functools.partial") + value((SYSTEM, TOUCH)) + value({}) + NEWOBJ_EX
    + EMPTY_TUPLE + REDUCE,  # which calls what was made
    "build": build(with_method("__setstate__"), TOUCH),
    "append": with_method("append") + value(TOUCH) + APPEND,
    "appends": with_method("append") + MARK + value(TOUCH) + APPENDS,
    "additems": with_method("add") + MARK + value(TOUCH) + ADDITEMS,
    "setitem": call("shelve.open", "ran") + value("a") + value(1) + SETITEM,
    "setitems": call("shelve.open", "ran") + MARK + value("a") + value(1) + SETITEMS,
    "ext1": call(Code(b"\x82\xf0"), TOUCH),
    "ext2": call(Code(b"\x83\xf0\x00"), TOUCH),
    "ext4": call(Code(b"\x84\xf0\x00\x00\x00"), TOUCH),
    "reconstructor": call("copyreg._reconstructor", HANDLER, HANDLER, "ran"),
    "python_2_reconstructor": call("copy_reg._reconstructor", HANDLER, HANDLER, "ran"),
    "getattr_chain": call(
        call("builtins.getattr", call("importlib.import_module", "os"), "system"), TOUCH),
    "attrgetter_chain": call(
        call(call("operator.attrgetter", "system"), call("builtins.__import__", "os")), TOUCH),
    "eval": call("builtins.eval", OPEN),
    "python_2_eval": call("__builtin__.eval", OPEN),
    "exec": call("builtins.exec", OPEN),
    "open": call("builtins.open", "ran", "w"),
    "posix": call("posix.system", TOUCH),
    "subprocess": call("subprocess.check_output", ["touch", "ran"]),
    "timeit": call("timeit.timeit", OPEN, "pass", name("time.perf_counter"), 1),
    "runpy": call("runpy._run_code", OPEN, {}),
    "pickle_in_a_pickle": call("_pickle.loads", program(RUN)),
    "in_a_set": call("builtins.frozenset", [RUN]),
    "as_a_key": value({RUN: 1}),
    "in_a_list": value([1, [2, RUN]]),
    "in_an_ordered_dict": ordered_dict({"a": RUN}),
}  # fmt: skip
TORCH_WAYS = {
    "rebuild_from_type": call(
        "torch._tensor._rebuild_from_type_v2", SYSTEM, SYSTEM, (TOUCH,), NONE),
    "hooks": tensor(None, 0, (4,), (1,), False, RUN),
    "shape": tensor(None, 0, (RUN,), (1,)),
    "storage": tensor(RUN),
    "storage_type": tensor(storage("0", 4, RUN)),
    "storage_key": tensor(storage(RUN, 4)),
    "persistent_id": persistent(RUN),
    "persistent_id_of_another_kind": persistent((RUN, 1)),
    "parameter": call("torch._utils._rebuild_parameter", RUN, True, NONE),
    "tensor_subclass": call(
        "torch._tensor._rebuild_from_type_v2", name("torch._utils._rebuild_tensor_v2"),
        name("evil.Tensor"), (storage(), 0, (4,), (1,), False, NONE), {"a": 1}),
    "torch_load": call("torch.load", "ran.pt"),
    "torch_hub": call("torch.hub.load", "evil/repo", "model"),
    "typed_storage_from_bytes": call("torch.storage._load_from_bytes", program(RUN)),
}  # fmt: skip


def listed(way, unsafe):
    """What the file is said to name, of the names in the way's code."""
    code = (WAYS | TORCH_WAYS)[way]
    if "stack_global" in way:
        return [one for one in unsafe if one.endswith("os.system")]
    names = {found.decode() for found in re.findall(rb"[ci][\w.]+\n([\w.]+)\n", code)}
    return [one for one in unsafe if one.rpartition(".")[2] in names]


MAY_BE_REFUSED = {"storage_key", "persistent_id", "persistent_id_of_another_kind", "inst", "obj",
                  "ext1", "ext2", "ext4"}  # fmt: skip
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


def whole(form, way):
    """The pickle of a checkpoint with ``bad`` between two good tensors."""
    bad = (WAYS | TORCH_WAYS)[way]
    protocol = 2 if "python_2" in way else 4  # where the standard unpickler knows old names
    if form == "tar":
        good = persistent("30", python=2)
        return program(value({"first": good, "bad": Code(bad), "last": good}), protocol=protocol)
    view = (None,) if form == "legacy" else ()
    good = tensor(storage("0", 4, "FloatStorage", "cpu", *view))
    if form == "legacy":
        bad = bad.replace(storage()[-4:], storage("0", 4, "FloatStorage", "cpu", None)[-5:])
    return program(value({"first": good, "bad": Code(bad), "last": good}), protocol=protocol)


def written(form, way, folder):
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
    def of(form):
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
    answer = answers(form)[way]
    assert "refused" not in answer, answer["refused"]
    assert listed(way, answer["unsafe"]), answer["unsafe"]


@pytest.mark.parametrize("form, way", [case for case in CASES if case[1] not in MAY_BE_REFUSED])
def test_the_tensors_beside_it_are_read(answers, form, way):
    assert answers(form)[way]["good"] == {"first": [0x11], "last": [0x11]}


@pytest.mark.parametrize(
    "form, way", [case for case in CASES if case[1] not in MAY_BE_REFUSED | {"hooks", "as_a_key"}]
)
def test_reading_what_depends_on_it_names_it(answers, form, way):
    answer = answers(form)[way]
    named = listed(way, answer["unsafe"])
    assert any(one in error for one in named for error in answer["errors"]), answer["errors"]


def test_the_standard_unpickler_would_run_it(tmp_path):
    """Or else the tests above would prove nothing."""
    raw = b"--next--".join(whole("tar", way) for way in WAYS)
    (tmp_path / "programs").write_bytes(raw)
    (tmp_path / "here").mkdir()
    script = f"import os; os.chdir({str(tmp_path / 'here')!r})\n" + OBEYS
    child = run_child(script, tmp_path / "programs")
    ran = dict(zip(WAYS, child.stdout.split(), strict=True))
    assert [way for way, it in ran.items() if it != "True"] == [], child.stderr
