"""`tidelog produce`: send records from a file or standard input to a topic.

Input is read incrementally and sent as it arrives. A record counts once the cluster has acknowledged it; the count is
printed at the end, and the command fails if any record failed.

Formats: `lines`, one value per line, with `--key-separator` preceded by a key; `json`, one object per line with any of
`FIELDS` (see docs/cli.md), as written by `tidelog consume --format json`. A field of another name is an error: a
misspelled `value` would be a null.

Entry: `produce`.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import click

from tidelog.cli import output
from tidelog.cli.client import ANSWER_TIMEOUT_S, ClusterConnection, message_error
from tidelog.cli.completion import partition_numbers, topic_names
from tidelog.cli.options import bootstrap_option, parse_pairs
from tidelog.console.client_errors import translate
from tidelog.runtime.errors import InvalidInput, TidelogError, Unavailable
from tidelog.runtime.progress_bar import ProgressBar

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

POLL_EVERY = 1_000
"""Records between two polls of the delivery reports."""
MAX_MESSAGE_BYTES = 1_000_000_000
"""librdkafka's own bound is raised to its maximum: the broker applies the topic's max.message.bytes."""
FIELDS = ("key", "key_base64", "value", "value_base64", "headers", "partition", "timestamp")
"""What a JSON record may have."""
HEADER_FIELDS = ("key", "value", "value_base64")
IGNORED_FIELDS = ("topic", "offset")
"""What `tidelog consume --format json` also writes."""
MAX_PARTITION = (1 << 31) - 1
MAX_TIMESTAMP_MS = (1 << 63) - 1
MAX_TIMEOUT_S = 2_147_483.0
"""librdkafka has 31 bits for milliseconds."""
TOO_DEEP = "JSON that is nested too deeply"
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
_TIMEOUT = "Seconds until an unacknowledged record counts as failed."


class InputRecord(NamedTuple):
    """One record to send; None means chosen by the client (partition, timestamp) or null (key, value)."""

    value: bytes | None
    key: bytes | None = None
    headers: list[tuple[str, bytes | None]] = []  # noqa: RUF012 — a NamedTuple's default, never changed
    partition: int | None = None
    timestamp_ms: int | None = None


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("file", type=click.File("rb", lazy=False), default="-")
@click.option("--key-separator", metavar="TEXT", help="Text between key and value in a line.")
@click.option(
    "-H", "--header", "headers", multiple=True, metavar="NAME=VALUE", help="Header of every record; may repeat."
)
@click.option(
    "-p",
    "--partition",
    type=click.IntRange(min=0),
    help="Send to this partition; default: by the key's hash.",
    shell_complete=partition_numbers,
)
@click.option("-z", "--compression", type=click.Choice(COMPRESSIONS), default="none", show_default=True)
@click.option("--acks", type=click.Choice(["0", "1", "all"]), default="all", show_default=True)
@click.option(
    "--idempotent/--no-idempotent", default=None, help="No duplicates from retries. Default: on if --acks all."
)
@click.option("--tombstone", is_flag=True, help="An empty value in a line means null.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.1, max=MAX_TIMEOUT_S),
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
        raise InvalidInput(f"--idempotent needs --acks all, not {acks}", hint="omit one of them")
    separator = key_separator.encode() if key_separator is not None else None
    if separator == b"" or (separator is not None and style == "json"):
        raise InvalidInput("--key-separator is a text in a line", hint="in JSON, give each record its `key`")
    common = [(name, value.encode()) for name, value in parse_pairs("--header", headers)]
    cluster = ClusterConnection(bootstrap)
    partitions = cluster.topics([topic])[topic]
    if partition is not None and partition not in partitions:
        raise InvalidInput(f"topic {topic!r} has the partitions 0 to {len(partitions) - 1}, not {partition}")

    def parse(line: bytes) -> InputRecord:
        if style == "json":
            return _from_json(line)
        return _from_line(line, separator, tombstone)

    config = {
        "acks": acks,
        "enable.idempotence": idempotent,
        "compression.type": compression,
        "message.timeout.ms": int(timeout_s * 1000),
        "message.max.bytes": MAX_MESSAGE_BYTES,
        "partitioner": "murmur2_random",  # the same partitioner as Java clients
        "linger.ms": 5,
        "sticky.partitioning.linger.ms": 100,
    }
    if sys.stdin.isatty() and file.name == sys.stdin.name and not quiet:
        output.warn("one record a line; Ctrl-D ends")
    delivery = _send(cluster, config, topic, _records(file, parse), common, partition)
    if not quiet and (delivery.delivered or delivery.is_interrupted):
        output.emit(delivery.summary(topic))
    delivery.raise_failure()
    if delivery.is_interrupted:
        raise click.exceptions.Exit(INTERRUPTED)


def _records(file: IO[bytes], parse: Callable[[bytes], InputRecord]) -> Iterator[InputRecord]:
    """Yield the records of the input, with a bar of progress, unless they are being typed."""
    size = os.fstat(file.fileno()).st_size if _is_regular(file) else 0
    done = 0
    progress = ProgressBar("producing", size)
    with contextlib.nullcontext() if file.isatty() else progress:
        for number, line in enumerate(file, 1):
            done += len(line)
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


def _from_line(line: bytes, separator: bytes | None, tombstone: bool) -> InputRecord:
    key: bytes | None = None
    value = line
    if separator is not None:
        key, found, value = line.partition(separator)
        if not found:
            raise InvalidInput(
                f"no key separator {separator.decode()!r} in {line[:60].decode(errors='replace')!r}",
                hint="each line is KEY, separator, VALUE",
            )
    return InputRecord(None if tombstone and not value else value, key)


def _from_json(line: bytes) -> InputRecord:
    try:
        body = json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"invalid JSON: {error}", hint="use one object per line, or --format lines") from error
    except RecursionError as error:
        raise InvalidInput(TOO_DEEP, hint="send what is so deep as text, or as `value_base64`") from error
    if not isinstance(body, dict):
        raise InvalidInput("a JSON object is expected", hint='for example {"key": "k", "value": "v"}')
    _check_fields(body, FIELDS, IGNORED_FIELDS)
    return InputRecord(
        _bytes_of(body, "value"),
        _bytes_of(body, "key"),
        _headers_of(body.get("headers")),
        _integer_of(body, "partition", MAX_PARTITION),
        _integer_of(body, "timestamp", MAX_TIMESTAMP_MS),
    )


def _check_fields(body: dict[str, Any], known: tuple[str, ...], ignored: tuple[str, ...] = ()) -> None:
    """Raises `InvalidInput` for a field of another name, with the nearest one."""
    for name in body:
        if name not in known and name not in ignored:
            close = difflib.get_close_matches(name.lower(), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the fields are {', '.join(known)}"
            raise InvalidInput(f"unknown field {name!r}", hint=hint)


def _bytes_of(body: dict[str, Any], name: str) -> bytes | None:
    """The text `name`, or `name_base64` for binary data; other JSON values are sent as JSON."""
    encoded = body.get(f"{name}_base64")
    if encoded is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise InvalidInput(f"{name}_base64 is not base64: {error}") from error
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        return _utf8(value, name, f"send its bytes as `{name}_base64`")
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError as error:
        raise InvalidInput(TOO_DEEP, hint=f"send what is so deep as text, or as `{name}_base64`") from error
    except ValueError as error:
        raise InvalidInput(f"{name} has a number that JSON has not: {error}", hint="send it as text") from error
    return _utf8(text, name, f"send its bytes as `{name}_base64`")


def _utf8(text: str, what: str, hint: str) -> bytes:
    """Encode text; JSON has halves of surrogate pairs (`\\ud800`), which UTF-8 cannot have."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode()
        raise InvalidInput(f"{what} has half of a surrogate pair, {half}, which is no text", hint=hint) from error


