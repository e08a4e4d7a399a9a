"""Every request is on one purpose's account, and topics get exactly the share that their bytes make."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.s3_servers import S3Server, new_bucket
from tidelog.chaos.faulty_s3 import Fault, FaultyS3
from tidelog.runtime.clock import SystemClock
from tidelog.storage.bucket import accounts as module
from tidelog.storage.bucket.accounts import OTHER_TOPIC, Account, BucketAccounts, Receipt, TopicNames
from tidelog.storage.bucket.gate import PriorityGate
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.local import LocalObjectStore
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.bucket.s3 import S3ObjectStore
from tidelog.storage.bucket.store import ObjectNotFound
from tidelog.storage.settings import S3Settings


def accounts(*topics: str) -> BucketAccounts:
    """Stream 10 is the first topic's, 20 the second's, …; others are nobody's."""
    made = BucketAccounts()
    made.divide_by(TopicNames({10 * number: topic for number, topic in enumerate(topics, 1)}.get, lambda topic: True))
    return made


def test_a_receipt_is_shared_in_proportion_to_bytes_and_the_purpose_has_all_of_it() -> None:
    mine = accounts("a", "b")
    receipt = Receipt(mine, "upload")
    receipt.request("put", 4)
    receipt.sent(1000)
    receipt.settle([(10, 300), (20, 100), (10, 0)])
    assert mine.purposes["upload"].requests == {"put": 4}
    topics = mine.topics()
    assert topics["a"]["upload"].requests == {"put": 3}
    assert (topics["a"]["upload"].sent_bytes, topics["b"]["upload"].sent_bytes) == (750, 250)


def test_what_is_not_settled_and_what_nobody_owns_is_shared() -> None:
    mine = accounts("a")
    Receipt(mine, "cold").request("get")
    lost = Receipt(mine, "cold")
    lost.request("get")
    lost.settle([(999, 10), (10, 10)])
    lost.settle([(10, 10)])  # once is enough
    assert mine.purposes["cold"].requests == {"get": 2}
    assert mine.topics()["a"]["cold"].requests == {"get": 0.5}


def test_a_store_without_accounts_gives_a_receipt_that_counts_for_nobody() -> None:
    receipt = Receipt()
    receipt.request("get")
    receipt.settle([(1, 1)])


def test_topics_beyond_the_cap_share_an_account_until_one_that_is_gone_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_TOPICS", 3)
    mine = BucketAccounts()
    gone: set[str] = set()
    mine.divide_by(TopicNames(lambda stream_id: f"t{stream_id}", lambda topic: topic not in gone))

    def charge(stream_id: int) -> None:
        receipt = Receipt(mine, "upload")
        receipt.request("put")
        receipt.settle([(stream_id, 1)])

    for stream_id in range(6):
        charge(stream_id)
    assert sorted(mine.topics()) == [OTHER_TOPIC, "t0", "t1", "t2"]
    assert mine.topics()[OTHER_TOPIC]["upload"].requests == {"put": 3}
    gone |= {"t0", "t1"}
    assert sorted(mine.topics()) == [OTHER_TOPIC, "t2"]
    assert mine.topics()[OTHER_TOPIC]["upload"].requests == {"put": 5}
    charge(7)
    assert "t7" in mine.topics()


@given(st.lists(st.tuples(st.sampled_from(["put", "get"]), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9))))))
def test_topics_never_have_more_than_their_purpose_and_nothing_goes_back(work: list[tuple[Any, Any]]) -> None:
    mine = accounts("a", "b", "c")
    before = 0.0
    for kind, streams in work:
        receipt = Receipt(mine, "compaction")
        receipt.request(kind)
        receipt.settle([(10 * stream, size) for stream, size in streams])
        total = Account()
        for topic in mine.topics().values():
            total.add(topic["compaction"])
        shared = sum(total.requests.values())
        assert before <= shared + 1e-9
        before = shared
    assert before <= sum(mine.account("compaction").requests.values()) + 1e-9


async def test_views_of_a_store_of_files_count_as_s3_would(tmp_path: Path) -> None:
    store = GuardedObjectStore(LocalObjectStore(tmp_path / "bucket"), PriorityGate(4), SystemClock())
    store.stats.accounts.divide_by(TopicNames({10: "a"}.get, lambda topic: True))
    upload = store.for_purpose(Purpose.UPLOAD)
    view, receipt = upload.with_receipt()
    await view.put("k/1", [b"x" * 100])
    receipt.settle([(10, 1)])
    cold = store.for_purpose(Purpose.COLD)
    await cold.get("k/1")
    await cold.get_ranges("k/1", [(0, 10), (20, 30)])  # near: one request
    clean = store.for_purpose(Purpose.CLEAN)
    assert [info.key async for info in clean.list("k/")] == ["k/1"]
    await clean.head("k/1")
    await clean.delete(["k/1", "k/2"])
    found = store.stats.accounts.snapshot()
    assert found["purposes"]["upload"] == {"requests": {"put": 1}, "received_bytes": 0, "sent_bytes": 100}
    assert found["purposes"]["cold"] == {"requests": {"get": 2}, "received_bytes": 120, "sent_bytes": 0}
    assert found["purposes"]["clean"]["requests"] == {"delete": 1, "head": 1, "list": 1}
    assert found["topics"] == {"a": {"upload": found["purposes"]["upload"]}}
    await store.close()


@pytest.mark.servers("moto")
async def test_on_s3_retries_and_the_parts_of_a_multipart_upload_are_counted(moto_server: S3Server) -> None:
    async with FaultyS3(moto_server) as proxy:
        settings = S3Settings(
            endpoint=proxy.server.endpoint,
            bucket=new_bucket(),
            access_key_id=moto_server.access_key_id,
            secret_access_key=moto_server.secret_access_key,
            multipart_bytes=5 << 20,
        )
        backend = S3ObjectStore(settings, SystemClock(), random.Random(1))
        store = GuardedObjectStore(backend, PriorityGate(4), SystemClock())
        await store.probe()
        upload = store.for_purpose(Purpose.UPLOAD)
        proxy.first(2, Fault(status=503), method="PUT")  # S3 does not charge for its own errors
        await upload.put("big", [b"x" * (11 << 20)])
        await upload.put("small", [b"x"])
        cold = store.for_purpose(Purpose.COLD)
        await cold.get("small")
        proxy.first(1, Fault(status=404, code="NoSuchKey"), method="GET")  # it does for those of the caller
        with pytest.raises(ObjectNotFound):
            await cold.get("small")
        found = store.stats.accounts.snapshot()["purposes"]
        assert found["upload"]["requests"] == {"put": 6}  # begin, three parts, end; and one
        assert found["upload"]["sent_bytes"] == (11 << 20) + 1
        assert found["cold"] == {"requests": {"get": 2}, "received_bytes": 1, "sent_bytes": 0}
        assert found["other"]["requests"]["put"] >= 1
        await store.close()
