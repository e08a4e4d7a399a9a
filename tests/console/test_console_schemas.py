"""Values that a schema registry describes: Avro and Protobuf, over a registry that the test serves."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
import tracemalloc
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from aiohttp import web
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.console.avro import MAX_ITEMS, AvroSchema
from tidelog.console.protobuf import ProtobufSchema
from tidelog.console.schemas import SchemaRegistry
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import InvalidInput

ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": ["null", "string"]},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "tags", "type": {"type": "map", "values": "int"}},
        {"name": "before", "type": ["null", "Order"]},
        {"name": "last", "type": "shop.State"},
    ],
}


def long(value: int) -> bytes:
    """A number as Avro writes it."""
    left = (value << 1) ^ (value >> 63)
    found = bytearray()
    while True:
        byte, left = left & 0x7F, left >> 7
        found.append(byte | (0x80 if left else 0))
        if not left:
            return bytes(found)


def text(value: str) -> bytes:
    return long(len(value.encode())) + value.encode()


INNER = long(1) + long(0) + long(0) + long(1) + b"\x05" + long(0) + long(0) + long(1)
OUTER = (
    long(-7) + long(1) + text("<b>é") + long(1) + long(2) + b"\xff\x38"
    + long(-1) + long(5) + text("a") + long(3) + long(0) + long(1) + INNER + long(0)
)  # fmt: skip
EXPECTED = {
    "id": -7, "customer": "<b>é", "state": "PAID", "price": "-2.00", "tags": {"a": 3},
    "before": {"id": 1, "customer": None, "state": "NEW", "price": "0.05", "tags": {}, "before": None, "last": "PAID"},
    "last": "NEW",
}  # fmt: skip


def test_a_record_of_avro_is_read_as_it_was_written() -> None:
    assert AvroSchema(json.dumps(ORDER)).read(OUTER) == EXPECTED


def test_decimals_are_exact_whatever_their_precision() -> None:
    schema = AvroSchema(json.dumps({"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 10}))
    for number, shown in ((12345678901234567890123456789012345678, "1234567890123456789012345678.9012345678"),
                          (0, "0.0000000000"), (-5, "-0.0000000005")):  # fmt: skip
        data = number.to_bytes(16, "big", signed=True)
        assert schema.read(long(len(data)) + data) == shown


def test_names_of_other_schemas_are_found() -> None:
    line = {"type": "record", "name": "Line", "namespace": "shop", "fields": [{"name": "order", "type": "shop.Order"}]}
    found = AvroSchema(json.dumps(line), {"order.avsc": json.dumps(ORDER)}).read(OUTER)
    assert found == {"order": EXPECTED}


@given(data=st.binary(max_size=200))
@hypothesis_settings(max_examples=examples(300), deadline=None)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidInput):
        json.dumps(AvroSchema(json.dumps(ORDER)).read(data))


@given(
    value=st.recursive(st.integers(-(1 << 63), (1 << 63) - 1), lambda inner: st.lists(inner, max_size=4), max_leaves=8)
)
@hypothesis_settings(max_examples=examples(100), deadline=None)
def test_numbers_and_arrays_come_back(value: Any) -> None:
    def schema(each: Any, depth: int) -> Any:
        return "long" if depth == 0 else {"type": "array", "items": ["long", schema(each, depth - 1)]}

    def written(each: Any, depth: int) -> bytes:
        if depth == 0:
            return long(each)
        body = b"".join(
            long(0) + long(one) if isinstance(one, int) else long(1) + written(one, depth - 1) for one in each
        )
        return (long(len(each)) + body if each else b"") + long(0)

    def depth_of(each: Any) -> int:
        return 0 if isinstance(each, int) else 1 + max((depth_of(one) for one in each), default=0)

    depth = depth_of(value)
    assert AvroSchema(json.dumps(schema(value, depth))).read(written(value, depth)) == value


@pytest.mark.parametrize(
    ("schema", "data"),
    [
        ({"type": "array", "items": "null"}, long(1 << 60)),
        ({"type": "array", "items": "null"}, long(MAX_ITEMS + 1) + long(0)),
        ("bytes", long(1 << 60)),
        ("string", long(-1)),
        ("string", long(1) + b"\xff"),
        ("long", b"\xff" * 11),
        (["null"], long(1)),
        ("int", long(1) + b"\x00"),
        ({"type": "record", "name": "R", "fields": [{"name": "r", "type": "R"}]}, b""),
    ],
)
def test_a_value_that_would_take_much_or_is_wrong_is_refused(schema: Any, data: bytes) -> None:
    with pytest.raises(InvalidInput):
        AvroSchema(json.dumps(schema)).read(data)


@pytest.mark.parametrize("schema", ["", "{", "[1", '{"type": "record", "name": "R"}', '{"name": "x"}', "{}"])
def test_what_is_no_schema_is_refused(schema: str) -> None:
    with pytest.raises(InvalidInput):
        AvroSchema(schema).read(b"\x02")


def test_reals_that_json_has_not_are_texts() -> None:
    assert AvroSchema('"double"').read(struct.pack("<d", float("nan"))) == "nan"
    assert AvroSchema('"float"').read(struct.pack("<f", 0.5)) == 0.5


def protobuf_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    file.message_type.add(name="Other")
    order = file.message_type.add(name="Order")
    order.field.add(name="order_id", number=1, type=3, label=1)
    order.field.add(name="at", number=2, type=11, label=1, type_name=".google.protobuf.Timestamp")
    line = order.nested_type.add(name="Line")
    line.field.add(name="sku", number=1, type=9, label=1)
    return file


def test_a_message_of_protobuf_is_found_by_its_place_and_read() -> None:
    schema = ProtobufSchema(protobuf_file().SerializeToString(), [])
    assert schema.read(long(1) + long(1) + b"\x08\x2a\x12\x02\x08\x01") == {
        "order_id": "42",
        "at": "1970-01-01T00:00:01Z",
    }
    assert schema.read(long(2) + long(1) + long(0) + b"\x0a\x03<b>") == {"sku": "<b>"}
    assert schema.read(long(0)) == {}
    for wrong in (b"", long(1) + long(9), long(99), long(1) + long(1) + b"\xff", long(1) + long(-1)):
        with pytest.raises(InvalidInput):
            schema.read(wrong)
    with pytest.raises(InvalidInput):
        ProtobufSchema(b"no file", [])


@contextlib.asynccontextmanager
async def registry(schemas: Mapping[int, Mapping[str, Any]]) -> AsyncIterator[tuple[SchemaRegistry, list[str]]]:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path_qs)
        found = schemas.get(int(request.match_info["id"]))
        return web.json_response(found) if found is not None else web.json_response({"error_code": 40403}, status=404)

    app = web.Application()
    app.add_routes([web.get("/schemas/ids/{id}", answer), web.get("/subjects/{subject}/versions/{id}", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found = SchemaRegistry(f"http://127.0.0.1:{runner.addresses[0][1]}", SystemClock())
    try:
        yield found, asked
    finally:
        await found.close()
        await runner.cleanup()


def framed(schema_id: int, payload: bytes) -> bytes:
    return b"\0" + schema_id.to_bytes(4, "big") + payload


async def test_framed_values_are_shown_by_their_schemas_which_are_asked_for_once() -> None:
    proto = base64.b64encode(protobuf_file().SerializeToString()).decode()
    schemas: dict[int, dict[str, Any]] = {
        1: {"schema": json.dumps(ORDER)},
        2: {"schemaType": "PROTOBUF", "schema": proto},
        3: {"schemaType": "JSON", "schema": "{}"},
        4: {
            "schema": '{"type": "array", "items": "shop.Order"}',
            "references": [{"name": "shop.Order", "subject": "a/b <", "version": 1}],
        },
        5: {"schemaType": "THRIFT", "schema": "struct"},
    }
    async with registry(schemas) as (found, asked):
        for _ in range(3):
            shown = await found.shown(framed(1, OUTER), 4_096)
            assert shown is not None
            assert (shown["kind"], json.loads(shown["text"]), shown["schema"]) == ("avro", EXPECTED, 1)
        assert asked == ["/schemas/ids/1"]
        message = await found.shown(framed(2, long(1) + long(1) + b"\x08\x2a"), 4_096)
        assert message is not None
        assert (message["kind"], json.loads(message["text"])) == ("protobuf", {"order_id": "42"})
        document = await found.shown(framed(3, b'{"a": 1}'), 4_096)
        assert document is not None
        assert json.loads(document["text"]) == {"a": 1}
        referring = await found.shown(framed(4, long(1) + OUTER + long(0)), 4_096)
        assert referring is not None
        assert json.loads(referring["text"]) == [EXPECTED]
        assert asked[-1] == "/subjects/a%2Fb%20%3C/versions/1"
        cut = await found.shown(framed(1, OUTER), 10)
        assert cut is not None
        assert (cut["cut"], len(cut["text"])) == (True, 10)
        wrong = await found.shown(framed(1, b"\x80"), 4_096)
        assert wrong is not None
        assert (wrong["kind"], "schema" in wrong["problem"]) == ("bytes", True)
        unknown = await found.shown(framed(5, b""), 4_096)
        assert unknown is not None
        assert "THRIFT".lower() in unknown["problem"]


async def test_what_has_no_frame_or_no_schema_is_shown_as_it_is() -> None:
    async with registry({}) as (found, asked):
        for data in (None, b"", b"\0\0\0", b"text that is long enough"):
            assert await found.shown(data, 100) is None
        assert await found.shown(framed(9, b"x"), 100) is None
        assert await found.shown(framed(9, b"x"), 100) is None
        assert asked == ["/schemas/ids/9"]


async def test_a_registry_that_is_away_is_said_beside_the_bytes() -> None:
    found = SchemaRegistry("http://127.0.0.1:9", SystemClock())
    try:
        shown = await found.shown(framed(1, b"\xff"), 100)
        assert shown is not None
        assert (shown["kind"], "registry" in shown["problem"]) == ("bytes", True)
    finally:
        await found.close()


def nested(depth: int, items: int) -> bytes:
    return b"[" * depth + b",".join([b"1"] * items) + b"]" * depth


@pytest.mark.parametrize(
    ("schema", "payload"),
    [
        ({"schemaType": "JSON", "schema": "{}"}, nested(depth=300, items=50_000)),
        (
            {"schema": json.dumps({"type": "array", "items": {"type": "enum", "name": "E", "symbols": ["x" * 3_000]}})},
            long(10_000) + long(0) * 10_000 + long(0),
        ),
    ],
    ids=["indentation", "a long symbol"],
)
async def test_no_more_text_is_made_of_a_value_than_is_shown(schema: dict[str, Any], payload: bytes) -> None:
    """Each would be 30 MB of text, and a gigabyte if a test had the time."""
    async with registry({1: schema}) as (found, _asked):
        await found.shown(framed(1, b""), 100)
        tracemalloc.start()
        try:
            shown = await found.shown(framed(1, payload), 4_096)
            assert tracemalloc.get_traced_memory()[1] < 5_000_000
        finally:
            tracemalloc.stop()
        assert shown is not None
        assert ("problem" in shown, shown["cut"], len(shown["text"])) == (False, True, 4_096)


async def test_others_go_on_while_a_value_is_read() -> None:
    async with registry({1: {"schemaType": "JSON", "schema": "{}"}}) as (found, _asked):
        await found.shown(framed(1, b"1"), 100)
        turned = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(turned.set_result, None)
        await found.shown(framed(1, nested(depth=10, items=1_000)), 4_096)
        assert turned.done(), "the event loop stood while the value was read"


async def test_values_whose_schema_is_not_told_are_not_kept() -> None:
    found = SchemaRegistry("http://127.0.0.1:9", SystemClock())
    try:
        await found.shown(framed(1, b"x"), 100)
        tracemalloc.start()
        try:
            for _ in range(40):
                shown = await found.shown(framed(1, bytes(256 << 10)), 100)
                assert shown is not None
                assert "registry" in shown["problem"]
            assert tracemalloc.get_traced_memory()[0] < 2_000_000
        finally:
            tracemalloc.stop()
    finally:
        await found.close()


@pytest.mark.parametrize(
    "references", [5, [5], [{}], [{"name": "a", "subject": "a", "version": "latest"}], {"name": "a"}]
)
async def test_references_that_are_none_are_said_beside_the_bytes(references: Any) -> None:
    async with registry({1: {"schema": '"long"', "references": references}}) as (found, _asked):
        shown = await found.shown(framed(1, long(1)), 100)
        assert shown is not None
        assert (shown["kind"], "references" in shown["problem"]) == ("bytes", True)


def test_the_protobuf_library_reads_what_the_test_writes() -> None:
    pool = descriptor_pool.DescriptorPool()
    file = protobuf_file()
    del file.dependency[:]
    del file.message_type[1].field[1]
    pool.Add(file)
    order = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))(order_id=42)
    assert order.SerializeToString() == b"\x08\x2a"
