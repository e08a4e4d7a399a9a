"""`NodeRole`: what a `tidelog serve` process does with each of its roles, whichever it is.

Entry: `tidelog.process.controller_role.ControllerRole`, `tidelog.process.broker_role.BrokerRole`.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class NodeRole(Protocol):
    """A controller or a broker in this process, with all that is made for it alone."""

    @property
    def ready_line(self) -> str:
        """`<kind of address>=host:port` of what it serves, once it is started."""
        ...

    @property
    def accounted_bytes(self) -> int:
        """Bytes that its caches and buffers account for."""
        ...

    @property
    def failed(self) -> asyncio.Future[None]:
        """A future that is set to the error that ended this role."""
        ...

    @property
    def restart_asked(self) -> asyncio.Future[None]:
        """A future that is done when an operator has asked for a restart of the process."""
        ...

    async def start(self) -> None:
        """Start it. Raises a `TidelogError` if the operator must correct something."""
        ...

    async def drain(self) -> None:
        """Hand over what it serves to other processes, as far as its time allows. May be cancelled."""
        ...

    async def stop_broker(self) -> None:
        """Stop it if it is a broker. A second call waits for the first."""
        ...

    def give_up(self) -> None:
        """Have it end at once: the bucket is another cluster's, so nothing can be committed or uploaded any more."""
        ...

    async def close(self) -> None:
        """Stop it and release what it holds. Valid after a failed start."""
        ...
