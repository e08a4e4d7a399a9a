"""The Go programs of `tests/clients/go`, built by the Go toolchain with the modules that their go.sum pins."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.external import Program, finished
from tests.support.s3_servers import Missing

SOURCES = Path(__file__).parents[1] / "clients" / "go"


def go_program(name: str, target: Path) -> Program:
    """Build the program in the folder `name` as `target`. Raises `Missing` without a toolchain."""
    go = shutil.which("go")
    if go is None:
        raise Missing("go: no `go` on PATH: the programs of tests/clients/go need it")
    finished([go, "build", "-o", str(target), f"./{name}"], cwd=SOURCES, CGO_ENABLED="0")
    return Program([str(target)])
