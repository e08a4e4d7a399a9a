"""What cures the problems that a cluster tells of itself (`tidelog status`), by the words of each.

docs/operations.md, "When something is wrong", says more of each. Entry: `cure_of`.
"""

from __future__ import annotations

import re
from typing import Final

_CURES: Final = (
    (
        r"^broker \d+ at .* is dead",
        "start it again over its data directory; if it will never be back:"
        " `tidelog broker remove ID --accept-loss --dry-run` says what would be lost",
    ),
    (r"^controller \d+ .* is away", "start that process, or look at the network between; `tidelog controller status`"),
    (r"no controller is active", "start the controllers that are away: a majority must be up"),
    (
        r"cannot delete from the bucket",
        "lift the lock, hold or policy that keeps these objects; they are tried again by themselves",
    ),
    (
        r"the bucket .*(403|denied|AccessDenied|refused)",
        "correct the credentials or their policy; all goes on by itself",
    ),
    (
        r"answers at .*, not broker \d+",
        "set admin.host or admin.advertised_host of that broker to what reaches it from here",
    ),
    (
        r"its coordinator answers nobody",
        "look at what the error names and at that broker's log; it is tried again by itself",
    ),
    (r"the bucket ", "mend the bucket, its server or the way to it; nothing is lost meanwhile, the WAL grows"),
    (r"not readable", "`tidelog object verify` lists what is damaged; restore the object from a copy of the bucket"),
    (r"does not open", "its object or tail is damaged in the bucket: restore it; it is tried again by itself"),
    (r"quarantine", "`tidelog object quarantine list`, then `tidelog object quarantine release TOPIC:PARTITION`"),
    (r"cannot write its log|left on the disk|disk is", "make room on that node's disk; it goes on by itself"),
    (r"certificate|private key .*TLS", "replace the certificate's file, or chmod 600 the key"),
    (r"has had no answer|has made no progress", "look at what the operation needs: disk, bucket or controllers"),
    (r"transaction", "`kafka-transactions abort` ends it, when its application is gone"),
    (r"entries behind|cannot reach \d+", "look at that controller's disk and at the network between"),
    (r"kept at .*rejected|refused is kept", "look at the disk, then delete that directory"),
    (r"^traces are dropped", "start the collector, or correct tracing.endpoint; clients do not notice it"),
    (r"opening|not registered|starting", "wait; if it stays, see the log of that broker"),
    (r"unexpected error", "report it, with what `tidelog debug bundle` writes"),
)


def cure_of(problem: str) -> str:
    """Return what cures a problem; empty if nothing is known but the general advice."""
    return next((cure for words, cure in _CURES if re.search(words, problem, re.IGNORECASE)), "")
