"""Decides whether a broker traces, without importing OpenTelemetry. Entry: `open_tracing`, `missing_library`."""

from __future__ import annotations

import importlib.util
import random
from typing import TYPE_CHECKING

from tidelog.broker.settings import TracingSettings
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import ConfigError

if TYPE_CHECKING:
    from tidelog.broker.telemetry.tracing import Tracing

NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def open_tracing(settings: TracingSettings, clock: Clock, rng: random.Random) -> Tracing | None:
    """Return the traces of a broker, not started; None if it has none. Raises `ConfigError` if a library is missing."""
    if not settings.endpoint:
        return None
    if name := missing_library():
        raise ConfigError(
            f"tracing.endpoint is {settings.endpoint}, but traces need the library {name}, which is not installed",
            hint="install it with pip install 'tidelog[tracing]', or leave tracing.endpoint empty",
        )
    from tidelog.broker.telemetry.tracing import Tracing

    return Tracing(settings, clock, rng)


def missing_library() -> str:
    """Return a library that traces need and this environment lacks; empty if none."""
    return next((name for name in NEEDED if not _is_installed(name)), "")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even its parent
        return False
