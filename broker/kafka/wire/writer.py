"""Writes responses: a message of ours becomes the kio entity of the version asked for, which kio writes.

What a version does not have is left out. What it has and the message does not say has kio's default; if kio has none,
or a value is of a type that no message may have, building the writer raises `TypeError`, which the tests do for every
version served.

Classes are imported lazily, by API and version: importing all of kio costs seconds.

Entry: `body_writer`.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import io
from collections.abc import Callable
from typing import Any

from kio.schema.errors import ErrorCode
from kio.serial import entity_writer
from kio.serial._introspect import EntityField, EntityTupleField, PrimitiveTupleField, classify_field

from tidelog.broker.kafka.wire.messages.base import KafkaResponse, Message, field_name, parts

Convert = Callable[[Any], Any]


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def _duration(value: int) -> datetime.timedelta:
    return datetime.timedelta(milliseconds=value)


def _instant(value: int) -> datetime.datetime:
    """-1, Kafka's "none", is a millisecond before the Unix epoch, which kio writes as -1."""
    return _EPOCH + _duration(value)


_CONVERTERS: dict[str, Convert] = {
    "timedelta_i32": _duration,
    "timedelta_i64": _duration,
    "datetime_i64": _instant,
    "error_code": ErrorCode,
}


def _as_it_is(value: Any) -> Any:
    return value


def _array(convert: Convert) -> Convert:
    return lambda values: None if values is None else tuple([convert(value) for value in values])


def _nullable(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _converter(field: dataclasses.Field[Any], part: type[Message] | None) -> Convert:
    kind = classify_field(field)
    if isinstance(kind, EntityTupleField):
        return _array(_as_it_is if part is None else _entity(kind.type_, part))
    if isinstance(kind, EntityField):
        assert part is not None, f"{field.name} is a message"
        return _nullable(_entity(kind.type_, part))
    if isinstance(kind, PrimitiveTupleField):
        return _array(_as_it_is)
    return _CONVERTERS.get(field.metadata["kafka_type"], _as_it_is)


def _entity(layout: type[Any], message: type[Message]) -> Convert:
    """A function from a message of ours to the entity of kio's class `layout`."""
    own = parts(message)
    steps = []
    for field in dataclasses.fields(layout):
        name = field_name(field)
        if name in own:
            steps.append((field.name, name, _converter(field, own[name])))
        elif field.default is dataclasses.MISSING:
            raise TypeError(f"{message.__name__} has no {name}, which {layout.__name__} v{layout.__version__} needs")

    def make(value: Any) -> Any:
        return layout(**{theirs: convert(getattr(value, ours)) for theirs, ours, convert in steps})

    return make


@functools.cache
def body_writer(layout: type[Any], message: type[KafkaResponse]) -> Callable[[KafkaResponse], bytes]:
    """A function from a response to its body, laid out as one of kio's classes."""
    convert, write = _entity(layout, message), entity_writer(layout)

    def encode(response: KafkaResponse) -> bytes:
        with io.BytesIO() as out:
            write(out, convert(response))
            return out.getvalue()

    return encode
