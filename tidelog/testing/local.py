"""`LocalBroker` and `LocalCluster`: brokers for a test, as context managers.

Each broker is a node, in a thread (`tidelog.testing.thread_node`) or a process (`tidelog.testing.child_node`), on ports
and in a folder that stay the same while it stops and starts.

Invariants: when `with` is entered all brokers are ready; when it is left, or was not entered because one failed, all
have ended, and ports, threads, processes and the private folder are gone. Methods may be called from any thread, one at
a time.

Entry: `LocalBroker`, `LocalCluster`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from tidelog.runtime.errors import InvalidInput, NotFound, Unavailable
from tidelog.testing.bucket_faults import LocalBucket
from tidelog.testing.clock import LocalClock
from tidelog.testing.fault_board import FaultBoard
from tidelog.testing.lines import BrokerLines
from tidelog.testing.options import CLUSTER_SETTINGS, BrokerEnded, RunOptions, Value, configuration
from tidelog.testing.ports import HOST, HeldPorts

if TYPE_CHECKING:
    from tidelog.cli.client import ClusterConnection
    from tidelog.config import Config
    from tidelog.runtime.children import ParentPipe

MOVE_S = 60.0
"""How long `move` waits for the new leader."""
LOOK_S = 0.02
MAX_BROKERS = 9
SECRET = "the secret of a cluster for tests\n"


class _Node(Protocol):
    @property
    def is_running(self) -> bool: ...
    def begin(self) -> None: ...
    def wait_ready(self) -> None: ...
    def halt(self) -> None: ...
    def stop(self) -> None: ...
    def discard(self) -> None: ...
    def kill(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class LocalBrokers:
    """What a broker and a cluster have in common."""

    def __init__(self, options: RunOptions, count: int) -> None:
        self._options = options
        self._count = count
        self._nodes: dict[int, _Node] = {}
        self._kafka_ports: dict[int, int] = {}
        self._resources = contextlib.ExitStack()
        self._cluster: ClusterConnection | None = None
        self._board = FaultBoard()
        self.bucket = LocalBucket(self._board)
        """Faults of the bucket."""
        self.clock = LocalClock(self._board)
        """The brokers' time of day."""
        self.lines = BrokerLines()
        """What `log` returns, with the number of lines so far."""
        self.directory = options.directory or Path()
        """Where their files are."""

    def __enter__(self) -> Self:
        try:
            self._prepare()
            for node in self._nodes.values():
                node.begin()
            for node in self._nodes.values():
                node.wait_ready()
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._close()
        else:
            self._discard()

    @property
    def bootstrap(self) -> str:
        """What clients take as `bootstrap.servers`: the address of each broker."""
        return ",".join(f"{HOST}:{port}" for port in self._kafka_ports.values())

    @property
    def log(self) -> list[str]:
        """The newest lines that brokers in processes of their own wrote; those of the others are in `logging`."""
        return self.lines.since(0)

    def create_topic(self, name: str, *, partitions: int = 1, config: Mapping[str, str] | None = None) -> None:
        """Create a topic and wait for it. Raises `AlreadyExists`, `InvalidInput`, `Unavailable`."""
        from confluent_kafka.admin import NewTopic

        cluster = self._connection()
        topic = NewTopic(name, num_partitions=partitions, config=dict(config or {}))
        cluster.wait(cluster.admin.create_topics([topic])[name], f"topic {name}")

    def delete_topic(self, name: str) -> None:
        """Delete a topic. Raises `NotFound`, `Unavailable`."""
        cluster = self._connection()
        cluster.wait(cluster.admin.delete_topics([name])[name], f"topic {name}")

    def heal(self) -> None:
        """End all faults: the bucket and the clock are right, and brokers that were killed, stopped or paused serve.

        So do those that have ended by themselves. Then it raises `BrokerEnded` with what the first one of them told.
        """
        self.bucket.heal()
        self.clock.heal()
        failures: list[BrokerEnded] = []
        for node in self._nodes.values():
            node.resume()
            if not node.is_running:
                self._cluster = None
                try:
                    node.stop()
                except BrokerEnded as error:
                    failures.append(error)
                node.begin()
        for node in self._nodes.values():
            node.wait_ready()
        if failures:
            raise failures[0]

    def _connection(self) -> ClusterConnection:
        from tidelog.cli.client import ClusterConnection

        if self._cluster is None:
            self._cluster = ClusterConnection(self.bootstrap)
        return self._cluster

    def _restart(self, node: _Node) -> None:
        self._cluster = None  # its client would wait longer and longer before it connects again
        node.stop()
        node.begin()
        node.wait_ready()

    # What they are made of

    def _prepare(self) -> None:
        options, resources = self._options, self._resources
        ports = HeldPorts()
        resources.callback(ports.close)
        descriptor: int | None = None
        if options.directory is None:
            from tidelog.testing.folder import PrivateFolder

            folder = PrivateFolder(memory=options.storage == "memory")
            resources.callback(folder.close)
            self.directory, descriptor = folder.path, folder.user_descriptor
        else:
            self.directory.mkdir(parents=True, exist_ok=True)
        parent: ParentPipe | None = None
        if options.child:
            from tidelog.runtime.children import ParentPipe
            from tidelog.testing.forking import warm_up

            warm_up()  # it imports while this process does
            parent = ParentPipe()
            resources.callback(parent.close)
        for config in self._configurations(ports):
            self._kafka_ports[config.node.id] = config.kafka.port
            self._nodes[config.node.id] = self._node(config, parent, descriptor)

    def _node(self, config: Config, parent: ParentPipe | None, descriptor: int | None) -> _Node:
        if parent is not None:
            from tidelog.testing.child_node import ChildNode, ChildSurroundings

            inherited = () if descriptor is None else (descriptor,)
            surroundings = ChildSurroundings(self.directory, parent, self._board, inherited)
            return ChildNode(config, surroundings, self._line_taker(config.node.id))
        from tidelog.testing.thread_node import ThreadNode

        return ThreadNode(config, self._board)

    def _line_taker(self, node_id: int) -> Callable[[str], None]:
        if self._count == 1:
            return self.lines.add
        return lambda line: self.lines.add(f"{node_id}: {line}")

    def _configurations(self, ports: HeldPorts) -> list[Config]:
        raise NotImplementedError

    def _close(self) -> None:
        """End the brokers, all of them before any that failed is told."""
        self._cluster = None
        self.bucket.heal()
        failures: list[Exception] = []
        nodes = list(self._nodes.values())
        keeps = self._options.directory is not None
        if len(nodes) > 1 and (keeps or not self._options.child):
            with ThreadPoolExecutor(len(nodes)) as pool:  # all brokers before any controller: they need a quorum
                list(pool.map(lambda node: node.halt(), nodes))
        for node in nodes:
            try:
                if keeps:
                    node.stop()
                else:
                    node.discard()
            except BrokerEnded as error:
                failures.append(error)
        self._nodes.clear()
        self._resources.close()
        if failures:
            raise failures[0]

    def _discard(self) -> None:
        """As `_close`, while another error is on its way: that one tells more."""
        with contextlib.suppress(BrokerEnded):
            self._close()


