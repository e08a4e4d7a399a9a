"""Section `[controller]` of the configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65_535)]
Millis = Annotated[int, Meta(ge=1)]


class ControllerSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How the controller listens, elects and keeps time."""

    host: str = "127.0.0.1"
    """Where its RPC server listens."""
    port: Port = 0
    """RPC port; 0 chooses a free one and writes it to the data directory."""
    endpoints: list[str] = msgspec.field(default_factory=list)
    """`host:port` of every controller's RPC server, for brokers; empty: the one in this process."""
    session_timeout_ms: Millis = 10_000
    """A broker without a heartbeat for so long is dead."""
    heartbeat_interval_ms: Millis = 1_000
    """How often a broker says that it is alive."""
    reelect_timeout_ms: Millis = 2_000
    """When the owner of a moving partition has closed it and not asked for the election so long, it is held anyway."""
    snapshot_entries: Annotated[int, Meta(ge=10)] = 10_000
    """Journal entries after which a snapshot is taken and the journal rewritten."""
    command_timeout_ms: Millis = 10_000
    """After this a command's outcome is unknown and the caller asks again with the same id."""
