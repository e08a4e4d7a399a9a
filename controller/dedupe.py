"""Answers already given, by dedupe id, so that a command asked twice takes effect once.

A client numbers its commands from 1 and tells with each one below which number it has all answers (`done`). Invariants:
an answer is kept until the client has it, or until the table's bounds or the client's silence push it out; a number
below what is kept is refused (`StaleCommand`), never applied again. Everything is decided by the command's own time
and order, so that all members forget the same things at the same command.

Entry: `DedupeTable`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from controller.errors import StaleCommand
from runtime.errors import InvalidInput

MAX_CLIENTS = 4_096
MAX_RESULTS_PER_CLIENT = 128
"""A client keeps at most half as many commands in flight."""
MAX_RESULT_BYTES = 16_384
"""Larger answers (an open of hundreds of streams) are not kept: those commands are idempotent by themselves."""
CLIENT_TTL_MS = 3_600_000
MAX_CLIENT_ID_CHARS = 64


class _Client:
    __slots__ = ("floor", "last_ms", "results")

    def __init__(self, floor: int, last_ms: int, results: dict[int, bytes]) -> None:
        self.floor = floor
        self.last_ms = last_ms
        self.results = results


class DedupeTable:
    """Bounded memory of answers, least recently used client first."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, _Client] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def lookup(self, client_id: str, sequence: int) -> bytes | None:
        """The answer given before, if any. Raises `StaleCommand`, and `InvalidInput` for an impossible id."""
        if len(client_id) > MAX_CLIENT_ID_CHARS or sequence < 1:
            raise InvalidInput(f"impossible dedupe id {client_id[:MAX_CLIENT_ID_CHARS]!r}/{sequence}")
        client = self._clients.get(client_id)
        if client is None:
            return None
        if sequence < client.floor:
            raise StaleCommand(f"command {sequence} of client {client_id} was answered long ago")
        return client.results.get(sequence)

    def store(self, client_id: str, sequence: int, done: int, result: bytes, now_ms: int) -> None:
        """Remember an answer, and forget what the client, the bounds or time allow."""
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = _Client(0, now_ms, {})
        self._clients.move_to_end(client_id)
        client.last_ms = now_ms
        if len(result) <= MAX_RESULT_BYTES:
            client.results[sequence] = result
        floor = min(max(client.floor, done), sequence)
        while len(client.results) > MAX_RESULTS_PER_CLIENT:
            oldest = min(client.results)
            del client.results[oldest]
            floor = max(floor, oldest + 1)
        if floor > client.floor:
            client.floor = floor
            for old in [number for number in client.results if number < floor]:
                del client.results[old]
        while self._clients and (
            len(self._clients) > MAX_CLIENTS or next(iter(self._clients.values())).last_ms + CLIENT_TTL_MS < now_ms
        ):
            self._clients.popitem(last=False)

    def dump(self) -> list[Any]:
        """Plain values for a snapshot, least recently used first."""
        return [[name, c.floor, c.last_ms, sorted(c.results.items())] for name, c in self._clients.items()]

    def load(self, rows: list[Any]) -> None:
        """Replace the content by what `dump` gave."""
        self._clients = OrderedDict(
            (name, _Client(floor, last_ms, dict(results))) for name, floor, last_ms, results in rows
        )
