"""`tidelog serve`: one process of a real deployment, from a TOML file.

It runs the roles that `[node] roles` names (controller, broker or both), prints one line `ready bootstrap=HOST:PORT`
once clients can connect, and on SIGTERM finishes what is in flight, uploads, and exits 0.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import click

from runtime import log, memory
from tidelog.config import Config
from tidelog.options import config_options, load_config


@click.command()
@config_options
def serve(config_file: Path | None, assignments: tuple[str, ...]) -> None:
    """Run one process of a real deployment."""
    from tidelog.commands.up import refuse_what_comes_later

    loaded = load_config(config_file, assignments)
    refuse_what_comes_later(loaded, brokers=1)
    log.configure(loaded.config.node.log_level, loaded.config.node.log_format)
    import uvloop

    memory.tune()
    uvloop.run(_serve(loaded.config))


async def _serve(config: Config) -> None:
    from tidelog.process import NodeProcess

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    process = NodeProcess(config)
    starting = loop.create_task(process.start())
    stop = loop.create_task(stopping.wait())
    await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if starting.done():
            starting.result()
            click.echo(f"ready bootstrap={process.bootstrap}")
            await process.run_until(stop)
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    finally:
        await process.stop()
        stop.cancel()
