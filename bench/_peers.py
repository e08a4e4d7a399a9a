"""Other Kafka servers beside Tidelog, started alike: an empty data directory on the same disk, one listener.

- `kafka`: Apache Kafka as it comes, broker and controller in one JVM with 1 GiB of heap. It acknowledges from the page
  cache.
- `kafka-synced`: the same with `log.flush.interval.messages=1`. It syncs before it acknowledges, as Tidelog does.

The servers and Kafka's Java producer come from `localstack/install.py`. Entry: `peers`, `java_producer`.
"""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from bench._common import pin
from tests.support.ports import free_port
from tests.support.tidelog_process import TidelogProcess

INSTALLER = Path(__file__).parents[1] / "localstack" / "install.py"
START_S = 60.0
KAFKA_JAVA = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20")
"""Heap and collector of Kafka's own start script."""
KAFKA_PROPERTIES = """process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{other}
controller.listener.names=CONTROLLER
controller.quorum.voters=1@127.0.0.1:{other}
log.dirs={directory}/log
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
message.max.bytes=4194304
{more}
"""


class Peer(Protocol):
    """A server under measurement."""

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients."""
        ...

    def start(self) -> None:
        """Start it; returns when clients are served."""
        ...

    def server_pid(self) -> int:
        """The process that does the work."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class TidelogPeer:
    """`tidelog up` with the embedded store on the same disk: each byte is written twice, WAL and object."""

    def __init__(self, directory: Path, settings: Sequence[str]) -> None:
        self._process = TidelogProcess(directory, [part for each in settings for part in ("--set", each)])

    @property
    def bootstrap(self) -> str:
        """See `Peer`."""
        return self._process.bootstrap

    def start(self) -> None:
        """See `Peer`."""
        self._process.start()

    def server_pid(self) -> int:
        """See `Peer`."""
        return self._process.broker_pid()

    def kill(self) -> None:
        """See `Peer`."""
        self._process.kill()


class KafkaPeer:
    """Apache Kafka; `more` are additional lines of its properties."""

    def __init__(self, directory: Path, jars: Path, more: str = "") -> None:
        self._directory = directory
        self._jars = jars
        self._more = more
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        """See `Peer`."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """See `Peer`. Raises `RuntimeError` with its output if it does not start."""
        self._directory.mkdir(parents=True)
        command = self._command()
        with (self._directory / "output").open("wb") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_S
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = (self._directory / "output").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"Kafka did not start:\n{said}")
            time.sleep(0.02)

    def _serves(self) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
            try:
                return bool(AdminClient({"bootstrap.servers": self.bootstrap}).list_topics(timeout=5).brokers)
            except KafkaException:
                return False
        return False

    def _command(self) -> Sequence[str]:
        properties = self._directory / "server.properties"
        properties.write_text(
            KAFKA_PROPERTIES.format(
                port=self._port, other=free_port(), directory=self._directory.absolute(), more=self._more
            )
        )
        java = [str(shutil.which("java")), "-cp", f"{self._jars}/*"]
        format_storage(self._jars, new_cluster_id(), properties)
        return [*java, *KAFKA_JAVA, "kafka.Kafka", str(properties)]

    def server_pid(self) -> int:
        """See `Peer`."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """See `Peer`."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)


def new_cluster_id() -> str:
    """Return a random id for a new Kafka cluster; none begins with a hyphen: it would look like an option."""
    while (found := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return found


def format_storage(jars: Path, cluster_id: str, properties: Path) -> None:
    """Prepare a Kafka node's directory for its first start."""
    java = [str(shutil.which("java")), "-cp", f"{jars}/*"]
    form = [*java, "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties)]
    subprocess.run(form, check=True, capture_output=True)


def installed(kind: str) -> Path | None:
    """Install a kind if necessary; None if that is not possible here (the reason is printed)."""
    result = subprocess.run([sys.executable, INSTALLER, kind], capture_output=True, text=True, check=False)
    if result.returncode:
        print(f"  {kind} is left out: {(result.stderr.strip().splitlines() or ['?'])[-1]}", flush=True)
        return None
    return Path(result.stdout.split()[1])


def peers(wanted: Sequence[str], settings: Sequence[str] = ()) -> dict[str, Callable[[Path], Peer]]:
    """Return how to make each wanted server that can be had on this machine; `settings` are Tidelog's own."""
    found: dict[str, Callable[[Path], Peer]] = {}
    if "tidelog" in wanted:
        found["tidelog"] = lambda directory: TidelogPeer(directory, ["admin.port=0", *settings])
    if any(name.startswith("kafka") for name in wanted) and (jars := installed("kafka")) is not None:
        if "kafka" in wanted:
            found["kafka"] = lambda directory: KafkaPeer(directory, jars)
        if "kafka-synced" in wanted:
            found["kafka-synced"] = lambda directory: KafkaPeer(directory, jars, "log.flush.interval.messages=1")
    return found


def java_producer(bootstrap: str, topic: str, record_bytes: int, records: int, cores: set[int] | None) -> float:
    """Run Kafka's own producer benchmark with acks=all; return MB (10^6 bytes) per second, warm-up included."""
    jars = installed("kafka")
    assert jars is not None, "asked for only where Kafka is installed"
    command = [str(shutil.which("java")), "-Xmx512m", "-cp", f"{jars}/*", "org.apache.kafka.tools.ProducerPerformance"]
    command += ["--topic", topic, "--num-records", str(records), "--record-size", str(record_bytes)]
    command += ["--throughput", "-1", "--producer-props", f"bootstrap.servers={bootstrap}", "acks=all"]
    command += ["linger.ms=50", "batch.size=1000000", "buffer.memory=67108864"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if cores is not None:
        pin(cores, process.pid)
    output, _ = process.communicate(timeout=300)
    last = output.strip().splitlines()[-1]
    if process.returncode or "records/sec" not in last:
        raise RuntimeError(f"Kafka's producer failed: {output[-500:]}")
    return float(last.split("records sent, ")[1].split()[0]) * record_bytes / 1e6
