"""Brokers for the tests of an application: what they serve, their faults, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, KafkaException, Message, Producer

import tidelog.testing
from tests.support.bucket_files import bucket_files
from tests.support.cluster_process import eventually
from tidelog.process.data_dir import WrongDataDirectory
from tidelog.runtime.errors import AlreadyExists, ConfigError, InvalidInput
from tidelog.testing import (
    AsyncLocalBroker,
    BrokerEnded,
    LocalBroker,
    LocalBucket,
    LocalClock,
    LocalCluster,
    NotPossibleHere,
)

pytestmark = pytest.mark.processes
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60


def test_a_broker_is_restarted_wherever_its_test_has_gone_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    with LocalBroker(child=True, directory="data") as broker:
        broker.create_topic("t", partitions=1)
        produce(broker.bootstrap, "t", b"kept")
        os.chdir(gone)
        broker.restart()
        gone.rmdir()
        broker.restart()
        assert [message.value() for message in consume(broker.bootstrap, "t", 1)] == [b"kept"]
    assert (tmp_path / "data").is_dir()


def produce(bootstrap: str, topic: str, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0})
    errors: list[object] = []
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, message: errors.append(error))
    assert producer.flush(WAIT_S) == 0
    assert len(errors) == len(values) and all(error is None for error in errors), errors


def consume(bootstrap: str, topic: str, count: int) -> list[Message]:
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": f"of-{topic}", "auto.offset.reset": "earliest", "log_level": 0}
    )
    try:
        consumer.subscribe([topic])
        found: list[Message] = []
        deadline = time.monotonic() + WAIT_S
        while len(found) < count:
            assert time.monotonic() < deadline, found
            message = consumer.poll(1)
            if message is not None:
                assert message.error() is None, message.error()
                found.append(message)
        return found
    finally:
        consumer.close()


def values(messages: list[Message]) -> list[bytes | None]:
    return [message.value() for message in messages]


def runs(pid: int) -> bool:
    """Whether the process runs; one that has ended may wait for an init that collects it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_broker_in_this_process_serves_restarts_on_its_port_and_leaves_nothing() -> None:
    before = set(threading.enumerate())
    with LocalBroker() as broker:
        broker.create_topic("orders", partitions=2)
        with pytest.raises(AlreadyExists):
            broker.create_topic("orders")
        address = broker.bootstrap
        produce(address, "orders", b"one")
        broker.restart()
        assert broker.bootstrap == address
        produce(address, "orders", b"two")
        assert sorted(map(bytes, filter(None, values(consume(address, "orders", 2))))) == [b"one", b"two"]
        folder, port = broker.directory, int(address.rpartition(":")[2])
        assert listens(port) and folder.exists()
    assert not listens(port) and not folder.exists()
    assert [one for one in threading.enumerate() if one not in before and one.name.startswith("tidelog")] == []


IN_BOTH = pytest.mark.parametrize("child", [False, True], ids=["here", "child"])


@IN_BOTH
def test_a_bucket_that_fails_delays_uploads_and_no_writes(child: bool) -> None:
    with LocalBroker(child=child, settings={"upload.age_ms": 50}) as broker:
        broker.create_topic("orders")
        objects = broker.directory / "data" / "bucket"

        def uploaded() -> set[Path]:
            return {file for file in bucket_files(objects) if "/data/" in file.as_posix()}

        before = uploaded()
        broker.bucket.fail(503, operations=["put"])
        produce(broker.bootstrap, "orders", b"kept")
        eventually(lambda: broker.bucket.struck > 1, WAIT_S)
        assert uploaded() == before
        broker.bucket.heal()
        eventually(lambda: uploaded() > before, WAIT_S)
        assert values(consume(broker.bootstrap, "orders", 1)) == [b"kept"]
        with pytest.raises(InvalidInput, match="418"):
            broker.bucket.fail(418)
        with pytest.raises(InvalidInput, match="rename"):
            broker.bucket.slow(0.1, operations=["rename"])


def test_a_fault_of_the_bucket_ends_by_time() -> None:
    with LocalBroker(settings={"upload.age_ms": 50}) as broker:
        broker.bucket.fail(503, seconds=0.3)
        rule = broker.bucket.rule
        assert rule.strikes("put")
        eventually(lambda: not rule.strikes("put"), 5)


@IN_BOTH
def test_a_clock_that_is_ahead_shows_in_the_timestamps_of_a_broker(child: bool) -> None:
    with LocalBroker(child=child) as broker:
        broker.create_topic("stamped", config={"message.timestamp.type": "LogAppendTime"})
        broker.clock.skew(3_600)
        produce(broker.bootstrap, "stamped", b"later")
        broker.clock.heal()
        produce(broker.bootstrap, "stamped", b"now")
        later, now = (message.timestamp()[1] for message in consume(broker.bootstrap, "stamped", 2))
        assert 3_500_000 < later - now < 3_700_000


