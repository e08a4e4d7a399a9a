"""What the source of a move tells its target directly, and what becomes of it when that goes wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crc32c import crc32c

from tests.e2e.backends import create_topic
from tests.support.cluster import Cluster
from tests.support.load import Load
from tidelog.broker.partitions.hints import HintBox, HintParams, Told
from tidelog.broker.partitions.peers import HintSender
from tidelog.broker.settings import LogSettings
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.rpc.connection import RpcChannel
from tidelog.storage.storage import Storage
from tidelog.stream.opened import OpenedStream

PARTITIONS = 3
TOPIC = "moved"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, log=LogSettings(move_drain_timeout_ms=1_000)) as cluster:
        create_topic(cluster.bootstrap, TOPIC, PARTITIONS)
        yield cluster


def hints(cluster: Cluster, outcome: str) -> int:
    return sum(node.parts.partitions.hints.counts[outcome] for node in cluster.nodes.values())


def test_a_target_that_was_hinted_reads_nothing_to_open_and_to_serve_the_tail(cluster: Cluster) -> None:
    _, target = cluster.elsewhere(TOPIC)
    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        before = cluster.bucket.reads
        cluster.move(TOPIC, 0, target)
        assert hints(cluster, "used") == 1
        load.more()
        assert cluster.nodes[target].parts.partitions.manager.get(TOPIC, 0).came_at > 0
        assert cluster.bucket.reads == before
    load.check(cluster.bootstrap)
    assert not hints(cluster, "stale")


@pytest.mark.long
def test_a_target_that_said_it_is_ready_has_the_partition_without_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Told] = []
    asked: list[int] = []
    hint, send, open_streams = HintSender.send, Storage.send_now, ControllerClient.open_streams

    def tell(self: HintSender, *args: Any) -> Told:
        told.append(hint(self, *args))
        return told[-1]

    async def send_when_answered(self: Storage) -> None:
        while told[-1].ready is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await send(self)

    async def count(self: ControllerClient, replica_set_id: int, *args: Any) -> list[OpenedStream]:
        asked.append(replica_set_id)
        return await open_streams(self, replica_set_id, *args)

    monkeypatch.setattr(HintSender, "send", tell)
    monkeypatch.setattr(Storage, "send_now", send_when_answered)
    monkeypatch.setattr(ControllerClient, "open_streams", count)
    with Cluster(tmp_path) as cluster:
        create_topic(cluster.bootstrap, TOPIC, PARTITIONS)
        with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
            load.more(10)
            asked.clear()  # all partitions are open
            for number in range(4):
                load.more(10)
                to = cluster.leader(TOPIC, 0) % 3 + 1
                cluster.move(TOPIC, 0, to)
                ready = told[-1].ready
                assert len(told) == number + 1 and ready is not None and ready.replica_set == to
            load.more(10)
            assert not asked
        load.check(cluster.bootstrap)
        assert hints(cluster, "used") == 4


Deliver = Callable[[HintParams], Awaitable[msgspec.Raw]]
NOT_ANSWERED = msgspec.Raw(msgspec.msgpack.encode(None))


def faults() -> dict[str, Callable[[Deliver, HintParams], Awaitable[msgspec.Raw]]]:
    """What may become of a hint on its way between two brokers."""
    last: list[HintParams] = []

    async def lost(deliver: Deliver, hint: HintParams) -> msgspec.Raw:
        return NOT_ANSWERED

    async def doubled(deliver: Deliver, hint: HintParams) -> msgspec.Raw:
        await deliver(hint)
        await deliver(hint)
        return NOT_ANSWERED

    async def stale(deliver: Deliver, hint: HintParams) -> msgspec.Raw:
        last.append(hint)
        await deliver(last[-2] if len(last) > 1 else hint)
        return NOT_ANSWERED

    async def of_a_fenced_epoch(deliver: Deliver, hint: HintParams) -> msgspec.Raw:
        """The ends are right, the epoch is not, and what it holds is something else."""
        body = msgspec.msgpack.decode(hint.body)
        body[3] -= 1
        body[6] = [[one, [[base, count, b"x" * len(data)] for base, count, data in rows]] for one, rows in body[6]]
        encoded = msgspec.msgpack.encode(body)
        await deliver(HintParams(crc32c(encoded), encoded))
        return NOT_ANSWERED

    async def corrupted(deliver: Deliver, hint: HintParams) -> msgspec.Raw:
        broken = hint.body[:-1] + bytes([hint.body[-1] ^ 1])
        return await deliver(HintParams(hint.crc, broken))

    # the last one is refused, and whoever is refused sends that broker no hint for a while
    return {one.__name__: one for one in (lost, doubled, stale, of_a_fenced_epoch, corrupted)}


@pytest.mark.long
def test_a_hint_that_is_not_right_costs_a_read_and_nothing_else(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: dict[str, Counter[str]] = {}
    call = RpcChannel.call

    def on_the_way(fault: Callable[[Deliver, HintParams], Awaitable[msgspec.Raw]]) -> object:
        async def disturbed(channel: RpcChannel, method: str, params: Any, timeout_s: float) -> msgspec.Raw:
            if method != "hint":
                return await call(channel, method, params, timeout_s)
            return await fault(lambda hint: call(channel, method, hint, timeout_s), params)

        return disturbed

    with Load(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.more()
        for name, fault in faults().items():
            monkeypatch.setattr(RpcChannel, "call", on_the_way(fault))
            before = Counter({outcome: hints(cluster, outcome) for outcome in HintBox(float).counts})
            for _ in range(3):
                cluster.move(TOPIC, 0, cluster.leader(TOPIC, 0) % 3 + 1)
                load.more(10)
            spent[name] = Counter({one: hints(cluster, one) - count for one, count in before.items()})
    load.check(cluster.bootstrap)
    assert spent["lost"]["taken"] == 0
    assert spent["doubled"]["used"] == 3
    assert spent["stale"]["used"] == 1, "the first was the right one"
    assert (spent["corrupted"]["taken"], spent["corrupted"]["used"]) == (0, 0)
    assert spent["corrupted"]["refused"] > 0
    assert (spent["of_a_fenced_epoch"]["used"], spent["of_a_fenced_epoch"]["stale"]) == (0, 3)
