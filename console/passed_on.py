"""Which requests the console passes on to the admin HTTP. Nothing else reaches a broker through it.

Entry: `READ`, `CHANGE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from tidelog.runtime.errors import InvalidInput

_NONE: Final[frozenset[str]] = frozenset()
READ: Final[Mapping[str, frozenset[str]]] = {
    "status": _NONE,
    "brokers": _NONE,
    "brokers/plan": frozenset({"id"}),
    "failover": _NONE,
    "partitions": frozenset({"topic"}),
    "partition": frozenset({"topic", "partition", "after"}),
    "topics": frozenset({"after", "limit", "name"}),
    "moves": _NONE,
    "balancer": _NONE,
    "balancer/plan": _NONE,
    "scale": _NONE,
    "bucket/usage": _NONE,
    "history": _NONE,
    "history/offsets": frozenset({"topic", "group"}),
    "timeline": _NONE,
    "explain": frozenset({"topic", "partition", "offset"}),
    "explain/groups": frozenset({"topic", "partition"}),
    "requests/slow": frozenset({"limit", "api", "topic"}),
    "replica-sets": _NONE,
    "replica-sets/describe": frozenset({"id"}),
    "wals": _NONE,
    "leases": _NONE,
    "cluster": _NONE,
    "controllers": _NONE,
}
"""GET: path → the parameters that it takes."""

CHANGE: Final[Mapping[str, frozenset[str]]] = {
    "moves": _NONE,
    "brokers/drain": frozenset({"id", "cancel"}),
    "balancer/run": _NONE,
    "balancer/mode": frozenset({"set"}),
    "replica-sets/elect": frozenset({"id", "broker"}),
}
"""POST: path → parameters. What may lose acknowledged records is for the command line: `accept_loss` is not passed."""


class PassedOn(NamedTuple):
    """A request to the admin HTTP: its path, and its parameters in order."""

    path: str
    query: list[tuple[str, str]]


def pass_on(table: Mapping[str, frozenset[str]], path: str, query: list[tuple[str, str]]) -> PassedOn:
    """Return the request if the table has it. Raises `InvalidInput`."""
    if path not in table:
        raise InvalidInput(f"the console does not pass on {path[:100]!r}")
    for name, _ in query:
        if name not in table[path]:
            raise InvalidInput(f"{path} has no parameter {name[:100]!r} here")
    return PassedOn(f"/{path}", query)
