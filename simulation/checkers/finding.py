"""Findings and options of the checkers."""

from __future__ import annotations

import msgspec

from tidelog.simulation.checkers.history import Op


class Finding(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One violation."""

    rule: str
    """One of `RULES`, or of another checker's."""
    message: str
    """One sentence."""
    ops: list[Op] = []
    """The operations that prove it."""
    topic: str = ""
    partition: int = -1
    offset: int = -1

    def text(self) -> str:
        """Return the message, with the operations below it."""
        return "\n".join([f"{self.rule}: {self.message}", *(f"    {op.text()}" for op in self.ops)])


class CheckOptions(msgspec.Struct, kw_only=True):
    """Information that is not in the history."""

    gaps_allowed: frozenset[str] = frozenset()
    """Topics from which acknowledged records may disappear by design, e.g. by log compaction."""
    max_lag_us: int | None = None
    """Maximum lag: an empty poll is a finding if a record was acknowledged longer ago; None: only measured."""
    tail_waits: bool = False
    """The high watermark of a poll may be lower after an election, until the new master has confirmed again (replica
    sets with several members; KIP-207). No record below it is lost all the same."""
    settle_us: int | None = None
    """A `send` that begins later than this after `heal` must succeed; None: not checked."""


class Findings:
    """Collects findings without duplicates of the same rule at the same place."""

    def __init__(self) -> None:
        self.found: list[Finding] = []
        self._seen: set[tuple[str, str, int, int]] = set()

    def add(self, rule: str, message: str, *ops: Op, at: tuple[str, int, int]) -> None:
        """`at` is topic, partition and a key that distinguishes findings of a rule there, usually the offset."""
        key = (rule, *at)
        if key in self._seen:
            return
        self._seen.add(key)
        topic, partition, offset = at
        listed = sorted({op.index: op for op in ops}.values(), key=lambda op: op.index)
        self.found.append(
            Finding(rule=rule, message=message, ops=listed, topic=topic, partition=partition, offset=offset)
        )
