"""What is to be thought of the bucket: each right that was tried, its latency, its clock.

Entry: `judge_rights`.
"""

from __future__ import annotations

from typing import Final

from tidelog.doctor.findings import DoctorFinding, found, ok
from tidelog.storage.bucket.rights import Right, RightOutcome, RightsFacts, RightTry

SLOW_MS: Final = 1_000.0
CLOCK_OFF_MS: Final = 60_000
"""Times of objects have whole seconds, and the tries themselves take some."""

_CHECKS: Final[dict[RightOutcome, str]] = {
    "denied": "bucket.denied",
    "no-bucket": "bucket.missing",
    "wrong-region": "bucket.wrong-region",
    "timeout": "bucket.timeout",
    "unreachable": "bucket.unreachable",
    "refused": "bucket.refused",
    "unsupported": "bucket.unsupported",
    "short": "bucket.short",
    "wrong-bytes": "bucket.wrong-bytes",
    "stale": "bucket.stale",
}
_POLICY: Final[dict[Right, str]] = {
    "put": "s3:PutObject",
    "get": "s3:GetObject",
    "ranged get": "s3:GetObject",
    "head": "s3:GetObject",
    "list": "s3:ListBucket",
    "conditional put": "s3:PutObject",
    "multipart begin": "s3:PutObject",
    "multipart part": "s3:PutObject",
    "multipart list": "s3:ListBucketMultipartUploads",
    "multipart abort": "s3:AbortMultipartUpload",
    "delete": "s3:DeleteObject",
}
_CLEAN_UP: Final[tuple[Right, ...]] = ("multipart list", "multipart abort")
"""Rights without which everything goes on, but what crashes leave stays."""


def judge_rights(
    where: str, facts: RightsFacts, *, wal_in_bucket: bool = False, may_create: bool = False
) -> list[DoctorFinding]:
    """Judge the tries of one node. `may_create`: the bucket is created at the first start if there is none."""
    findings = [_judge(where, facts, each, wal_in_bucket, may_create) for each in facts.tries]
    found_wrong = [each for each in findings if each is not None]
    good = [each for each in facts.tries if each.outcome == "ok"]
    if good:
        slowest = max(good, key=lambda each: each.took_ms)
        told = f"{facts.url}: {', '.join(f'{each.right} {each.took_ms:.0f} ms' for each in good)}"
        if slowest.took_ms >= SLOW_MS:
            found_wrong.append(found("bucket.slow", where, told))
        else:
            found_wrong.append(ok("bucket.rights", where, told))
    off_ms = facts.server_ms - facts.here_ms
    if facts.server_ms and abs(off_ms) >= CLOCK_OFF_MS:
        found_wrong.append(
            found("bucket.clock", where, f"the bucket's clock is {off_ms / 1000:+.0f} s off this node's")
        )
    if facts.left_behind:
        found_wrong.append(found("bucket.leftover", where, f"left in {facts.url}: {', '.join(facts.left_behind[:5])}"))
    return found_wrong


def _judge(
    where: str, facts: RightsFacts, one: RightTry, wal_in_bucket: bool, may_create: bool
) -> DoctorFinding | None:
    """Judge a single try; None for one that is well, or that another failure prevented."""
    if one.outcome in ("ok", "not-tried"):
        return None
    seen = f"{facts.url}: {one.right}: {one.detail}"
    if one.outcome == "no-bucket" and may_create:
        return found("bucket.to-be-created", where, seen)
    if one.right in _CLEAN_UP:
        return found("bucket.no-clean-up", where, seen)
    if one.right == "conditional put" and one.outcome in ("unsupported", "denied"):
        return found("bucket.cannot-fence" if wal_in_bucket else "bucket.no-conditions", where, seen)
    cure = one.hint
    if one.outcome == "denied" and (not cure or "policy" in cure):
        cure = f"allow {_POLICY[one.right]} in the policy of these credentials, for all keys below s3.prefix"
    return found(_CHECKS[one.outcome], where, seen, cure=cure)
