"""This broker's bucket requests since its start, and the cluster's storage in the bucket, as input for a cost report.

    GET /bucket/usage    requests and bytes by purpose and topic, bytes produced, bytes stored

Prices are added by `tidelog cost`. Usage that belongs to no topic is `shared`: for requests and bytes the difference
between a purpose and its topics (`tidelog.storage.bucket.accounts`), for stored bytes the objects with data of several
topics (compaction gives large streams objects of their own). What no topic needs any more, and only snapshots and
branches of other topics keep, is `held`.

Entry: `BucketUsage.routes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tidelog.broker.admin.answers import json_answer
from tidelog.broker.objects.held import has_left
from tidelog.controller.model.records import ObjectState
from tidelog.runtime.clock import Clock
from tidelog.storage.bucket.accounts import Account, BucketAccounts
from tidelog.storage.commits import StreamRange

if TYPE_CHECKING:
    from tidelog.controller.image.image import Image

_CHUNK_BYTES = 64_000
"""Bytes processed between two yields to the event loop: packed ranges, and 64 per object; about a millisecond."""


def topic_of_stream(image: Image, stream_id: int) -> str | None:
    """The name of the topic that a stream belongs to; None if the topic does not exist."""
    key = image.index.partition_key(stream_id)
    topic = image.topics.get(key[0]) if key is not None else None
    return topic.name if topic is not None else None


class BucketUsage:
    """The handler. `produced` returns the bytes that producers wrote, by topic; `wal_bytes` the size of the WAL in the
    bucket."""

    def __init__(
        self,
        *,
        node_id: int,
        url: str,
        accounts: BucketAccounts,
        image: Callable[[], Image],
        produced: Callable[[], Mapping[str, int]],
        wal_bytes: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._node_id = node_id
        self._url = url
        self._accounts = accounts
        self._image = image
        self._produced = produced
        self._wal_bytes = wal_bytes
        self._clock = clock
        self._since_ms = clock.time_ms()
        self._since = clock.monotonic()

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to add to the admin HTTP server."""
        return [web.get("/bucket/usage", self._usage)]

    async def _usage(self, request: web.Request) -> web.Response:
        stored = await self._stored()
        accounts = self._accounts.snapshot()  # all figures from here on are of one point in time
        produced = dict(self._produced())
        topics = {
            topic: {"produced_bytes": produced.get(topic, 0), "purposes": accounts["topics"].get(topic, {})}
            for topic in sorted({*produced, *accounts["topics"]})
        }
        return json_answer(
            {
                "node_id": self._node_id,
                "cluster_id": self._image().cluster_id,
                "bucket": self._url,
                "since_ms": self._since_ms,
                "seconds": self._clock.monotonic() - self._since,
                "produced_bytes": sum(produced.values()),
                "purposes": accounts["purposes"],
                "topics": topics,
                "shared": self._shared(),
                "stored": stored,
            }
        )

    def _shared(self) -> dict[str, Any]:
        """The usage that belongs to no topic, by purpose."""
        left: dict[str, Any] = {}
        topics = self._accounts.topics().values()
        for purpose, account in sorted(self._accounts.purposes.items()):
            rest = Account()
            rest.add(account)
            for mine in topics:
                if purpose in mine:
                    rest.add(mine[purpose], -1)
            left[purpose] = {
                "requests": {kind: _whole(count) for kind, count in sorted(rest.requests.items())},
                "received_bytes": _whole(rest.received_bytes),
                "sent_bytes": _whole(rest.sent_bytes),
            }
        return left

    async def _stored(self) -> dict[str, Any]:
        """Objects and bytes in the bucket per metadata: in use, by topic; only held; waiting for deletion."""
        image = self._image()
        topics: dict[str | None, list[int]] = {}
        held, waiting = [0, 0], [0, 0]
        looked_at = 0
        for record in list(image.objects.values()):
            if record.state == ObjectState.COMMITTED:
                ranges = record.ranges
                is_held = _only_held(image, ranges)
                _count(held if is_held else topics.setdefault(_only_topic(image, ranges), [0, 0]), record.size)
            elif record.state == ObjectState.DESTROYED:
                _count(waiting, record.size)
            looked_at += 64 + len(memoryview(record.packed))
            if looked_at >= _CHUNK_BYTES:
                looked_at = 0
                await asyncio.sleep(0)
        shared = topics.pop(None, [0, 0])
        wal_bytes = self._wal_bytes()
        everything = [*topics.values(), shared, held, waiting]
        return {
            "objects": sum(count for count, _ in everything),
            "bytes": sum(size for _, size in everything) + wal_bytes,
            "wal_bytes": wal_bytes,
            "topics": {topic: _stock(stock) for topic, stock in sorted(topics.items(), key=str)},
            "shared": _stock(shared),
            "held": _stock(held),
            "waiting": _stock(waiting),
        }


def _only_held(image: Image, ranges: Iterable[StreamRange]) -> bool:
    """Whether a snapshot or a branch keeps an object of which no stream has anything left itself."""
    return bool(image.index.pins) and not any(has_left(image, one.stream_id, one.end_offset) for one in ranges)


def _only_topic(image: Image, ranges: Iterable[StreamRange]) -> str | None:
    """The only topic with data in an object; None if there are several, or no existing one."""
    found: str | None = None
    for piece in ranges:
        topic = topic_of_stream(image, piece.stream_id)
        if topic is None or (found is not None and topic != found):
            return None
        found = topic
    return found


def _count(stock: list[int], size: int) -> None:
    stock[0] += 1
    stock[1] += size


def _stock(stock: Sequence[int]) -> dict[str, int]:
    return {"objects": stock[0], "bytes": stock[1]}


def _whole(value: float) -> float:
    """Remove rounding errors of the sum of fractions."""
    return value if value > 1e-6 else 0
