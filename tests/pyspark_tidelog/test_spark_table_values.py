"""JSON as columns: what fits a type, what widens or adds a column, and what goes to the quarantine."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.types import IcebergType, ListType, LongType, NestedField, StructType

from pyspark_tidelog.columns import column_names
from pyspark_tidelog.jobs.table.columns import inferred_fields, wanted_changes
from pyspark_tidelog.jobs.table.ddl import parse_ddl
from pyspark_tidelog.jobs.table.rows import KNOWN_YEARS, RowMaker, RowPlan
from pyspark_tidelog.jobs.table.schemas import JSON, RAW, given_schema, json_fields, partition_spec, raw_fields
from pyspark_tidelog.jobs.table.shapes import Shape, column_type
from pyspark_tidelog.jobs.table.values import ADD, IGNORE, REFUSE, Misfit, Wishes, converter
from pyspark_tidelog.rows import RowCollector
from tests.support.examples import examples
from tidelog.runtime.errors import ConfigError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
)
NAMES = st.text("abcAB_.", max_size=3)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=12
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=4)
LONGEST = "1234567890123456789012345678.0123456789"


def schema_of(ddl: str) -> Schema:
    """The table's own columns and others."""
    given = parse_ddl(ddl, "test")
    return Schema(
        *json_fields([NestedField(100 + i, f.name, f.field_type, required=f.required) for i, f in enumerate(given)])
    )


