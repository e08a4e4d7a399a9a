"""`tidelog spark backfill`: a topic's history from another Kafka cluster, with its offsets."""

from __future__ import annotations

from typing import Any

import click

from tidelog.cli import output
from tidelog.cli.options import parse_pairs
from tidelog.cli.spark_run import SparkRun, spark_options


@click.command()
@click.argument("topic")
@click.option("--from-bootstrap", required=True, metavar="HOST:PORT", help="A broker of the other cluster.")
@click.option(
    "--from-kafka",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of librdkafka for the other cluster; may repeat.",
)
@click.option("--to", "to_topic", default="", metavar="TOPIC", help="The target [default: the same name].")
@click.option("--fill-holes", is_flag=True, help="Write a record without key and value where the source has none.")
@click.option("--renumber", is_flag=True, help="Give up the offsets: number the records from 0.")
@spark_options
def backfill(
    call: SparkRun,
    topic: str,
    from_bootstrap: str,
    from_kafka: tuple[str, ...],
    to_topic: str,
    fill_holes: bool,
    renumber: bool,
) -> None:
    """Copy the history of TOPIC of another Kafka cluster, with its offsets. Run again, it goes on where it was."""
    call.need_extra()
    from pyspark_tidelog.jobs import backfill as job

    source = {**dict(parse_pairs("--from-kafka", from_kafka)), "bootstrap.servers": from_bootstrap}
    options = job.BackfillOptions(call.access(), source, topic, to_topic, not renumber, fill_holes)
    call.execute(
        "backfill",
        lambda: job.plan(options),
        lambda spark: job.run(spark, options),
        render=_render,
        render_plan=_render_plan,
    )


def _ranges(document: dict[str, Any]) -> str:
    names = ("partition", "start", "end", "target_end")
    headers = ["PARTITION", "START", "END", "TARGET-END"]
    return output.table(headers, [[one[name] for name in names] for one in document["ranges"]], right=headers) + "\n\n"


def _render_plan(document: dict[str, Any]) -> str:
    created = ", which would be created" if document["creates_target"] else ""
    offsets = "with their offsets" if document["keeps_offsets"] else "numbered from 0"
    return (
        f"{_ranges(document)}would copy the records of {document['topic']} to {document['target']}{created}, {offsets},"
        f" in {document['tasks']} tasks; nothing was copied"
    )


def _render(document: dict[str, Any]) -> str:
    text = f"{_ranges(document)}{document['records']} records of {document['topic']} written to {document['target']}"
    if document["filled"]:
        text += f", and {document['filled']} holes filled"
    if document["found"]:
        text += f"; an earlier run had written up to {document['found']} offsets"
    if document["restamped"]:
        text += f"\n{document['restamped']} records with timestamp 0 got the time of this run"
    return text
