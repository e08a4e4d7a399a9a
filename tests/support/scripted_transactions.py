"""The coordinator's side of admission, with answers that a test has written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

Key = tuple[str, int]


class Question(NamedTuple):
    """One call of `admit`."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    partitions: list[Key]
    add: bool


class ScriptedTransactions:
    """`TransactionPartitions` that says yes unless told otherwise."""

    def __init__(self) -> None:
        self.questions: list[Question] = []
        self.script: list[dict[Key, int] | int] = []
        """Answers of the next questions: a code for all partitions, or for some (0 for the others)."""
        self.open = asyncio.Event()
        """Cleared: answers wait."""
        self.open.set()
        self.on_question: Callable[[], None] = lambda: None

    async def admit(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[Key],
        *,
        add: bool,
        timeout_s: float,
    ) -> dict[Key, int]:
        self.questions.append(Question(transactional_id, producer_id, producer_epoch, list(partitions), add))
        answer = self.script.pop(0) if self.script else 0
        self.on_question()
        await self.open.wait()
        return {key: answer if isinstance(answer, int) else answer.get(key, 0) for key in partitions}
