"""The console's API over a real broker with a secret, on the broker's own admin HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.support import schema
from tests.support.cli import Cli
from tests.support.http_calls import HttpCalls
from tests.support.kafka_client import KafkaClient
from tests.support.raw_produce import UNREADABLE, write_batch
from tidelog.batch.batch import build_batch
from tidelog.cli.client import ClusterConnection
from tidelog.console.guard import HEADER
from tidelog.controller.rpc.secret import admin_token, read_secret, write_secret
from tidelog.runtime.errors import InvalidInput
from tidelog.testing import LocalBroker

pytestmark = pytest.mark.processes  # it takes real time

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">'


class Browser:
    """A browser that is signed in."""

    def __init__(self, url: str, token: str) -> None:
        self.http = HttpCalls(url)
        self.token = token
        self.cookie = ""

    def call(self, method: str, path: str, body: object = None, status: int = 200, **headers: str) -> Any:
        sent = {HEADER: "1", **headers}
        if self.cookie:
            sent["Cookie"] = self.cookie
        answer = self.http.call(method, f"/console/api/{path}", body, sent)
        assert answer.status == status, answer.text
        if "Set-Cookie" in answer.headers:
            (morsel,) = SimpleCookie(answer.headers["Set-Cookie"]).values()
            assert (morsel["httponly"], morsel["samesite"], morsel["path"]) == (True, "Strict", "/console/")
            self.cookie = f"{morsel.key}={morsel.value}"
        if answer.headers["Content-Type"].startswith("application/x-ndjson"):
            return [json.loads(line) for line in answer.text.splitlines()]
        return json.loads(answer.text)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalBroker, str]]:
    secret = tmp_path_factory.mktemp("secret") / "cluster.secret"
    write_secret(secret)
    with LocalBroker(settings={"admin.console": True, "controller.secret_file": str(secret)}) as started:
        started.create_topic("orders", partitions=2)
        yield started, admin_token(read_secret(secret))


@pytest.fixture
def browser(broker: tuple[LocalBroker, str]) -> Browser:
    started, token = broker
    found = Browser(ClusterConnection(started.bootstrap).admin_url, token)
    found.call("POST", "session", {"token": token})
    return found


def produce(broker: tuple[LocalBroker, str], *records: tuple[str | None, str], partition: int = 0) -> None:
    producer = Producer({"bootstrap.servers": broker[0].bootstrap})
    for key, value in records:
        producer.produce("orders", value, key, partition=partition, headers=[(HOSTILE, HOSTILE.encode())])
    assert producer.flush(30) == 0


def test_nothing_is_shown_or_done_without_the_token(broker: tuple[LocalBroker, str]) -> None:
    stranger = Browser(ClusterConnection(broker[0].bootstrap).admin_url, "")
    assert stranger.call("GET", "session") == {"needs_token": True, "signed_in": False, "version": "0.1.0"}
    for method, path in (
        ("GET", "read/any/status"),
        ("GET", "groups"),
        ("GET", "records?topic=orders"),
        ("POST", "produce"),
        ("POST", "group/reset"),
        ("POST", "change/balancer/run"),
        ("GET", "nothing"),
    ):
        refused = stranger.call(method, path, {} if method == "POST" else None, 401)
        assert "sign in" in refused["error"]
    stranger.call("POST", "session", {"token": "wrong"}, 401)
    stranger.call("POST", "session", {"key": "wrong"}, 401)
    stranger.call("GET", "groups", None, 401, Authorization="Bearer wrong")
    stranger.call("GET", "groups", Authorization=f"Bearer {broker[1]}")
    stranger.cookie = "tidelog_console_0=guessed"
    stranger.call("GET", "groups", None, 401)


def test_a_session_ends_when_it_is_signed_out(browser: Browser) -> None:
    assert browser.call("GET", "session")["signed_in"]
    kept = browser.cookie
    browser.call("DELETE", "session")
    browser.cookie = kept
    browser.call("GET", "groups", None, 401)


def test_only_listed_requests_are_passed_on(browser: Browser) -> None:
    assert browser.call("GET", "read/any/status")["nodes"][0]["id"] == 1
    everybody = browser.call("GET", "read/all/history")
    assert (set(everybody["answers"]), everybody["errors"]) == ({"1"}, {})
    assert "produced_bytes" in everybody["answers"]["1"]["series"]
    assert browser.call("GET", "read/1/timeline")["since_ms"] > 0
    assert browser.call("GET", "cost")["total"]["cost"] >= 0
    for path in ("read/any/objects/verify", "read/any/%2e%2e/metrics", "read/any/status?x=1", "read/x/status"):
        browser.call("GET", path, None, 400)
    browser.call("GET", "read/77/status", None, 404)
    for path in ("losses/accept", "brokers/remove", "upload", "token"):
        assert "does not pass on" in browser.call("POST", f"change/{path}", {}, 400)["error"]
    lossy = {"query": {"id": "1", "broker": "1", "accept_loss": "true"}}
    browser.call("POST", "change/replica-sets/elect", lossy, 400)
    assert browser.call("POST", "change/balancer/mode", {"query": {"set": "off"}})["mode"] == "off"
    assert browser.call("POST", "change/balancer/mode", {})["mode"] == "advise", "the configured one"


def test_topics_and_the_anatomy_of_a_partition_are_told(broker: tuple[LocalBroker, str], browser: Browser) -> None:
    produce(broker, ("k", "v"), partition=1)
    rows = browser.call("GET", "read/any/topics")["topics"]
    (row,) = [row for row in rows if row["name"] == "orders"]
    assert (row["partitions"], row["leaderless"], row["brokers"]) == (2, 0, [1])
    browser.call("GET", "read/any/topics?name=none", None, 404)
    end = {each["partition"]: each["end"] for each in browser.call("GET", "offsets?topic=orders")["partitions"]}[1]
    found = browser.call("GET", "read/1/partition?topic=orders&partition=1")
    assert (found["leader"], found["log"]["high_watermark"], found["log"]["log_end_offset"]) == (1, end, end)
    assert found["stored"]["end_offset"] == end
    assert found["stored"]["cache_start"] == 0
    assert found["wal"]["end_offset"] >= found["wal"]["durable_offset"] > 0
    browser.call("GET", "read/1/partition?topic=orders&partition=2", None, 404)


def test_records_are_found_by_key_and_text_and_hostile_ones_stay_text(
    broker: tuple[LocalBroker, str], browser: Browser
) -> None:
    produce(broker, (HOSTILE, HOSTILE), (None, json.dumps({"name": HOSTILE})), ("other", "x" * 10_000))
    lines = browser.call("GET", "records?topic=orders&partition=0&start=beginning&limit=500")
    assert lines[0]["event"] == "start"
    assert (lines[-1]["event"], lines[-1]["reason"]) == ("end", "end")
    hostile, document, long = [line for line in lines if line["event"] == "record"][-3:]
    assert hostile["key"]["text"] == hostile["value"]["text"] == HOSTILE
    assert hostile["headers"][0][0] == hostile["headers"][0][1]["text"] == HOSTILE
    assert (document["key"]["kind"], document["value"]["kind"]) == ("null", "json")
    assert json.loads(document["value"]["text"]) == {"name": HOSTILE}
    assert (long["value"]["cut"], long["value"]["size_bytes"], len(long["value"]["text"])) == (True, 10_000, 4_096)
    whole = browser.call(
        "GET", f"records?topic=orders&partition=0&start=offset&value={long['offset']}&limit=1&full=true"
    )
    assert len(whole[1]["value"]["text"]) == 10_000
    by_key = browser.call("GET", "records?topic=orders&start=beginning&key=other")
    assert [line["offset"] for line in by_key if line["event"] == "record"] == [long["offset"]]
    by_text = browser.call("GET", "records?topic=orders&start=beginning&contains=onerror&limit=1")
    events = [line["event"] for line in by_text if line["event"] != "progress"]  # there is one on a slow machine
    assert events == ["start", "record", "end"]
    assert by_text[-1]["reason"] == "limit"
    browser.call("GET", "records?topic=none", None, 404)


def test_headers_without_readable_names_hide_no_record(broker: tuple[LocalBroker, str], browser: Browser) -> None:
    """Kafka's protocol has any bytes there, and librdkafka and Go write them."""
    started = broker[0]
    started.create_topic("named", partitions=1)
    write_batch(started.bootstrap, "named", build_batch([UNREADABLE]))
    lines = browser.call("GET", "records?topic=named&start=beginning")
    start, record, end = [line for line in lines if line["event"] != "progress"]
    assert (start["event"], record["value"]["text"], end["reason"]) == ("start", "v", "end")
    assert (record["headers"], record["headers_unreadable"]) == ([], True)
    refused = Cli(started.bootstrap)("consume", "named", "--exit", "--format", "json", code=InvalidInput.exit_code)
    assert "named:0 at offset 0 has a header whose name is no UTF-8" in refused.err


