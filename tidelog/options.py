"""Command-line options that several commands share, and how they become a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tidelog.config import Loaded, load, parse_set

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_BOOTSTRAP = "127.0.0.1:9092"


def config_options(function: F) -> F:
    """`--config FILE` and `--set section.key=value`."""
    function = click.option(
        "--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting; may repeat."
    )(function)
    return click.option(
        "--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="TOML configuration file."
    )(function)


def bootstrap_option(function: F) -> F:
    """`--bootstrap HOST:PORT`, the one address every client-side command needs."""
    return click.option(
        "--bootstrap",
        default=DEFAULT_BOOTSTRAP,
        show_default=True,
        envvar="TIDELOG_BOOTSTRAP",
        metavar="HOST:PORT",
        help="Any broker of the cluster.",
    )(function)


def format_option(function: F) -> F:
    """`--format table|json`."""
    return click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)(
        function
    )


def load_config(config_file: Path | None, assignments: tuple[str, ...], **flags: Any) -> Loaded:
    """Merge file, environment and flags; `flags` are `section__key=value`, None meaning not given."""
    given = [(key.replace("__", ".", 1), value) for key, value in flags.items() if value is not None]
    return load(config_file, os.environ, [*(parse_set(text) for text in assignments), *given])