def _headers_of(headers: Any) -> list[tuple[str, bytes | None]]:
    """Read headers: an object name → value, or a list of `{"key", "value"}` if names repeat."""
    if headers is None:
        return []
    listed = [{"key": key, "value": value} for key, value in headers.items()] if isinstance(headers, dict) else headers
    if not isinstance(listed, list) or not all(isinstance(one, dict) and "key" in one for one in listed):
        raise InvalidInput("headers must be an object of names and values", hint='or a list of {"key", "value"}')
    for one in listed:
        _check_fields(one, HEADER_FIELDS)
    return [(_header_name(str(one["key"])), _bytes_of(one, "value")) for one in listed]


def _header_name(name: str) -> str:
    """Raises `InvalidInput` for a name that librdkafka's binding cannot take: it would crash, or cut the name."""
    _utf8(name, "the name of a header", "give it another name")
    if "\0" in name:
        raise InvalidInput(f"the name of a header has a zero byte: {name!r}", hint="give it another name")
    return name


def _integer_of(body: dict[str, Any], name: str, maximum: int) -> int | None:
    value = body.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= maximum):
        return value
    raise InvalidInput(f"{name} is {value!r}: a number of 0 to {maximum} is expected")


# --- sending -----------------------------------------------------------------------------------------------------


