"""Changes of a table's columns that records wish for.

Entry: `grow`, `inferred_fields`.
"""

from __future__ import annotations

import itertools
import logging

from pyiceberg.exceptions import ResolveError, ValidationError
from pyiceberg.schema import Schema
from pyiceberg.table import Transaction
from pyiceberg.types import DoubleType, IntegerType, LongType, NestedField

from pyspark_tidelog.jobs.table.shapes import Change, Shape, column_type, struct_fields
from pyspark_tidelog.jobs.table.tables import JobTable
from pyspark_tidelog.jobs.table.values import Wishes

logger = logging.getLogger(__name__)


def inferred_fields(wishes: Wishes, max_columns: int) -> list[NestedField]:
    """Return the columns for records that have none yet, the most frequent first."""
    top = Shape(fields={path[0]: shape for path, shape in wishes.new.items() if len(path) == 1})
    fields: list[NestedField] = []
    room = max_columns
    for field in struct_fields(top, itertools.count(100)):
        room -= _size(field)
        if room < 0:
            break
        fields.append(field)
    return fields


def wanted_changes(schema: Schema, wishes: Wishes, max_columns: int) -> list[Change]:
    """Return the changes that wishes lead to: columns that are wider, and new ones, the most frequent first."""
    changes = []
    for path in sorted(wishes.wide):
        is_int = isinstance(schema.find_field(".".join(path)).field_type, IntegerType)
        changes.append(Change(path, LongType() if is_int else DoubleType(), False))
    room = max_columns - len(schema.field_ids)
    taken: set[tuple[str, ...]] = set()
    for path in sorted(wishes.new, key=lambda each: (-wishes.new[each].total, each)):
        folded = (*path[:-1], path[-1].lower())
        kind = column_type(wishes.new[path], itertools.count(1))
        if kind is None or folded in taken:
            continue
        room -= _size(NestedField(0, path[-1], kind, required=False))
        if room < 0:
            logger.warning("there are %d columns: no more are added", max_columns)
            break
        taken.add(folded)
        changes.append(Change(path, kind, True))
    return changes


def _size(field: NestedField) -> int:
    return len(Schema(field).field_ids)


def grow(table: JobTable, wishes: Wishes, max_columns: int) -> bool:
    """Change the table's columns as records wish; return whether anything has changed.

    Columns come before the records that need them, in a commit of their own: a run that is killed between leaves a
    column without values. One that another job has added meanwhile is taken as it is.
    """
    changes = wanted_changes(table.table.schema(), wishes, max_columns)
    if not changes:
        return False
    before = table.table.schema()

    def stage(transaction: Transaction) -> None:
        with transaction.update_schema() as update:
            for change in changes:
                try:
                    if change.is_new:
                        update.add_column(change.path, change.type, required=False)
                    else:
                        update.update_column(change.path, field_type=change.type)
                except (ValueError, ValidationError, ResolveError) as error:
                    logger.warning("table %s: column %s: %s", table.identifier, ".".join(change.path), error)

    table.change(stage)
    return table.table.schema() != before
