"""`ControllerState`: the deterministic state machine of the replicated log.

The state changes only by `apply(envelope, index)`. It uses no clock, no randomness and no external input: the same
commands at the same indexes give the same bytes (`dump`) on every member. It never raises because of a command's
content: a refusal is a `Result` with an error and no effect, except that a commit with a gap quarantines its stream. An
unexpected exception, be it in a handler, in the indexes or in the encoding of rows and result, is also a refusal
(`CommandFailed`), because a member that stopped there would make all members stop at the same command. Each member
logs it and tells of it (`ControllerState.failed`). The exception's text is no part of the state: it differs between
members.

Rules (docs/rules.md) asserted here: 4 (one owner, epochs never decrease), 5 (committed ranges contiguous), 6 (objects
destroyed only when unreferenced), 7 (compaction conserves records), and idempotence by dedupe ids
(`tidelog.controller.machine.dedupe`).

The handlers are in `tidelog.controller.machine`: modules `nodes`, `topics`, `streams`, `objects`, `compaction`,
`moves`, `scaling`, `takeover`, `wal_notes`, `replica_sets`, `replica_elections`, `leases`, `snapshots`
and `branches`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from tidelog.controller.machine import (
    branches as state_branches,
)
from tidelog.controller.machine import (
    compaction as state_compaction,
)
from tidelog.controller.machine import (
    leases as state_leases,
)
from tidelog.controller.machine import (
    levels as state_levels,
)
from tidelog.controller.machine import (
    moves as state_moves,
)
from tidelog.controller.machine import (
    nodes as state_nodes,
)
from tidelog.controller.machine import (
    objects as state_objects,
)
from tidelog.controller.machine import (
    replica_elections,
    replica_sets,
    wal_notes,
)
from tidelog.controller.machine import (
    scaling as state_scaling,
)
from tidelog.controller.machine import (
    snapshots as state_snapshots,
)
from tidelog.controller.machine import (
    streams as state_streams,
)
from tidelog.controller.machine import (
    takeover as takeover_commands,
)
from tidelog.controller.machine import (
    topics as state_topics,
)
from tidelog.controller.machine.dedupe import DedupeTable
from tidelog.controller.machine.tables import FIRST_LEVEL_OF_TABLES, KEY_TYPES, RECORD_TYPES, Changes, RowChange, Tables
from tidelog.controller.model import commands as c
from tidelog.controller.model import leases as le
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model import snapshots as sn
from tidelog.controller.model.errors import CommandFailed, ErrorInfo, NotController, to_wire
from tidelog.controller.model.levels import NewerLevel, UnsupportedLevel, require_known
from tidelog.controller.model.records import ClusterRecord, ObjectRecord, StreamRecord
from tidelog.controller.model.wal_notes import WalLost
from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.runtime.msgpack import DECODE_ERRORS
from tidelog.storage.commits import CommitGap

logger = logging.getLogger(__name__)

DUMP_OF_LEVEL = {0: 1, 1: 2, 2: 3, 3: 4, 4: 4, 5: 5, 6: 5, 7: 5, 8: 5}
"""Version of the state's bytes at each feature level. Builds between 0 and 1 wrote version 1 with a cluster time."""
ROWS_AT_ONCE = 2_000
"""Rows that are encoded in one call of a few milliseconds."""
SWEEP_LIMIT = 1_024
"""Objects that one command destroys beyond its own; the next command (a `Barrier` suffices) continues."""
FAILED = "a command met an unexpected exception and changed nothing"

_NIL = msgspec.Raw(b"\xc0")


class Applied(NamedTuple):
    """The outcome of one command."""

    result: bytes
    """An encoded `tidelog.controller.model.commands.Result`."""
    mutations: list[RowChange]
    ends: dict[int, StreamRecord]
    """See `tidelog.controller.machine.tables.Changes`."""


