"""Names for types that several packages share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Buffer = bytes | bytearray | memoryview
"""Bytes to read, not kept longer than the callee documents."""
Offload = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function that would block the event loop in a thread, and returns its result."""
