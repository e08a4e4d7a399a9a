"""Sizes and shapes: folders, functions, parameters, classes, and private members used by tests.

Entry: one function for each figure; the rules are in `tools.figures`.
"""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from tools.report import Figure, Item
from tools.source import Definition, Function, Repository, Source

MAX_LINES = 70
MAX_PARAMETERS = 8
MANY_OPTIONAL = 5
LARGE_CONSTRUCTOR = 6
"""Number of parameters from which a constructor is listed."""

_OURS = ("tidelog", "tests", "bench", "localstack", "tools")
_BY_NAME = frozenset(["setattr", "getattr", "hasattr", "delattr", "object", "patch", "attrgetter"])
"""Functions that take the name of a member as a text; `object` is `patch.object`."""
_NAMEDTUPLE_METHODS = frozenset(["_replace", "_asdict", "_fields", "_make"])


def folders(repository: Repository) -> Figure:
    """Modules directly in each folder, the largest first."""
    counts = Counter(PurePosixPath(source.path).parent.as_posix() for source in repository.product)
    return Figure("Modules directly in each folder", dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))))


def long_functions(repository: Repository) -> Figure:
    """Functions of more lines than `MAX_LINES`, and the median."""
    lengths = [(source, each, _length(each.node)) for source, each in _functions(repository.product)]
    items = [_item(source, each, length) for source, each, length in lengths if length > MAX_LINES]
    numbers = {
        "functions": len(lengths),
        f"over {MAX_LINES} lines": len(items),
        "median length": statistics.median([length for *_, length in lengths] or [0]),
        "longest": max((length for *_, length in lengths), default=0),
    }
    return Figure(f"Functions over {MAX_LINES} lines", numbers, _largest_first(items))


def many_parameters(repository: Repository) -> Figure:
    """Functions of more parameters than `MAX_PARAMETERS`."""
    counts = ((source, each, _parameters(each)) for source, each in _functions(repository.product))
    items = [_item(source, each, count) for source, each, count in counts if count > MAX_PARAMETERS]
    title = f"Functions with more than {MAX_PARAMETERS} parameters"
    return Figure(title, {f"more than {MAX_PARAMETERS} parameters": len(items)}, _largest_first(items))


def constructors(repository: Repository) -> Figure:
    """`__init__` methods by parameters."""
    counts = [
        (source, each, _parameters(each))
        for source, each in _functions(repository.product)
        if each.owner is not None and each.node.name == "__init__"
    ]
    items = [_item(source, each, count) for source, each, count in counts if count >= LARGE_CONSTRUCTOR]
    numbers = {
        "constructors": len(counts),
        f"of {LARGE_CONSTRUCTOR} parameters or more": len(items),
        "median parameters": statistics.median([count for *_, count in counts] or [0]),
        "most parameters": max((count for *_, count in counts), default=0),
    }
    return Figure("Constructors by parameters", numbers, _largest_first(items))


def same_names(repository: Repository) -> Figure:
    """Names of two or more classes."""
    found: dict[str, list[str]] = {}
    for source, each in _classes(repository.product):
        found.setdefault(each.node.name, []).append(f"{source.path}:{each.node.lineno}")
    twice = {name: places for name, places in sorted(found.items()) if len(places) > 1}
    items = [Item(name, ", ".join(places), len(places)) for name, places in twice.items()]
    numbers = {
        "names defined more than once": len(twice),
        "of these public": sum(not name.startswith("_") for name in twice),
    }
    return Figure("Class names defined more than once", numbers, _largest_first(items))


def private_touches(repository: Repository) -> Figure:
    """Private members used by the tests."""
    places: dict[str, list[str]] = {}
    for source in repository.sources:
        if source.top == "tests":
            names = list(_private_names(source))
            if names:
                places[source.path] = names
    touches = [name for names in places.values() for name in names]
    items = [Item(path, " ".join(sorted(set(names))), len(names)) for path, names in places.items()]
    numbers = {"touches": len(touches), "distinct names": len(set(touches)), "files that touch": len(items)}
    return Figure("Private members touched by tests", numbers, _largest_first(items))


def handler_any(repository: Repository) -> Figure:
    """`Any` in the signatures of the Kafka handlers."""
    handlers = [each for each in repository.product if each.path.startswith("broker/") and "/handlers/" in each.path]
    signatures = [(source, each, _anys(each.node)) for source, each in _functions(handlers)]
    per_file: Counter[str] = Counter()
    for source, _, count in signatures:
        per_file[source.path] += count
    numbers = {
        "functions": len(signatures),
        "functions with Any": sum(count > 0 for *_, count in signatures),
        "Any in signatures": per_file.total(),
    }
    return Figure("Any in the signatures of the Kafka handlers", numbers, _counted(per_file))