class FailedCommand(msgspec.Struct, frozen=True):
    """The last command whose application raised an unexpected exception on this member since it started."""

    times: int
    """How many there were."""
    index: int
    """Its place in the replicated log."""
    command: str
    """The name of its class."""
    error: str


def _nothing(tables: Tables, command: c.Barrier) -> None:
    """Change nothing."""


_HANDLERS: dict[type, Callable[[Tables, Any], Any]] = {
    c.BecomeActive: state_nodes.become_active,
    c.Barrier: _nothing,
    c.RegisterBroker: state_nodes.register_broker,
    c.SetBrokerAlive: state_nodes.set_broker_alive,
    c.Elect: state_nodes.elect,
    c.SetLevel: state_levels.set_level,
    c.SetControllers: state_nodes.set_controllers,
    c.AlterConfigs: state_nodes.alter_configs,
    c.AllocateProducerIds: state_nodes.allocate_producer_ids,
    c.ApplyBrokerId: state_nodes.apply_broker_id,
    c.PutKv: state_nodes.put_kv,
    c.DeleteKv: state_nodes.delete_kv,
    c.CreateTopic: state_topics.create_topic,
    c.DeleteTopic: state_topics.delete_topic,
    c.DeletePartitions: state_topics.delete_partitions,
    c.CreatePartitions: state_topics.create_partitions,
    c.AlterTopicConfigs: state_topics.alter_topic_configs,
    c.OpenStreams: state_streams.open_streams,
    c.CloseStreams: state_streams.close_streams,
    c.TrimStream: state_streams.trim_stream,
    c.QuarantineStream: state_streams.quarantine_stream,
    c.ReleaseStream: state_streams.release_stream,
    c.PrepareObjects: state_objects.prepare_objects,
    c.Commit: state_objects.commit_objects,
    c.ExpireObjects: state_objects.expire_objects,
    c.ForgetObjects: state_objects.forget_objects,
    c.Compact: state_compaction.compact_objects,
    c.MovePartitions: state_moves.move_partitions,
    c.HandOver: state_moves.hand_over,
    c.ElectPartitions: state_moves.elect_partitions,
    c.ReclaimPartitions: state_moves.reclaim_partitions,
    c.DrainBroker: state_scaling.drain_broker,
    c.BeginRestart: state_scaling.begin_restart,
    c.RemoveBroker: state_scaling.remove_broker,
    c.ElectSuccessor: takeover_commands.elect_successor,
    c.PlaceTakenOver: takeover_commands.place_taken_over,
    c.Abandon: takeover_commands.abandon,
    c.NoteWal: wal_notes.note_wal,
    c.AcceptWalLoss: wal_notes.accept_wal_loss,
    r.AlterSyncStateSet: replica_sets.alter_sync_state_set,
    r.BeginElection: replica_elections.begin_election,
    r.PromiseEpoch: replica_elections.promise_epoch,
    r.SetReplicaSetPolicy: replica_sets.set_policy,
    r.AddReplica: replica_sets.add_replica,
    r.RemoveReplica: replica_sets.remove_replica,
    r.ElectUnclean: replica_elections.elect_unclean,
    r.AssignReplica: replica_sets.assign_replica,
    r.RetireReplica: replica_sets.retire_replica,
    r.TellPriority: replica_sets.tell_priority,
    r.SetPriority: replica_sets.set_priority,
    le.TakeLease: state_leases.take_lease,
    le.RenewLease: state_leases.renew_lease,
    le.EndLease: state_leases.end_lease,
    le.ExpireLeases: state_leases.expire_leases,
    sn.CreateSnapshot: state_snapshots.create_snapshot,
    sn.DeleteSnapshot: state_snapshots.delete_snapshot,
    sn.CreateBranch: state_branches.create_branch,
}


