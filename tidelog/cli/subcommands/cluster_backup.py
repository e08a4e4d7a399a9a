"""`tidelog cluster backup` and `restore`: a cluster copied from bucket to bucket, and back.

Neither needs any process; `backup` may run beside a living cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tidelog.cli import output
from tidelog.cli.options import PRIVATE_UMASK, config_options, format_option, load_config
from tidelog.cli.subcommands.cluster_rebuild import render_report, require_bucket, say_rebuilt
from tidelog.cli.subcommands.up import check_bucket
from tidelog.runtime.errors import ConfigError, InvalidInput, NotFound
from tidelog.runtime.progress_bar import ProgressBar

if TYPE_CHECKING:
    from tidelog.config import Loaded
    from tidelog.process.backup import BackupReport
    from tidelog.process.rebuild import RebuildReport
    from tidelog.storage.bucket.store import ObjectStore
    from tidelog.storage.settings import S3Settings


@click.command()
@click.option("--data-dir", type=click.Path(path_type=Path), metavar="DIR", help="Of the cluster, for its bucket.")
@click.option("--s3-endpoint", metavar="URL", help="The cluster's S3 server; without it the embedded store.")
@click.option("--bucket", metavar="NAME", help="The cluster's bucket on it.")
@click.option("--cluster-id", default="", metavar="ID", help="If the bucket holds several clusters.")
@click.option("--to", "directory", type=click.Path(path_type=Path), metavar="DIR", help="Where the backup is.")
@click.option("--to-s3-endpoint", metavar="URL", help="Instead of --to: an S3 server.")
@click.option("--to-bucket", metavar="NAME", help="The bucket on it.")
@click.option("--keep", type=click.IntRange(min=1), default=3, show_default=True, help="Backups kept there.")
@format_option
@config_options
def backup(
    data_dir: Path | None,
    s3_endpoint: str | None,
    bucket: str | None,
    cluster_id: str,
    directory: Path | None,
    to_s3_endpoint: str | None,
    to_bucket: str | None,
    keep: int,
    style: str,
    config_file: Path | None,
    assignments: tuple[str, ...],
) -> None:
    """Copy what is uploaded to another place, beside the running cluster.

    A later backup to the same place copies only what is new. Records that are not uploaded yet are not in it.
    """
    loaded = _load(config_file, assignments, data_dir, s3_endpoint, bucket)
    require_bucket(loaded)
    os.umask(PRIVATE_UMASK)
    other = _Other("--to", directory, to_s3_endpoint, to_bucket)
    other.refuse_data_directory()
    report = asyncio.run(_backup(loaded, cluster_id, other, keep))
    output.emit(json.dumps(msgspec.to_builtins(report), indent=2) if style == "json" else _render(report))


@click.command()
@click.option("--from", "directory", type=click.Path(path_type=Path), metavar="DIR", help="Where the backup is.")
@click.option("--from-s3-endpoint", metavar="URL", help="Instead of --from: an S3 server.")
@click.option("--from-bucket", metavar="NAME", help="The bucket on it.")
@click.option("--cluster-id", default="", metavar="ID", help="If the backup holds several clusters.")
@click.option("--data-dir", type=click.Path(path_type=Path), metavar="DIR", help="The new data directory.")
@click.option("--brokers", type=click.IntRange(min=1), default=1, show_default=True, help="Number of brokers.")
@click.option("--s3-endpoint", metavar="URL", help="The S3 server to restore to; else the embedded store in DIR.")
@click.option("--bucket", metavar="NAME", help="The bucket on it.")
@click.option("--dry-run", is_flag=True, help="Only say what the backup holds, and whether it may go there.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@format_option
@config_options
def restore(
    directory: Path | None,
    from_s3_endpoint: str | None,
    from_bucket: str | None,
    cluster_id: str,
    data_dir: Path | None,
    brokers: int,
    s3_endpoint: str | None,
    bucket: str | None,
    dry_run: bool,
    yes: bool,
    style: str,
    config_file: Path | None,
    assignments: tuple[str, ...],
) -> None:
    """Copy a backup to a bucket, and make a data directory for it; then start it with `tidelog up`.

    The bucket must not hold the cluster already. An interrupted restore goes on when it is started again.
    """
    loaded = _load(config_file, assignments, data_dir, s3_endpoint, bucket)
    os.umask(PRIVATE_UMASK)
    other = _Other("--from", directory, from_s3_endpoint, from_bucket)
    report = asyncio.run(_restore(loaded, brokers, cluster_id, other, style, dry_run=dry_run, yes=yes))
    if not dry_run:
        say_rebuilt(loaded, report, brokers)


class _Other:
    """The place of a backup, as the flags tell it."""

    def __init__(self, flag: str, directory: Path | None, endpoint: str | None, bucket: str | None) -> None:
        if (directory is None) == (bucket is None) or (endpoint is not None and bucket is None):
            raise ConfigError(
                f"give {flag} DIR, or {flag}-bucket NAME with {flag}-s3-endpoint URL",
                hint="without an endpoint the bucket is one of AWS",
            )
        self.flag = flag
        self.directory = directory
        self._endpoint = endpoint
        self._bucket = bucket

    def require(self) -> None:
        """Refuse a directory that does not exist."""
        if self.directory is not None and not self.directory.is_dir():
            raise NotFound(f"there is no directory {self.directory}", hint=f"{self.flag} names it")

    def refuse_data_directory(self) -> None:
        """Refuse a directory of a cluster, or one in it: the backup would be lost with it."""
        from tidelog.process.cluster_layout import LAYOUT_FILE
        from tidelog.process.data_dir import IDENTITY_FILE

        if self.directory is None:
            return
        place = self.directory.resolve()
        for above in (place, *place.parents):
            for name in (LAYOUT_FILE, IDENTITY_FILE):
                if (above / name).exists():
                    raise InvalidInput(
                        f"{self.directory} is in the data directory of a cluster: {above / name} exists",
                        hint=f"a backup there is lost with it; give {self.flag} another place",
                    )

    @contextlib.contextmanager
    def names_bucket(self) -> Iterator[None]:
        """Tell of a bucket that does not exist as what the flags name: nobody makes the bucket of a backup here."""
        from tidelog.storage.bucket.common import BucketMissing

        try:
            yield
        except BucketMissing as error:
            hint = f"check {self.flag}-bucket and {self.flag}-s3-endpoint"
            raise NotFound(error.message, hint=hint) from None

    def open(self, own: S3Settings) -> ObjectStore:
        """Open it; the other settings of its S3 server are those of the cluster's own (`[s3]`)."""
        from tidelog.runtime.clock import SystemClock
        from tidelog.storage.bucket.local import LocalObjectStore
        from tidelog.storage.bucket.open import open_store

        if self.directory is not None:
            return LocalObjectStore(self.directory, is_place=True)
        changes = {"endpoint": self._endpoint or "", "bucket": self._bucket, "create_bucket": True}
        return open_store(msgspec.structs.replace(own, **changes), Path(), SystemClock(), random.Random())