def test_what_only_a_process_has_is_refused_in_this_one() -> None:
    with LocalBroker() as broker:
        for fault in (broker.kill, broker.pause):
            with pytest.raises(NotPossibleHere, match="child=True"):
                fault()
        assert broker.is_running


def test_a_folder_of_ones_own_is_kept_and_found_again(tmp_path: Path) -> None:
    for value in (b"first", b"second"):
        with LocalBroker(directory=tmp_path / "mine") as broker:
            produce(broker.bootstrap, "kept", value)
    with LocalBroker(directory=tmp_path / "mine", settings={"kafka.num_partitions": 1}) as broker:
        assert sorted(map(bytes, filter(None, values(consume(broker.bootstrap, "kept", 2))))) == [b"first", b"second"]


def test_a_broker_that_cannot_start_tells_why_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kafka\.num_partition"):
        LocalBroker(settings={"kafka.num_partition": 1}).__enter__()
    occupied = tmp_path / "occupied"
    with LocalBroker(directory=occupied), pytest.raises(BrokerEnded, match="in use"):
        LocalBroker(directory=occupied).__enter__()
    assert [one.name for one in threading.enumerate() if one.name.startswith("tidelog")] == []


async def test_an_asynchronous_test_uses_its_own_event_loop() -> None:
    async with AsyncLocalBroker() as broker:
        await broker.create_topic("events")
        producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap)
        consumer = AIOKafkaConsumer("events", bootstrap_servers=broker.bootstrap, auto_offset_reset="earliest")
        async with producer, consumer:
            await producer.send_and_wait("events", b"one")
            assert (await consumer.getone()).value == b"one"
            await broker.restart()
            await producer.send_and_wait("events", b"two")
            assert (await consumer.getone()).value == b"two"


def broker_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("tidelog")]


async def test_a_method_that_is_cancelled_is_over_when_it_returns() -> None:
    async with AsyncLocalBroker() as broker:
        for method in (broker.restart, broker.stop, broker.restart):
            task = asyncio.create_task(method())
            await asyncio.sleep(0)  # its thread has begun
            for _ in range(3):  # as anyio does
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert broker.is_running == (method != broker.stop)
        await broker.create_topic("orders")
    assert broker_threads() == []


async def test_nothing_is_left_of_a_broker_whose_start_or_end_is_cancelled() -> None:
    async def use() -> None:
        async with AsyncLocalBroker() as broker:
            entered.set()
            await ended.wait()
            assert broker.is_running

    for cancels_start in (True, False):
        entered, ended = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(use())
        await (asyncio.sleep(0) if cancels_start else entered.wait())
        ended.set()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert broker_threads() == []


def test_a_killed_process_keeps_what_it_acknowledged() -> None:
    with LocalBroker(child=True) as broker:
        broker.create_topic("orders")
        produce(broker.bootstrap, "orders", b"acknowledged")
        broker.kill()
        assert not broker.is_running
        producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0, "message.timeout.ms": 500})
        refused: list[object] = []
        producer.produce("orders", b"refused", on_delivery=lambda error, message: refused.append(error))
        assert producer.flush(WAIT_S) == 0
        assert len(refused) == 1 and refused[0] is not None
        broker.restart()
        assert values(consume(broker.bootstrap, "orders", 1)) == [b"acknowledged"]
        assert any("ready bootstrap" in line for line in broker.log)
        folder = broker.directory
    assert not folder.exists()


@pytest.mark.long
def test_a_process_that_ends_by_itself_is_told_at_the_end() -> None:
    with pytest.raises(BrokerEnded, match="ended with"), LocalBroker(child=True) as broker:
        pid = next(int(line.rpartition(" ")[2]) for line in pids(broker.directory))
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not broker.is_running)


def pids(directory: Path) -> list[str]:
    return [f"pid {file.read_text().strip()}" for file in directory.rglob("lock")]


OWNER = """
import sys, time
from tidelog.testing import LocalBroker

with LocalBroker() as here, LocalBroker(child=True) as there:
    print(here.directory, there.directory, here.bootstrap, there.bootstrap, flush=True)
    time.sleep(600)
"""


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for file in files for child in file.read_text().split()]
    return children + [below for child in children for below in descendants(child)]


def test_nothing_is_left_when_the_process_of_the_tests_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        *folders, here, there = owner.stdout.readline().split()
        broker = next(int(line.removeprefix("pid ")) for line in pids(Path(folders[1])))
        children = descendants(owner.pid)
        assert broker in children and len(children) == 4  # the process that forks, and one for each folder
        assert all(Path(folder).exists() for folder in folders)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    eventually(lambda: not any(Path(folder).exists() for folder in folders), WAIT_S)
    eventually(lambda: not any(map(runs, children)), WAIT_S)
    assert not any(listens(int(address.rpartition(":")[2])) for address in (here, there))


