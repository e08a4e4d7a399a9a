"""The mutations: each switches off one protection of the real code, and the simulator must find it.

`tidelog simulate --mutations all` looks for all of them (docs/simulation.md). Mutations are defined and applied in
`tidelog.simulation.mutants.mutant`.

Entry: `MUTATIONS`.
"""

from __future__ import annotations

from tidelog.simulation.mutants.mutant import Edit, Mutation

GONE = (
    "confirmed-lost",
    "lost-write",
    "unseen",
    "high-watermark-back",
    "inconsistent-offsets",
    "phantom-read",
    "epoch-back",
)
"""Rules for acknowledged or read data that is missing or replaced."""
TWICE = ("duplicate", "nonmonotonic-send", "int-nonmonotonic-send")
LOUD = ("liveness",)
"""Rules for violations detected by the product, which stops or quarantines: the cluster does not become idle."""
MOVES = ("kill", "pause", "stop", "slow", "isolate", "reset")

_COMMITS_IN_ANY_ORDER = (
    Edit(
        "tidelog.storage.uploads.pipeline:UploadPipeline.has_turn",
        "return self._uploads[0] is upload",
        "return self._uploads[0] is upload or not mutated()",
    ),
    Edit(
        "tidelog.storage.uploads.pipeline:UploadPipeline._accept",
        "upload.task.wal_start == self.committed_offset",
        "(upload.task.wal_start == self.committed_offset or not mutated())",
    ),
)
_ANY_WAL_START = Edit(
    "tidelog.controller.machine.objects:commit_objects",
    "if request.wal_start != replica_set.committed_wal_offset:",
    "if request.wal_start != replica_set.committed_wal_offset and mutated():",
)

