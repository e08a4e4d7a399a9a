"""`ThreadNode`: a broker, with or without a controller, on an event loop in a thread of this process.

The loop (`tidelog.testing.loop_thread`) is not the test's, so that clients that block (confluent-kafka, kafka-python)
may be used in the thread of the test, and that the broker answers whatever the test does. It is the product's
`NodeProcess` in any case.

Invariants: `start` and `stop` return when that is done, within `START_S` and `STOP_S`, or raise; a node that ended by
itself raises why at `stop`.

Entry: `ThreadNode`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging

import msgspec

from tidelog.config import Config
from tidelog.process.serve import NodeProcess
from tidelog.testing.fault_board import FaultBoard
from tidelog.testing.loop_thread import enter_loop, leave_loop
from tidelog.testing.options import BrokerEnded, NotPossibleHere
from tidelog.testing.outside import outside

logger = logging.getLogger(__name__)

START_S = 60.0
STOP_S = 60.0
"""Several times `node.shutdown_timeout_ms`, which bounds the waits inside."""


class ThreadNode:
    """See the module. It may be started again after it has stopped. Its log goes to `logging`."""

    def __init__(self, config: Config, board: FaultBoard) -> None:
        self._config = config
        self._board = board
        self._run: ThreadRun | None = None

    @property
    def is_running(self) -> bool:
        """Whether it serves, or tries to start."""
        return self._run is not None and not self._run.ended.done()

    def begin(self) -> None:
        """Begin to start; `wait_ready` waits for it."""
        assert self._run is None
        loop = enter_loop()
        self._run = ThreadRun(loop, self._config, self._board)

    def wait_ready(self) -> None:
        """Wait until clients can connect. Raises `BrokerEnded`."""
        assert self._run is not None
        try:
            self._run.ready.result(START_S)
        except TimeoutError:
            raise BrokerEnded(f"the broker was not ready within {START_S:g} s") from None

    def halt(self) -> None:
        """Stop the broker, and not its controller; no effect if it is not running. `stop` comes after it."""
        if self._run is not None and self.is_running:
            self._run.halt()

    def stop(self) -> None:
        """Stop it as SIGTERM would; no effect if it is stopped. Raises `BrokerEnded` if it had ended by itself."""
        if self._run is not None:
            try:
                self._run.stop()
            finally:
                self._run = None
                leave_loop()

    def discard(self) -> None:
        """As `stop`: it does not end before what it has begun."""
        self.stop()

    def kill(self) -> None:
        """Raises `NotPossibleHere`."""
        raise NotPossibleHere("a broker in this process cannot be killed", hint="run it in its own: child=True")

    def pause(self) -> None:
        """Raises `NotPossibleHere`."""
        raise NotPossibleHere("a broker in this process cannot be paused", hint="run it in its own: child=True")

    def resume(self) -> None:
        """It is never paused."""


class ThreadRun:
    """From a start of a node to its end, seen from another thread than the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: Config, board: FaultBoard) -> None:
        self._loop = loop
        self._config = config
        self._board = board
        self._stopping = asyncio.Event()
        self._process: NodeProcess | None = None
        self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ended = asyncio.run_coroutine_threadsafe(self._serve(), loop)

    def halt(self) -> None:
        """Stop the broker and not its controller."""
        if self._process is not None:
            asyncio.run_coroutine_threadsafe(self._process.stop_broker(), self._loop).result(STOP_S)

    def stop(self) -> None:
        """End it, and raise `BrokerEnded` if it had ended by itself after it was ready."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        try:
            self.ended.result(STOP_S)
        except TimeoutError:
            raise BrokerEnded(f"the broker has not stopped within {STOP_S:g} s") from None

    async def _serve(self) -> None:
        config = msgspec.convert(msgspec.to_builtins(self._config), Config)  # a process fills its configuration in
        process = NodeProcess(config, outside(self._board, config.node.id))
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await self._run(process, stop)
        except Exception as error:
            told = BrokerEnded(f"the broker ended: {error}")
            if self.ready.done():
                logger.exception("the broker of a test ended by itself")
                raise told from error
            told.__cause__ = error
            self.ready.set_exception(told)
        finally:
            stop.cancel()
            if not self.ready.done():
                self.ready.set_exception(BrokerEnded("the broker was stopped before it was ready"))

    async def _run(self, process: NodeProcess, stop: asyncio.Task[bool]) -> None:
        try:
            starting = asyncio.create_task(process.start())
            await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return
            starting.result()
            self._process = process
            self.ready.set_result(None)
            if await process.run_until(stop):
                raise BrokerEnded("an operator has asked for a restart", hint="use `restart` of the broker")
        finally:
            await process.stop()
