"""The aiobotocore client, its configuration, and the form in which it takes bodies.

The settings are those of docs/libraries.md: checksums and payload signatures only where the server requires them (our
formats carry CRC32C), as many connections as requests in flight, no retries (the store retries within its own budget).

Puts and GETs of objects, nearly all of the traffic, go through `DataRequests`, which
`tidelog.storage.bucket.obstore` implements with another client.

Entry: `open_client`, `BotoRequests`.
"""

from __future__ import annotations

import asyncio
import io
import socket
import weakref
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, Protocol

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.handlers import add_expect_header, set_list_objects_encoding_type_url

from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.common import StoreUnsupported, Transient, join_body
from tidelog.storage.bucket.s3_errors import required
from tidelog.storage.bucket.store import View
from tidelog.storage.settings import S3Settings

WRITER_ID: Final = "tidelog-writer"
"""The object metadata (`x-amz-meta-…`) by which a writer recognises its own object."""
STREAMED_BODY_BYTES: Final = 1 << 20
"""Larger bodies are sent in chunks: aiohttp would write a larger `bytes` in one step and block the event loop."""
CONNECT_TIMEOUT_S: Final = 5.0

MIN_BYTES_PER_S: Final = 1 << 20
"""An attempt gets its time-out plus a second for each MiB it moves; below that rate, a retry on another connection
is likely to be faster."""
CLOSE_TIMEOUT_S: Final = 1.0
"""How long closing waits for the server to read what was sent, before the connection is reset."""


class Connections:
    """Creates the sockets of a client, and waits until they are closed.

    aiohttp does not wait for a connection that it abandoned because the answer came before the whole body was sent (a
    412 to a large conditional put, a 503). Such a connection would outlive the client and cause a `ResourceWarning`.
    """

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def __call__(self, address: Any) -> socket.socket:
        """Return a socket for an entry of `getaddrinfo`."""
        family, kind, protocol, *_ = address
        made = socket.socket(family=family, type=kind, proto=protocol)
        self._sockets.add(made)
        return made

    async def closed(self) -> None:
        """Return when all are closed; reset those that are still open after `CLOSE_TIMEOUT_S`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_TIMEOUT_S
        while lingering := [one for one in self._sockets if one.fileno() != -1]:
            if loop.time() > deadline + CLOSE_TIMEOUT_S:
                return
            if loop.time() > deadline:
                for one in lingering:
                    _cut(one)
            await asyncio.sleep(0.01)


def _cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the peer closed it first


async def open_client(settings: S3Settings, resources: AsyncExitStack) -> Any:
    """Return an S3 client on the running loop; `resources` closes it."""
    connections = Connections()
    resources.push_async_callback(connections.closed)
    timeout_s = settings.request_timeout_ms / 1000
    config = AioConfig(
        connect_timeout=min(CONNECT_TIMEOUT_S, timeout_s),
        read_timeout=timeout_s,
        max_pool_connections=settings.max_concurrency,
        connector_args={"socket_factory": connections},
        retries={"total_max_attempts": 1, "mode": "standard"},
        ignore_configured_endpoint_urls=True,  # without `s3.endpoint` it is AWS, whatever AWS_ENDPOINT_URL says
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"payload_signing_enabled": False, "addressing_style": "path" if settings.endpoint else "auto"},
    )
    client = await resources.enter_async_context(
        AioSession().create_client(
            "s3",
            endpoint_url=settings.endpoint or None,
            region_name=settings.region,
            aws_access_key_id=settings.access_key_id or None,
            aws_secret_access_key=settings.secret_access_key or None,
            config=config,
        )
    )
    client.meta.events.register_first("needs-retry.s3", _follow_no_unknown_region)
    # A file-like body would be announced by `Expect: 100-continue`: a further round trip for each large object.
    client.meta.events.unregister("before-call.s3", add_expect_header)
    # Listings are not URL-encoded: keys have no characters that XML cannot represent (`check_key`), and LocalStack
    # compares encoded keys with a plain StartAfter, which loses keys.
    client.meta.events.unregister("before-parameter-build.s3.ListObjectsV2", set_list_objects_encoding_type_url)
    return client


def _follow_no_unknown_region(
    response: tuple[Any, dict[str, Any]] | None, request_dict: dict[str, Any], **_: object
) -> None:
    """Keep botocore from following a redirect that names no region.

    It would ask for the bucket's region with a HEAD, which such a server (a proxy that redirects everything) answers
    with the same redirect, until the interpreter's stack is full.
    """
    if response is None or response[0].status_code < 300:
        return
    answer = response[1]
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    if "x-amz-bucket-region" not in headers and not answer.get("Error", {}).get("Region"):
        request_dict.get("context", {}).setdefault("s3_redirect", {})["redirected"] = True


def payload(data: bytes) -> bytes | io.BytesIO:
    """Return `data` in the form aiobotocore sends fastest; new for each attempt. It takes no memoryview."""
    return io.BytesIO(data) if len(data) > STREAMED_BODY_BYTES else data


class DataRequests(Protocol):
    """Single attempts at the requests that move objects. They raise what `tidelog.storage.bucket.s3_errors`
    classifies.

    `name` is the key with its prefix.
    """

    async def put(self, name: str, body: Sequence[Buffer], writer: str = "") -> str:
        """Put an object; return its ETag. With a writer id: only if it does not exist, storing the id with it."""
        ...

    async def get(self, name: str, deadline: asyncio.Timeout) -> bytes:
        """Return a whole object. The deadline, which covers the start of the answer, is extended for its size."""
        ...

    async def get_range(self, name: str, start: int, end: int, deadline: asyncio.Timeout) -> View:
        """Return bytes `[start, end)`; fewer where the object ends before. Raises `StoreUnsupported` too."""
        ...


class BotoRequests:
    """`DataRequests` by aiobotocore."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    async def put(self, name: str, body: Sequence[Buffer], writer: str = "") -> str:
        """See `DataRequests.put`."""
        condition: dict[str, Any] = {"IfNoneMatch": "*", "Metadata": {WRITER_ID: writer}} if writer else {}
        answer = await self._client.put_object(
            Bucket=self._bucket, Key=name, Body=payload(join_body(body)), **condition
        )
        return str(required(answer, "ETag")).strip('"')

    async def get(self, name: str, deadline: asyncio.Timeout) -> bytes:
        """See `DataRequests.get`."""
        return await _read(await self._client.get_object(Bucket=self._bucket, Key=name), deadline)

    async def get_range(self, name: str, start: int, end: int, deadline: asyncio.Timeout) -> View:
        """See `DataRequests.get_range`."""
        answer = await self._client.get_object(Bucket=self._bucket, Key=name, Range=f"bytes={start}-{end - 1}")
        if "ContentRange" not in answer:
            answer["Body"].close()
            raise StoreUnsupported("the server ignores the Range header of a GET")
        return await _read(answer, deadline)


async def _read(answer: Any, deadline: asyncio.Timeout) -> bytes:
    """Return the complete body of an answer. Raises `Transient`."""
    size = int(required(answer, "ContentLength"))
    required(answer, "ETag")  # the page of a proxy is no object
    allow(deadline, size)
    async with answer["Body"] as stream:
        data: bytes = await stream.read()
    if len(data) != size:
        raise Transient(f"the answer ended after {len(data)} of {size} bytes")
    return data


def allow(deadline: asyncio.Timeout, size: int) -> None:
    """Extend the deadline of an attempt by the time that `size` bytes may take."""
    when = deadline.when()
    assert when is not None
    deadline.reschedule(when + size / MIN_BYTES_PER_S)
