"""Values that were decoded from JSON, as those of a column's type. No I/O.

A value that does not fit raises `Misfit`, with its place and the reason. What would fit a column that is not there, or
a wider one, is noted in `Wishes`: the driver then changes the table, and the records are read again.

    boolean            true, false
    int, long          numbers without a fraction (1.0 is 1); an int is widened to long
    float, double      numbers; integers that a double cannot tell from their neighbours do not fit
    decimal(p, s)      numbers of up to 15 significant digits, or strings, without rounding
    string             strings
    binary             strings in base64
    date, timestamp    strings of ISO 8601; a timestamp without an offset from UTC is UTC
    list, map, struct  arrays, objects, objects

Entry: `converter`, `Wishes`.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Context, Decimal, DecimalException
from typing import Any

from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from pyspark_tidelog.jobs.table.shapes import LONG, MAX_PLACES, Shape, is_column_name

Path = tuple[str, ...]
Convert = Callable[[Any, "Wishes"], Any]

ADD, IGNORE, REFUSE = "add", "ignore", "quarantine"
"""What becomes of fields that have no column."""
_INT = (-(1 << 31), (1 << 31) - 1)
_MAX_FLOAT = 3.4028234663852886e38
_FLOAT = struct.Struct("<f")
_EPOCH = datetime(1970, 1, 1)
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_DIGITS = Context(prec=38)
"""As many as a decimal column has at most; Python's own context rounds to 28."""
_EXACT_DIGITS = 15
"""A number in JSON of so many significant digits is the same after it was a double."""


