"""`WalKeeper`: compares a broker's WAL with what the controllers know of it, and keeps them informed.

At the start, after recovery: a WAL that does not continue what was acknowledged is refused, unless an operator has
accepted that loss (`tidelog wal accept-loss`). The files of a WAL that is not continued are kept under another name.
Then the controllers learn of the epoch that was begun in it.

While the broker serves: before the first record after a wholly committed WAL is confirmed, they are told that there may
be more (`tidelog.storage.ack_gate`); while records are written, how far; and after a pause with everything committed,
that nothing is at stake. If no controller answers within `TELL_S`, records are confirmed nevertheless, because a broker
that only lost the controllers goes on: until it has told them, the loss of its WAL is not noticed.

While other brokers have replicas of the WAL, promises take that part: the last note then says that there may be more,
and stays for the day on which the broker is alone again.

Entry: `meet_known_wal`, then `WalKeeper.begin`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tidelog.broker.inputs import WalAccess
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.image.stake import at_stake
from tidelog.controller.model.commands import FIRST_LEVEL, NoteWal
from tidelog.controller.model.records import STREAMS_PER_PARTITION
from tidelog.controller.model.wal_notes import (
    DATA_STREAM,
    MAX_WAL_ENDS,
    FoundWal,
    WalLost,
    WalNote,
    WalVerdict,
    describe,
    judge,
    note_in,
    note_interval_s,
)
from tidelog.runtime.clock import Clock
from tidelog.runtime.log_limit import LogLimiter
from tidelog.runtime.task_errors import expected
from tidelog.runtime.tasks import TaskSet
from tidelog.storage.storage import Storage
from tidelog.storage.wal.base import Wal

logger = logging.getLogger(__name__)

TELL_S = 1.0
"""How long a record waits, at most, for the controllers to learn that the WAL is not wholly committed any more."""


async def meet_known_wal(
    broker_id: int,
    access: WalAccess,
    controller: ControllerClient,
    wal: Wal,
    master_epoch: int,
    start_over: Callable[[str], Awaitable[None]],
) -> None:
    """Judge the recovered WAL, and begin another one if it is not the one that is known and nothing is at stake.

    `start_over(suffix)` begins the other one, and keeps the files under this suffix. Raises `WalLost` if acknowledged
    records are missing, and the errors of `start_over`.
    """
    image, committed = controller.image, controller.committed_wal_offset(broker_id)
    note = note_in(image.kv, broker_id)
    history = wal.epoch_history.entries
    found = FoundWal(access.kind, tuple(each.epoch for each in history), wal.end_offset, access.may_lose_tail)
    owns = bool(image.index.partition_counts.get(broker_id, 0))
    verdict = judge(note, committed, owns=owns, found=found)
    if verdict is not WalVerdict.CONTINUES:
        assert note is not None
        if verdict is WalVerdict.LOST:
            if access.accepted_loss != f"{broker_id}.{note.master_epoch}":
                raise _lost(broker_id, access, controller, note, found)
            await controller.accept_wal_loss(broker_id, master_epoch, note.master_epoch)
            logger.warning("an operator accepted the loss of a WAL", extra={"broker": broker_id})
        kept_as = f".rejected-{master_epoch}"
        logger.warning(
            "beginning another WAL; the files of the one that was found are kept",
            extra={"broker": broker_id, "wal_end": found.end_offset, "committed": committed, "suffix": kept_as},
        )
        await start_over(kept_as)


def _lost(broker_id: int, access: WalAccess, controller: ControllerClient, note: WalNote, found: FoundWal) -> WalLost:
    if note.kind != found.kind:
        what = f"is of kind {found.kind}; the known one is of kind {note.kind}"
    elif found.end_offset == 0:
        what = "is empty"
    elif note.master_epoch not in found.epochs:
        newest = max(found.epochs, default=-1)
        what = f"is another or an older one: its newest master epoch is {newest}, not {note.master_epoch}"
    else:
        what = "is older, or a part of it is missing"
    committed = controller.committed_wal_offset(broker_id)
    token = f"{broker_id}.{note.master_epoch}"
    place = f" --data-dir {access.directory}" if access.directory else ""
    return WalLost(
        f"the WAL of broker {broker_id} {what}. It ends at WAL offset {found.end_offset}; {committed} is committed,"
        f" and {note.end_offset}{' or more' if note.may_grow else ''} was acknowledged."
        f" Records at stake: {describe(at_stake(controller.image, broker_id))}",
        hint="mount or restore the WAL that this broker used last, and start again; nothing was changed."
        f" If it is gone: `tidelog wal accept-loss {token}{place}` gives these records up at the next start",
    )


class WalKeeper:
    """The notes of one broker's WAL; see the module."""

    def __init__(
        self,
        broker_id: int,
        access: WalAccess,
        controller: ControllerClient,
        wal: Wal,
        storage: Storage,
        clock: Clock,
    ) -> None:
        self._id = broker_id
        self._access = access
        self._controller = controller
        self._wal = wal
        self.storage = storage
        self._limiter = LogLimiter(logger, clock, burst=1, period_s=60.0)
        self._tasks = TaskSet("wal-notes")
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._number = 0
        self._last_end = -1
        self._epoch = -1
        """The master epoch that is reported; nothing is told once the WAL has another one."""
        self._stands_down = False
        self._told: WalNote | None = None
        """The last note, if the controllers have it; None: not known."""
        storage.gate.on_wanted = self._wake.set

    # --- start ---------------------------------------------------------------------------------------------------

    async def begin(self, master_epoch: int) -> None:
        """Report the epoch that was begun in the WAL, before anything is acknowledged in it. Raises `TidelogError`."""
        self._access.forget_accepted_loss()
        self._epoch = master_epoch
        if self._may_note:
            self.storage.gate.close(self._wal.end_offset)
            note = self._note(master_epoch, may_grow=False)
            await self._controller.note_wal(self._id, note)
            self._told = note
        self._tasks.keep(self._run, "run")

    def begin_within(self, master_epoch: int) -> None:
        """Report a WAL whose epoch has begun before, and which other brokers had replicas of until now.

        Nothing is held back: the note that it is not wholly committed was left (`stand_down`).
        """
        self._epoch = master_epoch
        self._wake.set()
        self._tasks.keep(self._run, "run")

    @property
    def is_known(self) -> bool:
        """Return whether the controllers would notice the loss of this WAL, or nothing would be lost with it.

        Not, for a while, where they did not answer within `TELL_S`.
        """
        return not self.storage.gate.is_open or (self._told is not None and self._told.may_grow)

    # --- while it serves -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(note_interval_s(len(self._controller.image.brokers))):
                    await self._wake.wait()
            except TimeoutError:
                pass  # the interval is over
            self._wake.clear()
            async with self._lock:
                await self._step()

    @property
    def _may_note(self) -> bool:
        """Whether notes may be told: not below the feature level that knows them, nor in another term."""
        if self._wal.master_epoch != self._epoch:
            return False
        cluster = self._controller.image.cluster
        return cluster is not None and cluster.level >= FIRST_LEVEL[NoteWal]

    async def _step(self) -> None:
        if not self._may_note:
            return
        storage, gate, told = self.storage, self.storage.gate, self._told
        if self._stands_down:
            if told is None or not told.may_grow:
                await self._tell(may_grow=True)
        elif gate.is_wanted:
            await self._tell(may_grow=True)
            gate.open()
        elif not gate.is_open:
            if told is None or told.may_grow:
                await self._tell(may_grow=False)
        elif storage.is_all_committed and storage.data_end == self._last_end:
            await self._settle()
        elif told is None or not told.may_grow or told.end_offset != self._known_end():
            await self._tell(may_grow=True)
        self._last_end = storage.data_end

    async def settle(self) -> None:
        """Report that everything is committed, if it is: from here on the WAL may be lost, or be another kind's."""
        async with self._lock:
            is_told = self._told is not None and not self._stands_down
            if is_told and self.storage.is_all_committed and self.storage.gate.is_open:
                await self._settle()

    async def _settle(self) -> None:
        self.storage.gate.close(self._wal.end_offset)
        await self._tell(may_grow=False)

    def _known_end(self) -> int:
        return min(self.storage.data_end, self._wal.synced_offset)

    def _note(self, master_epoch: int, *, may_grow: bool) -> WalNote:
        self._number += 1
        ends = [
            each
            for each in self.storage.uncommitted_ends(STREAMS_PER_PARTITION * MAX_WAL_ENDS)
            if each[0] % STREAMS_PER_PARTITION == DATA_STREAM
        ]
        access = self._access
        return WalNote(
            access.kind,
            access.place,
            master_epoch,
            self._number,
            self._known_end(),
            may_grow,
            tuple(ends[:MAX_WAL_ENDS]),
        )

    async def _tell(self, *, may_grow: bool) -> None:
        """Send a note. Without an answer in time it is not known whether it counts; a later one has a larger number."""
        note = self._note(self._wal.master_epoch, may_grow=may_grow)
        self._told = None
        try:
            async with asyncio.timeout(TELL_S):
                await self._controller.note_wal(self._id, note)
        except TimeoutError:
            text = f"no answer within {TELL_S} s"
        except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
            text = str(expected("wal-notes", failure))
        else:
            self._told = note
            return
        self._limiter.line("tell", logging.WARNING, "the controllers do not learn the WAL's end", {"error": text})

    # --- stop ----------------------------------------------------------------------------------------------------

    def stand_down(self) -> None:
        """Hold nothing back: other brokers have replicas of the WAL from now on. The last note is left."""
        if not self._stands_down:
            self._stands_down = True
            self._wake.set()
        self.storage.gate.open()

    def stand_up(self) -> None:
        """Report again: this broker alone has the WAL."""
        if self._stands_down:
            self._stands_down = False
            self._wake.set()

    async def close(self, *, report: bool) -> None:
        """Stop, after storage was closed; with `report` tell where the WAL ends, for nothing is appended any more."""
        began = self._number > 0
        await self._tasks.close()
        if began and self._may_note and report and not self._stands_down and self._wal.master_epoch >= 0:
            await self._tell(may_grow=False)
