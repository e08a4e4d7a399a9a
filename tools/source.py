"""The files of a checkout: their paths, their syntax trees, and their import names.

The list comes from `git ls-files` (tracked files, and new ones that are not ignored) or, if that finds nothing, from a
walk. Neither follows symbolic links, so each file appears once.

A package here ("room" in names) is a top folder of the product. Its modules are imported by their path from the root,
unless the folder of the command line (`FACE`) has a symbolic link to it: then only by the path through the link.

Entry: `Repository.read`.
"""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FACE = "tidelog"
"""The package with the command line, the configuration and the supervisor."""
ROOMS = (FACE, "chaos", "simulation", "broker", "console", "controller", "stream", "storage", "batch", "runtime")
"""From the top down: a package may import those after it."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported name."""

    module: str
    """The module after `import` or `from`."""
    member: str | None
    """The name after `from … import`."""
    bound: str
    """The name that it binds in the module."""
    line: int
    type_only: bool
    """Whether it is under `if TYPE_CHECKING`."""

    @property
    def full(self) -> str:
        """Return the imported name with its module."""
        return self.module if self.member is None else f"{self.module}.{self.member}"

    @property
    def stands_for(self) -> str:
        """Return the name that `bound` refers to: `import a.b` binds `a`."""
        return self.bound if self.member is None and self.module.startswith(f"{self.bound}.") else self.full


@dataclass(frozen=True)
class Definition:
    """A class or function, and the class whose body contains it."""

    name: str
    """Qualified with the classes and functions that contain it."""
    node: ast.ClassDef | Function
    owner: ast.ClassDef | None


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: str
    """Path from the root, with slashes."""
    name: str
    """Import name."""
    text: str
    tree: ast.Module

    @property
    def top(self) -> str:
        """Return the top folder that contains it; for a module of the product, its package."""
        return self.path.partition("/")[0]

    @property
    def lines(self) -> int:
        """Return the number of all lines: code, comments, docstrings and empty ones."""
        return len(self.text.splitlines())

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Return all nodes of the tree."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Return all imports, including those inside functions."""
        return tuple(_imports(self.nodes))

    @cached_property
    def definitions(self) -> tuple[Definition, ...]:
        """Return all classes and functions, outer ones first."""
        return tuple(_definitions(self.tree))


@dataclass(frozen=True)
class Repository:
    """The parsed files of a checkout."""

    root: Path
    files: tuple[str, ...]
    sources: tuple[Source, ...]
    linked: frozenset[str]
    """Packages that are imported through a link in the folder of the command line."""

    @classmethod
    def read(cls, root: Path) -> Repository:
        """Read all files. Raises SystemExit if one is not Python."""
        files = tuple(sorted(_listed(root) or _walked(root)))
        linked = frozenset(room for room in ROOMS if (root / FACE / room).is_symlink())
        sources = tuple(_parsed(root, path, linked) for path in files if path.endswith(".py"))
        return cls(root, files, sources, linked)

    @property
    def product(self) -> list[Source]:
        """Return the modules of all packages."""
        return [source for source in self.sources if source.top in ROOMS and "/" in source.path]


def _listed(root: Path) -> set[str]:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        answer = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return set()
    paths = {os.fsdecode(path) for path in answer.stdout.split(b"\0") if path}
    return {path for path in paths if (root / path).is_file() and not (root / path).is_symlink()}


def _walked(root: Path) -> set[str]:
    found = set()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        paths = (Path(folder, name) for name in names)
        found |= {path.relative_to(root).as_posix() for path in paths if not path.is_symlink()}
    return found


def _parsed(root: Path, path: str, linked: frozenset[str]) -> Source:
    text = (root / path).read_text(encoding="utf-8")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise SystemExit(f"{path}:{error.lineno}: {error.msg}") from error
    return Source(path, _import_name(path, linked), text, tree)


def _import_name(path: str, linked: frozenset[str]) -> str:
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join([FACE, *parts] if parts[0] in linked else parts)


def _imports(nodes: Iterable[ast.AST]) -> Iterator[Import]:
    blocks = [node for node in nodes if isinstance(node, ast.If) and _asks_for_types(node.test)]
    hidden = {id(node) for block in blocks for statement in block.body for node in ast.walk(statement)}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                yield Import(alias.name, None, bound, node.lineno, id(node) in hidden)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield Import(node.module, alias.name, alias.asname or alias.name, node.lineno, id(node) in hidden)


def _asks_for_types(test: ast.expr) -> bool:
    return getattr(test, "id", getattr(test, "attr", None)) == "TYPE_CHECKING"


def _definitions(node: ast.AST, prefix: str = "", owner: ast.ClassDef | None = None) -> Iterator[Definition]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = prefix + child.name
            yield Definition(name, child, owner)
            yield from _definitions(child, f"{name}.", child if isinstance(child, ast.ClassDef) else None)
        elif not isinstance(child, ast.expr):
            yield from _definitions(child, prefix, owner)


def type_expressions(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """Iterate over the annotations of all parameters, results and variables."""
    for node in nodes:
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, Function) and node.returns is not None:
            yield node.returns
