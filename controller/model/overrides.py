"""Settings of the controllers that change while they run: cluster-wide overrides of their configuration.

An override is an entry of table `configs`, kind `cluster`, with the setting's dotted key, as
`controller.session_timeout_ms`. Kafka's tools and `tidelog controller config` set it. It is in force on every
controller that has applied the command, before what that controller's own configuration says, and is kept in the log,
snapshots and the bucket: so also after a restart, and on a controller that comes later.

Invariants: a setting is dynamic only if controllers may change it at different moments, and in the middle of whatever
it bounds, without a rule being broken; of all others `refusal` says why not, and what to do instead. An override that
this version does not know, or that does not parse, is left out: another version has written it, and the file counts.

Entry: `DYNAMIC`, `change_of`, `SettingsInForce`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from tidelog.controller.model.levels import OVERRIDES_LEVEL, UnsupportedLevel
from tidelog.controller.model.settings import BalancerSettings, ControllerSettings, ScaleSettings
from tidelog.runtime.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)

NO_OVERRIDES: Final[Mapping[str, str]] = {}
MIN_SESSION_HEARTBEATS = 3
"""A session time-out of fewer heartbeat intervals would take every broker for dead whose heartbeat is a little late."""
SECTIONS: Final[dict[str, type[msgspec.Struct]]] = {
    "controller": ControllerSettings,
    "balancer": BalancerSettings,
    "scale": ScaleSettings,
}
SESSION_TIMEOUT: Final = "controller.session_timeout_ms"
HEARTBEAT_INTERVAL: Final = "controller.heartbeat_interval_ms"
_CONTROLLER = (
    "session_timeout_ms",
    "reelect_timeout_ms",
    "replica_repair_after_ms",
    "preferred_master_enable",
    "replica_balance_enable",
    "lease_max_hold_ms",
)

_IN_FILES = "set it in the configuration of all controllers, and restart them (`tidelog cluster restart --rolling`)"
_PROTECTED: Final[dict[str, tuple[str, str]]] = {
    "controller.members": (
        "the quorum changes by a command that its members agree on",
        "`tidelog controller add` and `tidelog controller remove`",
    ),
    "controller.secret_file": ("processes prove the secret to each other before they tell anything else", _IN_FILES),
    "controller.read_grace_ms": (
        "brokers go on by the value that they were told, and would read objects that are deleted by a smaller one",
        _IN_FILES,
    ),
    "controller.startup_timeout_ms": (
        "it counts from the first broker's return, before the metadata are read",
        _IN_FILES,
    ),
    HEARTBEAT_INTERVAL: (
        "each broker has its own, and sends heartbeats by it before it knows the metadata",
        "set it in the configuration of all brokers, and restart them; it must stay below a third of"
        f" {SESSION_TIMEOUT}",
    ),
    **dict.fromkeys(
        ("controller.state_interval_ms", "controller.state_after_change_ms", "controller.state_kept"),
        ("`tidelog cluster rebuild` and `backup` judge by the configuration whether a cluster still writes", _IN_FILES),
    ),
    "balancer.mode": ("it has a command of its own", "`tidelog balancer mode MODE` sets it for the running cluster"),
}
"""Why a setting is not dynamic, and what to do instead; of the others, because a process reads it when it starts."""


class DynamicSetting(NamedTuple):
    """One setting that may be overridden."""

    section: str
    field: str
    type: Any
    """As the section declares it, with its range."""
    default: int | bool

    @property
    def is_flag(self) -> bool:
        """Return whether it is true or false."""
        return isinstance(self.default, bool)


def _rows(section: str, names: tuple[str, ...]) -> dict[str, DynamicSetting]:
    fields = {each.name: each for each in msgspec.structs.fields(SECTIONS[section])}
    return {
        f"{section}.{name}": DynamicSetting(section, name, fields[name].type, fields[name].default) for name in names
    }


DYNAMIC: Final[dict[str, DynamicSetting]] = {
    **_rows("controller", _CONTROLLER),
    **_rows("balancer", tuple(each for each in BalancerSettings.__struct_fields__ if each != "mode")),
}
"""The settings that may be overridden, by dotted key."""


def is_known(key: str) -> bool:
    """Return whether it is a setting of the controllers, dynamic or not."""
    section, _, name = key.partition(".")
    return section in SECTIONS and name in SECTIONS[section].__struct_fields__


def refusal(key: str) -> ConfigError | None:
    """Return why a setting of the controllers cannot be overridden; None: it can, or is none of theirs."""
    if key in DYNAMIC or not is_known(key):
        return None
    why, instead = _PROTECTED.get(key, ("a controller reads it when it starts", _IN_FILES))
    return ConfigError(f"{key} cannot be changed while the cluster runs: {why}", hint=instead)


def change_of(
    key: str, text: str | None, overrides: Mapping[str, str], *, level: int, configs: Mapping[str, str]
) -> dict[str, str | None]:
    """Return what to change of the `overrides` for a new value, or for none (None); empty if it is so already.

    `level`: the cluster's feature level; `configs`: a broker's effective configuration by dotted key. Raises
    `ConfigError`, and `UnsupportedLevel` while controllers may not know of overrides. One that is there can be taken
    back in any case, also one that another version has set.
    """
    if text is None and key in overrides:
        return {key: None}
    if text is None and key in DYNAMIC:
        return {}
    interval_ms = configs.get(HEARTBEAT_INTERVAL, ControllerSettings().heartbeat_interval_ms)
    value = checked(key, text or "", int(interval_ms))
    if level < OVERRIDES_LEVEL:
        raise UnsupportedLevel(
            f"{key} can be changed from feature level {OVERRIDES_LEVEL} on; the cluster is at level {level}",
            hint="raise it when all processes are of this release: `tidelog cluster upgrade`",
        )
    return {} if overrides.get(key) == value else {key: value}


def checked(key: str, text: str, heartbeat_interval_ms: int) -> str:
    """Return an override as it is stored. Raises `ConfigError` with the key, what is wrong, and what to do.

    `heartbeat_interval_ms`: the brokers'.
    """
    error = refusal(key)
    if error is not None:
        raise error
    if key not in DYNAMIC:
        raise ConfigError(
            f"the controllers have no setting {key!r}", hint="`tidelog controller config list` shows them"
        )
    value = _parsed(DYNAMIC[key], key, text)
    least_ms = MIN_SESSION_HEARTBEATS * heartbeat_interval_ms
    if key == SESSION_TIMEOUT and value < least_ms:
        raise ConfigError(
            f"{key} = {value} is less than {MIN_SESSION_HEARTBEATS} heartbeat intervals of"
            f" {heartbeat_interval_ms} ms: brokers that live would be taken for dead",
            hint=f"give {least_ms} or more, or lower {HEARTBEAT_INTERVAL} in the configuration of all brokers first",
        )
    return str(value).lower()


def _parsed(row: DynamicSetting, key: str, text: str) -> int | bool:
    wanted = text.strip().lower() if row.is_flag else text.strip()
    try:
        if row.is_flag and wanted not in ("true", "false"):
            raise msgspec.ValidationError("Expected `true` or `false`")
        found: int | bool = msgspec.convert(wanted, row.type, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{key} has invalid value {text!r}: {error}") from error
    return found


def _overridden(section: str, overrides: Mapping[str, str]) -> dict[str, int | bool]:
    """Return the overridden fields of a section that this version knows, with their values."""
    found: dict[str, int | bool] = {}
    for key, text in overrides.items():
        row = DYNAMIC.get(key)
        if row is None or row.section != section:
            continue
        try:
            found[row.field] = _parsed(row, key, text)
        except ConfigError:
            continue
    return found


def in_force(section: str, settings: S, overrides: Mapping[str, str]) -> S:
    """Return a section of a controller's configuration with the overrides that this version knows."""
    changes = _overridden(section, overrides)
    return msgspec.structs.replace(settings, **changes) if changes else settings


