"""Lesson 05: a pickle machine that calls nothing."""

import pickle
import re

import torch
from opcodes import Name, Note, Storage, Stored

from course.grading.exercise import Exercise
from course.lesson import defined, solution

GIVEN = defined("05")
HANDLERS, Machine = GIVEN["HANDLERS"], GIVEN["Machine"]


def stepped(answer, data, steps):
    machine = Machine(data, HANDLERS)
    for _ in range(steps):
        answer(machine)
    return {"at": machine.at, "stack": machine.stack, "below": machine.below}


STEP_UNGUARDED = Exercise(
    solution("05", "step_unguarded"),
    [
        (b"N.", 1),
        (b"K\x05.", 1),
        (b"\xff.", 1),
        (b"NNN.", 3),
        *((pickle.dumps(300, 2), k) for k in (1, 2, 3)),
    ],
    stepped,
    show=lambda data, steps: f"{steps} step{'s' * (steps > 1)} over the bytes {data.hex(' ')}",
    misconceptions="""
machine.data[machine.at] >> machine.at | You look up the place, not the byte that stands there.
machine.data[machine.at] >> machine.data[machine.at : machine.at + 1] | A slice of bytes is bytes, and the table's keys are ints.
machine.at += 1 >> pass | The machine stays where it is, and reads the opcode as its own argument.
machine.at += 1 >> machine.handlers[code](machine); machine.at += 1; return | You move on after the handler; it reads its argument from `at`, before that.
machine.handlers[code] >> machine.handlers.get(code, str) | You skip an opcode that nobody knows: its argument is then read as opcodes.
[code](machine) >> [code] | You look the handler up, and don't call it.
""",
)


def marks_seen(answer, *calls):
    """Push numbers, and call the methods that are named."""
    machine, seen = answer(b"", {}), {}
    first = machine.stack
    for number, call in enumerate(calls, 1):
        if isinstance(call, int):
            machine.stack.append(call)
            continue
        try:
            came = getattr(machine, call)()
        except ValueError:
            came = "ValueError"
        if came is not None:
            seen[f"{number}. {call}()"] = came
    aside = machine.below[0] if machine.below else machine.stack
    return seen | {
        "stack": machine.stack,
        "below": machine.below,
        "the list put aside first is the original": aside is first,
    }


MARK_MACHINE = Exercise(
    solution("05", "MarkMachine"),
    [
        (1, "mark"),
        ("pop_to_mark",),
        (1, "mark", 2, 3, "pop_to_mark"),
        (1, "mark", 2, "mark", 3, "pop_to_mark", 4, "pop_to_mark"),
        (1, "mark", 2, "pop_to_mark", "mark", 3, "pop_to_mark", "pop_to_mark"),
    ],
    marks_seen,
    show=lambda *calls: ", ".join(
        f"push {call}" if isinstance(call, int) else f"{call}()" for call in calls
    ),
    misconceptions="""
self.stack = [] >> self.stack.clear() | What you put aside and what you clear are one list.
self.below.append(self.stack) >> self.below.append(list(self.stack)) | The values are right, but a copy makes every mark cost the whole stack.
not self.below >> False | Without a mark there is nothing to take.
return values >> return self.stack | You return what lies below the mark, not what was pushed since.
""",
)


def trip(error):
    def handler(machine):
        machine.at += 1
        raise error("a handler said so")

    return handler


TRIPS = {b"\x01": trip(MemoryError), b"\x02": trip(AttributeError)}


def guarded(answer, data):
    """Say how a run ends."""
    machine = Machine(data, HANDLERS | TRIPS)
    try:
        for _ in range(len(data) + 1):
            if machine.running:
                answer(machine)
    except Exception as error:
        place = re.match(r"byte (\d+)", str(error))
        return {
            "raised": type(error).__name__,
            "the message begins with": place[0] if place else "no place",
            "the message has the error's words": "a handler said so" in str(error),
        }
    return {"raised": "nothing", "stack": machine.stack, "running": machine.running}


