"""A private folder that is gone when this process is, however it ends.

A shell waits at the end of a pipe whose write end this process has, and the children that use the folder inherit. When
all of them have ended, by `kill -9`, too, it deletes the folder and ends.

`memory` asks for a file system in memory, where nothing waits for a disk. It is used if it has `ROOM_BYTES` free: in
many containers it has 64 MiB, which a test may well fill.

Entry: `PrivateFolder`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM_BYTES = 512 << 20
WATCH = 'read -r _; rm -rf -- "$1"'
"""The program of the shell: nothing is ever written to its standard input."""


def memory_folder() -> Path | None:
    """Return a directory of a file system in memory with enough room, if there is one."""
    try:
        found = os.statvfs(MEMORY)
    except OSError:
        return None
    free = found.f_bavail * found.f_frsize
    return MEMORY if free >= ROOM_BYTES and os.access(MEMORY, os.W_OK | os.X_OK) else None


class PrivateFolder:
    """See the module."""

    def __init__(self, *, memory: bool) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="tidelog-", dir=memory_folder() if memory else None))
        read_end, self._write_end = os.pipe()
        try:
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", WATCH, "sh", str(self.path)],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, and the shell outlives it
            )
        except BaseException:
            os.close(self._write_end)
            self.path.rmdir()
            raise
        finally:
            os.close(read_end)

    @property
    def user_descriptor(self) -> int:
        """Children that use the folder inherit it: the folder stays while they run."""
        return self._write_end

    def close(self) -> None:
        """Delete the folder; its users have ended."""
        shutil.rmtree(self.path)
        self._watcher.kill()
        self._watcher.wait()
        os.close(self._write_end)
