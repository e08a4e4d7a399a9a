"""The command line without a cluster: start-up time, help, wrong usage, and a cluster that is not there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.cli import Cli
from tidelog.cli import output
from tidelog.cli.client import ClusterConnection, unknown
from tidelog.cli.main import COMMANDS
from tidelog.cli.options import TimestampType
from tidelog.cli.subcommands import status as page
from tidelog.cli.subcommands.config import config
from tidelog.cli.subcommands.status import gather, status
from tidelog.runtime.errors import InvalidInput, NotFound, Unavailable

pytestmark = pytest.mark.processes

SERVER_PARTS = ("confluent_kafka", "aiohttp", "aiobotocore", "uvloop", "kio", "pysyncobj")


def test_help_is_quick_because_it_imports_no_client_and_no_server() -> None:
    code = (
        "import sys; from tidelog.cli.main import main\n"
        "sys.argv = ['tidelog', '--help']\n"
        "try:\n    main()\n"
        f"finally:\n    print([name for name in {SERVER_PARTS!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: tidelog" in done.stdout and done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself(name: str) -> None:
    assert "Usage: tidelog " + name in Cli()(name, "--help").text


@pytest.mark.parametrize(
    "command",
    [
        ["topic", "create", "t"],
        ["topic", "list"],
        ["topic", "describe", "t"],
        ["topic", "alter", "t", "-p", "2"],
        ["topic", "delete", "t", "--yes"],
        ["produce", "t"],
        ["consume", "t"],
        ["group", "list"],
        ["group", "describe", "g"],
        ["group", "delete", "g"],
        ["group", "reset-offsets", "g", "--topic", "t", "--to-latest"],
        ["object", "list"],
        ["object", "inspect", "1"],
        ["object", "verify"],
        ["status"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_cluster_that_is_not_there_is_said_at_once(command: list[str]) -> None:
    started = time.monotonic()
    result = Cli("127.0.0.1:1")(*command, code=5)
    assert time.monotonic() - started < 25
    assert result.err.splitlines() == [
        "error: no broker can be reached at 127.0.0.1:1: Connection refused",
        "hint: start one with `tidelog up`, or name a broker with --bootstrap HOST:PORT",
    ]
    assert result.out == b""


@pytest.mark.parametrize(
    "command", [["--help"], ["config"], ["config", "--reference"], ["config", "--format", "json"], ["topic", "--help"]]
)
def test_a_reader_that_has_gone_before_the_first_line_is_no_error(command: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tidelog", *command], stdout=write, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["config", "config --format json", "--help"])
def test_output_that_is_closed_is_wrong_usage(command: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m tidelog {command} >&-', sys.executable],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.partition("\n")[0]) == (2, "error: standard input or output is closed")


def test_a_current_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"rmdir {gone} && exec {sys.executable} -P -m tidelog up --data-dir {tmp_path / 'data'}"
    done = subprocess.run(["sh", "-c", command], cwd=gone, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("error: the current directory does not exist any more\nhint: `cd` to one that does\n")


def test_no_file_gets_the_number_of_a_standard_stream_that_is_closed() -> None:
    program = "from tidelog.cli import main; main.run = lambda *_: exit(open('/dev/null').fileno() < 3); main.main()"
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program], check=False)
        assert done.returncode == 0, closed


def test_a_file_of_reassignments_that_is_nested_too_deeply_is_wrong_input(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("[" * 100_000)
    assert "is not a list of reassignments" in Cli()("partition", "move", "--file", file, code=2).err


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        stop = threading.Event()
        held: list[socket.socket] = []

        def accept() -> None:
            while not stop.is_set():
                try:
                    held.append(server.accept()[0])
                except TimeoutError:
                    continue

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        stop.set()
        thread.join()
        for one in held:
            one.close()


def test_a_server_that_is_no_broker_is_told_from_one_that_is_not_there(silent_server: str) -> None:
    started = time.monotonic()
    result = Cli(silent_server)("topic", "list", code=5)
    assert "does not respond as a broker" in result.err
    assert time.monotonic() - started < 25


@pytest.mark.parametrize("text", ["", "localhost", "localhost:", ":9092", "localhost:x", "localhost:70000", "a:1,b"])
def test_a_bootstrap_that_is_no_address_is_wrong_usage(text: str) -> None:
    with pytest.raises(InvalidInput, match="HOST:PORT"):
        ClusterConnection(text)


def test_several_bootstrap_addresses_fail_together() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1: .*; 127\.0\.0\.1:2: "):
        ClusterConnection("127.0.0.1:1,127.0.0.1:2").client_config()


@pytest.mark.parametrize(
    "command",
    [
        ["consume", "t", "--offset", "1", "--from-beginning"],
        ["consume", "t", "--group", "g", "--partition", "0"],
        ["consume", "t", "--at", "yesterday"],
        ["consume", "t", "--at", "-²h"],
        ["consume", "t", "--at", "9" * 25],
        ["consume", "t", "--at", f"-{'9' * 4400}d"],
        ["consume", "t", "--group", "\udcff"],
        ["consume", "t", "--delimiter", "\udcff"],
        ["produce", "t", "--key-separator", "\udcff"],
        ["partition", "list", "\udcff"],
        ["group", "describe", "\udcff"],
        ["group", "describe", ""],
        ["produce", "t", "--acks", "1", "--idempotent"],
        ["produce", "t", "--header", "x"],
        ["produce", "t", "--key-separator", ":", "--format", "json"],
        ["topic", "alter", "t"],
        ["topic", "create", "t", "--config", "retention.ms"],
        ["group", "reset-offsets", "g", "--topic", "t"],
        ["group", "reset-offsets", "g", "--topic", "t", "--to-latest", "--to-offset", "1"],
        ["group", "reset-offsets", "g", "--to-latest"],
        ["status", "--watch", "0"],
    ],
    ids=lambda command: ascii(" ".join(command))[:60],
)
def test_wrong_usage_is_said_before_anything_is_connected(command: list[str]) -> None:
    assert "rror: " in Cli()(*command, code=2).err


@pytest.mark.parametrize(("text", "at"), [("1969-12-31T23:59:59.999Z", 0), ("-999999d", 0), ("9" * 18, 10**18 - 1)])
def test_a_time_is_one_that_kafka_takes_for_a_time(text: str, at: int) -> None:
    assert TimestampType().convert(text, None, None) == at


def test_a_disk_that_is_full_is_said() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tidelog", "config"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 6
    assert done.stderr.splitlines() == [
        "error: cannot write: No space left on device",
        "hint: make room, or write to another disk",
    ]


# --- output ------------------------------------------------------------------------------------------------------


def test_tables_line_up_and_are_never_cut() -> None:
    text = output.table(["NAME", "SIZE"], [["a" * 100, 1], ["b", None], ["c", ""]], right=["SIZE"])
    lines = text.splitlines()
    assert lines[0] == "NAME" + " " * 98 + "SIZE"
    assert lines[1] == "a" * 100 + "     1"
    assert lines[2].split() == ["b", "-"]
    assert {len(line) for line in lines} == {106}


def test_sizes_and_times_for_people() -> None:
    assert [output.size(count) for count in (None, 0, 1023, 1536, 1 << 30, 1 << 60)] == [
        None,
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 GiB",
        "1048576.0 TiB",
    ]
    assert output.moment(0) == "1970-01-01T00:00:00.000Z"
    assert output.moment(-1) is None
    assert output.moment((1 << 63) - 1) == str((1 << 63) - 1)


def test_an_unknown_name_suggests_the_nearest() -> None:
    error = unknown("topic", "ordres", ["orders", "payments"], otherwise="create it")
    assert isinstance(error, NotFound)
    assert error.hint is not None and "'orders'" in error.hint
    assert unknown("topic", "zzz", ["orders"], otherwise="create it").hint == "create it"


# --- status of several nodes -------------------------------------------------------------------------------------


LOST = {"broker": 3, "wal": "s3", "partitions": 7, "state": "recovering", "by": 2, "since_ms": 5}
TAKING_OVER = {
    "broker": 3,
    "since_ms": 5,
    "step": "uploading",
    "wal_bytes": 2048,
    "partitions_placed": 0,
    "error": None,
}


def _answer(node_id: int, states: dict[int, str], problems: list[str]) -> dict[str, Any]:
    nodes = [
        {
            "id": one,
            "roles": ["broker"],
            "pid": 1000 + one if one == node_id else None,
            "address": f"h{one}:9092",
            "admin_url": f"http://h{one}",
            "state": "ready" if one == node_id else state,
        }
        for one, state in states.items()
    ]
    own = {key: {"of": node_id} for key in ("partitions", "wal", "upload", "memory", "bucket")}
    return {
        "cluster_id": "c",
        "node_id": node_id,
        "time_ms": 1,
        "image_version": 1,
        "topics": 0,
        "nodes": nodes,
        "failover": {"lost": [LOST], "taking_over": [TAKING_OVER] if node_id == 2 else []},
        "moves": {"total": 3, "first": [{"topic": "t", "partition": 0, "from": 1, "to": 2, "since_ms": 1}]},
        "problems": problems,
        **own,
    }


def test_status_asks_every_live_node_and_collects_the_problems() -> None:
    states = {1: "alive", 2: "alive", 3: "dead", 4: "alive"}

    def ask(url: str, broker: int) -> dict[str, Any]:
        if url == "http://h4":
            raise Unavailable("no answer")
        return _answer(2, states, ["the disk of 2 is full"])

    document = gather(_answer(1, states, ["a problem of 1"]), ask)
    assert [node["pid"] for node in document["nodes"]] == [1001, 1002, None, None]
    assert [node.get("wal") for node in document["nodes"]] == [{"of": 1}, {"of": 2}, None, None]
    assert document["problems"] == [
        "a problem of 1",
        "the disk of 2 is full",
        "broker 3 at h3:9092 is dead",
        "broker 4: no answer",
    ]
    told = {name: TAKING_OVER[name] for name in ("step", "wal_bytes", "partitions_placed", "error")}
    assert document["failovers"] == [{**LOST, **told}]


OWN = {
    "partitions": {"open": 1, "led": 1},
    "wal": {"start_offset": 0, "end_offset": 10},
    "upload": {"backlog_bytes": 10},
    "memory": {"resident_bytes": 10, "log_cache_bytes": 1, "log_cache_bound_bytes": 10},
    "bucket": {"healthy": True, "url": "memory://"},
}


def test_status_shows_failovers_and_the_first_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {1: "alive", 2: "alive", 3: "dead"}
    monkeypatch.setattr(ClusterConnection, "get", lambda cluster, path: {**_answer(1, states, []), **OWN})
    monkeypatch.setattr(page, "http_json", lambda url, path, broker, timeout_s: {**_answer(2, states, []), **OWN})
    result = CliRunner().invoke(status, [])
    assert result.exit_code == page.SOMETHING_WRONG, result.output
    parts = {part.splitlines()[0]: part.splitlines()[1:] for part in result.output.split("\n\n")}
    assert parts["failovers:"][1].split()[:7] == ["3", "s3", "recovering", "2", "uploading", "2.0", "KiB"]
    assert parts["moving:"][1].split()[:4] == ["t", "0", "1", "2"]
    assert parts["moving:"][-1] == "and 2 more: `tidelog partition list`"


def test_config_says_when_nothing_differs_from_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TIDELOG_")]:
        monkeypatch.delenv(name)
    result = CliRunner().invoke(config, ["--changed"])
    assert (result.stdout, result.stderr) == ("", "every setting has its default\n")
    result = CliRunner().invoke(config, ["--changed", "--set", "node.id=3"])
    assert result.stdout.split()[:2] == ["node.id", "3"]
    assert not result.stderr
