"""`ControllerState`: the deterministic state machine under the replicated log.

`apply(envelope, index)` is the only way to change it. It reads no clock, no randomness and nothing outside: the same
commands at the same indexes give the same bytes (`dump`) on every member. It never raises for what a command asks: a
refusal is a `Result` with an error and no effect (but one: a commit with a gap quarantines its stream). A defect in a
handler is a refusal too (`CommandFailed`), for a member that stops would stop all of them at the same command.

Rules of DESIGN.md kept here and asserted: 4 (one owner, epochs never down), 5 (committed ranges contiguous), 6 (objects
destroyed only when nothing names them), 7 (compaction conserves), and idempotence by dedupe ids (`controller.dedupe`).

The handlers are by family: `controller.state_nodes`, `state_topics`, `state_streams`, `state_objects`,
`state_compaction`, `state_moves`, `state_scaling`, `state_salvage`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from controller import commands as c
from controller import (
    state_compaction,
    state_moves,
    state_nodes,
    state_objects,
    state_salvage,
    state_scaling,
    state_streams,
    state_topics,
)
from controller.dedupe import DedupeTable
from controller.errors import CommandFailed, NotController, to_wire
from controller.model import ObjectRecord, StreamRecord
from controller.tables import KEY_TYPES, RECORD_TYPES, Changes, Mutation, Tables
from runtime.errors import CorruptData, TidelogError
from runtime.msgpack import DECODE_ERRORS
from storage.managers import CommitGap

log = logging.getLogger(__name__)

DUMP_VERSION = 1
ROWS_AT_ONCE = 2_000
"""Encoded in one call of a few milliseconds."""
SWEEP_LIMIT = 1_024
"""Objects destroyed by one command, beyond what it asks for; the rest waits for the next one (a `Barrier` will do)."""

_NIL = msgspec.Raw(b"\xc0")


class Applied(NamedTuple):
    """What one command came to."""

    result: bytes
    """An encoded `controller.commands.Result`."""
    mutations: list[Mutation]
    ends: dict[int, StreamRecord]
    """See `controller.tables.Changes`."""


def _nothing(tables: Tables, command: c.Barrier) -> None:
    """A barrier changes nothing."""


_HANDLERS: dict[type, Callable[[Tables, Any], Any]] = {
    c.BecomeActive: state_nodes.become_active,
    c.Barrier: _nothing,
    c.RegisterBroker: state_nodes.register_broker,
    c.SetBrokerAlive: state_nodes.set_broker_alive,
    c.Elect: state_nodes.elect,
    c.SetControllers: state_nodes.set_controllers,
    c.AlterConfigs: state_nodes.alter_configs,
    c.AllocateProducerIds: state_nodes.allocate_producer_ids,
    c.ApplyBrokerId: state_nodes.apply_broker_id,
    c.PutKv: state_nodes.put_kv,
    c.DeleteKv: state_nodes.delete_kv,
    c.CreateTopic: state_topics.create_topic,
    c.DeleteTopic: state_topics.delete_topic,
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
    c.RemoveBroker: state_scaling.remove_broker,
    c.Salvage: state_salvage.salvage,
    c.PlaceSalvaged: state_salvage.place_salvaged,
    c.Abandon: state_salvage.abandon,
}


class ControllerState:
    """All metadata of a cluster. Not thread-safe: one thread applies, dumps and loads."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.version = 0
        """Index of the last command that changed a public table."""
        self.applied_index = 0
        self._dedupe = DedupeTable()

    def apply(self, envelope: c.Envelope, index: int) -> Applied:
        """Apply the command at `index` of the log (strictly growing)."""
        assert index > self.applied_index, (index, self.applied_index)
        self.applied_index = index
        tables = self.tables
        tables.now_ms = max(tables.now_ms, envelope.now_ms)
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
        self._dedupe.store(envelope.client_id, envelope.sequence, envelope.done, applied.result, tables.now_ms)
        return applied

    def _refusal(self, envelope: c.Envelope) -> TidelogError | None:
        """Why a command does not count at all: it comes from a controller whose term is over, or has not begun."""
        if isinstance(envelope.command, c.BecomeActive):
            return None
        row = self.tables.cluster.get("")
        if row is None or envelope.term != row.active_term:
            active = row.active_term if row is not None else 0
            return NotController(f"command of term {envelope.term}; the active controller's is {active}")
        return None

    def _failed(self, error: TidelogError) -> bytes:
        return c.encode(c.Result(self.version, _NIL, to_wire(error)))

    def _execute(self, command: c.AnyCommand, index: int) -> Applied:
        tables = self.tables
        try:
            value = _HANDLERS[type(command)](tables, command)
        except TidelogError as error:
            tables.rollback()
            if isinstance(error, CommitGap) and error.stream_id is not None:
                state_objects.quarantine(tables, error.stream_id, error.message)
            return self._finish(index, None, error)
        except (MemoryError, RecursionError):
            raise  # not deterministic: this member must stop, not diverge
        except Exception as error:
            tables.rollback()
            log.exception("a command failed by a defect", extra={"command": type(command).__name__, "index": index})
            return self._finish(index, None, CommandFailed(f"{type(command).__name__}: {error!r}"))
        return self._finish(index, value, None)

    def _finish(self, index: int, value: Any, error: TidelogError | None) -> Applied:
        mutations, ends = self.tables.commit()
        if self.tables.index.garbage:
            mutations += self._sweep().mutations
        assert mutations or not ends
        if mutations:
            self.version = index
        if error is not None:
            return Applied(self._failed(error), mutations, ends)
        raw = msgspec.Raw(msgspec.msgpack.encode(value))
        return Applied(c.encode(c.Result(self.version, raw, None)), mutations, ends)

    def _sweep(self) -> Changes:
        """Destroy committed objects that nothing names any more, the oldest first (rule 6)."""
        garbage = self.tables.index.garbage
        for object_id in sorted(garbage)[:SWEEP_LIMIT]:
            assert self.tables.index.live_slices[object_id] == 0, object_id
            state_objects.destroy(self.tables, object_id)
        return self.tables.commit()

    def dump(self) -> bytes:
        """The whole state as versioned msgpack; equal states give equal bytes."""
        return self.freeze()()

    def freeze(self) -> Callable[[], bytes]:
        """Hold the state as it is now: shallow copies, for records never change. The function makes `dump`'s bytes.

        It may run on another thread while commands are applied, and lets go of the interpreter every few thousand rows.
        """
        tables = self.tables
        head = [DUMP_VERSION, self.version, self.applied_index, tables.now_ms]
        rows = [(table.name, dict(table.rows)) for table in tables.public()]
        tail = [sorted(tables.counters.rows.items()), self._dedupe.dump()]
        return lambda: _encode_dump(head, rows, tail)

    def load(self, data: bytes) -> None:
        """Replace everything by what `dump` gave. Raises `CorruptData`, leaving the state as it was."""
        try:
            body = msgspec.msgpack.decode(data, type=_Dump)
            if body.format_version != DUMP_VERSION:
                raise CorruptData(f"the snapshot has version {body.format_version}; this process reads {DUMP_VERSION}")
            loaded = _load_tables(body)
        except DECODE_ERRORS as error:
            raise CorruptData(f"the snapshot does not decode: {error}") from error
        self.tables = loaded
        self.version = body.version
        self.applied_index = body.applied_index
        self._dedupe.load(body.dedupe)


