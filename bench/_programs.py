"""Runs a program so that nothing of it stays: no process, no file, however it ends.

- Its temporary files go into a folder of its own on disk (`TMPDIR`) and one in memory (`MEMORY_VARIABLE`), which are
  removed when it has ended.
- It leads a process group, which is killed when its time is up. What has a group of its own (a broker under its
  supervisor) becomes this process's child when its parent dies (Linux: a child subreaper), and is killed then.

Entry: `run`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

MEMORY_VARIABLE = "TIDELOG_BENCH_MEMORY"
"""Environment variable with the folder for what is to be kept in memory."""
MEMORY_DIRECTORY = Path("/dev/shm")
_PREFIX = "tidelog-bench-"
_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 10.0
"""How long what was killed may take to be gone: gigabytes of memory have to be freed."""


def run(command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], limit_s: float) -> int | None:
    """Run `command`; its exit code, or None if it took longer than `limit_s` seconds and was killed.

    Whatever else the calling process has started is killed, too: it must have no other children.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with _scratch() as places:
        process = subprocess.Popen(command, cwd=cwd, env={**environment, **places}, start_new_session=True)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # none of the group is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _reap()


@contextlib.contextmanager
def _scratch() -> Iterator[dict[str, str]]:
    """The folders, as environment variables."""
    places = {"TMPDIR": tempfile.mkdtemp(prefix=_PREFIX)}
    if MEMORY_DIRECTORY.is_dir():
        places[MEMORY_VARIABLE] = tempfile.mkdtemp(prefix=_PREFIX, dir=MEMORY_DIRECTORY)
    try:
        yield places
    finally:
        for path in places.values():
            shutil.rmtree(path, ignore_errors=True)
            if os.path.exists(path):
                print(f"could not remove {path}", file=sys.stderr)


@contextlib.contextmanager
def scratch_directory(parent: str | Path | None = None) -> Iterator[Path]:
    """An empty directory (`parent` chooses the disk) that is removed at the end, SIGTERM included.

    What programs left that were killed (`kill -9`) is removed first: the names have their process's id.
    """
    place = Path(parent or tempfile.gettempdir())
    for left in place.glob(f"{_PREFIX}[0-9]*-*"):
        pid = left.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)
    ends = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ends:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with tempfile.TemporaryDirectory(
            prefix=f"{_PREFIX}{os.getpid()}-", dir=place, ignore_cleanup_errors=True
        ) as path:
            yield Path(path)
    finally:
        if ends:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _reap() -> None:
    """Kill what was left behind, and what that leaves behind."""
    deadline = time.monotonic() + _KILL_S
    while (left := _children()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    if left:
        print(f"processes {left} do not end", file=sys.stderr)


def _children() -> list[int]:
    if sys.platform != "linux":
        return []
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            found += map(int, (thread / "children").read_text().split())
    return found
