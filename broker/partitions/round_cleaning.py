"""Where the decisions of one round of log compaction are made: in a thread of the broker, or in a process of its own.

Decoding takes some 4 µs of CPU time a record, for which a thread keeps the interpreter from the event loop. So a round
over `WORTH_A_PROCESS_BYTES` has a process (`tidelog.broker.partitions.cleaning_worker`). It lasts as long as the round,
and holds nothing that is not made anew by the next one.

Failures and their handling:
- the process ends, or does not answer for `ANSWER_S`: it is killed, the round ends with `WorkerLost`, and is repeated;
- it cannot be started: the same;
- the round is cancelled: `close` kills it, which ends the thread that waits for its answer, too;
- the broker dies: the kernel kills it.

Entry: `RoundCleaning`, `LocalCleaning`, `WorkerCleaning`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from tidelog.batch.batch import CorruptRecord
from tidelog.broker.partitions.cleaning_frames import receive, send
from tidelog.runtime.errors import Unavailable
from tidelog.runtime.types import Buffer, Offload
from tidelog.storage.records import StreamEntry
from tidelog.stream.cleaning.aborted import AbortedTxns
from tidelog.stream.cleaning.cleaner import Cleaning, Mark
from tidelog.stream.cleaning.messages import (
    Begin,
    CleanRecords,
    Note,
    Noted,
    RecordsCleaned,
    Refused,
    Reply,
    Request,
    Seal,
    Sealed,
    described,
)
from tidelog.stream.cleaning.offset_set import CHUNK_BYTES, OffsetSet, Remains

WORTH_A_PROCESS_BYTES = 4 << 20
"""A smaller log takes less CPU time in a thread than the start of a process does (0.1 s)."""
ANSWER_S = 120.0
"""Time for one answer. A request of `PIECE_BYTES` takes half a second of CPU time at most, at the lowest priority."""
PIECE_BYTES = 4 << 20
"""Records go to the process in pieces of about this size, so that it needs little memory."""
_R = TypeVar("_R", Noted, Sealed, RecordsCleaned)
_COMMAND = (sys.executable, "-P", "-m", "tidelog.broker.partitions.cleaning_worker")


class WorkerLost(Unavailable):
    """The process of a round has ended, or hangs. The round is repeated."""


class RoundCleaning(Protocol):
    """The decisions of one round; see `tidelog.stream.cleaning.cleaner.Cleaning`."""

    @property
    def noted(self) -> int:
        """Return the offset up to which the map is filled."""
        ...

    @property
    def keys(self) -> int:
        """Return the number of keys in the map."""
        ...

    @property
    def capacity(self) -> int:
        """Return how many keys fit into the map."""
        ...

    async def note(self, records: Sequence[StreamEntry], aborted: AbortedTxns) -> bool:
        """See `Cleaning.note`. Raises `CorruptRecord`, `WorkerLost`."""
        ...

    async def seal(self) -> int:
        """See `Cleaning.seal`. Raises `WorkerLost`."""
        ...

    def is_gone(self, start: int, end: int) -> bool:
        """See `Remains.is_gone`."""
        ...

    def mark(self) -> Mark:
        """See `Cleaning.mark`."""
        ...

    def rewind(self, mark: Mark) -> None:
        """See `Cleaning.rewind`."""
        ...

    async def clean(self, records: Sequence[StreamEntry], aborted: AbortedTxns) -> list[StreamEntry]:
        """See `Cleaning.clean`. Raises `CorruptRecord`, `WorkerLost`."""
        ...

    async def close(self) -> None:
        """End it, whatever it does."""
        ...


class LocalCleaning:
    """Decides in this process, by `offload` beside the event loop."""

    def __init__(self, begin: Begin, offload: Offload) -> None:
        self._offload = offload
        self._cleaning = Cleaning(
            begin.first_dirty,
            begin.end,
            map_bytes=begin.map_bytes,
            now_ms=begin.now_ms,
            delete_retention_ms=begin.delete_retention_ms,
        )

    @property
    def noted(self) -> int:
        """See `RoundCleaning`."""
        return self._cleaning.noted

    @property
    def keys(self) -> int:
        """See `RoundCleaning`."""
        return self._cleaning.keys

    @property
    def capacity(self) -> int:
        """See `RoundCleaning`."""
        return self._cleaning.capacity

    async def note(self, records: Sequence[StreamEntry], aborted: AbortedTxns) -> bool:
        """See `RoundCleaning`."""
        return bool(await self._offload(partial(self._cleaning.note, records, aborted)))

    async def seal(self) -> int:
        """See `RoundCleaning`."""
        return int(await self._offload(self._cleaning.seal))

    def is_gone(self, start: int, end: int) -> bool:
        """See `RoundCleaning`."""
        return self._cleaning.remains().is_gone(start, end)

    def mark(self) -> Mark:
        """See `RoundCleaning`."""
        return self._cleaning.mark()

    def rewind(self, mark: Mark) -> None:
        """See `RoundCleaning`."""
        self._cleaning.rewind(mark)

    async def clean(self, records: Sequence[StreamEntry], aborted: AbortedTxns) -> list[StreamEntry]:
        """See `RoundCleaning`."""
        changed: list[StreamEntry] = await self._offload(partial(self._cleaning.clean, records, aborted))
        return changed

    async def close(self) -> None:
        """See `RoundCleaning`."""


class WorkerCleaning:
    """Decides in a process of its own, which `begin` starts."""

    def __init__(self, answer_s: float = ANSWER_S, command: Sequence[str] = _COMMAND) -> None:
        self._answer_s = answer_s
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._exchanging: asyncio.Future[tuple[bytes, memoryview]] | None = None
        self._first_dirty = 0
        self._state = Noted(0, 0, 0, True, Mark(-1, frozenset(), True))
        self._remains: Remains | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Reply).decode

    async def begin(self, begin: Begin) -> None:
        """Start the process and the round. Raises `WorkerLost`."""
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                ours.close()
                raise WorkerLost(f"no process for log compaction can be started: {error}") from error
        ours.settimeout(ANSWER_S)  # it has to start
        self._first_dirty = begin.first_dirty
        self._state, _ = await self._ask(begin, (), Noted)
        ours.settimeout(self._answer_s)

    @property
    def pid(self) -> int:
        """Return the process's id. It has begun."""
        assert self._process is not None
        return self._process.pid

    @property
    def noted(self) -> int:
        """See `RoundCleaning`."""
        return self._state.noted

    @property
    def keys(self) -> int:
        """See `RoundCleaning`."""
        return self._state.keys

    @property
    def capacity(self) -> int:
        """See `RoundCleaning`."""
        return self._state.capacity

    async def note(self, records: Sequence[StreamEntry], aborted: AbortedTxns) -> bool:
        """See `RoundCleaning`."""
        request = Note(described(records), list(aborted.entries))
        self._state, _ = await self._ask(request, [one.payload for one in records], Noted)
        return self._state.goes_on

    async def seal(self) -> int:
        """See `RoundCleaning`."""
        sealed, body = await self._ask(Seal(), (), Sealed)
        chunks = {number: bytes(body[at * CHUNK_BYTES :][:CHUNK_BYTES]) for at, number in enumerate(sealed.chunks)}
        self._remains = Remains(self._first_dirty, sealed.end, OffsetSet(chunks))
        return sealed.end

    def is_gone(self, start: int, end: int) -> bool:
        """See `RoundCleaning`."""
        assert self._remains is not None, "the map is not sealed"
        return self._remains.is_gone(start, end)

    def mark(self) -> Mark:
        """See `RoundCleaning`."""
        return self._state.mark

    def rewind(self, mark: Mark) -> None:
        """See `RoundCleaning`."""
        self._state.mark = mark

    async def clean(self, records: Sequence[StreamEntry], aborted: AbortedTxns) -> list[StreamEntry]:
        """See `RoundCleaning`."""
        changed: list[StreamEntry] = []
        piece: list[StreamEntry] = []
        size = 0
        for one in records:
            piece.append(one)
            size += len(one.payload)
            if size >= PIECE_BYTES:
                changed += await self._clean(piece, aborted)
                piece, size = [], 0
        if piece:
            changed += await self._clean(piece, aborted)
        return changed

    async def _clean(self, records: list[StreamEntry], aborted: AbortedTxns) -> list[StreamEntry]:
        request = CleanRecords(described(records), list(aborted.entries), self._state.mark)
        cleaned, body = await self._ask(request, [one.payload for one in records], RecordsCleaned)
        self._state.mark = cleaned.mark
        found = list(records)
        at = 0
        for number, length in cleaned.changed:
            found[number] = StreamEntry(*records[number][:2], bytes(body[at : at + length]))
            at += length
        return found

    async def _ask(self, request: Request, body: Sequence[Buffer], wanted: type[_R]) -> tuple[_R, memoryview]:
        work = partial(self._exchange, self._encode(request), body)
        self._exchanging = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            answer, payloads = await asyncio.shield(self._exchanging)
        except (OSError, EOFError) as error:
            await self.close()
            code = self._process.returncode if self._process is not None else None
            raise WorkerLost(f"the process of log compaction is lost (exit code {code}): {error!r}") from error
        reply: Any = self._decode(answer)
        if isinstance(reply, Refused):
            raise CorruptRecord(reply.message)
        assert isinstance(reply, wanted), reply
        return reply, payloads

    def _exchange(self, head: bytes, body: Sequence[Buffer]) -> tuple[bytes, memoryview]:
        assert self._socket is not None, "the round has begun"
        send(self._socket, head, body)
        return receive(self._socket)

    async def close(self) -> None:
        """See `RoundCleaning`."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._exchanging is not None:  # it ends with the process; its error is told, or nobody waits for it any more
            await asyncio.wait([self._exchanging])
            self._exchanging.exception()
        if self._socket is not None:
            self._socket.close()
