"""Branches of topics on real partition logs: what each side has, whatever happens to the other one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from tests.broker.test_handlers_fetch import BIG, values
from tests.support.guarded import append_guarded
from tests.support.kafka_world import KafkaWorld, batch, until
from tidelog.broker.objects.held import describe_branches, describe_snapshots
from tidelog.controller.image.image import Image
from tidelog.controller.image.lookup import FoundRange, OffsetRange, look_up
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import TopicExists
from tidelog.controller.model.snapshots import (
    MAX_EXTENTS,
    CreateBranch,
    CreateSnapshot,
    CutRefused,
    DeleteSnapshot,
    TopicCut,
    UnknownSnapshot,
)
from tidelog.runtime.errors import InvalidInput
from tidelog.storage.commits import unpack_ranges
from tidelog.stream import meta_stream
from tidelog.stream.partition_log import PartitionLog


class BranchWorld(KafkaWorld):
    """A broker with topic `t`."""

    def write(self, topic: str, first: int, end: int) -> None:
        for number in range(first, end):
            append_guarded(self.log(topic), batch(b"%s-%d" % (topic.encode(), number)))

    async def snapshot(self, name: str, topic: str = "t") -> int:
        """Return where it ends."""
        ends = await self.log(topic).cut()
        await self.storage.upload_now()
        topic_id = self.controller.image.topic_ids[topic]
        self.controller.apply(CreateSnapshot(name, (TopicCut(topic_id, (ends,)),)))
        return ends[1]

    async def branch(self, snapshot: str, name: str, source: str = "t") -> PartitionLog:
        topic_id = name.encode().ljust(16, b"\x07")
        self.controller.apply(CreateBranch(snapshot, source, topic_id, name, {}))
        return await self.reopen(name)

    async def reopen(self, name: str) -> PartitionLog:
        topic = self.controller.image.topic(name)
        assert topic is not None
        log = await self.open(topic, 0)
        await until(lambda: log.high_watermark == log.log_end_offset, "confirmation")
        return log


@asynccontextmanager
async def branched(own: int = 5) -> AsyncIterator[BranchWorld]:
    """Topic `t` with 60 records, of which `b`, a branch, has 40, and `own` more."""
    async with BranchWorld() as world:
        await world.topic("t")
        world.write("t", 0, 20)
        await world.chill()
        world.write("t", 20, 40)
        assert await world.snapshot("s") == 40
        world.write("t", 40, 60)
        await world.branch("s", "b")
        world.write("b", 40, 40 + own)
        logs = [world.log("t"), world.log("b")]
        await until(lambda: all(log.high_watermark == log.log_end_offset for log in logs), "confirmation")
        await world.chill()
        yield world


async def read(log: PartitionLog, *, committed: bool = False) -> list[tuple[int, bytes | None]]:
    """All records with their offsets; one read never goes beyond a branch's own beginning."""
    found: list[tuple[int, bytes | None]] = []
    at = log.log_start_offset
    while at < log.high_watermark:
        fetched = await log.read(at, BIG, committed=committed)
        if not fetched.records:
            break
        found += values(b"".join(bytes(each) for each in fetched.records))
        at = found[-1][0] + 1
    return found


def records(topic: str, first: int, end: int) -> list[tuple[int, bytes | None]]:
    return [(number, b"%s-%d" % (topic.encode(), number)) for number in range(first, end)]


async def test_both_sides_have_what_was_sent_to_them() -> None:
    async with branched() as world:
        assert await read(world.log("t")) == records("t", 0, 60)
        assert await read(world.log("b")) == [*records("t", 0, 40), *records("b", 40, 45)]
        assert world.log("b").leader_epoch > world.log("t").leader_epoch
        assert world.log("b").epoch_at(39) == world.log("t").epoch_at(39)


