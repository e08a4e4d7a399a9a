"""Who is signed in to the console. Sans-I/O.

A session is a random number in a cookie, and the token of the cluster's secret that it was begun with, which stays
here. A *sign-in key* stands for the token once: `tidelog console` prints one in the address, so that an operator on the
cluster's machine need not look for the secret.

Invariants: at most `MAX_SESSIONS` sessions; one ends `IDLE_S` after its last request, and at the latest `LIFE_S` after
its begin; after `MAX_FAILURES` wrong tokens within `FAILURES_S` no other one is looked at until that time is over.

Entry: `Sessions`.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tidelog.runtime.errors import Overloaded

MAX_SESSIONS: Final = 64
IDLE_S: Final = 3_600.0
LIFE_S: Final = 12 * 3_600.0
KEY_LIFE_S: Final = 600.0
MAX_FAILURES: Final = 10
FAILURES_S: Final = 60.0


class TooManyAttempts(Overloaded):
    """Too many wrong tokens came within a minute."""


@dataclass(slots=True)
class _ConsoleSession:
    token: str
    began: float
    used: float


class Sessions:
    """The sessions of one console."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._sessions: OrderedDict[str, _ConsoleSession] = OrderedDict()
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)
        self._key: tuple[str, str, float] | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    def check_rate(self) -> None:
        """Raise `TooManyAttempts` if no other token may be tried now."""
        if len(self._failures) == MAX_FAILURES and self._monotonic() - self._failures[0] < FAILURES_S:
            raise TooManyAttempts("too many wrong tokens", hint="wait for a minute, and try again")

    def failed(self) -> None:
        """A wrong token came."""
        self._failures.append(self._monotonic())

    def new_key(self, token: str) -> str:
        """Return a key that stands for the token once, within `KEY_LIFE_S`. It replaces an earlier one."""
        self._key = secrets.token_urlsafe(24), token, self._monotonic()
        return self._key[0]

    def take_key(self, key: str) -> str | None:
        """Return the token that a key stands for, and forget the key; None for a wrong or an old one."""
        if self._key is None or not hmac.compare_digest(key.encode(), self._key[0].encode()):
            return None
        (_, token, since), self._key = self._key, None
        return token if self._monotonic() - since < KEY_LIFE_S else None

    def begin(self, token: str) -> str:
        """Begin a session; return its id. The least recently used one ends if there are too many."""
        now = self._monotonic()
        self._end_old(now)
        while len(self._sessions) >= MAX_SESSIONS:
            self._sessions.popitem(last=False)
        session_id = secrets.token_urlsafe(32)
        self._sessions[session_id] = _ConsoleSession(token, now, now)
        return session_id

    def token_of(self, session_id: str) -> str | None:
        """Return the token of a session that goes on; None for an unknown or ended one."""
        now = self._monotonic()
        self._end_old(now)
        found = self._sessions.get(session_id)
        if found is None:
            return None
        found.used = now
        self._sessions.move_to_end(session_id)
        return found.token

    def end(self, session_id: str) -> None:
        """End a session, if it exists."""
        self._sessions.pop(session_id, None)

    def _end_old(self, now: float) -> None:
        for session_id, one in list(self._sessions.items()):
            if now - one.used >= IDLE_S or now - one.began >= LIFE_S:
                del self._sessions[session_id]
