"""A REST catalog of Iceberg tables that no part of this project wrote: Project Nessie, with its files on an S3 server.

Entry: `rest_catalog`, `RestCatalog`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
from pyarrow.fs import S3FileSystem
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from pyspark_tidelog.jobs.table.store import through_arrow
from tests.support.cli import until
from tests.support.s3_servers import S3Server, new_bucket

START_S = 120.0
WAREHOUSE = "lake"
_LISTENING = re.compile(r"Listening on: (http://127\.0\.0\.1:\d+)")
_SETTINGS = """\
quarkus.http.host=127.0.0.1
quarkus.http.port=0
quarkus.management.host=127.0.0.1
quarkus.management.port=0
quarkus.otel.sdk.disabled=true
nessie.version.store.type=IN_MEMORY
nessie.catalog.default-warehouse={warehouse}
nessie.catalog.warehouses.{warehouse}.location=s3://{bucket}/warehouse
nessie.catalog.service.s3.default-options.endpoint={endpoint}
nessie.catalog.service.s3.default-options.region=us-east-1
nessie.catalog.service.s3.default-options.path-style-access=true
nessie.catalog.service.s3.default-options.request-signing-enabled=false
nessie.catalog.service.s3.default-options.access-key=urn:nessie-secret:quarkus:tests.key
tests.key.name={key}
tests.key.secret={secret}
"""


@dataclass(frozen=True)
class RestCatalog:
    """A catalog that runs."""

    uri: str
    s3: S3Server

    @property
    def properties(self) -> dict[str, str]:
        """What a client needs beside the address, for the files."""
        return {
            "s3.endpoint": self.s3.endpoint,
            "s3.access-key-id": self.s3.access_key_id,
            "s3.secret-access-key": self.s3.secret_access_key,
        }

    def arguments(self) -> list[str]:
        """Return the options of `tidelog spark table`."""
        found = ["--warehouse", WAREHOUSE, "--catalog-uri", self.uri]
        for name, value in self.properties.items():
            found += ["--catalog-property", f"{name}={value}"]
        return found

    def table(self, name: str) -> Table:
        """A table as it is now. Raises pyiceberg's `NoSuchTableError`."""
        catalog = load_catalog("tests", type="rest", uri=self.uri, warehouse=WAREHOUSE, **self.properties)
        return through_arrow(catalog.load_table(name))

    def rows(self, name: str, folder: Path) -> list[dict[str, Any]]:
        """The rows of a table by partition and offset, as DuckDB reads its files, which are copied to a folder."""
        table = self.table(name)
        files = []
        for number, task in enumerate(table.scan().plan_files()):
            assert not task.delete_files
            with table.io.new_input(task.file.file_path).open() as stream:
                files.append(str(folder / f"{number}.parquet"))
                Path(files[-1]).write_bytes(stream.read())
        if not files:
            return []
        with duckdb.connect() as connection:
            connection.execute("set TimeZone = 'UTC'")
            found = connection.execute(
                "select * from read_parquet($1, union_by_name = true) order by _partition, _offset", [files]
            )
            names = [each[0] for each in found.description or []]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


@contextmanager
def rest_catalog(nessie: Path, folder: Path, s3: S3Server) -> Iterator[RestCatalog]:
    """Run a catalog, with a new bucket, for the time of the `with` statement. It forgets everything at its end."""
    folder.mkdir()
    bucket = new_bucket()
    S3FileSystem(
        endpoint_override=s3.endpoint,
        access_key=s3.access_key_id,
        secret_key=s3.secret_access_key,
        allow_bucket_creation=True,
    ).create_dir(bucket)
    log = folder / "nessie.log"
    settings = folder / "nessie.properties"
    settings.write_text(
        _SETTINGS.format(
            warehouse=WAREHOUSE,
            bucket=bucket,
            endpoint=s3.endpoint,
            key=s3.access_key_id,
            secret=s3.secret_access_key,
        )
    )
    command = [str(nessie / "java"), f"-Dquarkus.config.locations={settings}", "-jar", str(nessie / "nessie.jar")]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:

        def address() -> str:
            assert process.poll() is None, log.read_text()[-3_000:]
            found = _LISTENING.search(log.read_text())
            return found[1] if found else ""

        until(lambda: bool(address()), START_S)
        yield RestCatalog(f"{address()}/iceberg", s3)
    finally:
        process.kill()
        process.wait(30)
