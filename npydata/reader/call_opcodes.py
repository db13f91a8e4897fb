"""Opcodes that name something, and those with which pickle would call it: nothing is called.

Built in ``notebooks/05_pickle_program``.
"""

from typing import Any

from npydata.reader.pickle_machine import Handler, PickleMachine
from npydata.reader.stored import Global, Opaque


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
    """Where pickle would make an object of a class without calling its ``__init__``."""
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
    """Where pickle would set an object's state: note it on the object."""
    state = machine.stack.pop()
    target = machine.stack[-1]
    if isinstance(target, Opaque):
        target.state = state


def as_function(function: Any) -> Any:
    """Return what may stand in the place of a function: a name, or what a call would return."""
    if not isinstance(function, Global | Opaque):
        raise ValueError(f"calls a {type(function).__name__}, expected a name")
    return function
