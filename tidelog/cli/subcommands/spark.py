"""`tidelog spark JOB`: jobs over whole topics that Spark carries out. A module `spark_…` has each job's command.

Entry: `spark`, `JOBS`.
"""

from __future__ import annotations

import importlib

import click

JOBS = {
    "table": ("tidelog.cli.subcommands.spark_table:table", "Bring an Iceberg table up to date with a topic."),
    "table-compact": ("tidelog.cli.subcommands.spark_table:table_compact", "Put a table's small files together."),
    "audit": ("tidelog.cli.subcommands.spark_audit:audit", "Check every byte of every object."),
    "backfill": ("tidelog.cli.subcommands.spark_backfill:backfill", "Copy a topic's history from another cluster."),
    "compact": (
        "tidelog.cli.subcommands.spark_compact:compact",
        "Rewrite small objects into large ones.",
    ),
    "load": ("tidelog.cli.subcommands.spark_load:load", "Write Parquet, CSV or JSON files to a topic."),
    "replay": ("tidelog.cli.subcommands.spark_replay:replay", "Copy a topic into another, or into Parquet files."),
}
"""Job → (module:function, one line of help)."""


class _Jobs(click.Group):
    """Imports a job's command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(JOBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in JOBS:
            return None
        module, _, name = JOBS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Jobs"):
            formatter.write_dl([(name, text) for name, (_, text) in JOBS.items()])


@click.command(cls=_Jobs)
def spark() -> None:
    """Audit, replay, load and move topics with Spark, on this machine or a cluster (pip install "tidelog[spark]")."""
