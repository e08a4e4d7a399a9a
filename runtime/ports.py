"""Ports to listen on later, or again after a restart.

A port that the system hands out (bind to port 0) is one of its ephemeral ports: once it is let go, any outgoing
connection of any process on the machine may be given it, and whoever meant to listen on it finds it in use. So a port
that is written down first and listened on later is chosen outside that range, at random, among those that nobody uses
now. Two choosers at the same moment meet once in thousands of times; who must exclude that, keeps an account of its own
(`besides`).

Entry: `choose_port`, `check_free`.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Container, Sequence
from pathlib import Path

from runtime.network import AddressInUse

EPHEMERAL_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
EPHEMERAL_ELSEWHERE = range(32_768, 65_536)
"""Linux's default and the dynamic ports of RFC 6335 section 6, where the system does not say."""
PREFERRED = range(20_000, 30_000)
"""Above what most services have by custom, below the node ports of Kubernetes (from 30000)."""
UNPRIVILEGED = range(1_024, 65_536)


def ephemeral_ports() -> range:
    """What outgoing connections are given by this system."""
    try:
        first, last = map(int, EPHEMERAL_FILE.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return EPHEMERAL_ELSEWHERE
    return range(first, last + 1)


def lasting_ports(ephemeral: range | None = None) -> Sequence[int]:
    """The ports to choose from. Where the system takes all unprivileged ones for connections, there are no better."""
    taken = ephemeral_ports() if ephemeral is None else ephemeral
    for ports in (PREFERRED, UNPRIVILEGED):
        found = [port for port in ports if port not in taken]
        if found:
            return found
    return PREFERRED


def check_free(host: str, port: int, *, lingering: bool = False) -> None:
    """Raises `OSError` if `host`:`port` cannot be listened on now.

    With `lingering`, closed connections of a listener that has ended are no hindrance, as they are none to its
    successor.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        if lingering:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def choose_port(host: str, besides: Container[int] = ()) -> int:
    """A port of `host` to listen on, now or later, that is none of `besides`. Raises `AddressInUse`."""
    try:
        check_free(host, 0)
    except OSError as error:  # the address is not ours: no port of it will do
        raise AddressInUse(
            f"cannot listen on {host}: {error.strerror}", hint="check the host in the configuration"
        ) from error
    candidates = [port for port in lasting_ports() if port not in besides]
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        try:
            check_free(host, port)
        except OSError:
            continue
        return port
    raise AddressInUse(f"no port of {host} that would last is free", hint="name one in the configuration")
