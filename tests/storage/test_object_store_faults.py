"""What the S3 store does when the server or the network fails: a real server behind a proxy that fails on demand.

Every test runs with each of the clients of `s3.client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal

import pytest
from botocore.exceptions import ClientError

from tests.support.s3_servers import S3Server, new_bucket
from tidelog.chaos.faulty_s3 import Fault, FaultyS3, Seen
from tidelog.chaos.ports import free_port
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import ConfigError, InvalidInput, Unavailable
from tidelog.storage.bucket.common import BucketMissing, StoreAccessDenied
from tidelog.storage.bucket.gate import PriorityGate
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.s3 import S3ObjectStore
from tidelog.storage.bucket.s3_errors import classify
from tidelog.storage.bucket.store import ObjectExists, ObjectNotFound
from tidelog.storage.settings import S3Settings

MIB = 1 << 20
BUSY = Fault(status=503, code="SlowDown")

pytestmark = pytest.mark.servers("moto")


class Chosen:
    """The client of the running test."""

    client: Literal["aiobotocore", "obstore"] = "aiobotocore"


@pytest.fixture(autouse=True, params=["aiobotocore", "obstore"])
def _each_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chosen, "client", request.param)


def make_store(settings: S3Settings) -> S3ObjectStore:
    settings.client = Chosen.client
    return S3ObjectStore(settings, SystemClock(), random.Random(11))


@contextlib.asynccontextmanager
async def proxied(server: S3Server, **overrides: Any) -> AsyncIterator[tuple[FaultyS3[S3Server], S3ObjectStore]]:
    """A proxy before `server` and a store behind it whose bucket exists."""
    async with FaultyS3(server) as proxy:
        store = make_store(proxy.server.settings(multipart_bytes=5 * MIB, **overrides))
        try:
            await store.start()
            proxy.requests.clear()
            yield proxy, store
        finally:
            await store.close()


TRANSIENT = [
    Fault(status=503, code="SlowDown"),
    Fault(status=500, code="InternalError"),
    Fault(status=502, code="BadGateway"),
    Fault(status=429, code="TooManyRequests"),
    Fault(status=408, code="RequestTimeout"),
    Fault(status=409, code="OperationAborted"),
    Fault(reset=True),
]


@pytest.mark.parametrize("fault", TRANSIENT, ids=lambda fault: fault.code + str(fault.status))
async def test_a_transient_failure_of_any_operation_is_retried(moto_server: S3Server, fault: Fault) -> None:
    async with proxied(moto_server) as (proxy, store):

        async def put() -> None:
            await store.put("k", [b"data"])

        async def listed() -> None:
            assert [info.key async for info in store.list("")] == ["k"]

        async def ranges() -> None:
            assert await store.get_ranges("k", [(1, 3)]) == [b"at"]

        steps: dict[str, Callable[[], Awaitable[Any]]] = {
            "put": put,
            "get": lambda: store.get("k"),
            "get_ranges": ranges,
            "head": lambda: store.head("k"),
            "list": listed,
            "delete": lambda: store.delete(["k"]),
        }
        for operation, step in steps.items():
            proxy.first(2, fault)
            await step()
            figures = store.stats.snapshot()[operation]
            # aiohttp sends a request again by itself, once, if a kept connection turns out to be cut
            assert figures["retries"] in ((1, 2) if fault.reset else (2,)), operation
            assert (figures["count"], figures["errors"]) == (1, 0), operation


async def test_a_failure_that_lasts_ends_as_unavailable_inside_the_budget(moto_server: S3Server) -> None:
    async with proxied(moto_server, retry_budget_ms=700) as (proxy, store):
        proxy.fault = lambda seen: BUSY
        started = time.monotonic()
        with pytest.raises(Unavailable, match="503 SlowDown") as caught:
            await store.put("k", [b"data"])
        assert time.monotonic() - started < 10.0
        assert caught.value.retriable
        assert proxy.server.endpoint in str(caught.value)
        assert "check s3.endpoint" in str(caught.value).lower()
        assert len(proxy.requests) > 2
        assert store.stats.snapshot()["put"]["errors"] == 1
        proxy.fault = lambda seen: None
        await store.put("k", [b"data"])


async def test_an_outage_shorter_than_the_budget_is_only_a_delay(moto_server: S3Server) -> None:
    async with proxied(moto_server) as (proxy, store):
        over = time.monotonic() + 1.5
        proxy.fault = lambda seen: BUSY if time.monotonic() < over else None
        await asyncio.gather(*(store.put(f"k{i}", [b"%d" % i], if_absent=bool(i % 2)) for i in range(20)))
        assert time.monotonic() >= over
        assert len([info async for info in store.list("")]) == 20


async def test_a_slow_answer_is_given_up_and_asked_for_again(moto_server: S3Server) -> None:
    async with proxied(moto_server, request_timeout_ms=1_500) as (proxy, store):
        await store.put("k", [b"data"])
        proxy.first(2, Fault(delay_s=20.0), method="GET")
        started = time.monotonic()
        assert await store.get("k") == b"data"
        assert time.monotonic() - started < 20.0
        assert store.stats.snapshot()["get"]["retries"] == 2


async def test_a_body_cut_short_is_read_again(moto_server: S3Server) -> None:
    async with proxied(moto_server) as (proxy, store):
        data = random.Random(1).randbytes(300_000)
        await store.put("k", [data])
        proxy.first(2, Fault(body_bytes=100_000), method="GET")
        assert await store.get("k") == data
        proxy.first(1, Fault(body_bytes=0), method="GET")
        assert await store.get_ranges("k", [(10, 200_000)]) == [data[10:200_000]]


@pytest.mark.parametrize("losses", [1, 3])
async def test_a_conditional_create_whose_reply_was_lost_recognises_its_own_success(
    moto_server: S3Server, losses: int
) -> None:
    async with proxied(moto_server) as (proxy, store):
        proxy.first(losses, Fault(lose_reply=True), method="PUT")
        info = await store.put("fence", [b"mine"], if_absent=True)
        assert proxy.count("PUT") >= 2
        assert info.etag == (await store.head("fence")).etag
        assert await store.get("fence") == b"mine"
        with pytest.raises(ObjectExists):
            await store.put("fence", [b"mine"], if_absent=True)


async def test_a_conditional_create_that_lost_while_its_requests_were_lost_knows_that_too(
    moto_server: S3Server,
) -> None:
    async with proxied(moto_server) as (proxy, store):
        await store.put("fence", [b"mine"], if_absent=True)
        for fault in (Fault(lose_reply=True), Fault(reset=True), BUSY):
            proxy.first(2, fault, method="PUT")
            with pytest.raises(ObjectExists):
                await store.put("fence", [b"mine"], if_absent=True)
        proxy.first(2, BUSY, method="HEAD")
        with pytest.raises(ObjectExists):
            await store.put("fence", [b"mine"], if_absent=True)


async def test_a_conflict_between_conditional_creates_is_tried_again(moto_server: S3Server) -> None:
    async with proxied(moto_server) as (proxy, store):
        proxy.first(2, Fault(status=409, code="ConditionalRequestConflict"), method="PUT")
        await store.put("fence", [b"mine"], if_absent=True)
        assert store.stats.snapshot()["put"]["retries"] == 2
        proxy.first(1, Fault(status=400, code="RequestTimeout"), method="PUT")  # a body that came too slowly
        await store.put("other", [b"mine"], if_absent=True)


async def test_concurrent_creators_have_one_winner_though_replies_get_lost(moto_server: S3Server) -> None:
    async with proxied(moto_server) as (proxy, store):
        rng = random.Random(5)
        faults = [Fault(lose_reply=True), Fault(lose_reply=True), Fault(reset=True), BUSY, *[None] * 6]
        proxy.fault = lambda seen: rng.choice(faults)
        for round_ in range(3):
            bodies = [b"writer %d" % writer for writer in range(8)]
            creates = (store.put(f"fence/{round_}", [one], if_absent=True) for one in bodies)
            outcomes = await asyncio.gather(*creates, return_exceptions=True)
            won = [bodies[i] for i, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)]
            assert len(won) == 1, outcomes
            assert all(isinstance(o, ObjectExists) for o in outcomes if isinstance(o, BaseException)), outcomes
            assert await store.get(f"fence/{round_}") == won[0]


REFUSALS = [(403, "InvalidAccessKeyId", "access_key_id"), (403, "SignatureDoesNotMatch", "secret_access_key")]
REFUSALS += [(403, "AccessDenied", "policy"), (403, "RequestTimeTooSkewed", "clock")]


@pytest.mark.parametrize(("status", "code", "hint"), REFUSALS)
async def test_refused_access_is_said_clearly_and_not_retried(
    moto_server: S3Server, status: int, code: str, hint: str
) -> None:
    async with proxied(moto_server) as (proxy, store):
        proxy.fault = lambda seen: Fault(status=status, code=code)
        with pytest.raises(StoreAccessDenied, match=code) as caught:
            await store.put("k", [b"x"])
        assert hint in str(caught.value)
        assert len(proxy.requests) == 1


async def test_an_endpoint_where_nothing_listens_gives_a_clear_error_and_may_be_started_again(
    moto_server: S3Server,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refuses connections
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        store = make_store(S3Settings(endpoint=endpoint, bucket="b", access_key_id="x", secret_access_key="y"))
        started = time.monotonic()
        with pytest.raises(Unavailable, match="cannot connect") as caught:
            await store.probe()
        assert time.monotonic() - started < 20.0
        assert endpoint in str(caught.value)
        assert "s3.endpoint" in str(caught.value)
        await store.close()
    async with FaultyS3(moto_server) as proxy:
        proxy.fault = lambda seen: BUSY
        store = make_store(proxy.server.settings(retry_budget_ms=200))
        with pytest.raises(Unavailable):
            await store.probe()
        proxy.fault = lambda seen: None
        assert (await store.probe()).conditional_create
        await store.close()


@pytest.mark.parametrize("bucket", ["redirect", "certificate", "non-partial"])
async def test_the_name_of_a_bucket_does_not_change_what_a_failure_is(moto_server: S3Server, bucket: str) -> None:
    async with proxied(moto_server, bucket=f"{bucket}-{new_bucket()}") as (proxy, store):
        proxy.first(2, Fault(reset=True))
        await store.put("k", [b"x"], if_absent=True)
        assert proxy.count("PUT") == 3
    nowhere = f"http://127.0.0.1:{free_port()}"
    store = make_store(
        S3Settings(endpoint=nowhere, bucket=bucket, access_key_id="x", secret_access_key="y", retry_budget_ms=300)
    )
    with pytest.raises(Unavailable, match=f"cannot connect to {nowhere}"):
        await store.get("k")
    await store.close()


async def test_a_missing_bucket_is_created_or_said(moto_server: S3Server) -> None:
    bucket = new_bucket()
    strict = make_store(moto_server.settings(bucket, create_bucket=False))
    with pytest.raises(BucketMissing, match=bucket) as caught:
        await strict.start()
    assert caught.value.retriable
    with pytest.raises(BucketMissing):
        await strict.get("k")
    lax = [make_store(moto_server.settings(bucket)) for _ in range(3)]
    await asyncio.gather(*(store.start() for store in lax))
    await strict.start()
    with pytest.raises(ObjectNotFound):
        await strict.get("k")
    for store in (strict, *lax):
        await store.close()


def test_a_name_that_no_bucket_can_have_is_suspected_when_the_server_refuses_it_without_a_word() -> None:
    answer = {"Error": {"Code": "400", "Message": "Bad Request"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    error = classify(
        ClientError(answer, "HeadBucket"), what="finding the bucket", key="", bucket="nd", endpoint="http://there"
    )
    assert isinstance(error, InvalidInput)
    assert error.message == "finding the bucket was refused: http://there answered 400: Bad Request"
    assert error.hint is not None and "'nd'" in error.hint and "3 to 63" in error.hint


def ignores(*headers: str) -> Callable[[Seen], Fault]:
    return lambda seen: Fault(drop_headers=headers)


async def test_the_probe_unmasks_a_server_that_ignores_conditions(moto_server: S3Server) -> None:
    async with proxied(moto_server) as (proxy, store):
        proxy.fault = ignores("If-None-Match")
        found = await store.probe()
        assert not found.conditional_create
        assert len(found.problems) == 1
        assert "ignores `If-None-Match: *`" in found.problems[0]
        assert proxy.server.endpoint in found.problems[0]
        assert [info async for info in store.list("")] == []


async def test_the_probe_unmasks_a_server_that_cannot_do_conditions_or_ranges(moto_server: S3Server) -> None:
    async with proxied(moto_server) as (proxy, store):
        proxy.first(1, Fault(status=501, code="NotImplemented"), method="PUT", path="probe/")
        found = await store.probe()
        assert not found.conditional_create
        assert "does not support conditional create" in found.problems[0]
        proxy.fault = ignores("Range")
        found = await store.probe()
        assert found.conditional_create
        assert found.problems == (f"{proxy.server.endpoint} does not support range reads",)


async def test_a_multipart_put_survives_failing_parts_and_a_lost_completion(moto_server: S3Server) -> None:
    async with proxied(moto_server) as (proxy, store):
        data = random.Random(2).randbytes(11 * MIB)
        proxy.first(3, BUSY, method="PUT")
        await store.put("big", [data])
        assert await store.get("big") == data
        proxy.fault = lambda seen: Fault(lose_reply=True) if complete(seen) else None

        def complete(seen: Seen) -> bool:
            return seen.method == "POST" and "uploadId" in seen.query and sum(map(is_end, proxy.requests)) == 1

        def is_end(seen: Seen) -> bool:
            return seen.method == "POST" and "uploadId" in seen.query

        proxy.requests.clear()
        again = data[::-1]
        info = await store.put("big", [again])
        assert sum(map(is_end, proxy.requests)) == 2
        assert info.etag == (await store.head("big")).etag
        assert await store.get("big") == again
        assert await store.unfinished("") == []


async def test_a_multipart_put_that_fails_or_is_cancelled_leaves_no_parts_behind(moto_server: S3Server) -> None:
    async with proxied(moto_server, retry_budget_ms=300) as (proxy, store):
        data = bytes(16 * MIB)
        proxy.fault = lambda seen: BUSY if seen.query.get("partNumber") == "3" else None
        with pytest.raises(Unavailable, match="part 3"):
            await store.put("big", [data])
        assert await store.unfinished("") == []

        parts_arrive = asyncio.Event()

        def delay_parts(seen: Seen) -> Fault | None:
            if "partNumber" not in seen.query:
                return None
            parts_arrive.set()
            return Fault(delay_s=5.0)

        proxy.fault = delay_parts
        task = asyncio.ensure_future(store.put("big", [data]))
        await asyncio.wait_for(parts_arrive.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await store.unfinished("") == []
        with pytest.raises(ObjectNotFound):
            await store.head("big")


async def test_requests_in_flight_are_bounded(moto_server: S3Server) -> None:
    async with proxied(moto_server, max_concurrency=3) as (proxy, store):
        proxy.fault = lambda seen: Fault(delay_s=0.02)
        await asyncio.gather(*(store.put(f"k{i}", [b"x"]) for i in range(40)))
        assert proxy.most_in_flight == 3
        assert store.stats.snapshot()["put"]["in_flight"] == 0


async def test_neighbouring_ranges_share_a_get_and_distant_ones_do_not(moto_server: S3Server) -> None:
    async with proxied(moto_server) as (proxy, store):
        data = random.Random(3).randbytes(2 * MIB)
        await store.put("k", [data])
        ranges = [(0, 1000), (1000, 2000), (2000 + 65536, 70_000), (MIB, MIB + 5), (500, 1500)]
        assert await store.get_ranges("k", ranges) == [data[start:end] for start, end in ranges]
        assert proxy.count("GET") == 2


async def test_a_key_that_a_batch_delete_could_not_delete_is_not_taken_for_deleted(moto_server: S3Server) -> None:
    failed = b"<DeleteResult><Error><Key>k</Key><Code>%s</Code><Message>no</Message></Error></DeleteResult>"

    async with proxied(moto_server) as (proxy, store):
        await store.put("k", [b"x"])
        proxy.first(2, Fault(answer=failed % b"InternalError"), method="POST")
        await store.delete(["k"])
        assert proxy.count("POST") == 3
        proxy.first(1, Fault(answer=failed % b"AccessDenied"), method="POST")
        with pytest.raises(StoreAccessDenied):
            await store.delete(["k"])


@pytest.mark.parametrize("code", ["SlowDown", "ServiceUnavailable", "OperationAborted"])
async def test_a_key_that_a_busy_bucket_could_not_delete_is_deleted_again(moto_server: S3Server, code: str) -> None:
    failed = f"<DeleteResult><Error><Key>k</Key><Code>{code}</Code><Message>no</Message></Error></DeleteResult>"
    async with proxied(moto_server) as (proxy, store):
        await store.put("k", [b"x"])
        proxy.first(2, Fault(answer=failed.encode()), method="POST")
        await store.delete(["k"])
        with pytest.raises(ObjectNotFound):
            await store.get("k")


LOCKED = Fault(
    answer=b"<DeleteResult><Error><Key>k</Key><Code>InvalidRequest</Code><Message>Object is WORM protected and cannot"
    b" be overwritten</Message></Error></DeleteResult>"
)


@pytest.mark.parametrize("refusal", [LOCKED, Fault(status=405, code="MethodNotAllowed")], ids=["locked", "proxy"])
async def test_a_bucket_that_refuses_deletes_is_not_healthy(moto_server: S3Server, refusal: Fault) -> None:
    async with proxied(moto_server) as (proxy, store):
        guarded = GuardedObjectStore(store, PriorityGate(8), SystemClock())
        await guarded.put("k", [b"x"])
        proxy.first(1, refusal, method="POST")
        with pytest.raises(InvalidInput):
            await guarded.delete(["k"])
        (problem,) = guarded.health.problems()
        assert "delete fails" in problem and "refused" in problem
        await guarded.delete(["k"])
        assert guarded.health.problems() == []


async def test_a_success_that_no_s3_server_would_send_is_retried(moto_server: S3Server) -> None:
    """A proxy, or a portal, has answered: nothing was stored, and nothing is known to be absent."""
    portal = Fault(answer=b"<html>please log in</html>")
    async with proxied(moto_server, retry_budget_ms=1000) as (proxy, store):

        async def listed() -> None:
            assert [info.key async for info in store.list("")] == ["k", "new"]

        steps: dict[str, Callable[[], Awaitable[Any]]] = {
            "put": lambda: store.put("k", [b"data"]),
            "create": lambda: store.put("new", [b"data"], if_absent=True),
            "head": lambda: store.head("k"),
            "list": listed,
        }
        for step in steps.values():
            proxy.first(1, portal)
            await step()
        assert await store.get("k") == await store.get("new") == b"data"
        proxy.fault = lambda seen: portal
        for name in ("put", "head", "list"):
            with pytest.raises(Unavailable):
                await steps[name]()


async def test_a_page_of_no_s3_server_is_no_object(moto_server: S3Server) -> None:
    portal = Fault(answer=b"<html>please log in</html>")
    async with proxied(moto_server, retry_budget_ms=1000) as (proxy, store):
        await store.put("k", [b"data"])
        proxy.first(1, portal)
        assert await store.get("k") == b"data"
        proxy.fault = lambda seen: portal
        with pytest.raises(Unavailable):
            await store.get("k")


def page(*keys: str, token: str = "", truncated: bool = True) -> Fault:
    """A page of a listing."""
    rows = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-11-29T00:00:00.000Z</LastModified><ETag>e</ETag>"
        "<Size>1</Size></Contents>"
        for key in keys
    )
    follows = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    head = f"<IsTruncated>{str(truncated).lower()}</IsTruncated>{follows}"
    return Fault(answer=f"<ListBucketResult>{head}{rows}</ListBucketResult>".encode())


async def test_a_page_without_keys_is_not_the_end_of_a_listing(moto_server: S3Server) -> None:
    pages = {("", ""): page("a"), ("a", ""): page(token="t1"), ("", "t1"): page(token="t2"), ("", "t2"): page("b")}
    async with proxied(moto_server) as (proxy, store):
        await store.put("c", [b"x"])

        def decide(seen: Seen) -> Fault | None:
            return pages.get((seen.query.get("start-after", ""), seen.query.get("continuation-token", "")))

        proxy.fault = decide
        assert [info.key async for info in store.list("")] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "answer", [page(), page(token="t"), page("a", "b")], ids=["no-token", "same-token", "same-keys"]
)
async def test_a_listing_that_does_not_go_on_neither_ends_nor_repeats_for_ever(
    moto_server: S3Server, answer: Fault
) -> None:
    async with proxied(moto_server) as (proxy, store):
        proxy.fault = lambda seen: answer
        with pytest.raises(Unavailable, match="does not go on"):
            async with asyncio.timeout(20):
                assert [info async for info in store.list("")]
        assert len(proxy.requests) <= 2


async def test_a_listing_of_uploads_that_repeats_itself_is_given_up(moto_server: S3Server) -> None:
    head = b"<IsTruncated>true</IsTruncated><NextKeyMarker>k</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>"
    async with proxied(moto_server) as (proxy, store):
        answer = Fault(answer=b"<ListMultipartUploadsResult>" + head + b"</ListMultipartUploadsResult>")
        proxy.fault = lambda seen: answer
        with pytest.raises(Unavailable, match="does not go on"):
            async with asyncio.timeout(20):
                await store.unfinished("")


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "localhost:9000"},
        {"bucket": ""},
        {"access_key_id": "only"},
        {"multipart_bytes": MIB},
        {"max_concurrency": 0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_settings_that_cannot_work_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"s3.{next(iter(wrong))}"):
        make_store(S3Settings(**{"endpoint": "http://127.0.0.1:9000", "bucket": "b", **wrong}))


async def test_a_request_the_server_calls_wrong_is_not_retried(moto_server: S3Server) -> None:
    async with proxied(moto_server) as (proxy, store):
        proxy.fault = lambda seen: Fault(status=400, code="InvalidRequest")
        with pytest.raises(InvalidInput, match="InvalidRequest"):
            await store.put("k", [b"x"])
        assert len(proxy.requests) == 1


async def test_a_proxy_that_redirects_everything_is_a_clear_error_and_no_endless_loop(moto_server: S3Server) -> None:
    async with proxied(moto_server) as (proxy, store):
        await store.put("k", [b"data"])
        proxy.requests.clear()
        for status in (301, 302, 307):
            proxy.fault = lambda seen, status=status: Fault(status=status, code="PermanentRedirect")  # type: ignore[misc]
            with pytest.raises(ConfigError, match=r"wrong region|redirect"):
                await store.get("k")
            with pytest.raises(ConfigError):
                await store.delete(["k"])
        assert len(proxy.requests) == 6
        proxy.fault = lambda seen: None
