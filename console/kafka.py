"""What the console asks the brokers as a Kafka client: topics, groups, resets of offsets, one record to write.

confluent-kafka is imported at the first use: a broker that serves a console nobody opens does not load it. Its calls
block, and run in a few threads of the console's own.

Invariants: what is listed is bounded, and what was left out is counted; a reset or a record changes nothing unless
`dry_run` is false in the request itself.

Entry: `KafkaAccess`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar, cast, get_args

import msgspec

from tidelog.console.client_errors import translate
from tidelog.console.groups import INACTIVE, NAMELESS, Place, ResetTo, group_state, lag_row, reset_offset
from tidelog.console.partitioner import partition_of
from tidelog.runtime.errors import InvalidInput, NotFound, TidelogError, Unavailable

T = TypeVar("T")

REQUEST_TIMEOUT_S: Final = 10.0
MAX_GROUPS: Final = 200
MAX_GROUP_PARTITIONS: Final = 5_000
THREADS: Final = 8


class ResetOrder(msgspec.Struct, forbid_unknown_fields=True):
    """A reset of a group's offsets in one topic. `to`: earliest, latest, offset, time (milliseconds) or shift."""

    group: str
    topic: str
    to: str
    value: int | None = None
    partitions: list[int] | None = None
    dry_run: bool = True


class ProduceOrder(msgspec.Struct, forbid_unknown_fields=True):
    """A record to write."""

    topic: str
    key: str | None = None
    value: str | None = None
    partition: int | None = None
    headers: list[tuple[str, str | None]] = []
    dry_run: bool = True


class Span(NamedTuple):
    """The readable offsets of a partition."""

    start: int
    end: int


