"""New leaders in Produce and Fetch responses (KIP-951), shared by both codecs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tidelog.broker.kafka.wire.primitives import write_string, write_uvarint


class LeaderIdAndEpoch(NamedTuple):
    """The current leader of a partition; -1, -1 if unknown."""

    leader_id: int
    leader_epoch: int


NO_LEADER = LeaderIdAndEpoch(-1, -1)


class NodeEndpoint(NamedTuple):
    """The address of a broker."""

    node_id: int
    host: str
    port: int
    rack: str | None


def write_endpoints_tag(out: bytearray, endpoints: Sequence[NodeEndpoint]) -> None:
    """Append tag 0 with the compact array of endpoints. The caller has written the number of tags."""
    body = bytearray()
    write_uvarint(body, len(endpoints) + 1)
    for endpoint in endpoints:
        body += endpoint.node_id.to_bytes(4, "big", signed=True)
        write_string(body, endpoint.host, True)
        body += endpoint.port.to_bytes(4, "big", signed=True)
        write_string(body, endpoint.rack, True)
        body.append(0)
    out.append(0)
    write_uvarint(out, len(body))
    out += body
