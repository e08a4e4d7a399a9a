"""The bucket's health as reported by `/status`: for each kind of request, whether the bucket answers it.

The kinds are `get`, `put`, `list` and `delete`: a policy may allow some of them only. "No such object" and "exists
already" are answers; a bucket that returns them is healthy. Denied access is a failure, and so is a wrong configuration
that the bucket refuses, and a request that it refuses for any other reason. An error of the caller says nothing.

A bucket that nobody uses is not known to be healthy. So `BucketCheck` (`tidelog.broker.bucket_probe`) sends one request
of each kind when somebody asks, and notes the outcome as the kind `check`.

Entry: `BucketHealth.note`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import AlreadyExists, Closed, ConfigError, InvalidInput, NotFound, TidelogError
from tidelog.runtime.health import OperationHealth
from tidelog.storage.bucket.common import StoreRefused

RequestType = Literal["get", "put", "list", "delete", "check"]
SLOWEST_BYTES_PER_S: Final = 1 << 20
"""A large request at this speed is slow, and no problem."""
KINDS: Final[tuple[RequestType, ...]] = ("get", "put", "list", "delete", "check")


class BucketHealth:
    """The health by kind of request. Times in ms are since the Unix epoch, 0 for never."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.url = url
        self._clock = clock
        self.kinds: dict[RequestType, OperationHealth] = {kind: OperationHealth(kind) for kind in KINDS}
        self.last_success_ms = 0
        self.last_error_ms = 0
        self.last_error = ""

    @property
    def failures_in_a_row(self) -> int:
        """Return the largest number of failures in a row of any kind."""
        return max(one.failures_in_a_row for one in self.kinds.values())

    @contextmanager
    def note(self, kind: RequestType, size: int = 0) -> Iterator[None]:
        """Record the outcome of the `with` block, which is one request of this kind that moves `size` bytes."""
        health = self.kinds[kind]
        token = health.begin(self._clock.monotonic(), size / SLOWEST_BYTES_PER_S)
        try:
            yield
        except (NotFound, AlreadyExists):
            self.succeeded(kind, token)
            raise
        except (ConfigError, StoreRefused) as error:
            self.failed(kind, error, token)
            raise
        except (InvalidInput, Closed, asyncio.CancelledError, GeneratorExit):
            health.dropped(token)
            raise
        except TidelogError as error:
            self.failed(kind, error, token)
            raise
        except BaseException:
            health.dropped(token)
            raise
        else:
            self.succeeded(kind, token)

    def succeeded(self, kind: RequestType, token: int = 0) -> None:
        """Record that the bucket answered."""
        self.last_success_ms = self._clock.time_ms()
        self.kinds[kind].succeeded(self._clock.monotonic(), token)

    def failed(self, kind: RequestType, error: Exception, token: int = 0) -> None:
        """Record that a call failed after its retry budget was used up, or was refused."""
        self.last_error_ms = self._clock.time_ms()
        self.last_error = str(error)
        self.kinds[kind].failed(self._clock.monotonic(), error, token)

    def needs_check(self, after_s: float) -> bool:
        """Return whether some kind has had no outcome for `after_s` seconds, so that nobody knows how it is."""
        now_s = self._clock.monotonic()
        checked_s = self.kinds["check"].quiet_s(now_s)
        return checked_s >= after_s and any(one.quiet_s(now_s) >= after_s for one in self.kinds.values())

    def checked(self) -> None:
        """Take a check that has just succeeded: old failures that nothing has repeated are over."""
        now_s = self._clock.monotonic()
        for one in self.kinds.values():
            one.forgive(now_s, now_s)

    def probed(self) -> None:
        """Take a probe that has just succeeded: the bucket has answered requests of each kind."""
        for kind in self.kinds:
            self.succeeded(kind)

    def problems(self) -> list[str]:
        """Return what is wrong, one sentence for each kind; what a check found only if no other kind tells it."""
        now_s = self._clock.monotonic()
        found = {kind: problem for kind, one in self.kinds.items() if (problem := one.problem(now_s))}
        if len(found) > 1:
            found.pop("check", None)
        return [f"the bucket {self.url}: {problem}" for problem in found.values()]

    def report(self) -> dict[str, Any]:
        """Return the health as JSON."""
        return {
            "url": self.url,
            "healthy": not self.problems(),
            "last_success_ms": self.last_success_ms or None,
            "last_error_ms": self.last_error_ms or None,
            "last_error": self.last_error or None,
            "failures_in_a_row": self.failures_in_a_row,
            "requests": {kind: one.report(self._clock.monotonic()) for kind, one in self.kinds.items()},
        }
