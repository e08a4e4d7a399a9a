"""Helpers of the admin HTTP handlers: JSON responses, streamed JSON lines, bodies, and query parameters.

Entry: `json_answer`, `status_of`, `write_line`, `parsed`, `number`, `flag`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from tidelog.runtime.errors import AlreadyExists, InvalidInput, NotFound, TidelogError
from tidelog.runtime.msgpack import DECODE_ERRORS

T = TypeVar("T")

TAKE_S = 60.0
"""A client that does not read a line within this time is disconnected."""


def json_answer(body: object, *, status: int = 200) -> web.Response:
    """Build a response with one JSON document."""
    return web.json_response(body, status=status)


def status_of(error: TidelogError) -> int:
    """Return the HTTP status that says what kind of error it is."""
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, AlreadyExists):
        return 412
    if isinstance(error, InvalidInput):
        return 400
    return 503 if error.retriable else 500


async def write_line(response: web.StreamResponse, line: dict[str, Any]) -> None:
    """Write one line of JSON. Raises `TimeoutError` if the client does not read for `TAKE_S`."""
    async with asyncio.timeout(TAKE_S):
        await response.write(json.dumps(line).encode() + b"\n")


def parsed(decoder: msgspec.json.Decoder[T], body: bytes, what: str) -> T:
    """Decode the body of a request. Raises `InvalidInput`, which begins with `the body` and `what` that is wrong."""
    try:
        return decoder.decode(body)
    except DECODE_ERRORS as error:
        raise InvalidInput(f"the body {what}: {error}") from None


def number(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    """Parse a query parameter from `low` to `high`. Raises `InvalidInput`."""
    text = request.query.get(name)
    return default if text is None else integer(text, name, low, high)


def integer(text: str, name: str, low: int, high: int) -> int:
    """Parse a number from `low` to `high`. Raises `InvalidInput`."""
    found = int(text) if text.removeprefix("-").isdecimal() and text.isascii() and len(text) < 20 else None
    if found is None or not low <= found <= high:
        raise InvalidInput(f"{name} is {text!r}: a number from {low} to {high} is expected")
    return found


def flag(request: web.Request, name: str) -> bool:
    """Parse a query parameter `true` or `false`; false if missing. Raises `InvalidInput`."""
    text = request.query.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidInput(f"{name} is {text!r}: true or false is expected")
    return text == "true"
