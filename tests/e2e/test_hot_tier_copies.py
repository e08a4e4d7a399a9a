"""Brokers of replicated sets come back with older copies of their directories, as many as an election needs, or all."""

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
    """Have records acknowledged by two of three brokers, some in each set; return them."""
    written: set[bytes] = set()
    producer = Producer({"bootstrap.servers": hot.bootstrap, "acks": "all", **QUIET})

    def delivered(error: KafkaError | None, message: Message) -> None:
        value = message.value()
        if error is None and isinstance(value, bytes):
            written.add(value)

    for each in values:
        producer.produce(TOPIC, str(each).encode(), partition=each % PARTITIONS, on_delivery=delivered)
    assert producer.flush(60) == 0 and len(written) == len(values)
    return written


def read(hot: HotCluster) -> list[bytes]:
    return [each[4] for each in read_topic(hot.bootstrap, TOPIC, PARTITIONS)]


def known_ends(hot: HotCluster, beyond: dict[int, int]) -> dict[int, int]:
    """Up to where the controllers know that the WALs go, by set, once that is the same for all members, and further."""
    found = {each: {row["known_end"] for row in hot.described(each)["replicas"]} for each in BROKERS}
    assert all(len(ends) == 1 and None not in ends for ends in found.values()), found
    ends = {each: int(found[each].pop()) for each in BROKERS}
    assert all(end > beyond.get(each, -1) for each, end in ends.items()), (ends, beyond)
    return ends


def copied(hot: HotCluster, tmp_path: Path) -> tuple[set[bytes], set[bytes]]:
    """Copy the directories of all brokers, and go on; return the records before and after the copies. All are down."""
    create_topic(hot.bootstrap, TOPIC, PARTITIONS)
    before = produce(hot, range(300))
    ends = eventually(partial(known_ends, hot, {}))
    hot.kill(*BROKERS)
    for each in BROKERS:
        shutil.copytree(hot.files(each), tmp_path / str(each), symlinks=True)
    hot.begin(*BROKERS)
    hot.ready(*BROKERS)
    hot.wait_full()
    after = produce(hot, range(300, 400))
    eventually(partial(known_ends, hot, ends))
    hot.kill(*BROKERS)
    return before, after


def is_refused(hot: HotCluster, broker: int) -> bool:
    """Whether all promises of a broker were refused because its WALs are older."""
    return hot.said(broker, 400).count("it had offsets up to") >= len(BROKERS)


def nobody_leads(hot: HotCluster, *copies: int) -> None:
    for each in copies:
        eventually(partial(is_refused, hot, each))
    assert not any(hot.described(each)["master"] for each in BROKERS)


def is_elected(hot: HotCluster, replica_set: int, broker: int) -> bool:
    elect = ("replica-set", "elect", str(replica_set), "--broker", str(broker), "--accept-loss")
    found = tidelog_json(hot.bootstrap, *elect)
    return found is not None and found["master"] == broker


def test_two_of_three_older_copies_elect_nobody_until_one_right_disk_is_back_beside_the_third(tmp_path: Path) -> None:
    """Nothing is in the bucket by which they could be told from the right ones."""
    with hot_cluster(tmp_path / "hot") as hot:
        before, after = copied(hot, tmp_path)
        for each in (102, 103):
            hot.files(each).rename(tmp_path / f"right-{each}")
            shutil.copytree(tmp_path / str(each), hot.files(each), symlinks=True)
        hot.begin(102, 103)
        hot.ready(102, 103)
        nobody_leads(hot, 102, 103)
        hot.begin(101)
        hot.ready(101)
        nobody_leads(hot, 102, 103)
        hot.kill(102)
        hot.swap(102, tmp_path / "right-102")
        hot.begin(102)
        hot.ready(102)
        hot.wait_full()
        found = read(hot)
        assert len(found) == len(set(found)) and set(found) == before | after
        assert all((hot.files(103) / f"rejected-{each}").is_dir() for each in ("wal-1", "replica-102-1"))


def test_one_of_three_older_copies_goes_on_as_another_replica(tmp_path: Path) -> None:
    with hot_cluster(tmp_path / "hot") as hot:
        kept, gone = copied(hot, tmp_path)
        for each in BROKERS:
            hot.swap(each, tmp_path / str(each))
        hot.begin(*BROKERS)
        hot.ready(*BROKERS)
        nobody_leads(hot, *BROKERS)

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
