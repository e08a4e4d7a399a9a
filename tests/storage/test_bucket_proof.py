"""`BucketProof`: nothing is written to a bucket before an object of the cluster was found in it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tidelog.runtime.clock import SystemClock
from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.common import StoreAccessDenied
from tidelog.storage.bucket.gate import PriorityGate
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.proof import LOOKS, SAMPLE, BucketProof, WrongBucket
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.bucket.store import ObjectInfo

CLUSTER = "c"
KEYS = [f"{CLUSTER}/objects/{number}" for number in range(SAMPLE)]


class FastClock(SystemClock):
    """A clock whose pauses are over at once, and tell that they were made."""

    def __init__(self) -> None:
        self.pauses = 0

    async def sleep(self, seconds: float) -> None:
        self.pauses += 1
        await asyncio.sleep(0)


class Bucket(MemoryObjectStore):
    """Refuses the first `denials` looks, and knows what was ever written."""

    denials = 0

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        self.written.append(key)
        return await super().put(key, body, if_absent=if_absent)

    async def head(self, key: str) -> ObjectInfo:
        if self.denials:
            self.denials -= 1
            raise StoreAccessDenied("403")
        return await super().head(key)


class Case:
    def __init__(self, *, accepted: str = "") -> None:
        self.clock = FastClock()
        self.proof = BucketProof(self.clock, accepted=lambda cluster_id: cluster_id == accepted, place="/d")
        self.bucket = Bucket()
        self.store = GuardedObjectStore(self.bucket, PriorityGate(4), self.clock, proof=self.proof)
        self.keys: Sequence[str] = KEYS

    async def prove(self) -> None:
        await self.proof.prove(self.store, CLUSTER, lambda count: self.keys[:count])


async def test_a_cluster_without_objects_takes_any_bucket() -> None:
    case = Case()
    case.keys = []
    await case.prove()
    await case.store.put("key", [b"x"])


@pytest.mark.parametrize("found", KEYS)
async def test_one_of_the_newest_objects_is_enough(found: str) -> None:
    case = Case()
    await case.bucket.put(found, [b"x"])
    await case.prove()
    assert case.proof.is_proven
    assert case.clock.pauses == 0


async def test_a_bucket_without_them_is_refused_and_gets_nothing() -> None:
    case = Case()
    await case.bucket.put("c/objects/older", [b"x"])
    writes = [
        asyncio.create_task(case.store.put("c/objects/new", [b"x"])),
        asyncio.create_task(case.store.for_purpose(Purpose.METADATA).put("c/metadata/state", [b"x"])),
        asyncio.create_task(case.store.delete(["c/objects/older"])),
        asyncio.create_task(case.store.check("probe/health-1")),
    ]
    with pytest.raises(WrongBucket) as refused:
        await case.prove()
    assert refused.value.hint is not None
    assert "tidelog object accept-loss bucket.c --data-dir /d" in refused.value.hint
    assert case.clock.pauses == LOOKS - 1
    with pytest.raises(WrongBucket):
        await case.prove()
    assert case.clock.pauses == LOOKS - 1, "it is known by now"
    assert not any(write.done() for write in writes)
    assert case.bucket.written == ["c/objects/older"]
    assert [info.key async for info in case.bucket.list("")] == ["c/objects/older"]
    for write in writes:
        write.cancel()


async def test_writes_go_on_once_it_is_proven() -> None:
    case = Case()
    await case.bucket.put(KEYS[0], [b"x"])
    write = asyncio.create_task(case.store.put("key", [b"x"]))
    await asyncio.sleep(0)
    assert not write.done()
    await case.prove()
    await write


async def test_objects_that_were_replaced_meanwhile_are_looked_for_under_their_new_names() -> None:
    case = Case()
    await case.bucket.put("c/objects/joined", [b"x"])
    names = iter([KEYS, KEYS, ["c/objects/joined"]])
    await case.proof.prove(case.store, CLUSTER, lambda _count: next(names))
    assert case.clock.pauses == 2


async def test_a_bucket_that_denies_access_proves_nothing() -> None:
    case = Case()
    await case.bucket.put(KEYS[0], [b"x"])
    case.bucket.denials = 2
    for _ in range(2):
        with pytest.raises(StoreAccessDenied):
            await case.prove()
        assert not case.proof.is_proven
    await case.prove()


async def test_what_an_operator_has_given_up_is_not_asked_for() -> None:
    case = Case(accepted=CLUSTER)
    await case.prove()
    assert case.proof.is_proven


async def test_the_objects_of_another_cluster_were_not_given_up() -> None:
    case = Case(accepted="another")
    with pytest.raises(WrongBucket):
        await case.prove()