async def test_no_object_is_written_for_what_is_shared() -> None:
    async with BranchWorld() as world:
        await world.topic("t")
        world.write("t", 0, 40)
        await world.snapshot("s")
        before = set(world.controller.image.objects)
        await world.branch("s", "b")
        assert set(world.controller.image.objects) == before
        assert await read(world.log("b")) == records("t", 0, 40)


async def test_a_branch_ends_in_the_middle_of_an_object_and_of_a_block() -> None:
    async with BranchWorld() as world:
        await world.topic("t")
        world.write("t", 0, 10)
        ends = await world.log("t").cut()
        world.write("t", 10, 30)
        await world.chill()
        topic_id = world.controller.image.topic_ids["t"]
        world.controller.apply(CreateSnapshot("s", (TopicCut(topic_id, (ends,)),)))
        await world.branch("s", "b")
        assert await read(world.log("b")) == records("t", 0, 10)
        world.write("b", 10, 12)
        assert await read(world.log("b")) == [*records("t", 0, 10), *records("b", 10, 12)]
        await world.chill()
        assert await read(world.log("b")) == [*records("t", 0, 10), *records("b", 10, 12)]


async def test_deleting_records_of_one_side_leaves_the_other_whole() -> None:
    async with branched() as world:
        await world.log("t").delete_records(55)
        await world.chill()
        await world.log("t").apply_retention()
        assert await read(world.log("t")) == records("t", 55, 60)
        assert await read(world.log("b")) == [*records("t", 0, 40), *records("b", 40, 45)]
        await world.log("b").delete_records(42)
        await world.chill()
        await world.log("b").apply_retention()
        assert await read(world.log("b")) == records("b", 42, 45)
        assert await read(world.log("t")) == records("t", 55, 60)


async def long_meta(world: BranchWorld) -> PartitionLog:
    """Topic `t`, whose log starts at 5, with a meta stream that is to be rewritten."""
    await world.topic("t")
    log = world.log("t")
    for number in range(60):
        world.write("t", number, number + 1)
        await log.cut()
    await log.delete_records(5)
    assert log.can_shorten_meta
    return log


async def test_a_cut_whose_meta_stream_is_rewritten_before_the_snapshot_is_refused() -> None:
    async with BranchWorld() as world:
        log = await long_meta(world)
        ends = await log.cut()
        await log.shorten_meta()
        await world.storage.confirm.wait(world.storage.data_end)
        await world.storage.upload_now()
        await log.shorten_meta()
        assert log.state.meta.stream.start_offset >= ends[0] > 0, "what the cut names is trimmed"
        cut = TopicCut(world.controller.image.topic_ids["t"], (ends,))
        with pytest.raises(CutRefused):
            world.controller.apply(CreateSnapshot("s", (cut,)))
        assert await world.snapshot("s") == 60
        branch = await world.branch("s", "b")
        assert await read(branch) == records("t", 5, 60) and branch.batches_scanned == 0


async def test_a_cut_in_the_middle_of_a_rewrite_of_the_meta_stream_is_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meta_stream, "REWRITE_BYTES", 1)
    async with BranchWorld() as world:
        log = await long_meta(world)
        begun = asyncio.create_task(log.shorten_meta())
        await asyncio.sleep(0)  # its first step
        ends = await log.cut()
        await begun
        await world.storage.upload_now()
        await log.shorten_meta()
        assert 0 < log.state.meta.stream.start_offset < ends[0]
        cut = TopicCut(world.controller.image.topic_ids["t"], (ends,))
        world.controller.apply(CreateSnapshot("s", (cut,)))
        branch = await world.branch("s", "b")
        assert set(log.state.meta.keys()) < set(branch.state.meta.keys()), "one key says that the branch has begun"
        assert await read(branch) == records("t", 5, 60) and branch.batches_scanned == 0


