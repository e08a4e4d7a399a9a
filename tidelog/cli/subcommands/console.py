"""`tidelog console`: the console as a process of its own, for a cluster that is reached by one address.

It prints the address to open. Where the cluster has a secret that this process can read, the address has a key that
signs in once; elsewhere the page asks for the token (`tidelog cluster admin-token`). It ends with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from tidelog.cli.client import AdminTokenNeeded, ClusterConnection, http_json
from tidelog.cli.options import admin_options, price_option
from tidelog.console.prices import load_prices
from tidelog.runtime import log
from tidelog.runtime.errors import ConfigError
from tidelog.runtime.network import TcpNetwork

if TYPE_CHECKING:
    from aiohttp import web

    from tidelog.console.app import ConsolePlace
    from tidelog.console.sessions import Sessions

DEFAULT_PORT = 9680


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65_535), default=DEFAULT_PORT, show_default=True, help="0: a free one.")
@click.option("--host-name", "host_names", multiple=True, metavar="NAME", help="Browsers open it by this name, too.")
@price_option()
@click.option("--schema-registry", default="", metavar="URL", help="Reads values of Avro and Protobuf by its schemas.")
@admin_options
def console(
    host: str, port: int, host_names: tuple[str, ...], price_file: Path | None, schema_registry: str, bootstrap: str
) -> None:
    """Serve the console of a cluster to browsers."""
    from tidelog.console.app import ConsolePlace

    prices = load_prices(price_file)
    if schema_registry and not schema_registry.startswith(("http://", "https://")):
        raise ConfigError(f"--schema-registry takes http://HOST:PORT, not {schema_registry!r}")
    cluster = ClusterConnection(bootstrap)
    token = _token(cluster)
    if token is None and not _is_loopback(host):
        raise ConfigError(
            f"--host {host} accepts remote connections, and the cluster has no secret: anybody could read records",
            hint="listen on 127.0.0.1, or give the cluster a secret (controller.secret_file)",
        )
    log.configure("warning", "text")
    at = ConsoleListening(host, port, host_names)
    url = cluster.admin_url
    place = ConsolePlace(
        admin_url=lambda: url,
        bootstrap=lambda: cluster.bootstrap,
        host_names=frozenset({*host_names, host}),
        prices=prices,
        schema_registry=schema_registry,
        cluster_id=lambda: cluster.cluster_id,
    )
    asyncio.run(_serve(place, at, token))


class ConsoleListening(NamedTuple):
    """Where the console listens, and the names by which browsers may open it."""

    host: str
    port: int
    host_names: tuple[str, ...]


def _token(cluster: ClusterConnection) -> str | None:
    """The token of the cluster's secret; empty if this process cannot read the secret, None if there is none."""
    try:
        url = cluster.admin_url
        http_json(url, "/token", method="POST", cluster=cluster.cluster_id)
    except AdminTokenNeeded:
        try:
            return cluster.admin_token
        except AdminTokenNeeded:
            return ""
    return None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _serve(place: ConsolePlace, at: ConsoleListening, token: str | None) -> None:
    from aiohttp import web

    from tidelog.broker.admin.limits import AdminLimits, bounded, bounded_runner
    from tidelog.console.app import console_app
    from tidelog.console.sessions import Sessions

    sessions = Sessions(place.clock.monotonic)
    root = web.Application(middlewares=[bounded(lambda: limits)])
    root.add_routes([web.get("/", _to_console)])
    root.add_subapp("/console", console_app(place, sign_in_keys=sessions))
    runner = bounded_runner(root, place.clock, shutdown_s=1.0)
    await runner.setup()
    try:
        assert runner.server is not None
        limits = AdminLimits(runner.server, place.clock)
        listener = await TcpNetwork().listen(limits, at.host, at.port)
        try:
            port = listener.address[1]
            click.echo(f"console {_address(at.host, port, sessions, token)}")
            await _until_stopped()
        finally:
            await listener.close()
    finally:
        await runner.cleanup()


def _address(host: str, port: int, sessions: Sessions, token: str | None) -> str:
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    key = f"#key={sessions.new_key(token)}" if token else ""
    return f"http://{place}/console/{key}"


async def _to_console(_request: web.Request) -> web.StreamResponse:
    from aiohttp import web

    raise web.HTTPFound("/console/")


async def _until_stopped() -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
