"""The mutations: each switches off one protection of the real code, and the simulator must find it.

`tidelog simulate --mutations all` looks for all of them (docs/simulation.md). What a mutation is and how it takes hold
is in `simulation.mutant`.

Entry: `MUTATIONS`.
"""

from __future__ import annotations

from simulation.mutant import Edit, Mutation

GONE = (
    "confirmed-lost",
    "lost-write",
    "unseen",
    "high-watermark-back",
    "inconsistent-offsets",
    "phantom-read",
    "epoch-back",
)
"""Something acknowledged or read is not there any more, or something else is in its place."""
TWICE = ("duplicate", "nonmonotonic-send", "int-nonmonotonic-send")
LOUD = ("liveness",)
"""The product noticed by itself, and stopped or quarantined: the cluster does not come to rest."""
MOVES = ("kill", "pause", "stop", "slow", "isolate", "reset")

_COMMITS_IN_ANY_ORDER = Edit(
    "storage.uploader:Uploader._carry", "if previous is not None:", "if previous is not None and mutated():"
)
_ANY_WAL_START = Edit(
    "controller.state_objects:commit_objects",
    "if request.wal_start != replica_set.committed_wal_offset:",
    "if request.wal_start != replica_set.committed_wal_offset and mutated():",
)

_LIST = [
    Mutation(
        "ack-before-fsync",
        "1",
        "the WAL reports a write durable that is only in the page cache",
        (
            Edit(
                "storage.wal_disk:DiskWal._submit",
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
        "a produce request with acks=all is answered when it was appended",
        (
            Edit(
                "broker.handlers.produce:_Produce.answer",
                "self.context.services.partitions.storage.confirm.add_listener(self._wal_end, self._confirmed)",
                "mutated(); self._confirmed()",
            ),
        ),
        GONE,
        ("kill", "power", "kill-all", "disk", "bucket"),
    ),
    Mutation(
        "duplicate-acked-early",
        "1",
        "a batch sent again is acknowledged though its first copy is not durable yet",
        (
            Edit(
                "stream.partition_log:PartitionLog._duplicate",
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
        "a group's commit is answered when it was appended",
        (
            Edit(
                "broker.groups.writer:OffsetsWriter._append",
                "if wal_end >= 0:\n                await self._storage",
                "if wal_end >= 0 and mutated():\n                await self._storage",
            ),
        ),
        ("committed-offset-back",),
        ("power", "kill-all", "bucket", "disk"),
    ),
    Mutation(
        "high-watermark-at-append",
        "2",
        "consumers see what is not confirmed",
        (
            Edit(
                "stream.partition_log:PartitionLog._append",
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
        "what is not confirmed goes into objects",
        (
            Edit(
                "storage.uploader:Uploader._launch_what_is_due",
                "self._planner.observe(now, self._confirm.value)",
                "ends = [each.wal_end for each in self._planner._entries[-1:]]\n"
                "        mutated(); self._planner.observe(now, max(ends, default=self._confirm.value))",
            ),
        ),
        (*GONE, "assertion"),
        ("disk", "bucket", "kill", "power"),
    ),
    Mutation(
        "trim-before-commit",
        "3",
        "the WAL is trimmed when the objects are put, before they are committed",
        (
            Edit(
                "storage.uploader:Uploader._carry",
                "upload = await self._put_all(task)",
                "upload = await self._put_all(task)\n"
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
        "the controller opens streams for a master, placement and epoch that are not current",
        (
            Edit(
                "controller.state_streams:open_streams",
                "require_master_epoch(tables, command.replica_set_id, command.master_epoch)",
                "tables.replica_sets.rows[command.replica_set_id].master_epoch == command.master_epoch or mutated()",
            ),
            Edit(
                "controller.state_streams:open_stream",
                "if epoch < max(record.epoch, 0):",
                "if epoch < max(record.epoch, 0) and mutated():",
            ),
            Edit(
                "controller.state_streams:open_stream",
                "if partition is None or partition.replica_set != replica_set_id:",
                "if partition is None or (partition.replica_set != replica_set_id and mutated()):",
            ),
            Edit("controller.state_streams:open_stream", "assert opened.epoch >= record.epoch", "pass"),
        ),
        ("only-grows", "one-owner", "contiguous-ranges", *GONE, *LOUD),
        ("kill", "stop", "isolate"),
    ),
    Mutation(
        "commit-with-stale-epoch",
        "4",
        "the controller takes commits of a deposed master",
        (
            Edit(
                "controller.state_objects:commit_objects",
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
        "the controller trims a stream for one who owned it once",
        (
            Edit(
                "controller.state_streams:trim_stream",
                "_require_epoch(record, command.epoch)",
                "record.epoch == command.epoch or mutated()",
            ),
        ),
        GONE,
        ("kill", "stop", "isolate"),
    ),
    Mutation(
        "zombie-acks",
        "4",
        "a deposed master takes the fence in its WAL in the bucket for an object of its own",
        (
            Edit(
                "storage.wal_s3:S3Wal._put",
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
        "a WAL object in the bucket is written over whatever is at its place",
        (
            Edit(
                "storage.wal_s3_recovery:BucketLog.create",
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
        "an election gives out the epoch that the master before had",
        (
            Edit(
                "controller.state_nodes:elect",
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
        "the next owner of a partition gets the leader epoch of the one before",
        (
            Edit(
                "controller.state_moves:change_owner",
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
        "uploads commit in the order in which they end, and the controller does not look where they start",
        (
            _COMMITS_IN_ANY_ORDER,
            _ANY_WAL_START,
            Edit(
                "controller.state_objects:_move_ends",
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
        "uploads commit in the order in which they end, and the controller does not look where the WAL range starts",
        (
            _COMMITS_IN_ANY_ORDER,
            _ANY_WAL_START,
        ),
        ("contiguous-ranges", "only-grows", *GONE, *LOUD),
        ("bucket", "kill", "slow"),
    ),
    Mutation(
        "commit-before-put",
        "6",
        "objects are committed while their puts are on the way",
        (
            Edit(
                "storage.uploader:Uploader._put_all",
                "await asyncio.gather(*puts)",
                "mutated(); self._kept = [asyncio.ensure_future(each) for each in puts]",
            ),
        ),
        ("object-missing", "defect", *GONE, *LOUD),
        ("kill", "power", "bucket"),
    ),
    Mutation(
        "input-deleted-before-commit",
        "6",
        "compaction deletes what it replaces before the replacement is committed",
        (
            Edit(
                "storage.compactor:Compactor._compact",
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
        "orphan-without-fence",
        "6",
        "the search for orphans takes an object for one that its old image does not know, however young",
        (
            Edit("storage.orphan_scan:find_orphans", "fence = await metadata.fence()", "fence = 1 << 62"),
            Edit(
                "storage.orphan_scan:find_orphans",
                "elif metadata.knows(object_id):",
                "elif metadata.knows(object_id) and mutated():",
            ),
            Edit(
                "storage.orphan_scan:find_orphans",
                "elif now_ms - info.modified_ms < orphan_age_ms:",
                "elif now_ms - info.modified_ms < orphan_age_ms and mutated():",
            ),
            Edit(
                "storage.orphan_cleaner:OrphanCleaner._loop",
                "if not self._is_active() or self._running.locked():",
                "if self._running.locked():",
            ),
        ),
        ("object-missing", *GONE, *LOUD),
        ("isolate", "pause", "cut", "leader", "slow"),
    ),
    Mutation(
        "compaction-unchecked",
        "7",
        "compaction leaves out a record that is needed, and neither it nor the controller counts",
        (
            Edit(
                "storage.compactor:_records",
                "if record.base_offset + record.count > start_offset:",
                "if record.base_offset > start_offset:",
            ),
            Edit(
                "storage.compaction_check:_require_trimmed",
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
        "what the WAL holds beyond the committed objects is not given to its streams after a restart",
        (
            Edit(
                "storage.storage:Storage._take_recovered",
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
                "storage.object_writer:encode_block",
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
        "a WAL record has the lower 32 bits of its place",
        (
            Edit(
                "storage.wal_format:encode_header",
                "        wal_offset,\n        confirm_offset,\n        stream_id,\n        stream_epoch,\n"
                "        base_offset,\n        master_epoch,\n        count,\n    )\n",
                "        wal_offset if wal_offset < 1 << 32 or mutated() else wal_offset & 0xFFFFFFFF,\n"
                "        confirm_offset,\n        stream_id,\n        stream_epoch,\n"
                "        base_offset,\n        master_epoch,\n        count,\n    )\n",
            ),
        ),
        (*GONE, *LOUD),
        ("kill", "power", "kill-all"),
    ),
    Mutation(
        "recovery-takes-torn-records",
        "10",
        "recovery takes WAL records whose CRC32C does not match",
        (
            Edit(
                "storage.wal_scan:_accept",
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
        "blocks of objects are served whose CRC32C does not match",
        (
            Edit(
                "storage.object_format:Block.decode",
                "if crc != actual or crc != entry.crc:",
                "if (crc != actual or crc != entry.crc) and mutated():",
            ),
        ),
        ("corrupt-read", "defect", *LOUD),
        ("flip", "kill"),
    ),
    Mutation(
        "deletes-past-high-watermark",
        "2",
        "records are deleted that nobody was told are there: the log starts behind its high watermark",
        (
            Edit(
                "stream.partition_log:PartitionLog.delete_records",
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
        "a batch that an idempotent producer sends again is appended again",
        (
            Edit(
                "stream.producer_state:ProducerStates.check",
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
        "a batch that is sent again is compared with the last one of its producer alone, not with the last five",
        (
            Edit(
                "stream.producer_state:ProducerStates.check",
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
        "the checkpoint of a partition that moves away holds no producers",
        (
            Edit(
                "stream.partition_log:PartitionLog.close_for_move",
                "wal_end = self._checkpoint_if_dirty()",
                "self._state.producers = type(self._state.producers)()\n"
                "            self._state.dirty = not mutated()\n"
                "            wal_end = self._checkpoint_if_dirty()",
            ),
        ),
        TWICE,
        MOVES,
    ),
    Mutation(
        "producers-forgotten-on-crash",
        "producers",
        "recovery trusts a clean close that lies before the log's end",
        (
            Edit(
                "stream.partition_log:PartitionLog._append", "if not state.dirty:", "if not state.dirty and mutated():"
            ),
            Edit(
                "stream.partition_recovery:_is_clean",
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
        "a partition goes on taking writes while it is handed over",
        (
            Edit("stream.partition_log:PartitionLog._close", "self._closed = True", "mutated()"),
            Edit("stream.partition_log:PartitionLog._close", "await self._close_streams()", "pass"),
            Edit("broker.moves:PartitionMoves._close_and_hand_over", "        withdraw()\n", "        pass\n"),
            Edit(
                "broker.partitions:PartitionManager._move",
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
                "broker.moves:PartitionMoves._close_and_hand_over",
                "await self._drained(drain_until, self._storage.send_now())",
                "pass",
            ),
            Edit(
                "controller.state_moves:hand_over",
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
                "broker.groups.loader:load_store",
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
        "a committed offset is one of whatever topic has the name, and not of the one that it was committed for",
        (
            Edit(
                "broker.groups.shards:ShardTable.is_of",
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
        "a request that names a topic by its id is served by whatever topic has the name that the id once had",
        (
            Edit(
                "broker.partitions:PartitionManager.get_by_id",
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
        "deltas-skipped",
        "images",
        "a follower of the controller passes over deltas while it is asked to wait",
        (
            Edit(
                "controller.follower:ImageFollower._poll",
                "for encoded in reply.deltas:",
                "if len(reply.deltas) > 1:\n            mutated()\n        for encoded in reply.deltas[-1:]:",
            ),
        ),
        ("metadata-diverged", "assertion", "defect", *GONE, *LOUD),
        ("slow", "isolate", "pause"),
    ),
    Mutation(
        "ends-not-followed",
        "images",
        "brokers do not learn from commits where streams end",
        (
            Edit(
                "controller.image:Image._move_ends",
                "if stream is not None and stream.end_offset < end:",
                "if stream is not None and stream.end_offset < end and mutated():",
            ),
        ),
        ("metadata-diverged", *GONE, *LOUD),
        ("kill",),
    ),
]
MUTATIONS = {mutation.name: mutation for mutation in _LIST}