class Message:
    """A message as confluent-kafka has it."""

    def __init__(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        self._offset, self._key, self._value = offset, key, value

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 3

    def offset(self) -> int:
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_700_000_000_000 + self._offset

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return [("h", None), ("h", b"x")] if self._offset % 2 else None


class TimedMessage(Message):
    """A message of any time."""

    def __init__(self, offset: int, value: bytes | None, timestamp_ms: int) -> None:
        super().__init__(offset, b"k", value)
        self._timestamp_ms = timestamp_ms

    def timestamp(self) -> tuple[int, int]:
        return 1, self._timestamp_ms


def batch(records: Sequence[tuple[bytes | None, bytes | None]]) -> pa.RecordBatch:
    rows = RowCollector(column_names(include_headers=True))
    for offset, (key, value) in enumerate(records):
        rows.add(Message(offset, key, value))
    return rows.take()


def made(plan: RowPlan, values: Sequence[Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Wishes]:
    """Rows, what is quarantined, and wishes, for values that are turned to JSON unless they are bytes."""
    maker = RowMaker(plan)
    texts = [each if each is None or isinstance(each, bytes) else json.dumps(each).encode() for each in values]
    good, bad = maker.make(batch([(b"k", text) for text in texts]))
    return good.to_pylist(), bad.to_pylist(), maker.wishes


@pytest.mark.parametrize(
    ("ddl", "value", "wanted"),
    [
        ("boolean", True, True),
        ("int", (1 << 31) - 1, (1 << 31) - 1),
        ("int", 3.0, 3),
        ("long", -(1 << 63), -(1 << 63)),
        ("float", 0.5, 0.5),
        ("float", 1 << 24, 16777216.0),
        ("float", 1 << 100, 2.0**100),
        ("double", 7, 7.0),
        ("double", 1e300, 1e300),
        ("decimal(10,2)", 12.34, Decimal("12.34")),
        ("decimal(10,2)", "99999999.99", Decimal("99999999.99")),
        ("decimal(38,10)", 5, Decimal(5)),
        ("decimal(38,10)", f"-{LONGEST}", Decimal(f"-{LONGEST}")),
        ("decimal(38,0)", "9" * 38, Decimal("9" * 38)),
        ("decimal(38,38)", "0." + "9" * 38, Decimal("0." + "9" * 38)),
        ("string", "é\x00", "é\x00"),
        ("binary", base64.b64encode(b"\x00\xff").decode(), b"\x00\xff"),
        ("date", "1969-12-31", date(1969, 12, 31)),
        ("timestamp", "2024-02-29T12:00:00.123456+02:00", datetime(2024, 2, 29, 10, 0, 0, 123456, UTC)),
        ("timestamp", "1960-01-01T00:00:00Z", datetime(1960, 1, 1, tzinfo=UTC)),
        ("timestamp", "2024-01-01 00:00:00", datetime(2024, 1, 1, tzinfo=UTC)),
        ("timestamp_ntz", "2024-01-01T00:00:01", datetime(2024, 1, 1, 0, 0, 1)),
        ("array<long>", [1, None, 2], [1, None, 2]),
        ("map<string, long>", {"a": 1, "b": None}, [("a", 1), ("b", None)]),
        (
            "struct<a: long, b: array<struct<c: string>>>",
            {"b": [{"c": "x"}, None]},
            {"a": None, "b": [{"c": "x"}, None]},
        ),
    ],
)
def test_a_value_that_fits_its_column_is_kept_as_it_is(ddl: str, value: Any, wanted: Any) -> None:
    good, bad, wishes = made(RowPlan(JSON, schema_of(f"v {ddl}"), ADD), [{"v": value}])
    assert ([row["v"] for row in good], bad, bool(wishes)) == ([wanted], [], False)


@pytest.mark.parametrize(
    ("ddl", "value", "reason"),
    [
        ("boolean", 1, "v: 1 is no boolean"),
        ("int", True, "v: True is no int"),
        ("int", 1.5, "v: 1.5 is no int"),
        ("long", 1 << 63, "beyond 64 bits"),
        ("long", "5", "v: '5' is no long"),
        ("double", (1 << 53) + 1, "not the same"),
        ("double", 10**400, "beyond a double"),
        ("decimal(4,2)", 123.0, "does not fit"),
        ("decimal(4,2)", "1.234", "does not fit"),
        ("decimal(38,9)", LONGEST, "does not fit"),
        ("decimal(38,0)", "1" + "0" * 38, "does not fit"),
        ("decimal(38,20)", 0.1234567890123456789, "may have lost digits"),
        ("decimal(4,2)", "NaN", "does not fit"),
        ("decimal(4,2)", "x", "is no decimal"),
        ("string", 5, "v: 5 is no string"),
        ("binary", "*", "is no binary"),
        ("date", "2024-02-30", "is no date"),
        ("timestamp", 1_700_000_000, "is no timestamp"),
        ("timestamp_ntz", "2024-01-01T00:00:01Z", "without time zone"),
        ("array<long>", [1, "x"], "v.element: 'x' is no long"),
        ("map<string, long>", {"a": "b"}, "v.value: 'b' is no long"),
        ("struct<a: long>", {"a": {}}, "v.a: {} is no long"),
        ("struct<a: long not null>", {}, "v.a: is required"),
        ("long not null", None, "v: is required"),
    ],
)
def test_a_value_that_does_not_fit_is_quarantined_with_its_place(ddl: str, value: Any, reason: str) -> None:
    good, bad, wishes = made(RowPlan(JSON, schema_of(f"v {ddl}"), ADD), [{"v": value}])
    assert (good, len(bad), bool(wishes)) == ([], 1, False)
    assert reason in bad[0]["reason"]
    assert bad[0]["value"] == json.dumps({"v": value}).encode()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b'{"v": NaN}', "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"v": "\\ud800"}', "no JSON"),
        (b'{"v": 1} {"v": 2}', "no JSON"),
        (b"3", "3 is no object"),
        (b"[]", "[] is no object"),
        (b"null", "None is no object"),
        ({"V": 1}, "V: is the name of another column"),
        ({"_Offset": 1}, "_Offset: is the name of another column"),
        ({"_key": "x"}, "_key: is the name of another column"),
        ({"a.b": 1}, "cannot be a column"),
        ({"": 1}, "cannot be a column"),
    ],
)
def test_what_is_no_object_of_the_columns_is_quarantined(value: Any, reason: str) -> None:
    good, bad, wishes = made(RowPlan(JSON, schema_of("v long"), ADD), [value])
    assert (good, len(bad), bool(wishes)) == ([], 1, False)
    assert reason in bad[0]["reason"]


