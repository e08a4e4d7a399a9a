"""`tidelog wal`: the write-ahead logs. `inspect` and `verify` read those of one broker from disk or bucket, without it,
the replicas of other brokers' sets included; `list`, `drain`, `losses` and `accept-loss` are about what the controllers
know of them.

`verify` also checks the other checksummed files of the data directory: identity, controller journal and snapshot; for a
cluster's directory those of all nodes. The check is read-only and may run beside the broker. `verify` exits with 7 if a
process would refuse to start; a torn tail is not damage: recovery truncates it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection, StillUnderWay
from tidelog.cli.completion import broker_ids
from tidelog.cli.options import (
    admin_options,
    bootstrap_option,
    config_options,
    format_option,
    load_config,
    watch_option,
)
from tidelog.cli.placements import Get
from tidelog.runtime.errors import CorruptData, NotFound, StorageFailed, Unavailable
from tidelog.runtime.progress_bar import ProgressBar

if TYPE_CHECKING:
    from tidelog.config import Config
    from tidelog.process.data_check import DataReport
    from tidelog.storage.wal.base import WalRecord
    from tidelog.storage.wal.disk.inspect import WalFinding, WalInfo
    from tidelog.storage.wal.s3.inspect import BucketWalInfo

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
POLL_S = 0.2
UPLOAD_MS = 30_000
"""Time-out of one request to upload; the upload goes on after it."""


@click.group()
def wal() -> None:
    """Inspect and verify the write-ahead log and the data directory."""


def _where_options(function: F) -> F:
    """The flags of `tidelog up` that locate the log."""
    for option in (
        click.option("--cluster-id", default="", metavar="ID", help="Of a log in the bucket, if DIR has none."),
        click.option("--bucket", metavar="NAME", help="The bucket on the S3 server."),
        click.option("--s3-endpoint", metavar="URL", help="The S3 server; without it the embedded store in DIR."),
        click.option(
            "--wal", "kind", type=click.Choice(["disk", "s3"]), help="Where the log is: DIR/wal, or a bucket."
        ),
        click.option(
            "--data-dir", type=click.Path(path_type=Path), metavar="DIR", help="The data directory [tidelog-data]."
        ),
    ):
        function = option(function)
    return config_options(function)


def _config(where: dict[str, Any]) -> Config:
    data_dir = where["data_dir"]
    return load_config(
        where["config_file"],
        where["assignments"],
        node__data_dir=str(data_dir) if data_dir is not None else None,
        s3__endpoint=where["s3_endpoint"],
        s3__bucket=where["bucket"],
        wal__kind=where["kind"],
    ).config


@wal.command()
@_where_options
@click.option("--records", is_flag=True, help="Every record, one per line.")
@click.option(
    "--replica-set",
    type=click.IntRange(min=0),
    metavar="ID",
    help="Only this set's log [the broker's own, and a line each].",
)
@format_option
def inspect(records: bool, replica_set: int | None, style: str, **where: Any) -> None:
    """Show the log's files (or objects), offsets and epochs; and replicas of other sets, a line each."""
    config = _config(where)
    folder = _replica_folder(config, replica_set)
    if records:
        _print_records(config, where["cluster_id"], style, folder)
        return
    with ProgressBar("reading") as progress:
        document = _as_document(_inspect(config, where["cluster_id"], progress.update, None, folder))
        if replica_set is None:
            document["replicas"] = {
                str(each): _as_document(_inspect(config, "", progress.update, None, name))
                for each, name in _replica_folders(config).items()
            }
    output.show(style, lambda: document, _render)


def _replica_folders(config: Config) -> dict[int, str]:
    """Return the folders with replicas of other brokers' sets, by replica set."""
    from tidelog.process.replica_disks import PREFIX, replicas_in

    return {each: f"{PREFIX}{each}" for each in replicas_in(Path(config.node.data_dir))}


