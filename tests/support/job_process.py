"""`tidelog spark …` in a session of its own, and the processes that belong to it: any of them can be killed.

A session, not a process group: Python workers of Spark have a group of their own, and outlive the kill of their
driver's.

Entry: `JobProcess`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import pyspark

from tests.support.cli import environment

ROOT = Path(__file__).resolve().parents[2]
DRIVER, JVM, EXECUTOR, WORKER = "driver", "jvm", "executor", "worker"
"""Roles: the Python of the driver, its Java, the Java of an executor (of a master `local-cluster`), Python workers."""
END_S = 60.0
SAMPLE_S = 0.5


class JobProcess:
    """A started job. Its output goes to a file; its temporary files go beside that, into the folder `tmp`."""

    def __init__(
        self,
        bootstrap: str,
        log: Path,
        *arguments: str,
        module: str = "tidelog",
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`arguments` are those of `module`, which has the same options as `tidelog`; `more` is added to its
        environment."""
        self.log = log
        self.cpu_s = 0.0
        """CPU time of all its processes, as far as `wait` has seen."""
        scratch = log.parent / "tmp"  # killed processes leave files
        scratch.mkdir(exist_ok=True)
        given = {
            **environment(bootstrap),
            **more,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "TMPDIR": str(scratch),
            "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={scratch}",
        }
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env=given,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_running(self) -> bool:
        """Whether the driver has not ended."""
        return self.process.poll() is None

    def said(self, lines: int = 15) -> str:
        """What it said last."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def processes(self) -> dict[int, str]:
        """The roles of its processes that have not ended, by pid."""
        found = {}
        for each in Path("/proc").iterdir():
            if each.name.isdigit():
                with contextlib.suppress(OSError):
                    state, _, _, session = (each / "stat").read_text().rpartition(")")[2].split()[:4]
                    if int(session) == self.process.pid and state != "Z":
                        found[int(each.name)] = self._role(int(each.name), (each / "cmdline").read_bytes())
        return found

    def _role(self, pid: int, command: bytes) -> str:
        if pid == self.process.pid:
            return DRIVER
        if b"pyspark.daemon" in command or b"pyspark.worker" in command:
            return WORKER
        return EXECUTOR if b"CoarseGrainedExecutorBackend" in command else JVM

    def signal(self, number: signal.Signals, roles: Collection[str] = (DRIVER, JVM, EXECUTOR, WORKER)) -> int:
        """Send a signal to all of its processes that have one of these roles; return how many there were."""
        found = [pid for pid, role in self.processes().items() if role in roles]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(found)

    def kill(self) -> None:
        """Send `kill -9` to all of its processes, and wait until there are none."""
        deadline = time.monotonic() + END_S
        while self.signal(signal.SIGKILL):  # one that was being started is not among those that were found
            assert time.monotonic() < deadline, self.processes()
            self.process.poll()
            time.sleep(0.05)
        self.process.wait(END_S)

    def wait(self, timeout_s: float) -> int:
        """Wait until the driver ends; return its exit code. Raises `AssertionError`."""
        deadline = time.monotonic() + timeout_s
        while self.is_running():
            assert time.monotonic() < deadline, f"the job goes on after {timeout_s:g} s:\n{self.said()}"
            self.cpu_s = max(self.cpu_s, self._used_s())
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(SAMPLE_S)
        return self.process.wait()

    def _used_s(self) -> float:
        """The CPU time of its processes, and of those that they have waited for."""
        ticks = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(int(each) for each in told[11:15])
        return ticks / os.sysconf("SC_CLK_TCK")
