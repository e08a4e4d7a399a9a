"""Writing a large file past the page cache (`O_DIRECT`), for bodies that nobody reads soon.

An object's newest data is in the log cache. Through the page cache, each of its bytes is copied into a page that the
kernel first has to find, clear and later write back; that was more than half of a broker's CPU time with the embedded
store. Here a body is copied into one aligned buffer of the thread and written from there.

Invariants: after `write` the file holds exactly the body, whichever way was taken; it is not durable yet (the caller
syncs). Memory: `BUFFER_BYTES` for each thread that wrote a large body. Where the file system has no direct I/O, or
wants another alignment, the body goes through the page cache, and later bodies at once.

Entry: `BodyWriter`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Final

from tidelog.runtime.types import Buffer

logger = logging.getLogger(__name__)

BUFFER_BYTES: Final = 2 << 20
"""Of one write. Copying that much holds the GIL for a quarter of a millisecond."""
DIRECT_BYTES: Final = 1 << 20
"""Smaller bodies go through the page cache: each direct write waits for the device."""
BLOCK_BYTES: Final = 4096
"""Alignment of offsets and lengths: that of the disks and file systems in use (`statx`, stx_dio_offset_align)."""
BUFFERS_A_WRITE: Final = 1024
"""IOV_MAX of Linux."""

_UNSUPPORTED: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class BodyWriter:
    """Writes bodies into new, empty files. May be used by several threads."""

    def __init__(self) -> None:
        self.is_direct = True
        """Whether large bodies bypass the page cache; False once the file system refused."""
        self._local = threading.local()

    def write(self, descriptor: int, body: Sequence[Buffer]) -> None:
        """Write a body at the start of an empty file. Raises `OSError`; then the file's content is undefined."""
        views = [view for buffer in body if (view := memoryview(buffer).cast("B"))]
        if self.is_direct and sum(map(len, views)) >= DIRECT_BYTES:
            try:
                self._write_direct(descriptor, views)
                return
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self.is_direct = False
                logger.info("objects are written through the page cache", extra={"error": error.strerror})
                os.ftruncate(descriptor, 0)
                _set_direct(descriptor, on=False)
        _write_cached(descriptor, views)

    def _write_direct(self, descriptor: int, views: Sequence[memoryview]) -> None:
        _set_direct(descriptor, on=True)
        buffer = self._buffer()
        at = filled = 0
        for view in views:
            while view:
                size = min(len(view), BUFFER_BYTES - filled)
                buffer[filled : filled + size] = view[:size]
                view, filled = view[size:], filled + size
                if filled == BUFFER_BYTES:
                    _write_at(descriptor, buffer, at)
                    at, filled = at + filled, 0
        if filled:
            blocks = -(-filled // BLOCK_BYTES) * BLOCK_BYTES
            buffer[filled:blocks] = bytes(blocks - filled)  # what follows in the buffer is another body's
            _write_at(descriptor, buffer[:blocks], at)
            os.ftruncate(descriptor, at + filled)

    def _buffer(self) -> memoryview:
        found: memoryview | None = getattr(self._local, "buffer", None)
        if found is None:
            found = self._local.buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))  # begins at a page
        return found


def _set_direct(descriptor: int, *, on: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


def _write_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Write whole blocks. A write may end early at a block's end."""
    while view:
        written = os.pwrite(descriptor, view, offset) // BLOCK_BYTES * BLOCK_BYTES
        if not written:
            raise OSError(errno.EIO, "a direct write wrote less than a block")
        view, offset = view[written:], offset + written


def _write_cached(descriptor: int, views: list[memoryview]) -> None:
    first = 0
    while first < len(views):
        written = os.writev(descriptor, views[first : first + BUFFERS_A_WRITE])
        while written and written >= len(views[first]):
            written -= len(views[first])
            first += 1
        if written:
            views[first] = views[first][written:]
