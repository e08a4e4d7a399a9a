"""Reports of the parts of a broker: figures for metrics, problems and sections for `/status`.

A part is registered where it is constructed, under one name for each kind of report. Registering a name twice raises an
error. `Metrics` and `AdminHttp` read only this registry. Reports keep the order of registration.

The registered functions are called at each scrape and each `/status` request, on the event loop: they must be fast and
must not block.

Entry: `PartRegistry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from prometheus_client.core import Metric

T = TypeVar("T")


class PartRegistry:
    """The reports of the parts of one broker."""

    def __init__(self) -> None:
        self._figures: dict[str, Callable[[], Iterable[Metric]]] = {}
        self._problems: dict[str, Callable[[], Iterable[str]]] = {}
        self._sections: dict[str, Callable[[], Mapping[str, Any]]] = {}

    def add_figures(self, name: str, read: Callable[[], T], render: Callable[[T], Iterable[Metric]]) -> None:
        """Export `render(read())` at each scrape. Raises `ValueError` if the name is taken."""
        _add(self._figures, name, lambda: render(read()))

    def add_problems(self, name: str, read: Callable[[], Iterable[str]]) -> None:
        """Add problems for the operator, one sentence each. Raises `ValueError` if the name is taken."""
        _add(self._problems, name, read)

    def add_section(self, name: str, read: Callable[[], Mapping[str, Any]]) -> None:
        """Add the section of `/status` with this key. Raises `ValueError` if the name is taken."""
        _add(self._sections, name, read)

    def figures(self) -> Iterator[Metric]:
        """Yield the metric families of all parts."""
        for read in self._figures.values():
            yield from read()

    def problems(self) -> list[str]:
        """Return the problems of all parts."""
        return [problem for read in self._problems.values() for problem in read()]

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return all sections by name."""
        return {name: dict(read()) for name, read in self._sections.items()}

    def section(self, name: str) -> dict[str, Any]:
        """Return one section. Raises `KeyError` if no part has registered it."""
        return dict(self._sections[name]())


def _add(reports: dict[str, T], name: str, report: T) -> None:
    if name in reports:
        raise ValueError(f"{name!r} is registered already")
    reports[name] = report
