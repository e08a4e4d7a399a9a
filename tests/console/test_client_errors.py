"""What the errors of confluent-kafka become."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from tidelog.console.client_errors import translate
from tidelog.runtime.errors import NotFound, TidelogError, Unavailable

NO_LEADERS = -156
"""Of librdkafka itself, when offsets of a partition are asked for that has no leader yet."""


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (NO_LEADERS, Unavailable),
        (KafkaError.LEADER_NOT_AVAILABLE, Unavailable),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, NotFound),
        (KafkaError.UNKNOWN, TidelogError),
    ],
)
def test_an_error_has_the_kind_that_says_whether_to_try_again(code: int, kind: type[TidelogError]) -> None:
    found = translate(KafkaException(KafkaError(code, "on purpose")), "offsets of t [0]")
    assert type(found) is kind
    assert str(found).startswith("offsets of t [0]: on purpose")
