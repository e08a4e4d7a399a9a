"""`ClosingSelector`, for kafka-python's clients: `KafkaConsumer(selector=ClosingSelector, ...)`.

kafka-python 3.0 closes a connection that still has bytes to write when they are written, and a client that is closed
meanwhile, say a consumer in the middle of a rebalance, stops before: nobody closes the socket then, and the warning
falls on whichever test runs when it is garbage. What a client waited for is closed with its selector here.
"""

from __future__ import annotations

import selectors
import socket
from typing import Any


class ClosingSelector(selectors.DefaultSelector):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._sockets: set[socket.socket] = set()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._sockets.add(fileobj)
        return super().register(fileobj, events, data)

    def close(self) -> None:
        super().close()
        for each in self._sockets:
            each.close()
