"""What lesson 05 lets the learner build, and the wrong answers that people give."""

import pickle
import struct

import torch

from npydata.errors import CheckpointError
from tutorial.building import Build
from tutorial.frames.reader import MyMachine, MyRebuilder
from tutorial.kept.reader.call_opcodes import load_reduce, name_global
from tutorial.kept.reader.opcodes import HANDLERS, collect_tuple, mark, push_number, push_text
from tutorial.kept.reader.pickle_machine import MALFORMED, PickleMachine
from tutorial.kept.reader.stored import Global, Opaque, Storage, StoredTensor
from tutorial.kept.reader.torch_rebuild import CALLS, Rebuilder, first_opaque, validate_call
from tutorial.promised.reader import MACHINE_CARDS as CARDS  # noqa: F401
from tutorial.promised.reader import MACHINE_PROMISES as PROMISES  # noqa: F401

PART = "reader"


def with_method(owner, name, method):
    """A class of its own for an answer that is a method."""
    return type(owner.__name__, (owner,), {name: method})


def machine_over(data, own=(), kind=PickleMachine, end=None):
    """The library's machine, with some handlers of one's own; it notes every call."""
    return kind(data, HANDLERS | dict(own), find_class=Global, persistent_load=str,
                reduce=Opaque, end=end)  # fmt: skip


def left_in(machine):
    """What a machine holds, as texts where values have no equality."""
    below = [[str(one) for one in items] for items in machine.metastack]
    return {"at": machine.at, "stack": [repr(one) for one in machine.stack], "below": below}


# One step


def step_unguarded(machine):
    code = machine.data[machine.at]
    machine.at += 1
    machine.handlers[code](machine)


def stepped(answer, data, steps):
    """A machine after some steps that all go well."""
    machine, unknown = machine_over(data), "nothing"
    try:
        for _ in range(steps):
            answer(machine)
    except KeyError as error:
        unknown = repr(error.args[0])
    return left_in(machine) | {"looked up in vain": unknown}


def looks_up_bytes(machine):
    code = machine.data[machine.at : machine.at + 1]
    machine.at += 1
    machine.handlers[code](machine)


def looks_up_the_place(machine):
    code = machine.at
    machine.at += 1
    machine.handlers[code](machine)


def stays_in_its_place(machine):
    machine.handlers[machine.data[machine.at]](machine)


def moves_too_late(machine):
    machine.handlers[machine.data[machine.at]](machine)
    machine.at += 1


def forgets_the_machine(machine):
    code = machine.data[machine.at]
    machine.at += 1
    machine.handlers[code]()


STEP_UNGUARDED = Build(
    name="step_unguarded",
    reference=step_unguarded,
    cases=[(pickle.dumps(300, 2), steps) for steps in (1, 2, 3)] + [(b"NNN.", 3)],
    observe=stepped,
    show=lambda case: f"{case[1]} step{'s' * (case[1] > 1)} over the bytes {case[0].hex(' ')}",
    kept=False,
    wrong={
        "You look up the place, not the byte that lies there.": looks_up_the_place,
        "A slice of bytes is bytes; `data[at]` is an int, and the table's keys are ints.": (
            looks_up_bytes
        ),
        "The machine stays where it is, and reads the opcode as its own argument.": (
            stays_in_its_place
        ),
        "You move on after the handler; it reads its argument from `at`, before that.": (
            moves_too_late
        ),
        "A handler works on a machine: on which?": forgets_the_machine,
    },
)


# Handlers


def number_seen(answer, format, data):
    machine = machine_over(data)
    machine.stack.append("below")
    answer(format)(machine)
    return left_in(machine)


def pushes_at_once(format):
    return machine.stack.append(machine.number(format))  # noqa: F821 - that is the mistake


def reads_in_passing(format):
    return lambda machine: machine.stack.append(
        struct.unpack_from(format, machine.data, machine.at)[0]
    )


