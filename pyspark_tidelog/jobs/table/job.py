"""`tidelog spark table`: a topic becomes an Iceberg table, exactly once.

    look at the topic → choose offsets → executors write files → commit files and offsets → add to the quarantine

Each step may be the last one of a run that is killed: the next run reads from the table how far it is. The quarantine
is a second table, and no commit spans two. Its files are written before the commit of the table, which names them; they
are added to the quarantine after it, at once or by the next run, and before the table's next commit. The state in the
quarantine tells which commit's files it has, so a quarantine is of one table alone: it is told by a property.

Design: docs/design/0022-tables.md. Entry: `plan`, `run`.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pyiceberg.io.pyarrow import parquet_file_to_data_file
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.table import Transaction

from pyspark_tidelog.jobs.frame import ClusterAccess, RunningJob, spark_job, told_by_spark
from pyspark_tidelog.jobs.table.attempts import Attempts, attempt_directory
from pyspark_tidelog.jobs.table.columns import grow, inferred_fields
from pyspark_tidelog.jobs.table.reads import Ranges, TopicEnds, TopicReads
from pyspark_tidelog.jobs.table.rows import RowPlan
from pyspark_tidelog.jobs.table.schemas import (
    JSON,
    MESSAGE_KEY,
    OWN,
    RAW,
    given_schema,
    json_fields,
    partition_spec,
    quarantine_schema,
    raw_fields,
)
from pyspark_tidelog.jobs.table.state import TableState, attempt_name, check_ends, next_chunk, starts
from pyspark_tidelog.jobs.table.tables import CatalogOptions, JobTable, append, catalog_file, open_catalog, store_errors
from pyspark_tidelog.jobs.table.tasks import IngestPlan, TaskOutcome, ingest, observe
from pyspark_tidelog.jobs.table.upserts import KEY_TYPES, Upsert
from pyspark_tidelog.jobs.table.values import ADD, IGNORE, REFUSE, Wishes
from pyspark_tidelog.jobs.table.writer import DEFAULT_FILE_BYTES, WriteTarget
from tidelog.runtime.errors import ConfigError, Fenced, TidelogError, Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

SAMPLE_OFFSETS = 100_000
"""Offsets from which the columns of a new table are inferred, at most."""
ROUNDS = 3
"""How often the columns may change for the records of one commit."""
PATIENCE_S = 600.0
"""A job that follows a topic ends when something has not answered for so long."""
QUARANTINE_OF = "tidelog.quarantine-of"
"""A property of a quarantine: the identifier of its table."""
DEFAULT_MAX_OFFSETS = 1_000_000
DEFAULT_MAX_COLUMNS = 1_000


@dataclass(frozen=True)
class TableOptions:
    """What `tidelog spark table` is to do."""

    cluster: ClusterAccess
    topic: str
    table: str
    """NAMESPACE.NAME."""
    catalog: CatalogOptions
    schema: str = RAW
    """`raw`, `json`, DDL, or the path of a file of DDL or of Iceberg's JSON."""
    new_fields: str = ""
    """What becomes of fields without a column: `ADD`, `IGNORE` or `REFUSE`; empty: as the schema suggests."""
    quarantine: str = ""
    """Empty: the table's name and `_quarantine`."""
    partition_by: tuple[str, ...] = ()
    upsert_by: tuple[str, ...] = ()
    max_offsets: int = DEFAULT_MAX_OFFSETS
    """Of one commit."""
    max_columns: int = DEFAULT_MAX_COLUMNS
    """Columns and fields of columns."""
    file_bytes: int = DEFAULT_FILE_BYTES
    follow_s: float | None = None
    """Go on, and look for more so often; None: end when all is there."""
    accepts_loss: bool = False
    accepts_new_topic: bool = False

    def __post_init__(self) -> None:
        if not all(self.table.split(".")) or self.table.count(".") != 1:
            raise ConfigError(f"table {self.table!r} is no NAMESPACE.NAME", hint="for example: lake.orders")
        if self.quarantine_name.count(".") != 1 or self.quarantine_name == self.table:
            raise ConfigError(f"--quarantine {self.quarantine!r} is no NAMESPACE.NAME of another table")
        if self.new_fields not in ("", ADD, IGNORE, REFUSE):
            raise ConfigError(f"--new-fields {self.new_fields} is none of {ADD}, {IGNORE} and {REFUSE}")
        if self.kind == RAW and self.upsert_by not in ((), ("key",)):
            raise ConfigError("a raw table is upserted by its column key", hint="--upsert-by key")
        if MESSAGE_KEY in self.upsert_by and len(self.upsert_by) > 1:
            raise ConfigError(f"--upsert-by {MESSAGE_KEY} is the whole key", hint="name no other columns")

    @property
    def kind(self) -> str:
        """Return `RAW` or `JSON`."""
        return RAW if self.schema == RAW else JSON

    @property
    def quarantine_name(self) -> str:
        """Return the identifier of the quarantine."""
        return self.quarantine or f"{self.table}_quarantine"

    @property
    def fields_rule(self) -> str:
        """Return what becomes of fields without a column."""
        return self.new_fields or (ADD if self.schema == JSON else IGNORE)


