"""The `tidelog` command: lazily imported subcommands, and the conversion of errors to messages and exit codes.

Entry: `main`; `run` for a command that is not one of the command line; `EXIT_CODES`.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Any, NoReturn

import click

from tidelog import __version__
from tidelog.runtime.errors import InvalidInput, StorageFailed, TidelogError

COMMANDS = {
    "up": ("tidelog.cli.subcommands.up:up", "Start Tidelog on this machine and keep it running."),
    "serve": ("tidelog.cli.subcommands.serve:serve", "Run one process of a real deployment."),
    "topic": ("tidelog.cli.subcommands.topic:topic", "Create, list, describe, alter and delete topics."),
    "partition": (
        "tidelog.cli.subcommands.partition:partition",
        "Show where partitions are, and move them between brokers.",
    ),
    "produce": ("tidelog.cli.subcommands.produce:produce", "Write records to a topic from a file or standard input."),
    "consume": ("tidelog.cli.subcommands.consume:consume", "Read records from a topic."),
    "group": ("tidelog.cli.subcommands.group:group", "List, describe, delete and reset consumer groups."),
    "config": ("tidelog.cli.subcommands.config:config", "Show every setting, its value and where it came from."),
    "wal": ("tidelog.cli.subcommands.wal:wal", "Inspect and verify the write-ahead log on disk."),
    "object": (
        "tidelog.cli.subcommands.object:object_",
        "List, inspect, verify, compact and clean up objects in the bucket.",
    ),
    "cost": ("tidelog.cli.subcommands.cost:cost", "Show what the bucket costs, by purpose and topic."),
    "explain": (
        "tidelog.cli.subcommands.explain:explain",
        "Tell where one record went and when, or why requests were slow.",
    ),
    "broker": ("tidelog.cli.subcommands.broker:broker", "List, add, drain and remove brokers."),
    "replica-set": (
        "tidelog.cli.subcommands.replica_set:replica_set_",
        "Show replica sets, elect masters, set replication policies.",
    ),
    "balancer": ("tidelog.cli.subcommands.balancer:balancer", "Show how evenly brokers are loaded, and even it out."),
    "controller": ("tidelog.cli.subcommands.controller:controller", "Show and change the quorum of controllers."),
    "lease": (
        "tidelog.cli.subcommands.lease:lease",
        "Show and end leases of readers outside the cluster, such as Spark.",
    ),
    "snapshot": (
        "tidelog.cli.subcommands.snapshot:snapshot",
        "Hold topics as they are now: take, list and delete snapshots.",
    ),
    "cluster": ("tidelog.cli.subcommands.cluster:cluster", "Show and raise the feature level; rebuild from a bucket."),
    "spark": ("tidelog.cli.subcommands.spark:spark", "Audit, replay, load and move topics with Spark."),
    "simulate": ("tidelog.cli.subcommands.simulate:simulate", "Simulate clusters under faults, from a seed."),
    "check": ("tidelog.cli.subcommands.check:check", "Check a recorded history of what clients saw."),
    "chaos": ("tidelog.cli.subcommands.chaos:chaos", "Run real processes under faults and check every promise."),
    "completion": (
        "tidelog.cli.subcommands.completion:completion",
        "Print the script for a shell's completion.",
    ),
    "console": ("tidelog.cli.subcommands.console:console", "Serve the console of a cluster to browsers."),
    "debug": ("tidelog.cli.subcommands.debug:debug", "Write what a maintainer needs, without secrets."),
    "doctor": ("tidelog.cli.subcommands.doctor:doctor", "Say what is wrong, why it matters, and what cures it."),
    "status": ("tidelog.cli.subcommands.status:status", "Show the cluster's nodes and what is wrong, if anything."),
}
"""Command → (module:function, one line of help)."""

EXIT_CODES = {
    0: "done; also: watching or following ended by Ctrl-C, or the reader of the pipe went away",
    1: "anything not below; `check`, `simulate` and `chaos`: something was found",
    2: "wrong usage, input or configuration",
    3: "not found (the nearest name is suggested)",
    4: "exists already",
    5: "unavailable, or not possible now: try again",
    6: "storage failed",
    7: "corrupt data found",
    8: "port in use (`up`, `serve`)",
    9: "wrong data directory or wrong bucket (`up`, `serve`)",
    10: "`status`, `controller status` or `doctor` found something wrong",
    11: "`serve`: a restart was asked for (`cluster restart`); start it again",
    130: "ended by Ctrl-C before it was done",
}
"""Exit code → meaning, as in docs/cli.md. `TidelogError.exit_code` is the code of an error."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a disk says, to which standard output may have been led, that takes no more."""


class _LazyGroup(click.Group):
    """Imports a subcommand when it is called, not when `tidelog` starts."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        from tidelog.cli.options import refuse_senseless_values

        refuse_senseless_values(command)
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
    """Run the command line and exit with its exit code."""
    _open_closed_streams()
    run(cli, args)


def _open_closed_streams() -> None:
    """Open the standard streams that are closed, so that no other file gets their numbers, and is logged into.

    To read from such a stream, or to write to it, is an error, as it would be otherwise.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if mode == "w" else os.O_WRONLY)  # the lowest number that is free: this one
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def _exit_code(command: click.Command, args: list[str] | None) -> int:
    """Run a command; return its exit code, which is 0 if the reader of its pipe went away."""
    try:
        os.getcwd()
    except FileNotFoundError:  # a library asks for it when it is imported
        raise InvalidInput("the current directory does not exist any more", hint="`cd` to one that does") from None
    try:
        code = command.main(args=args, prog_name="tidelog", standalone_mode=False)
    except SystemExit as error:
        from tidelog.cli.output import reader_gone

        if error.code != 1 or not reader_gone():  # 1 is click's own after a broken pipe
            raise
        return 0
    return code if isinstance(code, int) else 0  # click returns the code of `click.exceptions.Exit`


def run(command: click.Command, args: list[str] | None) -> NoReturn:
    """Run a command and exit with its exit code."""
    try:
        sys.exit(_exit_code(command, args))
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
    except OSError as error:
        if error.errno not in (*NO_ROOM, errno.EBADF):
            raise
        from tidelog.cli.output import discard_output

        failure: TidelogError = StorageFailed(
            f"cannot write: {error.strerror}", hint="make room, or write to another disk"
        )
        if error.errno == errno.EBADF:
            failure = InvalidInput("standard input or output is closed", hint="`< /dev/null` is an input without data")
        report(failure)
        discard_output()
        sys.exit(failure.exit_code)