class ControllerState:
    """All metadata of a cluster. Not thread-safe: one thread applies, dumps and loads."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.version = 0
        """Index of the last command that changed a public table."""
        self.applied_index = 0
        self.failed: FailedCommand | None = None
        """Not part of the replicated state. Replaced as a whole, so that another thread may read it."""
        self._dedupe = DedupeTable()

    @property
    def level(self) -> int:
        """Return the feature level of the cluster; 0 before its first command."""
        row = self.tables.cluster.get("")
        return row.level if row is not None else 0

    def apply(self, envelope: c.Envelope, index: int) -> Applied:
        """Apply the command at `index` of the log (strictly growing).

        Raises `NewerLevel` if it raises the cluster to a level that this process does not support.
        """
        assert index > self.applied_index, (index, self.applied_index)
        self.applied_index = index
        tables = self.tables
        tables.log_index, tables.level = index, envelope.level
        self._take_time(envelope)
        refusal = self._refusal(envelope)
        if refusal is not None:
            return Applied(self._failed(refusal), [], {})
        if not envelope.client_id:
            return self._execute(envelope.command, index)
        try:
            known = self._dedupe.lookup(envelope.client_id, envelope.sequence)
        except TidelogError as error:
            return Applied(self._failed(error), [], {})
        if known is not None:
            return Applied(known, [], {})
        applied = self._execute(envelope.command, index)
        self._dedupe.store(envelope.client_id, envelope.sequence, envelope.done, applied.result, tables.time_ms)
        return applied

    def _take_time(self, envelope: c.Envelope) -> None:
        """Move the cluster time on, by what has elapsed in the term of the proposer."""
        tables, row = self.tables, self.tables.cluster.get("")
        if envelope.elapsed_ms < 0:  # of an older process, by the rules that it was acknowledged with
            tables.now_ms = max(tables.now_ms, envelope.now_ms)
            tables.time_ms = max(tables.time_ms, envelope.now_ms)
            return
        tables.now_ms = envelope.now_ms
        if row is None:
            tables.time_ms = max(tables.time_ms, envelope.now_ms)
        elif envelope.term == row.active_term:
            tables.time_ms = max(tables.time_ms, row.active_since_ms + envelope.elapsed_ms)

    def _refusal(self, envelope: c.Envelope) -> TidelogError | None:
        """Return why a command is ignored: of a level that is not in force, or of a term that is over or to come."""
        row = self.tables.cluster.get("")
        begins = isinstance(envelope.command, c.BecomeActive)
        try:
            self._check_level(envelope, row, begins=begins)
        except UnsupportedLevel as error:
            return error
        if begins:
            return None
        if row is None or envelope.term != row.active_term:
            active = row.active_term if row is not None else 0
            return NotController(f"command of term {envelope.term}; the active controller's is {active}")
        return None

    @staticmethod
    def _check_level(envelope: c.Envelope, row: ClusterRecord | None, *, begins: bool) -> None:
        """The first command founds the cluster at its level; a build between levels 0 and 1 began terms without it."""
        c.require_level(envelope.command, envelope.level)
        if row is None or envelope.level <= row.level or (begins and envelope.format_version == 1):
            return
        raise UnsupportedLevel(
            f"command {type(envelope.command).__name__} was written at feature level {envelope.level};"
            f" the cluster is at level {row.level}"
        )

    def _failed(self, error: TidelogError) -> bytes:
        return c.encode(c.Result(self.version, _NIL, to_wire(error)))

    def _execute(self, command: c.AnyCommand, index: int) -> Applied:
        kind = type(command).__name__
        try:
            changes, raw, refusal = self._commit(command)
        except (MemoryError, RecursionError, NewerLevel):
            raise  # not deterministic, or not for this process: this member must stop, not diverge
        except Exception as error:
            logger.exception(FAILED, extra={"command": kind, "index": index})
            self._note_failure(kind, index, error)
            failed = CommandFailed(
                f"command {kind} at index {index} met an unexpected exception and changed nothing",
                hint="the log of every controller has the traceback; report it",
            )
            return Applied(self._failed(failed), [], {})
        self.tables.settle()
        mutations = changes.mutations + self._sweep(kind, index)
        assert mutations or not changes.ends
        if mutations:
            self.version = index
        return Applied(c.encode(c.Result(self.version, raw, refusal)), mutations, changes.ends)

    def _commit(self, command: c.AnyCommand) -> tuple[Changes, msgspec.Raw, ErrorInfo | None]:
        """Put a command in force, or refuse it. Whatever can raise because of it does so here."""
        tables = self.tables
        raw, refusal = _NIL, None
        try:
            raw = msgspec.Raw(msgspec.msgpack.encode(_HANDLERS[type(command)](tables, command)))
        except NewerLevel:
            tables.rollback()
            raise
        except TidelogError as error:
            tables.rollback()
            refusal = to_wire(error)
            msgspec.msgpack.encode(refusal)
            if isinstance(error, CommitGap) and error.stream_id is not None:
                state_objects.quarantine(tables, error.stream_id, error.message)
            if isinstance(error, WalLost) and isinstance(command, r.PromiseEpoch):
                replica_elections.note_older_copy(tables, command)
        changes = tables.commit()
        _require_encodable(changes)
        return changes, raw, refusal

    def _note_failure(self, kind: str, index: int, error: Exception) -> None:
        self.tables.revert()
        times = self.failed.times + 1 if self.failed is not None else 1
        self.failed = FailedCommand(times, index, kind, repr(error))

    def _sweep(self, kind: str, index: int) -> list[RowChange]:
        """Destroy committed objects that no metadata names, the oldest first (rule 6).

        A failure here is none of the command's, which stays in force: the objects remain, and the next sweep tries.
        """
        garbage = self.tables.index.garbage
        if not garbage:
            return []
        try:
            for object_id in sorted(garbage)[:SWEEP_LIMIT]:
                assert self.tables.index.live_slices[object_id] == 0, object_id
                state_objects.destroy(self.tables, object_id)
            changes = self.tables.commit()
            _require_encodable(changes)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:
            what = f"{kind} (sweep of garbage)"
            logger.exception(FAILED, extra={"command": what, "index": index})
            self._note_failure(what, index, error)
            return []
        self.tables.settle()
        return changes.mutations

    def dump(self) -> bytes:
        """Return the whole state as versioned msgpack. Equal states give equal bytes."""
        return self.freeze()()

    def freeze(self) -> Callable[[], bytes]:
        """Take a shallow copy of the state (records are immutable) and return a function that encodes it like `dump`.

        The function may run on another thread while commands are applied. It releases the GIL every few thousand rows.
        """
        tables, level = self.tables, self.level
        head = [DUMP_OF_LEVEL[level], self.version, self.applied_index, tables.now_ms]
        absent = {name for name, first in FIRST_LEVEL_OF_TABLES.items() if level < first}
        rows = [(table.name, dict(table.rows)) for table in tables.public() if table.name not in absent]
        tail: list[Any] = [sorted(tables.counters.rows.items()), self._dedupe.dump()]
        if level >= 1:
            tail.append(tables.time_ms)
        return lambda: _encode_dump(head, rows, tail)

    def load(self, data: bytes) -> None:
        """Replace the state by the output of `dump`. Raises `CorruptData` and then leaves the state unchanged.

        Raises `NewerLevel`, which is one, for a state of a level that this process does not support.
        """
        try:
            _require_known_dump(msgspec.msgpack.decode(data, type=_DumpVersion).format_version)
            body = msgspec.msgpack.decode(data, type=_Dump)
            loaded = _load_tables(body)
        except DECODE_ERRORS as error:
            raise CorruptData(f"the snapshot does not decode: {error}") from error
        self.tables = loaded
        self.version = body.version
        self.applied_index = body.applied_index
        self._dedupe.load(body.dedupe)


def _require_encodable(changes: Changes) -> None:
    """Raises what the encoder raises: such a row would be in no delta, image or snapshot, on no member."""
    msgspec.msgpack.encode(changes.mutations)


def _encode_dump(head: list[int], tables: list[tuple[str, dict[Any, Any]]], tail: list[Any]) -> bytes:
    """Encode one msgpack array in pieces: one call for 400,000 rows would block the process while it runs."""
    encode = msgspec.msgpack.encode
    parts = [_array(len(head) + 1 + len(tail)), *map(encode, head), _array(len(tables))]
    for name, rows in tables:
        keys = sorted(rows)
        parts += [_array(2), encode(name), _array(len(keys))]
        for start in range(0, len(keys), ROWS_AT_ONCE):
            piece = [(key, rows[key]) for key in keys[start : start + ROWS_AT_ONCE]]
            encoded = encode(piece)
            parts.append(encoded[len(_array(len(piece))) :])
    return b"".join([*parts, *map(encode, tail)])


def _array(length: int) -> bytes:
    """Return the header of a msgpack array."""
    if length < 16:
        return bytes([0x90 | length])
    return b"\xdc" + length.to_bytes(2, "big") if length < 1 << 16 else b"\xdd" + length.to_bytes(4, "big")


class _DumpVersion(msgspec.Struct, array_like=True):
    """What every version of the state's bytes begins with."""

    format_version: int


