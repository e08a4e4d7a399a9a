"""How `tidelog broker add` and `remove` reach a running `tidelog up`: a socket in its data directory.

    DIR/up.sock     mode 0600: who may write the data directory's files may change its brokers, nobody else

One request for a connection, a line of JSON: `{"do": "add" | "stop" | "forget" | "list", "id": ID}`; the answer is one
line, `{"done": …}` or `{"error": …, "hint": …}`. The path of a socket has a narrow limit, so that both ends reach it
through the open directory, however long its name is.

Entry: `ControlServer`, `ask`, `listens`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError, InvalidInput, NotFound, TidelogError, Unavailable

SOCKET_FILE = "up.sock"
MAX_REQUEST_BYTES = 4_096
READ_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 180.0

Document = dict[str, Any]
Handler = Callable[[Document], Awaitable[Document]]


@contextlib.contextmanager
def _short_path(directory: Path) -> Iterator[str]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_FILE}"
    finally:
        os.close(descriptor)


class ControlServer:
    """Takes requests one at a time and gives them to `handler`."""

    def __init__(self, directory: Path, handler: Handler) -> None:
        self._directory = directory
        self._handler = handler
        self._one_at_a_time = asyncio.Lock()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. The socket of a `tidelog up` that is gone is replaced.

        That of one that runs is left alone: the brokers will find their data directories in use, and say so.
        """
        if await asyncio.to_thread(self._is_taken):
            return
        with _short_path(self._directory) as path:
            listening = socket.socket(socket.AF_UNIX)
            try:
                old = os.umask(0o177)
                try:
                    listening.bind(path)
                finally:
                    os.umask(old)
                self._server = await asyncio.start_unix_server(self._serve, sock=listening, limit=MAX_REQUEST_BYTES)
            except BaseException:
                listening.close()
                raise

    def _is_taken(self) -> bool:
        try:
            _connect(self._directory).close()
        except Unavailable:
            (self._directory / SOCKET_FILE).unlink(missing_ok=True)
            return False
        return True

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            (self._directory / SOCKET_FILE).unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                line = await reader.readline()
            if line:
                writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, ConnectionError, ValueError):
            pass  # the client is gone, or is none of ours: there is nobody to tell
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> Document:
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise InvalidInput("a request is a JSON object")
            async with self._one_at_a_time:
                return {"done": await self._handler(request)}
        except TidelogError as error:
            return {"error": error.message, "hint": error.hint, "kind": type(error).__name__}


def _connect(directory: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short_path(directory) as path:
            connection.settimeout(READ_TIMEOUT_S)
            connection.connect(path)
    except OSError as error:
        connection.close()
        raise Unavailable(
            f"no `tidelog up --brokers N` runs over {directory}: {error.strerror or error}",
            hint="name its directory with --data-dir; with `tidelog serve`, start one more process yourself",
        ) from error
    return connection


def listens(directory: Path) -> bool:
    """Whether a `tidelog up` runs over this directory."""
    try:
        _connect(directory).close()
    except (Unavailable, OSError):
        return False
    return True


def ask(directory: Path, request: Document) -> Document:
    """What the `tidelog up` over this directory answers. Raises `Unavailable` if there is none, and what it refuses."""
    with _connect(directory) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as lines:
                line = lines.readline()
        except OSError as error:
            raise Unavailable(f"the `tidelog up` over {directory} does not answer: {error}") from error
    if not line:
        raise Unavailable(f"the `tidelog up` over {directory} ended before it answered")
    answer: Document = json.loads(line)
    if "error" in answer:
        kinds = {kind.__name__: kind for kind in (ConfigError, InvalidInput, NotFound)}
        raise kinds.get(answer["kind"], Unavailable)(answer["error"], hint=answer["hint"])
    found: Document = answer["done"]
    return found