STEP = Exercise(
    solution("05", "step"),
    [
        (b"N.",),
        (b"",),
        (b"\xff",),
        (b"K",),
        (b"NNX\x09\0\0\0ab",),
        (b"N\x02N.",),
        (b"N\x01N.",),
        (b"}K\x05K\x06t",),
        (pickle.dumps({"b": 300}, protocol=2),),
    ],
    guarded,
    show=lambda data: f"step(machine), again and again, over the bytes {data.hex(' ') or '(none)'}",
    misconceptions="""
MALFORMED >> ValueError | A handler can fail in other ways, too.
MALFORMED >> Exception | You catch what is no fault of the file: running out of memory, say.
{begin} >> {machine.at} | By the time the error arrives, the machine stands elsewhere.
raise CheckpointError(f"byte {begin}: {error}") from None >> raise error | A script waits for a CheckpointError; the other names tell it nothing.
""",
)


def noted(answer, data):
    """Say what two opcodes leave on the stack, and what `reduce` was asked."""
    asked = []

    def reduce(function, args):
        asked.append((function, args))
        return "what reduce gave"

    machine = answer(data, HANDLERS, reduce)
    machine.stack.append("older")
    own = {ord("c"): answer.name_global, ord("R"): answer.load_reduce}
    while machine.at < len(data):
        code = data[machine.at]
        machine.at += 1
        own.get(code, machine.handlers[code])(machine)
    return {"stack": repr(machine.stack), "reduce was asked": asked, "at": machine.at}


NOTE_MACHINE = Exercise(
    solution("05", "NoteMachine"),
    [
        (b"cos\ngetcwd\n",),
        (b"cno_such_module\nfly\nN",),
        (b"cos\ngetcwd\n)R",),
        (b"cos\ngetcwd\nK\x05\x85RN",),
        (b"cos\ngetcwd\nK\x05K\x06\x86R",),
    ],
    noted,
    show=lambda data: f"the opcodes c (GLOBAL) and R (REDUCE) in the pickle {data!r}",
    misconceptions="""
self.stack.append(Name(f"{module}.{name}")) >> self.stack.append(getattr(__import__(module, fromlist=["."]), name)) | You import what the file names. That already runs the module's code.
Name(f"{module}.{name}") >> f"{module}.{name}" | It is a plain text now, like any other in the file.
self.line().decode(), self.line().decode() >> self.line(), self.line() | `line` gives bytes; a name is text.
args, function >> function, args | The tuple of arguments was pushed last, so it comes off first.
self.reduce(function, args) >> self.reduce(function, *args) | `reduce` takes the arguments as one tuple.
self.stack.append(self.reduce(function, args)) >> self.reduce(function, args) | What the call stands for goes onto the stack.
""",
)


def described(answer, function, args):
    """Return the description that comes back as something that can be compared."""
    value = answer(function, args)
    if isinstance(value, Note):
        return {"a note of": str(value.name), "with": repr(value.args)}
    return repr(value)


ONE = Storage("0", torch.float32, 6)
TENSOR, PARAMETER = Name("torch._utils._rebuild_tensor_v2"), Name("torch._utils._rebuild_parameter")
MISSING = Note("os.getcwd", ())
REDUCE = Exercise(
    solution("05", "reduce"),
    [
        (Name("collections.OrderedDict"), ()),
        (Name("os.makedirs"), ("surprise",)),
        (TENSOR, (ONE, 0, (2, 3), (3, 1))),
        (PARAMETER, (Stored(ONE, (6,), (1,), 0), True)),
        (PARAMETER, (MISSING, True)),
        (Name("os.makedirs"), (MISSING,)),
        (MISSING, (5,)),
        ("os.makedirs", ("surprise",)),
        (Name("os.makedirs"), ["surprise"]),
    ],
    described,
    misconceptions="""
check_call(function, args) >> pass | What is called must be a Name, and its arguments a tuple.
missing is not None >> False | A part of it was not made, so the whole can't be made either.
Note(missing.name, args) >> Note(function, args) | The note should name the part that is missing, not the call around it.
Note(missing.name, args) >> missing | The note stands for this call, not for its part: it keeps this call's own arguments.
CALLS.get(function) >> CALLS[function] | A file names what it likes: not every name is a key of `CALLS`.
ours(*args) >> ours(args) | Our functions take the arguments one by one, as theirs would.
""",
)
