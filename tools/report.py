"""Figures and their output: as a table for people and as JSON for scripts.

Entry: `Figure`, `table`, `as_json`, `read_numbers`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

Numbers = Mapping[str, float]

SHOWN = 60
"""Longest list in the table; JSON has all of it."""


@dataclass(frozen=True)
class Item:
    """One finding."""

    where: str
    """`path` or `path:line`."""
    what: str
    value: float | None = None
    """The measured value, if there is one."""


@dataclass(frozen=True)
class Figure:
    """One figure: numbers that can be compared, and the findings that they count."""

    title: str
    numbers: Numbers
    items: list[Item] = field(default_factory=list)


def as_json(figures: Mapping[str, Figure]) -> str:
    """Return an object with `title`, `numbers` and `items` of each figure under its key."""
    return json.dumps({key: asdict(figure) for key, figure in figures.items()}, indent=1, ensure_ascii=False)


def read_numbers(file: Path) -> dict[str, Numbers]:
    """Read the numbers of each figure from the output of `as_json`."""
    return {key: figure["numbers"] for key, figure in json.loads(file.read_text(encoding="utf-8")).items()}


def table(figures: Mapping[str, Figure], before: Mapping[str, Numbers] | None = None) -> str:
    """Return the table. With the numbers of `before`: before → after."""
    lines: list[str] = []
    for key, figure in figures.items():
        old = None if before is None else before.get(key, {})
        lines += ["", f"{figure.title} ({key})", "─" * 100, *_numbers(figure.numbers, old)]
        lines += [f"    {_line(item)}" for item in figure.items[:SHOWN]]
        if len(figure.items) > SHOWN:
            lines.append(f"    … and {len(figure.items) - SHOWN} more (--format json)")
    return "\n".join(lines[1:])


def _numbers(new: Numbers, old: Numbers | None) -> Iterator[str]:
    names = list(new) if old is None else list(dict.fromkeys([*new, *old]))
    for name in names:
        after = _number(new.get(name))
        text = f"{after:>7}" if old is None else f"{_number(old.get(name)):>7} → {after}"
        yield f"  {name:<60} {text}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}".removesuffix(".0")


def _line(item: Item) -> str:
    value = "" if item.value is None else f"{_number(item.value):>5}  "
    return f"{value}{item.where}  {item.what}".rstrip()