async def test_a_cut_of_a_partition_that_is_handed_over_before_the_snapshot_is_refused() -> None:
    """Nothing was written since it was opened, so its close has no checkpoint to write."""
    async with BranchWorld(brokers=(1, 2)) as world:
        await world.topic("t")
        world.write("t", 0, 60)
        await world.log("t").close()
        log = await world.reopen("t")
        ends = await log.cut()
        await world.storage.upload_now()
        image = world.controller.image
        topic_id = image.topic_ids["t"]
        world.controller.apply(c.MovePartitions((c.PartitionMove(topic_id, 0, 2),)))
        closed = await log.close_for_move()
        await world.storage.upload_now()
        partition = c.ClosedPartition(topic_id, 0, log.leader_epoch, closed.end_offsets, closed.meta_start)
        assert await world.controller.hand_over(1, image.replica_sets[1].master_epoch, [partition]) == [None]
        assert image.streams[log.first_stream].start_offset >= ends[0] > 0, "what the cut names is trimmed"
        with pytest.raises(CutRefused):
            world.controller.apply(CreateSnapshot("s", (TopicCut(topic_id, (ends,)),)))


@pytest.mark.parametrize("gone", ["t", "b"])
async def test_deleting_one_topic_and_the_snapshot_leaves_the_other_whole(gone: str) -> None:
    async with branched() as world:
        image = world.controller.image
        world.controller.apply(DeleteSnapshot("s"))
        log = world.partitions.logs.pop((image.topic_ids[gone], 0))
        world.controller.apply(c.DeleteTopic(image.topic_ids[gone]))
        await log.drop()
        world.storage.forget_uploaded()
        expected = records("t", 0, 60) if gone == "b" else [*records("t", 0, 40), *records("b", 40, 45)]
        (left,) = {"t", "b"} - {gone}
        assert await read(world.log(left)) == expected
        kept = [row["only_bytes"] > 0 for row in await describe_branches(image)]
        assert kept == ([True] if gone == "t" else []), "the branch alone keeps them now"


async def test_a_reopened_branch_is_what_it_was() -> None:
    async with branched() as world:
        before = await read(world.log("b"))
        await world.log("b").close()
        log = await world.reopen("b")
        assert await read(log) == before
        assert log.log_end_offset == 45, "it has begun already, and writes nothing"
        world.write("b", 45, 47)
        assert await read(log) == [*before, *records("b", 45, 47)]


async def test_a_branch_of_a_branch_has_all_three_parts() -> None:
    async with branched() as world:
        assert await world.snapshot("s2", "b") == 45
        await world.branch("s2", "bb", "b")
        world.write("bb", 45, 48)
        expected = [*records("t", 0, 40), *records("b", 40, 45), *records("bb", 45, 48)]
        assert await read(world.log("bb")) == expected
        image = world.controller.image
        for name in ("b", "t"):
            log = world.partitions.logs.pop((image.topic_ids[name], 0))
            world.controller.apply(c.DeleteTopic(image.topic_ids[name]))
            await log.drop()
        await world.chill()
        assert await read(world.log("bb")) == expected


async def test_branches_of_branches_are_bounded() -> None:
    async with BranchWorld() as world:
        await world.topic("t")
        world.write("t", 0, 3)
        source, end = "t", 3
        for depth in range(MAX_EXTENTS - 1):
            await world.snapshot(f"s{depth}", source)
            await world.branch(f"s{depth}", f"b{depth}", source)
            source, end = f"b{depth}", end + 1
            world.write(source, end - 1, end)
        await world.snapshot("last", source)
        await world.branch("last", "deep", source)
        world.write("deep", end, end + 1)
        with pytest.raises(InvalidInput, match="8 deep"):
            await world.snapshot("one-more", "deep")
        assert [offset for offset, _ in await read(world.log("deep"))] == list(range(end + 1))


