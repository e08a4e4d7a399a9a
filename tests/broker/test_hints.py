"""A hint is used when it is exactly what the controller commits, and never otherwise."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.broker.partitions.hints import (
    KEEP_S,
    MAX_BYTES,
    MAX_HINT_BYTES,
    MAX_HINTS,
    HintBox,
    HintParams,
    HintReply,
    Tails,
    encode_hint,
)
from tidelog.broker.partitions.peer_calls import PeerCalls
from tidelog.broker.partitions.peers import PeerListener
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model.errors import OtherCluster
from tidelog.controller.model.records import BrokerRecord, ClusterRecord
from tidelog.controller.rpc.connection import RpcChannel
from tidelog.controller.rpc.handshake import Credentials, NotAuthentic
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.runtime.network import TcpNetwork
from tidelog.storage.records import StreamEntry
from tidelog.stream.opened import OpenedStream

KEY = (b"t" * 16, 3)
FIRST = 40
EPOCH = 7
ENDS = (5, 30, 2, 0)
TAILS: Tails = {
    FIRST: [StreamEntry(3, 2, b"meta")],
    FIRST + 1: [StreamEntry(20, 4, b"a batch"), StreamEntry(24, 6, b"another")],
}


def opened(
    ends: tuple[int, ...] = ENDS, starts: tuple[int, ...] = (0, 0, 0, 0), first: int = FIRST
) -> list[OpenedStream]:
    return [
        OpenedStream(first + at, EPOCH + 1, start, end, 0)
        for at, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def hint(epoch: int = EPOCH, key: tuple[bytes, int] = KEY, tails: Tails | None = None) -> HintParams:
    made = encode_hint(key, epoch, FIRST, ENDS, TAILS if tails is None else tails)
    assert made is not None
    return made


class Box(HintBox):
    def __init__(self) -> None:
        self.time = 0.0
        super().__init__(lambda: self.time)


def test_a_hint_that_fits_what_the_controller_says_is_used_once() -> None:
    box = Box()
    box.take(hint())
    assert box.claim(KEY, EPOCH + 1, opened()).tails == TAILS
    assert box.claim(KEY, EPOCH + 1, opened()).tails == {}
    assert (box.counts["used"], len(box), box.bytes) == (1, 0, 0)


def test_a_note_comes_with_its_hint_and_is_left_out_where_it_does_not_fit() -> None:
    box = Box()
    for note in (b"", b"state", bytes(MAX_HINT_BYTES)):
        made = encode_hint(KEY, EPOCH, FIRST, ENDS, TAILS, note)
        assert made is not None
        box.take(made)
        assert box.claim(KEY, EPOCH + 1, opened()) == (TAILS, note if len(note) < MAX_HINT_BYTES else b"")
    stale = encode_hint(KEY, EPOCH, FIRST, ENDS, TAILS, b"state")
    assert stale is not None
    box.take(stale)
    assert box.claim(KEY, EPOCH + 2, opened()) == ({}, b"")


def test_the_same_hint_twice_is_one_hint() -> None:
    box = Box()
    box.take(hint())
    box.take(hint())
    assert len(box) == 1
    assert box.claim(KEY, EPOCH + 1, opened()).tails == TAILS


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH, EPOCH + 2, EPOCH + 9])
def test_a_hint_of_another_epoch_than_the_one_before_is_stale(epoch: int) -> None:
    box = Box()
    box.take(hint())
    assert box.claim(KEY, epoch, opened()).tails == {}
    assert box.counts["stale"] == 1
    assert len(box) == 0, "a later opening has no use for it either"


def test_a_hint_of_a_fenced_owner_that_comes_late_does_not_replace_the_newer_one() -> None:
    box = Box()
    box.take(hint(EPOCH))
    box.take(hint(EPOCH - 2, tails={FIRST: [StreamEntry(3, 2, b"old!")]}))
    assert box.claim(KEY, EPOCH + 1, opened()).tails == TAILS


@given(
    ends=st.tuples(*[st.integers(0, 40)] * 4),
    starts=st.tuples(*[st.integers(0, 40)] * 4),
    epoch=st.integers(EPOCH - 2, EPOCH + 3),
    first=st.sampled_from([FIRST, FIRST + 4]),
)
def test_it_is_used_only_at_the_controllers_ends_and_epoch(
    ends: tuple[int, ...], starts: tuple[int, ...], epoch: int, first: int
) -> None:
    box = Box()
    box.take(hint())
    found = box.claim(KEY, epoch, opened(ends, starts, first)).tails
    right = (ends, epoch, first) == (ENDS, EPOCH + 1, FIRST)
    kept = starts[0] <= 3 and starts[1] <= 20 and starts[2] <= ends[2] and starts[3] <= ends[3]
    assert found == (TAILS if right and kept else {})


@given(
    records=st.lists(
        st.builds(StreamEntry, st.integers(-5, 40), st.integers(-2, 12), st.binary(max_size=4)), min_size=1, max_size=4
    ),
    stream=st.integers(FIRST - 1, FIRST + 5),
)
def test_records_that_do_not_lie_without_a_gap_at_the_end_of_a_stream_are_never_used(
    records: list[StreamEntry], stream: int
) -> None:
    box = Box()
    box.take(hint(tails={stream: records}))
    for stream_id, found in box.claim(KEY, EPOCH + 1, opened()).tails.items():
        assert FIRST <= stream_id < FIRST + 4
        at = found[0].base_offset
        assert at >= 0
        for record in found:
            assert record.base_offset == at and record.count > 0
            at += record.count
        assert at == ENDS[stream_id - FIRST]


@given(st.data())
def test_a_changed_byte_is_noticed(data: st.DataObject) -> None:
    box, whole = Box(), hint()
    at = data.draw(st.integers(0, len(whole.body) - 1))
    body = bytearray(whole.body)
    body[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptData):
        box.take(HintParams(whole.crc, bytes(body)))
    assert (len(box), box.counts["refused"]) == (0, 1)


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_harmless(body: bytes) -> None:
    from crc32c import crc32c

    box = Box()
    with pytest.raises(CorruptData):
        box.take(HintParams(crc32c(body), body))
    assert box.claim(KEY, EPOCH + 1, opened()).tails == {}


def test_hints_are_bounded_in_number_bytes_and_time() -> None:
    box = Box()
    for index in range(MAX_HINTS + 10):
        box.take(hint(key=(b"t" * 16, index)))
    assert len(box) == MAX_HINTS
    box.time += KEEP_S + 1
    assert box.claim((b"t" * 16, MAX_HINTS), EPOCH + 1, opened()).tails == {}
    assert (len(box), box.bytes) == (0, 0)
    large = {FIRST: [StreamEntry(3, 2, bytes(MAX_HINT_BYTES - 1_000))]}
    for index in range(MAX_BYTES // MAX_HINT_BYTES + 5):
        box.take(hint(key=(b"t" * 16, index), tails=large))
        assert box.bytes <= MAX_BYTES
    assert encode_hint(KEY, EPOCH, FIRST, ENDS, {FIRST: [StreamEntry(3, 2, bytes(MAX_HINT_BYTES))]}) is None
    assert encode_hint(KEY, EPOCH, FIRST, ENDS, {FIRST: []}) is None


async def test_only_who_knows_the_secret_can_hint() -> None:
    box = Box()
    network, clock = TcpNetwork(), SystemClock()
    limits = PeerListener(box, network, clock, Credentials(b"the secret of the cluster", 1), lambda: None)
    port = await limits.start("127.0.0.1", 0)
    for secret, taken in ((b"the secret of the cluster", 1), (b"another secret altogether", 1), (None, 1)):
        credentials = None if secret is None else Credentials(secret, 2)
        channel = RpcChannel([("127.0.0.1", port)], network, credentials)
        try:
            await channel.call("hint", hint(), 2.0)
            assert secret == b"the secret of the cluster"
        except TidelogError as error:
            assert secret != b"the secret of the cluster"
            assert isinstance(error, NotAuthentic) or secret is None
        await channel.close()
        assert box.counts["taken"] == taken
    await limits.close()
    open_to_all = PeerListener(box, network, clock, None, lambda: None)
    assert await open_to_all.start("0.0.0.0", 0) == 0, "without a secret on the loopback interface only"
    await open_to_all.close()


class KnownBrokers:
    """What calls of other brokers ask of the controllers' client."""

    def __init__(self, cluster_id: str, port: int) -> None:
        self.image = Image()
        cluster = ClusterRecord(cluster_id, 1, 1, 0)
        broker = BrokerRecord(3, "check", "h", 1, "", "", "a", 1, True, peer_address=f"127.0.0.1:{port}")
        self.image.apply(Delta(1, [RowChange("cluster", "", cluster), RowChange("brokers", 3, broker)]))

    def subscribe(self, callback: object) -> Callable[[], None]:
        return lambda: None


