"""The Go program of `tests/clients/go`, built by the Go toolchain with the modules that its go.sum pins."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.external import Program, finished
from tests.support.s3_servers import Missing

SOURCES = Path(__file__).parents[1] / "clients" / "go"


def go_program(target: Path) -> Program:
    """Build it as `target`. Raises `Missing` without a toolchain."""
    go = shutil.which("go")
    if go is None:
        raise Missing("go: no `go` on PATH: the program of tests/clients/go needs it")
    finished([go, "build", "-o", str(target), "."], cwd=SOURCES, CGO_ENABLED="0")
    return Program([str(target)])
