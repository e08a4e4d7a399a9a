"""CPU time of a Fetch request in a fetch session, beside one without a session, and by the general way.

    python -m bench.session_fetch [--blocks 60] [--requests 100]

A request is decoded, handled and its response encoded; the logs are real, the WAL and the bucket are in memory, and no
socket is involved, whose cost is the same for all. Blocks of a hundred requests of each kind take turns in one process,
so that load from elsewhere and a changing clock rate meet all kinds alike; a figure is the median of the blocks. The
limit is a request for one partition without a session, which has had a short way for long.

All requests are version 17 with topic ids, as Java's consumers send them. Each partition has one batch with one record
of 100 bytes, so that the cost of a request shows and not that of its bytes.

- `one`: a session of one partition, which each request lists, as after each response with records;
- `six`: the same with six partitions of one topic;
- `swapped`: a session of six partitions; each request lists three and forgets the three of the request before, as a
  consumer does that still has records of those in hand;
- `empty`: a session of a hundred partitions without news, and requests that list nothing and wait for nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import struct
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median

from bench._common import pin, quick, row
from tests.support import schema
from tests.support.kafka_client import encode_request, request_entity
from tests.support.kafka_world import KafkaWorld, batch, until
from tidelog.broker.kafka.handlers.fetch import handle, handle_without_short_ways
from tidelog.broker.kafka.services import Answer, RequestContext
from tidelog.broker.kafka.wire.codec import message_codec
from tidelog.broker.kafka.wire.fetch import FetchRequest, FetchResponse

FETCH, VERSION = 1, 17
TOPIC = "bench"
IDLE = 100
Handle = Callable[[RequestContext, FetchRequest], Awaitable[FetchResponse]]
_SESSION_MARK, _EPOCH_MARK = 0x13572468, 0x24681357


@dataclass(frozen=True)
class Case:
    """What the requests of a session list, in turns, and whether each forgets what the one before listed."""

    listed: tuple[tuple[int, ...], ...]
    partitions: int
    offset: int = 0
    forgets: bool = False
    in_session: bool = True


ALONE = Case(((0,),), 1, in_session=False)
CASES = {
    "one": Case(((0,),), 1),
    "six": Case((tuple(range(6)),), 6),
    "swapped": Case(((0, 1, 2), (3, 4, 5)), 6, forgets=True),
    "empty": Case(((),), IDLE, offset=1),
}


class _Client:
    """Sends the requests of a case to one handler, and says what they cost."""

    def __init__(self, world: KafkaWorld, topic_id: uuid.UUID, case: Case, way: Handle) -> None:
        self._services = world.services
        self._case = case
        self._way = way
        self._codec = message_codec(FETCH, VERSION)
        turns = case.listed
        self._frames = [
            self._frame(topic_id, listed, turns[number - 1] if case.forgets else (), case.in_session)
            for number, listed in enumerate(turns)
        ]
        self._session, self._epoch = 0, 0 if case.in_session else -1
        if case.in_session:
            self._ask([self._next(self._frame(topic_id, tuple(range(case.partitions)), (), True))])
            assert self._session > 0, "the session was declined"

    def block(self, count: int) -> float:
        """Return the CPU time of a request in µs, of so many."""
        return self._ask([self._next(self._frames[number % len(self._frames)]) for number in range(count)])

    def _next(self, frame: bytes) -> bytearray:
        found = bytearray(frame)
        at = found.index(struct.pack(">ii", _SESSION_MARK, _EPOCH_MARK))
        struct.pack_into(">ii", found, at, self._session, self._epoch)
        self._epoch += self._case.in_session
        return found

    def _ask(self, frames: list[bytearray]) -> float:
        codec, services, way, session = self._codec, self._services, self._way, 0
        started = time.process_time()
        for frame in frames:
            client_id, request = codec.decode(frame)
            answer = way(RequestContext(services, FETCH, VERSION, 7, client_id, "127.0.0.1"), request)
            assert isinstance(answer, Answer) and answer.response is not None, "not answered at once"
            assert not answer.response.error_code
            session = answer.response.session_id
            codec.encode(7, answer.response)
        spent = time.process_time() - started
        self._session = session
        return spent / len(frames) * 1e6

    def _frame(self, topic_id: uuid.UUID, listed: tuple[int, ...], gone: tuple[int, ...], marked: bool) -> bytes:
        make = schema.request(FETCH, VERSION).make
        more = {"current_leader_epoch": -1, "last_fetched_epoch": -1, "log_start_offset": -1}
        offset = self._case.offset
        wanted = [
            make("FetchPartition", partition=one, fetch_offset=offset, partition_max_bytes=1 << 20, **more)
            for one in listed
        ]
        entity = request_entity(
            FETCH,
            VERSION,
            max_wait=0 if not any(self._case.listed) else 500,
            min_bytes=1,
            max_bytes=50 << 20,
            isolation_level=0,
            session_id=_SESSION_MARK,
            session_epoch=_EPOCH_MARK,
            topics=[make("FetchTopic", topic_id=topic_id, partitions=wanted)] if wanted else [],
            forgotten_topics_data=[make("ForgottenTopic", topic_id=topic_id, partitions=gone)] if gone else [],
            rack_id="",
        )
        return encode_request(entity, 1, "bench")[4:]


async def _measure(args: argparse.Namespace) -> dict[str, list[float]]:
    async with KafkaWorld() as world:
        topic = await world.topic(TOPIC, IDLE)
        for log in world.partitions.all():
            log.append(memoryview(bytearray(batch(bytes(100)))))
        await until(lambda: all(log.high_watermark for log in world.partitions.all()), "confirmation")
        topic_id = uuid.UUID(bytes=topic.id)
        clients = {"alone": _Client(world, topic_id, ALONE, handle)}
        for name, case in CASES.items():
            clients[name] = _Client(world, topic_id, case, handle)
            clients[f"{name}, general"] = _Client(world, topic_id, case, handle_without_short_ways)
        found: dict[str, list[float]] = {name: [] for name in clients}
        gc.freeze()
        for number in range(args.blocks + 3):
            for name, client in clients.items():
                spent = client.block(args.requests)
                if number >= 3:
                    found[name].append(spent)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20 if quick() else 60)
    parser.add_argument("--requests", type=int, default=100, help="in a block")
    args = parser.parse_args()
    pin({0})
    found = {name: median(values) for name, values in asyncio.run(_measure(args)).items()}
    for name in CASES:
        short, general = found[name], found[f"{name}, general"]
        row(
            f"fetch in a session, {name}",
            f"{short:.1f} µs of CPU, by the general way {general:.1f} ({general / short:.2f} times)",
            limit=f"one partition without a session {found['alone']:.1f} µs",
            ratio=f"{found['alone'] / short:.2f}",
        )


if __name__ == "__main__":
    main()
