"""The quorum over admin HTTP: members, active controller, lag of the others, and membership changes.

    GET  /controllers            members of the quorum, each requested separately
    POST /controllers/transfer   ?to=ID (default: the most up-to-date): transfers leadership
    POST /controllers/add        ?member=ID@HOST:PORT
    POST /controllers/remove     ?id=ID

Any broker accepts the requests; the response to a POST follows the commit of the change. Entry: `QuorumView`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from typing import Any

from aiohttp import web

from tidelog.broker.admin.answers import integer, json_answer
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.addresses import split_address
from tidelog.controller.raft.quorum import SIZES, parse_member
from tidelog.runtime.errors import InvalidInput, TidelogError

MAX_NODE_ID = 0x7FFF_FFFF
STATE_FAILS_S = 300.0
"""Age of the metadata in the bucket from which a failure to write it is reported as a problem."""
LAG_WORTH_TELLING = 1_000
"""Lag of a follower, in entries, from which it is reported as a problem."""

Document = dict[str, Any]


def known_members(client: ControllerClient) -> list[tuple[int, str]]:
    """Return the controllers that the metadata names, each with its address."""
    cluster = client.image.cluster
    known = list(cluster.controllers) if cluster is not None else []
    if not known:  # a single controller without a quorum
        known = [(cluster.active_node if cluster is not None else -1, "{}:{}".format(*client.endpoints[0]))]
    return known


class QuorumView:
    """The handlers."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [
            web.get("/controllers", self._get),
            web.post("/controllers/transfer", self._transfer),
            web.post("/controllers/add", self._add),
            web.post("/controllers/remove", self._remove),
        ]

    async def report(self) -> Document:
        """`members` (each with `id`, `address`, `state` as in docs/cli.md, and its figures), `problems`."""
        members = await asyncio.gather(*(self._ask(*each) for each in known_members(self._client)))
        _depose(members)
        image = self._client.image
        with_broker = {each.id for each in image.brokers.values() if each.alive}  # it tells of its process itself
        return {"members": members, "problems": _problems(members) + _of_processes(members, with_broker)}

    async def _ask(self, node_id: int, address: str) -> Document:
        row: Document = {
            "id": node_id,
            "address": address,
            "state": "away",
            "pid": None,
            "error": None,
            "problem": None,
        }
        try:
            found = await self._client.status_of(split_address(address))
        except TidelogError as error:
            return {**row, "error": error.message}
        if found["active"]:
            state = "active"
        elif found.get("leader") is None:
            state = "no leader"
        else:
            state = "follower"
        figures = (
            "not_uploaded",
            "term",
            "last_index",
            "applied_index",
            "version",
            "journal_bytes",
            "peers",
            "leader",
            "problem",
            "failed_command",
            "bucket_state",
            "not_deleted",
            "failing",
            "unexpected_errors",
        )
        return {**row, "state": state, "pid": found["pid"], **{name: found.get(name) for name in figures}}

    # HTTP

    async def _get(self, request: web.Request) -> web.Response:
        return json_answer(await self.report())

    async def _transfer(self, request: web.Request) -> web.Response:
        text = request.query.get("to")
        await self._client.transfer_leadership(None if text is None else integer(text, "to", 0, MAX_NODE_ID))
        return json_answer({"status": "handed over"})

    async def _add(self, request: web.Request) -> web.Response:
        node_id, address = parse_member(request.query.get("member", ""))
        await self._client.change_quorum("add", node_id, address)
        return json_answer({"status": "added", "id": node_id, "address": address})

    async def _remove(self, request: web.Request) -> web.Response:
        text = request.query.get("id")
        if text is None:
            raise InvalidInput("id is missing: give the controller to remove")
        node_id = integer(text, "id", 0, MAX_NODE_ID)
        was_member = await self._client.change_quorum("rem", node_id, "")
        return json_answer({"status": "removed" if was_member else "no member", "id": node_id})


def metadata_in_bucket(members: Sequence[Document]) -> Document | None:
    """The newest metadata state that the active controller has put into the bucket; None: not known."""
    return next((row["bucket_state"] for row in members if row["state"] == "active" and row.get("bucket_state")), None)


