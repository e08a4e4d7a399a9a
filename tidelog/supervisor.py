"""Keeps the processes of `tidelog up` running: start, watch, start again, stop together.

A child that ends before it was ever ready with an exit code that a retry cannot mend (wrong configuration, port in use,
wrong data directory, corrupt data) ends the whole: the supervisor leaves with the same code. Any other end is followed
by a new start after a growing, jittered delay that is reset once the child has been ready for a while. When the
supervisor itself is killed, the kernel sends its children SIGTERM, so that nothing is left behind.

Several processes stop in two steps: all brokers first (SIGUSR1), for they need the controllers to upload what is left,
then the processes (SIGTERM).

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
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from runtime.tasks import Backoff
from tidelog.config import Loaded, to_toml

FATAL_EXIT_CODES = frozenset({2, 7, 8, 9})
"""Exit codes that a new start cannot mend (`tidelog.cli` lists them)."""
STEADY_S = 1.0
"""A process that lived so long after its start and was ready has done work: the back-off starts over."""
READY_PREFIX = "ready bootstrap="
STOPPED_LINE = "broker stopped"
"""What a process says when its broker has stopped and its controller goes on."""
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Supervisor:
    """Runs one child process for each configuration. `on_ready(bootstrap)` once, when all of them are ready."""

    def __init__(self, nodes: Sequence[Loaded], on_ready: Callable[[str], None]) -> None:
        self._on_ready = on_ready
        self._stopping = asyncio.Event()
        self._children = [_Child(loaded, self, len(nodes) > 1) for loaded in nodes]
        self._announced = False
        self._stop: asyncio.Task[None] | None = None
        self._exit_code = 0

    @property
    def is_announced(self) -> bool:
        """Whether all were ready at one time."""
        return self._announced

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until a child fails for good; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        with tempfile.TemporaryDirectory(prefix="tidelog-up-") as scratch:
            runs = [child.keep_running(Path(scratch), self._stopping) for child in self._children]
            codes = await asyncio.gather(*runs)
        if self._stop is not None:
            await self._stop
        return self._exit_code or max(codes)

    def stop(self) -> None:
        """End all children."""
        if self._stop is None:
            self._stopping.set()
            self._stop = asyncio.get_running_loop().create_task(self._end_all())

    async def _end_all(self) -> None:
        if len(self._children) > 1:
            budget_s = max(child.shutdown_s for child in self._children)
            await asyncio.gather(*(child.stop_broker(budget_s) for child in self._children))
        for child in self._children:
            child.end()

    def child_ready(self) -> None:
        """Tell when all are ready for the first time."""
        if not self._announced and all(child.bootstrap for child in self._children):
            self._announced = True
            self._on_ready(",".join(child.bootstrap for child in self._children))

    def child_failed(self, code: int) -> None:
        """A child cannot run at all."""
        self._exit_code = self._exit_code or code
        self.stop()


class _Child:
    """One process."""

    def __init__(self, loaded: Loaded, supervisor: Supervisor, is_one_of_many: bool) -> None:
        self._loaded = loaded
        self._supervisor = supervisor
        self._name = f"broker process {loaded.config.node.id}" if is_one_of_many else "broker process"
        self._process: asyncio.subprocess.Process | None = None
        self._broker_stopped = asyncio.Event()
        self.bootstrap = ""
        """Where its broker listens; empty before it was ready for the first time."""
        self.shutdown_s = loaded.config.node.shutdown_timeout_ms / 1000

    def end(self) -> None:
        """Ask the process to finish."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> bool:
        if self._process is None or self._process.returncode is not None:
            return False
        self._process.send_signal(number)
        return True

    async def stop_broker(self, budget_s: float) -> None:
        """Ask the process to stop its broker, and wait until it has."""
        if not self.bootstrap or not self._signal(signal.SIGUSR1):
            return
        assert self._process is not None
        gone = asyncio.ensure_future(self._process.wait())
        stopped = asyncio.ensure_future(self._broker_stopped.wait())
        await asyncio.wait({gone, stopped}, timeout=budget_s, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        stopped.cancel()

    async def keep_running(self, scratch: Path, stopping: asyncio.Event) -> int:
        """Run the process, again and again, until `stopping`; returns the exit code of the last."""
        settings = scratch / f"node-{self._loaded.config.node.id}.toml"
        settings.touch(0o600)
        settings.write_text(to_toml(self._loaded.config), encoding="utf-8")
        backoff = Backoff(base_s=0.2, cap_s=10.0)
        while not stopping.is_set():
            started = time.monotonic()
            code, was_ready = await self._run(settings, stopping)
            if stopping.is_set():
                return 0 if code in (0, -signal.SIGTERM) else max(code, 1)
            if not was_ready and not self._supervisor.is_announced and code in FATAL_EXIT_CODES:
                self._supervisor.child_failed(code)
                return code
            if was_ready and time.monotonic() - started > STEADY_S:
                backoff.reset()
            delay_s = backoff.next_delay_s()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            click.echo(f"{self._name} ended ({how}); starting it again in {delay_s:.1f} s", err=True)
            try:
                await asyncio.wait_for(stopping.wait(), delay_s)
            except TimeoutError:
                continue
        return 0

    def _keep_port(self, bootstrap: str, settings: Path) -> None:
        """A port that the system chose stays the broker's for as long as this supervisor lives."""
        kafka = self._loaded.config.kafka
        if kafka.port == 0:
            kafka.port = int(bootstrap.rpartition(":")[2])
            settings.write_text(to_toml(self._loaded.config), encoding="utf-8")

    async def _run(self, settings: Path, stopping: asyncio.Event) -> tuple[int, bool]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDELOG_")}
        self._broker_stopped.clear()
        self._process = process = await asyncio.create_subprocess_exec(
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
        if stopping.is_set():
            process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        ready = False
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line == STOPPED_LINE:
                self._broker_stopped.set()
            elif line.startswith(READY_PREFIX):
                ready = True
                self._became_ready(line.removeprefix(READY_PREFIX), settings)
            else:
                click.echo(line)
        return await process.wait(), ready

    def _became_ready(self, bootstrap: str, settings: Path) -> None:
        if self.bootstrap:
            click.echo(f"{self._name} is ready again", err=True)
            return
        self.bootstrap = bootstrap
        self._keep_port(bootstrap, settings)
        self._supervisor.child_ready()
