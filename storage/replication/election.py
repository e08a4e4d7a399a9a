"""Which promises elect whom. Used by the controller's state machine, where every election is decided.

A *promise* of a member for epoch e says: my WAL takes nothing from a master of an older epoch any more, durably, and
this is where it ends. A master may be elected as soon as the promises hold every byte that an older master may have
confirmed, which is `SetConfiguration.promises_needed` of them (hot-tier rule B6). Of these the best is elected: the one
with the newest last epoch, then the largest end (64 bits), because that one holds all that any other holds (the Raft
paper, section 5.4.1); priority and the smaller id decide between equals.

A promise that is not needed may be left out, as if it had not arrived. So a designated member may be elected although
another one is ahead of it, by bytes that nobody confirmed: if the promises that are not ahead are enough by themselves.
Under load a master that hands its role over is always a little ahead.

Entry: `elected`, `settled`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tidelog.storage.replication.configuration import SetConfiguration, WalReplica


class Promise(NamedTuple):
    """A replica's promise for one epoch. The caller has checked that its broker's registration is current."""

    replica: WalReplica
    last_epoch: int
    """Epoch of its last byte (int32); -1: its WAL is empty."""
    end_offset: int
    """The end of its WAL (int64 bytes), durable."""
    priority: int = 0
    """The larger is preferred among equals."""

    @property
    def position(self) -> tuple[int, int]:
        """Return what decides: epoch first, then offset."""
        return self.last_epoch, self.end_offset


def elected(
    promises: Iterable[Promise], configuration: SetConfiguration, *, designated: int = -1, waits_for: Iterable[int] = ()
) -> Promise | None:
    """Return the promise of the replica to elect; None: more promises are needed.

    Promises of replicas outside the configuration are ignored, a broker's with another WAL among them. `designated`, a
    broker id, is elected instead of the best if enough promises are not ahead of its own. `waits_for` names brokers,
    such as a master that hands its role over, whose promises are awaited although enough others are there.
    """
    members = {each.broker_id for each in configuration.members}
    counted = {each.replica.broker_id: each for each in promises if each.replica in configuration.members}
    if len(counted) < configuration.promises_needed or any(
        each in members and each not in counted for each in waits_for
    ):
        return None
    best = max(counted.values(), key=_preference)
    wanted = counted.get(designated)
    if wanted is None:
        return best
    not_ahead = sum(each.position <= wanted.position for each in counted.values())
    return wanted if not_ahead >= configuration.promises_needed else best


def settled(
    configuration: SetConfiguration, *, master: WalReplica, alive: Iterable[int], all_ack: bool
) -> SetConfiguration:
    """Return the configuration after the election of `master`, with the next number.

    With a quorum the set stays as it was: each of its members may hold confirmed bytes that another lacks, and the
    quorum does not shrink because somebody died. With `all_ack` each of them holds every confirmed byte, so those that
    live go on without the others, and a second loss in a row does not stop the set.
    """
    members, quorum = configuration.members, configuration.quorum
    if all_ack and quorum == len(members):
        living = {*alive, master.broker_id}
        members = frozenset(each for each in members if each.broker_id in living)
        quorum = len(members)
    assert master in members
    return SetConfiguration(configuration.number + 1, members, quorum).check()


def _preference(promise: Promise) -> tuple[int, int, int, int]:
    return promise.last_epoch, promise.end_offset, promise.priority, -promise.replica.broker_id
