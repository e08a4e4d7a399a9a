"""Runs a program without leaving processes or files behind, however it ends.

- Its temporary files are in a separate folder on disk (`TMPDIR`) and one in memory (`MEMORY_VARIABLE`), which are
  removed at the end.
- It leads a process group, which is killed at the time limit. A process with another group (a broker under its
  supervisor) becomes this process's child when its parent dies (Linux: a child subreaper), and is then killed.

Entry: `run`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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
"""Environment variable with the folder for files in memory."""
MEMORY_DIRECTORY = Path("/dev/shm")
_PREFIX = "tidelog-bench-"
_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 10.0
"""Time-out for the end of killed processes: gigabytes of memory have to be freed."""


def run(command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], limit_s: float) -> int | None:
    """Run `command`; return its exit code, or None if it was killed after `limit_s` seconds.

    All other children of the calling process are killed, too.
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
    """Create the folders; yield the environment variables."""
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
    """Yield an empty directory (`parent` chooses the disk) that is removed at the end, also after SIGTERM.

    Directories of killed programs (`kill -9`) are removed first: nobody has them locked. The process id in their names
    is for users only; that of a program in another pid namespace says nothing here.
    """
    place = Path(parent or tempfile.gettempdir())
    for left in place.glob(f"{_PREFIX}[0-9]*-*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left, ignore_errors=True)
    ends = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ends:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with _new_directory(place) as path:
            yield path
    finally:
        if ends:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _new_directory(place: Path) -> Iterator[Path]:
    """Create a locked directory; it has a name that others look at only when it is locked."""
    fresh = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}new-", dir=place))
    path = fresh.with_name(fresh.name.replace("new-", f"{os.getpid()}-", 1))
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # nobody can lock it on such a file system, and nobody removes it
                stack.enter_context(_locked(fresh))
            fresh.rename(path)
            yield path
    finally:
        for each in (fresh, path):
            shutil.rmtree(each, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a directory until the end of the block or of this process. Raises `OSError` if that cannot be."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _reap() -> None:
    """Kill remaining children, and the children that they leave."""
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
