"""An image arrives whole, or not at all, whatever its size and whatever happens between two of its parts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.controller.controller_helpers import make_node
from tidelog.controller.image.feed import TRANSFER_IDLE_S, DeltaFeed, FeedLimits
from tidelog.controller.image.follower import ImageFollower
from tidelog.controller.image.image import STEP_ROWS, Delta, Image
from tidelog.controller.image.transfer import (
    IMAGE_FORMAT,
    PLAIN_FORMAT,
    START,
    ImageChunk,
    ImageEnd,
    ImageParams,
    ImageReceiver,
    ImageSender,
    decode_params,
)
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model.errors import ImageTransferLost
from tidelog.controller.model.records import ClusterRecord, ObjectRecord, ObjectState
from tidelog.controller.node import ControllerNode
from tidelog.controller.rpc.connection import CallTimeout, PollReply, RpcChannel, RpcConnection
from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import CorruptData, InvalidInput, Overloaded, Unavailable
from tidelog.runtime.network import TcpNetwork
from tidelog.runtime.wire import MAX_FRAME_BYTES, FrameTooLarge
from tidelog.storage.commits import pack_ranges

pytestmark = pytest.mark.timeout(300)


def an_object(object_id: int, streams: int = 1) -> ObjectRecord:
    start = (1 << 40) + object_id
    packed = pack_ranges([(4 * stream, start, start + 1) for stream in range(streams)])
    return ObjectRecord(object_id, int(ObjectState.COMMITTED), 1, 100, packed, 0, 0)


def fill(node: ControllerNode, objects: int, streams: int = 1) -> None:
    """Let the node have an image of a snapshot, with that many objects."""
    image = node.feed.new_image()
    rows = [RowChange("cluster", "", node.image.cluster)]
    rows += [RowChange("objects", each, an_object(each, streams)) for each in range(1, objects + 1)]
    image.apply(Delta(node.image.version + 1_000, rows))
    node.feed.reset(image)


class Lossy(RpcChannel):
    """A connection to a controller. `lost` says which replies never arrive, by method and count."""

    def __init__(self, node: ControllerNode, lost: Callable[[str, int], bool] = lambda method, count: False) -> None:
        self._lost = lost
        self._channels = [RpcChannel([node.address], TcpNetwork())]
        self.calls = 0

    def pass_to(self, node: ControllerNode) -> None:
        """From now on another controller answers."""
        self._channels.append(RpcChannel([node.address], TcpNetwork()))

    async def call(self, method: str, params: Any, timeout_s: float) -> msgspec.Raw:
        self.calls += 1
        lost = self._lost(method, self.calls)
        result = await self._channels[-1].call(method, params, timeout_s)
        if lost:
            raise CallTimeout("no answer")
        return result

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._channels))


@asynccontextmanager
async def controller(directory: Path, **kwargs: Any) -> AsyncIterator[ControllerNode]:
    node = make_node(directory, **kwargs)
    await node.start()
    try:
        await node.wait_active(60)
        yield node
    finally:
        await node.close()


async def load(channel: RpcChannel, timeout_s: float = 60) -> Image:
    """Follow until the first image is there."""
    follower = ImageFollower(channel, SystemClock(), random.Random(1))
    task = asyncio.create_task(follower.run())
    try:
        async with asyncio.timeout(timeout_s):
            await follower.wait_loaded()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await channel.close()
    return follower.image


async def test_a_loader_that_times_out_between_two_parts_gets_the_whole_image(tmp_path: Path) -> None:
    async with controller(tmp_path) as node:
        fill(node, 20_480)
        image = await load(Lossy(node, lambda method, count: method == "image" and count == 4))
        assert image.version == node.image.version
        assert len(image.objects) == 20_480
        assert not node.image.difference(image)


async def test_more_loaders_than_the_controller_keeps_places_for_all_get_the_whole_image(tmp_path: Path) -> None:
    async with controller(tmp_path, feed=FeedLimits(chunk_rows=3, transfers=4)) as node:
        fill(node, 10)
        images = await asyncio.gather(*(load(Lossy(node)) for _ in range(9)))
        assert {len(image.objects) for image in images} == {10}


async def test_an_image_of_many_streams_in_an_object_is_loaded(tmp_path: Path) -> None:
    async with controller(tmp_path) as node:
        fill(node, 700, streams=4_096)
        image = await load(Lossy(node), 30)
        assert len(image.objects) == 700


@pytest.mark.parametrize("credentials", [None, Credentials(b"a secret of sixteen bytes", 1)])
async def test_a_reply_beyond_the_frame_limit_is_answered_with_an_error(credentials: Credentials | None) -> None:
    async def handle(connection: RpcConnection, method: str, params: msgspec.Raw) -> bytes:
        return msgspec.msgpack.encode(bytes(MAX_FRAME_BYTES if method == "large" else 3))

    network = TcpNetwork()
    listener = await network.listen(lambda: RpcConnection(handler=handle, credentials=credentials), "127.0.0.1", 0)
    channel = RpcChannel([listener.address], network, credentials)
    with pytest.raises(FrameTooLarge, match="exceeds the limit"):
        await channel.call("large", None, 5.0)
    assert bytes(await channel.call("small", None, 5.0)) == msgspec.msgpack.encode(bytes(3)), "it goes on"
    await channel.close()
    await listener.close()


async def test_a_loader_whose_connection_passes_to_another_controller_starts_over(tmp_path: Path) -> None:
    small = FeedLimits(chunk_rows=3)
    async with controller(tmp_path / "a", feed=small) as first, controller(tmp_path / "b", feed=small) as other:
        fill(first, 20)
        other.feed.reset(rebuilt(first.image, 30))
        one = Lossy(first, lambda method, count: switch(count))

        def switch(count: int) -> bool:
            if count == 4:
                one.pass_to(other)  # the same position, of the same number of a transfer, at another version
            return False

        image = await load(one)
        assert image.version == other.image.version
        assert not other.image.difference(image)


def rebuilt(image: Image, objects: int) -> Image:
    """A newer image of the same cluster."""
    newer = Image(finds_objects=False)
    rows = [RowChange("cluster", "", image.cluster)]
    rows += [RowChange("objects", each, an_object(each + 100)) for each in range(1, objects + 1)]
    newer.apply(Delta(image.version + 5, rows))
    return newer


class AtHand(RpcChannel):
    """A controller whose answers are there at once, so that whoever asks goes on in the same turn of the event loop."""

    def __init__(self, first: Image) -> None:
        self.feed = DeltaFeed()
        self.feed.reset(first)
        self.told = asyncio.Event()
        """There is a newer image."""

    async def call(self, method: str, params: Any, timeout_s: float) -> msgspec.Raw:
        image = self.feed.image
        if method == "image":
            return msgspec.Raw(msgspec.msgpack.encode(self.feed.image_chunk("it", params)))
        if image.version <= params.from_version:
            self.told.clear()
            await self.told.wait()
            image = self.feed.image
        return msgspec.Raw(msgspec.msgpack.encode(PollReply(image.cluster_id, True, [], image.version)))

    def drop(self) -> None:
        raise AssertionError("no transfer fails")


async def test_others_run_while_an_image_is_compared_with_a_newer_one() -> None:
    """A broker of a cluster with 100,000 partitions that reloaded its metadata answered nobody for a second or more."""
    rows = [RowChange("objects", each, an_object(each)) for each in range(1, 50_001)]
    images = []
    for version, size in ((7, 100), (12, 101)):
        images.append(Image(finds_objects=False))
        objects = [*rows[:-1], RowChange("objects", 50_000, msgspec.structs.replace(rows[-1].record, size=size))]
        images[-1].apply(Delta(version, [RowChange("cluster", "", ClusterRecord("c", 1, 1, 0)), *objects]))
    channel = AtHand(images[0])
    follower = ImageFollower(channel, SystemClock(), random.Random(1))
    task = asyncio.create_task(follower.run())
    try:
        async with asyncio.timeout(10):
            await follower.wait_loaded()
            deltas: list[Delta] = []
            follower.subscribe(deltas.append)
            channel.feed.reset(images[1])
            channel.told.set()
            turns = 0
            while not deltas:
                assert follower.image.version == 7 and follower.image.objects[50_000].size == 100, "half of it"
                await asyncio.sleep(0)
                turns += 1
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [(each.table, each.key) for each in deltas[0].mutations] == [("objects", 50_000)]
    assert follower.image.version == 12 and follower.image.objects[50_000].size == 101
    assert turns > 3 * 50_000 / STEP_ROWS, "it is built, and compared from both sides, in steps"


class Absent(RpcChannel):
    """No controller answers."""

    def __init__(self) -> None:
        pass

    async def call(self, method: str, params: Any, timeout_s: float) -> msgspec.Raw:
        raise Unavailable("no controller is active")


class Hurried(SystemClock):
    """Does not sleep, and keeps for how long it was to, until that was `count` times."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.slept: list[float] = []
        self.is_over = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) == self._count:
            self.is_over.set()
        await asyncio.sleep(0)


