"""A broker's membership in its cluster: registration, election as master of its replica set, serving, and drain.

Invariants: a broker is registered under one registration epoch and master under one master epoch, each greater than all
before; it accepts partitions from other brokers only while it serves.

Entry: `BrokerMembership.register`, then `elect`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Mapping

from tidelog.broker.failure import BrokerFailure
from tidelog.broker.inputs import BrokerIdentity, WalAccess
from tidelog.broker.partitions.hints import HintReply
from tidelog.broker.partitions.takeover import wait_for_takeover
from tidelog.broker.settings import KafkaSettings
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.image.leading import partitions_led
from tidelog.controller.model.commands import RegisterBroker
from tidelog.controller.model.errors import DirectoryInUse, NoPlaceToDrain
from tidelog.controller.model.overrides import SESSION_TIMEOUT, in_force
from tidelog.controller.model.records import DrainMode
from tidelog.controller.model.settings import ControllerSettings
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import TidelogError

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.25
REGISTER_POLL_S = 0.5
NOTICE_S = 2.0
"""Beyond a session time-out, until its end is in the metadata: two rounds of the active controller."""


class BrokerMembership:
    """The membership of one broker; see the module."""

    def __init__(
        self,
        identity: BrokerIdentity,
        controller: ControllerClient,
        clock: Clock,
        failure: BrokerFailure,
        terms: Callable[[], Mapping[int, int]],
    ) -> None:
        """`terms`: the master epochs in which this broker serves, by replica set."""
        self._terms = terms
        self._identity = identity
        self._controller = controller
        self._clock = clock
        self._failure = failure
        self.registration_epoch = -1
        """-1: not registered yet."""
        self.serves = False
        """Whether the broker has started, and is not stopping."""

    # --- start ---------------------------------------------------------------------------------------------------

    def registration(
        self, kafka: KafkaSettings, *, admin_url: str, wal: WalAccess, peer_port: int, rng: random.Random
    ) -> RegisterBroker:
        """Return this process's registration: a new incarnation, and its addresses. `peer_port` 0: no peer listener."""
        host = kafka.advertised_host or kafka.host
        peer_host = kafka.peer_advertised_host or host
        return RegisterBroker(
            self._identity.broker_id,
            self._identity.check_code,
            str(uuid.UUID(int=rng.getrandbits(128), version=4)),
            host,
            kafka.advertised_port or kafka.port,
            rack=kafka.rack,
            admin_url=admin_url,
            wal_kind=wal.kind,
            peer_address=f"{peer_host}:{peer_port}" if peer_port else "",
            directory=self._identity.directory,
            wal_place=wal.place,
        )

    async def register(self, registration: RegisterBroker) -> None:
        """Register; wait a bounded time for the end of a process with another copy of the data directory.

        Raises `BrokerIdInUse`, `DirectoryInUse`, `WalNotCommitted`.
        """
        deadline = self._clock.monotonic() + self._patience_s()
        told = False
        while True:
            try:
                self.registration_epoch = await self._controller.register_broker(registration)
                return
            except DirectoryInUse as error:
                if self._clock.monotonic() >= deadline:
                    raise
                if not told:
                    logger.warning("waiting for another process to end", extra={"error": str(error)})
                told = True
                await self._clock.sleep(REGISTER_POLL_S)

    def _patience_s(self) -> float:
        """Return how long that process may be registered although it is dead: the time-out may be overridden."""
        patience_s, overrides = self._identity.patience_s, self._controller.image.cluster_configs
        if patience_s and SESSION_TIMEOUT in overrides:
            found = in_force("controller", ControllerSettings(), overrides)
            patience_s = max(patience_s, found.session_timeout_ms / 1000 + NOTICE_S)
        return patience_s

    async def elect(self) -> int:
        """Become master of the broker's replica set, which has one member, after a takeover in progress.

        Returns the new master epoch.
        """
        broker_id = self._identity.broker_id
        await wait_for_takeover(self._controller, broker_id)
        return (await self._controller.elect(broker_id, broker_id)).master_epoch

    def hint_reply(self) -> HintReply | None:
        """Return the epochs for a partition that moves to this broker's own replica set; None unless it serves that."""
        master_epoch = self._terms().get(self._identity.broker_id)
        if not self.serves or self._failure.happened or master_epoch is None:
            return None
        return HintReply(self._identity.broker_id, master_epoch)

    # --- stop ----------------------------------------------------------------------------------------------------

    async def drain(self, budget_s: float) -> None:
        """Have other brokers lead the partitions before a stop, as far as `budget_s` allows. Never raises.

        Partitions of replica sets of several members stay there, and another member becomes master; others move.

        The broker stays marked as draining until it registers again.
        """
        if not self.is_to_drain(budget_s):
            return
        logger.info("draining before the stop", extra={"partitions": self._owned(), "timeout_s": budget_s})
        try:
            async with asyncio.timeout(budget_s):
                await self._controller.drain_broker(
                    self._identity.broker_id, DrainMode.SHUTDOWN, self.registration_epoch
                )
                await self._drained()
        except (TimeoutError, TidelogError) as error:
            logger.warning(
                "stopping with partitions that were not moved: they wait for this broker, or for a takeover",
                extra={"partitions": self._owned(), "error": str(error) or "time is up"},
            )

    def is_to_drain(self, budget_s: float) -> bool:
        """Return whether a drain with this budget does anything."""
        return self.serves and not self._failure.happened and budget_s > 0 and self._has_others()

    def _owned(self) -> int:
        return partitions_led(self._controller.image, self._identity.broker_id)

    def _has_others(self) -> bool:
        mine = self._identity.broker_id
        return any(one.alive and not one.draining and one.id != mine for one in self._controller.image.brokers.values())

    async def _drained(self) -> None:
        """Return when no partition is led here any more; log the progress. Raises `NoPlaceToDrain`."""
        told = self._owned()
        while left := self._owned():
            if not self._has_others():
                raise NoPlaceToDrain("no other broker is alive, and not draining, any more")
            if left != told:
                logger.info("draining", extra={"partitions_left": left})
                told = left
            await self._clock.sleep(DRAIN_POLL_S)
        logger.info("drained: other brokers lead all partitions")
