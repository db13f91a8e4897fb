"""Opcodes that name something, and those with which pickle would call it: nothing is called.

Built in ``notebooks/05_pickle_program``.
"""

from collections import Counter, OrderedDict
from typing import Any

from tutorial.kept.reader.pickle_machine import Handler, PickleMachine
from tutorial.kept.reader.stored import Global, Opaque, StoredTensor
from tutorial.kept.reader.torch_rebuild import CALLED_ONLY, TENSOR_CLASSES


def name_global(machine: PickleMachine) -> None:
    """Push what a name stands for: the line is read, nothing is imported."""
    module, name = machine.line().decode(), machine.line().decode()
    machine.stack.append(machine.find_class(module, name))


def name_stack_global(machine: PickleMachine) -> None:
    """Push what a name stands for that lies on the stack."""
    name, module = machine.stack.pop(), machine.stack.pop()
    if not (isinstance(name, str) and isinstance(module, str)):
        raise ValueError("a name that is not text")
    machine.stack.append(machine.find_class(module, name))


def name_extension(format: str) -> Handler:
    """Return the handler of a name given as a number, whose meaning only its writer knows."""

    def handler(machine: PickleMachine) -> None:
        number = machine.number(format)
        machine.stack.append(machine.find_class("copyreg", f"extension {number}"))

    return handler


def load_persistent_id(machine: PickleMachine) -> None:
    """Replace a persistent id by what it stands for; torch's stand for storages."""
    machine.stack.append(machine.persistent_load(machine.stack.pop()))


def load_text_persistent_id(machine: PickleMachine) -> None:
    """Push what a persistent id written as text stands for."""
    machine.stack.append(machine.persistent_load(machine.line().decode()))


def load_reduce(machine: PickleMachine) -> None:
    """Where pickle would call a function with the arguments on top of it: hand both over."""
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.reduce(function, args))


def new_object(machine: PickleMachine) -> None:
    """Where pickle would make an object of a class without calling its ``__init__``.

    What is not called does not look at its arguments: a set of these is empty, a function of torch
    is an error.
    """
    function, args = machine.stack[-2:]
    if isinstance(function, Global) and str(function) in CALLED_ONLY and args != ():
        raise ValueError(f"makes a {function} of arguments, which only a call would look at")
    load_reduce(machine)


def new_object_with_keywords(machine: PickleMachine) -> None:
    """Where pickle would make an object with keyword arguments."""
    keywords, args, function = (machine.stack.pop() for _ in range(3))
    machine.stack.append(Opaque(as_function(function), (args, keywords)))


def make_instance(machine: PickleMachine) -> None:
    """Where pickle would call the class it names next with what was collected."""
    module, name = machine.line().decode(), machine.line().decode()
    args = tuple(machine.pop_to_mark())
    machine.stack.append(machine.reduce(machine.find_class(module, name), args))


def make_object(machine: PickleMachine) -> None:
    """Where pickle would call the class that was collected first with the rest."""
    function, *args = machine.pop_to_mark()
    machine.stack.append(machine.reduce(function, tuple(args)))


def build(machine: PickleMachine) -> None:
    """Where pickle would set an object's state: note it on the object.

    An ``OrderedDict`` or ``Counter`` has attributes beside its items, and they are passed over. The
    state of a tensor would put another in its place, but for what torch wrote before 0.4.
    """
    state = machine.stack.pop()
    target = machine.stack[-1]
    if isinstance(target, Opaque) and target.cause not in TENSOR_CLASSES:
        target.set_state(state)
    elif isinstance(target, OrderedDict | Counter):
        if not isinstance(state, dict):
            raise ValueError(f"sets a {type(state).__name__} on a dictionary, expected attributes")
    elif isinstance(target, StoredTensor) and target.is_parameter and is_old_state(state):
        target.requires_grad = state[0]
    else:
        what = target.cause if isinstance(target, Opaque) else type(target).__name__
        raise ValueError(f"sets the state of a {what}")


def is_old_state(state: Any) -> bool:
    """Whether a state is that of a parameter of old: requires_grad, volatile, and its hooks."""
    return (
        isinstance(state, tuple)
        and len(state) == 3
        and isinstance(state[0], bool)
        and isinstance(state[2], dict | None)
    )


def as_function(function: Any) -> Any:
    """Return what may stand in the place of a function: a name, or what a call would return."""
    if not isinstance(function, Global | Opaque):
        raise ValueError(f"calls a {type(function).__name__}, expected a name")
    return function
