"""The `Network` interface of simulated hosts: byte streams in memory that can be delayed, slowed, cut and reset.

A connection keeps the order of its bytes, as TCP does; there is no order between connections. So loss, duplication and
reordering appear as they do to applications: connections that stall, are reset, are late, or overtake each other.

- A *cut* (one way or both) holds back the bytes sent over it until it heals; a connection held for `GIVE_UP_S` is reset
  at both ends. A connect over a cut times out.
- A process that *crashes* resets its connections immediately, as the surviving kernel does; if its host is down, peers
  receive nothing until they time out or the host is back.
- Bytes are delivered in the receiver's life (`tidelog.simulation.world.loop`): a paused life receives them when it
  resumes.
- An `asyncio.BufferedProtocol` gets as much at a time as its buffer takes, and nothing more once it has paused reading
  or the connection has another protocol; `pieces` has reads end at any byte besides.

Entry: `SimNetwork.host`, the network of one host; `SimNetwork.cut`, `heal`, `slow`, `reset_some`, `crash`.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Collection
from typing import Any

from tidelog.runtime.network import AddressInUse, Listener, ProtocolFactory, cannot_connect
from tidelog.runtime.types import Buffer
from tidelog.simulation.world.loop import VirtualLoop
from tidelog.simulation.world.odd import OddErrors

MIN_LATENCY_S = 0.0002
MAX_LATENCY_S = 0.001
GIVE_UP_S = 12.0
"""How long a connection may be cut before both ends reset it (like TCP_USER_TIMEOUT)."""
HIGH_WATER_BYTES = 64 << 10
"""The default of asyncio."""
KERNEL_BYTES = 16 << 10
"""What the kernel takes of a connection whose transport is to keep nothing (`set_write_buffer_limits(high=0)`)."""
WHOLE_READS = 2 / 3
"""The share of reads that do not end at some byte, where `SimNetwork.pieces` divides them."""
FIRST_FREE_PORT = 40_000
_LOCALHOST_S = 0.00002

Address = tuple[str, int]


class SimTransport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: SimNetwork, local: Address, remote: Address, context: contextvars.Context) -> None:
        super().__init__({"peername": remote, "sockname": local})
        self._network = network
        self._loop = network.loop
        self._context = context
        self.host = local[0]
        self._protocol: Any = None
        self._buffered = False
        self.peer: SimTransport
        self._out: list[bytes] = []
        """Bytes written here and not yet delivered."""
        self._out_bytes = 0
        self._scheduled = False
        self._high = HIGH_WATER_BYTES
        self._paused_writing = False
        self._reading = True
        self._closing = False
        self._eof = False
        """Closed for writing: nothing follows the bytes in `_out`."""
        self.lost = False
        """`connection_lost` was called, or is about to be."""

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        """Set the protocol of this end, before any bytes are delivered."""
        self._protocol = protocol
        self._buffered = isinstance(protocol, asyncio.BufferedProtocol)
        self.peer._schedule()

    # Called by protocols

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """See `asyncio.BaseTransport`."""
        self.attach(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """See `asyncio.BaseTransport`."""
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport`."""
        return self._closing

    def is_reading(self) -> bool:
        """See `asyncio.ReadTransport`."""
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        self._reading = False

    def resume_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        if not self._reading:
            self._reading = True
            self.peer._schedule()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See `asyncio.WriteTransport`. `_out` is the transport's buffer and the kernel's in one."""
        self._high = HIGH_WATER_BYTES if high is None else high or KERNEL_BYTES

    def get_write_buffer_size(self) -> int:
        """See `asyncio.WriteTransport`."""
        return self._out_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """See `asyncio.WriteTransport`."""
        return self._high // 4, self._high

    def write(self, data: Buffer) -> None:
        """See `asyncio.WriteTransport`."""
        if self._closing or not data:
            return
        self._out.append(bytes(data))
        self._out_bytes += len(data)
        if self._out_bytes > self._high and not self._paused_writing:
            self._paused_writing = True
            self._protocol.pause_writing()
        self._schedule()

    def writelines(self, list_of_data: Any) -> None:
        """See `asyncio.WriteTransport`."""
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        """See `asyncio.WriteTransport`."""
        return False

    def close(self) -> None:
        """See `asyncio.BaseTransport`: written bytes are still delivered."""
        if self._closing:
            return
        self._closing = self._eof = True
        self._schedule()
        self._lose(None)

    def abort(self) -> None:
        """See `asyncio.WriteTransport`: the peer sees a reset."""
        if self.lost:
            return
        self._closing = True
        self._out.clear()
        self._out_bytes = 0
        self._lose(None)
        self._reset_peer()

    # Called by the network

    def abandon(self) -> None:
        """Drop a connection that was not accepted."""
        if not self.lost:
            self._closing = True
            self._lose(None)
            self._reset_peer()

    def _lose(self, error: Exception | None) -> None:
        if self.lost:
            return
        self.lost = self._closing = True
        self._network.forget(self)
        if self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, error, context=self._context)

    def _reset_peer(self) -> None:
        if not self.peer.lost:
            delay_s = self._network.latency_s(self.host, self.peer.host)
            self._loop.call_later(delay_s, self.peer.reset, context=self.peer._context)

    def reset(self) -> None:
        """Reset this end of the connection."""
        if not self.lost:
            self._out.clear()
            self._lose(ConnectionResetError("connection reset by peer"))

    def _schedule(self) -> None:
        if self._scheduled or not (self._out or self._eof) or self.peer.lost:
            return
        self._scheduled = True
        delay_s = self._network.latency_s(self.host, self.peer.host, self._out_bytes)
        self._loop.call_later(delay_s, self._deliver, context=self.peer._context)

    def wake(self) -> None:
        """Continue after a cut has healed."""
        self._schedule()

    def _deliver(self) -> None:
        """Deliver bytes, in the receiver's life."""
        self._scheduled = False
        peer = self.peer
        if peer.lost:
            if self._out and not self.lost:
                self._loop.call_soon(self.reset, context=self._context)  # it was closed: later bytes are refused
            return
        if self._network.is_cut(self.host, peer.host):
            self._network.stalled.setdefault(self, self._loop.time())
            return
        if not peer._reading or peer._protocol is None:
            return
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out.clear()
        self._out_bytes = 0
        rest = peer._receive(data) if data else b""
        if rest and not peer.lost:
            self._out.insert(0, rest)
            self._out_bytes += len(rest)
        if self._paused_writing and self._out_bytes <= self._high // 4:
            self._paused_writing = False
            self._loop.call_soon(self._resume_writing, context=self._context)
        if self._out:
            self._schedule()
        elif self._eof and not peer.lost:
            peer._take_eof()

    def _resume_writing(self) -> None:
        if not self.lost:
            self._protocol.resume_writing()

    def _receive(self, data: bytes) -> bytes:
        """Give bytes to the protocol, which may be replaced meanwhile, and return those that it does not read now."""
        at, view = 0, memoryview(data)
        while at < len(data) and self._reading and not self._closing:
            left = len(data) - at
            if not self._buffered:
                self._protocol.data_received(bytes(view[at:]) if at else data)
                return b""
            buffer = self._protocol.get_buffer(left)
            assert len(buffer), "get_buffer() returned an empty buffer"
            size = self._network.piece_bytes(min(len(buffer), left))
            buffer[:size] = view[at : at + size]
            self._protocol.buffer_updated(size)
            at += size
        return data[at:]

    def _take_eof(self) -> None:
        if not self._closing:
            self._protocol.eof_received()
            self.close()


