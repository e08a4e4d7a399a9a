"""`tidelog cluster rebuild`: make a data directory from the bucket alone.

It works without any process. `--dry-run` changes nothing and says what would be lost; without it the command asks
first, unless `--yes` is given.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from tidelog.cli import output
from tidelog.cli.options import PRIVATE_UMASK, config_options, format_option, load_config
from tidelog.cli.subcommands.up import check_bucket
from tidelog.runtime.errors import NotFound
from tidelog.runtime.progress_bar import ProgressBar

if TYPE_CHECKING:
    from tidelog.config import Loaded
    from tidelog.process.rebuild import RebuildReport

SHOWN_LOSSES = 20
"""Lost ranges that the text shows; `--format json` has all."""


@click.command()
@click.option("--data-dir", type=click.Path(path_type=Path), metavar="DIR", help="The new data directory.")
@click.option("--brokers", type=click.IntRange(min=1), default=1, show_default=True, help="Number of brokers.")
@click.option("--s3-endpoint", metavar="URL", help="The S3 server; without it the embedded store in DIR/bucket.")
@click.option("--bucket", metavar="NAME", help="The bucket on it.")
@click.option("--cluster-id", default="", metavar="ID", help="If the bucket holds several clusters.")
@click.option("--dry-run", is_flag=True, help="Only say what is taken and what is lost.")
@click.option("--take-over", is_flag=True, help="Although the bucket seems to have a living owner.")
@click.option("--accept-loss", is_flag=True, help="Give up what is missing, and what precedes it in its partitions.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@format_option
@config_options
def rebuild(
    data_dir: Path | None,
    brokers: int,
    s3_endpoint: str | None,
    bucket: str | None,
    cluster_id: str,
    dry_run: bool,
    take_over: bool,
    accept_loss: bool,
    yes: bool,
    style: str,
    config_file: Path | None,
    assignments: tuple[str, ...],
) -> None:
    """Make a data directory from the bucket alone; then start it with `tidelog up` and the same --brokers.

    At most what was never uploaded is lost. With the embedded store DIR must contain the folder `bucket`, or a link to
    it. The old cluster must not run any more.
    """
    loaded = load_config(
        config_file,
        assignments,
        node__data_dir=str(data_dir) if data_dir is not None else None,
        s3__endpoint=s3_endpoint,
        s3__bucket=bucket,
        s3__create_bucket=False,
    )
    check_bucket(loaded)
    require_bucket(loaded)
    os.umask(PRIVATE_UMASK)
    choices = _Choices(dry_run, take_over, accept_loss, yes)
    report = asyncio.run(_rebuild(loaded, brokers, cluster_id, style, choices))
    if not dry_run:
        say_rebuilt(loaded, report, brokers)


def say_rebuilt(loaded: Loaded, report: RebuildReport, brokers: int) -> None:
    """Say how the cluster is started."""
    where, s3 = loaded.config.node.data_dir, loaded.config.s3
    words = ["tidelog", "up", "--brokers", str(brokers), "--data-dir", where]
    words += ["--s3-endpoint", s3.endpoint] if s3.endpoint else []
    words += ["--bucket", s3.bucket] if s3.bucket else []
    more = {"node.data_dir", "s3.endpoint", "s3.bucket", "s3.create_bucket"}
    others = " and the other settings that you have given here" if loaded.sources.keys() - more else ""
    click.echo(f"rebuilt cluster {report.cluster_id} in {where}; start it: {shlex.join(words)}{others}", err=True)


def require_bucket(loaded: Loaded) -> None:
    """Refuse an embedded store that does not exist: opening it would create it. Raises `NotFound`."""
    from tidelog.storage.bucket.open import EMBEDDED_BUCKET

    config = loaded.config
    place = Path(config.node.data_dir) / EMBEDDED_BUCKET
    if config.s3.is_embedded and not place.is_dir():
        raise NotFound(
            f"there is no embedded bucket in {config.node.data_dir}",
            hint=f"put the bucket or a link to it at {place}, or give --s3-endpoint and --bucket",
        )


class _Choices(NamedTuple):
    """What the operator allows."""

    dry_run: bool
    take_over: bool
    accept_loss: bool
    yes: bool


async def _rebuild(loaded: Loaded, brokers: int, cluster_id: str, style: str, choices: _Choices) -> RebuildReport:
    from tidelog.process.rebuild import carry_out, check_directory, prepare
    from tidelog.runtime.clock import SystemClock
    from tidelog.storage.bucket.open import open_store
    from tidelog.storage.bucket.purpose import Purpose

    config = loaded.config
    data_dir = Path(config.node.data_dir)
    check_directory(config)
    store = open_store(config.s3, data_dir, SystemClock(), random.Random())
    try:
        view = store.for_purpose(Purpose.METADATA)
        with ProgressBar("reading", unit="objects") as progress:
            told, accepted = progress.update, choices.accept_loss
            prepared = await prepare(config, view, brokers, cluster_id, told, accept_loss=accepted)
        document = msgspec.to_builtins(prepared.report)
        output.emit(json.dumps(document, indent=2) if style == "json" else render_report(document))
        if not choices.dry_run:
            if not choices.yes:
                click.confirm("Rebuild the cluster so?", abort=True, err=True)
            await carry_out(loaded, view, prepared, take_over=choices.take_over)
        return prepared.report
    finally:
        await store.close()


def render_report(report: dict[str, Any]) -> str:
    """Return the text of a `RebuildReport`."""
    last = "of a clean stop" if report["state_is_last"] else "later changes of topics and settings are lost"
    about = [
        ("cluster", report["cluster_id"]),
        ("generation", report["generation"]),
        ("metadata of", f"{output.moment(report['state_written_ms'])} ({last})"),
        ("topics", report["topics"]),
        ("partitions", report["partitions"]),
        ("objects", f"{report['objects']}, {report['new_objects']} of them newer than the metadata"),
        ("brokers", ", ".join(map(str, report["brokers"]))),
    ]
    parts = [output.pairs(about)]
    if report["living_owner"]:
        parts.append(f"warning: the bucket seems to be in use: {report['living_owner']}")
    if report["removed_brokers"]:
        names = ", ".join(map(str, report["removed_brokers"]))
        parts.append(f"brokers that will not exist, and whose own settings are gone: {names}")
    if report["lost_snapshots"]:
        parts.append(f"snapshots that were deleted later, and are gone: {', '.join(report['lost_snapshots'])}")
    if report["damaged"]:
        parts.append("damaged, and not used:\n" + "\n".join(f"  - {one}" for one in report["damaged"]))
    parts.append(_render_losses(report["lost"]))
    return "\n\n".join(parts)


def _render_losses(lost: list[dict[str, Any]]) -> str:
    if not lost:
        return "nothing is known to be lost"
    cells = [
        [
            one["what"],
            one["topic"] or None,
            one["partition"] if one["partition"] >= 0 else None,
            one["from_offset"],
            one["to_offset"] if one["to_offset"] >= 0 else "unknown",
            one["object_id"] if one["object_id"] >= 0 else None,
        ]
        for one in lost[:SHOWN_LOSSES]
    ]
    headers = ["WHAT", "TOPIC", "PARTITION", "FROM", "TO", "OBJECT"]
    table = output.table(headers, cells, right=["PARTITION", "FROM", "TO", "OBJECT"])
    more = len(lost) - SHOWN_LOSSES
    return f"lost, or may be lost:\n{table}" + (f"\nand {more} more: --format json shows them" if more > 0 else "")