def _replica_folder(config: Config, replica_set: int | None) -> str | None:
    """Return the folder of a set; None: the broker's own log, wherever it is. Raises `NotFound`."""
    from tidelog.process.data_check import own_replica_set

    folders = _replica_folders(config)
    if replica_set is None or replica_set in folders:
        return folders[replica_set] if replica_set is not None else None
    own = own_replica_set(config)
    if replica_set == own:
        return None
    there = ", ".join(map(str, sorted({*folders, own}))) if folders else str(own)
    raise NotFound(
        f"{config.node.data_dir} has no log of replica set {replica_set}",
        hint=f"it has, or is to have, those of {there}; `tidelog replica-set describe {replica_set}` shows who has one",
    )


@wal.command()
@_where_options
@format_option
def verify(style: str, **where: Any) -> None:
    """Check every byte of the log, and the data directory's other files. Changes nothing; exits 7 on damage.

    In the directory of a `tidelog up --brokers N`: of all its nodes.
    """
    from tidelog.process.data_check import check_all

    config = _config(where)
    with ProgressBar("verifying") as progress:
        reports = _run(config, check_all(config, where["cluster_id"], progress.update))
    findings = [one for report in reports for one in report.findings]
    errors = sum(one.is_error for one in findings)
    document: dict[str, Any] = {
        "sound": not errors,
        "findings": [{**_as_document(one), "error": one.is_error} for one in findings],
    }
    if len(reports) == 1:
        document |= _parts_document(reports[0])
    else:
        document["nodes"] = [{"node": one.node, **_parts_document(one)} for one in reports if one.node]
    output.show(style, lambda: document, lambda _: _render_reports(reports, findings))
    if errors:
        raise CorruptData(
            f"{config.node.data_dir}: {errors} finding{'' if errors == 1 else 's'} of damage",
            hint="keep a copy of the directory before anything else; see docs/operations.md",
        )


@wal.command("list")
@format_option
@watch_option
@bootstrap_option
def list_(style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show what the controllers know of each broker's log, and whether all of it is committed."""
    cluster = ClusterConnection(bootstrap)
    output.show(style, lambda: cluster.get("/wals")["wals"], _render_wals, watch_s=watch_s)


def _render_wals(rows: list[dict[str, Any]]) -> str:
    headers = ["BROKER", "KIND", "BUCKET", "EPOCH", "ACKNOWLEDGED", "COMMITTED", "AT-STAKE"]
    cells = [
        [
            row["broker"],
            row["kind"],
            row["bucket"],
            row["master_epoch"],
            row["acknowledged_offset"],
            row["committed_offset"],
            _stake(row),
        ]
        for row in rows
    ]
    return output.table(headers, cells, right=["BROKER", "EPOCH", "ACKNOWLEDGED", "COMMITTED"])


def _stake(row: dict[str, Any]) -> str:
    if _is_replicated(row):
        return f"nothing: {row['replicas']} replicas"
    return "nothing" if row["committed"] else f"{len(row['at_stake'])} partitions"


def _is_replicated(row: dict[str, Any]) -> bool:
    """Return whether other brokers have replicas of a log; a broker of an older version does not say so."""
    return int(row.get("replicas", 1)) > 1


@wal.command()
@click.option(
    "--broker",
    "broker_id",
    type=click.IntRange(min=0),
    metavar="ID",
    shell_complete=broker_ids,
    help="Only this broker's.",
)
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=60.0, show_default=True, help="Seconds to wait."
)
@format_option
@admin_options
def drain(broker_id: int | None, timeout_s: float, style: str, bootstrap: str) -> None:
    """Upload all records of the logs; return when the controllers know that they are committed.

    Then a log may be given another kind or place. Stop the producers first: a record that is written later is in the
    log again.
    """
    cluster = ClusterConnection(bootstrap)
    with ProgressBar("uploading", unit="brokers") as progress:
        rows = _upload_all(cluster, broker_id, timeout_s, progress)
    text = f"everything in the logs of {len(rows)} broker{'' if len(rows) == 1 else 's'} is committed"
    output.emit(json.dumps(rows, indent=2) if style == "json" else text)


