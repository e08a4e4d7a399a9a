"""Decodes any request into kio's message classes.

kio has a native reader, but it trusts array lengths (a 20-byte request makes it allocate gigabytes and abort the
process), refuses unknown tagged fields (KIP-482: ignore them) and booleans other than 0 and 1. A broker reads bytes
from strangers, so it decodes with this one: driven by the same classes, checking every length against the frame and
the number of array elements against `MAX_ELEMENTS`, raising nothing but `MalformedRequest`. The tests prove it equal to
kio's on all requests that both accept.

Entry: `request_reader`.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import struct
import uuid
from collections.abc import Callable
from typing import Any

from kio.schema.errors import ErrorCode
from kio.serial._implicit_defaults import get_tagged_field_default
from kio.serial._introspect import (
    EntityField,
    EntityTupleField,
    PrimitiveField,
    classify_field,
    get_field_tag,
    get_schema_field_type,
    is_optional,
)

from broker.errors import MalformedRequest
from broker.wire import primitives
from broker.wire.primitives import Buffer

Read = Callable[[Buffer, int], tuple[Any, int]]

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MILLISECOND = datetime.timedelta(milliseconds=1)
_FORMATS = {
    "int8": ">b",
    "int16": ">h",
    "int32": ">i",
    "int64": ">q",
    "uint8": ">B",
    "uint16": ">H",
    "uint32": ">I",
    "uint64": ">Q",
    "float64": ">d",
}


def _number(code: str, convert: Callable[[Any], Any] | None = None) -> Read:
    layout = struct.Struct(code)
    unpack, size = layout.unpack_from, layout.size

    def read(buffer: Buffer, at: int) -> tuple[Any, int]:
        return unpack(buffer, at)[0], at + size

    def read_converted(buffer: Buffer, at: int) -> tuple[Any, int]:
        assert convert is not None
        return convert(unpack(buffer, at)[0]), at + size

    return read if convert is None else read_converted


def _duration(value: int) -> datetime.timedelta:
    return value * _MILLISECOND


def _instant(value: int) -> datetime.datetime | None:
    return None if value < 0 else _EPOCH + value * _MILLISECOND


def _read_uuid(buffer: Buffer, at: int) -> tuple[uuid.UUID | None, int]:
    raw = bytes(buffer[at : at + 16])
    if len(raw) < 16:
        raise MalformedRequest("a UUID leaves the frame")
    return (uuid.UUID(bytes=raw) if any(raw) else None), at + 16


def _read_bytes(span: Callable[[Buffer, int], tuple[int, int]]) -> Read:
    def read(buffer: Buffer, at: int) -> tuple[bytes | None, int]:
        start, end = span(buffer, at)
        return (None, start) if end < 0 else (bytes(buffer[start:end]), end)

    return read


def _not_null(read: Read, name: str) -> Read:
    def read_required(buffer: Buffer, at: int) -> tuple[Any, int]:
        value, at = read(buffer, at)
        if value is None:
            raise MalformedRequest(f"{name} is null")
        return value, at

    return read_required


def _primitive(kafka_type: str, flexible: bool) -> Read:
    if kafka_type in _FORMATS:
        return _number(_FORMATS[kafka_type])
    simple: dict[str, Read] = {
        "bool": _number(">B", bool),
        "error_code": _number(">h", ErrorCode),
        "timedelta_i32": _number(">i", _duration),
        "timedelta_i64": _number(">q", _duration),
        "datetime_i64": _number(">q", _instant),
        "uuid": _read_uuid,
        "string": primitives.read_compact_string if flexible else primitives.read_legacy_string,
    }
    if kafka_type in simple:
        return simple[kafka_type]
    if kafka_type in ("bytes", "records"):
        return _read_bytes(primitives.compact_bytes_span if flexible else primitives.legacy_bytes_span)
    raise TypeError(f"no reader for Kafka type {kafka_type}")


_left = [0]
"""Elements that the request being decoded may still have; decoding never awaits, so one count serves all."""


def _array(read_item: Read, flexible: bool) -> Read:
    read_count = primitives.read_compact_count if flexible else primitives.read_legacy_count

    def read(buffer: Buffer, at: int) -> tuple[tuple[Any, ...] | None, int]:
        count, at = read_count(buffer, at)
        if count < 0:
            return None, at
        _left[0] -= count
        if _left[0] < 0:
            raise primitives.too_many_elements()
        items = []
        for _ in range(count):
            item, at = read_item(buffer, at)
            items.append(item)
        return tuple(items), at

    return read


def _nullable_entity(read_entity: Read) -> Read:
    def read(buffer: Buffer, at: int) -> tuple[Any, int]:  # KIP-893: int8 -1 is null
        if buffer[at] == 0xFF:
            return None, at + 1
        return read_entity(buffer, at + 1)

    return read


def _field(field: dataclasses.Field[Any], flexible: bool, tagged: bool) -> Read:
    kind = classify_field(field)
    optional = is_optional(field)
    if isinstance(kind, EntityField):
        read = _entity(kind.type_)
        return _nullable_entity(read) if optional and not tagged else read
    if isinstance(kind, EntityTupleField):
        read = _array(_entity(kind.type_), flexible)
        optional = _nullable_array(field)
    else:
        kafka_type = get_schema_field_type(field)
        read = _primitive(kafka_type, flexible)
        if isinstance(kind, PrimitiveField):
            if kafka_type in ("uuid", "datetime_i64"):
                return read  # null is a value of theirs
        else:
            read = _array(read if kafka_type == "uuid" else _not_null(read, field.name), flexible)
            optional = _nullable_array(field)
    return read if optional else _not_null(read, field.name)


def _nullable_array(field: dataclasses.Field[Any]) -> bool:
    return type(None) in getattr(field.type, "__args__", ())


def _entity(cls: type[Any]) -> Read:
    flexible: bool = cls.__flexible__
    plain: list[tuple[str, Read]] = []
    tagged: dict[int, tuple[str, Read]] = {}
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        tag = get_field_tag(field)
        read = _field(field, flexible, tag is not None)
        if tag is None:
            plain.append((field.name, read))
        else:
            tagged[int(tag)] = (field.name, read)
            defaults[field.name] = get_tagged_field_default(field)

    def read_entity(buffer: Buffer, at: int) -> tuple[Any, int]:
        values = dict(defaults)
        for name, read in plain:
            values[name], at = read(buffer, at)
        if flexible:
            spans, at = primitives.read_tags(buffer, at)
            for tag, (start, end) in spans.items():
                if tag in tagged:
                    name, read = tagged[tag]
                    values[name], stop = read(buffer[:end], start)
                    if stop != end:
                        raise MalformedRequest(f"tagged field {name} has the wrong size")
        return cls(**values), at

    return read_entity


@functools.cache
def request_reader(cls: type[Any]) -> Callable[[Buffer, int], Any]:
    """A function `(frame, position) → entity` for one of kio's classes. It raises only `MalformedRequest`.

    Bytes after the message are ignored, as Kafka does.
    """
    read = _entity(cls)

    def decode(frame: Buffer, at: int) -> Any:
        _left[0] = primitives.MAX_ELEMENTS
        try:
            return read(memoryview(frame), at)[0]
        except (struct.error, *primitives.DECODE_ERRORS) as error:
            raise MalformedRequest(f"cannot decode {cls.__name__} v{cls.__version__}: {error}") from error

    return decode
