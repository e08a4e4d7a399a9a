"""Ports for servers that tests start, end and start again: `simulation.ports`, which the chaos harness uses, too."""

from __future__ import annotations

from simulation.ports import BLOCK, free_port, port_block

__all__ = ["BLOCK", "free_port", "port_block"]
