"""`DataRequests` by obstore (Rust's `object_store`), whose threads send requests without holding the GIL.

The reasons and measurements are in docs/design/0004-object-store-client.md. Properties of obstore 0.12:

- Its errors are text. `_translate` extracts the HTTP status and S3's code and raises what botocore would, so that
  `tidelog.storage.bucket.s3_errors` classifies both clients alike. The fault tests pin the text.
- `mode="create"` is `If-None-Match: *`. It reports a 409 as "already exists" too; `_translate` does not.
- Cancelling the awaiting task ends the request and its connection.
- A thread of obstore that touches a Python object while the interpreter shuts down aborts the process (seen 7
  times in 40 when a loop ended right after the last answer). So closing waits until the threads are idle (`_REST_S`).
- It must not be used on both sides of a fork; nothing here forks.

Credentials come from botocore, with its provider chain and renewal. obstore takes every option that it is not given
from the environment (`AWS_ENDPOINT_URL_S3` even before `endpoint`), so it is given all that decide where, and as whose,
a request is sent (`_place`).

Entry: `open_requests`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import obstore
from aiobotocore.session import AioSession
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, SSLError
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.common import StoreUnsupported, body_size, join_body
from tidelog.storage.bucket.s3_client import CONNECT_TIMEOUT_S, WRITER_ID, allow
from tidelog.storage.bucket.s3_errors import required
from tidelog.storage.bucket.store import View
from tidelog.storage.settings import S3Settings

if TYPE_CHECKING:
    from obstore.store import S3Credential

T = TypeVar("T")

_REST_S: Final = 0.1
"""After an answer was delivered, a thread needs microseconds to become idle."""
_NO_LIMIT: Final = timedelta(hours=6)
"""Disables obstore's own time-out: the store's, which depends on the size, applies."""
_IDLE_TIMEOUT: Final = timedelta(seconds=12)
"""How long an idle connection is kept, as in botocore: servers close theirs after about 20 s."""
_CREDENTIALS_LIFE: Final = timedelta(minutes=10)
"""obstore renews five minutes before expiry; botocore renews 15 minutes before theirs."""
_JOINED_BYTES: Final = 16 << 10
"""Buffers smaller than this on average are joined first: each buffer costs a call."""
_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<]*)</Message>")
_ADDRESS: Final = re.compile(r"https?://\S+")
"""The address of the request in an error's text. Endpoint, bucket and prefix in it may contain any word."""


class _Credentials:
    """obstore's credential provider."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._session = AioSession()

    async def __call__(self) -> S3Credential:
        """Return the current credentials. Raises `NoCredentialsError`."""
        settings = self._settings
        if settings.access_key_id:
            return {
                "access_key_id": settings.access_key_id,
                "secret_access_key": settings.secret_access_key,
                "expires_at": None,
            }
        found = await self._session.get_credentials()
        if found is None:
            raise NoCredentialsError
        frozen = await found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LIFE,
        }


async def open_requests(settings: S3Settings, resources: AsyncExitStack) -> ObstoreRequests:
    """Return the requests for the bucket; `resources` closes them. Raises `NoCredentialsError`."""
    credentials = _Credentials(settings)
    await credentials()
    store = S3Store(
        settings.bucket,
        region=settings.region,
        credential_provider=credentials,
        skip_signature=False,
        unsigned_payload=True,
        conditional_put="etag",
        s3_express=False,
        client_options={
            "allow_http": settings.endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, settings.request_timeout_ms / 1000)),
            "timeout": _NO_LIMIT,
            "pool_idle_timeout": _IDLE_TIMEOUT,
            "pool_max_idle_per_host": str(settings.max_concurrency),
        },
        retry_config={"max_retries": 0},
        **_place(settings),
    )
    resources.push_async_callback(asyncio.sleep, _REST_S)
    return ObstoreRequests(store, settings.endpoint or f"AWS S3 ({settings.region})")


def _place(settings: S3Settings) -> dict[str, Any]:
    """Return the options that say where the bucket is. Without an endpoint these are obstore's defaults."""
    # A name with dots matches no wildcard certificate; self-hosted servers seldom support the other style.
    is_in_host = not settings.endpoint and "." not in settings.bucket
    host = f"s3.{settings.region}.amazonaws.com"
    endpoint = settings.endpoint or f"https://{settings.bucket + '.' if is_in_host else ''}{host}"
    return {
        "endpoint": endpoint,
        "aws_endpoint_url_s3": endpoint,
        "virtual_hosted_style_request": is_in_host,
    }


class ObstoreRequests:
    """`DataRequests` by obstore."""

    def __init__(self, store: S3Store, endpoint: str) -> None:
        self._store = store
        self._endpoint = endpoint

    async def put(self, name: str, body: Sequence[Buffer], writer: str = "") -> str:
        """See `DataRequests.put`. Large buffers are sent without a copy."""
        condition: dict[str, Any] = {"mode": "create", "attributes": {WRITER_ID: writer}} if writer else {}
        parts = [memoryview(one).cast("B") for one in body] if _are_large(body) else join_body(body)
        answer = await self._answer(
            "PutObject", obstore.put_async(self._store, name, parts, use_multipart=False, **condition)
        )
        return str(answer["e_tag"] or "").strip('"')

    async def get(self, name: str, deadline: asyncio.Timeout) -> bytes:
        """See `DataRequests.get`."""
        answer = await self._answer("GetObject", obstore.get_async(self._store, name))
        required(answer.meta, "e_tag")  # the page of a proxy is no object
        allow(deadline, answer.meta["size"])
        data: bytes = (await self._answer("GetObject", answer.bytes_async())).to_bytes()
        return data

    async def get_range(self, name: str, start: int, end: int, deadline: asyncio.Timeout) -> View:
        """See `DataRequests.get_range`."""
        found = await self._answer("GetObject", obstore.get_range_async(self._store, name, start=start, end=end))
        return memoryview(found)

    async def _answer(self, operation: str, request: Awaitable[T]) -> T:
        try:
            return await request
        except (BaseError, FileNotFoundError) as error:
            raise _translate(error, operation, self._endpoint) from error


def _are_large(body: Sequence[Buffer]) -> bool:
    return len(body) > 1 and body_size(body) >= _JOINED_BYTES * len(body)


def _translate(error: Exception, operation: str, endpoint: str) -> Exception:
    """Return the exception that botocore would have raised."""
    translated: Exception
    text = str(error)
    status = _STATUS.search(text)
    if status is not None:
        code, message = _CODE.search(text), _MESSAGE.search(text)
        said = {"Code": code[1] if code else status[1], "Message": message[1] if message else ""}
        translated = ClientError({"Error": said, "ResponseMetadata": {"HTTPStatusCode": int(status[1])}}, operation)
        return translated
    reason = text.partition("\n")[0]
    words = _ADDRESS.sub("", text).lower()
    if "non-partial response" in words:
        return StoreUnsupported("the server ignores the Range header of a GET")
    if "certificate" in words:  # before the others: it quotes the names of the certificate
        translated = SSLError(endpoint_url=endpoint, error=reason)
    elif "redirect" in words:  # its client follows none, and keeps neither status nor code
        said = {"Code": "PermanentRedirect", "Message": reason}
        translated = ClientError({"Error": said, "ResponseMetadata": {"HTTPStatusCode": 301}}, operation)
    elif "kind: connect" in words:
        translated = EndpointConnectionError(endpoint_url=endpoint)
    else:
        translated = ConnectionError(reason)
    return translated
