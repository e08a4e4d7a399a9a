"""`ControllerAuthority`: the `SetAuthority` of one replica, over the client of the controllers.

A request is one command, which the client repeats under one dedupe id until it has an answer. A call that ends without
one leaves a request that may take effect, and whose copies may still be on their way: the next call for the same
configuration is another command, and the state machine answers it as it would have answered the first.

A refusal says that no earlier request has taken effect, and nothing of copies that are still to come. So a request that
is refused is asked once more, after all that this process has asked before (`after_all` of the client). What is refused
then is over: copies that arrive later are below the numbers of which the controllers still keep results.

What a refusal means is read from the local image, which is at least as new as the refusal. A master whose term goes on
is not told that it has ended, whichever class the refusal has: `NotEligible`, for one, is a class of `Fenced`, and is
also the answer for a set that has lost its last other replica.

Invariants: `AlterRefused` is raised only when neither the request nor an earlier one of this process for the same
configuration number can take effect any more; `Fenced` only when the image names another epoch, master or registration;
the one deadline only decides how long an answer is awaited (rule 16).

Entry: `ControllerAuthority`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from tidelog.broker.replication.inputs import AlterRefused, ReplicaIdentity
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.errors import ConfigurationRefused
from tidelog.controller.model.records import ReplicaSetRecord
from tidelog.controller.model.replication import has_several
from tidelog.controller.model.wal_notes import note_interval_s
from tidelog.runtime.errors import Fenced, NotFound, TidelogError, Unavailable
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica

logger = logging.getLogger(__name__)

ALTER_S = 30.0
"""Seconds for which an answer is awaited: longer than an election of the controllers. The master asks again then."""

Ask = Callable[..., Awaitable[ReplicaSetRecord]]
"""Sends a request; `after_all` as `ReplicaSetClient.alter_sync_state_set` has it."""


class ControllerAuthority:
    """What the controllers decide for the set of one replica; see the module docstring."""

    def __init__(self, client: ControllerClient, identity: ReplicaIdentity, *, deadline_s: float = ALTER_S) -> None:
        """`client`: started, and of the process that is registered as `identity` says. `deadline_s`: > 0."""
        self._client = client
        self._identity = identity
        self._deadline_s = deadline_s

    async def alter(
        self, wanted: SetConfiguration, *, master_epoch: int, ends: Mapping[WalReplica, int], confirm_offset: int
    ) -> SetConfiguration:
        """See `SetAuthority.alter`.

        Every error of the client becomes one of `Fenced`, `AlterRefused` and `Unavailable`. `Unavailable`: no
        controller has answered within the deadline, or the answer leaves open whether the request has taken effect.
        """
        identity = self._identity
        ask = partial(
            self._client.replica_sets.alter_sync_state_set,
            identity.replica_set_id,
            wanted,
            master=(identity.replica.broker_id, identity.registration_epoch),
            master_epoch=master_epoch,
            ends=ends,
            confirm_offset=confirm_offset,
        )
        try:
            async with asyncio.timeout(self._deadline_s):
                try:
                    return await self._ask(ask, wanted, master_epoch)
                except AlterRefused:
                    return await self._ask(partial(ask, after_all=True), wanted, master_epoch)
        except TimeoutError:
            raise Unavailable(
                f"replica set {identity.replica_set_id}: no answer to a sync-state set within {self._deadline_s} s",
                hint="is there an active controller? `tidelog controller status` shows it",
            ) from None

    async def _ask(self, ask: Ask, wanted: SetConfiguration, master_epoch: int) -> SetConfiguration:
        """Ask once. Raises as `alter`; `AlterRefused` is final if it was asked after all others."""
        try:
            record = await ask()
        except (ConfigurationRefused, Fenced, NotFound) as refusal:
            in_force = self._in_force(master_epoch, refusal)
            if in_force.number > wanted.number:
                return in_force  # an earlier request has taken effect
            if in_force.number < wanted.number:
                raise Fenced(
                    f"the controllers are at sync-state set epoch {in_force.number} of replica set"
                    f" {self._identity.replica_set_id}, and its master has seen {wanted.number}",
                    hint="the controllers' metadata was set back: see `tidelog controller status`",
                ) from refusal
            raise AlterRefused(refusal.message, hint=refusal.hint) from refusal
        except Unavailable:
            raise
        except TidelogError as error:
            extra = {"set": self._identity.replica_set_id, "wanted": str(wanted), "error": str(error)}
            logger.warning("a request for a sync-state set failed", extra=extra)
            raise Unavailable(
                f"a sync-state set was answered with {type(error).__name__}: {error.message}", hint=error.hint
            ) from error
        return wanted._replace(number=record.sync_state_set_epoch)

    def _in_force(self, master_epoch: int, refusal: TidelogError) -> SetConfiguration:
        """Return the configuration of a term that goes on, after a refusal. Raises `Fenced` if it has ended."""
        image, identity = self._client.image, self._identity
        record = image.replica_sets.get(identity.replica_set_id)
        configuration = image.configuration(identity.replica_set_id)
        me = identity.replica.broker_id
        is_master = record is not None and (record.master, record.master_epoch) == (me, master_epoch)
        if configuration is None or not is_master or not self._is_registered(me, identity.registration_epoch):
            raise Fenced(refusal.message, hint=refusal.hint) from refusal
        return configuration

    def _is_registered(self, broker_id: int, registration_epoch: int) -> bool:
        broker = self._client.image.brokers.get(broker_id)
        return broker is not None and broker.registration_epoch == registration_epoch

    async def resign(self, designated: int, reason: str, *, master_epoch: int) -> None:
        """See `SetAuthority.resign`."""
        set_id = self._identity.replica_set_id
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._client.replica_sets.begin_election(
                    set_id, master_epoch, reason, designated=designated, is_patient=False
                )
        except TimeoutError:
            raise Unavailable(f"replica set {set_id}: no answer to an election within {self._deadline_s} s") from None

    def reports_every_s(self) -> float:
        """See `SetAuthority.reports_every_s`: as often as notes of WALs, and none beside these."""
        record = self._client.image.replica_sets.get(self._identity.replica_set_id)
        if record is None or not has_several(record):
            return math.inf
        return note_interval_s(len(self._client.image.brokers))

    def admits(self, replica: WalReplica, registration_epoch: int, *, learner: bool) -> bool:
        """See `SetAuthority.admits`, by the local image: who has joined just now may have to try again."""
        row = self._client.image.replication.get(self._identity.replica_set_id)
        joined = row.replica(replica.broker_id) if row is not None else None
        if joined is None or (joined.wal_id, joined.is_learner) != (replica.wal_id, learner):
            return False
        return self._is_registered(replica.broker_id, registration_epoch)
