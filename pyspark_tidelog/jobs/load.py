"""The job `load`: Parquet, CSV or JSON files, or a frame of a program, into a topic.

A first pass over the rows finds those that cannot be records: malformed ones, and those that are larger than the
topic's max.message.bytes. They are told with file and row, and nothing is written. The second pass writes, with as many
tasks as Spark reads with, by the sink of the data source (`pyspark_tidelog.sink`).

At least once: when a task is run again, its rows may be there twice. After a load that ended midway nobody can say
which rows are there, so another run is refused while the topic has records: empty it first, or let `appends` add to
them.

Entry: `run`, `plan`, `LoadOptions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark_tidelog.jobs.frame import ClusterAccess, RunningJob, spark_job
from pyspark_tidelog.jobs.topics import TopicAdmin, client_settings, sink_options
from tidelog.runtime.errors import AlreadyExists, ConfigError, InvalidInput, NotFound

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

FORMATS = ("parquet", "csv", "json")
JSON = "json"
"""As `value`: the whole row."""
SHOWN = 5
"""So many bad rows are told; the others are counted."""
OVERHEAD_BYTES = 100
"""What a record needs beside key and value, at most: its batch, without headers."""
_CORRUPT = "_tidelog_corrupt"
_PROBLEM = "_tidelog_problem"
_FILE = "_tidelog_file"
_FORMATS = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS[XXX]",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""Options of Spark's `to_json`, whose own formats cut timestamps off to milliseconds."""
_ONE_SPLIT = "spark.sql.files.maxPartitionBytes"


@dataclass(frozen=True)
class LoadOptions:
    """What to load, and where to."""

    cluster: ClusterAccess
    topic: str
    paths: tuple[str, ...] = ()
    """Files, directories or patterns, on any file system that Spark has; not used for a frame of a program."""
    format: str = ""
    """One of `FORMATS`; empty: as the first path ends."""
    value: str = JSON
    """A column, or `JSON`: the whole row as a JSON object."""
    key: str = ""
    """A column; empty: no keys."""
    timestamp: str = ""
    """A column of timestamps, or of what Spark casts to them; empty: the time at which a record is written."""
    read: Mapping[str, str] = field(default_factory=dict)
    """Options of Spark's reader: `header`, `sep`, …"""
    appends: bool = False
    """Whether the topic may have records."""


@dataclass(frozen=True)
class LoadPlan:
    """What a load would do."""

    topic: str
    format: str
    files: int | None
    """None: Spark has to be asked, of another file system than this machine's."""
    bytes: int | None
    records_there: int
    """Offsets that the topic has now."""


@dataclass(frozen=True)
class LoadResult:
    """What a load did."""

    topic: str
    records: int


def plan(options: LoadOptions) -> LoadPlan:
    """Return what would be done. Raises `ConfigError`, `NotFound`, `AlreadyExists`, `Unavailable`."""
    there = _check_target(options)
    kind = _format(options)
    if any("://" in path for path in options.paths):
        return LoadPlan(options.topic, kind, None, None, there)
    files = [file for path in options.paths for file in _local_files(path)]
    return LoadPlan(options.topic, kind, len(files), sum(file.stat().st_size for file in files), there)


def run(spark: SparkSession, options: LoadOptions, frame: DataFrame | None = None) -> LoadResult:
    """Load files, or the rows of a frame. Raises `InvalidInput` for bad rows, and as `plan`."""
    _check_target(options)
    what = "a frame" if frame is not None else f"{len(options.paths)} paths"
    with spark_job(spark, "load", f"load of {what} into {options.topic}") as job:
        rows = frame if frame is not None else _read(spark, options, options.paths)
        _check_columns(rows, options)
        checked = rows.withColumn(_PROBLEM, _problem(rows, options))
        with job.stage(f"load: check the rows for {options.topic}"):
            records = _check_rows(spark, job, options, checked, is_frame=frame is not None)
        with job.stage(f"load: write {records} rows to {options.topic}"):
            writing = rows.select(*_record(rows, options)).write.format("tidelog").mode("append")
            writing.options(**sink_options(options.cluster, options.topic, keeps_timestamps=bool(options.timestamp)))
            writing.save()
    return LoadResult(options.topic, records)


