"""`tidelog spark load`: Parquet, CSV or JSON files into a topic."""

from __future__ import annotations

from typing import Any

import click

from tidelog.cli import output
from tidelog.cli.completion import topic_names
from tidelog.cli.options import parse_pairs
from tidelog.cli.spark_run import SparkRun, spark_options


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--input", "kind", type=click.Choice(["parquet", "csv", "json"]), help="Default: as the first PATH ends.")
@click.option("--read", "reader", multiple=True, metavar="NAME=VALUE", help="An option of Spark's reader: header=true.")
@click.option(
    "--value", default="json", show_default=True, metavar="COLUMN", help="The value; json: the whole row as JSON."
)
@click.option("--key", default="", metavar="COLUMN", help="The key, which chooses the partition.")
@click.option("--timestamp", default="", metavar="COLUMN", help="The timestamp [default: the time of writing].")
@click.option("--append", is_flag=True, help="Write also into a topic that has records.")
@spark_options
def load(
    call: SparkRun, topic: str, paths: tuple[str, ...], kind: str | None, reader: tuple[str, ...], **more: Any
) -> None:
    """Write the rows of files to TOPIC. Bad rows are told with file and row before anything is written."""
    call.need_extra()
    from pyspark_tidelog.jobs import load as job

    options = job.LoadOptions(
        call.access(),
        topic,
        paths,
        kind or "",
        more["value"],
        more["key"],
        more["timestamp"],
        dict(parse_pairs("--read", reader)),
        more["append"],
    )
    call.execute(
        "load",
        lambda: job.plan(options),
        lambda spark: job.run(spark, options),
        render=lambda document: f"{document['records']} rows written to {document['topic']}",
        render_plan=_render_plan,
    )


def _render_plan(document: dict[str, Any]) -> str:
    size = output.size(document["bytes"])
    files = "the files" if document["files"] is None else f"{document['files']} files ({size})"
    there = f", which has {document['records_there']} records" if document["records_there"] else ""
    return f"would write the rows of {files} ({document['format']}) to {document['topic']}{there}; nothing was written"
