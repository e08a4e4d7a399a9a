"""`tidelog object compact|clean`: compaction and orphan search on request.

Both run in a broker, which has access to the bucket and the metadata; the command sends requests over admin HTTP and
shows the progress. A broker compacts the objects that it owns, so all brokers are requested in turn. `--dry-run`
changes nothing. Ctrl-C ends a compaction: committed results are kept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlencode

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection
from tidelog.cli.completion import topic_names
from tidelog.cli.many import ask_at_once
from tidelog.cli.options import DurationType, admin_options, format_option
from tidelog.cli.subcommands.status import GOOD_STATES
from tidelog.runtime.errors import TidelogError, Unavailable
from tidelog.runtime.progress_bar import ProgressBar

PLAN_TIMEOUT_S = 20.0
"""For the brokers to plan, all at the same time."""
MAX_SHOWN_IDS = 8
"""Maximum number of objects of a task in a table; JSON has all."""


# --- compact -----------------------------------------------------------------------------------------------------


@click.command()
@click.option(
    "-t",
    "--topic",
    "topics",
    multiple=True,
    metavar="NAME",
    help="Only objects with data of TOPIC; may repeat.",
    shell_complete=topic_names,
)
@click.option("--eager", is_flag=True, help="Also merge two small neighbours of any age (ignore compaction.*).")
@click.option("--now", "unthrottled", is_flag=True, help="Ignore the throttle, even if the broker is busy.")
@click.option("--dry-run", is_flag=True, help="Show planned and running tasks; change nothing.")
@format_option
@admin_options
def compact(topics: tuple[str, ...], eager: bool, unthrottled: bool, dry_run: bool, style: str, bootstrap: str) -> None:
    """Merge small objects into large ones now, as brokers do in the background. Exits 5 if a task was abandoned."""
    query = [("topic", name) for name in topics] + [("eager", "true")] * eager
    brokers = _brokers(ClusterConnection(bootstrap))
    failures = output.Failures()
    states = _states(brokers, query, failures)
    if dry_run:
        _show_plans(style, states)
        failures.exit()
        return
    document = _nothing_done()
    due = [broker for broker, state in states.items() if state["plan"] or state["active"]]
    if not due and len(states) == len(brokers):
        output.show(style, lambda: document, lambda _: _nothing_to_do(eager))
        return
    ended = len(states) - len(due)
    for broker in due:
        done = _nothing_done()
        try:
            _run(brokers[broker], query + [("unthrottled", "true")] * unthrottled, done)
            ended += 1
        except TidelogError as error:  # the other brokers can still compact
            failures.add(error)
        document = {key: document[key] + done[key] for key in document}
    if ended or document["tasks"]:
        output.show(style, lambda: document, _render_outcome)
    failures.exit()
    if document["given_up"]:
        count = len(document["given_up"])
        raise Unavailable(
            f"{count} of {count + document['tasks']} compactions were given up without changes",
            hint="run it again; `tidelog status` shows the cause",
        )


def _states(
    brokers: Mapping[int, ClusterConnection], query: Sequence[tuple[str, str]], failures: output.Failures
) -> dict[int, dict[str, Any]]:
    """What each broker does and would do. Why others do not say is among the failures, which end it if none does."""

    def ask(one: ClusterConnection) -> dict[str, Any]:
        found: dict[str, Any] = one.get(f"/compaction?{urlencode(query)}")
        return found

    states: dict[int, dict[str, Any]] = {}
    answers = ask_at_once({broker: partial(ask, one) for broker, one in brokers.items()}, PLAN_TIMEOUT_S)
    for broker, answer in answers.items():
        if isinstance(answer, Unavailable):
            failures.add(answer)
        elif isinstance(answer, TidelogError):
            raise answer
        else:
            states[broker] = answer
    if not states:
        failures.exit()
    return states


def _brokers(cluster: ClusterConnection) -> dict[int, ClusterConnection]:
    """Connections to each live broker, by id."""
    asked = cluster.get("/status")
    found = {asked["node_id"]: cluster.at(cluster.admin_url, asked["node_id"])}
    for node in asked["nodes"]:
        if "broker" not in node["roles"] or node["id"] in found:
            continue
        if node["state"] in GOOD_STATES:
            found[node["id"]] = cluster.at(node["admin_url"], node["id"])
        else:
            output.warn(f"broker {node['id']} is {node['state']}: its objects are not compacted")
    return dict(sorted(found.items()))


def _show_plans(style: str, states: dict[int, dict[str, Any]]) -> None:
    """Show the state of one broker unchanged, of several as a list."""
    if len(states) == 1:
        (state,) = states.values()
        output.show(style, lambda: state, _render_plan)
        return
    document = {"brokers": [{"broker": broker, **state} for broker, state in states.items()]}
    parts = [f"broker {broker}\n{_render_plan(state)}" for broker, state in states.items()]
    output.show(style, lambda: document, lambda _: "\n\n".join(parts))


def _nothing_done() -> dict[str, Any]:
    """The result of a compaction before its first task."""
    return {"tasks": 0, "inputs": 0, "outputs": 0, "read_bytes": 0, "written_bytes": 0, "given_up": []}


def _nothing_to_do(eager: bool) -> str:
    if eager:
        return "nothing to compact"
    return "nothing to compact by the thresholds of the configuration; --eager also merges two small neighbours"


def _run(cluster: ClusterConnection, query: Sequence[tuple[str, str]], totals: dict[str, Any]) -> None:
    """Run a compaction and show its progress; count in `totals` what was done.

    Raises `Unavailable` if the broker aborts or disconnects.
    """
    planned = 0
    with ProgressBar("compacting") as progress:
        for line in cluster.post_lines(f"/compaction?{urlencode(query)}"):
            event = line["event"]
            if event == "start" and line["busy"]:
                output.warn("the broker is busy: it compacts at a tenth of its throttle; --now does not wait")
            elif event == "plan":
                planned += line["bytes"]
                progress.update(totals["read_bytes"], planned)
            elif event == "progress":
                totals["read_bytes"], totals["written_bytes"] = line["read_bytes"], line["written_bytes"]
                progress.update(line["read_bytes"], planned)
            elif event == "task":
                totals["tasks"] += 1
                totals["inputs"] += line["inputs"]
                totals["outputs"] += line["outputs"]
            elif event == "skipped":
                totals["given_up"].append({key: line[key] for key in ("kind", "inputs", "bytes", "error")})
            elif event == "error":
                raise Unavailable(line["error"], hint=line["hint"])
            elif event == "done":
                totals["read_bytes"], totals["written_bytes"] = line["read_bytes"], line["written_bytes"]
                return
    raise Unavailable("the compaction was interrupted", hint="committed results are kept; see `tidelog status`")


def _render_plan(document: dict[str, Any]) -> str:
    state = "running" if document["active"] else "idle"
    if document["stopped"]:
        state = f"ended: {document['stopped']}"
    about = [
        ("compaction", f"{state}, background {'on' if document['enabled'] else 'off'}"),
        ("throttle", _throttle(document)),
        ("done", f"{document['tasks']} tasks, {document['inputs']} objects into {document['outputs']}"),
        ("given up", document["given_up"]),
    ]
    text = output.pairs(about)
    if document["running"]:
        rows = [[one["kind"], one["objects"], output.size(one["bytes"]), one["reason"]] for one in document["running"]]
        text += "\n\n" + output.table(["RUNNING", "OBJECTS", "BYTES", "REASON"], rows, right=["OBJECTS", "BYTES"])
    if document["excluded"]:
        rows = [[one["object"], one["why"]] for one in document["excluded"]]
        text += "\n\n" + output.table(["LEFT ALONE", "WHY"], rows, right=["LEFT ALONE"])
    plan = document["plan"]
    if not plan:
        return f"{text}\n\nnothing to compact now"
    headers = ["KIND", "OBJECTS", "BYTES-IN", "BYTES-OUT", "STREAMS", "TOPICS", "REASON", "IDS"]
    rows = [
        [
            task["kind"],
            len(task["inputs"]),
            output.size(task["bytes"]),
            f"~{output.size(task['estimated_bytes'])}",
            task["streams"],
            _some(task["topics"]),
            task["reason"],
            _some(task["inputs"]),
        ]
        for task in plan
    ]
    total = output.size(sum(task["bytes"] for task in plan))
    table = output.table(headers, rows, right=headers[1:5])
    return f"{text}\n\n{table}\n\n{len(plan)} tasks, {total} to read; nothing was changed"


def _throttle(document: dict[str, Any]) -> str:
    throttle = f"{output.size(document['throttle_bytes_per_s'])}/s"
    if document["unthrottled"]:
        return "none, as requested"
    return f"{throttle}, a tenth of it now: the broker is busy" if document["busy"] else throttle


def _some(values: Sequence[Any]) -> str:
    shown = ",".join(str(value) for value in values[:MAX_SHOWN_IDS])
    more = len(values) - MAX_SHOWN_IDS
    return f"{shown},…(+{more})" if more > 0 else shown


def _render_outcome(document: dict[str, Any]) -> str:
    read, written = output.size(document["read_bytes"]), output.size(document["written_bytes"])
    text = (
        f"{document['inputs']} objects became {document['outputs']} in {document['tasks']} tasks;"
        f" {read} read, {written} written"
    )
    if document["given_up"]:
        rows = [[one["kind"], one["inputs"], output.size(one["bytes"]), one["error"]] for one in document["given_up"]]
        text += "\n\n" + output.table(["GIVEN UP", "OBJECTS", "BYTES", "WHY"], rows, right=["OBJECTS", "BYTES"])
    return text


# --- clean -------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--dry-run", is_flag=True, help="List orphans; delete nothing.")
@click.option(
    "--min-age", type=DurationType(), metavar="AGE", help="Minimum age (10m, 2h); default: clean.orphan_age_ms."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@format_option
@admin_options
def clean(dry_run: bool, min_age: int | None, yes: bool, style: str, bootstrap: str) -> None:
    """Find and delete objects that crashes left in the bucket and no metadata names."""
    cluster = ClusterConnection(bootstrap)
    query = [] if min_age is None else [("min_age_ms", str(min_age))]
    if dry_run or not yes:
        found = _search(cluster, [*query, ("dry_run", "true")])
        if dry_run or not (found["orphans"] or found["unfinished"]):
            output.show(style, lambda: found, _render_clean)
            return
        size = output.size(sum(one["size_bytes"] for one in found["orphans"]))
        uploads = f" and abort {len(found['unfinished'])} uploads" if found["unfinished"] else ""
        output.confirm(f"delete {len(found['orphans'])} orphans ({size}){uploads}")
    done = _search(cluster, query)
    output.show(style, lambda: done, _render_clean)


def _search(cluster: ClusterConnection, query: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Have the bucket searched. Raises `Unavailable` if the broker aborts or disconnects."""
    with ProgressBar("searching") as progress:
        for line in cluster.post_lines(f"/orphans?{urlencode(query)}"):
            if line["event"] == "progress":
                progress.update(line["bytes"])
            elif line["event"] == "error":
                raise Unavailable(line["error"], hint=line["hint"] or "run it again: it finds the remaining orphans")
            elif line["event"] == "done":
                return {key: value for key, value in line.items() if key != "event"}
    raise Unavailable("the search was interrupted", hint="run it again: it finds the remaining orphans")


