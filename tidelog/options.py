"""Command-line options that several commands share, and how they become a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click

from runtime.errors import ConfigError
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


def watch_option(function: F) -> F:
    """`--watch [SECONDS]`, for what changes while one looks."""
    return click.option(
        "--watch",
        "watch_s",
        type=click.FloatRange(min=0.1),
        is_flag=False,
        flag_value=2.0,
        metavar="[SECONDS]",
        help="Show it again every so many seconds (2 if not said) until Ctrl-C. Give it after the names.",
    )(function)


def parse_pairs(flag: str, texts: tuple[str, ...]) -> list[tuple[str, str]]:
    """The `key=value` arguments of a flag that may repeat. Raises `ConfigError`."""
    pairs = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{flag} takes KEY=VALUE, not {text!r}", hint=f"for example {flag} key=value")
        pairs.append((key.strip(), value))
    return pairs


class TimestampType(click.ParamType):  # type: ignore[type-arg]  # generic only from click 8.3 on
    """A point in time as milliseconds since the epoch: epoch milliseconds, ISO 8601, or `-10m` (s, m, h, d ago)."""

    name = "time"
    _UNITS: ClassVar[dict[str, int]] = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse `value`; an ISO time without a zone is local time."""
        if isinstance(value, int):
            return value
        text = str(value).strip()
        if text.isascii() and text.isdigit():
            return int(text)
        if text[:1] == "-" and text[-1:] in self._UNITS and text[1:-1].isdigit():
            return int(datetime.now().timestamp() * 1000) - int(text[1:-1]) * self._UNITS[text[-1]]
        try:
            return int(datetime.fromisoformat(text).timestamp() * 1000)
        except (ValueError, OverflowError):
            self.fail(f"{text!r} is no time: take 2026-07-30T12:00:00Z, epoch milliseconds, or -10m", param, ctx)


class DurationType(click.ParamType):  # type: ignore[type-arg]  # generic only from click 8.3 on
    """A length of time as milliseconds: `90s`, `10m`, `2h`, `7d`, or `0`."""

    name = "duration"
    _UNITS: ClassVar[dict[str, int]] = TimestampType._UNITS

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse `value`."""
        if isinstance(value, int):
            return value
        text = str(value).strip()
        if text == "0":
            return 0
        number = text[:-1]
        if text[-1:] not in self._UNITS or not (number.isascii() and number.isdigit()) or len(number) > 9:
            self.fail(f"{text!r} is no length of time: take 90s, 10m, 2h or 7d", param, ctx)
        return int(number) * self._UNITS[text[-1]]


def load_config(config_file: Path | None, assignments: tuple[str, ...], **flags: Any) -> Loaded:
    """Merge file, environment and flags; `flags` are `section__key=value`, None meaning not given."""
    given = [(key.replace("__", ".", 1), value) for key, value in flags.items() if value is not None]
    return load(config_file, os.environ, [*(parse_set(text) for text in assignments), *given])
