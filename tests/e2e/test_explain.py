"""`tidelog explain` of real records through their life, and of requests that a real stall made slow."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.e2e.backends import QUIET
from tests.support.clients import wait_until
from tests.support.hung_disk import hung_syncs
from tidelog.cli.client import ClusterConnection, http_json
from tidelog.cli.main import cli
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import TidelogError
from tidelog.testing import LocalBroker, LocalCluster

Document = dict[str, Any]
UPLOADS_LATER = {"upload.age_ms": 3_600_000}
CLEANS_SOON = {
    "log.cleaner_interval_ms": 200,
    "compaction.interval_ms": 200,
    "compaction.min_objects": 2,
    "upload.age_ms": 200,
    "upload.delete_delay_ms": 100,
    "log.retention_check_interval_ms": 300,
}


def explain(bootstrap: str, *arguments: str) -> Document:
    found = CliRunner().invoke(cli, ["explain", *arguments, "--format", "json", "--bootstrap", bootstrap])
    if found.exception is not None:
        raise found.exception
    document: Document = json.loads(found.stdout)
    return document


def stages(document: Document) -> dict[str, Document]:
    return {one["stage"]: one for one in document["stages"]}


def produce(bootstrap: str, topic: str, values: Sequence[bytes], key: bytes | None = None) -> None:
    """Each record in a batch of its own."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, **QUIET})
    for value in values:
        producer.produce(topic, value, key, partition=0)
        assert producer.flush(60) == 0


def commit(bootstrap: str, group: str, topic: str, offset: int) -> None:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, **QUIET})
    try:
        consumer.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
    finally:
        consumer.close()


def transact(bootstrap: str, topic: str, value: bytes, *, commit: bool) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"txn-{commit}", **QUIET})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(topic, value, partition=0)
    assert producer.flush(60) == 0
    if commit:
        producer.commit_transaction(60)
    else:
        producer.abort_transaction(60)


def until_stage(bootstrap: str, record: str, holds: Callable[[dict[str, Document]], bool], what: str) -> Document:
    """Wait until the stages of a record are so, and return what is told of it."""
    found: list[Document] = []

    def is_so() -> bool:
        found[:] = [explain(bootstrap, record)]
        return holds(stages(found[0]))

    wait_until(is_so, what, 60)
    return found[0]


def test_a_fresh_record_has_its_times_and_an_uploaded_one_its_object() -> None:
    before_ms = SystemClock().time_ms()
    with LocalBroker(settings=UPLOADS_LATER) as broker:
        address = broker.bootstrap
        broker.create_topic("orders")
        produce(address, "orders", [b"a", b"bcd", b"e"], b"key")
        commit(address, "readers", "orders", 2)
        fresh = explain(address, "orders:0@1")
        assert fresh["summary"] == "visible" and fresh["log"]["high_watermark"] == 3
        assert (fresh["batch"]["base_offset"], fresh["batch"]["sequence"]) == (1, 1)
        assert (fresh["record"]["key_bytes"], fresh["record"]["value_bytes"]) == (3, 3)
        told, now_ms = stages(fresh), SystemClock().time_ms()
        for name in ("received", "WAL written", "synced", "confirmed", "visible"):
            assert told[name]["state"] == "done"
            assert before_ms <= told[name]["after_ms"] <= told[name]["by_ms"] <= now_ms, told[name]
        assert [told[name]["state"] for name in ("cached", "uploaded")] == ["done", "pending"]
        assert [(one["group"], one["has_read"]) for one in fresh["groups"]] == [("readers", True)]
        assert not explain(address, "orders:0@2")["groups"][0]["has_read"]
        assert explain(address, "orders:0@3")["summary"] == "not written yet: the log ends at 3"

        ClusterConnection(address).post("/upload")
        uploaded = stages(explain(address, "orders:0@1"))
        assert told["received"]["after_ms"] <= uploaded["uploaded"]["by_ms"]
        detail = uploaded["object"]["detail"]
        assert "object " in detail and ", block at byte " in detail
        assert uploaded["compacted"]["detail"] == "still in the object that it was uploaded in"

        slow = explain(address, "--slow", "--api", "produce", "--limit", "2")
        assert [one["api"] for one in slow["requests"]] == ["Produce"] * 2
        assert slow["requests"][0]["topic"] == "orders" and slow["problems"] == []
        assert {one["topic"] for one in explain(address, "--slow", "--topic", "orders")["requests"]} == {"orders"}
        assert explain(address, "--slow", "--topic", "order")["requests"] == []
        for arguments, code, text in (
            (["orders:0@1"], 0, "orders:0@1"),
            (["--slow"], 0, "Produce"),
            ([], 2, "name either a record or --slow"),
            (["orders:0"], 2, "is not a record"),
            (["nothing:0@1"], 3, "does not exist"),
            (["orders:9@1"], 3, "no partition 9"),
            (["--slow", "--api", "Nonsense"], 2, "no API has that name"),
        ):
            found = CliRunner().invoke(cli, ["explain", *arguments, "--bootstrap", address])
            error = found.exception
            assert (error.exit_code if isinstance(error, TidelogError) else found.exit_code) == code, arguments
            assert text in (str(error) if isinstance(error, TidelogError) else found.stdout), arguments


