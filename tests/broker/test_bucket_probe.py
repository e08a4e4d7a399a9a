"""The probe at a broker's start: one short answer, or an object that is not found at once, does not end the start."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tidelog.broker.bucket_probe import BucketProbe
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import ConfigError, InvalidInput
from tidelog.storage.bucket.common import StoreAccessDenied, past_end
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.store import ObjectNotFound, View


class InstantClock(SystemClock):
    async def sleep(self, seconds: float) -> None:
        return


class Store(MemoryObjectStore):
    """Answers range reads with `errors` first."""

    url = "memory://"

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        if self.errors:
            raise self.errors.pop(0)
        return await super().get_ranges(key, ranges)


async def proven() -> None:
    """It is the cluster's bucket."""


def probe(store: Store) -> BucketProbe:
    return BucketProbe(cast("Any", store), InstantClock(), random.Random(1), lambda error: pytest.fail(str(error)))


@pytest.mark.parametrize("must_fence", [True, False])
@pytest.mark.parametrize(
    "error",
    [past_end("key", 3, 9), InvalidInput("answered 416"), ObjectNotFound("key")],
    ids=lambda e: type(e).__name__,
)
async def test_one_short_or_absent_answer_is_asked_for_again(error: Exception, must_fence: bool) -> None:
    store = Store(error, error)
    await probe(store).meet(proven, first_start=True, must_fence=must_fence)
    assert not store.errors


@pytest.mark.parametrize("error", [StoreAccessDenied("denied"), ConfigError("no such region")])
async def test_what_waiting_cannot_mend_still_ends_a_first_start(error: Exception) -> None:
    with pytest.raises(type(error)):
        await probe(Store(error)).meet(proven, first_start=True, must_fence=True)
