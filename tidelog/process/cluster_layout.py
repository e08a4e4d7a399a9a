"""The file layout and the addresses of the processes of `tidelog up --brokers N`.

    DIR/cluster.json     {"format": 2, "controllers": {"1": port, …}, "kafka_ports": {"1": port, …},
                         "brokers": [1, …], "last_id": n, after the last `tidelog broker add` or `remove`,
                         "racks": ["a", …], the last value of --racks, "crc32c": of the other keys (docs/formats.md)}
    DIR/up.lock          held by the running `tidelog up` (`tidelog.process.data_dir`)
    DIR/up.sock          control socket of the running `tidelog up` (`tidelog.process.up_control`)
    DIR/cluster.secret   cluster secret, shared by all processes
    DIR/bucket/          the embedded store, shared
    DIR/node-1/ …        one data directory for each process; its `bucket` is a link to the shared one

A single broker uses DIR itself. Ports and controllers are chosen at the first start and stored, because the members of
the quorum identify each other by them. The id of a removed broker is not reused.

Entry: `plan`, `add_broker`, `drop_broker`; `of_node` and `nodes` are read-only.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tidelog.config import Config, Loaded
from tidelog.controller.model.addresses import MAX_PORT
from tidelog.controller.raft.files import sync_directory
from tidelog.controller.rpc.secret import write_secret
from tidelog.process.data_dir import CONTROLLER_FOLDER, IDENTITY_FILE, WrongDataDirectory, json_checksum, read_identity
from tidelog.runtime.errors import ConfigError, CorruptData, DamagedFile, InvalidInput
from tidelog.runtime.ports import choose_port
from tidelog.storage.bucket.open import EMBEDDED_BUCKET

FORMAT = 2
FORMAT_WITHOUT_CHECKSUM = 1
SECRET_FILE = "cluster.secret"
LAYOUT_FILE = "cluster.json"
MAX_BROKERS = 100
REPLICAS = 3
"""With so many brokers, `tidelog up` keeps each replica set's WAL on as many, unless told otherwise."""


class ClusterLayout(msgspec.Struct, forbid_unknown_fields=True):
    """The content of `cluster.json`."""

    format: int
    controllers: dict[str, int]
    """RPC port of each node that is a controller, by node id."""
    kafka_ports: dict[str, int]
    brokers: list[int] = []
    """The broker ids after a broker was added or removed; empty: 1 to the value of --brokers."""
    last_id: int = 0
    """The largest id that was allocated."""
    racks: list[str] = []
    """Assigned to the brokers round-robin, by id; empty: all brokers are in `kafka.rack`."""


def plan(loaded: Loaded, brokers: int, controllers: int | None = None, racks: Sequence[str] = ()) -> list[Loaded]:
    """Return the configuration of each process and create the files that the processes share. Raises `ConfigError`,
    `CorruptData`, `WrongDataDirectory`.

    `racks` are assigned to the brokers round-robin; None means the racks of the last start.
    """
    directory = Path(loaded.config.node.data_dir)
    layout = _read(directory / LAYOUT_FILE)
    if brokers == 1 and layout is None:
        _require_no_nodes(directory)
        if racks:
            loaded.config.kafka.rack = racks[0]
        return [loaded]
    if layout is not None and racks:
        layout.racks = list(racks)
    if not 1 <= brokers <= MAX_BROKERS:
        raise ConfigError(f"--brokers {brokers}: `tidelog up` runs 1 to {MAX_BROKERS} brokers on one machine")
    ids = list(range(1, brokers + 1))
    if layout is not None and layout.brokers:
        ids = list(layout.brokers)  # added and removed brokers override the flag of the first start
        if controllers not in (None, len(layout.controllers)):
            raise _fixed_controllers(directory, layout)
        _choose_ports(layout, loaded.config, ids)
        _write(directory / LAYOUT_FILE, layout)
        return [_node(loaded, layout, node_id) for node_id in _processes(layout, ids)]
    if layout is None:
        if (directory / "identity.json").exists():
            raise ConfigError(
                f"data directory {directory} belongs to a single broker; --brokers {brokers} needs another directory",
                hint="use an empty --data-dir, or --brokers 1",
            )
        wanted = controllers or (3 if brokers >= 3 else 1)
        if wanted > brokers:
            raise ConfigError(f"--controllers {wanted} needs as many brokers; there are {brokers}")
        layout = ClusterLayout(FORMAT, dict.fromkeys(map(str, range(1, wanted + 1)), 0), {}, racks=list(racks))
    elif controllers not in (None, len(layout.controllers)):
        raise _fixed_controllers(directory, layout)
    needed = max(map(int, layout.controllers))
    if brokers < needed:
        raise ConfigError(
            f"the cluster in {directory} has controllers on nodes 1 to {needed}; --brokers {brokers} excludes some",
            hint=_to_begin_anew(directory) or f"use --brokers {needed} or more",
        )
    layout.last_id = max(layout.last_id, brokers)
    _choose_ports(layout, loaded.config, ids)
    directory.mkdir(parents=True, exist_ok=True)
    write_secret(directory / SECRET_FILE)
    _write(directory / LAYOUT_FILE, layout)
    return [_node(loaded, layout, node_id) for node_id in ids]


