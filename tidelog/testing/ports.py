"""Ports that stay with a test while its brokers stop and start.

The operating system chooses the port, and a socket that is bound to it and does not listen keeps it: the broker, which
binds with SO_REUSEADDR, may listen on it as often as it starts, and no other process of any test run gets it from the
system or finds it free. So tests may run side by side (pytest-xdist, several checkouts) without knowing each other.

Entry: `HeldPorts`.
"""

from __future__ import annotations

import contextlib
import socket

HOST = "127.0.0.1"


class HeldPorts:
    """Ports of the loopback address, until `close`."""

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()

    def new(self) -> int:
        """Return one more port."""
        holder = self._held.enter_context(socket.socket())
        holder.bind((HOST, 0))  # not yet with SO_REUSEADDR: the system may then give a port that another one holds
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return int(holder.getsockname()[1])

    def close(self) -> None:
        """Give the ports back."""
        self._held.close()
