"""Addresses as `HOST:PORT`, of controllers and of brokers.

Entry: `is_address` to validate external input, then `split_address`.
"""

from __future__ import annotations

MAX_PORT = 65_535


def is_address(text: str) -> bool:
    """Whether `split_address` accepts `text`: a host, and a port of 1 to 65,535."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) <= MAX_PORT


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` into host and port (IPv6 addresses are in brackets)."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
