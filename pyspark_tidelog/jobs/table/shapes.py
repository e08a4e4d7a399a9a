"""What JSON values look like, and the columns that follow from it. No I/O.

`Shape` counts the kinds of values that were seen in one place. Shapes are added up over tasks, in any order, and the
column is the type of most values: one bad record among thousands does not decide. Values of other kinds do not fit the
column and go to the quarantine.

A column widens only as Iceberg allows: int to long, float to double. Everything else that does not fit is quarantined.

Entry: `Shape`, `column_type`, `Change`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pyiceberg.types import (
    BooleanType,
    DoubleType,
    IcebergType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
)

LONG = (-(1 << 63), (1 << 63) - 1)
MAX_DEPTH = 32
"""Deeper values have no column."""
MAX_PLACES = 10_000
"""Places (fields, elements) that a task tells the driver of at most."""
_ORDER = ("string", "object", "array", "double", "long", "boolean")
"""Between kinds that are equally frequent the first wins."""


@dataclass
class Shape:
    """The kinds of values in one place: counts, by kind; fields of objects; elements of arrays."""

    kinds: Counter[str] = field(default_factory=Counter)
    fields: dict[str, Shape] = field(default_factory=dict)
    element: Shape | None = None

    def add(self, value: Any, depth: int = 0) -> None:
        """Count a value that was decoded from JSON. Null says nothing."""
        kind = kind_of(value)
        if kind is None or depth > MAX_DEPTH:
            return
        self.kinds[kind] += 1
        if isinstance(value, dict):
            for name, each in value.items():
                if each is not None:
                    self.fields.setdefault(name, Shape()).add(each, depth + 1)
        elif isinstance(value, list):
            for each in value:
                self.element = self.element or Shape()
                self.element.add(each, depth + 1)

    def merge(self, other: Shape) -> None:
        """Add what another shape has counted."""
        self.kinds.update(other.kinds)
        for name, shape in other.fields.items():
            self.fields.setdefault(name, Shape()).merge(shape)
        if other.element is not None:
            self.element = self.element or Shape()
            self.element.merge(other.element)

    @property
    def total(self) -> int:
        """Return the number of values that were counted here."""
        return self.kinds.total()

    def places(self) -> int:
        """Return the number of places in it, its own among them."""
        below = sum(each.places() for each in self.fields.values())
        return 1 + below + (self.element.places() if self.element is not None else 0)


@dataclass(frozen=True)
class Change:
    """A column to be added, or widened, at a path from the top. A list has `element`, a map `value`."""

    path: tuple[str, ...]
    type: IcebergType
    is_new: bool


def kind_of(value: Any) -> str | None:
    """Return the kind of a value that was decoded from JSON; None for null and for numbers that no column holds."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "long" if LONG[0] <= value <= LONG[1] else None
    return {str: "string", float: "double", dict: "object", list: "array"}[type(value)]


def column_type(shape: Shape, ids: Iterator[int]) -> IcebergType | None:
    """Return the type for a shape, with fresh field ids; None if nothing in it has one."""
    counts = Counter(shape.kinds)
    if counts["double"]:
        counts["double"] += counts.pop("long", 0)
    for kind in sorted(_ORDER, key=lambda each: (-counts[each], _ORDER.index(each))):
        if counts[kind] > 0:
            found = _type_of(kind, shape, ids)
            if found is not None:
                return found
    return None


def _type_of(kind: str, shape: Shape, ids: Iterator[int]) -> IcebergType | None:
    if kind == "array":
        element = column_type(shape.element, ids) if shape.element is not None else None
        return ListType(next(ids), element, element_required=False) if element is not None else None
    if kind == "object":
        fields = struct_fields(shape, ids)
        return StructType(*fields) if fields else None
    plain: dict[str, IcebergType] = {
        "string": StringType(),
        "double": DoubleType(),
        "long": LongType(),
        "boolean": BooleanType(),
    }
    return plain[kind]


def struct_fields(shape: Shape, ids: Iterator[int]) -> list[NestedField]:
    """Return the columns for the fields of objects, the most frequent first."""
    found: list[NestedField] = []
    taken: set[str] = set()
    for name in sorted(shape.fields, key=lambda each: (-shape.fields[each].total, each)):
        if not is_column_name(name) or name.lower() in taken:
            continue
        kind = column_type(shape.fields[name], ids)
        if kind is not None:
            taken.add(name.lower())
            found.append(NestedField(next(ids), name, kind, required=False))
    return found


def is_column_name(name: str) -> bool:
    """Whether a field may become a column: Iceberg's paths cannot tell a dot in a name from a step into a struct."""
    return bool(name) and "." not in name and len(name) <= 255