def _check_target(options: LoadOptions) -> int:
    """Return how many offsets the topic has. Raises as `plan`."""
    topics = TopicAdmin(client_settings(options.cluster))
    count = topics.existing(options.topic)
    bounds = topics.bounds(options.topic, range(count), committed=False)
    there = sum(end - start for start, end in bounds.values())
    if there and not options.appends:
        raise AlreadyExists(
            f"topic {options.topic} has {there} records: is it what a load left that ended midway?",
            hint="delete and create the topic, or add --append",
        )
    return there


def _format(options: LoadOptions) -> str:
    if not options.paths:
        raise ConfigError("no file is named", hint="name files, directories or patterns")
    kind = options.format or Path(options.paths[0].rstrip("/")).suffix.removeprefix(".").lower()
    kind = "json" if kind in ("jsonl", "ndjson") else kind
    if kind not in FORMATS:
        raise ConfigError(
            f"the format of {options.paths[0]} is not known", hint=f"--input {', --input '.join(FORMATS)}"
        )
    return kind


def _local_files(path: str) -> list[Path]:
    """Return the files that Spark would read of a path of this machine. Raises `NotFound`."""
    here = Path(path)
    found = [here] if here.exists() else sorted(Path(here.anchor or ".").glob(str(here.relative_to(here.anchor))))
    if not found:
        raise NotFound(f"there is no file {path}")
    files = [file for each in found for file in (each.rglob("*") if each.is_dir() else [each])]
    return [file for file in files if file.is_file() and not file.name.startswith(("_", "."))]


