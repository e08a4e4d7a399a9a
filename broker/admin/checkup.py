"""What `tidelog doctor` and `tidelog debug bundle` ask of a node.

    GET  /clock      who this is, and what time it has
    GET  /node       ?controller=ID: what the process knows of itself: version, machine, limits, settings with where
                     they came from (secrets hidden), modes of the files with secrets, certificates
    POST /checkup    ?controller=ID: syncs a nameless file on its disks, tries each right in the bucket, and the
                     addresses of all other nodes in the metadata; some seconds
    POST /stacks     ?controller=ID: where each task and thread is

With `controller` the broker has that member of the quorum answer; it needs no admin HTTP of its own. POST needs the
token of administrators, where the cluster has a secret. No address can be named: see `tidelog.controller.checkup`.

Entry: `CheckupRoutes.routes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from tidelog.broker.admin.answers import integer, json_answer
from tidelog.broker.admin.quorum import MAX_NODE_ID
from tidelog.controller.checkup import Checkup
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.addresses import split_address
from tidelog.runtime.errors import NotFound


class CheckupRoutes:
    """The handlers."""

    def __init__(
        self, checkup: Checkup, client: ControllerClient, controllers: Callable[[], Sequence[tuple[int, str]]]
    ) -> None:
        self._checkup = checkup
        self._client = client
        self._controllers = controllers

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [
            web.get("/clock", self._clock),
            web.get("/node", self._node),
            web.post("/checkup", self._run),
            web.post("/stacks", self._stacks),
        ]

    async def _clock(self, request: web.Request) -> web.Response:
        return json_answer(self._checkup.clock())

    async def _node(self, request: web.Request) -> web.Response:
        return json_answer(await self._answer(request, "node"))

    async def _run(self, request: web.Request) -> web.Response:
        return json_answer(await self._answer(request, "checkup"))

    async def _stacks(self, request: web.Request) -> web.Response:
        return json_answer(await self._answer(request, "stacks"))

    async def _answer(self, request: web.Request, question: str) -> Any:
        text = request.query.get("controller")
        if text is None:
            return await self._checkup.answer(question)
        node_id = integer(text, "controller", 0, MAX_NODE_ID)
        known = dict(self._controllers())
        if node_id not in known:
            raise NotFound(f"{node_id} is no controller of this cluster", hint="GET /controllers lists them")
        return await self._client.checkup_of(split_address(known[node_id]), question)
