"""`DoctorFinding`: one thing that was looked at, and what is to be thought of it.

Entry: `ok`, `found`, `in_order`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from tidelog.doctor.advice import ADVICE, Level

ORDER: Final[tuple[Level, ...]] = ("problem", "warning", "unknown", "ok")
"""The gravest first."""
Count = dict[Literal["problem", "warning", "unknown", "ok"], int]


class DoctorFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding."""

    check: str
    """What was found, as a stable name: `disk.sync-slow`; of what is well, what was looked at: `disk.sync`."""
    level: Level
    where: str
    """The node, or the part of the cluster."""
    seen: str
    why: str = ""
    """Why it matters."""
    cure: str = ""


def ok(check: str, where: str, seen: str) -> DoctorFinding:
    """Return a finding of something that is well."""
    return DoctorFinding(check=check, level="ok", where=where, seen=seen)


def found(check: str, where: str, seen: str, *, cure: str = "") -> DoctorFinding:
    """Return a finding of something that is not well; `check` is in `ADVICE`.

    `cure`: instead of the table's, where what was seen says more exactly what helps.
    """
    advice = ADVICE[check]
    return DoctorFinding(
        check=check, level=advice.level, where=where, seen=seen, why=advice.why, cure=cure or advice.cure
    )


def in_order(findings: Iterable[DoctorFinding]) -> list[DoctorFinding]:
    """Return the findings with the gravest first, else as they came, each once."""
    return sorted(dict.fromkeys(findings), key=lambda each: ORDER.index(each.level))


def count(findings: Iterable[DoctorFinding]) -> Count:
    """Return how many findings there are of each level."""
    levels = [each.level for each in findings]
    return {
        "problem": levels.count("problem"),
        "warning": levels.count("warning"),
        "unknown": levels.count("unknown"),
        "ok": levels.count("ok"),
    }
