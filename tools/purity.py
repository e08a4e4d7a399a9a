"""The sans-I/O share: the share of lines of the server packages in modules without I/O.

A module does I/O if its text contains any of these:

- `async def`;
- an import of a module that waits, schedules, or uses the operating system or a service (`_IO_MODULES`), even if only a
  constant or an exception of it is used. `pathlib.Path` is one of them, because paths lead to files;
- a use of `os`, except for pure functions (`_PURE_OS`);
- a use of `random`, except for the type `random.Random` and `random.Random(seed)`; `uuid.uuid1` and `uuid.uuid4`;
- a use of `now`, `utcnow` or `today` of `datetime`'s classes;
- a call of the built-in `open`, `input` or `print`, of `io.open`, or of a method that only files and folders have
  (`_FILE_METHODS`).

Imports under `if TYPE_CHECKING`, annotations and log lines do not count, nor does I/O of imported modules. A second
share is of the modules that do no I/O and import, directly or indirectly, only such modules of the product; they run
without any code that does I/O. Lines are all lines of a file.

Entry: `sans_io`, `io_reasons`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from tools.arrows import find_arrows
from tools.report import Figure, Item
from tools.source import Repository, Source, type_expressions

SERVER_ROOMS = ("storage", "controller", "broker", "stream", "batch")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IO_MODULES = _words("""
    asyncio concurrent.futures ctypes fcntl glob http.client http.server mmap multiprocessing pathlib.Path queue
    resource sched secrets select selectors shutil signal socket socketserver sqlite3 ssl subprocess tempfile threading
    time urllib.request aiobotocore aiohttp boto3 confluent_kafka obstore pysyncobj uvloop
""")
_PURE_OS = _words("""
    os.PathLike os.fspath os.fsencode os.fsdecode os.strerror os.sep os.linesep os.path.join os.path.basename
    os.path.dirname os.path.split os.path.splitext os.path.normpath os.path.commonpath os.path.isabs
""")
_IO_NAMES = _words("""
    datetime.datetime.now datetime.datetime.utcnow datetime.datetime.today datetime.date.today
    io.open pathlib.Path uuid.uuid1 uuid.uuid4
""")
_IO_BUILTINS = _words("open input print")
_FILE_METHODS = _words("read_text read_bytes write_text write_bytes unlink mkdir rmdir iterdir")


def sans_io(repository: Repository) -> Figure:
    """Compute the share of each server package and of all, in per cent, and list the modules that do I/O."""
    reasons = {source.name: found for source in repository.product if (found := io_reasons(source))}
    server = [source for source in repository.product if source.top in SERVER_ROOMS]
    pure, lines = _shares(server, set(reasons))
    closed, _ = _shares(server, _importers(repository, set(reasons)))
    items = [
        Item(source.path, ", ".join(reasons[source.name]), source.lines) for source in server if source.name in reasons
    ]
    numbers: dict[str, float] = {f"{room}, %": share for room, share in pure.items()}
    numbers |= {f"{room}, with all that they import, %": share for room, share in closed.items()}
    numbers |= {"lines": lines, "modules that do I/O": len(items), "modules": len(server)}
    items.sort(key=lambda item: (-(item.value or 0), item.where))
    return Figure("Sans-I/O share of the server packages' lines; below, the modules that do I/O", numbers, items)


def _shares(sources: list[Source], io: set[str]) -> tuple[dict[str, float], int]:
    """Return the per cent of lines outside `io`, of each package and of all, and the number of lines."""
    shares = {}
    for room in (*SERVER_ROOMS, "all"):
        inside = [source for source in sources if room in (source.top, "all")]
        if lines := sum(source.lines for source in inside):
            shares[room] = round(100 * sum(source.lines for source in inside if source.name not in io) / lines, 1)
    return shares, sum(source.lines for source in sources)


def _importers(repository: Repository, io: set[str]) -> set[str]:
    """Return `io` and all modules that import one of them, directly or indirectly."""
    importers: dict[str, list[str]] = {}
    for arrow in find_arrows(repository.product):
        if not arrow.type_only:
            importers.setdefault(arrow.target.name, []).append(arrow.source.name)
    found, stack = set(io), list(io)
    while stack:
        new = set(importers.get(stack.pop(), [])) - found
        found |= new
        stack += new
    return found


def io_reasons(source: Source) -> list[str]:
    """Return why this module does I/O; empty if it does none."""
    found = {*_imported(source), *_used(source)}
    if any(isinstance(node, ast.AsyncFunctionDef) for node in source.nodes):
        found.add("async def")
    return sorted(found)


def _imported(source: Source) -> Iterator[str]:
    for each in source.imports:
        if not each.type_only:
            parts = each.full.split(".")
            names = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
            yield from (name for name in names if name in _IO_MODULES)


def _used(source: Source) -> Iterator[str]:
    known = {each.bound: each.stands_for for each in source.imports}
    hidden = {id(node) for annotation in type_expressions(source.nodes) for node in ast.walk(annotation)}
    calls = {id(node.func): node for node in source.nodes if isinstance(node, ast.Call)}
    for node in source.nodes:
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in hidden:
            yield from _reasons(node, calls.get(id(node)), known)


def _reasons(node: ast.Name | ast.Attribute, call: ast.Call | None, known: Mapping[str, str]) -> Iterator[str]:
    name = _full_name(node, known)
    if name is not None:
        unseeded = name == "random.Random" and call is not None and not call.args and not call.keywords
        if unseeded or _is_io(name):
            yield "os" if name.startswith("os.") else name
    elif call is not None:
        if isinstance(node, ast.Attribute) and node.attr in _FILE_METHODS:
            yield f".{node.attr}()"
        elif isinstance(node, ast.Name) and node.id in _IO_BUILTINS:
            yield f"{node.id}()"


def _full_name(node: ast.expr, known: Mapping[str, str]) -> str | None:
    """Return a name such as `os.path.join`, resolving aliases; None if the first part was not imported."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return None
    return ".".join([known[node.id], *reversed(parts)])


def _is_io(name: str) -> bool:
    if name.startswith("os."):
        return name != "os.path" and not any(f"{name}.".startswith(f"{pure}.") for pure in _PURE_OS)
    if name.startswith("random."):
        return not f"{name}.".startswith("random.Random.")
    return name in _IO_NAMES
