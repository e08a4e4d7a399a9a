"""The transport between Raft members, in the place of pysyncobj's: authenticated, without pickle, and stricter.

- Messages are msgpack maps of known kinds (`_KINDS`); anything else ends the connection. Nothing is unpickled.
- An acknowledgement (`next_node_idx`) leaves only after the entries it confirms are durable: acks are held until the
  end of the tick, so that one fdatasync serves everything that arrived in it. It carries the term it was given in, and
  one of another term is ignored (pysyncobj's has none).
- `conform` makes a follower truncate only at a conflict and commit only what it has compared (Raft paper, figure 2).
- Pre-vote (Ongaro's thesis, section 9.6): a member asks a majority whether it could win before it raises its term. A
  member says yes only if it has not heard from a leader for the minimum election time-out and the asker's log is as
  good as its own. A paused or cut-off member that comes back then deposes nobody.
- Commands are not forwarded: who is not the leader says so.

Everything here runs on the consensus thread. Used by `controller.raft_member` only.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from pysyncobj.node import Node
from pysyncobj.transport import Transport

from controller.handshake import Credentials, Session
from controller.journal import Entry
from controller.raft_links import Message, ReceiveLink, Resolver, SendLink, refuse
from runtime.errors import CorruptData

log = logging.getLogger(__name__)

_KINDS = frozenset(
    {"append_entries", "next_node_idx", "request_vote", "response_vote", "timeout_now", "pre_vote", "pre_vote_reply"}
)
_FORWARDED = frozenset({"apply_command", "apply_command_response"})
NOT_A_MEMBER = "not a member of this quorum"


def make_node(node_id: int, address: str) -> Node:
    """pysyncobj's name for a member: its id. The address is what it is reached by."""
    return Node(str(node_id), address=address)


def conform(message: Message, entries: Sequence[Entry], commit_index: int) -> bool:
    """Rewrite an `append_entries` so that pysyncobj's follower does what Raft demands; whether its tail must stay.

    pysyncobj drops everything after `prevLogIdx` even where the new entries agree with it, and moves its commit index
    to the end of its own log. Here entries that are held already are taken out of the message, and the commit index
    goes no further than what has been compared. Raises `CorruptData` for a message that no member sends.
    """
    if "transmission" in message:
        raise CorruptData("an entry in pieces: commands are too small for that")
    if "serialized" in message:
        piece = message["serialized"]
        if piece is None or not piece[2]:
            message["commit_index"] = commit_index  # what the snapshot will bring has not been compared yet
        return True
    previous, term = message["prevLogIdx"], message["prevLogTerm"]
    fresh = [(bytes(command), int(index), int(entry_term)) for command, index, entry_term in message["entries"]]
    message["entries"] = fresh
    first = entries[0][1]
    if not isinstance(previous, int) or not first <= previous <= entries[-1][1]:
        return True
    if entries[previous - first][2] != term:
        return True  # refused as it stands
    taken = 0
    while taken < len(fresh):
        _, index, entry_term = fresh[taken]
        if index != previous + 1:
            raise CorruptData(f"entry {index} follows entry {previous} in a message")
        if index > entries[-1][1] or entries[index - first][2] != entry_term:
            break
        previous, term = index, entry_term
        taken += 1
    message["prevLogIdx"], message["prevLogTerm"], message["entries"] = previous, term, fresh[taken:]
    compared = previous + len(fresh) - taken
    message["commit_index"] = min(message["commit_index"], compared)
    return taken == len(fresh)


