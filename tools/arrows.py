"""Imports between the modules of the product: import cycles, and imports of a higher package.

A cycle ("circle" in the figures) is a strongly connected component of two or more modules. Cycles are counted without
and with the imports under `if TYPE_CHECKING`; imports inside functions count like others. The implicit import of the
packages that contain a module does not count.

Entry: `arrows`; `find_arrows`, `circles`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tools.report import Figure, Item
from tools.source import ROOMS, Repository, Source


class Arrow(NamedTuple):
    """An import of one module by another."""

    source: Source
    target: Source
    line: int
    type_only: bool


def arrows(repository: Repository) -> Figure:
    """Import cycles between modules, and upward imports."""
    all_arrows = list(find_arrows(repository.product))
    run = circles(_graph([arrow for arrow in all_arrows if not arrow.type_only]))
    types = circles(_graph(all_arrows))
    upward = [arrow for arrow in all_arrows if _height(arrow.source) < _height(arrow.target)]
    numbers = {
        "circles": len(run),
        "modules in circles": sum(map(len, run)),
        "modules in the largest circle": max(map(len, run), default=0),
        "circles, with type imports": len(types),
        "modules in circles, with type imports": sum(map(len, types)),
        "modules in the largest circle, with type imports": max(map(len, types), default=0),
        "upward imports": sum(not arrow.type_only for arrow in upward),
        "upward type imports": sum(arrow.type_only for arrow in upward),
    }
    items = [Item(circle[0], "circle: " + " ".join(circle), len(circle)) for circle in run]
    items += [Item(circle[0], "circle by types: " + " ".join(circle), len(circle)) for circle in types]
    for arrow in sorted(upward, key=lambda arrow: (arrow.type_only, arrow.source.path, arrow.line)):
        kind = "upward by types" if arrow.type_only else "upward"
        items.append(Item(f"{arrow.source.path}:{arrow.line}", f"{kind}: {arrow.target.name}"))
    return Figure("Import circles and upward arrows", numbers, items)


def find_arrows(product: list[Source]) -> Iterator[Arrow]:
    """Iterate over all imports of one module of the product by another, each pair once."""
    modules = {source.name: source for source in product}
    for source in product:
        seen = set()
        for each in source.imports:
            target = modules.get(f"{each.module}.{each.member}") or modules.get(each.module)
            if target is None or target is source or (target.name, each.type_only) in seen:
                continue
            seen.add((target.name, each.type_only))
            yield Arrow(source, target, each.line, each.type_only)


def _height(source: Source) -> int:
    return -ROOMS.index(source.top)


def _graph(all_arrows: list[Arrow]) -> dict[str, list[str]]:
    graph: dict[str, list[str]] = {}
    for arrow in all_arrows:
        graph.setdefault(arrow.source.name, []).append(arrow.target.name)
        graph.setdefault(arrow.target.name, [])
    return graph


def circles(graph: Mapping[str, list[str]]) -> list[list[str]]:
    """Return the strongly connected components of two or more nodes, the largest first."""
    backward: dict[str, list[str]] = {node: [] for node in graph}
    for node, targets in graph.items():
        for target in targets:
            backward[target].append(node)
    left = set(graph)
    found = []
    for node in reversed(_finished(graph)):
        if node in left:
            component = _reached(node, backward, left)
            left -= component
            if len(component) > 1:
                found.append(sorted(component))
    return sorted(found, key=lambda circle: (-len(circle), circle))


def _finished(graph: Mapping[str, list[str]]) -> list[str]:
    """Return all nodes in post-order: each node after its successors, except in cycles."""
    done: list[str] = []
    seen: set[str] = set()
    for start in graph:
        stack = [] if start in seen else [(start, iter(graph[start]))]
        seen.add(start)
        while stack:
            node, targets = stack[-1]
            target = next((target for target in targets if target not in seen), None)
            if target is None:
                done.append(node)
                stack.pop()
            else:
                seen.add(target)
                stack.append((target, iter(graph[target])))
    return done


def _reached(start: str, graph: Mapping[str, list[str]], within: set[str]) -> set[str]:
    reached = {start}
    stack = [start]
    while stack:
        new = [node for node in graph[stack.pop()] if node in within and node not in reached]
        reached.update(new)
        stack += new
    return reached
