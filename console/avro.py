"""Avro's binary encoding, read with the schema that wrote it. Sans-I/O.

Logical types are shown as what they are kept in, but decimals, which are numbers with a scale; bytes and fixed are
hexadecimal. A default or another reader's schema plays no part: the record is shown as it was written.

Invariants (rule 12): a value has at most `MAX_ITEMS` items and `MAX_DEPTH` levels, whatever its bytes say; a length is
compared with what is left before anything is taken. That is why it is not fastavro that reads: an array of 50 million
nulls, which is six bytes of a record, takes 400 MB there.

Entry: `AvroSchema.read`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

from tidelog.runtime.errors import InvalidInput

MAX_ITEMS: Final = 100_000
MAX_DEPTH: Final = 64
MAX_SCALE: Final = 1_000
_MAX_VARINT: Final = 10


class AvroSchema:
    """A schema as a registry tells it."""

    def __init__(self, text: str, references: Mapping[str, str] | None = None) -> None:
        """`references`: the texts of other schemas whose names it uses. Raises `InvalidInput`."""
        self._named: dict[str, Any] = {}
        try:
            for other in (references or {}).values():
                self._learn(json.loads(other), "", 0)
            self._root = json.loads(text)
            self._learn(self._root, "", 0)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidInput(f"the schema is not Avro's: {error}") from None

    def _learn(self, schema: Any, space: str, depth: int) -> None:
        """Collect the named types, and give every name its full form."""
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        if isinstance(schema, list):
            for each in schema:
                self._learn(each, space, depth + 1)
        elif isinstance(schema, dict):
            kind = schema["type"]
            if kind in ("record", "error", "enum", "fixed"):
                space = schema.get("namespace", space)
                name = schema["name"]
                full = name if "." in name or not space else f"{space}.{name}"
                space = full.rpartition(".")[0]
                self._named[full] = schema
                schema["_space"] = space
                for field in schema.get("fields", ()):
                    self._learn(field["type"], space, depth + 1)
            elif kind in ("array", "map"):
                self._learn(schema["items" if kind == "array" else "values"], space, depth + 1)
            elif isinstance(kind, (dict, list)):
                self._learn(kind, space, depth + 1)

    def read(self, data: bytes) -> Any:
        """Return the value as JSON has it. Raises `InvalidInput` for bytes that are no such value."""
        reader = _Reader(data, self._named)
        try:
            value = reader.value(self._root, "", 0)
        except (struct.error, UnicodeDecodeError, IndexError, KeyError, TypeError) as error:
            raise InvalidInput(f"the value is not what its schema says: {error}") from None
        if reader.at != len(data):
            raise InvalidInput(f"{len(data) - reader.at} bytes are left after the value")
        return value


class _Reader:
    def __init__(self, data: bytes, named: Mapping[str, Any]) -> None:
        self._data = data
        self._named = named
        self._items = 0
        self.at = 0

    def value(self, schema: Any, space: str, depth: int) -> Any:
        self._items += 1
        if self._items > MAX_ITEMS or depth > MAX_DEPTH:
            raise InvalidInput(f"the value has more than {MAX_ITEMS} items, or {MAX_DEPTH} levels")
        if isinstance(schema, list):
            return self.value(schema[self._index(len(schema))], space, depth + 1)
        if isinstance(schema, str):
            if schema in _PRIMITIVES:
                return _PRIMITIVES[schema](self)
            full = schema if "." in schema or not space else f"{space}.{schema}"
            return self.value(self._named[full if full in self._named else schema], space, depth + 1)
        return self._complex(schema, space, depth)

    def _complex(self, schema: Mapping[str, Any], space: str, depth: int) -> Any:
        kind = schema["type"]
        if kind in ("record", "error"):
            inner = schema["_space"]
            return {field["name"]: self.value(field["type"], inner, depth + 1) for field in schema["fields"]}
        if kind == "enum":
            return schema["symbols"][self._index(len(schema["symbols"]))]
        if kind == "fixed":
            return _number(self.take(schema["size"]), schema)
        if kind == "array":
            found: list[Any] = []
            self._blocks(lambda: found.append(self.value(schema["items"], space, depth + 1)))
            return found
        if kind == "map":
            table: dict[str, Any] = {}
            self._blocks(lambda: table.__setitem__(self.text(), self.value(schema["values"], space, depth + 1)))
            return table
        if kind == "bytes":
            return _number(self.take(self.long()), schema)
        return self.value(kind, space, depth + 1)

    def _blocks(self, one: Callable[[], None]) -> None:
        while count := self.long():
            if count < 0:
                count = -count
                self.long()  # the block's size, for readers that skip it
            for _ in range(count):
                one()

    def _index(self, size: int) -> int:
        found = self.long()
        if not 0 <= found < size:
            raise InvalidInput(f"the value names choice {found} of {size}")
        return found

    def take(self, size: int) -> bytes:
        if not 0 <= size <= len(self._data) - self.at:
            raise InvalidInput(f"{size} bytes are wanted at {self.at} of {len(self._data)}")
        self.at += size
        return self._data[self.at - size : self.at]

    def long(self) -> int:
        found = 0
        for shift in range(_MAX_VARINT):
            byte = self._data[self.at]
            self.at += 1
            found |= (byte & 0x7F) << 7 * shift
            if byte < 0x80:
                return (found >> 1) ^ -(found & 1)
        raise InvalidInput("a number is longer than 10 bytes")

    def text(self) -> str:
        return self.take(self.long()).decode()

    def real(self, size: int) -> float | str:
        value = struct.unpack("<f" if size == 4 else "<d", self.take(size))[0]
        return float(value) if value - value == 0 else str(value)  # JSON has no NaN and no infinity


def _number(data: bytes, schema: Mapping[str, Any]) -> str:
    """Bytes in hexadecimal, or the decimal that they are."""
    scale = schema.get("scale", 0)
    if schema.get("logicalType") != "decimal" or not isinstance(scale, int) or not 0 <= scale <= MAX_SCALE:
        return data.hex()
    if len(data) > MAX_SCALE:
        return data.hex()
    unscaled = int.from_bytes(data, "big", signed=True)
    digits = Decimal(unscaled).as_tuple()
    return format(Decimal((digits.sign, digits.digits, -scale)), "f")  # exact, whatever its precision


_PRIMITIVES: Final[Mapping[str, Callable[[_Reader], Any]]] = {
    "null": lambda _: None,
    "boolean": lambda reader: reader.take(1) != b"\0",
    "int": _Reader.long,
    "long": _Reader.long,
    "float": lambda reader: reader.real(4),
    "double": lambda reader: reader.real(8),
    "bytes": lambda reader: reader.take(reader.long()).hex(),
    "string": _Reader.text,
}
