"""Kafka's own command-line tools, run as its scripts run them, from the jars of fixture `kafka`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

TOOLS = {
    "kafka-client-metrics": "org.apache.kafka.tools.ClientMetricsCommand",
    "kafka-cluster": "org.apache.kafka.tools.ClusterTool",
    "kafka-configs": "kafka.admin.ConfigCommand",
    "kafka-console-consumer": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "kafka-consumer-groups": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "kafka-features": "org.apache.kafka.tools.FeatureCommand",
    "kafka-get-offsets": "org.apache.kafka.tools.GetOffsetShell",
    "kafka-log-dirs": "org.apache.kafka.tools.LogDirsCommand",
    "kafka-producer-perf-test": "org.apache.kafka.tools.ProducerPerformance",
    "kafka-reassign-partitions": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
    "kafka-topics": "org.apache.kafka.tools.TopicCommand",
    "kafka-transactions": "org.apache.kafka.tools.TransactionsCommand",
}
"""Main classes by the names of the scripts."""
DEADLINE_S = 120.0


class KafkaTools:
    """The tools against one cluster."""

    def __init__(self, jars: Path, bootstrap: str) -> None:
        self._jars = jars
        self._bootstrap = bootstrap

    def run(self, tool: str, *arguments: str, code: int = 0) -> str:
        """Run a tool; return what it said on both outputs, without SLF4J's. Fails unless it ends with `code`."""
        done = subprocess.run(
            [*self._java(), TOOLS[tool], *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        errors = [line for line in done.stderr.splitlines() if not line.startswith("SLF4J: ")]
        said = done.stdout + "\n".join(errors)
        assert done.returncode == code, f"{tool} ended with {done.returncode}:\n{said}"
        return said

    def ask(self, tool: str, *arguments: str, code: int = 0) -> str:
        """`run` with the cluster's address."""
        return self.run(tool, "--bootstrap-server", self._bootstrap, *arguments, code=code)

    @contextmanager
    def running(self, tool: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """A tool that runs until the block ends; what it says is dropped."""
        command = [*self._java(), TOOLS[tool], "--bootstrap-server", self._bootstrap, *arguments]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet) as process:
            try:
                yield process
            finally:
                process.kill()

    def _java(self) -> Sequence[str]:
        return [str(shutil.which("java")), "-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", f"{self._jars}/*"]
