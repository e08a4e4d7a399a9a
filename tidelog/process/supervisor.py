"""Supervise the processes of `tidelog up`: start, watch, restart and stop them.

If a child fails before its first readiness, the supervisor ends with the same exit code, unless the code says that a
restart may help. A broker added to a running cluster that fails so is given up, and its own error is the answer to the
request. After any other end it restarts the child after a growing, jittered delay, which is reset once the child has
been ready for a while; one that ended because an operator asked for a restart is started at once. A failed storage
(exit code 6), a process that the system cannot start (which counts as that), or a taken port is often cured by another
attempt, but after `FUTILE_STARTS` in a row the supervisor ends, or gives up this child alone if others run. When the
supervisor is killed, its children notice it by a pipe and stop as when it stops them, so no process is left behind.

A child gets its configuration in an anonymous in-memory file: credentials are on no disk, and no file is left however
the supervisor ends.

Several processes stop in two steps: first all brokers (SIGUSR1), because they need the controllers to commit their last
uploads, then the processes (SIGTERM). Each kills itself when it does not stop in time; one that cannot, because it is
stopped (SIGSTOP), the supervisor kills a little later (`LATE_S`).

Brokers are added to and removed from a running supervisor through a socket in the data directory
(`tidelog.process.up_control`). If the node of a removed broker also has a controller, the controller continues.

Entry: `Supervisor.run`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tidelog.config import Loaded, to_toml
from tidelog.process import cluster_layout
from tidelog.process.up_control import ControlServer, child_error
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.children import TIDELOG, ParentPipe
from tidelog.runtime.errors import InvalidInput, NotFound, StorageFailed, TidelogError, Unavailable
from tidelog.runtime.lines import say

RESTARTED_EXIT_CODES = frozenset({0, 5, 6, 130})
"""Exit codes after which even a child that has never been ready is restarted: it was stopped, or a bucket or controller
did not answer (`tidelog.cli.main` lists them)."""
RESTART_EXIT_CODE = 11
"""A process ends with it to be started again at once, because an operator asked for that. It is no failure; it is not
0, so that supervisors that restart only what has failed do it, too."""
FUTILE_STARTS = 10
"""Starts in a row that end before readiness with a code that says that a restart does not help, or with
`StorageFailed`; with the delays between them about half a minute.
"""
STEADY_S = 1.0
"""The back-off is reset after a process has been ready and has run for this long."""
READY_PREFIX = "ready bootstrap="
READY_CONTROLLER_PREFIX = "ready controller="
ADD_TIMEOUT_S = 60.0
"""How long `add` waits for a new broker to be ready; after that its start continues without a waiting caller."""
LATE_S = 45.0
"""How long a process may take to end after SIGTERM, on top of its settings: longer than it gives itself
(`STOP_GRACE_S` of `tidelog serve`)."""
FAILED_PREFIX = "failed "
"""Begins the line with which a process tells the error that ends it, as JSON."""
STOPPED_LINE = "broker stopped"
"""The line that a process prints when its broker has stopped and its controller continues."""


ORIGINS_ENV = "TIDELOG_ORIGINS"
"""The environment variable that tells a child where its settings came from, as JSON by dotted key."""


class ChildProcess(Protocol):
    """What the supervisor needs of a running process; `asyncio.subprocess.Process` has it."""

    @property
    def stdout(self) -> AsyncIterable[bytes] | None:
        """Its output, line by line; it ends with the process."""
        ...

    @property
    def returncode(self) -> int | None:
        """The exit code; below 0 the signal that ended it; None while it runs."""
        ...

    def send_signal(self, signal: int, /) -> None:
        """Send a signal to it, which runs."""
        ...

    async def wait(self) -> int:
        """Wait until it has ended, and return `returncode`."""
        ...


Launch = Callable[[Loaded, int], Awaitable[ChildProcess]]
"""Starts a process from a configuration, and with the read end of the pipe that ends with the supervisor. Raises
`OSError` if the system cannot do that now."""


async def _lines(output: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Yield what a process prints. Of a line that is longer than the buffer of the pipe only a part comes."""
    raw = aiter(output)
    while True:
        try:
            line = await anext(raw)
        except StopAsyncIteration:
            return
        except ValueError:  # it was too long: what was read of it is gone
            continue
        yield line.decode(errors="replace").rstrip()


