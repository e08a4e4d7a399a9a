"""The sockets of this machine, as a Raft member uses them: they never block, and a silent peer ends them.

Entry: `SystemSockets`, one for each member.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import select
import socket
import threading
from typing import cast

from pysyncobj.poller import createPoller

from tidelog.controller.raft.surroundings import Poller, RaftSocket

logger = logging.getLogger(__name__)

CONGESTED_BYTES = 8 << 20
SILENT_PEER_MS = 2_000
"""Sent bytes that the peer's machine does not acknowledge for so long end the connection."""
RESOLVE_AGAIN_S = 5.0


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_PEER_MS)


class _Resolver:
    """Turns a host name into an address in the background: the consensus thread never waits for it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, str]] = {}
        self._asking: set[str] = set()

    def look_up(self, host: str, now: float) -> str | None:
        """An IP address, or None while it is not known yet."""
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host))
        at, found = self._known.get(host, (float("-inf"), ""))
        if now - at > RESOLVE_AGAIN_S and host not in self._asking:
            self._asking.add(host)
            threading.Thread(target=self._ask, args=(host, now), name="tidelog-resolve", daemon=True).start()
        return found or None

    def _ask(self, host: str, now: float) -> None:
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            self._known[host] = (now, str(rows[0][4][0]))
        except OSError as error:
            logger.warning("a controller's name does not resolve", extra={"host": host, "error": str(error)})
            self._known[host] = (now, "")
        finally:
            self._asking.discard(host)


class SystemSockets:
    """See `tidelog.controller.raft.surroundings.Sockets`."""

    def __init__(self) -> None:
        self._resolver = _Resolver()
        self.congested_bytes = CONGESTED_BYTES

    def look_up(self, host: str, now: float) -> str | None:
        """See `Sockets.look_up`."""
        return self._resolver.look_up(host, now)

    def open(self, address: str) -> RaftSocket:
        """See `Sockets.open`."""
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            _tune(sock)
        except OSError:
            sock.close()
            raise
        return sock

    def take_over(self, transport: asyncio.Transport) -> RaftSocket:
        """See `Sockets.take_over`."""
        transport.pause_reading()
        duplicate = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        transport.abort()  # closes this descriptor; the connection lives on in the other
        return duplicate

    def adopted(self, sock: RaftSocket) -> None:
        """See `Sockets.adopted`."""
        _tune(cast(socket.socket, sock))

    def wait_writable(self, sock: RaftSocket, seconds: float) -> None:
        """See `Sockets.wait_writable`."""
        select.select([], [sock.fileno()], [], seconds)

    def poller(self) -> Poller:
        """See `Sockets.poller`."""
        poller: Poller = createPoller("auto")
        return poller