def _render_clean(document: dict[str, Any]) -> str:
    now_ms = time.time() * 1000
    headers = ["ID", "SIZE", "AGE", "STATE", "GOES", "KEY", "WHY"]
    goes = "now" if document["dry_run"] else "deleted"
    rows = [
        [
            one["id"],
            output.size(one["size_bytes"]),
            _ago(now_ms - one["modified_ms"]),
            "orphan",
            goes,
            one["key"],
            one["reason"],
        ]
        for one in document["orphans"]
    ]
    rows += [
        [
            one["id"],
            output.size(one["size_bytes"]),
            _ago(now_ms - one["modified_ms"]),
            one["state"],
            f"in {_ago(max(0.0, one['until_ms'] - now_ms))}",
            one["key"],
            one["reason"],
        ]
        for one in document["waiting"]
    ]
    rows += [
        [
            None,
            None,
            _ago(now_ms - one["started_ms"]),
            "unfinished",
            "now" if document["dry_run"] else "aborted",
            one["key"],
            one["reason"],
        ]
        for one in document["unfinished"]
    ]
    text = output.table(headers, rows, right=["ID", "SIZE", "AGE"]) + "\n\n" if rows else ""
    size = output.size(sum(one["size_bytes"] for one in document["orphans"]))
    what = "found, nothing was deleted" if document["dry_run"] else f"found, {document['deleted']} deleted"
    text += f"{len(document['orphans'])} orphans ({size}) {what}"
    text += f"; {document['objects']} objects ({output.size(document['bytes'])}) examined"
    if document["unfinished"]:
        done = "found" if document["dry_run"] else f"found, {document['aborted']} aborted"
        text += f"\n{len(document['unfinished'])} unfinished uploads {done}"
    if document["unfinished_problem"]:
        done = "aborted" if document["unfinished"] else "listed"
        text += f"\nunfinished uploads could not be {done}: {document['unfinished_problem']}"
    if document["waiting"]:
        text += f"\n{len(document['waiting'])} wait for the controller, which deletes them by itself"
    if document["young"]:
        age = _ago(document["min_age_ms"])
        text += f"\n{document['young']} are younger than {age} and kept; --min-age changes the limit"
    if document["unknown_future"]:
        text += (
            f"\n{document['unknown_future']} have ids that the controller has not yet allocated, and are never deleted:"
            " was its directory restored from an old backup?"
        )
    return text


def _ago(milliseconds: float) -> str:
    seconds = milliseconds / 1000
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f}{unit}"
    return f"{seconds:.0f}s"
