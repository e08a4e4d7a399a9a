"""The transactional clients of a simulation: what they decode, and that a run has all that the rules are about."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tidelog.batch.batch import ControlType, Record, build_batch, build_control_batch, set_base_offset
from tidelog.simulation.actors.consumers import decode
from tidelog.simulation.actors.kafka import Fetched
from tidelog.simulation.checkers.history import Op, load

SEED = "17"
"""A cluster with transactional clients, at the newest feature level."""


def batch(offset: int, producer: int, *values: int, transactional: bool = True) -> bytes:
    records = [Record(0, 0, None, b"%d|" % value) for value in values]
    return at(offset, build_batch(records, producer_id=producer, transactional=transactional))


def marker(offset: int, producer: int, kind: ControlType) -> bytes:
    return at(
        offset, build_control_batch(kind, producer_id=producer, producer_epoch=0, coordinator_epoch=0, timestamp=0)
    )


def at(offset: int, data: bytes) -> bytes:
    placed = bytearray(data)
    set_base_offset(placed, offset)
    return bytes(placed)


RECORDS = (
    batch(0, 1, 10, 11)
    + batch(2, 2, 20)
    + marker(3, 1, ControlType.ABORT)
    + batch(4, 1, 12)
    + batch(5, 3, 30, transactional=False)
    + marker(6, 2, ControlType.ABORT)
    + marker(7, 1, ControlType.COMMIT)
    + batch(8, 2, 21)
)


def test_aborted_transactions_are_left_out_from_their_first_offset_to_their_marker() -> None:
    found = decode(Fetched("t", 0, 0, 9, 0, RECORDS, aborted=((2, 2), (1, 0))), 0)
    assert (found.values, found.offsets) == ([12, 30, 21], [4, 5, 8])
    assert found.markers == [(3, 1, False), (6, 2, False), (7, 1, True)]
    assert found.following == 9


def test_a_fetch_may_begin_within_an_aborted_transaction() -> None:
    found = decode(Fetched("t", 0, 0, 9, 0, RECORDS, aborted=((1, 0),)), 1)
    assert found.offsets == [2, 4, 5, 8]


def test_without_aborted_transactions_everything_but_markers_is_read() -> None:
    found = decode(Fetched("t", 0, 0, 9, 0, RECORDS), 1)
    assert found.values == [11, 20, 12, 30, 21]


@pytest.mark.processes
def test_a_bank_has_aborts_deaths_zombies_and_transfers(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    command = [sys.executable, "-m", "tidelog", "simulate", "--seed", SEED, "--history", str(path)]
    done = subprocess.run([*command, "--faults", "kill,pause"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    ops = load(path).ops

    def those(kind: str, outcome: str) -> list[Op]:
        return [op for op in ops if op.kind == kind and op.outcome == outcome]

    ends = those("end_txn", "ok")
    assert sum(op.commits for op in ends) > 30
    assert sum(not op.commits for op in ends) > 3
    assert [op for op in those("end_txn", "fail") if op.error == "error 90"], "a zombie that was fenced"
    assert those("txn_commit", "ok")
    assert sum(op.ok and op.amounts != [0] for op in ops if op.kind == "send" and op.amounts) > 10
    assert {op.committed_only for op in those("audit", "ok")} == {True, False}
    assert {op.target for op in those("describe_txn", "ok")} <= {"Empty", "CompleteCommit", "CompleteAbort"}