def test_the_place_of_a_record_is_kept_in_rows_and_in_the_quarantine() -> None:
    good, bad, _ = made(RowPlan(JSON, schema_of("v long"), ADD), [{"v": 1}, b"x", None])
    places = ("_topic", "_partition", "_offset", "_timestamp", "_key")
    at = datetime.fromtimestamp(1_700_000_000, UTC)
    assert next(tuple(row[name] for name in places) for row in good) == ("t", 3, 0, at, b"k")
    assert [(row["_offset"], row["v"]) for row in good] == [(0, 1), (2, None)]
    assert (bad[0]["_offset"], bad[0]["key"], bad[0]["value"]) == (1, b"k", b"x")
    assert bad[0]["headers"] == [{"key": "h", "value": None}, {"key": "h", "value": b"x"}]


@pytest.mark.parametrize("value", [b"{}", b"x"])
def test_times_that_python_does_not_have_are_told_as_its_first_and_last(value: bytes) -> None:
    end = 253_402_300_799_999
    rows = RowCollector(column_names(include_headers=True))
    for offset, at in enumerate([1_700_000_000_000_000, end + 1, end, -1, -(1 << 63), (1 << 63) - 1]):
        rows.add(TimedMessage(offset, value, at))
    good, bad = RowMaker(RowPlan(JSON, schema_of("v long"), ADD)).make(rows.take())
    told = [row["_timestamp"] for row in (good if good.num_rows else bad).to_pylist()]
    first, last = KNOWN_YEARS
    assert told == [last, last, last, datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC), first, last]


def test_a_raw_table_takes_every_record_as_it_is() -> None:
    maker = RowMaker(RowPlan(RAW, Schema(*raw_fields())))
    good, bad = maker.make(batch([(None, b""), (b"", None), (b"\xff", b"{")]))
    assert [(row["key"], row["value"]) for row in good.to_pylist()] == [(None, b""), (b"", None), (b"\xff", b"{")]
    assert [row["headers"] is None for row in good.to_pylist()] == [True, False, True]
    assert bad.num_rows == 0


def test_new_fields_and_wider_numbers_are_wishes_until_the_table_does_not_change_any_more() -> None:
    values = [{"v": 1 << 40}, {"w": [{"x": 1}]}, {"w": [{"x": 2.5}]}, {"v": "bad", "new": 1}]
    schema = schema_of("v int")
    good, bad, wishes = made(RowPlan(JSON, schema, ADD), values)
    changes = {change.path: str(change.type) for change in wanted_changes(schema, wishes, 100)}
    assert changes == {("v",): "long", ("w",): "list<struct<1: x: optional double>>"}
    assert len(bad) == 1, "a record that does not fit has no wishes"
    good, bad, wishes = made(RowPlan(JSON, schema, ADD, is_final=True), values)
    assert (good, len(bad), bool(wishes)) == ([], 4, False)
    good, bad, wishes = made(RowPlan(JSON, schema, REFUSE), values[1:3])
    assert (good, len(bad), bool(wishes)) == ([], 2, False)
    good, bad, wishes = made(RowPlan(JSON, schema, IGNORE), [{"V": 1, "w": 2, "_offset": 3, "v": 4}])
    assert ([row["v"] for row in good], bad, bool(wishes)) == ([4], [], False)


@pytest.mark.parametrize("value", [(1 << 24) + 1, (1 << 40) + 1, 1e39])
def test_a_number_that_a_float_cannot_hold_is_a_wish_for_a_double(value: float) -> None:
    schema = schema_of("v float")
    _, bad, wishes = made(RowPlan(JSON, schema, ADD), [{"v": value}])
    assert bad == []
    assert {change.path: str(change.type) for change in wanted_changes(schema, wishes, 100)} == {("v",): "double"}
    good, bad, _ = made(RowPlan(JSON, schema, ADD, is_final=True), [{"v": value}])
    assert (good, len(bad)) == ([], 1)


