"""What a checker says, and what it is told beforehand."""

from __future__ import annotations

import msgspec

from simulation.history import Op


class Finding(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One broken promise."""

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
        """For people: the sentence, and the operations below it."""
        return "\n".join([f"{self.rule}: {self.message}", *(f"    {op.text()}" for op in self.ops)])


class CheckOptions(msgspec.Struct, kw_only=True):
    """What the history cannot say of itself."""

    gaps_allowed: frozenset[str] = frozenset()
    """Topics in which acknowledged records may vanish by design, e.g. by key compaction."""
    max_lag_us: int | None = None
    """Polls that find nothing although something older than this was acknowledged are findings; None: only measured."""
    settle_us: int | None = None
    """A `send` that begins later than this after `heal` must succeed; None: not asked for."""


class Findings:
    """Collects; what proves the same thing about the same place again is left out."""

    def __init__(self) -> None:
        self.found: list[Finding] = []
        self._seen: set[tuple[str, str, int, int]] = set()

    def add(self, rule: str, message: str, *ops: Op, at: tuple[str, int, int]) -> None:
        """`at` is topic, partition and what tells two findings of a rule apart there, usually the offset."""
        key = (rule, *at)
        if key in self._seen:
            return
        self._seen.add(key)
        topic, partition, offset = at
        listed = sorted({op.index: op for op in ops}.values(), key=lambda op: op.index)
        self.found.append(
            Finding(rule=rule, message=message, ops=listed, topic=topic, partition=partition, offset=offset)
        )
