"""`S3ObjectStore`: a bucket on AWS, MinIO, LocalStack or another server with the S3 API.

Puts and GETs of objects, which are nearly all requests and bytes, go through obstore or aiobotocore (`s3.client`; for
the reasons see docs/design/0004-object-store-client.md); everything else, and parts of multipart uploads, through
aiobotocore. This module adds retries inside one budget (the clients' own are off), a bound on requests in flight and on
the time of each attempt, one GET for neighbouring ranges, and parallel parts.

Invariants:
- A conditional create is one PUT with `If-None-Match: *`, never a multipart upload (see docs/libraries.md).
- A PUT whose reply was lost is sent again, and may then be refused because the first one succeeded. So every
  conditional PUT carries a writer id in the object's metadata; after a 412 the id in the bucket identifies the winner.
- A multipart upload that fails is aborted; its parts do not stay in the bucket.
- After `Unavailable` from a put, it is unknown whether the object exists.

Everything bound to an event loop is created on first use, so the store can be used by a loop in another thread.
Payloads are not signed: TLS, or the CRC32C of our formats, protects them, and SHA-256 would dominate the CPU time.

Entry: `S3ObjectStore`.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import copy
import logging
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from botocore.exceptions import ClientError, InvalidRegionError, ParamValidationError
from botocore.handlers import validate_bucket_name
from botocore.utils import is_valid_endpoint_url, is_valid_ipv6_endpoint_url, validate_region_name

from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import Closed, ConfigError, InvalidInput, Unavailable
from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.accounts import Account, RequestKind
from tidelog.storage.bucket.common import (
    BucketMissing,
    MergedRange,
    PlainViews,
    Retrier,
    body_size,
    check_key,
    check_ranges,
    gather_or_cancel,
    merge_ranges,
    past_end,
    probe_store,
    split_merged,
)
from tidelog.storage.bucket.s3_client import MIN_BYTES_PER_S, WRITER_ID, BotoRequests, DataRequests, open_client
from tidelog.storage.bucket.s3_errors import ATTEMPT_ERRORS, classify, is_charged, required
from tidelog.storage.bucket.s3_multipart import MIN_PART_BYTES, MultipartUpload
from tidelog.storage.bucket.stats import OperationStats, StoreStats
from tidelog.storage.bucket.store import ObjectInfo, ObjectNotFound, StoreCapabilities, UnfinishedUpload, View
from tidelog.storage.settings import S3Settings

logger = logging.getLogger(__name__)
T = TypeVar("T")
Request = Callable[[Any, asyncio.Timeout], Awaitable[T]]
"""One attempt: called with the aiobotocore client and the time-out of the attempt."""

MAX_PUT_BYTES: Final = 5 << 30
"""S3's limit on a single PUT, and so on a conditional create."""
DELETE_BATCH: Final = 1000
LIST_PAGE: Final = 1000
MAX_UNFINISHED: Final = 10_000
"""Multipart uploads listed per call; the caller that aborts them finds the rest the next time."""
START_BUDGET_S: Final = 5.0
"""How long `start` retries before it raises a descriptive error; the caller repeats it."""


class _Connection:
    """Mutable state that all views of a store share: the clients, each created on first use.

    Whoever only reads objects needs `data` only: aiobotocore's client costs 0.1 s of CPU time, and as many objects for
    the garbage collector to follow as all else that a small process has.
    """

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings  # not those of a view that happens to be the first to need a client
        self.opening = asyncio.Lock()
        self.resources = AsyncExitStack()
        self.client: Any = None
        self.data: DataRequests | None = None
        self.closed = False

    @property
    def opened_data(self) -> DataRequests:
        """Return `data`, which a call has opened. Raises `Closed` if the store was closed since."""
        if self.data is None:
            raise Closed("the object store was closed while a request waited for its turn")
        return self.data


