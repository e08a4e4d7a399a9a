"""Partitions that have lost records which a query or a table has read, and have given their offsets to others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from pyspark_tidelog import stream
from pyspark_tidelog.cluster import Cluster, KnownEnd
from pyspark_tidelog.options import EARLIEST, Partition, ReadOptions, stream_options
from pyspark_tidelog.positions import Position, compare, epochs_at
from pyspark_tidelog.reading import DataLoss
from pyspark_tidelog.stream import TidelogStreamReader
from tidelog.runtime.errors import Unavailable
from tidelog.testing import LocalBroker

ID = "a" * 32
PLACE = ("t", 0)
READ_UP_TO = Position.of({PLACE: 150}, {"t": ID}, "g", {PLACE: 1}).to_json()


class ShorterCluster:
    """As `Cluster`, of one partition."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.end = KnownEnd(200, 1_006)
        self.epoch_end = 100
        self.failures = 0
        self.asked: list[dict[Partition, int]] = []
        self.planned: list[dict[Partition, tuple[int, int]]] = []

    def refresh(self) -> None: ...

    def has_topic(self, topic: str) -> bool:
        return True

    def partitions(self, topics: Iterable[str]) -> list[Partition]:
        return [(topic, 0) for topic in topics]

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str]:
        return dict.fromkeys(topics, ID)

    def offsets(self, wanted: Mapping[Partition, int]) -> dict[Partition, int]:
        assert set(wanted.values()) <= {EARLIEST}
        return dict.fromkeys(wanted, 0)

    def ends(self, places: Iterable[Partition]) -> dict[Partition, KnownEnd]:
        return dict.fromkeys(places, self.end)

    def log_ends(self, readable: Mapping[Partition, int]) -> dict[Partition, int]:
        return {**readable}

    def epoch_ends(self, epochs: Mapping[Partition, int]) -> dict[Partition, int]:
        self.asked.append({**epochs})
        if self.failures:
            self.failures -= 1
            raise Unavailable("no leader")
        return {place: self.epoch_end if epoch < self.end.epoch else self.end.offset for place, epoch in epochs.items()}

    def commit(self, group: str, offsets: Mapping[Partition, int]) -> Any:
        raise NotImplementedError

    def forget_brokers(self) -> None: ...

    def lookups(self) -> Any:
        raise AssertionError("no test plans tasks")


