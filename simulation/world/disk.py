"""The `Disk` interface of a simulated node, and its persistent state, which survives crashes.

`Platters` are the files: their visible content, and for each unsynced write the replaced content. After a killed
process all writes remain, synced or not. After a power loss all synced writes remain, and of every later write
(independently, so that they are also reordered) all, nothing, a part cut at any byte, or a part with flipped bits,
which recovery must detect by checksums. Name changes are durable immediately, as `Disk` guarantees. Bits may flip at
rest in unused places (`Platters.rot`).

`SimDisk` is the disk of one life: one group of ordered operations at a time, as in `tidelog.runtime.disk`, with the
delays of a device. Faults: `slow_s`, `full_bytes`, `fail_next_sync` (an EIO, after which the ordered lane is dead),
`hang` (nothing ends until `go_on`).

Entry: `Platters`, `SimDisk`.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tidelog.runtime.disk import Done, FileInfo
from tidelog.runtime.types import Buffer
from tidelog.simulation.world.loop import VirtualLoop
from tidelog.simulation.world.odd import OddErrors
from tidelog.storage.wal.disk.segments import SEGMENT_SUFFIX, SPARE_SUFFIX

WRITE_S = 0.0001
SYNC_S = 0.0006
READ_S = 0.0002
_ZERO_PIECE = 1 << 20
MAX_ROT = 8
"""Number of bits flipped at a time."""
ROT_NEAR = 256
"""Maximum distance of a flipped bit from the start of an unused place."""


class _Inode:
    """One file."""

    def __init__(self, data: bytes = b"") -> None:
        self.seen = bytearray(data)
        self.unsynced: list[tuple[int, bytes, bytes]] = []
        """Offset, old bytes, new bytes; in order."""
        self.tail = 0
        """End of the last record: nothing was written after it since the file was started."""

    def write(self, offset: int, data: bytes) -> None:
        if offset + len(data) > len(self.seen):
            self.seen.extend(bytes(offset + len(data) - len(self.seen)))
        self.unsynced.append((offset, bytes(self.seen[offset : offset + len(data)]), data))
        self.seen[offset : offset + len(data)] = data

    def append(self, offset: int, data: bytes) -> None:
        self.write(offset, data)
        self.tail = offset + len(data)

    def sync(self) -> None:
        self.unsynced.clear()

    def lose_power(self, rng: random.Random) -> None:
        for offset, before, _ in reversed(self.unsynced):
            self.seen[offset : offset + len(before)] = before
        for offset, _, data in self.unsynced:
            fate = rng.randrange(5)
            start, end = 0, len(data)
            if fate == 0:
                continue
            if fate in (1, 3):
                end = rng.randrange(len(data) + 1)
            elif fate == 2:
                start = rng.randrange(len(data) + 1)
            piece = bytearray(data[start:end])
            if fate == 3 and piece:
                piece[rng.randrange(len(piece))] ^= 1 << rng.randrange(8)
            self.seen[offset + start : offset + start + len(piece)] = piece
        self.unsynced.clear()


class Platters:
    """The files of one node's disk, by name."""

    def __init__(self) -> None:
        self.files: dict[str, _Inode] = {}

    @property
    def used_bytes(self) -> int:
        """Total size of the files."""
        return sum(len(inode.seen) for inode in self.files.values())

    def lose_power(self, rng: random.Random) -> None:
        """Keep synced data, and a random part of the rest."""
        for inode in self.files.values():
            inode.lose_power(rng)

    def copy(self) -> Platters:
        """Return a copy of all files as reads see them at this moment."""
        copy = Platters()
        for name, inode in self.files.items():
            copied = copy.files[name] = _Inode(bytes(inode.seen))
            copied.tail = inode.tail
        return copy

    def settle(self) -> None:
        """Write everything out, as unmounting does."""
        for inode in self.files.values():
            inode.sync()

    def rot(self, rng: random.Random) -> int:
        """Flip some bits of spare WAL files, and after the last record of the others; return their number."""
        places = []
        for name, inode in self.files.items():
            first = 0 if name.endswith(SPARE_SUFFIX) else inode.tail
            if name.endswith((SPARE_SUFFIX, SEGMENT_SUFFIX)) and first < len(inode.seen):
                places.append((inode.seen, first))
        if not places:
            return 0
        count = rng.randint(1, MAX_ROT)
        for _ in range(count):
            data, first = rng.choice(places)
            data[rng.randrange(first, min(len(data), first + ROT_NEAR))] ^= 1 << rng.randrange(8)
        return count


