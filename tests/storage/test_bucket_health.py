"""What counts as an answer of the bucket, and what as a failure."""

from __future__ import annotations

import pytest

from tests.support.fake_storage import FakeClock
from tidelog.runtime.errors import InvalidInput, Unavailable
from tidelog.storage.bucket.common import BucketMissing
from tidelog.storage.bucket.gate import PriorityGate
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.store import ObjectExists, ObjectNotFound, StoreCapabilities


def watched() -> tuple[MemoryObjectStore, GuardedObjectStore]:
    memory = MemoryObjectStore()
    return memory, GuardedObjectStore(memory, PriorityGate(64), FakeClock())


async def test_every_call_goes_through_and_counts_as_a_success() -> None:
    memory, store = watched()
    assert (store.url, store.stats) == (memory.url, memory.stats)
    assert store.health.report()["last_success_ms"] is None
    assert (await store.put("k", [b"ab", b"c"])).size == 3
    assert await store.get("k") == b"abc"
    assert await store.get_ranges("k", [(1, 3)]) == [b"bc"]
    assert (await store.head("k")).key == "k"
    assert [info.key async for info in store.list("")] == ["k"]
    await store.delete(["k"])
    assert (await store.probe()).conditional_create
    report = store.health.report()
    assert report["healthy"]
    assert report["last_success_ms"] > 0
    await store.close()


async def test_not_found_and_exists_are_answers_of_a_healthy_bucket() -> None:
    _, store = watched()
    store.health.failed("get", Unavailable("before"))
    with pytest.raises(ObjectNotFound):
        await store.get("absent")
    assert store.health.failures_in_a_row == 0
    await store.put("k", [b""])
    store.health.failed("put", Unavailable("before"))
    with pytest.raises(ObjectExists):
        await store.put("k", [b""], if_absent=True)
    assert store.health.report()["healthy"]


async def test_failures_are_counted_until_the_next_success_and_the_last_error_stays() -> None:
    memory, store = watched()

    async def fail(key: str) -> bytes:
        raise Unavailable("the bucket answers 503")

    working = memory.get
    memory.get = fail  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(Unavailable):
            await store.get("k")
    report = store.health.report()
    assert (report["healthy"], report["failures_in_a_row"]) == (False, 2)
    memory.get = working  # type: ignore[method-assign]
    with pytest.raises(ObjectNotFound):
        await store.get("k")
    report = store.health.report()
    assert (report["healthy"], report["last_error"]) == (True, "the bucket answers 503")


async def test_a_wrong_question_says_nothing_about_the_bucket() -> None:
    _, store = watched()
    await store.put("k", [b"abc"])
    before = store.health.report()
    with pytest.raises(InvalidInput):
        await store.get_ranges("k", [(2, 1)])
    assert store.health.report() == before


async def test_failures_from_before_the_bucket_existed_end_with_the_probe_that_creates_it() -> None:
    memory, store = watched()
    for kind in store.health.kinds:
        store.health.failed(kind, BucketMissing("bucket new does not exist"))
    assert len(store.health.problems()) == 4
    await store.probe()
    assert store.health.problems() == []

    async def fail() -> StoreCapabilities:
        raise Unavailable("the bucket answers 503")

    store.health.failed("put", Unavailable("the bucket answers 503"))
    memory.probe = fail  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await store.probe()
    assert store.health.problems() != [], "a probe that fails says nothing good"
