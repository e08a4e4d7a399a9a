"""`tidelog debug bundle`: one archive with what a maintainer needs to understand a node or a cluster, without secrets.

It holds the configuration with its origins, the findings of `tidelog doctor`, versions, what each node answers to
operators (status, metrics, metadata, stacks), listings of files and objects, and the ends of log files. What cannot be
had is named in its `manifest.json`, and on standard error.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from tidelog.cli import output
from tidelog.cli.options import config_options, secret_file_option


@click.group()
def debug() -> None:
    """Write what a maintainer needs, without secrets."""


@debug.command()
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.tar.gz",
    help="The archive [default: tidelog-debug-TIME.tar.gz in this directory].",
)
@click.option(
    "--log",
    "logs",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    metavar="FILE",
    help="A log file whose end goes with it; may repeat. Those in the data directory do by themselves.",
)
@click.option("--data-dir", type=click.Path(path_type=Path), metavar="DIR", help="The node's data directory.")
@click.option(
    "--bootstrap",
    metavar="HOST:PORT",
    help="Any broker of the cluster [default: what the configuration says, else 127.0.0.1:9092].",
)
@click.option("--offline", is_flag=True, help="Look at this machine only, and ask no cluster.")
@secret_file_option
@config_options
def bundle(
    config_file: Path | None,
    assignments: tuple[str, ...],
    file: Path | None,
    logs: tuple[Path, ...],
    data_dir: Path | None,
    bootstrap: str | None,
    offline: bool,
) -> None:
    """Write an archive for a bug report: what is known of this node and its cluster, and no secret."""
    from tidelog.cli.examine import DoctorTarget, gather_facts, secrets_of
    from tidelog.cli.subcommands.doctor import MAX_COLUMNS, document, render
    from tidelog.doctor.bundle import Bundle
    from tidelog.doctor.judge import judge
    from tidelog.doctor.masking import Masker
    from tidelog.doctor.parts import add_cluster, add_machine

    path = file or Path(f"tidelog-debug-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    gathered = gather_facts(DoctorTarget(config_file, assignments, data_dir, bootstrap, offline))
    made = Bundle(Masker(secrets_of(gathered.loaded)))
    findings = judge(gathered.facts)
    made.add_text("doctor.txt", render(findings, MAX_COLUMNS) + "\n")
    made.add_json("doctor.json", document(findings))
    add_machine(made, gathered.loaded, os.environ, logs)
    add_cluster(made, gathered.facts, gathered.ask, output.warn)
    size = made.write(path, time.time_ns() // 1_000_000)
    for name, why in made.missing.items():
        output.warn(f"missing: {name}: {why}")
    output.emit(f"{path}: {output.size(size)}" + (f", {len(made.missing)} parts missing" if made.missing else ""))
