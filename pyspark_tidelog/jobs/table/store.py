"""The store of a table's files: always through Arrow, with the properties that the catalog gives.

A REST catalog may name another implementation (`py-io-impl`), whose package is not installed. Executors and the
listing of directories need Arrow's file systems anyway; so all accesses have the same settings and rights. What Arrow
cannot do is to have the catalog sign requests: credentials come from the catalog, the options, or the environment.

Entry: `through_arrow`, `refresh`.
"""

from __future__ import annotations

from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table


def through_arrow(table: Table) -> Table:
    """Have the files of a table, as it was just loaded, read and written through Arrow; return the table."""
    if type(table.io) is not PyArrowFileIO:
        table.io = PyArrowFileIO(table.io.properties)
    return table


def refresh(table: Table) -> None:
    """Read a table's metadata again. Raises what the catalog raises."""
    through_arrow(table.refresh())