def _upload_all(
    cluster: ClusterConnection, broker_id: int | None, timeout_s: float, progress: ProgressBar
) -> list[dict[str, Any]]:
    """Have all logs uploaded; return their rows when that is committed. Raises `Unavailable`."""
    deadline = time.monotonic() + timeout_s
    uploaded: dict[int, int] = {}
    answered: set[int] = set()
    rows = _drainable(cluster.get, broker_id)
    while True:
        left = [row for row in rows if not _is_uploaded(row, uploaded, answered)]
        progress.update(len(rows) - len(left), len(rows))
        if not left:
            return rows
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the logs of brokers {[row['broker'] for row in left]} were not committed within {timeout_s:g} s",
                hint="stop the producers; `tidelog status` shows whether uploads fail",
            )
        for row in left:
            if _is_uploaded(row, uploaded, answered) or (_is_replicated(row) and not row["alive"]):
                continue  # with another one of the same master; or that is being elected
            if not row["alive"]:
                raise Unavailable(
                    f"broker {row['broker']} is dead: only it can upload its log",
                    hint="start it as it was started before",
                )
            wait_ms = max(1, min(UPLOAD_MS, int((deadline - time.monotonic()) * 1000)))
            path = f"/upload?timeout_ms={wait_ms}"
            with contextlib.suppress(StillUnderWay):  # asked again until the deadline
                answer = cluster.post_to(row["admin_url"], path, broker=_uploader(row))
                uploaded |= {int(each): epoch for each, epoch in answer.get("master_epochs", {}).items()}
                answered.add(row["broker"])
        time.sleep(POLL_S)
        rows = _drainable(partial(cluster.get_patiently, deadline=deadline), broker_id)


def _uploader(row: dict[str, Any]) -> int | None:
    """Return the broker that uploads a log; None for a replicated one where an older version does not say so."""
    default = None if _is_replicated(row) else row["broker"]
    found: int | None = row.get("master", default)
    return found


def _is_uploaded(row: dict[str, Any], uploaded: dict[int, int], answered: set[int]) -> bool:
    """Return whether all of a log is committed. `uploaded`: in which master epochs masters have said so.

    Of a log with replicas the controllers do not know it; its master's word counts while that is the master. Of another
    one they may not have heard of its last records, so its broker, if it lives, is among those that have `answered`.
    """
    if _is_replicated(row):
        return bool(uploaded.get(row["broker"]) == row["master_epoch"])
    return bool(row["committed"]) and (not row["alive"] or row["broker"] in answered)


def _drainable(get: Get, broker_id: int | None) -> list[dict[str, Any]]:
    rows = [row for row in get("/wals")["wals"] if broker_id in (None, row["broker"])]
    if not rows:
        whose = "any log" if broker_id is None else f"a log of broker {broker_id}"
        raise NotFound(f"nothing is known of {whose}", hint="`tidelog wal list` shows them")
    return rows


