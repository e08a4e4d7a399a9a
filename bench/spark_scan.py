"""A scan of a topic by Spark: `format("tidelog")`, Spark's own Kafka source, and bare GETs of the same objects.

    python -m bench.spark_scan [--mb 1000] [--bucket minio|embedded] [--runs 3] [--record-bytes 100,1024]

Three brokers on one bucket, and for each size of records a topic of six partitions: values like JSON with keys of
eight bytes, in the lz4 batches that librdkafka makes of them, all of it uploaded. One Spark (`local[2]`) has both
sources. It is of the version of the connector (`localstack/install.py spark_kafka`), which is not the newest one.

The scan is `sum(length(value)), count(*), max(offset)`, timed from planning to the result; all sources must have the
same result. In turns, after a warm-up of each with each topic: `tidelog`; `tidelog_two`, the same with a schema of the
two columns that the scan uses; `kafka` as it comes, a task to a partition; `kafka` with `minPartitions` as many as
`tidelog` has tasks (where both have as many, the two show the noise); and `raw`: GETs of all those objects through the
product's own client, as many at a time as two tasks have.

Printed for each: rows and bytes of values a second; CPU seconds of the brokers during the scan, of which what they use
when idle for as long is told apart; CPU seconds of Spark, all its processes. What the brokers send to the Kafka source
is in the page cache or in their own ones; so are the objects, as if the bucket were on machines with much memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from bench._bucket import KINDS, Bucket, bucket, environment
from bench._clients import create_topic, flush, records_in
from bench._cluster_load import settle_all
from bench._clusters import TidelogCluster, leaders, running
from bench._common import Spread, cpu_seconds, directory, in_process, interleaved, quick, row
from bench.limit_s3 import get_all
from localstack.install import install
from pyspark_tidelog.fetch import EMBEDDED, RUN_BYTES, RUNS_AHEAD, open_bucket
from tests.pyspark_tidelog.harness import Spark
from tests.support.cli import Cli, until
from tidelog.cli.client import ClusterConnection
from tidelog.storage.objects.key import object_key

PARTITIONS = 6
CORES = 2
"""Tasks at a time."""
USED = "value BINARY, offset LONG"
"""The columns that the scan uses."""
GOAL_SPEED = 3.0
GOAL_BROKERS = 0.05
LIBRDKAFKA = {"compression.type": "lz4", "linger.ms": 50, "acks": "all", "queue.buffering.max.messages": 1_000_000}
UNACKNOWLEDGED = 300_000
AT_ONCE = 1_000
VALUES = 20_000
"""Different values."""
IDLE_S = 5.0
SETTINGS = ("compaction.enabled=false", "clean.enabled=false", "log.retention_ms=-1")


class Scan(NamedTuple):
    """One scan."""

    found: list[int]
    """Bytes of values, rows, the largest offset."""
    seconds: float
    brokers_s: float
    """CPU time."""
    spark_s: float
    """CPU time."""


class Objects(NamedTuple):
    """Where a topic's records are."""

    stored: list[tuple[str, int]]
    """Keys and sizes."""
    bucket: dict[str, str]
    """The settings for `open_bucket`."""