class _Dump(msgspec.Struct, array_like=True):
    format_version: int
    version: int
    applied_index: int
    now_ms: int
    tables: list[tuple[str, list[tuple[msgspec.Raw, msgspec.Raw]]]]
    counters: list[tuple[str, int]]
    dedupe: list[tuple[str, int, int, list[tuple[int, bytes]]]]
    time_ms: int = 0


_key_decoders = {name: msgspec.msgpack.Decoder(kind) for name, kind in KEY_TYPES.items()}
_record_decoders = {name: msgspec.msgpack.Decoder(kind) for name, kind in RECORD_TYPES.items()}


def decode_mutation(table: str, key: msgspec.Raw, record: msgspec.Raw) -> RowChange:
    """Decode a mutation. Raises `CorruptData` for an unknown table, `msgspec.DecodeError`."""
    if table not in _key_decoders:
        raise CorruptData(f"there is no table {table!r}", hint="the peer is newer than this process")
    value = None if record == _NIL else _record_decoders[table].decode(record)
    if type(value) is ObjectRecord:
        value.release()
    return RowChange(table, _key_decoders[table].decode(key), value)


def _load_tables(body: _Dump) -> Tables:
    tables = Tables()
    tables.now_ms = body.now_ms
    tables.time_ms = body.time_ms or body.now_ms  # at level 0 there is one time
    for name, rows in body.tables:
        for raw_key, raw_record in rows:
            mutation = decode_mutation(name, raw_key, raw_record)
            getattr(tables, name).put(mutation.key, mutation.record)
    for counter, value in body.counters:
        tables.counters.put(counter, value)
    _complete_cluster(tables, body)
    tables.commit()
    tables.settle()  # a command that fails right after this takes back nothing but itself
    return tables


def _complete_cluster(tables: Tables, body: _Dump) -> None:
    """Check the level of a loaded state; a build between levels 0 and 1 did not write it."""
    row = tables.cluster.get("")
    if row is None:
        return
    require_known(row.level, "the snapshot")
    if body.format_version == 1 and body.time_ms:
        tables.cluster.put("", msgspec.structs.replace(row, level=max(row.level, 1)))


def _require_known_dump(version: int) -> None:
    if version not in DUMP_OF_LEVEL.values():
        raise NewerLevel(
            f"the snapshot has version {version}; this process reads {', '.join(map(str, DUMP_OF_LEVEL.values()))}",
            hint="start the version that wrote it, or a newer one",
        )