def _read(spark: SparkSession, options: LoadOptions, paths: Sequence[str]) -> DataFrame:
    """Return the rows of files, with the column `_FILE`, and `_CORRUPT` where rows may be malformed."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as f

    kind = _format(options)
    reader = spark.read.options(**options.read)
    try:
        if kind == "parquet":
            return reader.parquet(*paths).withColumn(_FILE, f.col("_metadata.file_path"))
        known = reader.format(kind).load(list(paths)).schema
        schema = known if _CORRUPT in known.fieldNames() else known.add(_CORRUPT, "string")
        if kind == "json" and "_corrupt_record" in schema.fieldNames():  # Spark's inference has seen one
            schema = type(schema)([each for each in schema.fields if each.name != "_corrupt_record"])
        if schema.fieldNames() == [_CORRUPT]:
            raise InvalidInput(f"{', '.join(paths)} has no column: is there any row?", hint="see --input, --read")
        reader = reader.schema(schema).options(mode="PERMISSIVE", columnNameOfCorruptRecord=_CORRUPT)
        return reader.format(kind).load(list(paths)).withColumn(_FILE, f.col("_metadata.file_path"))
    except AnalysisException as error:
        told = str(error).splitlines()[0]
        raise InvalidInput(f"Spark cannot read {', '.join(paths)}: {told}", hint="see --input, --read") from error


def _of(rows: DataFrame, name: str) -> Column:
    """Return a column by its name, which may have dots and backticks."""
    quoted = name.replace("`", "``")
    return rows[f"`{quoted}`"]


def _columns(rows: DataFrame) -> list[str]:
    return [name for name in rows.columns if name not in (_FILE, _CORRUPT, _PROBLEM)]


def _check_columns(rows: DataFrame, options: LoadOptions) -> None:
    names = _columns(rows)
    wanted = {"--key": options.key, "--timestamp": options.timestamp}
    if options.value != JSON:
        wanted["--value"] = options.value
    for flag, name in wanted.items():
        if name and name not in names:
            raise ConfigError(f"{flag} names {name!r}; the rows have the columns {', '.join(names) or 'none'}")


def _record(rows: DataFrame, options: LoadOptions) -> list[Column]:
    """Return the columns of the sink."""
    from pyspark.sql import functions as f

    if options.value == JSON:
        whole = f.struct(*[_of(rows, name) for name in _columns(rows)])
        found = [f.to_json(whole, {**_FORMATS, "ignoreNullFields": "false"}).alias("value")]
    else:
        found = [_as_bytes(rows, options.value).alias("value")]
    if options.key:
        found.append(_as_bytes(rows, options.key).alias("key"))
    if options.timestamp:
        found.append(_of(rows, options.timestamp).cast("timestamp").alias("timestamp"))
    return found


def _as_bytes(rows: DataFrame, name: str) -> Column:
    """Return a column as binary or string: other types as text, composed ones as JSON."""
    from pyspark.sql import functions as f

    kind = rows.schema[name].dataType.typeName()
    column = _of(rows, name)
    if kind in ("binary", "string"):
        return column
    return f.to_json(column, _FORMATS) if kind in ("struct", "array", "map") else column.cast("string")


def _problem(rows: DataFrame, options: LoadOptions) -> Column:
    """Return why a row is no record; null: it is one."""
    from pyspark.sql import functions as f

    topics = TopicAdmin(client_settings(options.cluster))
    bound = topics.max_message_bytes(options.topic)
    record = _record(rows, options)
    size = sum((f.coalesce(f.octet_length(each), f.lit(0)) for each in record[: 1 + bool(options.key)]), f.lit(0))
    told = f.when(
        size > bound - OVERHEAD_BYTES,
        f.concat(f.lit("it has "), size.cast("string"), f.lit(f" bytes; the topic's max.message.bytes is {bound}")),
    )
    if options.timestamp:
        given = _of(rows, options.timestamp)
        is_none = given.isNotNull() & given.try_cast("timestamp").isNull()
        text = f.concat(f.lit("its timestamp is "), f.substring(given.cast("string"), 1, 80))
        first, last = topics.timestamps(options.topic)
        is_refused = ~f.unix_millis(given.try_cast("timestamp")).between(first, last)
        why = f.concat(text, f.lit(", beyond the topic's message.timestamp.after.max.ms or before.max.ms"))
        told = f.when(is_none, text).when(is_refused, why).otherwise(told)
    if _CORRUPT in rows.columns:
        corrupt = rows[_CORRUPT]
        text = f.concat(f.lit("it is malformed: "), f.substring(corrupt, 1, 80))
        told = f.when(corrupt.isNotNull(), text).otherwise(told)
    return told


def _check_rows(
    spark: SparkSession, job: RunningJob, options: LoadOptions, checked: DataFrame, *, is_frame: bool
) -> int:
    """Return the number of rows. Raises `InvalidInput` for those that are no records."""
    from pyspark.sql import functions as f

    # All columns are used, for Spark parses only what is: a row is malformed in what is not looked at, too.
    whole = f.count(f.struct(*[_of(checked, name) for name in checked.columns]))
    (found,) = checked.agg(whole.alias("rows"), f.count(_PROBLEM).alias("bad")).collect()
    if not found["bad"]:
        return int(found["rows"])
    bad = checked.where(f.col(_PROBLEM).isNotNull())
    if is_frame:
        told = [row[_PROBLEM] for row in bad.select(_PROBLEM).limit(SHOWN).collect()]
    else:
        files = [row[_FILE] for row in bad.select(_FILE).distinct().limit(SHOWN).collect()]
        with job.stage("load: find the bad rows in their files"), _one_split(spark):
            told = [text for file in sorted(files) for text in _bad_rows(spark, options, file)][:SHOWN]
    more = f"; and {found['bad'] - len(told)} more" if found["bad"] > len(told) else ""
    raise InvalidInput(
        f"{found['bad']} of {found['rows']} rows cannot be records, and nothing was written: {'; '.join(told)}{more}",
        hint="mend or remove them",
    )


@contextmanager
def _one_split(spark: SparkSession) -> Iterator[None]:
    """Have each file read by one task, in the order of its rows."""
    before = spark.conf.get(_ONE_SPLIT, None)
    spark.conf.set(_ONE_SPLIT, str(1 << 60))
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(_ONE_SPLIT)
        else:
            spark.conf.set(_ONE_SPLIT, before)


def _bad_rows(spark: SparkSession, options: LoadOptions, file: str) -> list[str]:
    """Return the first bad rows of a file, with their numbers from 1."""
    rows = _read(spark, options, [file])
    problems: Any = rows.withColumn(_PROBLEM, _problem(rows, options)).rdd.map(lambda row: row[_PROBLEM])
    bad = problems.zipWithIndex().filter(lambda pair: pair[0] is not None).take(SHOWN)
    return [f"{file} row {number + 1}: {problem}" for problem, number in bad]
