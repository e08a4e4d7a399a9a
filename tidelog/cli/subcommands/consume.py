"""`tidelog consume`: write a topic's records to standard output.

Without `--exit`, `--max-records` or `--timeout` it follows the topic until Ctrl-C. It starts at the committed offsets
of the group, if given; else at the end, or at the beginning with `--exit`.

The output is the unchanged bytes of the records. With a group, the offset of a record is committed only after the
record was written to the output, so that no record is lost if the reader of the output ends.

Entry: `consume`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection, message_error
from tidelog.cli.completion import group_names, partition_numbers, topic_names
from tidelog.cli.options import TextType, TimestampType, bootstrap_option
from tidelog.console.client_errors import record_headers, translate
from tidelog.runtime.errors import InvalidInput, TidelogError, Unavailable
from tidelog.runtime.progress_bar import ProgressBar
from tidelog.runtime.text import printable, text_or_base64

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

BATCH = 1_000
"""Maximum number of records per call of the client."""
POLL_S = 0.1
"""Maximum wait for records before the output is checked."""
_CELL = 60
"""Width of a key in a table; the value is the last column and is not truncated."""

Format = Callable[["Message"], bytes]


class _Start(NamedTuple):
    """The start position from the options; at most one field is set."""

    from_beginning: bool
    offset: int | None
    """A negative value counts back from the end of each partition."""
    timestamp_ms: int | None

    @property
    def given(self) -> bool:
        return self.from_beginning or self.offset is not None or self.timestamp_ms is not None


class _End(NamedTuple):
    """The end conditions; None and False disable a condition."""

    max_records: int | None
    at_end: bool
    timeout_s: float | None


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.option("--from-beginning", is_flag=True, help="Start at the oldest record.")
@click.option("-o", "--offset", type=int, metavar="N", help="Start at offset N; -N: N records before the end.")
@click.option("--at", "timestamp_ms", type=TimestampType(), metavar="TIME", help="Start at a time: ISO 8601, ms, -10m.")
@click.option(
    "-p",
    "--partition",
    "partitions",
    type=click.IntRange(min=0),
    multiple=True,
    help="Only this partition; may repeat.",
    shell_complete=partition_numbers,
)
@click.option(
    "-g",
    "--group",
    metavar="GROUP",
    help="Consume as a member of this group, and commit.",
    shell_complete=group_names,
)
@click.option("-n", "--max-records", type=click.IntRange(min=1), metavar="N", help="Stop after N records.")
@click.option("-e", "--exit", "at_end", is_flag=True, help="Stop at the end of the topic.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), metavar="S", help="Stop after S s without records."
)
@click.option("--format", "style", type=click.Choice(["value", "json", "table"]), default="value", show_default=True)
@click.option(
    "--key-separator",
    type=TextType(may_be_empty=True),
    metavar="TEXT",
    help="With values: prefix each with its key and TEXT.",
)
@click.option(
    "--delimiter",
    type=TextType(may_be_empty=True),
    default="\n",
    metavar="TEXT",
    help="With values: what ends each; default is a new line.",
)
@bootstrap_option
def consume(
    topic: str,
    from_beginning: bool,
    offset: int | None,
    timestamp_ms: int | None,
    partitions: tuple[int, ...],
    group: str | None,
    max_records: int | None,
    at_end: bool,
    timeout_s: float | None,
    style: str,
    key_separator: str | None,
    delimiter: str,
    bootstrap: str,
) -> None:
    """Read the records of TOPIC. Follows the topic until Ctrl-C, unless an end is given."""
    start = _Start(from_beginning, offset, timestamp_ms)
    if sum((from_beginning, offset is not None, timestamp_ms is not None)) > 1:
        raise InvalidInput("--from-beginning, --offset and --at are mutually exclusive")
    if group is not None and (partitions or offset is not None or timestamp_ms is not None):
        raise InvalidInput(
            "a group starts at its committed offsets, in its assigned partitions",
            hint="`tidelog group reset-offsets` moves a group; or omit --group",
        )
    if at_end and not start.given:
        start = start._replace(from_beginning=True)
    cluster = ClusterConnection(bootstrap)
    known = cluster.topics([topic])[topic]
    wrong = sorted(set(partitions) - set(known))
    if wrong:
        raise InvalidInput(f"topic {topic!r} has the partitions 0 to {len(known) - 1}, not {wrong[0]}")
    end = _End(max_records, at_end, timeout_s)
    reader = _TopicReader(cluster, topic, group, _formatter(style, key_separator, delimiter), end)
    try:
        if group is not None:
            reader.subscribe(earliest=start.from_beginning)
        else:
            reader.assign(list(partitions) or known, start)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave the group normally, as on Ctrl-C
        if style == "table":
            reader.write(b"PARTITION  OFFSET      TIMESTAMP                 KEY  VALUE\n")
        reader.run()
    finally:
        reader.close()


# --- reading -----------------------------------------------------------------------------------------------------


class _TopicReader:
    """A consumer, its output and its end conditions."""

    def __init__(self, cluster: ClusterConnection, topic: str, group: str | None, format: Format, end: _End) -> None:
        self._cluster = cluster
        self._topic = topic
        self._group = group
        self._format = format
        self._end = end
        self._written = 0
        self._assigned: set[int] = set()
        self._ended: set[int] = set()
        self._lost = False
        self._says_it_waits = not end.at_end and sys.stderr.isatty()
        self._total = end.max_records or 0
        """How many records there will be; 0: not known."""
        self._out = sys.stdout.buffer
        self._consumer: Consumer | None = None

    def _connect(self, earliest: bool) -> Consumer:
        from confluent_kafka import Consumer

        self._consumer = Consumer(
            {
                **self._cluster.client_config(),
                "group.id": self._group or "tidelog-consume",  # librdkafka requires an id; used with --group only
                "enable.auto.commit": self._group is not None,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "earliest" if earliest else "latest",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 50 if self._end.at_end else 500,  # the end is detected by an empty fetch
                "error_cb": self._on_client_error,
            }
        )
        return self._consumer

    def subscribe(self, *, earliest: bool) -> None:
        """Join the group; partitions without a committed offset start at the beginning or the end."""

        def assigned(_: Consumer, partitions: list[TopicPartition]) -> None:
            self._assigned |= {one.partition for one in partitions}

        def revoked(_: Consumer, partitions: list[TopicPartition]) -> None:
            gone = {one.partition for one in partitions}
            self._assigned -= gone
            self._ended -= gone

        self._connect(earliest).subscribe([self._topic], on_assign=assigned, on_revoke=revoked, on_lost=revoked)

    def assign(self, partitions: list[int], start: _Start) -> None:
        """Read these partitions without a group."""
        from confluent_kafka import TopicPartition

        offsets, ends = _start_offsets(self._cluster, self._topic, partitions, start)
        if self._end.at_end:
            there = sum(ends[one] - offsets[one] for one in partitions)
            self._total = min(there, self._end.max_records or there)
        self._assigned = set(partitions)
        consumer = self._connect(earliest=True)  # offsets removed by retention meanwhile: continue after them
        consumer.assign([TopicPartition(self._topic, one, offsets[one]) for one in partitions])

    def run(self) -> None:
        """Write records until an end condition, Ctrl-C, or a closed output."""
        progress = ProgressBar("consuming", self._total, "records")
        is_file = (self._end.at_end or self._end.max_records is not None) and not sys.stdout.isatty()
        try:
            with progress if is_file else contextlib.nullcontext():
                self._run(progress)
        except BrokenPipeError:
            output.leave_pipe()
        except KeyboardInterrupt:
            return  # the usual end of following

    def _run(self, progress: ProgressBar) -> None:
        assert self._consumer is not None
        last = time.monotonic()
        while not self._done():
            room = BATCH if self._end.max_records is None else min(BATCH, self._end.max_records - self._written)
            records, failure = self._sorted_out(self._consumer.consume(room, POLL_S))
            if records:
                self._lost = False
                for message in records:
                    self._out.write(self._format(message))
                self._out.flush()
                self._written += len(records)
                progress.update(self._written)
                self._store(records)
                last = time.monotonic()
            if failure is not None:
                raise failure
            if records:
                continue
            self._say_waiting()
            if output.reader_gone():
                output.leave_pipe()
            elif self._end.timeout_s is not None and time.monotonic() - last >= self._end.timeout_s:
                self._timed_out()
                return

    def _done(self) -> bool:
        if self._written == self._end.max_records:
            return True
        return self._end.at_end and bool(self._assigned) and self._assigned <= self._ended

    def _say_waiting(self) -> None:
        """Tell a person once that nothing is wrong when nothing is printed."""
        if self._says_it_waits:
            self._says_it_waits = False
            output.warn(f"waiting for records of {self._topic}; Ctrl-C ends")

    def _timed_out(self) -> None:
        wanted, written = self._end.max_records, self._written
        if wanted is not None:
            raise Unavailable(
                f"only {written} of {wanted} records arrived, then none for {self._end.timeout_s:g} s",
                hint=f"`tidelog topic describe {self._topic}` shows the offsets",
            )

    def _sorted_out(self, messages: list[Message]) -> tuple[list[Message], TidelogError | None]:
        """Return the records up to the first permanent error, and that error."""
        records: list[Message] = []
        for message in messages:
            try:
                if self._is_record(message):
                    records.append(message)
            except TidelogError as error:
                return records, error
        return records, None

    def _is_record(self, message: Message) -> bool:
        """Whether a message is a record. Notes the end of a partition; raises permanent errors."""
        from confluent_kafka import KafkaError

        error, partition = message.error(), _partition(message)
        if error is None:
            self._ended.discard(partition)
            return True
        if error.code() == KafkaError._PARTITION_EOF:
            self._ended.add(partition)
            return False
        self._raise_or_warn(error, message_error(message) or translate(error))
        return False

    def _raise_or_warn(self, error: KafkaError, translated: TidelogError) -> None:
        if error.fatal() or not (isinstance(translated, Unavailable) or error.retriable()):
            raise translated
        if not self._lost:
            self._lost = True
            output.warn(f"warning: {translated.message}; continuing when it is available")

    def _on_client_error(self, error: KafkaError) -> None:
        """Report errors of the whole client, which retries by itself."""
        from confluent_kafka import KafkaError

        if error.code() == KafkaError._ALL_BROKERS_DOWN and not self._lost:
            self._lost = True
            output.warn(f"warning: no broker of {self._cluster.bootstrap} answers; continuing when one is available")

    def _store(self, records: list[Message]) -> None:
        """Store the offsets of written records for the next commit."""
        if self._group is None:
            return
        from confluent_kafka import KafkaError, KafkaException, TopicPartition

        assert self._consumer is not None
        last = {_partition(message): message for message in records}
        for partition, message in last.items():
            position = TopicPartition(self._topic, partition, (message.offset() or 0) + 1)
            try:
                self._consumer.store_offsets(offsets=[position])
            except KafkaException as error:
                if error.args[0].code() != KafkaError._STATE:  # reassigned: the new owner reads the record again
                    raise translate(error, f"cannot commit offsets of group {self._group!r}") from error

    def write(self, data: bytes) -> None:
        """Write bytes to standard output."""
        self._out.write(data)

    def close(self) -> None:
        """Commit the written offsets, and leave the group."""
        if self._consumer is not None:
            self._consumer.close()


def _partition(message: Message) -> int:
    partition = message.partition()
    return -1 if partition is None else partition


def _start_offsets(
    cluster: ClusterConnection, topic: str, partitions: list[int], start: _Start
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the start offset of each partition, within its range, and the end of each."""
    keys = [(topic, one) for one in partitions]
    ranges = cluster.offsets(keys)
    if start.timestamp_ms is not None:
        found = cluster.offsets_at(keys, start.timestamp_ms)
    offsets = {}
    for key in keys:
        first, end = ranges[key].log_start_offset, ranges[key].high_watermark
        if start.from_beginning:
            wanted = first
        elif start.timestamp_ms is not None:
            at = found[key]
            wanted = end if at is None else at
        elif start.offset is not None:
            wanted = start.offset if start.offset >= 0 else end + start.offset
        else:
            wanted = end
        offsets[key[1]] = min(max(wanted, first), end)
    return offsets, {key[1]: ranges[key].high_watermark for key in keys}


