"""The limit of an acknowledgement by several disks: a request relayed over blocking sockets, and nothing else.

    python -m bench.limit_relay [--rounds 3] [--seconds 3] [--mb-per-s 5] [--batch-bytes 16384] [--dir DIR]

A client sends requests of fixed size at fixed times to a process that sends each to its followers, writes and syncs it
as `bench.limit_disk` does, and answers when a follower has done the same. Each process has one thread, which waits in
system calls alone: no event loop, no protocol, no checksum, no log. What is left is what the machine takes to wake
processes, to copy the bytes over its sockets, and to sync as many files of one disk as there are replicas.

Entry: `relayed`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench._common import Spread, background, directory, due_times, percentile, quick
from bench.limit_disk import RawDisk

HOST = "127.0.0.1"
FILE_BYTES = 32 << 20
PATIENCE_S = 30.0
_ANSWER = bytes(8)


def _received(one: socket.socket, buffer: memoryview) -> bool:
    """Fill the buffer; False: the other side has closed the connection."""
    got = 0
    while got < len(buffer):
        count = one.recv_into(buffer[got:])
        if not count:
            return False
        got += count
    return True


def _accepted(put: Callable[[Any], None]) -> socket.socket:
    """Put a port, and return the connection that comes to it."""
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(PATIENCE_S)
        put(server.getsockname()[1])
        one, _ = server.accept()
    one.settimeout(PATIENCE_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one


def _connected(port: int) -> socket.socket:
    one = socket.create_connection((HOST, port), PATIENCE_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one


def _relay(path: Path, size: int, followers: list[int], put: Callable[[Any], None]) -> None:
    """Take requests of `size` bytes, send each to these ports, write it, and answer when one of them has, too."""
    path.mkdir()
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(contextlib.closing(RawDisk(path, FILE_BYTES)))
        ready = stack.enter_context(selectors.DefaultSelector())
        owed = {stack.enter_context(_connected(port)): 0 for port in followers}
        for follower in owed:
            ready.register(follower, selectors.EVENT_READ)
        one = stack.enter_context(_accepted(put))
        request, answer, number = bytearray(size), memoryview(bytearray(_ANSWER)), 0
        while _received(one, memoryview(request)):
            number += 1
            for follower in owed:
                follower.sendall(request)
            disk.write(bytes(request))
            while owed and max(owed.values()) < number:
                for key, _ in ready.select(PATIENCE_S):
                    assert isinstance(key.fileobj, socket.socket)
                    if not _received(key.fileobj, answer):
                        raise ConnectionError("a follower has ended")
                    owed[key.fileobj] += 1
            one.sendall(_ANSWER)
        for follower in owed:  # what slower ones still answer: unread, it would reset their connections
            follower.shutdown(socket.SHUT_WR)
            while follower.recv(len(answer)):
                pass


def _paced(port: int, size: int, per_s: float, seconds: float, put: Callable[[Any], None]) -> None:
    """Put the seconds until each request was answered, from when it was due or, if that is later, its timer fired."""
    request, answer, took = os.urandom(size), memoryview(bytearray(_ANSWER)), []
    with _connected(port) as one:
        for due in due_times(per_s, seconds):
            one.sendall(request)
            if not _received(one, answer):
                raise ConnectionError("the relay has ended")
            took.append(time.perf_counter() - due)
    put(took)


def relayed(place: Path, replicas: int, size: int, per_s: float, seconds: float) -> list[float]:
    """Return the seconds until each request of `size` bytes was synced by the first process and one follower, if any.

    `replicas` (≥ 1) processes write below `place`; the requests are sent `per_s` times a second.
    """
    with contextlib.ExitStack() as stack:
        followers = [stack.enter_context(background(_relay, place / f"{n}", size, [])) for n in range(1, replicas)]
        ports = [follower() for follower in followers]
        port = stack.enter_context(background(_relay, place / "0", size, ports))()
        return list(stack.enter_context(background(_paced, port, size, per_s, seconds))())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1 if quick() else 3)
    parser.add_argument("--seconds", type=float, default=1.0 if quick() else 3.0)
    parser.add_argument("--mb-per-s", type=float, default=5.0)
    parser.add_argument("--batch-bytes", type=int, default=16_384)
    parser.add_argument("--dir", default=None, help="where to write (default: the system's temporary directory)")
    args = parser.parse_args()
    found: dict[int, list[float]] = {1: [], 2: [], 3: []}
    for _ in range(args.rounds):
        for replicas, p50 in found.items():
            with directory(args.dir) as place:
                per_s = args.mb_per_s * 1e6 / args.batch_bytes
                p50.append(percentile(relayed(place, replicas, args.batch_bytes, per_s, args.seconds), 0.5) * 1e3)
    for replicas, p50 in found.items():
        print(f"{replicas} replicas: p50 {Spread.of(p50).text('ms', 2)}", flush=True)


if __name__ == "__main__":
    main()