PUSH_NUMBER = Build(
    name="push_number",
    reference=push_number,
    cases=[("<B", b"\x05."), ("<H", b"\x2c\x01."), ("<i", b"\xff\xff\xff\xff."), (">d", b"?" * 8)],
    observe=number_seen,
    show=lambda case: f"push_number({case[0]!r})(machine)  # the bytes {case[1].hex(' ')} follow",
    wrong={
        "You return the number; a handler pushes it.": (
            lambda format: lambda machine: machine.number(format)
        ),
        "You push the format, not the number that it describes.": (
            lambda format: lambda machine: machine.stack.append(format)
        ),
        "You return no function: the table needs one that it can call later.": (
            lambda format: format
        ),
        "There is no machine yet when the table is made: a handler is given one later.": (
            pushes_at_once
        ),
        "The number is read, and the machine still stands before it.": reads_in_passing,
        "A new value goes on the top of the stack: at its end.": (
            lambda format: lambda machine: machine.stack.insert(0, machine.number(format))
        ),
        "Not every number is two bytes long.": (
            lambda format: lambda machine: machine.stack.append(machine.number("<H"))
        ),
    },
)


def text_seen(answer, length, data):
    machine = machine_over(data)
    machine.stack.append("below")
    answer(length)(machine)
    return left_in(machine)


def text_as(decode=lambda raw: raw.decode("utf-8", "surrogatepass"), length_of=None):
    """A `push_text` that may be wrong."""
    return lambda length: (
        lambda machine: machine.stack.append(
            decode(machine.take(machine.number(length_of or length)))
        )
    )


PUSH_TEXT = Build(
    name="push_text",
    reference=push_text,
    cases=[
        ("<B", b"\x02abc"),
        ("<I", b"\x03\0\0\0step."),
        ("<I", b"\x06\0\0\0" + "a\u00fc\u20ac".encode() + b"."),
        ("<B", b"\x03\xed\xa0\x80."),
        ("<B", b"\0."),
        ("<B", b"\x09ab."),
        ("<B", b"\x02\xff\xff."),
    ],
    observe=text_seen,
    show=lambda case: f"push_text({case[0]!r})(machine)  # the bytes {case[1].hex(' ')} follow",
    wrong={
        "You push bytes; a text is decoded.": text_as(bytes),
        "A letter may take several bytes: not latin-1.": text_as(lambda raw: raw.decode("latin-1")),
        "Python writes half a pair of UTF-16 as well; `surrogatepass` reads it.": text_as(
            bytes.decode
        ),
        "Bytes that are no text are an error, not question marks.": text_as(
            lambda raw: raw.decode("utf-8", "replace")
        ),
        "How long the length is, says the argument.": text_as(length_of="<I"),
        "`length` is a format, not a number: the number stands in the file.": lambda length: (
            lambda machine: machine.stack.append(machine.take(length).decode())
        ),
    },
)


def handled(code):
    """Observe a handler in a whole pickle."""

    def seen(answer, data):
        machine = machine_over(data, {code: answer})
        before = machine.stack
        while machine.running and machine.at < len(data):
            machine.step()
        return left_in(machine) | {"the same list goes on": machine.stack is before}

    return seen


def in_hex(name):
    return lambda case: f"{name} in the pickle {case[0].hex(' ')}"


def clears_the_stack(machine):
    machine.metastack.append(machine.stack)
    machine.stack.clear()


def copies_and_clears(machine):
    machine.metastack.append(list(machine.stack))
    machine.stack.clear()


def copies_the_stack(machine):
    machine.metastack.append(list(machine.stack))
    machine.stack = []


def pushes_a_mark(machine):
    machine.stack.append("mark")


def forgets_what_was(machine):
    machine.stack = []


def begins_none(machine):
    machine.metastack.append(machine.stack)


def keeps_one_mark(machine):
    machine.metastack = [machine.stack]
    machine.stack = []


MARK = Build(
    name="mark",
    reference=mark,
    cases=[(data,) for data in (b"N(", b"(N", b"N(NN(N", b"N(N((t", b"](NNe", b"}(NNu.")],
    observe=handled(pickle.MARK),
    show=in_hex("mark"),
    wrong={
        "What you put aside and what you clear are one list.": clears_the_stack,
        "The values are right; but a copy makes every mark cost the whole stack.": copies_the_stack,
        "The values are right; but to copy and to clear makes every mark cost the whole stack.": (
            copies_and_clears
        ),
        "A mark on the stack is a value like another: who tells them apart?": pushes_a_mark,
        "The list that you put aside goes on as the stack: all that follows lands in it.": (
            begins_none
        ),
        "What lay below is gone; later opcodes want it back.": forgets_what_was,
        "Marks are set inside of marks: there can be several stacks aside.": keeps_one_mark,
    },
)