class _Delivery:
    """The acknowledged and the failed records."""

    def __init__(self, tells_offsets: bool) -> None:
        self._tells_offsets = tells_offsets
        self.delivered = 0
        self.failed = 0
        self.first_error: TidelogError | None = None
        self.is_interrupted = False
        """Ctrl-C ended the input."""
        self._ranges: dict[int, tuple[int, int]] = {}
        """Partition → first and last offset."""

    def report(self, error: KafkaError | None, message: Message) -> None:
        """Handle the delivery report of one record."""
        if error is not None:
            self.fail(message_error(message) or translate(error))
            return
        self.delivered += 1
        partition, offset = message.partition(), message.offset()
        if self._tells_offsets and partition is not None and offset is not None and offset >= 0:
            first, last = self._ranges.get(partition, (offset, offset))
            self._ranges[partition] = (min(first, offset), max(last, offset))

    def fail(self, error: TidelogError) -> None:
        """Count one record as failed."""
        self.failed += 1
        self.first_error = self.first_error or error

    def summary(self, topic: str) -> str:
        """Return the summary that is printed."""
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
    cluster: ClusterConnection,
    config: dict[str, Any],
    topic: str,
    records: Iterator[InputRecord],
    headers: list[tuple[str, bytes]],
    partition: int | None,
) -> _Delivery:
    """Send records until the first failure, bad input or Ctrl-C; wait until each is acknowledged or has failed."""
    from confluent_kafka import KafkaException, Producer

    delivery = _Delivery(config["acks"] != "0")
    producer = Producer({**cluster.client_config(), **config})
    try:  # since the partitions are known, records without a key stay together and in order for a while
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
                break  # later records would follow a gap
    except InvalidInput as error:
        delivery.fail(error)
    except KeyboardInterrupt:
        delivery.is_interrupted = True
    finally:
        left = producer.flush(config["message.timeout.ms"] / 1000 + 5)
    for _ in range(left):
        delivery.fail(Unavailable(f"{topic}: no response", hint="see `tidelog status`"))
    return delivery


def _enqueue(
    producer: Producer, topic: str, record: InputRecord, delivery: _Delivery, optional: dict[str, Any]
) -> None:
    """Pass a record to the client; wait while its queue is full. Raises `KafkaException`."""
    while True:
        try:
            producer.produce(topic, value=record.value, key=record.key, on_delivery=delivery.report, **optional)
        except BufferError:
            producer.poll(0.5)
        else:
            return
