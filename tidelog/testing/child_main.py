"""What a broker in a process of its own runs: the product's `serve`, with a clock and a bucket that obey the test.

    python -P -m tidelog.testing.child_main --config FILE --parent-pipe N --faults N

A forked process (`tidelog.testing.fork_server`) begins at `run_child`.

Entry: `run_child`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import click

from tidelog.cli.main import run
from tidelog.cli.options import load_config
from tidelog.cli.subcommands.serve import run_node, serve_signals
from tidelog.testing.fault_board import FaultBoard


@click.command()
@click.option("--config", "config_file", type=click.Path(path_type=Path), required=True)
@click.option("--parent-pipe", type=int, required=True, help="Stop when this inherited descriptor is at its end.")
@click.option("--faults", type=int, required=True, help="The inherited descriptor of the test's `FaultBoard`.")
def child(config_file: Path, parent_pipe: int, faults: int) -> None:
    """Run one broker of a test."""
    signals = serve_signals()
    from tidelog.testing.outside import outside

    loaded = load_config(config_file, ())
    run_node(loaded, parent_pipe, signals, outside(FaultBoard(faults), loaded.config.node.id))


def run_child(args: list[str]) -> NoReturn:
    """Run the broker and exit as `tidelog serve` does."""
    run(child, args)


if __name__ == "__main__":
    import sys

    run_child(sys.argv[1:])
