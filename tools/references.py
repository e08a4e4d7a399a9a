"""References to things that do not exist: files, link targets, anchors, modules and their attributes.

All pages except the changelog, and the docstrings and comments of all modules are checked.

- A file: a name that ends in `.md` or `.py`. It exists if it is a path from the root, a path from the folder of the
  text, or the end of the path of any file.
- A link of a page without a scheme: its target is a file or folder; an anchor into a page is one of its headings.
- A module: a dotted name in backticks, alone, with a call's parentheses, or after `-m`, whose first part is a top
  folder with modules. Its longest prefix that is a module must define the next name; a class, the one after (or a class
  that it inherits from, if all of them are known). If a package is imported through a link in the folder of the command
  line, its bare name is not a module. Keys of the configuration are not modules: names that are whole strings somewhere
  in the code, and a section (a member of the class `Config`) with a member of that section's class.

Entry: `references`.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from urllib.parse import unquote

from tools.passages import Passage, anchors, links, passages, spans, without_links
from tools.report import Figure, Item
from tools.source import FACE, Function, Repository, Source

_URL = re.compile(r"\w+://\S+")
_FILE = re.compile(r"(?<![\w/.@*{}<>$-])(?:\.{1,2}/)*\w[\w./-]*\.(?:md|py)\b(?![\w/*-]|\.\w)")
_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+"
_DOTTED = re.compile(rf"({_NAME})(?:\(.*\))?", re.DOTALL)
_RUN = re.compile(rf"(?:^|\s)-m\s+({_NAME})(?=\s|$)")
_SUFFIX = re.compile("md|py|toml|json|jsonl|ya?ml|txt|log|sh|cfg|ini|html|csv|properties")


def references(repository: Repository) -> Figure:
    """List all dangling references, by kind."""
    files, modules = _Files(repository), _Modules(repository)
    found: dict[str, list[Item]] = {}
    for passage in passages(repository):
        for kind, position, name in [*files.dangling(passage), *modules.dangling(passage)]:
            found.setdefault(kind, []).append(Item(passage.place(position), f"{kind}: {name}"))
    kinds = ("page", "link", "anchor", "module", "source file")
    numbers = {f"{kind}s": len(found.get(kind, [])) for kind in kinds}
    numbers["all"] = sum(numbers.values())
    return Figure("Dangling references", numbers, [item for kind in kinds for item in found.get(kind, [])])


class _Files:
    """The files and folders of the repository."""

    def __init__(self, repository: Repository) -> None:
        self._root = repository.root
        through = {f"{FACE}/{path}" for path in repository.files if path.partition("/")[0] in repository.linked}
        self._files = {*repository.files, *through}
        self._ends = {path[at:] for path in self._files for at in _starts(path)}
        self._folders = {path[: at - 1] for path in self._files for at in _starts(path) if at} | {"."}
        self._anchors: dict[str, set[str]] = {}

    def dangling(self, passage: Passage) -> Iterator[tuple[str, int, str]]:
        """Iterate over kind, position and text of each reference to a file that does not exist."""
        text = _URL.sub(lambda match: " " * len(match[0]), passage.text)
        if passage.is_page:
            text = without_links(text)
            yield from self._dangling_links(passage)
        for match in _FILE.finditer(text):
            if not self._is_named(match[0], passage.path):
                yield "page" if match[0].endswith(".md") else "source file", match.start(), match[0]

    def _is_named(self, name: str, path: str) -> bool:
        near = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        return near in self._files or posixpath.normpath(name) in self._ends

    def _dangling_links(self, passage: Passage) -> Iterator[tuple[str, int, str]]:
        for position, link in links(passage.text):
            target, _, anchor = link.partition("#")
            if re.match(r"\w[\w+.-]*:", link):
                continue
            folder = "" if target.startswith("/") else posixpath.dirname(passage.path)
            path = posixpath.normpath(posixpath.join(folder, unquote(target).lstrip("/"))) if target else passage.path
            if path not in self._files and path not in self._folders:
                yield "link", position, link
            elif anchor and path.endswith(".md") and unquote(anchor) not in self._anchors_of(path):
                yield "anchor", position, link

    def _anchors_of(self, path: str) -> set[str]:
        if path not in self._anchors:
            self._anchors[path] = anchors(self._root / path)
        return self._anchors[path]


class _Modules:
    """The modules, their names, and the keys of the configuration."""

    def __init__(self, repository: Repository) -> None:
        sources = repository.sources
        self._modules = {source.name: _Held(source.tree) for source in sources}
        self._packages = {name[:at] for name in self._modules for at, mark in enumerate(name) if mark == "."}
        self._tops = {source.top for source in sources if "/" in source.path}
        self._classes: dict[str, list[ast.ClassDef]] = {}
        self._keys: set[str] = set()
        self._sections: dict[str, str] = {}
        for source in sources:
            self._note(source)

    def _note(self, source: Source) -> None:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                self._classes.setdefault(node.name, []).append(node)
                if node.name == "Config":
                    self._sections |= dict(_sections(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._keys.add(node.value)

    def dangling(self, passage: Passage) -> Iterator[tuple[str, int, str]]:
        """Iterate over kind, position and text of each dotted name that does not exist."""
        for position, span in spans(passage.text):
            whole = _DOTTED.fullmatch(span)
            for name in [whole[1]] if whole else _RUN.findall(span):
                if self._is_reference(name) and not self._is_there(name.split(".")):
                    yield "module", position, name

    def _is_reference(self, name: str) -> bool:
        first, *rest = name.split(".")
        if first not in self._tops or _SUFFIX.fullmatch(rest[-1]) or name in self._keys:
            return False
        section = self._classes.get(self._sections.get(first, ""), [])
        return not any(rest[0] in _held_by(node) for node in section)

    def _is_there(self, parts: list[str]) -> bool:
        for end in range(len(parts), 0, -1):
            name, rest = ".".join(parts[:end]), parts[end:]
            if name in self._modules:
                return not rest or self._holds(self._modules[name], rest)
            if name in self._packages:
                return not rest
        return False

    def _holds(self, module: _Held, rest: list[str]) -> bool:
        if rest[0] not in module.names:
            return False
        node = module.classes.get(rest[0])
        return len(rest) == 1 or node is None or self._has_member(node, rest[1])

    def _has_member(self, node: ast.ClassDef, name: str) -> bool:
        if name in _held_by(node):
            return True
        bases = [getattr(base, "id", getattr(base, "attr", "")) for base in node.bases]
        known = [self._classes.get(base, []) for base in bases if base not in ("Protocol", "ABC", "object", "")]
        return any(not found or any(self._has_member(base, name) for base in found) for found in known)


class _Held:
    """The names that a module binds at its top level, and its classes."""

    def __init__(self, tree: ast.Module) -> None:
        self.names = set(_bound(tree))
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _bound(node: ast.AST) -> Iterator[str]:
    """Iterate over names bound in a body, also under `if` and `try`, but not inside its functions and classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | Function):
            yield child.name
        elif isinstance(child, ast.alias):
            yield child.asname or child.name.partition(".")[0]
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        else:
            yield from _bound(child)


def _sections(config: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Iterate over the members of a class and the names of their classes."""
    for node in config.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation)


def _held_by(node: ast.ClassDef) -> set[str]:
    """Return the names bound in a class's body, and by its methods on `self`."""
    found = set(_bound(node))
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and isinstance(part.value, ast.Name):
            found.add(part.attr)
    return found


def _starts(path: str) -> list[int]:
    """Return the start positions of the parts of a path."""
    return [0, *(at + 1 for at, character in enumerate(path) if character == "/")]
