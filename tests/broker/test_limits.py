"""The bounds that connections share: kept whatever peers announce, and nothing waits without a limit."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.broker.kafka.limits import EAGER_BYTES, FIRST_STEP_BYTES, STALL_S, ByteBudget, Seats, UnreadOutput
from tidelog.broker.kafka.wire.frames import RECEIVE_BUFFER_BYTES, FrameReader
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.log_limit import LogLimiter

MIB = 1 << 20


class Peer:
    """A connection as far as memory goes: sends one large frame in pieces, then holds it until it is answered."""

    def __init__(self, budget: ByteBudget, number: int, size: int) -> None:
        self.budget = budget
        self.size = size
        self.left = size + 4
        self.waiting = False
        self.frame: bytearray | None = None
        self.gone = False
        self.reader = FrameReader(bytearray(RECEIVE_BUFFER_BYTES), 1 << 30, lambda *args: budget.grant(number, *args))
        self.number = number

    def send(self, count: int) -> None:
        """What a socket would do: nothing while the broker does not read."""
        if self.frame is not None or self.gone or self.waiting:
            return
        room = self.reader.buffer()
        count = min(count, self.left, len(room))
        if self.left == self.size + 4:
            count = max(count, 4)
            room[:4] = self.size.to_bytes(4, "big")
        reserved = self.reader.reserved_bytes
        frames = self.reader.received(count)
        self.left -= count
        if frames:
            (self.frame,) = frames
            if reserved:
                self.budget.received(reserved)
            else:
                self.budget.take(self.size)
        elif self.reader.blocked:
            self._ask()

    def _ask(self) -> None:
        self.waiting = not self.reader.unblock()
        if self.waiting:
            self.budget.wait(self.number, self._ask)

    def answer(self) -> None:
        if self.frame is not None:
            self.frame = None
            self.gone = True
            self.budget.release(self.size)

    def leave(self) -> None:
        if not self.gone and self.frame is None:
            self.gone = True
            self.budget.leave(self.number, self.reader.reserved_bytes, 0)


steps = st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["send", "send", "send", "answer", "leave"]),
                           st.integers(1, MIB)), max_size=80)  # fmt: skip


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(20_000, 3 * MIB), min_size=1, max_size=12), steps)
def test_memory_stays_bounded_and_every_frame_comes_in(sizes: list[int], script: list[tuple[int, str, int]]) -> None:
    limit = 2 * MIB
    budget = ByteBudget(limit)
    peers = [Peer(budget, number, size) for number, size in enumerate(sizes)]

    def check() -> None:
        assert budget.used <= limit + max(sizes)
        held = sum(len(peer.frame) for peer in peers if peer.frame is not None)
        assert budget.used == held + sum(peer.reader.reserved_bytes for peer in peers if not peer.gone)

    for number, action, size in script:
        peer = peers[number % len(peers)]
        if action == "send":
            peer.send(size)
        elif action == "answer":
            peer.answer()
        else:
            peer.leave()
        check()
    for _ in range(len(peers) * 400):
        for peer in peers:  # everybody who can, goes on
            peer.send(RECEIVE_BUFFER_BYTES)
            check()
        if all(peer.gone or peer.frame is not None or peer.waiting for peer in peers):
            for peer in peers:
                peer.answer()
        if all(peer.gone for peer in peers):
            break
    assert all(peer.gone for peer in peers), "frames wait for each other"
    assert budget.used == budget.receiving == 0


def test_a_thousand_announcements_of_100_mib_cost_what_was_sent_of_them() -> None:
    budget = ByteBudget(512 * MIB)
    granted = [budget.grant(number, 0, 1, 100 * MIB) for number in range(1000)]
    assert granted[:64] == [EAGER_BYTES] * 64  # a quarter of the budget: received straight into place
    assert granted[64:] == [FIRST_STEP_BYTES] * 936
    assert budget.used == 64 * EAGER_BYTES + 936 * FIRST_STEP_BYTES and not budget.full


def test_seats_are_counted_in_all_and_by_address() -> None:
    seats = Seats(3, 2)
    assert seats.take("a") is None and seats.take("a") is None
    assert seats.take("a") == "connections_per_address"
    assert seats.take("b") is None
    assert seats.take("c") == "connections"
    seats.leave("a")
    assert seats.take("a") is None
    for address in ("a", "a", "b"):
        seats.leave(address)
    assert seats.taken == 0 and seats.addresses == 0


class Slow:
    """A client whose unread output the test decides."""

    def __init__(self, unread: int, last_active: float) -> None:
        self.unread = unread
        self.last_active = last_active
        self.dropped = False

    def unread_bytes(self) -> int:
        return self.unread

    def drop_slow_reader(self) -> None:
        self.dropped = True


def test_unread_output_costs_those_who_stall_first() -> None:
    output = UnreadOutput(1000)
    stalled, reading = Slow(600, 0.0), Slow(600, STALL_S)
    output.note(stalled, 1.0)
    output.note(reading, STALL_S + 1)
    assert stalled.dropped and not reading.dropped and output.used == 600
    output.forget(stalled)
    output.forget(reading)
    assert output.used == 0


def test_at_twice_the_bound_somebody_goes_at_once() -> None:
    output = UnreadOutput(1000)
    readers = [Slow(600, float(number)) for number in range(4)]
    for reader in readers:
        output.note(reader, 5.0)
    assert [reader.dropped for reader in readers] == [True, False, False, False] and output.used == 1800
    woken: list[int] = []
    assert output.full
    output.wait("fetch", lambda: woken.append(1))
    output.forget(readers[1])
    assert not woken
    readers[2].unread = 0
    output.sweep(6.0)
    assert woken == [1] and output.used == 600


class ManualClock(SystemClock):
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_log_lines_of_a_kind_are_kept_to_a_rate_and_what_was_left_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    limiter = LogLimiter(logging.getLogger("limits"), clock, burst=3, period_s=60)
    for _ in range(100):
        limiter.line("scan", logging.WARNING, "scanned", {"client": "x"})
    limiter.line("other", logging.WARNING, "something else", {})
    assert [record.message for record in caplog.records] == ["scanned"] * 3 + ["something else"]
    clock.now = 61.0
    limiter.line("scan", logging.WARNING, "scanned", {"client": "x"})
    assert vars(caplog.records[-1])["left_out"] == 97