# --- formats -----------------------------------------------------------------------------------------------------


def _formatter(style: str, key_separator: str | None, delimiter: str) -> Format:
    if style == "json":
        return _as_json
    if style == "table":
        return _as_row
    ending = delimiter.encode().replace(b"\\n", b"\n").replace(b"\\0", b"\0").replace(b"\\t", b"\t")
    if key_separator is None:
        return lambda message: (message.value() or b"") + ending
    separator = key_separator.encode()
    return lambda message: (message.key() or b"") + separator + (message.value() or b"") + ending


def _as_json(message: Message) -> bytes:
    """Return one line that `tidelog produce --format json` reads back."""
    document: dict[str, Any] = {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "timestamp": message.timestamp()[1],
        **text_or_base64("key", message.key()),
        **text_or_base64("value", message.value()),
        "headers": [
            {"key": name, **text_or_base64("value", _header_bytes(value))} for name, value in _headers(message)
        ],
    }
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def _headers(message: Message) -> list[tuple[str, Any]]:
    headers = record_headers(message)
    if headers is None:
        place = f"{message.topic()}:{message.partition()} at offset {message.offset()}"
        raise InvalidInput(f"{place} has a header whose name is no UTF-8", hint="--format value and table leave it out")
    return headers


def _header_bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _as_row(message: Message) -> bytes:
    key = _shown(message.key())
    row = (
        f"{message.partition():>9}  {message.offset():<10}  {output.moment(message.timestamp()[1]) or '-':<24}"
        f"  {key if len(key) <= _CELL else key[: _CELL - 1] + '…'}  {_shown(message.value())}\n"
    )
    return row.encode(errors="replace")


def _shown(data: bytes | None) -> str:
    """Return bytes as one line of text; unprintable characters are escaped."""
    if data is None:
        return "-"
    return printable(data.decode(errors="backslashreplace"))