def pop_seen(answer, aside, stack):
    machine = machine_over(b".", kind=with_method(MyMachine, "pop_to_mark", answer))
    machine.metastack, machine.stack = [list(one) for one in aside], list(stack)
    try:
        items = machine.pop_to_mark()
    except ValueError:
        return "ValueError"
    return {"returned": items} | left_in(machine)


def pops_unguarded(self):
    items, self.stack = self.stack, self.metastack.pop()
    return items


def returns_what_was_below(self):
    if not self.metastack:
        raise ValueError("no mark was set")
    self.stack = self.metastack.pop()
    return self.stack


def gives_out_what_was_aside(self):
    return self.metastack.pop()


def takes_the_first_mark(self):
    if not self.metastack:
        raise ValueError("no mark was set")
    items, self.stack = self.stack, self.metastack.pop(0)
    return items


def leaves_the_mark(self):
    if not self.metastack:
        raise ValueError("no mark was set")
    items, self.stack = self.stack, self.metastack[-1]
    return items


def puts_them_back(self):
    if not self.metastack:
        raise ValueError("no mark was set")
    items, self.stack = self.stack, self.metastack.pop() + self.stack
    return items


POP_TO_MARK = Build(
    name="pop_to_mark",
    reference=PickleMachine.pop_to_mark,
    owner="MyMachine",
    cases=[([], []), ([], [1]), ([[]], [1, 2]), ([["a"]], [1]), ([["a"], ["b", "c"]], [])],
    observe=pop_seen,
    show=lambda case: f"pop_to_mark()  # metastack {case[0]}, stack {case[1]}",
    wrong={
        "Without a mark there is nothing to take: say so with a ValueError.": pops_unguarded,
        "You return what lay below the mark, not what was pushed since.": returns_what_was_below,
        "You give out the stack that was put aside; the machine goes on with the wrong one.": (
            gives_out_what_was_aside
        ),
        "The newest mark is the one at the end.": takes_the_first_mark,
        "The mark is used up: its stack is aside no more.": leaves_the_mark,
        "What you return is taken from the stack.": puts_them_back,
    },
)


def tuple_as(make, push=lambda machine, made: machine.stack.append(made)):
    return lambda machine: push(machine, make(machine.pop_to_mark()))


COLLECT_TUPLE = Build(
    name="collect_tuple",
    reference=collect_tuple,
    cases=[(data,) for data in (b"(t", b"(Nt", b"N(NK\x05t", b"N(N(K\x01K\x02tt", b"Nt")],
    observe=handled(pickle.TUPLE),
    show=in_hex("collect_tuple"),
    wrong={
        "A list is no tuple.": tuple_as(list),
        "The tuple went nowhere: returned, or put on the list that was `machine.stack` before.": (
            lambda machine: machine.stack.append(tuple(machine.pop_to_mark()))
        ),
        "Each value is pushed alone; they should be one.": tuple_as(
            tuple, lambda machine, made: machine.stack.extend(made)
        ),
        "The values come in the order in which they were pushed.": tuple_as(
            lambda items: tuple(reversed(items))
        ),
        "You collect the whole stack, whatever the mark says.": lambda machine: (
            machine.stack.append(tuple(machine.stack))
        ),
    },
)


# Bytes that are there, and a step that says what is wrong


def taken(answer, data, count, end):
    machine = machine_over(data, kind=with_method(MyMachine, "take", answer), end=end)
    machine.at = 1
    try:
        return {"returned": bytes(machine.take(count)), "at": machine.at}
    except ValueError:
        return "ValueError"


def take_as(fits=lambda self, count: count >= 0 and self.at + count <= self.end, move=True):
    """A `take` that may be wrong."""

    def take(self, count):
        if not fits(self, count):
            raise ValueError("not there")
        chunk = self.data[self.at : self.at + count]
        self.at += count if move else 0
        return chunk

    return take


TAKE = Build(
    name="take",
    reference=PickleMachine.take,
    owner="MyMachine",
    cases=[(b".abcdef.", count, end) for count in (-1, 0, 1, 3, 4, 7, 8) for end in (4, 8)],
    observe=taken,
    show=lambda case: f"take({case[1]})  # at 1, end {case[2]}, of the bytes {case[0]}",
    wrong={
        "A slice that reaches too far is only shorter: a text would be cut.": take_as(
            lambda self, count: True
        ),
        "The bytes may go on behind `end`: another pickle's.": take_as(
            lambda self, count: count >= 0 and self.at + count <= len(self.data)
        ),
        "A negative length goes back, and the machine would never end.": take_as(
            lambda self, count: self.at + count <= self.end
        ),
        "The bytes up to the very end may be taken.": take_as(
            lambda self, count: count >= 0 and self.at + count < self.end
        ),
        "The machine must move behind the bytes.": take_as(move=False),
    },
)


