"""The limit of a write-ahead log on this machine's disk: sequential in-place `pwrite` and `fdatasync`.

    python -m bench.limit_disk [--seconds 3] [--runs 3] [--dir DIR] [--burst-seconds 0]

The file is filled with zeros and synced first, as the WAL's files are: a disk (especially a virtual one) may take
longer to allocate new blocks than to overwrite old ones, and the WAL writes into recycled files. `--burst-seconds`
writes for this time and prints the rate of each second, which shows throttling after a burst. It also prints the rate
of filling new files, which the WAL does only until it has enough of them.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from bench._common import Spread, directory, due_times, interleaved, percentile, quick

FILE_BYTES = 1 << 30
"""About the total size of a busy WAL's files: twice the log cache."""
_FILL_BYTES = 4 << 20


class RawDisk:
    """A zero-filled file that is overwritten cyclically."""

    def __init__(self, path: Path, size: int = FILE_BYTES) -> None:
        self._size = size
        self._fd = os.open(path / "raw", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._at = 0
        started = time.perf_counter()
        zeros = bytes(_FILL_BYTES)
        for at in range(0, size, _FILL_BYTES):
            os.pwrite(self._fd, zeros, at)
            os.fdatasync(self._fd)
        self.fill_mb_per_s = size / 1e6 / (time.perf_counter() - started)

    def write(self, data: bytes) -> float:
        """Write and sync at the next position; return the duration in seconds."""
        if self._at + len(data) > self._size:
            self._at = 0
        started = time.perf_counter()
        os.pwrite(self._fd, data, self._at)
        os.fdatasync(self._fd)
        self._at += len(data)
        return time.perf_counter() - started

    def throughput(self, chunk_bytes: int, seconds: float) -> float:
        """MB/s of writes of `chunk_bytes`, each synced."""
        data = os.urandom(chunk_bytes)
        started, count = time.perf_counter(), 0
        while time.perf_counter() < started + seconds:
            self.write(data)
            count += 1
        return count * chunk_bytes / 1e6 / (time.perf_counter() - started)

    def latencies(self, size: int, per_s: float, seconds: float) -> list[float]:
        """Seconds until each write of `size` bytes was synced, at `per_s` writes per second.

        Writes that are due while another runs include that wait, as do requests of a client that does not wait for
        responses. The delay of the timer is not counted.
        """
        data = os.urandom(size)
        took = []
        for due in due_times(per_s, seconds):
            self.write(data)
            took.append(time.perf_counter() - due)
        return took

    def close(self) -> None:
        """Release the file."""
        os.close(self._fd)


def burst(disk: RawDisk, seconds: float) -> None:
    """Print the rate of each second."""
    rates = [f"{disk.throughput(4 << 20, 1.0):,.0f}" for _ in range(int(seconds))]
    print(f"MB/s of each second: {' '.join(rates)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5 if quick() else 2.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", default=None, help="where to write (default: the system's temporary directory)")
    parser.add_argument("--burst-seconds", type=float, default=0.0)
    args = parser.parse_args()
    with directory(args.dir) as path:
        disk = RawDisk(path)
        print(f"new blocks  {disk.fill_mb_per_s:,.0f} MB/s", flush=True)
        if args.burst_seconds:
            burst(disk, args.burst_seconds)
        sizes = {f"{size >> 10} KiB": size for size in (16 << 10, 128 << 10, 1 << 20, 4 << 20, 16 << 20)}
        rates = interleaved(
            args.runs,
            **{name: lambda size=size: disk.throughput(size, args.seconds) for name, size in sizes.items()},
        )
        for name, values in rates.items():
            print(f"{name:>9s}   {Spread.of(values).text('MB/s')}", flush=True)
        for size in (4096, 16_384):
            took = disk.latencies(size, 5e6 / size, args.seconds)
            figures = ", ".join(f"p{part * 100:g} {percentile(took, part) * 1e3:.2f} ms" for part in (0.5, 0.99, 0.999))
            print(f"5 MB/s in writes of {size:,} bytes: {figures}", flush=True)
        disk.close()


if __name__ == "__main__":
    main()
