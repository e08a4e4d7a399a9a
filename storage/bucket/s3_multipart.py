"""Multipart upload of one large object: parts in parallel, abort on failure.

Invariants:
- The object appears as a whole, when `CompleteMultipartUpload` succeeds.
- At most `PARTS_IN_FLIGHT` parts are held in memory as copies.
- When `run` ends early, by an error or cancellation, the upload is aborted, so that its parts do not continue being
  charged for. If the abort fails too, that is logged with the upload id.

Entry: `MultipartUpload.run`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Any, Final, Protocol

from botocore.exceptions import ClientError

from tidelog.runtime.errors import TidelogError, Unavailable
from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.accounts import RequestKind
from tidelog.storage.bucket.common import gather_or_cancel, slice_body
from tidelog.storage.bucket.s3_client import WRITER_ID, payload
from tidelog.storage.bucket.s3_errors import required
from tidelog.storage.bucket.stats import OperationStats
from tidelog.storage.bucket.store import ObjectNotFound

logger = logging.getLogger(__name__)

MIN_PART_BYTES: Final = 5 << 20
"""S3's lower limit for every part but the last."""
MAX_PARTS: Final = 10_000
"""S3's upper limit on the number of parts."""
PARTS_IN_FLIGHT: Final = 4
"""Each holds a copy of its part; four fill a 10 Gbit/s link at the 300 MB/s measured for one connection."""
ABORT_BUDGET_S: Final = 10.0


class Call(Protocol):
    """`S3ObjectStore`'s function for a request with retries."""

    async def __call__(
        self,
        stats: OperationStats,
        what: str,
        key: str,
        request: Any,
        *,
        kind: RequestKind,
        size: int = 0,
        budget_s: float | None = None,
    ) -> Any:
        """Run `request(client, deadline)` until it succeeds or the budget is spent."""
        ...


class MultipartUpload:
    """One upload of the object `key`, whose full name in `bucket` is `name`, in parts of at least `part_bytes`."""

    def __init__(self, call: Call, bucket: str, key: str, name: str, part_bytes: int) -> None:
        self._call = call
        self._target = {"Bucket": bucket, "Key": name}
        self._key = key
        self._part_bytes = part_bytes
        self._writer = secrets.token_hex(16)

    async def run(self, stats: OperationStats, body: Sequence[Buffer], size: int) -> str:
        """Upload `body` of `size` bytes; returns the ETag. Raises what the store's `put` raises."""
        upload_id = await self._call(stats, "begin of multipart put", self._key, self._begin, kind="put")
        upload = {**self._target, "UploadId": upload_id}
        try:
            parts = await self._send_parts(stats, upload, body, size)
            return await self._finish(stats, upload, parts)
        except ObjectNotFound as error:
            raise Unavailable(
                f"the multipart upload of {self._key} disappeared from the server", hint="the put may be repeated"
            ) from error
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self._abort(stats, upload)))
            raise

    async def _begin(self, client: Any, _deadline: asyncio.Timeout) -> str:
        answer = await client.create_multipart_upload(**self._target, Metadata={WRITER_ID: self._writer})
        return str(required(answer, "UploadId"))

    async def _send_parts(
        self, stats: OperationStats, upload: dict[str, str], body: Sequence[Buffer], size: int
    ) -> list[dict[str, Any]]:
        part_bytes = max(self._part_bytes, -(-size // MAX_PARTS))
        slots = asyncio.Semaphore(PARTS_IN_FLIGHT)

        async def send(number: int) -> dict[str, Any]:
            async with slots:
                data = slice_body(body, (number - 1) * part_bytes, min(number * part_bytes, size))

                async def request(client: Any, _deadline: asyncio.Timeout) -> str:
                    answer = await client.upload_part(**upload, PartNumber=number, Body=payload(data))
                    return str(required(answer, "ETag"))

                etag = await self._call(
                    stats, f"put of part {number} of", self._key, request, kind="put", size=len(data)
                )
                return {"PartNumber": number, "ETag": etag}

        return await gather_or_cancel([send(number) for number in range(1, -(-size // part_bytes) + 1)])

    async def _finish(self, stats: OperationStats, upload: dict[str, str], parts: list[dict[str, Any]]) -> str:
        async def request(client: Any, _deadline: asyncio.Timeout) -> str:
            try:
                answer = await client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
            except ClientError as error:
                # The upload no longer exists: perhaps a completion whose reply was lost succeeded.
                if error.response.get("Error", {}).get("Code") != "NoSuchUpload":
                    raise
                answer = await client.head_object(**self._target)
                if answer.get("Metadata", {}).get(WRITER_ID) != self._writer:
                    raise
            return str(required(answer, "ETag")).strip('"')

        return str(await self._call(stats, "end of multipart put", self._key, request, kind="put"))

    async def _abort(self, stats: OperationStats, upload: dict[str, str]) -> None:
        async def request(client: Any, _deadline: asyncio.Timeout) -> None:
            await client.abort_multipart_upload(**upload)

        try:
            await self._call(
                stats, "abort of multipart put", self._key, request, kind="delete", budget_s=ABORT_BUDGET_S
            )
        except ObjectNotFound:
            return  # it was aborted already, or was completed and the reply was lost
        except TidelogError as error:
            logger.warning(
                "multipart upload left behind",
                extra={"key": self._key, "upload_id": upload["UploadId"], "error": str(error)},
            )
