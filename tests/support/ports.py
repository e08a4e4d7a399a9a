"""Ports for servers that tests start, end and start again: `tidelog.chaos.ports`, which the chaos harness uses,
too."""

from __future__ import annotations

from tidelog.chaos.ports import BLOCK, free_port, port_block

__all__ = ["BLOCK", "free_port", "port_block"]
