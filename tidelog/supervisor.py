"""Keeps the processes of `tidelog up` running: start, watch, start again, stop together.

A child that ends before it was ever ready with an exit code that a retry cannot mend (wrong configuration, port in use,
wrong data directory, corrupt data) ends the whole: the supervisor leaves with the same code. Any other end is followed
by a new start after a growing, jittered delay that is reset once the child has been ready for a while. When the
supervisor itself is killed, the kernel sends its children SIGTERM, so that nothing is left behind.

Entry: `Supervisor.run`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

from runtime.tasks import Backoff
from tidelog.config import Loaded, to_toml

FATAL_EXIT_CODES = frozenset({2, 7, 8, 9})
"""Exit codes that a new start cannot mend (`tidelog.cli` lists them)."""
STEADY_S = 1.0
"""A process that lived so long after its start and was ready has done work: the back-off starts over."""
READY_PREFIX = "ready bootstrap="
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Supervisor:
    """Runs one child process and relays its readiness."""

    def __init__(self, loaded: Loaded, on_ready: Callable[[str], None]) -> None:
        self._loaded = loaded
        self._on_ready = on_ready
        self._announced = False
        self._stopping = asyncio.Event()
        self._child: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until a child fails for good; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        with tempfile.TemporaryDirectory(prefix="tidelog-up-") as scratch:
            settings = Path(scratch) / "node.toml"
            settings.touch(0o600)
            settings.write_text(to_toml(self._loaded.config), encoding="utf-8")
            return await self._keep_running(settings)

    def _stop(self) -> None:
        self._stopping.set()
        if self._child is not None and self._child.returncode is None:
            self._child.send_signal(signal.SIGTERM)

    async def _keep_running(self, settings: Path) -> int:
        backoff = Backoff(base_s=0.2, cap_s=10.0)
        while not self._stopping.is_set():
            started = time.monotonic()
            code, was_ready = await self._run_child(settings)
            if self._stopping.is_set():
                return 0 if code in (0, -signal.SIGTERM) else max(code, 1)
            if not was_ready and not self._announced and code in FATAL_EXIT_CODES:
                return code
            if was_ready and time.monotonic() - started > STEADY_S:
                backoff.reset()
            delay_s = backoff.next_delay_s()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            click.echo(f"broker process ended ({how}); starting it again in {delay_s:.1f} s", err=True)
            try:
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            except TimeoutError:
                continue
        return 0

    def _keep_port(self, bootstrap: str, settings: Path) -> None:
        """A port that the system chose stays the broker's for as long as this supervisor lives."""
        kafka = self._loaded.config.kafka
        if kafka.port == 0:
            kafka.port = int(bootstrap.rpartition(":")[2])
            settings.write_text(to_toml(self._loaded.config), encoding="utf-8")

    async def _run_child(self, settings: Path) -> tuple[int, bool]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDELOG_")}
        self._child = child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tidelog",
            "serve",
            "--config",
            str(settings),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then asks the child to end
            preexec_fn=_die_with_parent,
        )
        if self._stopping.is_set():
            child.send_signal(signal.SIGTERM)
        assert child.stdout is not None
        ready = False
        async for raw in child.stdout:
            line = raw.decode(errors="replace").rstrip()
            if not line.startswith(READY_PREFIX):
                click.echo(line)
                continue
            ready = True
            if self._announced:
                click.echo("broker process is ready again", err=True)
            else:
                self._announced = True
                bootstrap = line.removeprefix(READY_PREFIX)
                self._keep_port(bootstrap, settings)
                self._on_ready(bootstrap)
        return await child.wait(), ready
