"""Asks a running cluster: one of its brokers for the members, then each node for what it finds.

Nodes of one machine are asked one after the other, because their disk probes would disturb each other; machines side by
side. A node that does not answer is told as such.

Entry: `look_at_cluster`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from tidelog.config import Config, examine
from tidelog.controller.checkup import CheckupReport
from tidelog.controller.model.addresses import is_address, split_address
from tidelog.doctor.facts import ClusterView, NodeClock, NodeView
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import NotFound, TidelogError
from tidelog.runtime.facts.node import NodeFacts, SettingFacts
from tidelog.runtime.facts.reach import ClockSample, NodeAddress, Tries
from tidelog.runtime.network import TcpNetwork

MACHINES_AT_ONCE: Final = 16
CLOCK_LOOKS: Final = 3
"""Of a clock: the one with the shortest round trip counts."""
GOOD_STATES: Final = ("ready", "alive", "draining", "drained", "starting")


class NoToken(TidelogError):
    """The admin HTTP asks for the token of the cluster's secret, and it is not at hand."""


class Ask(Protocol):
    """Sends requests to the admin HTTP at a URL. Both raise `TidelogError`: `NotFound` for what a version lacks."""

    def get(self, url: str, path: str, broker: int | None = None) -> Any:
        """Return the document of a GET. `broker`: whose answer is wanted; raises `Unavailable` if another answers."""
        ...

    def post(self, url: str, path: str) -> Any:
        """Return the document of a POST. Raises `NoToken`, too."""
        ...


class _AskedNode:
    """A node that is to be asked: a broker at its own admin HTTP, a controller by way of a broker's."""

    def __init__(self, row: Mapping[str, Any], url: str, through: bool) -> None:
        self.id = int(row["id"])
        self.where = f"controller {self.id}" if through else f"broker {self.id}"
        self.url = url
        self.query = f"?controller={self.id}" if through else ""
        self.is_broker = not through
        self.machine = str(row["address"]).rpartition(":")[0]


def look_at_cluster(
    bootstrap: str, status: Callable[[], Mapping[str, Any]], ask: Ask, *, is_named: bool = True
) -> tuple[ClusterView, list[NodeView]]:
    """Ask a cluster and its nodes. `status`: returns the document of `tidelog status`, or raises `TidelogError`."""
    try:
        document = dict(status())
    except TidelogError as error:
        return ClusterView(bootstrap=bootstrap, error=error.message, hint=error.hint or "", is_named=is_named), []
    answering, silent = _sort_out(document, ask)
    nodes = [*answering, *_controllers(document, answering)]
    views = _examine_all(nodes, ask)
    levels, levels_error = _levels(answering, ask)
    from_here = asyncio.run(Tries(TcpNetwork(), SystemClock()).run(_addresses(document)))
    return (
        ClusterView(
            bootstrap=bootstrap,
            is_named=is_named,
            status=document,
            levels=levels,
            levels_error=levels_error,
            clocks=[clock for node in answering if (clock := _clock(node, ask)) is not None],
            from_here=from_here,
            silent=silent,
        ),
        views,
    )


def _sort_out(document: Mapping[str, Any], ask: Ask) -> tuple[list[_AskedNode], dict[int, str]]:
    """Return the brokers that answer themselves, and the living ones that do not, with the reason."""

    def problem(row: Mapping[str, Any]) -> str | None:
        try:
            ask.get(row["admin_url"], "/healthz", int(row["id"]))
        except TidelogError as error:
            return error.message
        return None

    rows = [row for row in document["nodes"] if "broker" in row["roles"] and row["state"] in GOOD_STATES]
    answering, silent = [], {}
    with ThreadPoolExecutor(MACHINES_AT_ONCE, thread_name_prefix="doctor") as pool:
        for row, why in zip(rows, pool.map(problem, rows), strict=True):
            if why is None:
                answering.append(_AskedNode(row, row["admin_url"], through=False))
            else:
                silent[int(row["id"])] = why
    return answering, silent