class _SimOperation(NamedTuple):
    file: SimFile
    action: Callable[[], None]
    sync: bool
    done: Done


class SimFile:
    """A `tidelog.runtime.disk.DiskFile`."""

    def __init__(self, disk: SimDisk, name: str, inode: _Inode) -> None:
        self._disk = disk
        self._name = name
        self.inode = inode
        self._size = len(inode.seen)

    @property
    def name(self) -> str:
        """See `DiskFile.name`."""
        return self._name

    @property
    def size(self) -> int:
        """See `DiskFile.size`."""
        return self._size

    def write(self, offset: int, buffers: Sequence[Buffer], *, sync: bool, done: Done, may_block: bool = False) -> None:
        """See `DiskFile.write`. This disk never blocks: virtual time passes only between iterations of the loop."""
        assert offset >= 0 and offset + sum(map(len, buffers)) <= self._size, "writes stay inside the allocated file"
        data = b"".join(buffers)
        self._disk.submit(_SimOperation(self, lambda: self.inode.append(offset, data), sync, done))

    def sync(self, done: Done) -> None:
        """See `DiskFile.sync`."""
        self._disk.submit(_SimOperation(self, lambda: None, True, done))

    def publish(self, name: str, done: Done) -> None:
        """See `DiskFile.publish`."""
        old, self._name = self._name, name
        self._disk.submit(_SimOperation(self, lambda: self._disk.move(old, name), False, done))

    async def rename(self, name: str) -> None:
        """See `DiskFile.rename`."""
        await self._disk.background(SYNC_S)
        self._disk.move(self._name, name)
        self._name = name

    async def read(self, offset: int, length: int) -> bytes:
        """See `DiskFile.read`."""
        await self._disk.background(READ_S)
        return bytes(self.inode.seen[offset : offset + length])

    async def fill_zeros(self, offset: int, length: int) -> None:
        """See `DiskFile.fill_zeros`."""
        end = offset + length
        while offset < end:
            await self._disk.background(SYNC_S)
            piece = min(_ZERO_PIECE, end - offset)
            self._disk.check_room(max(0, offset + piece - len(self.inode.seen)))
            self.inode.write(offset, bytes(piece))
            self.inode.sync()
            offset += piece
            self._size = max(self._size, offset)

    async def is_linked(self) -> bool:
        """See `DiskFile.is_linked`."""
        await self._disk.background(READ_S)
        return self._disk.holds(self._name, self.inode)

    async def settle(self) -> None:
        """See `DiskFile.settle`."""
        await self._disk.background(SYNC_S)
        self.inode.sync()

    async def close(self) -> None:
        """See `DiskFile.close`."""
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(_error: OSError | None) -> None:
            if not closed.done():
                closed.set_result(None)

        self._disk.submit(_SimOperation(self, lambda: None, False, done))
        await closed


