"""The metadata of 100,000 partitions after a month of writes, with the sorting of full objects and without.

    python -m bench.metadata_growth [--days N] [--partitions N] [--streams-in-upload N]

The real planner, layout and state machine of the controller; data exists only as sizes. One of ten brokers is run, with
a tenth of the partitions, for `--days`: each partition gets 16 KiB every 10 minutes, in random order, and an upload is
64 MiB of 4,096 streams. Nothing is trimmed. Printed for each day: objects, slices (an object's range of one stream) and
bytes of the controller's snapshot, and how often a byte was written again. The last lines are for ten brokers and 30
days, extrapolated: metadata grow as in the second half of the measured days. Eight days take some ten minutes.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from bench._common import quick, row
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import from_wire
from tidelog.storage.commits import CommitObjects, CompactObjects, NewObject, ObjectKind, StreamRange, pack_ranges
from tidelog.storage.compaction.facts import ObjectFacts
from tidelog.storage.compaction.plan import BlockSource, CompactionTask, lay_out, plan
from tidelog.storage.objects.format import Footer, IndexEntry, ObjectIndex, cluster_fingerprint, encode_index
from tidelog.storage.settings import CompactionSettings, UploadSettings

BROKERS, DAYS = 10, 30
WRITE_BYTES, WRITE_EVERY_S = 16 << 10, 600
CLUSTER = "bench"
Part = tuple[int, list[tuple[int, int, int]]]
"""A stream, and its blocks in an object: start and end offset, bytes."""


class Broker:
    """One broker's objects, in the state machine and as the planner sees them."""

    def __init__(self, partitions: int, settings: CompactionSettings) -> None:
        self.settings = settings
        self.state = ControllerState()
        self.index = 0
        self.seconds = 0.0
        self.facts: dict[int, ObjectFacts] = {}
        self.indexes: dict[int, ObjectIndex] = {}
        self.uploaded = self.rewritten = 0
        self.apply(c.BecomeActive(0, 1, CLUSTER, 60_000))
        self.apply(c.RegisterBroker(0, "bench", "run", "host", 9092, "", ""))
        self.epoch = int(self.apply(c.Elect(0, 0))[4])
        for number in range(0, partitions, 1_000):
            topic_id = (number + 1).to_bytes(16, "big")
            count = min(1_000, partitions - number)
            self.apply(c.CreateTopic(topic_id, f"topic-{number}", count, {}, False, False, None))
        self.streams = [one.first_stream + 1 for one in self.state.tables.partitions.rows.values()]
        for at in range(0, partitions, 4_096):
            pairs = tuple((stream_id, self.epoch) for stream_id in self.streams[at : at + 4_096])
            self.apply(c.OpenStreams(0, self.epoch, pairs))
        self.ends = dict.fromkeys(self.streams, 0)
        self.empty_bytes = len(self.state.dump())

    def apply(self, command: c.AnyCommand) -> Any:
        self.index += 1
        envelope = c.Envelope(c.FORMAT_VERSION, 1, int(self.seconds * 1000), "", 0, 0, command)
        result = c.decode_result(self.state.apply(envelope, self.index).result)
        if result.error is not None:
            raise from_wire(result.error)
        return msgspec.msgpack.decode(result.value)

    def new_object(self, object_id: int, kind: int, parts: Sequence[Part]) -> NewObject:
        """Note an object's index and facts."""
        entries: list[IndexEntry] = []
        position = 0
        for stream_id, blocks in parts:
            for start, end, size in blocks:
                entries.append(IndexEntry(stream_id, start, end, position, size, end - start, 0))
                position += size
        raw = encode_index(entries)
        records = sum(one.record_count for one in entries)
        footer = Footer(position, len(raw), len(entries), records, object_id, 0, cluster_fingerprint(CLUSTER), kind)
        self.indexes[object_id] = ObjectIndex.decode(raw, footer, key=str(object_id))
        ranges = tuple(StreamRange(stream_id, blocks[0][0], blocks[-1][1]) for stream_id, blocks in parts)
        size = position + len(raw)
        self.facts[object_id] = ObjectFacts(object_id, kind, size, int(self.seconds * 1000), ranges, len(ranges))
        packed = pack_ranges([(one.stream_id, one.start_offset, one.end_offset) for one in ranges])
        return NewObject(object_id, kind, size, packed)

    def upload(self, streams: Sequence[int]) -> None:
        parts: list[Part] = []
        for stream_id in sorted(streams):
            end = self.ends[stream_id] = self.ends[stream_id] + 16
            parts.append((stream_id, [(end - 16, end, WRITE_BYTES)]))
        object_id = int(self.apply(c.PrepareObjects(1, 600_000)))
        new = self.new_object(object_id, ObjectKind.STREAM_SET, parts)
        self.apply(c.Commit(CommitObjects(0, self.epoch, self.index_of_wal, self.index_of_wal + 1, (new,))))
        self.uploaded += new.size

    @property
    def index_of_wal(self) -> int:
        return self.state.tables.replica_sets.rows[0].committed_wal_offset

    def compact(self) -> None:
        """Compact until nothing is due, and forget what was destroyed."""
        while tasks := plan(self.facts.values(), int(self.seconds * 1000), self.settings):
            for task in tasks:
                self.carry_out(task)
        destroyed = sorted(self.state.tables.index.destroyed)
        self.seconds += 61
        for at in range(0, len(destroyed), 1_000):
            self.apply(c.ForgetObjects(tuple(destroyed[at : at + 1_000])))

    def carry_out(self, task: CompactionTask) -> None:
        starts = dict.fromkeys(self.streams, 0)
        outputs = lay_out(task, self.indexes, starts, self.settings.stream_bytes, self.settings.target_bytes)
        first = int(self.apply(c.PrepareObjects(len(outputs), 600_000)))
        made = [
            self.new_object(first + number, output.kind, [(one, list(_blocks(of))) for one, of in output.parts])
            for number, output in enumerate(outputs)
        ]
        inputs = tuple(one.object_id for one in task.inputs)
        self.apply(c.Compact(CompactObjects(0, self.epoch, inputs, tuple(made))))
        self.rewritten += sum(one.size for one in made)
        for object_id in inputs:
            del self.facts[object_id], self.indexes[object_id]

    def figures(self) -> tuple[int, int, int]:
        """Objects, slices, and bytes of the snapshot beyond that of the partitions themselves."""
        slices = sum(len(one.ranges) for one in self.facts.values())
        return len(self.facts), slices, len(self.state.dump()) - self.empty_bytes


