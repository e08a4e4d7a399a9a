"""Keeps the processes of `tidelog up` running: start, watch, start again, stop together.

A child that ends before it was ever ready with an exit code that a retry cannot mend (wrong configuration, port in use,
wrong data directory, corrupt data) ends the whole: the supervisor leaves with the same code. Any other end is followed
by a new start after a growing, jittered delay that is reset once the child has been ready for a while. When the
supervisor itself is killed, the kernel sends its children SIGINT, so that nothing is left behind.

A child gets its configuration in a file that has no name: what may hold credentials is on no disk, and nothing is left
however the supervisor ends.

Several processes stop in two steps: all brokers first (SIGUSR1), for they need the controllers to upload what is left,
then the processes (SIGTERM).

While it runs, brokers are added and removed through a socket in the data directory (`tidelog.up_control`). One that
is a controller, too, goes on as a controller alone when its broker is removed.

Entry: `Supervisor.run`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click

from runtime.errors import InvalidInput, NotFound, Unavailable
from runtime.tasks import Backoff
from tidelog import cluster_layout
from tidelog.config import Loaded, to_toml
from tidelog.up_control import ControlServer

FATAL_EXIT_CODES = frozenset({2, 7, 8, 9})
"""Exit codes that a new start cannot mend (`tidelog.cli` lists them)."""
STEADY_S = 1.0
"""A process that lived so long after its start and was ready has done work: the back-off starts over."""
READY_PREFIX = "ready bootstrap="
READY_CONTROLLER_PREFIX = "ready controller="
ADD_TIMEOUT_S = 60.0
"""How long a new broker may take to be ready before its adding is told to go on without anybody waiting."""
STOPPED_LINE = "broker stopped"
"""What a process says when its broker has stopped and its controller goes on."""
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """At once, without moving partitions: all of them die together. A shell may have had SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


class Supervisor:
    """Runs one child process for each configuration. `on_ready(bootstrap)` once, when all of them are ready.

    `loaded` is the configuration that those of the nodes were made from; with it, brokers can be added and removed.
    """

    def __init__(self, nodes: Sequence[Loaded], on_ready: Callable[[str], None], loaded: Loaded) -> None:
        self._on_ready = on_ready
        self._loaded = loaded
        self._stopping = asyncio.Event()
        self._children = {one.config.node.id: _Child(one, self, len(nodes) > 1) for one in nodes}
        self._runs: dict[_Child, asyncio.Task[int]] = {}
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
        control = ControlServer(Path(self._loaded.config.node.data_dir), self._control)
        if cluster_layout.is_cluster(self._loaded.config):
            await control.start()
        try:
            for child in self._children.values():
                self._start(child)
            await self._stopping.wait()
            codes = await asyncio.gather(*self._runs.values())
            if self._stop is not None:
                await self._stop
        finally:
            await control.close()
        return self._exit_code or max(codes, default=0)

    def _start(self, child: _Child) -> None:
        self._runs[child] = asyncio.create_task(child.keep_running())

    def stop(self) -> None:
        """End all children."""
        if self._stop is None:
            self._stopping.set()
            for child in self._children.values():
                child.stopping.set()
            self._stop = asyncio.get_running_loop().create_task(self._end_all())

    async def _end_all(self) -> None:
        children = list(self._children.values())
        if len(children) > 1:
            budget_s = max(child.shutdown_s for child in children)
            await asyncio.gather(*(child.stop_broker(budget_s) for child in children))
        for child in children:
            child.end()

    # --- brokers that come and go ----------------------------------------------------------------------------------

    async def _control(self, request: dict[str, Any]) -> dict[str, Any]:
        """What `tidelog broker` asks for. Raises `InvalidInput`, `ConfigError`, `NotFound`, `Unavailable`."""
        if self._stopping.is_set():
            raise Unavailable("this `tidelog up` is stopping")
        what, node_id = request.get("do"), request.get("id")
        if what == "list":
            return {"brokers": {str(each): child.bootstrap for each, child in self._brokers().items()}}
        if what == "add":
            return await self._add()
        if what == "stop" and isinstance(node_id, int):
            return await self._remove(node_id)
        if what == "forget" and isinstance(node_id, int):
            if node_id in self._brokers():
                raise InvalidInput(f"broker {node_id} runs")
            await asyncio.to_thread(cluster_layout.forget_broker, self._loaded, node_id)
            return {"id": node_id}
        raise InvalidInput(f"there is no request {what!r}")

    def _brokers(self) -> dict[int, _Child]:
        return {each: child for each, child in self._children.items() if child.is_broker}

    async def _add(self) -> dict[str, Any]:
        node = cluster_layout.add_broker(self._loaded, list(self._brokers()))
        child = self._children[node.config.node.id] = _Child(node, self, True)
        self._start(child)
        try:
            async with asyncio.timeout(ADD_TIMEOUT_S):
                await child.ready.wait()
        except TimeoutError:
            raise Unavailable(
                f"broker {node.config.node.id} was not ready within {ADD_TIMEOUT_S:g} s; it is tried further",
                hint="what `tidelog up` prints says why; `tidelog broker list` shows when it is there",
            ) from None
        click.echo(f"broker {node.config.node.id} was added at {child.bootstrap}", err=True)
        return {"id": node.config.node.id, "bootstrap": child.bootstrap}

    async def _remove(self, node_id: int) -> dict[str, Any]:
        """End a broker for good; a controller in the same node goes on alone."""
        child = self._brokers().get(node_id)
        if child is None:
            raise NotFound(f"no broker {node_id} runs here")
        if len(self._brokers()) == 1:
            raise InvalidInput("the last broker cannot be removed", hint="stop `tidelog up` instead")
        left = cluster_layout.drop_broker(self._loaded, node_id, list(self._brokers()))
        child.stopping.set()
        child.end()
        await self._runs.pop(child)
        del self._children[node_id]
        if left is not None and not self._stopping.is_set():
            controller = self._children[node_id] = _Child(left, self, True)
            self._start(controller)
            await self._wait_back(controller)
        click.echo(f"broker {node_id} was stopped to be removed", err=True)
        return {"id": node_id, "controller": left is not None}

    async def _wait_back(self, controller: _Child) -> None:
        """Who removes several brokers, one after the other, shall not stop a majority of the controllers with them."""
        try:
            async with asyncio.timeout(ADD_TIMEOUT_S):
                await controller.ready.wait()
        except TimeoutError:
            click.echo(f"the controller of the removed broker is not ready after {ADD_TIMEOUT_S:g} s", err=True)

    def child_ready(self) -> None:
        """Tell when all are ready for the first time."""
        children = list(self._children.values())
        if not self._announced and all(child.ready.is_set() for child in children):
            self._announced = True
            self._on_ready(",".join(child.bootstrap for child in children if child.is_broker))

    def child_failed(self, code: int) -> None:
        """A child cannot run at all."""
        self._exit_code = self._exit_code or code
        self.stop()


