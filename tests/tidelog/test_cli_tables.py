"""Every list and description can be watched, and fits a terminal of 80 columns, however long the names are."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout

import click
import pytest
from confluent_kafka import Consumer, Producer

from tests.support.cli import environment
from tests.support.cluster_process import eventually
from tidelog.cli.main import cli, main
from tidelog.cli.screen import CLEAR, HOME
from tidelog.testing import LocalBroker

pytestmark = pytest.mark.processes

COLUMNS = 80
TOPIC = "orders-of-all-customers-in-the-north-and-the-south-of-europe"
GROUP = "readers-that-add-up-what-was-ordered-by-customers-of-the-north"
SNAPSHOT = "before-it-moves"
CLIENT = "reader-of-the-north"
"""An id of a member has 37 characters more, and no place where it could be divided."""
WAIT_S = 60

ARGUMENTS: dict[str, list[str]] = {
    "explain": [f"{TOPIC}:0@0"],
    "topic describe": [TOPIC, "--configs"],
    "group describe": [GROUP],
    "partition list": [TOPIC],
    "replica-set describe": ["1"],
    "object inspect": ["OBJECT"],
    "snapshot describe": [SNAPSHOT],
}
"""What a command needs, beside its name."""


def commands(
    group: click.Group, context: click.Context, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, click.Context(command, parent=context), (*path, name))
        else:
            yield " ".join((*path, name)), command


ALL = dict(commands(cli, click.Context(cli)))
WATCHED = [name for name, command in ALL.items() if any("--watch" in one.opts for one in command.params)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def broker() -> Iterator[LocalBroker]:
    with LocalBroker(settings={"upload.age_ms": 50}) as broker:
        broker.create_topic(
            TOPIC, partitions=3, config={"cleanup.policy": "compact,delete", "retention.ms": "123456789"}
        )
        producer = Producer({"bootstrap.servers": broker.bootstrap, "client.id": TOPIC})
        producer.produce(TOPIC, b"value", b"key")
        assert producer.flush(WAIT_S) == 0
        consumer = Consumer(
            {
                "bootstrap.servers": broker.bootstrap,
                "group.id": GROUP,
                "client.id": CLIENT,
                "auto.offset.reset": "earliest",
            }
        )
        consumer.subscribe([TOPIC])
        assert consumer.poll(WAIT_S) is not None
        consumer.commit(asynchronous=False)
        run(broker, "snapshot", "create", SNAPSHOT)
        run(broker, "topic", "branch", f"{TOPIC}@{SNAPSHOT}", f"{TOPIC}-branch")
        yield broker
        consumer.close()


def run(broker: LocalBroker, *args: str) -> str:
    """What a command shows on a terminal."""
    out, err = Terminal(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main([*args, "--bootstrap", broker.bootstrap])
    assert ended.value.code in (0, 10), err.getvalue()
    return out.getvalue()


def test_all_lists_and_descriptions_can_be_watched() -> None:
    named = [name for name in ALL if name.split()[-1] in ("list", "describe", "status")]
    assert len(named) > 10 and [name for name in named if name not in WATCHED] == []


@pytest.mark.parametrize("name", WATCHED)
def test_a_table_fits_eighty_columns(name: str, broker: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    arguments = ARGUMENTS.get(name, [])
    if arguments == ["OBJECT"]:
        found = eventually(lambda: json.loads(run(broker, "object", "list", "--format", "json")), WAIT_S)
        arguments = [str(found[0]["id"])]
    text = run(broker, *name.split(), *arguments)
    assert text.strip() and [line for line in text.splitlines() if len(line) > COLUMNS] == []


def test_a_terminal_shows_pages_and_ctrl_c_ends_them(broker: LocalBroker) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    names = {**environment(broker.bootstrap), "TERM": "xterm"}
    command = [sys.executable, "-m", "tidelog", "topic", "list", "--watch", "0.1"]
    watching = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=names)
    os.close(theirs)
    seen = b""
    try:
        while seen.count(HOME.encode()) < 3:
            seen += os.read(ours, 65536)
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=WAIT_S)
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)
    assert (watching.returncode, err) == (0, b"")
    assert seen.count(CLEAR.encode()) == 1 and TOPIC.encode() in seen


def test_a_pipe_gets_blocks_until_its_reader_goes_away(broker: LocalBroker) -> None:
    command = [sys.executable, "-m", "tidelog", "topic", "list", "--watch", "0.1"]
    watching = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(broker.bootstrap), text=True
    )
    assert watching.stdout is not None and watching.stderr is not None
    with watching:
        found: list[str] = []
        while sum(line == "" for line in found) < 4:  # one after the time, one after the table
            found.append(watching.stdout.readline().rstrip())
        watching.stdout.close()
        assert watching.wait(WAIT_S) == 0
        assert watching.stderr.read() == ""
    _, empty, header, *rows = found[: len(found) // 2]
    assert empty == rows.pop() == "" and header.startswith("TOPIC") and rows[0].startswith(TOPIC)
    assert found[len(found) // 2 + 1 :] == ["", header, *rows, ""]