async def test_a_broker_asks_at_least_once_a_second_however_long_no_controller_answers() -> None:
    """Until it does, its clients are told of topics and configs as they were."""
    clock = Hurried(50)
    task = asyncio.create_task(ImageFollower(Absent(), clock, random.Random(1)).run())
    try:
        async with asyncio.timeout(10):
            await clock.is_over.wait()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert max(clock.slept) <= 1.0


# The chunks themselves


def an_image(objects: int = 10, streams: int = 1) -> Image:
    image = Image(finds_objects=False)
    image.apply(Delta(7, [RowChange("objects", each, an_object(each, streams)) for each in range(objects)]))
    return image


def chunks(image: Image, *, rows: int = 3, size: int = 1 << 20, transfer: int = 5) -> list[ImageChunk]:
    sender = ImageSender(transfer, image, chunk_rows=rows, chunk_bytes=size)
    found = [sender.next_chunk()]
    while found[-1].end is None:
        found.append(sender.next_chunk())
    return found


def received(found: list[ImageChunk]) -> ImageReceiver:
    receiver = ImageReceiver()
    for chunk in found:
        receiver.take(msgspec.Raw(msgspec.msgpack.encode(chunk)))
    return receiver


def test_chunks_in_order_make_the_image_and_nothing_less_is_whole() -> None:
    found = chunks(an_image())
    assert [chunk.position for chunk in found] == [0, 3, 6, 9]
    for count in range(len(found)):
        assert not received(found[:count]).is_whole
    whole = received(found)
    assert whole.is_whole and whole.version == 7
    assert [row.key for row in whole.rows if row.table == "objects"] == list(range(10))


