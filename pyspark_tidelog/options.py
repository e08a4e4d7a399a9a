"""The options of the data source, checked: names and meanings of Spark's Kafka source, and some of its own.

Names are not case-sensitive, as everywhere in Spark. `kafka.NAME` is passed to the Kafka client that asks for offsets
and reads the tail. An option that is not known is refused with the nearest name, for a misspelt one would be ignored.

Entry: `read_options`, `stream_options`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pyspark_tidelog.columns import COLUMNS, column_names
from tidelog.runtime.errors import ConfigError

EARLIEST = -2
LATEST = -1
DEFAULT_MAX_BYTES_PER_TASK = 64 << 20
DEFAULT_MAX_SLICES = 10_000
"""Slices that the tasks of a plan carry, at most: those of one answer of a broker. With more, they are in manifests."""

Partition = tuple[str, int]
"""Topic and partition index."""

_WAYS = ("subscribe", "subscribepattern", "assign")
_NAMES = (
    "kafka.bootstrap.servers",
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "failOnDataLoss",
    "includeHeaders",
    "minPartitions",
    "maxRecordsPerPartition",
    "maxBytesPerTask",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "groupIdPrefix",
    "maxSlicesInTasks",
    "tail",
    "readToken",
    "readTokenFile",
    "kafka.isolation.level",
    "s3.endpoint",
    "s3.bucket",
    "s3.prefix",
    "s3.region",
    "s3.access_key_id",
    "s3.access_key_id_file",
    "s3.secret_access_key",
    "s3.secret_access_key_file",
    "s3.client",
)
_KNOWN = {name.lower(): name for name in _NAMES}
_ONLY_STREAMS = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "groupIdPrefix")
_ONLY_BATCHES = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
_SPARKS_OWN = frozenset({"path", "paths"})
"""Options that Spark adds by itself."""


@dataclass(frozen=True)
class Bound:
    """Where reading begins or ends: one way for all partitions, or offsets or timestamps of some."""

    offset: int | None = None
    """`EARLIEST` or `LATEST` for all partitions."""
    timestamp_ms: int | None = None
    """For all partitions: the first offset with a timestamp of at least this."""
    offsets: Mapping[Partition, int] = field(default_factory=dict)
    """An offset (int64 ≥ 0), `EARLIEST` or `LATEST`."""
    timestamps: Mapping[Partition, int] = field(default_factory=dict)
    """Milliseconds since the epoch."""


@dataclass(frozen=True)
class ReadOptions:
    """Checked options of a read. Pickled to the executors."""

    bootstrap: str
    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: tuple[Partition, ...] = ()
    starting: Bound = Bound(EARLIEST)
    ending: Bound = Bound(LATEST)
    latest_after_timestamps: bool = False
    """Where no record has a starting timestamp or a later one: begin at the end, and do not fail."""
    fail_on_data_loss: bool = True
    columns: tuple[str, ...] = COLUMNS
    """Of the rows, in this order."""
    min_partitions: int = 0
    max_records: int = 0
    """Of one task; 0: no bound."""
    max_bytes: int = DEFAULT_MAX_BYTES_PER_TASK
    max_slices: int = DEFAULT_MAX_SLICES
    """Of a plan; one with more is written to the bucket."""
    reads_tail: bool = True
    is_committed_only: bool = False
    max_offsets: int = 0
    """Of one micro-batch; 0: no bound."""
    min_offsets: int = 0
    """Fewer new offsets wait for more, for `max_delay_s` at most."""
    max_delay_s: float = 900.0
    group_prefix: str = "spark-tidelog"
    """Of the consumer group that shows how far a query is, unless `kafka.group.id` names it."""
    token: str = field(default="", repr=False)
    kafka: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further settings of the Kafka client."""
    s3: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Settings of the bucket by their names in `tidelog.storage.settings.S3Settings`."""


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """Check the options of a batch read. Raises `ConfigError`, which names the option."""
    _refuse(given, _ONLY_STREAMS, "is for streaming reads")
    return _options(given, starting=EARLIEST)


def stream_options(given: Mapping[str, str]) -> ReadOptions:
    """Check the options of a streaming read. Raises `ConfigError`, which names the option."""
    _refuse(given, _ONLY_BATCHES, "is for batch reads: a stream has no end")
    found = _options(given, starting=LATEST)
    if found.max_offsets and found.min_offsets > found.max_offsets:
        raise ConfigError(
            f"option minOffsetsPerTrigger is {found.min_offsets}, and maxOffsetsPerTrigger {found.max_offsets}",
            hint="no micro-batch could have so many",
        )
    return found


def default_columns(given: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns of a read, of either kind, without a schema of its own. Raises `ConfigError`."""
    _refuse_unknown(given)
    options = {name.lower(): value for name, value in given.items()}
    return column_names(include_headers=flag(options, "includeHeaders", default=False))


