"""What the roles of one `tidelog serve` process are made from: its data directory, its id, its bucket.

The id may be in the configuration, in the data directory, or have to be asked for: then nothing else of the process can
begin before the controllers have answered.

Entry: `learn`.
"""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tidelog.config import Config, Loaded
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.addresses import split_address
from tidelog.controller.raft.quorum import parse_members
from tidelog.controller.rpc.connection import Endpoint
from tidelog.controller.rpc.handshake import Credentials
from tidelog.controller.rpc.secret import read_secret
from tidelog.process.accepted_loss import use_lost_bucket
from tidelog.process.data_dir import (
    CONTROLLER_FOLDER,
    IDENTITY_FILE,
    LONE_NODE_ID,
    WAL_FOLDER,
    DataDirectory,
    WrongDataDirectory,
)
from tidelog.process.replica_disks import PREFIX as REPLICA_PREFIX
from tidelog.process.replica_disks import replicas_in
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import ConfigError
from tidelog.runtime.facts.node import OwnFacts, SettingFacts
from tidelog.runtime.network import Network
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.open import EMBEDDED_BUCKET, OpenBackend, open_backend, open_store
from tidelog.storage.bucket.proof import BucketProof

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Outside:
    """The interfaces to the machine that all roles share."""

    network: Network
    clock: Clock
    rng: random.Random
    open_backend: OpenBackend = open_backend
    """Opens the configured bucket."""


@dataclass(frozen=True, slots=True)
class NodeBase:
    """A process that knows its id, before its roles are made."""

    config: Config
    outside: Outside
    directory: DataDirectory
    credentials: Credentials | None
    """None in a cluster on one machine that has no secret."""
    endpoints: list[Endpoint]
    """Where the configuration says that controllers are; empty if this process has the only one."""
    store: GuardedObjectStore
    sources: Mapping[str, str]
    """Where the settings came from that are no defaults, by dotted key."""

    @property
    def own(self) -> OwnFacts:
        """What the process tells of itself when an operator asks."""
        return OwnFacts(lambda: setting_facts(Loaded(self.config, dict(self.sources))), own_folders(self.config))

    @property
    def path(self) -> Path:
        """The data directory."""
        return self.directory.path

    @property
    def is_local(self) -> bool:
        """Whether this process's broker has this process's controller, and no other."""
        return not self.endpoints and "broker" in self.config.node.roles


def setting_facts(loaded: Loaded) -> list[SettingFacts]:
    """Return every setting with its source, secrets hidden."""
    return [SettingFacts(each.key, each.value, each.source) for each in loaded.settings()]


def own_folders(config: Config) -> list[Path]:
    """Return the data directory, and the folders in it that a process with this configuration keeps data in."""
    path = Path(config.node.data_dir)
    folders = [path]
    if "controller" in config.node.roles:
        folders.append(path / CONTROLLER_FOLDER)
    if "broker" in config.node.roles and config.wal.kind == "disk":
        folders += [path / WAL_FOLDER, *(path / f"{REPLICA_PREFIX}{each}" for each in replicas_in(path))]
    if config.s3.is_embedded:
        folders.append(path / EMBEDDED_BUCKET)
    return folders


async def learn(
    config: Config, outside: Outside, closing: AsyncExitStack, sources: Mapping[str, str] | None = None
) -> NodeBase:
    """Open the data directory, find out the process's id, which is also put into `config`, and open the bucket.

    What is opened is closed by `closing`, also if a later step fails. Waits for the controllers if they have to
    allocate the id. Raises `WrongDataDirectory`, `CorruptData`, `ConfigError`.
    """
    credentials = credentials_of(config)
    path = Path(config.node.data_dir)
    directory = DataDirectory.open(path, config.node.id, str(uuid.uuid4()))
    closing.callback(directory.close)
    settings = config.controller
    known = settings.endpoints or parse_members(settings.members).values()
    endpoints = [split_address(text) for text in known]
    if directory.broker_id < 0:
        if endpoints:
            _check_not_used(path)
        directory.assign(await _find_id(config, outside, directory.check_code, endpoints, credentials))
    config.node.id = directory.broker_id
    clock = outside.clock
    proof = BucketProof(clock, accepted=lambda cluster_id: use_lost_bucket(path, cluster_id), place=str(path))
    store = open_store(config.s3, path, clock, outside.rng, proof, outside.open_backend)
    closing.push_async_callback(store.close)
    return NodeBase(config, outside, directory, credentials_of(config), endpoints, store, sources or {})


def _check_not_used(path: Path) -> None:
    """Raise `WrongDataDirectory` if a directory whose broker is not known has a WAL.

    Under another id it would be recovered as the WAL of another replica set: the records of all partitions are dropped.
    """
    found = [*path.glob(f"{WAL_FOLDER}/*.wal"), *path.glob(f"{REPLICA_PREFIX}*")]
    if found:
        raise WrongDataDirectory(
            f"data directory {path} has {found[0].relative_to(path)}, and {IDENTITY_FILE} does not say whose it is",
            hint=f"put {IDENTITY_FILE} back, from a copy; or set node.id to the id that this broker had, as"
            " `tidelog broker list` shows it",
        )


async def _find_id(
    config: Config, outside: Outside, check_code: str, endpoints: list[Endpoint], credentials: Credentials | None
) -> int:
    """Obtain an id if neither configuration nor directory has one. Waits for the controllers."""
    if not endpoints:
        return LONE_NODE_ID
    if "controller" in config.node.roles:
        raise ConfigError("a controller of a quorum needs a node id", hint="set node.id as in controller.members")
    client = ControllerClient(
        endpoints,
        outside.network,
        outside.clock,
        outside.rng,
        credentials=credentials,
        follows_image=not config.controller.endpoints,
    )
    try:
        await client.start()
        found = await client.apply_for_id(check_code)
    finally:
        await client.close()
    logger.info("the controllers allocated a broker id", extra={"broker": found})
    return found


def credentials_of(config: Config) -> Credentials | None:
    """Return the identity and cluster secret, if one is configured. Raises `ConfigError` for a listener that accepts
    remote connections without one.
    """
    settings = config.controller
    if settings.secret_file:
        return Credentials(read_secret(Path(settings.secret_file)), config.node.id)
    if settings.members:
        raise ConfigError(
            "controller.members needs controller.secret_file: members and brokers use it to authenticate each other",
            hint="`openssl rand -hex 32 > FILE; chmod 600 FILE`, the same file on all nodes",
        )
    if "controller" in config.node.roles and settings.host not in LOOPBACK:
        raise ConfigError(
            f"controller.host {settings.host} accepts remote connections, but controller.secret_file is not set",
            hint="set controller.secret_file, or let the controller listen on 127.0.0.1",
        )
    if "broker" in config.node.roles and config.admin.host not in LOOPBACK:
        raise ConfigError(
            f"admin.host {config.admin.host} accepts remote connections, which could give up acknowledged data, but"
            " controller.secret_file is not set",
            hint="set controller.secret_file (`openssl rand -hex 32 > FILE; chmod 600 FILE`), or let the admin HTTP"
            " listen on 127.0.0.1",
        )
    return None
