"""A topic that is deleted and created again while a read of it is planned."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pyspark_tidelog import stream
from pyspark_tidelog.cluster import Lease, Lookups, retried
from pyspark_tidelog.manifests import find_ranges
from pyspark_tidelog.options import EARLIEST, Partition, ReadOptions, stream_options
from pyspark_tidelog.positions import Position
from pyspark_tidelog.reading import DataLoss
from pyspark_tidelog.stream import TidelogStreamReader
from tests.controller.controller_helpers import TOPIC
from tests.pyspark_tidelog.test_spark_lookups import OBJECTS
from tests.pyspark_tidelog.test_spark_manifests import WritingBroker
from tidelog.controller.model import commands as c
from tidelog.runtime.errors import Unavailable

NEW_TOPIC = b"n" * 16
LEASE = Lease(1, 1, 60.0)
ALL = [("t", 0, 0, 10 * OBJECTS)]


class RecreatingBroker(WritingBroker):
    """Its topic is another one from question number `at` about objects on, without records."""

    at = 0

    def answer(self, path: str, body: bytes, authorization: str) -> tuple[int, bytes]:
        if path.startswith(("/slices", "/manifests")):
            self.at -= 1
            if self.at == 0:
                self.driver.run(c.DeleteTopic(TOPIC))
                self.driver.topic(3, "t", NEW_TOPIC)
        return super().answer(path, body, authorization)


class LaggingCluster:
    """As `Cluster`, of which the broker that is asked for topics' ids has old metadata for some questions."""

    def __init__(self, options: ReadOptions, broker: RecreatingBroker, old: int) -> None:
        self.options = options
        self.old = old
        self._broker = broker

    def refresh(self) -> None: ...

    def forget_brokers(self) -> None: ...

    def lookups(self) -> Lookups:
        return Lookups((self._broker.url,), "")

    def bucket(self) -> dict[str, str]:
        return self._broker.bucket

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str]:
        self.old -= 1
        return dict.fromkeys(topics, (TOPIC if self.old >= 0 else NEW_TOPIC).hex())

    def offsets(self, wanted: Mapping[Partition, int]) -> dict[Partition, int]:
        assert set(wanted.values()) <= {EARLIEST}
        return dict.fromkeys(wanted, 0)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RecreatingBroker]:
    found = RecreatingBroker(tmp_path / "bucket")
    yield found
    found.close()


def test_answers_about_two_topics_of_one_name_are_not_put_together(broker: RecreatingBroker) -> None:
    broker.limit, broker.at = 2, 2
    lookups = Lookups((broker.url,), "")
    with pytest.raises(Unavailable, match="topic t was deleted and created again"):
        lookups.slices(ALL, 1)
    (found,) = retried(lambda: lookups.slices(ALL, 1)).ranges
    assert (found.topic_id, found.slices, found.committed_end) == (NEW_TOPIC.hex(), (), 0)


def test_nor_are_manifests(broker: RecreatingBroker) -> None:
    broker.slices, broker.at = 2, 3  # the first question tells that there are too many slices
    with pytest.raises(Unavailable, match="topic t was deleted and created again"):
        find_ranges(Lookups((broker.url,), ""), broker.bucket, ALL, LEASE, most=1)


@pytest.mark.parametrize("fails", [True, False])
def test_a_query_does_not_go_on_in_another_topic_of_the_name(
    broker: RecreatingBroker, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    broker.at = 1

    def connected(options: ReadOptions) -> Any:
        return LaggingCluster(options, broker, old=1)

    monkeypatch.setattr(stream, "Cluster", connected)
    told = {"kafka.bootstrap.servers": "there:9092", "subscribe": "t", "failOnDataLoss": json.dumps(fails)}
    reader = TidelogStreamReader(stream_options(told))
    ids = {"t": TOPIC.hex()}
    start, end = (Position.of({("t", 0): at}, ids, "").to_json() for at in (10, 30))
    try:
        if fails:
            with pytest.raises(DataLoss, match="topic t was deleted and created again"):
                reader.partitions(start, end)
        else:
            assert not reader.partitions(start, end)
    finally:
        reader.stop()
