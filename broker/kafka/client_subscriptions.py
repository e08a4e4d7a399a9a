"""The subscriptions of client metrics (KIP-714), of the configs that hold them (`tidelog.broker.kafka.named_configs`).

Entry: `ClientSubscriptions.current`.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.broker.kafka.client_telemetry import TelemetrySubscription
from tidelog.broker.kafka.named_configs import CLIENT_METRICS, entries, named, overrides_of, patterns
from tidelog.broker.partitions.topic_config import split_list
from tidelog.controller.image.image import Image


class ClientSubscriptions:
    """Reads them again only when the metadata have changed."""

    def __init__(self, image: Callable[[], Image]) -> None:
        self._image = image
        self._version = -1
        self._configs: dict[str, dict[str, str]] = {}
        self._subscriptions: tuple[TelemetrySubscription, ...] = ()

    def current(self) -> tuple[TelemetrySubscription, ...]:
        """Return the subscriptions; the same object until one changes."""
        image = self._image()
        if image.version != self._version:
            self._version = image.version
            configs = {name: dict(overrides_of(image, CLIENT_METRICS, name)) for name in named(image, CLIENT_METRICS)}
            if configs != self._configs:
                self._configs = configs
                self._subscriptions = tuple(_subscription(image, name) for name in configs)
        return self._subscriptions


def _subscription(image: Image, name: str) -> TelemetrySubscription:
    values = {entry.name: entry.value or "" for entry in entries(image, CLIENT_METRICS, name)}
    return TelemetrySubscription(
        tuple(split_list(values["metrics"])), int(values["interval.ms"]), patterns(values["match"])
    )
