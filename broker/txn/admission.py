"""Asks coordinators whether partitions belong to a transaction, or adds them: for Produce and TxnOffsetCommit.

The question goes to the broker that leads the id's state partition, which may be this one. It has the ids of the
topics, as this broker knows them. Invariant: it is answered with a code for every partition, whatever fails.

Entry: `TxnAdmission.admit`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tidelog.broker.txn.calls import ADMIT, AdmitParams, TopicPartition, read_codes
from tidelog.broker.txn.coordinator import TxnCoordinator
from tidelog.broker.txn.errors import TxnError
from tidelog.broker.txn.markers import CallsToPeers
from tidelog.runtime.errors import TidelogError

logger = logging.getLogger(__name__)

MAX_LOGGED_CHARS = 100
_AS_THEY_ARE = frozenset((14, 15, 16))


class TxnAdmission:
    """The way from the partitions that this broker leads to the coordinators."""

    def __init__(self, node_id: int, coordinator: TxnCoordinator, calls: CallsToPeers) -> None:
        self._node_id = node_id
        self._coordinator = coordinator
        self._calls = calls

    async def admit(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
        *,
        add: bool,
        timeout_s: float,
    ) -> dict[TopicPartition, int]:
        """Return Kafka's error code for each partition: 0 if it is in the producer's open transaction.

        `add`: partitions that are not are added to it, and a transaction is begun if none is open (KIP-890).
        """
        ids = {topic: self._coordinator.topic_id(topic) for topic, _ in partitions}
        params = AdmitParams(transactional_id, producer_id, producer_epoch, list(partitions), add, ids)
        try:
            async with asyncio.timeout(timeout_s):
                codes = await self._ask(params, timeout_s)
        except TimeoutError:
            codes = [TxnError.COORDINATOR_NOT_AVAILABLE] * len(partitions)
        except TidelogError as error:
            logger.info(
                "a coordinator of transactions does not answer",
                extra={"transactional_id": transactional_id[:MAX_LOGGED_CHARS], "error": str(error)},
            )
            code = error.kafka_code if error.kafka_code in _AS_THEY_ARE else TxnError.COORDINATOR_NOT_AVAILABLE
            codes = [code] * len(partitions)
        return dict(zip(partitions, codes, strict=True))

    async def _ask(self, params: AdmitParams, timeout_s: float) -> list[int]:
        leader = await self._coordinator.leader_of(params.transactional_id)
        if leader.id == self._node_id:
            return await self._coordinator.admit(params)
        raw = await self._calls.call(leader.id, ADMIT, params, timeout_s)
        return read_codes(raw, len(params.partitions))
