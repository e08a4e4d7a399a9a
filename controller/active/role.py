"""What the work of the active controller is done through.

Entry: `ActiveRole`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tidelog.controller.image.image import Image
from tidelog.controller.model.commands import AnyCommand

Propose = Callable[[AnyCommand], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ActiveRole:
    """The metadata, and the way to change it while this controller is the active one."""

    image: Callable[[], Image]
    propose: Propose
    """Commits a command. Raises `TidelogError` if that fails, or this controller is not active any more."""
    is_active: Callable[[], bool]
    time_ms: Callable[[], int]
    """Cluster time (`tidelog.controller.machine.tables`) in milliseconds, while this controller is active."""
