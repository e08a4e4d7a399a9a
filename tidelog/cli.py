"""The `tidelog` command: lazy sub-commands, and one place where errors become messages and exit codes.

Exit codes: 0 success; 2 wrong usage, input or configuration; 3 not found; 4 exists already; 5 unavailable or
overloaded, try again; 6 storage failed; 7 corrupt data; 8 port in use; 9 wrong data directory; 10 `status` found
something wrong; 1 anything else.

Entry: `main`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from runtime.errors import TidelogError
from tidelog import __version__

COMMANDS = {
    "up": ("tidelog.commands.up:up", "Start Tidelog on this machine and keep it running."),
    "serve": ("tidelog.commands.serve:serve", "Run one process of a real deployment."),
    "topic": ("tidelog.commands.topic:topic", "Create, list, describe, alter and delete topics."),
    "partition": ("tidelog.commands.partition:partition", "Show where partitions are, and move them between brokers."),
    "produce": ("tidelog.commands.produce:produce", "Write records to a topic from a file or standard input."),
    "consume": ("tidelog.commands.consume:consume", "Read records from a topic."),
    "group": ("tidelog.commands.group:group", "List, describe, delete and reset consumer groups."),
    "config": ("tidelog.commands.config:config", "Show every setting, its value and where it came from."),
    "wal": ("tidelog.commands.wal:wal", "Inspect and verify the write-ahead log on disk."),
    "object": ("tidelog.commands.object:object_", "List, inspect, verify, compact and clean up objects in the bucket."),
    "cost": ("tidelog.commands.cost:cost", "Show what the bucket costs, by purpose and topic."),
    "broker": ("tidelog.commands.broker:broker", "List, add, drain and remove brokers."),
    "balancer": ("tidelog.commands.balancer:balancer", "Show how evenly brokers are loaded, and even it out."),
    "controller": ("tidelog.commands.controller:controller", "Show and change the quorum of controllers."),
    "simulate": ("tidelog.commands.simulate:simulate", "Simulate clusters under faults, from a seed."),
    "check": ("tidelog.commands.check:check", "Check a recorded history of what clients saw."),
    "chaos": ("tidelog.commands.chaos:chaos", "Run real processes under faults and check every promise."),
    "status": ("tidelog.commands.status:status", "Show the cluster's nodes and what is wrong, if anything."),
}
"""Command → (module:function, one line of help)."""


class _LazyGroup(click.Group):
    """Imports a sub-command when it is called, not when `tidelog` starts."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tidelog")
def cli() -> None:
    """Tidelog: Kafka's protocol in front, object storage behind."""


def report(error: TidelogError) -> None:
    """Print an error and its hint to standard error."""
    click.echo(f"error: {error.message}", err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)


def main(args: list[str] | None = None) -> Any:
    """Run the command line and exit with the code of what happened."""
    try:
        code = cli.main(args=args, prog_name="tidelog", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)  # click returns the code of an Exit
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except TidelogError as error:
        report(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