def test_most_values_decide_on_a_column_and_columns_have_a_bound() -> None:
    seen = Wishes()
    values: list[dict[str, Any]] = [{"b": 1}, {"B": 2}, {"c": {"d": None}}, {"e": []}, {"a": "x"}]
    for value in [*({"a": each} for each in range(9)), *values]:
        for name, each in value.items():
            seen.note_new((name,), each)
    assert [(each.name, str(each.field_type)) for each in inferred_fields(seen, 100)] == [("a", "long"), ("B", "long")]
    assert [each.name for each in inferred_fields(seen, 1)] == ["a"]


@given(st.lists(VALUES, max_size=8), st.integers(0, 8))
@settings(max_examples=examples(300), deadline=None)
def test_shapes_are_added_up_in_any_order(values: list[Any], cut: int) -> None:
    def shape(some: list[Any]) -> Shape:
        found = Shape()
        for each in some:
            found.add(each)
        return found

    def type_of(found: Shape) -> IcebergType | None:
        return column_type(found, itertools.count(1))

    whole = shape(values)
    first, second = shape(values[:cut]), shape(values[cut:])
    first.merge(second)
    assert type_of(first) == type_of(whole) == type_of(shape(values[::-1]))
    assert first.places() == whole.places()


@given(st.lists(OBJECTS, min_size=1, max_size=10))
@settings(max_examples=examples(300), deadline=None)
def test_after_the_wished_changes_every_object_is_a_row_with_its_values_or_quarantined(
    objects: list[dict[str, Any]],
) -> None:
    schema = Schema(*json_fields())
    _, _, wishes = made(RowPlan(JSON, schema, ADD), objects)
    fields = inferred_fields(wishes, 1000)
    schema = Schema(*json_fields(fields))
    good, bad, wishes = made(RowPlan(JSON, schema, ADD, is_final=True), objects)
    assert not wishes
    assert sorted([*(row["_offset"] for row in good), *(row["_offset"] for row in bad)]) == list(range(len(objects)))
    for row in good:
        mine = objects[row["_offset"]]
        for field in fields:
            assert same(mine.get(field.name), row[field.name], field.field_type), (mine, row)
        assert {name for name, each in mine.items() if each is not None} <= {field.name for field in fields}


def same(value: Any, kept: Any, kind: IcebergType) -> bool:
    """Whether a column has kept a value: nothing is lost but nulls in objects."""
    if value is None:
        return kept is None
    if isinstance(kind, StructType):
        names = {field.name: field.field_type for field in kind.fields}
        return all(each is None or name in names for name, each in value.items()) and all(
            same(value.get(name), kept[name], each) for name, each in names.items()
        )
    if isinstance(kind, ListType):
        return len(value) == len(kept) and all(
            same(each, other, kind.element_type) for each, other in zip(value, kept, strict=True)
        )
    return bool(value == kept) and (isinstance(value, bool) == isinstance(kept, bool) or isinstance(kind, LongType))


@given(VALUES, st.sampled_from(["boolean", "int", "decimal(9,3)", "date", "timestamp", "binary", "array<float>"]))
@settings(max_examples=examples(300), deadline=None)
def test_no_value_breaks_a_converter(value: Any, ddl: str) -> None:
    (field,) = parse_ddl(f"v {ddl}", "test")
    try:
        found = converter(field.field_type, ("v",))(value, Wishes(is_final=True))
    except Misfit:
        return
    arrow = schema_to_pyarrow(Schema(field)).field(0).type
    assert len(pa.array([found], arrow)) == 1


UPSERTS = schema_of("id long, region string, v long")