def _require_no_nodes(directory: Path) -> None:
    """Raise `WrongDataDirectory` for the directory of a cluster that has lost its layout."""
    nodes = [each.parent.name for each in sorted(directory.glob(f"node-*/{IDENTITY_FILE}"))]
    if nodes:
        raise WrongDataDirectory(
            f"{directory} has the nodes of a cluster ({', '.join(nodes)}), and no {LAYOUT_FILE}: a single broker would"
            " begin another cluster beside them",
            hint=f"put {LAYOUT_FILE} back, from a copy; or give --brokers as they were, which makes it anew",
        )


def _fixed_controllers(directory: Path, layout: ClusterLayout) -> ConfigError:
    return ConfigError(
        f"the cluster in {directory} has {len(layout.controllers)} controllers",
        hint=_to_begin_anew(directory)
        or "`tidelog controller add` and `tidelog controller remove` change a running cluster",
    )


def _to_begin_anew(directory: Path) -> str:
    """Return what to do with a directory whose first start failed, so that it holds no cluster; empty if it may.

    A node that has been in a cluster knows its id.
    """
    if any(path.is_file() for path in (directory / EMBEDDED_BUCKET).rglob("*")):
        return ""
    for node in directory.glob("node-*"):
        try:
            identity = read_identity(node / IDENTITY_FILE)
        except (CorruptData, OSError):
            return ""
        has_files = (node / CONTROLLER_FOLDER).exists() or (node / "wal").exists()
        if identity["cluster_id"] if identity is not None else has_files:
            return ""
    return f"its first start failed, and no cluster is in it: delete {directory} to begin anew, also with other options"


def _processes(layout: ClusterLayout, ids: list[int]) -> list[int]:
    """All nodes: the brokers, and controllers whose broker was removed."""
    return sorted({*ids, *map(int, layout.controllers)})


def is_cluster(config: Config) -> bool:
    """Whether `plan` has made this the data directory of a cluster."""
    return (Path(config.node.data_dir) / LAYOUT_FILE).exists()


def nodes(config: Config) -> list[Config]:
    """Return the configuration of each process of a cluster, by id, without changing anything. Raises `CorruptData`."""
    layout = _read(Path(config.node.data_dir) / LAYOUT_FILE)
    assert layout is not None, "is_cluster"
    ids = layout.brokers or list(range(1, layout.last_id + 1))
    return [_node_config(config, layout, node_id) for node_id in _processes(layout, ids)]


def nodes_found(config: Config) -> list[Config]:
    """As `nodes`, from the directory names only, for a damaged layout: just the location of each node's files."""
    found = []
    for path in sorted(Path(config.node.data_dir).glob("node-*")):
        node = msgspec.convert(msgspec.to_builtins(config), Config)
        node.node.data_dir = str(path.absolute())
        node.node.id = -1
        found.append(node)
    return found


def add_broker(loaded: Loaded, running: list[int]) -> Loaded:
    """Record one more broker, with a new id, and return its configuration. Raises `ConfigError`,
    `WrongDataDirectory`."""
    directory = Path(loaded.config.node.data_dir)
    layout = _changeable(directory, running)
    if len(layout.brokers) >= MAX_BROKERS:
        raise ConfigError(f"`tidelog up` runs at most {MAX_BROKERS} brokers on one machine")
    layout.last_id += 1
    layout.brokers.append(layout.last_id)
    _choose_ports(layout, loaded.config, layout.brokers)
    _write(directory / LAYOUT_FILE, layout)
    return _node(loaded, layout, layout.last_id)