class Reader:
    """The driver's part of a query over a `ShorterCluster`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
        told = {"kafka.bootstrap.servers": "there:9092", "subscribe": "t", "failOnDataLoss": json.dumps(fails)}
        self.cluster = ShorterCluster(stream_options(told))
        monkeypatch.setattr(stream, "Cluster", lambda _: self.cluster)
        monkeypatch.setattr(stream.GroupProgress, "report", lambda *_: None)
        self.reader = TidelogStreamReader(self.cluster.options)

    def latest(self, start: dict[str, Any]) -> dict[str, Any]:
        return self.reader.latestOffset(start, self.reader.getDefaultReadLimit())

    def planned(self, monkeypatch: pytest.MonkeyPatch, start: dict[str, Any], end: dict[str, Any]) -> Any:
        found: list[Any] = []

        def find(_cluster: Any, _lookups: Any, asked: Any, _lease: Any) -> Any:
            found.extend(asked)
            raise DataLoss("enough")

        monkeypatch.setattr(stream, "find_ranges", find)
        monkeypatch.setattr(self.cluster, "lookups", lambda: None)
        monkeypatch.setattr(stream.MovingLease, "moved_on", lambda *_: None)
        monkeypatch.setattr(stream.MovingLease, "end", lambda _: None)
        try:
            assert not self.reader.partitions(start, end)
        except DataLoss as error:
            if error.message != "enough":
                raise
        return found


def test_a_query_does_not_go_on_behind_records_that_it_has_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataLoss, match="t-0 was read up to offset 150, and has lost its records from 100 on since"):
        Reader(monkeypatch, fails=True).latest(READ_UP_TO)


@pytest.mark.parametrize("end", [150, 200])
def test_where_data_may_be_lost_it_reads_the_others_from_the_first_on(
    monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    query = Reader(monkeypatch, fails=False)
    query.cluster.end, query.cluster.failures = KnownEnd(end, 1_006), 1
    reached = query.latest(READ_UP_TO)
    assert reached["topics"]["t"] == {"id": ID, "offsets": {"0": end}, "epochs": {"0": 1_006}}
    assert query.planned(monkeypatch, READ_UP_TO, reached) == [("t", 0, 100, end)]
    assert query.cluster.asked == [{PLACE: 1}] * 2  # the failure, and the answer, which is kept
    assert query.latest(reached) == reached


def test_a_micro_batch_that_is_done_again_has_no_records_of_another_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Position.of({PLACE: 50}, {"t": ID}, "g", {PLACE: 1}).to_json()
    with pytest.raises(DataLoss, match="t-0 was read up to offset 150"):
        Reader(monkeypatch, fails=True).planned(monkeypatch, start, READ_UP_TO)
    query = Reader(monkeypatch, fails=False)
    assert query.planned(monkeypatch, start, READ_UP_TO) == [("t", 0, 50, 100)]
    assert query.latest(READ_UP_TO)["topics"]["t"]["offsets"] == {"0": 200}


def test_a_new_leader_that_has_everything_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    query = Reader(monkeypatch, fails=True)
    query.cluster.end, query.cluster.epoch_end = KnownEnd(150, 2), 150
    assert query.latest(READ_UP_TO) == READ_UP_TO
    assert query.latest(READ_UP_TO) == READ_UP_TO
    assert query.cluster.asked == [{PLACE: 1}]


def test_positions_of_older_versions_have_no_epochs_and_get_them() -> None:
    old = Position.from_json({"version": 1, "group": "g", "topics": {"t": {"id": ID, "offsets": {"0": 5}}}})
    assert old.epochs == {} and "epochs" not in old.to_json()["topics"]["t"]
    for offset, known in ((5, -1), (6, 3)):
        assert epochs_at(Position.of({PLACE: offset}, {"t": ID}), old, {PLACE: 3}, {}) == {PLACE: known}
    again = Position.of({PLACE: 5}, {"t": "b" * 32})
    assert epochs_at(again, Position.of({PLACE: 5}, {"t": ID}, "", {PLACE: 2}), {PLACE: 3}, {}) == {PLACE: 3}


def test_a_partition_that_is_shorter_may_have_lost_more_than_that() -> None:
    before, ends = (Position.of({PLACE: at}, {"t": ID}) for at in (9, 5))
    assert compare(before, ends, {PLACE: 4}) == (
        {PLACE: 4},
        [
            "t-0 ends at offset 5, and was read up to 9",
            "t-0 was read up to offset 9, and has lost its records from 4 on since: others have their offsets now",
        ],
    )
    assert compare(before, ends, {PLACE: 5}) == ({PLACE: 5}, ["t-0 ends at offset 5, and was read up to 9"])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    directory: Path = tmp_path_factory.mktemp("broker")
    with LocalBroker(storage="disk", directory=directory) as found:
        yield found


def test_brokers_tell_where_a_leader_epoch_ends(broker: LocalBroker) -> None:
    broker.create_topic("t", partitions=2)

    def write(count: int) -> None:
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        for _ in range(count):
            producer.produce("t", b"x", partition=1)
        assert producer.flush(30) == 0

    def cluster(**more: str) -> Cluster:
        return Cluster(stream_options({"kafka.bootstrap.servers": broker.bootstrap, "subscribe": "t", **more}))

    write(5)
    before = cluster().ends([("t", 0), ("t", 1)])
    assert [end.offset for end in before.values()] == [0, 5]
    assert all(end.epoch >= 0 for end in before.values())
    broker.restart()
    write(3)
    after = cluster().ends(before)
    assert after["t", 1].offset == 8 and after["t", 1].epoch > before["t", 1].epoch
    asked = {**{place: end.epoch for place, end in before.items()}, ("t", 7): 1, ("u", 0): 1}
    assert cluster().epoch_ends(asked)["t", 1] == 5
    assert cluster().epoch_ends({place: end.epoch for place, end in after.items()})["t", 1] == 8
    assert cluster().epoch_ends({("t", 1): after["t", 1].epoch + 1}) == {}
    behind_a_proxy = cluster()
    behind_a_proxy.options.kafka["security.protocol"] = "SSL"  # type: ignore[index]
    assert behind_a_proxy.epoch_ends(asked) == {}
