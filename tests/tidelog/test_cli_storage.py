"""`tidelog object`, `wal` and `status` against a real `tidelog up` and its files: sound, damaged, and while it runs."""

from __future__ import annotations

import json
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import Cli, until
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.cli.client import ClusterConnection

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TidelogProcess]:
    with running(tmp_path_factory.mktemp("cli") / "data") as started:
        cli = Cli(started.bootstrap)
        cli("topic", "create", "stored", "-p", 2)
        for first in (0, 500):  # the second group of records proves the first one durable
            cli("produce", "stored", stdin=b"".join(b"record %d\n" % (first + n) for n in range(500)))
        yield started


@pytest.fixture(scope="module")
def cli(process: TidelogProcess) -> Cli:
    return Cli(process.bootstrap)


def upload(bootstrap: str) -> None:
    """Everything into the bucket, now."""
    request = urllib.request.Request(ClusterConnection(bootstrap).admin_url + "/upload", method="POST")
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["status"] == "uploaded"


# --- objects -----------------------------------------------------------------------------------------------------


def test_objects_are_listed_inspected_and_verified(cli: Cli) -> None:
    upload(cli.bootstrap)
    objects = cli("object", "list", "--format", "json").json()
    assert objects and all(one["state"] == "committed" for one in objects)
    assert [one["id"] for one in objects] == sorted(one["id"] for one in objects)
    assert [row[0] for row in cli("object", "list").rows()] == [str(one["id"]) for one in objects]
    assert cli("object", "list", "--limit", 1, "--format", "json").json() == objects[:1]
    assert cli("object", "list", "--after", objects[-1]["id"], "--format", "json").json() == []

    owners = set()
    for one in objects:
        document = cli("object", "inspect", one["id"], "--format", "json").json()
        owners |= {(block["topic"], block["partition"], block["part"]) for block in document["blocks"]}
    assert ("stored", 0, "data") in owners or ("stored", 1, "data") in owners
    shown = cli("object", "inspect", objects[0]["id"]).text
    assert objects[0]["key"] in shown
    assert "CRC32C" in shown

    size = sum(one["size_bytes"] for one in objects)
    document = cli("object", "verify", "--format", "json").json()
    assert document == {"objects": len(objects), "bytes": size, "findings": []}
    assert cli("object", "verify", objects[0]["id"]).text.startswith("sound: 1 objects")


def test_an_object_that_does_not_exist_is_not_found(cli: Cli) -> None:
    for action in ("inspect", "verify"):
        assert "`tidelog object list`" in cli("object", action, 999_999, code=3).err


def test_a_flipped_byte_in_the_bucket_is_found(cli: Cli, process: TidelogProcess) -> None:
    upload(cli.bootstrap)
    one = cli("object", "list", "--format", "json").json()[0]
    file = process.data_dir / "bucket" / one["key"]
    sound = file.read_bytes()
    file.write_bytes(sound[:50] + bytes([sound[50] ^ 1]) + sound[51:])
    try:
        result = cli("object", "verify", code=7)
        assert "DAMAGED" in result.text
        assert one["key"] in result.text
        assert "hint: " in result.err
        document = cli("object", "verify", one["id"], "--format", "json", code=7).json()
        assert [finding["object"] for finding in document["findings"]] == [one["id"]]
        file.unlink()
        assert "is not in the bucket" in cli("object", "verify", code=7).text
    finally:
        file.write_bytes(sound)
    assert cli("object", "verify").text.startswith("sound: ")


# --- the write-ahead log -----------------------------------------------------------------------------------------


def test_the_log_is_read_while_its_broker_runs(cli: Cli, process: TidelogProcess) -> None:
    assert "SIZE" in cli("wal", "inspect", "--data-dir", process.data_dir).text
    document = cli("wal", "inspect", "--data-dir", process.data_dir, "--format", "json").json()
    assert document["epoch_file"] == "ok"
    assert document["end_offset"] > document["start_offset"]
    assert cli("wal", "verify", "--data-dir", process.data_dir).text.startswith("sound: ")


def test_records_are_shown_one_a_line(cli: Cli, process: TidelogProcess) -> None:
    lines = cli("wal", "inspect", "--data-dir", process.data_dir, "--records", "--format", "json").out.splitlines()
    records = [json.loads(line) for line in lines]
    assert records[0]["type"] == "epoch_start"
    offsets = [one["offset"] for one in records]
    assert offsets == sorted(set(offsets))
    assert any(one["type"] == "data" and one["bytes"] > 0 for one in records)
    assert len(cli("wal", "inspect", "--data-dir", process.data_dir, "--records").rows()) >= len(records)


