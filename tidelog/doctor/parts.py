"""What goes into a bundle: of this machine, of each node, and of the cluster as a whole.

Entry: `add_machine`, `add_cluster`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from tidelog.config import Loaded
from tidelog.doctor.bundle import Bundle
from tidelog.doctor.cluster import Ask
from tidelog.doctor.facts import ClusterView, Facts, NodeView
from tidelog.doctor.masking import MAX_FILE_BYTES, shown_settings
from tidelog.process.node_base import setting_facts
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.facts.machine import machine_facts
from tidelog.runtime.facts.node import secret_files

MAX_LISTED_FILES: Final = 5_000
LOG_TAIL_BYTES: Final = 2 << 20
MAX_LOGS: Final = 20
PAGE: Final = 1_000
PAGES: Final = 5
"""Of objects that are listed."""
OF_CLUSTER: Final = (
    "/cluster",
    "/controllers",
    "/controllers/config",
    "/brokers",
    "/partitions",
    "/replica-sets",
    "/wals",
    "/losses/accepted",
    "/quarantine",
    "/balancer",
    "/scale",
    "/restart",
    "/leases",
)
"""Asked of one broker."""
OF_NODE: Final = ("/status", "/failover", "/moves", "/compaction", "/bucket/usage")
"""Asked of each."""


class AskText(Ask, Protocol):
    """As `Ask`, also for answers that are no JSON."""

    def text(self, url: str, path: str) -> str:
        """Return the text of a GET, or as much of its begin as a bundle may hold. Raises `TidelogError`."""
        ...


def secrets_in_files(loaded: Loaded) -> list[bytes]:
    """Read the files with secrets that a configuration names, as far as they can be read."""
    values = {each.key: each.value for each in setting_facts(loaded)}
    found = []
    for file in secret_files(values):
        try:
            with Path(file.path).open("rb") as opened:
                found.append(opened.read(MAX_FILE_BYTES))
        except OSError:
            continue  # then nothing else here can have read it; the doctor tells
    return found


def add_machine(bundle: Bundle, loaded: Loaded, environment: Mapping[str, str], logs: Iterable[Path]) -> None:
    """Add the configuration with its origins, versions, the environment, listings of the data directory, logs."""
    bundle.add_json("config.json", shown_settings(setting_facts(loaded)))
    bundle.add_json("machine.json", {**msgspec.to_builtins(machine_facts()), "packages": _packages()})
    told = {name: value for name, value in sorted(environment.items()) if name.startswith(("TIDELOG_", "AWS_"))}
    bundle.add_text("environment.txt", "".join(f"{name}={value}\n" for name, value in told.items()))
    data_dir = Path(loaded.config.node.data_dir)
    if os.path.isdir(data_dir):  # False of one that may not be looked at
        bundle.add_text("files.txt", "".join(f"{line}\n" for line in listing(data_dir)))
        logs = [*logs, *sorted(data_dir.glob("*.log")), *sorted(data_dir.glob("node-*/*.log"))]
    for number, log in enumerate(list(dict.fromkeys(logs))[:MAX_LOGS], 1):
        name = f"logs/{number:02}-{log.name}"
        try:
            bundle.add_text(name, tail(log), keeps_end=True)
        except OSError as error:
            bundle.lack(name, f"{log}: {error.strerror}")


def _packages() -> dict[str, str]:
    """Return the version of each package that Tidelog needs, as installed."""
    required = metadata.requires("tidelog") or []
    names = {each.partition(";")[0].split("[")[0].strip() for each in required if "extra ==" not in each}
    found = {}
    for name in sorted(name.split(">")[0].split("=")[0].split("<")[0].split("!")[0].strip() for name in names):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def listing(directory: Path) -> Iterator[str]:
    """Yield a line for each file below a directory: mode, size, time (ms), path; no link is followed."""
    count = 0
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if count >= MAX_LISTED_FILES:
                yield f"… and more: {MAX_LISTED_FILES} files are listed"
                return
            count += 1
            try:
                found = path.lstat()
            except OSError:
                continue  # removed meanwhile
            yield f"{found.st_mode & 0o7777:04o} {found.st_size:>14} {found.st_mtime_ns // 1_000_000} {path}"


def tail(file: Path, limit: int = LOG_TAIL_BYTES) -> str:
    """Return the last lines of a file: whole ones, so that no begin of a secret is cut off. Raises `OSError`."""
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - limit))
        data = opened.read(limit)
    if size > limit:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", "replace")


def add_cluster(bundle: Bundle, facts: Facts, ask: AskText, tell: Callable[[str], None]) -> None:
    """Add what each node answers. `tell` is called with what is being done."""
    cluster = facts.cluster
    if cluster is None:
        bundle.lack("cluster", "it was not asked (--offline)")
        return
    if cluster.error:
        bundle.lack("cluster", cluster.error)
        return
    bundle.add_json("status.json", cluster.status)
    for node, why in cluster.silent.items():
        bundle.lack(f"nodes/{node}", why)
    rows = {int(row["id"]): row for row in cluster.status["nodes"]}
    for row in rows.values():
        if "broker" in row["roles"] and row["state"] in ("dead", "away"):
            bundle.lack(f"nodes/{row['id']}", f"broker {row['id']} is {row['state']}")
        elif row["state"] == "away":
            bundle.lack(f"nodes/{row['id']}", f"controller {row['id']} is away")
    _add_nodes(bundle, cluster, facts.nodes, ask, tell)


def _add_nodes(
    bundle: Bundle, cluster: ClusterView, views: Sequence[NodeView], ask: AskText, tell: Callable[[str], None]
) -> None:
    urls = {int(row["id"]): row["admin_url"] for row in cluster.status["nodes"] if "broker" in row["roles"]}
    running = [view for view in views if view.is_running]
    answering = [node for node in urls if f"broker {node}" in {view.where for view in running}]
    if not answering:
        bundle.lack("nodes", "no broker's admin HTTP answers")
        return
    tell("asking the cluster")
    for path in OF_CLUSTER:
        _add_answer(bundle, f"cluster{_file_name(path)}.json", ask, urls[answering[0]], path)
    _add_objects(bundle, ask, urls[answering[0]])
    for view in running:
        tell(f"asking {view.where}")
        folder = f"nodes/{view.where.replace(' ', '-')}"
        through = view.where.startswith("controller")
        url = urls[answering[0]] if through else urls[int(view.where.rpartition(" ")[2])]
        query = f"?controller={view.where.rpartition(' ')[2]}" if through else ""
        if view.told is not None:
            told = {**msgspec.to_builtins(view.told), "settings": shown_settings(view.told.settings)}
            bundle.add_json(f"{folder}/node.json", told)
        if view.report is not None:
            bundle.add_json(f"{folder}/checkup.json", msgspec.to_builtins(view.report))
        for why in view.missing:
            bundle.lack(f"{folder}/checkup.json", why)
        _add_answer(bundle, f"{folder}/stacks.json", ask, url, f"/stacks{query}", posts=True)
        if through:
            continue
        for path in OF_NODE:
            _add_answer(bundle, f"{folder}{_file_name(path)}.json", ask, url, path)
        try:
            bundle.add_text(f"{folder}/metrics.txt", ask.text(url, "/metrics"))
        except TidelogError as error:
            bundle.lack(f"{folder}/metrics.txt", error.message)


def _add_answer(bundle: Bundle, name: str, ask: AskText, url: str, path: str, *, posts: bool = False) -> None:
    try:
        bundle.add_json(name, ask.post(url, path) if posts else ask.get(url, path))
    except TidelogError as error:
        bundle.lack(name, error.message)


def _add_objects(bundle: Bundle, ask: AskText, url: str) -> None:
    """List the objects of the metadata, the oldest ones if there are very many."""
    objects: list[Any] = []
    after: int | None = -1
    try:
        for _ in range(PAGES):
            page = ask.get(url, f"/objects?limit={PAGE}&after={after}")
            objects += page["objects"]
            after = page["next_after"]
            if after is None:
                break
    except TidelogError as error:
        bundle.lack("cluster/objects.json", error.message)
    bundle.add_json("cluster/objects.json", {"objects": objects, "more_after": after})


def _file_name(path: str) -> str:
    """`/losses/accepted` → `/losses-accepted`; a query is left out."""
    return "/" + path.partition("?")[0].strip("/").replace("/", "-")
