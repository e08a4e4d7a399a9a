"""Each right that Tidelog needs in its bucket, tried: with a server, and a proxy before it that denies or spoils."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support.s3_servers import S3Server
from tidelog.chaos.faulty_s3 import Fault, FaultyS3, Seen
from tidelog.doctor.rules_bucket import judge_rights
from tidelog.runtime.clock import SystemClock
from tidelog.storage.bucket.local import LocalObjectStore
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.open import open_store
from tidelog.storage.bucket.rights import PROBE_PREFIX, STALE_MS, RightsFacts, try_rights
from tidelog.storage.bucket.s3 import S3ObjectStore
from tidelog.storage.bucket.store import ObjectInfo, UnfinishedUpload
from tidelog.storage.settings import S3Settings

DENIED = Fault(status=403, code="AccessDenied")
ALL = ["put", "get", "ranged get", "head", "list", "conditional put", "delete"]
PARTS = ["multipart begin", "multipart part", "multipart list", "multipart abort"]


class Chosen:
    """The client of the running test."""

    client: Literal["aiobotocore", "obstore"] = "obstore"


@pytest.fixture(params=["aiobotocore", "obstore"])
def each_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chosen, "client", request.param)


@contextlib.asynccontextmanager
async def proxied(server: S3Server, **overrides: Any) -> AsyncIterator[tuple[FaultyS3[S3Server], S3ObjectStore]]:
    """A proxy before the server, and a store behind it whose bucket exists."""
    async with FaultyS3(server) as proxy:
        settings = proxy.server.settings(client=Chosen.client, **overrides)
        store = S3ObjectStore(settings, SystemClock(), random.Random(3))
        try:
            await store.start()
            proxy.requests.clear()
            yield proxy, store
        finally:
            await store.close()


def outcomes(facts: RightsFacts) -> dict[str, str]:
    return {each.right: each.outcome for each in facts.tries}


def bad(facts: RightsFacts) -> dict[str, str]:
    return {right: outcome for right, outcome in outcomes(facts).items() if outcome not in ("ok", "not-tried")}


def checks(facts: RightsFacts, **judging: bool) -> set[str]:
    return {each.check for each in judge_rights("here", facts, **judging) if each.level != "ok"}


async def nothing_left(store: S3ObjectStore) -> None:
    assert [each.key async for each in store.list("")] == []
    assert await store.unfinished("") == []


# --- stores that are well --------------------------------------------------------------------------------------------


async def test_every_right_is_tried_and_nothing_is_left_in_memory_or_in_a_directory(tmp_path: Path) -> None:
    memory, local = MemoryObjectStore(), LocalObjectStore(tmp_path / "bucket")
    for store in (memory, local):
        facts = await try_rights(store, SystemClock())
        assert outcomes(facts) == dict.fromkeys(ALL, "ok")
        assert checks(facts) == set()
        assert [each.key async for each in store.list("")] == []
        assert facts.left_behind == [] and facts.server_ms
        await store.close()


@pytest.mark.servers("moto")
async def test_every_right_is_tried_on_a_server_and_nothing_is_left(moto_server: S3Server, each_client: None) -> None:
    async with proxied(moto_server) as (proxy, store):
        facts = await try_rights(store, SystemClock())
        assert outcomes(facts) == dict.fromkeys([*ALL, *PARTS], "ok")
        assert checks(facts) == set()
        await nothing_left(store)
        assert all(PROBE_PREFIX in seen.path or seen.query or seen.method == "POST" for seen in proxy.requests)


async def test_a_store_before_which_a_gate_is_tries_by_its_backend(tmp_path: Path) -> None:
    store = open_store(S3Settings(), tmp_path, SystemClock(), random.Random(1))
    assert bad(await store.try_rights()) == {}
    await store.close()


# --- rights that are denied ------------------------------------------------------------------------------------------


def of_put(seen: Seen) -> bool:
    return seen.method == "PUT" and "partNumber" not in seen.query


def of_get(seen: Seen) -> bool:
    return seen.method == "GET" and PROBE_PREFIX in seen.path


def of_list(seen: Seen) -> bool:
    return seen.method == "GET" and "list-type" in seen.query


DENIALS: dict[str, tuple[Callable[[Seen], bool], dict[str, str], set[str]]] = {
    "put": (of_put, {"put": "denied"}, {"bucket.denied"}),
    "get": (of_get, {"get": "denied", "ranged get": "denied"}, {"bucket.denied"}),
    "head": (  # a conditional put that is refused asks by HEAD whether the object is its own
        lambda seen: seen.method == "HEAD",
        {"head": "denied", "conditional put": "denied"},
        {"bucket.denied", "bucket.no-conditions"},
    ),
    "list": (of_list, {"list": "denied"}, {"bucket.denied"}),
    "multipart-list": (
        lambda seen: seen.method == "GET" and "uploads" in seen.query,
        {"multipart list": "denied"},
        {"bucket.no-clean-up"},
    ),
    "conditional": (
        lambda seen: of_put(seen) and "-once" in seen.path,
        {"conditional put": "denied"},
        {"bucket.no-conditions"},
    ),
}


@pytest.mark.servers("moto")
@pytest.mark.parametrize("right", DENIALS)
async def test_a_denied_right_is_found_with_the_right_that_cures_it(moto_server: S3Server, right: str) -> None:
    is_denied, expected, found = DENIALS[right]
    async with proxied(moto_server) as (proxy, store):
        proxy.fault = lambda seen: DENIED if is_denied(seen) else None
        facts = await try_rights(store, SystemClock())
        assert bad(facts) == expected
        assert checks(facts) == found
        proxy.fault = lambda seen: None
        await nothing_left(store)
    if "bucket.denied" in found:
        assert all("allow s3:" in each.cure for each in judge_rights("here", facts) if each.level == "problem")


@pytest.mark.servers("moto")
async def test_what_may_not_be_deleted_is_named_and_removed_by_the_next_try_that_may(moto_server: S3Server) -> None:
    async with proxied(moto_server) as (proxy, store):
        proxy.fault = lambda seen: DENIED if seen.method in ("POST", "DELETE") and "uploads" not in seen.query else None
        facts = await try_rights(store, SystemClock())
        assert bad(facts) == {"multipart abort": "denied", "delete": "denied"}
        assert {"bucket.leftover", "bucket.no-clean-up", "bucket.denied"} <= checks(facts)
        keys = [each.key async for each in store.list("")]
        assert len(keys) == 2 and set(keys) <= set(facts.left_behind)
        proxy.fault = lambda seen: None
        assert bad(await try_rights(store, SystemClock())) == {}
        assert [each.key async for each in store.list("")] == keys  # they are young: another doctor may be at work

        class Later(SystemClock):
            def time_ms(self) -> int:
                return super().time_ms() + STALE_MS + 60_000

        facts = await try_rights(store, Later())
        assert [each.key async for each in store.list("")] == []
        assert checks(facts) == {"bucket.clock"}  # an hour off


@pytest.mark.servers("moto")
async def test_what_a_try_that_was_killed_has_left_is_removed_by_a_later_one(moto_server: S3Server) -> None:
    class LaterClock(SystemClock):
        def time_ms(self) -> int:
            return super().time_ms() + 2 * STALE_MS

    async with proxied(moto_server) as (_, store):
        await store.put(f"{PROBE_PREFIX}1-object", [b"x"])
        await store.begin_upload(f"{PROBE_PREFIX}1-parts")
        await try_rights(store, LaterClock())
        await nothing_left(store)


# --- servers and ways to them that are wrong -------------------------------------------------------------------------


@pytest.mark.servers("moto")
async def test_a_missing_bucket_is_not_created(moto_server: S3Server, each_client: None) -> None:
    settings = moto_server.settings(client=Chosen.client)
    store = S3ObjectStore(settings, SystemClock(), random.Random(3))
    facts = await try_rights(store, SystemClock())
    assert outcomes(facts)["put"] == "no-bucket"
    assert checks(facts) == {"bucket.missing"}
    assert checks(facts, may_create=True) == {"bucket.to-be-created"}
    assert facts.left_behind == []
    assert outcomes(await try_rights(store, SystemClock()))["put"] == "no-bucket"
    await store.close()


@pytest.mark.servers("moto")
@pytest.mark.parametrize(
    ("fault", "outcome", "check"),
    [
        (Fault(status=301, code="PermanentRedirect"), "wrong-region", "bucket.wrong-region"),
        (Fault(status=400, code="AuthorizationHeaderMalformed"), "wrong-region", "bucket.wrong-region"),
        (Fault(status=403, code="SignatureDoesNotMatch"), "denied", "bucket.denied"),
        (Fault(status=503, code="SlowDown"), "unreachable", "bucket.unreachable"),
        (Fault(status=400, code="InvalidRequest"), "refused", "bucket.refused"),
        (Fault(delay_s=30.0), "timeout", "bucket.timeout"),
    ],
    ids=["redirect", "region", "signature", "busy", "refused", "hangs"],
)
async def test_what_is_wrong_with_a_server_is_told_apart(
    moto_server: S3Server, each_client: None, monkeypatch: pytest.MonkeyPatch, fault: Fault, outcome: str, check: str
) -> None:
    monkeypatch.setattr("tidelog.storage.bucket.rights.ATTEMPT_S", 0.3)
    monkeypatch.setattr("tidelog.storage.bucket.rights.BUDGET_S", 0.5)
    monkeypatch.setattr("tidelog.storage.bucket.rights.CLEAN_UP_S", 1.0)
    async with proxied(moto_server) as (proxy, store):
        proxy.fault = lambda seen: fault
        facts = await try_rights(store, SystemClock())
        assert outcomes(facts)["put"] == outcome, facts
        assert check in checks(facts)
        proxy.fault = lambda seen: None


async def test_a_server_that_is_not_there_is_unreachable(each_client: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.storage.bucket.rights.BUDGET_S", 0.3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refuses connections
        settings = S3Settings(
            endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}",
            bucket="b",
            access_key_id="x",
            secret_access_key="y",
            client=Chosen.client,
        )
        store = S3ObjectStore(settings, SystemClock(), random.Random(3))
        facts = await try_rights(store, SystemClock())
        await store.close()
    assert outcomes(facts)["put"] == "unreachable"
    assert "bucket.unreachable" in checks(facts)


@pytest.mark.servers("moto")
async def test_answers_that_are_cut_or_changed_are_told_apart(
    moto_server: S3Server, each_client: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.storage.bucket.rights.BUDGET_S", 0.3)
    async with proxied(moto_server) as (proxy, store):
        proxy.fault = lambda seen: Fault(body_bytes=100) if of_get(seen) else None
        facts = await try_rights(store, SystemClock())
        assert outcomes(facts)["get"] == "short", facts
        assert "bucket.short" in checks(facts)
        proxy.fault = lambda seen: Fault(answer=b"<html>a proxy's page</html>".ljust(4096)) if of_get(seen) else None
        facts = await try_rights(store, SystemClock())
        assert outcomes(facts)["get"] == "wrong-bytes", facts
        assert "bucket.wrong-bytes" in checks(facts)
        assert "was it an S3 server's?" in next(each.detail for each in facts.tries if each.right == "get")
        proxy.fault = lambda seen: None
        await nothing_left(store)


@pytest.mark.servers("moto")
async def test_a_server_without_conditions_or_ranges_is_found(moto_server: S3Server, each_client: None) -> None:
    async with proxied(moto_server) as (proxy, store):
        proxy.fault = lambda seen: Fault(drop_headers=("If-None-Match",))
        facts = await try_rights(store, SystemClock())
        assert bad(facts) == {"conditional put": "unsupported"}
        assert checks(facts) == {"bucket.no-conditions"}
        assert checks(facts, wal_in_bucket=True) == {"bucket.cannot-fence"}
        proxy.fault = lambda seen: Fault(drop_headers=("Range",))
        facts = await try_rights(store, SystemClock())
        assert bad(facts) == {"ranged get": "unsupported"}
        proxy.fault = lambda seen: None
        await nothing_left(store)


@pytest.mark.servers("moto")
async def test_a_broker_with_much_patience_gives_the_tries_little(moto_server: S3Server) -> None:
    async with proxied(moto_server, retry_budget_ms=600_000, request_timeout_ms=60_000) as (proxy, store):
        proxy.fault = lambda seen: Fault(status=503, code="SlowDown") if of_put(seen) else None
        async with asyncio.timeout(60):
            facts = await try_rights(store, SystemClock())
        assert outcomes(facts)["put"] == "unreachable", "not a mere time-out: the server has said something"
        proxy.fault = lambda seen: None


# --- stores that are inconsistent, and tries that are interrupted ----------------------------------------------------


class Stale(MemoryObjectStore):
    """A store whose listings do not have what was just written."""

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        nothing: list[ObjectInfo] = []
        for each in nothing:
            yield each


class Undead(MemoryObjectStore):
    """A store that acknowledges deletes and does nothing."""

    async def delete(self, keys: Any) -> None:
        return None


async def test_stores_that_are_not_consistent_are_found() -> None:
    facts = await try_rights(Stale(), SystemClock())
    assert bad(facts) == {"list": "stale"} and checks(facts) == {"bucket.stale"}
    facts = await try_rights(Undead(), SystemClock())
    assert bad(facts) == {"delete": "stale"}


class Hanging(MemoryObjectStore):
    """A store whose gets hang."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def get(self, key: str) -> bytes:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_what_was_written_is_removed_when_the_tries_are_cancelled_or_time_out() -> None:
    store = Hanging()
    task = asyncio.create_task(try_rights(store, SystemClock()))
    await store.asked.wait()
    assert store.keys()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.keys() == []
    facts = await try_rights(store, SystemClock(), timeout_s=0.05)
    assert outcomes(facts)["get"] == "timeout"
    assert store.keys() == []


class Parted(MemoryObjectStore):
    """A store with multipart uploads that cannot be aborted."""

    def with_budget(self, attempt_s: float, budget_s: float) -> Parted:
        return self

    async def begin_upload(self, key: str) -> UnfinishedUpload:
        return UnfinishedUpload(key, "upload-1", 0)

    async def put_part(self, upload: UnfinishedUpload, body: bytes) -> None:
        return None

    async def abort(self, upload: UnfinishedUpload) -> None:
        await asyncio.Event().wait()


async def test_an_upload_that_cannot_be_aborted_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.storage.bucket.rights.CLEAN_UP_S", 0.05)
    facts = await try_rights(Parted(), SystemClock(), timeout_s=0.05)
    assert bad(facts) == {"multipart abort": "timeout"}
    assert len(facts.left_behind) == 1 and "upload-1" in facts.left_behind[0]
