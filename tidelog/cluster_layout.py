"""Where the processes of `tidelog up --brokers N` keep their state, and how they find each other.

    DIR/cluster.json     {"format": 1, "controllers": {"1": port, …}, "kafka_ports": {"1": port, …}}
    DIR/cluster.secret   what they authenticate each other with
    DIR/bucket/          the embedded store, shared
    DIR/node-1/ …        one data directory for each process; its `bucket` is a link to the shared one

One broker alone uses DIR itself. Ports and controllers are chosen at the first start and kept: members of the quorum
know each other by them. Entry: `plan`.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import msgspec

from controller.handshake import write_secret
from runtime.errors import ConfigError, CorruptData
from storage.open_store import EMBEDDED_BUCKET
from tidelog.config import Config, Loaded

FORMAT = 1
SECRET_FILE = "cluster.secret"
LAYOUT_FILE = "cluster.json"
MAX_BROKERS = 100


class Layout(msgspec.Struct):
    """The content of `cluster.json`."""

    format: int
    controllers: dict[str, int]
    """RPC port of each node that is a controller, by node id."""
    kafka_ports: dict[str, int]


def plan(loaded: Loaded, brokers: int, controllers: int | None = None) -> list[Loaded]:
    """The configuration of each process. Creates what they share. Raises `ConfigError`, `CorruptData`."""
    directory = Path(loaded.config.node.data_dir)
    layout = _read(directory / LAYOUT_FILE)
    if brokers == 1 and layout is None:
        return [loaded]
    if not 1 <= brokers <= MAX_BROKERS:
        raise ConfigError(f"--brokers {brokers}: `tidelog up` runs 1 to {MAX_BROKERS} brokers on one machine")
    if layout is None:
        if (directory / "identity.json").exists():
            raise ConfigError(
                f"data directory {directory} belongs to a single broker; --brokers {brokers} needs one of its own",
                hint="use an empty --data-dir, or --brokers 1",
            )
        wanted = controllers or (3 if brokers >= 3 else 1)
        if wanted > brokers:
            raise ConfigError(f"--controllers {wanted} needs as many brokers; there are {brokers}")
        layout = Layout(FORMAT, dict.fromkeys(map(str, range(1, wanted + 1)), 0), {})
    elif controllers not in (None, len(layout.controllers)):
        raise ConfigError(
            f"the cluster in {directory} has {len(layout.controllers)} controllers",
            hint="`tidelog controller add` and `remove` change them while it runs",
        )
    needed = max(map(int, layout.controllers))
    if brokers < needed:
        raise ConfigError(
            f"the cluster in {directory} has controllers on nodes 1 to {needed}; --brokers {brokers} leaves some out",
            hint=f"use --brokers {needed} or more",
        )
    _choose_ports(layout, loaded.config, brokers)
    directory.mkdir(parents=True, exist_ok=True)
    write_secret(directory / SECRET_FILE)
    _write(directory / LAYOUT_FILE, layout)
    return [_node(loaded, layout, node_id) for node_id in range(1, brokers + 1)]


def _choose_ports(layout: Layout, config: Config, brokers: int) -> None:
    """Free ports for those that have none, all different."""
    held: list[socket.socket] = []

    def free(host: str) -> int:
        probe = socket.socket()
        held.append(probe)
        probe.bind((host, 0))
        return int(probe.getsockname()[1])

    try:
        for name, port in layout.controllers.items():
            layout.controllers[name] = port or free(config.controller.host)
        for number in range(1, brokers + 1):
            if config.kafka.port:
                layout.kafka_ports[str(number)] = config.kafka.port + number - 1
            elif str(number) not in layout.kafka_ports:
                layout.kafka_ports[str(number)] = free(config.kafka.host)
    finally:
        for probe in held:
            probe.close()


def _node(loaded: Loaded, layout: Layout, node_id: int) -> Loaded:
    config = msgspec.convert(msgspec.to_builtins(loaded.config), Config)  # a copy that shares nothing
    directory = Path(config.node.data_dir)
    config.node.id = node_id
    config.node.data_dir = str(directory / f"node-{node_id}")
    is_controller = str(node_id) in layout.controllers
    config.node.roles = ["controller", "broker"] if is_controller else ["broker"]
    host = config.controller.host
    config.controller.members = [f"{name}@{host}:{port}" for name, port in layout.controllers.items()]
    config.controller.secret_file = str((directory / SECRET_FILE).absolute())
    config.controller.port = 0
    config.kafka.port = layout.kafka_ports[str(node_id)]
    if config.admin.port:
        config.admin.port += node_id - 1
    if not config.s3.endpoint and not config.s3.bucket:
        _share_bucket(directory, Path(config.node.data_dir))
    return Loaded(config, loaded.sources)


def _share_bucket(directory: Path, node_directory: Path) -> None:
    node_directory.mkdir(parents=True, exist_ok=True)
    (directory / EMBEDDED_BUCKET).mkdir(exist_ok=True)
    link = node_directory / EMBEDDED_BUCKET
    if not link.exists():
        link.symlink_to(Path("..") / EMBEDDED_BUCKET, target_is_directory=True)


def _read(file: Path) -> Layout | None:
    try:
        layout = msgspec.json.decode(file.read_bytes(), type=Layout)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise CorruptData(f"cannot read {file}: {error}", hint="restore it from a copy") from error
    if layout.format != FORMAT or not layout.controllers:
        raise CorruptData(f"{file} has format {layout.format}; this version reads {FORMAT}")
    return layout


def _write(file: Path, layout: Layout) -> None:
    draft = file.with_name(file.name + ".tmp")
    with draft.open("w", encoding="utf-8") as output:
        json.dump(msgspec.to_builtins(layout), output, indent=2)
        output.flush()
        os.fsync(output.fileno())
    draft.rename(file)
