"""A network without sockets: listeners hand out their protocol factory, transports remember what was written."""

from __future__ import annotations

import asyncio
from typing import Any

from tidelog.runtime.network import Listener, ProtocolFactory


class _NoListener:
    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", 9092)

    async def close(self) -> None:
        """Nothing listens."""


class FuzzNetwork:
    """`Network` whose connections are made by the fuzzer."""

    def __init__(self) -> None:
        self.factory: ProtocolFactory

    async def listen(self, factory: ProtocolFactory, host: str, port: int) -> Listener:
        """Keep the factory."""
        self.factory = factory
        return _NoListener()

    async def connect(self, factory: ProtocolFactory, host: str, port: int, *, timeout_s: float) -> Any:
        """Nobody connects out."""
        raise AssertionError("a connection out of the fuzzed part")


class FuzzTransport(asyncio.Transport):
    """The peer's end: `written` has what the protocol sent; `open` says whether it may be sent more."""

    def __init__(self, protocol: asyncio.BaseProtocol) -> None:
        super().__init__({"peername": ("127.0.0.1", 5)})
        self._protocol = protocol
        self._lost = False
        self.reading = True
        self.written = bytearray()

    @property
    def open(self) -> bool:
        return not self._lost

    def write(self, data: Any) -> None:
        if not self._lost:
            self.written += data

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def is_closing(self) -> bool:
        return self._lost

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Everything is taken at once."""

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._lost:
            self._lost = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)