def test_an_empty_image_is_one_chunk() -> None:
    assert received(chunks(Image())).is_whole


@pytest.mark.parametrize("order", [(1,), (0, 2), (0, 0), (0, 1, 1), (0, 2, 1, 3), (0, 1, 3), (3,), (0, 3)])
def test_a_chunk_that_is_missing_repeated_or_out_of_order_is_refused(order: tuple[int, ...]) -> None:
    found = chunks(an_image())
    with pytest.raises(CorruptData, match="position"):
        received([found[at] for at in order])


def test_chunks_of_two_transfers_or_versions_are_not_put_together() -> None:
    found, others = chunks(an_image()), chunks(an_image(), transfer=6)
    with pytest.raises(CorruptData, match="transfer"):
        received([found[0], others[1]])
    newer = msgspec.structs.replace(found[1], version=8)
    with pytest.raises(CorruptData, match="version"):
        received([found[0], newer])


def test_another_count_or_checksum_is_refused() -> None:
    *found, last = chunks(an_image())
    assert last.end is not None
    for end in (ImageEnd(9, last.end.checksum), ImageEnd(10, last.end.checksum ^ 1)):
        with pytest.raises(CorruptData, match="the controller sent"):
            received([*found, msgspec.structs.replace(last, end=end)])
    other = chunks(an_image(9, 2))[1]
    with pytest.raises(CorruptData, match="the controller sent"):
        received([found[0], msgspec.structs.replace(other, transfer=5), *found[2:], last])


def test_a_chunk_without_rows_does_not_keep_a_loader_busy() -> None:
    empty = msgspec.structs.replace(chunks(an_image())[0], rows=msgspec.Raw(msgspec.msgpack.encode([])))
    with pytest.raises(CorruptData, match="no rows"):
        received([empty])


@pytest.mark.parametrize("params", [None, ImageParams(1, START, 0), ImageParams(IMAGE_FORMAT + 1, START, 0), [9]])
def test_a_request_of_another_format_is_refused_clearly(params: Any) -> None:
    with pytest.raises(InvalidInput, match="format") as found:
        decode_params(msgspec.Raw(msgspec.msgpack.encode(params)), 1)
    assert found.value.hint


