"""All brokers of a replicated set come back with older copies of their directories, and the right ones are gone."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Message, Producer

from tests.e2e.backends import QUIET, create_topic, read_topic
from tests.support.hot_cluster import BROKERS, HotCluster, hot_cluster
from tidelog.chaos.serve_cluster import eventually, tidelog_json
from tidelog.runtime.children import TIDELOG

PARTITIONS = 6
TOPIC = "copied"

pytestmark = [pytest.mark.slow, pytest.mark.long]


def produce(hot: HotCluster, values: range) -> set[bytes]:
    """Have records acknowledged by two of three brokers; return them."""
    written: set[bytes] = set()
    producer = Producer({"bootstrap.servers": hot.bootstrap, "acks": "all", **QUIET})

    def delivered(error: KafkaError | None, message: Message) -> None:
        value = message.value()
        if error is None and isinstance(value, bytes):
            written.add(value)

    for each in values:
        producer.produce(TOPIC, str(each).encode(), on_delivery=delivered)
    assert producer.flush(60) == 0 and len(written) == len(values)
    return written


def read(hot: HotCluster) -> list[bytes]:
    return [each[4] for each in read_topic(hot.bootstrap, TOPIC, PARTITIONS)]


def is_refused(hot: HotCluster, broker: int) -> bool:
    """Whether all promises of a broker were refused because its WALs are older."""
    return hot.said(broker, 400).count("it had offsets up to") >= len(BROKERS)


def is_elected(hot: HotCluster, replica_set: int, broker: int) -> bool:
    elect = ("replica-set", "elect", str(replica_set), "--broker", str(broker), "--accept-loss")
    found = tidelog_json(hot.bootstrap, *elect)
    return found is not None and found["master"] == broker


def test_one_of_three_older_copies_goes_on_as_another_replica(tmp_path: Path) -> None:
    with hot_cluster(tmp_path / "hot") as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        kept = produce(hot, range(300))
        hot.kill(*BROKERS)
        for each in BROKERS:
            shutil.copytree(hot.files(each), tmp_path / str(each), symlinks=True)
        hot.begin(*BROKERS)
        hot.ready(*BROKERS)
        hot.wait_full()
        gone = produce(hot, range(300, 400))
        for replica_set in BROKERS:  # the controllers learn how far the WALs go beyond the copies
            for broker in (102, 103, 101):
                hot.elect(replica_set, broker)
        hot.kill(*BROKERS)
        for each in BROKERS:
            hot.swap(each, tmp_path / str(each))
        hot.begin(*BROKERS)
        hot.ready(*BROKERS)
        for each in BROKERS:
            eventually(partial(is_refused, hot, each))
        assert not any(hot.described(each)["master"] for each in BROKERS)

        command = [*TIDELOG, "wal", "renew-id", "--data-dir", str(hot.files(103)), "--yes", "--replica-set"]
        busy = subprocess.run([*command, "103"], capture_output=True, text=True, timeout=60, check=False)
        assert busy.returncode == 9 and "is in use by process" in busy.stderr, busy
        hot.kill(103)
        for each in BROKERS:
            subprocess.run([*command, str(each)], capture_output=True, text=True, timeout=60, check=True)
        hot.begin(103)
        hot.ready(103)
        for each in BROKERS:
            eventually(partial(is_elected, hot, each, 103))
        hot.wait_full()
        found = read(hot)
        assert len(found) == len(set(found)) and kept <= set(found) <= kept | gone
        losses = tidelog_json(hot.bootstrap, "wal", "losses")
        assert sorted(each["replica_set"] for each in losses) == list(BROKERS)
        assert produce(hot, range(400, 450)) <= set(read(hot))
