"""Which requests of a browser the console answers. Sans-I/O.

Three attacks come from other web pages in the operator's browser:

- *Rebinding*: a page's own host name is made to resolve to the console's address, so that the browser takes the console
  for the page's own server. Such requests name that host, so only known host names, and addresses, are answered.
- *Cross-site requests* (CSRF): every request to the API must have the header `HEADER`, which a page cannot set
  for another origin without a permission (CORS) that the console never gives. Besides, a request with an `Origin` must
  have the console's own, and one with `Sec-Fetch-Site` must say `same-origin`. The cookie is `SameSite=Strict`; this
  alone would not do, for another port of the same host is the same site.
- *Framing*: `SECURITY_HEADERS` forbid it.

Entry: `refusal`, `SECURITY_HEADERS`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import urlsplit

HEADER: Final = "X-Tidelog-Console"
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
"""Headers of every response. With `trusted-types 'none'` a browser that knows them turns no string into markup."""


def refusal(headers: Mapping[str, str], host_names: Collection[str], *, is_api: bool) -> str | None:
    """Return why a request is not answered; None if it is.

    `headers` are looked up as they are spelled here; `host_names` are those of the console besides addresses.
    """
    host = headers.get("Host", "")
    if not is_known_host(host, host_names):
        return f"the console is not at the host {host[:100]!r}: open it by its address, or name the host to it"
    if not is_api:
        return None
    origin = headers.get("Origin")
    if origin is not None and not _same_origin(origin, host):
        return "requests of other web pages are refused"
    if headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
        return "requests of other web pages are refused"
    if headers.get(HEADER) != "1":
        return f"requests to the console's API have the header {HEADER}: 1"
    return None


def is_known_host(host: str, names: Collection[str]) -> bool:
    """Return whether a `Host` header has an address, `localhost`, or one of the names."""
    try:
        name = urlsplit(f"//{host}").hostname
        _ = urlsplit(f"//{host}").port
    except ValueError:
        return False
    if not name or "@" in host or "/" in host:
        return False
    if name == "localhost" or name in {each.lower() for each in names}:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _same_origin(origin: str, host: str) -> bool:
    """Whether a page of this origin came from this host and port. A proxy may have added TLS."""
    scheme, separator, place = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and place.lower() == host.lower()