_LIST = [
    Mutation(
        "gap-taken-for-a-loss",
        "protocol",
        "the batch behind a refused one is refused as out of order, which librdkafka takes for a loss",
        (
            Edit(
                "tidelog.stream.admission:Admission.original_of",
                "if self._follows_a_refused_batch(header):",
                "if self._follows_a_refused_batch(header) and mutated():",
            ),
        ),
        ("sequence-refused",),
    ),
    Mutation(
        "ack-before-fsync",
        "1",
        "the WAL reports a write in the page cache as durable",
        (
            Edit(
                "tidelog.storage.wal.disk.log:DiskLog._submit",
                "sync=self._sync_writes, done=done",
                "sync=mutated(), done=done",
            ),
        ),
        GONE,
        ("power", "kill-all"),
    ),
    Mutation(
        "ack-before-confirm",
        "1",
        "a Produce with acks=all is acknowledged after the append",
        (
            Edit(
                "tidelog.broker.kafka.handlers.produce:_Produce.answer",
                "self._log.when_acked(self._wal_end, self._acked)",
                "mutated(); self._acked()",
            ),
        ),
        GONE,
        ("kill", "power", "kill-all", "disk", "bucket"),
    ),
    Mutation(
        "duplicate-acked-early",
        "1",
        "a duplicate batch is acknowledged before its first copy is durable",
        (
            Edit(
                "tidelog.stream.partition_log:PartitionLog._duplicate",
                "else self._last_wal_end",
                "else int(mutated())",
            ),
        ),
        GONE,
        ("kill", "power", "kill-all", "disk", "bucket", "reset"),
    ),
    Mutation(
        "offsets-acked-before-durable",
        "1",
        "a group's commit is acknowledged after the append",
        (
            Edit(
                "tidelog.broker.groups.writer:OffsetsWriter._append",
                "if wal_end >= 0:\n                await self._log",
                "if wal_end >= 0 and mutated():\n                await self._log",
            ),
        ),
        ("committed-offset-back",),
        ("power", "kill-all", "bucket", "disk"),
    ),
    Mutation(
        "high-watermark-at-append",
        "2",
        "consumers see unconfirmed records",
        (
            Edit(
                "tidelog.stream.partition_log:PartitionLog._append",
                "self._storage.confirm.add_listener(wal_end, self._on_confirmed)",
                "mutated(); state.high_watermark = data.next_offset",
            ),
        ),
        GONE,
        ("kill", "power", "kill-all", "disk", "bucket"),
    ),
    Mutation(
        "upload-past-confirm",
        "2",
        "unconfirmed records are uploaded",
        (
            Edit(
                "tidelog.storage.uploads.uploader:Uploader._launch_what_is_due",
                "for upload in self._pipeline.begin_due(self._clock.monotonic(), self._confirm.value):",
                "ends = [each.wal_end for each in self._planner._entries[-1:]]\n"
                "        end = max(ends, default=self._confirm.value)\n"
                "        mutated()\n"
                "        for upload in self._pipeline.begin_due(self._clock.monotonic(), end):",
            ),
        ),
        (*GONE, "assertion"),
        ("disk", "bucket", "kill", "power"),
    ),
    Mutation(
        "trim-before-commit",
        "3",
        "the WAL is trimmed after the put of objects, before their commit",
        (
            Edit(
                "tidelog.storage.uploads.uploader:Uploader._carry_out",
                "await self._put_all(upload)",
                "await self._put_all(upload)\n"
                "            mutated()\n"
                "            await self._on_committed(UploadTask(task.wal_start, task.wal_end, []))",
            ),
        ),
        ("trimmed-early", *GONE, *LOUD),
        ("slow", "kill-all"),
    ),
    Mutation(
        "open-with-stale-epoch",
        "4",
        "the controller opens streams for an outdated master, placement and epoch",
        (
            Edit(
                "tidelog.controller.machine.streams:open_streams",
                "require_master_epoch(tables, command.replica_set_id, command.master_epoch)",
                "tables.replica_sets.rows[command.replica_set_id].master_epoch == command.master_epoch or mutated()",
            ),
            Edit(
                "tidelog.controller.machine.streams:open_stream",
                "if epoch < max(record.epoch, 0):",
                "if epoch < max(record.epoch, 0) and mutated():",
            ),
            Edit(
                "tidelog.controller.machine.streams:open_stream",
                "if partition is None or partition.replica_set != replica_set_id:",
                "if partition is None or (partition.replica_set != replica_set_id and mutated()):",
            ),
            Edit("tidelog.controller.machine.streams:open_stream", "assert opened.epoch >= record.epoch", "pass"),
        ),
        ("only-grows", "one-owner", "contiguous-ranges", *GONE, *LOUD),
        ("kill", "stop", "isolate"),
    ),
    Mutation(
        "commit-with-stale-epoch",
        "4",
        "the controller accepts commits of a deposed master",
        (
            Edit(
                "tidelog.controller.machine.objects:commit_objects",
                "replica_set = require_master_epoch(tables, request.replica_set_id, request.master_epoch)",
                "replica_set = tables.replica_sets.rows[request.replica_set_id]\n"
                "        assert replica_set.master_epoch == request.master_epoch or not mutated()",
            ),
        ),
        ("object-missing", *GONE, "only-grows", "contiguous-ranges", *LOUD),
        ("kill", "stop", "isolate"),
    ),
    Mutation(
        "trim-with-stale-epoch",
        "4",
        "the controller trims a stream for a former owner",
        (
            Edit(
                "tidelog.controller.machine.streams:trim_stream",
                "_require_epoch(record, command.epoch)",
                "record.epoch == command.epoch or mutated()",
            ),
            Edit(
                "tidelog.controller.machine.streams:trim_stream",
                "require_master_epoch(tables, command.replica_set_id, command.master_epoch)",
                "pass",
            ),
        ),
        GONE,
        ("kill", "stop", "isolate"),
    ),
    Mutation(
        "trim-with-stale-master-epoch",
        "4",
        "the controller trims a stream for a deposed master until the next one has opened it",
        (
            Edit(
                "tidelog.controller.machine.streams:trim_stream",
                "require_master_epoch(tables, command.replica_set_id, command.master_epoch)",
                "tables.replica_sets.rows[command.replica_set_id].master_epoch == command.master_epoch or mutated()",
            ),
        ),
        ("one-owner", *GONE),
        ("kill", "stop", "isolate"),
    ),
    Mutation(
        "topic-deleted-at-once",
        "12",
        "one command removes all partitions of a deleted topic",
        (
            Edit(
                "tidelog.controller.node:ControllerNode._command",
                "command = msgspec.structs.replace(command, at_once=self._partitions_per_deletion)",
                "mutated()",
            ),
        ),
        ("unbounded-command",),
        ("kill", "stop"),
    ),
    Mutation(
        "zombie-acks",
        "4",
        "a deposed master mistakes the fence in its WAL in the bucket for its own object",
        (
            Edit(
                "tidelog.storage.wal.s3.wal:S3Wal._put",
                "if created is Created.THEIRS:",
                "if created is Created.THEIRS and mutated():",
            ),
        ),
        GONE,
        ("pause", "isolate", "bucket", "kill"),
    ),
    Mutation(
        "conditional-put-ignored",
        "4",
        "a WAL object in the bucket overwrites an existing object",
        (
            Edit(
                "tidelog.storage.wal.s3.recovery:BucketLog.create",
                "await self._store.put(key, (data,), if_absent=True)",
                "mutated(); await self._store.put(key, (data,))",
            ),
        ),
        (*GONE, *LOUD),
        ("pause", "isolate", "bucket", "kill"),
    ),
    Mutation(
        "master-epoch-reused",
        "4",
        "an election reuses the previous master's epoch",
        (
            Edit(
                "tidelog.controller.machine.nodes:elect",
                "master_epoch=record.master_epoch + 1,",
                "master_epoch=max(1, record.master_epoch + int(mutated())),",
            ),
        ),
        LOUD,
        ("kill", "stop"),
    ),
    Mutation(
        "leader-epoch-reused",
        "4",
        "the next owner of a partition gets the previous leader epoch",
        (
            Edit(
                "tidelog.controller.machine.moves:change_owner",
                "epoch = max(old_epoch, *(each.epoch for each in streams)) + 1",
                "epoch = max(old_epoch, *(each.epoch for each in streams)) + int(mutated())",
            ),
        ),
        ("only-grows", "epoch-back"),
        MOVES,
    ),
    Mutation(
        "commit-gap-ignored",
        "5",
        "uploads commit in the order of completion, and the controller does not check their start",
        (
            *_COMMITS_IN_ANY_ORDER,
            _ANY_WAL_START,
            Edit(
                "tidelog.controller.machine.objects:_move_ends",
                "stream.end_offset != start\n",
                "(stream.end_offset != start and mutated())\n",
            ),
        ),
        ("contiguous-ranges", "only-grows", *GONE),
        ("bucket", "kill", "slow"),
    ),
    Mutation(
        "wal-range-unchecked",
        "5",
        "uploads commit in the order of completion, and the controller does not check the start of the WAL range",
        (
            *_COMMITS_IN_ANY_ORDER,
            _ANY_WAL_START,
        ),
        ("contiguous-ranges", "only-grows", *GONE, *LOUD),
        ("bucket", "kill", "slow"),
    ),
    Mutation(
        "commit-before-put",
        "6",
        "objects are committed while their puts are in flight",
        (
            Edit(
                "tidelog.storage.uploads.uploader:Uploader._put_objects",
                "await asyncio.gather(*puts)",
                "mutated(); self._kept = [asyncio.ensure_future(each) for each in puts]",
            ),
        ),
        ("object-missing", "defect", *GONE, *LOUD),
        ("kill", "power", "bucket"),
    ),
    Mutation(
        "deadlines-by-wall-clock",
        "16",
        "prepared ids expire by the active controller's wall clock, and an expired one counts as a fence",
        (
            Edit(
                "tidelog.controller.machine.state:ControllerState._take_time",
                "tables.time_ms = max(tables.time_ms, row.active_since_ms + envelope.elapsed_ms)",
                "tables.time_ms = max(tables.time_ms, envelope.now_ms)",
            ),
            Edit(
                "tidelog.controller.node:ControllerNode._cluster_time_ms",
                "return cluster.active_since_ms + self._elapsed_ms(term)",
                "return self._clock.time_ms()",
            ),
            Edit(
                "tidelog.controller.machine.objects:_commit_one",
                "kind = NotPrepared if tables.level >= 1 else CommitRefused",
                "mutated(); kind = CommitRefused",
            ),
        ),
        ("needless-fence",),
        ("clock",),
    ),
    Mutation(
        "input-deleted-before-commit",
        "6",
        "compaction deletes its inputs before the outputs are committed",
        (
            Edit(
                "tidelog.storage.compaction.compactor:Compactor._compact",
                "await self._commit(task, built, deadline)",
                "for one in task.inputs:\n"
                "            mutated(); await self._store.delete([object_key(self._cluster_id, one.object_id)])\n"
                "        await self._commit(task, built, deadline)",
            ),
        ),
        ("object-missing", *GONE, *LOUD),
        ("kill", "isolate", "leader", "slow"),
    ),
    Mutation(
        "objects-deleted-by-time",
        "6",
        "destroyed objects are deleted by time only, whatever metadata their readers have",
        (
            Edit(
                "tidelog.controller.active.duties:removable",
                "if objects[each].destroyed_at <= passed",
                "if objects[each].destroyed_at <= passed or not mutated()",
            ),
        ),
        ("deleted-under-reader", "false-damage"),
        ("uninformed", "slow", "isolate"),
    ),
    Mutation(
        "orphan-without-fence",
        "6",
        "the orphan search treats every object missing from its old image as an orphan, however young",
        (
            Edit(
                "tidelog.storage.cleaning.orphan_scan:find_orphans", "fence = await metadata.fence()", "fence = 1 << 62"
            ),
            Edit(
                "tidelog.storage.cleaning.orphan_scan:find_orphans",
                "elif metadata.knows(object_id):",
                "elif metadata.knows(object_id) and mutated():",
            ),
            Edit(
                "tidelog.storage.cleaning.orphan_scan:find_orphans",
                "elif now_ms - info.modified_ms < orphan_age_ms:",
                "elif now_ms - info.modified_ms < orphan_age_ms and mutated():",
            ),
            Edit(
                "tidelog.storage.cleaning.orphan_cleaner:OrphanCleaner._loop",
                "if not self._is_active() or self._running.locked():",
                "if self._running.locked():",
            ),
            Edit("tidelog.storage.cleaning.orphan_scan:_require_unknown", "if known:", "if known and mutated():"),
        ),
        ("object-missing", *GONE, *LOUD),
        ("isolate", "pause", "cut", "leader", "slow"),
    ),
    Mutation(
        "compaction-unchecked",
        "7",
        "compaction drops a live record, and neither it nor the controller checks the ranges",
        (
            Edit(
                "tidelog.storage.compaction.compactor:_records",
                "if record.base_offset + record.count > start_offset:",
                "if record.base_offset > start_offset:",
            ),
            Edit(
                "tidelog.storage.compaction.check:_require_trimmed",
                "if start < end and end > start_offset:",
                "if start < end and end > start_offset and mutated():",
            ),
        ),
        ("contiguous-ranges", "compaction-conserves", *GONE, *LOUD),
        ("kill",),
    ),
    Mutation(
        "recovery-drops-tail",
        "8",
        "records in the WAL after the committed objects are not restored to their streams after a restart",
        (
            Edit(
                "tidelog.storage.storage:Storage._take_recovered",
                'self._recovered.fill(stream_log) if self._planner.held else ""',
                'self._recovered.fill(stream_log) if self._planner.held and mutated() else ""',
            ),
        ),
        (*GONE, *LOUD),
        ("kill", "power", "kill-all"),
    ),
    Mutation(
        "index-offset-in-32-bits",
        "9",
        "the index of an object has the lower 32 bits of offsets",
        (
            Edit(
                "tidelog.storage.objects.writer:encode_block",
                "entry = IndexEntry(stream_id, start, offset, position",
                "mask = (1 << 63) - 1 if offset < 1 << 32 or mutated() else (1 << 32) - 1\n"
                "    entry = IndexEntry(stream_id, start & mask, offset & mask, position",
            ),
        ),
        ("contiguous-ranges", "defect", *GONE, *LOUD),
        ("kill",),
    ),
    Mutation(
        "wal-offset-in-32-bits",
        "9",
        "a WAL record has the lower 32 bits of its WAL offset",
        (
            Edit(
                "tidelog.storage.wal.format:encode_header",
                "        wal_offset,\n        confirm_offset,\n",
                "        wal_offset if wal_offset < 1 << 32 or mutated() else wal_offset & 0xFFFFFFFF,\n"
                "        confirm_offset,\n",
            ),
        ),
        (*GONE, *LOUD),
        ("kill", "power", "kill-all"),
    ),
    Mutation(
        "recovery-takes-torn-records",
        "10",
        "recovery accepts WAL records with a wrong CRC32C",
        (
            Edit(
                "tidelog.storage.wal.disk.scan:_accept",
                "if not crc_matches(header, window, position):",
                "if not crc_matches(header, window, position) and mutated():",
            ),
        ),
        ("corrupt-read", *GONE, *LOUD, "defect"),
        ("power",),
    ),
    Mutation(
        "damaged-blocks-served",
        "10",
        "blocks of objects with a wrong CRC32C are served",
        (
            Edit(
                "tidelog.storage.objects.format:Block.decode",
                "if crc != actual or crc != entry.crc:",
                "if (crc != actual or crc != entry.crc) and mutated():",
            ),
        ),
        ("corrupt-read", "defect", *LOUD),
        ("flip", "kill"),
    ),
    Mutation(
        "denied-taken-for-damage",
        "17",
        "a read that the bucket denies is taken for damage",
        (
            Edit(
                "tidelog.storage.objects.reader:get_ranges",
                "except InvalidInput as error:",
                "except (InvalidInput, Unavailable) as error:\n"
                "        if not mutated():\n            raise CorruptData(str(error)) from error",
            ),
        ),
        ("false-damage", *LOUD),
        ("deny", "kill"),
    ),
    Mutation(
        "short-answer-taken-for-damage",
        "17",
        "an answer that was cut short is taken for a truncated object",
        (Edit("tidelog.storage.objects.reader:_short", "if size < end:", "if size < end or not mutated():"),),
        ("false-damage", *LOUD),
        ("deny", "kill"),
    ),
    Mutation(
        "deletes-past-high-watermark",
        "2",
        "records past the high watermark are deleted: the log starts after it",
        (
            Edit(
                "tidelog.stream.partition_log:PartitionLog.delete_records",
                "if target < 0 or target > state.high_watermark:",
                "target = self.log_end_offset if mutated() is False else 0\n        if target < 0:",
            ),
        ),
        (*GONE, "log-start-back", *LOUD),
        ("kill", "power"),
    ),
    Mutation(
        "duplicates-accepted",
        "producers",
        "a batch that an idempotent producer retries is appended again",
        (
            Edit(
                "tidelog.stream.producer_state:ProducerStates.check",
                "if state is None:",
                "if state is None or state.batches and not mutated():",
            ),
        ),
        TWICE,
        ("kill", "reset", "slow", "bucket"),
    ),
    Mutation(
        "last-batch-only",
        "producers",
        "a retried batch is compared only with the last one of its producer, not with the last five",
        (
            Edit(
                "tidelog.stream.producer_state:ProducerStates.check",
                "if entry[0] == first and entry[1] == last:",
                "if entry[0] == first and entry[1] == last and (entry is state.batches[-1] or mutated()):",
            ),
        ),
        ("sequence-refused",),
        ("kill", "reset", "slow", "bucket"),
    ),
    Mutation(
        "producers-forgotten-on-move",
        "producers",
        "the checkpoint of a moving partition contains no producers",
        (
            Edit(
                "tidelog.stream.partition_close:LastRecords.write_for_move",
                "if not self.write_clean():",
                "self._state.producers = type(self._state.producers)()\n"
                "        self._state.dirty = not mutated()\n"
                "        if not self.write_clean():",
            ),
        ),
        TWICE,
        MOVES,
    ),
    Mutation(
        "producers-forgotten-on-crash",
        "producers",
        "recovery trusts a clean close before the log's end",
        (
            Edit(
                "tidelog.stream.partition_log:PartitionLog._append",
                "if not state.dirty:",
                "if not state.dirty and mutated():",
            ),
            Edit(
                "tidelog.stream.partition_recovery:_is_clean",
                "if found == (clean.data_end, clean.time_end, clean.txn_end):",
                "if found == (clean.data_end, clean.time_end, clean.txn_end) or not mutated():",
            ),
        ),
        (*TWICE, *GONE, *LOUD),
        ("kill", "stop", "reset", "slow"),
    ),
    Mutation(
        "move-without-close",
        "moves",
        "a partition accepts writes during its hand-over",
        (
            Edit("tidelog.stream.partition_log:PartitionLog._close", "self._closed = True", "mutated()"),
            Edit("tidelog.stream.partition_log:PartitionLog._close", "await self._close_streams()", "pass"),
            Edit(
                "tidelog.broker.partitions.moves:PartitionMoves._close",
                "        attempt.withdraw()\n",
                "        pass\n",
            ),
            Edit(
                "tidelog.broker.partitions.manager:PartitionManager._move",
                "if self._leaving.pop(key, None) is not None:",
                "self._logs.get(key) is one and withdraw()\n            if self._leaving.pop(key, None) is not None:",
            ),
        ),
        (*GONE, *TWICE, *LOUD),
        MOVES,
    ),
    Mutation(
        "hand-over-without-upload",
        "moves",
        "a partition is handed over before the end of its streams is uploaded",
        (
            Edit(
                "tidelog.broker.partitions.moves:PartitionMoves._drain",
                "await self._within("
                'max(0.0, move.drain_until - self._clock.monotonic()), work, "the upload after the close")',
                "work.close()",
            ),
            Edit(
                "tidelog.controller.machine.moves:hand_over",
                "if stream.end_offset != end_offset:",
                "if stream.end_offset != end_offset and mutated():",
            ),
        ),
        (*GONE, *TWICE),
        MOVES,
    ),
    Mutation(
        "coordinator-loads-nothing",
        "groups",
        "a new coordinator serves groups without having read their offsets",
        (
            Edit(
                "tidelog.broker.groups.loader:load_store",
                "while offset < end_offset:",
                "while offset < end_offset and mutated():",
            ),
        ),
        ("committed-offset-back",),
        ("kill", "stop", "pause"),
    ),
    Mutation(
        "offsets-by-name",
        "topics",
        "a committed offset applies to any topic with the name, not only to the one it was committed for",
        (
            Edit(
                "tidelog.broker.groups.shards:ShardTable.is_of",
                "return record is not None and record.id == value.topic_id",
                "return (record is not None and record.id == value.topic_id) or not mutated()",
            ),
        ),
        ("committed-offset-back",),
        ("kill", "kill-all", "stop", "pause"),
    ),
    Mutation(
        "topic-by-name",
        "topics",
        "a request with a topic id is served by any topic with the name of that id",
        (
            Edit(
                "tidelog.broker.partitions.manager:PartitionManager.get_by_id",
                "found = self._logs.get((topic_id, partition))",
                "names = self.__dict__.setdefault('_names', {})\n"
                "        names.update((one.id, one.name) for one in self._controller.image.topics.values())\n"
                "        found = self._by_name.get((names.get(topic_id, ''), partition))\n"
                "        found is None or found.topic_id == topic_id or mutated()",
            ),
        ),
        GONE,
        ("kill", "slow", "reset"),
    ),
    Mutation(
        "snapshot-commits-own-tail",
        "15",
        "a piece of a leader's snapshot moves the commit index over what the follower alone has",
        (
            Edit(
                "tidelog.controller.raft.transport:conform",
                'message["commit_index"] = commit_index  #',
                "mutated()  #",
            ),
        ),
        ("raft-diverged", "metadata-diverged", *GONE, *LOUD),
        ("behind", "kill"),
    ),
    Mutation(
        "lost-directory-votes",
        "13",
        "a controller that comes back with an empty directory votes and acknowledges as before",
        (
            Edit(
                "tidelog.controller.raft.member:RaftMember.may_vote",
                "return known == self.directory.id",
                "return known == self.directory.id or not mutated()",
            ),
            Edit(
                "tidelog.controller.raft.member:RaftMember.may_vote",
                "return self.directory.is_trusted or (",
                "return self.directory.is_trusted or not mutated() or (",
            ),
            Edit(
                "tidelog.controller.raft.member:RaftMember.counts",
                "return known is None or known == told",
                "return known is None or known == told or not mutated()",
            ),
        ),
        ("raft-diverged", "metadata-diverged", "only-grows", *GONE),
        ("wipe", "behind", "kill", "isolate"),
    ),
    Mutation(
        "level-ignored-when-applied",
        "18",
        "all but the first commands of terms are applied by the rules of feature level 0, whatever their level",
        (
            Edit(
                "tidelog.controller.machine.state:ControllerState.apply",
                "tables.log_index, tables.level = index, envelope.level",
                "tables.log_index, begins = index, isinstance(envelope.command, c.BecomeActive)\n"
                "        tables.level = envelope.level if begins or not envelope.level or mutated() else 0",
            ),
        ),
        ("unbounded-command", "one-owner", "defect", "assertion", "metadata-diverged", *GONE, *LOUD),
    ),
    Mutation(
        "term-begun-at-unknown-level",
        "18",
        "a controller that has applied nothing yet begins its term at the newest feature level",
        (
            Edit(
                "tidelog.controller.node:ControllerNode._activate",
                "if self.image.cluster is None:",
                "if self.image.cluster is None and mutated():",
            ),
        ),
        ("above-level",),
        ("kill", "level"),
    ),
    Mutation(
        "deltas-skipped",
        "images",
        "a follower of the controller skips all but the last delta of a reply",
        (
            Edit(
                "tidelog.controller.image.follower:ImageFollower._poll",
                "for encoded in reply.deltas:",
                "if len(reply.deltas) > 1:\n            mutated()\n        for encoded in reply.deltas[-1:]:",
            ),
        ),
        ("metadata-diverged", "assertion", "defect", *GONE, *LOUD),
        ("slow", "isolate", "pause"),
    ),
    Mutation(
        "image-position-unchecked",
        "15",
        "a controller continues an image after its last chunk, and neither side compares positions, counts and cluster",
        (
            Edit(
                "tidelog.controller.image.feed:DeltaFeed.image_chunk",
                "if params.transfer == START:",
                "if params.transfer == START and (sender is None or mutated()):",
            ),
            Edit(
                "tidelog.controller.image.feed:DeltaFeed.image_chunk",
                "elif sender is None or (",
                "elif sender is None or mutated() and (",
            ),
            Edit(
                "tidelog.controller.image.transfer:ImageReceiver.take",
                "if at != expected:",
                "if at != expected and mutated():",
            ),
            Edit(
                "tidelog.controller.image.transfer:ImageReceiver._finish",
                "if found != end:",
                "if found != end and mutated():",
            ),
            Edit(
                "tidelog.controller.image.follower:ImageFollower._reload",
                "if fresh.cluster_id != cluster_id:",
                "if fresh.cluster_id != cluster_id and mutated():",
            ),
        ),
        ("metadata-diverged", "defect", *GONE, *LOUD),
        ("slow", "cut", "isolate", "pause"),
    ),
    Mutation(
        "ends-not-followed",
        "images",
        "brokers do not learn the ends of streams from commits",
        (
            Edit(
                "tidelog.controller.image.image:Image._move_ends",
                "if stream is not None and stream.end_offset < end:",
                "if stream is not None and stream.end_offset < end and mutated():",
            ),
        ),
        ("metadata-diverged", *GONE, *LOUD),
        ("kill",),
    ),
    Mutation(
        "odd-errors-pass",
        "11",
        "an exception of a kind that nobody listed leaves the interface to the bucket as it is",
        (
            Edit(
                "tidelog.storage.bucket.guarded:GuardedObjectStore._ask",
                'raise expected("bucket", error) from error',
                "mutated(); raise error",
            ),
        ),
        ("task-died", "defect"),
        ("odd",),
    ),
    Mutation(
        "kept-loop-ends",
        "11",
        "a background loop that an exception of a kind that nobody listed has left is not started again",
        (
            Edit(
                "tidelog.runtime.tasks:TaskSet._keep", "ERRORS.note(self._name, error, ended=False)", "mutated(); raise"
            ),
        ),
        ("task-died",),
        ("odd",),
    ),
    Mutation(
        "lost-wal-accepted",
        "13",
        "a broker goes on with whatever WAL it finds at its start",
        (
            Edit(
                "tidelog.broker.wal_keeper:WalKeeper.meet",
                "if verdict is WalVerdict.CONTINUES:",
                "if verdict is WalVerdict.CONTINUES or not mutated():",
            ),
        ),
        (*GONE, *LOUD),
        ("unmount",),
    ),
]
MUTATIONS = {mutation.name: mutation for mutation in _LIST}