STARTS = """
import os
from pathlib import Path
from tidelog.testing import LocalBroker

def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

def names(pid):
    return {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.exists()}

with LocalBroker(child=True) as one, LocalBroker(child=True) as two:
    first, second = (int(next(each.directory.rglob("lock")).read_text()) for each in (one, two))
    print("forked" if parent(first) == parent(second) != os.getpid() else "started")
    common = {name for name in names(first) & names(second) if name.startswith(("pipe:", "socket:"))}
    print(len(common), one.directory.as_posix() in str(names(second)))
    if parent(first) != os.getpid():
        os.kill(parent(first), 9)
        one.create_topic("still-served")
        one.kill()
        one.restart()
    one.create_topic("orders")
"""


A_THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


@pytest.mark.parametrize(
    ("everywhere", "how"),
    [("", "forked"), pytest.param(A_THREAD, "started", marks=pytest.mark.long)],
    ids=["alone", "threads"],
)
def test_brokers_are_forked_where_a_fork_is_safe(tmp_path: Path, everywhere: str, how: str) -> None:
    """`everywhere` runs in every Python of this environment, as a debugger's or a tracer's hook does."""
    (tmp_path / "sitecustomize.py").write_text(everywhere)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [how, "0", "False"]


def test_a_partition_moves_between_brokers_in_this_process() -> None:
    with LocalCluster(2, child=False) as cluster:
        cluster.create_topic("orders")
        produce(cluster.bootstrap, "orders", b"before")
        source = cluster.leader("orders")
        target = cluster.move("orders")
        assert (target, cluster.leader("orders")) == (3 - source, 3 - source)
        produce(cluster.bootstrap, "orders", b"after")
        assert values(consume(cluster.bootstrap, "orders", 2)) == [b"before", b"after"]


def test_a_copy_of_a_cluster_whose_links_were_followed_is_refused_until_its_nodes_share_a_bucket(
    tmp_path: Path,
) -> None:
    with LocalCluster(2, child=False, directory=tmp_path / "original") as cluster:
        cluster.create_topic("orders")
        produce(cluster.bootstrap, "orders", b"before")
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "original", copy)  # it follows links
    with pytest.raises(WrongDataDirectory, match="keep its objects for itself"):
        LocalCluster(2, child=False, directory=copy).__enter__()
    for node in ("node-1", "node-2"):
        shutil.copytree(copy / node / "bucket", copy / "bucket", dirs_exist_ok=True)
        shutil.rmtree(copy / node / "bucket")
    with LocalCluster(2, child=False, directory=copy) as cluster:
        produce(cluster.bootstrap, "orders", b"after")
        cluster.move("orders")
        assert values(consume(cluster.bootstrap, "orders", 2)) == [b"before", b"after"]


@pytest.mark.long
def test_another_broker_takes_over_from_a_killed_one() -> None:
    with LocalCluster(3) as cluster:
        cluster.create_topic("orders")
        produce(cluster.bootstrap, "orders", b"before")
        first = cluster.leader("orders")
        cluster.kill(first)
        assert first not in cluster.running
        produce(cluster.bootstrap, "orders", b"during")
        cluster.restart(first)
        cluster.move("orders", to=first)
        produce(cluster.bootstrap, "orders", b"after")
        assert values(consume(cluster.bootstrap, "orders", 3)) == [b"before", b"during", b"after"]
        cluster.pause(first)
        with pytest.raises(KafkaException):
            Consumer({"bootstrap.servers": cluster.address(first), "group.id": "g"}).list_topics(timeout=1)
        cluster.heal()
        produce(cluster.bootstrap, "orders", b"healed")


def test_all_that_is_public_is_on_the_page() -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    assert [name for name in tidelog.testing.__all__ if f"`{name}" not in page] == []
    for kind in (LocalBroker, LocalCluster, LocalBucket, LocalClock):
        names = [name for name, member in vars(kind).items() if callable(member) and not name.startswith("_")]
        assert [name for name in names if f"{name}(" not in page] == []


def test_the_package_imports_nothing_heavy() -> None:
    program = "import sys; a = set(sys.modules); import tidelog.testing; print(*(set(sys.modules) - a), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"asyncio", "msgspec", "aiohttp", "kio", "confluent_kafka", "uvloop", "pytest"}
    assert len([name for name in loaded if name.startswith("tidelog")]) < 20


def test_importing_tidelog_imports_its_version_alone() -> None:
    """What an import costs is what it imports: this holds on any machine."""
    program = "import sys; a = set(sys.modules); import tidelog; print(*(set(sys.modules) - a), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("tidelog")}
    assert ours == {"tidelog", "tidelog.runtime", "tidelog.runtime.version"}
    assert not set(done.stdout.split()) & {"asyncio", "msgspec", "aiohttp", "kio", "confluent_kafka", "click"}