class Misfit(Exception):
    """A value does not fit its column."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{'.'.join(path)}: {reason}" if path else reason)


@dataclass
class Wishes:
    """What records would need that the table does not have. Added up over records and tasks."""

    new_fields: str = ADD
    new: dict[Path, Shape] = field(default_factory=dict)
    wide: set[Path] = field(default_factory=set)
    is_final: bool = False
    """Nothing is noted any more: what does not fit is a misfit."""
    _places: int = 0

    def __bool__(self) -> bool:
        return bool(self.new or self.wide)

    def merge(self, other: Wishes) -> None:
        """Add what other records need."""
        for path, shape in other.new.items():
            self.new.setdefault(path, Shape()).merge(shape)
        self.wide |= other.wide

    def begin(self) -> Wishes:
        """Return wishes of one record, which `merge` adds when all of it fits."""
        return Wishes(self.new_fields, is_final=self.is_final or self._places > MAX_PLACES)

    def end(self, one: Wishes) -> None:
        """Add the wishes of one record, up to `MAX_PLACES` places."""
        self._places += sum(shape.places() for shape in one.new.values())
        if self._places <= MAX_PLACES:
            self.merge(one)

    def note_wide(self, path: Path, reason: str) -> None:
        """Wish for a wider column. Raises `Misfit` where columns may not change."""
        if self.is_final or self.new_fields != ADD:
            raise Misfit(path, reason)
        self.wide.add(path)

    def note_new(self, path: Path, value: Any) -> None:
        """Wish for a column. Raises `Misfit` where there may be none."""
        if self.new_fields == IGNORE:
            return
        if not is_column_name(path[-1]):
            raise Misfit(path, "a name that is empty, longer than 255 or has a dot cannot be a column")
        if self.new_fields == REFUSE or self.is_final:
            raise Misfit(path, f"there is no such column, for a value like {_shown(value)}")
        self.new.setdefault(path, Shape()).add(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def converter(kind: IcebergType, path: Path) -> Convert:
    """Return the function that turns a value (never null) into what Arrow takes for the type."""
    if isinstance(kind, StructType):
        return struct_converter(kind.fields, path)
    if isinstance(kind, ListType):
        return _list(kind, path)
    if isinstance(kind, MapType):
        return _map(kind, path)
    if isinstance(kind, DecimalType):
        return _decimal(kind, path)
    if isinstance(kind, (IntegerType, LongType)):
        return _integer(path, is_long=isinstance(kind, LongType))
    if isinstance(kind, (FloatType, DoubleType)):
        return _floating(path, is_double=isinstance(kind, DoubleType))
    if isinstance(kind, (TimestampType, TimestamptzType)):
        return _timestamp(path, has_zone=isinstance(kind, TimestamptzType))
    plain: dict[type[IcebergType], Callable[[Any], Any]] = {
        BooleanType: lambda value: value if isinstance(value, bool) else None,
        StringType: lambda value: value if isinstance(value, str) else None,
        BinaryType: _bytes,
        DateType: _day,
    }
    make: Callable[[Any], Any] = plain.get(type(kind), lambda _value: None)

    def convert(value: Any, wishes: Wishes) -> Any:
        found = make(value)
        if found is None:
            raise Misfit(path, f"{_shown(value)} is no {kind}")
        return found

    return convert


def _bytes(value: Any) -> bytes | None:
    try:
        return base64.b64decode(value, validate=True) if isinstance(value, str) else None
    except (binascii.Error, ValueError):
        return None


def _day(value: Any) -> int | None:
    try:
        return date.fromisoformat(value).toordinal() - _EPOCH_DAY if isinstance(value, str) else None
    except ValueError:
        return None


def _integer(path: Path, *, is_long: bool) -> Convert:
    low, high = LONG if is_long else _INT
    name = "long" if is_long else "int"

    def convert(value: Any, wishes: Wishes) -> Any:
        if type(value) is float and value.is_integer() and abs(value) <= 1 << 53:
            value = int(value)
        if type(value) is not int:
            raise Misfit(path, f"{_shown(value)} is no {name}")
        if not low <= value <= high:
            if is_long or not LONG[0] <= value <= LONG[1]:
                raise Misfit(path, f"{value} is beyond 64 bits")
            wishes.note_wide(path, f"{value} is beyond 32 bits")
            return None
        return value

    return convert


def _floating(path: Path, *, is_double: bool) -> Convert:
    name = "double" if is_double else "float"

    def convert(value: Any, wishes: Wishes) -> Any:
        if type(value) not in (int, float):
            raise Misfit(path, f"{_shown(value)} is no {name}")
        try:
            found = float(value)
        except OverflowError:
            raise Misfit(path, f"{_shown(value)} is beyond a double") from None
        if type(value) is int and int(found) != value:
            raise Misfit(path, f"{_shown(value)} is not the same as a {name}")
        if not is_double and abs(found) > _MAX_FLOAT:
            wishes.note_wide(path, f"{found} is beyond a float")
            return None
        if not is_double and type(value) is int and _as_float(found) != found:
            wishes.note_wide(path, f"{_shown(value)} is not the same as a float")
            return None
        return found

    return convert


def _as_float(value: float) -> float:
    """Return a number as 32 bits have it."""
    (found,) = _FLOAT.unpack(_FLOAT.pack(value))
    return float(found)


def _decimal(kind: DecimalType, path: Path) -> Convert:
    step = Decimal(1).scaleb(-kind.scale)
    limit = Decimal(10) ** (kind.precision - kind.scale)

    def convert(value: Any, wishes: Wishes) -> Any:
        try:
            if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                raise Misfit(path, f"{_shown(value)} is no {kind}")
            found = Decimal(repr(value) if isinstance(value, float) else value)
            if isinstance(value, float) and len(found.as_tuple().digits) > _EXACT_DIGITS:
                raise Misfit(path, f"{value!r} may have lost digits; exact decimals are given as strings")
            if not found.is_finite() or found.copy_abs() >= limit or found != found.quantize(step, context=_DIGITS):
                raise Misfit(path, f"{_shown(value)} does not fit {kind}")
        except DecimalException:
            raise Misfit(path, f"{_shown(value)} is no {kind}") from None
        return found.quantize(step, context=_DIGITS)

    return convert


def _timestamp(path: Path, *, has_zone: bool) -> Convert:
    name = "timestamp" if has_zone else "timestamp without time zone"

    def convert(value: Any, wishes: Wishes) -> Any:
        try:
            found = datetime.fromisoformat(value) if isinstance(value, str) else None
            if found is not None and found.tzinfo is not None:
                found = found.astimezone(UTC).replace(tzinfo=None) if has_zone else None
        except (ValueError, OverflowError):
            found = None
        if found is None:
            raise Misfit(path, f"{_shown(value)} is no {name}")
        elapsed = found - _EPOCH
        return (elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds

    return convert


def _list(kind: ListType, path: Path) -> Convert:
    inner = converter(kind.element_type, (*path, "element"))

    def convert(value: Any, wishes: Wishes) -> Any:
        if not isinstance(value, list):
            raise Misfit(path, f"{_shown(value)} is no array")
        if kind.element_required and None in value:
            raise Misfit(path, "an element is null")
        return [None if each is None else inner(each, wishes) for each in value]

    return convert


def _map(kind: MapType, path: Path) -> Convert:
    inner = converter(kind.value_type, (*path, "value"))

    def convert(value: Any, wishes: Wishes) -> Any:
        if not isinstance(value, dict):
            raise Misfit(path, f"{_shown(value)} is no object")
        if kind.value_required and None in value.values():
            raise Misfit(path, "a value is null")
        return [(name, None if each is None else inner(each, wishes)) for name, each in value.items()]

    return convert


def struct_converter(fields: tuple[NestedField, ...], path: Path, reserved: tuple[str, ...] = ()) -> Convert:
    """Return the function that turns an object into the values of fields, by their names; `reserved` are no fields."""
    inner = {each.name: converter(each.field_type, (*path, each.name)) for each in fields}
    required = [each.name for each in fields if each.required]
    folded = {*(each.name.lower() for each in fields), *reserved}
    empty = dict.fromkeys(inner)

    def convert(value: Any, wishes: Wishes) -> Any:
        if not isinstance(value, dict):
            raise Misfit(path, f"{_shown(value)} is no object")
        found = dict(empty)
        for name, each in value.items():
            if each is None:
                continue
            make = inner.get(name)
            if make is not None:
                found[name] = make(each, wishes)
            elif name.lower() in folded and wishes.new_fields != IGNORE:
                raise Misfit((*path, name), "is the name of another column, upper and lower case apart")
            else:
                wishes.note_new((*path, name), each)
        for name in required:
            if value.get(name) is None:
                raise Misfit((*path, name), "is required, and missing or null")
        return found

    return convert