def raises_checkpoint_error(machine):
    raise CheckpointError("a handler said so")


def runs_out_of_memory(machine):
    raise MemoryError


TRIPS = {b"\x01": raises_checkpoint_error, b"\x02": runs_out_of_memory}


def guarded(answer, data, end=None):
    """How a run ends, and where the machine stands then."""
    machine = machine_over(data, TRIPS, with_method(MyMachine, "step", answer), end)
    try:
        for _ in range(len(data) + 1):
            if machine.running:
                machine.step()
    except CheckpointError as error:
        text = str(error)
        return {"raised": "CheckpointError", "its message": text, "at": machine.at}
    return left_in(machine)


def step_as(caught=MALFORMED, guard=True, back="begin", own=False, raises=True):
    """A step that may be wrong."""

    def step(self):
        begin, self.at = self.at, self.at + 1
        try:
            if guard and begin >= self.end:
                raise IndexError
            self.handlers[self.data[begin]](self)
        except caught as error:
            self.at = {"begin": begin, "one": self.at - 1, "no": self.at}[back]
            made = CheckpointError(str(error)) if own else self.malformed(str(error))
            if raises:
                raise made from None

    return step


def lets_it_pass(self):
    begin, self.at = self.at, self.at + 1
    if begin < self.end:
        self.handlers[self.data[begin]](self)


def raises_outside(self):
    begin = self.at
    if begin >= self.end:
        raise IndexError("the pickle ends here")
    try:
        self.at += 1
        self.handlers[self.data[begin]](self)
    except MALFORMED as error:
        self.at = begin
        raise self.malformed(str(error)) from None


WHOLE = pickle.dumps({"a": (1, "text"), "b": 300}, protocol=2)
STEP = Build(
    name="step",
    reference=PickleMachine.step,
    owner="MyMachine",
    cases=[
        (b"N.",),
        (b"K",),
        (b"",),
        (b"\xff",),
        (b"K\x05s.",),
        (b"\x80\x02\x01.",),
        (b"\x80\x02\x02.",),
        (b"N.", 1),
        (b"NK\x05", 2),
        *[(WHOLE[:length],) for length in range(3, len(WHOLE), 4)],
        (WHOLE,),
    ],
    observe=guarded,
    show=lambda case: (
        f"step() until the end of the bytes {case[0].hex(' ')}"
        + (f", with machine.end {case[1]}" if case[1:] else "")
    ),
    wrong={
        "An error that is raised before the `try` begins is caught by nobody.": raises_outside,
        "Not all that a handler trips over is a KeyError.": step_as(KeyError),
        "You catch what is no fault of the file: running out of memory, say.": step_as(Exception),
        "The bytes may go on behind `end`: another pickle's.": step_as(guard=False),
        "The message names the byte where the machine stands: bring it back to the opcode.": (
            step_as(back="no")
        ),
        "One byte back is not the opcode: the handler may have read its argument by then.": (
            step_as(back="one")
        ),
        "`self.malformed` makes the error; you don't raise it.": step_as(raises=False),
        "You catch every error, even one that is no fault of the file, and never look at `end`.": (
            step_as(Exception, guard=False)
        ),
        "`self.malformed` knows opcode and place; an error of your own doesn't say them.": (
            step_as(own=True)
        ),
        "A pickle that ends too early is an error, not an end.": lets_it_pass,
    },
)


# Names and calls


def named_seen(answer, data):
    found = []
    machine = PickleMachine(
        data, HANDLERS | {pickle.GLOBAL: answer}, persistent_load=str, reduce=Opaque,
        find_class=lambda module, name: found.append((module, name)) or f"{module}:{name}",
    )  # fmt: skip
    while machine.running and machine.at < len(data):
        machine.step()
    return left_in(machine) | {"asked find_class for": found}


def imports_it(machine):
    from importlib import import_module

    module, name = machine.line().decode(), machine.line().decode()
    machine.stack.append(getattr(import_module(module), name))


