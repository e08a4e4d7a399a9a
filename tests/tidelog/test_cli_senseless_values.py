"""Options with an empty value, as of a shell variable that is not set, impossible paths, and numbers that are none are
refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tidelog.cli.main import cli
from tidelog.runtime.errors import ConfigError


@pytest.mark.parametrize(
    "args",
    [
        ("up", "--bucket", ""),
        ("up", "--s3-endpoint="),
        ("up", "--data-dir", ""),
        ("serve", "--config", ""),
        ("cluster", "backup", "--to", ""),
        ("cluster", "rebuild", "--cluster-id", ""),
        ("snapshot", "create", "before", "--topics", ""),
        ("consume", "orders", "--group", ""),
        ("produce", ""),
        ("check", ""),
    ],
)
def test_what_is_empty_is_refused(args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDELOG_BOOTSTRAP", "127.0.0.1:1")
    done = CliRunner().invoke(cli, args)
    assert (done.exit_code, "it is empty" in done.stderr) == (2, True), done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "args",
    [
        ("wal", "inspect", "--data-dir", "x" * 256),
        ("wal", "verify", "--data-dir", "x/" * 2_500),
        ("cluster", "backup", "--to", "/tmp/b", "--data-dir", "x" * 256),
        ("cluster", "rebuild", "--data-dir", "x" * 256),
    ],
)
def test_a_path_that_no_file_system_takes_is_refused(args: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, args)
    assert (done.exit_code, "bytes is too long" in done.stderr) == (2, True), done.output


def test_nor_is_it_a_warehouse() -> None:
    done = CliRunner().invoke(cli, ["spark", "table-compact", "lake.t", "--warehouse", "x" * 256])
    assert isinstance(done.exception, ConfigError) and "is too long" in str(done.exception)


@pytest.mark.parametrize("args", [("--delimiter", ""), ("--key-separator", "")])
def test_what_is_put_between_records_may_be_empty(args: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, ["consume", "orders", *args, "--bootstrap", "127.0.0.1:1"])
    assert "no broker can be reached" in str(done.exception)


@pytest.mark.parametrize(
    "args",
    [
        ("produce", "orders", "--timeout", "inf"),
        ("produce", "orders", "--timeout", "1e300"),
        ("wal", "drain", "--timeout", "nan"),
        ("wal", "drain", "--timeout", "inf"),
        ("status", "--watch", "nan"),
    ],
)
def test_what_is_no_number_of_seconds_is_refused(args: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, [*args, "--bootstrap", "127.0.0.1:1"])
    assert (done.exit_code, "Invalid value for" in done.stderr) == (2, True), done.output