class PeerTransport(Transport):  # type: ignore[misc]
    """See the module."""

    def __init__(self, member: Any, credentials: Credentials, nodes: Sequence[Node]) -> None:
        super().__init__(member, None, [])
        self._member = member
        self._credentials = credentials
        self._nodes: dict[int, Node] = {}
        self._links: dict[int, SendLink] = {}
        self._receiving: dict[int, ReceiveLink] = {}
        self._accepted: deque[tuple[int, socket.socket, Session]] = deque()
        self._resolver = Resolver()
        self._held: list[tuple[Node, Message]] = []
        self._heard_leader = 0.0
        self._round = 0
        self._granted: set[int] | None = None
        self._won = False
        self.news = False
        """A message arrived since this was last reset."""
        member.addOnTickCallback(self._tick)
        for node in nodes:
            self.addNode(node)

    # What pysyncobj calls

    def addNode(self, node: Node) -> None:  # noqa: N802
        """See `Transport`."""
        node_id = int(node.id)
        if node_id in self._nodes:
            return
        conf = self._member.conf
        self._nodes[node_id] = node
        self._links[node_id] = SendLink(
            poller=self._member._poller,
            resolver=self._resolver,
            credentials=self._credentials,
            peer_id=node_id,
            address=node.address,
            on_change=lambda is_open: self._link_changed(node, is_open),
            connect_timeout_s=conf.connectionTimeout,
            retry_s=conf.connectionRetryTime,
        )

    def dropNode(self, node: Node) -> None:  # noqa: N802
        """See `Transport`."""
        node_id = int(node.id)
        self._nodes.pop(node_id, None)
        link = self._links.pop(node_id, None)
        if link is not None:
            was_open = link.is_open
            link.close()
            if was_open:
                self._onNodeDisconnected(node)
        receiving = self._receiving.pop(node_id, None)
        if receiving is not None:
            receiving.close()

    def send(self, node: Node, message: Message) -> bool:
        """Send, or hold what confirms entries that may not be durable yet."""
        kind = message["type"]
        if kind in _FORWARDED:
            return False
        if kind == "next_node_idx":
            message["term"] = self._member.raftCurrentTerm
            self._held.append((node, message))
            return True
        return self._post(node, message)

    def destroy(self) -> None:
        """See `Transport`."""
        for link in self._links.values():
            link.close()
        for receiving in self._receiving.values():
            receiving.close()
        while self._accepted:
            self._accepted.popleft()[1].close()
        self._receiving.clear()

    # Links

    def adopt(self, peer_id: int, sock: socket.socket, session: Session) -> None:
        """Take over a socket on which an authenticated peer wants to send."""
        self._accepted.append((peer_id, sock, session))

    def _tick(self) -> None:
        now = time.monotonic()
        while self._accepted:
            peer_id, sock, session = self._accepted.popleft()
            self._admit(peer_id, sock, session)
        for link in list(self._links.values()):
            link.tick(now)

    def _admit(self, peer_id: int, sock: socket.socket, session: Session) -> None:
        if peer_id not in self._nodes:
            refuse(sock, f"node {peer_id} is {NOT_A_MEMBER}")
            return
        old = self._receiving.pop(peer_id, None)
        if old is not None:
            old.close()
        try:
            self._receiving[peer_id] = ReceiveLink(
                poller=self._member._poller,
                sock=sock,
                session=session,
                peer_id=peer_id,
                on_message=self._received,
                on_end=self._receive_ended,
            )
        except OSError:
            sock.close()  # the peer is gone already, and comes back

    def _receive_ended(self, link: ReceiveLink) -> None:
        if self._receiving.get(link.peer_id) is link:
            del self._receiving[link.peer_id]

    def _link_changed(self, node: Node, is_open: bool) -> None:
        if is_open:
            self._onNodeConnected(node)
        else:
            self._onNodeDisconnected(node)

    def _post(self, node: Node, message: Message) -> bool:
        link = self._links.get(int(node.id))
        return link is not None and link.send(message)

    def problems(self) -> dict[int, str]:
        """Why a peer cannot be reached, by id; empty while it can."""
        return {peer_id: "" if link.is_open else link.problem or "connecting" for peer_id, link in self._links.items()}

    # Acknowledgements and pre-votes

    def release(self) -> None:
        """The journal is durable: let the held acknowledgements go."""
        held, self._held = self._held, []
        for node, message in held:
            self._post(node, message)

    def silence_s(self, now: float) -> float:
        """Seconds since a leader was heard."""
        return now - self._heard_leader

    def ask_pre_vote(self) -> None:
        """Begin a round: ask everybody whether an election could be won."""
        member = self._member
        self._round += 1
        self._granted = set()
        message = {
            "type": "pre_vote",
            "round": self._round,
            "term": member.raftCurrentTerm,
            "log": member.last_log(),
        }
        for node in list(self._nodes.values()):
            self._post(node, message)

    def take_pre_vote_won(self) -> bool:
        """Whether the last round was won; asks once."""
        won, self._won = self._won, False
        return won

    def _received(self, peer_id: int, message: Message) -> None:
        node = self._nodes.get(peer_id)
        kind = message.get("type")
        if kind not in _KINDS:
            raise CorruptData(f"controller {peer_id} sends a message of kind {kind!r}")
        if node is None:
            return
        self.news = True
        try:
            self._dispatch(node, kind, message)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CorruptData(f"controller {peer_id} sends a malformed {kind}: {error!r}") from error

    def _dispatch(self, node: Node, kind: str, message: Message) -> None:
        member = self._member
        if kind == "pre_vote":
            self._answer(node, message)
        elif kind == "pre_vote_reply":
            self._count(node, message)
        elif kind == "append_entries":
            if message["term"] < member.raftCurrentTerm:
                return
            self._heard_leader = time.monotonic()
            self._granted = None
            keeps = conform(message, member.journal.entries, member.raftCommitIndex)
            with member.keeping_tail(keeps):
                self._onMessageReceived(node, message)
        elif kind != "next_node_idx" or message["term"] == member.raftCurrentTerm:
            self._onMessageReceived(node, message)

    def _answer(self, node: Node, message: Message) -> None:
        member = self._member
        has_leader = member._isLeader() or self.silence_s(time.monotonic()) <= member.conf.raftMinTimeout
        is_good = message["term"] >= member.raftCurrentTerm and tuple(message["log"]) >= member.last_log()
        reply = {
            "type": "pre_vote_reply",
            "round": message["round"],
            "granted": is_good and not has_leader,
            "term": member.raftCurrentTerm,
        }
        self._post(node, reply)

    def _count(self, node: Node, message: Message) -> None:
        member = self._member
        if message["term"] > member.raftCurrentTerm and not member._isLeader():
            member.adopt_term(message["term"])
        if self._granted is None or message["round"] != self._round or not message["granted"]:
            return
        self._granted.add(int(node.id))
        if len(self._granted) + 1 > (len(self._nodes) + 1) / 2:
            self._granted = None
            self._won = True
            member.force_election()