def asks_by_bytes(machine):
    machine.stack.append(machine.find_class(machine.line(), machine.line()))


def name_before_module(machine):
    name, module = machine.line().decode(), machine.line().decode()
    machine.stack.append(machine.find_class(module, name))


def reads_one_line(machine):
    module, _, name = machine.line().decode().rpartition(".")
    machine.stack.append(machine.find_class(module, name))


def returns_the_note(machine):
    module, name = machine.line().decode(), machine.line().decode()
    return machine.find_class(module, name)


NAME_GLOBAL = Build(
    name="name_global",
    reference=name_global,
    cases=[(b"cos\nmakedirs\n",), (b"Nccollections\nOrderedDict\nN",), (b"cos.path\njoin\n.",)],
    observe=named_seen,
    show=lambda case: f"name_global at the opcode c in {case[0]!r}",
    wrong={
        "You import what the file names. That already runs the module's code.": imports_it,
        "Names are text; `line` gives bytes.": asks_by_bytes,
        "You return the note, and nobody takes it: a handler leaves it on the stack.": (
            returns_the_note
        ),
        "The first line is the module.": name_before_module,
        "Two lines follow: one with the module, one with the name.": reads_one_line,
    },
)


def reduced_seen(answer, data):
    asked = []
    machine = PickleMachine(
        data, HANDLERS | {pickle.REDUCE: answer}, find_class=Global, persistent_load=str,
        reduce=lambda function, args: asked.append((str(function), args)) or "what reduce gave",
    )  # fmt: skip
    while machine.running and machine.at < len(data):
        machine.step()
    return left_in(machine) | {"asked reduce for": asked}


def called(function, args):
    """What an eager answer would do; here it would only harm the child."""
    return function(*args)


def calls_it(machine):
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(called(function, args))


def pops_in_the_wrong_order(machine):
    function, args = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.reduce(function, args))


def spreads_the_arguments(machine):
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.reduce(function, *args))


def leaves_both(machine):
    machine.stack.append(machine.reduce(machine.stack[-2], machine.stack[-1]))


def pushes_nothing(machine):
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.reduce(function, args)


LOAD_REDUCE = Build(
    name="load_reduce",
    reference=load_reduce,
    cases=[(b"cos\nmakedirs\nK\x05\x85R",), (b"Ncos\nabort\n)R.",), (b"N)R",)],
    observe=reduced_seen,
    show=lambda case: f"load_reduce at the opcode R in {case[0]!r}",
    wrong={
        "You call it. That is what the file wants.": calls_it,
        "The newest value is the arguments: they were pushed last.": pops_in_the_wrong_order,
        "`machine.reduce` takes the arguments as one tuple.": spreads_the_arguments,
        "Function and arguments stay on the stack; they are used up.": leaves_both,
        "What the call stands for goes on the stack.": pushes_nothing,
    },
)


def described(value):
    """What a record says, in values that can be compared."""
    if isinstance(value, Opaque):
        name = value.function
        kept = "a text, not a name" if isinstance(name, str) else str(name)
        return {"not called": kept, "with": described(value.args)}
    if isinstance(value, StoredTensor):
        return {"tensor": (value.storage.key, value.shape, value.stride, value.offset)}
    if isinstance(value, tuple):
        return tuple(map(described, value))
    return value if isinstance(value, str | int) else repr(value)


def in_words(value):
    """An argument of a call as it is shown."""
    if isinstance(value, tuple):
        return f"({', '.join(map(in_words, value))}{',' * (len(value) == 1)})"
    return f"storage {value.key!r}" if isinstance(value, Storage) else repr(value)


UNMADE = Opaque(Global("os", "getpid"), ())
TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
PARAMETER = Global("torch._utils", "_rebuild_parameter")


def reduce_seen(answer, function, args):
    own = with_method(MyRebuilder, "reduce", answer)
    return described(own(1000).reduce(function, args))


def note_of_part(function, args, part):
    return Opaque(part.function, (part,))


def reduce_as(
    calls=True, hidden=True, validated=True, missing=note_of_part, noted=Opaque,
    describe=lambda self, known, function, args: self.describe(known, function, args),
):  # fmt: skip
    """A `reduce` that may be wrong."""

    def reduce(self, function, args):
        if validated:
            validate_call(function, args)
        if hidden and (unmade := first_opaque(args)) is not None:
            return missing(function, args, unmade)
        known = CALLS.get(str(function)) if calls else None
        return noted(function, args) if known is None else describe(self, known, function, args)

    return reduce