async def test_producers_begin_anew_in_a_branch() -> None:
    async with BranchWorld() as world:
        await world.topic("t")

        def send(topic: str, sequence: int) -> int:
            sent = batch(b"x", producer_id=7, producer_epoch=0, base_sequence=sequence)
            return append_guarded(world.log(topic), sent).base_offset

        assert [send("t", sequence) for sequence in range(4)] == [0, 1, 2, 3]
        await world.snapshot("s")
        log = await world.branch("s", "b")
        assert log.producers() == []
        assert [send("b", 0), send("b", 1), send("b", 1)] == [4, 5, 5], "not a duplicate of the topic's, but of its own"
        await log.close()
        log = await world.reopen("b")
        assert [each.last_sequence for each in log.producers()] == [1]
        assert send("t", 4) == 4, "the topic's producer goes on"


async def test_transactions_that_are_open_at_the_cut_are_aborted_in_the_branch() -> None:
    async with BranchWorld() as world:
        await world.topic("t")

        def send(producer: int, sequence: int, value: bytes) -> None:
            options = {"producer_id": producer, "producer_epoch": 0, "base_sequence": sequence, "transactional": True}
            append_guarded(world.log("t"), batch(value, **options))

        def end(topic: str, producer: int, *, commit: bool) -> None:
            log = world.log(topic)
            log.write_marker(producer, 0, commit=commit, coordinator_epoch=1, transaction_version=1)

        send(7, 0, b"open")
        send(8, 0, b"aborted")
        send(9, 0, b"committed")
        end("t", 8, commit=False)
        end("t", 9, commit=True)
        cut = await world.snapshot("s")
        log = await world.branch("s", "b")
        assert (log.log_end_offset, log.open_transactions()) == (cut + 1, []), "a marker of its own"
        await until(lambda: log.last_stable_offset == cut + 1, "the marker is confirmed")
        assert world.log("t").last_stable_offset == 0, "it is open in the topic still"
        aborted = (await log.read(0, BIG, committed=True)).aborted
        assert sorted(aborted) == [(7, 0), (8, 1)]
        end("t", 7, commit=True)
        await until(lambda: world.log("t").last_stable_offset == world.log("t").log_end_offset, "the commit")
        assert (await world.log("t").read(0, BIG, committed=True)).aborted == [(8, 1)]
        assert sorted((await log.read(0, BIG, committed=True)).aborted) == [(7, 0), (8, 1)]


async def test_lookups_by_time_find_records_of_both_parts() -> None:
    async with BranchWorld() as world:
        await world.topic("t")
        for number in range(10):
            append_guarded(world.log("t"), batch(b"t", timestamp=1_000 + number))
        await world.snapshot("s")
        log = await world.branch("s", "b")
        for number in range(10, 15):
            append_guarded(log, batch(b"b", timestamp=1_000 + number))
        await until(lambda: log.high_watermark == 15, "confirmation")
        for number in (0, 4, 9, 10, 14):
            found = await log.offset_for_timestamp(1_000 + number)
            assert found is not None and found.offset == number


async def test_held_objects_are_not_compacted_and_are_told() -> None:
    async with branched() as world:
        image = world.controller.image
        (snapshot,) = await describe_snapshots(image)
        (branch,) = await describe_branches(image)
        assert (branch["source"], branch["shared"], branch["own"]) == ("t@s", 40, 5)
        assert snapshot["objects"] == branch["objects"] == sum(image.is_held(each) for each in image.objects)
        assert snapshot["only_bytes"] == branch["only_bytes"] == 0


def spans(image: Image, asked: OffsetRange, limit: int) -> tuple[FoundRange, list[tuple[int, int, int]]]:
    """Ask until the answer is complete; stream, start and end of each slice, and whether its object has that."""
    found: list[tuple[int, int, int]] = []
    while True:
        answer = look_up(image, [asked], limit, reads_shared=True)
        (row,) = answer.ranges
        for each in row.slices:
            inside = [one.stream for one in row.shared if one.start < each.end_offset <= one.end]
            stream = inside[0] if inside else row.stream
            assert any(
                (held, start) == (stream, each.start_offset) and each.end_offset <= end
                for held, start, end in unpack_ranges(image.objects[each.object_id].packed)
            )
            found.append((stream, each.start_offset, each.end_offset))
        if answer.next is None:
            return row, found
        asked = OffsetRange(asked.topic, asked.partition, answer.next.start, asked.end)


