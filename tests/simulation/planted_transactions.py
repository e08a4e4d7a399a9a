"""Violations of the rules of transactions, planted for `tests/simulation/test_checkers.py`, and their clean twins."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.histories import Story
from tidelog.simulation.checkers.history import UNKNOWN, Outcome

Plant = Callable[[Story, bool], None]
TRANSACTIONS: dict[str, tuple[str, Plant]] = {}


def plant(rule: str) -> Callable[[Plant], Plant]:
    """A story that takes whether to break the rule."""

    def keep(function: Plant) -> Plant:
        TRANSACTIONS[function.__name__] = (rule, function)
        return function

    return keep


@plant("G0")
def one_marker_for_two_transactions(story: Story, broken: bool) -> None:
    story.txn(1, 5, 11, at=0)
    story.txn(1, 6, 12, at=2)
    story.audit(4, (0, 11), (2, 12), markers={3: True} if broken else {1: True, 3: True})


@plant("G0")
def a_write_behind_the_marker_of_its_transaction(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0, txn=5, producer=1)
    story.txn(1, 5, 12, at=2 if broken else 1)
    story.audit(4, (0, 11), (2 if broken else 1, 12), markers={1: True, 3: True} if broken else {2: True})


@plant("G1b")
def a_committed_reader_gets_a_part_of_a_transaction(story: Story, broken: bool) -> None:
    story.txn(1, 5, 11, 12, at=0)
    story.send(1, 13, at=3)
    rest = [(1, 12)] if not broken else []
    story.poll(2, (0, 11), *rest, (3, 13), committed_only=True)
    story.poll(3, (0, 11), (1, 12), (3, 13))


@plant("poll-skip")
def a_committed_reader_passes_over_a_transaction(story: Story, broken: bool) -> None:
    story.txn(1, 5, 11, at=0, end="ok" if broken else "info")
    story.send(1, 13, at=2)
    story.op("assign", 2, offset=0)
    story.poll(2, (2, 13), committed_only=True)
    story.poll(3, (0, 11), (2, 13))


@plant("poll-skip")
def a_committed_reader_passes_over_a_record_outside_of_transactions(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0)
    story.send(1, 13, at=1)
    story.op("assign", 2, offset=0 if broken else 1)
    story.poll(2, (1, 13), committed_only=True)
    story.poll(3, (0, 11), (1, 13))


@plant("G1c")
def two_transactions_that_have_read_of_each_other(story: Story, broken: bool) -> None:
    story.txn(1, 5, 11, at=0, causes=[12])
    story.txn(2, 6, 12, at=2, causes=[11 if broken else -1])
    story.txn(3, 7, 13, at=4, causes=[12])


@plant("atomicity")
def one_half_is_committed(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0, txn=5, producer=1)
    story.txn(1, 5, 12, at=0, partition=1, end="info")
    story.audit(4, (0, 11), markers={1: True})
    story.audit(4, (0, 12), markers={1: not broken}, partition=1)


@plant("atomicity")
def what_was_committed_is_aborted(story: Story, broken: bool) -> None:
    story.txn(1, 5, 11, at=0, end="ok" if broken else "info")
    story.audit(4, (0, 11), markers={1: False})


@plant("atomicity")
def what_nobody_ended_is_committed(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0, txn=5, producer=1)
    story.audit(4, (0, 11), markers={1: broken})


@plant("atomicity")
def a_committed_reader_gets_what_is_aborted(story: Story, broken: bool) -> None:
    story.txn(1, 5, 11, at=0, end="info")
    story.send(1, 12, at=2)
    story.audit(4, (0, 11), (2, 12), markers={1: False})
    story.audit_committed(5, *([(0, 11)] if broken else []), (2, 12))


def _transfer(story: Story, txn: int, entry: int, at: int) -> None:
    """A transaction that makes an entry in partition 1 of the order 11, and commits what is behind it."""
    story.send(1, entry, at=at, txn=txn, producer=1, partition=1, causes=[11])
    story.op("txn_commit", 1, txn=txn, group="g", offset=1)
    story.op("end_txn", 1, txn=txn, commits=True)


@plant("exactly-once")
def an_order_is_carried_out_twice(story: Story, broken: bool) -> None:
    story.txn(2, 5, 11, at=0)
    _transfer(story, 6, 21, 0)
    if broken:
        _transfer(story, 7, 22, 2)
    story.op("committed", 3, group="g", offset=1)
    story.audit_committed(5, (0, 11))
    story.audit_committed(6, (0, 21), *([(2, 22)] if broken else []), partition=1)


@plant("exactly-once")
def an_order_is_passed_over(story: Story, broken: bool) -> None:
    story.txn(2, 5, 10, 11, at=0)
    story.send(1, 21, at=0, txn=6, producer=1, partition=1, causes=[11])
    if not broken:
        story.send(1, 22, at=1, txn=6, producer=1, partition=1, causes=[10])
    story.op("txn_commit", 1, txn=6, group="g", offset=2)
    story.op("end_txn", 1, txn=6, commits=True)
    story.op("committed", 3, group="g", offset=2)
    story.audit_committed(5, (0, 10), (1, 11))
    story.audit_committed(6, (0, 21), *([] if broken else [(1, 22)]), partition=1)


@plant("exactly-once")
def an_aborted_order_is_carried_out(story: Story, broken: bool) -> None:
    story.txn(2, 5, 10, 11, at=0, end="info")
    story.txn(1, 6, 21, at=0, partition=1, causes=[11])
    story.audit_committed(5, *([] if broken else [(0, 10), (1, 11)]))
    story.audit_committed(6, (0, 21), partition=1)


@plant("exactly-once")
def nobody_can_read_the_committed_offset(story: Story, broken: bool) -> None:
    story.txn(2, 5, 11, at=0)
    _transfer(story, 6, 21, 0)
    story.op("committed", 3, "info" if broken else "ok", group="g", offset=1)
    story.audit_committed(5, (0, 11))
    story.audit_committed(6, (0, 21), partition=1)


@plant("balance")
def an_entry_is_lost(story: Story, broken: bool) -> None:
    story.send(1, 21, at=0, txn=6, producer=1, amounts=[-5])
    story.txn(1, 6, 22, at=0, partition=1, amounts=[4 if broken else 5])
    story.audit_committed(5, (0, 21))
    story.audit_committed(6, (0, 22), partition=1)


@plant("zombie-accepted")
def a_fenced_session_writes(story: Story, broken: bool) -> None:
    story.op("init_txn", 1, name="teller")
    story.op("init_txn", 2, "ok" if broken else "info", name="teller")
    story.op("init_txn", 3, name="another")
    story.send(1, 11, at=0, txn=5, producer=1)


@plant("zombie-accepted")
def a_fenced_session_ends_its_transaction(story: Story, broken: bool) -> None:
    story.op("init_txn", 1, name="teller")
    story.op("init_txn", 2, name="teller")
    story.op("end_txn", 1, "ok" if broken else "fail", txn=5)


@plant("lso-stuck")
def readers_are_held_up_at_rest(story: Story, broken: bool) -> None:
    story.op("list_offsets", 4, high_watermark=2)
    story.op("list_offsets", 4, offset=1 if broken else 2, committed_only=True)
    story.op("audit", 5, offset=2)


@plant("lso-stuck")
def nobody_tells_the_ends_at_rest(story: Story, broken: bool) -> None:
    end = UNKNOWN if broken else 2
    outcome: Outcome = "fail" if broken else "ok"
    story.op("list_offsets", 4, outcome, high_watermark=end)
    story.op("list_offsets", 4, outcome, offset=end, committed_only=True)
    story.op("audit", 5, offset=end)


@plant("lso-stuck")
def a_transaction_that_is_never_decided(story: Story, broken: bool) -> None:
    story.send(1, 11, at=0, txn=5, producer=1)
    story.audit(4, (0, 11), markers={} if broken else {1: False})


@plant("txn-unsettled")
def a_transactional_id_with_an_open_transaction(story: Story, broken: bool) -> None:
    story.op("describe_txn", 4, name="teller", target="Ongoing" if broken else "CompleteAbort")


@plant("txn-unsettled")
def a_transactional_id_that_nobody_can_read(story: Story, broken: bool) -> None:
    story.op("describe_txn", 4, "info" if broken else "ok", name="teller", target="Empty", error="error 15")


@plant("txn-unsettled")
def a_transactional_id_that_is_forgotten(story: Story, broken: bool) -> None:
    story.op("init_txn", 1, "ok" if broken else "info", name="teller")
    story.op("describe_txn", 4, name="teller")


@plant("committed-offset-back")
def the_offset_of_an_aborted_transaction(story: Story, broken: bool) -> None:
    story.op("txn_commit", 1, txn=5, group="g", offset=3)
    story.op("end_txn", 1, txn=5, commits=not broken)
    story.op("committed", 2, group="g", offset=3)


@plant("committed-offset-back")
def the_offset_of_a_committed_transaction_is_forgotten(story: Story, broken: bool) -> None:
    story.op("txn_commit", 1, txn=5, group="g", offset=3)
    story.op("end_txn", 1, "ok" if broken else "info", txn=5, commits=True)
    story.op("committed", 2, group="g", offset=-1)
