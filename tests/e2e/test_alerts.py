"""Each alert fires by its fault: metrics of real brokers, scraped while the fault goes on, evaluated by Prometheus' own
promtool. Before the fault none of them fires.

The rules are those of `tools.alerts` with all durations divided, so that minutes pass in seconds; nothing else is
changed. The expressions, and what the texts of the alerts say then, are as in `deploy/prometheus/alerts.yml`.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from tests.e2e.backends import QUIET, create_topic, faulty_proxy, s3_flags
from tests.e2e.test_quarantine import quarantine
from tests.support import schema
from tests.support.bit_flips import bit_flip
from tests.support.certificates import Authority
from tests.support.cli import Cli
from tests.support.clients import wait_until
from tests.support.kafka_client import KafkaClient
from tests.support.kafka_world import batch
from tests.support.missing import lacking
from tests.support.ports import free_port
from tests.support.s3_servers import S3Server
from tests.support.scrapes import Rules, Scrapes, targets
from tests.support.tidelog_process import READY_PREFIX, TidelogProcess, running
from tidelog.chaos.faulty_s3 import Fault
from tidelog.chaos.serve_cluster import eventually
from tidelog.testing import LocalBroker, LocalCluster
from tools.alerts import alerts
from tools.monitoring import JOB, ROOT
from tools.promql import Catalogue

pytestmark = [pytest.mark.long, pytest.mark.slow]

FASTER = 30.0
"""A minute passes in two seconds, five in ten."""
CALM_TICKS = 8
DEADLINE_S = 120.0
ALERTS = {
    alert.name: alert for group in alerts(Catalogue.read(ROOT / "docs" / "metrics.md"), JOB).values() for alert in group
}
FIRED: set[str] = set()
"""The alerts that a test below fires."""


def fires(*names: str) -> pytest.MarkDecorator:
    """A test with the fault by which these alerts fire; it gets them as `names`."""
    FIRED.update(names)
    return pytest.mark.parametrize("names", [names], ids=["-".join(name.removeprefix("Tidelog") for name in names)])


class Watched:
    """Brokers that are scraped, and the alerts that are expected of them."""

    def __init__(self, scrapes: Scrapes, rules: Rules) -> None:
        self._scrapes = scrapes
        self._rules = rules

    def calm(self) -> None:
        """See that none of the alerts fires yet."""
        wait_until(lambda: self._scrapes.ticks >= CALM_TICKS, "the first scrapes")
        at = self._scrapes.ticks - 1
        assert self._rules.firing(self._scrapes, at) == set()

    def fired(self, *names: str, while_waiting: Callable[[], object] = lambda: time.sleep(0.5)) -> None:
        """Wait until they all fire, and look at what they say."""
        deadline = time.monotonic() + DEADLINE_S
        left = set(names)
        while True:
            at = self._scrapes.ticks - 1
            firing = self._rules.firing(self._scrapes, at) & left
            for name in firing:
                said = self._rules.told(self._scrapes, name, at)
                for wrong in ("error expanding", "<no value>", "$VALUE", "NaN"):
                    assert wrong not in said, said
            left -= firing
            if not left:
                return
            assert time.monotonic() < deadline, f"these do not fire: {sorted(left)}"
            while_waiting()


@contextmanager
def watched(
    promtool: Path, folder: Path, urls: Mapping[str, str], names: tuple[str, ...], faster: float = FASTER
) -> Iterator[Watched]:
    (folder / "rules").mkdir()
    rules = Rules(promtool, folder / "rules", [ALERTS[name] for name in names], faster)
    with Scrapes(urls, rules.metrics) as scrapes:
        yield Watched(scrapes, rules)


def produce(bootstrap: str, topic: str, values: list[bytes], timeout_s: float = 30, **config: object) -> int:
    """Write records; how many were not acknowledged in time."""
    producer = Producer({"bootstrap.servers": bootstrap, **QUIET, **config})
    for value in values:
        with suppress(BufferError):
            producer.produce(topic, value)
    return int(producer.flush(timeout_s))


def random_bytes(count: int, size: int, seed: int = 1) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(size) for _ in range(count)]


# --- the files themselves -----------------------------------------------------------------------------------------


def test_each_alert_has_a_fault_below() -> None:
    assert set(ALERTS) - FIRED == set()


def test_promtool_takes_the_files(promtool: Path, tmp_path: Path) -> None:
    folder = ROOT / "deploy" / "prometheus"
    for kind, name in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        done = subprocess.run([promtool, "check", kind, folder / name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert str(len(ALERTS)) in done.stdout
    broken = tmp_path / "alerts.yml"
    broken.write_text((folder / "alerts.yml").read_text(encoding="utf-8").replace('up{job="tidelog"} == 0', "up{"))
    assert subprocess.run([promtool, "check", "rules", broken], capture_output=True, check=False).returncode != 0


def test_the_rules_as_they_are_pass_their_own_tests(promtool: Path) -> None:
    """Times, thresholds and texts of the committed file, by series that somebody wrote down."""
    done = subprocess.run(
        [promtool, "test", "rules", "alerts_test.yml"],
        cwd=ROOT / "deploy" / "prometheus",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tested = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts_test.yml").read_text(encoding="utf-8"))
    assert len(tested["tests"]) >= 4


# --- brokers and controllers --------------------------------------------------------------------------------------


@fires("TidelogBrokerDown", "TidelogReplicasMissing", "TidelogReplicaSetDegraded")
def test_a_broker_is_killed(promtool: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    settings = {"replication.in_sync_replicas": 3, "replication.enable_auto_in_sync_replicas": True}
    with LocalCluster(3, settings=settings) as cluster:
        cluster.create_topic("t", partitions=3)
        assert produce(cluster.bootstrap, "t", [b"x"] * 10) == 0
        with watched(promtool, tmp_path, targets(cluster.bootstrap), names) as watch:
            watch.calm()
            cluster.kill(3)
            watch.fired(*names)


@fires("TidelogNoActiveController", "TidelogReplicaSetRefuses", "TidelogClientErrors")
def test_two_of_three_nodes_are_killed(promtool: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    with LocalCluster(3) as cluster:
        cluster.create_topic("t", partitions=3)
        assert produce(cluster.bootstrap, "t", [b"x"] * 10) == 0
        led_by_1 = next(each for each in range(3) if cluster.leader("t", each) == 1)
        with watched(promtool, tmp_path, targets(cluster.bootstrap), names) as watch:
            watch.calm()
            cluster.kill(2)
            cluster.kill(3)
            producer = Producer({"bootstrap.servers": cluster.address(1), "retry.backoff.ms": 200, **QUIET})

            def write() -> None:
                producer.produce("t", b"y", partition=led_by_1)
                producer.poll(0.2)

            watch.fired(*names, while_waiting=write)
            producer.purge()


@fires("TidelogPartitionsLeaderless", "TidelogTransactionMarkersWait")
def test_a_broker_is_killed_whose_wal_is_on_its_disk_alone(
    promtool: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    with LocalCluster(2, settings={"group.transaction_topic_partitions": 1}) as cluster:
        cluster.create_topic("t", partitions=2)
        producer = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": "t", **QUIET})
        producer.init_transactions(60)
        cluster.move("__transaction_state", 0, to=1)
        for partition in (0, 1):
            if cluster.leader("t", partition) != partition + 1:
                cluster.move("t", partition, to=partition + 1)
        producer.begin_transaction()
        for partition in (0, 1):
            producer.produce("t", b"x", partition=partition)
        producer.flush(60)
        with watched(promtool, tmp_path, targets(cluster.bootstrap), names) as watch:
            watch.calm()
            cluster.kill(2)
            producer.commit_transaction(60)
            watch.fired(*names)


@fires("TidelogBrokerRestarts")
def test_a_broker_ends_again_and_again(promtool: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    with (
        LocalBroker(child=True, settings={"admin.port": free_port()}) as broker,
        watched(promtool, tmp_path, targets(broker.bootstrap), names, faster=10) as watch,
    ):
        watch.calm()
        for _ in range(4):
            broker.kill()
            broker.restart()
            time.sleep(1.5)  # scraped in between
        watch.fired(*names)


# --- the bucket ---------------------------------------------------------------------------------------------------


@fires(
    "TidelogUploadsStalled",
    "TidelogOperationFails",
    "TidelogProducersWillWait",
    "TidelogProduceSlow",
)
def test_the_bucket_refuses_and_memory_fills(promtool: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    settings = {"cache.log_bytes": 4 << 20, "upload.age_ms": 200, "upload.size_bytes": 1 << 20}
    with LocalBroker(settings=settings) as broker:
        broker.create_topic("t")
        assert produce(broker.bootstrap, "t", [b"x"]) == 0
        with watched(promtool, tmp_path, targets(broker.bootstrap), names) as watch:
            watch.calm()
            broker.bucket.fail(403)
            produce(broker.bootstrap, "t", random_bytes(40, 100_000), 5, **{"request.timeout.ms": 3000})
            producer = Producer({"bootstrap.servers": broker.bootstrap, "request.timeout.ms": 3000, **QUIET})

            def write() -> None:
                with suppress(BufferError):
                    producer.produce("t", bytes(100_000))
                producer.poll(0.5)

            watch.fired(*names, while_waiting=write)
            producer.purge()
            broker.bucket.heal()


@fires("TidelogBucketErrors")
def test_the_bucket_denies_writes(
    promtool: Path, tmp_path: Path, names: tuple[str, ...], moto_server: S3Server
) -> None:
    flags = ("--set", "upload.age_ms=200")
    with faulty_proxy(moto_server) as proxy, running(tmp_path / "data", [*s3_flags(proxy.server), *flags]) as process:
        create_topic(process.bootstrap, "t")
        with watched(promtool, tmp_path, targets(process.bootstrap), names) as watch:
            watch.calm()
            denied = Fault(status=403, code="AccessDenied")
            proxy.fault = lambda seen: denied if seen.method in ("PUT", "POST") else None
            watch.fired(*names, while_waiting=lambda: produce(process.bootstrap, "t", [b"x"]))
            proxy.fault = lambda seen: None


@fires("TidelogBucketSlow")
def test_the_bucket_is_slow(promtool: Path, tmp_path: Path, names: tuple[str, ...], moto_server: S3Server) -> None:
    flags = ("--set", "upload.age_ms=100", "--set", "s3.request_timeout_ms=30000")
    with faulty_proxy(moto_server) as proxy, running(tmp_path / "data", [*s3_flags(proxy.server), *flags]) as process:
        create_topic(process.bootstrap, "t")
        with watched(promtool, tmp_path, targets(process.bootstrap), names, faster=10) as watch:
            watch.calm()
            proxy.fault = lambda seen: Fault(delay_s=6.0) if seen.method == "PUT" else None
            watch.fired(*names, while_waiting=lambda: produce(process.bootstrap, "t", [b"x"]))
            proxy.fault = lambda seen: None


def in_the_bucket(process: TidelogProcess, topic: str, part: str) -> list[dict[str, Any]]:
    """The blocks of a part of a topic's first partition, each with the key of its object."""
    cli = Cli(process.bootstrap)
    return [
        {**block, "key": one["key"]}
        for one in cli("object", "list", "--format", "json").json()
        for block in cli("object", "inspect", one["id"], "--format", "json").json()["blocks"]
        if (block["topic"], block["partition"], block["part"]) == (topic, 0, part)
    ]