@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_readers_outside_the_cluster_are_told_whose_the_shared_offsets_are(limit: int) -> None:
    async with branched() as world:
        image = world.controller.image
        source, branch = (look_up(image, [OffsetRange(name, 0, 50)]).ranges[0].stream for name in ("t", "b"))
        row, found = spans(image, OffsetRange("b", 0), limit)
        assert [(one.stream, one.start, one.end) for one in row.shared] == [(source, 0, 40)]
        assert [(stream, end) for stream, _, end in found if end >= 40] == [(source, 40), (branch, 45)]
        assert found[0][1] == 0 and all(one[2] == other[1] for one, other in itertools.pairwise(found))
        assert [each[2] for each in spans(image, OffsetRange("b", 0, 30, 42), limit)[1]] == [40, 45]
        assert spans(image, OffsetRange("b", 0, 40), limit)[1] == [(branch, 40, 45)]
        assert spans(image, OffsetRange("t", 0), limit)[0].shared == []
        await world.log("b").delete_records(42)
        await world.chill()
        await world.log("b").apply_retention()
        row, found = spans(image, OffsetRange("b", 0), limit)
        assert (row.log_start, found) == (42, [(branch, 40, 45)])


async def test_they_are_told_of_each_topic_of_a_branch_of_a_branch_when_the_others_are_gone() -> None:
    async with branched() as world:
        image = world.controller.image
        source, branch = (look_up(image, [OffsetRange(name, 0, 50)]).ranges[0].stream for name in ("t", "b"))
        await world.snapshot("ss", "b")
        await world.branch("ss", "bb", "b")
        world.write("bb", 45, 47)
        await until(lambda: world.log("bb").high_watermark == 47, "confirmation")
        await world.chill()
        for name in ("s", "ss"):
            world.controller.apply(DeleteSnapshot(name))
        for name in ("t", "b"):
            log = world.partitions.logs.pop((image.topic_ids[name], 0))
            world.controller.apply(c.DeleteTopic(image.topic_ids[name]))
            await log.drop()
        row, found = spans(image, OffsetRange("bb", 0), 100)
        assert [tuple(msgspec.structs.astuple(one)) for one in row.shared] == [(source, 0, 40), (branch, 40, 45)]
        assert [(stream, end) for stream, _, end in found[-3:]] == [(source, 40), (branch, 45), (row.stream, 47)]


async def test_readers_that_do_not_know_of_branches_are_refused_what_is_shared() -> None:
    async with branched() as world:
        image = world.controller.image
        with pytest.raises(InvalidInput, match="is a branch: its offsets below 40"):
            look_up(image, [OffsetRange("b", 0)])
        with pytest.raises(InvalidInput, match="is a branch"):
            look_up(image, [OffsetRange("b", 0, 39, 41)])
        (found,) = look_up(image, [OffsetRange("b", 0, 40)]).ranges
        assert (found.start, found.end, found.committed_end) == (40, 45, 45) and found.slices
        assert look_up(image, [OffsetRange("t", 0)]).ranges[0].slices


async def test_what_is_no_branch_is_refused() -> None:
    async with branched() as world:
        for snapshot, source in (("ghost", "t"), ("s", "b")):
            with pytest.raises(UnknownSnapshot):
                world.controller.apply(CreateBranch(snapshot, source, b"\x01" * 16, "x", {}))
        with pytest.raises(TopicExists):
            world.controller.apply(CreateBranch("s", "t", b"\x01" * 16, "b", {}))
        world.controller.apply(CreateBranch("s", "t", b"\x01" * 16, "kept", {"retention.ms": "-1"}))
        kept = world.controller.image.topic("kept")
        assert kept is not None and kept.configs == {"retention.ms": "-1"}
