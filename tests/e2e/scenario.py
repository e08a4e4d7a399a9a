"""What every client must be able to do with Tidelog, as one scenario over a `Kit`."""

from __future__ import annotations

from collections import Counter

from tests.support.clients import CODECS, Kit, Member, Record, wait_until

RECORDS_A_CODEC = 200


def make_records(label: str, count: int) -> list[Record]:
    """Printable records (kcat reads lines) of growing size, each one of a kind."""
    return [(f"{label}-{n}".encode(), f"{label} {n} {'x' * (n * 7 % 900)} ünïcode".encode()) for n in range(count)]


def round_trip(kit: Kit, bootstrap: str, topic: str, partitions: int = 3) -> None:
    """Create, produce with every codec and idempotence, then consume as a group over restart and rebalance."""
    group = f"group-of-{topic}"
    kit.create_topic(bootstrap, topic, partitions)
    sent: list[Record] = []
    for codec in CODECS:
        records = make_records(f"{topic}-{codec}", RECORDS_A_CODEC)
        kit.produce(bootstrap, topic, records, codec)
        sent += records

    first = kit.join(bootstrap, topic, group)
    wait_for(first, len(sent))
    first.stop()
    assert Counter(first.records) == Counter(sent), "the first member must read exactly what was sent"

    more = make_records(f"{topic}-after-restart", RECORDS_A_CODEC)
    kit.produce(bootstrap, topic, more, "lz4")
    second = kit.join(bootstrap, topic, group)
    wait_for(second, len(more))
    assert Counter(second.records) == Counter(more), "a restarted group goes on where it committed"

    rebalance(kit, bootstrap, topic, group, second)


def rebalance(kit: Kit, bootstrap: str, topic: str, group: str, second: Member) -> None:
    """A third member joins: partitions are shared, and everything sent afterwards is read by one of the two."""
    before = len(second.records)
    third = kit.join(bootstrap, topic, group)
    if kit.reports_assignment:
        wait_until(lambda: bool(third.assigned) and bool(second.assigned), "both members have partitions")
        wait_until(lambda: not (second.assigned & third.assigned), "no partition has two owners")
    last = make_records(f"{topic}-rebalance", RECORDS_A_CODEC)
    kit.produce(bootstrap, topic, last, "none")
    wanted = Counter(last)
    wait_until(
        lambda: (
            not (wanted - Counter(second.records[before:] + third.records))
            or second.error is not None
            or third.error is not None
        ),
        "the two members together read everything",
    )
    third.stop()
    second.stop()
    extra = Counter(second.records[before:] + third.records) - wanted
    assert all(record in wanted for record in extra), "nothing but what was sent after the restart may come again"


def wait_for(member: Member, count: int) -> None:
    wait_until(lambda: len(member.records) >= count or member.error is not None, f"{count} records arrive")
