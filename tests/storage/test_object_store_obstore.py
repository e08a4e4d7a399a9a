"""What is peculiar to obstore: where it takes credentials from, how a process ends that used it, and its bodies."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from aiobotocore.client import AioBaseClient
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.s3_servers import ROOT, S3Server
from tidelog.chaos.ports import free_port
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import Closed, ConfigError, Unavailable
from tidelog.storage.bucket.common import StoreAccessDenied
from tidelog.storage.bucket.s3 import S3ObjectStore
from tidelog.storage.bucket.s3_client import open_client
from tidelog.storage.settings import S3Settings

pytestmark = pytest.mark.servers("minio")


async def round_trip(settings: S3Settings) -> None:
    store = S3ObjectStore(settings, SystemClock(), random.Random(3))
    try:
        await store.start()
        await store.put("k", [b"data"], if_absent=True)
        assert await store.get("k") == b"data"
    finally:
        await store.close()


def clients_in_memory() -> int:
    gc.collect()
    return sum(isinstance(one, AioBaseClient) for one in gc.get_objects())


def settings_of(server: S3Server, **overrides: Any) -> S3Settings:
    return server.settings(client="obstore", **overrides)


def test_who_only_reads_and_writes_objects_needs_no_second_client(
    minio_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 0.1 s of CPU time: a task of Spark opens a store of its own."""
    settings, opened = settings_of(minio_server), list[int]()
    asyncio.run(round_trip(settings))

    async def read_only() -> None:
        store = S3ObjectStore(settings, SystemClock(), random.Random(3))
        try:
            assert await store.get("k") == b"data"
            assert await store.get_ranges("k", [(1, 3)]) == [b"at"]
            await store.put("other", [b"data"])
            assert not opened
            assert (await store.head("other")).size == 4
            assert opened == [1], "what only the second client can do opens it"
        finally:
            await store.close()
        with pytest.raises(Closed):
            await store.get("k")

    async def counted(*arguments: Any) -> Any:
        opened.append(1)
        return await open_client(*arguments)

    monkeypatch.setattr("tidelog.storage.bucket.s3.open_client", counted)
    asyncio.run(read_only())


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "http://"},
        {"endpoint": "http://bad host"},
        {"endpoint": "http://[::1"},
        {"endpoint": "http://127.0.0.1:port"},
        {"region": "over there"},
        {"bucket": "my bucket"},
    ],
)
def test_what_no_request_can_be_sent_with_is_told_before_one_is(wrong: dict[str, str]) -> None:
    """obstore's threads panicked."""
    settings = {"endpoint": "http://127.0.0.1:9", "bucket": "bucket", "client": "obstore", **wrong}
    with pytest.raises(ConfigError, match=f"s3.{next(iter(wrong))} is '"):
        S3ObjectStore(S3Settings(**settings), SystemClock(), random.Random(3))  # type: ignore[arg-type]


async def test_a_request_that_waits_for_its_turn_when_the_store_is_closed_is_told_so() -> None:
    arrived, going = asyncio.Event(), asyncio.Event()

    async def answer(_request: web.Request) -> web.Response:
        arrived.set()
        await going.wait()
        return web.Response(body=b"data")

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(application) as server:
        settings = S3Settings(
            endpoint=str(server.make_url("")).rstrip("/"),
            bucket="bucket",
            client="obstore",
            access_key_id="x",
            secret_access_key="y",
            max_concurrency=1,
        )
        store = S3ObjectStore(settings, SystemClock(), random.Random(3))
        first, second = asyncio.create_task(store.get("a")), asyncio.create_task(store.get("b"))
        async with asyncio.timeout(30):
            await arrived.wait()
            await store.close()
            going.set()
            with pytest.raises(Closed):
                await second
            await asyncio.gather(first, return_exceptions=True)


