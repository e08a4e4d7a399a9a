"""Streaming reads over a real cluster, driven as Spark drives them: offsets go through JSON, tasks through pickle."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from pyspark_tidelog import TidelogSource, stream
from pyspark_tidelog.reading import DataLoss
from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import FLAGS, Row, World, expected, rows_of_batch
from tests.support.cli import until
from tests.support.cluster_process import up_cluster
from tidelog.runtime.errors import InvalidInput, NotFound

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("spark")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with up_cluster(tmp_path_factory.mktemp("cluster") / "data", brokers=2, flags=FLAGS) as up:
        yield World(up)


class Query:
    """A query and its checkpoint."""

    def __init__(self, options: Mapping[str, object], checkpoint: dict[str, Any] | None = None) -> None:
        source = TidelogSource({name: str(value) for name, value in options.items()})
        self.reader: Any = source.streamReader(source.schema())
        self.at = self._kept(self.reader.initialOffset()) if checkpoint is None else checkpoint

    @staticmethod
    def _kept(offset: dict[str, Any]) -> dict[str, Any]:
        return dict(json.loads(json.dumps(offset)))

    def end(self, limit: ReadLimit | None = None) -> dict[str, Any]:
        """Where the next micro-batch ends."""
        return self._kept(self.reader.latestOffset(self.at, limit or self.reader.getDefaultReadLimit()))

    def batch(self, limit: ReadLimit | None = None) -> list[Row]:
        end = self.end(limit)
        rows = self.rows(self.at, end)
        self.at = end
        return rows

    def rows(self, start: dict[str, Any], end: dict[str, Any]) -> list[Row]:
        found: list[Row] = []
        for partition in pickle.loads(pickle.dumps(self.reader.partitions(start, end))):
            for batch in self.reader.read(partition):
                found += rows_of_batch(batch)
        return sorted(found, key=lambda row: (row["topic"], row["partition"], row["offset"]))

    def all(self) -> list[Row]:
        """Micro-batches, until one has no rows."""
        found: list[Row] = []
        while rows := self.batch():
            found += rows
        return sorted(found, key=lambda row: (row["topic"], row["partition"], row["offset"]))

    def stop(self) -> None:
        self.reader.stop()


def rows_of(topic: str, partition: int, first: int, count: int) -> list[Row]:
    return expected(topic, partition, first, count, headers=False)


@pytest.fixture
def query(world: World) -> Iterator[Any]:
    made: list[Query] = []

    def make(checkpoint: dict[str, Any] | None = None, **options: object) -> Query:
        made.append(Query(world.options(**options), checkpoint))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def leases(world: World) -> list[dict[str, Any]]:
    return list(world.cli("lease", "list", "--format", "json").json())


def test_a_query_goes_on_with_what_is_new_also_from_its_checkpoint(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "on", 2)
    world.produce("on", 0, 0, 100)
    world.upload()
    world.produce("on", 0, 100, 20)
    first = query(subscribe="on", startingOffsets="earliest")
    assert first.batch() == rows_of("on", 0, 0, 120)
    assert first.end() == first.at, "an offset that is the same is no micro-batch"
    world.produce("on", 1, 0, 30)
    assert first.batch() == rows_of("on", 1, 0, 30)
    first.stop()
    world.produce("on", 0, 120, 10)
    world.upload()
    assert query(first.at, subscribe="on").batch() == rows_of("on", 0, 120, 10)


@pytest.mark.long
def test_a_query_begins_at_the_end_unless_it_is_told_where(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "begin", 1)
    world.produce("begin", 0, 0, 50)
    newest, told = query(subscribe="begin"), query(subscribe="begin", startingOffsets='{"begin": {"0": 40}}')
    timed = query(subscribe="begin", startingTimestamp=1_700_000_000_045)
    world.produce("begin", 0, 50, 5)
    assert newest.batch() == rows_of("begin", 0, 50, 5)
    assert told.batch() == rows_of("begin", 0, 40, 15)
    assert timed.batch() == rows_of("begin", 0, 45, 10)


def test_a_micro_batch_has_as_many_offsets_as_it_may(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "limit", 2)
    world.produce("limit", 0, 0, 90)
    world.produce("limit", 1, 0, 10)
    limited = query(subscribe="limit", startingOffsets="earliest", maxOffsetsPerTrigger=40)
    sizes = []
    rows: list[Row] = []
    while found := limited.batch():
        sizes.append(len(found))
        rows += found
    assert sizes == [40, 40, 20]
    assert sorted(rows, key=lambda row: (row["partition"], row["offset"])) == [
        *rows_of("limit", 0, 0, 90),
        *rows_of("limit", 1, 0, 10),
    ]
    everything = query(subscribe="limit", startingOffsets="earliest", maxOffsetsPerTrigger=40)
    assert len(everything.batch(ReadAllAvailable())) == 100


@pytest.mark.long
def test_a_query_waits_for_enough_records_and_not_for_ever(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "enough", 1)
    patient = query(subscribe="enough", minOffsetsPerTrigger=10)
    hasty = query(subscribe="enough", minOffsetsPerTrigger=10, maxTriggerDelay="1s")
    world.produce("enough", 0, 0, 9)
    assert patient.batch() == []
    hasty.batch()
    until(lambda: hasty.batch() == rows_of("enough", 0, 0, 9))
    world.produce("enough", 0, 9, 1)
    assert patient.batch() == rows_of("enough", 0, 0, 10)


@pytest.mark.long
def test_a_query_that_is_to_end_does_not_read_what_comes_later(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "now", 1)
    world.produce("now", 0, 0, 25)
    ending = query(subscribe="now", startingOffsets="earliest", maxOffsetsPerTrigger=10, minOffsetsPerTrigger=9)
    ending.reader.prepareForTriggerAvailableNow()
    world.produce("now", 0, 25, 25)
    assert ending.all() == rows_of("now", 0, 0, 25)


def test_new_topics_and_partitions_are_read_from_their_start(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "new-a", 1)
    found = query(subscribePattern="new-.*")
    assert found.batch() == []
    create_topic(world.bootstrap, "new-b", 2)
    world.produce("new-b", 1, 0, 10)
    assert found.batch() == rows_of("new-b", 1, 0, 10)
    world.cli("topic", "alter", "new-a", "--partitions", 2)
    world.produce("new-a", 1, 0, 10)
    assert found.batch() == rows_of("new-a", 1, 0, 10)


def test_a_query_begins_at_the_end_where_the_tail_is_to_be_skipped(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "behind", 1)
    world.produce("behind", 0, 0, 10)
    skipping = query(subscribe="behind", tail="skip")
    assert skipping.batch() == [], "it begins behind what is in the bucket"
    world.produce("behind", 0, 10, 10)
    again = query(skipping.at, subscribe="behind", tail="skip")
    again.reader.prepareForTriggerAvailableNow()
    assert again.batch() == []
    world.upload()
    until(lambda: skipping.end() != skipping.at)
    assert skipping.batch() == rows_of("behind", 0, 10, 10)


def test_a_new_query_that_is_to_end_may_begin_behind_the_end_that_it_was_to_have(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "start", 1)
    ending = query({}, subscribePattern="start.*")
    ending.reader.prepareForTriggerAvailableNow()  # Spark asks for the first offsets after that
    world.produce("start", 0, 0, 5)
    create_topic(world.bootstrap, "started", 1)
    ending.at = ending.reader.initialOffset()
    assert ending.batch() == []


@pytest.mark.long
def test_only_the_bucket_is_read_where_the_tail_is_to_be_skipped(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "skip", 2)
    world.produce("skip", 0, 0, 10)
    skipping = query(subscribe="skip", startingOffsets="earliest", tail="skip")
    assert skipping.batch() == []
    world.upload()
    world.produce("skip", 0, 10, 10)
    until(lambda: skipping.end() != skipping.at)
    assert skipping.batch() == rows_of("skip", 0, 0, 10)
    world.upload()
    until(lambda: skipping.end() != skipping.at)
    assert skipping.batch() == rows_of("skip", 0, 10, 10)


def test_the_same_micro_batch_has_the_same_rows_after_compaction_and_a_move(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "again", 1)
    for number in range(3):
        world.produce("again", 0, 20 * number, 20)
        world.upload()
    one = query(subscribe="again", startingOffsets="earliest")
    start, end = one.at, one.end()
    assert one.rows(start, end) == rows_of("again", 0, 0, 60)
    objects = world.objects("again")
    world.end_leases()
    world.compact()
    world.wait_deleted(objects)
    world.move("again:0")
    assert one.rows(start, end) == rows_of("again", 0, 0, 60), "its lease has ended: it takes another one"
    assert query(start, subscribe="again").rows(start, end) == rows_of("again", 0, 0, 60)


def test_a_lease_moves_on_with_each_micro_batch_and_ends_with_the_query(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "lease", 1)
    before = {each["id"] for each in leases(world)}
    one = query(subscribe="lease", startingOffsets="earliest")
    versions = []
    for number in range(4):
        world.produce("lease", 0, 5 * number, 5)
        world.upload()
        assert one.batch() == rows_of("lease", 0, 5 * number, 5)
        (mine,) = [each for each in leases(world) if each["id"] not in before]
        versions.append(mine["version"])
    assert versions == sorted(versions) and versions[0] < versions[-1]
    one.stop()
    assert {each["id"] for each in leases(world)} <= before


@pytest.mark.long
def test_the_lag_of_a_query_is_seen_as_a_consumer_groups(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "lag", 2)
    world.produce("lag", 0, 0, 30)
    world.produce("lag", 1, 0, 5)
    one = query(subscribe="lag", startingOffsets="earliest", maxOffsetsPerTrigger=20, groupIdPrefix="team")
    group = one.at["group"]
    assert group.startswith("team-")

    def lag() -> int:
        one.reader.latestOffset(one.at, one.reader.getDefaultReadLimit())
        told = world.cli("group", "describe", group, "--format", "json", code=None)
        return sum(row["lag"] for row in told.json()[0]["partitions"]) if told.code == 0 else -1

    until(lambda: lag() == 35)
    one.batch()
    until(lambda: lag() == 15)
    one.batch()
    until(lambda: lag() == 0)
    again = query(one.at, subscribe="lag", groupIdPrefix="other")
    assert again.end()["group"] == group, "the group belongs to the checkpoint"
    named = query(subscribe="lag", startingOffsets="earliest", **{"kafka.group.id": "mine"})
    named.batch()
    until(lambda: "mine" in world.cli("group", "list").text)


@pytest.mark.long
def test_a_query_moves_here_with_the_checkpoint_of_sparks_kafka_source(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "moved-here", 2)
    world.produce("moved-here", 0, 0, 20)
    world.produce("moved-here", 1, 0, 20)
    here = query({"moved-here": {"0": 15, "1": 20}}, subscribe="moved-here")
    assert here.batch() == rows_of("moved-here", 0, 15, 5)
    assert here.at["version"] == 1


def test_a_topic_that_was_created_again_is_data_loss(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "twice", 1)
    world.produce("twice", 0, 0, 10)
    before = query(subscribe="twice", startingOffsets="earliest")
    start = before.at
    before.batch()
    world.cli("topic", "delete", "twice", "--yes")
    with pytest.raises(DataLoss, match="topic twice does not exist any more"):
        before.end()
    create_topic(world.bootstrap, "twice", 1)
    world.produce("twice", 0, 0, 30)
    with pytest.raises(DataLoss, match="topic twice was deleted and created again"):
        query(before.at, subscribe="twice").end()
    with pytest.raises(DataLoss, match="topic twice was deleted and created again"):
        query(start, subscribe="twice").rows(start, before.at)
    careless = query(before.at, subscribe="twice", failOnDataLoss="false")
    assert careless.rows(start, before.at) == []
    assert careless.batch() == rows_of("twice", 0, 0, 30)


@pytest.mark.long
@pytest.mark.parametrize("ends", [False, True])
def test_a_query_that_may_lose_data_goes_on_without_what_is_gone_for_good(
    world: World, query: Any, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """`ends`: with the trigger `availableNow`."""
    monkeypatch.setattr(stream, "GONE_S", 1.0)
    stays, goes, shrinks = f"stays-{ends}", f"goes-{ends}", f"shrinks-{ends}"
    for topic, partitions in ((stays, 1), (goes, 1), (shrinks, 2)):
        create_topic(world.bootstrap, topic, partitions)
    named = {"subscribe": f"{stays},{goes}"}, {"assign": json.dumps({stays: [0], shrinks: [0, 1]})}
    before = [query(startingOffsets="earliest", **each) for each in named]
    for each in before:
        each.stop()
    world.cli("topic", "delete", goes, "--yes")
    world.cli("topic", "delete", shrinks, "--yes")
    create_topic(world.bootstrap, shrinks, 1)
    for each, options, problem in zip(before, named, (goes, rf"{shrinks}(-1| was deleted and created)"), strict=True):
        with pytest.raises(NotFound, match=problem):
            query(each.at, **options).end()
    careless = [query(each.at, failOnDataLoss="false", **how) for each, how in zip(before, named, strict=True)]
    for number in range(2):
        world.produce(stays, 0, 10 * number, 10)
        for each in careless:
            if ends:
                each.reader.prepareForTriggerAvailableNow()
            assert each.batch() == rows_of(stays, 0, 10 * number, 10)
    create_topic(world.bootstrap, goes, 1)
    world.produce(goes, 0, 0, 5)
    if ends:
        careless[0].reader.prepareForTriggerAvailableNow()
    assert careless[0].batch() == rows_of(goes, 0, 0, 5), "it is there again"


@pytest.mark.long
@pytest.mark.parametrize("trims", [True, False], ids=["trimmed", "uploaded"])
def test_records_that_are_deleted_before_they_are_read_are_data_loss(world: World, query: Any, trims: bool) -> None:
    topic = f"lost-{trims}"
    create_topic(world.bootstrap, topic, 1)
    for number in range(2):
        world.produce(topic, 0, 50 * number, 50)
        world.upload()
    careful = query(subscribe=topic, startingOffsets="earliest")
    world.delete_records(topic, 70, trims=trims)
    with pytest.raises(DataLoss, match=f"{topic}-0: offsets 0 to 69 do not exist any more"):
        careful.batch()
    careless = query(careful.at, subscribe=topic, failOnDataLoss="false")
    assert careless.batch() == rows_of(topic, 0, 70, 30)


def test_a_checkpoint_of_something_else_and_a_missing_topic_are_refused(world: World, query: Any) -> None:
    with pytest.raises(InvalidInput, match="the checkpoint's offsets are not this source's"):
        query({"version": 7}, subscribe="t").end()
    with pytest.raises(NotFound, match="no topic 'nothing'"):
        query(subscribe="nothing")
    create_topic(world.bootstrap, "other", 1)
    other = query(subscribe="other")
    with pytest.raises(DataLoss, match=r"topic other .* is not subscribed to any more"):
        query(other.at, subscribePattern="begin").end()


def transact(world: World, topic: str, name: str, sizes: Sequence[int]) -> Any:
    """Begin a transaction, and write batches of so many records."""
    producer = Producer({"bootstrap.servers": world.bootstrap, "transactional.id": name, "linger.ms": 100})
    producer.init_transactions(60)
    producer.begin_transaction()
    for size in sizes:
        for _ in range(size):
            producer.produce(topic, name.encode(), partition=0)
        producer.flush()
    return producer


@pytest.mark.parametrize("most", [3, 1_000])
def test_what_transactions_have_aborted_is_not_read_from_the_bucket(world: World, query: Any, most: int) -> None:
    topic = f"settled-{most}"
    create_topic(world.bootstrap, topic, 1)
    transact(world, topic, f"{topic}-a", [4]).abort_transaction()  # 0-3, marker 4
    transact(world, topic, f"{topic}-b", [4]).commit_transaction()  # 5-8, marker 9
    world.produce(topic, 0, 0, 2)  # 10-11
    aborted = transact(world, topic, f"{topic}-c", [2, 2])  # 12-15
    committed = transact(world, topic, f"{topic}-d", [3])  # 16-18
    aborted.abort_transaction()  # 19
    world.produce(topic, 0, 0, 1)  # 20
    committed.commit_transaction()  # 21
    world.upload()
    transact(world, topic, f"{topic}-e", [1]).abort_transaction()  # 22, marker 23, in the tail
    wanted = [5, 6, 7, 8, 10, 11, 16, 17, 18, 20]
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxRecordsPerPartition": most}
    settled = query(**options, **{"kafka.isolation.level": "read_committed"})
    assert [row["offset"] for row in settled.batch()] == wanted
    everything = query(**options)
    markers = {4, 9, 19, 21, 23}
    assert [row["offset"] for row in everything.batch()] == [at for at in range(24) if at not in markers]


def test_a_query_that_reads_committed_only_from_now_on_waits_for_the_transaction_that_it_is_in(
    world: World, query: Any
) -> None:
    create_topic(world.bootstrap, "stricter", 1)
    world.produce("stricter", 0, 0, 2)
    begun = transact(world, "stricter", "stricter", [3])
    lax = query(subscribe="stricter", startingOffsets="earliest")
    assert [row["offset"] for row in lax.batch()] == [0, 1, 2, 3, 4], "it goes past the last stable offset"
    options = {"subscribe": "stricter", "kafka.isolation.level": "read_committed"}
    for more in ({}, {"failOnDataLoss": "false"}, {"tail": "skip"}):
        assert query(lax.at, **options, **more).end() == lax.at, "nothing was lost, and nothing is read again"
    strict = query(lax.at, **options)
    begun.commit_transaction()  # marker 5
    world.produce("stricter", 0, 0, 1)
    until(lambda: strict.end() != strict.at)
    assert [row["offset"] for row in strict.batch()] == [6]


def test_large_records_of_the_tail_come_in_batches_of_bounded_size(world: World, query: Any) -> None:
    create_topic(world.bootstrap, "large", 1)
    producer = Producer({"bootstrap.servers": world.bootstrap})
    for _ in range(60):
        producer.produce("large", bytes(900_000), partition=0)
    assert producer.flush(60) == 0
    one = query(subscribe="large", startingOffsets="earliest")
    (task,) = pickle.loads(pickle.dumps(one.reader.partitions(one.at, one.end())))
    assert task.task.is_tail, "nothing is uploaded"
    sizes = [batch.num_rows for batch in one.reader.read(task)]
    assert sizes == [19, 19, 19, 3], "16 MiB and what the last record has more"
