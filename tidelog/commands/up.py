"""`tidelog up`: a whole Tidelog on one machine, supervised.

The supervisor starts one `tidelog serve` process for each broker (the first three of three or more are the controllers,
too), relays their readiness as one line, starts again what
dies (with back-off, and says so), and on SIGTERM or Ctrl-C lets all of them finish and upload before it exits 0. It
holds no state of its own: everything is under the data directory.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from runtime.errors import ConfigError
from tidelog import cluster_layout
from tidelog.config import Loaded
from tidelog.options import config_options, load_config
from tidelog.supervisor import Supervisor

HOW_TO_CONNECT = """
  Python   from confluent_kafka import Producer
           p = Producer({{"bootstrap.servers": "{bootstrap}"}}); p.produce("hello", b"world"); p.flush()
  kcat     echo world | kcat -b {bootstrap} -P -t hello   then   kcat -b {bootstrap} -C -t hello -e
  Tidelog  tidelog status --bootstrap {bootstrap}         stop with Ctrl-C
"""


@click.command()
@click.option("--brokers", type=click.IntRange(min=1), default=1, show_default=True, help="Number of brokers.")
@click.option(
    "--controllers", type=click.Choice(["1", "3", "5"]), help="Members of the quorum [default: 3 from 3 brokers on]."
)
@click.option("--data-dir", type=click.Path(path_type=Path), metavar="DIR", help="Where all state is kept.")
@click.option("--kafka-port", type=int, metavar="P", help="Broker i listens on P+i-1.")
@click.option("--s3-endpoint", metavar="URL", help="An S3 server; without it the embedded store is used.")
@click.option("--bucket", metavar="NAME", help="The bucket on it.")
@click.option("--wal", type=click.Choice(["disk", "s3", "memory"]), help="Where the write-ahead log lives.")
@click.option(
    "--racks", metavar="A,B,...", help="Racks of the brokers, given to them in turn; kept with the directory."
)
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
    nodes = cluster_layout.plan(loaded, brokers, int(controllers) if controllers else None, parse_racks(racks))
    exit_code = asyncio.run(_run(nodes, quiet, loaded))
    raise click.exceptions.Exit(exit_code)


def parse_racks(text: str | None) -> list[str]:
    """The names in `--racks`. Raises `ConfigError`."""
    names = [name.strip() for name in text.split(",")] if text is not None else []
    if not all(names):
        raise ConfigError(f"--racks {text!r} has an empty name", hint="for example --racks a,b,c")
    return names


def check_bucket(loaded: Loaded) -> None:
    """An S3 server needs a bucket. Raises `ConfigError`."""
    if loaded.config.s3.endpoint and not loaded.config.s3.bucket:
        raise ConfigError("--s3-endpoint needs a bucket", hint="add --bucket NAME")


async def _run(nodes: list[Loaded], quiet: bool, loaded: Loaded) -> int:
    def ready(bootstrap: str) -> None:
        click.echo(f"ready bootstrap={bootstrap}")
        if not quiet:
            click.echo(HOW_TO_CONNECT.format(bootstrap=bootstrap.partition(",")[0]), err=True)

    return await Supervisor(nodes, ready, loaded).run()
