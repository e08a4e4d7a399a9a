"""What the controllers know of WALs, and what follows from it: who may start, what may change, what was given up."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controller.controller_helpers import TOPIC, Driver, new_object
from tests.controller.replica_trio import Trio
from tidelog.controller.image.stake import at_stake, wal_rows
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.levels import EMPTY_COPY_LEVEL
from tidelog.controller.model.records import ReplicaSetRecord
from tidelog.controller.model.replication import PolicyRecord
from tidelog.controller.model.wal_notes import (
    FoundWal,
    StakeRange,
    WalLoss,
    WalLost,
    WalNotCommitted,
    WalNote,
    WalVerdict,
    describe,
    gave_up,
    judge,
    loss_key,
    losses_in,
    note_in,
)
from tidelog.runtime.errors import Fenced, InvalidInput, NotFound
from tidelog.storage.commits import CommitObjects

DATA = 1
"""The data stream of partition 0 is this many after its first stream."""


def register(driver: Driver, broker: int, kind: str = "disk", place: str = "s3://b/", incarnation: str = "a") -> None:
    names = (f"code{broker}", incarnation, "host")
    driver.run(c.RegisterBroker(broker, *names, 9092, "", "", kind, f"host:{7000 + broker}", "", place), int)


def cluster(kind: str = "disk") -> Driver:
    """Broker 1, master in epoch 1, with a topic of two partitions that are open."""
    driver = Driver()
    register(driver, 1, kind)
    driver.run(c.Elect(1, 1))
    driver.run(c.CreateTopic(TOPIC, "events", 2, {}, False, False, None))
    first = [each.first_stream for each in driver.image.partitions(TOPIC)]
    driver.run(c.OpenStreams(1, 1, tuple((one + step, 1) for one in first for step in range(4))))
    return driver


def note(number: int, end: int, *, may_grow: bool, kind: str = "disk", epoch: int = 1, ends: int = -1) -> c.NoteWal:
    known = ((first_data(), ends),) if ends >= 0 else ()
    return c.NoteWal(1, WalNote(kind, "s3://b/", epoch, number, end, may_grow, known))


def first_data() -> int:
    return 4 + DATA


def commit(driver: Driver, end: int, records: int) -> None:
    object_id = driver.run(c.PrepareObjects(1, 60_000), int)
    start = driver.image.streams[first_data()].end_offset
    objects = (new_object(object_id, (first_data(), start, start + records)),) if records else ()
    before = driver.image.replica_sets[1].committed_wal_offset
    driver.run(c.Commit(CommitObjects(1, driver.image.replica_sets[1].master_epoch, before, end, objects)))


def known(driver: Driver) -> WalNote:
    found = note_in(driver.image.kv, 1)
    assert found is not None
    return found


def test_a_late_note_does_not_replace_a_newer_one() -> None:
    driver = cluster()
    driver.run(note(2, 500, may_grow=True))
    driver.run(note(1, 100, may_grow=False))
    assert (known(driver).end_offset, known(driver).may_grow) == (500, True)
    driver.run(c.Elect(1, 1))
    with pytest.raises(Fenced):
        driver.run(note(9, 900, may_grow=False))
    driver.run(note(1, 500, may_grow=False, epoch=2))
    assert known(driver).master_epoch == 2


def test_what_is_at_stake_names_partitions_and_offsets() -> None:
    driver = cluster()
    assert at_stake(driver.image, 1) == []  # nothing is known of its WAL
    commit(driver, 300, 10)
    driver.run(note(1, 500, may_grow=True, ends=25))
    found = at_stake(driver.image, 1)
    assert [str(one) for one in found] == ["events:0 offsets 10 to 25", "events:1 offset 0 and later"]
    (row,) = wal_rows(driver.image)
    assert (row["acknowledged_offset"], row["committed_offset"], row["committed"]) == (500, 300, False)
    commit(driver, 500, 15)
    driver.run(note(2, 500, may_grow=False))
    assert at_stake(driver.image, 1) == []
    assert describe([StakeRange("t", n, 0) for n in range(12)]).endswith("and 2 more partitions")


def test_nothing_is_in_a_wal_alone_that_other_brokers_have_replicas_of() -> None:
    trio = Trio()
    trio.run(c.CreateTopic(TOPIC, "events", 2, {}, False, False, None))
    trio.run(c.NoteWal(0, WalNote("disk", "s3://b/", trio.record.master_epoch, 1, 500, True)))
    assert 0 in {each.replica_set for each in trio.image.partitions(TOPIC)}
    assert at_stake(trio.image, 0) == []
    (row,) = wal_rows(trio.image)
    assert (row["broker"], row["replicas"], row["committed"], row["at_stake"]) == (0, 3, None, [])
    assert (row["master"], row["alive"], row["master_epoch"]) == (trio.record.master, True, trio.record.master_epoch)
    trio.begin()
    (row,) = wal_rows(trio.image)
    assert (row["master"], row["alive"], row["admin_url"]) == (None, False, ""), (
        "nobody uploads it while a master is elected"
    )


class GrownSet(Driver):
    """Broker 1 kept a WAL alone, noted its end, and died; then broker 2 joined, which had been assigned before."""

    def __init__(self, version: int = c.FORMAT_VERSION) -> None:
        self.version = version
        super().__init__()
        for each in (1, 2):
            register(self, each)
            self.run(c.Elect(each, each))
        self.run(r.SetReplicaSetPolicy(1, PolicyRecord(2, 1, 1)))
        self.run(r.AddReplica(1, 1, 1, "wal-1"))
        self.run(note(1, 500, may_grow=True))
        self.run(r.AssignReplica(1, 2))
        self.run(c.SetBrokerAlive(1, 1, False))
        self.run(r.AddReplica(1, 2, 1, "wal-2"))

    def envelope(self, command: c.AnyCommand, client: str = "", sequence: int = 0, done: int = 0) -> c.Envelope:
        """See `Driver.envelope`."""
        return c.Envelope(self.version, self.term, self.now_ms, client, sequence, done, command)

    def promise(self, end: int) -> int:
        """Start broker 1 again; who is master when it has promised with a WAL that ends there."""
        register(self, 1, incarnation=f"again-{self.index}")
        broker, epoch = self.image.brokers[1], self.image.replica_sets[1].master_epoch
        command = r.PromiseEpoch(1, epoch, 1, broker.registration_epoch, "wal-1", 1, end, 0)
        return int(self.run(command, ReplicaSetRecord).master)


def test_the_noted_end_of_a_wal_counts_when_others_get_replicas_of_it() -> None:
    """From the second member on its WAL is not judged by the note any more: an older copy of it was elected."""
    driver = GrownSet()
    with pytest.raises(WalLost, match="ends at 400; it had offsets up to 500"):
        driver.promise(400)
    assert driver.promise(500) == 1


def test_the_noted_end_counts_for_nothing_until_all_members_know_the_rule() -> None:
    assert GrownSet(EMPTY_COPY_LEVEL).promise(400) == 1


def test_what_was_known_of_a_wal_while_others_had_replicas_is_noted_when_it_is_alone_again() -> None:
    driver = GrownSet()
    assert driver.promise(500) == 1
    record, registration = driver.image.replica_sets[1], driver.image.brokers[1].registration_epoch
    told = (r.ReportedMember(1, "wal-1", 900),)
    driver.run(r.AlterSyncStateSet(1, 1, registration, record.master_epoch, record.sync_state_set_epoch, told, 1, 900))
    driver.run(r.RemoveReplica(1, 2))
    register(driver, 1, incarnation="c")
    assert driver.image.replication[1].in_sync == (), "the WAL is judged by the note again"
    assert (known(driver).master_epoch, known(driver).end_offset, known(driver).may_grow) == (1, 900, True)


@pytest.mark.parametrize("changed", [("s3", "s3://b/"), ("memory", "s3://b/"), ("disk", "s3://other/")])
def test_kind_and_bucket_change_only_when_everything_is_committed(changed: tuple[str, str]) -> None:
    driver = cluster()
    driver.run(note(1, 500, may_grow=True))
    before = driver.image.brokers[1]
    with pytest.raises(WalNotCommitted) as refused:
        register(driver, 1, *changed, incarnation="b")
    assert "wal drain" in str(refused.value)
    assert driver.image.brokers[1] == before  # others may still take over from it
    register(driver, 1, incarnation="c")
    commit(driver, 500, 5)
    driver.run(note(2, 500, may_grow=False))
    register(driver, 1, *changed, incarnation="d")
    assert driver.image.brokers[1].wal_kind == changed[0]


def test_a_broker_without_partitions_and_one_of_an_older_version_may_change() -> None:
    driver = Driver()
    register(driver, 1, "s3")
    driver.run(c.Elect(1, 1))
    driver.run(c.NoteWal(1, WalNote("s3", "", 1, 1, 500, True)))
    register(driver, 1, "disk", incarnation="b")
    older = cluster("s3")
    older.run(c.NoteWal(1, WalNote("s3", "", 1, 1, 500, True)))
    register(older, 1, "s3", "s3://named now/", "b")
    register(older, 1, "", "", "c")


def test_memory_is_never_missed() -> None:
    driver = cluster("memory")
    driver.run(note(1, 500, may_grow=True, kind="memory"))
    register(driver, 1, "disk", incarnation="b")
    assert judge(known(driver), 0, owns=True, found=FoundWal("disk", (), 0, False)) is WalVerdict.CONTINUES


def test_an_accepted_loss_is_recorded_once_and_settles_the_wal() -> None:
    driver = cluster()
    commit(driver, 300, 10)
    driver.run(note(1, 500, may_grow=True, ends=25))
    driver.run(c.Elect(1, 1))
    with pytest.raises(InvalidInput, match=r"1\.1"):
        driver.run(c.AcceptWalLoss(1, 2, 7))
    with pytest.raises(Fenced):
        driver.run(c.AcceptWalLoss(1, 1, 1))
    assert losses_in(driver.image.kv) == []
    driver.run(c.AcceptWalLoss(1, 2, 1))
    (loss,) = losses_in(driver.image.kv)
    assert (loss.master_epoch, loss.committed_offset, loss.end_offset, loss.may_be_more) == (1, 300, 500, True)
    assert loss.partitions == (StakeRange("events", 0, 10, 25), StakeRange("events", 1, 0))
    old = FoundWal("disk", (1,), 500, False)
    assert judge(known(driver), 300, owns=True, found=old) is WalVerdict.STARTS_OVER
    with pytest.raises(InvalidInput):
        driver.run(c.AcceptWalLoss(1, 2, 1))
    assert len(losses_in(driver.image.kv)) == 1


@pytest.mark.parametrize(
    ("replica_set", "last_epoch", "end_offset", "kept"),
    [(7, 2, 501, True), (7, 2, 500, False), (7, 3, 900, False), (8, 2, 501, False)],
    ids=["more than was committed", "all was committed", "of the epoch that was elected", "another set"],
)
def test_which_wals_have_records_that_were_given_up(
    replica_set: int, last_epoch: int, end_offset: int, kept: bool
) -> None:
    loss = WalLoss(7, 3, 0, "an operator elected another replica", 500, 800, True, ())
    rows = {loss_key(loss): msgspec.msgpack.encode(loss)}
    assert gave_up(rows, replica_set, last_epoch=last_epoch, end_offset=end_offset) == kept


def test_there_is_no_loss_to_accept_where_nothing_is_known() -> None:
    driver = cluster()
    with pytest.raises(NotFound):
        driver.run(c.AcceptWalLoss(1, 1, 1))


@pytest.mark.parametrize("told", [True, False])
def test_abandoning_a_dead_broker_leaves_a_record(told: bool) -> None:
    driver = cluster()
    register(driver, 2)
    driver.run(c.Elect(2, 2))
    if told:
        driver.run(note(1, 500, may_grow=True, ends=25))
    driver.run(c.SetBrokerAlive(1, driver.image.brokers[1].registration_epoch, False))
    driver.run(c.Abandon(1, 1, ((TOPIC, 0), (TOPIC, 1))))
    (loss,) = losses_in(driver.image.kv)
    assert loss.partitions[0] == StakeRange("events", 0, 0, 25 if told else -1)
    driver.run(c.RemoveBroker(1))
    assert note_in(driver.image.kv, 1) is None
    assert len(losses_in(driver.image.kv)) == 1


@pytest.mark.parametrize("kept", [True, False])
def test_nothing_is_lost_of_a_deleted_topic_whose_partitions_are_being_removed(kept: bool) -> None:
    """Whoever accepts the loss meanwhile is not refused because of them."""
    driver = cluster()
    register(driver, 2)
    driver.run(c.Elect(2, 2))
    kept_id = bytes(15) + b"k"
    if kept:
        driver.run(c.CreateTopic(kept_id, "kept", 1, {}, False, False, (1,)))
    driver.run(note(1, 500, may_grow=True, ends=25))
    driver.run(c.DeleteTopic(TOPIC, 1))
    assert driver.image.index.deleted_topics == {TOPIC}
    driver.run(c.AcceptWalLoss(1, 1, 1))
    driver.run(note(2, 600, may_grow=True))
    driver.now_ms += 1
    driver.run(c.SetBrokerAlive(1, driver.image.brokers[1].registration_epoch, False))
    driver.run(c.Abandon(1, 1, ((TOPIC, 0), (kept_id, 0))))
    wanted = (StakeRange("kept", 0, 0),)
    assert [loss.partitions for loss in losses_in(driver.image.kv)] == ([wanted, wanted] if kept else [])
    assert driver.state.failed is None


def test_abandoning_a_broker_whose_wal_is_committed_loses_nothing() -> None:
    driver = cluster()
    register(driver, 2)
    driver.run(c.Elect(2, 2))
    commit(driver, 500, 5)
    driver.run(note(1, 500, may_grow=False))
    driver.run(c.SetBrokerAlive(1, driver.image.brokers[1].registration_epoch, False))
    driver.run(c.Abandon(1, 1, ((TOPIC, 0), (TOPIC, 1))))
    assert losses_in(driver.image.kv) == []


OPEN = WalNote("disk", "", 5, 1, 1000, True)
SETTLED = WalNote("disk", "", 5, 1, 1000, False)
CONTINUES, OVER, LOST = WalVerdict.CONTINUES, WalVerdict.STARTS_OVER, WalVerdict.LOST


@pytest.mark.parametrize(
    ("told", "committed", "owns", "found", "verdict"),
    [
        pytest.param(None, 0, True, FoundWal("disk", (), 0, False), CONTINUES, id="nothing is known"),
        pytest.param(OPEN, 800, True, FoundWal("disk", (4, 5), 1000, False), CONTINUES, id="the same"),
        pytest.param(OPEN, 800, True, FoundWal("disk", (5, 7), 2000, False), CONTINUES, id="a later epoch was begun"),
        pytest.param(OPEN, 800, True, FoundWal("disk", (), 0, False), LOST, id="empty"),
        pytest.param(OPEN, 1000, True, FoundWal("disk", (), 0, False), LOST, id="empty, and more was acknowledged"),
        pytest.param(OPEN, 800, True, FoundWal("disk", (3, 4), 1000, False), LOST, id="of before the last start"),
        pytest.param(OPEN, 800, True, FoundWal("disk", (5,), 999, False), LOST, id="an older copy"),
        pytest.param(OPEN, 1200, True, FoundWal("disk", (5,), 1100, False), LOST, id="ends before what is committed"),
        pytest.param(OPEN, 1200, True, FoundWal("disk", (5,), 1100, True), CONTINUES, id="a power loss with async"),
        pytest.param(OPEN, 800, True, FoundWal("disk", (5,), 999, True), LOST, id="async, but it was synced"),
        pytest.param(OPEN, 800, True, FoundWal("s3", (5,), 1000, False), LOST, id="another kind"),
        pytest.param(OPEN, 800, False, FoundWal("disk", (), 0, False), OVER, id="it owns nothing"),
        pytest.param(SETTLED, 1000, True, FoundWal("disk", (), 0, False), OVER, id="wiped after all was uploaded"),
        pytest.param(SETTLED, 1000, True, FoundWal("s3", (), 0, False), OVER, id="another kind after a drain"),
        pytest.param(SETTLED, 1000, True, FoundWal("disk", (4,), 2000, False), OVER, id="the old disk comes back"),
        pytest.param(SETTLED, 1000, True, FoundWal("disk", (7, 9), 5000, False), CONTINUES, id="controllers restored"),
        pytest.param(OPEN, 800, True, FoundWal("disk", (7,), 900, False), LOST, id="newer, and it ends too early"),
        pytest.param(SETTLED, 999, True, FoundWal("disk", (), 0, False), LOST, id="told, and not committed"),
        pytest.param(SETTLED, 1000, True, FoundWal("disk", (5,), 1064, False), CONTINUES, id="stopped in good order"),
    ],
)
def test_verdicts(told: WalNote | None, committed: int, owns: bool, found: FoundWal, verdict: WalVerdict) -> None:
    assert judge(told, committed, owns=owns, found=found) is verdict


@given(st.integers(0, 50), st.integers(0, 50), st.booleans(), st.integers(0, 50), st.lists(st.integers(0, 9)))
def test_a_wal_that_is_taken_has_everything_that_was_told(
    committed: int, end: int, may_grow: bool, found_end: int, epochs: list[int]
) -> None:
    told = WalNote("disk", "", 5, 1, end, may_grow)
    verdict = judge(told, committed, owns=True, found=FoundWal("disk", tuple(epochs), found_end, False))
    if verdict is WalVerdict.CONTINUES:
        assert 5 in epochs or max(epochs) > 5
        assert found_end >= end or (end <= committed and not may_grow)
    if verdict is WalVerdict.STARTS_OVER:
        assert end <= committed and not may_grow
