"""Lesson 05: a pickle machine that calls nothing."""

import pickle
import re
from functools import partial
from importlib import import_module

import torch

from course.grading.exercise import Exercise
from course.lesson import defined, solution

here = partial(solution, "05")
GIVEN = defined("05")
HANDLERS, Machine, CALLS = GIVEN["HANDLERS"], GIVEN["Machine"], GIVEN["CALLS"]
opcodes = import_module("opcodes")
Name, Note, Storage = opcodes.Name, opcodes.Note, opcodes.Storage


def left_in(machine):
    return {"at": machine.at, "stack": machine.stack, "below": machine.below}


def stepped(answer, data, steps):
    """Run some steps, of which each opcode has a handler."""
    machine, unknown = Machine(data, HANDLERS), "none"
    try:
        for _ in range(steps):
            answer(machine)
    except ValueError as error:
        unknown = str(error)
    return left_in(machine) | {"an error": unknown}


STEP_UNGUARDED = Exercise(
    here("step_unguarded"),
    [(b"N.", 1), (b"K\x05.", 1), (b"NNN.", 3), *((pickle.dumps(300, 2), k) for k in (1, 2, 3))],
    stepped,
    show=lambda data, steps: f"{steps} step{'s' * (steps > 1)} over the bytes {data.hex(' ')}",
    misconceptions="""
machine.data[machine.at] >> machine.at | You look up the place, not the byte that stands there.
machine.data[machine.at] >> machine.data[machine.at : machine.at + 1] | A slice of bytes is bytes; one element is an int, and the table's keys are ints.
machine.at += 1 >> pass | The machine stays where it is, and reads the opcode as its own argument.
machine.at += 1 >> machine.handlers[code](machine); machine.at += 1; return | You move on after the handler; it reads its argument from `at`, before that.
[code](machine) >> [code] | You look the handler up, and don't call it.
""",
)


def number_seen(answer, format, data):
    machine = Machine(data, HANDLERS)
    machine.stack.append("older")
    handler = answer(format)
    if not callable(handler):
        return {"push_number returns": "no function"}
    handler(machine)
    return left_in(machine)


PUSH_NUMBER = Exercise(
    here("push_number"),
    [("<B", b"\x05."), ("<H", b"\x2c\x01."), ("<i", b"\xff\xff\xff\xff."), (">d", b"?" * 8)],
    number_seen,
    show=lambda format, data: f"push_number({format!r})(machine), the bytes {data.hex(' ')} follow",
    misconceptions="""
machine.stack.append(machine.number(format)) >> machine.number(format) | You return the number; a handler puts it onto the stack.
machine.stack.append(machine.number(format)) >> machine.stack.append(format) | You push the format, not the number that it describes.
return lambda >> lambda | You make a handler, and don't return it.
lambda machine: >> | There is no machine yet when the table is made: a handler is given one later.
machine.number(format) >> machine.number("<H") | Not every number is two bytes long.
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
    here("MarkMachine"),
    [
        (1, "mark"),
        (1, "mark", 2),
        ("pop_to_mark",),
        (1, "mark", 2, 3, "pop_to_mark"),
        (1, "mark", 2, "mark", 3, "pop_to_mark"),
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
self.below.append(self.stack) >> self.below = [self.stack] | There are marks inside marks: several stacks can be aside.
if not self.below: >> if False: | Without a mark there is nothing to take: say so with a ValueError.
self.below.pop() >> self.below.pop(0) | The newest mark is the one at the end.
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
    here("step"),
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
except MALFORMED as error >> except ValueError as error | An opcode that is not known is a ValueError; a handler can fail in other ways, too.
except MALFORMED as error >> except Exception as error | You catch what is no fault of the file: running out of memory, say.
{begin} >> {machine.at} | By the time the error arrives, the machine stands elsewhere: note the place before.
raise CheckpointError(f"byte {begin}: {error}") from None >> raise error | A script waits for a CheckpointError; the other names tell it nothing.
raise CheckpointError(f"byte {begin}: {error}") from None >> pass | The error is caught, and nobody raises another.
""",
)


