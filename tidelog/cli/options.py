"""Command-line options shared by several commands, and their conversion to a configuration."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click

from tidelog.config import Loaded, known_keys, load, parse_set
from tidelog.runtime.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

PRIVATE_UMASK = 0o077
"""The umask of processes that keep data: nobody else reads write-ahead logs, objects, metadata or secrets."""
DEFAULT_BOOTSTRAP = "127.0.0.1:9092"
BOOTSTRAP_ENV = "TIDELOG_BOOTSTRAP"


def _settings(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The settings that begin with `incomplete`, with the sign that a value follows."""
    return [f"{key}=" for key in known_keys() if key.startswith(incomplete)]


def config_options(function: F) -> F:
    """`--config FILE` and `--set section.key=value`."""
    function = click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="Override one setting; may repeat.",
        shell_complete=_settings,
    )(function)
    return click.option(
        "--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="TOML configuration file."
    )(function)


def bootstrap_option(function: F) -> F:
    """`--bootstrap HOST:PORT`, the address for every client-side command."""
    return click.option(
        "--bootstrap",
        default=DEFAULT_BOOTSTRAP,
        show_default=True,
        envvar=BOOTSTRAP_ENV,
        metavar="HOST:PORT",
        help="Any broker of the cluster.",
    )(function)


SECRET_FILE_ENV = "TIDELOG_CONTROLLER__SECRET_FILE"
"""The variable of the setting `controller.secret_file`."""
_SECRET_FILE = "tidelog.secret_file"


def admin_options(function: F) -> F:
    """`--bootstrap` and `--secret-file`, for commands that change something by the admin HTTP."""
    return bootstrap_option(secret_file_option(function))


def secret_file_option(function: F) -> F:
    """`--secret-file`, whose value `given_secret_file` returns."""

    def keep(context: click.Context, _parameter: click.Parameter, file: Path | None) -> None:
        context.meta[_SECRET_FILE] = file

    return click.option(
        "--secret-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        envvar=SECRET_FILE_ENV,
        callback=keep,
        expose_value=False,
        help="The cluster's secret [default: the file that a broker on this machine names].",
    )(function)


def given_secret_file() -> Path | None:
    """Return the file of `--secret-file` of the running command, else of the environment, else None."""
    context = click.get_current_context(silent=True)
    if context is not None and _SECRET_FILE in context.meta:
        given: Path | None = context.meta[_SECRET_FILE]
        return given
    told = os.environ.get(SECRET_FILE_ENV)
    return Path(told) if told else None


def price_option(table: str = "as of `tidelog cost`") -> Callable[[F], F]:
    """`--prices FILE`, for commands that price what is stored."""
    return click.option(
        "--prices",
        "price_file",
        type=click.Path(path_type=Path),
        envvar="TIDELOG_PRICES",
        metavar="FILE",
        help=f"Price table, {table}.",
    )


def format_option(function: F) -> F:
    """`--format table|json`."""
    return click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)(
        function
    )


def watch_option(function: F) -> F:
    """`--watch [SECONDS]`, for changing output."""
    return click.option(
        "--watch",
        "watch_s",
        type=click.FloatRange(min=0.1),
        is_flag=False,
        flag_value=2.0,
        metavar="[SECONDS]",
        help="Repeat every SECONDS (default 2) until Ctrl-C. Place it after the names.",
    )(function)


def parse_pairs(flag: str, texts: tuple[str, ...]) -> list[tuple[str, str]]:
    """Parse the `key=value` arguments of a repeatable flag. Raises `ConfigError`."""
    pairs = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{flag} takes KEY=VALUE, not {text!r}", hint=f"for example {flag} key=value")
        pairs.append((key.strip(), value))
    return pairs


MAX_DIGITS = 18
"""Of a time or its distance from now: such a number fits into the 64 bits that Kafka has for it."""


