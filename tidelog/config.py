"""The configuration: a typed model, a fixed order of sources, and the source of each value.

Order, the later wins: defaults < TOML file (`--config`) < environment (`TIDELOG_SECTION__KEY`) < flags
(`--set section.key=value` and the dedicated flags). Unknown sections and keys are errors that suggest the nearest name;
the error for a value of the wrong type or out of range names its key and its source. Secrets are never printed.

The `settings` module of each package defines the fields, units and ranges of its sections; this module composes them.

Entry: `load`.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from tidelog.broker.settings import (
    AdminSettings,
    GroupSettings,
    KafkaSettings,
    LogSettings,
    ReplicationSettings,
    TracingSettings,
)
from tidelog.controller.model.settings import BalancerSettings, ControllerSettings, ScaleSettings
from tidelog.runtime.errors import ConfigError
from tidelog.storage.settings import (
    CacheSettings,
    CleanSettings,
    CompactionSettings,
    S3Settings,
    UploadSettings,
    WalSettings,
)

ENV_PREFIX = "TIDELOG_"
MAX_FILE_BYTES = 1 << 20
SECRETS = frozenset({"s3.secret_access_key"})
URLS = frozenset({"admin.schema_registry", "s3.endpoint", "tracing.endpoint"})
HIDDEN = "********"
"""Stands for the value of a secret."""


class NodeSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[node]`: who this process is."""

    id: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] = -1
    """Broker id (int32), stored in the data directory's identity file once used. -1: the id in that file; in a new
    directory 1 for a process that is its own single controller, else an id that the controllers allocate and never
    reuse. Required for the controllers of a quorum.
    """
    roles: list[Literal["controller", "broker"]] = msgspec.field(default_factory=lambda: ["controller", "broker"])
    """Roles of this process: controller, broker, or both."""
    data_dir: str = "tidelog-data"
    """Directory with `wal/`, `bucket/` (the embedded store) and `controller/`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of the log lines written to standard error."""
    log_format: Literal["text", "json"] = "text"
    """`text` for people, `json` for programs; one event per line."""
    shutdown_timeout_ms: Annotated[int, Meta(ge=100)] = 30_000
    """How long a shutdown by SIGTERM waits for requests in flight and the last upload."""
    drain_timeout_ms: Annotated[int, Meta(ge=0)] = 30_000
    """How long a broker, after SIGTERM, first moves its partitions to other live brokers; 0 disables this."""