def noted(answer, data):
    """Say what two opcodes leave on the stack, and what `reduce` was asked."""
    asked = []
    machine = answer(data, HANDLERS, lambda *given: asked.append(given) or "what reduce gave")
    machine.stack.append("older")
    own = {ord("c"): answer.name_global, ord("R"): answer.load_reduce}
    while machine.at < len(data):
        code = data[machine.at]
        machine.at += 1
        own.get(code, machine.handlers[code])(machine)
    texts = [f"{type(one).__name__} {one!r}" for one in machine.stack]
    return {"stack": texts, "reduce was asked": asked, "at": machine.at}


NOTE_MACHINE = Exercise(
    here("NoteMachine"),
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
self.stack.append(Name(f"{module}.{name}")) >> __import__(module); self.stack.append(Name(f"{module}.{name}")) | Nothing is imported, not even to look: a module runs when it is imported.
Name(f"{module}.{name}") >> f"{module}.{name}" | It is a plain text now, like any other in the file: a Name was asked for.
self.line().decode(), self.line().decode() >> self.line(), self.line() | `line` gives bytes; a name is text.
args, function = >> function, args = | The tuple of arguments was pushed last, so it comes off first.
self.reduce(function, args) >> self.reduce(function, *args) | `reduce` takes the arguments as one tuple.
self.stack.append(self.reduce(function, args)) >> self.reduce(function, args) | What the call stands for goes onto the stack.
""",
)


def in_words(value):
    """Return a description as something that can be compared."""
    if isinstance(value, Note):
        return {"a note of": str(value.name), "with": in_words(value.args)}
    if isinstance(value, tuple):
        return tuple(map(in_words, value))
    return value if isinstance(value, str | int) else repr(value)


def shown(value):
    """Return an argument as it is shown."""
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))}{',' * (len(value) == 1)})"
    if isinstance(value, Storage):
        return f"storage {value.key!r}"
    return f"Name({str(value)!r})" if isinstance(value, Name) else repr(value)


ONE = Storage("0", torch.float32, 6)
TENSOR, PARAMETER = Name("torch._utils._rebuild_tensor_v2"), Name("torch._utils._rebuild_parameter")
MISSING = Note("os.getcwd", ())
REDUCE = Exercise(
    here("reduce"),
    [
        (Name("collections.OrderedDict"), ()),
        (Name("os.makedirs"), ("surprise",)),
        (TENSOR, (ONE, 0, (2, 3), (3, 1))),
        (PARAMETER, (opcodes.Stored(ONE, (6,), (1,), 0), True)),
        (PARAMETER, (MISSING, True)),
        (Name("os.makedirs"), (MISSING,)),
        (MISSING, (5,)),
        ("os.makedirs", ("surprise",)),
        (Name("os.makedirs"), ["surprise"]),
    ],
    lambda answer, function, args: in_words(answer(function, args)),
    show=lambda function, args: f"reduce({shown(function)}, {shown(args)})",
    others={
        "You look into `CALLS` first; a call that we know may have a part that is missing, too.": (
            lambda function, args: (
                GIVEN["check_call"](function, args)
                or (
                    CALLS[function](*args) if function in CALLS else GIVEN["reduce"](function, args)
                )
            )
        )
    },
    misconceptions="""
check_call(function, args) >> pass | What is called must be a Name, and its arguments a tuple: `check_call`.
missing is not None >> False | A part of it was not made, so the whole can't be made either.
Note(missing.name, args) >> Note(function, args) | The note should name the part that is missing, not the call around it.
Note(missing.name, args) >> missing | The note stands for this call, not for its part: it keeps this call's own arguments.
ours = CALLS.get(function) >> ours = None | torch's own calls are harmless: `CALLS` has a function of ours for each.
CALLS.get(function) >> CALLS[function] | A file names what it likes: not every name is a key of `CALLS`.
ours(*args) >> ours(args) | Our functions take the arguments one by one, as theirs would.
""",
)