async def test_a_view_with_a_budget_shortens_no_time_outs_of_the_store(
    minio_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request may be the first that needs the second client, which all views share."""
    opened = list[int]()

    async def noted(settings: S3Settings, *arguments: Any) -> Any:
        opened.append(settings.request_timeout_ms)
        return await open_client(settings, *arguments)

    monkeypatch.setattr("tidelog.storage.bucket.s3.open_client", noted)
    settings = settings_of(minio_server, request_timeout_ms=20_000)
    await round_trip(settings)
    store = S3ObjectStore(settings, SystemClock(), random.Random(3))
    try:
        assert await store.get("k") == b"data"
        await store.with_budget(3.0, 4.0).head("k")
    finally:
        await store.close()
    assert opened == [20_000, 20_000]


def test_credentials_come_by_the_chain_that_botocore_has(
    minio_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in minio_server.environment().items():
        monkeypatch.setenv(name, value)
    asyncio.run(round_trip(settings_of(minio_server, access_key_id="", secret_access_key="")))


def test_configured_credentials_do_not_mix_with_those_of_the_environment(
    minio_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "somebody-elses")
    asyncio.run(round_trip(settings_of(minio_server)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ENDPOINT_URL_S3", "ELSEWHERE"),
        ("AWS_ENDPOINT_URL", "ELSEWHERE"),
        ("AWS_SKIP_SIGNATURE", "true"),
        ("AWS_CONDITIONAL_PUT", "disabled"),
        ("AWS_S3_EXPRESS", "true"),
        ("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true"),
    ],
)
def test_the_environment_does_not_change_where_and_how_requests_are_sent(
    minio_server: S3Server, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value.replace("ELSEWHERE", f"http://127.0.0.1:{free_port()}"))
    asyncio.run(round_trip(settings_of(minio_server, retry_budget_ms=500)))


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
@pytest.mark.parametrize("client", ["aiobotocore", "obstore"])
async def test_without_an_endpoint_nothing_is_sent_to_the_one_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, client: Literal["aiobotocore", "obstore"], name: str
) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(f"{request.method} {request.path}")
        return web.Response(status=404)

    elsewhere = web.Application()
    elsewhere.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(elsewhere) as server:
        monkeypatch.setenv(name, str(server.make_url("")))
        settings = S3Settings(
            bucket="b",
            region="nowhere-1",  # a host that does not exist
            client=client,
            access_key_id="x",
            secret_access_key="y",
            request_timeout_ms=1500,
            retry_budget_ms=100,
        )
        store = S3ObjectStore(settings, SystemClock(), random.Random(3))
        try:
            for request in (store.get, store.head):
                with pytest.raises(Unavailable):
                    await request("k")
        finally:
            await store.close()
    assert asked == []


async def test_a_store_without_credentials_keeps_nothing_of_its_attempts_and_works_once_it_has_some(
    minio_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each attempt kept a client, 12 MB: a broker whose role was missing for a while ran out of memory."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "absent"))
    before = clients_in_memory()
    store = S3ObjectStore(
        settings_of(minio_server, access_key_id="", secret_access_key=""), SystemClock(), random.Random(3)
    )
    try:
        for _ in range(3):
            with pytest.raises(StoreAccessDenied, match="no usable credentials"):
                await store.get("k")
        assert clients_in_memory() <= before
        for name, value in minio_server.environment().items():
            monkeypatch.setenv(name, value)
        await store.start()
        await store.put("k", [b"data"])
        assert await store.get("k") == b"data"
    finally:
        await store.close()


async def test_wrong_credentials_are_said(minio_server: S3Server) -> None:
    settings = settings_of(minio_server)
    await round_trip(settings)
    store = S3ObjectStore(
        settings_of(minio_server, bucket=settings.bucket, secret_access_key="wrong"),
        SystemClock(),
        random.Random(3),
    )
    try:
        with pytest.raises(StoreAccessDenied, match=r"SignatureDoesNotMatch.*s3\.secret_access_key"):
            await store.get("k")
    finally:
        await store.close()


async def test_bodies_of_many_buffers_arrive_in_order(minio_server: S3Server) -> None:
    store = S3ObjectStore(settings_of(minio_server), SystemClock(), random.Random(3))
    try:
        await store.start()
        rng = random.Random(1)
        for sizes in ([100_000] * 7, [1] * 1000, [0, 300_000, 0, 5], [40_000, 7]):
            buffers = [rng.randbytes(size) for size in sizes]
            body = [
                memoryview(one) if n % 3 == 0 else bytearray(one) if n % 3 == 1 else one
                for n, one in enumerate(buffers)
            ]
            await store.put("k", body)
            assert await store.get("k") == b"".join(buffers)
    finally:
        await store.close()


ENDS_AT_ONCE = """
import asyncio, random, sys
from tidelog.runtime.clock import SystemClock
from tidelog.storage.bucket.s3 import S3ObjectStore
from tidelog.storage.bucket.s3_client import open_client
from tidelog.storage.settings import S3Settings

async def main():
    endpoint, bucket, key, secret, how = sys.argv[1:]
    settings = S3Settings(
        endpoint=endpoint, bucket=bucket, access_key_id=key, secret_access_key=secret, client="obstore"
    )
    store = S3ObjectStore(settings, SystemClock(), random.Random(1))
    await store.start()
    body = bytes(4 << 20)
    await asyncio.gather(*(store.put(f"k{n}", [body]) for n in range(4)))
    gets = [asyncio.ensure_future(store.get(f"k{n % 4}")) for n in range(16)]
    if how == "cancelled":
        await asyncio.wait(gets, return_when=asyncio.FIRST_COMPLETED)
        for one in gets:
            one.cancel()
    await asyncio.gather(*gets, return_exceptions=True)
    await store.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["done", "cancelled"])
def test_a_process_that_closed_its_store_ends_cleanly(minio_server: S3Server, how: str) -> None:
    """Without the rest at the end of `close`, one in six of these was aborted while the interpreter shut down."""
    settings = settings_of(minio_server)
    child = [sys.executable, "-c", ENDS_AT_ONCE, settings.endpoint, settings.bucket]
    for _ in range(6):
        ended = subprocess.run(
            [*child, settings.access_key_id, settings.secret_access_key, how],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
