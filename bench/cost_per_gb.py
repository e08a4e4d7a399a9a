"""A broker's cost per GB: CPU seconds, and requests to the bucket, with upload and compaction.

    python -m bench.cost_per_gb [--mb 1024] [--wal disk|s3] [--client obstore|aiobotocore] [--record-bytes 1024]

A real `tidelog up` with a MinIO on this machine. Records are produced to 16 partitions by raw connections (acks=all) in
batches of 64 KiB; then the benchmark waits until all of it is uploaded and compacted: nothing waits for an upload, and
no compaction has begun for some seconds. CPU seconds are those of the broker's process, all threads, user and system. A
GB is 10⁹ bytes of record payload. Uploads are of 16 MiB, so that there is something to compact; it runs unthrottled.
"""

from __future__ import annotations

import argparse
import re
import time
import urllib.request
from collections import Counter
from unittest import mock

from bench._bucket import bucket, environment
from bench._clients import create_topic, replay_produce
from bench._common import broker, cpu_seconds, directory, in_process, quick, row
from tests.support.tidelog_process import TidelogProcess
from tidelog.chaos.ports import free_port

TOPIC = "cost"
PARTITIONS = 16
BATCH_BYTES = 64_000
SETTINGS = (
    f"upload.size_bytes={16 << 20}",
    "upload.age_ms=2000",
    "upload.delete_delay_ms=0",
    "compaction.interval_ms=500",
    f"compaction.throttle_bytes_per_s={1 << 30}",
    f"compaction.busy_bytes_per_s={1 << 30}",
)
QUIET_S = 3.0
"""The work is complete after this time without requests to the bucket."""
SETTLE_S = 60.0
_SAMPLE = re.compile(r"^(tidelog_\w+)(?:\{([^}]*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Figures:
    """The metrics of a broker."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"

    def read(self) -> dict[tuple[str, str, str], float]:
        """(name, purpose, operation or direction) → value; missing labels are empty."""
        found: dict[tuple[str, str, str], float] = {}
        with urllib.request.urlopen(self._url, timeout=30) as answer:
            text = answer.read().decode()
        for line in text.splitlines():
            if match := _SAMPLE.match(line):
                labels: dict[str, str] = dict(_LABEL.findall(match[2] or ""))
                kind = labels.get("operation", labels.get("direction", ""))
                found[match[1], labels.get("purpose", ""), kind] = float(match[3])
        return found

    def requests(self) -> Counter[tuple[str, str]]:
        """Requests to the bucket by purpose and operation."""
        name = "tidelog_bucket_requests_total"
        return Counter({(purpose, kind): int(n) for (which, purpose, kind), n in self.read().items() if which == name})


def wait_until_done(figures: Figures) -> float:
    """Wait until all is uploaded and compacted; return the time since then. Raises `TimeoutError`: a part of the work
    has no price."""
    deadline, last, since = time.monotonic() + SETTLE_S, figures.requests(), time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(0.25)
        now = figures.requests()
        now.pop(("other", "get"), None)
        if now != last:
            last, since = now, time.monotonic()
        pending = figures.read()["tidelog_storage_log_cache_pending_bytes", "", ""]
        if not pending and time.monotonic() - since > QUIET_S:
            return time.monotonic() - since
    raise TimeoutError(f"uploads and compaction have not ended within {SETTLE_S:g} s")


def measure(tidelog: TidelogProcess, port: int, args: argparse.Namespace) -> None:
    """Produce, wait, and print the cost."""
    create_topic(tidelog.bootstrap, TOPIC, PARTITIONS)
    pid, figures = tidelog.broker_pid(), Figures(port)
    before, cpu = figures.requests(), cpu_seconds(pid)
    produced, seconds = 0, 0.0
    while produced < args.mb << 20:
        load = (("127.0.0.1", tidelog.port), TOPIC, PARTITIONS, args.record_bytes, BATCH_BYTES, 2, 1.0)
        size, took = in_process(replay_produce, *load)
        produced += size
        seconds += took
    written = cpu_seconds(pid) - cpu
    wait_until_done(figures)
    total = cpu_seconds(pid) - cpu
    gb = produced / 1e9
    asked = figures.requests() - before
    for (purpose, kind), count in sorted(asked.items(), key=lambda one: -one[1]):
        print(f"  {purpose:10s} {kind:12s} {count / gb:8.1f} a GB", flush=True)
    by_kind: Counter[str] = Counter()
    for (_, kind), count in asked.items():
        by_kind[kind] += count
    row(
        f"cost of a GB, WAL {args.wal}, {args.client}",
        f"{total / gb:.2f} CPU s, {sum(asked.values()) / gb:,.0f} requests"
        f" ({', '.join(f'{kind} {count / gb:,.0f}' for kind, count in by_kind.most_common())})",
        limit=f"{written / gb:.2f} CPU s while it was produced, at {produced / 1e6 / seconds:,.0f} MB/s",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256 if quick() else 1024)
    parser.add_argument("--wal", choices=("disk", "s3", "both"), default="both")
    parser.add_argument("--client", choices=("obstore", "aiobotocore"), default="obstore")
    parser.add_argument("--record-bytes", type=int, default=1024)
    parser.add_argument("--dir", help="where the data goes (default: a temporary folder)")
    args = parser.parse_args()
    for wal in ("disk", "s3"):
        if args.wal not in (wal, "both"):
            continue
        with bucket("minio", args.dir) as one, directory(args.dir) as data:
            port = free_port()
            settings = [*SETTINGS, f"wal.kind={wal}", f"s3.client={args.client}", f"admin.port={port}"]
            settings += [f"s3.endpoint={one.s3.endpoint}", f"s3.bucket={one.s3.bucket}"]
            with (
                mock.patch.dict("os.environ", environment()),
                broker(data / "data", settings) as tidelog,
            ):
                measure(tidelog, port, argparse.Namespace(**{**vars(args), "wal": wal}))


if __name__ == "__main__":
    main()
