"""Consumer groups when the broker of their coordinator is killed: what was committed is there at the next coordinator,
nobody is given an older offset, and members go on without an error of their application's concern.

Controllers run apart; the offsets topic is in replicated WALs as every other one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.e2e.backends import QUIET, create_topic
from tests.support.hot_cluster import BROKERS, HotCluster, hot_cluster
from tests.support.partition_load import PartitionLoad
from tidelog.chaos.serve_cluster import eventually

TOPIC, PARTITIONS = "shared", 6
GROUPS = tuple(f"group-{number}" for number in range(6))

pytestmark = pytest.mark.slow


class CommittingMember:
    """The only member of a group: takes records in order and commits them, synchronously, in a thread.

    `committed`: the offset of each partition's last commit that was answered. `attempted`: of the last one sent.
    """

    def __init__(self, bootstrap: str, group: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                **QUIET,
            }
        )
        self._consumer.subscribe([TOPIC])
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=group, daemon=True)
        self.committed: dict[int, int] = {}
        self.attempted: dict[int, int] = {}
        self.faults: list[str] = []

    def begin(self) -> None:
        """Start consuming."""
        self._thread.start()

    def end(self) -> None:
        """Stop consuming and leave the group."""
        self._stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._consumer.close()

    def _run(self) -> None:
        following: dict[int, int] = {}
        while not self._stopping.is_set():
            for message in self._consumer.consume(50, 0.1):
                if (error := message.error()) is not None:
                    if error.fatal():
                        self.faults.append(str(error))
                    continue
                at, offset = message.partition(), message.offset()
                assert at is not None and offset is not None
                floor = max(following.get(at, 0), self.committed.get(at, 0))
                if offset < floor and following.get(at) is not None:
                    self.faults.append(f"{at}: given {offset} after {floor}")
                following[at] = offset + 1
            if following:
                self._commit(following)

    def _commit(self, following: dict[int, int]) -> None:
        offsets = [TopicPartition(TOPIC, at, offset) for at, offset in following.items()]
        self.attempted.update(following)
        try:
            answers = self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            if error.args[0].fatal():
                self.faults.append(str(error))
            return  # the next commit covers it
        self.committed.update({each.partition: each.offset for each in answers or [] if each.error is None})


@contextlib.contextmanager
def members(hot: HotCluster) -> Iterator[dict[str, CommittingMember]]:
    found = {group: CommittingMember(hot.bootstrap, group) for group in GROUPS}
    for member in found.values():
        member.begin()
    try:
        yield found
    finally:
        for member in found.values():
            member.end()


def asking(hot: HotCluster) -> AdminClient:
    """A client that remembers no coordinator: librdkafka waits for one that it remembers until the request's end."""
    return AdminClient({"bootstrap.servers": hot.bootstrap, **QUIET})


def coordinators(hot: HotCluster) -> dict[str, int]:
    client = asking(hot)  # kept until the answers are there
    described = client.describe_consumer_groups(list(GROUPS), request_timeout=20)
    return {group: future.result(30).coordinator.id for group, future in described.items()}


def stored(hot: HotCluster, group: str) -> dict[int, int]:
    asked = [ConsumerGroupTopicPartitions(group)]
    client = asking(hot)
    answer = client.list_consumer_group_offsets(asked, request_timeout=20)[group].result(30)
    return {each.partition: each.offset for each in answer.topic_partitions}


def wait_progress(found: dict[str, CommittingMember]) -> None:
    before = {group: dict(member.committed) for group, member in found.items()}

    def all_grew() -> bool:
        return all(
            member.committed.get(at, 0) > before[group].get(at, 0)
            for group, member in found.items()
            for at in range(PARTITIONS)
        )

    eventually(all_grew, 120)


@pytest.mark.long
def test_no_commit_is_lost_when_the_broker_of_a_coordinator_is_killed(tmp_path: Path) -> None:
    with hot_cluster(tmp_path / "hot") as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
            with members(hot) as found:
                wait_progress(found)
                for victim in BROKERS[:2]:
                    hot.wait_full()
                    eventually(lambda: coordinators(hot), 60)
                    known = {group: dict(member.committed) for group, member in found.items()}
                    hot.kill(victim)
                    hot.wait_masters([victim])
                    for group in GROUPS:
                        now = eventually(functools.partial(stored, hot, group), 60)
                        missing = {at: (offset, now.get(at)) for at, offset in known[group].items() if now[at] < offset}
                        assert not missing, f"{group}: committed and stored offsets {missing}"
                    wait_progress(found)
                    assert victim not in coordinators(hot).values()
                    hot.begin(victim)
                    hot.ready(victim)
            assert [member.faults for member in found.values()] == [[]] * len(GROUPS)
            for group, member in found.items():
                ends = stored(hot, group)
                for at, offset in member.committed.items():
                    assert offset <= ends[at] <= member.attempted[at], f"{group}-{at}"
        assert load.verify(hot.bootstrap) == []
