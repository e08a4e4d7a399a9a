"""`tidelog serve`: one process of a real deployment, from a TOML file.

It runs the roles that `[node] roles` names (controller, broker or both), prints one line `ready bootstrap=HOST:PORT`
once clients can connect (a controller alone: `ready controller=HOST:PORT`). On SIGTERM it gives its partitions to
other living brokers, if there are any and `node.drain_timeout_ms` allows, finishes what is in flight, uploads, and
exits 0; on SIGINT, or a second SIGTERM, it does so without moving partitions. SIGUSR1 stops the broker only and prints
`broker stopped`: who stops a whole cluster stops all brokers first, while there are controllers to commit their last
uploads.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from runtime import log, memory
from runtime.clock import SystemClock
from runtime.scheduling import wake_promptly
from runtime.tasks import TaskSet
from tidelog.config import Config
from tidelog.options import config_options, load_config

if TYPE_CHECKING:
    from tidelog.process import NodeProcess


@click.command()
@config_options
def serve(config_file: Path | None, assignments: tuple[str, ...]) -> None:
    """Run one process of a real deployment."""
    from tidelog.commands.up import check_bucket

    loaded = load_config(config_file, assignments)
    check_bucket(loaded)
    log.configure(loaded.config.node.log_level, loaded.config.node.log_format)
    import uvloop

    memory.tune()
    wake_promptly()  # the event loop's thread
    uvloop.run(_serve(loaded.config))


async def _serve(config: Config) -> None:
    from tidelog.process import NodeProcess
    from tidelog.supervisor import STOPPED_LINE

    stopping, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def terminate() -> None:
        if stopping.is_set():
            at_once.set()
        stopping.set()

    def interrupt() -> None:
        at_once.set()
        stopping.set()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    process = NodeProcess(config)

    async def stop_broker() -> None:
        at_once.set()
        if starting.done():
            await process.stop_broker()
        click.echo(STOPPED_LINE)

    def broker_only() -> None:
        parts.append(loop.create_task(stop_broker()))

    parts: list[asyncio.Task[None]] = []
    loop.add_signal_handler(signal.SIGUSR1, broker_only)
    starting = loop.create_task(process.start())
    stop = loop.create_task(stopping.wait())
    tasks = TaskSet("serve")
    await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if starting.done():
            starting.result()
            memory.give_back()
            tasks.spawn(memory.collect_when_due(SystemClock(), lambda: process.accounted_bytes), "collect")
            click.echo(f"ready {process.ready_line}")
            await process.run_until(stop)
            await _drain(process, at_once)
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    finally:
        await asyncio.gather(*parts)
        await process.stop()
        stop.cancel()
        await tasks.close()


async def _drain(process: NodeProcess, at_once: asyncio.Event) -> None:
    """Give the partitions away, until that is done or `at_once`."""
    drain, hurry = asyncio.create_task(process.drain()), asyncio.create_task(at_once.wait())
    await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
    for task in (drain, hurry):
        task.cancel()
    await asyncio.gather(hurry, return_exceptions=True)
    with contextlib.suppress(asyncio.CancelledError):
        await drain
