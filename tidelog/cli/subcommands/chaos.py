"""`tidelog chaos`: run real processes under faults, and apply the checkers.

Exit codes: 0 no finding; 1 a finding, or the cluster did not become idle; 2 the options do not fit together; 3, 5 the
S3 server cannot be started.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tidelog.cli import output
from tidelog.cli.options import format_option
from tidelog.runtime.errors import InvalidInput

if TYPE_CHECKING:
    from tidelog.chaos.run import ChaosReport
    from tidelog.chaos.s3_server import RunningS3

SHOWN_FINDINGS = 10


@click.command()
@click.option("--seconds", type=click.FloatRange(min=1), default=60.0, show_default=True, help="No fault begins later.")
@click.option("--rounds", type=click.IntRange(min=1), metavar="N", help="Maximum number of faults.")
@click.option(
    "--faults",
    metavar="NAME,...",
    help="Kinds [kill,kill-active,stop,cut,cut-clients,slow]; also bucket-503,bucket-slow,disk-full.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed for order, targets and times of faults.")
@click.option("--partitions", type=click.IntRange(1, 1000), default=12, show_default=True)
@click.option("--rate", type=click.FloatRange(min=1), default=800.0, show_default=True, help="Records per second.")
@click.option("--wal", type=click.Choice(["disk", "s3"]), default="disk", show_default=True, help="Where the WALs are.")
@click.option(
    "--s3",
    "kind",
    type=click.Choice(["embedded", "moto", "minio", "localstack"]),
    default="embedded",
    show_default=True,
    help="The bucket: a directory, or a server to start.",
)
@click.option("--s3-endpoint", metavar="URL", help="A running server; a bucket is created on it.")
@click.option("--access-key", default="", metavar="ID", help="For --s3-endpoint.")
@click.option("--secret-key", default="", metavar="KEY", help="For --s3-endpoint.")
@click.option("--no-moves", is_flag=True, help="Do not move partitions.")
@click.option("--no-transactions", is_flag=True, help="No transactional clients; --old-python has none either.")
@click.option("--no-compaction", is_flag=True, help="No compacted topic; --old-python has none either.")
@click.option("--old-python", default="", metavar="PATH", help="Some nodes run the release in this environment.")
@click.option(
    "--history", type=click.Path(path_type=Path), metavar="FILE", help="Keep the history for `tidelog check`."
)
@format_option
def chaos(
    seconds: float,
    rounds: int | None,
    faults: str | None,
    seed: int,
    partitions: int,
    rate: float,
    wal: str,
    kind: str,
    s3_endpoint: str | None,
    access_key: str,
    secret_key: str,
    no_moves: bool,
    no_transactions: bool,
    no_compaction: bool,
    old_python: str,
    history: Path | None,
    style: str,
) -> None:
    """Run a cluster of real processes under faults, and check every promise.

    It starts three nodes on this machine under a temporary directory, and stops them at the end. Producers, consumers
    and moves continue while nodes are killed, paused, cut off and slowed down, the bucket fails and disks fill up.
    """
    from tidelog.chaos import run as harness

    options = harness.ChaosOptions(
        seconds=seconds,
        seed=seed,
        partitions=partitions,
        rate=rate,
        wal=wal,
        s3=kind,
        endpoint=_endpoint(s3_endpoint, access_key, secret_key),
        moves=not no_moves,
        transactions=not no_transactions,
        compaction=not no_compaction,
        history=history,
        old_python=old_python,
    )
    if rounds is not None:
        options.rounds = rounds
    if faults is not None:
        options.faults = tuple(name.strip() for name in faults.split(",") if name.strip())
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))  # and stop the nodes
    found = harness.run(options, output.warn)
    output.show(style, lambda: _document(found), lambda _: _render(found))
    if not found.clean:
        raise click.exceptions.Exit(1)


def _endpoint(url: str | None, access_key: str, secret_key: str) -> RunningS3 | None:
    if url is None:
        if access_key or secret_key:
            raise InvalidInput("--access-key and --secret-key are for --s3-endpoint")
        return None
    from tidelog.chaos.s3_server import RunningS3

    return RunningS3(url, access_key, secret_key)


def _document(found: ChaosReport) -> dict[str, Any]:
    import msgspec

    document = msgspec.to_builtins(found)
    assert isinstance(document, dict)
    return {**document, "clean": found.clean}


def _replayed(sizes: list[int]) -> str | None:
    """For a WAL on disk only: for a WAL in the bucket only its broker counts the bytes."""
    if not sizes:
        return None
    return f"{len(sizes)} times, median {output.size(sorted(sizes)[len(sizes) // 2])}, most {output.size(max(sizes))}"


def _old_starts(found: ChaosReport) -> str | None:
    if "old" not in found.starts:
        return None
    return f"{found.starts['old']}, in this one {found.starts.get('new', 0)}"


def _lag(found: ChaosReport) -> str:
    what = f" ({found.worst_lag.text()})" if found.worst_lag is not None else ""
    return f"{found.worst_lag_s:.2f} s{what}"


def _render(found: ChaosReport) -> str:
    from tidelog.chaos.report import quantile

    def seconds(values: list[float], share: float) -> str | None:
        value = quantile(values, share)
        return f"{value:.2f}" if value is not None else None

    headers = ["FAULT", "ROUNDS", "ACKNOWLEDGED", "LOST", "DOUBLED", "OTHER"]
    headers += ["UNAVAILABLE-P50", "P99", "MAX", "FIRST-ACK-P50", "FIRST-ACK-MAX"]
    rows = [
        [
            row.fault,
            row.rounds,
            row.acknowledged,
            row.lost,
            row.doubled,
            row.other_findings,
            *(seconds(row.unavailable_s, share) for share in (0.5, 0.99, 1.0)),
            *(seconds(row.first_ack_s, share) for share in (0.5, 1.0)),
        ]
        for row in found.rows
    ]
    about: list[tuple[str, Any]] = [
        ("records acknowledged", f"{found.acknowledged:,}"),
        ("records read by all consumers", f"{found.read:,}"),
        ("operations checked", f"{found.operations:,}"),
        ("findings", len(found.findings)),
        ("partitions moved", found.moves),
        ("rounds of log compaction", f"{found.rounds_compacted:,}"),
        ("worst real-time lag", _lag(found)),
        ("replayed by killed nodes", _replayed(found.replayed_bytes)),
        ("orphans, deleted at the end", f"{found.orphans}, {found.orphans_left} left"),
        ("nodes started in the old release", _old_starts(found)),
        ("nodes that ended by themselves", len(found.restarts)),
        ("took", f"{found.took_s:.1f} s"),
    ]
    lines = [output.table(headers, rows, right=headers[1:]), "", output.pairs(about)]
    lines += ["", *(f"problem: {one}" for one in found.problems)] if found.problems else []
    lines += [one.text() for one in found.findings[:SHOWN_FINDINGS]]
    more = len(found.findings) - SHOWN_FINDINGS
    if more > 0:
        lines.append(f"and {more} more findings: --history FILE, then `tidelog check FILE`")
    lines.append("every promise was kept" if found.clean else "PROMISES WERE BROKEN")
    return "\n".join(lines)
