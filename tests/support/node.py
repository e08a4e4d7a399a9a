"""The programs of `tests/clients/js`, run by Node with the clients that a fixture provides."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.external import Program
from tests.support.s3_servers import Missing

SOURCES = Path(__file__).parents[1] / "clients" / "js"


def node_program(name: str, clients: Path, work: Path) -> Program:
    """The program `name`.mjs, copied to an empty folder where Node finds its modules. Raises `Missing` without Node."""
    node = shutil.which("node")
    if node is None:
        raise Missing("node: no `node` on PATH: the programs of tests/clients/js need it")
    for source in SOURCES.glob("*.mjs"):
        shutil.copy(source, work)
    (work / "node_modules").symlink_to(clients / "node_modules")
    return Program([node, str(work / f"{name}.mjs")])
