"""What a request to the bucket is for: one word that decides who goes first and on whose account it is.

A component asks for its view once, when it is made: `self._store = for_purpose(store, Purpose.UPLOAD)`. Stores that
tell purposes apart (the gate of `storage.priority_gate`, the accounts of costs) have a method `for_purpose` which
returns an `ObjectStore` over the same bucket; wrappers pass the call on to what they wrap. A plain store, as in tests,
is its own view for every purpose. Nothing travels in context variables: who reads the code sees the purpose.

Requests and bytes are counted by purpose (`storage.bucket_accounts`). Whoever knows whose data a request carries asks
for a view of its own with a receipt, `store, receipt = with_receipt(self._store)`, and settles it afterwards.

Entry: `Purpose`, `for_purpose`, `with_receipt`.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol, TypeGuard, runtime_checkable

from storage.bucket_accounts import Account, Receipt
from storage.object_store import ObjectStore
from storage.object_store_stats import MeasuredObjectStore


class Purpose(Enum):
    """Why the bucket is asked, the most urgent first. The value is the name in metrics."""

    WAL = "wal"
    """Write-ahead log objects: a producer waits for each."""
    TAIL = "tail"
    """Reads that a consumer near the end waits for."""
    UPLOAD = "upload"
    """From the log cache to the bucket: when it stops, producers do, a little later."""
    COLD = "cold"
    """Reads of history, read-ahead included."""
    COMPACTION = "compaction"
    CLEAN = "clean"
    """Deletes, orphan search, verification."""
    OTHER = "other"
    """Probes and tools."""


@runtime_checkable
class PurposefulStore(Protocol):
    """A store that tells purposes apart."""

    def for_purpose(self, purpose: Purpose) -> MeasuredObjectStore:
        """The same bucket, asked for this purpose. Cheap; the view lives as long as the store and needs no close."""
        ...


def for_purpose(store: ObjectStore, purpose: Purpose) -> ObjectStore:
    """The view of `store` for `purpose`; the store itself if it makes no difference."""
    return store.for_purpose(purpose) if isinstance(store, PurposefulStore) else store


class AccountingStore(MeasuredObjectStore, Protocol):
    """A backend that counts its requests on an account."""

    def with_account(self, account: Account) -> MeasuredObjectStore:
        """The same bucket, with its requests on this account. Cheap; needs no close."""
        ...


class ReceiptStore(Protocol):
    """A store that gives receipts."""

    def with_receipt(self) -> tuple[MeasuredObjectStore, Receipt]:
        """The same bucket for the same purpose, and the receipt of all that this view asks."""
        ...


def gives_receipts(store: ObjectStore) -> TypeGuard[ReceiptStore]:
    """Whether a store is a `ReceiptStore`. Asked at every request: `isinstance` of a protocol would take 10 µs."""
    return hasattr(store, "with_receipt")


def keeps_accounts(store: ObjectStore) -> TypeGuard[AccountingStore]:
    """Whether a store is an `AccountingStore`."""
    return hasattr(store, "with_account")


def with_receipt(store: ObjectStore) -> tuple[ObjectStore, Receipt]:
    """A view of `store` for one piece of work, and its receipt; the store itself if it gives none."""
    return store.with_receipt() if gives_receipts(store) else (store, Receipt())