class SimDisk:
    """A `tidelog.runtime.disk.Disk` of one life over `platters`."""

    def __init__(
        self,
        platters: Platters,
        loop: VirtualLoop,
        rng: random.Random,
        *,
        odd: OddErrors | None = None,
        host: str = "",
    ) -> None:
        self._platters = platters
        self._host = host
        self._odd = odd or OddErrors()
        self._loop = loop
        self._rng = rng
        self._queue: deque[_SimOperation] = deque()
        self._running = False
        self._error: OSError | None = None
        self.slow_s = 0.0
        """Additional time of every operation."""
        self.full_bytes = 1 << 62
        """Maximum total size of the files (ENOSPC)."""
        self.fail_next_sync = False
        self._flows = asyncio.Event()
        """Whether operations end."""
        self._flows.set()
        self._unfinished: tuple[contextvars.Context, list[_SimOperation], bool] | None = None
        """The group that would have ended while the disk hangs. It ends in the life that began it, or never."""
        self.on_write: Callable[[], None] | None = None
        """Called once, when a write has begun and is not yet durable."""
        self.on_replace: Callable[[], None] | None = None
        """Called once, when a file was replaced, which whoever asked for it has not heard of."""

    def hang(self) -> None:
        """Let no operation end from now on."""
        self._flows.clear()

    def go_on(self) -> None:
        """Let operations end again."""
        self._flows.set()
        if self._unfinished is not None:
            (context, *held), self._unfinished = self._unfinished, None
            self._loop.call_soon(self._finish, *held, context=context)

    # Ordered lane

    def submit(self, operation: _SimOperation) -> None:
        """Queue an operation of the ordered lane."""
        self._queue.append(operation)
        if not self._running:
            self._running = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Take the queued operations of one file as one group: in the page cache now, durable at the end."""
        group = [self._queue.popleft()]
        while self._queue and self._queue[0].file is group[0].file:
            group.append(self._queue.popleft())
        if self._error is None:
            try:
                for operation in group:
                    operation.action()
            except OSError as error:
                self._error = error
        if self.on_write is not None:
            called, self.on_write = self.on_write, None
            called()
        syncs = any(operation.sync for operation in group)
        self._loop.call_later(self._takes_s(SYNC_S if syncs else WRITE_S), self._finish, group, syncs)

    def _finish(self, group: list[_SimOperation], syncs: bool) -> None:
        if not self._flows.is_set():
            self._unfinished = (contextvars.copy_context(), group, syncs)
            return
        if syncs and self.fail_next_sync and self._error is None:
            self.fail_next_sync = False
            self._error = OSError(errno.EIO, os.strerror(errno.EIO))
        if syncs and self._error is None:
            self._finish_sync(group[0].file.inode)
        self._running = bool(self._queue)
        if self._running:
            self._loop.call_soon(self._begin)
        for operation in group:
            operation.done(self._error)

    def _finish_sync(self, inode: _Inode) -> None:
        """Mark the written data as durable."""
        inode.sync()

    def _takes_s(self, base_s: float) -> float:
        return base_s * (0.5 + self._rng.random()) + self.slow_s * self._rng.random()

    # Background lane

    async def background(self, base_s: float) -> None:
        """Wait for the duration of a background operation."""
        await asyncio.sleep(self._takes_s(base_s))
        await self._flows.wait()
        self._odd.strike("disk", self._host)

    def check_room(self, grows_bytes: int) -> None:
        """Raises ENOSPC."""
        if self._platters.used_bytes + grows_bytes > self.full_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def move(self, old: str, new: str) -> None:
        """Rename immediately."""
        self._platters.files[new] = self._platters.files.pop(old)

    def holds(self, name: str, inode: _Inode) -> bool:
        """Return whether the file of this name is this one."""
        return self._platters.files.get(name) is inode

    async def open(self, name: str, *, create: bool = False, read_only: bool = False) -> SimFile:
        """See `Disk.open`."""
        await self.background(READ_S)
        files = self._platters.files
        if create:
            if name in files:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            self.check_room(4096)
            files[name] = _Inode()
        if name not in files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return SimFile(self, name, files[name])

    async def entries(self) -> list[FileInfo]:
        """See `Disk.entries`."""
        await self.background(READ_S)
        return sorted(FileInfo(name, len(inode.seen)) for name, inode in self._platters.files.items())

    async def remove(self, name: str) -> None:
        """See `Disk.remove`."""
        await self.background(SYNC_S)
        if self._platters.files.pop(name, None) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    async def load(self, name: str) -> bytes | None:
        """See `Disk.load`."""
        await self.background(READ_S)
        inode = self._platters.files.get(name)
        return None if inode is None else bytes(inode.seen)

    async def replace(self, name: str, data: Buffer) -> None:
        """See `Disk.replace`."""
        await self.background(SYNC_S)
        self.check_room(len(data))
        self._platters.files[name] = _Inode(bytes(data))
        if self.on_replace is not None:
            called, self.on_replace = self.on_replace, None
            called()

    async def free_bytes(self) -> int:
        """See `Disk.free_bytes`."""
        return max(0, self.full_bytes - self._platters.used_bytes)

    async def close(self) -> None:
        """See `Disk.close`."""
        while self._running:  # noqa: ASYNC110  # it takes a moment
            await asyncio.sleep(SYNC_S)
