"""What driver and tasks ask brokers for over the admin HTTP: answers in pieces, dead brokers, refusals."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from pyspark_tidelog.cluster import Lease, LeaseKeeper, Lookups
from pyspark_tidelog.plan import plan_tasks
from tests.controller.controller_helpers import Driver, new_object
from tests.support.clients import wait_until
from tests.support.ports import free_port
from tidelog.controller.image.lookup import OffsetRange, look_up
from tidelog.controller.model import commands as c
from tidelog.runtime.errors import ConfigError, InvalidInput, NotFound, Unavailable

OBJECTS = 7


def filled() -> Driver:
    """Topic `t` with three partitions, in each of whose objects every partition has ten offsets."""
    driver = Driver()
    epoch = driver.broker()
    streams = [first + 1 for first in driver.topic(3)]
    driver.run(c.OpenStreams(0, epoch, tuple((stream, 0) for stream in streams)))
    for number in range(OBJECTS):
        ranges = [(stream, 10 * number, 10 * number + 10) for stream in streams]
        driver.commit(epoch, (number, number + 1), new_object(driver.prepare(), *ranges))
    return driver


class Broker:
    """A server that answers as a broker does, from a real image, in pieces of `limit` slices."""

    def __init__(self, driver: Driver, limit: int = 10_000) -> None:
        self.driver = driver
        self.limit = limit
        self.asked: list[tuple[str, Any, str]] = []
        self.meant: set[str | None] = set()
        """Whose answers were wanted."""
        self.refuses: tuple[int, str] | None = None
        self.renewed = threading.Event()
        broker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                broker.meant.add(self.headers.get("Tidelog-Cluster"))
                length = int(self.headers.get("Content-Length", 0))
                status, body = broker.answer(self.path, self.rfile.read(length), self.headers.get("Authorization", ""))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def answer(self, path: str, body: bytes, authorization: str) -> tuple[int, bytes]:
        question = json.loads(body) if body else None
        self.asked.append((path, question, authorization))
        if self.refuses is not None:
            status, text = self.refuses
            return status, json.dumps({"error": text, "hint": None}).encode()
        if path.startswith("/leases/renew"):
            self.renewed.set()
        if path.startswith("/leases"):
            return 200, json.dumps({"id": 3, "version": 17, "cluster_id": "cluster"}).encode()
        assert question is not None
        ranges = msgspec.convert(question["ranges"], list[OffsetRange])
        found = look_up(self.driver.image, ranges, self.limit, reads_shared=path.endswith("?shared=true"))
        return 200, msgspec.json.encode(found)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def broker() -> Iterator[Broker]:
    found = Broker(filled())
    yield found
    found.close()


RANGES = [("t", 0, 5, 62), ("t", 1, 0, 70), ("t", 2, 33, 34)]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 10_000])
def test_an_answer_in_pieces_is_put_together(broker: Broker, limit: int) -> None:
    broker.limit = limit
    cluster_id, _, found = Lookups((broker.url,), "").slices(RANGES, 1)
    assert cluster_id == "cluster"
    assert [(each.topic, each.partition, each.start, each.end) for each in found] == RANGES
    assert [[(one.start, one.end) for one in each.slices] for each in found] == [
        [(at, at + 10) for at in range(0, 70, 10)],
        [(at, at + 10) for at in range(0, 70, 10)],
        [(30, 40)],
    ]
    assert sum(each.end - each.start for each in plan_tasks(found, max_bytes=50)) == 57 + 70 + 1


def test_many_ranges_are_several_questions(broker: Broker) -> None:
    ranges = [("t", number % 3, 0, 70) for number in range(450)]
    found = Lookups((broker.url,), "").slices(ranges, 1).ranges
    assert [(each.topic, each.partition, each.start, each.end) for each in found] == ranges
    assert len(broker.asked) == 3


def test_a_range_that_was_trimmed_begins_where_the_log_does(broker: Broker) -> None:
    (partition, *_) = broker.driver.image.partitions(broker.driver.image.topic_ids["t"])
    epoch = broker.driver.image.replica_sets[0].master_epoch
    broker.driver.run(c.TrimStream(partition.first_stream + 1, 0, 25, 0, epoch))
    (found,) = Lookups((broker.url,), "").slices([("t", 0, 5, 62)], 1).ranges
    assert (found.start, found.slices[0].start) == (25, 20)


def test_another_broker_is_asked_when_one_is_dead(broker: Broker) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    for _ in range(8):  # they are asked in any order
        assert Lookups((dead, broker.url, dead), "secret").take_lease("me", 60.0) == Lease(3, 17, 60.0)
    path, _, authorization = broker.asked[0]
    assert path == "/leases?holder=me&ttl_ms=60000" and authorization == "Bearer secret"
    with pytest.raises(Unavailable, match="no broker answers /leases: "):
        Lookups((dead,), "").take_lease("me", 60.0)
    with pytest.raises(Unavailable, match="no broker"):
        Lookups((), "").take_lease("me", 60.0)


@pytest.mark.parametrize(
    ("status", "kind", "hint"),
    [(401, ConfigError, "readTokenFile"), (404, NotFound, None), (400, InvalidInput, None), (503, Unavailable, None)],
)
def test_a_refusal_is_told_in_the_brokers_words(
    broker: Broker, status: int, kind: type[Exception], hint: str | None
) -> None:
    broker.refuses = (status, "because of this")
    with pytest.raises(kind, match="because of this") as caught:
        Lookups((broker.url,), "").slices(RANGES, 1)
    assert hint is None or hint in str(vars(caught.value)["hint"])


def test_another_broker_is_asked_when_one_does_not_know_the_token(broker: Broker) -> None:
    stranger = Broker(broker.driver)
    stranger.refuses = (401, "POST /slices needs the token")
    try:
        lookups = Lookups((stranger.url, broker.url), "token")
        for _ in range(20):
            assert lookups.slices([("t", 0, 0, 70)], 0).cluster_id == "cluster"
    finally:
        stranger.close()
    assert stranger.asked


def test_a_broker_of_another_cluster_is_told_whose_answer_is_wanted_and_the_next_one_is_asked(broker: Broker) -> None:
    """Its topic of the same name was read, where the two shared a bucket."""
    stranger = Broker(broker.driver)
    stranger.refuses = (421, "a broker of cluster B answers")
    try:
        for _ in range(20):
            assert Lookups((stranger.url, broker.url), "", "cluster").slices([("t", 0, 0, 70)], 0).ranges
        with pytest.raises(Unavailable, match="a broker of cluster B answers"):
            Lookups((stranger.url,), "", "cluster").take_lease("me", 60.0)
        with pytest.raises(Unavailable, match="421"):
            Lookups((stranger.url,), "", "cluster").objects(1)
    finally:
        stranger.close()
    assert stranger.meant == broker.meant == {"cluster"}


def test_a_lease_is_renewed_while_a_task_reads_and_let_go_when_it_is_over(broker: Broker) -> None:
    lookups = Lookups((broker.url,), "")
    with LeaseKeeper(lookups, Lease(3, 17, 0.03)):
        assert broker.renewed.wait(30)
        broker.renewed.clear()
        assert broker.renewed.wait(30), "again and again"
        broker.refuses = (401, "POST /leases/renew needs the token")
        count = len(broker.asked)
        wait_until(lambda: len(broker.asked) > count + 2, "a refusal is no reason to stop", 30)
        broker.refuses = (503, "away for a while")
    assert {path.partition("&")[0] for path, _, _ in broker.asked} == {"/leases/renew?id=3"}
    broker.refuses = (404, "lease 3 has ended")
    count = len(broker.asked)
    with LeaseKeeper(lookups, Lease(3, 17, 0.001)) as keeper:
        keeper.wait_over(30)
    assert len(broker.asked) == count + 1, "nobody asks for a lease that is over"


def test_tasks_that_follow_each_other_do_not_all_renew_their_lease(broker: Broker) -> None:
    lookups = Lookups((broker.url,), "")
    for _ in range(5):
        with LeaseKeeper(lookups, Lease(4, 17, 600.0)):
            assert broker.renewed.wait(30)
    assert len(broker.asked) == 1
    broker.renewed.clear()
    with LeaseKeeper(lookups, Lease(5, 17, 600.0)):
        assert broker.renewed.wait(30), "that is another one"
    broker.renewed.clear()
    with LeaseKeeper(lookups, Lease(5, 17, 60.0)):
        assert broker.renewed.wait(30), "and that one of another cluster, which would end before it is due"


class Willing(Lookups):
    """Renews whatever it is asked to."""

    def renew_lease(self, lease: Lease, version: int = 0) -> Lease:
        return lease


def test_keepers_of_many_leases_do_not_disturb_each_other(caplog: pytest.LogCaptureFixture) -> None:
    def keep(first: int) -> None:
        for number in range(first, first + 300):
            with LeaseKeeper(Willing(("many",), ""), Lease(number, 17, 60.0)):
                pass

    threads = [threading.Thread(target=keep, args=(1_000 * number,)) for number in range(1, 5)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not caplog.records, "each was renewed"
