"""Records as rows of the table, and those that are none, with the reason. What a task does between reading and writing.

Invariant: every record of a batch is in exactly one of the two results.

Entry: `RowMaker`, `RowPlan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema

from pyspark_tidelog.jobs.table.schemas import DELETED, JSON, MESSAGE_KEY, OWN, RAW, quarantine_schema
from pyspark_tidelog.jobs.table.values import ADD, Misfit, Wishes, converter, struct_converter

RAW_KEY = "key"
KNOWN_YEARS = (datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC))
"""The first and the last time of a record that Python has, and so pyiceberg; others are told as these."""
_PLACES = {"_topic": "topic", "_partition": "partition", "_offset": "offset", "_timestamp": "timestamp"}
_RAW = {RAW_KEY: "key", "value": "value", "headers": "headers"}


@dataclass(frozen=True)
class RowPlan:
    """How records become rows. Pickled to the executors."""

    kind: str
    """`RAW` or `JSON`."""
    schema: Schema
    """The table's."""
    new_fields: str = ADD
    is_final: bool = False
    """The table does not change any more: what does not fit goes to the quarantine."""
    upsert_by: tuple[str, ...] = ()
    """Columns of the key; empty: every record is a row."""


class RowMaker:
    """Turns batches of the data source into rows; `wishes` tells what they would need besides."""

    def __init__(self, plan: RowPlan) -> None:
        self._plan = plan
        self.wishes = Wishes(plan.new_fields, is_final=plan.is_final)
        self._arrow = staged_schema(plan.schema) if plan.upsert_by else nullable(schema_to_pyarrow(plan.schema))
        self._bad = schema_to_pyarrow(quarantine_schema())
        own = {**_PLACES, **(_RAW if plan.kind == RAW else {MESSAGE_KEY: "key"})}
        self._own = {name: source for name, source in own.items() if name in self._arrow.names}
        self._fields = tuple(each for each in plan.schema.fields if plan.kind == JSON and each.name not in OWN)
        self._convert = struct_converter(self._fields, (), OWN)
        self._keys = [(name, converter(plan.schema.find_field(name).field_type, (name,))) for name in plan.upsert_by]

    def make(self, batch: pa.RecordBatch) -> tuple[pa.Table, pa.Table]:
        """Return the rows of a batch, and those for the quarantine."""
        batch = _in_known_years(batch)
        keys = batch.column("key").to_pylist() if self._plan.upsert_by or self._plan.kind == JSON else []
        values = batch.column("value").to_pylist() if keys else []
        good: list[int] = []
        bad: list[int] = []
        reasons: list[str] = []
        rows: list[dict[str, Any]] = []
        if not keys:
            return self._table(batch, None, []), self._quarantined(batch, [], [])
        for index in range(batch.num_rows):
            try:
                rows.append(self._row(keys[index], values[index]))
                good.append(index)
            except Misfit as misfit:
                bad.append(index)
                reasons.append(str(misfit))
        return self._table(batch, good, rows), self._quarantined(batch, bad, reasons)

    def _row(self, key: bytes | None, value: bytes | None) -> dict[str, Any]:
        """Return the values of what is not a column of its own. Raises `Misfit`."""
        row: dict[str, Any] = {}
        one = self.wishes.begin()
        by_message_key = self._plan.upsert_by in ((MESSAGE_KEY,), (RAW_KEY,))
        if self._plan.upsert_by and value is None:
            if not by_message_key:
                row = self._deleted_key(key, one)
            row[DELETED] = True
        elif self._plan.kind == JSON:
            row = self._convert(decode(value), one) if value is not None else self._convert({}, one)
            for name, _ in [] if by_message_key else self._keys:
                if row[name] is None and (name,) not in one.wide:
                    raise Misfit((name,), "is a column of the key, and null")
        if by_message_key and key is None:
            raise Misfit((), "the record has no key")
        self.wishes.end(one)
        return row

    def _deleted_key(self, key: bytes | None, wishes: Wishes) -> dict[str, Any]:
        """Return the columns of the key that a record without a value deletes: its key tells them."""
        if key is None:
            raise Misfit((), "the record has neither key nor value")
        try:
            told = decode(key)
        except Misfit:
            told = None
        if not isinstance(told, dict) and len(self._keys) == 1:
            name, convert = self._keys[0]
            try:
                return {name: convert(told, wishes)}
            except Misfit:
                try:
                    return {name: convert(key.decode(), wishes)}
                except UnicodeDecodeError:
                    raise Misfit((name,), "the key of a record without a value is no text") from None
        if not isinstance(told, dict):
            raise Misfit((), "the key of a record without a value is no JSON object")
        row = {}
        for name, convert in self._keys:
            if told.get(name) is None:
                raise Misfit((name,), "is missing in the key of a record without a value")
            row[name] = convert(told[name], wishes)
        return row

    def _table(self, batch: pa.RecordBatch, good: list[int] | None, rows: list[dict[str, Any]]) -> pa.Table:
        if good is not None and len(good) < batch.num_rows:
            batch = batch.take(pa.array(good, pa.int64()))
        columns = []
        for field in self._arrow:
            if field.name in self._own:
                column = batch.column(self._own[field.name]).cast(field.type)
            elif field.name == DELETED:
                column = pa.array([bool(row.get(DELETED)) for row in rows], field.type)
            elif rows and any(field.name in row for row in rows):
                column = pa.array([row.get(field.name) for row in rows], field.type)
            else:
                column = pa.nulls(batch.num_rows, field.type)
            columns.append(column)
        return pa.Table.from_arrays(columns, schema=self._arrow)

    def _quarantined(self, batch: pa.RecordBatch, bad: list[int], reasons: list[str]) -> pa.Table:
        batch = batch.take(pa.array(bad, pa.int64()))
        sources = {"reason": pa.array(reasons, pa.large_string())}
        columns = []
        for field in self._bad:
            source = sources.get(field.name)
            if source is None:
                source = batch.column({**_PLACES, **_RAW}[field.name])
            columns.append(source.cast(field.type))
        return pa.Table.from_arrays(columns, schema=self._bad)


def _in_known_years(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch whose times are those of `KNOWN_YEARS`."""
    at = batch.schema.get_field_index("timestamp")
    field = batch.schema.field(at)
    first, last = (pa.scalar(each, field.type).cast(pa.int64()) for each in KNOWN_YEARS)
    times = pc.max_element_wise(pc.min_element_wise(batch.column(at).cast(pa.int64()), last), first)
    return batch.set_column(at, field, times.cast(field.type))


def nullable(schema: pa.Schema) -> pa.Schema:
    """Return a schema whose columns may all be null."""
    return pa.schema([field.with_nullable(True) for field in schema])


def staged_schema(schema: Schema) -> pa.Schema:
    """Return the columns of rows that wait for their key's last record."""
    return nullable(schema_to_pyarrow(schema)).append(pa.field(DELETED, pa.bool_()))


def decode(text: bytes) -> Any:
    """Return what a text of JSON says. Raises `Misfit`."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Misfit((), f"no JSON: {error}") from None
