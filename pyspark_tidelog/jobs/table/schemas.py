"""The columns and the partitioning of tables: what options say, as Iceberg's schema and spec. No I/O but one file.

Every table has the place of each record in Kafka as columns:

    _topic string, _partition int, _offset long, _timestamp timestamptz

A raw table has besides `key binary, value binary, headers list<struct<key string, value binary>>`; a table of JSON has
`_key binary` and the fields of the objects; the quarantine has `reason string` and what a raw table has.

Entry: `raw_fields`, `json_fields`, `quarantine_schema`, `given_schema`, `partition_spec`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    YearTransform,
)
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from pyspark_tidelog.jobs.table.ddl import parse_ddl
from tidelog.runtime.errors import ConfigError

RAW, JSON = "raw", "json"
MESSAGE_KEY = "_key"
"""The column of the record's key in a table of JSON."""
_PLACE: tuple[tuple[str, IcebergType], ...] = (
    ("_topic", StringType()),
    ("_partition", IntegerType()),
    ("_offset", LongType()),
    ("_timestamp", TimestamptzType()),
)
DELETED = "_tidelog_deleted"
"""A column of staged rows only: the record deletes its key."""
OWN = (*(name for name, _ in _PLACE), MESSAGE_KEY, DELETED)
"""Columns that no field of an object can have."""
_FILLED = (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
    TimestamptzType,
)
_TRANSFORM = re.compile(r"^(?P<name>\w+)\(\s*(?:(?P<number>\d+)\s*,\s*)?(?P<column>[^,()]+?)\s*\)$")
_TIMES: dict[str, Callable[[], Transform[Any, Any]]] = {
    "year": YearTransform,
    "month": MonthTransform,
    "day": DayTransform,
    "hour": HourTransform,
}
_IDENTITIES = (BooleanType, DateType, IntegerType, LongType, StringType)


def _place() -> list[NestedField]:
    return [NestedField(number, name, kind, required=False) for number, (name, kind) in enumerate(_PLACE, 1)]


def _headers(first: int) -> NestedField:
    pair = StructType(
        NestedField(first + 2, "key", StringType(), required=False),
        NestedField(first + 3, "value", BinaryType(), required=False),
    )
    return NestedField(first, "headers", ListType(first + 1, pair, element_required=False), required=False)


def raw_fields() -> list[NestedField]:
    """Return the columns of a raw table."""
    pair = [NestedField(number, name, BinaryType(), required=False) for number, name in ((5, "key"), (6, "value"))]
    return [*_place(), *pair, _headers(7)]


def json_fields(given: Sequence[NestedField] = ()) -> list[NestedField]:
    """Return the columns of a table of JSON: its own, and those that were given or inferred."""
    return [*_place(), NestedField(5, MESSAGE_KEY, BinaryType(), required=False), *given]


def quarantine_schema() -> Schema:
    """Return the columns of a quarantine."""
    return Schema(NestedField(20, "reason", StringType(), required=False), *raw_fields())


def given_schema(text: str) -> list[NestedField]:
    """Return the columns that an option gives: DDL, or a file of DDL or of Iceberg's JSON. Raises `ConfigError`."""
    source = f"schema {text!r}"
    path = Path(text)
    if not any(sign in text for sign in " ,<") or path.suffix in (".json", ".ddl", ".sql"):
        source = f"schema file {text}"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{source} cannot be read: {error}", hint="give raw, json, a file, or columns: 'id long, name string'"
            ) from error
    fields = _from_json(text, source) if text.lstrip().startswith("{") else parse_ddl(text, source)
    _check_fields(fields, source)
    return fields


def _from_json(text: str, source: str) -> list[NestedField]:
    """Return the columns of Iceberg's JSON, or of Spark's, whose fields have no ids."""
    try:
        told = json.loads(text)
        return list(Schema.model_validate({"schema-id": 0, **told}).fields)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{source} is no schema of Iceberg: {error}", hint="see https://iceberg.apache.org/spec/#schemas"
        ) from error


def _check_fields(fields: Sequence[NestedField], source: str) -> None:
    names = [field.name.lower() for field in fields]
    for field in fields:
        if field.name.lower() in OWN:
            raise ConfigError(f"{source} has a column {field.name}, which is one of the table's own: {', '.join(OWN)}")
        if names.count(field.name.lower()) > 1:
            raise ConfigError(f"{source} has the column {field.name} twice")
        if "." in field.name:
            raise ConfigError(f"{source} has a column {field.name!r}: a name cannot have a dot")
        check_type(field.field_type, f"{source}: column {field.name}")


def check_type(kind: IcebergType, source: str) -> None:
    """Refuse a type that JSON is not turned into. Raises `ConfigError`."""
    if isinstance(kind, StructType):
        for field in kind.fields:
            check_type(field.field_type, f"{source}.{field.name}")
    elif isinstance(kind, ListType):
        check_type(kind.element_type, f"{source}.element")
    elif isinstance(kind, MapType):
        if not isinstance(kind.key_type, StringType):
            raise ConfigError(f"{source} is a map whose keys are {kind.key_type}: JSON has strings")
        check_type(kind.value_type, f"{source}.value")
    elif not isinstance(kind, _FILLED):
        raise ConfigError(f"{source} has type {kind}, which a job does not fill", hint="use string or binary")


def partition_spec(texts: Sequence[str], schema: Schema) -> PartitionSpec:
    """Return the partitioning that texts say: `day(_timestamp)`, `bucket(16, id)`, `region`. Raises `ConfigError`."""
    fields: list[PartitionField] = []
    for text in texts:
        transform, column = _transform(text.strip())
        try:
            source = schema.find_field(column)
        except ValueError:
            raise ConfigError(
                f"--partition-by {text}: the table has no column {column}",
                hint=f"it has {', '.join(field.name for field in schema.fields)}",
            ) from None
        is_plain = isinstance(transform, IdentityTransform)
        if not transform.can_transform(source.field_type) or (
            is_plain and not isinstance(source.field_type, _IDENTITIES)
        ):
            raise ConfigError(f"--partition-by {text}: a column of type {source.field_type} cannot be used so")
        suffix = "" if is_plain else f"_{text.partition('(')[0].strip().lower()}"
        name = column.replace(".", "_") + suffix
        if any(field.source_id == source.field_id for field in fields):
            raise ConfigError(f"--partition-by {text}: {column} is used already")
        fields.append(PartitionField(source.field_id, PARTITION_FIELD_ID_START + len(fields), transform, name))
    return PartitionSpec(*fields)


def _transform(text: str) -> tuple[Transform[Any, Any], str]:
    if re.fullmatch(r"[\w.]+", text):
        return IdentityTransform(), text
    match = _TRANSFORM.match(text)
    if match is not None:
        name, number, column = match["name"].lower(), match["number"], match["column"]
        if name in _TIMES and number is None:
            return _TIMES[name](), column
        if name == "identity" and number is None:
            return IdentityTransform(), column
        if name in ("bucket", "truncate") and number is not None and 0 < int(number) < 1 << 31:
            width = int(number)
            return BucketTransform(width) if name == "bucket" else TruncateTransform(width), column
    raise ConfigError(
        f"--partition-by {text} is not understood",
        hint="COLUMN, year|month|day|hour(COLUMN), bucket(N, COLUMN) or truncate(W, COLUMN)",
    )
