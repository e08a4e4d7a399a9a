"""`tidelog spark audit`: checks every byte of every object on executors. Exits with 7 if something is corrupt."""

from __future__ import annotations

from typing import Any

import click

from tidelog.cli import output
from tidelog.cli.spark_run import SparkRun, spark_options
from tidelog.runtime.errors import CorruptData

_COLUMNS = {
    "OBJECT": "object_id",
    "PART": "part",
    "BYTE": "position",
    "STREAM": "stream_id",
    "TOPIC": "topic",
    "PARTITION": "partition",
    "OF": "stream_part",
    "START": "start_offset",
    "END": "end_offset",
    "PROBLEM": "problem",
}
_RIGHT = ("OBJECT", "BYTE", "START", "END")


@click.command()
@click.option("--report", default="", metavar="FILE", help="Also write the findings to FILE: .parquet or .csv.")
@click.option(
    "--batches/--no-batches",
    default=True,
    show_default=True,
    help="Decode every record batch, too: its CRC-32C, offsets and records.",
)
@spark_options
def audit(call: SparkRun, report: str, batches: bool) -> None:
    """Read and check every byte of every object, and compare it with the metadata. Exits 7 if something is corrupt."""
    call.need_extra()
    from pyspark_tidelog.jobs import audit as job

    options = job.AuditOptions(call.access(), report, batches=batches)
    found = call.execute(
        "audit",
        lambda: job.plan(options),
        lambda spark: job.run(spark, options),
        render=_render,
        render_plan=_render_plan,
    )
    if not call.dry_run and found.findings:
        count = len(found.findings)
        raise CorruptData(
            f"{count} problem{'' if count == 1 else 's'} found in the bucket",
            hint="`tidelog object inspect ID` shows an object; see docs/operations.md",
        )


def _render_plan(document: dict[str, Any]) -> str:
    size = output.size(document["bytes"])
    where = f"; findings go to {document['report']}" if document["report"] else ""
    return (
        f"would read {document['objects']} objects ({size}) with the records of {document['partitions']} partitions,"
        f" in {document['tasks']} tasks{where}; nothing was read"
    )


def _render(document: dict[str, Any]) -> str:
    size = output.size(document["bytes"])
    checked = f"{document['objects']} objects, {size}, {document['blocks']} blocks checked"
    if document["replaced"]:
        checked += f"; {document['replaced']} were replaced meanwhile"
    rows = [[one[name] for name in _COLUMNS.values()] for one in (*document["findings"], *document["orphans"])]
    text = output.table(list(_COLUMNS), rows, right=_RIGHT) + "\n\n" if rows else ""
    text += f"{'DAMAGED' if document['findings'] else 'sound'}: {checked}"
    if document["not_listed"]:
        return f"{text}\norphans were not looked for: {document['not_listed']}"
    return f"{text}\n{len(document['orphans'])} orphans"