def test_a_chunk_of_another_format_is_refused_clearly() -> None:
    for chunk in ([5481, [["kv", "k", b"v"]], True, 1], [IMAGE_FORMAT + 1, "something", "else"]):
        with pytest.raises(CorruptData, match="reads format") as found:
            ImageReceiver().take(msgspec.Raw(msgspec.msgpack.encode(chunk)))
        assert found.value.hint


def test_a_chunk_is_bounded_by_bytes_and_holds_at_least_one_row_of_any_size() -> None:
    found = chunks(an_image(20, 1_000), rows=100, size=50_000)
    assert len(found) > 3
    assert all(len(bytes(chunk.rows)) <= 50_100 for chunk in found)
    assert received(found).is_whole
    assert [chunk.position for chunk in chunks(an_image(3, 1_000), size=1)] == [0, 1, 2]


async def test_a_row_beyond_the_frame_limit_is_named_and_never_left_out() -> None:
    image = an_image(3)
    image.kv["large"] = bytes(MAX_FRAME_BYTES)
    feed = DeltaFeed(limits=FeedLimits(chunk_rows=1))
    feed.reset(image)

    def request(transfer: int, position: int) -> ImageChunk:
        return feed.image_chunk("a", ImageParams(IMAGE_FORMAT, transfer, position))

    first = request(START, 0)
    assert request(first.transfer, 1).end is None
    with pytest.raises(FrameTooLarge, match="'large' of table kv"):
        request(first.transfer, 2)
    with pytest.raises(ImageTransferLost):
        request(first.transfer, 2)


async def test_a_request_that_does_not_continue_its_transfer_is_refused_and_harms_no_other() -> None:
    feed = DeltaFeed(limits=FeedLimits(chunk_rows=3))
    feed.reset(an_image())

    def request(transfer: int, position: int, follower: str = "a") -> ImageChunk:
        return feed.image_chunk(follower, ImageParams(IMAGE_FORMAT, transfer, position))

    old = request(START, 0)
    new = request(START, 0)
    for transfer, position in ((old.transfer, 3), (new.transfer, 0), (new.transfer, 6), (99, 3)):
        with pytest.raises(ImageTransferLost):
            request(transfer, position)
    with pytest.raises(ImageTransferLost):
        request(new.transfer, 3, "b")
    assert request(new.transfer, 3).position == 3


async def test_a_transfer_that_makes_progress_is_not_ended_by_others_but_an_abandoned_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = DeltaFeed(limits=FeedLimits(chunk_rows=3, transfers=2))
    feed.reset(an_image())
    now_s = 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)

    def request(follower: str, transfer: int = START, position: int = 0) -> ImageChunk:
        return feed.image_chunk(follower, ImageParams(IMAGE_FORMAT, transfer, position))

    first, second = request("a"), request("b")
    with pytest.raises(Overloaded):
        request("c")
    now_s += TRANSFER_IDLE_S - 1
    assert request("a", first.transfer, 3).position == 3
    now_s += 1
    assert request("c").position == 0, "in the place of b"
    with pytest.raises(ImageTransferLost):
        request("b", second.transfer, 3)
    assert request("a", first.transfer, 6).position == 6
    feed.forget("c")
    assert request("d").position == 0


async def test_a_transfer_without_positions_is_served_and_read_at_level_0_only() -> None:
    feed = DeltaFeed(limits=FeedLimits(chunk_rows=3))
    feed.reset(an_image())
    params = decode_params(msgspec.Raw(b"\xc0"), 0)
    assert params.format == PLAIN_FORMAT
    with pytest.raises(InvalidInput, match="reads images of format 1"):
        decode_params(msgspec.Raw(b"\xc0"), 1)

    loading = ImageReceiver()
    while not loading.is_whole:
        loading.take(msgspec.Raw(msgspec.msgpack.encode(feed.plain_image_chunk("old"))))
    assert loading.is_plain
    whole = received(chunks(an_image()))
    assert (loading.version, loading.rows) == (whole.version, whole.rows)


async def test_chunks_without_positions_of_two_transfers_are_not_put_together() -> None:
    feed = DeltaFeed(limits=FeedLimits(chunk_rows=3))
    feed.reset(an_image())
    first = feed.plain_image_chunk("old")
    loading = ImageReceiver()
    loading.take(msgspec.Raw(msgspec.msgpack.encode(first)))
    for other in (msgspec.structs.replace(first, version=first.version + 1), chunks(an_image())[0]):
        with pytest.raises(CorruptData):
            loading.take(msgspec.Raw(msgspec.msgpack.encode(other)))