@pytest.mark.parametrize(("cluster_id", "taken"), [("mine", 1), ("another", 0)])
async def test_a_broker_of_another_cluster_at_the_same_address_is_given_nothing(cluster_id: str, taken: int) -> None:
    box = Box()
    credentials = Credentials(b"the secret of both clusters", 1)
    listener = PeerListener(box, TcpNetwork(), SystemClock(), credentials, lambda: None, cluster_id=lambda: cluster_id)
    known = KnownBrokers("mine", await listener.start("127.0.0.1", 0))
    calls = PeerCalls(cast(ControllerClient, known), TcpNetwork(), credentials)
    with contextlib.nullcontext() if taken else pytest.raises(OtherCluster):
        await calls.call(3, "hint", hint(), 2.0)
    assert box.counts["taken"] == taken
    await calls.close()
    await listener.close()


async def test_what_is_no_hint_is_refused_and_the_connection_lives() -> None:
    box = Box()
    limits = PeerListener(box, TcpNetwork(), SystemClock(), None, lambda: None)
    channel = RpcChannel([("127.0.0.1", await limits.start("127.0.0.1", 0))], TcpNetwork(), None)
    rng = random.Random(4)
    for params in (None, 3, ["x", 2], [1, rng.randbytes(40)], msgspec.structs.astuple(hint())[:1]):
        with pytest.raises(TidelogError):
            await channel.call("hint", params, 2.0)
    with pytest.raises(TidelogError):
        await channel.call("command", hint(), 2.0)
    await channel.call("hint", hint(), 2.0)
    assert box.counts["taken"] == 1
    await channel.close()
    await limits.close()


async def test_a_broker_answers_a_hint_whether_it_is_ready() -> None:
    said: list[HintReply | None] = [None, HintReply(3, 8)]

    limits = PeerListener(Box(), TcpNetwork(), SystemClock(), None, lambda: said[0])
    channel = RpcChannel([("127.0.0.1", await limits.start("127.0.0.1", 0))], TcpNetwork(), None)
    while said:
        raw = await channel.call("hint", hint(), 2.0)
        assert msgspec.msgpack.decode(raw, type=HintReply | None) == said.pop(0)
    await channel.close()
    await limits.close()


def test_a_hint_is_held_for_the_epoch_that_follows_until_it_is_claimed() -> None:
    box = Box()
    assert not box.holds(KEY, EPOCH + 1)
    box.take(hint())
    assert [epoch for epoch in range(EPOCH + 4) if box.holds(KEY, epoch)] == [EPOCH + 1]
    box.claim(KEY, EPOCH + 1, opened())
    assert not box.holds(KEY, EPOCH + 1)
