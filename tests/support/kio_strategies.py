"""Hypothesis strategies for kio's message classes: `entities(cls)` draws any value that the wire can carry."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import uuid
from typing import Any

from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from kio.serial._introspect import (
    EntityField,
    EntityTupleField,
    PrimitiveField,
    classify_field,
    get_schema_field_type,
    is_optional,
)

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
_PRIMITIVES: dict[str, st.SearchStrategy[Any]] = {
    "int8": st.integers(-(1 << 7), (1 << 7) - 1),
    "int16": st.integers(-(1 << 15), (1 << 15) - 1),
    "int32": st.integers(-(1 << 31), (1 << 31) - 1),
    "int64": st.integers(-(1 << 63), (1 << 63) - 1),
    "uint8": st.integers(0, (1 << 8) - 1),
    "uint16": st.integers(0, (1 << 16) - 1),
    "uint32": st.integers(0, (1 << 32) - 1),
    "uint64": st.integers(0, (1 << 64) - 1),
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "error_code": st.sampled_from(list(ErrorCode)),
    "timedelta_i32": st.integers(-(1 << 31), (1 << 31) - 1).map(lambda ms: datetime.timedelta(milliseconds=ms)),
    "timedelta_i64": st.integers(0, 1 << 40).map(lambda ms: datetime.timedelta(milliseconds=ms)),
    "datetime_i64": st.integers(0, 1 << 32).map(lambda s: _EPOCH + datetime.timedelta(seconds=s)),
    "uuid": st.none() | st.integers(1, (1 << 128) - 1).map(lambda number: uuid.UUID(int=number)),
    "string": _TEXT,
    "bytes": st.binary(max_size=40),
    "records": st.binary(max_size=200),
}


def _nullable(field: dataclasses.Field[Any]) -> bool:
    return type(None) in getattr(field.type, "__args__", ())


def _values(field: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    kind = classify_field(field)
    if isinstance(kind, EntityField):
        values = entities(kind.type_)
        return st.none() | values if is_optional(field) else values
    if isinstance(kind, EntityTupleField):
        values = st.lists(entities(kind.type_), max_size=3).map(tuple)
        return st.none() | values if _nullable(field) else values
    values = _PRIMITIVES[get_schema_field_type(field)]
    if isinstance(kind, PrimitiveField):
        return st.none() | values if is_optional(field) else values
    values = st.lists(values, max_size=3).map(tuple)
    return st.none() | values if _nullable(field) else values


@functools.cache
def entities(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Any instance of one of kio's classes."""
    return st.builds(cls, **{field.name: _values(field) for field in dataclasses.fields(cls)})
