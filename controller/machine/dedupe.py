"""Results of applied commands by dedupe id, so that a repeated command takes effect once.

A client numbers its commands from 1. Each command carries `done`, the number below which the client has all results.
Invariants: a result is kept until the client has it, or until it is evicted because of the bounds of the table or the
client's inactivity; a number below the kept ones is refused (`StaleCommand`) and never applied again. Eviction depends
only on the times and the order of commands, so all members evict the same results at the same command.

Entry: `DedupeTable`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from tidelog.controller.model.errors import StaleCommand
from tidelog.runtime.errors import InvalidInput

MAX_CLIENTS = 4_096
MAX_RESULTS_PER_CLIENT = 128
"""A client has at most half as many commands in flight."""
MAX_RESULT_BYTES = 16_384
"""Larger results (an open of hundreds of streams) are not kept: those commands are idempotent in themselves."""
CLIENT_TTL_MS = 3_600_000
MAX_CLIENT_ID_CHARS = 64


class _Client:
    __slots__ = ("floor", "last_ms", "results")

    def __init__(self, floor: int, last_ms: int, results: dict[int, bytes]) -> None:
        self.floor = floor
        self.last_ms = last_ms
        self.results = results


class DedupeTable:
    """Bounded table of results. The least recently used client is evicted first."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, _Client] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def lookup(self, client_id: str, sequence: int) -> bytes | None:
        """Return the stored result, if any. Raises `StaleCommand`, and `InvalidInput` for an invalid id."""
        if len(client_id) > MAX_CLIENT_ID_CHARS or sequence < 1:
            raise InvalidInput(f"invalid dedupe id {client_id[:MAX_CLIENT_ID_CHARS]!r}/{sequence}")
        client = self._clients.get(client_id)
        if client is None:
            return None
        if sequence < client.floor:
            raise StaleCommand(f"command {sequence} of client {client_id} is older than the results that are kept")
        return client.results.get(sequence)

    def store(self, client_id: str, sequence: int, done: int, result: bytes, time_ms: int) -> None:
        """Store a result, at a cluster time in milliseconds. Evict results that the client has, that exceed the bounds,
        or that are too old."""
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = _Client(0, time_ms, {})
        self._clients.move_to_end(client_id)
        client.last_ms = time_ms
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
            len(self._clients) > MAX_CLIENTS or next(iter(self._clients.values())).last_ms + CLIENT_TTL_MS < time_ms
        ):
            self._clients.popitem(last=False)

    def dump(self) -> list[Any]:
        """Return plain values for a snapshot, least recently used client first."""
        return [[name, c.floor, c.last_ms, sorted(c.results.items())] for name, c in self._clients.items()]

    def load(self, rows: list[Any]) -> None:
        """Replace the content by the output of `dump`."""
        self._clients = OrderedDict(
            (name, _Client(floor, last_ms, dict(results))) for name, floor, last_ms, results in rows
        )