def _controllers(document: Mapping[str, Any], brokers: list[_AskedNode]) -> list[_AskedNode]:
    """Return the controllers in processes of their own, which a broker asks for us."""
    if not brokers:
        return []
    rows = [row for row in document["nodes"] if "broker" not in row["roles"] and row["state"] in GOOD_STATES]
    return [_AskedNode(row, brokers[0].url, through=True) for row in rows]


def _examine_all(nodes: Iterable[_AskedNode], ask: Ask) -> list[NodeView]:
    machines: dict[str, list[_AskedNode]] = defaultdict(list)
    for node in nodes:
        machines[node.machine].append(node)

    def examine_machine(same: list[_AskedNode]) -> list[NodeView]:
        return [_examine(each, ask) for each in same]

    with ThreadPoolExecutor(MACHINES_AT_ONCE, thread_name_prefix="doctor") as pool:
        views = [view for found in pool.map(examine_machine, machines.values()) for view in found]
    return sorted(views, key=lambda view: view.where)


def _examine(node: _AskedNode, ask: Ask) -> NodeView:
    """Ask one node for all that it knows."""
    view = NodeView(where=node.where, asked_id=node.id)
    try:
        told = msgspec.convert(ask.get(node.url, f"/node{node.query}"), NodeFacts)
    except NotFound:
        return msgspec.structs.replace(view, is_older=True)
    except (TidelogError, msgspec.ValidationError) as error:
        if "there is no method" in str(error):
            return msgspec.structs.replace(view, is_older=True)
        return msgspec.structs.replace(view, missing=[f"its facts: {error}"])
    config = config_of(told.settings)
    sources = {each.key: each.source for each in told.settings if each.source != "default"}
    view = msgspec.structs.replace(view, told=told, config=config, sources=sources)
    try:
        report = msgspec.convert(ask.post(node.url, f"/checkup{node.query}"), CheckupReport)
    except NoToken:
        return msgspec.structs.replace(view, no_token=True)
    except (TidelogError, msgspec.ValidationError) as error:
        return msgspec.structs.replace(view, missing=[f"its checkup: {error}"])
    return msgspec.structs.replace(view, report=report)


def config_of(settings: Iterable[SettingFacts]) -> Config | None:
    """Return the configuration that a node has told; None if it told none. Settings of another version are left out."""
    values = [(each.key, each.value) for each in settings]
    return examine(flags=values)[0].config if values else None


def _levels(brokers: Iterable[_AskedNode], ask: Ask) -> tuple[dict[str, Any], str]:
    """Return the feature level and who supports which, or why no broker told it."""
    error = ""
    for node in brokers:
        try:
            return dict(ask.get(node.url, "/cluster")), ""
        except TidelogError as refused:
            error = f"{node.where}: {refused.message}"
    return {}, error


def _clock(node: _AskedNode, ask: Ask) -> NodeClock | None:
    samples = []
    for _ in range(CLOCK_LOOKS):
        before_ms = _now_ms()
        try:
            told = ask.get(node.url, "/clock")
        except TidelogError:
            return None  # an older version, or one that has just ended: the other questions tell
        samples.append(ClockSample(before_ms, int(told["time_ms"]), _now_ms()))
    return NodeClock(node.where, min(samples, key=lambda each: each.after_ms - each.before_ms))


def _now_ms() -> int:
    return SystemClock().time_ms()


def _addresses(document: Mapping[str, Any]) -> list[NodeAddress]:
    found = []
    for row in document["nodes"]:
        if "broker" not in row["roles"] or row["state"] not in GOOD_STATES:
            continue
        if is_address(row["address"]):
            found.append(NodeAddress("kafka", int(row["id"]), *split_address(row["address"])))
        admin = urlsplit(row["admin_url"])
        if admin.hostname and admin.port:
            found.append(NodeAddress("admin", int(row["id"]), admin.hostname, admin.port))
    return found
