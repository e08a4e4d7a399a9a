"""The plan of a rolling restart, and how far the restart of one broker is: pure functions of what the cluster says.

The documents are those of `GET /restart` (`tidelog.broker.admin.restart`). A step is known by the registration that the
broker had before it, so a plan that is made again after the command was killed goes on with what is left.

Sans-IO. Entry: `plan`, `step_phase`.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from tidelog.runtime.errors import NotFound

Document = dict[str, Any]


class Phase(enum.Enum):
    """Where the restart of a broker is."""

    ENDING = "hands over what it leads"
    AWAY = "has ended, and is to be started again"
    STARTING = "has registered again, and is starting"
    CATCHING_UP = "is catching up"
    ELECTING = "waits for the election of a replica set"
    FOLLOWING = "is in sync, and does not lead its replica set"
    DONE = "is back"


class PlannedStep(NamedTuple):
    """One broker of the plan."""

    broker: int
    partitions: int
    """That it leads."""
    is_active_controller: bool
    skipped: str
    """Why it is not restarted; empty: it is."""
    hindrances: list[str]
    """What speaks against restarting it now; while others are restarted something always does."""


def plan(document: Document, chosen: Sequence[int] = ()) -> list[PlannedStep]:
    """Return the steps: by id, but the broker that is also the active controller last. Raises `NotFound`.

    `chosen`: the brokers to restart; empty: all. Its order does not matter.
    """
    rows = {row["id"]: row for row in document["brokers"]}
    for each in chosen:
        if each not in rows:
            close = difflib.get_close_matches(str(each), [str(one) for one in rows], n=1)
            raise NotFound(
                f"there is no broker {each}",
                hint=f"did you mean {close[0]}?" if close else "`tidelog broker list` shows them",
            )
    active = {row["id"] for row in document["controllers"] if row["state"] == "active"}
    ids = sorted({*chosen} or rows, key=lambda each: (each in active, each))
    return [
        PlannedStep(
            each, rows[each]["partitions"], each in active, _skipped(rows[each]), list(rows[each]["hindrances"])
        )
        for each in ids
    ]


def _skipped(row: Document) -> str:
    if row["drain"] == "operator":
        return "drained by an operator"
    return ""


def broker_row(document: Document, broker: int) -> Document:
    """Return a broker's row. Raises `NotFound` when it was removed meanwhile."""
    for row in document["brokers"]:
        if row["id"] == broker:
            found: Document = row
            return found
    raise NotFound(f"broker {broker} was removed from the cluster", hint="`tidelog broker list` shows the others")


def home_set(document: Document, broker: int) -> Document | None:
    """Return the replica set of which the broker is the preferred master."""
    return next((row for row in document["replica_sets"] if row["id"] == broker), None)


def step_phase(document: Document, broker: int, registration_epoch: int, *, is_ready: bool) -> Phase:
    """Return where the restart of a broker is.

    `registration_epoch`: the one that ends. `is_ready`: whether a process that registered later says that it serves.
    """
    row = broker_row(document, broker)
    if row["registration_epoch"] <= registration_epoch:
        return Phase.ENDING if row["alive"] else Phase.AWAY
    if not row["alive"]:
        return Phase.AWAY
    if not is_ready:
        return Phase.STARTING
    sets = [each for each in document["replica_sets"] if each["elects"] and broker in each["members"]]
    if any(broker not in each["in_sync"] for each in sets):
        return Phase.CATCHING_UP
    home = home_set(document, broker)
    if home is not None and home["elects"]:
        if home["electing"] or home["master"] is None:
            return Phase.ELECTING
        if home["master"] != broker and broker in home["in_sync"]:
            return Phase.FOLLOWING
    return Phase.DONE


LATE_HINTS = {
    Phase.ENDING: "see the broker's log; `tidelog broker list` shows what it still leads",
    Phase.AWAY: "whoever supervises its process must start it again after exit code 11 (docs/operations.md); start it,"
    " and run this command again",
    Phase.STARTING: "see the broker's log, and its /readyz",
    Phase.CATCHING_UP: "`tidelog replica-set list` shows who is in sync; run this command again when it is",
    Phase.ELECTING: "`tidelog replica-set describe ID` shows the election",
    Phase.FOLLOWING: "`tidelog replica-set elect ID --broker ID` lets it lead; the broker itself was restarted",
}
"""What to do next when a phase does not end."""
