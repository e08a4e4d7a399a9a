"""`AsyncLocalBroker` and `AsyncLocalCluster`: the same for `async with`, where no method blocks the event loop.

Each method runs that of the blocking one, `blocking`, in a thread.

Invariant: a method that is cancelled, as by a time-out, raises that only when its thread is done. What follows, as the
end of the context, finds nobody else at work on the brokers; and nothing is left of brokers whose start was cancelled.

Entry: `AsyncLocalBroker`, `AsyncLocalCluster`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Generic, Literal, ParamSpec, Self, TypeVar

from tidelog.testing.bucket_faults import LocalBucket
from tidelog.testing.clock import LocalClock
from tidelog.testing.local import LocalBroker, LocalBrokers, LocalCluster
from tidelog.testing.options import Value

P = ParamSpec("P")
T = TypeVar("T")
BrokersT = TypeVar("BrokersT", bound=LocalBrokers)


async def _in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    import asyncio

    work = asyncio.get_running_loop().run_in_executor(None, partial(call, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:  # more than one may come
            cancelled = error
    if cancelled is None:
        return work.result()
    work.exception()  # the cancellation is told instead
    raise cancelled


class AsyncLocalBrokers(Generic[BrokersT]):
    """What the asynchronous broker and cluster have in common."""

    def __init__(self, blocking: BrokersT) -> None:
        self.blocking = blocking
        """The same brokers, for code that blocks."""

    async def __aenter__(self) -> Self:
        try:
            await _in_thread(self.blocking.__enter__)
        except BaseException as error:
            await _in_thread(self.blocking.__exit__, type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _in_thread(self.blocking.__exit__, kind, error, trace)

    @property
    def bootstrap(self) -> str:
        """See `LocalBroker.bootstrap`."""
        return self.blocking.bootstrap

    @property
    def bucket(self) -> LocalBucket:
        """See `LocalBroker.bucket`; its methods wait for nothing."""
        return self.blocking.bucket

    @property
    def clock(self) -> LocalClock:
        """See `LocalBroker.clock`; its methods wait for nothing."""
        return self.blocking.clock

    @property
    def directory(self) -> Path:
        """See `LocalBroker.directory`."""
        return self.blocking.directory

    @property
    def log(self) -> list[str]:
        """See `LocalBroker.log`."""
        return self.blocking.log

    async def create_topic(self, name: str, *, partitions: int = 1, config: Mapping[str, str] | None = None) -> None:
        """See `LocalBroker.create_topic`."""
        await _in_thread(self.blocking.create_topic, name, partitions=partitions, config=config)

    async def delete_topic(self, name: str) -> None:
        """See `LocalBroker.delete_topic`."""
        await _in_thread(self.blocking.delete_topic, name)

    async def heal(self) -> None:
        """See `LocalBroker.heal`."""
        await _in_thread(self.blocking.heal)


class AsyncLocalBroker(AsyncLocalBrokers[LocalBroker]):
    """`LocalBroker` for `async with`; the arguments are the same."""

    def __init__(
        self,
        *,
        child: bool = False,
        storage: Literal["memory", "disk"] = "memory",
        directory: Path | str | None = None,
        settings: Mapping[str, Value] | None = None,
    ) -> None:
        super().__init__(LocalBroker(child=child, storage=storage, directory=directory, settings=settings))

    @property
    def is_running(self) -> bool:
        """See `LocalBroker.is_running`."""
        return self.blocking.is_running

    async def kill(self) -> None:
        """See `LocalBroker.kill`."""
        await _in_thread(self.blocking.kill)

    async def stop(self) -> None:
        """See `LocalBroker.stop`."""
        await _in_thread(self.blocking.stop)

    async def restart(self) -> None:
        """See `LocalBroker.restart`."""
        await _in_thread(self.blocking.restart)

    async def pause(self) -> None:
        """See `LocalBroker.pause`."""
        await _in_thread(self.blocking.pause)

    async def resume(self) -> None:
        """See `LocalBroker.resume`."""
        await _in_thread(self.blocking.resume)


class AsyncLocalCluster(AsyncLocalBrokers[LocalCluster]):
    """`LocalCluster` for `async with`; the arguments are the same."""

    def __init__(
        self,
        brokers: int = 3,
        *,
        child: bool = True,
        storage: Literal["memory", "disk"] = "memory",
        directory: Path | str | None = None,
        settings: Mapping[str, Value] | None = None,
    ) -> None:
        super().__init__(LocalCluster(brokers, child=child, storage=storage, directory=directory, settings=settings))

    @property
    def running(self) -> list[int]:
        """See `LocalCluster.running`."""
        return self.blocking.running

    def address(self, broker: int) -> str:
        """See `LocalCluster.address`."""
        return self.blocking.address(broker)

    async def kill(self, broker: int) -> None:
        """See `LocalCluster.kill`."""
        await _in_thread(self.blocking.kill, broker)

    async def stop(self, broker: int) -> None:
        """See `LocalCluster.stop`."""
        await _in_thread(self.blocking.stop, broker)

    async def restart(self, broker: int) -> None:
        """See `LocalCluster.restart`."""
        await _in_thread(self.blocking.restart, broker)

    async def pause(self, broker: int) -> None:
        """See `LocalCluster.pause`."""
        await _in_thread(self.blocking.pause, broker)

    async def resume(self, broker: int) -> None:
        """See `LocalCluster.resume`."""
        await _in_thread(self.blocking.resume, broker)

    async def leader(self, topic: str, partition: int = 0) -> int:
        """See `LocalCluster.leader`."""
        return await _in_thread(self.blocking.leader, topic, partition)

    async def move(self, topic: str, partition: int = 0, to: int | None = None) -> int:
        """See `LocalCluster.move`."""
        return await _in_thread(self.blocking.move, topic, partition, to)