@pytest.mark.long
def test_a_record_is_followed_through_compaction_transactions_and_its_deletion() -> None:
    with LocalBroker(settings=CLEANS_SOON) as broker:
        address = broker.bootstrap
        broker.create_topic("orders")
        produce(address, "orders", [b"first"])
        first = until_stage(address, "orders:0@0", lambda told: "object" in told, "the first record is uploaded")
        transact(address, "orders", b"kept", commit=True)
        transact(address, "orders", b"dropped", commit=False)
        kept = explain(address, "orders:0@1")
        assert (kept["summary"], kept["batch"]["transaction"]) == ("visible", "committed")
        assert explain(address, "orders:0@2")["record"]["marker"] == "commit"
        dropped = explain(address, "orders:0@3")
        assert "aborted transaction" in dropped["summary"] and stages(dropped)["stable"]["state"] == "gone"

        for number in range(3):
            produce(address, "orders", [b"%d" % number])
            ClusterConnection(address).post("/upload")
        compacted = stages(
            until_stage(address, "orders:0@0", lambda told: told["compacted"]["state"] == "done", "it is compacted")
        )
        assert compacted["object"]["detail"] != stages(first)["object"]["detail"]
        assert compacted["compacted"]["state"] == "done"
        assert stages(first)["object"]["detail"].split(",")[0] in compacted["compacted"]["detail"]
        assert compacted["uploaded"]["by_ms"] <= compacted["compacted"]["at_ms"]

        admin, place = AdminClient({"bootstrap.servers": address, **QUIET}), TopicPartition("orders", 0, 1)
        admin.delete_records([place])[place].result(60)
        deleted = explain(address, "orders:0@0")
        assert deleted["summary"] == "deleted: the log starts at 1"
        assert stages(deleted)["deleted"]["at_ms"] >= stages(first)["received"]["after_ms"]


@pytest.mark.long
def test_records_that_log_compaction_or_retention_took_away() -> None:
    with LocalBroker(settings=CLEANS_SOON) as broker:
        address = broker.bootstrap
        table = {"cleanup.policy": "compact", "segment.bytes": "400", "min.cleanable.dirty.ratio": "0.01"}
        broker.create_topic("table", config=table)
        produce(address, "table", [b"%d" % number + bytes(100) for number in range(12)], b"key")
        removed = until_stage(
            address, "table:0@0", lambda told: told.get("log compaction", {})["state"] == "done", "it is compacted"
        )
        assert removed["summary"] == "removed by log compaction"
        assert explain(address, "table:0@11")["summary"] == "visible"

        broker.create_topic("short", config={"segment.bytes": "400", "retention.bytes": "1"})
        produce(address, "short", [bytes(300) for _ in range(4)])
        deleted = until_stage(address, "short:0@0", lambda told: "deleted" in told, "retention deletes it")
        assert deleted["summary"].startswith("deleted: the log starts at ")


@pytest.mark.long
def test_a_hung_disk_is_the_stage_sync_of_a_slow_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalBroker(storage="disk") as broker:
        address = broker.bootstrap
        broker.create_topic("orders")
        produce(address, "orders", [b"quick"])
        with hung_syncs(monkeypatch, str(broker.directory)) as go_on:
            waiting = threading.Thread(target=produce, args=(address, "orders", [b"slow"]))
            waiting.start()
            wait_until(lambda: explain(address, "--slow")["running"] != [], "a request has waited for a second", 60)
            (running,) = explain(address, "--slow")["running"]
            assert running["api"] == "Produce" and running["age_ms"] > 1_000
            go_on.set()
            waiting.join(60)
        slowest = explain(address, "--slow", "--api", "Produce", "--limit", "1")["requests"][0]
        assert slowest["stages_ms"]["sync"] > 1_000
        assert slowest["stages_ms"]["sync"] > 0.9 * slowest["duration_ms"]
        assert (slowest["topic"], slowest["partition"]) == ("orders", 0)


@pytest.mark.long
def test_another_broker_says_who_leads_and_a_dead_one_is_told_of(tmp_path: Path) -> None:
    with LocalCluster(2, directory=tmp_path / "cluster") as cluster:
        cluster.create_topic("orders")
        produce(cluster.bootstrap, "orders", [b"a"])
        leader = cluster.leader("orders")
        other = cluster.address(3 - leader)
        assert explain(other, "orders:0@0")["broker"] == leader
        nodes = ClusterConnection(other).get("/status")["nodes"]
        url = next(node["admin_url"] for node in nodes if node["id"] == 3 - leader)
        with pytest.raises(TidelogError) as refused:
            http_json(url, "/explain?topic=orders&partition=0&offset=0")
        assert f"ask broker {leader}" in str(refused.value.hint)
        if leader == 1:  # the only controller is beside broker 1
            cluster.move("orders", to=2)
            leader, other = 2, cluster.address(1)
        assert explain(other, "orders:0@0")["summary"] == "visible", "from the new leader"
        cluster.kill(leader)
        wait_until(
            lambda: ClusterConnection(other).get("/partitions?topic=orders")["partitions"][0]["leader"] is None,
            "its death is known",
            60,
        )
        with pytest.raises(TidelogError, match="nobody leads orders:0 now"):
            explain(other, "orders:0@0")
        slow = explain(other, "--slow")
        assert any(f"broker {leader}" in problem for problem in slow["problems"])
