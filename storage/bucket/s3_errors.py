"""Classification of S3 errors: which are retried, and which exception each of the others becomes.

`classify` maps the exceptions of botocore and aiohttp to `Transient` (the retry loop continues) or to the error for the
caller. The codes are those of "Error responses" in the Amazon S3 API reference, which other servers use too.

Entry: `classify`, `ATTEMPT_ERRORS`, `required`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
    SSLError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError

from tidelog.runtime.errors import ConfigError
from tidelog.storage.bucket.common import (
    BucketMissing,
    StoreAccessDenied,
    StoreRefused,
    StoreUnsupported,
    StoreWrongRegion,
    Transient,
)
from tidelog.storage.bucket.store import ObjectExists, ObjectNotFound, RangePastEnd

ATTEMPT_ERRORS: Final = (BotoCoreError, ClientError, ResponseParserError, aiohttp.ClientError, TimeoutError, OSError)
"""Every exception that an attempt may raise and `classify` handles; any other is a defect."""

_NETWORK_ERRORS: Final = (
    BotoConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ResponseParserError,
    aiohttp.ClientError,
    TimeoutError,
    OSError,
)
_CREDENTIAL_ERRORS: Final = (NoCredentialsError, PartialCredentialsError, ProfileNotFound)
_TRANSIENT_CODES: Final = frozenset(
    {
        "RequestTimeout",  # 400: the body was sent too slowly
        "ExpiredToken",  # botocore fetches new temporary credentials before the next attempt
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "TooManyRequests",
    }
)
_TRANSIENT_STATUS: Final = frozenset(
    {
        408,
        409,  # ConditionalRequestConflict, OperationAborted: S3 requests a retry. A HEAD carries no code.
        429,
    }
)
_ACCESS_HINTS: Final = {
    "RequestTimeTooSkewed": "set this machine's clock",
    "InvalidAccessKeyId": "check s3.access_key_id, or AWS_ACCESS_KEY_ID in the environment",
    "InvalidToken": "check the session token of the credentials",
    "TokenRefreshRequired": "check the session token of the credentials",
    "SignatureDoesNotMatch": "check s3.secret_access_key, or AWS_SECRET_ACCESS_KEY in the environment",
}
_ACCESS_HINT: Final = "check the credentials and that their policy allows the bucket"
_NAME_HINT: Final = "is {!r} a legal name? Buckets have 3 to 63 lower-case letters, digits, dots and hyphens"
_REGION_CODES: Final = frozenset(
    {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
)


def required(answer: Mapping[str, Any], name: str) -> Any:
    """Return what every answer of its kind has. Raises `ResponseParserError` if a proxy, or a portal, has answered."""
    if answer.get(name) is None:
        raise ResponseParserError(f"the answer has no {name}: was it an S3 server's?")
    return answer[name]


def is_charged(error: BaseException) -> bool:
    """Return whether S3 charges for an attempt with this error: the server answered with anything but a 5xx."""
    if not isinstance(error, ClientError):
        return False
    return 0 < int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) < 500


def classify(error: BaseException, *, what: str, key: str, bucket: str, endpoint: str) -> Exception:
    """Return the error that stands for `error`, which one attempt of `what` on `key` raised."""
    if isinstance(error, ClientError):
        return _classify_answer(error, what=what, key=key, bucket=bucket, endpoint=endpoint)
    if isinstance(error, _CREDENTIAL_ERRORS):
        return StoreAccessDenied(
            f"no usable credentials for {endpoint}: {error}",
            hint="set s3.access_key_id and s3.secret_access_key, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    if isinstance(error, (*_NETWORK_ERRORS, CredentialRetrievalError)):
        return Transient(_network_reason(error, endpoint))
    return ConfigError(f"{what} cannot be sent to {endpoint}: {error}", hint="check the section [s3]")


def _network_reason(error: BaseException, endpoint: str) -> str:
    if isinstance(error, SSLError):
        return f"the TLS connection to {endpoint} failed: {error}"
    if isinstance(error, EndpointConnectionError | ConnectTimeoutError):
        return f"cannot connect to {endpoint}"
    if isinstance(error, ReadTimeoutError | TimeoutError):
        return f"no answer from {endpoint} in time"
    return f"the connection to {endpoint} broke: {error or type(error).__name__}"


def _classify_answer(error: ClientError, *, what: str, key: str, bucket: str, endpoint: str) -> Exception:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    text = str(error.response.get("Error", {}).get("Message", "") or code)
    answer = (
        f"{endpoint} answered {status}"
        + (f" {code}" if code != str(status) else "")
        + (f": {text}" if text not in (code, "") else "")
    )
    if code == "NotImplemented" or status == 501:
        return StoreUnsupported(f"{what} is not supported: {answer}")
    if code in _TRANSIENT_CODES or status >= 500 or status in _TRANSIENT_STATUS:
        return Transient(answer)
    if code == "NoSuchBucket":
        return BucketMissing(
            f"bucket {bucket} does not exist at {endpoint}", hint="create it, or set s3.create_bucket = true"
        )
    if status == 412 or code == "PreconditionFailed":
        return ObjectExists(f"object {key} exists in bucket {bucket} at {endpoint}")
    if status == 404:
        return ObjectNotFound(f"object {key} does not exist in bucket {bucket} at {endpoint}")
    if status == 416:
        return RangePastEnd(f"{what} of {key} was refused: {answer}")
    if code in _REGION_CODES or status in (301, 302, 307, 308):
        return StoreWrongRegion(
            f"{what} was sent to the wrong region: {answer}", hint="check s3.region and s3.endpoint"
        )
    if code in _ACCESS_HINTS or status in (401, 403):
        return StoreAccessDenied(f"{what} was refused: {answer}", hint=_ACCESS_HINTS.get(code, _ACCESS_HINT))
    hint = _NAME_HINT.format(bucket) if status == 400 and not key else None  # an error of HEAD has no message
    return StoreRefused(f"{what} was refused: {answer}", hint=hint)
