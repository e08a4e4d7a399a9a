"""`tidelog cluster restart --rolling`: restart the brokers one after another, each by handing over its roles.

Each step begins with a request to the broker itself, which the controllers allow only while every other broker is there
and in sync, so two of these commands at the same time take no two brokers away. Everything that the command knows is in
the cluster: one that was killed is started again, and restarts all brokers that it is asked for.
See docs/design/0016-rolling-restart.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection
from tidelog.cli.completion import broker_list
from tidelog.cli.options import admin_options, format_option
from tidelog.cli.placements import placements
from tidelog.cli.rolling_restart import LATE_HINTS, Phase, PlannedStep, broker_row, home_set, plan, step_phase
from tidelog.runtime.errors import InvalidInput, NotFound, TidelogError, Unavailable
from tidelog.runtime.progress_bar import ProgressBar

POLL_S = 0.1
FIRST_PATIENCE_S = 15.0
"""How long the first step waits for a cluster that is not ready: what an interrupted run has left passes by itself."""
STEADY_S = 1.0
"""How long a broker has followed before it is elected: one that has just caught up may lack the newest bytes again."""
ELECT_AGAIN_S = 3.0
"""After an election that another one has won."""
BETWEEN_S = 2.0
"""Between two steps: clients find the leaders of the last one before those of the next one change."""
LOOK_TIMEOUT_S = 10.0
"""For each piece of an answer that others give, too."""
MOVES_AT_ONCE = 1_000
MOVE_AGAIN_S = 5.0
Document = dict[str, Any]


def _ids(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[int, ...]:
    found = []
    for each in (text or "").split(",") if text is not None else ():
        if not (each.strip().isascii() and each.strip().isdigit()):
            raise InvalidInput(f"--brokers takes ids, not {each.strip()!r}", hint="for example --brokers 1,2")
        found.append(int(each))
    return tuple(found)


@click.command()
@click.option("--rolling", is_flag=True, help="One broker after another, while the others serve. Required.")
@click.option(
    "--brokers",
    "chosen",
    metavar="ID,ID,...",
    callback=_ids,
    shell_complete=broker_list,
    help="Only these. [default: all]",
)
@click.option("--dry-run", is_flag=True, help="Only show the order, and what speaks against it now.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="Seconds to wait for each part of a step, such as the broker's end, and its return.",
)
@format_option
@admin_options
def restart(
    rolling: bool, chosen: tuple[int, ...], dry_run: bool, timeout_s: float, style: str, bootstrap: str
) -> None:
    """Restart all brokers, one after another, under load.

    Each broker hands over what it leads, ends, is started again by whoever supervises its process, catches up, and
    leads its own replica set again, before the next one follows.
    """
    if not rolling:
        raise InvalidInput("give --rolling: the brokers are restarted one after another")
    cluster = _RestartedCluster(ClusterConnection(bootstrap))
    steps = plan(cluster.look(), chosen)
    if dry_run:
        rows = [step._asdict() for step in steps]
        output.emit(json.dumps(rows, indent=2) if style == "json" else _render_plan(steps))
        return
    with ProgressBar("restarting", sum(not step.skipped for step in steps), "brokers") as progress:
        done = _restart_all(cluster, steps, timeout_s, progress)
    document = {"restarted": done, "skipped": [step.broker for step in steps if step.skipped]}
    if style == "json":
        output.emit(json.dumps(document, indent=2))
    else:
        output.emit(_render_done(document))


def _restart_all(
    cluster: _RestartedCluster, steps: list[PlannedStep], timeout_s: float, progress: ProgressBar
) -> list[Document]:
    done: list[Document] = []
    for step in steps:
        if step.skipped:
            output.warn(f"broker {step.broker} is left alone: {step.skipped}")
            continue
        if done:
            time.sleep(BETWEEN_S)
        progress.describe(f"restarting broker {step.broker}")
        patience_s = timeout_s if done else min(timeout_s, FIRST_PATIENCE_S)
        done.append(_BrokerRestart(cluster, step.broker, timeout_s).run(patience_s))
        progress.update(len(done))
    if done:
        progress.describe("waiting for the cluster")
        cluster.wait_clear(done[-1]["broker"], timeout_s, "the cluster is not as it was")
    return done


class _RestartedCluster:
    """The cluster, asked through brokers that are not being restarted."""

    def __init__(self, connection: ClusterConnection) -> None:
        self._connection = connection
        self._urls: dict[int, str] = {}
        """The admin HTTP of each living broker."""
        self._silent: set[int] = set()
        """Those that have accepted a connection and not answered, or not even that: they are asked last."""

    def look(self, spare: int | None = None) -> Document:
        """Return what the cluster says now; by broker `spare` last. Raises `NotFound` for an older version."""
        try:
            found = self.get("/restart", spare)
        except NotFound as error:
            raise NotFound(
                "this broker runs a version before rolling restarts",
                hint="stop and start its brokers one by one (docs/operations.md)",
            ) from error
        self._urls = {row["id"]: row["admin_url"] for row in found["brokers"] if row["alive"] and row["admin_url"]}
        return found

    def get(self, path: str, spare: int | None = None) -> Document:
        """Send a GET to the first broker that answers."""
        return self._first(
            spare,
            lambda url: self._connection.ask(url, path, timeout_s=LOOK_TIMEOUT_S),
            lambda: self._connection.get(path),
        )

    def post(self, path: str, body: object = None, spare: int | None = None) -> Document:
        """Send a POST to the first broker that answers."""
        return self._first(spare, lambda url: self.post_to(url, path, body), lambda: self._connection.post(path, body))

    def post_to(self, url: str, path: str, body: object = None) -> Document:
        """Send a POST to one broker."""
        found: Document = self._connection.post_to(url, path, body)
        return found

    def _first(self, spare: int | None, ask: Callable[[str], Document], last: Callable[[], Document]) -> Document:
        order = sorted(self._urls.items(), key=lambda each: (each[0] in self._silent, each[0] == spare, each[0]))
        for broker, url in order:
            try:
                found = ask(url)
            except Unavailable as error:
                if not isinstance(error.__cause__, OSError):
                    raise  # it has answered
                del self._urls[broker]
                self._silent.add(broker)
            else:
                self._silent.discard(broker)
                return found
        return last()

    def is_ready(self, row: Document) -> bool:
        """Whether a broker says that it serves everything that it leads."""
        try:
            self._connection.ask(row["admin_url"], "/readyz", timeout_s=LOOK_TIMEOUT_S, broker=row["id"])
        except TidelogError:
            return False
        return True

    def wait_clear(self, broker: int, timeout_s: float, what: str) -> Document:
        """Wait until nothing speaks against restarting a broker; return what the cluster says then.

        Raises `Unavailable` after the time-out.
        """
        deadline, told = time.monotonic() + timeout_s, ""
        while True:
            found = self.look()
            reasons = "; ".join(broker_row(found, broker)["hindrances"])
            if not reasons:
                return found
            if reasons != told:
                output.warn(f"waiting: {reasons}")
                told = reasons
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{what}: {reasons}",
                    hint="`tidelog status` and `tidelog replica-set list` show the cluster; run this again afterwards",
                )
            time.sleep(POLL_S)


class _BrokerRestart:
    """The restart of one broker."""

    def __init__(self, cluster: _RestartedCluster, broker: int, timeout_s: float) -> None:
        self._cluster = cluster
        self._broker = broker
        self._timeout_s = timeout_s

    def run(self, patience_s: float) -> Document:
        """Restart it, and wait until it is back. Raises `Unavailable`, and what the broker refuses."""
        broker, began = self._broker, time.monotonic()
        before = self._cluster.wait_clear(broker, patience_s, f"broker {broker} cannot be restarted now")
        row, home = broker_row(before, broker), home_set(before, broker)
        moved = self._owned() if home is not None and not home["elects"] and home["partitions"] else []
        self._request(row)
        told = f", {len(moved)} of them by moves, which are taken back afterwards" if moved else ""
        output.warn(f"broker {broker}: hands over {row['partitions']} partitions{told}")
        self._follow(row["registration_epoch"])
        if moved:
            self._bring_back(moved)
        took_s = time.monotonic() - began
        output.warn(f"broker {broker}: is back ({took_s:.1f} s)")
        return {"broker": broker, "partitions": row["partitions"], "took_s": round(took_s, 3)}

    def _request(self, row: Document) -> None:
        """Ask the broker to restart, until it does; another command that asks at the same time may win."""
        deadline = time.monotonic() + self._timeout_s
        path = f"/restart?id={row['id']}&registration_epoch={row['registration_epoch']}"
        while True:
            try:
                self._cluster.post_to(row["admin_url"], path)
                return
            except InvalidInput:
                raise  # a wrong token, or a feature level without restarts
            except TidelogError as error:
                now = broker_row(self._cluster.look(self._broker), self._broker)
                if now["registration_epoch"] != row["registration_epoch"] or now["drain"] == "shutdown":
                    return  # the answer was lost, or another command has asked for the same
                if time.monotonic() > deadline:
                    raise Unavailable(error.message, hint=error.hint) from error
            time.sleep(POLL_S)

    def _follow(self, registration_epoch: int) -> None:
        """Wait until another process is registered, in sync, and leads the broker's replica set."""
        told, since, elect_at = Phase.ENDING, time.monotonic(), 0.0
        while True:
            now = self._cluster.look(self._broker)
            row = broker_row(now, self._broker)
            is_ready = row["registration_epoch"] > registration_epoch and row["alive"] and self._cluster.is_ready(row)
            phase = step_phase(now, self._broker, registration_epoch, is_ready=is_ready)
            if phase is Phase.DONE:
                return
            if phase is not told:
                output.warn(f"broker {self._broker}: {phase.value}")
                told, since = phase, time.monotonic()
                if phase is Phase.FOLLOWING:
                    elect_at = max(elect_at, since + STEADY_S)
            if phase is Phase.FOLLOWING and time.monotonic() >= elect_at:
                self._elect(now)
                elect_at = time.monotonic() + ELECT_AGAIN_S
            if time.monotonic() - since > self._timeout_s:
                raise Unavailable(
                    f"broker {self._broker} {phase.value}, for {self._timeout_s:g} s now; no other one is restarted",
                    hint=LATE_HINTS[phase],
                )
            time.sleep(POLL_S)

    def _elect(self, document: Document) -> None:
        """Have it elected as master of its own replica set; ask the present master, which prepares for that."""
        home = home_set(document, self._broker)
        path = f"/replica-sets/elect?id={self._broker}&broker={self._broker}"
        master = next((row for row in document["brokers"] if home is not None and row["id"] == home["master"]), None)
        try:
            if master is not None:
                self._cluster.post_to(master["admin_url"], path)
        except InvalidInput:
            raise
        except TidelogError as error:  # it may have ended: an election follows by itself, and the next look shows it
            output.warn(f"broker {self._broker}: not elected yet: {error.message}")

    # --- a replica set of one member -----------------------------------------------------------------------------

    def _owned(self) -> list[Document]:
        found: list[Document] = self._cluster.get(f"/restart?owner={self._broker}")["owned"]
        return found

    def _existing(self, partitions: list[Document]) -> list[Document]:
        """Return those whose topics were not deleted meanwhile."""
        names = (one["topic"] for one in partitions)
        rows = placements(lambda path: self._cluster.get(path, self._broker), names, but_deleted=True)
        exist = {(row["topic"], row["partition"]) for row in rows}
        return [one for one in partitions if (one["topic"], one["partition"]) in exist]

    def _bring_back(self, partitions: list[Document]) -> None:
        """Move partitions back that the broker's drain has moved away, and wait until it has them."""
        ask_at = time.monotonic()
        deadline = ask_at + self._timeout_s
        while True:
            here = {(one["topic"], one["partition"]) for one in self._owned()}
            missing = [one for one in partitions if (one["topic"], one["partition"]) not in here]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{len(missing)} partitions of broker {self._broker} are not back yet; their moves continue",
                    hint="`tidelog partition list` shows them; `tidelog balancer run` evens out what is left",
                )
            if time.monotonic() >= ask_at:  # and again, when a move was refused or came to nothing
                ask_at = time.monotonic() + MOVE_AGAIN_S
                partitions = self._existing(partitions)
                moves = [{**one, "to": self._broker} for one in missing[:MOVES_AT_ONCE]]
                self._cluster.post("/moves", {"moves": moves}, spare=self._broker)
            time.sleep(POLL_S)


def _render_plan(steps: list[PlannedStep]) -> str:
    rows = [
        [
            step.broker,
            step.partitions,
            "yes" if step.is_active_controller else "no",
            step.skipped or "; ".join(step.hindrances) or "ready",
        ]
        for step in steps
    ]
    return output.table(["BROKER", "PARTITIONS", "ACTIVE-CONTROLLER", "NOW"], rows, right=["BROKER", "PARTITIONS"])


def _render_done(document: Document) -> str:
    if not document["restarted"]:
        return "no broker was restarted"
    rows = [[one["broker"], one["partitions"], f"{one['took_s']:.1f} s"] for one in document["restarted"]]
    return output.table(["BROKER", "PARTITIONS", "TOOK"], rows, right=["BROKER", "PARTITIONS", "TOOK"])
