"""Hostile clients at the admin HTTP listener: bounded and forgotten, while good ones are answered."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging

import pytest

from tests.broker.test_admin_http import Place, get, serving
from tests.support.kafka_world import until
from tidelog.console.app import ConsolePlace, console_app
from tidelog.runtime.log import TextFormatter


async def connect(place: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = place.server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def closed(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(60):
        try:
            await reader.read()
        except ConnectionResetError:
            return True
        return True


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /healthz HT",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nX-Slow: ",
        b"POST /upload HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\nx",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
async def test_a_connection_outside_of_a_handler_ends_in_time(start: bytes) -> None:
    async with serving() as (place, session):
        place.server.limits.timeout_s = 0.2
        reader, writer = await connect(place)
        writer.write(start)
        assert await closed(reader)
        writer.transport.abort()
        await get(session, "/healthz")
        await session.close()
        await until(lambda: place.server.limits.connections == 0, "forgotten")


async def test_a_handler_does_not_wait_for_a_body_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    console = console_app(ConsolePlace(admin_url=lambda: "", bootstrap=lambda: ""))
    async with serving(console=console) as (place, session):
        limits = place.server.limits
        limits.max_connections, limits.timeout_s = 3, 0.2
        hostile = [await connect(place) for _ in range(3)]
        for _, writer in hostile:
            writer.write(
                b"POST /console/api/session HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Tidelog-Console: 1\r\n"
                b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
            )
        for reader, writer in hostile:
            assert await closed(reader)
            writer.transport.abort()
        await until(lambda: limits.connections == 0, "forgotten")
        await get(session, "/healthz")
        assert limits.dropped == {"connections": 0, "late": 3}
    assert "Error handling request" not in caplog.text


async def test_an_answer_that_is_not_taken_is_given_up() -> None:
    async with serving() as (place, session):
        place.server.limits.timeout_s = 0.3
        for number in range(900):
            place.metrics.produced(f"topic-{number:0200}", 1, 1)
        _, writer = await connect(place)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 40)
        await until(lambda: place.server.limits.dropped["late"] == 1, "dropped")
        writer.transport.abort()
        await session.close()
        await until(lambda: place.server.limits.connections == 0, "forgotten")


async def test_connections_are_bounded_and_a_long_request_is_not_cut() -> None:
    async with serving() as (place, session):
        limits = place.server.limits
        limits.max_connections, limits.timeout_s = 3, 0.2
        going_on = asyncio.Event()

        async def slow() -> dict[int, int]:
            await going_on.wait()
            return {}

        place.upload = slow
        upload = asyncio.ensure_future(session.post("/upload"))
        await until(lambda: limits.connections == 1, "the request is in")
        hostile = [await connect(place) for _ in range(10)]
        await until(lambda: limits.dropped["connections"] == 8, "too many")
        await until(lambda: limits.dropped["late"] == 2, "and the others were late")
        going_on.set()
        assert (await upload).status == 200
        await get(session, "/healthz")
        for _, writer in hostile:
            writer.transport.abort()


async def test_a_head_that_is_too_large_and_garbage_are_refused() -> None:
    async with serving() as (place, session):
        for raw in (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00" * 100, b"\x00" * 1000):
            reader, writer = await connect(place)
            writer.write(raw)
            async with asyncio.timeout(60):
                assert b" 400 " in await reader.readline()
            writer.transport.abort()
        await get(session, "/healthz")


async def answered(place: Place, raw: bytes) -> bytes:
    """Send bytes on a connection of their own; return the first line of the answer."""
    reader, writer = await connect(place)
    writer.write(raw)
    try:
        async with asyncio.timeout(60):
            return await reader.readline()
    finally:
        writer.transport.abort()


async def test_requests_that_are_not_http_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(token="secret") as (place, session):
        with caplog.at_level(logging.INFO):
            for raw in (
                b"GET / HTTP/1.1\r\nno header\r\n\r\n",
                b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
                b"POST /token HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
                b"GET http://[::1/ HTTP/1.1\r\nHost: a\r\n\r\n",
            ):
                for _ in range(10):
                    assert b" 400 " in await answered(place, raw)
        await get(session, "/healthz")
    assert [record for record in caplog.records if record.exc_info] == []
    told = [record for record in caplog.records if "not valid HTTP" in record.getMessage()]
    assert 0 < len(told) <= 10 and len(caplog.records) <= 10
    assert vars(told[0])["client"] == "127.0.0.1" and vars(told[0])["error"].startswith("Invalid header token")


async def test_a_handler_that_fails_is_told_with_its_traceback_within_limits(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> dict[int, int]:
        raise ZeroDivisionError("a defect")

    async with serving() as (place, session):
        place.upload = broken
        for _ in range(30):
            async with session.post("/upload") as response:
                assert response.status == 500
    told = [record for record in caplog.records if record.exc_info]
    assert 0 < len(told) <= 10 and "a defect" in caplog.text


async def test_a_body_is_not_decompressed() -> None:
    """A kilobyte would stand for a megabyte, which the event loop unpacks before it is known who asks."""
    console = console_app(ConsolePlace(admin_url=lambda: "", bootstrap=lambda: ""))
    async with serving(token="secret", console=console) as (place, _):
        body = gzip.compress(json.dumps({"key": "x" * 100_000}).encode())
        head = (
            "POST /console/api/session HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Tidelog-Console: 1\r\n"
            f"Content-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        assert b" 400 " in await answered(place, head.encode() + body)


async def test_a_path_without_a_token_forges_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.setFormatter(TextFormatter())
    async with serving(token="secret") as (place, _):
        forged = "12:00:00.000%20ERROR%20an%20operator%20accepted%20the%20loss%20of%20a%20WAL%1b[2J"
        head = f"POST /x%0a{forged} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer wrong\r\nContent-Length: 0\r\n\r\n"
        assert b" 401 " in await answered(place, head.encode())
    (line,) = caplog.text.splitlines()
    assert line.isprintable() and "a request with a wrong token was refused" in line and "accepted the loss" in line
