"""`tidelog spark replay`: a topic, or a part of it, into another topic or into Parquet files."""

from __future__ import annotations

import json
from typing import Any

import click

from tidelog.cli import output
from tidelog.cli.completion import topic_names
from tidelog.cli.options import TimestampType
from tidelog.cli.spark_run import SparkRun, spark_options
from tidelog.runtime.errors import ConfigError


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.option("--to", "to_topic", default="", metavar="TOPIC", help="The target; it is created if it is not there.")
@click.option("--to-parquet", default="", metavar="PATH", help="A directory, on any file system that Spark has.")
@click.option("--from", "from_ms", type=TimestampType(), metavar="TIME", help="Begin with records of this time.")
@click.option("--until", "until_ms", type=TimestampType(), metavar="TIME", help="End before records of this time.")
@click.option("--from-offsets", default="", metavar="JSON", help='Begin at offsets of each partition: {"0": 23}.')
@click.option("--until-offsets", default="", metavar="JSON", help="End before offsets of each partition.")
@click.option("--by-key", is_flag=True, help="Let the key choose the partition [default: that of the same number].")
@spark_options
def replay(call: SparkRun, topic: str, to_topic: str, to_parquet: str, by_key: bool, **range_: Any) -> None:
    """Copy TOPIC, or a part of it, into another topic or into Parquet files. Run again, it goes on or begins anew."""
    call.need_extra()
    from pyspark_tidelog.jobs import replay as job

    bounds = {
        **_bound(topic, "starting", "--from", range_["from_ms"], range_["from_offsets"]),
        **_bound(topic, "ending", "--until", range_["until_ms"], range_["until_offsets"]),
    }
    options = job.ReplayOptions(call.access(), topic, to_topic, to_parquet, by_key, bounds)
    call.execute(
        "replay",
        lambda: job.plan(options),
        lambda spark: job.run(spark, options),
        render=_render,
        render_plan=_render_plan,
    )


def _bound(topic: str, side: str, flag: str, time_ms: int | None, offsets: str) -> dict[str, str]:
    """Return the option of the data source for a side of the range. Raises `ConfigError`."""
    if time_ms is not None and offsets:
        raise ConfigError(f"both {flag} and {flag}-offsets are given", hint="leave one out")
    if time_ms is not None:
        return {f"{side}Timestamp": str(time_ms)}
    if not offsets:
        return {}
    try:
        return {f"{side}Offsets": json.dumps({topic: json.loads(offsets)})}
    except ValueError as error:
        raise ConfigError(f"{flag}-offsets is no JSON: {error}", hint='as {"0": 23, "1": 42}') from error


def _ranges(document: dict[str, Any]) -> str:
    rows = [[one["partition"], one["start"], one["end"], one["end"] - one["start"]] for one in document["ranges"]]
    headers = ["PARTITION", "START", "END", "OFFSETS"]
    return output.table(headers, rows, right=headers) + "\n\n" if rows else ""


def _render_plan(document: dict[str, Any]) -> str:
    created = ", which would be created" if document["creates_target"] else ""
    return (
        f"{_ranges(document)}would copy these offsets of {document['topic']} into {document['target']}{created},"
        f" in {document['tasks']} tasks, from objects of {output.size(document['bytes'])}; nothing was copied"
    )


def _render(document: dict[str, Any]) -> str:
    text = f"{_ranges(document)}{document['records']} records of {document['topic']} written to {document['target']}"
    if document["found"]:
        text += f"; an earlier run had written {document['found']}"
    if document["restamped"]:
        text += f"\n{document['restamped']} records with timestamp 0 got the time of this run"
    return text
