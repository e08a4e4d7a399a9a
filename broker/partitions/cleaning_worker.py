"""The process that decides a round of log compaction: `python -m tidelog.broker.partitions.cleaning_worker`.

It answers the frames on its standard input, a socket, and does no other I/O. It has the lowest priority, and ends with
its broker: the socket is closed then, and Linux kills it (it may be stopped, or busy).

Entry: `main`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

import msgspec

from tidelog.broker.partitions.cleaning_frames import receive, send
from tidelog.stream.cleaning.messages import Answerer, Request

NICE = 19
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer until the broker closes the socket."""
    os.nice(NICE)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answerer = Answerer()
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Request).decode
    with socket.socket(fileno=os.dup(0)) as one:
        while True:
            try:
                head, body = receive(one)
                reply, payloads = answerer.answer(decode(head), body)
                send(one, encode(reply), payloads)
            except (EOFError, ConnectionError):
                return


if __name__ == "__main__":
    main()