def _load(
    config_file: Path | None,
    assignments: tuple[str, ...],
    data_dir: Path | None,
    s3_endpoint: str | None,
    bucket: str | None,
) -> Loaded:
    loaded = load_config(
        config_file,
        assignments,
        node__data_dir=str(data_dir) if data_dir is not None else None,
        s3__endpoint=s3_endpoint,
        s3__bucket=bucket,
    )
    check_bucket(loaded)
    return loaded


async def _backup(loaded: Loaded, cluster_id: str, other: _Other, keep: int) -> BackupReport:
    from tidelog.controller.rebuild.source import only_cluster
    from tidelog.process.backup import back_up
    from tidelog.runtime.clock import SystemClock
    from tidelog.storage.bucket.open import open_store
    from tidelog.storage.bucket.purpose import Purpose

    config, clock = loaded.config, SystemClock()
    store = open_store(config.s3, Path(config.node.data_dir), clock, random.Random())
    try:
        source = store.for_purpose(Purpose.METADATA)
        chosen = cluster_id or await only_cluster(source)
        target = other.open(config.s3)
        try:
            await target.probe()
            with ProgressBar("copying") as progress:
                view = target.for_purpose(Purpose.METADATA)
                return await back_up(source, view, chosen, clock, kept=keep, progress=progress.update)
        finally:
            await target.close()
    finally:
        await store.close()


async def _restore(
    loaded: Loaded, brokers: int, cluster_id: str, other: _Other, style: str, *, dry_run: bool, yes: bool
) -> RebuildReport:
    from tidelog.process import backup as copies
    from tidelog.process.rebuild import carry_out, check_directory, is_unfinished, prepare
    from tidelog.runtime.clock import SystemClock
    from tidelog.storage.bucket.common import BucketMissing
    from tidelog.storage.bucket.open import open_store
    from tidelog.storage.bucket.purpose import Purpose

    config, clock = loaded.config, SystemClock()
    check_directory(config)
    had_claimed = is_unfinished(Path(config.node.data_dir))
    other.require()
    backup_store = other.open(config.s3)
    try:
        source = backup_store.for_purpose(Purpose.METADATA)
        with ProgressBar("reading", unit="objects") as progress, other.names_bucket():
            planned = await prepare(config, source, brokers, cluster_id, progress.update, of_backup=True)
        report = msgspec.structs.replace(planned.report, living_owner="")  # a backup has none
        document = msgspec.to_builtins(report)
        output.emit(json.dumps(document, indent=2) if style == "json" else render_report(document))
        if dry_run and config.s3.is_embedded:
            return report  # nothing is there yet: `check_directory`
        if not (dry_run or yes):
            click.confirm("Restore the cluster so?", abort=True, err=True)
        store = open_store(config.s3, Path(config.node.data_dir), clock, random.Random())
        try:
            target = store.for_purpose(Purpose.METADATA)
            if dry_run:
                with contextlib.suppress(BucketMissing):  # it would be made
                    await copies.check_target(source, target, report.cluster_id, had_claimed=had_claimed)
                return report
            await store.probe()
            with ProgressBar("copying") as progress:
                await copies.restore(source, target, report.cluster_id, progress.update, had_claimed=had_claimed)
            with ProgressBar("reading", unit="objects") as progress:
                cluster, told = report.cluster_id, progress.update
                prepared = await prepare(config, target, brokers, cluster, told, of_backup=True)
            await carry_out(loaded, target, prepared, take_over=True)  # nobody else has written there
            return prepared.report
        finally:
            await store.close()
    finally:
        await backup_store.close()


def _render(report: BackupReport) -> str:
    about: list[tuple[str, Any]] = [
        ("cluster", report.cluster_id),
        ("metadata of", output.moment(report.state_written_ms)),
        ("objects", f"{report.objects}, {output.size(report.size_bytes)}"),
        ("copied", f"{report.copied}, {output.size(report.copied_bytes)}"),
        ("removed", f"{report.removed} of older backups"),
    ]
    return output.pairs(about)