def of_node(loaded: Loaded, node_id: int) -> Loaded:
    """Return the configuration with which a recorded node would be started now. Raises `CorruptData`."""
    layout = _read(Path(loaded.config.node.data_dir) / LAYOUT_FILE)
    assert layout is not None, "is_cluster"
    return _node(loaded, layout, node_id)


def drop_broker(loaded: Loaded, node_id: int, running: list[int]) -> Loaded | None:
    """Record that this broker is removed. Returns what remains of its node: a controller, or None."""
    layout = _changeable(Path(loaded.config.node.data_dir), running)
    if node_id in layout.brokers:
        layout.brokers.remove(node_id)
    layout.kafka_ports.pop(str(node_id), None)
    _write(Path(loaded.config.node.data_dir) / LAYOUT_FILE, layout)
    return _node(loaded, layout, node_id) if str(node_id) in layout.controllers else None


def removed_brokers(loaded: Loaded) -> list[int]:
    """Return the ids of removed brokers whose files are still here. Raises `CorruptData`."""
    directory = Path(loaded.config.node.data_dir)
    layout = _read(directory / LAYOUT_FILE)
    if layout is None or not layout.brokers:
        return []
    ids = (each for each in range(1, layout.last_id + 1) if each not in layout.brokers)
    return [each for each in ids if _files_of(directory, layout, each).exists()]


def forget_broker(loaded: Loaded, node_id: int) -> None:
    """Delete the files of a removed broker. The files of a controller on the same node are kept."""
    directory = Path(loaded.config.node.data_dir)
    layout = _read(directory / LAYOUT_FILE)
    if layout is None or not layout.brokers or node_id in layout.brokers or not 0 < node_id <= layout.last_id:
        raise InvalidInput(f"node {node_id} of {directory} is not a removed broker")
    left = _files_of(directory, layout, node_id)
    if left.exists():
        shutil.rmtree(left)  # remove the link to the bucket, not its target


def _files_of(directory: Path, layout: ClusterLayout, node_id: int) -> Path:
    """Return the folder of a removed broker, which may share its node with a controller."""
    return directory / f"node-{node_id}" / ("wal" if str(node_id) in layout.controllers else "")


def _changeable(directory: Path, running: list[int]) -> ClusterLayout:
    layout = _read(directory / LAYOUT_FILE)
    if layout is None:
        raise ConfigError(
            f"{directory} belongs to a single broker, not to a cluster",
            hint="run `tidelog up --brokers 2` or more with a new --data-dir",
        )
    if not layout.brokers:
        layout.brokers = sorted(running)
    layout.last_id = max(layout.last_id, *layout.brokers, *map(int, layout.controllers))
    return layout


def _choose_ports(layout: ClusterLayout, config: Config, ids: list[int]) -> None:
    """Choose distinct ports for nodes without one: the configured port, else a free one.

    Raises `AddressInUse`, and `ConfigError` if one that is counted from the configured port is none.
    """
    _check_counted("kafka.port", config.kafka.port, ids)
    without = [int(each) for each, port in layout.controllers.items() if not port]
    _check_counted("controller.port", config.controller.port, without)
    _check_counted("kafka.peer_port", config.kafka.peer_port, ids)
    _check_counted("admin.port", config.admin.port, _processes(layout, ids))
    if config.kafka.port:
        layout.kafka_ports.update({str(number): config.kafka.port + number - 1 for number in ids})
    taken = {*layout.controllers.values(), *layout.kafka_ports.values()}

    def free(host: str) -> int:
        port = choose_port(host, taken)
        taken.add(port)
        return port

    for name, port in layout.controllers.items():
        configured = config.controller.port and config.controller.port + int(name) - 1
        layout.controllers[name] = port or configured or free(config.controller.host)
    for number in ids:
        if str(number) not in layout.kafka_ports:
            layout.kafka_ports[str(number)] = free(config.kafka.host)


def _check_counted(setting: str, first: int, ids: list[int]) -> None:
    last = max(ids, default=1)
    if first + last - 1 > MAX_PORT:
        raise ConfigError(
            f"{setting} is {first}: node {last} would listen on {first + last - 1}",
            hint=f"ports are counted up from it, and end at {MAX_PORT}: choose a lower one",
        )


