"""Load reports, and the number of brokers that they ask for."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.broker.telemetry.load import PartitionLoadMeter
from tidelog.controller.active.scale import BrokerReport, Scaler
from tidelog.controller.model.load import (
    MAX_HEAVIEST,
    STALE_S,
    BrokerLoad,
    HeartbeatReply,
    LoadTable,
    PartitionLoad,
    partition_loads,
)
from tidelog.controller.model.records import PartitionRecord
from tidelog.controller.model.settings import ScaleSettings
from tidelog.controller.rpc.connection import HeartbeatParams

COUNTS = st.integers(0, 1 << 50)
PARTITIONS = st.builds(PartitionLoad, st.integers(0, 1 << 40), COUNTS, COUNTS, COUNTS)
LOADS = st.builds(BrokerLoad, COUNTS, COUNTS, COUNTS, COUNTS, st.lists(PARTITIONS, max_size=20).map(tuple))


class Times:
    """A clock and a processor clock that a test turns."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.cpu_s = 0.0

    def meter(self) -> PartitionLoadMeter:
        return PartitionLoadMeter(lambda: self.now_s, lambda: self.cpu_s)


# --- heartbeats --------------------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 31), st.integers(0, 1 << 40), st.none() | LOADS)
def test_heartbeats_survive_the_wire(broker: int, epoch: int, load: BrokerLoad | None) -> None:
    beat = HeartbeatParams(broker, epoch, load)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(beat), type=HeartbeatParams) == beat


def test_a_heartbeat_of_an_older_broker_carries_no_load() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([3, 7]), type=HeartbeatParams) == HeartbeatParams(3, 7, None)


@given(st.none() | st.builds(HeartbeatReply, COUNTS, COUNTS, COUNTS, COUNTS))
def test_replies_survive_the_wire(reply: HeartbeatReply | None) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=HeartbeatReply | None) == reply


# --- the broker's meter ------------------------------------------------------------------------------------------


def test_rates_are_right_from_the_first_sample_and_stay_so() -> None:
    times = Times()
    meter = times.meter()
    for _ in range(30):
        for _ in range(10):
            meter.produced(4, 1_000)
            meter.fetched(8, 300)
        times.now_s += 1.0
        times.cpu_s += 0.25
        load = meter.sample()
        assert (load.bytes_in, load.bytes_out, load.requests, load.cpu) == (10_000, 3_000, 20_000, 250)
        assert set(load.heaviest) == {PartitionLoad(4, 10_000, 0, 10_000), PartitionLoad(8, 0, 3_000, 10_000)}


def test_a_change_of_load_is_seen_within_a_few_windows() -> None:
    times = Times()
    meter = times.meter()
    for rate in [1_000] * 30 + [9_000] * 30:
        meter.produced(4, rate)
        times.now_s += 1.0
        load = meter.sample()
    assert 8_000 < load.bytes_in <= 9_000


def test_silent_and_lost_partitions_leave_the_report() -> None:
    times = Times()
    meter = times.meter()
    meter.produced(4, 1_000)
    meter.produced(8, 1_000)
    meter.forget(8)
    times.now_s += 1.0
    assert [one.stream for one in meter.sample().heaviest] == [4]
    for _ in range(120):
        times.now_s += 1.0
        load = meter.sample()
    assert load == BrokerLoad(0, 0, 0, 0)