def _name(number: int) -> str:
    """Return the name of a signal; its number, if it has none, as most of those from SIGRTMIN to SIGRTMAX."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _read_failure(text: str) -> dict[str, str | None]:
    """Return the error that a process told; one that was killed meanwhile has told a part."""
    try:
        told = json.loads(text)
    except ValueError:
        told = None
    return told if isinstance(told, dict) else {"error": text}


def _settings(loaded: Loaded) -> BinaryIO:
    """Write a configuration to an in-memory file, which a child opens through the inherited descriptor."""
    settings = os.fdopen(os.memfd_create(f"node-{loaded.config.node.id}.toml"), "wb")
    settings.write(to_toml(loaded.config).encode())
    settings.flush()
    return settings


async def launch_node(loaded: Loaded, parent: int) -> asyncio.subprocess.Process:
    """Start `tidelog serve`. See `Launch`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDELOG_")}
    environment[ORIGINS_ENV] = json.dumps(loaded.sources)
    with _settings(loaded) as settings:
        return await asyncio.create_subprocess_exec(
            *TIDELOG,
            "serve",
            "--config",
            f"/proc/self/fd/{settings.fileno()}",
            "--parent-pipe",
            str(parent),
            pass_fds=[settings.fileno(), parent],
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only the supervisor, which then stops the child
        )


class Supervisor:
    """Runs one child process for each configuration. Calls `on_ready(bootstrap)` once, when all of them are ready.

    `loaded` is the configuration that the nodes' configurations derive from; with it, brokers can be added and removed.
    """

    def __init__(
        self,
        nodes: Sequence[Loaded],
        on_ready: Callable[[str], None],
        loaded: Loaded,
        launch: Launch = launch_node,
    ) -> None:
        self._on_ready = on_ready
        self._loaded = loaded
        self.launch = launch
        self._stopping = asyncio.Event()
        self.pipe = ParentPipe()
        self._children = {one.config.node.id: _Child(one, self, len(nodes) > 1) for one in nodes}
        self._runs: dict[_Child, asyncio.Task[int]] = {}
        self._announced = False
        self._stop: asyncio.Task[None] | None = None
        self._exit_code = 0

    @property
    def is_announced(self) -> bool:
        """Whether all children have been ready."""
        return self._announced

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until a child fails permanently; returns the exit code."""
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
            self.pipe.close()
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
        runs = dict(self._runs)  # a removal that goes on meanwhile takes its own out
        if len(runs) > 1:
            budget_s = max(child.shutdown_s for child in runs)
            await asyncio.gather(*(child.stop_broker(budget_s) for child in runs))
        await asyncio.gather(*(child.end(run) for child, run in runs.items()))

    # --- adding and removing brokers -------------------------------------------------------------------------------

    async def _control(self, request: dict[str, Any]) -> dict[str, Any]:
        """Handle a request of `tidelog broker`. Raises `InvalidInput`, `ConfigError`, `NotFound`, `Unavailable`."""
        if self._stopping.is_set():
            raise Unavailable("this `tidelog up` is stopping")
        what, node_id = request.get("do"), request.get("id")
        if what == "list":
            brokers = {str(each): child.bootstrap for each, child in self._brokers().items()}
            return {"brokers": brokers, "removed": cluster_layout.removed_brokers(self._loaded)}
        if what == "add":
            return await self._add()
        if what == "stop" and isinstance(node_id, int):
            return await self._remove(node_id)
        if what == "forget" and isinstance(node_id, int):
            if node_id in self._brokers():
                raise InvalidInput(f"broker {node_id} is running")
            await asyncio.to_thread(cluster_layout.forget_broker, self._loaded, node_id)
            return {"id": node_id}
        raise InvalidInput(f"unknown request {what!r}")

    def _brokers(self) -> dict[int, _Child]:
        return {each: child for each, child in self._children.items() if child.is_broker}

    async def _add(self) -> dict[str, Any]:
        node = cluster_layout.add_broker(self._loaded, list(self._brokers()))
        child = self._children[node.config.node.id] = _Child(node, self, True)
        self._start(child)
        try:
            async with asyncio.timeout(ADD_TIMEOUT_S):
                await child.settled.wait()
        except TimeoutError:
            raise Unavailable(
                f"broker {node.config.node.id} was not ready within {ADD_TIMEOUT_S:g} s; its start continues",
                hint="see the output of `tidelog up` for the reason; `tidelog broker list` shows when it is ready",
            ) from None
        if not child.ready.is_set():
            raise await self._take_back(child, node.config.node.id)
        say(f"broker {node.config.node.id} was added at {child.bootstrap}", err=True)
        return {"id": node.config.node.id, "bootstrap": child.bootstrap, "to_restart": self._renew()}

    def _renew(self) -> list[int]:
        """Have all brokers start next as the cluster is now; return those whose WALs get more replicas then."""
        now = {each: cluster_layout.of_node(self._loaded, each) for each in self._brokers()}
        return [each for each, child in self._brokers().items() if child.renew(now[each])]

    async def _take_back(self, child: _Child, node_id: int) -> TidelogError:
        """Forget an added broker that cannot start, and return why. It never served; its directory is kept."""
        await self._runs[child]
        del self._runs[child], self._children[node_id]
        cluster_layout.drop_broker(self._loaded, node_id, list(self._brokers()))
        told = child.failure
        return child_error(
            told.get("kind", ""),
            f"broker {node_id} cannot start: {told.get('error') or 'see the output of `tidelog up`'}",
            told.get("hint") or "the broker was taken back; mend that and add one again",
        )

    async def _remove(self, node_id: int) -> dict[str, Any]:
        """Stop a broker permanently; a controller on the same node continues."""
        child = self._brokers().get(node_id)
        if child is None:
            raise NotFound(f"this `tidelog up` runs no broker {node_id}")
        if len(self._brokers()) == 1:
            raise InvalidInput("the last broker cannot be removed", hint="stop `tidelog up` instead")
        left = cluster_layout.drop_broker(self._loaded, node_id, list(self._brokers()))
        child.stopping.set()
        await child.end(self._runs[child])
        del self._runs[child], self._children[node_id]
        if left is not None and not self._stopping.is_set():
            controller = self._children[node_id] = _Child(left, self, True)
            self._start(controller)
            await self._wait_back(controller)
        say(f"broker {node_id} was stopped to be removed", err=True)
        return {"id": node_id, "controller": left is not None}

    async def _wait_back(self, controller: _Child) -> None:
        """Wait for the node's controller, so that successive removals never stop a majority of the controllers."""
        try:
            async with asyncio.timeout(ADD_TIMEOUT_S):
                await controller.settled.wait()
        except TimeoutError:
            say(f"the controller of the removed broker is not ready after {ADD_TIMEOUT_S:g} s", err=True)

    def child_ready(self) -> None:
        """Call `on_ready` when all children are ready for the first time."""
        children = list(self._children.values())
        if not self._announced and all(child.ready.is_set() for child in children):
            self._announced = True
            self._on_ready(",".join(child.bootstrap for child in children if child.is_broker))

    def child_given_up(self, child: _Child, code: int) -> None:
        """Stop, unless the cluster has been ready and other processes go on."""
        others_run = any(not run.done() for each, run in self._runs.items() if each is not child)
        if not self._announced or not others_run:
            self.child_failed(code)

    def child_failed(self, code: int) -> None:
        """Record that a child cannot run, and stop."""
        self._exit_code = self._exit_code or code
        self.stop()


