"""Reading records for the console: by position, by key or text, and the new ones as they come.

A reader is a consumer without a group: it commits nothing, and no broker knows of it but by its fetches.

Invariants (rule 12): at most `MAX_READERS` readers at a time; one sends at most `MAX_LIMIT` records, or follows for
`FOLLOW_S` at up to `MAX_PER_S` records a second, and counts those that it leaves out; a search ends after `SEARCH_S` or
`MAX_SCANNED` records, and says where it stopped; a browser that does not take a line within `TAKE_S` is given up. What
goes wrong after the first line is the last line.

Entry: `RecordReader.reading`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tidelog.console.client_errors import record_headers, translate
from tidelog.console.decode import FULL_LIMIT, VALUE_LIMIT, shown
from tidelog.console.groups import Place
from tidelog.console.kafka import KafkaAccess, Span
from tidelog.console.schemas import SchemaRegistry
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import InvalidInput, Overloaded, TidelogError, Unavailable

MAX_READERS: Final = 4
MAX_LIMIT: Final = 500
MAX_PARTITIONS: Final = 1_000
MAX_PER_S: Final = 200
MAX_SCANNED: Final = 2_000_000
MAX_HEADERS_SHOWN: Final = 50
MAX_PATTERN: Final = 1_000
SEARCH_S: Final = 60.0
FOLLOW_S: Final = 900.0
TAKE_S: Final = 30.0
TOLD_EVERY_S: Final = 1.0
CHECKED_EVERY_S: Final = 5.0
"""How often a live tail to which nothing comes looks whether its topic still exists: a client is not told that."""
BATCH: Final = 200
POLL_S: Final = 0.25
STARTS: Final = ("last", "beginning", "end", "offset", "time")

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """Which records are wanted."""

    topic: str
    partition: int | None = None
    start: str = "last"
    """One of `STARTS`; `offset` and `time` (milliseconds) have a `value`."""
    value: int = 0
    key: bytes | None = None
    """Only records with this key."""
    contains: bytes | None = None
    """Only records whose key or value contains this."""
    follow: bool = False
    limit: int = 100
    committed: bool = False
    """Leave out records of open and aborted transactions."""
    full: bool = False
    """Send up to `FULL_LIMIT` bytes of each value; with a `limit` of 1."""

    @staticmethod
    def parse(given: Mapping[str, str]) -> RecordQuery:
        """Parse the parameters of a request. Raises `InvalidInput`."""
        known = {"topic", "partition", "start", "value", "key", "contains", "follow", "limit", "committed", "full"}
        for name in given:
            if name not in known:
                raise InvalidInput(f"{name[:100]!r} is no parameter of a search", hint=", ".join(sorted(known)))
        start = given.get("start", "last")
        if start not in STARTS:
            raise InvalidInput(f"start is {start[:20]!r}: one of {', '.join(STARTS)} is expected")
        if start in ("offset", "time") and "value" not in given:
            raise InvalidInput(f"start={start} needs a value")
        full = _flag(given, "full")
        return RecordQuery(
            topic=given.get("topic", ""),
            partition=_number(given, "partition", 0, 0, (1 << 31) - 1) if given.get("partition") else None,
            start=start,
            value=_number(given, "value", 0, 0, (1 << 63) - 1),
            key=_pattern(given, "key"),
            contains=_pattern(given, "contains"),
            follow=_flag(given, "follow"),
            limit=_number(given, "limit", 100, 1, 1 if full else MAX_LIMIT),
            committed=_flag(given, "committed"),
            full=full,
        )

    def matches(self, key: bytes | None, value: bytes | None) -> bool:
        """Return whether a record is one of those wanted."""
        if self.key is not None and key != self.key:
            return False
        if self.contains is None:
            return True
        return (value is not None and self.contains in value) or (key is not None and self.contains in key)


def _number(given: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = given.get(name, "")
    if not text:
        return min(default, high)
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and low <= int(text) <= high):
        raise InvalidInput(f"{name} is {text[:30]!r}: a number from {low} to {high} is expected")
    return int(text)


def _flag(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidInput(f"{name} is {text[:20]!r}: true or false is expected")
    return text == "true"


def _pattern(given: Mapping[str, str], name: str) -> bytes | None:
    """The bytes to look for: text as UTF-8, or hexadecimal after `0x`."""
    text = given.get(name, "")
    if not text:
        return None
    if len(text) > MAX_PATTERN:
        raise InvalidInput(f"{name} has more than {MAX_PATTERN} characters")
    if not text.startswith("0x"):
        return text.encode()
    try:
        return bytes.fromhex(text[2:])
    except ValueError:
        raise InvalidInput(f"{name} is {text[:30]!r}: pairs of hexadecimal digits are expected after 0x") from None


@dataclass(slots=True)
class _ReadProgress:
    """What a reader has seen."""

    sent: int = 0
    scanned: int = 0
    skipped: int = 0
    """Matches that were not sent, for more came than a page can show."""
    done: set[int] = field(default_factory=set)
    """Partitions that are read to their ends."""
    next: dict[int, int] = field(default_factory=dict)
    """The offset after the last one seen, by partition."""

    def line(self, event: str, **more: Any) -> Line:
        return {"event": event, "sent": self.sent, "scanned": self.scanned, "skipped": self.skipped, **more}


class RecordReader:
    """The readers of one console."""

    def __init__(self, kafka: KafkaAccess, clock: Clock, registry: SchemaRegistry | None = None) -> None:
        """`registry`: that of the schemas of framed values, if there is one."""
        self._kafka = kafka
        self._clock = clock
        self._registry = registry
        self._running = 0

    async def send(self, write: Callable[[bytes], Awaitable[None]], line: bytes) -> None:
        """Write a line. Raises `TimeoutError` if the browser does not take it."""
        async with asyncio.timeout(TAKE_S):
            await write(line)

    @contextlib.asynccontextmanager
    async def reading(self, query: RecordQuery) -> AsyncIterator[AsyncIterator[Line]]:
        """Begin to read; yields the lines to send. Raises `NotFound`, `InvalidInput`, `Overloaded`, `Unavailable`."""
        if self._running >= MAX_READERS:
            raise Overloaded(
                f"{MAX_READERS} searches and live tails are going on", hint="close one, or use `tidelog consume`"
            )
        self._running += 1
        try:
            spans = await self._spans(query)
            starts = await self._starts(query, spans)
            consumer = await self._kafka.run(self._consumer, query, starts)
            try:
                yield _with_error(self._lines(query, spans, starts, consumer))
            finally:
                await asyncio.shield(self._kafka.run(consumer.close))
        finally:
            self._running -= 1

    async def _spans(self, query: RecordQuery) -> dict[Place, Span]:
        there = await self._kafka.partitions(query.topic)
        if query.partition is not None and query.partition not in there:
            raise InvalidInput(f"topic {query.topic!r} has the partitions 0 to {len(there) - 1}")
        chosen = there if query.partition is None else [query.partition]
        if len(chosen) > MAX_PARTITIONS:
            raise InvalidInput(f"the topic has {len(chosen)} partitions: choose one", hint="partition=N")
        spans = await self._kafka.spans((query.topic, partition) for partition in chosen)
        if not spans:
            raise Unavailable(f"no partition of {query.topic!r} has a leader now", hint="see `tidelog status`")
        return spans

    async def _starts(self, query: RecordQuery, spans: Mapping[Place, Span]) -> dict[Place, int]:
        if query.start == "time":
            at = await self._kafka.offsets_at(spans, query.value)
            return {place: span.end if (found := at[place]) is None else found for place, span in spans.items()}
        each = max(1, query.limit // len(spans))

        def start(span: Span) -> int:
            if query.start == "beginning":
                return span.start
            if query.start == "end":
                return span.end
            return query.value if query.start == "offset" else span.end - each

        return {place: min(max(start(span), span.start), span.end) for place, span in spans.items()}

    def _consumer(self, query: RecordQuery, starts: Mapping[Place, int]) -> Any:
        """Create the consumer. Runs in a thread."""
        from confluent_kafka import Consumer, TopicPartition

        config = {
            **self._kafka.config(),
            "group.id": "tidelog-console",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed" if query.committed else "read_uncommitted",
            "queued.max.messages.kbytes": 8 << 10,
            "queued.min.messages": 1_000,
            "fetch.message.max.bytes": 1 << 20,
            "fetch.wait.max.ms": 250,
        }
        consumer = Consumer(config)
        consumer.assign([TopicPartition(topic, partition, offset) for (topic, partition), offset in starts.items()])
        return consumer

    async def _lines(
        self, query: RecordQuery, spans: Mapping[Place, Span], starts: Mapping[Place, int], consumer: Any
    ) -> AsyncIterator[Line]:
        began = told = checked = self._clock.monotonic()
        seen = _ReadProgress(done={place[1] for place, span in spans.items() if starts[place] >= span.end})
        ends = {partition: span.end for (_, partition), span in spans.items()}
        yield {
            "event": "start",
            "partitions": [
                {"partition": place[1], "from": starts[place], "start": span.start, "end": span.end}
                for place, span in spans.items()
            ],
        }
        second, in_second = began, 0
        while (reason := self._end(query, seen, ends, self._clock.monotonic() - began)) is None:
            messages = await self._kafka.run(consumer.consume, BATCH, POLL_S)
            now = self._clock.monotonic()
            if now - second >= 1.0:
                second, in_second = now, 0
            for message in messages:
                line = self._line(query, seen, ends, message)
                if line is None:
                    continue
                if query.follow and in_second >= MAX_PER_S:
                    seen.skipped += 1
                    continue
                in_second += 1
                seen.sent += 1
                yield await self._decoded(query, line, message)
                if not query.follow and seen.sent >= query.limit:
                    break
            if messages:
                checked = now
            elif query.follow and now - checked >= CHECKED_EVERY_S:
                checked = now
                await self._check_exists(query.topic)
            if now - told >= TOLD_EVERY_S:
                told = now
                yield seen.line("progress")
        yield seen.line("end", reason=reason, next=seen.next)

    async def _check_exists(self, topic: str) -> None:
        """Raise `NotFound` if the topic is gone; a cluster that does not answer now may do so later."""
        with contextlib.suppress(Unavailable):
            await self._kafka.partitions(topic)

    async def _decoded(self, query: RecordQuery, line: Line, message: Any) -> Line:
        """The line with key and value as their schemas say."""
        if self._registry is None:
            return line
        limit = FULL_LIMIT if query.full else VALUE_LIMIT
        found = {
            name: await self._registry.shown(data, limit)
            for name, data in (("key", message.key()), ("value", message.value()))
        }
        return {**line, **{name: each for name, each in found.items() if each is not None}}

    @staticmethod
    def _end(query: RecordQuery, seen: _ReadProgress, ends: Mapping[int, int], seconds: float) -> str | None:
        """Why the reader ends now; None: it goes on."""
        if query.follow:
            return f"a live tail ends after {FOLLOW_S / 60:.0f} minutes" if seconds >= FOLLOW_S else None
        if seen.sent >= query.limit:
            return "limit"
        if seen.done >= ends.keys():
            return "end"
        if seconds >= SEARCH_S:
            return f"a search ends after {SEARCH_S:.0f} s"
        return f"a search ends after {MAX_SCANNED:,} records" if seen.scanned >= MAX_SCANNED else None

    @staticmethod
    def _line(query: RecordQuery, seen: _ReadProgress, ends: Mapping[int, int], message: Any) -> Line | None:
        """The line for what a consumer returned; None if there is none."""
        from confluent_kafka import KafkaError

        error = message.error()
        partition = message.partition()
        if error is not None:
            if error.code() != KafkaError._PARTITION_EOF:
                raise translate(error, f"{query.topic}:{partition}")
            seen.done.add(partition)
            return None
        offset = message.offset()
        if not query.follow and offset >= ends[partition]:
            seen.done.add(partition)
            return None
        seen.scanned += 1
        seen.next[partition] = offset + 1
        if offset + 1 >= ends[partition]:
            seen.done.add(partition)
        key, value = message.key(), message.value()
        if not query.matches(key, value):
            return None
        limit = FULL_LIMIT if query.full else VALUE_LIMIT
        headers = record_headers(message)
        shown_headers = (headers or [])[:MAX_HEADERS_SHOWN]
        kind, timestamp_ms = message.timestamp()
        return {
            "event": "record",
            "partition": partition,
            "offset": offset,
            "timestamp_ms": timestamp_ms if kind else None,
            "key": shown(key, limit),
            "value": shown(value, limit),
            "headers": [[name, shown(data, VALUE_LIMIT)] for name, data in shown_headers],
            "headers_left_out": len(headers or []) - len(shown_headers),
            "headers_unreadable": headers is None,
        }


async def _with_error(lines: AsyncIterator[Line]) -> AsyncIterator[Line]:
    """The lines, and an error that ends them: the answer has begun, and can have no other status any more."""
    try:
        async for line in lines:
            yield line
    except TidelogError as error:
        yield {"event": "error", "error": error.message, "hint": error.hint}
