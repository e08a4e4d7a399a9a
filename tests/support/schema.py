"""Construction of kio's message classes: one call for all versions of a message.

kio has one set of dataclasses for each API version, and speaks `datetime`, `timedelta`, `ErrorCode` and tuples.
`request(key, version)` and `response(key, version)` return a `Schema` whose `make(name, **fields)` drops the fields
that the version does not have and converts the rest. A name that no version knows is a programming error and raises.

`body`, `as_message` and `read_response` go between kio's entities, bytes and the broker's own message classes.

Classes are imported lazily, per API and version: importing all of kio costs seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import io
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import msgspec
from kio.index import KioIndexError, load_payload_module, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType

from tidelog.broker.kafka.wire.codec import encode_body
from tidelog.broker.kafka.wire.messages.base import KafkaResponse, Message, parts

M = TypeVar("M", bound=Message)

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def to_ms(value: datetime.timedelta) -> int:
    """Convert a duration decoded by kio to whole milliseconds."""
    return value // datetime.timedelta(milliseconds=1)


def _duration(value: Any) -> Any:
    return datetime.timedelta(milliseconds=value) if isinstance(value, int) else value


def _instant(value: Any) -> Any:
    if isinstance(value, int):
        return None if value < 0 else _EPOCH + datetime.timedelta(milliseconds=value)
    return value


def _error(value: Any) -> Any:
    return ErrorCode(value)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "timedelta_i32": _duration,
    "timedelta_i64": _duration,
    "datetime_i64": _instant,
    "error_code": _error,
}


class Schema:
    """The message classes of one API key, version and direction."""

    def __init__(self, api_key: int, version: int, direction: EntityType) -> None:
        self.api_key = api_key
        self.version = version
        self._direction = direction
        self._module = load_payload_module(api_key, version, direction)
        self._converters: dict[str, dict[str, Callable[[Any], Any]]] = {}
        self._dropped: set[tuple[str, str]] = set()

    def has(self, name: str) -> bool:
        """Whether this version has a (nested) message class of that name."""
        return hasattr(self._module, name)

    def fields(self, name: str) -> frozenset[str]:
        """The field names of a message class in this version; empty if the version lacks the class."""
        return _fields(self._module, name)

    def make(self, name: str, /, **fields: Any) -> Any:
        """Build message class `name`, or return None if this version lacks it.

        Durations and instants may be given in milliseconds, error codes as integers, arrays as lists. Raises
        `TypeError` for a class or field that no version has.
        """
        cls = getattr(self._module, name, None)
        if cls is None:
            self._check_known(name, None)
            return None
        converters = self._converters.get(name)
        if converters is None:
            converters = self._converters[name] = {
                f.name: _CONVERTERS.get(f.metadata.get("kafka_type", ""), _plain) for f in dataclasses.fields(cls)
            }
        arguments = {}
        for field, value in fields.items():
            convert = converters.get(field)
            if convert is not None:
                arguments[field] = convert(value)
            else:
                self._check_known(name, field)
        return cls(**arguments)

    def _check_known(self, name: str, field: str | None) -> None:
        if (name, field or "") in self._dropped:
            return
        found = [_fields(module, name) for module in _versions(self.api_key, self._direction) if hasattr(module, name)]
        if not found or (field is not None and not any(field in names for names in found)):
            raise TypeError(f"no version of API {self.api_key} has {name}{'.' + field if field else ''}")
        self._dropped.add((name, field or ""))


def _fields(module: ModuleType, name: str) -> frozenset[str]:
    cls = getattr(module, name, None)
    return frozenset(f.name for f in dataclasses.fields(cls)) if cls is not None else frozenset()


def _versions(api_key: int, direction: EntityType) -> list[ModuleType]:
    modules = []
    for version in range(32):
        with contextlib.suppress(KioIndexError):  # a version outside kio's range
            modules.append(load_payload_module(api_key, version, direction))
    return modules


@functools.cache
def response(api_key: int, version: int) -> Schema:
    """Return the response classes of one API version."""
    return Schema(api_key, version, EntityType.response)


@functools.cache
def request(api_key: int, version: int) -> Schema:
    """Return the request classes of one API version."""
    return Schema(api_key, version, EntityType.request)


def body(entity: Any) -> bytes:
    """An entity as kio writes it."""
    with io.BytesIO() as out:
        entity_writer(type(entity))(out, entity)
        return out.getvalue()


def as_message(entity: Any, message: type[M]) -> M:
    """What the broker should read where kio reads `entity`: the fields that `message` has, durations as integers."""
    nested = parts(message)
    values = {}
    for field in msgspec.structs.fields(message):
        name = field.name.removesuffix("_ms")
        if hasattr(entity, name):
            values[field.name] = _as_value(getattr(entity, name), nested[field.name])
    return message(**values)


def _as_value(value: Any, part: type[Message] | None) -> Any:
    if isinstance(value, datetime.timedelta):
        return to_ms(value)
    if part is None or value is None:
        return value
    return tuple(as_message(one, part) for one in value) if isinstance(value, tuple) else as_message(value, part)


def read_response(api_key: int, version: int, response: KafkaResponse) -> Any:
    """A response as a client reads it."""
    data = encode_body(api_key, version, response)
    entity, size = entity_reader(load_response_schema(api_key, version))(data, 0)
    assert size == len(data)
    return entity