class S3ObjectStore(PlainViews):
    """An `ObjectStore` on an S3 server. The constructor does no I/O. Raises `ConfigError` for wrong settings."""

    def __init__(self, settings: S3Settings, clock: Clock, rng: random.Random) -> None:
        _check_settings(settings)
        self._settings = settings
        self._clock = clock
        self._endpoint = settings.endpoint or f"AWS S3 ({settings.region})"
        self._bucket = settings.bucket
        self._prefix = f"{settings.prefix.strip('/')}/" if settings.prefix.strip("/") else ""
        self._retrier = Retrier(clock, rng)
        self._slots = asyncio.Semaphore(settings.max_concurrency)
        self._connection = _Connection(settings)
        self.stats = StoreStats(clock)
        self._account: Account = self.stats.accounts.account("other")

    def with_account(self, account: Account) -> S3ObjectStore:
        """See `Backend.with_account`. All views share connections and statistics."""
        view = copy.copy(self)
        view._account = account
        return view

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return f"s3://{self._bucket}/{self._prefix} at {self._endpoint}"

    async def start(self) -> None:
        """Connect, and find or create the bucket. May be called again after a failure; calling it is optional.

        Raises `Unavailable` (no answer, or the bucket is missing) and `ConfigError` (access refused).
        """
        stats = self.stats.operation("start")
        try:
            await self._call(stats, "finding the bucket", "", self._head_bucket, kind="head", budget_s=START_BUDGET_S)
        except ObjectNotFound as error:
            if not self._settings.create_bucket:
                raise BucketMissing(
                    f"bucket {self._bucket} does not exist at {self._endpoint}",
                    hint="create it, or set s3.create_bucket = true",
                ) from error
            await self._call(stats, "creating the bucket", "", self._create_bucket, kind="put", budget_s=START_BUDGET_S)
            logger.info("bucket created", extra={"bucket": self._bucket, "endpoint": self._endpoint})

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """See `ObjectStore.put`. `modified_ms` is this machine's time."""
        name = self._name(key)
        size = body_size(body)
        with self.stats.measure("put") as stats:
            if if_absent:
                if size > MAX_PUT_BYTES:
                    raise InvalidInput(f"a conditional create takes at most {MAX_PUT_BYTES} bytes, {key} has {size}")
                etag = await self._create(stats, key, name, body, size)
            elif size >= self._settings.multipart_bytes:
                upload = MultipartUpload(self._call, self._bucket, key, name, self._settings.multipart_bytes)
                etag = await upload.run(stats, body, size)
            else:
                etag = await self._put(stats, key, name, body, size)
            stats.bytes_out += size
            self._account.sent(size)
            return ObjectInfo(key, size, etag, self._clock.time_ms())

    async def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        name = self._name(key)

        async def request(_client: Any, deadline: asyncio.Timeout) -> bytes:
            return await self._connection.opened_data.get(name, deadline)

        with self.stats.measure("get") as stats:
            data = await self._call(stats, "get", key, request, kind="get", data_only=True)
            stats.bytes_in += len(data)
            self._account.received(len(data))
            return data

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        """See `ObjectStore.get_ranges`. Ranges at most `MERGE_GAP_BYTES` apart share a GET."""
        name = self._name(key)
        check_ranges(key, ranges)
        with self.stats.measure("get_ranges") as stats:
            merged = merge_ranges(ranges)
            reads = await gather_or_cancel([self._get_range(stats, key, name, one) for one in merged])
            return split_merged(ranges, [*zip(merged, reads, strict=True)])

    async def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        name = self._name(key)

        async def request(client: Any, _deadline: asyncio.Timeout) -> ObjectInfo:
            answer = await client.head_object(Bucket=self._bucket, Key=name)
            modified_ms = int(required(answer, "LastModified").timestamp() * 1000)
            return ObjectInfo(
                key, int(required(answer, "ContentLength")), required(answer, "ETag").strip('"'), modified_ms
            )

        with self.stats.measure("head") as stats:
            return await self._call(stats, "head", key, request, kind="head")

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """See `ObjectStore.list`. Each page begins after the last key of the previous one, so it can be retried.

        A page without keys need not be the last one. One that does not go on behind the page before it is `Unavailable`
        and not the end: whoever lists takes what is not listed for absent.
        """
        after = self._prefix + start_after if start_after else ""
        token = ""
        while True:
            arguments = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, "MaxKeys": LIST_PAGE}
            if token:
                arguments["ContinuationToken"] = token
            elif after:
                arguments["StartAfter"] = after

            async def request(client: Any, _deadline: asyncio.Timeout, arguments: Any = arguments) -> Any:
                answer = await client.list_objects_v2(**arguments)
                required(answer, "IsTruncated")
                return answer

            with self.stats.measure("list") as stats:
                page = await self._call(stats, "list", prefix, request, kind="list")
            contents = page.get("Contents", [])
            if contents and contents[0]["Key"] <= after:
                raise self._stuck(prefix, f"after {after} comes {contents[0]['Key']}")
            for entry in contents:
                yield ObjectInfo(
                    entry["Key"].removeprefix(self._prefix),
                    int(entry["Size"]),
                    entry["ETag"].strip('"'),
                    int(entry["LastModified"].timestamp() * 1000),
                )
            if not page["IsTruncated"]:
                return
            before, token = token, "" if contents else str(page.get("NextContinuationToken", ""))
            if contents:
                after = contents[-1]["Key"]
            elif token in ("", before):
                raise self._stuck(prefix, "a page without keys is not the last one, and does not say how to go on")

    def _stuck(self, prefix: str, what: str) -> Unavailable:
        return Unavailable(
            f"the listing of {prefix} in {self.url} does not go on: {what}",
            hint="look for a proxy between Tidelog and the bucket",
        )

    async def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`. 1,000 keys per request, one request after the other."""
        names = list(dict.fromkeys(self._name(key) for key in keys))
        for first in range(0, len(names), DELETE_BATCH):
            batch = {"Objects": [{"Key": name} for name in names[first : first + DELETE_BATCH]], "Quiet": True}

            async def request(client: Any, _deadline: asyncio.Timeout, batch: Any = batch) -> None:
                answer = await client.delete_objects(Bucket=self._bucket, Delete=batch)
                _check_deleted(answer.get("Errors", []))

            with self.stats.measure("delete") as stats:
                await self._call(stats, "delete", names[first], request, kind="delete")

    async def unfinished(self, prefix: str) -> builtins.list[UnfinishedUpload]:
        """See `ObjectStore.unfinished`."""
        found: builtins.list[UnfinishedUpload] = []
        markers: dict[str, str] = {}
        while len(found) < MAX_UNFINISHED:
            arguments = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, "MaxUploads": LIST_PAGE, **markers}

            async def request(client: Any, _deadline: asyncio.Timeout, arguments: Any = arguments) -> Any:
                return await client.list_multipart_uploads(**arguments)

            with self.stats.measure("list") as stats:
                page = await self._call(stats, "list uploads", prefix, request, kind="list")
            for entry in page.get("Uploads", []):
                started_ms = int(entry["Initiated"].timestamp() * 1000)
                found.append(UnfinishedUpload(entry["Key"].removeprefix(self._prefix), entry["UploadId"], started_ms))
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                break
            before = markers
            markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}
            if markers == before:
                raise self._stuck(prefix, f"the uploads after {page['NextKeyMarker']} are these again")
        return found

    async def abort(self, upload: UnfinishedUpload) -> None:
        """See `ObjectStore.abort`."""
        name = self._name(upload.key)

        async def request(client: Any, _deadline: asyncio.Timeout) -> None:
            await client.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload.upload_id)

        with self.stats.measure("delete") as stats, contextlib.suppress(ObjectNotFound):
            await self._call(stats, "abort upload", upload.key, request, kind="delete")

    def with_budget(self, attempt_s: float, budget_s: float) -> S3ObjectStore:
        """Return a view of the bucket that gives up sooner, if it would not by itself."""
        view = copy.copy(self)
        view._settings = msgspec.structs.replace(
            self._settings,
            request_timeout_ms=min(self._settings.request_timeout_ms, int(attempt_s * 1000)),
            retry_budget_ms=min(self._settings.retry_budget_ms, int(budget_s * 1000)),
        )
        return view

    async def begin_upload(self, key: str) -> UnfinishedUpload:
        """Begin a multipart upload, which the caller aborts: see `tidelog.storage.bucket.rights`."""
        name = self._name(key)

        async def request(client: Any, _deadline: asyncio.Timeout) -> str:
            answer = await client.create_multipart_upload(Bucket=self._bucket, Key=name)
            return str(answer["UploadId"])

        with self.stats.measure("put") as stats:
            upload_id = await self._call(stats, "begin of multipart put", key, request, kind="put")
        return UnfinishedUpload(key, upload_id, self._clock.time_ms())

    async def put_part(self, upload: UnfinishedUpload, body: bytes) -> None:
        """Put the first part of a multipart upload."""
        target = {"Bucket": self._bucket, "Key": self._name(upload.key), "UploadId": upload.upload_id}

        async def request(client: Any, _deadline: asyncio.Timeout) -> None:
            await client.upload_part(**target, PartNumber=1, Body=body)

        with self.stats.measure("put") as stats:
            await self._call(stats, "put of a part of", upload.key, request, kind="put", size=len(body))

    async def probe(self) -> StoreCapabilities:
        """See `ObjectStore.probe`. Finds or creates the bucket first (`start`)."""
        await self.start()
        return await probe_store(self, self._endpoint)

    async def close(self) -> None:
        """See `ObjectStore.close`. Calls in progress should have ended; their result is otherwise undefined."""
        connection = self._connection
        connection.closed = True
        async with connection.opening:
            connection.client = connection.data = None
            await connection.resources.aclose()

    # -- single requests -----------------------------------------------------------------------------------------------

    async def _put(self, stats: OperationStats, key: str, name: str, body: Sequence[Buffer], size: int) -> str:
        async def request(_client: Any, _deadline: asyncio.Timeout) -> str:
            return await self._connection.opened_data.put(name, body)

        return await self._call(stats, "put", key, request, kind="put", size=size, data_only=True)

    async def _create(self, stats: OperationStats, key: str, name: str, body: Sequence[Buffer], size: int) -> str:
        # From the system's entropy, not from `rng`: two writers must differ, whatever their seeds.
        writer = secrets.token_hex(16)

        async def request(client: Any, _deadline: asyncio.Timeout) -> str:
            try:
                return await self._connection.opened_data.put(name, body, writer)
            except ClientError as error:
                if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") != 412:
                    raise
                answer = await self._own_success(client, name, writer, error)
            return str(required(answer, "ETag")).strip('"')

        return await self._call(stats, "conditional create", key, request, kind="put", size=size)

    async def _own_success(self, client: Any, name: str, writer: str, refusal: ClientError) -> Any:
        """After a 412: return the HEAD of the object if this call wrote it; raise `refusal` if another writer did.

        Checked even on a first attempt: the client may repeat a PUT by itself when a kept connection breaks.
        """
        self._account.request("head")
        try:
            answer = await client.head_object(Bucket=self._bucket, Key=name)
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404:
                raise refusal from None  # it existed, and was deleted since
            raise
        if answer.get("Metadata", {}).get(WRITER_ID) != writer:
            raise refusal
        return answer

    async def _get_range(self, stats: OperationStats, key: str, name: str, one: MergedRange) -> View:
        async def request(_client: Any, deadline: asyncio.Timeout) -> View:
            return await self._connection.opened_data.get_range(name, one.start, one.end, deadline)

        size = one.end - one.start
        data = await self._call(stats, "range get", key, request, kind="get", size=size, data_only=True)
        if len(data) != size:
            raise past_end(key, one.start, one.end)
        stats.bytes_in += len(data)
        self._account.received(len(data))
        return data

    async def _head_bucket(self, client: Any, _deadline: asyncio.Timeout) -> None:
        await client.head_bucket(Bucket=self._bucket)

    async def _create_bucket(self, client: Any, _deadline: asyncio.Timeout) -> None:
        arguments: dict[str, Any] = {"Bucket": self._bucket}
        if self._settings.region != "us-east-1":
            arguments["CreateBucketConfiguration"] = {"LocationConstraint": self._settings.region}
        try:
            await client.create_bucket(**arguments)
        except ClientError as error:
            # Another broker created it first; if it belongs to another account, the first access fails.
            if error.response.get("Error", {}).get("Code") not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise

    # -- every request -------------------------------------------------------------------------------------------------

    def _name(self, key: str) -> str:
        return check_key(self._prefix + check_key(key))

    async def _connected(self, *, data_only: bool) -> Any:
        """Return aiobotocore's client; with `data_only` only `_Connection.data` is sure to be open."""
        connection = self._connection
        if connection.data is None or (connection.client is None and not data_only):
            async with connection.opening:
                if connection.closed:
                    raise Closed(f"the object store {self.url} is closed")
                await self._open(connection, data_only=data_only)
        return connection.client

    async def _open(self, connection: _Connection, *, data_only: bool) -> None:
        """Open the clients that are missing, or none of them: whoever has no credentials yet tries again and again."""
        async with AsyncExitStack() as opened:
            client, data = connection.client, connection.data
            if client is None and (self._settings.client == "aiobotocore" or not data_only):
                client = await open_client(connection.settings, opened)
            if data is None:
                data = await self._open_data(client, opened)
            connection.client, connection.data = client, data
            await connection.resources.enter_async_context(opened.pop_all())

    async def _open_data(self, client: Any, resources: AsyncExitStack) -> DataRequests:
        if self._settings.client == "aiobotocore":
            return BotoRequests(client, self._bucket)
        try:
            from tidelog.storage.bucket.obstore import open_requests
        except ImportError as error:
            raise ConfigError(
                f"s3.client is obstore, which cannot be used here: {error}",
                hint="`make install` (or pip install --editable .) installs it; or set s3.client = aiobotocore",
            ) from error
        return await open_requests(self._connection.settings, resources)

    async def _call(
        self,
        stats: OperationStats,
        what: str,
        key: str,
        request: Request[T],
        *,
        kind: RequestKind,
        size: int = 0,
        data_only: bool = False,
        budget_s: float | None = None,
    ) -> T:
        """Run `request`, which moves about `size` bytes, with retries, a time-out per attempt and an overall budget.

        With `data_only` the request needs no client of aiobotocore.

        Attempts that are answered are counted as `kind`.
        """

        async def attempt() -> T:
            try:
                client = await self._connected(data_only=data_only)
                async with self._slots:
                    timeout_s = self._settings.request_timeout_ms / 1000 + size / MIN_BYTES_PER_S
                    async with asyncio.timeout(timeout_s) as deadline:
                        result = await request(client, deadline)
                        self._account.request(kind)
                        return result
            except ATTEMPT_ERRORS as error:
                if is_charged(error):
                    self._account.request(kind)
                raise classify(error, what=what, key=key, bucket=self._bucket, endpoint=self._endpoint) from error

        budget = min(self._settings.retry_budget_ms / 1000, budget_s or float("inf"))
        subject = f"{what} {key} in {self.url}" if key else f"{what} {self._bucket} at {self._endpoint}"
        hint = f"is an S3 server running and healthy at {self._endpoint}? Check s3.endpoint"
        return await self._retrier.run(subject, hint, budget, stats, attempt)


_STATUS_OF_KEY: Final = {"InternalError": 500, "ServiceUnavailable": 503, "OperationAborted": 409, "AccessDenied": 403}
"""The status that stands for the error of a key, which has none."""


def _check_deleted(errors: Sequence[Any]) -> None:
    """Raise the first error of a batch delete as if for a single delete; absent keys are success."""
    for error in errors:
        if error.get("Code") not in ("NoSuchKey", None):
            status = _STATUS_OF_KEY.get(error["Code"], 400)
            raise ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}, "DeleteObjects")


def _check_place(settings: S3Settings) -> None:
    """Check what no request could be sent with. botocore would tell, but who needs `data` only does not ask it."""
    if settings.endpoint and not _is_address(settings.endpoint):
        raise ConfigError(f"s3.endpoint is {settings.endpoint!r}", hint="it is http(s)://HOST:PORT")
    try:
        validate_region_name(settings.region)
        validate_bucket_name({"Bucket": settings.bucket})
    except InvalidRegionError as error:
        raise ConfigError(f"s3.region is {settings.region!r}", hint="it has letters, digits and hyphens") from error
    except ParamValidationError as error:
        hint = "it has 3 to 255 letters, digits, dots, hyphens and underscores, or is an ARN"
        raise ConfigError(f"s3.bucket is {settings.bucket!r}", hint=hint) from error


def _is_address(url: str) -> bool:
    try:
        _ = urlsplit(url).port
        return bool(is_valid_endpoint_url(url) or is_valid_ipv6_endpoint_url(url))
    except ValueError:
        return False


def _check_settings(settings: S3Settings) -> None:
    if not settings.bucket:
        raise ConfigError("s3.endpoint is set but s3.bucket is not", hint="name the bucket: --bucket NAME")
    if settings.endpoint and not settings.endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"s3.endpoint is {settings.endpoint!r}", hint="it begins with http:// or https://")
    _check_place(settings)
    if bool(settings.access_key_id) != bool(settings.secret_access_key):
        raise ConfigError("one of s3.access_key_id and s3.secret_access_key is set", hint="set both, or neither")
    if settings.multipart_bytes < MIN_PART_BYTES:
        raise ConfigError(f"s3.multipart_bytes is {settings.multipart_bytes}", hint=f"at least {MIN_PART_BYTES}")
    for field in ("max_concurrency", "request_timeout_ms", "retry_budget_ms"):
        if getattr(settings, field) < 1:
            raise ConfigError(f"s3.{field} is {getattr(settings, field)}", hint="at least 1")