def test_a_live_tail_ends_with_its_topic(broker: tuple[LocalBroker, str], browser: Browser) -> None:
    started = broker[0]
    started.create_topic("passing", partitions=1)
    admin = AdminClient({"bootstrap.servers": started.bootstrap})
    place = urlsplit(ClusterConnection(started.bootstrap).admin_url)
    with contextlib.closing(HTTPConnection(place.hostname or "", place.port, timeout=60)) as connection:
        path = "/console/api/records?topic=passing&start=end&follow=true"
        connection.request("GET", path, headers={HEADER: "1", "Cookie": browser.cookie})
        response = connection.getresponse()
        assert json.loads(response.readline())["event"] == "start"
        admin.delete_topics(["passing"])["passing"].result()
        deadline = time.monotonic() + 60
        while (line := json.loads(response.readline()))["event"] == "progress":
            assert time.monotonic() < deadline, "the tail of a topic that is gone goes on"
        assert (line["event"], "passing" in line["error"]) == ("error", True)
        assert response.read() == b"", "nothing comes after the error, no second answer least of all"


def test_slow_requests_and_the_way_of_one_record_are_told(broker: tuple[LocalBroker, str], browser: Browser) -> None:
    produce(broker, ("k", "v"))
    end = browser.call("GET", "read/1/partition?topic=orders&partition=0")["log"]["high_watermark"]
    story = browser.call("GET", f"read/1/explain?topic=orders&partition=0&offset={end - 1}")
    assert (story["summary"], story["record"]["value_bytes"]) == ("visible", 1)
    assert {"received", "synced", "confirmed", "uploaded"} <= {each["stage"] for each in story["stages"]}
    groups = browser.call("GET", "read/all/explain/groups?topic=orders&partition=0")
    assert (set(groups["answers"]), groups["errors"]) == ({"1"}, {})
    browser.call("GET", "read/1/explain?topic=none&partition=0&offset=1", None, 404)
    browser.call("GET", "read/1/explain?topic=orders&partition=0&offset=x", None, 400)

    produced = browser.call("GET", "read/all/requests/slow?limit=5&api=Produce&topic=orders")["answers"]["1"]
    assert {(row["api"], row["topic"]) for row in produced["requests"]} == {("Produce", "orders")}
    assert len(produced["requests"]) <= 5 and set(produced["requests"][0]["stages_ms"]) <= set(produced["stages"])
    hostile = browser.call("GET", f"read/all/requests/slow?topic={quote(HOSTILE)}")["answers"]["1"]
    assert hostile["requests"] == []
    refused = browser.call("GET", f"read/all/requests/slow?api={quote(HOSTILE)}")
    assert (refused["answers"], "no API has that name" in refused["errors"]["1"]) == ({}, True)


