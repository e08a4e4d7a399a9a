"""Mutations of `tidelog.storage`: the WALs, uploads, compaction, objects and the bucket.

Entry: `MUTATIONS_IN_STORAGE`.
"""

from __future__ import annotations

from tidelog.simulation.mutants.findings import GONE, LOUD
from tidelog.simulation.mutants.mutant import Edit, Mutation

MUTATIONS_IN_STORAGE = [
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
                "            done = UploadTask(task.wal_start, task.wal_end, [], task.waiting_since)\n"
                "            await self._on_committed(done)",
            ),
        ),
        ("trimmed-early", *GONE, *LOUD),
        ("slow", "kill-all"),
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
                "tidelog.storage.compaction.rewriting:records_from",
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
                'self._recovered.fill(stream_log, self.confirm.value) if self._planner.held else ""',
                'self._recovered.fill(stream_log, self.confirm.value) if self._planner.held and mutated() else ""',
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
]
