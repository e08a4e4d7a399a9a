"""`tidelog broker remove`: that it is told what would be lost, what is checked before anything is stopped, and repeats.

The controllers' state and the handlers of the admin HTTP are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp.test_utils import make_mocked_request
from click.testing import CliRunner, Result

from tests.controller.controller_helpers import Driver
from tidelog.broker.admin.answers import status_of
from tidelog.broker.admin.brokers import BrokerRoutes
from tidelog.broker.admin.losses import LossRoutes
from tidelog.broker.kafka.services import nothing_to_prepare
from tidelog.cli.client import ClusterConnection
from tidelog.cli.subcommands.broker import remove
from tidelog.controller.model import commands as c
from tidelog.runtime.errors import NotFound, TidelogError
from tidelog.storage.bucket.memory import MemoryObjectStore

GONE, LIVE = 1, 2
TOPIC = bytes(range(16))


class NoWal:
    """The WAL of a broker, of which nothing is in the bucket."""

    async def fence(self, master_epoch: int) -> None:
        """Shut nobody out."""

    async def clear(self, master_epoch: int, committed_offset: int) -> int:
        """Delete nothing."""
        return 0

    async def sweep(self) -> int:
        """Delete nothing."""
        return 0


class RemovalWorld:
    """The controllers' state, and the admin HTTP of a broker that lives."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.url = ""
        self.posts: list[str] = []
        controller, store = cast("Any", self), MemoryObjectStore()
        self._routes = [
            *BrokerRoutes(controller, lambda _: cast("Any", NoWal()), nothing_to_prepare).routes(),
            *LossRoutes(controller, store, self.quorum, lambda _: cast("Any", NoWal())).routes(),
        ]

    @property
    def image(self) -> Any:
        return self.driver.image

    async def quorum(self) -> dict[str, Any]:
        return {"members": [{"not_uploaded": {str(GONE): [4_096, 1_000]}}]}

    async def remove_broker(self, broker_id: int) -> None:
        self.driver.run(c.RemoveBroker(broker_id))

    async def abandon(self, replica_set: int, epoch: int, keys: Any, *, force: bool) -> tuple[int, int]:
        left, following = self.driver.run(c.Abandon(replica_set, epoch, tuple(keys), force))
        return left, following

    def register(self, broker: int, wal_kind: str = "disk") -> None:
        names = (f"code{broker}", "a", "host", 9_000 + broker, "", self.url)
        self.driver.run(c.RegisterBroker(broker, *names, wal_kind), int)
        self.driver.run(c.Elect(broker, broker))

    def die(self, broker: int) -> None:
        registration = self.driver.image.brokers[broker].registration_epoch
        self.driver.run(c.SetBrokerAlive(broker, registration, False))

    def answer(self, method: str, path: str) -> tuple[int, bytes]:
        if method == "POST":
            self.posts.append(path)
        (handler,) = (
            cast("Any", each).handler
            for each in self._routes
            if (cast("Any", each).method, cast("Any", each).path) == (method, path.partition("?")[0])
        )
        try:
            response = asyncio.run(handler(make_mocked_request(method, path)))
        except TidelogError as error:
            return status_of(error), json.dumps({"error": error.message, "hint": error.hint}).encode()
        return response.status, response.body


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RemovalWorld]:
    world = RemovalWorld()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply()

        def do_POST(self) -> None:
            self.reply()

        def reply(self) -> None:
            status, body = world.answer(self.command, self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    world.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(ClusterConnection, "admin_url", world.url)
    monkeypatch.chdir(tmp_path)
    try:
        yield world
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(remove, [*map(str, arguments), "--bootstrap", "127.0.0.1:1"])


# --- dry runs ----------------------------------------------------------------------------------------------------


def test_a_dry_run_of_giving_up_what_others_would_recover_tells_that_it_is_lost(world: RemovalWorld) -> None:
    for broker in (GONE, LIVE):
        world.register(broker, "s3")
    world.driver.run(c.CreateTopic(TOPIC, "t", 2, {}, False, False, (GONE, GONE)))
    world.die(GONE)
    safe = invoke(str(GONE), "--accept-loss", "--dry-run")
    assert safe.exit_code == 0 and "nothing would be lost" in safe.output
    told = invoke(str(GONE), "--accept-loss", "--force", "--dry-run")
    assert told.exit_code == 0 and "nothing would be lost" not in told.output
    assert "would be lost: 4,096 bytes of its WAL" in told.output and "without --force" in told.output
    document = json.loads(invoke(str(GONE), "--accept-loss", "--force", "--dry-run", "--format", "json").output)
    assert document["given_up"] and [row["partition"] for row in document["partitions"]] == [0, 1]
    assert world.posts == []
    assert invoke(str(GONE), "--accept-loss", "--force").exit_code == 0
    assert world.posts == [f"/losses/accept?id={GONE}&force=true", f"/brokers/remove?id={GONE}"]


def test_a_dry_run_does_not_say_of_a_broker_that_there_is_none_that_nothing_is_lost(world: RemovalWorld) -> None:
    world.register(LIVE)
    for arguments in (["7", "--dry-run"], ["7"]):
        assert isinstance(invoke(*arguments).exception, NotFound), arguments
