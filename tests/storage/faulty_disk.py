"""A `Disk` in memory that crashes like a real one: unsynced writes may be lost, torn, or arrive out of order.

`power_loss(rng)` makes the disk what a power loss could leave: for each file the bytes last synced, plus an arbitrary
part of the writes after that (each whole, not at all, or cut at any byte). Names change durably at once, as the
interface promises; a rename under way at the crash either happened or not. Faults are injected by `fail_at` (the n-th
operation of a kind) and `capacity_bytes` (ENOSPC where files grow).
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections import deque
from collections.abc import Callable, Sequence

from tidelog.runtime.disk import Done, FileInfo
from tidelog.runtime.types import Buffer

Queued = tuple[str, "FaultyFile", Callable[[], None], Done, bool]
"""An operation of the ordered lane: kind, file, what it does, whom it tells, whether a sync must follow."""


class PowerLost(Exception):
    """The disk was used after its crash."""


class Inode:
    def __init__(self, data: bytes = b"") -> None:
        self.seen = bytearray(data)  # what reads see
        self.synced = bytearray(data)  # what a crash leaves for certain
        self.unsynced: list[tuple[int, bytes]] = []

    def write(self, offset: int, data: bytes) -> None:
        self.unsynced.append((offset, data))
        _put(self.seen, offset, data)

    def sync(self) -> None:
        self.synced = bytearray(self.seen)
        self.unsynced.clear()

    def crash(self, rng: random.Random) -> None:
        for offset, data in self.unsynced:
            fate = rng.randrange(4)
            if fate == 0:
                continue
            if fate == 1:
                cut = rng.randrange(len(data) + 1)
                _put(self.synced, offset, data[:cut])
            elif fate == 2:
                cut = rng.randrange(len(data) + 1)
                _put(self.synced, offset + cut, data[cut:])
            else:
                _put(self.synced, offset, data)
        self.seen = bytearray(self.synced)
        self.unsynced.clear()


def _put(target: bytearray, offset: int, data: bytes) -> None:
    if len(target) < offset:
        target.extend(bytes(offset - len(target)))
    target[offset : offset + len(data)] = data


def os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class FaultyFile:
    def __init__(self, disk: FaultyDisk, name: str, inode: Inode) -> None:
        self.disk = disk
        self.name = name
        self.inode = inode
        self.size = len(inode.seen)

    def write(self, offset: int, buffers: Sequence[Buffer], *, sync: bool, done: Done, may_block: bool = False) -> None:
        length = sum(map(len, buffers))
        assert offset >= 0 and offset + length <= self.size, "writes stay inside the allocated file"
        buffers = list(buffers)
        self.disk.submit("write", self, lambda: self.inode.write(offset, b"".join(buffers)), done, sync=sync)
        if may_block and self.disk.blocks and len(self.disk.queue) == 1:
            self.disk.step()

    def sync(self, done: Done) -> None:
        self.disk.submit("sync", self, lambda: None, done, sync=True)

    def publish(self, name: str, done: Done) -> None:
        old, self.name = self.name, name
        self.disk.submit("publish", self, lambda: self.disk.move(old, name), done)

    async def rename(self, name: str) -> None:
        await self.disk.background("rename")
        self.disk.move(self.name, name)
        self.name = name

    async def read(self, offset: int, length: int) -> bytes:
        await self.disk.background("read")
        return bytes(self.inode.seen[offset : offset + length])

    async def fill_zeros(self, offset: int, length: int) -> None:
        end = offset + length
        while offset < end:
            await self.disk.background("fill")
            piece = min(4096, end - offset)
            grown = max(0, offset + piece - len(self.inode.seen))
            if self.disk.used_bytes + grown > self.disk.capacity_bytes:
                raise os_error(errno.ENOSPC)
            self.inode.write(offset, bytes(piece))
            offset += piece
            self.size = max(self.size, offset)
        await self.disk.background("fill")
        self.inode.sync()

    async def is_linked(self) -> bool:
        return self.disk.files.get(self.name) is self.inode

    async def settle(self) -> None:
        await self.disk.background("settle")
        self.inode.sync()

    async def close(self) -> None:
        if not self.disk.crashed:
            closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def done(_error: OSError | None) -> None:
                if not closed.done():
                    closed.set_result(None)

            self.disk.submit("close", self, lambda: None, done)
            await closed


class FaultyDisk:
    """See the module. `fail_at = {"fsync": (3, errno.EIO)}` fails the third fsync from now."""

    def __init__(self, files: dict[str, Inode] | None = None) -> None:
        self.files = files if files is not None else {}
        self.capacity_bytes = 1 << 62
        self.fail_at: dict[str, tuple[int, int]] = {}
        self.crash_after = -1  # operations until the power goes; -1: never
        self.crashed = False
        self.blocks = False  # writes that may block, with nothing queued before them, end before they return
        self.stalled = False  # the ordered lane does nothing while this is set
        self.operations = 0
        self.queue: deque[Queued] = deque()
        self._error: OSError | None = None
        self._running = False

    @property
    def used_bytes(self) -> int:
        return sum(len(inode.seen) for inode in self.files.values())

    # faults

    def power_loss(self, rng: random.Random) -> FaultyDisk:
        """The disk as it comes back after the power was cut now."""
        self.crashed = True
        for inode in self.files.values():
            inode.crash(rng)
        return FaultyDisk(self.files)

    def process_killed(self) -> FaultyDisk:
        """The disk as the next process sees it: what was written is seen, synced or not; what was queued is not."""
        self.crashed = True
        return FaultyDisk(self.files)

    def _count(self, kind: str) -> None:
        self.operations += 1
        if self.crash_after >= 0:
            if self.crash_after == 0:
                self.crashed = True
            self.crash_after -= 1
        if kind in self.fail_at:
            left, code = self.fail_at[kind]
            if left <= 1:
                del self.fail_at[kind]
                raise os_error(code)
            self.fail_at[kind] = (left - 1, code)

    async def background(self, kind: str) -> None:
        await asyncio.sleep(0)
        if not self.crashed:
            self._count(kind)
        if self.crashed:
            await asyncio.get_running_loop().create_future()  # nothing ever comes back

    # ordered lane

    def submit(
        self, kind: str, file: FaultyFile, action: Callable[[], None], done: Done, *, sync: bool = False
    ) -> None:
        self.queue.append((kind, file, action, done, sync))
        self.run()

    def run(self) -> None:
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_soon(self.step)

    def step(self) -> None:
        """One group: consecutive operations of one file, then one sync for all of them."""
        self._running = False
        if self.crashed or self.stalled or not self.queue:
            return
        group = [self.queue.popleft()]
        file = group[0][1]
        while self.queue and self.queue[0][1] is file:
            group.append(self.queue.popleft())
        if self._error is None:
            try:
                self._commit(group)
            except OSError as error:
                self._error = error
        self._report(group)

    def _report(self, group: list[Queued]) -> None:
        """A disk that has crashed tells nobody."""
        if self.crashed:
            return
        for _, _, _, done, _ in group:
            done(self._error)
        if self.queue:
            self.run()

    def _commit(self, group: list[Queued]) -> None:
        for kind, _, action, _, _ in group:
            self._count(kind)
            if self.crashed:
                return
            action()
        if any(sync for *_, sync in group):
            self._count("fsync")
            if not self.crashed:
                group[0][1].inode.sync()

    # directory

    def move(self, old: str, new: str) -> None:
        if old not in self.files:
            raise os_error(errno.ENOENT)
        self.files[new] = self.files.pop(old)

    async def open(self, name: str, *, create: bool = False, read_only: bool = False) -> FaultyFile:
        await self.background("open")
        if create:
            if name in self.files:
                raise FileExistsError(name)
            self.files[name] = Inode()
        if name not in self.files:
            raise FileNotFoundError(name)
        return FaultyFile(self, name, self.files[name])

    async def entries(self) -> list[FileInfo]:
        await self.background("entries")
        return sorted(FileInfo(name, len(inode.seen)) for name, inode in self.files.items())

    async def remove(self, name: str) -> None:
        await self.background("remove")
        if self.files.pop(name, None) is None:
            raise FileNotFoundError(name)

    async def load(self, name: str) -> bytes | None:
        await self.background("load")
        return bytes(self.files[name].seen) if name in self.files else None

    async def replace(self, name: str, data: Buffer) -> None:
        await self.background("replace")
        old = len(self.files[name].seen) if name in self.files else 0
        if self.used_bytes - old + len(data) > self.capacity_bytes:
            raise os_error(errno.ENOSPC)
        self.files[name] = Inode(bytes(data))

    async def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    async def close(self) -> None:
        return
