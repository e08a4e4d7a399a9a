"""The transport between Raft members: pysyncobj's, with held acknowledgements and a pre-vote.

- An acknowledgement (`next_node_idx`) leaves only after the entries it confirms are durable. Acks are held until the
  end of the tick, so that one fdatasync serves everything that arrived in it (group commit on followers).
- Pre-vote (Ongaro's thesis, section 9.6): a member asks a majority whether it could win before it raises its term. A
  member says yes only if it has not heard from a leader for the minimum election time-out and the asker's log is as
  good as its own. A paused or cut-off member that comes back then deposes nobody.

Everything here runs on the consensus thread. Used by `controller.raft_member` only.
"""

from __future__ import annotations

import time
from typing import Any

from pysyncobj.transport import TCPTransport


class HardenedTransport(TCPTransport):  # type: ignore[misc]
    """See the module."""

    def __init__(self, member: Any, self_node: Any, other_nodes: Any) -> None:
        self._held: list[tuple[Any, dict[str, Any]]] = []
        self._heard_leader = 0.0
        self._round = 0
        self._granted: set[str] | None = None
        self._won = False
        super().__init__(member, self_node, other_nodes)

    def send(self, node: Any, message: Any) -> bool:
        """Send, or hold what confirms entries that may not be durable yet."""
        if isinstance(message, dict) and message.get("type") == "next_node_idx":
            self._held.append((node, message))
            return True
        return bool(super().send(node, message))

    def release(self) -> None:
        """The journal is durable: let the held acknowledgements go."""
        held, self._held = self._held, []
        for node, message in held:
            super().send(node, message)

    def silence_s(self, now: float) -> float:
        """Seconds since a leader was heard."""
        return now - self._heard_leader

    def ask_pre_vote(self) -> None:
        """Begin a round: ask everybody whether an election could be won."""
        member = self._syncObj
        self._round += 1
        self._granted = set()
        term, index = member.last_log()
        for node in member.otherNodes:
            self.send(
                node,
                {"type": "pre_vote", "round": self._round, "term": member.raftCurrentTerm, "log": (term, index)},
            )

    def take_pre_vote_won(self) -> bool:
        """Whether the last round was won; asks once."""
        won, self._won = self._won, False
        return won

    def _onMessageReceived(self, node: Any, message: Any) -> None:  # noqa: N802
        kind = message.get("type") if isinstance(message, dict) else None
        if kind == "pre_vote":
            self._answer(node, message)
        elif kind == "pre_vote_reply":
            self._count(node, message)
        elif kind is not None:
            if kind == "append_entries" and message["term"] >= self._syncObj.raftCurrentTerm:
                self._heard_leader = time.monotonic()
                self._granted = None
            super()._onMessageReceived(node, message)

    def _answer(self, node: Any, message: dict[str, Any]) -> None:
        member = self._syncObj
        has_leader = member._isLeader() or self.silence_s(time.monotonic()) <= member.conf.raftMinTimeout
        is_good = message["term"] >= member.raftCurrentTerm and tuple(message["log"]) >= member.last_log()
        reply = {
            "type": "pre_vote_reply",
            "round": message["round"],
            "granted": is_good and not has_leader,
            "term": member.raftCurrentTerm,
        }
        self.send(node, reply)

    def _count(self, node: Any, message: dict[str, Any]) -> None:
        member = self._syncObj
        if message["term"] > member.raftCurrentTerm:
            member.adopt_term(message["term"])
        if self._granted is None or message["round"] != self._round or not message["granted"]:
            return
        self._granted.add(str(node.id))
        if len(self._granted) + 1 > (len(member.otherNodes) + 1) / 2:
            self._granted = None
            self._won = True
            member.force_election()