def optional_members(repository: Repository) -> Figure:
    """Classes with at least `MANY_OPTIONAL` members that may be None."""
    items = []
    members = 0
    for source, each in _classes(repository.product):
        names = sorted(set(_optional(each.node)))
        members += len(names)
        if len(names) >= MANY_OPTIONAL:
            items.append(Item(f"{source.path}:{each.node.lineno}", f"{each.name}: {' '.join(names)}", len(names)))
    numbers = {f"classes with {MANY_OPTIONAL} or more": len(items), "members that may be None, in all": members}
    return Figure("Classes with many members that may be None", numbers, _largest_first(items))


def _functions(sources: Iterable[Source]) -> Iterator[tuple[Source, Definition]]:
    for source in sources:
        yield from ((source, each) for each in source.definitions if isinstance(each.node, Function))


def _classes(sources: Iterable[Source]) -> Iterator[tuple[Source, Definition]]:
    for source in sources:
        yield from ((source, each) for each in source.definitions if isinstance(each.node, ast.ClassDef))


def _item(source: Source, each: Definition, value: float) -> Item:
    return Item(f"{source.path}:{each.node.lineno}", each.name, value)


def _counted(counts: Counter[str]) -> list[Item]:
    return [Item(path, "", count) for path, count in counts.most_common() if count]


def _largest_first(items: list[Item]) -> list[Item]:
    return sorted(items, key=lambda item: (-(item.value or 0), item.where))


def _length(node: ast.ClassDef | Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _parameters(each: Definition) -> int:
    assert isinstance(each.node, Function)
    arguments = each.node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in each.node.decorator_list)
    bound = bool(plain) and each.owner is not None and not static
    variable = (arguments.vararg is not None) + (arguments.kwarg is not None)
    return len(plain) - bound + len(arguments.kwonlyargs) + variable


def _private_names(source: Source) -> Iterator[str]:
    own = {id(node) for node in source.nodes if isinstance(node, ast.ClassDef) for node in ast.walk(node)}
    foreign = {each.bound for each in source.imports if each.member is None and each.full.split(".")[0] not in _OURS}
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            is_foreign = isinstance(node.value, ast.Name) and node.value.id in foreign
            if _is_private(node.attr) and not is_foreign and not _is_own(node.value, in_class=id(node) in own):
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if _is_private(alias.name))
        elif isinstance(node, ast.Call) and _called(node) in _BY_NAME:
            texts = (each.value for each in node.args[:2] if isinstance(each, ast.Constant))
            names = (each.rpartition(".")[2] for each in texts if isinstance(each, str))
            yield from (name for name in names if _is_private(name))


def _is_private(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and name != "_" and not dunder and name not in _NAMEDTUPLE_METHODS


def _is_own(value: ast.expr, *, in_class: bool) -> bool:
    """`self`, `cls` and `super()` of a class of the test. Outside a class they are an argument like any other."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls") and in_class


def _called(node: ast.Call) -> str:
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def _anys(node: ast.ClassDef | Function) -> int:
    assert isinstance(node, Function)
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    signature = [node.returns, *(argument.annotation for argument in every if argument is not None)]
    parts = (part for annotation in signature if annotation is not None for part in ast.walk(annotation))
    return sum(getattr(part, "id", getattr(part, "attr", None)) == "Any" for part in parts)


def _optional(node: ast.ClassDef | Function) -> Iterator[str]:
    """Iterate over annotated members, in the class's body and as `self.x: … = …` in its methods."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if _may_be_none(statement.annotation):
                yield statement.target.id
        elif isinstance(statement, Function):
            for part in ast.walk(statement):
                if isinstance(part, ast.AnnAssign) and _may_be_none(part.annotation):
                    yield from _of_self(part.target)


def _of_self(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
        yield target.attr


def _may_be_none(annotation: ast.expr) -> bool:
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return _may_be_none(annotation.left) or _may_be_none(annotation.right)
    if isinstance(annotation, ast.Subscript):
        outer = annotation.value
        name = getattr(outer, "id", getattr(outer, "attr", None))
        return name == "Optional" or (name in ("ClassVar", "Final", "Annotated") and _may_be_none(annotation.slice))
    return isinstance(annotation, ast.Constant) and annotation.value is None