class LocalBroker(LocalBrokers):
    """One broker with its controller, as a context manager: `with LocalBroker() as broker`.

    - `child`: in a process of its own, which can be killed and paused; else in a thread of this one.
    - `storage`: "memory", the default, where nothing waits for a disk, or "disk", a temporary folder.
    - `directory`: a folder of your own, which stays; a second context on it finds what the first one wrote.
    - `settings`: of the configuration, by dotted key, above those of tests: `{"kafka.num_partitions": 1}`.

    Raises `BrokerEnded` if the broker does not start, `ConfigError`.
    """

    def __init__(
        self,
        *,
        child: bool = False,
        storage: Literal["memory", "disk"] = "memory",
        directory: Path | str | None = None,
        settings: Mapping[str, Value] | None = None,
    ) -> None:
        super().__init__(
            RunOptions(child, storage, Path(directory).absolute() if directory else None, settings or {}), 1
        )

    def _configurations(self, ports: HeldPorts) -> list[Config]:
        data_dir = str((self.directory / "data").absolute())
        own: dict[str, Value] = {"node.data_dir": data_dir, "node.id": 1, "kafka.port": ports.new()}
        return [configuration(self._options, {**own, "controller.port": ports.new()})]

    @property
    def _node_1(self) -> _Node:
        if not self._nodes:
            raise InvalidInput("the broker was not started", hint="with LocalBroker() as broker: …")
        return self._nodes[1]

    @property
    def is_running(self) -> bool:
        """Whether the broker has not been stopped, killed or ended."""
        return bool(self._nodes) and self._nodes[1].is_running

    def kill(self) -> None:
        """`kill -9`: it is gone until `restart`. Raises `NotPossibleHere` for a broker in this process."""
        self._node_1.kill()

    def stop(self) -> None:
        """Stop it as an operator would, until `restart`: requests in flight are finished, and all is uploaded."""
        self._node_1.stop()

    def restart(self) -> None:
        """Start it again on the same port and data; one that runs is stopped before. Returns when it is ready."""
        self._restart(self._node_1)

    def pause(self) -> None:
        """Have it hang, with its connections open, until `resume`. Raises `NotPossibleHere` in this process."""
        self._node_1.pause()

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self._node_1.resume()