def _node(loaded: Loaded, layout: ClusterLayout, node_id: int) -> Loaded:
    config = _node_config(loaded.config, layout, node_id)
    if config.s3.is_embedded:
        share_bucket(Path(loaded.config.node.data_dir), Path(config.node.data_dir))
    sources = dict(loaded.sources)
    brokers = len(layout.brokers) or layout.last_id
    if brokers >= REPLICAS and config.wal.kind == "disk" and "replication.total_replicas" not in sources:
        config.replication.total_replicas = REPLICAS
        sources["replication.total_replicas"] = f"`tidelog up` with {REPLICAS} brokers or more"
    return Loaded(config, sources)


def _node_config(shared: Config, layout: ClusterLayout, node_id: int) -> Config:
    config = msgspec.convert(msgspec.to_builtins(shared), Config)  # a deep copy
    directory = Path(config.node.data_dir)
    config.node.id = node_id
    config.node.data_dir = str((directory / f"node-{node_id}").absolute())
    if layout.racks:
        config.kafka.rack = layout.racks[(node_id - 1) % len(layout.racks)]
    is_controller = str(node_id) in layout.controllers
    is_broker = not layout.brokers or node_id in layout.brokers
    config.node.roles = []
    if is_controller:
        config.node.roles.append("controller")
    if is_broker:
        config.node.roles.append("broker")
    host = config.controller.host
    config.controller.members = [f"{name}@{host}:{port}" for name, port in layout.controllers.items()]
    config.controller.secret_file = str((directory / SECRET_FILE).absolute())
    config.controller.port = 0
    config.kafka.port = layout.kafka_ports.get(str(node_id), 0)
    if config.admin.port > 0:
        config.admin.port += node_id - 1
    if config.kafka.peer_port:
        config.kafka.peer_port += node_id - 1
    return config


def share_bucket(directory: Path, node_directory: Path) -> None:
    """Link a node's embedded bucket to the one that all nodes share. Raises `WrongDataDirectory`.

    A copy that has followed links has a bucket for each node. All of them hold what was there when the copy was made,
    so each node would find its cluster's objects in its own, and no other node those that it uploads from then on.
    """
    shared = directory / EMBEDDED_BUCKET
    node_directory.mkdir(parents=True, exist_ok=True)
    shared.mkdir(exist_ok=True)
    link = node_directory / EMBEDDED_BUCKET
    if not os.path.lexists(link):
        link.symlink_to(Path("..") / EMBEDDED_BUCKET, target_is_directory=True)
    elif not (link.exists() and link.samefile(shared)):
        raise WrongDataDirectory(
            f"{link} is not the link to {shared} that it was made as: each node would keep its objects for itself. "
            "A copy of the directory has followed its links",
            hint="copy it with its links (cp -a, rsync -a, tar; shutil.copytree with symlinks=True). Or, for each node,"
            f" `cp -an {link}/. {shared}` and delete {link}: the next start makes the link",
        )


def _read(file: Path) -> ClusterLayout | None:
    """Read the layout; None if the file does not exist. Raises `CorruptData`."""
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorruptData(f"cannot read {file}: {error}", hint="restore it from a copy") from error
    try:
        body = json.loads(raw)
        checksum = body.pop("crc32c", None)
        layout = msgspec.convert(body, ClusterLayout)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(str(file), 0, f"not a cluster layout: {error}", hint="restore it from a copy") from error
    if layout.format not in (FORMAT_WITHOUT_CHECKSUM, FORMAT):
        what = f"it has format {layout.format}; this version reads {FORMAT}"
        raise DamagedFile(str(file), 0, what, hint="restore it from a copy, or use a newer Tidelog")
    if layout.format == FORMAT and checksum != json_checksum(body):
        raise DamagedFile(str(file), 0, "its checksum does not match", hint="restore it from a copy")
    if not layout.controllers:
        raise DamagedFile(str(file), 0, "it names no controller", hint="restore it from a copy")
    layout.format = FORMAT
    return layout


def _write(file: Path, layout: ClusterLayout) -> None:
    body = msgspec.to_builtins(layout)
    draft = file.with_name(file.name + ".tmp")
    with draft.open("w", encoding="utf-8") as output:
        json.dump({**body, "crc32c": json_checksum(body)}, output, indent=2)
        output.flush()
        os.fsync(output.fileno())
    draft.rename(file)
    sync_directory(file.parent)
