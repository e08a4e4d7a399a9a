"""`tidelog produce` and `tidelog consume` against a real `tidelog up`: every byte, every pipe, every end."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from confluent_kafka import Consumer

from tests.support.cli import NO_REBALANCE_DELAY, Cli
from tests.support.tidelog_process import running
from tidelog.runtime.progress_bar import ERASE

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("cli") / "data", NO_REBALANCE_DELAY) as process:
        yield Cli(process.bootstrap)


_numbers = count()


@pytest.fixture
def topic(cli: Cli) -> str:
    """A new topic of one partition: order is certain."""
    name = f"records-{next(_numbers)}"
    cli("topic", "create", name, "-p", 1)
    return name


# --- produce -----------------------------------------------------------------------------------------------------


def test_lines_arrive_in_order_and_are_counted(cli: Cli, topic: str) -> None:
    assert (
        cli("produce", topic, stdin=b"one\ntwo\nthree").text
        == f"3 records to {topic}, at [partition] offset: [0] 0-2\n"
    )
    assert cli("consume", topic, "--from-beginning", "--max-records", 3).out == b"one\ntwo\nthree\n"


def test_nothing_to_produce_is_no_error(cli: Cli, topic: str) -> None:
    assert cli("produce", topic, stdin=b"") == (0, b"", "")


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_every_compression_and_acks(cli: Cli, topic: str, compression: str, acks: str) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(500))
    cli("produce", topic, "--compression", compression, "--acks", acks, "-q", stdin=lines)
    assert cli("consume", topic, "--from-beginning", "-n", 500, "--timeout", 30).out == lines


def test_bytes_that_are_no_text_come_back_as_they_were(cli: Cli, topic: str, tmp_path: Path) -> None:
    data = bytes(one for one in range(256) if one != 10)
    file = tmp_path / "data"
    file.write_bytes(data + b"\n\n" + data)
    cli("produce", topic, str(file))
    assert cli("consume", topic, "--exit").out == data + b"\n\n" + data + b"\n"
    assert cli("consume", topic, "--exit", "--delimiter", "\\0").out == data + b"\0\0" + data + b"\0"


def test_keys_headers_tombstones_and_partitions(cli: Cli) -> None:
    cli("topic", "create", "keyed", "-p", 3)
    cli(
        "produce",
        "keyed",
        "-p",
        1,
        "--key-separator",
        "::",
        "-H",
        "a=1",
        "-H",
        "b=",
        "--tombstone",
        stdin=b"k::v\ngone::\n",
    )
    records = [json.loads(line) for line in cli("consume", "keyed", "--exit", "--format", "json").out.splitlines()]
    assert [(one["partition"], one["offset"], one["key"], one["value"]) for one in records] == [
        (1, 0, "k", "v"),
        (1, 1, "gone", None),
    ]
    assert records[0]["headers"] == [{"key": "a", "value": "1"}, {"key": "b", "value": ""}]
    assert cli("consume", "keyed", "--exit", "--key-separator", "=").out == b"k=v\ngone=\n"
    assert "partitions 0 to 2, not 7" in cli("produce", "keyed", "-p", 7, code=2).err
    assert "partitions 0 to 2, not 7" in cli("consume", "keyed", "-p", 7, code=2).err


def test_the_same_key_goes_to_the_partition_that_java_clients_choose(cli: Cli) -> None:
    """Murmur2 of the key: what kafka-python, a port of the Java client, says."""
    from kafka.partitioner.default import murmur2

    cli("topic", "create", "hashed", "-p", 7)
    keys = [f"key-{number}".encode() for number in range(30)]
    cli("produce", "hashed", "--key-separator", ":", stdin=b"".join(key + b":v\n" for key in keys))
    for line in cli("consume", "hashed", "--exit", "--format", "json").out.splitlines():
        record = json.loads(line)
        assert record["partition"] == (murmur2(record["key"].encode()) & 0x7FFFFFFF) % 7


def test_json_round_trips_through_a_pipe(cli: Cli, topic: str) -> None:
    raw = b"\xff\x00\n\xfe"
    records = [
        {"key": "k", "value": "two\nlines", "headers": {"h": "x"}, "timestamp": 1_700_000_000_000, "partition": 0},
        {"key": None, "value": None, "headers": [{"key": "h", "value": "1"}, {"key": "h", "value": None}]},
        {"value_base64": base64.b64encode(raw).decode(), "key": "ü"},
        {"value": {"nested": [1, 2.5, True]}},
    ]
    cli("produce", topic, "--format", "json", stdin="\n".join(map(json.dumps, records)).encode())
    first = cli("consume", topic, "--exit", "--format", "json").out
    got = [json.loads(line) for line in first.splitlines()]
    assert (got[0]["key"], got[0]["value"], got[0]["timestamp"]) == ("k", "two\nlines", 1_700_000_000_000)
    assert (got[1]["key"], got[1]["value"]) == (None, None)
    assert got[1]["headers"] == [{"key": "h", "value": "1"}, {"key": "h", "value": None}]
    assert base64.b64decode(got[2]["value_base64"]) == raw
    assert json.loads(got[3]["value"]) == {"nested": [1, 2.5, True]}

    copy = f"{topic}-copy"
    cli("topic", "create", copy, "-p", 1)
    cli("produce", copy, "--format", "json", stdin=first)
    again = [json.loads(line) for line in cli("consume", copy, "--exit", "--format", "json").out.splitlines()]
    assert [{**one, "topic": topic} for one in again] == got


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"[1]",
        b'{"headers": 3}',
        b'{"partition": -1}',
        b'{"value_base64": "?"}',
        pytest.param(b'{"value": "\\ud800"}', id="half of a surrogate pair"),
        pytest.param(b'{"value": {"name": "\\udfff"}}', id="half of a surrogate pair in JSON"),
        pytest.param(b'{"headers": {"\\ud800": "x"}}', id="half of a surrogate pair in a header's name"),
        pytest.param(b'{"headers": {"a\\u0000b": "x"}}', id="a zero byte in a header's name"),
        pytest.param(b'{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="nested too deeply"),
        pytest.param(b'{"value": [1e400]}', id="a number that JSON has not"),
    ],
)
def test_bad_input_names_its_line_and_keeps_what_came_before(cli: Cli, topic: str, line: bytes) -> None:
    result = cli(
        "produce", topic, "--format", "json", stdin=b'{"value": "good"}\n' + line + b'\n{"value": "late"}\n', code=2
    )
    assert "line 2" in result.err
    assert result.text.startswith("1 record to ")
    assert cli("consume", topic, "--exit").out == b"good\n"


def test_a_record_that_is_refused_fails_the_command(cli: Cli, topic: str) -> None:
    cli("topic", "alter", topic, "-c", "max.message.bytes=1000")
    result = cli("produce", topic, stdin=b"x" * 5_000 + b"\n", code=2)
    assert "1 of 1 records were not written" in result.err
    assert "max.message.bytes" in result.err


def test_a_pipe_that_trickles_is_sent_as_it_trickles(cli: Cli, topic: str) -> None:
    following = cli.start("consume", topic, "--from-beginning")
    assert following.stdout is not None
    try:
        with cli.start("produce", topic, "-q", stdin=subprocess.PIPE) as sender:
            assert sender.stdin is not None
            for number in range(3):
                sender.stdin.write(b"line %d\n" % number)
                sender.stdin.flush()
                assert following.stdout.readline() == b"line %d\n" % number
            sender.stdin.close()
            assert sender.wait(30) == 0
    finally:
        following.send_signal(signal.SIGINT)
        following.communicate(timeout=30)
    assert following.returncode == 0


# --- consume -----------------------------------------------------------------------------------------------------


def test_where_to_start(cli: Cli, topic: str) -> None:
    cli(
        "produce",
        topic,
        "--format",
        "json",
        stdin=b'{"value":"old","timestamp":1000}\n{"value":"new"}\n{"value":"newest"}\n',
    )
    for arguments, expected in (
        (["--from-beginning"], b"old\nnew\nnewest\n"),
        ([], b"old\nnew\nnewest\n"),
        (["--offset", "1"], b"new\nnewest\n"),
        (["--offset", "-1"], b"newest\n"),
        (["--offset", "-99"], b"old\nnew\nnewest\n"),
        (["--offset", "99"], b""),
        (["--at", "2001-01-01"], b"new\nnewest\n"),
        (["--at", "1000"], b"old\nnew\nnewest\n"),
        (["--at", "-1h"], b"new\nnewest\n"),
    ):
        assert cli("consume", topic, "--exit", *arguments).out == expected, arguments


def test_without_a_start_only_new_records_are_shown(cli: Cli, topic: str) -> None:
    cli("produce", topic, stdin=b"before\n")
    with cli.start("consume", topic, "--max-records", "1", "--timeout", "60") as following:
        assert following.poll() is None
        deadline = time.monotonic() + 30
        while following.poll() is None and time.monotonic() < deadline:
            cli("produce", topic, stdin=b"after\n")
        out, _ = following.communicate(timeout=30)
    assert (following.returncode, out) == (0, b"after\n")


def test_a_timeout_ends_and_says_when_records_are_missing(cli: Cli, topic: str) -> None:
    cli("produce", topic, stdin=b"one\n")
    assert cli("consume", topic, "--from-beginning", "--timeout", 1).out == b"one\n"
    result = cli("consume", topic, "--from-beginning", "-n", 2, "--timeout", 1, code=5)
    assert result.out == b"one\n"
    assert "only 1 of 2 records" in result.err


def test_a_reader_that_goes_away_is_no_error(cli: Cli, topic: str) -> None:
    cli("produce", topic, stdin=b"line\n" * 20_000)
    for arguments in (["--exit"], []):
        with cli.start("consume", topic, "--from-beginning", *arguments) as consuming:
            assert consuming.stdout is not None and consuming.stderr is not None
            assert consuming.stdout.readline() == b"line\n"
            consuming.stdout.close()
            assert consuming.wait(30) == 0
            assert consuming.stderr.read() == b""


def test_an_idle_consumer_notices_that_its_reader_is_gone(cli: Cli, topic: str) -> None:
    with cli.start("consume", topic) as consuming:
        assert consuming.stdout is not None
        consuming.stdout.close()
        assert consuming.wait(30) == 0


def test_a_group_goes_on_where_it_was(cli: Cli, topic: str) -> None:
    cli("produce", topic, stdin=b"".join(b"%d\n" % number for number in range(100)))
    group = ["consume", topic, "--group", f"g-{topic}"]
    first = cli(*group, "--from-beginning", "--max-records", 30, "--timeout", 30).text.split()
    rest = cli(*group, "--exit").text.split()
    assert [int(one) for one in first + rest] == list(range(100))
    assert cli(*group, "--exit").out == b""


def test_other_clients_go_on_where_a_group_was(cli: Cli, topic: str) -> None:
    cli("produce", topic, stdin=b"a\nb\n")
    cli("consume", topic, "--group", f"g-{topic}", "--from-beginning", "-n", 1, "--timeout", 30)
    consumer = Consumer({"bootstrap.servers": cli.bootstrap, "group.id": f"g-{topic}", "auto.offset.reset": "error"})
    try:
        consumer.subscribe([topic])
        message = consumer.poll(30)
        assert message is not None and message.value() == b"b"
    finally:
        consumer.close()


def test_a_table_has_one_line_a_record_whatever_is_in_it(cli: Cli, topic: str) -> None:
    cli("produce", topic, "--format", "json", stdin=b'{"value": "two\\nlines\\u001b[31m", "key": "k"}\n')
    header, line = cli("consume", topic, "--exit", "--format", "table").text.splitlines()
    assert header.split() == ["PARTITION", "OFFSET", "TIMESTAMP", "KEY", "VALUE"]
    assert line.split()[:2] == ["0", "0"]
    assert line.endswith("k  two\\nlines\\x1b[31m")


def test_a_broker_that_dies_is_waited_for(tmp_path: Path) -> None:
    with running(tmp_path / "data") as process:
        cli = Cli(process.bootstrap)
        cli("topic", "create", "survives", "-p", 1)
        with cli.start("consume", "survives", "--from-beginning", "-n", "2", "--timeout", "60") as consuming:
            assert consuming.stdout is not None and consuming.stderr is not None
            cli("produce", "survives", stdin=b"before\n")
            assert consuming.stdout.readline() == b"before\n"
            process.kill_broker()
            process.wait_for_line("ready again")
            cli("produce", "survives", stdin=b"after\n")
            assert consuming.stdout.readline() == b"after\n"
            assert consuming.wait(30) == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"vlaue": "x"}', "did you mean 'value'"),
        (b'{"value": "x", "Headers": {}}', "did you mean 'headers'"),
        (b'{"value": "x", "zzz": 1}', "the fields are"),
        (b'{"headers": [{"key": "h", "vlaue": "x"}]}', "did you mean 'value'"),
    ],
)
def test_an_unknown_field_is_refused_with_its_line_and_the_nearest_name(
    cli: Cli, topic: str, line: bytes, said: str
) -> None:
    refused = cli("produce", topic, "--format", "json", stdin=b'{"value": "fine"}\n' + line + b"\n", code=2)
    assert "line 2: unknown field" in refused.err and said in refused.err
    assert cli("consume", topic, "--exit").out == b"fine\n"


@pytest.mark.parametrize("line", [b'{"partition": 2147483648}', b'{"timestamp": 9223372036854775808}'])
def test_a_number_out_of_range_is_refused_with_its_line(cli: Cli, topic: str, line: bytes) -> None:
    assert "line 1: " in cli("produce", topic, "--format", "json", stdin=line, code=2).err


def test_an_interrupted_producer_prints_its_count(cli: Cli, topic: str) -> None:
    with cli.start("produce", topic, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"one\ntwo\n")
        process.stdin.flush()
        assert cli("consume", topic, "--from-beginning", "-n", 2).out == b"one\ntwo\n"
        process.send_signal(signal.SIGINT)
        printed = process.stdout.read()
    assert (process.returncode, printed) == (130, b"2 records to %s, at [partition] offset: [0] 0-1\n" % topic.encode())


def test_a_producer_from_a_pipe_shows_its_progress_on_the_terminal_alone(cli: Cli, topic: str) -> None:
    shown = b""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "tidelog", "produce", topic, "--bootstrap", cli.bootstrap]
    names = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs, env=names) as process:
        os.close(theirs)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"one\ntwo\n")
        process.stdin.flush()
        while b"producing" not in shown:
            assert select.select([ours], [], [], 60)[0], "no bar in 60 s"
            shown += os.read(ours, 1000)
        process.stdin.close()
        printed = process.stdout.read()
        shown += os.read(ours, 65536)
    os.close(ours)
    assert shown.endswith(ERASE.encode())
    assert printed == b"2 records to %s, at [partition] offset: [0] 0-1\n" % topic.encode()


def test_a_consumer_says_on_a_terminal_that_it_waits(cli: Cli, topic: str) -> None:
    said = b""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "tidelog", "consume", topic, "--bootstrap", cli.bootstrap]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process:
        try:
            while b"\n" not in said:
                assert select.select([ours], [], [], 60)[0], "nothing was said in 60 s"
                said += os.read(ours, 1000)
        finally:
            process.send_signal(signal.SIGINT)
            os.close(theirs)
    os.close(ours)
    assert said == b"waiting for records of %s; Ctrl-C ends\r\n" % topic.encode()
    with cli.start("consume", topic) as quiet:
        assert cli("consume", topic, "--timeout", 1).err == ""
        quiet.send_signal(signal.SIGINT)
