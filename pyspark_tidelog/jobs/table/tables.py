"""Iceberg tables that know how far they are: opening and creating them, and commits that happen once.

A commit adds files and moves the state (`pyspark_tidelog.jobs.table.state`) in one transaction of the catalog, on the
condition that the table's snapshot is the one on which the state was read. After any answer but success the table is
read again: the state tells whether the commit is there, whether another job was faster, or whether it may be tried
again. pyiceberg's own retries are switched off: they would put the same files on top of another job's commit.

Entry: `open_catalog`, `JobTable`.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    NotInstalledError,
    RESTError,
    TableAlreadyExistsError,
)
from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask, Table, Transaction
from sqlalchemy.exc import OperationalError

from pyspark_tidelog.jobs.table.state import KEY, SnapshotFact, TableState, find_state
from pyspark_tidelog.jobs.table.store import through_arrow
from tidelog.runtime.errors import ConfigError, Fenced, Unavailable

if TYPE_CHECKING:
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema

logger = logging.getLogger(__name__)

CATALOG_FILE = "catalog.db"
TRIES = 8
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
_MERGE = "commit.manifest-merge.enabled"
_NO_OWN_RETRIES = {"commit.retry.num-retries": "0"}
_CREATED_WITH = {
    "format-version": "2",
    _MERGE: "true",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}
_CLIENTS = frozenset({"botocore", "google", "pyiceberg", "requests", "sqlalchemy", "thrift"})
"""Packages whose exceptions a catalog or a store of files raises."""
_PASSWORD = re.compile(r"(://[^/@:]*:)[^/@]*@")
_MAYBE = (CommitFailedException, CommitStateUnknownException, RESTError, OperationalError, OSError)
"""After these a commit has happened, or has not."""
Stage = Callable[[Transaction, dict[str, str]], None]
"""Adds changes to a transaction; the summary is for its last snapshot."""


@dataclass(frozen=True)
class CatalogOptions:
    """Where tables are."""

    warehouse: str
    """A path, or a URL such as s3://bucket/prefix."""
    uri: str = ""
    """Of the catalog; empty: an SQLite file in the warehouse, which is a path then."""
    properties: Mapping[str, str] | None = field(default=None, repr=False)
    """Further properties of pyiceberg's catalog and of the store of files."""
    name: str = "tidelog"


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turn what a catalog or a store of files raises into `Unavailable`: there are many kinds, without a remedy.

    Raises `ConfigError` if a package is missing, such as a database's driver.
    """
    try:
        yield
    except (ImportError, NotInstalledError) as error:
        raise ConfigError(
            f"the catalog, or the store of its files, needs a package that is not installed: {error}",
            hint="install it where `tidelog` is; see --catalog-uri and --catalog-property",
        ) from error
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] not in _CLIENTS:
            raise
        raise Unavailable(
            f"the catalog, or the store of its files, fails: {str(error) or type(error).__name__}",
            hint="see --warehouse, --catalog-uri and --catalog-property; the job may be run again",
        ) from error


def catalog_file(options: CatalogOptions) -> Path | None:
    """Return the file of the embedded catalog; None where there is another catalog. Raises `ConfigError`."""
    if options.uri or (options.properties or {}).get("type"):
        return None
    if "://" in options.warehouse and not options.warehouse.startswith("file://"):
        raise ConfigError(
            f"warehouse {options.warehouse} is no path on this machine, where the embedded catalog would be",
            hint="--catalog-uri: a REST catalog (https://…) or a database (sqlite:////path/catalog.db, postgresql://…)",
        )
    return Path(options.warehouse.removeprefix("file://")).absolute() / CATALOG_FILE


def open_catalog(options: CatalogOptions) -> Catalog:
    """Open the catalog; the embedded one is created with its folder. Raises `ConfigError`, `Unavailable`."""
    properties = {"warehouse": options.warehouse, **(options.properties or {})}
    file = catalog_file(options)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        properties |= {"type": "sql", "uri": f"sqlite:///{file}", "warehouse": f"file://{file.parent}"}
    elif options.uri:
        properties["uri"] = options.uri
    called = _PASSWORD.sub(r"\1***@", properties.get("uri", "")) or f"of type {properties.get('type')}"
    for attempt in range(2):
        try:
            return load_catalog(options.name, **properties)
        except OperationalError as error:  # two processes create its tables at once
            if attempt:
                raise Unavailable(f"catalog {called} does not open: {error}") from error
        except (ImportError, NotInstalledError):
            raise
        except Exception as error:
            raise Unavailable(
                f"catalog {called} does not open: {error}", hint="see --catalog-uri, --catalog-property"
            ) from error
    raise AssertionError("not reached")


class JobTable:
    """A table that jobs write to, with the state that it had when it was read last."""

    def __init__(self, catalog: Catalog, identifier: str, table: Table) -> None:
        self._catalog = catalog
        self.identifier = identifier
        self.table = table
        self.state = _state_of(identifier, table)

    @classmethod
    def find(cls, catalog: Catalog, identifier: str) -> JobTable | None:
        """Return a table; None if there is none."""
        try:
            return cls(catalog, identifier, through_arrow(catalog.load_table(identifier)))
        except NoSuchTableError:
            return None

    @classmethod
    def create(
        cls,
        catalog: Catalog,
        identifier: str,
        schema: Schema,
        spec: PartitionSpec,
        properties: Mapping[str, str] | None = None,
    ) -> JobTable:
        """Create a table, and its namespace; one that another job has created meanwhile is opened."""
        with contextlib.suppress(NamespaceAlreadyExistsError):  # by another job, between look and creation
            catalog.create_namespace_if_not_exists(identifier.rpartition(".")[0])
        try:
            created_with = {**_CREATED_WITH, **(properties or {})}
            table = catalog.create_table(identifier, schema, partition_spec=spec, properties=created_with)
        except TableAlreadyExistsError:
            table = catalog.load_table(identifier)
        return cls(catalog, identifier, through_arrow(table))

    def reload(self) -> None:
        """Read the table and its state again. Raises `Fenced` if it is another table now."""
        table = through_arrow(self._catalog.load_table(self.identifier))
        if table.metadata.table_uuid != self.table.metadata.table_uuid:
            raise Fenced(
                f"table {self.identifier} was dropped and created again by someone else", hint="run the job again"
            )
        self.table = table
        self.state = _state_of(self.identifier, table)

    def change(self, stage: Callable[[Transaction], None]) -> None:
        """Change something that is no data. The caller looks at the result: another job may have been faster."""
        transaction = _transaction(self.table)
        stage(transaction)
        try:
            transaction.commit_transaction()
        except CommitFailedException as error:
            logger.info("table %s was changed by another: %s", self.identifier, error)
        self.reload()

    def advance(self, wanted: TableState, stage: Stage, *, is_repeatable: bool) -> bool:
        """Commit what `stage` adds, together with a state that follows the present one.

        Returns whether it was done; False if someone who moves no state has changed the table, and the work is not
        `is_repeatable` on it. Raises `Fenced` when another job has moved the state, `Unavailable`.
        """
        before, spec = self.state, self.table.metadata.default_spec_id
        for attempt in range(TRIES):
            problem = self._try(wanted, stage)
            if problem is None:
                return True
            self.reload()
            if self.state is not None and self.state.commit == wanted.commit:
                return True
            if self.state != before:
                raise Fenced(
                    f"another job has written to table {self.identifier} meanwhile"
                    f" (commit {self.state.commit if self.state else 'none'}, and not {wanted.commit})",
                    hint="one job to a table is enough; what this one has read is not added",
                )
            if not is_repeatable or self.table.metadata.default_spec_id != spec:
                return False
            pause_s = min(FIRST_PAUSE_S * 2**attempt, MAX_PAUSE_S)
            time.sleep(pause_s * random.uniform(0.5, 1.0))
        raise Unavailable(f"table {self.identifier} could not be committed to in {TRIES} tries: {problem}")

    def _try(self, wanted: TableState, stage: Stage) -> Exception | None:
        """Commit once; return the error after which it is not known whether that happened."""
        transaction = _transaction(self.table)
        text = wanted.to_json(self.table.metadata.next_sequence_number())
        try:
            stage(transaction, {KEY: text})
            transaction.set_properties({KEY: text})
            transaction.commit_transaction()
        except _MAYBE as error:
            return error
        self.reload()
        return None

    def replace(self, old: Mapping[str, frozenset[str]], new: set[str], stage: Stage) -> bool:
        """Commit files `new`, which `stage` adds, in place of `old`, with the state as it is.

        `old` are data files with the delete files that were applied to them. Returns False, and does nothing, if the
        table does not have them so any more. Raises `Unavailable`.
        """
        for attempt in range(TRIES):
            present = {task.file.file_path: deletes_of(task) for task in self.table.scan().plan_files()}
            if new and new <= present.keys():
                return True  # the answer to an earlier try was lost
            if any(present.get(path) != deletes for path, deletes in old.items()):
                return False
            sequence = self.table.metadata.next_sequence_number()
            summary = {KEY: self.state.to_json(sequence)} if self.state is not None else {}
            transaction = _transaction(self.table)
            try:
                stage(transaction, summary)
                transaction.commit_transaction()
                self.reload()
                return True
            except _MAYBE as error:
                problem = error
            self.reload()
            time.sleep(min(FIRST_PAUSE_S * 2**attempt, MAX_PAUSE_S) * random.uniform(0.5, 1.0))
        raise Unavailable(f"table {self.identifier} could not be committed to in {TRIES} tries: {problem}")


def deletes_of(task: FileScanTask) -> frozenset[str]:
    """Return the paths of the delete files that apply to a data file."""
    return frozenset(each.file_path for each in task.delete_files)


def append(transaction: Transaction, summary: dict[str, str], *, files: Sequence[DataFile]) -> None:
    """Stage a snapshot with further data files; also one without any, for its summary."""
    update = transaction.update_snapshot(snapshot_properties=summary)
    merges = transaction.table_metadata.properties.get(_MERGE, "").lower() == "true"
    with update.merge_append() if merges else update.fast_append() as producer:
        for each in files:
            producer.append_data_file(each)


def swap(
    transaction: Transaction, summary: dict[str, str], *, old: Sequence[DataFile], new: Sequence[DataFile]
) -> None:
    """Stage a snapshot that has data files in place of others."""
    with transaction.update_snapshot(snapshot_properties=summary).overwrite() as producer:
        for each in old:
            producer.delete_data_file(each)
        for each in new:
            producer.append_data_file(each)


def _transaction(table: Table) -> Transaction:
    """Begin a transaction that is tried once, whatever the table's properties say. They are not changed by it."""
    properties = {**table.metadata.properties, **_NO_OWN_RETRIES}
    table.metadata = table.metadata.model_copy(update={"properties": properties})
    return table.transaction()


def _state_of(identifier: str, table: Table) -> TableState | None:
    metadata = table.metadata
    facts = {}
    for each in metadata.snapshots:
        summary = each.summary.additional_properties if each.summary is not None else {}
        parent, sequence = each.parent_snapshot_id, each.sequence_number or 0
        facts[each.snapshot_id] = SnapshotFact(each.snapshot_id, parent, sequence, summary.get(KEY))
    return find_state(metadata.current_snapshot_id, facts, metadata.properties.get(KEY), identifier)