class Config(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All sections."""

    node: NodeSettings = msgspec.field(default_factory=NodeSettings)
    kafka: KafkaSettings = msgspec.field(default_factory=KafkaSettings)
    admin: AdminSettings = msgspec.field(default_factory=AdminSettings)
    controller: ControllerSettings = msgspec.field(default_factory=ControllerSettings)
    balancer: BalancerSettings = msgspec.field(default_factory=BalancerSettings)
    scale: ScaleSettings = msgspec.field(default_factory=ScaleSettings)
    wal: WalSettings = msgspec.field(default_factory=WalSettings)
    s3: S3Settings = msgspec.field(default_factory=S3Settings)
    replication: ReplicationSettings = msgspec.field(default_factory=ReplicationSettings)
    upload: UploadSettings = msgspec.field(default_factory=UploadSettings)
    cache: CacheSettings = msgspec.field(default_factory=CacheSettings)
    compaction: CompactionSettings = msgspec.field(default_factory=CompactionSettings)
    clean: CleanSettings = msgspec.field(default_factory=CleanSettings)
    log: LogSettings = msgspec.field(default_factory=LogSettings)
    group: GroupSettings = msgspec.field(default_factory=GroupSettings)
    tracing: TracingSettings = msgspec.field(default_factory=TracingSettings)


class Setting(NamedTuple):
    """The effective value of one setting."""

    key: str
    """Dotted name: `wal.flush`."""
    value: Any
    source: str
    """`default`, `file PATH`, `environment NAME` or `flag`."""


class Loaded(NamedTuple):
    """A configuration and the source of each value that is not a default."""

    config: Config
    sources: dict[str, str]

    def settings(self) -> Iterator[Setting]:
        """Every setting in the order of the model; secrets are shown as `********`."""
        for section, key, value in _walk(self.config):
            name = f"{section}.{key}"
            shown = HIDDEN if name in SECRETS and value else value
            yield Setting(name, shown, self.sources.get(name, "default"))


def _walk(config: Config) -> Iterator[tuple[str, str, Any]]:
    for section in config.__struct_fields__:
        struct = getattr(config, section)
        for key in struct.__struct_fields__:
            yield section, key, getattr(struct, key)


def known_keys() -> list[str]:
    """Return all settings, as SECTION.KEY."""
    return [f"{section}.{key}" for section, key, _ in _walk(Config())]


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Iterable[tuple[str, str | int | bool]] = (),
) -> Loaded:
    """Merge the sources in their order and validate the result. Raises `ConfigError`.

    `flags` are `(dotted key, value)` pairs; strings are parsed according to the type of the field.
    """
    loaded, errors = examine(file, environment, flags)
    if errors:
        raise errors[0]
    return loaded


def examine(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Iterable[tuple[str, str | int | bool]] = (),
) -> tuple[Loaded, list[ConfigError]]:
    """As `load`, but leave out what is wrong, and return all of it. Raises `ConfigError` for a file that is no TOML."""
    merged: dict[str, tuple[Any, str]] = {}
    if file is not None:
        merged.update(_from_file(file))
    for name, value in sorted((environment or {}).items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            key = name[len(ENV_PREFIX) :].lower().replace("__", ".", 1)
            merged[key] = (value, f"environment {name}")
    for key, flag in flags:
        merged[key] = (flag, "flag")
    config = Config()
    sources: dict[str, str] = {}
    errors: list[ConfigError] = []
    for key, (value, source) in merged.items():
        try:
            _assign(config, key, value, source)
        except ConfigError as error:
            errors.append(error)
        else:
            sources[key] = source
    return Loaded(config, sources), errors


def _from_file(file: Path) -> dict[str, tuple[Any, str]]:
    source = f"file {file}"
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"configuration file {file} is longer than {MAX_FILE_BYTES} bytes", hint="check --config")
        document = tomllib.loads(text.decode())
    except FileNotFoundError as error:
        raise ConfigError(f"no configuration file {file}", hint="check --config") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"cannot read configuration file {file}: {error}") from error
    values: dict[str, tuple[Any, str]] = {}
    for section, body in document.items():
        if not isinstance(body, dict):
            raise ConfigError(
                f"{source}: {section!r} is outside a section",
                hint=_nearest(f"node.{section}", "put it under a [section]"),
            )
        for key, value in body.items():
            values[f"{section}.{key}"] = (value, source)
    return values


def _nearest(key: str, otherwise: str) -> str:
    known = known_keys()
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:
        tail = key.rpartition(".")[2]
        close = [name for name in known if name.rpartition(".")[2] == tail][:1]
    return f"did you mean {close[0]!r}?" if close else otherwise


def _assign(config: Config, key: str, value: Any, source: str) -> None:
    section, _, name = key.partition(".")
    struct = getattr(config, section, None) if section in config.__struct_fields__ else None
    if struct is None or name not in struct.__struct_fields__:
        raise ConfigError(
            f"unknown configuration key {key!r} (from {source})",
            hint=_nearest(key, "`tidelog config` lists every key"),
        )
    wanted = next(field.type for field in msgspec.structs.fields(type(struct)) if field.name == name)
    shown = HIDDEN if key in SECRETS else repr(value)
    textual = isinstance(value, str)
    if textual and (problem := _problem_of(key, value)):
        raise ConfigError(f"configuration key {key!r} (from {source}) has invalid value {shown}: {problem}")
    if textual and msgspec.inspect.type_info(wanted).__class__ is msgspec.inspect.ListType:
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        converted = msgspec.convert(value, wanted, strict=not textual)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration key {key!r} (from {source}) has invalid value {shown}: {error}") from error
    setattr(struct, name, converted)


def _problem_of(key: str, text: str) -> str:
    """Return why a text can be no value of a setting; empty if it can."""
    try:
        text.encode()
    except UnicodeEncodeError:  # what the system gives as a path or variable may have other bytes in it
        return "it is not UTF-8"
    if "\0" in text:
        return "it has a NUL, which no path, host or name may have"
    if key in URLS:
        try:
            _ = urlsplit(text).port
        except ValueError as error:  # a port that is none, or half an IPv6 address
            return str(error)
    return ""


def exposed_secrets(loaded: Loaded) -> list[str]:
    """Return a sentence for each secret that other users of this machine can read, with what to do instead."""
    found = []
    for key in sorted(SECRETS & loaded.sources.keys()):
        source = loaded.sources[key]
        file = Path(source.removeprefix("file ")) if source.startswith("file ") else None
        if source == "flag":
            where = "is on the command line, which all users of this machine can see"
        elif file is not None and file.stat().st_mode & 0o077:
            where = f"is in {file}, which is open to other users"
        else:
            continue
        found.append(f"{key} {where}: put it alone into a file of mode 600 and name that by {key}_file")
    return found


def parse_set(text: str) -> tuple[str, str]:
    """Split a `--set section.key=value`. Raises `ConfigError`."""
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
        raise ConfigError(f"--set takes section.key=value, not {text!r}", hint="for example --set wal.flush=async")
    return key.strip(), value.strip()


def to_toml(config: Config) -> str:
    """Return the whole configuration as a TOML document that `load` reads back."""
    lines: list[str] = []
    section_before = ""
    for section, key, value in _walk(config):
        if section != section_before:
            lines.append(f"[{section}]")
            section_before = section
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON allows, and TOML does not
        lines.append(f"{key} = {text}")
    return "\n".join(lines) + "\n"
