"""The control socket of `tidelog up`, used by `tidelog broker add` and `tidelog broker remove`.

    DIR/up.sock     mode 0600: only the owner of the data directory's files may change its brokers

One request per connection, a line of JSON: `{"do": "add" | "stop" | "forget" | "list", "id": ID}`; the response is one
line, `{"done": …}` or `{"error": …, "hint": …}`. `list` tells the addresses of the `brokers`, by id, and the ids of
`removed` ones whose files are still there, because their removal ended before `forget`. The length of a socket's path
is limited to about 100 bytes, so both ends use a path through an open descriptor of the directory.

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

from tidelog.process.data_dir import WrongDataDirectory
from tidelog.runtime.errors import (
    AlreadyExists,
    ConfigError,
    CorruptData,
    InvalidInput,
    NotFound,
    StorageFailed,
    TidelogError,
    Unavailable,
)
from tidelog.runtime.network import AddressInUse

SOCKET_FILE = "up.sock"
MAX_REQUEST_BYTES = 4_096
READ_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 180.0
TOLD_KINDS: tuple[type[TidelogError], ...] = (
    AddressInUse,
    AlreadyExists,
    ConfigError,
    CorruptData,
    InvalidInput,
    NotFound,
    StorageFailed,
    WrongDataDirectory,
)
"""Errors that pass between the processes of `tidelog up`; others arrive as `Unavailable`."""

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
    """Accepts requests one at a time and passes them to `handler`."""

    def __init__(self, directory: Path, handler: Handler) -> None:
        self._directory = directory
        self._handler = handler
        self._one_at_a_time = asyncio.Lock()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Replaces the socket of a `tidelog up` that has ended.

        The socket of a running `tidelog up` is kept: the brokers will fail because their data directories are in use.
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
            pass  # the client has disconnected, or is not a Tidelog client: no response is possible
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> Document:
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise InvalidInput("a request is a JSON object")
            async with self._one_at_a_time:
                return {"done": await self._handler(request)}
        except (TidelogError, OSError) as failure:
            error = failure if isinstance(failure, TidelogError) else StorageFailed(str(failure))  # of the directory
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
            f"no `tidelog up --brokers N` is running on {directory}: {error.strerror or error}",
            hint="give its directory with --data-dir; with `tidelog serve`, start another process yourself",
        ) from error
    return connection


def listens(directory: Path) -> bool:
    """Whether a `tidelog up` is running on this directory."""
    try:
        _connect(directory).close()
    except (Unavailable, OSError):
        return False
    return True


def child_error(kind: str | None, message: str, hint: str | None) -> TidelogError:
    """Return an error that another process told: of its kind if that is of `TOLD_KINDS`, else `Unavailable`."""
    kinds = {each.__name__: each for each in TOLD_KINDS}
    return kinds.get(kind or "", Unavailable)(message, hint=hint)


def ask(directory: Path, request: Document) -> Document:
    """Send a request to the `tidelog up` on this directory. Raises `Unavailable` if none runs, and its errors."""
    with _connect(directory) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as lines:
                line = lines.readline()
        except OSError as error:
            raise Unavailable(f"the `tidelog up` on {directory} does not respond: {error}") from error
    if not line:
        raise Unavailable(f"the `tidelog up` on {directory} ended before it responded")
    answer: Document = json.loads(line)
    if "error" in answer:
        raise child_error(answer["kind"], answer["error"], answer["hint"])
    found: Document = answer["done"]
    return found
