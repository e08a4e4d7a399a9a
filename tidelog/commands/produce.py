"""`tidelog produce`: records from a file or standard input to a topic.

Input is read as it comes (a pipe that trickles is sent as it trickles) and never as a whole. A record counts when the
cluster has acknowledged it; the count is printed at the end, and any record that failed makes the command fail.

Formats: `lines`, one value a line, with `--key-separator` a key before it; `json`, one object a line with any of `key`,
`value`, `headers`, `partition`, `timestamp` (see docs/cli.md), as `tidelog consume --format json` writes them.

Entry: `produce`.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import click

from runtime.errors import InvalidInput, TidelogError, Unavailable
from tidelog import output
from tidelog.client import ANSWER_TIMEOUT_S, Cluster, message_error, translate
from tidelog.options import bootstrap_option, parse_pairs

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

POLL_EVERY = 1_000
"""Records between two looks at the delivery reports."""
MAX_MESSAGE_BYTES = 1_000_000_000
"""librdkafka's own bound is lifted: the topic's max.message.bytes decides, on the broker."""
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
_TIMEOUT = "Seconds until a record that is not acknowledged counts as failed."


class Record(NamedTuple):
    """One record to send; None leaves the choice to the client (partition, timestamp) or is null (key, value)."""

    value: bytes | None
    key: bytes | None = None
    headers: list[tuple[str, bytes | None]] = []  # noqa: RUF012 — a NamedTuple's default, never changed
    partition: int | None = None
    timestamp_ms: int | None = None


@click.command()
@click.argument("topic")
@click.argument("file", type=click.File("rb", lazy=False), default="-")
@click.option("--key-separator", metavar="TEXT", help="Text between key and value in a line.")
@click.option("-H", "--header", "headers", multiple=True, metavar="NAME=VALUE", help="For every record; may repeat.")
@click.option("-p", "--partition", type=click.IntRange(min=0), help="Send to this partition; else by the key's hash.")
@click.option("-z", "--compression", type=click.Choice(COMPRESSIONS), default="none", show_default=True)
@click.option("--acks", type=click.Choice(["0", "1", "all"]), default="all", show_default=True)
@click.option("--idempotent/--no-idempotent", default=None, help="No duplicates by retries. Default: on if --acks all.")
@click.option("--tombstone", is_flag=True, help="An empty value in a line is null.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    metavar="S",
    help=_TIMEOUT,
)
@click.option("--format", "style", type=click.Choice(["lines", "json"]), default="lines", show_default=True)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@bootstrap_option
def produce(
    topic: str,
    file: IO[bytes],
    key_separator: str | None,
    headers: tuple[str, ...],
    partition: int | None,
    compression: str,
    acks: str,
    idempotent: bool | None,
    tombstone: bool,
    timeout_s: float,
    style: str,
    quiet: bool,
    bootstrap: str,
) -> None:
    """Write records to TOPIC from FILE, or from standard input."""
    idempotent = acks == "all" if idempotent is None else idempotent
    if idempotent and acks != "all":
        raise InvalidInput(f"--idempotent needs --acks all, not {acks}", hint="leave one of them away")
    separator = key_separator.encode() if key_separator is not None else None
    if separator == b"" or (separator is not None and style == "json"):
        raise InvalidInput("--key-separator is a text in a line", hint="in JSON, give each record its `key`")
    common = [(name, value.encode()) for name, value in parse_pairs("--header", headers)]
    cluster = Cluster(bootstrap)
    partitions = cluster.topics([topic])[topic]
    if partition is not None and partition not in partitions:
        raise InvalidInput(f"topic {topic!r} has the partitions 0 to {len(partitions) - 1}, not {partition}")

    def parse(line: bytes) -> Record:
        if style == "json":
            return _from_json(line)
        return _from_line(line, separator, tombstone)

    config = {
        "acks": acks,
        "enable.idempotence": idempotent,
        "compression.type": compression,
        "message.timeout.ms": int(timeout_s * 1000),
        "message.max.bytes": MAX_MESSAGE_BYTES,
        "partitioner": "murmur2_random",  # the same key goes where Java's clients send it
        "linger.ms": 5,
        "sticky.partitioning.linger.ms": 100,
    }
    if sys.stdin.isatty() and file.name == sys.stdin.name and not quiet:
        output.warn("one record a line; Ctrl-D ends")
    delivery = _send(cluster, config, topic, _records(file, parse), common, partition)
    if not quiet and delivery.delivered:
        output.emit(delivery.summary(topic))
    delivery.raise_failure()


def _records(file: IO[bytes], parse: Callable[[bytes], Record]) -> Iterator[Record]:
    """The records of the input, with a progress bar where there is a size and a terminal."""
    size = os.fstat(file.fileno()).st_size if _is_regular(file) else 0
    done = 0
    with output.Progress("producing", size) if size else contextlib.nullcontext() as progress:
        for number, line in enumerate(file, 1):
            done += len(line)
            if progress is not None and number % POLL_EVERY == 0:
                progress.update(done)
            try:
                yield parse(line.removesuffix(b"\n"))
            except InvalidInput as error:
                raise InvalidInput(f"line {number}: {error.message}", hint=error.hint) from error


def _is_regular(file: IO[bytes]) -> bool:
    try:
        return os.path.isfile(file.fileno())
    except (OSError, ValueError):  # not a file of the operating system
        return False


# --- input -------------------------------------------------------------------------------------------------------


def _from_line(line: bytes, separator: bytes | None, tombstone: bool) -> Record:
    key: bytes | None = None
    value = line
    if separator is not None:
        key, found, value = line.partition(separator)
        if not found:
            raise InvalidInput(
                f"no key separator {separator.decode()!r} in {line[:60].decode(errors='replace')!r}",
                hint="each line is KEY, separator, VALUE",
            )
    return Record(None if tombstone and not value else value, key)


def _from_json(line: bytes) -> Record:
    try:
        body = json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"this is not JSON: {error}", hint="one object a line; or --format lines") from error
    if not isinstance(body, dict):
        raise InvalidInput("a JSON object is expected", hint='for example {"key": "k", "value": "v"}')
    return Record(
        _bytes_of(body, "value"),
        _bytes_of(body, "key"),
        _headers_of(body.get("headers")),
        _integer_of(body, "partition"),
        _integer_of(body, "timestamp"),
    )


def _bytes_of(body: dict[str, Any], name: str) -> bytes | None:
    """The text `name`, or `name_base64` where it is no text; other JSON values are sent as JSON."""
    encoded = body.get(f"{name}_base64")
    if encoded is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise InvalidInput(f"{name}_base64 is not base64: {error}") from error
    value = body.get(name)
    if value is None or isinstance(value, str):
        return value.encode() if value is not None else None
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _headers_of(headers: Any) -> list[tuple[str, bytes | None]]:
    """An object name → value, or a list of `{"key", "value"}` where a name repeats."""
    if headers is None:
        return []
    listed = [{"key": key, "value": value} for key, value in headers.items()] if isinstance(headers, dict) else headers
    if not isinstance(listed, list) or not all(isinstance(one, dict) and "key" in one for one in listed):
        raise InvalidInput("headers are an object of names and values", hint='or a list of {"key", "value"}')
    return [(str(one["key"]), _bytes_of(one, "value")) for one in listed]


def _integer_of(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise InvalidInput(f"{name} is {value!r}: a number from 0 is expected")


# --- sending -----------------------------------------------------------------------------------------------------


class _Delivery:
    """What the cluster has acknowledged, and what failed."""

    def __init__(self, tells_offsets: bool) -> None:
        self._tells_offsets = tells_offsets
        self.delivered = 0
        self.failed = 0
        self.first_error: TidelogError | None = None
        self._ranges: dict[int, tuple[int, int]] = {}
        """Partition → first and last offset."""

    def report(self, error: KafkaError | None, message: Message) -> None:
        """The delivery report of one record."""
        if error is not None:
            self.fail(message_error(message) or translate(error))
            return
        self.delivered += 1
        partition, offset = message.partition(), message.offset()
        if self._tells_offsets and partition is not None and offset is not None and offset >= 0:
            first, last = self._ranges.get(partition, (offset, offset))
            self._ranges[partition] = (min(first, offset), max(last, offset))

    def fail(self, error: TidelogError) -> None:
        """One record will not arrive."""
        self.failed += 1
        self.first_error = self.first_error or error

    def summary(self, topic: str) -> str:
        """For a person."""
        records = f"{self.delivered} record{'' if self.delivered == 1 else 's'} to {topic}"
        known = sorted((partition, *span) for partition, span in self._ranges.items())
        if not known or len(known) > 8:
            return records
        spans = [f"{first}" if first == last else f"{first}-{last}" for _, first, last in known]
        parts = ", ".join(f"[{partition}] {span}" for (partition, _, _), span in zip(known, spans, strict=True))
        return f"{records}, at [partition] offset: {parts}"

    def raise_failure(self) -> None:
        """Fail if any record failed, with the first error."""
        if self.first_error is None:
            return
        total = self.delivered + self.failed
        message = f"{self.failed} of {total} records were not written; the first: {self.first_error.message}"
        raise type(self.first_error)(message, hint=self.first_error.hint)


def _send(
    cluster: Cluster,
    config: dict[str, Any],
    topic: str,
    records: Iterator[Record],
    headers: list[tuple[str, bytes]],
    partition: int | None,
) -> _Delivery:
    """Send records until the first failure or bad input, and wait until each is acknowledged or has failed."""
    from confluent_kafka import KafkaException, Producer

    delivery = _Delivery(config["acks"] != "0")
    producer = Producer({**cluster.client_config(), **config})
    try:  # with the partitions known, records without a key stay together, and in order, for a while
        producer.list_topics(topic, ANSWER_TIMEOUT_S)
    except KafkaException as error:
        raise translate(error, topic) from error
    try:
        for number, record in enumerate(records, 1):
            where = record.partition if partition is None else partition
            optional: dict[str, Any] = {}
            if where is not None:
                optional["partition"] = where
            if record.timestamp_ms is not None:
                optional["timestamp"] = record.timestamp_ms
            if headers or record.headers:
                optional["headers"] = [*headers, *record.headers]
            try:
                _enqueue(producer, topic, record, delivery, optional)
            except KafkaException as error:
                delivery.fail(translate(error, f"{topic} [{where}]"))
            if number % POLL_EVERY == 0:
                producer.poll(0)
            if delivery.first_error is not None:
                break  # what follows would have a gap before it
    except InvalidInput as error:
        delivery.fail(error)
    finally:
        left = producer.flush(config["message.timeout.ms"] / 1000 + 5)
    for _ in range(left):
        delivery.fail(Unavailable(f"{topic}: no answer", hint="see `tidelog status`"))
    return delivery


def _enqueue(producer: Producer, topic: str, record: Record, delivery: _Delivery, optional: dict[str, Any]) -> None:
    """Hand a record to the client, waiting while its queue is full. Raises `KafkaException`."""
    while True:
        try:
            producer.produce(topic, value=record.value, key=record.key, on_delivery=delivery.report, **optional)
        except BufferError:
            producer.poll(0.5)
        else:
            return