def _refuse_empty(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> None:
    """Refuse an empty text that was given, as by a shell's variable that is not set: it would count as none."""
    if value == "" and param is not None and ctx is not None and param.name is not None:
        is_given = ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
        if is_given or isinstance(param, click.Argument):
            raise click.BadParameter("it is empty", ctx=ctx, param=param)


class TextType(click.types.StringParamType):
    """A text, as `click.STRING`, that can be sent to a cluster: valid UTF-8, and not empty where it says something."""

    def __init__(self, *, may_be_empty: bool = False) -> None:
        self._may_be_empty = may_be_empty

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check `value`. What of an argument is no UTF-8 is in it as surrogates, which end librdkafka."""
        text = super().convert(value, param, ctx)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"{text!r} is not UTF-8", param, ctx)
        if not self._may_be_empty:
            _refuse_empty(text, param, ctx)
        return text


def is_too_long(path: str | os.PathLike[str]) -> bool:
    """Whether no file system takes the path."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False


class NamedPath(click.ParamType):  # type: ignore[type-arg]  # generic only from click 8.3 on
    """A path as `click.Path` takes it, but not an empty one, which would be the current directory, nor one that no file
    system takes."""

    def __init__(self, path: click.Path) -> None:
        self.name = path.name
        self._path = path

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check `value`."""
        _refuse_empty(value, param, ctx)
        if is_too_long(value):
            self.fail(f"a path of {len(os.fsencode(value)):,} bytes is too long, or a name in it is", param, ctx)
        return self._path.convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """Complete as paths are."""
        return self._path.shell_complete(ctx, param, incomplete)


class FiniteRange(click.FloatRange):
    """A number within a range as `click.FloatRange` takes it, but not `nan`, which is beside all, and not `inf`."""

    def __init__(self, given: click.FloatRange) -> None:
        super().__init__(given.min, given.max, given.min_open, given.max_open, given.clamp)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check `value`."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def refuse_senseless_values(command: click.Command) -> None:
    """Have the command, and those below it, check its texts by `TextType`, paths by `NamedPath`, and numbers."""
    for parameter in command.params:
        if parameter.type is click.STRING:
            parameter.type = TextType()
        elif isinstance(parameter.type, click.Path):
            parameter.type = NamedPath(parameter.type)
        elif isinstance(parameter.type, click.FloatRange):
            parameter.type = FiniteRange(parameter.type)
    if isinstance(command, click.Group):
        for each in command.commands.values():
            refuse_senseless_values(each)


class TimestampType(click.ParamType):  # type: ignore[type-arg]  # generic only from click 8.3 on
    """A time in milliseconds since the epoch: epoch milliseconds, ISO 8601, or `-10m` (s, m, h, d ago)."""

    name = "time"
    _UNITS: ClassVar[dict[str, int]] = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse `value`; an ISO time without a zone is local time."""
        if isinstance(value, int):
            return value
        text = str(value).strip()
        digits = text[1:-1] if text[:1] == "-" and text[-1:] in self._UNITS else text
        try:
            if not (digits.isascii() and digits.isdigit()):
                at = int(datetime.fromisoformat(text).timestamp() * 1000)
            elif len(digits) > MAX_DIGITS:
                raise OverflowError
            elif digits == text:
                at = int(text)
            else:
                at = int(datetime.now().timestamp() * 1000) - int(digits) * self._UNITS[text[-1]]
            return max(0, at)  # Kafka takes times before 1970 for others: -1 is the newest record
        except (ValueError, OverflowError):
            self.fail(f"{text!r} is not a time: use 2026-07-30T12:00:00Z, epoch milliseconds, or -10m", param, ctx)


class DurationType(click.ParamType):  # type: ignore[type-arg]  # generic only from click 8.3 on
    """A duration in milliseconds: `90s`, `10m`, `2h`, `7d`, or `0`."""

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
            self.fail(f"{text!r} is not a duration: use 90s, 10m, 2h or 7d", param, ctx)
        return int(number) * self._UNITS[text[-1]]


def load_config(config_file: Path | None, assignments: tuple[str, ...], **flags: Any) -> Loaded:
    """Merge file, environment and flags; `flags` are `section__key=value`, None means not given."""
    given = [(key.replace("__", ".", 1), value) for key, value in flags.items() if value is not None]
    return load(config_file, os.environ, [*(parse_set(text) for text in assignments), *given])
