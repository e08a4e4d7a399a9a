"""The controllers' configuration over admin HTTP: what is in force, and overrides while they run.

    GET  /controllers/config   each setting with `value` (in force at the active controller), `source` (override, file
                               or default), `configured` (by its own configuration), `dynamic`, and of one that is
                               not: `why`; `differs`: what other controllers have configured, by their ids, where it
                               differs from that
    POST /controllers/config   ?key=K&value=V: overrides a dynamic setting on all controllers, now and after restarts.
                               Without `value`: takes that back

Any broker accepts the requests. Kafka's tools reach the same overrides (`kafka-configs --entity-type brokers
--entity-default`). Entry: `ControllerConfigRoutes.routes`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tidelog.broker.admin.answers import json_answer
from tidelog.broker.admin.quorum import known_members
from tidelog.controller.client.configs import until_based
from tidelog.controller.model.addresses import split_address
from tidelog.controller.model.configs import digest
from tidelog.controller.model.overrides import DYNAMIC, change_of, refusal
from tidelog.runtime.errors import InvalidInput, TidelogError, Unavailable

if TYPE_CHECKING:
    from tidelog.controller.client.client import ControllerClient

logger = logging.getLogger(__name__)

Document = dict[str, Any]


class ControllerConfigRoutes:
    """The handlers."""

    def __init__(self, client: ControllerClient, configs: Callable[[], Mapping[str, str]]) -> None:
        """`configs`: this broker's effective configuration by dotted key."""
        self._client = client
        self._configs = configs

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [web.get("/controllers/config", self._get), web.post("/controllers/config", self._post)]

    async def report(self) -> list[Document]:
        """Return the settings of the active controller. Raises `Unavailable` if none is active or tells them."""
        members = known_members(self._client)
        told = await asyncio.gather(*(self._ask(address) for _, address in members))
        active = max((each for each in told if each.get("active")), key=lambda each: each.get("term") or 0, default={})
        if not active.get("settings"):
            raise Unavailable(
                "no active controller tells its settings", hint="`tidelog controller status` shows who is away"
            )
        others = {node_id: each.get("settings") or {} for (node_id, _), each in zip(members, told, strict=True)}
        return [_row(key, one, others) for key, one in active["settings"].items()]

    async def _ask(self, address: str) -> Document:
        try:
            return await self._client.status_of(split_address(address))
        except TidelogError:
            return {}

    async def _get(self, request: web.Request) -> web.Response:
        return json_answer({"settings": await self.report()})

    async def _post(self, request: web.Request) -> web.Response:
        key, value = request.query.get("key", ""), request.query.get("value")
        if not key:
            raise InvalidInput("key is missing: give the setting to change")
        changes = await until_based(lambda: self._change(key, value))
        if changes:
            logger.info("an operator changed a setting of the controllers", extra={"key": key, "value": value})
        return json_answer({"key": key, "value": changes.get(key, value), "changed": bool(changes)})

    async def _change(self, key: str, value: str | None) -> dict[str, str | None]:
        image = self._client.image
        current = image.cluster_configs
        changes = change_of(key, value, current, level=image.level, configs=self._configs())
        if changes:
            await self._client.alter_configs("cluster", "", changes, base=digest(current))
        return changes


def _row(key: str, one: Document, others: Mapping[int, Mapping[str, Document]]) -> Document:
    source = "default" if one["configured"] == one["default"] else "file"
    error = refusal(key)
    return {
        "key": key,
        "value": one["value"],
        "source": "override" if one["overridden"] else source,
        "configured": one["configured"],
        "dynamic": error is None,
        "why": str(error) if error is not None else None,
        "differs": {
            str(node_id): settings[key]["configured"]
            for node_id, settings in others.items()
            if key in DYNAMIC and key in settings and settings[key]["configured"] != one["configured"]
        },
    }
