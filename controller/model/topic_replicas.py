"""The replication factor with which a topic was created, as an entry of `kv`: a topic's row has none at old levels.

An entry is there from feature level 2 on, and only if a number was asked for; it goes with the topic. Key:
`topic-replicas/<topic id, 32 hexadecimal digits>`; value: the number, in decimal ASCII.

Entry: `topic_replicas`, `replicas_key`.
"""

from __future__ import annotations

from typing import Protocol

_PREFIX = "topic-replicas/"


class _Rows(Protocol):
    def get(self, key: str, /) -> bytes | None: ...


def replicas_key(topic_id: bytes) -> str:
    """Return the key of a topic's entry in `kv`."""
    return _PREFIX + topic_id.hex()


def topic_replicas(rows: _Rows, topic_id: bytes) -> int:
    """Return how many replicas a topic was created with; 0: any number."""
    value = rows.get(replicas_key(topic_id))
    return int(value) if value is not None else 0
