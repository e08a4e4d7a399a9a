"""The targets by name."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.base import Target
from tests.fuzz.handler_target import Handlers
from tests.fuzz.rpc_target import Rpc
from tests.fuzz.storage_target import Batches, Files
from tests.fuzz.wire_target import Requests

TARGETS: dict[str, Callable[[], Target]] = {
    "requests": Requests,
    "handlers": Handlers,
    "batches": Batches,
    "files": Files,
    "rpc": Rpc,
}
