"""Decodes any request, after the layout that kio's class of its version gives, into a message class of ours.

kio has a native reader, but it trusts array lengths (a 20-byte request makes it allocate gigabytes and abort the
process), refuses unknown tagged fields (KIP-482: ignore them) and booleans other than 0 and 1. A broker reads bytes
from strangers, so it decodes with this one: checking every length against the frame and the number of array elements
against `MAX_ELEMENTS`, raising nothing but `MalformedRequest`. The tests prove it equal to kio's on all requests that
both accept.

The message class says which fields are kept (`tidelog.broker.kafka.wire.messages.base`). It may be kio's class itself,
which keeps all of them as kio reads them; so are the parts read that are not kept.

Entry: `request_reader`.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import struct
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

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

from tidelog.broker.kafka.errors import MalformedRequest
from tidelog.broker.kafka.wire import primitives
from tidelog.broker.kafka.wire.messages.base import Message, field_name, parts
from tidelog.runtime.types import Buffer

Read = Callable[[Buffer, int], tuple[Any, int]]
M = TypeVar("M")

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MILLISECOND = datetime.timedelta(milliseconds=1)
_MILLISECONDS = {"timedelta_i32": ">i", "timedelta_i64": ">q", "datetime_i64": ">q"}
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
        raise MalformedRequest("a UUID exceeds the frame")
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
"""Elements still permitted in the current request; decoding does not await, so a single count is sufficient."""


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


def _field(field: dataclasses.Field[Any], flexible: bool, tagged: bool, part: type[Any] | None) -> Read:
    """Reads a field into kio's types; if it is a message, into `part` (None: kio's class)."""
    kind = classify_field(field)
    optional = is_optional(field)
    if isinstance(kind, EntityField):
        read = _entity(kind.type_, part or kind.type_)
        return _nullable_entity(read) if optional and not tagged else read
    if isinstance(kind, EntityTupleField):
        read = _array(_entity(kind.type_, part or kind.type_), flexible)
        optional = _nullable_array(field)
    else:
        kafka_type = get_schema_field_type(field)
        read = _primitive(kafka_type, flexible)
        if isinstance(kind, PrimitiveField):
            if kafka_type in ("uuid", "datetime_i64"):
                return read  # null is a valid value of these
        else:
            read = _array(read if kafka_type == "uuid" else _not_null(read, field.name), flexible)
            optional = _nullable_array(field)
    return read if optional else _not_null(read, field.name)


def _nullable_array(field: dataclasses.Field[Any]) -> bool:
    return type(None) in getattr(field.type, "__args__", ())


def _entity(layout: type[Any], message: type[Any]) -> Read:
    flexible: bool = layout.__flexible__
    own: Mapping[str, type[Message] | None] | None = parts(message) if issubclass(message, Message) else None
    plain: list[tuple[str | None, Read]] = []
    tagged: dict[int, tuple[str | None, Read]] = {}
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(layout):
        tag = get_field_tag(field)
        name: str | None = field.name
        if own is None:
            read = _field(field, flexible, tag is not None, None)
            if tag is not None:
                defaults[field.name] = get_tagged_field_default(field)
        else:
            name = field_name(field)
            in_ms = _MILLISECONDS.get(field.metadata.get("kafka_type", ""))
            read = _number(in_ms) if in_ms else _field(field, flexible, tag is not None, own.get(name))
            if name not in own:
                name = None
        if tag is None:
            plain.append((name, read))
        else:
            tagged[int(tag)] = (name, read)

    def read_entity(buffer: Buffer, at: int) -> tuple[Any, int]:
        values = dict(defaults)
        for name, read in plain:
            value, at = read(buffer, at)
            if name is not None:
                values[name] = value
        if flexible:
            spans, at = primitives.read_tags(buffer, at)
            for tag, (start, end) in spans.items():
                if tag in tagged:
                    name, read = tagged[tag]
                    value, stop = read(buffer[:end], start)
                    if stop != end:
                        raise MalformedRequest(f"tagged field {tag} of {layout.__name__} has the wrong size")
                    if name is not None:
                        values[name] = value
        return message(**values), at

    return read_entity


@functools.cache
def request_reader(layout: type[Any], message: type[M]) -> Callable[[Buffer, int], M]:
    """A function `(frame, position) → message` for requests laid out as one of kio's classes. It raises only
    `MalformedRequest`.

    Bytes after the message are ignored, as Kafka does.
    """
    read = _entity(layout, message)

    def decode(frame: Buffer, at: int) -> M:
        _left[0] = primitives.MAX_ELEMENTS
        try:
            found: M = read(memoryview(frame), at)[0]
        except (struct.error, *primitives.DECODE_ERRORS) as error:
            raise MalformedRequest(f"cannot decode {layout.__name__} v{layout.__version__}: {error}") from error
        return found

    return decode
