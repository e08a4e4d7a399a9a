"""Base classes of messages, and the mapping of their fields to those of kio's classes.

A message class here covers all served versions of a message. A field has kio's name, and a duration
or a point in time, which is a `timedelta` or `datetime` in kio, is an integer whose name ends in `_ms`. A field that
some served version lacks has a default, which a handler reads for such versions. Fields that no handler
uses are not declared; they are read and dropped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, dataclass_transform, get_args

import msgspec

_IN_MS = frozenset(("timedelta_i32", "timedelta_i64", "datetime_i64"))


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Message(msgspec.Struct, frozen=True):
    """A message or a part of one. Constructed with keywords, which mypy checks."""


class KafkaRequest(Message):
    """A client's request."""

    API_KEY: ClassVar[int]


class KafkaResponse(Message):
    """The response to a request."""


def field_name(field: dataclasses.Field[Any]) -> str:
    """Return the name in our message of a field of kio's class."""
    return f"{field.name}_ms" if field.metadata.get("kafka_type") in _IN_MS else field.name


@functools.cache
def parts(message: type[Message]) -> Mapping[str, type[Message] | None]:
    """Return the fields of a message with the message class of their values; None for other types."""
    return {
        field.name: next((found for found in _inside(field.type) if issubclass(found, Message)), None)
        for field in msgspec.structs.fields(message)
    }


def _inside(annotation: Any) -> Iterator[type[Any]]:
    """Yield the classes in an annotation, inside unions and tuples."""
    if isinstance(annotation, type):
        yield annotation
    for argument in get_args(annotation):
        yield from _inside(argument)
