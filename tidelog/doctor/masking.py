"""Hides secrets in text that leaves the machine: those that are known by value, and what looks like one.

Known values are those of the configuration, of the files and environment variables with secrets, and the tokens that
follow from the cluster's secret; each is hidden in whatever form it is written (plain, base64, hexadecimal, quoted for
URLs and JSON). What looks like one is hidden by its surroundings: values of settings named `password`, `secret`,
`token` and the like, private keys, `Authorization` headers, keys of AWS, signatures of S3 requests, SCRAM's proofs,
and any 40 characters in a row that look like base64: a secret key of AWS, a line of a private key without its frame.

Invariants: a setting that names a file is shown; masking twice changes nothing more; the time that it takes grows
with the length of the text and not with its square, whatever names clients have chosen.

Entry: `Masker`, `known_secrets`, `shown_settings`.
"""

from __future__ import annotations

import base64
import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

from tidelog.config import SECRETS, Config
from tidelog.controller.rpc.secret import admin_token, read_token
from tidelog.runtime.facts.node import SettingFacts

MASK: Final = "********"
LEAST_CHARACTERS: Final = 6
"""Shorter values would hide common words; no secret that is worth the name is shorter."""
MAX_FILE_BYTES: Final = 64 << 10

_NAMES: Final = (
    r"password|passwd|passphrase|secret|token|credential|(?:private|access|api|session|stored|server|client)[_-]?key"
    r"|salt|sasl\.jaas"
)
SECRET_NAME: Final = re.compile(_NAMES, re.IGNORECASE)
_FILE_NAME: Final = re.compile(r"(_file|_path|_dir|\.py)$", re.IGNORECASE)
"""Names of what is no secret itself: a path, or a place in the source."""
_JSON_WORD: Final = re.compile(r"-?\d[\d.eE+-]*|true|false|null|[\[{].*")
"""What stands unquoted in JSON."""
_NAMED: Final = re.compile(
    rf"""(?<![\w.-])(?=[\w.-]*?(?:{_NAMES}))(?P<name>[\w.-]++)(?P<between>\\*["']?\s*[=:]\s*)"""
    rf"""(?:(?P<open>\\*["'])(?P<quoted>.*?(?<!\\)(?=(?P=open))|.*?)(?P<close>(?P=open))|(?P<plain>[^\s"',;&}}\])\\]+))""",
    re.IGNORECASE,
)
_PEM: Final = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_PEM_END: Final = re.compile(r"-----END [A-Z0-9 ]*PRIVATE KEY-----")
_PEM_CHARACTERS: Final = string.ascii_letters + string.digits + "+/=\\" + string.whitespace
"""Of the lines of a key, as they are or in JSON."""
_RUN: Final = "[A-Za-z0-9+/]*"
_OTHERS: Final = (
    (re.compile(r"(?i)(authorization\\*[\"']?\s*[:=]\s*\\*[\"']?)[^\r\n\"'\\]+"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), rf"\1 {MASK}"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), MASK),
    (re.compile(r"(?i)\b(x-amz-(?:signature|credential|security-token)=)[^&\s\"']+"), rf"\1{MASK}"),
    (re.compile(r"(://[^/\s:@]*:)[^/\s@]+(@)"), rf"\1{MASK}\2"),
    (re.compile(r"(?<![\w.])([psv]=)[A-Za-z0-9+/]{16,}={0,2}"), rf"\1{MASK}"),
    (re.compile(rf"(?<![\w+/])(?={_RUN}[A-Z])(?={_RUN}[a-z])(?={_RUN}[0-9])[A-Za-z0-9+/]{{40,}}={{0,2}}"), MASK),
)


class Masker:
    """Hides secrets in text."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """`secrets`: known values; those of fewer than `LEAST_CHARACTERS` are left out."""
        forms = {form for secret in secrets if len(secret) >= LEAST_CHARACTERS for form in _forms(secret)}
        longest_first = sorted(forms, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if forms else None

    def mask(self, text: str) -> str:
        """Return the text with every secret hidden."""
        if self._known is not None:
            text = self._known.sub(MASK, text)
        text = _hide_key_ends(_PEM.sub(MASK, text))
        for pattern, shown in _OTHERS:
            text = pattern.sub(shown, text)
        return _NAMED.sub(_hide_named, text)


def names_secret(name: str) -> bool:
    """Whether a setting or variable of this name holds a secret itself, and not the path of a file with one."""
    return bool(SECRET_NAME.search(name)) and not _FILE_NAME.search(name)


def shown_settings(settings: Iterable[SettingFacts]) -> list[dict[str, Any]]:
    """Return settings as documents, the values of those that hold a secret hidden."""
    return [
        {"key": each.key, "value": MASK if each.value and names_secret(each.key) else each.value, "source": each.source}
        for each in settings
    ]


def _hide_key_ends(text: str) -> str:
    """Hide keys whose begin is cut off: all before their last line that may be of them."""
    parts: list[str] = []
    at = 0
    for end in _PEM_END.finditer(text):
        before = text[at : end.start()]
        kept = before.rstrip(_PEM_CHARACTERS)
        key = before[len(kept) :]
        parts += [kept, key[: len(key) - len(key.lstrip())], MASK]
        at = end.end()
    return "".join([*parts, text[at:]])


def _hide_named(found: re.Match[str]) -> str:
    if _FILE_NAME.search(found["name"]):
        return found[0]
    if found["plain"] is not None:
        if '"' in found["between"] and _JSON_WORD.fullmatch(found["plain"]):
            return found[0]
        return f"{found['name']}{found['between']}{MASK}"
    hidden = MASK if found["quoted"] else ""
    return f"{found['name']}{found['between']}{found['open']}{hidden}{found['close']}"


def _forms(secret: str) -> Iterator[str]:
    """Yield the forms in which a value may be written."""
    raw = secret.encode("utf-8", "surrogateescape")
    yield secret
    yield json.dumps(secret)[1:-1]
    yield quote(secret, safe="", errors="surrogateescape", encoding="utf-8")
    yield base64.b64encode(raw).decode().rstrip("=")
    yield base64.urlsafe_b64encode(raw).decode().rstrip("=")
    yield raw.hex()
    yield raw.hex().upper()


def known_secrets(config: Config, files: Iterable[bytes], environment: Mapping[str, str]) -> set[str]:
    """Return the secret values that are known: of settings, the lines of files, variables, and derived tokens."""
    found = {config.s3.access_key_id}
    for key in SECRETS:
        section, _, name = key.partition(".")
        found.add(str(getattr(getattr(config, section), name)))
    for content in files:
        text = content.decode("utf-8", "surrogateescape")
        found |= {line.strip() for line in text.splitlines() if not line.startswith("-----")}
        found.add(text.strip())
        found |= {admin_token(content.strip()), read_token(content.strip())} if content.strip() else set()
    found |= {value for name, value in environment.items() if names_secret(name)}
    return {each for each in found if len(each) >= LEAST_CHARACTERS}