def test_a_report_is_bounded_and_names_the_heaviest() -> None:
    times = Times()
    meter = times.meter()
    for stream in range(2_000):
        meter.produced(4 * stream, stream + 1)
    times.now_s += 1.0
    load = meter.sample()
    assert load.bytes_in == sum(range(1, 2_001))
    assert {one.stream // 4 for one in load.heaviest} == set(range(2_000 - MAX_HEAVIEST, 2_000))
    assert len(msgspec.msgpack.encode(load)) < 8_192


def test_controllers_that_ask_at_the_same_time_get_the_same_report() -> None:
    times = Times()
    meter = times.meter()
    meter.produced(4, 1_000)
    times.now_s += 1.0
    first = meter.sample()
    times.now_s += 0.1
    assert meter.sample() is first


# --- the controller's table --------------------------------------------------------------------------------------


@given(LOADS, st.integers(1, 30))
def test_the_partitions_of_a_broker_add_up_to_its_total(load: BrokerLoad, count: int) -> None:
    named = {one.stream: one for one in load.heaviest}
    heaviest = tuple(named.values())
    extra = 12_345
    whole = BrokerLoad(
        sum(one.bytes_in for one in heaviest) + extra,
        sum(one.bytes_out for one in heaviest),
        sum(one.requests for one in heaviest),
        0,
        heaviest,
    )
    owned = [PartitionRecord(b"t" * 16, index, 1, 0, stream) for index, stream in enumerate(named)]
    owned += [PartitionRecord(b"u" * 16, index, 1, 0, (1 << 41) + index) for index in range(count)]
    found = partition_loads(whole, owned)
    assert len(found) == len(owned)
    assert sum(one.bytes_in for one in found.values()) == pytest.approx(whole.bytes_in)
    assert found[b"u" * 16, 0].bytes_in == pytest.approx(extra / count)


def test_reports_get_stale_and_are_forgotten() -> None:
    table = LoadTable()
    table.note(1, 1, BrokerLoad(1, 2, 3, 4), 10.0)
    assert table.get(1, 10.0 + STALE_S) == BrokerLoad(1, 2, 3, 4)
    assert table.get(1, 10.1 + STALE_S) is None
    table.keep([2])
    assert table.get(1, 10.0) is None


# --- the wanted number -------------------------------------------------------------------------------------------

SETTINGS = ScaleSettings(
    min_brokers=2, max_brokers=8, broker_bytes_in_per_s=1_000, up_window_ms=3_000, down_window_ms=10_000
)


def reports(brokers: int, bytes_in: int) -> list[BrokerReport]:
    """The whole cluster takes `bytes_in` a second."""
    return [BrokerReport(number, BrokerLoad(bytes_in // brokers, 0, 0, 0)) for number in range(1, brokers + 1)]


def scaler() -> Scaler:
    made = Scaler(SETTINGS)
    made.activated(0.0)
    return made


def wanted_after(one: Scaler, found: list[BrokerReport], start_s: int, seconds: int) -> int:
    for second in range(start_s, start_s + seconds):
        answer = one.look(found, float(second))
    return answer.wanted


def test_more_are_wanted_when_the_load_needs_them_for_the_whole_window() -> None:
    one = scaler()
    assert wanted_after(one, reports(3, 3_300), 0, 3) == 3
    assert "not yet for all" in one.latest.reason  # type: ignore[union-attr]
    assert wanted_after(one, reports(3, 3_300), 3, 1) == 5  # 3300 / 700
    assert "bytes_in is at 110%" in one.latest.reason  # type: ignore[union-attr]


def test_a_peak_that_is_shorter_than_the_window_changes_nothing() -> None:
    one = scaler()
    wanted_after(one, reports(3, 1_800), 0, 10)
    assert wanted_after(one, reports(3, 3_300), 10, 2) == 3
    assert wanted_after(one, reports(3, 1_800), 12, 1) == 3
    assert wanted_after(one, reports(3, 3_300), 13, 2) == 3


def test_fewer_are_wanted_later_and_only_if_they_stay_well_below_the_mark() -> None:
    one = scaler()
    assert wanted_after(one, reports(6, 900), 0, 10) == 6
    assert wanted_after(one, reports(6, 900), 10, 2) == 2  # 900 / 500
    again = scaler()
    assert wanted_after(again, reports(6, 2_700), 0, 30) == 6  # 4 would do at the mark, 6 below it


def test_the_bounds_hold_and_are_told() -> None:
    one = scaler()
    assert wanted_after(one, reports(8, 100_000), 0, 10) == 8
    assert "scale.max_brokers" in one.latest.reason  # type: ignore[union-attr]
    low = scaler()
    assert wanted_after(low, reports(1, 1), 0, 1) == 2
    assert "scale.min_brokers" in low.latest.reason  # type: ignore[union-attr]


def test_fewer_are_never_wanted_while_a_report_is_missing() -> None:
    one = scaler()
    found = [*reports(3, 3), BrokerReport(9, None)]
    assert wanted_after(one, found, 0, 60) == 4
    assert one.latest is not None and one.latest.missing == (9,)


def test_a_new_active_controller_wants_no_fewer_before_its_window_is_full() -> None:
    one = scaler()
    wanted_after(one, reports(6, 900), 0, 12)
    one.activated(12.0)
    assert wanted_after(one, reports(6, 900), 12, 10) == 6
    assert wanted_after(one, reports(6, 900), 22, 1) == 2


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 1 << 30)), min_size=1, max_size=60))
def test_the_wanted_number_is_always_within_its_bounds(looks: list[tuple[int, int]]) -> None:
    one = scaler()
    for second, (brokers, bytes_in) in enumerate(looks):
        answer = one.look(reports(brokers, bytes_in), float(second))
        assert SETTINGS.min_brokers <= answer.wanted <= SETTINGS.max_brokers
        assert answer.reason
        msgspec.json.encode(answer.as_dict(SETTINGS))
