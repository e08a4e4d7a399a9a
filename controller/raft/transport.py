"""Transport between Raft members, replacing pysyncobj's: authenticated, without pickle, and stricter.

- Messages are msgpack maps of known kinds (`_KINDS`); anything else ends the connection. Nothing is unpickled.
- What promises something (an acknowledgement `next_node_idx`, a vote, a candidate's request for votes) leaves only when
  it is durable: it is held until the end of the tick, so that one fdatasync serves everything that arrived in it. An
  acknowledgement carries the term it was given in, and one of another term is ignored (pysyncobj's has none).
- `conform` makes a follower truncate only at a conflict and commit only what it has compared (Raft paper, figure 2).
- Pre-vote (Ongaro's thesis, section 9.6): a member asks a majority whether it could win before it raises its term. A
  member grants it only if it has not heard from a leader for the minimum election time-out and the candidate's log is
  at least as current as its own. A member that was paused or disconnected therefore deposes no leader.
- The first election of a cluster needs the pre-votes of all members, all of them empty: members that have lost their
  directories must not begin another cluster beside one that still has the log.
- Commands are not forwarded: a member that is not the leader refuses them.
- Entries and snapshots are taken from a leader that the member's own log does not name yet, as Raft demands (Ongaro's
  thesis, section 4.1): the log of a member that was added anew may begin with a snapshot from before the leader's time.
  Nothing else of such an unlisted leader counts, and no link to one is kept while a listed member leads.

Everything here runs on the consensus thread. Used by `tidelog.controller.raft.member` only.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tidelog.controller.raft.core import CoreTransport, MemberNode, make_node
from tidelog.controller.raft.journal import Entry
from tidelog.controller.raft.links import Message, ReceiveLink, SendLink, refuse
from tidelog.controller.raft.surroundings import Poller, RaftSocket, Surroundings
from tidelog.controller.rpc.handshake import Credentials, Session
from tidelog.runtime.errors import CorruptData

logger = logging.getLogger(__name__)

_KINDS = frozenset(
    {"append_entries", "next_node_idx", "request_vote", "response_vote", "timeout_now", "pre_vote", "pre_vote_reply"}
)
_PROMISES = frozenset({"next_node_idx", "request_vote", "response_vote"})
"""What reflects entries, a term or a vote that must be durable before."""
_SIGNED = _PROMISES | {"pre_vote", "pre_vote_reply"}
"""What says which directory it comes from."""
_FORWARDED = frozenset({"apply_command", "apply_command_response"})
NOT_A_MEMBER = "not a member of this quorum"


def conform(message: Message, entries: Sequence[Entry], commit_index: int) -> bool:
    """Rewrite an `append_entries` so that pysyncobj's follower conforms to Raft. Returns whether its tail must stay.

    pysyncobj drops everything after `prevLogIdx` even where the new entries agree with it, and moves its commit index
    to the end of its own log. Here entries that the follower already has are removed from the message, and the commit
    index is limited to the entries that were compared. Raises `CorruptData` for a message that no member sends.
    """
    if "transmission" in message:
        raise CorruptData("an entry in pieces: commands are never that large")
    if "serialized" in message:
        message["commit_index"] = commit_index  # what a snapshot brings has not been compared with what is here
        return True
    previous, term = message["prevLogIdx"], message["prevLogTerm"]
    fresh = [(bytes(command), int(index), int(entry_term)) for command, index, entry_term in message["entries"]]
    message["entries"] = fresh
    first = entries[0][1]
    if not isinstance(previous, int) or not first <= previous <= entries[-1][1]:
        return True
    if entries[previous - first][2] != term:
        return True  # refused unchanged
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


def _recorded(message: Message) -> str:
    """The directory by which a candidate's log knows the receiver; a member of an older version tells none."""
    return str(message.get("recorded", ""))