class _Child:
    """One child process."""

    def __init__(self, loaded: Loaded, supervisor: Supervisor, is_one_of_many: bool) -> None:
        self._loaded = loaded
        self._launched = loaded
        """With which its process runs, or ran last."""
        self._supervisor = supervisor
        self.is_broker = "broker" in loaded.config.node.roles
        kind = "broker process" if self.is_broker else "controller process"
        self._name = f"{kind} {loaded.config.node.id}" if is_one_of_many else kind
        self.stopping = asyncio.Event()
        """The process is to end and not to be restarted."""
        self.ready = asyncio.Event()
        """The process has been ready."""
        self.settled = asyncio.Event()
        """The process has been ready, or is not started again."""
        self.failure: dict[str, str | None] = {}
        """The error with which the last process ended, if it told one: `kind`, `error` and `hint`."""
        self._process: ChildProcess | None = None
        self._broker_stopped = asyncio.Event()
        self.bootstrap = ""
        """Address of its broker; empty before it is ready for the first time."""
        self.shutdown_s = loaded.config.node.shutdown_timeout_ms / 1000
        self._limit_s = self.shutdown_s + loaded.config.node.drain_timeout_ms / 1000 + LATE_S

    def renew(self, loaded: Loaded) -> bool:
        """Start with this configuration from now on; return whether the WAL of its broker gets more replicas then."""
        self._loaded = loaded
        return self._launched.config.replication.total_replicas < loaded.config.replication.total_replicas

    async def end(self, run: asyncio.Task[int]) -> None:
        """Send the process SIGTERM, and SIGKILL if it is late; wait until its `run` has ended."""
        self._signal(signal.SIGTERM)
        await asyncio.wait({run}, timeout=self._limit_s)
        if self._signal(signal.SIGKILL):
            say(f"{self._name} was killed: it has not ended within {self._limit_s:g} s of SIGTERM", err=True)
        await run

    def _signal(self, number: signal.Signals) -> bool:
        if self._process is None or self._process.returncode is not None:
            return False
        self._process.send_signal(number)
        return True

    async def stop_broker(self, budget_s: float) -> None:
        """Have the process stop its broker, and wait until it has stopped."""
        if not self.bootstrap or not self._signal(signal.SIGUSR1):
            return
        assert self._process is not None
        gone = asyncio.ensure_future(self._process.wait())
        stopped = asyncio.ensure_future(self._broker_stopped.wait())
        await asyncio.wait({gone, stopped}, timeout=budget_s, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        stopped.cancel()

    async def keep_running(self) -> int:
        """Run and restart the process until `stopping`. Returns the last exit code.

        An exception that nobody expected ends that, and is told: nobody would start the process again.
        """
        try:
            return await self._keep_running()
        except Exception as error:  # noqa: BLE001  # whatever it is: nobody awaits this before the end
            say(f"{self._name} is not started again: {type(error).__name__}: {error}", err=True)
            self.settled.set()
            self._supervisor.child_given_up(self, StorageFailed.exit_code)
            return StorageFailed.exit_code

    async def _keep_running(self) -> int:
        stopping = self.stopping
        backoff = Backoff(0.2, 10.0, random.Random())
        futile = 0
        while not stopping.is_set():
            started = time.monotonic()
            code, was_ready = await self._run(stopping)
            if stopping.is_set():
                return 0 if code in (0, RESTART_EXIT_CODE, -signal.SIGTERM, -signal.SIGINT) else max(code, 1)
            if code == RESTART_EXIT_CODE:
                say(f"{self._name} ended to be started again, as an operator asked", err=True)
                backoff.reset()
                futile = 0
                continue
            may_restart = code < 0 or code in RESTARTED_EXIT_CODES
            cannot_run = not was_ready and not may_restart
            if cannot_run and not self._supervisor.is_announced:
                self._supervisor.child_failed(code)
                return code
            if cannot_run and not self.ready.is_set():
                say(f"{self._name} ended with exit code {code} before it was ready: it is given up", err=True)
                self.settled.set()
                return 0  # `tidelog up` goes on as it was before
            if was_ready and time.monotonic() - started > STEADY_S:
                backoff.reset()
                futile = 0
            futile = futile + 1 if cannot_run or code == StorageFailed.exit_code else 0
            if futile == FUTILE_STARTS:
                self._give_up(code)
                return code
            delay_s = backoff.next_delay_s()
            say(f"{self._name} {self._how(code)}; restarting it in {delay_s:.1f} s", err=True)
            try:
                await asyncio.wait_for(stopping.wait(), delay_s)
            except TimeoutError:
                continue
        return 0

    def _how(self, code: int) -> str:
        if self._process is None:
            return f"cannot be started: {self.failure['error']}"
        return f"ended (signal {_name(-code)})" if code < 0 else f"ended (exit code {code})"

    def _give_up(self, code: int) -> None:
        say(
            f"{self._name} ended {FUTILE_STARTS} times in a row with exit code {code}: it is not started again. "
            "Its messages above say what fails; mend that and run `tidelog up` again",
            err=True,
        )
        self.settled.set()
        self._supervisor.child_given_up(self, code)

    def _keep_port(self, bootstrap: str) -> None:
        """Keep a port that the system chose until this supervisor ends."""
        kafka = self._loaded.config.kafka
        if kafka.port == 0:
            kafka.port = int(bootstrap.rpartition(":")[2])

    async def _run(self, stopping: asyncio.Event) -> tuple[int, bool]:
        """Run the process once. Whatever fails here is this start's failure: nobody else would hear of it."""
        self._broker_stopped.clear()
        self.failure = {}
        self._process = None
        try:
            return await self._run_to_end(stopping)
        except Exception as error:  # noqa: BLE001  # no memory, process or descriptor is left, or nobody knows what
            text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            await self._kill_unwatched(text)
            self.failure = {"error": text}
            return StorageFailed.exit_code, False

    async def _kill_unwatched(self, why: str) -> None:
        if self._process is not None:
            say(f"{self._name} is killed, for it cannot be watched: {why}", err=True)
            self._signal(signal.SIGKILL)
            await self._process.wait()

    async def _run_to_end(self, stopping: asyncio.Event) -> tuple[int, bool]:
        self._launched = self._loaded
        self._process = process = await self._supervisor.launch(self._loaded, self._supervisor.pipe.read_end)
        if stopping.is_set():
            process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        ready = False
        async for line in _lines(process.stdout):
            if line == STOPPED_LINE:
                self._broker_stopped.set()
            elif line.startswith((READY_PREFIX, READY_CONTROLLER_PREFIX)):
                ready = True
                self._became_ready(line)
            elif line.startswith(FAILED_PREFIX):
                self.failure = _read_failure(line.removeprefix(FAILED_PREFIX))
            else:
                say(line)
        return await process.wait(), ready

    def _became_ready(self, line: str) -> None:
        if self.ready.is_set():
            say(f"{self._name} is ready again", err=True)
            return
        self.ready.set()
        self.settled.set()
        if self.is_broker:
            self.bootstrap = line.removeprefix(READY_PREFIX)
            self._keep_port(self.bootstrap)
        self._supervisor.child_ready()
