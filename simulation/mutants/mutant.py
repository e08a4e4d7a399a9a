"""Switches off one protection of the product, to show that the simulator detects its absence.

A mutation is an edit of source text: one passage of a function is replaced, the function is recompiled, and its code
object replaces the old one, so that all references to the function run the mutant. The replacement calls `mutated()`
where the protection would have taken effect. `mutated()` counts and returns False, so that `if stale and mutated():` is
a check that never refuses, and the count is the number of cases in which it would have.

A missing function, a passage that does not occur exactly once (the code has changed), and a replacement without
`mutated()` raise `MutationVoid`.

Entry: `Mutation`, `check`, `apply`. The list is in `tidelog.simulation.mutants.mutations`.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
from dataclasses import dataclass
from types import CodeType, FunctionType

MARK = "mutated()"
COUNTER = "mutated"


class MutationVoid(Exception):
    """The mutation no longer matches the code."""


@dataclass(frozen=True, slots=True)
class Edit:
    """The replacement of one passage of one function."""

    where: str
    """`module:function` or `module:Class.method`."""
    line: str
    """The protecting passage in the source of the function, where it occurs exactly once."""
    instead: str


@dataclass(frozen=True, slots=True)
class Mutation:
    """A protection, and the findings that show its absence."""

    name: str
    rule: str
    """The rule of docs/rules.md that it enforces (a number), or the protocol."""
    what: str
    """The fault without the protection, in a few words."""
    edits: tuple[Edit, ...]
    found_by: tuple[str, ...]
    """Any of these findings shows it."""
    faults: tuple[str, ...] = ()
    """The faults under which it is looked for; empty: all of them."""
    transactions: bool = False
    """It is looked for in clusters with transactional clients, at the newest feature level."""
    table: bool = False
    """It is looked for in clusters with a compacted topic, at the newest feature level; with `transactions`, where that
    is written to in transactions."""


class Counter:
    """Counts how often a switched-off protection would have taken effect."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> bool:
        """Count and return False."""
        self.count += 1
        return False


def apply(mutation: Mutation) -> Counter:
    """Switch the protection off in this process, permanently; return the counter. Raises `MutationVoid`."""
    compiled = _compile(mutation)
    counter = Counter()
    for function, code in compiled:
        function.__globals__[COUNTER] = counter
        function.__code__ = code
    return counter


def check(mutation: Mutation) -> None:
    """Check that the mutation matches the code; change nothing. Raises `MutationVoid`."""
    _compile(mutation)


def _compile(mutation: Mutation) -> list[tuple[FunctionType, CodeType]]:
    if not any(MARK in edit.instead for edit in mutation.edits):
        raise MutationVoid(f"{mutation.name}: no edit says {MARK}: it would be unknown whether it was reached")
    by_function: dict[str, list[Edit]] = {}
    for edit in mutation.edits:
        by_function.setdefault(edit.where, []).append(edit)
    return [_mutant(mutation.name, where, edits) for where, edits in by_function.items()]


def _find(name: str, where: str) -> FunctionType:
    module_name, _, path = where.partition(":")
    try:
        found = importlib.import_module(module_name)
        for part in path.split("."):
            found = inspect.getattr_static(found, part)
    except (ImportError, AttributeError) as error:
        raise MutationVoid(f"{name}: there is no {where}: {error}") from error
    inner = getattr(found, "__func__", getattr(found, "fget", found))
    if not isinstance(inner, FunctionType):
        raise MutationVoid(f"{name}: {where} is no function")
    return inner


def _mutant(name: str, where: str, edits: list[Edit]) -> tuple[FunctionType, CodeType]:
    function = _find(name, where)
    if function.__globals__.get(COUNTER) is not None:
        raise MutationVoid(f"{name}: {where} is mutated already, or its module has a name `{COUNTER}`")
    source = inspect.getsource(function)
    for edit in edits:
        times = source.count(edit.line)
        if times != 1:
            raise MutationVoid(f"{name}: {where} has this passage {times} times, not once: {edit.line!r}")
        source = source.replace(edit.line, edit.instead)
    try:
        block = ast.parse("if True:\n" + source if source[0] == " " else source).body[0]
    except SyntaxError as error:
        raise MutationVoid(f"{name}: {where} does not parse with {edits[0].instead!r} in it: {error}") from error
    definition = block.body[0] if isinstance(block, ast.If) else block
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    definition.decorator_list = []
    ast.increment_lineno(definition, function.__code__.co_firstlineno - definition.lineno)
    tree = ast.Module([definition], [])
    flags = __future__.annotations.compiler_flag
    module = compile(tree, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    code = next(each for each in module.co_consts if isinstance(each, CodeType) and each.co_name == function.__name__)
    if code.co_freevars != function.__code__.co_freevars:
        raise MutationVoid(f"{name}: {where} closes over {function.__code__.co_freevars}")
    return function, code.replace(co_qualname=function.__code__.co_qualname)
