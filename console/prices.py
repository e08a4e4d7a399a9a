"""The prices of a bucket: the price table, its defaults, and the parser of a user's price file.

The defaults are an assumption and are marked as such: S3 Standard as published for us-east-1, for brokers in the
bucket's region (so reads are no egress). A file replaces the whole table: a mixture could add different currencies.
Errors in a file name the key.

Entry: `load_prices`, `to_toml`.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from pathlib import Path
from typing import Any, Final

import msgspec

from tidelog.runtime.errors import ConfigError, NotFound

GB_BYTES: Final = 1 << 30
"""Bytes of a billed GB: 2^30, as for S3."""
MONTH_S: Final = 730 * 3600
"""Hours of a billed month: 730, as for S3."""
MAX_PRICE: Final = 1e9
"""Upper bound of a price; larger values are rejected as typing errors."""
SECTIONS: Final = {
    "requests_per_1000": ("put", "list", "get", "head", "delete"),
    "transfer_per_gb": ("received", "sent"),
    "storage_per_gb_month": ("stored",),
}
"""The sections of a table and the keys that each must have."""
_HINT: Final = "`tidelog cost --print-prices` prints a complete table to begin with"


class Prices(msgspec.Struct, frozen=True):
    """A price table; all prices in `currency`."""

    name: str
    """Description of these prices."""
    currency: str
    requests_per_1000: dict[str, float]
    """Price of 1,000 requests by operation. Operations as in docs/metrics.md."""
    transfer_per_gb: dict[str, float]
    """Price of a GB `received` from the bucket (egress) or `sent` to it."""
    storage_per_gb_month: dict[str, float]
    """`stored`: price of a GB for a month."""


DEFAULT: Final = Prices(
    name="assumed: AWS S3 Standard, us-east-1, as published 2025; brokers in the bucket's region",
    currency="USD",
    requests_per_1000={"put": 0.005, "list": 0.005, "get": 0.0004, "head": 0.0004, "delete": 0.0},
    transfer_per_gb={"received": 0.0, "sent": 0.0},
    storage_per_gb_month={"stored": 0.023},
)


def load_prices(path: Path | None) -> Prices:
    """Load the table from a TOML file, or from JSON if the file name ends in `.json`; without a path, the default.

    Raises `NotFound` for a missing file, `ConfigError` for invalid content.
    """
    if path is None:
        return DEFAULT
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFound(f"there is no price table {path}", hint=_HINT) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the price table {path} cannot be read: {error}", hint=_HINT) from error
    try:
        table = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of both parsers, with line and column; nested too deeply
        kind = "JSON" if path.suffix.lower() == ".json" else "TOML"
        raise ConfigError(f"the price table {path} is not valid {kind}: {error}", hint=_HINT) from error
    return _checked(table, path)


def _checked(table: Any, path: Path) -> Prices:
    if not isinstance(table, dict):
        raise ConfigError(f"the price table {path} is not a table of sections", hint=_HINT)
    _check_names(table, ("name", "currency", *SECTIONS), "", path)
    texts = {key: table[key] for key in ("name", "currency")}
    for key, value in texts.items():
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{key} in the price table {path} is {value!r}: a text is expected", hint=_HINT)
    sections: dict[str, dict[str, float]] = {}
    for section, keys in SECTIONS.items():
        prices = table[section]
        if not isinstance(prices, dict):
            raise ConfigError(f"{section} in the price table {path} is {prices!r}: a section is expected", hint=_HINT)
        _check_names(prices, keys, f"{section}.", path)
        sections[section] = {key: _price(prices[key], f"{section}.{key}", path) for key in keys}
    return Prices(
        texts["name"],
        texts["currency"],
        sections["requests_per_1000"],
        sections["transfer_per_gb"],
        sections["storage_per_gb_month"],
    )


def _check_names(found: dict[str, Any], known: tuple[str, ...], prefix: str, path: Path) -> None:
    for name in found:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known are {', '.join(prefix + k for k in known)}"
            raise ConfigError(f"the price table {path} has an unknown key {prefix}{name}", hint=hint)
    missing = [prefix + name for name in known if name not in found]
    if missing:
        raise ConfigError(f"the price table {path} lacks {', '.join(missing)}", hint=_HINT)


def _price(value: Any, name: str, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} in the price table {path} is {value!r}: a number is expected", hint=_HINT)
    if not math.isfinite(value) or not 0 <= value <= MAX_PRICE:
        raise ConfigError(
            f"{name} in the price table {path} is {value}: a price from 0 to {MAX_PRICE:.0f} is expected", hint=_HINT
        )
    return float(value)


def to_toml(prices: Prices) -> str:
    """Return the table as TOML that `load_prices` reads."""
    lines = [
        "# Prices for `tidelog cost --prices FILE`. 1 GB is 2^30 bytes, a month 730 hours, as S3 counts.",
        f"name = {_quoted(prices.name)}",
        f"currency = {_quoted(prices.currency)}",
    ]
    notes = {
        "requests_per_1000": "1,000 requests, by operation",
        "transfer_per_gb": "a GB; received from the bucket is egress (S3 to the internet: about 0.09)",
        "storage_per_gb_month": "a GB for a month",
    }
    for section, keys in SECTIONS.items():
        lines += ["", f"[{section}]  # {notes[section]}"]
        lines += [f"{key} = {getattr(prices, section)[key]}" for key in keys]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Return a TOML string: that of JSON, except for the control character that JSON does not escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def priced(row: dict[str, Any], prices: Prices) -> dict[str, Any]:
    """Return a row with `only_bytes`, and what it costs a month to keep these."""
    cost = row["only_bytes"] / GB_BYTES * prices.storage_per_gb_month["stored"]
    return {**row, "cost_per_month": cost, "currency": prices.currency}
