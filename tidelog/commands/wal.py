"""`tidelog wal inspect|verify`: the write-ahead log, read without a broker from disk or bucket.

`verify` checks the other checksummed files of the data directory, too: identity, controller journal and snapshot; of a
cluster's directory those of all nodes. It only reads, so a broker may be running meanwhile. `verify` exits 7 when a
process would refuse to start; a torn tail is no corruption, recovery cuts it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from runtime.errors import CorruptData, StorageFailed
from tidelog import output
from tidelog.options import config_options, format_option, load_config

if TYPE_CHECKING:
    from storage.wal import WalRecord
    from storage.wal_s3_tool import BucketWalInfo
    from storage.wal_tool import Finding, WalInfo
    from tidelog.config import Config
    from tidelog.data_check import DataReport

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@click.group()
def wal() -> None:
    """Inspect and verify the write-ahead log and the data directory."""


def _where_options(function: F) -> F:
    """The flags of `tidelog up` that say where the log is."""
    for option in (
        click.option("--cluster-id", default="", metavar="ID", help="Of a log in the bucket, if DIR does not know it."),
        click.option("--bucket", metavar="NAME", help="The bucket on the S3 server."),
        click.option("--s3-endpoint", metavar="URL", help="The S3 server; without it the embedded store in DIR."),
        click.option(
            "--wal", "kind", type=click.Choice(["disk", "s3"]), help="Where the log lives: DIR/wal, or a bucket."
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
@click.option("--records", is_flag=True, help="Every record, one a line.")
@format_option
def inspect(records: bool, style: str, **where: Any) -> None:
    """Show the log's files (or objects), offsets and epochs."""
    config = _config(where)
    if records:
        _print_records(config, where["cluster_id"], style)
        return
    with output.Progress("reading", 0) as progress:
        info = _inspect(config, where["cluster_id"], progress.update, None)
    output.show(style, lambda: _as_document(info), _render)


@wal.command()
@_where_options
@format_option
def verify(style: str, **where: Any) -> None:
    """Check every byte of the log, and the data directory's other files. Changes nothing; exits 7 on damage.

    Of the directory of a `tidelog up --brokers N`: of all its nodes.
    """
    from tidelog.data_check import check_all

    config = _config(where)
    with output.Progress("verifying", 0) as progress:
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


def _parts_document(report: DataReport) -> dict[str, Any]:
    return {
        "info": _as_document(report.info) if report.info is not None else None,
        "identity": report.identity,
        "controller": _as_document(report.controller) if report.controller is not None else None,
    }


def _inspect(
    config: Config,
    cluster_id: str,
    progress: Callable[[int, int], None] | None,
    on_record: Callable[[WalRecord], None] | None,
) -> WalInfo | BucketWalInfo:
    from runtime.disk import FileDisk
    from storage import wal_tool
    from tidelog.data_check import WAL_FOLDER, has_wal_on_disk, inspect_bucket_wal, nothing_there

    data_dir = Path(config.node.data_dir)
    if config.wal.kind == "s3":
        return _run(config, inspect_bucket_wal(config, cluster_id, progress, on_record))
    if not has_wal_on_disk(data_dir):
        raise nothing_there(data_dir)

    async def from_disk() -> WalInfo:
        disk = FileDisk(data_dir / WAL_FOLDER)
        try:
            return await wal_tool.inspect(disk, on_record=on_record, progress=progress)
        finally:
            await disk.close()

    return _run(config, from_disk())


def _run(config: Config, work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end. Raises `StorageFailed` when a file cannot be read."""
    try:
        return asyncio.run(work)
    except OSError as error:
        name = error.filename if error.filename is not None else config.node.data_dir
        raise StorageFailed(
            f"cannot read {name}: {error.strerror or error}", hint="check the path and its rights"
        ) from error


def _as_document(struct: Any) -> dict[str, Any]:
    import msgspec

    document = msgspec.to_builtins(struct)
    assert isinstance(document, dict)
    return document


def _render(document: dict[str, Any]) -> str:
    return _render_bucket(document) if "objects" in document else _render_files(document)


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


def _span(first: int, last: int) -> str | None:
    if first < 0:
        return None
    return str(first) if first == last else f"{first}-{last}"


def _render_reports(reports: list[DataReport], findings: list[Finding]) -> str:
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


def _worst_first(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda one: not one.is_error)


def _parts(report: DataReport) -> list[str]:
    """What was checked, in words."""
    parts = []
    info = report.info
    if info is not None:
        document = _as_document(info)
        what = "objects" if "objects" in document else "files"
        pieces = document["objects" if "objects" in document else "segments"]
        records = sum(one["records"] for one in pieces)
        offsets = f"WAL offsets {info.start_offset} to {info.end_offset}"
        parts.append(f"{records} records in {len(pieces)} {what} ({offsets})")
    if report.controller is not None:
        files = report.controller
        parts.append(f"controller entries up to {files.last_index} (snapshot up to {files.snapshot_index})")
    if report.identity is not None:
        parts.append(f"identity of broker {report.identity['broker_id']}")
    return parts


def _print_records(config: Config, cluster_id: str, style: str) -> None:
    """One line a record as it is read: a log may hold more of them than memory."""
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
    _inspect(config, cluster_id, None, on_record)
