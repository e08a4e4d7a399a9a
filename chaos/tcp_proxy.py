"""TCP paths that a test cuts, one way or both, or slows down, as a network does: bytes stop, connections stay.

Bytes sent during a cut arrive when it heals (as with TCP retransmission), unless an end has closed the connection. A
new connection during a cut of the requests reaches only this proxy. `reset` closes open connections instead.

    with Proxies() as proxies:
        path = proxies.path("127.0.0.1", 9092)   # clients connect to path.port
        path.cut(requests=False)                 # responses are lost, requests arrive
        path.heal()

All paths share one event loop in a separate thread. The methods are for the test's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from tidelog.runtime.network import close_server

T = TypeVar("T")
CHUNK = 1 << 16


class Path:
    """A path to one target."""

    def __init__(self, proxies: Proxies, target: tuple[str, int]) -> None:
        self._proxies = proxies
        self._target = target
        self._requests = asyncio.Event()
        self._answers = asyncio.Event()
        self._requests.set()
        self._answers.set()
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self._delay_s = 0.0
        self.host = ""
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; runs on the loop."""
        self._server = await asyncio.start_server(self._accept, host, port)
        self.host = host
        self.port = int(self._server.sockets[0].getsockname()[1])

    @property
    def address(self) -> str:
        """`host:port` for clients."""
        return f"{self.host}:{self.port}"

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._clients[task] = writer
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        writer = self._clients.pop(task)
        if task.cancelled():  # maybe before the cut began
            writer.transport.abort()
        else:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._requests.wait()
        try:
            answers, onward = await asyncio.open_connection(*self._target)
        except OSError:
            return  # the target is down
        copies = {
            asyncio.create_task(self._copy(reader, onward, self._requests)),
            asyncio.create_task(self._copy(answers, writer, self._answers)),
        }
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            onward.transport.abort()
            raise
        finally:
            onward.close()
            for copy in copies:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await gate.wait()
                writer.write(data)
                await writer.drain()
            await gate.wait()  # the end of a stream is lost in a cut, too

    def cut(self, *, requests: bool = True, answers: bool = True) -> None:
        """Stop forwarding in the given directions."""

        async def apply() -> None:
            if requests:
                self._requests.clear()
            if answers:
                self._answers.clear()

        self._proxies.run(apply())

    def slow(self, delay_s: float) -> None:
        """Delay every chunk (at most 64 KiB) by this time, in each direction."""

        async def apply() -> None:
            self._delay_s = delay_s

        self._proxies.run(apply())

    def heal(self) -> None:
        """Resume forwarding without delay."""

        async def apply() -> None:
            self._delay_s = 0.0
            self._requests.set()
            self._answers.set()

        self._proxies.run(apply())

    def reset(self) -> None:
        """Close every open connection."""

        async def apply() -> None:
            await self.drop()

        self._proxies.run(apply())

    async def drop(self) -> None:
        """Close the connections; runs on the loop."""
        tasks = list(self._clients)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close the path; runs on the loop."""
        assert self._server is not None
        await close_server(self._server)
        await self.drop()


class Proxies:
    """A set of paths on one event loop; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._paths: list[Path] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in self._paths:
            self.run(path.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def path(self, host: str, port: int, *, at: tuple[str, int] = ("127.0.0.1", 0)) -> Path:
        """Create a path to a target, which need not listen yet; it listens at `at` (port 0: any)."""
        made = Path(self, (host, port))
        self.run(made.start(*at))
        self._paths.append(made)
        return made