class KafkaAccess:
    """A Kafka client of one cluster, for the console's handlers."""

    def __init__(self, bootstrap: Callable[[], str]) -> None:
        self._bootstrap = bootstrap
        self._admin_client: Any = None
        self._producer: Any = None
        self._pool = ThreadPoolExecutor(THREADS, "console-kafka")

    async def close(self) -> None:
        """End the threads; what they do now is finished first."""
        await asyncio.to_thread(self._pool.shutdown)
        self._admin_client = self._producer = None

    def config(self) -> dict[str, Any]:
        """Return the configuration of every client."""
        return {
            "bootstrap.servers": self._bootstrap(),
            "client.id": "tidelog-console",
            "log_level": 0,
            "allow.auto.create.topics": False,
            "socket.connection.setup.timeout.ms": 3_000,
        }

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Do blocking work in one of the threads. Errors of confluent-kafka are translated."""
        from confluent_kafka import KafkaException

        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)
        except KafkaException as error:
            raise translate(error.args[0]) from error

    async def _admin(self) -> Any:
        from confluent_kafka.admin import AdminClient

        if self._admin_client is None:
            config = {**self.config()}
            del config["allow.auto.create.topics"]
            self._admin_client = await self.run(AdminClient, config)
        return self._admin_client

    async def _wait(self, future: Future[T], what: str) -> T:
        from confluent_kafka import KafkaException

        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S + 5):
                return await asyncio.wrap_future(future)
        except KafkaException as error:
            raise translate(error.args[0], what) from error
        except TimeoutError:
            raise Unavailable(f"{what}: no answer in time", hint="see `tidelog status`") from None

    # --- topics --------------------------------------------------------------------------------------------------

    async def partitions(self, topic: str) -> list[int]:
        """Return the partitions of a topic. Raises `NotFound`; creates none."""
        from confluent_kafka import TopicCollection

        if not topic or len(topic) > 249:
            raise InvalidInput("a topic's name has 1 to 249 characters")
        admin = await self._admin()
        futures = admin.describe_topics(TopicCollection([topic]), request_timeout=REQUEST_TIMEOUT_S)
        found = await self._wait(futures[topic], f"topic {topic!r}")
        return sorted(each.id for each in found.partitions)

    async def spans(self, places: Iterable[Place]) -> dict[Place, Span]:
        """Return the readable offsets of partitions; those without a leader are left out."""
        from confluent_kafka.admin import OffsetSpec

        spec: Any = OffsetSpec
        wanted = list(places)
        first = await self.offsets(wanted, spec.earliest())
        last = await self.offsets(wanted, spec.latest())
        return {
            place: Span(start, end)
            for place in wanted
            if (start := first[place]) is not None and (end := last[place]) is not None
        }

    async def offsets_at(self, places: Iterable[Place], timestamp_ms: int) -> dict[Place, int | None]:
        """Return the first offset at or after a time in each partition; None: there is none, or no leader."""
        from confluent_kafka.admin import OffsetSpec

        if not 0 <= timestamp_ms < 1 << 53:
            raise InvalidInput(f"{timestamp_ms} is no time in milliseconds since 1970")
        return await self.offsets(list(places), OffsetSpec.for_timestamp(timestamp_ms))

    async def offsets(self, places: list[Place], spec: Any) -> dict[Place, int | None]:
        """ListOffsets; None for a partition that does not answer or has no such offset."""
        from confluent_kafka import KafkaException, TopicPartition

        if not places:
            return {}
        admin = await self._admin()
        asked = {TopicPartition(topic, partition): spec for topic, partition in places}
        futures = admin.list_offsets(asked, request_timeout=REQUEST_TIMEOUT_S)
        found = await asyncio.gather(*map(asyncio.wrap_future, futures.values()), return_exceptions=True)
        result: dict[Place, int | None] = {}
        for one, each in zip(futures, found, strict=True):
            if isinstance(each, BaseException):
                if not isinstance(each, KafkaException):
                    raise each
                result[one.topic, one.partition] = None
            else:
                result[one.topic, one.partition] = each.offset if each.offset >= 0 else None
        return result

    # --- groups --------------------------------------------------------------------------------------------------

    async def groups(self) -> dict[str, Any]:
        """Return the groups with members and lag, and the errors of brokers that did not tell theirs."""
        admin = await self._admin()
        listed = await self._wait(admin.list_consumer_groups(request_timeout=REQUEST_TIMEOUT_S), "groups")
        names = sorted(one.group_id for one in listed.valid)
        shown = names[:MAX_GROUPS]
        errors = [str(error) for error in listed.errors]
        described = await self._describe(shown)
        committed = dict(zip(shown, await asyncio.gather(*map(self._committed, shown)), strict=True))
        places = dict.fromkeys(place for one in committed.values() if not isinstance(one, str) for place in one)
        spans = await self.spans(list(places)[:MAX_GROUP_PARTITIONS])
        rows = []
        for name in shown:
            offsets, about = committed[name], described[name]
            if isinstance(offsets, str) or isinstance(about, str):
                errors.append(f"group {name!r}: {offsets if isinstance(offsets, str) else about}")
                continue
            lags = [max(0, spans[place].end - offset) for place, offset in offsets.items() if place in spans]
            rows.append(
                {
                    "group": name,
                    "state": group_state(about.state),
                    "members": len(about.members),
                    "coordinator": about.coordinator.id if about.coordinator is not None else None,
                    "topics": sorted({topic for topic, _ in offsets}),
                    "partitions": len(offsets),
                    "lag": sum(lags),
                    "unknown": len(offsets) - len(lags),
                }
            )
        return {"groups": rows, "left_out": len(names) - len(shown), "errors": errors}

    async def _describe(self, names: list[str]) -> dict[str, Any]:
        """The description of each group, or the text of the error."""
        if not names:
            return {}
        admin = await self._admin()
        futures = admin.describe_consumer_groups(names, request_timeout=REQUEST_TIMEOUT_S)
        return {name: await self._or_text(future, "description") for name, future in futures.items()}

    async def _or_text(self, future: Future[T], what: str) -> T | str:
        try:
            return await self._wait(future, what)
        except TidelogError as error:
            return error.message

    async def _committed(self, name: str) -> dict[Place, int] | str:
        """The committed offsets of a group, or the text of the error."""
        from confluent_kafka import ConsumerGroupTopicPartitions

        if not name:
            return NAMELESS
        admin = await self._admin()
        futures = admin.list_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(name)], request_timeout=REQUEST_TIMEOUT_S
        )
        found = await self._or_text(futures[name], "offsets")
        if isinstance(found, str):
            return found
        return {(one.topic, one.partition): one.offset for one in found.topic_partitions or [] if one.offset >= 0}

    async def group(self, name: str) -> dict[str, Any]:
        """Return one group with its members, and the lag of each partition. Raises `NotFound`."""
        if not name:
            raise InvalidInput("the name of the group is missing")
        about = (await self._describe([name]))[name]
        committed = await self._committed(name)
        for found in (about, committed):
            if isinstance(found, str):
                raise Unavailable(f"group {name!r}: {found}", hint="see `tidelog status`")
        assert isinstance(committed, dict)
        if group_state(about.state) == "dead" and not committed:
            raise NotFound(f"group {name!r} does not exist", hint="`tidelog group list` shows them")
        owners: dict[Place, str] = {}
        members = []
        for member in about.members:
            held = [(one.topic, one.partition) for one in (member.assignment.topic_partitions or [])]
            owners.update(dict.fromkeys(held, member.member_id))
            members.append(
                {
                    "member_id": member.member_id,
                    "instance_id": member.group_instance_id,
                    "client_id": member.client_id,
                    "host": member.host,
                    "partitions": len(held),
                }
            )
        places = sorted({*committed, *owners})
        spans = await self.spans(places[:MAX_GROUP_PARTITIONS])
        return {
            "group": name,
            "state": group_state(about.state),
            "coordinator": about.coordinator.id if about.coordinator is not None else None,
            "members": members,
            "partitions": [
                lag_row(place, committed.get(place), spans[place].end if place in spans else None, owners.get(place))
                for place in places[:MAX_GROUP_PARTITIONS]
            ],
            "left_out": max(0, len(places) - MAX_GROUP_PARTITIONS),
        }

    async def reset(self, order: ResetOrder) -> dict[str, Any]:
        """Return what the reset does in each partition; with `dry_run` false it is done. Raises `Unavailable`."""
        there = await self.partitions(order.topic)
        chosen = there if order.partitions is None else sorted(set(order.partitions))
        for partition in chosen:
            if partition not in there:
                raise InvalidInput(f"topic {order.topic!r} has no partition {partition}")
        about = (await self._describe([order.group]))[order.group]
        before = await self._committed(order.group)
        if isinstance(before, str) or isinstance(about, str):
            raise Unavailable(f"group {order.group!r}: {before if isinstance(before, str) else about}")
        places = [(order.topic, partition) for partition in chosen]
        spans = await self.spans(places)
        for topic, partition in places:
            if (topic, partition) not in spans:
                raise Unavailable(f"partition {topic}:{partition} has no leader now", hint="see `tidelog status`")
        after = await self._targets(order, before, spans)
        hindrance = None
        if group_state(about.state) not in INACTIVE:
            hindrance = f"group {order.group!r} has {len(about.members)} members, which would overwrite the offsets"
        if not order.dry_run:
            if hindrance is not None:
                raise Unavailable(hindrance, hint="stop its members first")
            await self._alter(order.group, after)
        rows = [
            {
                "partition": place[1],
                "before": before.get(place),
                "after": offset,
                "log_start_offset": spans[place].start,
                "high_watermark": spans[place].end,
            }
            for place, offset in after.items()
        ]
        return {"dry_run": order.dry_run, "hindrance": hindrance, "partitions": rows}

    async def _targets(
        self, order: ResetOrder, before: Mapping[Place, int], spans: Mapping[Place, Span]
    ) -> dict[Place, int]:
        """The new offset of each partition, within what it holds."""
        if order.to not in get_args(ResetTo):
            raise InvalidInput(f"to is {order.to[:20]!r}: earliest, latest, offset, time or shift is expected")
        if order.to in ("offset", "time", "shift") and order.value is None:
            raise InvalidInput(f"to {order.to} needs a value")
        to, value = cast(ResetTo, order.to), order.value or 0
        at = await self.offsets_at(spans, value) if to == "time" else {}
        for topic, partition in spans:
            if to == "shift" and (topic, partition) not in before:
                raise InvalidInput(f"the group has no committed offset in {topic}:{partition} to shift")
        return {
            place: reset_offset(to, value, *span, before.get(place), at.get(place)) for place, span in spans.items()
        }

    async def _alter(self, group: str, offsets: Mapping[Place, int]) -> None:
        from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

        admin = await self._admin()
        changes = [TopicPartition(topic, partition, offset) for (topic, partition), offset in offsets.items()]
        futures = admin.alter_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(group, changes)], request_timeout=REQUEST_TIMEOUT_S
        )
        result = await self._wait(futures[group], f"group {group!r}")
        for one in result.topic_partitions or []:
            if one.error is not None:
                raise translate(one.error, f"{one.topic}:{one.partition}")

    # --- records -------------------------------------------------------------------------------------------------

    async def produce(self, order: ProduceOrder) -> dict[str, Any]:
        """Write a record, or say where it would go (`partition` null: any)."""
        there = await self.partitions(order.topic)
        if order.partition is not None and order.partition not in there:
            raise InvalidInput(f"topic {order.topic!r} has no partition {order.partition}")
        key = None if order.key is None else order.key.encode()
        value = None if order.value is None else order.value.encode()
        partition = order.partition
        if partition is None and key is not None:
            partition = partition_of(key, len(there))
        if order.dry_run:
            size = len(key or b"") + len(value or b"")
            return {"dry_run": True, "partition": partition, "size_bytes": size}
        headers = [(name, None if text is None else text.encode()) for name, text in order.headers]
        message = await self.run(self._deliver, order.topic, partition, key, value, headers)
        return {
            "dry_run": False,
            "partition": message.partition(),
            "offset": message.offset(),
            "timestamp_ms": message.timestamp()[1],
        }

    def _deliver(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes | None]],
    ) -> Any:
        """Write a record, and wait for its confirmation. Runs in a thread."""
        from confluent_kafka import KafkaException, Producer

        if self._producer is None:
            config = {**self.config(), "acks": "all", "enable.idempotence": True, "message.timeout.ms": 10_000}
            del config["allow.auto.create.topics"]
            self._producer = Producer(config)
        delivered: list[tuple[Any, Any]] = []
        where = {} if partition is None else {"partition": partition}
        self._producer.produce(
            topic, value, key, headers=headers, on_delivery=lambda error, one: delivered.append((error, one)), **where
        )
        self._producer.flush(15)
        if not delivered:
            raise Unavailable(f"{topic}: not confirmed in 15 s; it may still be written", hint="see `tidelog status`")
        error, message = delivered[0]
        if error is not None:
            raise KafkaException(error)
        return message