@wal.command()
@format_option
@watch_option
@bootstrap_option
def losses(style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show what was given up: every accepted loss of a log, with its partitions and offsets."""
    cluster = ClusterConnection(bootstrap)
    output.show(style, lambda: cluster.get("/losses/accepted")["losses"], _render_accepted, watch_s=watch_s)


def _render_accepted(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "no loss was ever accepted"
    cells = [
        [
            output.moment(row["at_ms"]),
            row["replica_set"],
            one["topic"],
            one["partition"],
            one["from_offset"],
            _lost_to(one["to_offset"], row["may_be_more"]),
            row["reason"],
        ]
        for row in rows
        for one in row["partitions"]
    ]
    headers = ["TIME", "BROKER", "TOPIC", "PARTITION", "FROM", "TO", "REASON"]
    return output.table(headers, cells, right=["BROKER", "PARTITION", "FROM", "TO"])


def _lost_to(known: int, may_be_more: bool) -> str:
    """Return where a loss ends, as far as the controllers were told: the newest second of a crash is not known."""
    if known < 0:
        return "unknown"
    return f"{known} or more" if may_be_more else str(known)


@wal.command("accept-loss")
@click.argument("loss", metavar="LOSS")
@click.option(
    "--data-dir", type=click.Path(path_type=Path), metavar="DIR", help="The broker's data directory [tidelog-data]."
)
@config_options
def accept_loss(loss: str, data_dir: Path | None, config_file: Path | None, assignments: tuple[str, ...]) -> None:
    """Give up the records of a log that is gone: LOSS as the broker's refused start printed it.

    Takes effect at the next start of the broker, for this loss only. `tidelog wal losses` shows it afterwards.
    """
    from tidelog.process.accepted_loss import WAL_LOSS, accept

    config = load_config(
        config_file, assignments, node__data_dir=str(data_dir) if data_dir is not None else None
    ).config
    path = accept(Path(config.node.data_dir), loss, WAL_LOSS)
    output.emit(f"accepted loss {loss} in {path}: start the broker, which records it")


@wal.command("renew-id")
@click.option(
    "--replica-set", type=click.IntRange(min=0), metavar="ID", help="The set whose log it is [the broker's own]."
)
@click.option(
    "--data-dir", type=click.Path(path_type=Path), metavar="DIR", help="The broker's data directory [tidelog-data]."
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@format_option
@config_options
def renew_id(
    replica_set: int | None,
    data_dir: Path | None,
    yes: bool,
    style: str,
    config_file: Path | None,
    assignments: tuple[str, ...],
) -> None:
    """Let an older copy of a log go on as that of another replica, where only older copies are left.

    The broker is stopped, and the records stay as they are. Started again, it promises with this log, and
    `tidelog replica-set elect` with --accept-loss elects it.
    """
    from tidelog.process.data_check import own_replica_set
    from tidelog.process.renewed_id import renew_id as renew

    config = load_config(
        config_file, assignments, node__data_dir=str(data_dir) if data_dir is not None else None
    ).config
    own = own_replica_set(config)
    chosen = own if replica_set is None else replica_set
    if not yes:
        output.confirm(f"let the log of replica set {chosen} in {config.node.data_dir} go on as another replica's")
    renewed = _run(config, renew(Path(config.node.data_dir), chosen, own))
    if style == "json":
        document = {"replica_set": chosen, "path": str(renewed.path), "before": renewed.before, "id": renewed.now}
        output.emit(json.dumps(document, indent=2))
        return
    output.emit(
        f"{renewed.path} has the id {renewed.now} now, instead of {renewed.before}: start the broker, and then `tidelog"
        f" replica-set elect {chosen} --broker {own} --accept-loss`"
    )


def _parts_document(report: DataReport) -> dict[str, Any]:
    return {
        "info": _as_document(report.info) if report.info is not None else None,
        "replicas": {str(each): _as_document(found) for each, found in report.replicas.items()},
        "identity": report.identity,
        "controller": _as_document(report.controller) if report.controller is not None else None,
    }


def _inspect(
    config: Config,
    cluster_id: str,
    progress: Callable[[int, int], None] | None,
    on_record: Callable[[WalRecord], None] | None,
    folder: str | None,
) -> WalInfo | BucketWalInfo:
    """Read the broker's own log, or the one in a folder of its data directory."""
    from tidelog.process.data_check import has_wal_on_disk, inspect_bucket_wal, nothing_there
    from tidelog.process.data_dir import WAL_FOLDER
    from tidelog.runtime.disk import FileDisk
    from tidelog.storage.wal.disk import inspect as wal_tool

    data_dir = Path(config.node.data_dir)
    if folder is None and config.wal.kind == "s3":
        return _run(config, inspect_bucket_wal(config, cluster_id, progress, on_record))
    if folder is None and not has_wal_on_disk(data_dir):
        raise nothing_there(data_dir)

    async def from_disk() -> WalInfo:
        disk = FileDisk(data_dir / (folder or WAL_FOLDER))
        try:
            return await wal_tool.inspect(disk, on_record=on_record, progress=progress)
        finally:
            await disk.close()

    return _run(config, from_disk())


def _run(config: Config, work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine. Raises `StorageFailed` when a file cannot be read."""
    try:
        return asyncio.run(work)
    except OSError as error:
        name = error.filename if error.filename is not None else config.node.data_dir
        raise StorageFailed(
            f"cannot read {name}: {error.strerror or error}", hint="check the path and its permissions"
        ) from error


def _as_document(struct: Any) -> dict[str, Any]:
    import msgspec

    document = msgspec.to_builtins(struct)
    assert isinstance(document, dict)
    return document


def _render(document: dict[str, Any]) -> str:
    text = _render_bucket(document) if "objects" in document else _render_files(document)
    replicas = document.get("replicas")
    return f"{text}\n\n{_render_replicas(replicas)}" if replicas else text


def _render_replicas(replicas: dict[str, dict[str, Any]]) -> str:
    """Return a line for each replica of another broker's set."""
    headers = ["REPLICA-OF", "START", "END", "RECORDS", "FILES", "EPOCH", "PROMISED", "CONFIRMED", "EPOCH-FILE"]
    rows = [
        [
            replica_set,
            one["start_offset"],
            one["end_offset"],
            sum(each["records"] for each in one["segments"]),
            len(one["segments"]),
            one["epochs"][-1][0] if one["epochs"] else None,
            one["promised_epoch"] if one["promised_epoch"] >= 0 else None,
            one["noted_confirm_offset"],
            one["epoch_file"],
        ]
        for replica_set, one in replicas.items()
    ]
    return output.table(headers, rows, right=headers[:-1])


def _render_bucket(document: dict[str, Any]) -> str:
    objects = document["objects"]
    about = [
        ("WAL offsets", f"{document['start_offset']} to {document['end_offset']}"),
        ("records", sum(one["records"] for one in objects if one["is_live"])),
        ("objects", f"{sum(one['is_live'] for one in objects)} of the log, {len(objects)} in the bucket"),
        ("keys", f"{document['prefix']}*"),
        ("last epoch", document["last_epoch"] if document["last_epoch"] >= 0 else None),
    ]
    headers = ["OBJECT", "KIND", "LIVE", "START", "END", "RECORDS", "EPOCH", "SIZE"]
    rows = [
        [
            one["key"].removeprefix(document["prefix"]),
            one["kind"],
            one["is_live"],
            one["start_offset"] if one["start_offset"] >= 0 else None,
            one["end_offset"] if one["end_offset"] >= 0 else None,
            one["records"],
            one["master_epoch"] if one["master_epoch"] >= 0 else None,
            output.size(one["size_bytes"]),
        ]
        for one in objects
    ]
    return f"{output.pairs(about)}\n\n{output.table(headers, rows, right=headers[3:])}"


def _render_files(document: dict[str, Any]) -> str:
    segments = document["segments"]
    about = [
        ("WAL offsets", f"{document['start_offset']} to {document['end_offset']}"),
        ("records", sum(one["records"] for one in segments)),
        ("files", f"{len(segments)}, and {document['spare_files']} spare"),
        ("epoch file", document["epoch_file"]),
        ("epochs", ", ".join(f"{epoch} from {start}" for epoch, start in document["epochs"])),
        *_replica_pairs(document),
    ]
    headers = ["FILE", "START", "END", "RECORDS", "STREAMS", "EPOCHS", "PAYLOAD", "SIZE"]
    rows = [
        [
            one["name"],
            one["start_offset"],
            one["end_offset"],
            one["records"],
            one["streams"],
            _span(one["first_epoch"], one["last_epoch"]),
            output.size(one["payload_bytes"]),
            output.size(one["file_bytes"]),
        ]
        for one in segments
    ]
    return f"{output.pairs(about)}\n\n{output.table(headers, rows, right=headers[1:])}"


def _replica_pairs(document: dict[str, Any]) -> list[tuple[str, object]]:
    """Return what is known of a log that is one of several replicas."""
    if document["promised_epoch"] < 0:
        return []
    own_from = document["own_from"]
    about: list[tuple[str, object]] = [
        ("promised epoch", document["promised_epoch"]),
        ("confirmed", f"{document['noted_confirm_offset']} at least"),
        ("written here", "nothing" if own_from < 0 else f"from {own_from}"),
    ]
    if document["cut_at"] >= 0:
        about.append(("truncation", f"at {document['cut_at']}, not complete"))
    return about


def _span(first: int, last: int) -> str | None:
    if first < 0:
        return None
    return str(first) if first == last else f"{first}-{last}"


def _render_reports(reports: list[DataReport], findings: list[WalFinding]) -> str:
    verdict = "DAMAGED" if any(one.is_error for one in findings) else "sound"
    if len(reports) == 1:
        text = f"{verdict}: {', '.join(_parts(reports[0]))}"
    else:
        nodes = [f"{one.node}: {', '.join(_parts(one)) or 'nothing'}" for one in reports if one.node]
        text = "\n".join([f"{verdict}: {len(nodes)} nodes", *nodes])
    if not findings:
        return text
    rows = [
        [
            "error" if one.is_error else "note",
            one.kind,
            one.file,
            one.file_offset if one.file_offset >= 0 else None,
            one.wal_offset if one.wal_offset >= 0 else None,
            one.message,
        ]
        for one in _worst_first(findings)
    ]
    headers = ["LEVEL", "KIND", "FILE", "BYTE", "WAL-OFFSET", "WHAT"]
    return f"{text}\n\n{output.table(headers, rows, right=['BYTE', 'WAL-OFFSET'])}"


def _worst_first(findings: list[WalFinding]) -> list[WalFinding]:
    return sorted(findings, key=lambda one: not one.is_error)


def _parts(report: DataReport) -> list[str]:
    """Describe what was checked."""
    parts = []
    info = report.info
    if info is not None:
        document = _as_document(info)
        what = "objects" if "objects" in document else "files"
        pieces = document["objects" if "objects" in document else "segments"]
        records = sum(one["records"] for one in pieces)
        offsets = f"WAL offsets {info.start_offset} to {info.end_offset}"
        parts.append(f"{records} records in {len(pieces)} {what} ({offsets})")
    parts += [
        f"replica of set {each}: WAL offsets {found.start_offset} to {found.end_offset}"
        for each, found in sorted(report.replicas.items())
    ]
    if report.controller is not None:
        files = report.controller
        parts.append(f"controller entries up to {files.last_index} (snapshot up to {files.snapshot_index})")
    if report.identity is not None:
        parts.append(f"identity of broker {report.identity['broker_id']}")
    return parts


def _print_records(config: Config, cluster_id: str, style: str, folder: str | None) -> None:
    """Print one line per record while reading: a log may be larger than memory."""
    keys = ("offset", "type", "master_epoch", "stream_id", "stream_epoch", "base_offset", "count", "bytes")
    widths = (12, 12, 6, 10, 6, 12, 6, 9)
    titles = ("WAL-OFFSET", "TYPE", "EPOCH", "STREAM", "S-EP", "BASE", "COUNT", "BYTES")

    def line(values: tuple[Any, ...]) -> str:
        return "  ".join(f"{value!s:>{width}}" for value, width in zip(values, widths, strict=True))

    def on_record(record: WalRecord) -> None:
        values = (
            record.offset,
            record.type.name.lower(),
            record.master_epoch,
            record.stream_id,
            record.stream_epoch,
            record.base_offset,
            record.count,
            len(record.payload),
        )
        output.emit(json.dumps(dict(zip(keys, values, strict=True))) if style == "json" else line(values))

    if style == "table":
        output.emit(line(titles))
    _inspect(config, cluster_id, None, on_record, folder)