def _encode_dump(head: list[int], tables: list[tuple[str, dict[Any, Any]]], tail: list[Any]) -> bytes:
    """One msgpack array, made in pieces: encoding 400,000 rows in one call would stop the process for that long."""
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
    """The head of a msgpack array."""
    if length < 16:
        return bytes([0x90 | length])
    return b"\xdc" + length.to_bytes(2, "big") if length < 1 << 16 else b"\xdd" + length.to_bytes(4, "big")


class _Dump(msgspec.Struct, array_like=True):
    format_version: int
    version: int
    applied_index: int
    now_ms: int
    tables: list[tuple[str, list[tuple[msgspec.Raw, msgspec.Raw]]]]
    counters: list[tuple[str, int]]
    dedupe: list[tuple[str, int, int, list[tuple[int, bytes]]]]


_key_decoders = {name: msgspec.msgpack.Decoder(kind) for name, kind in KEY_TYPES.items()}
_record_decoders = {name: msgspec.msgpack.Decoder(kind) for name, kind in RECORD_TYPES.items()}


def decode_mutation(table: str, key: msgspec.Raw, record: msgspec.Raw) -> Mutation:
    """A mutation from its encoded parts. Raises `CorruptData` for an unknown table, `msgspec.DecodeError`."""
    if table not in _key_decoders:
        raise CorruptData(f"there is no table {table!r}", hint="the peer is newer than this process")
    value = None if record == _NIL else _record_decoders[table].decode(record)
    if type(value) is ObjectRecord:
        value.release()
    return Mutation(table, _key_decoders[table].decode(key), value)


def _load_tables(body: _Dump) -> Tables:
    tables = Tables()
    tables.now_ms = body.now_ms
    for name, rows in body.tables:
        for raw_key, raw_record in rows:
            mutation = decode_mutation(name, raw_key, raw_record)
            getattr(tables, name).put(mutation.key, mutation.record)
    for counter, value in body.counters:
        tables.counters.put(counter, value)
    tables.commit()
    return tables
