"""A controller with its client in one process, which commits until it is killed. Run by `test_controller_crash.py`.

Prints `state <end> <keys>` once the metadata is loaded, then `ack <end>` and `key <number>` after each acknowledgement.
With a third argument N it kills itself just before its N-th durable step (fsync, fdatasync, rename) after that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pysyncobj.serializer

from tests.controller.controller_helpers import make_client, make_node
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.commands import RegisterBroker
from tidelog.controller.model.settings import ControllerSettings
from tidelog.storage.commits import CommitObjects, NewObject, pack_ranges

WRITERS = 4


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def die_before_step(step: int) -> None:
    """Count the durable steps of the whole process, on whatever thread."""
    left = [step]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args)

        return run

    for name in ("fsync", "fdatasync", "rename"):
        setattr(os, name, counted(getattr(os, name)))
    pysyncobj.serializer.atomicReplace = os.rename


async def commits(client: ControllerClient, epoch: int, stream_id: int) -> None:
    while True:
        object_id = await client.prepare_objects(1, 60_000)
        end, wal = client.image.streams[stream_id].end_offset, client.committed_wal_offset(0)
        ranges = pack_ranges([(stream_id, end, end + 1)])
        await client.commit_objects(CommitObjects(0, epoch, wal, wal + 1, (NewObject(object_id, 1, 10, ranges),)))
        say(f"ack {end + 1}")


async def keys(client: ControllerClient, first: int) -> None:
    number = first
    while True:
        await client.put_kv(f"key-{number}", b"value")
        say(f"key {number}")
        number += WRITERS


async def main(directory: Path, port: int, step: int) -> None:
    node = make_node(directory, settings=ControllerSettings(snapshot_entries=40, port=port))
    await node.start()
    client = make_client(node.address)
    await client.start()
    image = client.image
    await client.register_broker(RegisterBroker(0, "c", str(os.getpid()), "h", 1, "", ""))
    epoch = (await client.elect(0, 0)).master_epoch
    topic = image.topic("t") or await client.create_topic("t", 1, {})
    stream_id = image.partitions(topic.id)[0].first_stream
    opened = await client.open_streams(0, epoch, [(stream_id, epoch)])
    written = sorted(key for key in image.kv if key.startswith("key-"))
    say(f"state {opened[0].end_offset} {','.join(written)}")
    if step:
        die_before_step(step)
    numbers = [int(key.removeprefix("key-")) for key in written]
    start = max(numbers, default=-1) + 1
    await asyncio.gather(commits(client, epoch, stream_id), *(keys(client, start + each) for each in range(WRITERS)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