class Measured:
    """A cluster and a Spark."""

    def __init__(self, cluster: TidelogCluster, one: Bucket, bucket_path: Path, spark: Spark) -> None:
        self._pids = list(cluster.broker_pids().values())
        self._bootstrap = cluster.bootstrap
        self._connection = ClusterConnection(cluster.bootstrap)
        self._spark = spark
        self._token = Cli(cluster.bootstrap)("cluster", "read-token").text.strip()
        self._bucket = {EMBEDDED: bucket_path.as_uri()}
        if one.s3.endpoint:
            self._bucket = {"endpoint": one.s3.endpoint, "bucket": one.s3.bucket}

    def fill(self, topic: str, record_bytes: int, size: int) -> None:
        """Create a topic and write `size` bytes of values, until all of it is in the bucket."""
        create_topic(self._bootstrap, topic, PARTITIONS)
        leaders(self._bootstrap, topic)
        started = time.perf_counter()
        in_process(write_records, self._bootstrap, topic, record_bytes, size // record_bytes)
        records = records_in(self._bootstrap, topic, PARTITIONS)
        assert records == size // record_bytes, f"{records} records are in the log"

        def is_uploaded() -> bool:
            for node in self._connection.get("/brokers")["brokers"]:
                self._connection.at(node["admin_url"], node["id"]).post("/upload")
            return sum(int(each["committed_end"]) for each in self._ranges(topic)[1]) == records

        until(is_uploaded, 120)
        print(f"  {topic}: {records:,} records in {time.perf_counter() - started:.0f} s", flush=True)

    def _ranges(self, topic: str) -> tuple[str, list[dict[str, Any]]]:
        asked = [{"topic": topic, "partition": index} for index in range(PARTITIONS)]
        told = self._connection.post("/slices", {"ranges": asked})
        assert told["next"] is None, "the answer is not complete"
        return told["cluster_id"], told["ranges"]

    def objects(self, topic: str) -> Objects:
        """Return where a topic is."""
        cluster_id, ranges = self._ranges(topic)
        sizes = {each[0]: each[2] for one in ranges for each in one["slices"]}
        return Objects([(object_key(cluster_id, each), size) for each, size in sorted(sizes.items())], self._bucket)

    def _ask(self, step: str, **arguments: Any) -> Any:
        told = self._spark.ask(call=f"bench._spark_steps:{step}", **{"with": arguments})
        assert "ok" in told, told["error"]
        return told["ok"]

    def options(self, topic: str, **more: str) -> dict[str, str]:
        """Options that both sources know."""
        found = {"kafka.bootstrap.servers": self._bootstrap, "subscribe": topic, "startingOffsets": "earliest"}
        return {**found, **more}

    def tidelog_options(self, topic: str) -> dict[str, str]:
        """Options of the data source `tidelog`."""
        return self.options(topic, readToken=self._token)

    def tasks(self, source: str, options: Mapping[str, str]) -> int:
        """The number of tasks of a read."""
        return int(self._ask("tasks", source=source, options=options))

    def scan(self, source: str, options: Mapping[str, str], schema: str = "") -> Scan:
        """Scan a topic once."""
        settle_all(self._pids)
        before = self._brokers_s()
        told = self._ask("scan", source=source, options=options, schema=schema)
        return Scan(told["found"], told["seconds"], self._brokers_s() - before, told["cpu_s"])

    def idle_share(self) -> float:
        """The part of a core that the brokers use when nobody asks them."""
        settle_all(self._pids)
        before = self._brokers_s()
        time.sleep(IDLE_S)
        return (self._brokers_s() - before) / IDLE_S

    def _brokers_s(self) -> float:
        return sum(map(cpu_seconds, self._pids))


def write_records(bootstrap: str, topic: str, record_bytes: int, count: int, put: Callable[[Any], None]) -> None:
    """Write so many records, of `VALUES` different ones in turns. In a process of its own."""
    from confluent_kafka import KafkaException, Producer

    def failed(error: Any) -> None:
        raise KafkaException(error)

    chance = random.Random(record_bytes)
    values = [json_value(chance, record_bytes) for _ in range(VALUES)]
    rows = [{"key": b"%08x" % chance.getrandbits(32), "value": value} for value in values]
    groups = [rows[at : at + AT_ONCE] for at in range(0, VALUES, AT_ONCE)]
    producer = Producer({"bootstrap.servers": bootstrap, "error_cb": failed, **LIBRDKAFKA})
    for number, at in enumerate(range(0, count, AT_ONCE)):
        group = groups[number % len(groups)][: count - at]
        assert producer.produce_batch(topic, group) == len(group), "librdkafka's queue is full"
        producer.poll(0)
        while len(producer) > UNACKNOWLEDGED:
            producer.poll(0.01)
    flush(producer)
    put(count)


def json_value(chance: random.Random, size: int) -> bytes:
    """Return a value of so many bytes with names that repeat and contents that do not."""
    text = f'{{"id":{chance.getrandbits(40)},"state":"{chance.choice(("new", "paid", "sent"))}","note":"'
    while len(text) < size - 2:
        text += f"{chance.choice(WORDS)} {chance.getrandbits(24):x} "
    return (text[: size - 2] + '"}').encode()


WORDS = ("order", "customer", "delivery", "address", "invoice", "amount", "warehouse", "carrier")


def raw_gets(objects: Objects, put: Callable[[Any], None]) -> None:
    """Put (bytes, seconds) of GETs of all objects. In a process of its own."""

    async def run() -> tuple[int, float]:
        store = open_bucket(objects.bucket)
        started = time.perf_counter()
        got = await get_all(store, objects.stored, RUN_BYTES, CORES * RUNS_AHEAD)
        seconds = time.perf_counter() - started
        await store.close()
        return got, seconds

    put(asyncio.run(run()))


def report(what: str, runs: Mapping[str, Sequence[Any]], objects: Objects, idle_share: float) -> None:
    """Print the medians of a topic's scans, and their ratios."""
    scans: dict[str, Sequence[Scan]] = {name: found for name, found in runs.items() if name != "raw"}
    results = {tuple(each.found) for found in scans.values() for each in found}
    assert len(results) == 1, f"the sources disagree: {results}"
    ((value_bytes, rows, _),) = results
    speed = {name: Spread.of(rows / each.seconds / 1e6 for each in found) for name, found in scans.items()}
    brokers = {name: Spread.of(each.brokers_s for each in found) for name, found in scans.items()}
    caused = {
        name: Spread.of(max(0.0, each.brokers_s - idle_share * each.seconds) for each in found)
        for name, found in scans.items()
    }
    for name, found in scans.items():
        seconds = Spread.of(each.seconds for each in found)
        print(
            f"  {name:12s} {speed[name].text('million rows/s', 2)}, {value_bytes / 1e6 / seconds.median:,.0f} MB/s of"
            f" values, {seconds.text('s', 1)}; CPU: brokers {brokers[name].text('s', 2)}, above idle"
            f" {caused[name].median:.2f} s, Spark {Spread.of(each.spark_s for each in found).text('s', 1)}",
            flush=True,
        )
    for columns, name in product(("tidelog", "tidelog_two"), ("kafka", "kafka_tasks")):
        ratio = speed[columns].median / speed[name].median
        row(
            f"Spark scans {what}, {'all columns' if columns == 'tidelog' else 'the two that it uses'},"
            f" {'its tasks' if name == 'kafka' else 'as many tasks'}",
            speed[columns].text("million rows/s", 2),
            limit=f"Kafka source {speed[name].text('million rows/s', 2)}",
            ratio=f"{ratio:.2f}",
            goal=f"≥ {GOAL_SPEED:g}",
            holds=ratio >= GOAL_SPEED,
        )
    ratio = brokers["tidelog"].median / brokers["kafka"].median
    row(
        f"brokers' CPU while Spark scans {what}",
        brokers["tidelog"].text("s", 2),
        limit=f"Kafka source {brokers['kafka'].text('s', 2)}",
        ratio=f"{ratio:.3f} (above idle {caused['tidelog'].median / max(caused['kafka'].median, 0.01):.3f})",
        goal=f"≤ {GOAL_BROKERS:g}",
        holds=ratio <= GOAL_BROKERS,
    )
    stored = sum(size for _, size in objects.stored)
    raw = Spread.of(got / 1e6 / seconds for got, seconds in runs["raw"])
    ours = Spread.of(stored / 1e6 / each.seconds for each in scans["tidelog"])
    row(
        f"stored bytes while Spark scans {what}",
        ours.text("MB/s"),
        limit=f"bare GETs {raw.text('MB/s')}",
        ratio=f"{ours.median / raw.median:.2f}",
    )


def measure(found: Measured, args: argparse.Namespace) -> None:
    sizes = [int(each) for each in args.record_bytes.split(",")]
    topics = {f"records-of-{size}": size for size in sizes}
    for topic, size in topics.items():
        found.fill(topic, size, int(args.mb * 1e6))
    for topic in topics:
        found.scan("tidelog", found.tidelog_options(topic))
        found.scan("kafka", found.options(topic))
    idle_share = found.idle_share()
    print(f"  idle brokers use {100 * idle_share:.1f} % of a core", flush=True)
    for topic, size in topics.items():
        ours, objects = found.tidelog_options(topic), found.objects(topic)
        count = found.tasks("tidelog", ours)
        as_many = found.options(topic, minPartitions=str(count))
        stored = sum(each for _, each in objects.stored)
        print(
            f"  {topic}: {len(objects.stored)} objects of {stored / 1e6:,.0f} MB, {count} tasks; Kafka source"
            f" {found.tasks('kafka', found.options(topic))} and {found.tasks('kafka', as_many)}",
            flush=True,
        )
        phases: dict[str, Callable[[], Any]] = {
            "tidelog": partial(found.scan, "tidelog", ours),
            "tidelog_two": partial(found.scan, "tidelog", ours, USED),
            "kafka": partial(found.scan, "kafka", found.options(topic)),
            "kafka_tasks": partial(found.scan, "kafka", as_many),
            "raw": partial(in_process, raw_gets, objects),
        }
        report(f"records of {size} B", interleaved(args.runs, **phases), objects, idle_share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=100 if quick() else 1_000, help="of values, in each topic")
    parser.add_argument("--bucket", choices=KINDS, default="minio")
    parser.add_argument("--runs", type=int, default=1 if quick() else 3)
    parser.add_argument("--record-bytes", default="100,1024", help="sizes of values, with commas")
    args = parser.parse_args()
    connector = install("spark_kafka")
    jars = ",".join(str(each) for each in sorted((connector / "jars").iterdir()))
    os.environ.update(environment())
    with bucket(args.bucket) as one, directory() as place:
        settings = [*SETTINGS, *one.flags()[1::2]]
        cluster = TidelogCluster(place / "cluster", 1, settings)
        with (
            running(cluster),
            Spark(place / "spark", more={"spark.jars": jars}, path=str(connector / "python")) as spark,
        ):
            measure(Measured(cluster, one, place / "cluster" / "bucket", spark), args)


if __name__ == "__main__":
    main()