def test_a_record_is_written_only_when_it_is_no_dry_run(broker: tuple[LocalBroker, str], browser: Browser) -> None:
    order = {"topic": "orders", "key": "a key", "value": "a value", "headers": [["h", "1"]]}
    planned = browser.call("POST", "produce", order)
    assert planned == {"dry_run": True, "partition": planned["partition"], "size_bytes": 12}
    done = browser.call("POST", "produce", {**order, "dry_run": False})
    assert done["partition"] == planned["partition"]
    found = browser.call(
        "GET", f"records?topic=orders&partition={done['partition']}&start=offset&value={done['offset']}"
    )
    assert found[1]["value"]["text"] == "a value"
    browser.call("POST", "produce", {**order, "topic": "none"}, 404)
    browser.call("POST", "produce", {**order, "partition": 9}, 400)
    browser.call("POST", "produce", {**order, "more": 1}, 400)
    browser.call("POST", "produce", {**order, "value": "x" * (3 << 20)}, 400)


def test_a_group_is_listed_with_its_lag_and_reset_only_on_purpose(
    broker: tuple[LocalBroker, str], browser: Browser
) -> None:
    produce(broker, ("k", "one"), ("k", "two"))
    consumer = Consumer({"bootstrap.servers": broker[0].bootstrap, "group.id": "readers"})
    consumer.commit(offsets=[TopicPartition("orders", 0, 1)], asynchronous=False)
    consumer.close()
    listed = browser.call("GET", "groups")
    (row,) = [row for row in listed["groups"] if row["group"] == "readers"]
    assert (row["state"], row["members"], row["partitions"]) == ("empty", 0, 1)
    described = browser.call("GET", "group?name=readers")
    (place,) = described["partitions"]
    assert (place["committed"], place["lag"]) == (1, place["high_watermark"] - 1)
    order = {"group": "readers", "topic": "orders", "to": "latest", "partitions": [0]}
    planned = browser.call("POST", "group/reset", order)
    assert planned["dry_run"]
    assert (planned["partitions"][0]["before"], planned["partitions"][0]["after"]) == (1, place["high_watermark"])
    assert browser.call("GET", "group?name=readers")["partitions"][0]["committed"] == 1
    browser.call("POST", "group/reset", {**order, "dry_run": False})
    assert browser.call("GET", "group?name=readers")["partitions"][0]["lag"] == 0
    shifted = browser.call("POST", "group/reset", {**order, "to": "shift", "value": -100})
    assert shifted["partitions"][0]["after"] == 0
    browser.call("POST", "group/reset", {**order, "to": "nowhere"}, 400)
    browser.call("GET", "group?name=none", None, 404)


