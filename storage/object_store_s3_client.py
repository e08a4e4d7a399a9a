"""The aiobotocore client, tuned, and the form in which it takes bodies.

The settings are those that deps.md measured: checksums and payload signatures only where the server requires them (our
formats carry CRC32C), as many connections as requests in flight, no retries (the store has its own budget for them).

Entry: `open_client`.
"""

from __future__ import annotations

import asyncio
import io
import socket
import weakref
from contextlib import AsyncExitStack
from typing import Any, Final

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.handlers import add_expect_header, set_list_objects_encoding_type_url

from storage.settings import S3Settings

WRITER_ID: Final = "tidelog-writer"
"""The object metadata (`x-amz-meta-…`) in which a writer recognises its own success."""
STREAMED_BODY_BYTES: Final = 1 << 20
"""Bodies above this go out in chunks: aiohttp would write a larger `bytes` in one step and stall the loop."""
CONNECT_TIMEOUT_S: Final = 5.0

CLOSE_TIMEOUT_S: Final = 1.0
"""How long closing waits for the server to read what was sent to it, before it cuts the connection."""


class Connections:
    """Makes the sockets of a client, and sees them closed.

    aiohttp does not wait for a connection that it gave up because the answer came before the whole body was sent (a 412
    to a large conditional put, a 503): such a connection would outlive the client, and warn about it.
    """

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def __call__(self, address: Any) -> socket.socket:
        """A socket for an entry of `getaddrinfo`."""
        family, kind, protocol, *_ = address
        made = socket.socket(family=family, type=kind, proto=protocol)
        self._sockets.add(made)
        return made

    async def closed(self) -> None:
        """Return when all are closed; cut those that are not after `CLOSE_TIMEOUT_S`."""
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
        return  # the other side was faster


async def open_client(settings: S3Settings, resources: AsyncExitStack) -> Any:
    """An S3 client on the running loop; it ends with `resources`."""
    connections = Connections()
    resources.push_async_callback(connections.closed)
    timeout_s = settings.request_timeout_ms / 1000
    config = AioConfig(
        connect_timeout=min(CONNECT_TIMEOUT_S, timeout_s),
        read_timeout=timeout_s,
        max_pool_connections=settings.max_concurrency,
        connector_args={"socket_factory": connections},
        retries={"total_max_attempts": 1, "mode": "standard"},
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
    # A body that can be read would be announced by `Expect: 100-continue`: a round trip more for each large object.
    client.meta.events.unregister("before-call.s3", add_expect_header)
    # Listings come as they are, not URL-encoded: keys have no characters that XML lacks (`check_key`), and LocalStack
    # compares encoded keys with a plain StartAfter, which loses keys.
    client.meta.events.unregister("before-parameter-build.s3.ListObjectsV2", set_list_objects_encoding_type_url)
    return client


def payload(data: bytes) -> bytes | io.BytesIO:
    """`data` as aiobotocore sends it best; made anew for each attempt. It takes no memoryview."""
    return io.BytesIO(data) if len(data) > STREAMED_BODY_BYTES else data
