"""The pytest plugin, in pytest processes of their own, as a project would use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pytest_project import outcome, run_pytest

pytestmark = pytest.mark.processes

TEN_LINES = """
from confluent_kafka import Consumer, Producer

def test_orders_arrive(tidelog, tidelog_topic):
    producer = Producer({"bootstrap.servers": tidelog.bootstrap})
    producer.produce(tidelog_topic, b"one")
    assert producer.flush(30) == 0
    consumer = Consumer({"bootstrap.servers": tidelog.bootstrap, "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.subscribe([tidelog_topic])
    assert consumer.poll(30).value() == b"one"
    consumer.close()
"""


@pytest.mark.long
def test_ten_lines_suffice_on_two_workers_at_once(tmp_path: Path) -> None:
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(TEN_LINES)
    done = run_pytest(tmp_path, "-n", "2", "--dist", "loadfile", "-W", "error")
    assert outcome(done) == "2 passed", done.stdout


OTHER = """
import pytest
import tidelog.testing.local

@pytest.fixture
def tidelog():
    return "of this project"

@pytest.mark.parametrize("right", [True, False])
def test_it(tidelog, right):
    assert right
"""


def test_a_fixture_of_the_same_name_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(OTHER)
    done = run_pytest(tmp_path)
    assert outcome(done) == "1 failed, 1 passed", done.stdout


SHARED = """
import pytest
from confluent_kafka.admin import AdminClient

@pytest.fixture(scope="session")
def tidelog_settings():
    return {"kafka.num_partitions": 7}

seen = []

def partitions(broker, topic):
    topics = AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(topic, timeout=30).topics
    return len(topics[topic].partitions)

@pytest.mark.tidelog_topic(partitions=3, config={"cleanup.policy": "compact"})
def test_the_marker(tidelog, tidelog_topic):
    seen.append((tidelog, tidelog_topic))
    assert partitions(tidelog, tidelog_topic) == 3
    tidelog.bucket.fail(503, operations=["get"])
    tidelog.clock.skew(60)
    tidelog.stop()

@pytest.mark.parametrize("case", ["a b", "ü/ö"])
def test_names_and_scope(tidelog, tidelog_topic, case):
    assert [broker for broker, _ in seen] == [tidelog] * len(seen)
    assert tidelog_topic not in [topic for _, topic in seen]
    assert tidelog.is_running and tidelog.clock.offset_ms == 0
    assert not tidelog.bucket.rule.strikes("get")
    assert partitions(tidelog, "made-by-itself") == 7
"""


def test_brokers_are_shared_and_each_test_finds_them_whole(tmp_path: Path) -> None:
    (tmp_path / "test_shared.py").write_text(SHARED)
    done = run_pytest(tmp_path, "--strict-markers")
    assert outcome(done) == "3 passed", done.stdout


FAILING = """
import sys

def test_what_forks_is_started_before_the_first_broker():
    assert sys.modules["tidelog.testing.forking"].warm_up().is_running
    assert "tidelog.testing.local" not in sys.modules or "tidelog.config" not in sys.modules

def test_that_fails(tidelog):
    tidelog.create_topic("seen")
    tidelog.restart()
    assert False, "on purpose"
"""


@pytest.mark.long
def test_the_log_of_a_child_is_in_the_report_of_a_test_that_fails(tmp_path: Path) -> None:
    (tmp_path / "test_failing.py").write_text(FAILING)
    done = run_pytest(tmp_path, ini="tidelog_child = true\ntidelog_scope = function")
    assert outcome(done) == "1 failed, 1 passed", done.stdout
    _, title, log = done.stdout.partition("Log of tidelog during this test")
    assert title and "ready bootstrap=127.0.0.1:" in log


ENDED = """
import os
import signal

import pytest

torn_down = []

@pytest.fixture
def of_this_test():
    yield
    torn_down.append(True)

def test_that_ends_its_broker(tidelog, of_this_test):
    lock = next(tidelog.directory.rglob("lock"))
    os.kill(int(lock.read_text()), signal.SIGKILL)
    while tidelog.is_running:
        pass

def test_that_comes_after(tidelog):
    assert torn_down == [True]
    tidelog.create_topic("served")

def test_without_a_broker():
    pass
"""


def test_a_broker_that_ended_by_itself_is_told_once_and_started_again(tmp_path: Path) -> None:
    (tmp_path / "test_ended.py").write_text(ENDED)
    done = run_pytest(tmp_path, ini="tidelog_child = true")
    assert outcome(done) == "3 passed, 1 error", done.stdout
    assert "BrokerEnded: broker 1 ended with -9" in done.stdout


BY_NAME = """
import pytest

@pytest.fixture
def chosen(request):
    return request.getfixturevalue("tidelog")

def test_through_another_fixture(chosen):
    chosen.clock.skew(60)
    chosen.kill()

@pytest.mark.parametrize("name", ["tidelog"])
def test_in_its_middle(request, name):
    broker = request.getfixturevalue(name)
    assert (broker.is_running, broker.clock.offset_ms) == (True, 0)
    broker.bucket.fail(503)
    broker.kill()
    broker.restart()
    assert not broker.is_running  # the failure whose report has the log

def test_that_comes_after(tidelog):
    assert (tidelog.is_running, tidelog.bucket.rule.status) == (True, 0)
"""


def test_a_broker_that_a_test_asked_for_by_name_is_healed_and_its_log_told(tmp_path: Path) -> None:
    (tmp_path / "test_by_name.py").write_text(BY_NAME)
    done = run_pytest(tmp_path, ini="tidelog_child = true")
    assert outcome(done) == "1 failed, 2 passed", done.stdout
    assert done.stdout.count("Log of tidelog during this test") == 1, done.stdout


@pytest.mark.long
def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    for ini, said in (
        ("tidelog_scope = planet", "tidelog_scope is 'planet'"),
        ("tidelog_storage = tape", "tidelog_storage is 'tape'"),
        ("tidelog_brokers = many", "tidelog_brokers is 'many'"),
    ):
        done = run_pytest(tmp_path, "--collect-only", ini=ini)
        assert done.returncode == pytest.ExitCode.USAGE_ERROR and said in done.stderr, done


UNUSED = """
import sys

def test_nothing_is_imported():
    loaded = {name for name in sys.modules if name.startswith("tidelog")}
    assert "tidelog.testing.plugin" in loaded
    assert not loaded & {"tidelog.config", "tidelog.process", "tidelog.storage", "tidelog.broker"}
    assert not {"msgspec", "kio", "aiohttp", "uvloop", "confluent_kafka"} & set(sys.modules)
"""


def test_a_project_that_uses_no_fixture_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_unused.py").write_text(UNUSED)
    done = run_pytest(tmp_path, "-p", "no:hypothesispytest")
    assert outcome(done) == "1 passed", done.stdout


ON_A_CLUSTER = """
def test_a_move(tidelog_cluster, tidelog_topic):
    before = tidelog_cluster.leader(tidelog_topic)
    assert tidelog_cluster.move(tidelog_topic) == 3 - before
"""


@pytest.mark.long
def test_a_cluster_by_settings(tmp_path: Path) -> None:
    (tmp_path / "test_cluster.py").write_text(ON_A_CLUSTER)
    done = run_pytest(tmp_path, ini="tidelog_brokers = 2\ntidelog_cluster_child = false\ntidelog_storage = disk")
    assert outcome(done) == "1 passed", done.stdout
