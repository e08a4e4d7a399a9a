"""The console's way to the admin HTTP of the brokers: of any one that answers, of a named one, or of all.

Invariants: an answer is bounded (`MAX_ANSWER_BYTES`) and so is the wait for it, so that a dead or paused broker delays
the others' answers by `ASK_TIMEOUT_S` at most; what one broker does not answer is told as its error, never left out,
nor is another broker's answer taken for its own.
The addresses come from the metadata that the brokers tell, not from the browser.

Entry: `ClusterLink`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import aiohttp

from tidelog.console.passed_on import PassedOn
from tidelog.runtime.errors import InvalidInput, NotFound, TidelogError, Unavailable
from tidelog.runtime.network import BROKER_HEADER, CLUSTER_HEADER

ASK_TIMEOUT_S: Final = 5.0
CHANGE_TIMEOUT_S: Final = 60.0
MAX_ANSWER_BYTES: Final = 32 << 20
NODES_FOR_S: Final = 5.0
"""How long the addresses of the brokers are used before they are asked for again."""


class WrongToken(TidelogError):
    """The admin HTTP does not accept the token."""


class ClusterLink:
    """The admin HTTP of one cluster. `admin_url` is that of the broker to ask first; `cluster_id` may be empty."""

    def __init__(
        self, admin_url: Callable[[], str], monotonic: Callable[[], float], cluster_id: Callable[[], str] = str
    ) -> None:
        self._admin_url = admin_url
        self._cluster_id = cluster_id
        self._monotonic = monotonic
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[int, str] = {}
        self._dead: set[int] = set()
        self._asked_at = 0.0

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def read(self, asked: PassedOn, broker: int | None = None) -> Any:
        """Return the answer of a broker, or of the first one that answers. Raises `TidelogError`."""
        if broker is not None:
            return await self._ask(await self._url_of(broker), asked, broker=broker)
        error: TidelogError = Unavailable("no broker is known", hint="see `tidelog status`")
        for url in dict.fromkeys([self._admin_url(), *self._urls.values()]):
            try:
                return await self._ask(url, asked)
            except Unavailable as failed:
                error = failed  # the next one may answer
        raise error

    async def read_all(self, asked: PassedOn) -> dict[str, Any]:
        """Return `answers` by broker, and `errors` by broker for those that did not answer."""
        urls = await self._nodes()

        async def one(broker: int, url: str) -> tuple[int, Any, str | None]:
            if broker in self._dead:
                return broker, None, f"broker {broker} is dead"
            try:
                return broker, await self._ask(url, asked, broker=broker), None
            except TidelogError as error:
                return broker, None, error.message

        found = await asyncio.gather(*(one(broker, url) for broker, url in urls.items()))
        return {
            "answers": {str(broker): answer for broker, answer, error in found if error is None},
            "errors": {str(broker): error for broker, _, error in found if error is not None},
        }

    async def change(self, asked: PassedOn, body: object, token: str) -> Any:
        """Send a POST to a broker that answers. Raises `TidelogError`. It is never sent twice."""
        url = self._admin_url()
        try:
            await self._ask(url, PassedOn("/healthz", []))
        except Unavailable:
            await self._nodes()
            url = next((each for broker, each in self._urls.items() if broker not in self._dead), url)
        return await self._ask(url, asked, method="POST", body=body, token=token)

    async def needs_token(self) -> bool:
        """Return whether the cluster has a secret."""
        return not await self.accepts("")

    async def accepts(self, token: str) -> bool:
        """Return whether the cluster accepts a token. Raises `Unavailable`."""
        error: TidelogError = Unavailable("no broker is known", hint="see `tidelog status`")
        for url in dict.fromkeys([self._admin_url(), *self._urls.values()]):
            try:
                await self._ask(url, PassedOn("/token", []), method="POST", token=token)
            except WrongToken:
                return False
            except Unavailable as failed:
                error = failed
            else:
                return True
        raise error

    async def _url_of(self, broker: int) -> str:
        urls = await self._nodes()
        if broker not in urls:
            raise NotFound(f"there is no broker {broker}", hint="`tidelog broker list` shows them")
        if broker in self._dead:
            raise Unavailable(f"broker {broker} is dead", hint="see `tidelog status`")
        return urls[broker]

    async def _nodes(self) -> dict[int, str]:
        """The admin URLs of the brokers, dead ones included."""
        if self._urls and self._monotonic() - self._asked_at < NODES_FOR_S:
            return self._urls
        rows = (await self.read(PassedOn("/brokers", [])))["brokers"]
        self._urls = {row["id"]: row["admin_url"] for row in rows if row["admin_url"]}
        self._dead = {row["id"] for row in rows if row["state"] == "dead"}
        self._asked_at = self._monotonic()
        return self._urls

    async def _ask(
        self,
        url: str,
        asked: PassedOn,
        *,
        method: str = "GET",
        body: object = None,
        token: str = "",
        broker: int | None = None,
    ) -> Any:
        """Return the answer of whoever is at an address, or of that broker only."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if broker is not None:
            headers[BROKER_HEADER] = str(broker)
        if cluster_id := self._cluster_id():
            headers[CLUSTER_HEADER] = cluster_id
        timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S if method == "GET" else CHANGE_TIMEOUT_S)
        text = None if body is None else json.dumps(body)
        try:
            async with self._session.request(
                method, url + asked.path, params=asked.query, data=text, headers=headers, timeout=timeout
            ) as response:
                raw = await _bounded(response, f"{url}{asked.path}")
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unavailable(
                f"the admin HTTP at {url} does not answer: {error or 'no answer in time'}", hint="see `tidelog status`"
            ) from error
        try:
            found = json.loads(raw)
        except ValueError as error:
            raise Unavailable(f"{url}{asked.path} returned invalid JSON", hint="is it a Tidelog broker?") from error
        if status >= 400:
            raise _error(status, found, f"{method} {asked.path}")
        return found


async def _bounded(response: aiohttp.ClientResponse, what: str) -> bytes:
    raw = bytearray()
    async for chunk in response.content.iter_chunked(64 << 10):
        raw += chunk
        if len(raw) > MAX_ANSWER_BYTES:
            raise Unavailable(f"the answer of {what} is longer than {MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(raw)


def _error(status: int, body: object, request: str) -> TidelogError:
    told: Mapping[str, Any] = body if isinstance(body, dict) else {}
    message, hint = str(told.get("error") or f"{request} was answered with {status}"), told.get("hint")
    kinds: Mapping[int, type[TidelogError]] = {400: InvalidInput, 401: WrongToken, 404: NotFound}
    kind = kinds.get(status, Unavailable if status in (409, 421, 502, 503, 504) else TidelogError)
    return kind(message, hint=hint if isinstance(hint, str) else None)
