"""Mutations of `tidelog.controller`: its machine, its duties, Raft and the images.

Entry: `MUTATIONS_IN_CONTROLLER`.
"""

from __future__ import annotations

from tidelog.simulation.mutants.findings import GONE, LOUD, MOVES
from tidelog.simulation.mutants.mutant import Edit, Mutation

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

MUTATIONS_IN_CONTROLLER = [
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
                "tidelog.controller.node:ControllerNode._completed",
                "return msgspec.structs.replace(command, at_once=self._partitions_per_deletion)",
                "mutated(); return command",
            ),
        ),
        ("unbounded-command",),
        ("kill", "stop"),
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
        "leases-ignored",
        "6",
        "destroyed objects are deleted although a reader outside the cluster has a lease on a version that names them",
        (
            Edit(
                "tidelog.controller.active.lifecycle:Lifecycle._remove",
                "min(passed, held_version(self._image().leases.values()))",
                "passed if passed <= held_version(self._image().leases.values()) or not mutated() else -1",
            ),
        ),
        ("deleted-under-reader",),
        ("kill", "leader"),
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
        "unlisted-leader-refused",
        "13",
        "a controller takes nothing from a leader that its log does not name yet",
        (
            Edit(
                "tidelog.controller.raft.transport:PeerTransport.keep_unlisted",
                "if self._nodes.pop(int(node.id), None) is not None:",
                "if mutated() and self._nodes.pop(int(node.id), None) is not None:",
            ),
            Edit(
                "tidelog.controller.raft.transport:PeerTransport._take_unlisted",
                "if address is None or self._is_led_by_listed():",
                "if address is None or self._is_led_by_listed() or not mutated():",
            ),
        ),
        ("liveness",),
        ("members", "wipe", "leader"),
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
                "if self.image.cluster is None or self._level < NEWEST:",
                "if (self.image.cluster is None or self._level < NEWEST) and mutated():",
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
        "configs-overwritten",
        "configs",
        "a change of configs is applied that was computed from others than are there",
        (
            Edit(
                "tidelog.controller.machine.nodes:check_base",
                "if base != ANY and base != digest(configs):",
                "if base != ANY and base != digest(configs) and mutated():",
            ),
        ),
        ("config-lost",),
        MOVES,
    ),
    Mutation(
        "older-controller-elected",
        "1",
        "a controller becomes active without a look at the states in the bucket",
        (
            Edit(
                "tidelog.controller.node:ControllerNode._activate",
                "if self._keeper is not None:",
                "if self._keeper is not None and mutated():",
            ),
        ),
        ("rolled-back", "defect", *GONE, *LOUD),
        ("older-raft", "kill"),
    ),
]
