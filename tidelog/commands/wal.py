"""`tidelog wal inspect|verify`: the write-ahead log of a data directory, read from disk without a broker.

It only reads, so a broker may be running on the directory meanwhile. `verify` exits 7 when a broker would refuse to
start; a torn tail is no corruption, recovery cuts it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime.errors import CorruptData, NotFound, StorageFailed
from tidelog import output
from tidelog.options import format_option

if TYPE_CHECKING:
    from storage.wal import WalRecord
    from storage.wal_tool import VerifyReport, WalInfo


@click.group()
def wal() -> None:
    """Inspect and verify the write-ahead log on disk."""


def _data_dir_option(function: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--data-dir",
        type=click.Path(path_type=Path),
        default=Path("tidelog-data"),
        show_default=True,
        metavar="DIR",
        help="The broker's data directory; the log is in DIR/wal.",
    )(function)


@wal.command()
@_data_dir_option
@click.option("--records", is_flag=True, help="Every record, one a line.")
@format_option
def inspect(data_dir: Path, records: bool, style: str) -> None:
    """Show the log's files, offsets and epochs."""
    path = _wal_path(data_dir)
    if records:
        _print_records(path, style)
        return
    with output.Progress("reading", 0) as progress:
        info = _run(path, "inspect", progress.update)
    output.show(style, lambda: _as_document(info), _render)


@wal.command()
@_data_dir_option
@format_option
def verify(data_dir: Path, style: str) -> None:
    """Check every byte of the log. Changes nothing; exits 7 if it is damaged."""
    path = _wal_path(data_dir)
    with output.Progress("verifying", 0) as progress:
        report = _run(path, "verify", progress.update)
    document = {
        "sound": report.is_sound,
        "findings": [{**_as_document(one), "error": one.is_error} for one in report.findings],
        "info": _as_document(report.info),
    }
    output.show(style, lambda: document, lambda _: _render_report(report))
    if not report.is_sound:
        errors = sum(1 for one in report.findings if one.is_error)
        raise CorruptData(
            f"the write-ahead log {path} is damaged ({errors} finding{'' if errors == 1 else 's'})",
            hint="keep a copy of the directory before anything else; see docs/operations.md",
        )


def _wal_path(data_dir: Path) -> Path:
    path = data_dir / "wal"
    if not path.is_dir():
        raise NotFound(
            f"there is no write-ahead log in {data_dir}", hint="--data-dir names what was given to `tidelog up`"
        )
    return path


def _run(path: Path, action: str, progress: Callable[[int, int], None] | None, **more: Any) -> Any:
    """Call `inspect` or `verify` of `storage.wal_tool`. Raises `StorageFailed` when the disk cannot be read."""
    from runtime.disk import FileDisk
    from storage import wal_tool

    async def run() -> Any:
        disk = FileDisk(path)
        try:
            return await getattr(wal_tool, action)(disk, progress=progress, **more)
        finally:
            await disk.close()

    try:
        return asyncio.run(run())
    except OSError as error:
        raise StorageFailed(
            f"cannot read the write-ahead log {path}: {error.strerror or error}", hint="check the path and its rights"
        ) from error


def _as_document(struct: Any) -> dict[str, Any]:
    import msgspec

    document = msgspec.to_builtins(struct)
    assert isinstance(document, dict)
    return document


def _render(document: dict[str, Any]) -> str:
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


def _render_report(report: VerifyReport) -> str:
    info: WalInfo = report.info
    records = sum(one.records for one in info.segments)
    verdict = "sound" if report.is_sound else "DAMAGED"
    text = f"{verdict}: {records} records in {len(info.segments)} files, WAL offsets {info.start_offset} to "
    text += str(info.end_offset)
    if not report.findings:
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
        for one in report.findings
    ]
    headers = ["LEVEL", "KIND", "FILE", "BYTE", "WAL-OFFSET", "WHAT"]
    return f"{text}\n\n{output.table(headers, rows, right=['BYTE', 'WAL-OFFSET'])}"


def _print_records(path: Path, style: str) -> None:
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
    _run(path, "inspect", None, on_record=on_record)
