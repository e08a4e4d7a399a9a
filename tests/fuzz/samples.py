"""Random values of kio's message classes and of msgspec's structs, with the names that exist in the fuzzed worlds."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import io
import random
import struct
import uuid
from typing import Any

import msgspec
from kio.index import load_request_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_writer
from kio.serial._introspect import (
    EntityField,
    EntityTupleField,
    PrimitiveField,
    classify_field,
    get_schema_field_type,
    is_optional,
)
from msgspec import inspect

from tidelog.batch.batch import Compression, Record, build_batch

WORDS = ("t", "u", "", "g", "h", "m", "__consumer_offsets", "consumer", "range", "*", "bad topic!", "é", "1", "0",
         "retention.ms", "cleanup.policy", "compact", "t" * 249, "x" * 300)  # fmt: skip
TIMES_MS = (0, 1, 100, 6000, 30_000, -1, 1 << 31)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_UBITS = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}


def records(rng: random.Random) -> bytes:
    """A record batch as a producer sends it; now and then a damaged one."""
    count = rng.randint(1, 4)
    idempotent = rng.random() < 0.3
    made = [
        Record(n, 1_700_000_000_000 + n, rng.choice((None, b"k")), rng.randbytes(rng.randint(0, 40)), ())
        for n in range(count)
    ]
    data = build_batch(
        made,
        compression=rng.choice(list(Compression)),
        producer_id=rng.randint(0, 3) if idempotent else -1,
        producer_epoch=rng.randint(0, 2) if idempotent else -1,
        base_sequence=rng.randint(0, 5) if idempotent else -1,
    )
    if rng.random() < 0.1:
        damaged = bytearray(data)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        return bytes(damaged)
    return data


def number(rng: random.Random, bits: int, signed: bool = True) -> int:
    """Mostly small, sometimes at an edge."""
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    if rng.random() < 0.85:
        return max(low, rng.choice((0, 0, 1, 1, 2, 3, -1, -2, 100)))
    return rng.choice((low, high, rng.randint(low, high)))


def _primitive(kafka_type: str, name: str, rng: random.Random) -> Any:
    if kafka_type in _BITS:
        if "bytes" in name:
            return rng.choice((0, 1, 1000, 1 << 20, (1 << 31) - 1))
        return number(rng, _BITS[kafka_type])
    if kafka_type in _UBITS:
        return number(rng, _UBITS[kafka_type], signed=False)
    if kafka_type == "float64":
        return rng.random()
    if kafka_type == "bool":
        return rng.random() < 0.5
    if kafka_type == "error_code":
        return rng.choice(list(ErrorCode))
    if kafka_type == "timedelta_i32":
        return datetime.timedelta(milliseconds=min(rng.choice(TIMES_MS), (1 << 31) - 1))
    if kafka_type == "timedelta_i64":
        return datetime.timedelta(milliseconds=max(0, rng.choice(TIMES_MS)))
    if kafka_type == "datetime_i64":
        return _EPOCH + datetime.timedelta(seconds=rng.choice((0, 1_700_000_000)))
    if kafka_type == "uuid":
        return rng.choice((None, uuid.UUID(int=1), uuid.UUID(int=2), uuid.UUID(int=77)))
    if kafka_type == "records":
        return records(rng)
    if kafka_type == "bytes":
        return rng.choice((b"", b"x", b"\x00\x00\x00\x00\x00\x01\x00\x01t", rng.randbytes(20)))
    assert kafka_type == "string", kafka_type
    return rng.choice(WORDS)


def _nullable(field: dataclasses.Field[Any]) -> bool:
    return type(None) in getattr(field.type, "__args__", ())


def _value(field: dataclasses.Field[Any], rng: random.Random) -> Any:
    kind = classify_field(field)
    if isinstance(kind, EntityField):
        return None if is_optional(field) and rng.random() < 0.3 else entity(kind.type_, rng)
    if isinstance(kind, EntityTupleField):
        if _nullable(field) and rng.random() < 0.2:
            return None
        return tuple(entity(kind.type_, rng) for _ in range(rng.choice((0, 1, 1, 2, 3))))
    kafka_type = get_schema_field_type(field)
    if isinstance(kind, PrimitiveField):
        if is_optional(field) and rng.random() < 0.2:
            return None
        return _primitive(kafka_type, field.name, rng)
    if _nullable(field) and rng.random() < 0.2:
        return None
    return tuple(_primitive(kafka_type, field.name, rng) for _ in range(rng.choice((0, 1, 2))))


def entity(cls: type[Any], rng: random.Random) -> Any:
    """A value of one of kio's classes, encodable in its version."""
    return cls(**{field.name: _value(field, rng) for field in dataclasses.fields(cls)})


def body(message: Any) -> bytes:
    """The bytes of a message without its header."""
    with io.BytesIO() as out:
        entity_writer(type(message))(out, message)
        return out.getvalue()


def header(api_key: int, version: int, correlation_id: int, flexible: bool, client_id: str = "fuzz") -> bytes:
    """A request header."""
    raw = client_id.encode()
    return struct.pack(">hhih", api_key, version, correlation_id, len(raw)) + raw + (b"\x00" if flexible else b"")


def request_frame(api_key: int, version: int, rng: random.Random) -> bytes:
    """A valid request, without its size."""
    cls = load_request_schema(api_key, version)
    return header(api_key, version, rng.randrange(1 << 31), cls.__flexible__) + body(entity(cls, rng))


def of_type(kind: inspect.Type, rng: random.Random) -> Any:
    """A value that msgpack can carry, of a msgspec type; sometimes of another one."""
    if rng.random() < 0.02:
        return rng.choice((None, -1, 1 << 63, "x", b"x", [], {}, [[]], True, 1.5))
    match kind:
        case inspect.IntType():
            return number(rng, 64)
        case inspect.StrType():
            return rng.choice(WORDS)
        case inspect.BytesType():
            return rng.choice(((1).to_bytes(16, "big"), (2).to_bytes(16, "big"), b"", b"x"))
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.FloatType():
            return rng.random()
        case inspect.NoneType():
            return None
        case inspect.EnumType(cls=cls) if issubclass(cls, enum.Enum):
            return rng.choice(list(cls)).value
        case inspect.UnionType(types=types):
            return of_type(rng.choice(types), rng)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return [of_type(item, rng) for _ in range(rng.choice((0, 1, 2)))]
        case inspect.TupleType(item_types=items):
            return [of_type(item, rng) for item in items]
        case inspect.DictType(key_type=key, value_type=value):
            return {of_type(key, rng): of_type(value, rng) for _ in range(rng.choice((0, 1, 2)))}
        case inspect.RawType():  # the stream ranges of an object
            return of_type(inspect.type_info(list[tuple[int, int, int]]), rng)
        case inspect.StructType():
            values = [of_type(field.type, rng) for field in kind.fields]
            tag = [] if kind.tag is None else [kind.tag]
            return (
                [*tag, *values]
                if kind.array_like
                else dict(zip([field.encode_name for field in kind.fields], values, strict=True))
            )
        case _:
            return rng.choice((0, "t", None))


def command(kind: Any, rng: random.Random) -> bytes:
    """msgpack of a value of a msgspec type (an odd one where a dictionary got an unhashable key)."""
    try:
        return msgspec.msgpack.encode(of_type(inspect.type_info(kind), rng))
    except TypeError:
        return b"\x90"