class SettingsInForce(Generic[S]):
    """A section of a controller's configuration, as it is in force at the moment."""

    def __init__(self, section: str, configured: S, overrides: Callable[[], Mapping[str, str]]) -> None:
        """`overrides`: those of the metadata, another object when they have changed."""
        self.configured = configured
        self._section = section
        self._overrides = overrides
        self._seen: Mapping[str, str] = NO_OVERRIDES
        self._now = configured

    @property
    def now(self) -> S:
        """Return the section; the same object until an override changes."""
        overrides = self._overrides()
        if overrides is not self._seen:
            self._seen = overrides
            found = in_force(self._section, self.configured, overrides)
            if found != self._now:
                self._now = found
        return self._now


def report(sections: Mapping[str, msgspec.Struct], overrides: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return each setting of a controller as JSON, by dotted key.

    Its `value` in force, what is `configured`, the `default`, and whether it is `overridden`.
    """
    found: dict[str, dict[str, Any]] = {}
    for section, configured in sections.items():
        changes, default = _overridden(section, overrides), type(configured)()
        for name in configured.__struct_fields__:
            own = getattr(configured, name)
            found[f"{section}.{name}"] = {
                "value": changes.get(name, own),
                "configured": own,
                "default": getattr(default, name),
                "overridden": name in changes,
            }
    return found