class LocalCluster(LocalBrokers):
    """Several brokers, each with a controller beside it, as a context manager: `with LocalCluster(3) as cluster`.

    Brokers are 1, 2, 3 … With three or more, each write-ahead log is on three of them, as with `tidelog up --brokers
    3`. The arguments are those of `LocalBroker`; `child` is true unless told otherwise: what is killed is a process.
    """

    def __init__(
        self,
        brokers: int = 3,
        *,
        child: bool = True,
        storage: Literal["memory", "disk"] = "memory",
        directory: Path | str | None = None,
        settings: Mapping[str, Value] | None = None,
    ) -> None:
        if not 2 <= brokers <= MAX_BROKERS:
            raise InvalidInput(f"a cluster of {brokers} brokers", hint=f"2 to {MAX_BROKERS}; one is a LocalBroker")
        super().__init__(
            RunOptions(child, storage, Path(directory).absolute() if directory else None, settings or {}), brokers
        )

    def _configurations(self, ports: HeldPorts) -> list[Config]:
        from tidelog.process.cluster_layout import share_bucket

        ids = range(1, self._count + 1)
        secret = self.directory / "cluster.secret"
        secret.touch(mode=0o600)
        secret.write_text(SECRET, encoding="ascii")
        members = ",".join(f"{each}@{HOST}:{ports.new()}" for each in ids if each <= (3 if self._count >= 3 else 1))
        replicas = 3 if self._count >= 3 else 1
        found = []
        for each in ids:
            data_dir = self.directory / f"node-{each}"
            share_bucket(self.directory, data_dir)
            own: dict[str, Value] = {
                **CLUSTER_SETTINGS,
                "node.id": each,
                "node.roles": "controller,broker" if f"{each}@" in members else "broker",
                "node.data_dir": str(data_dir.absolute()),
                "controller.members": members,
                "controller.secret_file": str(secret.absolute()),
                "kafka.port": ports.new(),
                "wal.kind": "disk",  # a replicated WAL is on disks, if only in memory
                "replication.total_replicas": replicas,
            }
            found.append(configuration(self._options, own))
        return found

    def _found(self, broker: int) -> _Node:
        try:
            return self._nodes[broker]
        except KeyError:
            raise NotFound(f"there is no broker {broker}", hint=f"they are {sorted(self._nodes)}") from None

    @property
    def running(self) -> list[int]:
        """The brokers that have not been stopped, killed or ended."""
        return [node_id for node_id, node in self._nodes.items() if node.is_running]

    def address(self, broker: int) -> str:
        """`HOST:PORT` of one broker."""
        self._found(broker)
        return f"{HOST}:{self._kafka_ports[broker]}"

    def kill(self, broker: int) -> None:
        """`kill -9` a broker and its controller: others take over. Raises `NotPossibleHere` for a cluster here."""
        self._found(broker).kill()

    def stop(self, broker: int) -> None:
        """Stop a broker as an operator would, until `restart`."""
        self._found(broker).stop()

    def restart(self, broker: int) -> None:
        """Start a broker again on the same port and data; one that runs is stopped before."""
        self._restart(self._found(broker))

    def pause(self, broker: int) -> None:
        """Have a broker hang, with its connections open, until `resume`. Raises `NotPossibleHere` for one here."""
        self._found(broker).pause()

    def resume(self, broker: int) -> None:
        """Let a broker go on after `pause`."""
        self._found(broker).resume()

    def leader(self, topic: str, partition: int = 0) -> int:
        """Return the broker that serves a partition; -1 if none does now. Raises `NotFound`, `Unavailable`."""
        leader = self._row(topic, partition)["leader"]
        return -1 if leader is None else int(leader)

    def move(self, topic: str, partition: int = 0, to: int | None = None) -> int:
        """Move a partition to broker `to`, by default the next one that runs, while clients use it; return that one.

        Returns when the new broker serves it. Raises `NotFound`, `InvalidInput`, `Unavailable`.
        """
        source = int(self._row(topic, partition)["broker"])
        others = [each for each in self.running if each != source]
        if to is None and not others:
            raise InvalidInput("no other broker runs")
        target = to if to is not None else min(others, key=lambda each: (each < source, each))
        self._found(target)
        move = {"topic": topic, "partition": partition, "to": target}
        for result in self._connection().post("/moves", {"moves": [move]})["results"]:
            if result["error"] is not None:
                raise InvalidInput(str(result["error"]))
        deadline = time.monotonic() + MOVE_S
        while self.leader(topic, partition) != target:
            if time.monotonic() > deadline:
                raise Unavailable(f"{topic}:{partition} is not on broker {target} after {MOVE_S:g} s")
            time.sleep(LOOK_S)
        return target

    def _row(self, topic: str, partition: int) -> dict[str, Any]:
        for row in self._connection().get(f"/partitions?topic={topic}")["partitions"]:
            if (row["topic"], row["partition"]) == (topic, partition):
                return dict(row)
        raise NotFound(f"partition {topic}:{partition} does not exist")