class PeerTransport(CoreTransport):
    """See the module."""

    def __init__(
        self,
        member: Any,
        credentials: Credentials,
        nodes: Sequence[MemberNode],
        addresses: Mapping[int, str],
        surroundings: Surroundings,
        poller: Poller,
    ) -> None:
        super().__init__()
        self._member = member
        self._now = surroundings.monotonic
        self._sockets = surroundings.sockets
        self._poller = poller
        self._credentials = credentials
        self._nodes: dict[int, MemberNode] = {}
        self._unlisted: dict[int, MemberNode] = {}
        """Those that lead, or may, and that the log does not name yet."""
        self._addresses = dict(addresses)
        """Of all members that were ever told of."""
        self._links: dict[int, SendLink] = {}
        self._receiving: dict[int, ReceiveLink] = {}
        self._accepted: deque[tuple[int, RaftSocket, Session]] = deque()
        self._held: list[tuple[MemberNode, Message]] = []
        self._heard_leader = 0.0
        self._round = 0
        self._granted: set[int] | None = None
        self._won = False
        self._awaited: set[int] = set()
        """Members that a first election was told to wait for."""
        self.strangers: set[int] = set()
        """Members whose directory is not the one that the quorum knows."""
        self._before_levels: set[int] = set()
        """Members whose messages show that they are of a version before feature levels."""
        self.news = False
        """A message arrived since this was last reset."""
        member.addOnTickCallback(self._tick)
        for node in nodes:
            self.addNode(node)

    # What pysyncobj calls

    def addNode(self, node: MemberNode) -> None:  # noqa: N802
        """See `Transport`."""
        node_id = int(node.id)
        if node_id in self._nodes:
            return
        if node_id in self._unlisted and self._links[node_id].address != node.address:
            self._drop_unlisted(node_id)
        self._addresses[node_id] = node.address
        self._nodes[node_id] = node
        if self._unlisted.pop(node_id, None) is None:
            self._link(node)
        elif self._links[node_id].is_open:
            self.connected(node)

    def _link(self, node: MemberNode) -> None:
        node_id, conf = int(node.id), self._member.conf
        self._links[node_id] = SendLink(
            poller=self._poller,
            sockets=self._sockets,
            credentials=self._credentials,
            peer_id=node_id,
            address=node.address,
            on_change=lambda is_open: self._link_changed(node, is_open),
            connect_timeout_s=conf.connectionTimeout,
            retry_s=conf.connectionRetryTime,
        )

    def dropNode(self, node: MemberNode) -> None:  # noqa: N802
        """See `Transport`."""
        node_id = int(node.id)
        if node_id in self._unlisted:
            return
        self._nodes.pop(node_id, None)
        self._unlink(node)

    def _unlink(self, node: MemberNode) -> None:
        node_id = int(node.id)
        link = self._links.pop(node_id, None)
        if link is not None:
            was_open = link.is_open
            link.close()
            if was_open:
                self.disconnected(node)
        receiving = self._receiving.pop(node_id, None)
        if receiving is not None:
            receiving.close()

    def keep_unlisted(self, node: MemberNode) -> None:
        """The members are about to be replaced by those of a snapshot, which do not name its sender: the leader."""
        if self._nodes.pop(int(node.id), None) is not None:
            self._unlisted[int(node.id)] = node
            self.disconnected(node)

    def _take_unlisted(self, node_id: int) -> bool:
        """Link to one that is not in the log, if its address is known and no listed member leads."""
        if node_id in self._unlisted:
            return True
        address = self._addresses.get(node_id)
        if address is None or self._is_led_by_listed():
            return False
        logger.info("a controller is heard that the log does not name yet", extra={"peer": node_id})
        self._unlisted[node_id] = node = make_node(node_id, address)
        self._link(node)
        return True

    def _is_led_by_listed(self) -> bool:
        member = self._member
        if member.is_leader():
            return True
        leader = member.leader()
        is_heard = self.silence_s(self._now()) <= member.conf.raftMinTimeout
        return is_heard and leader is not None and int(leader.id) in self._nodes

    def _drop_unlisted(self, node_id: int) -> None:
        self._unlink(self._unlisted.pop(node_id))

    def send(self, node: MemberNode, message: Message) -> bool:
        """Send, or hold what confirms entries that may not be durable yet."""
        kind = message["type"]
        if kind in _FORWARDED:
            return False
        if kind == "append_entries" and message.get("serialized") is not None:
            sent = message["serialized"]
            piece = sent.plain() if int(node.id) in self._before_levels else sent.piece
            return self._post(node, {**message, "serialized": piece})
        if kind == "next_node_idx":
            message["term"] = self._member.raftCurrentTerm
            message["reset"] = message["reset"] and self._now() >= self._member.next_snapshot_at
        if kind in _PROMISES:
            self._member.sign(message, node)
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

    def adopt(self, peer_id: int, sock: RaftSocket, session: Session) -> None:
        """Take over a socket on which an authenticated peer wants to send."""
        self._accepted.append((peer_id, sock, session))

    def _tick(self) -> None:
        now = self._now()
        while self._accepted:
            peer_id, sock, session = self._accepted.popleft()
            self._admit(peer_id, sock, session)
        if self._unlisted and self._is_led_by_listed():
            for node_id in list(self._unlisted):
                self._drop_unlisted(node_id)
        for link in list(self._links.values()):
            link.tick(now)

    def _admit(self, peer_id: int, sock: RaftSocket, session: Session) -> None:
        if peer_id not in self._nodes and not self._take_unlisted(peer_id):
            refuse(sock, f"node {peer_id} is {NOT_A_MEMBER}")
            return
        old = self._receiving.pop(peer_id, None)
        if old is not None:
            old.close()
        try:
            self._receiving[peer_id] = ReceiveLink(
                poller=self._poller,
                sockets=self._sockets,
                sock=sock,
                session=session,
                peer_id=peer_id,
                on_message=self.received,
                on_end=self._receive_ended,
            )
        except OSError:
            sock.close()  # the peer has disconnected, and reconnects

    def _receive_ended(self, link: ReceiveLink) -> None:
        if self._receiving.get(link.peer_id) is link:
            del self._receiving[link.peer_id]

    def _link_changed(self, node: MemberNode, is_open: bool) -> None:
        if int(node.id) in self._unlisted:
            return
        if is_open:
            self.connected(node)
        else:
            self.disconnected(node)
            self._member.link_lost(node)

    def _post(self, node: MemberNode, message: Message) -> bool:
        link = self._links.get(int(node.id))
        return link is not None and link.send(message)

    def is_congested(self, node: MemberNode) -> bool:
        """Whether a member has not taken yet what was sent to it."""
        link = self._links.get(int(node.id))
        return link is not None and link.is_congested

    def problems(self) -> dict[int, str]:
        """Return by id why a peer cannot be reached; an empty string if it can."""
        return {peer_id: "" if link.is_open else link.problem or "connecting" for peer_id, link in self._links.items()}

    # Acknowledgements and pre-votes

    def release(self) -> None:
        """Send the held acknowledgements, because the journal is durable."""
        held, self._held = self._held, []
        for node, message in held:
            self._post(node, message)

    def silence_s(self, now: float) -> float:
        """Return the seconds since the last message of a leader."""
        return now - self._heard_leader

    def ask_pre_vote(self) -> None:
        """Start a round: ask all peers whether an election could be won."""
        member = self._member
        if self._granted is not None and member.is_empty():
            self._tell_awaited(set(self._nodes) - self._granted)
        self._round += 1
        self._granted = set()
        for node in list(self._nodes.values()):
            message = {
                "type": "pre_vote",
                "round": self._round,
                "term": member.raftCurrentTerm,
                "log": member.last_log(),
            }
            member.sign(message, node)
            self._post(node, message)

    def _tell_awaited(self, awaited: set[int]) -> None:
        """The cluster cannot begin yet: in the last round these were silent, or have a log."""
        if awaited != self._awaited:
            self._awaited = awaited
            event = "a new quorum begins when all its members agree, with empty directories; these have not yet"
            logger.info(event, extra={"controllers": sorted(awaited)})

    def take_pre_vote_won(self) -> bool:
        """Return whether the last round was won, and reset that."""
        won, self._won = self._won, False
        return won

    def received(self, peer_id: int, message: Message) -> None:
        """Take a message of a peer. Raises `CorruptData` for one that no member sends."""
        node = self._nodes.get(peer_id)
        kind = message.get("type")
        if kind not in _KINDS:
            raise CorruptData(f"controller {peer_id} sends a message of kind {kind!r}")
        if node is None and kind == "append_entries":
            node = self._unlisted.get(peer_id)
        if node is None:
            return
        self.news = True
        try:
            self._dispatch(node, kind, message)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CorruptData(f"controller {peer_id} sends a malformed {kind}: {error!r}") from error

    def _dispatch(self, node: MemberNode, kind: str, message: Message) -> None:
        member = self._member
        if kind in _SIGNED:
            (self._before_levels.discard if "directory" in message else self._before_levels.add)(int(node.id))
            if not member.counts(int(node.id), message):
                self._take_from_stranger(node, kind, message)
                return
            self.strangers.discard(int(node.id))
        if kind == "pre_vote":
            self._answer(node, message)
        elif kind == "request_vote":
            if member.may_vote((message["last_log_term"], message["last_log_index"]), _recorded(message)):
                if message["last_log_index"] == 1:
                    member.trust_directory()
                self.deliver(node, message)
        elif kind == "timeout_now":
            if member.may_vote(member.last_log()):
                self.deliver(node, message)
        elif kind == "pre_vote_reply":
            self._count(node, message)
        elif kind == "append_entries":
            if message["term"] < member.raftCurrentTerm:
                return
            self._heard_leader = self._now()
            self._granted = None
            keeps = conform(message, member.journal.entries, member.raftCommitIndex)
            piece, message["serialized"] = message.get("serialized"), None
            with member.keeping_tail(keeps):
                self.deliver(node, message)
            if piece is not None:
                member.take_piece(node, piece)
        elif kind != "next_node_idx" or message["term"] == member.raftCurrentTerm:
            self.deliver(node, message)

    def _take_from_stranger(self, node: MemberNode, kind: str, message: Message) -> None:
        """Of a member whose directory is not the one that the quorum knows: it is sent entries, and nothing counts."""
        member = self._member
        self.strangers.add(int(node.id))
        if kind == "next_node_idx" and message["term"] == member.raftCurrentTerm:
            heard_at = member.heard_at(node)
            message["reset"], message["success"] = message["reset"] or message["success"], False
            self.deliver(node, message)
            member.forget_answer(node, heard_at)

    def _answer(self, node: MemberNode, message: Message) -> None:
        member = self._member
        has_leader = member.is_leader() or self.silence_s(self._now()) <= member.conf.raftMinTimeout
        has_leader = has_leader or not member.may_vote(tuple(message["log"]), _recorded(message))
        is_good = message["term"] >= member.raftCurrentTerm and tuple(message["log"]) >= member.last_log()
        reply = {
            "type": "pre_vote_reply",
            "round": message["round"],
            "granted": is_good and not has_leader,
            "term": member.raftCurrentTerm,
        }
        member.sign(reply, node)
        self._post(node, reply)

    def _count(self, node: MemberNode, message: Message) -> None:
        member = self._member
        if message["term"] > member.raftCurrentTerm and not member.is_leader():
            member.set_term(message["term"])
        if self._granted is None or message["round"] != self._round or not message["granted"]:
            return
        self._granted.add(int(node.id))
        members = len(self._nodes) + 1
        if len(self._granted) + 1 >= (members if member.is_empty() else members // 2 + 1):
            self._granted = None
            self._won = True
            member.force_election()
