"""Produce (0): appends at once, answers when the WAL has confirmed, or with acks=1 when it is durable here.

`handle` is a plain function: when it returns, the batches have their offsets and their position in the WAL, and its
result is an `Answer`, which is set at the acknowledgement. So the next request of the connection may be appended while
this one waits for the disk (see `tidelog.broker.kafka.connection`). Only under back-pressure it is a coroutine, which
delays the next request: idempotent producers depend on the order. So it is while a partition opens here
(`tidelog.broker.partitions.openings`): a refusal would let the batches behind it overtake, and lose those of a producer
that does not retry. The other partitions of the request are appended meanwhile. And so it is when the batches take long
to check (keys of compacted topics, another compression): other clients are served between them.

Rules: exactly one batch for a partition; acks 0, 1 and -1 (0: no reply, and an error closes the connection). -1 waits
for the quorum of the replica set; 1 for the disk of this broker alone, and the record is lost if another broker is
elected that does not have it. Only -1 is refused before the append when fewer replicas are in sync than
`min.insync.replicas`, or than the set's policy asks for (NOT_ENOUGH_REPLICAS). When the WAL or the log
cache is at its bound the append waits up to the request's time-out and then fails with KAFKA_STORAGE_ERROR, which
producers retry. Where confirmation fails because the master's term has ended, the answer is NOT_LEADER_OR_FOLLOWER at
once; where it does not come in time, REQUEST_TIMED_OUT. Either way the batch may be in the log all the same, as in
Kafka. Only the partitions that it has not come for are told so.

A transactional batch in a request without a transactional id ends the request: what was not appended before it gets
TRANSACTIONAL_ID_AUTHORIZATION_FAILED, as in Kafka. Batches of two producers in one transactional request are refused
with INVALID_PRODUCER_ID_MAPPING.

Versions 0–2 cannot carry the v2 record format: refused with UNSUPPORTED_VERSION. v13 identifies topics by id.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import islice

from tidelog.batch.batch import HEADER_BYTES, Compression, InvalidRecord
from tidelog.broker.kafka.errors import (
    INVALID_PRODUCER_ID_MAPPING,
    INVALID_REQUIRED_ACKS,
    INVALID_TOPIC_EXCEPTION,
    INVALID_TXN_STATE,
    KAFKA_STORAGE_ERROR,
    NOT_ENOUGH_REPLICAS,
    NOT_LEADER_OR_FOLLOWER,
    REQUEST_TIMED_OUT,
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    UNSUPPORTED_COMPRESSION_TYPE,
    UNSUPPORTED_VERSION,
    CloseConnection,
    produce_code,
)
from tidelog.broker.kafka.handlers.leaders import current_leader, endpoints
from tidelog.broker.kafka.handlers.produce_transactions import (
    ATTRIBUTES_LOW,
    TRANSACTIONAL,
    MustAsk,
    NotAdmitted,
    TransactionalBatches,
    producers_of,
)
from tidelog.broker.kafka.services import Answer, RequestContext, serve
from tidelog.broker.kafka.wire.produce import (
    MAX_VERSION,
    MIN_VERSION,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from tidelog.broker.partitions.openings import LeaderNotAvailable, Opening
from tidelog.broker.partitions.topic_config import INTERNAL_TOPICS
from tidelog.broker.telemetry.slow_requests import Stages, Timing
from tidelog.broker.telemetry.traced import MAX_BATCHES, TracedBatch
from tidelog.controller.model.levels import TRANSACTIONS_LEVEL
from tidelog.runtime.errors import Overloaded, TidelogError
from tidelog.runtime.types import Buffer
from tidelog.stream.partition_log import MEASURED_BYTES, AppendResult, PartitionLog

FIRST_SERVED = 3
_FIRST_WITH_ZSTD = 7
_FIRST_WITH_LEADERS = 10
_FIRST_WITH_TOPIC_ID = 13
_CODEC_MASK = 0x07
_NO_TRANSACTIONS_YET = "transactions are served once all brokers are upgraded: run `tidelog cluster upgrade`"
_RETRY_PAUSE_S = 0.005
"""Delay between attempts when the storage reports that it is writable but has no room for this batch."""
_TURN_S = 0.1
"""Time after which other clients are served between two batches of a request: a batch may take 0.3 s, and a request has
thousands."""
_TURN_PAUSE_S = 0.01


_Step = tuple[TopicProduceData, PartitionProduceData, PartitionProduceResponse]


class _RequestRefused(Exception):
    """A batch ends its whole request. `code`: for the client."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Produce:
    """One Produce request in progress: completed and pending partitions, and the WAL offsets that acknowledge it.

    Its partitions may use several WALs (one for each replica set). The answer waits for each WAL once, for the
    last batch that the request appended to it.
    """

    __slots__ = (
        "_answer",
        "_appended",
        "_appended_at",
        "_checking_later_s",
        "_checking_s",
        "_deadline",
        "_deferred",
        "_failed",
        "_is_asking",
        "_log",
        "_next",
        "_opening",
        "_others",
        "_refused",
        "_slot",
        "_steps",
        "_transaction",
        "_turn_is_over",
        "_wal_end",
        "api_version",
        "request",
        "services",
        "topics",
    )

    def __init__(self, context: RequestContext, request: ProduceRequest) -> None:
        self.services = context.services
        self.api_version = context.api_version
        self.request = request
        self.topics: list[TopicProduceResponse] = []
        self._steps: list[_Step] = []
        self._deferred: list[_Step] = []
        """Those whose partition is opening, or that wait for their coordinator."""
        self._opening: Opening | None = None
        """One of these openings."""
        self._transaction: TransactionalBatches | None = None
        """Set if the request has a transactional id and may write to its transaction."""
        self._next = 0
        self._log: PartitionLog | None = None
        """The log of the first batch."""
        self._wal_end = 0
        """End of the last batch in its WAL."""
        self._others: dict[object, tuple[PartitionLog, int]] | None = None
        """The same for each other WAL: a log, and the end of the last batch."""
        self._refused: PartitionLog
        """The log that had no room."""
        self._failed = self._is_asking = self._turn_is_over = False
        self._deadline = -1.0
        self._checking_s = self._checking_later_s = self._appended_at = 0.0
        """Seconds of checks of large batches; those of them after a wait; and when all was appended, if that took one.
        """
        self._answer: Answer[ProduceResponse | None] = Answer()
        self._appended: list[tuple[PartitionLog, AppendResult, int, PartitionProduceResponse]] = []
        """The log, what its append returned, the size of the batch, and where it is answered."""
        self._slot: int | None = None
        for topic in request.topics:
            outcomes = []
            for data in topic.partitions:
                outcome = PartitionProduceResponse(data.index)
                outcomes.append(outcome)
                self._steps.append((topic, data, outcome))
            self.topics.append(TopicProduceResponse(topic.name, topic.topic_id, outcomes))

    def fail_rest(self, code: int, message: str) -> None:
        """Set the same error for all partitions not tried yet."""
        rest = [*self._deferred, *self._steps[self._next :]]
        for _, _, outcome in rest:
            outcome.error_code = code
            outcome.error_message = message
        self._failed = self._failed or bool(rest)
        self._deferred = []
        self._next = len(self._steps)

    def _note_refused(self) -> None:
        """Tell the logs of all partitions not tried yet that their batches are refused now, and sent again."""
        for topic, data, _ in [*self._deferred, *self._steps[self._next :]]:
            with contextlib.suppress(TidelogError):  # who opens it, here or elsewhere, takes that for granted
                self._log_of(topic, data).note_refused()

    def _log_of(self, topic: TopicProduceData, data: PartitionProduceData) -> PartitionLog:
        partitions = self.services.partitions
        if self.api_version >= _FIRST_WITH_TOPIC_ID:
            return partitions.get_by_id(topic.topic_id, data.index)
        return partitions.get(topic.name, data.index)

    def append(self) -> bool:
        """Append the pending batches, in order. False if some must wait: call again after `_may_go_on`.

        The storage is at its bound, or the turn is over, or (the others are appended then) partitions are opening, or a
        coordinator must be asked.
        """
        steps, clock = self._steps, self.services.clock
        turn_end = clock.monotonic() + _TURN_S if len(steps) > 1 else 0.0
        while self._next < len(steps):
            topic, data, outcome = steps[self._next]
            try:
                self._append_one(topic, data, outcome)
            except Overloaded:
                return False
            except LeaderNotAvailable as error:
                if error.opening is None:
                    self._note_error(topic, outcome, error)
                else:
                    self._deferred.append(steps[self._next])
                    self._opening = error.opening
            except TidelogError as error:
                self._note_error(topic, outcome, error)
            except NotAdmitted as error:
                self._refuse(outcome, error.code, str(error))
            except MustAsk:
                self._deferred.append(steps[self._next])
            except _RequestRefused as error:
                self.fail_rest(error.code, str(error))
                return True
            self._next += 1
            if self._next < len(steps) and clock.monotonic() > turn_end:
                self._turn_is_over = True
                return False
        if not self._deferred:
            return True
        self._steps, self._deferred, self._next = self._deferred, [], 0
        return False

    def _append_one(
        self, topic: TopicProduceData, data: PartitionProduceData, outcome: PartitionProduceResponse
    ) -> None:
        version, services = self.api_version, self.services
        log = self._log_of(topic, data)
        if log.topic in INTERNAL_TOPICS:  # a malformed record would prevent its groups from loading
            self._refuse(outcome, INVALID_TOPIC_EXCEPTION, f"clients may not write to the internal topic {log.topic}")
            return
        records = data.records
        if records is None or len(records) < HEADER_BYTES:
            raise InvalidRecord("a Produce request must hold exactly one record batch for each partition")
        attributes = records[ATTRIBUTES_LOW]
        if version < _FIRST_WITH_ZSTD and attributes & _CODEC_MASK == Compression.ZSTD:
            self._refuse(outcome, UNSUPPORTED_COMPRESSION_TYPE, f"Produce v{version} cannot carry zstd")
            return
        try:
            if self.request.acks == -1:
                log.check_writable()
            began = services.clock.monotonic() if len(records) >= MEASURED_BYTES else 0.0
            result = self._append_transactional(log, records) if attributes & TRANSACTIONAL else log.append(records)
        except Overloaded:
            self._refused = log
            raise
        if began and result.checked_at:
            self._checking_s += result.checked_at - began
        outcome.base_offset = result.base_offset
        outcome.log_append_time_ms = result.log_append_time_ms
        outcome.log_start_offset = result.log_start_offset
        first = self._log
        if first is None:
            self._log, self._wal_end = log, result.wal_end
        elif log.wal is not first.wal:
            self._append_elsewhere(log, result.wal_end)
        elif result.wal_end > self._wal_end:
            self._wal_end = result.wal_end
        self._appended.append((log, result, len(records), outcome))

    def join_transaction(self, transactional_id: str) -> None:
        """Let transactional batches in, if the cluster serves transactions and all are of one producer."""
        if self.services.controller.image.level < TRANSACTIONS_LEVEL:
            self.fail_rest(INVALID_TXN_STATE, _NO_TRANSACTIONS_YET)
        elif len(producers_of(self.request)) > 1:
            self.fail_rest(INVALID_PRODUCER_ID_MAPPING, "a request has transactional batches of several producers")
        else:
            self._transaction = TransactionalBatches(self.services, transactional_id, self.api_version)

    def _append_transactional(self, log: PartitionLog, records: memoryview) -> AppendResult:
        if self._transaction is not None:
            return self._transaction.append(log, records)
        if self.services.controller.image.level < TRANSACTIONS_LEVEL:
            raise NotAdmitted(INVALID_TXN_STATE, _NO_TRANSACTIONS_YET)
        raise _RequestRefused(
            TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "a transactional batch came without a transactional id"
        )

    def _append_elsewhere(self, log: PartitionLog, wal_end: int) -> None:
        """Record a batch in a WAL other than the first one."""
        if self._others is None:
            self._others = {}
        known = self._others.get(log.wal)
        if known is None or wal_end > known[1]:
            self._others[log.wal] = log, wal_end

    def _refuse(self, outcome: PartitionProduceResponse, code: int, message: str) -> None:
        outcome.error_code = code
        outcome.error_message = message
        self._failed = True

    def _note_error(self, topic: TopicProduceData, outcome: PartitionProduceResponse, error: TidelogError) -> None:
        self._refuse(outcome, produce_code(error), str(error))
        if isinstance(error, InvalidRecord):
            outcome.record_errors = error.record_errors
        self._name_leader(outcome, topic.name, topic.topic_id)

    def _name_leader(self, outcome: PartitionProduceResponse, topic: str, topic_id: bytes) -> None:
        if outcome.error_code == NOT_LEADER_OR_FOLLOWER and self.api_version >= _FIRST_WITH_LEADERS:
            outcome.current_leader = current_leader(self.services, topic, topic_id, outcome.index)

    def _response(self) -> ProduceResponse:
        response = ProduceResponse(self.topics)
        if self._failed:
            self._count_errors()
        if self._failed and self.api_version >= _FIRST_WITH_LEADERS:
            leaders = [
                outcome.current_leader.leader_id
                for topic in self.topics
                for outcome in topic.partitions
                if outcome.current_leader is not None
            ]
            if leaders:
                response.node_endpoints = endpoints(self.services.controller.image, leaders)
        return response

    # --- acknowledging ---------------------------------------------------------------------------------------------

    def answer(self) -> Answer[ProduceResponse | None]:
        """Return the response, set once all batches are acknowledged or the request's time-out has passed."""
        answer = self._answer
        if self.request.acks == 0:
            if self._failed:
                self._count_errors()
                answer.fail(CloseConnection(f"Produce with acks=0 failed: {self._first_error()}"))
            else:
                answer.give(None)
            self._count()
            return answer
        if self._log is None:
            self._acked()
        elif self._others is None:
            self._when_acked(self._log, self._wal_end, self._acked, self._lost)
        else:
            self._wait_for_all([(self._log, self._wal_end), *self._others.values()])
        if not answer.done:
            self._slot = self.services.deadlines.add(self._remaining_s(), self._timed_out)
        return answer

    def _when_acked(
        self, log: PartitionLog, wal_end: int, acked: Callable[[], None], lost: Callable[[Exception], None]
    ) -> None:
        """Wait for what the request asks for: the quorum, or with acks=1 this broker's own WAL."""
        if self.request.acks == 1:
            log.when_durable(wal_end, acked, lost)
        else:
            log.when_acked(wal_end, acked, lost)

    def _wait_for_all(self, ends: list[tuple[PartitionLog, int]]) -> None:
        """Wait for several WALs: the last one that confirms, or fails, sets the answer."""
        unacked = len(ends)

        def one_acked() -> None:
            nonlocal unacked
            unacked -= 1
            if unacked == 0:
                self._acked()

        def one_lost(wal: object, error: Exception) -> None:
            self._note_lost(wal, error)
            one_acked()

        for log, wal_end in ends:
            self._when_acked(log, wal_end, one_acked, partial(one_lost, log.wal))

    def _lost(self, error: Exception) -> None:
        """The only WAL confirms no more."""
        assert self._log is not None
        self._note_lost(self._log.wal, error)
        self._acked()

    def _unacked(self) -> Iterator[tuple[PartitionLog, PartitionProduceResponse]]:
        """Yield the appended batches that do not have what the request asks for, and no error yet.

        A batch that has it is told so whatever happens to the others: a producer without idempotence would double it.
        """
        for log, result, _, outcome in self._appended:
            is_acked = log.is_durable if self.request.acks == 1 else log.is_acked
            if outcome.error_code == 0 and not is_acked(result.wal_end):
                yield log, outcome

    def _note_lost(self, wal: object, error: Exception) -> None:
        """What was appended to this WAL may take effect, or never: its clients retry."""
        for log, outcome in self._unacked():
            if log.wal is wal:
                self._refuse(outcome, produce_code(error), str(error))
                self._name_leader(outcome, log.topic, log.topic_id)

    def _acked(self) -> None:
        if self._slot is not None:
            self.services.deadlines.discard(self._slot, self._timed_out)
        if not self._answer.done:
            self._answer.give(self._response())
        self._count()

    def _count(self) -> None:
        """Update the metrics, once: after the answer, which need not wait for it."""
        appended, self._appended = self._appended, []
        metrics = self.services.metrics
        for log, result, size_bytes, _ in appended:
            metrics.load.produced(log.first_stream, size_bytes)
            if not result.duplicate:
                metrics.produced(log.topic, result.last_offset - result.base_offset + 1, size_bytes)

    def _timed_out(self) -> None:
        if not self._answer.done:
            for _, outcome in self._unacked():
                outcome.error_code = REQUEST_TIMED_OUT
                self._failed = True
            self._answer.give(self._response())
        self._count()
        asyncio.get_running_loop().call_soon(self._forget_records)  # behind the response, of which traces are made

    def _forget_records(self) -> None:
        """Let go of the request's memory, which its answer has given back to the budget.

        The WAL calls this request when it confirms, which may be much later. The log has what was new in it, within a
        bound; idempotent producers repeat that again and again, and nothing bounds the repeats.
        """
        for topic in self.request.topics:
            for data in topic.partitions:
                data.records = None

    def _count_errors(self) -> None:
        metrics = self.services.metrics
        for topic in self.topics:
            for outcome in topic.partitions:
                if outcome.error_code != 0:
                    metrics.partition_error(ProduceRequest.API_KEY, outcome.error_code)

    def _first_error(self) -> str:
        for topic in self.topics:
            for outcome in topic.partitions:
                if outcome.error_code != 0:
                    return f"{outcome.error_message} (error {outcome.error_code})"
        return "unknown"

    # --- back-pressure ---------------------------------------------------------------------------------------------

    def _remaining_s(self) -> float:
        if self._deadline < 0:
            return max(self.request.timeout_ms, 0) / 1000
        return max(self._deadline - self.services.clock.monotonic(), 0.0)

    async def wait_and_append(self) -> ProduceResponse | None:
        """Append the pending batches as partitions open and the storage makes room, within the request's time-out."""
        services, checking_s = self.services, self._checking_s
        self._deadline = services.clock.monotonic() + self._remaining_s()
        try:
            async with asyncio.timeout(self._remaining_s()):
                await self._may_go_on()
                while not self.append():
                    if not self._turn_is_over:
                        await asyncio.sleep(_RETRY_PAUSE_S)
                    await self._may_go_on()
        except TimeoutError:
            self._note_refused()
            if self._is_asking:
                self.fail_rest(NOT_ENOUGH_REPLICAS, "the transaction's coordinator has not answered: retry")
            if self._opening is not None:
                self.fail_rest(NOT_LEADER_OR_FOLLOWER, "the partition is still opening: retry")
            if self._turn_is_over:
                self.fail_rest(KAFKA_STORAGE_ERROR, "the batches of the request take too long to check: retry")
            self.fail_rest(KAFKA_STORAGE_ERROR, "the write-ahead log is at its bound: retry")
        except TidelogError as error:
            self._note_refused()
            self.fail_rest(produce_code(error), str(error))
        self._appended_at = services.clock.monotonic()
        self._checking_later_s = self._checking_s - checking_s
        return await self.answer()

    async def _may_go_on(self) -> None:
        """Wait for what made `append` stop: other clients, a coordinator, an opening, or room."""
        transaction = self._transaction
        if self._turn_is_over:
            await asyncio.sleep(_TURN_PAUSE_S)
            self._turn_is_over = False
        elif transaction is not None and transaction.must_ask:
            self._is_asking = True
            await transaction.ask(self._remaining_s())
            self._is_asking = False
        elif self._opening is None:
            await self._refused.writable()
        else:
            await self._opening.wait(self._remaining_s())
            self._opening = None

    # --- for the recorder of slow requests -------------------------------------------------------------------------

    def timing(self, started_at: float, handled_at: float, now: float) -> Timing:
        """See `RequestParts`. The WAL's history says when it had the request's batches."""
        appended_at = self._appended_at or handled_at
        durable_at = acked_at = appended_at
        if self.request.acks != 0 and self._log is not None:
            for log, wal_end in [(self._log, self._wal_end), *(self._others or {}).values()]:
                durable, confirmed = log.history.reached(wal_end, now)
                durable_at = max(durable_at, durable)
                acked_at = max(acked_at, durable if self.request.acks == 1 else confirmed)
        acked_at = min(acked_at, now)
        sync = min(durable_at, acked_at) - appended_at  # nothing is confirmed that is not durable here
        topic = self.request.topics[0] if self.request.topics else None
        errors = (one.error_code for each in self.topics for one in each.partitions if one.error_code)
        return Timing(
            Stages(
                check=self._checking_s,
                append=max(handled_at - started_at - self._checking_s + self._checking_later_s, 0.0),
                room=max(appended_at - handled_at - self._checking_later_s, 0.0),
                sync=sync,
                replication=acked_at - appended_at - sync,
            ),
            acked_at,
            0.0,
            self._log.topic if self._log is not None else topic.name if topic is not None else "",
            topic.partitions[0].index if topic is not None and topic.partitions else -1,
            sum(len(each.partitions) for each in self.topics),
            next(errors, 0),
        )

    def trace_records(self) -> Sequence[Buffer]:
        """See `tidelog.broker.telemetry.traced.RequestParts`."""
        every = (data.records for topic in self.request.topics for data in topic.partitions)
        return list(islice((each for each in every if each is not None), MAX_BATCHES))

    def traced(self) -> list[TracedBatch]:
        """See `tidelog.broker.telemetry.traced.RequestParts`."""
        batches: list[TracedBatch] = []
        for topic, outcomes in zip(self.request.topics, self.topics, strict=True):
            name = topic.name or self.services.topic_name(topic.topic_id)
            for data, outcome in zip(topic.partitions, outcomes.partitions, strict=True):
                if len(batches) == MAX_BATCHES:
                    return batches
                records = (data.records,) if data.records is not None else ()
                batches.append(TracedBatch(name, data.index, outcome.base_offset, records, outcome.error_code))
        return batches


def handle(context: RequestContext, request: ProduceRequest) -> Awaitable[ProduceResponse | None]:
    """Append now; await the result for the acknowledgement."""
    produce = context.timed = _Produce(context, request)
    if context.api_version < FIRST_SERVED:
        produce.fail_rest(UNSUPPORTED_VERSION, "Produce before v3 is not supported")
    elif request.acks not in (-1, 0, 1):
        produce.fail_rest(INVALID_REQUIRED_ACKS, f"acks must be -1, 0 or 1, not {request.acks}")
    elif request.transactional_id is not None:
        produce.join_transaction(request.transactional_id)
    if not produce.append():
        return produce.wait_and_append()
    return produce.answer()


APIS = [serve(ProduceRequest, MIN_VERSION, MAX_VERSION, handle)]
