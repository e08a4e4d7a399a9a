"""`Command`: the base class of the state machine's commands (`tidelog.controller.model.commands`)."""

from __future__ import annotations

import msgspec


class Command(msgspec.Struct, frozen=True, array_like=True):
    """The base of all commands."""
