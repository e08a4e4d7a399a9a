"""`tidelog doctor` where nothing runs: real directories, files, ports and buckets, and what is wrong with each."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.certificates import Authority
from tests.support.missing import lacking
from tests.support.s3_servers import S3Server, new_bucket
from tidelog.cli.main import cli
from tidelog.doctor.here import directory_facts, locked_inodes
from tidelog.process.data_dir import DataDirectory

PROBLEM = 10


def doctor(*arguments: object, code: int | None = None) -> list[dict[str, Any]]:
    """Run the command in this process; return the findings that are not ok."""
    result = run("doctor", "--offline", "--format", "json", *arguments, code=code)
    document = json.loads(result.output)
    found = [each for each in document["findings"] if each["level"] != "ok"]
    assert all(each["why"] and each["cure"] for each in found)
    assert result.exit_code == (PROBLEM if document["counts"]["problem"] else 0)
    return found


def run(*arguments: object, code: int | None = None) -> Result:
    result = CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)
    assert code is None or result.exit_code == code, result.output
    return result


def names(found: list[dict[str, Any]]) -> set[str]:
    return {each["check"] for each in found}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private data directory on a disk that syncs in two milliseconds, and nothing else set."""
    for name in os.environ:
        if name.startswith("TIDELOG_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data"
    path.mkdir(mode=0o700)
    sync(monkeypatch, 0.002)
    return path


def sync(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every fdatasync takes at least this long."""
    monkeypatch.setattr(os, "fdatasync", lambda _fd: time.sleep(seconds))


def quiet(data: Path) -> list[object]:
    """Options for a node over `data` that finds nothing wrong, wherever tests keep their files."""
    return ["--data-dir", data, "--set", "kafka.port=0"]


USUAL = {"config.temporary-directory", "disk.container-layer", "disk.in-memory", "disk.network", "disk.nearly-full"}
"""What depends on the machine that runs the tests."""


def test_a_new_directory_and_the_defaults_are_well_and_nothing_is_changed(data: Path) -> None:
    assert names(doctor(*quiet(data))) <= USUAL
    assert list(data.iterdir()) == []


# --- configuration ---------------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_in_a_configuration_is_told_at_once_with_where_it_came_from(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.toml"
    file.write_text("[wal]\nflsh = 'sync'\nflush_interval_ms = 0\nkind = 'memory'\n[kafka]\nport = 0\n")
    monkeypatch.setenv("TIDELOG_KAFKA__MAX_CONECTIONS", "3")
    found = doctor("--config", file, "--data-dir", data, code=PROBLEM)
    assert {"config.unknown-key", "config.invalid-value", "config.memory-wal"} <= names(found)
    told = "\n".join(each["seen"] for each in found)
    assert "wal.flsh" in told and "TIDELOG_KAFKA__MAX_CONECTIONS" in told and f"file {file}" in told
    assert "did you mean 'wal.flush'?" in [each["cure"] for each in found]


@pytest.mark.parametrize("text", ["[wal\n", "data_dir = 'x'\n"])
def test_a_file_that_is_no_configuration_is_told_and_the_rest_is_looked_at(data: Path, text: str) -> None:
    file = data.parent / "t.toml"
    file.write_text(text)
    found = doctor("--config", file, *quiet(data), code=PROBLEM)
    assert "config.unreadable" in names(found)
    assert names(found) <= USUAL | {"config.unreadable"}


def test_caches_larger_than_the_machine_are_found(data: Path) -> None:
    found = doctor(*quiet(data), "--set", f"cache.log_bytes={1 << 50}")
    assert "config.memory-exceeded" in names(found)


def test_a_key_in_the_configuration_is_told_and_not_shown(data: Path) -> None:
    options = [*quiet(data), "--set", "s3.secret_access_key=do-not-show-me", "--set", "s3.access_key_id=id"]
    found = doctor(*options)
    assert "config.exposed-secret" in names(found)
    assert "do-not-show-me" not in str(found)


# --- directories and disks -------------------------------------------------------------------------------------------


def test_slow_very_slow_and_failing_syncs_are_told_apart(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync(monkeypatch, 0.06)
    assert "disk.sync-slow" in names(doctor(*quiet(data)))
    sync(monkeypatch, 0.51)
    assert "disk.sync-very-slow" in names(doctor(*quiet(data), code=PROBLEM))

    def broken(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    (unusable,) = [each for each in doctor(*quiet(data), code=PROBLEM) if each["check"] == "disk.unusable"]
    assert "Input/output error" in unusable["seen"]


def test_syncs_that_no_disk_can_make_are_suspected(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fdatasync", lambda _fd: None)
    monkeypatch.setattr(os, "pwrite", lambda _fd, body, _at: len(body))
    assert names(doctor(*quiet(data))) & {"disk.sync-implausible", "disk.in-memory"}


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"f_bavail": 1}, "disk.full"),
        ({"f_bavail": (1 << 30) // 4096}, "disk.nearly-full"),
        ({"f_favail": 10, "f_files": 1000}, "disk.few-files"),
    ],
)
def test_a_disk_with_no_room_is_found(
    data: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, int], check: str
) -> None:
    class Space:
        f_bavail, f_blocks, f_frsize, f_favail, f_files = 1 << 30, 1 << 31, 4096, 1 << 20, 1 << 21

    space = Space()
    for name, value in change.items():
        setattr(space, name, value)
    monkeypatch.setattr(os, "statvfs", lambda _path: space)
    assert check in names(doctor(*quiet(data)))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_takes_no_byte_more_is_full_and_not_out_of_order(
    data: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", refuse)
    found = doctor(*quiet(data), code=PROBLEM)
    assert "disk.full" in names(found) and "disk.unusable" not in names(found)
    (told,) = [each for each in found if each["check"] == "disk.full"]
    assert os.strerror(code) in told["seen"] and told["cure"].startswith("make room")


def test_a_directory_in_memory_is_a_problem(data: Path) -> None:
    if not Path("/dev/shm").is_dir():
        lacking("/dev/shm")
    path = Path("/dev/shm") / f"doctor-{os.getpid()}"
    found = doctor("--data-dir", path, "--set", "kafka.port=0", code=PROBLEM)
    assert {"disk.in-memory", "config.temporary-directory"} <= names(found)
    assert not path.exists()


def test_a_directory_that_others_can_read_is_found(data: Path) -> None:
    data.chmod(0o755)
    assert "disk.open-to-others" in names(doctor(*quiet(data)))


def test_whose_a_directory_is_and_who_has_it_is_read_from_its_files(data: Path) -> None:
    directory = DataDirectory.open(data, 3, "code")
    try:
        facts = directory_facts(data)
        assert (facts.node, facts.holder, facts.damage) == (3, os.getpid(), "")
        found = doctor(*quiet(data), "--set", "node.id=4", code=PROBLEM)
        assert "data.other-node" in names(found)
    finally:
        directory.close()
    assert directory_facts(data).holder == 0
    (data / "identity.json").write_text('{"format": 1, "crc32c": 5}')
    assert "data.damaged" in names(doctor(*quiet(data), code=PROBLEM))


def test_the_locks_of_the_kernel_are_understood() -> None:
    text = (
        "1: FLOCK  ADVISORY  WRITE 4711 08:01:131 0 EOF\n"
        "2: POSIX  ADVISORY  READ 12 08:01:77 128 128\n"
        "3: -> FLOCK  ADVISORY  WRITE 4712 08:01:99 0 EOF\nx\n"
    )
    assert locked_inodes(text) == {131}


def test_a_damaged_layout_of_a_cluster_is_found(data: Path) -> None:
    (data / "cluster.json").write_text("{}")
    found = doctor(*quiet(data), code=PROBLEM)
    assert "data.damaged" in names(found)


def test_a_directory_that_may_not_be_looked_into_is_told_and_the_rest_is_judged(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As to a user who is not the one of the service, whose directory above has mode 700."""

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def refused(path: Any, *more: Any, **named: Any) -> Any:
            if not isinstance(path, int) and Path(os.fspath(path)).is_relative_to(data):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *more, **named)

        return refused

    for module, name in ((os, "stat"), (os, "open"), (os, "scandir"), (io, "open")):
        monkeypatch.setattr(module, name, refusing(getattr(module, name)))
    (tmp_path / "t.toml").write_text(f"[node]\ndata_dir = '{data}'\n[kafka]\nport = 0\n")
    found = doctor("--config", tmp_path / "t.toml", "--set", "wal.kind=memory")
    assert {"data.damaged", "config.memory-wal"} <= names(found)
    (told,) = [each for each in found if each["check"] == "data.damaged"]
    assert told["seen"].endswith("Permission denied") and "as the user of the node" in told["cure"]
    file = tmp_path / "b.tar.gz"
    run("debug", "bundle", "--offline", "-o", file, "--config", tmp_path / "t.toml", code=0)
    assert file.exists()


def test_ports_that_are_taken_or_of_another_machine_are_found(data: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = doctor("--data-dir", data, "--set", f"kafka.port={port}", code=PROBLEM)
        assert "port.in-use" in names(found)
    found = doctor("--data-dir", data, "--set", "kafka.host=192.0.2.7", code=PROBLEM)
    assert "port.host" in names(found)


# --- secrets, certificates, limits -----------------------------------------------------------------------------------


def test_files_with_secrets_that_are_open_short_or_missing_are_found(data: Path, tmp_path: Path) -> None:
    secret, key = tmp_path / "secret", tmp_path / "key"
    secret.write_text("x" * 32)
    key.write_text("y" * 32)
    secret.chmod(0o644)
    key.chmod(0o640)
    options = [*quiet(data), "--set", f"controller.secret_file={secret}"]
    bucket = ["--set", "s3.access_key_id=x", "--set", f"s3.secret_access_key_file={key}"]
    found = names(doctor(*options, *bucket, code=PROBLEM))
    assert {"secret.open", "secret.key-open"} <= found
    secret.chmod(0o600)
    key.chmod(0o600)
    assert names(doctor(*options, *bucket)) <= USUAL | {"config.exposed-secret"}
    secret.write_text("short")
    assert "secret.short" in names(doctor(*options, code=PROBLEM))
    secret.unlink()
    assert "secret.unreadable" in names(doctor(*options, code=PROBLEM))


def test_certificates_that_expire_have_expired_or_do_not_fit_are_found(data: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")

    def found(files: Any) -> set[str]:
        named = {"cert": files.cert_file, "key": files.key_file, "ca": files.ca_file}
        sets = [part for name, file in named.items() for part in ("--set", f"replication.tls_{name}_file={file}")]
        return names(doctor(*quiet(data), *sets)) - USUAL

    assert found(authority.issue("good", days=29)) == set()
    assert found(authority.issue("soon", days=3)) == {"tls.expires-soon"}
    assert found(authority.issue("old", begins_days=-3, days=-1)) == {"tls.expired"}
    assert found(authority.issue("one")._replace(key_file=authority.issue("two").key_file)) == {"tls.unusable"}


@pytest.mark.parametrize(("limit", "check"), [(2_000, "limits.open-files"), (256, "limits.open-files-low")])
def test_limits_of_open_files_are_compared_with_the_connections(
    data: Path, monkeypatch: pytest.MonkeyPatch, limit: int, check: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (limit, limit))
    assert check in names(doctor(*quiet(data)))


# --- traces ----------------------------------------------------------------------------------------------------------


def test_a_collector_is_tried_before_the_first_start_and_a_missing_library_is_a_problem(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as collector:
        options = [*quiet(data), "--set", f"tracing.endpoint=http://127.0.0.1:{collector.getsockname()[1]}"]
        assert names(doctor(*options, code=0)) <= USUAL
    assert names(doctor(*options, code=0)) - USUAL == {"tracing.unreachable"}
    assert names(doctor(*quiet(data), "--set", "tracing.endpoint=https://no-such-host.invalid")) - USUAL == {
        "tracing.unreachable"
    }
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    (found,) = (each for each in doctor(*options, code=PROBLEM) if each["check"] == "config.tracing-library")
    assert "opentelemetry.sdk is not installed" in found["seen"] and "tidelog[tracing]" in found["cure"]


# --- the bucket ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "check"),
    [
        ("tracing.endpoint=http://collector:99999", "config.invalid-value"),
        ("tracing.endpoint=http://[::1", "config.invalid-value"),
        ("admin.schema_registry=http://registry:8o81", "config.invalid-value"),
        ("s3.endpoint=http://[::1", "config.invalid-value"),
        ("s3.endpoint=http://minio:99999", "config.invalid-value"),
        ("kafka.host=broker..example", "port.host"),
        ("kafka.host=" + "a" * 300, "port.host"),
        ("s3.secret_access_key_file=a\0b", "config.invalid-value"),
    ],
)
def test_an_address_or_path_that_cannot_be_one_is_told_and_the_rest_is_judged(
    data: Path, setting: str, check: str
) -> None:
    found = doctor("--data-dir", data, "--set", setting, "--set", "wal.kind=memory", code=PROBLEM)
    assert {check, "config.memory-wal"} <= names(found)


def test_settings_that_no_bucket_can_be_opened_with_are_found(data: Path) -> None:
    found = doctor(*quiet(data), "--set", "s3.endpoint=ftp://x", "--set", "s3.bucket=b", code=PROBLEM)
    assert "bucket.settings" in names(found)


def test_an_embedded_bucket_is_tried_where_there_is_one(data: Path) -> None:
    (data / "bucket").mkdir()
    result = run("doctor", "--offline", *quiet(data))
    assert "ok       bucket.rights" in result.output
    left = [each for each in (data / "bucket").rglob("*") if each.is_file()]
    assert left == []


@pytest.mark.servers("moto")
def test_a_bucket_is_tried_with_the_keys_of_the_configuration(data: Path, moto_server: S3Server) -> None:
    options = [*quiet(data), "--set", f"s3.endpoint={moto_server.endpoint}", "--set", f"s3.bucket={new_bucket()}"]
    options += ["--set", f"s3.access_key_id={moto_server.access_key_id}"]
    options += ["--set", f"s3.secret_access_key={moto_server.secret_access_key}"]
    found = doctor(*options, code=0)
    assert "bucket.to-be-created" in names(found)
    found = doctor(*options, "--set", "s3.create_bucket=false", code=PROBLEM)
    assert "bucket.missing" in names(found)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_table_has_the_gravest_first_and_ends_with_the_counts(data: Path) -> None:
    result = run("doctor", "--offline", *quiet(data), "--set", "wal.kind=memory", "--set", "kafka.host=0.0.0.0")
    lines = result.output.splitlines()
    assert lines[0].startswith("problem  config.any-address, this configuration: ")
    assert any(line.startswith("         cure: ") for line in lines)
    assert lines[-1].startswith("1 problems, ")
    assert max(map(len, lines)) <= 110


def test_all_findings_can_be_listed() -> None:
    listed = json.loads(run("doctor", "--list", "--format", "json", code=0).output)
    assert len(listed) > 80 and all(each["why"] and each["cure"] for each in listed)
    assert "disk.in-memory (problem)" in run("doctor", "--list", code=0).output


def test_where_no_cluster_answers_that_is_told_and_is_a_problem_only_if_it_was_named(data: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refuses connections
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run("doctor", "--format", "json", *quiet(data), "--bootstrap", address, code=PROBLEM)
        assert "cluster.unreachable" in {each["check"] for each in json.loads(result.output)["findings"]}
        port = ["--set", f"kafka.port={address.rpartition(':')[2]}"]
        result = run("doctor", "--format", "json", "--data-dir", data, *port)
        assert "cluster.not-asked" in {each["check"] for each in json.loads(result.output)["findings"]}
        directory = DataDirectory.open(data, 1, "code")  # as a process that hangs, and answers nobody
        try:
            result = run("doctor", "--format", "json", "--data-dir", data, *port, code=PROBLEM)
            assert "cluster.unreachable" in {each["check"] for each in json.loads(result.output)["findings"]}
        finally:
            directory.close()
