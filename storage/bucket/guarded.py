"""A decorator of a store backend that schedules, accounts and monitors every request.

Each request waits at the gate (`tidelog.storage.bucket.gate`), is counted on the account of its purpose
(`tidelog.storage.bucket.accounts`), and its outcome is recorded in the health (`tidelog.storage.bucket.health`). The
views that `for_purpose` and `with_receipt` return share the backend, the gate, the health, and the proof that the
bucket is the cluster's (`tidelog.storage.bucket.proof`), for which everything that changes the bucket waits.

Entry: `GuardedObjectStore`, created by `tidelog.storage.bucket.open.open_store`.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

from tidelog.runtime.clock import Clock
from tidelog.runtime.task_errors import expected
from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.accounts import Receipt
from tidelog.storage.bucket.common import body_size, check_store
from tidelog.storage.bucket.gate import PriorityGate
from tidelog.storage.bucket.health import BucketHealth
from tidelog.storage.bucket.proof import BucketProof
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.bucket.rights import RightsFacts, try_rights
from tidelog.storage.bucket.stats import StoreStats
from tidelog.storage.bucket.store import Backend, ObjectInfo, StoreCapabilities, UnfinishedUpload, View

P = ParamSpec("P")
T = TypeVar("T")


class GuardedObjectStore:
    """An `ObjectStore` over a backend. Its requests have `Purpose.OTHER` unless made by a view from `for_purpose`.

    Retries inside the backend keep their slot at the gate, so a slow or failing bucket gets fewer requests, not more.
    """

    def __init__(
        self,
        backend: Backend,
        gate: PriorityGate,
        clock: Clock,
        *,
        purpose: Purpose = Purpose.OTHER,
        health: BucketHealth | None = None,
        proof: BucketProof | None = None,
    ) -> None:
        """Without `proof` the bucket is taken for the right one: the caller has no metadata to compare it with."""
        self._backend = backend
        self._clock = clock
        self._purpose = purpose
        self.gate = gate
        self.health = health or BucketHealth(backend.url, clock)
        """Shared by all views."""
        self.proof = proof
        """Shared by all views."""

    def for_purpose(self, purpose: Purpose) -> GuardedObjectStore:
        """See `ObjectStore.for_purpose`. The view's requests are on the purpose's account."""
        backend = self._backend.with_account(self.stats.accounts.account(purpose.value))
        return self._view(backend, purpose)

    def with_receipt(self) -> tuple[GuardedObjectStore, Receipt]:
        """See `ObjectStore.with_receipt`."""
        receipt = Receipt(self.stats.accounts, self._purpose.value)
        return self._view(self._backend.with_account(receipt), self._purpose), receipt

    def _view(self, backend: Backend, purpose: Purpose) -> GuardedObjectStore:
        return GuardedObjectStore(
            backend, self.gate, self._clock, purpose=purpose, health=self.health, proof=self.proof
        )

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return self._backend.url

    @property
    def stats(self) -> StoreStats:
        """Return the backend's statistics. Latencies exclude the wait at the gate."""
        return self._backend.stats

    async def _ask(
        self, note: AbstractContextManager[None], request: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Send one request when the gate admits it; `note` records its outcome."""
        await self.gate.enter(self._purpose)
        try:
            with note:
                try:
                    return await request(*args, **kwargs)
                except Exception as error:
                    raise expected("bucket", error) from error
        finally:
            self.gate.leave(self._purpose)

    async def _writable(self) -> None:
        if self.proof is not None and not self.proof.is_proven:
            await self.proof.wait()

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """See `ObjectStore.put`. A multipart upload enters the gate once."""
        await self._writable()
        return await self._ask(
            self.health.note("put", body_size(body)), self._backend.put, key, body, if_absent=if_absent
        )

    async def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        return await self._ask(self.health.note("get"), self._backend.get, key)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        """See `ObjectStore.get_ranges`."""
        size = sum(end - start for start, end in ranges)
        return await self._ask(self.health.note("get", size), self._backend.get_ranges, key, ranges)

    async def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return await self._ask(self.health.note("get"), self._backend.head, key)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """See `ObjectStore.list`. A slot is held during each request, not while the caller handles a page."""
        found = self._backend.list(prefix, start_after=start_after)
        while True:
            await self.gate.enter(self._purpose)
            try:
                with self.health.note("list"):
                    info = await anext(found, None)
            except Exception as error:
                raise expected("bucket", error) from error
            finally:
                self.gate.leave(self._purpose)
            if info is None:
                return
            yield info

    async def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        await self._writable()
        await self._ask(self.health.note("delete"), self._backend.delete, keys)

    async def unfinished(self, prefix: str) -> builtins.list[UnfinishedUpload]:
        """See `ObjectStore.unfinished`. No part of the health: a policy may well not allow it."""
        return await self._ask(nullcontext(), self._backend.unfinished, prefix)

    async def abort(self, upload: UnfinishedUpload) -> None:
        """See `ObjectStore.abort`."""
        await self._writable()
        await self._ask(nullcontext(), self._backend.abort, upload)

    async def probe(self) -> StoreCapabilities:
        """See `ObjectStore.probe`. It sends requests of each kind: failures from before it are over, such as those of
        other parts while the bucket of a new cluster did not exist."""
        found = await self._ask(self.health.note("check"), self._backend.probe)
        self.health.probed()
        return found

    async def check(self, key: str) -> None:
        """Write, read, list and delete the object `key`, which is for nothing else, to learn the bucket's health.

        Raises `Unavailable`, and what else the backend's requests raise.
        """
        await self._writable()
        await self._ask(self.health.note("check"), check_store, self._backend, key)
        self.health.checked()

    async def try_rights(self) -> RightsFacts:
        """Try each right that Tidelog needs; see `tidelog.storage.bucket.rights`. It passes the gate as one request."""
        return await self._ask(nullcontext(), try_rights, self._backend, self._clock)

    async def close(self) -> None:
        """See `ObjectStore.close`. Closes the bucket for all views; only the owner calls it."""
        await self._backend.close()