def _blocks(sources: Sequence[BlockSource]) -> Iterator[tuple[int, int, int]]:
    """Blocks as the writer makes them of these: of about `upload.block_bytes`."""
    limit = UploadSettings().block_bytes
    start, size = sources[0].entry.start_offset, 0
    for source in sources:
        size += source.entry.length
        if size >= limit:
            yield start, source.entry.end_offset, size
            start, size = source.entry.end_offset, 0
    if size:
        yield start, sources[-1].entry.end_offset, size


def writes(streams: Sequence[int]) -> Iterator[int]:
    """The streams that are written to, each once in `WRITE_EVERY_S`."""
    rng, order = random.Random(1), list(streams)
    while True:
        rng.shuffle(order)
        yield from order


def run(args: argparse.Namespace, *, sort: bool, days: float) -> list[tuple[int, int, int]]:
    """Return the figures of each tenth of the days, the empty broker's first."""
    broker = Broker(args.partitions // BROKERS, CompactionSettings())
    due = writes(broker.streams)
    uploads = max(10, round(days * 86_400 / WRITE_EVERY_S * len(broker.streams) / args.streams_in_upload))
    found = [broker.figures()]
    for number in range(1, uploads + 1):
        broker.seconds = number / uploads * days * 86_400
        broker.upload(list(islice(due, args.streams_in_upload)))
        if sort and number % 12 == 0:
            broker.compact()
        if number * 10 // uploads > (number - 1) * 10 // uploads:
            found.append(broker.figures())
            objects, slices, size = found[-1]
            again = broker.rewritten / broker.uploaded
            print(
                f"{'with' if sort else 'without'} sorting, day {broker.seconds / 86_400:.1f}: {objects} objects, "
                f"{slices} slices, {size / 1e6:.2f} MB, {broker.uploaded / 1e9:.0f} GB uploaded, written again "
                f"{again:.1f} times",
                flush=True,
            )
    return found


def month(found: Sequence[tuple[int, int, int]], days: float) -> tuple[int, int, float]:
    """Objects, slices and MB of all brokers after a month, from the last figures and the growth in the second half."""
    middle, end = found[len(found) // 2], found[-1]
    rest = (DAYS - days) / (days * (len(found) - 1 - len(found) // 2) / (len(found) - 1))
    objects, slices, size = (BROKERS * round(two + (two - one) * rest) for one, two in zip(middle, end, strict=True))
    return objects, slices, size / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=0.5 if quick() else 2.0)
    parser.add_argument("--partitions", type=int, default=100_000)
    parser.add_argument("--streams-in-upload", type=int, default=4_096)
    args = parser.parse_args()
    if (
        not CompactionSettings().target_bytes
        <= 2 * WRITE_BYTES * args.streams_in_upload
        <= 2 * WRITE_BYTES * args.partitions // BROKERS
    ):
        parser.error("an upload is to be a full object, and to have no stream of the broker twice")
    brief = min(args.days, 0.25)  # grows by the same with each upload
    for name, found, days in (
        ("without sorting", run(args, sort=False, days=brief), brief),
        ("with sorting", run(args, sort=True, days=args.days), args.days),
    ):
        objects, slices, size = month(found, days)
        row(f"metadata of a month, {name}", f"{objects:,} objects, {slices:,} slices, {size:,.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
