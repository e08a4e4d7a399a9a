"""A bucket of which there are only the facts and the indexes of its objects, for the planner of compaction."""

from __future__ import annotations

import itertools

from tidelog.storage.commits import ObjectKind, StreamRange
from tidelog.storage.compaction.check import check_conserved
from tidelog.storage.compaction.facts import ObjectFacts
from tidelog.storage.compaction.plan import MAX_OUTPUTS, CompactionTask, OutputPlan, lay_out, plan
from tidelog.storage.compaction.sorting import MAX_INPUTS
from tidelog.storage.objects.format import (
    BLOCK_HEADER,
    Footer,
    IndexEntry,
    ObjectIndex,
    cluster_fingerprint,
    encode_index,
)
from tidelog.storage.settings import CompactionSettings


class Bucket:
    """Objects as the metadata and their indexes have them; the data itself is only a size."""

    def __init__(self, settings: CompactionSettings) -> None:
        self.settings = settings
        self.facts: dict[int, ObjectFacts] = {}
        self.indexes: dict[int, ObjectIndex] = {}
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.next_id = 1
        self.now_ms = 1_000_000
        self.written = 0

    def put(self, kind: int, parts: list[tuple[int, list[tuple[int, int, int]]]]) -> int:
        """Write an object: for each stream its blocks (start, end, bytes)."""
        object_id, self.next_id = self.next_id, self.next_id + 1
        entries: list[IndexEntry] = []
        ranges: list[StreamRange] = []
        position = 0
        for stream_id, blocks in parts:
            for start, end, size in blocks:
                size = max(size, BLOCK_HEADER.size + 16)
                entries.append(IndexEntry(stream_id, start, end, position, size, end - start, 0))
                position += size
            ranges.append(StreamRange(stream_id, blocks[0][0], blocks[-1][1]))
        raw = encode_index(entries)
        records = sum(entry.record_count for entry in entries)
        footer = Footer(position, len(raw), len(entries), records, object_id, 0, cluster_fingerprint("c"), kind)
        self.indexes[object_id] = ObjectIndex.decode(raw, footer, key=str(object_id))
        self.facts[object_id] = ObjectFacts(object_id, kind, position + len(raw), self.now_ms, tuple(ranges), 0)
        return object_id

    def upload(self, sizes: dict[int, int], alone: frozenset[int] = frozenset()) -> None:
        """One upload: `size` bytes in one block of each stream, some in objects of their own."""
        shared = []
        for stream_id, size in sorted(sizes.items()):
            start = self.ends.get(stream_id, 0)
            self.starts.setdefault(stream_id, 0)
            self.ends[stream_id] = start + 5
            part = (stream_id, [(start, start + 5, size)])
            if stream_id in alone:
                self.put(ObjectKind.STREAM, [part])
            else:
                shared.append(part)
        if shared:
            self.put(ObjectKind.STREAM_SET, shared)

    def objects(self) -> list[ObjectFacts]:
        """As the controller has them: dead ones are gone."""
        found = []
        for one in self.facts.values():
            live = sum(self.starts.get(piece.stream_id, 1 << 62) < piece.end_offset for piece in one.ranges)
            if live:
                found.append(one._replace(live=live))
        return found

    def lay_out(self, task: CompactionTask) -> list[OutputPlan]:
        return lay_out(task, self.indexes, self.starts, self.settings.stream_bytes, self.settings.target_bytes)

    def run(self, task: CompactionTask) -> None:
        """Check a task's layout and replace its inputs, merging blocks as the writer does."""
        outputs = self.lay_out(task)
        ranges = [
            StreamRange(stream_id, sources[0].entry.start_offset, sources[-1].entry.end_offset)
            for output in outputs
            for stream_id, sources in output.parts
        ]
        check_conserved((piece for one in task.inputs for piece in one.ranges), ranges, self.starts.get)
        self.written += sum(output.size for output in outputs)
        for one in task.inputs:
            del self.facts[one.object_id]
        for output in outputs:
            parts = []
            for stream_id, sources in output.parts:
                size = sum(source.entry.length for source in sources)
                parts.append((stream_id, [(sources[0].entry.start_offset, sources[-1].entry.end_offset, size)]))
            self.put(output.kind, parts)

    def covered(self) -> dict[int, list[tuple[int, int]]]:
        """For each stream its ranges at or above the start, in order; they must be contiguous to the end."""
        found: dict[int, list[tuple[int, int]]] = {}
        for one in self.facts.values():
            for piece in one.ranges:
                if piece.end_offset > self.starts.get(piece.stream_id, 1 << 62):
                    found.setdefault(piece.stream_id, []).append((piece.start_offset, piece.end_offset))
        for stream_id, ranges in found.items():
            ranges.sort()
            assert ranges[0][0] <= self.starts[stream_id]
            assert ranges[-1][1] == self.ends[stream_id]
            assert all(one[1] == two[0] for one, two in itertools.pairwise(ranges))
        return found

    def settle(self, rounds: int = 200) -> int:
        """Compact until nothing is planned; returns the number of tasks."""
        done = 0
        for _ in range(rounds):
            tasks = plan(self.objects(), self.now_ms, self.settings)
            if not tasks:
                return done
            taken = [one.object_id for task in tasks for one in task.inputs]
            assert len(taken) == len(set(taken))
            for task in tasks:
                assert len(task.inputs) <= self.settings.max_objects
                if task.kind == "sort":
                    assert len(task.inputs) <= MAX_INPUTS
                else:
                    assert task.size <= self.settings.target_bytes or len(task.inputs) == 1
                assert len(self.lay_out(task)) <= MAX_OUTPUTS + 2 * len(task.inputs)
                self.run(task)
                done += 1
            self.covered()
        raise AssertionError("it never came to an end")
