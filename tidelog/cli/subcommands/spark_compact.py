"""`tidelog spark compact`: see `pyspark_tidelog.jobs.compact`."""

from __future__ import annotations

from typing import Any

import click

from tidelog.cli import output
from tidelog.cli.client import AdminTokenNeeded, ClusterConnection
from tidelog.cli.completion import topic_names
from tidelog.cli.options import secret_file_option
from tidelog.cli.spark_run import SparkRun, spark_options
from tidelog.runtime.errors import CorruptData, NotFound, Unavailable

MIB = 1 << 20


@click.command()
@click.option(
    "--topic",
    "topics",
    multiple=True,
    help="Only objects with data of this topic; may repeat.",
    shell_complete=topic_names,
)
@click.option(
    "--target-mib",
    type=click.IntRange(1, 1_024),
    help="Size of the new objects; a task takes three times that [default: compaction.target_bytes of the brokers].",
)
@click.option(
    "--max-objects",
    type=click.IntRange(2, 1_024),
    default=256,
    show_default=True,
    help="Objects that one task puts together.",
)
@secret_file_option
@spark_options
def compact(call: SparkRun, topics: tuple[str, ...], target_mib: int | None, max_objects: int) -> None:
    """Rewrite small and scattered objects into large ones, whatever their age, until nothing is left to do.

    Brokers say what belongs together, Spark's executors rewrite it, and a broker commits each task, as it would its
    own. Executors need to read and create objects in the bucket. It may be ended at any moment and run again.
    """
    access = call.access()
    from pyspark_tidelog.jobs import compact as job

    options = job.CompactOptions(access, _admin_token(call.bootstrap), topics, (target_mib or 0) * MIB, max_objects)
    found = call.execute(
        "compact",
        lambda: job.plan(options),
        lambda spark: job.run(spark, options),
        render=_render,
        render_plan=_render_plan,
    )
    if isinstance(found, job.CompactResult):
        _raise_what_is_wrong(found.damaged, found.failed)


def _admin_token(bootstrap: str) -> str:
    try:
        return ClusterConnection(bootstrap).admin_token
    except (AdminTokenNeeded, NotFound):
        return ""  # no secret, or one of another machine: the first request that needs the token says so


def _raise_what_is_wrong(damaged: int, failed: int) -> None:
    if damaged:
        raise CorruptData(
            f"{damaged} tasks met damaged or missing objects, which were left as they are",
            hint="`tidelog object verify` shows the damage",
        )
    if failed:
        raise Unavailable(f"{failed} tasks failed without changes", hint="see the problems, and run it again")


def _render(document: dict[str, Any]) -> str:
    about = [
        ("compacted", f"{document['inputs']} objects into {document['outputs']}"),
        ("tasks", f"{document['tasks']} in {document['rounds']} rounds"),
        ("read", output.size(document["read_bytes"])),
        ("written", output.size(document["written_bytes"])),
        ("refused", document["refused"]),
        ("damaged", document["damaged"]),
        ("failed", document["failed"]),
    ]
    return _with_problems(output.pairs(about), document)


def _render_plan(document: dict[str, Any]) -> str:
    if not document["tasks"]:
        return _with_problems("nothing to compact", document)
    kinds = ", ".join(f"{count} {kind}" for kind, count in document["kinds"].items())
    about = [
        ("tasks", f"{document['tasks']} ({kinds})"),
        ("objects", document["objects"]),
        ("to read", output.size(document["bytes"])),
        ("to write", f"~{output.size(document['estimated_bytes'])}"),
        ("requests", f"~{document['requests']}"),
    ]
    text = output.pairs(about) + "\n\nthe first round; later ones put together what is small still. Nothing was changed"
    return _with_problems(text, document)


def _with_problems(text: str, document: dict[str, Any]) -> str:
    return "\n".join([text, *([""] if document["problems"] else []), *document["problems"]])