def test_damage_of_durable_bytes_is_found_and_nothing_is_changed(
    cli: Cli, process: TidelogProcess, tmp_path: Path
) -> None:
    data_dir = tmp_path / "copy"
    shutil.copytree(process.data_dir / "wal", data_dir / "wal", ignore=shutil.ignore_patterns("*.tmp"))
    [segment] = (data_dir / "wal").glob("*.wal")
    with segment.open("r+b") as file:
        file.seek(200)  # in the first records: later ones say that this was durable
        byte = file.read(1)[0]
        file.seek(200)
        file.write(bytes([byte ^ 0xFF]))
    damaged = segment.read_bytes()
    result = cli("wal", "verify", "--data-dir", data_dir, code=7)
    assert result.text.startswith("DAMAGED")
    assert segment.name in result.text
    assert "hint: " in result.err
    document = cli("wal", "verify", "--data-dir", data_dir, "--format", "json", code=7).json()
    assert document["sound"] is False
    assert [one["kind"] for one in document["findings"] if one["error"]] == ["corrupt"]
    assert segment.read_bytes() == damaged


def test_a_directory_without_a_log_is_not_found(tmp_path: Path) -> None:
    for action in ("inspect", "verify"):
        assert "--data-dir" in Cli()("wal", action, "--data-dir", tmp_path, code=3).err
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_epoch_file_is_damage(process: TidelogProcess, tmp_path: Path) -> None:
    data_dir = tmp_path / "copy"
    shutil.copytree(process.data_dir / "wal", data_dir / "wal", ignore=shutil.ignore_patterns("*.tmp"))
    (data_dir / "wal" / "epochs").write_bytes(b"nonsense")
    result = Cli()("wal", "verify", "--data-dir", data_dir, code=7)
    assert "epochs" in result.text


# --- status ------------------------------------------------------------------------------------------------------


def test_status_shows_the_nodes(cli: Cli, process: TidelogProcess) -> None:
    document = cli("status", "--format", "json").json()
    [node] = document["nodes"]
    assert (node["id"], node["address"], node["state"]) == (1, process.bootstrap, "ready")
    assert node["roles"] == ["controller", "broker"]
    assert node["pid"] == process.broker_pid()
    assert node["bucket"]["healthy"] is True
    assert document["problems"] == []
    shown = cli("status").text
    assert process.bootstrap in shown
    assert shown.endswith("no problems\n")


def test_something_wrong_is_an_exit_code_and_a_sentence(tmp_path: Path) -> None:
    with running(tmp_path / "data") as process:
        cli = Cli(process.bootstrap)
        cli("topic", "create", "stuck", "-p", 1)
        bucket = tmp_path / "data" / "bucket"
        bucket.rename(tmp_path / "away")
        bucket.touch()  # a file where the bucket's directory was
        cli("produce", "stuck", stdin=b"acknowledged all the same\n")
        upload_url = ClusterConnection(process.bootstrap).admin_url + "/upload?timeout_ms=500"
        with pytest.raises(urllib.error.HTTPError) as failure:
            urllib.request.urlopen(urllib.request.Request(upload_url, method="POST"), timeout=30)
        failure.value.close()
        until(lambda: cli("status", code=None).code == 10)
        document = cli("status", "--format", "json", code=10).json()
        assert any("bucket" in problem for problem in document["problems"])
        assert "problems:" in cli("status", code=10).text
        bucket.unlink()
        (tmp_path / "away").rename(bucket)
        until(lambda: cli("status", code=None).code == 0)
        assert cli("consume", "stuck", "--exit").out == b"acknowledged all the same\n"


def test_watching_goes_on_over_a_restart(tmp_path: Path) -> None:
    with running(tmp_path / "data") as process:
        watching = Cli(process.bootstrap).start("status", "--format", "json", "--watch", "0.1")
        try:
            assert watching.stdout is not None
            out = watching.stdout
            before = json.loads(out.readline())["nodes"][0]["pid"]
            process.kill_broker()
            until(lambda: json.loads(out.readline())["nodes"][0]["pid"] != before)
        finally:
            watching.send_signal(signal.SIGINT)
            watching.communicate(timeout=30)
        assert watching.returncode in (0, 10)
