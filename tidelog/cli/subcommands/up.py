"""`tidelog up`: a complete Tidelog on one machine, supervised.

The supervisor starts one `tidelog serve` process for each broker (with three or more, the first three are also the
controllers), prints their readiness as one line, and restarts processes that end (with back-off and a message). On
SIGTERM or Ctrl-C it lets all of them complete requests and upload, and exits with 0. It has no state of its own:
everything is in the data directory, whose `up.lock` it holds: a second `tidelog up` is refused before it starts or
writes anything.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from tidelog.cli.options import PRIVATE_UMASK, config_options, load_config
from tidelog.config import Loaded, exposed_secrets
from tidelog.process import cluster_layout
from tidelog.process.data_dir import UP_LOCK_FILE, lock_file
from tidelog.process.rebuild import check_finished
from tidelog.process.supervisor import Supervisor
from tidelog.runtime.errors import ConfigError
from tidelog.runtime.lines import say

HOW_TO_CONNECT = """
  Python   from confluent_kafka import Producer
           p = Producer({{"bootstrap.servers": "{bootstrap}"}}); p.produce("hello", b"world"); p.flush()
  kcat     echo world | kcat -b {bootstrap} -P -t hello   then   kcat -b {bootstrap} -C -t hello -e
  Tidelog  tidelog status --bootstrap {bootstrap}         stop with Ctrl-C
"""


@click.command()
@click.option("--brokers", type=click.IntRange(min=1), default=1, show_default=True, help="Number of brokers.")
@click.option(
    "--controllers",
    type=click.Choice(["1", "3", "5"]),
    help="Members of the quorum [default: 3 with 3 or more brokers].",
)
@click.option("--data-dir", type=click.Path(path_type=Path), metavar="DIR", help="Directory of all state.")
@click.option("--kafka-port", type=int, metavar="P", help="Broker i listens on P+i-1.")
@click.option("--s3-endpoint", metavar="URL", help="An S3 server; without it the embedded store is used.")
@click.option("--bucket", metavar="NAME", help="The bucket on it.")
@click.option("--wal", type=click.Choice(["disk", "s3", "memory"]), help="Where the write-ahead log is stored.")
@click.option("--racks", metavar="A,B,...", help="Racks, assigned to the brokers round-robin; stored in the directory.")
@click.option("--quiet", is_flag=True, help="Print the ready line only.")
@config_options
def up(
    brokers: int,
    controllers: str | None,
    data_dir: Path | None,
    kafka_port: int | None,
    s3_endpoint: str | None,
    bucket: str | None,
    wal: str | None,
    racks: str | None,
    quiet: bool,
    config_file: Path | None,
    assignments: tuple[str, ...],
) -> None:
    """Start Tidelog on this machine and keep it running."""
    loaded = load_config(
        config_file,
        assignments,
        node__data_dir=str(data_dir) if data_dir is not None else None,
        kafka__port=kafka_port,
        s3__endpoint=s3_endpoint,
        s3__bucket=bucket,
        wal__kind=wal,
    )
    check_bucket(loaded)
    os.umask(PRIVATE_UMASK)
    for sentence in exposed_secrets(loaded):
        click.echo(f"warning: {sentence}", err=True)
    with _locked(Path(loaded.config.node.data_dir)):
        check_finished(Path(loaded.config.node.data_dir))
        nodes = cluster_layout.plan(loaded, brokers, int(controllers) if controllers else None, parse_racks(racks))
        exit_code = asyncio.run(_run(nodes, quiet, loaded))
    raise click.exceptions.Exit(exit_code)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of `tidelog up`. A directory that was made for nothing but the lock is removed afterwards."""
    is_new = not directory.exists()
    lock_file(directory, UP_LOCK_FILE)  # until this process ends
    try:
        yield
    finally:
        if is_new and [each.name for each in directory.iterdir()] == [UP_LOCK_FILE]:
            (directory / UP_LOCK_FILE).unlink()
            directory.rmdir()


def parse_racks(text: str | None) -> list[str]:
    """Parse the names in `--racks`. Raises `ConfigError`."""
    names = [name.strip() for name in text.split(",")] if text is not None else []
    if not all(names):
        raise ConfigError(f"--racks {text!r} has an empty name", hint="for example --racks a,b,c")
    return names


def check_bucket(loaded: Loaded) -> None:
    """Check that an S3 server is given with a bucket. Raises `ConfigError`."""
    if loaded.config.s3.endpoint and not loaded.config.s3.bucket:
        raise ConfigError("--s3-endpoint needs a bucket", hint="add --bucket NAME")


async def _run(nodes: list[Loaded], quiet: bool, loaded: Loaded) -> int:
    def ready(bootstrap: str) -> None:
        say(f"ready bootstrap={bootstrap}")
        if not quiet:
            say(HOW_TO_CONNECT.format(bootstrap=bootstrap.partition(",")[0]), err=True)

    return await Supervisor(nodes, ready, loaded).run()