def test_the_group_whose_id_is_empty_hides_no_other(broker: tuple[LocalBroker, str], browser: Browser) -> None:
    """Kafka takes its commits, which old consumers send that have no group id."""
    started = broker[0]
    consumer = Consumer({"bootstrap.servers": started.bootstrap, "group.id": "beside"})
    consumer.commit(offsets=[TopicPartition("orders", 0, 0)], asynchronous=False)
    consumer.close()

    async def commit() -> Any:
        host, _, port = started.bootstrap.partition(":")
        make = schema.request(8, 7).make
        offset = {"committed_offset": 0, "committed_leader_epoch": -1, "committed_metadata": ""}
        places = (make("OffsetCommitRequestPartition", partition_index=0, **offset),)
        topics = (make("OffsetCommitRequestTopic", name="orders", partitions=places),)
        nobody = {"group_id": "", "generation_id_or_member_epoch": -1, "member_id": "", "group_instance_id": None}
        async with KafkaClient(host, int(port)) as client:
            return await client.send(8, 7, **nobody, topics=topics)

    assert asyncio.run(commit()).topics[0].partitions[0].error_code == 0
    listed = browser.call("GET", "groups")
    assert "beside" in [row["group"] for row in listed["groups"]]
    (error,) = listed["errors"]
    assert "group ''" in error
    order = {"group": "", "topic": "orders", "to": "latest"}
    assert "empty" in browser.call("POST", "group/reset", order, 503)["error"]
    assert "empty" in Cli(started.bootstrap)("group", "describe", "", code=InvalidInput.exit_code).err


def test_the_brokers_admin_http_keeps_its_own_rules(broker: tuple[LocalBroker, str], browser: Browser) -> None:
    answer = browser.http.call("POST", "/upload", None, {"Origin": "http://evil.example"})
    assert answer.status == 403
    assert browser.http.call("POST", "/upload", None, {"Cookie": browser.cookie, HEADER: "1"}).status == 401
    assert browser.http.call("POST", "/token", None, {}).status == 401
    assert browser.http.call("POST", "/token", None, {"Authorization": f"Bearer {broker[1]}"}).status == 200


def test_a_broker_serves_no_console_unless_it_is_told_to(tmp_path: Path) -> None:
    with LocalBroker() as plain:
        answer = HttpCalls(ClusterConnection(plain.bootstrap).admin_url).call("GET", "/console/", None, {})
        assert answer.status == 404
