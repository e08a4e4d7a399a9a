"""Exceptions of types that nobody listed, raised where the processes of nodes wait for network, bucket or disk.

At the place `loop` they are raised in background loops that are kept, where these wait for their clock.

They stand for what no interface documents: a library's defect, a rare errno, a socket closed at an unlucky moment. No
task of a process may die of one (finding `task-died`). Each carries a note (`is_odd`): an exception that nobody raised
here, and nobody expected, is a `defect`, however often what met it is tried again.

Entry: `OddErrors`, `is_odd`.
"""

from __future__ import annotations

import errno
import os
import random

_NOTE = "raised by the simulator"
_ERRNOS = (errno.EPROTO, errno.EOVERFLOW, errno.ESTALE, errno.EBADF, errno.EINTR, errno.ENOTCONN)


class OddErrors:
    """Whether and where they are raised now."""

    def __init__(self) -> None:
        self.probability = 0.0
        self.places: frozenset[str] = frozenset()
        self.hosts: frozenset[str] = frozenset()
        """Those of the cluster's nodes."""
        self.rng = random.Random(0)
        self.raised = 0
        """Their number so far."""

    def heal(self) -> None:
        """Raise none from now on."""
        self.probability = 0.0

    def strike(self, place: str, host: str) -> None:
        """Raise one, perhaps. Only for the processes of `hosts`: clients are spared."""
        if not self.probability or place not in self.places or host not in self.hosts:
            return
        if self.rng.random() >= self.probability:
            return
        self.raised += 1
        error = self._draw(place)
        error.add_note(_NOTE)
        raise error

    def _draw(self, place: str) -> Exception:
        code = self.rng.choice(_ERRNOS)
        return self.rng.choice(
            (
                RuntimeError(f"odd error of the {place}"),
                ValueError("Invalid file descriptor: -1"),
                KeyError(f"odd key of the {place}"),
                TypeError(f"odd type of the {place}"),
                OSError(code, os.strerror(code)),
            )
        )


def is_odd(error: BaseException) -> bool:
    """Whether an exception was raised by `OddErrors`, or came of one that was."""
    known, left = set[int](), [error]
    while left:
        one = left.pop()
        if _NOTE in getattr(one, "__notes__", ()):
            return True
        known.add(id(one))
        inner = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        further = (one.__cause__, one.__context__, *inner)
        left += [each for each in further if each is not None and id(each) not in known]
    return False