class _SimListener:
    def __init__(self, network: SimNetwork, address: Address) -> None:
        self._network = network
        self._address = address

    @property
    def address(self) -> Address:
        return self._address

    async def close(self) -> None:
        self._network.unlisten(self._address)


class HostNetwork:
    """A `tidelog.runtime.network.Network`: the view of the processes on one host."""

    def __init__(self, network: SimNetwork, host: str) -> None:
        self._network = network
        self.host = host

    async def listen(self, factory: ProtocolFactory, host: str, port: int) -> Listener:
        """See `Network.listen`. `host` does not matter: a simulated host has one address."""
        return self._network.listen(factory, self.host, port)

    async def connect(
        self, factory: ProtocolFactory, host: str, port: int, *, timeout_s: float
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        """See `Network.connect`."""
        self._network.odd.strike("network", self.host)
        return await self._network.connect(factory, self.host, (host, port), timeout_s)


class SimNetwork:
    """See the module."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self._rng = rng
        self._listening: dict[Address, tuple[ProtocolFactory, contextvars.Context]] = {}
        self._ends: dict[SimTransport, None] = {}
        self.stalled: dict[SimTransport, float] = {}
        """Ends whose bytes are held by a cut, and the start time."""
        self._cuts: set[tuple[str, str]] = set()
        self._silent: set[str] = set()
        """Hosts that are down: not even a kernel responds."""
        self._slow: dict[str, float] = {}
        """Additional latency of this host's links in seconds; also per 64 KiB."""
        self._ports: dict[str, int] = {}
        self.odd = OddErrors()
        self.pieces: random.Random | None = None
        """If set, it divides what buffered protocols read."""

    def host(self, name: str) -> HostNetwork:
        """Return the network of one host."""
        return HostNetwork(self, name)

    # Faults

    def is_cut(self, source: str, target: str) -> bool:
        """Whether `source` cannot reach `target`."""
        if not self._cuts and not self._silent:
            return False
        return (source, target) in self._cuts or source in self._silent or target in self._silent

    def cut(self, source: str, target: str) -> None:
        """Hold back the bytes that `source` sends to `target`."""
        self._cuts.add((source, target))
        self.loop.call_later(GIVE_UP_S, self._give_up, context=contextvars.Context())

    def _give_up(self) -> None:
        """Reset connections that have been held for too long."""
        before = self.loop.time() - GIVE_UP_S / 2
        for end in [end for end, since in self.stalled.items() if since <= before]:
            del self.stalled[end]
            self._reset_both(end)

    def heal(self, source: str | None = None, target: str | None = None) -> None:
        """End one cut, or all of them."""
        if source is None:
            self._cuts.clear()
        else:
            self._cuts.discard((source, target or ""))
        self._wake()

    def _wake(self) -> None:
        for end in [end for end in self.stalled if not self.is_cut(end.host, end.peer.host)]:
            del self.stalled[end]
            end.wake()

    def slow(self, host: str, seconds: float) -> None:
        """Add `seconds` to the latency of all links of `host` (0: end)."""
        if seconds:
            self._slow[host] = seconds
        else:
            self._slow.pop(host, None)

    def reset_some(self, share: float) -> int:
        """Reset each connection with probability `share`; return the number."""
        chosen = [end for end in self._ends if end.host <= end.peer.host and self._rng.random() < share]
        for end in chosen:
            self._reset_both(end)
        return len(chosen)

    def reset_between(self, host: str, others: Collection[str]) -> None:
        """Reset what connects a host with some others."""
        for end in [end for end in self._ends if end.host == host and end.peer.host in others]:
            self._reset_both(end)

    def peers_of(self, host: str) -> set[str]:
        """Return the hosts that a host has connections with."""
        return {end.peer.host for end in self._ends if end.host == host}

    def _reset_both(self, end: SimTransport) -> None:
        for one in (end, end.peer):
            self.loop.call_soon(one.reset, context=one._context)

    def crash(self, host: str, *, silent: bool) -> None:
        """Crash the process on `host`; `silent`: the whole host, until `revive`."""
        for address in [address for address in self._listening if address[0] == host]:
            del self._listening[address]
        if silent:
            self._silent.add(host)
        for end in [end for end in self._ends if end.host == host]:
            end.lost = end._closing = True
            self._ends.pop(end, None)
            if not silent:
                end._reset_peer()

    def revive(self, host: str) -> None:
        """Bring the host back: it resets unknown connections."""
        self._silent.discard(host)
        for end in [end for end in self._ends if end.peer.host == host and end.peer.lost]:
            self.loop.call_later(self.latency_s(host, end.host), end.reset, context=end._context)
        self._wake()

    # Connections

    def latency_s(self, source: str, target: str, size: int = 0) -> float:
        """Return the latency of the next bytes."""
        if source == target:
            return _LOCALHOST_S
        seconds = MIN_LATENCY_S + (MAX_LATENCY_S - MIN_LATENCY_S) * self._rng.random()
        if self._slow:
            extra = self._slow.get(source, 0.0) + self._slow.get(target, 0.0)
            seconds += extra * (1 + size / 65_536)
        return seconds

    def piece_bytes(self, size: int) -> int:
        """Return how many of `size` bytes a buffered protocol reads at a time, at least one."""
        if self.pieces is None or self.pieces.random() < WHOLE_READS:
            return size
        return self.pieces.randint(1, size)

    def forget(self, end: SimTransport) -> None:
        """Remove a closed end."""
        self._ends.pop(end, None)

    def listen(self, factory: ProtocolFactory, host: str, port: int) -> Listener:
        """See `Network.listen`."""
        if port == 0:
            port = self._free_port(host)
        address = (host, port)
        if address in self._listening:
            raise AddressInUse(f"port {port} on {host} is in use by another process")
        self._listening[address] = factory, contextvars.copy_context()
        return _SimListener(self, address)

    def unlisten(self, address: Address) -> None:
        """Stop accepting connections there."""
        self._listening.pop(address, None)

    def _free_port(self, host: str) -> int:
        port = self._ports[host] = self._ports.get(host, FIRST_FREE_PORT) + 1
        return port

    async def connect(
        self, factory: ProtocolFactory, source: str, target: Address, timeout_s: float
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        """See `Network.connect`."""
        context = contextvars.copy_context()
        answer: asyncio.Future[SimTransport] = self.loop.create_future()
        self.loop.call_later(
            self.latency_s(source, target[0]),
            self._arrive,
            source,
            target,
            context,
            answer,
            context=contextvars.Context(),
        )
        try:
            async with asyncio.timeout(timeout_s):
                end = await answer
        except (OSError, TimeoutError) as error:
            raise cannot_connect(*target, error) from error
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result().abandon()
            raise
        protocol = factory()
        end.attach(protocol)
        protocol.connection_made(end)
        return end, protocol

    def _arrive(
        self, source: str, target: Address, context: contextvars.Context, answer: asyncio.Future[SimTransport]
    ) -> None:
        """Deliver a SYN to its host, unless it is lost."""
        if self.is_cut(source, target[0]) or self.is_cut(target[0], source):
            return
        back_s = self.latency_s(target[0], source)
        listening = self._listening.get(target)
        if listening is None:
            refused = ConnectionRefusedError("connection refused")
            self.loop.call_later(back_s, _settle, answer, refused, context=context)
            return
        factory, accepting = listening
        self.loop.call_soon(self._accept, factory, source, target, context, answer, back_s, context=accepting.copy())

    def _accept(
        self,
        factory: Callable[[], Any],
        source: str,
        target: Address,
        context: contextvars.Context,
        answer: asyncio.Future[SimTransport],
        back_s: float,
    ) -> None:
        """Accept a connection, in the listener's life."""
        if answer.done():
            return
        client = SimTransport(self, (source, self._free_port(source)), target, context.copy())
        server = SimTransport(self, target, client.get_extra_info("sockname"), contextvars.copy_context())
        client.peer, server.peer = server, client
        self._ends[client] = self._ends[server] = None
        protocol = factory()
        server.attach(protocol)
        protocol.connection_made(server)
        self.loop.call_later(back_s, self._established, answer, client, context=context)

    def _established(self, answer: asyncio.Future[SimTransport], client: SimTransport) -> None:
        if answer.done():
            client.abandon()
        elif client.lost:
            answer.set_exception(ConnectionResetError("connection reset by peer"))
        else:
            answer.set_result(client)


def _settle(answer: asyncio.Future[SimTransport], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
