"""Our message classes say the same as kio's classes of every version served."""

from __future__ import annotations

import dataclasses
import types
import typing
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from kio.index import load_request_schema, load_response_schema
from kio.serial._implicit_defaults import get_tagged_field_default
from kio.serial._introspect import (
    EntityField,
    EntityTupleField,
    PrimitiveTupleField,
    classify_field,
    get_field_tag,
    get_schema_field_type,
)

from tidelog.broker.kafka.apis import all_apis
from tidelog.broker.kafka.handlers.api_versions import ApiVersions
from tidelog.broker.kafka.services import ApiHandler
from tidelog.broker.kafka.wire.codec import EncodedBody
from tidelog.broker.kafka.wire.messages import REQUESTS
from tidelog.broker.kafka.wire.messages.base import KafkaResponse, Message, field_name, parts
from tidelog.broker.kafka.wire.messages.cluster import MetadataResponse
from tidelog.broker.kafka.wire.reader import request_reader
from tidelog.broker.kafka.wire.writer import body_writer

TYPES = {"bool": bool, "uuid": uuid.UUID, "string": str, "bytes": bytes, "records": bytes, "float64": float}
NULLABLE = frozenset(("uuid",))
"""Kafka types of which null is a value."""


def served() -> list[ApiHandler]:
    return [api for api in [*all_apis(), ApiVersions([]).api] if api.api_key in REQUESTS]


def response_of(api: ApiHandler) -> type[KafkaResponse]:
    """The response class that a handler's signature names."""
    found = typing.get_type_hints(api.handle)["return"]
    return MetadataResponse if found is EncodedBody else found


PAIRS = [
    pytest.param(message, [load(api.api_key, version) for version in range(api.min_version, api.max_version + 1)])
    for api in served()
    for load, message in ((load_request_schema, REQUESTS[api.api_key]), (load_response_schema, response_of(api)))
]


def expected(field: dataclasses.Field[Any], part: type[Message] | None) -> tuple[Any, bool]:
    """The type that our field must have, an array's as a tuple of one, and whether it must allow None."""
    kind = classify_field(field)
    nullable = type(None) in getattr(field.type, "__args__", ())
    if isinstance(kind, EntityTupleField):
        return (part,), nullable
    if isinstance(kind, EntityField):
        return part, nullable
    kafka_type = get_schema_field_type(field)
    found = TYPES.get(kafka_type, int)
    return ((found,) if isinstance(kind, PrimitiveTupleField) else found), nullable or kafka_type in NULLABLE


def declared(annotation: Any) -> tuple[Any, bool]:
    """The same of an annotation."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    (found,) = (option for option in options if option is not type(None))
    if typing.get_origin(found) in (tuple, Sequence):
        found = tuple(option for option in typing.get_args(found) if option is not ...) or (None,)
    return found, len(options) > 1


def pairs(layout: type[Any], message: type[Message]) -> Iterator[tuple[type[Any], type[Message]]]:
    """A message and all of its parts, each with kio's class for it."""
    yield layout, message
    nested = parts(message)
    for field in dataclasses.fields(layout):
        part = nested.get(field_name(field))
        if part is not None:
            yield from pairs(classify_field(field).type_, part)


@pytest.mark.parametrize(("message", "layouts"), PAIRS)
def test_every_field_has_the_type_that_kafka_gives_it(message: type[Message], layouts: list[type[Any]]) -> None:
    nullable: dict[tuple[type[Message], str], bool] = {}
    for layout in layouts:
        for theirs, ours in pairs(layout, message):
            fields = {field.name: field for field in msgspec.structs.fields(ours)}
            for field in dataclasses.fields(theirs):
                name = field_name(field)
                if name in fields:
                    wanted, may_be_null = expected(field, parts(ours)[name])
                    assert declared(fields[name].type)[0] == wanted, (ours, name)
                    nullable[ours, name] = nullable.get((ours, name), False) or may_be_null
    for (ours, name), may_be_null in nullable.items():
        (found,) = (field for field in msgspec.structs.fields(ours) if field.name == name)
        if declared(found.type)[1] != may_be_null:  # a response need not use a null that it may have
            assert may_be_null and issubclass(message, KafkaResponse), (ours, name)


@pytest.mark.parametrize(("message", "layouts"), PAIRS)
def test_no_field_is_unknown_to_all_versions(message: type[Message], layouts: list[type[Any]]) -> None:
    known: dict[type[Message], set[str]] = {}
    for layout in layouts:
        for theirs, ours in pairs(layout, message):
            known.setdefault(ours, set()).update(field_name(field) for field in dataclasses.fields(theirs))
    assert message in known
    for ours, names in known.items():
        assert set(parts(ours)) <= names, ours


@pytest.mark.parametrize(("message", "layouts"), PAIRS)
def test_a_field_that_a_version_may_not_carry_has_a_default(message: type[Message], layouts: list[type[Any]]) -> None:
    for layout in layouts:
        for theirs, ours in pairs(layout, message):
            carried = {field_name(field): field for field in dataclasses.fields(theirs)}
            for found in msgspec.structs.fields(ours):
                field = carried.get(found.name)
                if field is None:
                    assert not found.required, (ours, found.name, theirs.__version__)
                elif get_field_tag(field) is not None and layout.__name__.endswith("Request"):
                    assert found.default == get_tagged_field_default(field), (ours, found.name)


@pytest.mark.parametrize("api", served(), ids=lambda api: REQUESTS[api.api_key].__name__)
def test_readers_and_writers_of_every_version_can_be_built(api: ApiHandler) -> None:
    for version in range(api.min_version, api.max_version + 1):
        request_reader(load_request_schema(api.api_key, version), REQUESTS[api.api_key])
        body_writer(load_response_schema(api.api_key, version), response_of(api))


@pytest.mark.parametrize("api", served(), ids=lambda api: REQUESTS[api.api_key].__name__)
def test_a_handler_takes_and_gives_the_messages_of_its_api(api: ApiHandler) -> None:
    assert typing.get_type_hints(api.handle)["request"] is REQUESTS[api.api_key]
    assert response_of(api).__name__ == load_response_schema(api.api_key, api.max_version).__name__
    assert REQUESTS[api.api_key].__name__ == load_request_schema(api.api_key, api.max_version).__name__
    said = REQUESTS[api.api_key].__doc__
    assert said is not None
    assert f"versions {api.min_version} to {api.max_version}." in said or f"version {api.min_version}." in said