@dataclass(frozen=True)
class TablePlan:
    """What a run would do now."""

    topic: str
    topic_id: str
    table: str
    exists: bool
    commit: int
    """The number of the table's last commit; 0: there is none."""
    ranges: dict[int, tuple[int, int]]
    """Partition → offsets `[start, end)` that are to be added."""
    offsets: int
    commits: int
    quarantine: str
    upsert_by: tuple[str, ...]
    columns: list[str]
    """Of the table, or those that it would have; empty: to be inferred."""


@dataclass(frozen=True)
class TableResult:
    """What a run did."""

    topic: str
    table: str
    quarantine: str
    commits: int = 0
    offsets: int = 0
    rows: int = 0
    """Records that were taken as rows (or, in an upsert, as changes)."""
    quarantined: int = 0
    removed_files: int = 0
    """Files of runs that were killed."""
    snapshot: int | None = None
    next: dict[int, int] = field(default_factory=dict)
    """Partition → the offset behind the last one that the table has."""


def plan(options: TableOptions) -> TablePlan:
    """Say what a run would do. Changes nothing."""
    reads = _reads(options)
    ends = reads.look()
    with store_errors():
        table = _existing(options)
    state = _checked_ends(_checked_state(options, table, ends.topic_id), reads, ends)
    ranges = next_chunk(state, ends.end, ends.first, 1 << 62)
    offsets = sum(end - start for start, end in ranges.values())
    fields = table.table.schema().fields if table is not None else tuple(_first_fields(options) or ())
    return TablePlan(
        topic=options.topic,
        topic_id=ends.topic_id,
        table=options.table,
        exists=table is not None,
        commit=state.number,
        ranges=ranges,
        offsets=offsets,
        commits=-(-offsets // options.max_offsets),
        quarantine=options.quarantine_name,
        upsert_by=options.upsert_by,
        columns=[f"{each.name} {each.field_type}" for each in fields],
    )


def run(spark: SparkSession, options: TableOptions, stop: threading.Event | None = None) -> TableResult:
    """Bring the table up to the topic's end; with `follow_s` go on until `stop` is set.

    Raises `NotFound` (topic, offsets that are gone), `Fenced` (another job writes to the table), `Unavailable`,
    `ConfigError`.
    """
    stop = stop or threading.Event()
    with spark_job(spark, "table", f"topic {options.topic} to table {options.table}") as job:
        with store_errors():
            ingestion = Ingestion(spark, options, job)
        try:
            _follow(ingestion, options, stop)
        finally:
            ingestion.close()
        return ingestion.result


def _follow(ingestion: Ingestion, options: TableOptions, stop: threading.Event) -> None:
    well_s = time.monotonic()
    while True:
        try:
            with store_errors():
                ingestion.catch_up(stop)
            well_s = time.monotonic()
        except Exception as error:
            told = error if isinstance(error, TidelogError) else told_by_spark(error)
            is_over = options.follow_s is None or time.monotonic() - well_s > PATIENCE_S
            if is_over or not isinstance(told, Unavailable):
                raise
            ingestion.is_clean = False
            logger.warning("tried again in %g s: %s", options.follow_s, told)
        if options.follow_s is None or stop.wait(options.follow_s):
            return


def _reads(options: TableOptions) -> TopicReads:
    return TopicReads(options.cluster, options.topic, fails_on_loss=not options.accepts_loss)


def _existing(options: TableOptions) -> JobTable | None:
    """Return the table, if there is one, and do not make a catalog for that."""
    file = catalog_file(options.catalog)
    if file is not None and not file.exists():
        return None
    return JobTable.find(open_catalog(options.catalog), options.table)


def _checked_state(options: TableOptions, table: JobTable | None, topic_id: str) -> TableState:
    """Return the state on which a run begins. Raises `ConfigError`, `Fenced`."""
    state = table.state if table is not None else None
    if state is None:
        return TableState(options.topic, topic_id, options.kind, upsert_by=options.upsert_by)
    if state.topic != options.topic:
        raise ConfigError(f"table {options.table} is made of topic {state.topic}", hint="give another --table")
    if state.kind != options.kind:
        raise ConfigError(
            f"table {options.table} has records as {state.kind}, not as {options.kind}", hint="see --schema"
        )
    if state.upsert_by != options.upsert_by:
        told = ", ".join(state.upsert_by) or "nothing"
        raise ConfigError(f"table {options.table} is upserted by {told}", hint="give the same --upsert-by as before")
    if state.topic_id == topic_id:
        return state
    if not options.accepts_new_topic:
        raise Fenced(
            f"topic {options.topic} is not the one that table {options.table} was made of: it was deleted and created"
            f" again, or is in another cluster (id {topic_id}, and {state.topic_id} before)",
            hint="--accept-new-topic keeps the rows and goes on with the first offset of the new one",
        )
    return replace(state, topic_id=topic_id, next={}, has_all=False, epochs={}, since={})


def _checked_ends(state: TableState, reads: TopicReads, ends: TopicEnds) -> TableState:
    """Return the state with the leader epochs of now, when all is there that the table has. Raises as `check_ends`."""
    older = {partition: epoch for partition, epoch in state.epochs.items() if epoch < ends.epochs.get(partition, -1)}
    check_ends(state, ends.log_end, reads.epoch_ends(older))
    return replace(state, epochs=ends.epochs)


def _first_fields(options: TableOptions) -> Sequence[Any] | None:
    """Return the columns of a new table; None if they are to be inferred."""
    if options.schema == RAW:
        return raw_fields()
    return None if options.schema == JSON else json_fields(_numbered(given_schema(options.schema)))


def _numbered(fields: Sequence[Any]) -> Sequence[Any]:
    """Return fields whose ids do not meet those of the table's own columns. The catalog numbers all anew."""
    from pyiceberg.schema import assign_fresh_schema_ids

    numbers = iter(range(100, 1 << 30))
    return assign_fresh_schema_ids(Schema(*fields), lambda: next(numbers)).fields


class Ingestion:
    """The work of one run."""

    def __init__(self, spark: SparkSession, options: TableOptions, job: RunningJob) -> None:
        self._context = spark.sparkContext
        self._options = options
        self._job = job
        self._reads = _reads(options)
        self._catalog = open_catalog(options.catalog)
        self._table: JobTable | None = None
        self._quarantine: JobTable | None = None
        self.is_clean = False
        """Nothing is left of what was not committed."""
        self.result = TableResult(options.topic, options.table, options.quarantine_name)

    def close(self) -> None:
        """Give back what the run holds in the cluster."""
        self._reads.close()

    def catch_up(self, stop: threading.Event) -> None:
        """Commit until the table has what the topic had when this began. Raises as `run`."""
        ends = self._reads.look()
        table = self._table = self._table or JobTable.find(self._catalog, self._options.table)
        if table is None:
            table = self._table = self._create(ends)
            if table is None:
                return
        table.reload()
        self._prepare(table)
        state = _checked_ends(_checked_state(self._options, table, ends.topic_id), self._reads, ends)
        self._settle_quarantine(table)
        if not self.is_clean:
            self._clean(table)
        while not stop.is_set():
            ranges = next_chunk(state, ends.end, ends.first, self._options.max_offsets)
            if not ranges:
                break
            state = self._commit(table, state, ranges, starts(state, ends.first))
            self._settle_quarantine(table)
            if not self.is_clean:
                self._clean(table)
                self.is_clean = True  # with this commit the number of all that an earlier run has left is reached
        snapshot = table.table.metadata.current_snapshot_id
        self.result = replace(self.result, snapshot=snapshot, next=dict(state.next))

    def _spread(self, pieces: Sequence[Any], work: Any) -> list[Any]:
        """Have executors work on pieces; return what they tell."""
        if not pieces:
            return []
        return list(self._context.parallelize(pieces, len(pieces)).map(work).collect())

    # Before the first commit

    def _create(self, ends: TopicEnds) -> JobTable | None:
        """Create the table; None while its columns cannot be inferred from anything."""
        fields = _first_fields(self._options)
        if fields is None:
            nothing = TableState(self._options.topic, ends.topic_id)
            ranges = next_chunk(nothing, ends.end, ends.first, min(SAMPLE_OFFSETS, self._options.max_offsets))
            if not ranges:
                return None
            with self._job.stage("infers the columns from samples"):
                seen = Wishes(ADD)
                plan = RowPlan(JSON, Schema(*json_fields()))
                for wishes in self._spread(self._reads.plan(ranges), partial(observe, plan=plan)):
                    seen.merge(wishes)
            fields = json_fields(inferred_fields(seen, self._options.max_columns))
        schema = Schema(*fields)
        _check_keys(self._options, schema)
        spec = partition_spec(self._options.partition_by, schema)
        return JobTable.create(self._catalog, self._options.table, schema, spec)

    def _prepare(self, table: JobTable) -> None:
        """Make an existing table fit to be written to, and find or create the quarantine."""
        if self._quarantine is not None:
            return
        if table.table.metadata.format_version < 2:
            raise ConfigError(f"table {table.identifier} has Iceberg's format 1", hint="upgrade it to format 2")
        wanted = raw_fields() if self._options.kind == RAW else json_fields()
        missing = [each for each in wanted if each.name not in table.table.schema().column_names]
        if missing:

            def stage(transaction: Transaction) -> None:
                with transaction.update_schema() as update:
                    for each in missing:
                        update.add_column(each.name, each.field_type)

            table.change(stage)
        schema = table.table.schema()
        own = {each.name for each in wanted}
        for each in schema.fields:
            if each.required and (each.name in own or self._options.kind == RAW):
                raise ConfigError(f"column {each.name} of table {table.identifier} is required, and may be null here")
        _check_keys(self._options, schema)
        if self._options.partition_by:
            spec = partition_spec(self._options.partition_by, schema)
            if not spec.compatible_with(table.table.spec()):
                raise ConfigError(
                    f"table {table.identifier} is partitioned by {table.table.spec()}, not as --partition-by says",
                    hint="leave --partition-by out, or change the table with another engine",
                )
        self._quarantine = self._own_quarantine()

    def _own_quarantine(self) -> JobTable:
        """Find or create the quarantine. Raises `ConfigError` if it is another table's: the numbers in it are not ours.

        One that an earlier version has made does not tell whose it is: it becomes ours, unless it is of another topic.
        """
        options, name = self._options, self._options.quarantine_name
        mine = {QUARANTINE_OF: options.table}

        def stage(transaction: Transaction) -> None:
            transaction.set_properties(mine)

        found = JobTable.find(self._catalog, name) or JobTable.create(
            self._catalog, name, quarantine_schema(), UNPARTITIONED_PARTITION_SPEC, mine
        )
        topic = found.state.topic if found.state is not None else options.topic
        if QUARANTINE_OF not in found.table.metadata.properties and topic == options.topic:
            found.change(stage)
        owner = found.table.metadata.properties.get(QUARANTINE_OF)
        if owner != options.table:
            told = f"table {owner}" if owner else f"topic {topic}"
            raise ConfigError(f"{name} has the records of {told} that do not fit", hint="give another --quarantine")
        return found

    def _clean(self, table: JobTable) -> None:
        """Delete what runs have left that were killed."""
        assert self._quarantine is not None
        state = table.state
        number = state.number if state is not None else 0
        self._quarantine.reload()
        is_settled = state is None or not state.pending or _has(self._quarantine, state)
        removed = Attempts(table.table).clean(number)
        # Files that are to be added to the quarantine, by another run perhaps, are in no snapshot yet.
        removed += Attempts(self._quarantine.table).clean(number if is_settled else number - 1)
        self.result = replace(self.result, removed_files=self.result.removed_files + removed)

    # One commit

    def _commit(self, table: JobTable, state: TableState, ranges: Ranges, begun: Mapping[int, int]) -> TableState:
        """Read ranges of offsets and commit them; `begun`: where all partitions are. Raises as `run`."""
        assert self._quarantine is not None
        past = self._quarantine.state.number if self._quarantine.state is not None else 0
        number, run_id = max(state.number, past) + 1, uuid.uuid4().hex[:12]
        name = attempt_name(number, run_id)
        offsets = sum(end - start for start, end in ranges.values())
        attempts, bad_attempts = Attempts(table.table), Attempts(self._quarantine.table)
        attempts.begin(name)
        bad_attempts.begin(name)
        with self._job.stage(f"commit {number} of {table.identifier}: {offsets:,} offsets"):
            done = self._read(table, ranges, name)
            if self._reads.topic_id() != state.topic_id:
                raise Fenced(f"topic {self._options.topic} was deleted and created again while it was read")
            pending = [_name_of(each) for each in done.bad_files]
            wanted = state.advanced(number, run_id, ranges, pending, begun)
            try:
                kept = self._put(table, wanted, done, attempts.directory(name))
            except Fenced:  # the number is reached: what was written for it can never be committed
                attempts.abandon(name)
                bad_attempts.abandon(name)
                raise
        attempts.end(name, [each.file_path for each in kept])
        bad_attempts.end(name, [each.file_path for each in done.bad_files])
        self.result = replace(
            self.result,
            commits=self.result.commits + 1,
            offsets=self.result.offsets + offsets,
            rows=self.result.rows + done.rows,
            quarantined=self.result.quarantined + done.bad,
        )
        return wanted

    def _read(self, table: JobTable, ranges: Ranges, name: str) -> TaskOutcome:
        """Have the records of ranges written to files; change the table's columns first where they wish for it."""
        assert self._quarantine is not None
        options, is_final = self._options, False
        quarantine = _target(self._quarantine, name, options.file_bytes)
        for left in range(ROUNDS, -1, -1):
            rows = RowPlan(
                options.kind, table.table.schema(), options.fields_rule, is_final or not left, options.upsert_by
            )
            work = IngestPlan(rows, _target(table, name, options.file_bytes), quarantine)
            done = TaskOutcome(wishes=Wishes(options.fields_rule))
            for told in self._spread(self._reads.plan(ranges), partial(ingest, plan=work)):
                done.add(told)
            if not done.wishes:
                return done
            with self._job.stage(f"changes the columns of {table.identifier}"):
                is_final = not grow(table, done.wishes, options.max_columns)
        raise AssertionError("the last round has no wishes")

    def _put(self, table: JobTable, wanted: TableState, done: TaskOutcome, directory: str) -> list[DataFile]:
        """Commit; return the files that the table has got."""
        if self._options.upsert_by:
            upsert = Upsert(table, self._options.upsert_by, directory, self._options.file_bytes, self._spread)
            return upsert.put(wanted, done.staged)
        if not table.advance(wanted, partial(append, files=done.files), is_repeatable=True):
            raise Unavailable(f"the partitioning of table {table.identifier} has changed meanwhile", hint="try again")
        return done.files

    def _settle_quarantine(self, table: JobTable) -> None:
        """Add to the quarantine what belongs to the table's last commit, unless it has it."""
        state, quarantine = table.state, self._quarantine
        assert quarantine is not None
        if state is None or not state.pending:
            return
        quarantine.reload()
        if _has(quarantine, state):
            return
        directory = attempt_directory(quarantine.table.metadata, state.commit)

        def stage(transaction: Transaction, summary: dict[str, str]) -> None:
            metadata, io = transaction.table_metadata, quarantine.table.io
            files = [parquet_file_to_data_file(io, metadata, f"{directory}/{name}") for name in state.pending]
            before = quarantine.state
            if before is not None and before.topic_id == state.topic_id:
                for partition, start in state.since.items():
                    if before.next.get(partition, 0) > start:  # the table was rolled back, and got other rows
                        transaction.delete(f"_partition = {partition} and _offset >= {start}")
            append(transaction, summary, files=files)

        with self._job.stage(f"adds to {quarantine.identifier}"):
            try:
                quarantine.advance(replace(state, pending=()), stage, is_repeatable=True)
            except Fenced:
                if not _has(quarantine, state):
                    raise


def _has(quarantine: JobTable, state: TableState) -> bool:
    """Whether the quarantine has what belongs to a commit."""
    return quarantine.state is not None and quarantine.state.number >= state.number


def _name_of(file: DataFile) -> str:
    return file.file_path.rpartition("/")[2]


def _target(table: JobTable, name: str, file_bytes: int) -> WriteTarget:
    metadata = table.table.metadata
    return WriteTarget.of(metadata, table.table.io, attempt_directory(metadata, name), file_bytes)


def _check_keys(options: TableOptions, schema: Schema) -> None:
    """Refuse columns of the key that there are not, or that cannot be compared. Raises `ConfigError`."""
    for name in options.upsert_by:
        known = {each.name: each.field_type for each in schema.fields}
        if name not in known or (name in OWN and name != MESSAGE_KEY):
            raise ConfigError(
                f"--upsert-by {name}: table {options.table} has no such column of the records",
                hint=f"it has {', '.join(each for each in known if each not in OWN)}, and {MESSAGE_KEY}",
            )
        if not isinstance(known[name], KEY_TYPES):
            raise ConfigError(f"--upsert-by {name}: a column of type {known[name]} cannot be part of a key")
