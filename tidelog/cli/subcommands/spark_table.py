"""`tidelog spark table` and `tidelog spark table-compact`: a topic as an Iceberg table (docs/spark.md).

Entry: `table`, `table_compact`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tidelog.cli.completion import topic_names
from tidelog.cli.options import is_too_long, parse_pairs
from tidelog.cli.spark_run import SparkRun, spark_options
from tidelog.runtime.errors import ConfigError

if TYPE_CHECKING:
    from pyspark_tidelog.jobs.table.tables import CatalogOptions

F = TypeVar("F", bound=Callable[..., Any])


def _catalog_options(function: F) -> F:
    options = (
        click.option(
            "--catalog-property",
            "properties",
            multiple=True,
            metavar="NAME=VALUE",
            help="A property of pyiceberg's catalog, such as s3.endpoint, token or type; may repeat.",
        ),
        click.option(
            "--catalog-uri",
            default="",
            metavar="URL",
            help="A REST catalog (https://…) or a database (postgresql://…) [default: SQLite in the warehouse].",
        ),
        click.option("--catalog-name", default="tidelog", show_default=True, help="The catalog's name."),
        click.option("--warehouse", required=True, metavar="PATH|URL", help="Where tables are: a folder, or s3://…"),
    )
    decorated: Any = function
    for option in options:
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.option("--table", "name", required=True, metavar="NAMESPACE.NAME", help="The table; it is created if need be.")
@_catalog_options
@click.option(
    "--schema",
    default="raw",
    show_default=True,
    metavar="raw|json|COLUMNS|FILE",
    help="Key, value and headers as they are; fields of JSON objects, inferred; or given: 'id long, at timestamp'.",
)
@click.option(
    "--new-fields",
    type=click.Choice(["add", "ignore", "quarantine"]),
    help="What becomes of JSON fields without a column [default: add for --schema json, else ignore].",
)
@click.option("--quarantine", default="", metavar="NAMESPACE.NAME", help="For records that do not fit.")
@click.option(
    "--partition-by",
    multiple=True,
    metavar="TRANSFORM",
    help="Of a new table: COLUMN, day(_timestamp), bucket(16, id), truncate(4, name); may repeat.",
)
@click.option("--upsert-by", default="", metavar="COLUMNS", help="Keep the last record of each key; with commas.")
@click.option(
    "--max-offsets-per-commit", "max_offsets", type=click.IntRange(min=1), default=1_000_000, show_default=True
)
@click.option("--max-columns", type=click.IntRange(min=1), default=1_000, show_default=True)
@click.option("--file-bytes", type=click.IntRange(min=1), default=128 << 20, show_default=True, help="Of a data file.")
@click.option("--follow", is_flag=True, help="Go on with what comes until Ctrl-C.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="Seconds; of --follow."
)
@click.option("--accept-data-loss", "accepts_loss", is_flag=True, help="Go on where offsets do not exist any more.")
@click.option(
    "--accept-new-topic", "accepts_new_topic", is_flag=True, help="Go on with a topic that was created again."
)
@spark_options
def table(call: SparkRun, topic: str, name: str, upsert_by: str, follow: bool, interval: float, **given: Any) -> None:
    """Bring an Iceberg table up to date with TOPIC, exactly once.

    The table tells how far it is: run this again after anything, and as often as you like.
    """
    access = call.access()
    catalog = _catalog(given)
    from pyspark_tidelog.jobs.table import job

    options = job.TableOptions(
        cluster=access,
        topic=topic,
        table=name,
        catalog=catalog,
        new_fields=given.pop("new_fields") or "",
        upsert_by=tuple(part.strip() for part in upsert_by.split(",") if part.strip()),
        follow_s=interval if follow else None,
        **given,
    )
    stop = _stopped_by_interrupt() if follow and not call.dry_run else None
    call.execute(
        "table",
        lambda: job.plan(options),
        lambda spark: job.run(spark, options, stop),
        render=_render,
        render_plan=_render_plan,
    )


def _catalog(given: dict[str, Any]) -> CatalogOptions:
    from pyspark_tidelog.jobs.table.tables import CatalogOptions

    warehouse, uri, name = given.pop("warehouse"), given.pop("catalog_uri"), given.pop("catalog_name")
    if is_too_long(warehouse):
        raise ConfigError(f"--warehouse: a path of {len(warehouse):,} characters is too long, or a name in it is")
    if Path(warehouse).is_file():
        raise ConfigError(f"--warehouse {warehouse} is a file", hint="give a folder or a URL")
    return CatalogOptions(warehouse, uri, dict(parse_pairs("--catalog-property", given.pop("properties"))), name)


def _stopped_by_interrupt() -> threading.Event:
    """Return what Ctrl-C sets before it cancels what Spark does: a job that waits for records has nothing there."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handle)
    return stop


def _render(told: dict[str, Any]) -> str:
    commits = f"{told['commits']} commit{'s' * (told['commits'] != 1)}"
    lines = [f"table {told['table']}: {told['rows']:,} rows of {told['offsets']:,} offsets in {commits}"]
    if told["snapshot"] is None:
        lines.append("there is no record yet")
    if told["quarantined"]:
        lines.append(f"{told['quarantined']:,} records are in the quarantine {told['quarantine']}, with the reasons")
    if told["removed_files"]:
        lines.append(f"{told['removed_files']:,} files of runs that were killed are removed")
    return "\n".join(lines)


def _render_plan(told: dict[str, Any]) -> str:
    state = f"at commit {told['commit']}" if told["exists"] else "to be created"
    lines = [
        f"topic {told['topic']} ({told['topic_id']}) to table {told['table']}, {state}",
        f"{told['offsets']:,} offsets to be added, in {told['commits']} commit{'s' * (told['commits'] != 1)}",
        *(f"  partition {index}: {start} to {end - 1}" for index, (start, end) in told["ranges"].items()),
        f"records that do not fit go to {told['quarantine']}",
        "columns: " + (", ".join(told["columns"]) or "inferred from the first records"),
    ]
    if told["upsert_by"]:
        lines.append(f"the last record of each {', '.join(told['upsert_by'])} stays")
    return "\n".join(lines)


@click.command()
@click.argument("name", metavar="NAMESPACE.NAME")
@_catalog_options
@click.option("--file-bytes", type=click.IntRange(min=1), default=128 << 20, show_default=True, help="Of a data file.")
@spark_options
def table_compact(call: SparkRun, name: str, file_bytes: int, **given: Any) -> None:
    """Put the small files of a table together. A job that follows a topic may go on meanwhile."""
    call.need_extra()
    catalog = _catalog(given)
    from pyspark_tidelog.jobs.table import compaction

    options = compaction.RewriteOptions(name, catalog, file_bytes)
    call.execute(
        "table-compact",
        lambda: compaction.plan(options),
        lambda spark: compaction.run(spark, options),
        render=lambda told: (
            f"table {told['table']}: {told['written']:,} files in place of {told['rewritten']:,}"
            + (f"; {told['skipped']:,} were changed by others meanwhile" if told["skipped"] else "")
        ),
        render_plan=lambda told: (
            f"table {told['table']}: {told['rewritten']:,} of {told['files']:,} files"
            f" ({told['bytes']:,} bytes) become about {told['groups']:,}"
        ),
    )
