"""Ports for a listener that is opened later, or again after a restart.

A port that the system assigns (bind to port 0) is an ephemeral port. Once it is released, the system may assign it to
any outgoing connection of any process, and the listener then finds it in use. A port that is recorded first and opened
later is therefore chosen at random outside that range, among the free ones. Two processes that choose at the same
moment collide once in thousands of times; a caller that must exclude that tracks its own choices (`besides`).

Entry: `choose_port`, `check_free`.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Container, Sequence
from pathlib import Path

from tidelog.runtime.network import AddressInUse

EPHEMERAL_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
EPHEMERAL_ELSEWHERE = range(32_768, 65_536)
"""Linux's default and the dynamic ports of RFC 6335 section 6, for systems that do not report their range."""
PREFERRED = range(20_000, 30_000)
"""Above the customary ports of most services, below the node ports of Kubernetes (from 30000)."""
UNPRIVILEGED = range(1_024, 65_536)


def ephemeral_ports() -> range:
    """Return the ports that this system assigns to outgoing connections."""
    try:
        first, last = map(int, EPHEMERAL_FILE.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return EPHEMERAL_ELSEWHERE
    return range(first, last + 1)


def lasting_ports(ephemeral: range | None = None) -> Sequence[int]:
    """Return the ports to choose from; all unprivileged ones if the system uses all of them for connections."""
    taken = ephemeral_ports() if ephemeral is None else ephemeral
    for ports in (PREFERRED, UNPRIVILEGED):
        found = [port for port in ports if port not in taken]
        if found:
            return found
    return PREFERRED


def check_free(host: str, port: int, *, lingering: bool = False) -> None:
    """Raise `OSError` if `host`:`port` cannot be listened on now, or `host` cannot be the name of one.

    With `lingering`, closed connections of a previous listener are ignored, as a new listener ignores them.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except UnicodeError as error:  # a label of the name is empty or too long
        raise OSError(errno.EADDRNOTAVAIL, str(error)) from error
    with socket.socket(family, kind, protocol) as probe:
        if lingering:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def choose_port(host: str, besides: Container[int] = ()) -> int:
    """Choose a port of `host` for a listener, now or later, not in `besides`. Raises `AddressInUse`."""
    try:
        check_free(host, 0)
    except OSError as error:  # not an address of this machine: no port of it can be used
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
    raise AddressInUse(f"no port of {host} outside the ephemeral range is free", hint="set one in the configuration")
