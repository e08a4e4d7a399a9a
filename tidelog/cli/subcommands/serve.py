"""`tidelog serve`: one process of a multi-machine deployment, configured by a TOML file.

It runs the roles in `[node] roles` (controller, broker or both) and prints the line `ready bootstrap=HOST:PORT` once
clients can connect (a controller without a broker: `ready controller=HOST:PORT`). On SIGTERM it moves its partitions to
other live brokers, if there are any and `node.drain_timeout_ms` allows it, completes the requests in flight, uploads,
and exits with 0; on SIGINT, or a second SIGTERM, it does so without moving partitions. When an operator asks for a
restart (`tidelog cluster restart`) it does the same as on SIGTERM, and exits with 11. SIGUSR1 stops only the broker
and prints `broker stopped`: to stop a whole cluster, stop all brokers first, while the controllers can still commit
their last uploads. A child of `tidelog up` stops as on SIGINT when its parent dies. A process that was told to stop, or
that has failed, is killed when it has not stopped within `node.shutdown_timeout_ms` and `STOP_GRACE_S`, after SIGTERM
`node.drain_timeout_ms` more; what is not uploaded then is in the write-ahead log. Until a failed broker has ended it
sends heartbeats, so nobody would take over from one that cannot stop.

Entry: `serve`; `run_node` for who starts such a process otherwise (`tidelog.testing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tidelog.cli.options import PRIVATE_UMASK, config_options, load_config
from tidelog.config import Config, Loaded, exposed_secrets
from tidelog.runtime import log, memory
from tidelog.runtime.children import watch_parent
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.lines import flush_all, say
from tidelog.runtime.scheduling import wake_promptly
from tidelog.runtime.stop_signals import OnSignal, StopSignals, end_within
from tidelog.runtime.tasks import TaskSet

if TYPE_CHECKING:
    from tidelog.process.node_base import Outside
    from tidelog.process.serve import NodeProcess

logger = logging.getLogger(__name__)

STOP_GRACE_S = 30.0
"""Time for the parts of a process to stop, besides `node.shutdown_timeout_ms`, after which it is killed."""


@click.command()
@click.option("--parent-pipe", type=int, hidden=True, help="Stop when this inherited descriptor is at its end.")
@config_options
def serve(parent_pipe: int | None, config_file: Path | None, assignments: tuple[str, ...]) -> None:
    """Run one process of a real deployment."""
    signals = serve_signals()
    run_node(load_config(config_file, assignments), parent_pipe, signals)


def serve_signals() -> StopSignals:
    """Return the signals that stop the process; to be called before it has other threads."""
    return StopSignals(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def run_node(loaded: Loaded, parent_pipe: int | None, signals: StopSignals, outside: Outside | None = None) -> None:
    """Run the process until it is stopped. `outside`: as for `NodeProcess`.

    Raises a `TidelogError` when it cannot go on, and `Exit` with `RESTART_EXIT_CODE` when it is to be started again.
    """
    from tidelog.cli.subcommands.up import check_bucket
    from tidelog.process.rebuild import check_finished
    from tidelog.process.supervisor import FAILED_PREFIX, RESTART_EXIT_CODE

    check_bucket(loaded)
    check_finished(Path(loaded.config.node.data_dir))
    log.configure(loaded.config.node.log_level, loaded.config.node.log_format)
    os.umask(PRIVATE_UMASK)
    if parent_pipe is None:  # else `tidelog up` has told
        for sentence in exposed_secrets(loaded):
            logger.warning(sentence)
    import uvloop

    import tidelog.process.serve  # noqa: F401 - before `tune`, which takes out of collections what is imported

    memory.tune()
    wake_promptly()  # the thread of the event loop
    try:
        origins = _origins(loaded, parent_pipe)
        restarts = uvloop.run(_serve(loaded.config, parent_pipe, signals, origins, outside))
    except TidelogError as error:
        flush_all()  # what led to the error stands before it
        if parent_pipe is not None:
            told = {"kind": type(error).__name__, "error": error.message, "hint": error.hint}
            click.echo(FAILED_PREFIX + json.dumps(told))
        raise
    if restarts:
        raise click.exceptions.Exit(RESTART_EXIT_CODE)


def _origins(loaded: Loaded, parent_pipe: int | None) -> dict[str, str]:
    """Return where the settings came from: as `tidelog up` knows it, whose configuration is no file of the user's."""
    from tidelog.process.supervisor import ORIGINS_ENV

    told = os.environ.get(ORIGINS_ENV)
    return json.loads(told) if parent_pipe is not None and told else loaded.sources


async def _serve(
    config: Config,
    parent_pipe: int | None,
    signals: StopSignals,
    sources: dict[str, str],
    outside: Outside | None,
) -> bool:
    """Run the process. Returns whether it is to be started again."""
    from tidelog.process.serve import NodeProcess
    from tidelog.process.supervisor import STOPPED_LINE

    stopping, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def terminate() -> None:
        if stopping.is_set():
            at_once.set()
        stopping.set()

    def interrupt() -> None:
        at_once.set()
        stopping.set()

    def parent_died() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends already
            loop.call_soon_threadsafe(interrupt)

    limit_s = config.node.shutdown_timeout_ms / 1000 + STOP_GRACE_S
    if parent_pipe is not None:
        watch_parent(parent_pipe, parent_died, limit_s)
    process = NodeProcess(config, outside, sources=sources)

    async def stop_broker() -> None:
        at_once.set()
        if starting.done():
            await process.stop_broker()
        say(STOPPED_LINE)

    def broker_only() -> None:
        parts.append(loop.create_task(stop_broker()))

    parts: list[asyncio.Task[None]] = []
    signals.serve(
        loop,
        {
            signal.SIGTERM: OnSignal(terminate, limit_s + config.node.drain_timeout_ms / 1000),
            signal.SIGINT: OnSignal(interrupt, limit_s),
            signal.SIGUSR1: OnSignal(broker_only),
        },
    )
    starting = loop.create_task(process.start())
    stop = loop.create_task(stopping.wait())
    tasks = TaskSet("serve")
    try:
        restarts = await _until_over(process, starting, stop, tasks)
        if restarts:
            end_within(limit_s + config.node.drain_timeout_ms / 1000, "the request to restart")
        if not starting.cancelled() and starting.exception() is None:
            await _drain(process, at_once)
    except Exception as error:
        end_within(limit_s, f"its failure ({error})")
        raise
    finally:
        try:
            await asyncio.gather(*parts)
        finally:
            await process.stop()
        stop.cancel()
        await tasks.close()
    return restarts and not stopping.is_set()


async def _until_over(
    process: NodeProcess, starting: asyncio.Task[None], stop: asyncio.Task[bool], tasks: TaskSet
) -> bool:
    """Return when the process is to stop, and whether it is to be started again. Raises what ends it otherwise."""
    await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False
    starting.result()
    memory.give_back()
    tasks.spawn(memory.collect_when_due(SystemClock(), lambda: process.accounted_bytes), "collect")
    say(f"ready {process.ready_line}")
    return await process.run_until(stop)


async def _drain(process: NodeProcess, at_once: asyncio.Event) -> None:
    """Move the partitions away, until that is done or `at_once` is set."""
    drain, wake = asyncio.create_task(process.drain()), asyncio.create_task(at_once.wait())
    await asyncio.wait({drain, wake}, return_when=asyncio.FIRST_COMPLETED)
    for task in (drain, wake):
        task.cancel()
    await asyncio.gather(wake, return_exceptions=True)
    with contextlib.suppress(asyncio.CancelledError):
        await drain