@pytest.mark.parametrize(
    ("by", "key", "wanted"),
    [
        (("_key",), b"anything", {}),
        (("id",), b"17", {"id": 17}),
        (("id",), b'{"id": 17, "more": 1}', {"id": 17}),
        (("region",), b"north", {"region": "north"}),
        (("region",), b'"north"', {"region": "north"}),
        (("region",), b"17", {"region": "17"}),
        (("id", "region"), b'{"region": "n", "id": 1}', {"id": 1, "region": "n"}),
    ],
)
def test_the_key_of_a_record_without_a_value_says_what_is_deleted(
    by: tuple[str, ...], key: bytes, wanted: dict[str, Any]
) -> None:
    good, bad = RowMaker(RowPlan(JSON, UPSERTS, upsert_by=by)).make(batch([(key, None)]))
    (row,) = good.to_pylist()
    assert bad.num_rows == 0
    assert row["_tidelog_deleted"] is True
    assert {name: row[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("by", "key", "value", "reason"),
    [
        (("_key",), None, b"{}", "no key"),
        (("_key",), None, None, "no key"),
        (("id",), None, None, "neither key nor value"),
        (("id",), b"north", None, "no long"),
        (("id",), b"\xff", None, "no text"),
        (("id",), b'{"region": "n"}', None, "id: is missing"),
        (("id", "region"), b"17", None, "no JSON object"),
        (("id",), b"17", b'{"v": 1}', "id: is a column of the key, and null"),
    ],
)
def test_a_record_whose_key_is_not_known_is_quarantined(
    by: tuple[str, ...], key: bytes | None, value: bytes | None, reason: str
) -> None:
    good, bad = RowMaker(RowPlan(JSON, UPSERTS, upsert_by=by)).make(batch([(key, value)]))
    assert good.num_rows == 0
    assert reason in bad.to_pylist()[0]["reason"]


def test_given_columns_are_read_from_ddl_and_from_icebergs_json(tmp_path: Any) -> None:
    text = (
        "id long not null comment 'key', `odd name` array<struct<a: int, b: map<string, decimal(5, 2)>>>, at timestamp"
    )
    told = [(each.name, str(each.field_type), each.required) for each in given_schema(text)]
    assert [each[0] for each in told] == ["id", "odd name", "at"]
    assert [each[2] for each in told] == [True, False, False]
    assert told[2][1] == "timestamptz"
    file = tmp_path / "schema.json"
    file.write_text(Schema(*given_schema(text)).model_dump_json())
    assert [(each.name, str(each.field_type), each.required) for each in given_schema(str(file))] == told
    (tmp_path / "schema.ddl").write_text(text)
    assert len(given_schema(str(tmp_path / "schema.ddl"))) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id", "cannot be read"),
        ("id long,", "a name is expected at the end"),
        ("id lung", "'lung' at character 3"),
        ("id long name string", "'name' at character 8"),
        ("id long, ID string", "twice"),
        ("_offset long", "one of the table's own"),
        ("a decimal(50,2)", "a precision up to 38"),
        ("m map<int, int>, b int", "whose keys are int"),
        ("`a.b` long, c int", "cannot have a dot"),
        ("a array<int", "> is expected"),
        ("a ?, b int", "not understood"),
    ],
)
def test_columns_that_are_not_understood_are_refused_with_the_place(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        given_schema(text)
    assert said in str(refused.value)


def test_the_partitioning_is_read_as_iceberg_writes_it() -> None:
    schema = schema_of("id long, region string, d double")
    spec = partition_spec(["day(_timestamp)", "bucket(16, id)", "region"], schema)
    assert [(each.name, str(each.transform)) for each in spec.fields] == [
        ("_timestamp_day", "day"),
        ("id_bucket", "bucket[16]"),
        ("region", "identity"),
    ]
    for text, said in [
        ("hour(id)", "cannot be used so"),
        ("d", "cannot be used so"),
        ("bucket(id)", "not understood"),
        ("day(nothing)", "no column nothing"),
        ("sort(id)", "not understood"),
    ]:
        with pytest.raises(ConfigError, match=said):
            partition_spec([text], schema)
    with pytest.raises(ConfigError, match="used already"):
        partition_spec(["id", "bucket(2, id)"], schema)