def _depose(members: Sequence[Document]) -> None:
    """Only the controller of the newest term is active; one that has not noticed its successor is not."""
    active = [row for row in members if row["state"] == "active"]
    newest = max((row["term"] or 0 for row in active), default=0)
    for row in active:
        if (row["term"] or 0) < newest:
            row["state"] = "deposed"


def _problems(members: Sequence[Document]) -> list[str]:
    found = [f"controller {row['id']} at {row['address']} is away: {row['error']}" for row in members if row["error"]]
    for row in members:
        if row["problem"]:
            found.append(f"controller {row['id']} at {row['address']} {row['problem']}")
        if row["state"] == "deposed":
            found.append(f"controller {row['id']} at {row['address']} takes itself for the active one, and is not")
    if not any(row["state"] == "active" for row in members):
        found.append("no controller is active: topics cannot change and uploads wait; open partitions continue")
    if len(members) not in SIZES:
        found.append(f"the quorum has {len(members)} controllers: 1, 3 or 5 tolerate the most failures per member")
    away = {row["id"] for row in members if row["error"]}
    found += [
        "controller {}: command {command} at index {index} met an unexpected exception and changed nothing"
        " ({times} such since its start); its log has the traceback, report it".format(row["id"], **failed)
        for row in members
        if (failed := row.get("failed_command")) is not None
    ]
    found += [
        f"the active controller {row['id']} cannot write its metadata to the bucket: {state['problem']}"
        for row in members
        if (state := row.get("bucket_state")) is not None
        and state["problem"]
        and (state["age_s"] is None or state["age_s"] > STATE_FAILS_S)
    ]
    found += [
        f"the active controller {row['id']} cannot delete from the bucket {row['not_deleted']}"
        for row in members
        if row["state"] == "active" and row.get("not_deleted")
    ]
    for row in members:
        for peer in (row.get("peers") or ()) if row["state"] == "active" else ():
            if peer["problem"] and peer["id"] not in away:
                found.append(f"the active controller {row['id']} cannot reach {peer['id']}: {peer['problem']}")
            elif (peer["lag"] or 0) > LAG_WORTH_TELLING:
                found.append(f"controller {peer['id']} is {peer['lag']} entries behind")
    return found


def _of_processes(members: Sequence[Document], with_broker: Container[int]) -> list[str]:
    """What only the processes of controllers know: an older version tells none of it."""
    found = [
        f"the active controller {row['id']} {each}"
        for row in members
        if row["state"] == "active"
        for each in row.get("failing") or ()
    ]
    return found + [
        f"controller {row['id']}: {each}"
        for row in members
        if row["id"] not in with_broker
        for each in row.get("unexpected_errors") or ()
    ]


def quorum_hindrances(members: Sequence[Document]) -> list[str]:
    """Return what speaks against ending a controller's process now, one sentence each.

    `members`: those of `QuorumView.report`.
    """
    found = [f"controller {row['id']} is away" for row in members if row["error"]]
    if not any(row["state"] == "active" for row in members):
        found.append("no controller is active")
    away = {row["id"] for row in members if row["error"]}
    peers = [peer for row in members if row["state"] == "active" for peer in row.get("peers") or ()]
    return found + [
        f"controller {peer['id']} is behind, or cannot be reached by the active one"
        for peer in peers
        if peer["id"] not in away and (peer["problem"] or (peer["lag"] or 0) > LAG_WORTH_TELLING)
    ]


def merge_nodes(brokers: Sequence[Document], controllers: Sequence[Document]) -> list[Document]:
    """One row per node: that of the broker with the state of its controller, or that of a controller."""
    rows = {row["id"]: dict(row) for row in brokers}
    for member in controllers:
        row = rows.get(member["id"])
        if row is None:
            rows[member["id"]] = {
                "id": member["id"],
                "roles": ["controller"],
                "pid": member["pid"],
                "address": member["address"],
                "admin_url": "",
                "rack": None,
                "state": "away" if member["error"] else "ready",
                "controller": member["state"],
            }
        else:
            row["roles"] = ["controller", "broker"]
            row["pid"] = row["pid"] or member["pid"]
            row["controller"] = member["state"]
    return [rows[node_id] for node_id in sorted(rows)]
