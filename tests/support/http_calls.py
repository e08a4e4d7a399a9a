"""HTTP requests with any header, `Host`, `Origin` and `Cookie` included, which a test of a server's rules needs."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

TIMEOUT_S = 60.0


class HttpAnswer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    text: str


class HttpCalls:
    """Requests to one server, each on a connection of its own."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port

    def call(self, method: str, path: str, body: object, headers: Mapping[str, str]) -> HttpAnswer:
        """Send `body` as JSON, if there is one, and return the whole answer."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            text = None if body is None else json.dumps(body)
            more = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, text, {**more, **headers})
            response = connection.getresponse()
            return HttpAnswer(response.status, response.headers, response.read().decode())