def knows_before_it_looks(self, function, args):
    validate_call(function, args)
    if (known := CALLS.get(str(function))) is not None:
        return self.describe(known, function, args)
    unmade = first_opaque(args)
    return Opaque(function, args) if unmade is None else Opaque(unmade.function, (unmade,))


def refuses_the_unknown(self, function, args):
    validate_call(function, args)
    if (unmade := first_opaque(args)) is not None:
        return Opaque(unmade.function, (unmade,))
    if str(function) not in CALLS:
        raise CheckpointError(f"{function} is not known")
    return self.describe(CALLS[str(function)], function, args)


def describes_all(self, function, args):
    validate_call(function, args)
    return self.describe(CALLS.get(str(function)), function, args)


def expects_to_know_all(self, function, args):
    validate_call(function, args)
    if (unmade := first_opaque(args)) is not None:
        return Opaque(unmade.function, (unmade,))
    return self.describe(CALLS[str(function)], function, args)


def calls_what_it_was_told(self, function, args):
    validate_call(function, args)
    if (unmade := first_opaque(args)) is not None:
        return Opaque(unmade.function, (unmade,))
    return function(*args)


ONE = Storage("0", torch.float32, 6)
REDUCE = Build(
    name="reduce",
    reference=Rebuilder.reduce,
    owner="MyRebuilder",
    cases=[
        (Global("collections", "OrderedDict"), ()),
        (Global("os", "makedirs"), ("surprise",)),
        (TENSOR, (ONE, 0, (2, 3), (3, 1))),
        (PARAMETER, (UNMADE, True)),
        (Global("os", "makedirs"), (UNMADE,)),
        (UNMADE, (5,)),
        ("os.makedirs", ("surprise",)),
        (Global("os", "makedirs"), ["surprise"]),
        (TENSOR, (ONE, -1, (2, 3), (3, 1))),
        (TENSOR, (ONE,)),
    ],
    observe=reduce_seen,
    show=lambda case: f"reduce({case[0]}, {in_words(case[1])})",
    wrong={
        "Torch's own calls are harmless: `CALLS` has a function of ours for each.": (
            reduce_as(calls=False)
        ),
        "A part that was not made is inside: then the whole can't be made either.": (
            reduce_as(hidden=False)
        ),
        "What is called must be a name, and its arguments a tuple: `validate_call`.": (
            reduce_as(validated=False)
        ),
        "One unknown name, and the whole file is refused: the weights are harmless.": (
            refuses_the_unknown
        ),
        "A file names what it likes: not every name is a key of `CALLS`.": expects_to_know_all,
        "You call what the file names. Luckily it is only a note of a name.": (
            calls_what_it_was_told
        ),
        "What is not in `CALLS` has no function of ours to describe it.": describes_all,
        "You run our function yourself, and nobody checks the arguments: ask `self.describe`.": (
            reduce_as(describe=lambda self, known, function, args: known(self, *args))
        ),
        "Our functions take the rebuilder before the arguments; `self.describe` gives it.": (
            reduce_as(describe=lambda self, known, function, args: known(*args))
        ),
        "You look into `CALLS` first. A call that we know may have a part that is missing, too.": (
            knows_before_it_looks
        ),
        "The note should say which part is missing: its function, and the part alone.": (
            reduce_as(missing=lambda function, args, part: Opaque(function, args))
        ),
        "A note of the whole call hides which part is missing.": (
            reduce_as(missing=lambda function, args, part: Opaque(function, (part,)))
        ),
        "`self.describe` wants our function from the table, not the name of theirs.": reduce_as(
            describe=lambda self, known, function, args: self.describe(
                str(function), function, args
            )
        ),
        "A note keeps the function as the file gave it; a text is no name that was asked for.": (
            reduce_as(noted=lambda function, args: Opaque(str(function), args))
        ),
    },
)

BUILDS = [
    STEP_UNGUARDED,
    PUSH_NUMBER,
    PUSH_TEXT,
    MARK,
    POP_TO_MARK,
    COLLECT_TUPLE,
    TAKE,
    STEP,
    NAME_GLOBAL,
    LOAD_REDUCE,
    REDUCE,
]
