"""kio's message classes, made easy to build: one call for all versions of a message.

kio has one set of dataclasses for each API version, and speaks `datetime`, `timedelta`, `ErrorCode` and tuples.
Handlers want to write one response for all versions, in milliseconds, integers and lists. `response(key, version)`
returns a `Schema` whose `make(name, **fields)` drops the fields that the version does not have and converts the rest.
A name that no served version knows is a programming error and raises.

Classes are imported lazily, per API and version: importing all of kio costs seconds (kafka-wire.md section 1).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kio.index import KioIndexError, load_payload_module
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def to_ms(value: datetime.timedelta) -> int:
    """A duration as kio decodes it, in whole milliseconds."""
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
    """The response classes of one API version."""
    return Schema(api_key, version, EntityType.response)


@functools.cache
def request(api_key: int, version: int) -> Schema:
    """The request classes of one API version."""
    return Schema(api_key, version, EntityType.request)
