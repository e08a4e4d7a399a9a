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
    """RPC port; 0: as `members` says, else a free one, which is written to the data directory."""
    members: list[str] = msgspec.field(default_factory=list)
    """The quorum at its first start: `id@host:port` of 1, 3 or 5 controllers, on all nodes the same; empty: one."""
    secret_file: str = ""
    """File with the secret that all nodes share: 16 bytes or more, readable by its owner only. `members` need it."""
    endpoints: list[str] = msgspec.field(default_factory=list)
    """`host:port` by which this broker reaches the controllers, if not as `members` says."""
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
