"""The Iceberg tables of a warehouse with a catalog in SQLite, read by DuckDB: it shares no code with what wrote them.

Entry: `Warehouse`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

Row = dict[str, Any]


class Warehouse:
    """A folder of tables."""

    def __init__(self, path: Path) -> None:
        self.warehouse = path

    def table(self, name: str) -> Table:
        """A table as it is now. Raises pyiceberg's `NoSuchTableError`."""
        catalog = load_catalog("tidelog", type="sql", uri=f"sqlite:///{self.warehouse / 'catalog.db'}")
        try:
            return catalog.load_table(name)
        finally:
            catalog.close()

    def query(self, name: str, sql: str) -> list[Row]:
        """The rows of a query with `{rows}` in the place of the table's; none while the table has no file."""
        tasks = list(self.table(name).scan().plan_files())
        assert [task.delete_files for task in tasks if task.delete_files] == []
        if not tasks:
            return []
        files = [task.file.file_path.removeprefix("file://") for task in tasks]
        with duckdb.connect() as connection:
            connection.execute("set TimeZone = 'UTC'")
            found = connection.execute(sql.format(rows="read_parquet($1, union_by_name = true)"), [files])
            names = [each[0] for each in found.description or []]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def rows(self, name: str) -> list[Row]:
        """The rows of a table by partition and offset."""
        return self.query(name, "select * from {rows} order by _partition, _offset")

    def strays(self, *names: str) -> list[Path]:
        """Parquet files in the warehouse that no snapshot of these tables has."""
        known = set()
        for name in names:
            table = self.table(name)
            for snapshot in table.snapshots():
                for manifest in snapshot.manifests(table.io):
                    known |= {each.data_file.file_path for each in manifest.fetch_manifest_entry(table.io)}
        return [each for each in self.warehouse.rglob("*.parquet") if f"file://{each}" not in known]

    def markers(self) -> list[str]:
        """The markers of attempts to commit."""
        return [each.name for each in self.warehouse.rglob("tidelog/attempts/*")]
