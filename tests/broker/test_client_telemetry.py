"""KIP-714 through the bytes of its requests: subscriptions, intervals, what is taken of a push and what is refused."""

from __future__ import annotations

import dataclasses
import random
import uuid
from typing import Any

import pytest

from tests.broker.test_admin_configs import change
from tests.broker.test_client_metrics import Payload
from tests.support.admin_world import AdminWorld
from tidelog.batch.compression import compress
from tidelog.broker.kafka.apis import all_apis
from tidelog.broker.kafka.client_telemetry import (
    DEFAULT_INTERVAL_MS,
    MAX_CLIENTS,
    MAX_PREFIXES,
    MAX_UNPACKED_BYTES,
    ClientTelemetry,
    instance_text,
)
from tidelog.broker.kafka.handlers.api_versions import ApiVersions
from tidelog.broker.kafka.handlers.client_telemetry import APIS
from tidelog.broker.kafka.named_configs import CLIENT_METRICS

GET, PUSH = 71, 72
SET, DELETE = 0, 1
NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
PREFIX = "org.apache.kafka.producer."
INTERVAL_S = 60.0


class ManualClock:
    """Monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


class Telemetry:
    """A client "test" at 127.0.0.1, and one subscription of `PREFIX` a minute."""

    def __init__(self, *, subscribed: bool = True, max_bytes: int = 1 << 20) -> None:
        self.world = AdminWorld()
        self.clock = ManualClock()
        clock: Any = self.clock
        telemetry = ClientTelemetry(max_bytes, random.Random(4), self.world.subscriptions.current)
        self.world.services = dataclasses.replace(self.world.services, clock=clock, telemetry=telemetry)
        if subscribed:
            self.subscribe("s", metrics=PREFIX, **{"interval.ms": "60000"})

    def subscribe(self, name: str, **values: str | None) -> None:
        changes = [(key, SET if value is not None else DELETE, value) for key, value in values.items()]
        assert change(self.world, CLIENT_METRICS, name, *changes) == (0, "")

    def get(self, instance: uuid.UUID | None = None) -> Any:
        return self.world.call(APIS, GET, 0, client_instance_id=instance)

    def push(self, told: Any, payload: bytes | None = None, **fields: Any) -> int:
        sent = {
            "client_instance_id": told.client_instance_id,
            "subscription_id": told.subscription_id,
            "terminating": False,
            "compression_type": NONE,
            "metrics": Payload().number("total", f"{PREFIX}sent", 7).encoded if payload is None else payload,
        }
        return int(self.world.call(APIS, PUSH, 0, **{**sent, **fields}).error_code)

    def samples(self, name: str) -> dict[str, float]:
        """Values of a family by metric or outcome."""
        found = self.world.services.telemetry.families(self.clock.now)
        return {
            one.labels.get("metric", one.labels.get("outcome", "")): one.value
            for family in found
            for one in family.samples
            if one.name == name
        }


def test_a_client_is_told_its_id_the_metrics_and_the_interval_and_its_push_becomes_a_metric() -> None:
    here = Telemetry()
    told = here.get()
    assert told.error_code == 0
    assert told.client_instance_id is not None
    assert tuple(told.requested_metrics) == (PREFIX,)
    assert tuple(told.accepted_compression_types) == (ZSTD, LZ4, GZIP, SNAPPY)
    assert told.telemetry_max_bytes == 1 << 20
    assert told.push_interval.total_seconds() == INTERVAL_S
    assert not told.delta_temporality
    assert here.push(told) == 0
    assert here.samples("tidelog_client_metric_total") == {f"{PREFIX}sent": 7}
    assert here.samples("tidelog_client_telemetry_pushes_total")["taken"] == 1
    assert here.samples("tidelog_client_telemetry_instances") == {"": 1}


def test_without_a_subscription_nothing_is_asked_for_and_nothing_kept() -> None:
    here = Telemetry(subscribed=False)
    told = here.get()
    assert tuple(told.requested_metrics) == ()
    assert told.push_interval.total_seconds() * 1000 == DEFAULT_INTERVAL_MS
    assert here.push(told) == 0
    assert here.samples("tidelog_client_metric_total") == {}


def test_the_union_of_the_matching_subscriptions_with_the_smallest_interval_is_told() -> None:
    here = Telemetry()
    here.subscribe("faster", metrics="org.apache.kafka.consumer.", match="client_id=te.*", **{"interval.ms": "30000"})
    here.subscribe("others", metrics="*", match="client_id=te")
    here.subscribe("elsewhere", metrics="*", match="client_id=test,client_source_address=10[.].*")
    told = here.get()
    assert tuple(told.requested_metrics) == ("org.apache.kafka.consumer.", PREFIX)
    assert told.push_interval.total_seconds() == 30
    here.subscribe("all", metrics="*", match=f"client_instance_id={instance_text(uuid.UUID(int=5))}")
    assert tuple(here.get(uuid.UUID(int=5)).requested_metrics) == ("",)
    assert tuple(here.get(uuid.UUID(int=6)).requested_metrics) == ("org.apache.kafka.consumer.", PREFIX)


def test_who_asks_or_pushes_too_early_is_refused() -> None:
    here = Telemetry()
    told = here.get()
    assert here.get(told.client_instance_id).error_code == 89
    assert here.push(told) == 0, "the first one after the question"
    here.clock.now += INTERVAL_S - 1
    assert here.push(told) == 89
    assert here.get(told.client_instance_id).error_code == 89
    here.clock.now += 1
    assert here.push(told) == 0
    assert here.push(told) == 89
    assert here.push(told, terminating=True) == 0
    assert here.samples("tidelog_client_telemetry_pushes_total")["too_early"] == 2


def test_after_its_last_push_a_client_sends_nothing_more() -> None:
    here = Telemetry()
    told = here.get()
    assert here.push(told, terminating=True) == 0
    here.clock.now += INTERVAL_S
    assert here.push(told) == 42
    assert here.samples("tidelog_client_metric_total") == {}, "its values are gone after a minute"


def test_a_client_with_a_subscription_that_is_no_more_asks_again_at_once() -> None:
    here = Telemetry()
    told = here.get()
    assert here.push(told) == 0
    here.subscribe("s", metrics=f"{PREFIX}record.")
    assert here.push(told) == 117
    again = here.get(told.client_instance_id)
    assert again.error_code == 0
    assert again.subscription_id != told.subscription_id
    assert tuple(again.requested_metrics) == (f"{PREFIX}record.",)
    assert here.push(again) == 0
    here.subscribe("unrelated", metrics="*", match="client_id=nobody")
    here.clock.now += INTERVAL_S
    assert here.push(again) == 0
    assert here.get(uuid.UUID(int=9)).subscription_id != again.subscription_id, "it is of the client"


def test_a_broker_that_has_never_heard_of_a_client_takes_its_push() -> None:
    one, other = Telemetry(), Telemetry()
    told = one.get()
    assert other.push(told) == 0


@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4, ZSTD])
def test_every_compression_is_taken_within_its_bound(codec: int) -> None:
    here = Telemetry()
    payload = Payload().number("gauge", f"{PREFIX}rate", 2.5).encoded
    assert here.push(here.get(), compress(payload, codec), compression_type=codec) == 0
    assert here.samples("tidelog_client_metric_value") == {f"{PREFIX}rate": 2.5}
    if codec != NONE:
        bomb = compress(bytes(MAX_UNPACKED_BYTES + 1), codec)
        assert here.push(here.get(), bomb, compression_type=codec) == 118
        assert here.push(here.get(), b"\x01garbage", compression_type=codec) == 87


def test_what_is_wrong_with_a_push_is_told() -> None:
    here = Telemetry(max_bytes=1_000)
    assert here.push(here.get(), bytes(1_001)) == 118
    assert here.push(here.get(), b"\xff\xff\xff") == 87
    told = here.get()
    assert here.push(told, compression_type=9) == 76
    assert here.get(told.client_instance_id).error_code == 0, "it may ask again at once"
    assert here.push(told, client_instance_id=None) == 42
    assert here.push(here.get(), b"") == 0
    outcomes = here.samples("tidelog_client_telemetry_pushes_total")
    assert {name: count for name, count in outcomes.items() if count} == {
        "taken": 1, "too_large": 1, "invalid": 1, "unsupported_compression": 1, "refused": 1,
    }  # fmt: skip


def test_the_apis_are_listed_while_there_is_a_subscription() -> None:
    here = Telemetry(subscribed=False)
    api = ApiVersions(APIS).api

    def listed() -> set[int]:
        answer = here.world.call([api], 18, 4, client_software_name="test", client_software_version="1")
        return {each.api_key for each in answer.api_keys}

    assert listed() == {18}, "librdkafka writes a line to the terminal for each client that asks"
    here.subscribe("s", metrics=PREFIX)
    assert listed() == {18, GET, PUSH}
    here.subscribe("s", metrics=None)
    assert listed() == {18}
    assert here.get().error_code == 0, "who has seen them before goes on asking"


def test_a_broker_that_takes_no_metrics_does_not_serve_the_apis() -> None:
    served = {api.api_key for api in all_apis()}
    assert served - {api.api_key for api in all_apis(telemetry=False)} == {GET, PUSH}


def test_the_clients_that_are_remembered_are_bounded() -> None:
    telemetry = ClientTelemetry(1 << 20, random.Random(1), tuple)
    for _ in range(MAX_CLIENTS + 10):
        telemetry.subscribe(None, {}, 0.0)
    instances = next(one for one in telemetry.families(0.0) if one.name == "tidelog_client_telemetry_instances")
    assert instances.samples[0].value == MAX_CLIENTS


def test_a_client_of_too_many_prefixes_is_told_to_send_all_metrics() -> None:
    telemetry = Telemetry(subscribed=False)
    half = MAX_PREFIXES // 2
    telemetry.subscribe("a", metrics=",".join(f"a{index}" for index in range(half)))
    telemetry.subscribe("b", metrics=",".join(f"b{index}" for index in range(half)))
    assert len(telemetry.get().requested_metrics) == MAX_PREFIXES
    telemetry.subscribe("c", metrics="c")
    assert list(telemetry.get().requested_metrics) == [""]