@fires("TidelogDataDamaged", "TidelogObjectsNotCompacted", "TidelogPartitionsUncleanable")
def test_a_bit_of_the_bucket_is_flipped(promtool: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    data_dir, port = tmp_path / "data", free_port()
    quiet = ("--set", "compaction.enabled=false", "--set", "log.cleaner_enabled=false", "--set", "upload.age_ms=100")
    compacted = {"cleanup.policy": "compact", "segment.ms": "200", "min.cleanable.dirty.ratio": "0.01"}
    with running(data_dir, quiet, port=port) as process:
        create_topic(process.bootstrap, "t", 1, **compacted)
        producer = Producer({"bootstrap.servers": process.bootstrap, **QUIET})
        for number in range(30):
            producer.produce("t", random.Random(number).randbytes(500), key=b"%d" % (number % 3))
            producer.flush(30)
            time.sleep(0.05)  # segments roll by time
        wait_until(lambda: len(in_the_bucket(process, "t", "data")) >= 4, "several objects")
        assert process.stop() == 0, process.tail()
    with running(data_dir, quiet, port=port) as process:
        block = in_the_bucket(process, "t", "data")[1]
        assert process.stop() == 0, process.tail()
    busy = (
        "--set",
        "compaction.interval_ms=200",
        "--set",
        "compaction.min_objects=2",
        "--set",
        "log.cleaner_interval_ms=200",
    )
    with ExitStack() as stack:
        process = stack.enter_context(running(data_dir, quiet, port=port))
        urls = targets(process.bootstrap)
        watch = stack.enter_context(watched(promtool, tmp_path, urls, names))
        watch.calm()
        assert process.stop() == 0, process.tail()
        stack.enter_context(bit_flip(data_dir / "bucket" / block["key"], (block["position"] + 10) * 8))
        admin = next(iter(urls.values())).rpartition("/")[0].rpartition(":")[2]
        process = stack.enter_context(running(data_dir, [*busy, "--set", f"admin.port={admin}"], port=port))

        def read() -> None:
            consumer = Consumer({"bootstrap.servers": process.bootstrap, "group.id": "g", "check.crcs": True, **QUIET})
            consumer.assign([TopicPartition("t", 0, 0)])
            consumer.consume(100, 1.0)
            consumer.close()

        watch.fired(*names, while_waiting=read)


@fires("TidelogPartitionsNotOpen")
def test_what_a_partition_must_read_first_is_damaged(promtool: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    data_dir, port, admin = tmp_path / "data", free_port(), free_port()
    flags = ("--set", "compaction.enabled=false", "--set", "upload.age_ms=100", "--set", f"admin.port={admin}")
    with running(data_dir, flags, port=port) as process:
        create_topic(process.bootstrap, "t")
        assert produce(process.bootstrap, "t", [b"x"] * 10) == 0
        assert process.stop() == 0, process.tail()
    with ExitStack() as stack:
        process = stack.enter_context(running(data_dir, flags, port=port))
        watch = stack.enter_context(watched(promtool, tmp_path, targets(process.bootstrap), names))
        watch.calm()
        blocks = in_the_bucket(process, "t", "meta")
        assert process.stop() == 0, process.tail()
        for key, position in {block["key"]: block["position"] for block in blocks}.items():
            stack.enter_context(bit_flip(data_dir / "bucket" / key, (position + 10) * 8))
        stack.enter_context(running(data_dir, flags, port=port))
        watch.fired(*names)


@fires("TidelogStreamsQuarantined")
def test_a_stream_is_quarantined(promtool: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    data_dir = tmp_path / "data"
    with running(data_dir, ("--set", "upload.age_ms=100")) as process:
        create_topic(process.bootstrap, "t")
        assert produce(process.bootstrap, "t", [b"x"] * 10) == 0
        with watched(promtool, tmp_path, targets(process.bootstrap), names) as watch:
            watch.calm()
            asyncio.run(quarantine(data_dir, "t", "data"))
            short = {"message.timeout.ms": 500}
            watch.fired(*names, while_waiting=lambda: produce(process.bootstrap, "t", [b"y"], 1, **short))


@fires("TidelogCompactionBehind")
def test_compaction_is_throttled_too_hard(promtool: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    settings = {
        "upload.age_ms": 50,
        "compaction.interval_ms": 200,
        "compaction.min_objects": 2,
        "compaction.max_objects": 4,
        "compaction.throttle_bytes_per_s": 1024,
    }
    with LocalBroker(settings=settings) as broker:
        broker.create_topic("t")
        with watched(promtool, tmp_path, targets(broker.bootstrap), names, faster=3000) as watch:
            watch.calm()
            for value in random_bytes(40, 20_000):
                assert produce(broker.bootstrap, "t", [value]) == 0
            watch.fired(*names)


# --- clients ------------------------------------------------------------------------------------------------------


@fires("TidelogConnectionsNearLimit", "TidelogConnectionsRefused")
def test_clients_open_too_many_connections(promtool: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    with LocalBroker(settings={"kafka.max_connections": 20}) as broker, ExitStack() as stack:
        address = broker.bootstrap.rpartition(":")
        with watched(promtool, tmp_path, targets(broker.bootstrap), names) as watch:
            watch.calm()
            for _ in range(18):
                stack.enter_context(socket.create_connection((address[0], int(address[2]))))
            watch.fired("TidelogConnectionsNearLimit")

            def open_more() -> None:
                for _ in range(5):
                    stack.enter_context(socket.create_connection((address[0], int(address[2]))))
                time.sleep(0.5)

            watch.fired("TidelogConnectionsRefused", while_waiting=open_more)


async def prepare(bootstrap: str) -> None:
    """Begin a transaction that only its client may end (KIP-939), and write to it."""
    host, _, port = bootstrap.rpartition(":")
    name = {"transactional_id": "two-phase"}
    async with KafkaClient(host, int(port)) as client:

        async def begun() -> Any:
            while True:
                await client.send(10, 4, key_type=1, coordinator_keys=("two-phase",))  # makes the topic of transactions
                found = await client.send(22, 6, **name, transaction_timeout=60_000, enable2_pc=True)
                if found.error_code == 0:
                    return found
                said.append(found.error_code)
                await asyncio.sleep(0.2)

        said: list[int] = []
        try:
            producer = await asyncio.wait_for(begun(), 60)
        except TimeoutError:
            raise AssertionError(f"no producer id: {said[-3:]}") from None
        ids = {"producer_id": producer.producer_id, "producer_epoch": producer.producer_epoch}
        added = schema.request(24, 3).make("AddPartitionsToTxnTopic", name="t", partitions=(0,))
        old = {f"v3_and_below_{key}": value for key, value in {**name, **ids, "topics": (added,)}.items()}
        await client.send(24, 3, **old)
        records = batch(b"v", base_sequence=0, transactional=True, **ids)
        make = schema.request(0, 9).make
        data = make("PartitionProduceData", index=0, records=records)
        topic = make("TopicProduceData", name="t", partition_data=(data,))
        answer = await client.send(0, 9, **name, acks=-1, timeout=30_000, topic_data=(topic,))
        assert [one.error_code for each in answer.responses for one in each.partition_responses] == [0]


@fires("TidelogTransactionsHanging")
def test_a_prepared_transaction_is_decided_by_nobody(promtool: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    with LocalBroker(settings={"group.transaction_two_phase_commit": True}) as broker:
        broker.create_topic("t")
        with watched(promtool, tmp_path, targets(broker.bootstrap), names) as watch:
            asyncio.run(prepare(broker.bootstrap))
            watch.calm()
            broker.clock.skew(7200)
            watch.fired(*names)


@fires("TidelogConsumerLagGrows")
def test_a_consumer_falls_behind(promtool: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    """It commits one record, and is gone; the producer goes on."""
    values = [b"x" * 10] * 5000
    with running(tmp_path / "data") as process:
        create_topic(process.bootstrap, "t")
        produce(process.bootstrap, "t", values[:1])
        consumer = Consumer({"bootstrap.servers": process.bootstrap, "group.id": "behind", **QUIET})
        consumer.commit(offsets=[TopicPartition("t", 0, 1)], asynchronous=False)
        consumer.close()
        with watched(promtool, tmp_path, targets(process.bootstrap), names) as watch:
            watch.calm()
            watch.fired(*names, while_waiting=lambda: produce(process.bootstrap, "t", values))


# --- hosts and load -----------------------------------------------------------------------------------------------


@fires("TidelogClocksDiffer")
def test_the_clock_of_a_broker_is_set_ahead(promtool: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    """To Prometheus two brokers are of one cluster if their labels say so, which is all that this alert looks at."""
    with LocalBroker() as one, LocalBroker() as other:
        urls = {name: url for name, each in {"a": one, "b": other}.items() for url in targets(each.bootstrap).values()}
        with watched(promtool, tmp_path, urls, names) as watch:
            watch.calm()
            other.clock.skew(60)
            watch.fired(*names)


@fires("TidelogCertificateExpires")
def test_a_certificate_is_replaced_by_one_that_ends_soon(
    promtool: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    authority = Authority(tmp_path / "tls")
    issued = authority.issue("broker", days=29)
    settings = {f"replication.tls_{name}": str(getattr(issued, name)) for name in ("cert_file", "key_file", "ca_file")}
    with (
        LocalBroker(settings=settings) as broker,
        watched(promtool, tmp_path, targets(broker.bootstrap), names) as watch,
    ):
        watch.calm()
        authority.issue("broker", days=13)
        watch.fired(*names)


@fires("TidelogUnexpectedErrors")
def test_the_operating_system_answers_what_nobody_expects(
    promtool: Path, tmp_path: Path, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalBroker(settings={"upload.age_ms": 200}) as broker:
        broker.create_topic("t")
        with watched(promtool, tmp_path, targets(broker.bootstrap), names) as watch:
            watch.calm()

            real = os.fstat

            def fstat(descriptor: int) -> os.stat_result:
                if "/bucket/" in os.readlink(f"/proc/self/fd/{descriptor}"):
                    raise RuntimeError("as the test wants it")
                return real(descriptor)

            monkeypatch.setattr(os, "fstat", fstat)
            assert produce(broker.bootstrap, "t", [b"x"]) == 0
            watch.fired(*names)
            monkeypatch.undo()


@contextmanager
def on_small_disk(directory: Path, megabytes: int) -> Iterator[tuple[TidelogProcess, Path]]:
    """Tidelog over a file system of this size, in a mount namespace of its own, and the way into it from here."""
    unshare = shutil.which("unshare")
    check = [unshare or "unshare", "--user", "--map-root-user", "--mount", "true"]
    if unshare is None or subprocess.run(check, capture_output=True, check=False).returncode != 0:
        lacking("a mount namespace of one's own (unshare --user --mount)")
    directory.mkdir()
    port = free_port()
    settings = ["--set", "wal.segment_bytes=1048576"]
    run = f'mount -t tmpfs -o size={megabytes}m none \'{directory}\' && exec "$0" "$@"'
    tidelog = [sys.executable, "-m", "tidelog", "up", "--data-dir", str(directory / "data"), "--kafka-port", str(port)]
    command = [*check[:-1], "sh", "-c", run, *tidelog, *settings]
    output = directory.with_suffix(".out")
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    try:
        eventually(lambda: READY_PREFIX in output.read_text(), 60)
        known = TidelogProcess(directory / "data", port=port)
        yield known, Path(f"/proc/{process.pid}/root{directory}")
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


@fires("TidelogDiskNearlyFull")
def test_the_disk_fills(promtool: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    with (
        on_small_disk(tmp_path / "small", 256) as (process, way_in),
        watched(promtool, tmp_path, targets(process.bootstrap), names) as watch,
    ):
        watch.calm()
        status = os.statvfs(way_in)
        (way_in / "fill").write_bytes(bytes(int(status.f_bavail * status.f_frsize - 0.05 * 256 * (1 << 20))))
        watch.fired(*names)


@fires("TidelogBrokersWanted")
def test_the_load_outgrows_the_brokers(promtool: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    settings = {"scale.broker_bytes_in_per_s": 10_000, "scale.up_window_ms": 0}
    with LocalBroker(settings=settings) as broker:
        broker.create_topic("t")
        with watched(promtool, tmp_path, targets(broker.bootstrap), names) as watch:
            watch.calm()
            values = random_bytes(10, 10_000)
            watch.fired(*names, while_waiting=lambda: produce(broker.bootstrap, "t", values))


def test_nothing_fires_in_a_cluster_that_is_well(promtool: Path, tmp_path: Path) -> None:
    """Thirty times faster, so it says something of holds and rates, and nothing of load."""
    names = tuple(sorted(ALERTS))
    with LocalCluster(3, settings={"upload.age_ms": 1000}) as cluster:
        cluster.create_topic("t", partitions=3)
        with watched(promtool, tmp_path, targets(cluster.bootstrap), names) as watch:
            until = time.monotonic() + 30
            while time.monotonic() < until:
                assert produce(cluster.bootstrap, "t", random_bytes(10, 1000)) == 0
                with suppress(KafkaException):
                    Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "g", **QUIET}).close()
            watch.calm()