def _refuse_unknown(given: Mapping[str, str]) -> None:
    refuse_unknown({name: value for name, value in given.items() if name.lower() not in _SPARKS_OWN}, _KNOWN)


def _refuse(given: Mapping[str, str], names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if name.lower() in {each.lower() for each in given}:
            raise ConfigError(f"option {name} {reason}")


def _options(given: Mapping[str, str], *, starting: int) -> ReadOptions:
    options = {name.lower(): value for name, value in given.items()}
    _refuse_unknown(given)
    bootstrap = bootstrap_servers(options)
    ways = [name for name in _WAYS if name in options]
    if len(ways) != 1:
        raise ConfigError(
            "exactly one of the options subscribe, subscribePattern and assign is needed"
            + (f", not {' and '.join(_KNOWN[name] for name in ways)}" if ways else ""),
            hint='.option("subscribe", "topic1,topic2")',
        )
    return ReadOptions(
        bootstrap=bootstrap,
        topics=_topics(options),
        pattern=_pattern(options),
        assigned=_assigned(options),
        starting=_bound(options, "starting", starting),
        ending=_bound(options, "ending", LATEST),
        latest_after_timestamps=_choice(options, "startingOffsetsByTimestampStrategy", ("error", "latest")) == "latest",
        fail_on_data_loss=flag(options, "failOnDataLoss", default=True),
        columns=column_names(include_headers=flag(options, "includeHeaders", default=False)),
        min_partitions=_number(options, "minPartitions", 0, 1, 1_000_000),
        max_records=_number(options, "maxRecordsPerPartition", 0, 1, 1 << 62),
        max_bytes=_number(options, "maxBytesPerTask", DEFAULT_MAX_BYTES_PER_TASK, 1, 1 << 40),
        max_slices=_number(options, "maxSlicesInTasks", DEFAULT_MAX_SLICES, 0, 1_000_000),
        reads_tail=_choice(options, "tail", ("broker", "skip")) == "broker",
        is_committed_only=_choice(options, "kafka.isolation.level", ("read_uncommitted", "read_committed"))
        == "read_committed",
        max_offsets=_number(options, "maxOffsetsPerTrigger", 0, 1, 1 << 62),
        min_offsets=_number(options, "minOffsetsPerTrigger", 0, 1, 1 << 62),
        max_delay_s=_seconds(options, "maxTriggerDelay", 900.0),
        group_prefix=options.get("groupidprefix", "spark-tidelog"),
        token=_token(options),
        kafka={name[6:]: value for name, value in given.items() if _is_clients(name)},
        s3={name[3:].lower(): value for name, value in given.items() if name.lower().startswith("s3.")},
    )


def bootstrap_servers(options: Mapping[str, str]) -> str:
    """Return the brokers to begin with. Raises `ConfigError` where they are not given."""
    bootstrap = options.get("kafka.bootstrap.servers", "").strip()
    if not bootstrap:
        raise ConfigError(
            "option kafka.bootstrap.servers is missing", hint='.option("kafka.bootstrap.servers", "HOST:PORT")'
        )
    return bootstrap


def is_read_option(name: str) -> bool:
    """Return whether reads have an option of this name."""
    return name.lower() in _KNOWN


def _is_clients(name: str) -> bool:
    return name.lower().startswith("kafka.") and name.lower() not in _KNOWN


def refuse_unknown(given: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Raise `ConfigError` for an option that is not in `known` (lower case: as it is written), nor the client's."""
    for name in given:
        if name.lower() not in known and not name.lower().startswith("kafka."):
            near = difflib.get_close_matches(name.lower(), known, 1)
            raise ConfigError(
                f"there is no option {name!r}", hint=f"did you mean {known[near[0]]}?" if near else "see docs/spark.md"
            )


def _topics(options: Mapping[str, str]) -> tuple[str, ...]:
    if "subscribe" not in options:
        return ()
    names = tuple(dict.fromkeys(part.strip() for part in options["subscribe"].split(",") if part.strip()))
    if not names:
        raise ConfigError("option subscribe names no topic", hint="name topics with commas")
    return names


def _pattern(options: Mapping[str, str]) -> str:
    pattern = options.get("subscribepattern", "")
    if "subscribepattern" in options:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"option subscribePattern is {pattern!r}: {error}") from error
        if not pattern:
            raise ConfigError("option subscribePattern is empty")
    return pattern


def _assigned(options: Mapping[str, str]) -> tuple[Partition, ...]:
    if "assign" not in options:
        return ()
    wanted = 'as {"topic": [0, 1]}'
    found = _json(options["assign"], "assign", wanted)
    places: list[Partition] = []
    for topic, indexes in found.items():
        if not isinstance(indexes, list) or not all(type(each) is int and each >= 0 for each in indexes):
            raise ConfigError(f"option assign: partitions of {topic!r} are {indexes!r}; they are given {wanted}")
        places += [(topic, each) for each in indexes]
    if not places:
        raise ConfigError("option assign names no partition", hint=f"give it {wanted}")
    return tuple(dict.fromkeys(places))


def _json(text: str, name: str, wanted: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"option {name} is no JSON: {error}", hint=f"give it {wanted}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"option {name} is {text!r}", hint=f"give it {wanted}")
    return found


def _bound(options: Mapping[str, str], side: str, default: int) -> Bound:
    names = (f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets")
    given = [name for name in names if name.lower() in options]
    if not given:
        return Bound(default)
    name = given[0]  # the order of preference is that of Spark's Kafka source
    text = options[name.lower()].strip()
    if name == names[0]:
        return Bound(timestamp_ms=_number(options, name, 0, 0, (1 << 63) - 1))
    if name == names[1]:
        return Bound(timestamps=_per_partition(text, name, low=0))
    is_stream = side == "starting" and default == LATEST
    if text.lower() in ("earliest", "latest"):
        offset = EARLIEST if text.lower() == "earliest" else LATEST
        if offset != default and not is_stream:
            raise ConfigError(f"option {name} cannot be {text!r} in a batch read", hint="or nothing would be read")
        return Bound(offset)
    offsets = _per_partition(text, name, low=EARLIEST)
    wrong = LATEST if side == "starting" else EARLIEST
    if wrong in offsets.values() and not is_stream:
        raise ConfigError(f"option {name} has {wrong}, which a batch read cannot use there")
    return Bound(offsets=offsets)


def _per_partition(text: str, name: str, *, low: int) -> dict[Partition, int]:
    wanted = 'as {"topic": {"0": 23, "1": -2}}' if low < 0 else 'as {"topic": {"0": 1700000000000}}'
    found: dict[Partition, int] = {}
    for topic, rows in _json(text, name, wanted).items():
        for index, value in rows.items() if isinstance(rows, dict) else [("", None)]:
            if not index.isdecimal() or type(value) is not int or not low <= value < 1 << 63:
                raise ConfigError(
                    f"option {name}: {topic!r} has {json.dumps(rows)}; partitions are given {wanted}",
                    hint="-2 is the earliest offset, -1 the latest" if low < 0 else None,
                )
            found[topic, int(index)] = value
    if not found:
        raise ConfigError(f"option {name} names no partition", hint=f"give it {wanted}, with every partition")
    return found


def _number(options: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = options.get(name.lower())
    if text is None:
        return default
    stripped = text.strip()
    if not stripped.isascii() or not stripped.isdecimal() or not low <= int(stripped) <= high:
        raise ConfigError(f"option {name} is {text!r}: a number from {low} to {high} is expected")
    return int(stripped)


_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}


def _seconds(options: Mapping[str, str], name: str, default: float) -> float:
    text = options.get(name.lower())
    if text is None:
        return default
    found = re.fullmatch(r"(\d{1,9})\s*([a-z]+)", text.strip().lower(), re.ASCII)
    if found is None or found[2] not in _UNITS_S:
        raise ConfigError(f"option {name} is {text!r}: a time is expected, as 15m, 30s or 500ms")
    return int(found[1]) * _UNITS_S[found[2]]


def flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Return an option that is true or false. Raises `ConfigError`."""
    text = options.get(name.lower(), str(default)).strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"option {name} is {text!r}: true or false is expected")
    return text == "true"


def _choice(options: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    text = options.get(name.lower(), choices[0]).strip().lower()
    if text not in choices:
        raise ConfigError(f"option {name} is {text!r}: {' or '.join(choices)} is expected")
    return text


def _token(options: Mapping[str, str]) -> str:
    token, file = options.get("readtoken", "").strip(), options.get("readtokenfile", "").strip()
    if token and file:
        raise ConfigError("both readToken and readTokenFile are given", hint="the file is better: options are logged")
    if file:
        try:
            token = Path(file).read_text().strip()
        except OSError as error:
            raise ConfigError(f"option readTokenFile: cannot read {file}: {error.strerror}") from error
    return token
