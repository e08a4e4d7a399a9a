"""Changes of configs that are computed from the configs that a broker knows.

Entry: `until_based`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tidelog.controller.model.errors import ConfigsChanged

ATTEMPTS = 50
"""With each attempt that is refused another change was made."""

R = TypeVar("R")


async def until_based(change: Callable[[], Awaitable[R]]) -> R:
    """Make a change, and have it computed anew if others have changed the configs meanwhile.

    `change` reads them, and names them as the base of its command (`tidelog.controller.model.configs`). Raises
    `ConfigsChanged` if that is refused `ATTEMPTS` times.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return await change()
        except ConfigsChanged:
            continue  # the local image has the other change by now
    return await change()
