"""The compose files of the repository: what they say, and their nodes as processes.

There may be no Docker here. So the nodes are started as processes, exactly as written but for what a container would
bring: host names, ports and directories.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.cluster_process import tidelog_json
from tests.support.tidelog_process import READY_PREFIX
from tidelog.cli.subcommands.serve import serve
from tidelog.config import Config, load, parse_set

Document = dict[str, Any]


def compose(path: Path) -> Document:
    """The file, with the variables that are not set: their defaults, or their own names where they must be set."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"\$\{(\w+):\?[^}]*\}", r"\1", re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
    found: Document = yaml.safe_load(text)
    return found


def flags(service: Document) -> list[str]:
    """The `--set` values of a node, its command line parsed as the CLI does."""
    name, *arguments = service["command"]
    assert name == "serve"
    context = serve.make_context("serve", arguments)
    assert context.params["config_file"] is None
    return list(context.params["assignments"])


def configuration(service: Document) -> Config:
    """What the node of this service would run with. Raises `ConfigError` for a key or value that it would refuse."""
    return load(None, service["environment"], [parse_set(text) for text in flags(service)]).config


@contextmanager
def node(service: Document, changes: dict[str, str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The node as a process; `changes` are made to every text. What it prints goes to `output`."""

    def changed(text: str) -> str:
        for old, new in changes.items():
            text = text.replace(old, new)
        return text

    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TIDELOG_", "AWS_"))}
    environment |= {name: changed(value) for name, value in service["environment"].items()}
    command = [sys.executable, "-m", "tidelog", *map(changed, service["command"])]
    with output.open("wb") as file, subprocess.Popen(command, env=environment, stdout=file) as process:
        try:
            yield process
        finally:
            process.kill()


def bootstrap(output: Path) -> str:
    """Where the node says that it listens; empty: it does not yet."""
    _, found, address = output.read_text().partition(READY_PREFIX)
    return address.strip() if found else ""


def healthy(bootstrap: str) -> Any:
    status = tidelog_json(bootstrap, "status", ok=(0, 5, 10))
    return status if status and len(status["nodes"]) == 3 and not status["problems"] else None
