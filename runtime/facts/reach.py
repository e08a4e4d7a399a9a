"""Trying addresses of other nodes from this process: whether anything answers there, and whether it is the right one.

A try is a connection that asks one harmless question: a Kafka listener which APIs it serves, an admin HTTP who it is
and what time it has. Outcomes:

    ok            it answered as it should
    refused       nothing listens there
    timeout       no connection within `TRY_S`: a firewall, a dead host, or a wrong address
    unresolved    the host name has no address
    unreachable   another error of the network; `detail` has it
    silent        the connection was accepted, and the question not answered within `TRY_S`
    wrong         something else answered, or another node than expected

Entry: `Tries.run`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, cast

import msgspec

from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import Unavailable
from tidelog.runtime.network import ConnectionRefused, Network

TRY_S: Final = 3.0
MAX_AT_ONCE: Final = 64
MAX_ANSWER_BYTES: Final = 64 << 10

AddressKind = Literal["kafka", "admin", "peer", "controller", "collector"]
Outcome = Literal["ok", "refused", "timeout", "unresolved", "unreachable", "silent", "wrong"]


class NodeAddress(msgspec.Struct, frozen=True):
    """An address that a node has registered, or that the quorum knows it by; or of a collector of traces."""

    kind: AddressKind
    node: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ClockSample(msgspec.Struct, frozen=True):
    """What another clock said between two readings of one's own: milliseconds since the Unix epoch."""

    before_ms: int
    told_ms: int
    after_ms: int


class AddressTry(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one try; see the module."""

    kind: AddressKind
    node: int
    address: str
    outcome: Outcome
    took_ms: float = 0.0
    detail: str = ""
    clock: ClockSample | None = None
    """Of the node that answered."""


class Tries:
    """Tries addresses, at most `MAX_AT_ONCE` at a time."""

    def __init__(self, network: Network, clock: Clock, *, between_brokers: Network | None = None) -> None:
        """`between_brokers`: the network for peer addresses, if it is another one (TLS)."""
        self._network = network
        self._peers = between_brokers or network
        self._clock = clock
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def run(self, addresses: Iterable[NodeAddress]) -> list[AddressTry]:
        """Try all addresses; the outcomes are in their order. Controllers and collectors are only connected to."""
        return list(await asyncio.gather(*(self._try(each) for each in addresses)))

    async def _try(self, address: NodeAddress) -> AddressTry:
        async with self._slots:
            started = self._clock.monotonic()
            outcome, detail, clock = await self._ask(address)
            took_ms = (self._clock.monotonic() - started) * 1000
        return AddressTry(
            kind=address.kind,
            node=address.node,
            address=str(address),
            outcome=outcome,
            took_ms=round(took_ms, 3),
            detail=detail,
            clock=clock,
        )

    async def _ask(self, address: NodeAddress) -> tuple[Outcome, str, ClockSample | None]:
        network = self._peers if address.kind == "peer" else self._network
        try:
            transport, protocol = await network.connect(_AddressQuestion, address.host, address.port, timeout_s=TRY_S)
        except Unavailable as error:
            return outcome_of(error), error.message, None
        assert isinstance(protocol, _AddressQuestion)
        try:
            if address.kind == "kafka":
                return await self._ask_kafka(protocol)
            if address.kind == "admin":
                return await self._ask_admin(protocol, address)
            return "ok", "", None
        except TimeoutError:
            return "silent", f"no answer within {TRY_S:g} s", None
        finally:
            transport.close()

    async def _ask_kafka(self, connection: _AddressQuestion) -> tuple[Outcome, str, ClockSample | None]:
        connection.send(_API_VERSIONS)
        answer = await connection.answer(lambda data: len(data) >= 8)
        if answer[4:8] != _CORRELATION_ID or not 0 < int.from_bytes(answer[:4], "big") < 1 << 20:
            return "wrong", f"what answers is no Kafka broker: {_shown(answer)}", None
        return "ok", "", None

    async def _ask_admin(
        self, connection: _AddressQuestion, address: NodeAddress
    ) -> tuple[Outcome, str, ClockSample | None]:
        before_ms = self._clock.time_ms()
        connection.send(f"GET /clock HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        answer = await connection.answer(lambda _data: False)
        after_ms = self._clock.time_ms()
        told = clock_answer(answer)
        if told is None:
            return "wrong", f"what answers is no admin HTTP of Tidelog: {_shown(answer)}", None
        if told["node"] != address.node:
            return "wrong", f"node {told['node']} answers there", None
        return "ok", "", ClockSample(before_ms, told["time_ms"], after_ms)


def outcome_of(error: Unavailable) -> Outcome:
    """Return the outcome that an error of `Network.connect` stands for."""
    if isinstance(error, ConnectionRefused):
        return "refused"
    if isinstance(error.__cause__, TimeoutError):
        return "timeout"
    return "unresolved" if isinstance(error.__cause__, socket.gaierror) else "unreachable"


def clock_answer(answer: bytes) -> dict[str, Any] | None:
    """Return the document of an answer to `GET /clock`, with numbers in `node` and `time_ms`; None: it is none."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1."):
        return None
    try:
        told = json.loads(body)
    except ValueError:
        return None
    if not isinstance(told, dict) or not all(type(told.get(name)) is int for name in ("node", "time_ms")):
        return None
    return told


def _shown(answer: bytes) -> str:
    return repr(answer[:40]) if answer else "it closes the connection"


_CORRELATION_ID: Final = b"tide"
_BODY: Final = struct.pack(">hh", 18, 0) + _CORRELATION_ID + struct.pack(">h", 6) + b"doctor"
_API_VERSIONS: Final = struct.pack(">i", len(_BODY)) + _BODY
"""ApiVersions v0, which every broker answers, whatever it knows."""


class _AddressQuestion(asyncio.Protocol):
    """One connection: sends bytes, and collects those that come back."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._changed = asyncio.Event()
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._data += data[: MAX_ANSWER_BYTES - len(self._data)]
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._ended = True
        self._changed.set()

    def send(self, data: bytes) -> None:
        """Send the question."""
        assert self._transport is not None, "the connection is made"
        self._transport.write(data)

    async def answer(self, is_whole: Callable[[bytes], bool]) -> bytes:
        """Return what has come when it is whole, or at the end. Raises `TimeoutError` after `TRY_S`."""
        async with asyncio.timeout(TRY_S):
            while not self._ended and len(self._data) < MAX_ANSWER_BYTES and not is_whole(bytes(self._data)):
                self._changed.clear()
                await self._changed.wait()
        return bytes(self._data)
