"""The console's files, headers and refusals, over a real socket, without a cluster."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from tidelog.console.app import ConsolePlace, console_app
from tidelog.console.assets import load_assets
from tidelog.console.guard import HEADER, SECURITY_HEADERS

STATIC = Path(__file__).resolve().parents[2] / "tidelog" / "console" / "static"
NOBODY = "http://127.0.0.1:9"
"""The discard port: nothing listens there."""


@contextlib.asynccontextmanager
async def console() -> AsyncIterator[aiohttp.ClientSession]:
    root = web.Application()
    root.add_subapp("/console", console_app(ConsolePlace(admin_url=lambda: NOBODY, bootstrap=lambda: "127.0.0.1:9")))
    runner = web.AppRunner(root, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
            yield session
    finally:
        await runner.cleanup()


async def answer(session: aiohttp.ClientSession, method: str, path: str | URL, **more: Any) -> tuple[int, Any]:
    async with session.request(method, path, allow_redirects=False, **more) as response:
        for name, value in SECURITY_HEADERS.items():
            assert response.headers[name] == value, f"{method} {path} lacks {name}"
        if response.content_type == "application/json":
            return response.status, await response.json()
        return response.status, await response.read()


async def test_every_file_is_served_as_what_it_is_and_only_those() -> None:
    files = {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in STATIC.rglob("*") if path.is_file()}
    assert set(load_assets()) == set(files)
    async with console() as session:
        for name, body in files.items():
            assert await answer(session, "GET", f"/console/{name}") == (200, body)
        assert (await answer(session, "GET", "/console/"))[1] == files["index.html"]
        assert (await answer(session, "GET", "/console"))[0] == 308
        for path in ("app.py", "../app.py", "%2e%2e/app.py", "..%2fapp.py", "%00", "index.html/", "api/"):
            async with session.get(URL(f"/console/{path}", encoded=True)) as response:
                assert response.status in (403, 404), path


async def test_a_file_that_the_browser_has_is_not_sent_again() -> None:
    async with console() as session:
        async with session.get("/console/app.js") as first:
            etag = first.headers["ETag"]
            assert first.headers["Cache-Control"] == "no-cache"
        assert await answer(session, "GET", "/console/app.js", headers={"If-None-Match": etag}) == (304, b"")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "session"),
        ("POST", "session"),
        ("DELETE", "session"),
        ("GET", "read/any/status"),
        ("POST", "change/balancer/run"),
        ("GET", "records?topic=t"),
        ("POST", "produce"),
        ("POST", "group/reset"),
        ("GET", "nothing"),
    ],
)
async def test_requests_of_other_web_pages_are_refused_before_anything_is_asked(method: str, path: str) -> None:
    async with console() as session:
        for headers in (
            {},
            {HEADER: "1", "Origin": "http://evil.example"},
            {HEADER: "1", "Sec-Fetch-Site": "cross-site"},
            {HEADER: "1", "Host": "evil.example"},
            {"Origin": "http://evil.example", "Content-Type": "text/plain"},
        ):
            status, body = await answer(session, method, f"/console/api/{path}", headers=headers)
            assert status == 403, (headers, body)
        status, _ = await answer(session, "OPTIONS", f"/console/api/{path}", headers={"Origin": "http://evil.example"})
        assert status == 403, "a preflight gives no permission"


async def test_a_cluster_that_is_away_is_an_error_with_a_hint_and_shows_nothing() -> None:
    async with console() as session:
        for method, path in (("GET", "session"), ("GET", "read/any/status"), ("GET", "groups")):
            status, body = await answer(session, method, f"/console/api/{path}", headers={HEADER: "1"})
            assert status == 503
            assert "does not answer" in body["error"]
            assert body["hint"]


def test_the_pages_make_no_markup_of_strings_and_name_no_other_host() -> None:
    """Every text goes through text nodes: these are the names by which a string becomes markup, code or a style."""
    sinks = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|srcdoc|"
        r"\beval\b|new Function|setHTML|javascript:|import\(|setTimeout\(\s*[\"'`]"
    )
    for path in STATIC.rglob("*"):
        text = path.read_text(encoding="utf-8")
        assert not sinks.search(text), path.name
        others = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text)) - {"http://www.w3.org"}
        assert not others, path.name
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    assert "<style" not in html
    assert not re.search(r"<script(?![^>]*\bsrc=)", html)
    assert not re.search(r"\bon\w+=|\bstyle=", html)
