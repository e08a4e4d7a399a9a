"""Protections of the replication protocol that `tests.support.replica_world` misses when they are switched off.

Entry: `MUTATIONS`.
"""

from __future__ import annotations

_ROOM = "tidelog.storage.replication"
MUTATIONS: dict[str, tuple[str, str, str]] = {
    "only the present configuration counts": (
        f"{_ROOM}.master:Master._advance",
        "in_force = (self.configuration, self.pending, self.prepared)",
        "in_force = (self.configuration, None if not mutated() else self.pending, None)",
    ),
    "one promise fewer": (
        f"{_ROOM}.configuration:SetConfiguration.promises_needed",
        "len(self.members) - self.quorum + 1",
        "max(1, len(self.members) - self.quorum + int(mutated()))",
    ),
    "a designated member is elected although confirmed bytes may be ahead": (
        f"{_ROOM}.election:elected",
        "return wanted if not_ahead >= configuration.promises_needed else best",
        "return wanted if not mutated() else best",
    ),
    "another disk counts as the one before": (
        f"{_ROOM}.election:elected",
        "if each.replica in configuration.members}",
        "if each.replica.broker_id in members and not mutated()}",
    ),
    "a dirty end stays": (
        f"{_ROOM}.following:WalFollower._match",
        "Step.KEEP if cut == mine.end_offset else Step.TRUNCATE",
        "Step.KEEP if not mutated() else Step.TRUNCATE",
    ),
    "a batch crosses an epoch": (
        f"{_ROOM}.sending:FollowerLink.batch",
        "min(epoch_end, wanted)",
        "wanted + int(mutated())",
    ),
    "a request for an older configuration is taken": (
        "tidelog.controller.machine.replica_sets:alter_sync_state_set",
        "if command.sync_state_set_epoch != present.number:",
        "if command.sync_state_set_epoch != present.number and mutated():",
    ),
    "what an earlier master confirmed is not counted in a change": (
        f"{_ROOM}.master:Master._may_be_confirmed",
        "return max(self.confirm_offset, self._epoch_confirmable_at)",
        "return max(self.confirm_offset, int(mutated()) * self._epoch_confirmable_at)",
    ),
    "the set shrinks to the living although a quorum confirms": (
        f"{_ROOM}.election:settled",
        "if all_ack and quorum == len(members):",
        "if not mutated():",
    ),
}
"""Name → (module:function, line, line instead)."""
