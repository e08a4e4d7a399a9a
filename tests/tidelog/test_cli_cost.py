"""`tidelog cost` against a real broker and bucket: what was asked is counted, shared out, and priced."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.backends import s3_flags
from tests.support.cli import Cli, until
from tests.support.object_jobs import BY_HAND, fill, objects
from tests.support.s3_servers import S3Server
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.cli.client import ClusterConnection, http_json
from tidelog.console.prices import DEFAULT, to_toml

pytestmark = pytest.mark.processes

SMALL_CACHE = ("--set", "cache.log_bytes=4194304")


def counts(process: TidelogProcess) -> None:
    """Uploads and compaction of two topics, seen in the JSON, the table and the metrics."""
    cli = Cli(process.bootstrap)
    cli("topic", "create", "big", "small", "-p", 1)
    produced = len(fill(cli, "big", 3, records=400)) + len(fill(cli, "small", 3, records=20))
    sizes = sum(one["size_bytes"] for one in objects(cli))
    uploaded = len(objects(cli))
    assert cli("object", "compact", "--eager", "--format", "json").json()["tasks"] == 1

    document = cli("cost", "--format", "json").json()
    purposes: dict[str, Any] = {one["purpose"]: one for one in document["purposes"]}
    assert purposes["upload"]["requests"] == {"put": uploaded}
    assert purposes["upload"]["sent_bytes"] == sizes
    assert purposes["compaction"]["requests"]["put"] >= 1
    assert purposes["compaction"]["received_bytes"] >= sizes
    assert document["produced_bytes"] >= produced
    topics: dict[str | None, Any] = {one["topic"]: one for one in document["topics"]}
    assert topics["big"]["cost"] > topics["small"]["cost"] > 0
    assert topics["big"]["sent_bytes"] > topics["small"]["sent_bytes"] > 0
    total = document["total"]
    assert sum(one["cost"] for one in document["topics"]) == pytest.approx(total["cost"])
    assert sum(one["cost"] for one in document["purposes"]) == pytest.approx(total["cost"])
    in_bucket = cli("object", "list", "--format", "json").json()
    assert document["stored"]["bytes"] >= sum(one["size_bytes"] for one in in_bucket if one["state"] == "committed")
    assert total["cost_per_month"] > total["storage_cost_per_month"] > 0
    shown = cli("cost").text
    assert "assumed: " in shown
    for word in ("PURPOSE", "upload", "compaction", "(shared)", "a month", "a GB written", "too short"):
        assert word in shown


def test_what_was_asked_of_the_bucket_is_counted_and_priced(tmp_path: Path) -> None:
    with running(tmp_path / "data", BY_HAND) as process:
        counts(process)


@pytest.mark.long
@pytest.mark.servers("minio")
def test_it_is_counted_on_minio_too(tmp_path: Path, minio_server: S3Server) -> None:
    with running(tmp_path / "data", [*BY_HAND, *s3_flags(minio_server)]) as process:
        counts(process)


@pytest.mark.servers("minio")
def test_a_wal_in_the_bucket_is_paid_for_by_no_topic(tmp_path: Path, minio_server: S3Server) -> None:
    with running(tmp_path / "data", [*BY_HAND, *s3_flags(minio_server), "--wal", "s3"]) as process:
        cli = Cli(process.bootstrap)
        cli("topic", "create", "t", "-p", 1)
        cli("produce", "t", stdin=b"one\n")
        document = cli("cost", "--format", "json").json()
        [wal] = [one for one in document["purposes"] if one["purpose"] == "wal"]
        assert wal["requests"]["put"] >= 2
        [shared] = [one for one in document["topics"] if one["topic"] is None]
        assert shared["requests"]["put"] >= wal["requests"]["put"]
        assert document["stored"]["wal_bytes"] > 0


@pytest.mark.long
def test_reads_of_history_are_the_topic_s_that_is_read_and_a_deleted_topic_s_series_go(tmp_path: Path) -> None:
    port = None
    with running(tmp_path / "data", BY_HAND) as process:
        port = process.port
        cli = Cli(process.bootstrap)
        cli("topic", "create", "read", "unread", "-p", 1)
        lines = fill(cli, "read", 2)
        fill(cli, "unread", 2)
        assert process.stop() == 0
    with running(tmp_path / "data", BY_HAND, port) as process:  # its log cache is empty: it reads the bucket
        cli = Cli(process.bootstrap)
        assert cli("consume", "read", "--exit").out == lines
        usage = http_json(ClusterConnection(process.bootstrap).admin_url, "/bucket/usage")

        def reads(topic: str) -> float:
            mine = usage["topics"].get(topic, {"purposes": {}})["purposes"]
            return float(sum(mine.get(kind, {"received_bytes": 0})["received_bytes"] for kind in ("cold", "tail")))

        assert reads("read") >= len(lines)
        fill(cli, "read", 1)
        cli("topic", "delete", "read", "--yes")
        until(
            lambda: "read" not in http_json(ClusterConnection(process.bootstrap).admin_url, "/bucket/usage")["topics"]
        )
        left = {one["topic"]: one for one in cli("cost", "--format", "json").json()["topics"]}
        assert left["__other__"]["received_bytes"] >= len(lines)


# --- prices ------------------------------------------------------------------------------------------------------


def test_prices_of_one_s_own_are_used_and_bad_ones_are_named(tmp_path: Path) -> None:
    with running(tmp_path / "data", BY_HAND) as process:
        cli = Cli(process.bootstrap)
        cli("topic", "create", "t", "-p", 1)
        fill(cli, "t", 1)
        table = tmp_path / "prices.toml"
        text = to_toml(DEFAULT).replace('"USD"', '"EUR"').replace("put = 0.005", "put = 1000.0")
        table.write_text(text, encoding="utf-8")
        document = cli("cost", "--prices", table, "--format", "json").json()
        assert document["currency"] == "EUR"
        assert document["total"]["cost"] >= document["total"]["requests"]["put"]
        assert "EUR" in cli("cost", "--prices", table).text
        table.write_text(text.replace("1000.0", '"dear"'), encoding="utf-8")
        refused = cli("cost", "--prices", table, code=2)
        assert "requests_per_1000.put" in refused.err
        assert "--print-prices" in refused.err
        window = cli("cost", "--window", "1s", "--format", "json").json()
        assert window["nodes"][0]["seconds"] < 30
        assert window["total"]["requests"].get("put", 0) < document["total"]["requests"]["put"]


def test_the_default_table_is_printed_without_a_cluster_and_a_missing_one_is_not_found(tmp_path: Path) -> None:
    cli = Cli()
    assert cli("cost", "--print-prices").text == to_toml(DEFAULT) + "\n"
    assert "no price table" in cli("cost", "--prices", tmp_path / "none.toml", code=3).err
    assert cli("cost", code=5).err.startswith("error: ")


def test_it_can_be_watched(tmp_path: Path) -> None:
    with running(tmp_path / "data", BY_HAND) as process:
        watching = Cli(process.bootstrap).start("cost", "--format", "json", "--watch", "0.1")
        try:
            assert watching.stdout is not None
            seconds = [json.loads(watching.stdout.readline())["nodes"][0]["seconds"] for _ in range(3)]
            assert seconds == sorted(seconds)
        finally:
            watching.send_signal(signal.SIGINT)
            watching.communicate(timeout=30)
        assert watching.returncode == 0