class _Child:
    """One process."""

    def __init__(self, loaded: Loaded, supervisor: Supervisor, is_one_of_many: bool) -> None:
        self._loaded = loaded
        self._supervisor = supervisor
        self.is_broker = "broker" in loaded.config.node.roles
        kind = "broker process" if self.is_broker else "controller process"
        self._name = f"{kind} {loaded.config.node.id}" if is_one_of_many else kind
        self.stopping = asyncio.Event()
        """It shall end and not be started again."""
        self.ready = asyncio.Event()
        """It was ready at one time."""
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

    async def keep_running(self) -> int:
        """Run the process, again and again, until `stopping`; returns the exit code of the last."""
        stopping = self.stopping
        backoff = Backoff(base_s=0.2, cap_s=10.0)
        while not stopping.is_set():
            started = time.monotonic()
            code, was_ready = await self._run(stopping)
            if stopping.is_set():
                return 0 if code in (0, -signal.SIGTERM, -signal.SIGINT) else max(code, 1)
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

    def _keep_port(self, bootstrap: str) -> None:
        """A port that the system chose stays the broker's for as long as this supervisor lives."""
        kafka = self._loaded.config.kafka
        if kafka.port == 0:
            kafka.port = int(bootstrap.rpartition(":")[2])

    def _settings(self) -> BinaryIO:
        """A file in memory; the child opens it by the descriptor that it inherits."""
        settings = os.fdopen(os.memfd_create(f"node-{self._loaded.config.node.id}.toml"), "wb")
        settings.write(to_toml(self._loaded.config).encode())
        settings.flush()
        return settings

    async def _launch(self) -> asyncio.subprocess.Process:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDELOG_")}
        with self._settings() as settings:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tidelog",
                "serve",
                "--config",
                f"/proc/self/fd/{settings.fileno()}",
                pass_fds=[settings.fileno()],
                env=environment,
                stdout=asyncio.subprocess.PIPE,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then asks the child to end
                preexec_fn=_die_with_parent,
            )

    async def _run(self, stopping: asyncio.Event) -> tuple[int, bool]:
        self._broker_stopped.clear()
        self._process = process = await self._launch()
        if stopping.is_set():
            process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        ready = False
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line == STOPPED_LINE:
                self._broker_stopped.set()
            elif line.startswith((READY_PREFIX, READY_CONTROLLER_PREFIX)):
                ready = True
                self._became_ready(line)
            else:
                click.echo(line)
        return await process.wait(), ready

    def _became_ready(self, line: str) -> None:
        if self.ready.is_set():
            click.echo(f"{self._name} is ready again", err=True)
            return
        self.ready.set()
        if self.is_broker:
            self.bootstrap = line.removeprefix(READY_PREFIX)
            self._keep_port(self.bootstrap)
        self._supervisor.child_ready()
