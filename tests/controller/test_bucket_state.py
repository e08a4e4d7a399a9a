"""The metadata in the bucket: its format, when the active controller writes it, and when it must not."""

from __future__ import annotations

import asyncio
import shutil
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tests.controller.controller_helpers import KeptNetwork, ask, make_client, make_node, until
from tidelog.controller.active import state_keeper
from tidelog.controller.active.role import ActiveRole
from tidelog.controller.active.state_keeper import BucketSuperseded, KeptLog, StateKeeper
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model import commands as c
from tidelog.controller.model.bucket_state import (
    STATE_HEAD_BYTES,
    BucketState,
    claim_key,
    decode_state,
    encode_state,
    generation_of,
    metadata_prefix,
    parse_claim_key,
    parse_state_key,
    state_key,
    version_in,
)
from tidelog.controller.model.errors import NotController, OutcomeUnknown
from tidelog.controller.model.levels import NewerLevel
from tidelog.controller.model.records import ClusterRecord
from tidelog.controller.model.settings import ControllerSettings
from tidelog.controller.node import ControllerNode
from tidelog.controller.rebuild.source import Damaged, newest_state
from tidelog.controller.rpc.connection import CommandParams, SessionReply
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import CorruptData, Unavailable
from tidelog.storage.bucket.common import StoreAccessDenied
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.store import ObjectInfo

QUICK = ControllerSettings(state_interval_ms=100, state_after_change_ms=100, state_kept=2)
GOLDEN = BucketState("cluster", 2, 300, 299, 5, 1_700_000_000_000, True, b"state")
GOLDEN_HEX = (
    "544c5354415445010100000022000000000000009b8270cc5f1a72c098a7636c757374657202cd012ccd012b05cf0000"
    "018bcfe56800c3c4057374617465"
)


def test_the_bytes_of_a_state_are_fixed() -> None:
    assert encode_state(GOLDEN).hex() == GOLDEN_HEX
    assert decode_state(bytes.fromhex(GOLDEN_HEX), key="cluster/metadata/state-00000002-000000000000012c") == GOLDEN


@given(
    st.integers(1, (1 << 32) - 1), st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 63) - 1), st.binary(max_size=99)
)
def test_states_and_keys_are_read_as_they_were_written(generation: int, index: int, version: int, state: bytes) -> None:
    key = state_key("c-_1", generation, index)
    written = BucketState("c-_1", generation, index, version, 7, 8, False, state)
    assert decode_state(encode_state(written), key=key) == written
    assert version_in(encode_state(written)[:STATE_HEAD_BYTES]) == version
    assert parse_state_key(key) == (generation, index)
    assert parse_claim_key(claim_key("c-_1", generation)) == generation
    assert parse_claim_key(key) is None and parse_state_key(claim_key("c-_1", generation)) is None
    assert key.startswith(metadata_prefix("c-_1"))


@given(st.integers(0, 8 * len(encode_state(GOLDEN)) - 1))
def test_a_flipped_bit_is_found(bit: int) -> None:
    damaged = bytearray(encode_state(GOLDEN))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptData):
        decode_state(bytes(damaged), key=state_key("cluster", 2, 300))


@given(st.binary(max_size=STATE_HEAD_BYTES), st.integers(0, STATE_HEAD_BYTES))
def test_the_first_bytes_of_anything_else_say_no_version_or_some(data: bytes, kept: int) -> None:
    assert version_in(data) is None
    found = version_in(encode_state(GOLDEN)[:kept] + data)
    assert found is None or found >= 0


@given(st.integers(0, len(encode_state(GOLDEN)) - 1))
def test_a_part_of_a_state_is_no_state(size: int) -> None:
    with pytest.raises(CorruptData):
        decode_state(encode_state(GOLDEN)[:size], key=state_key("cluster", 2, 300))


def test_a_state_under_another_key_is_refused() -> None:
    with pytest.raises(CorruptData, match="it is the state of"):
        decode_state(encode_state(GOLDEN), key=state_key("cluster", 2, 301))


def newer(data: bytes) -> bytes:
    """The same state in the next format."""
    magic, version, *rest = struct.unpack_from("<8sIQI", data)
    header = struct.pack("<8sIQI", magic, version + 1, *rest)
    return header + struct.pack("<I", crc32c(header)) + data[len(header) + 4 :]


def test_a_state_of_a_newer_format_is_not_damaged() -> None:
    with pytest.raises(NewerLevel, match="has format version 2; this process reads 1") as caught:
        decode_state(newer(encode_state(GOLDEN)), key=state_key("cluster", 2, 300))
    assert caught.value.hint == "start the version that wrote it, or a newer one"


async def test_no_older_state_is_taken_for_the_newest_instead_of_one_of_a_newer_format() -> None:
    """All that was written since would be left out of what is rebuilt."""
    store = MemoryObjectStore(SystemClock())
    damaged: list[Damaged] = []
    for index in (299, 300):
        data = encode_state(msgspec.structs.replace(GOLDEN, index=index))
        await store.put(state_key("cluster", 2, index), [newer(data) if index == 300 else data])
    infos = [info async for info in store.list(metadata_prefix("cluster"))]
    with pytest.raises(NewerLevel, match="state-00000002-000000000000012c has format version 2"):
        await newest_state(store, "cluster", infos, damaged)
    await store.put(state_key("cluster", 2, 300), [encode_state(GOLDEN)[:-1]])
    base, _ = await newest_state(store, "cluster", infos, damaged)
    assert base.index == 299 and [one.key for one in damaged] == [state_key("cluster", 2, 300)]


async def alter(node: ControllerNode, number: int) -> None:
    command = c.AlterConfigs("cluster", "", {"a": str(number)})
    await ask(node, "command", CommandParams("test", number + 1, 1, msgspec.Raw(c.encode(command))))


async def states(store: MemoryObjectStore, cluster_id: str) -> list[str]:
    return [info.key async for info in store.list(metadata_prefix(cluster_id)) if parse_state_key(info.key)]


async def newest(store: MemoryObjectStore, node: ControllerNode) -> tuple[BucketState, ControllerState]:
    key = (await states(store, node.image.cluster_id))[-1]
    found = decode_state(await store.get(key), key=key)
    loaded = ControllerState()
    loaded.load(found.state)
    return found, loaded


async def started(directory: Path, store: MemoryObjectStore, **kwargs: Any) -> ControllerNode:
    node = make_node(directory, settings=QUICK, state_store=store, **kwargs)
    await node.start()
    await node.wait_active(10)
    return node


def written_version(node: ControllerNode) -> int:
    state = node.bucket_state()
    return -1 if state is None or state["version"] is None else int(state["version"])


@pytest.mark.usefixtures("quick_rounds")
async def test_the_active_controller_writes_what_it_has_and_keeps_a_few(tmp_path: Path) -> None:
    store = MemoryObjectStore(SystemClock())
    node = await started(tmp_path, store)
    for number in range(4):
        before = written_version(node)
        await alter(node, number)
        await until(lambda before=before: written_version(node) > before)  # type: ignore[misc]
    found, loaded = await newest(store, node)
    assert (found.cluster_id, found.generation, found.closed) == (node.image.cluster_id, 1, False)
    assert loaded.tables.configs.get(("cluster", "")) == {"a": "3"}
    assert loaded.version == found.version and loaded.applied_index == found.index
    await node.close()
    found, loaded = await newest(store, node)
    assert found.closed
    assert len(await states(store, node.image.cluster_id)) == 2


@pytest.mark.usefixtures("quick_rounds")
async def test_a_restarted_controller_says_at_once_that_it_is_not_closed(tmp_path: Path) -> None:
    store = MemoryObjectStore(SystemClock())
    node = await started(tmp_path, store)
    await node.close()
    assert (await newest(store, node))[0].closed
    node = await started(tmp_path, store)
    await until(lambda: written_version(node) >= 0)
    assert not (await newest(store, node))[0].closed
    await node.close()


@pytest.mark.usefixtures("quick_rounds")
async def test_a_superseded_controller_writes_and_deletes_nothing_more_and_ends(tmp_path: Path) -> None:
    store = MemoryObjectStore(SystemClock())
    failed: list[Exception] = []
    deleted: list[int] = []

    async def delete(ids: Any) -> None:
        deleted.extend(ids)

    node = await started(tmp_path, store, on_failed=failed.append, delete_objects=delete, delete_delay_ms=10)
    await until(lambda: written_version(node) >= 0)
    await store.put(claim_key(node.image.cluster_id, 2), [b"claim"], if_absent=True)
    kept = await states(store, node.image.cluster_id)
    await alter(node, 1)
    await until(lambda: bool(failed))
    assert isinstance(failed[0], BucketSuperseded)
    assert not node.is_active
    assert await states(store, node.image.cluster_id) == kept and not deleted
    await node.close()
    assert await states(store, node.image.cluster_id) == kept


async def copied_between_two_lives(directory: Path, copy: Path, store: MemoryObjectStore) -> ControllerNode:
    """A controller that runs again since its directory was copied."""
    await (await started(directory, store)).close()
    shutil.copytree(directory, copy)
    return await started(directory, store)


@pytest.mark.usefixtures("quick_rounds")
async def test_an_older_copy_of_the_directory_is_refused_again_and_again(tmp_path: Path) -> None:
    """The bucket knows of commands that the copy does not have. No start of it may make it look newer than that."""
    store = MemoryObjectStore(SystemClock())
    node = await copied_between_two_lives(tmp_path / "new", tmp_path / "old", store)
    await alter(node, 1)
    await node.close()
    kept = await states(store, node.image.cluster_id)
    for _ in range(8):
        failed: list[Exception] = []
        copy = make_node(tmp_path / "old", settings=QUICK, state_store=store, on_failed=failed.append)
        await copy.start()
        await until(lambda failed=failed: bool(failed))  # type: ignore[misc]
        assert isinstance(failed[0], BucketSuperseded) and "older copy" in str(failed[0])
        assert not copy.is_active
        await copy.close()
    assert await states(store, node.image.cluster_id) == kept
    await (await started(tmp_path / "new", store)).close()


@pytest.mark.usefixtures("quick_rounds")
async def test_a_controller_over_a_copy_of_the_directory_is_refused_while_the_first_one_runs(tmp_path: Path) -> None:
    store = MemoryObjectStore(SystemClock())
    node = await copied_between_two_lives(tmp_path / "one", tmp_path / "other", store)
    await until(lambda: written_version(node) >= 0)
    failed: list[Exception] = []
    copy = make_node(tmp_path / "other", settings=QUICK, state_store=store, on_failed=failed.append)
    await copy.start()
    await until(lambda: bool(failed))
    assert isinstance(failed[0], BucketSuperseded)
    await copy.close()
    before = written_version(node)
    await alter(node, 1)
    await until(lambda: written_version(node) > before)
    await node.close()


@pytest.mark.usefixtures("quick_rounds")
async def test_a_controller_finds_later_that_another_one_has_gone_on_from_the_same_log(tmp_path: Path) -> None:
    store = MemoryObjectStore(SystemClock())
    failed: list[Exception] = []
    node = await started(tmp_path, store, on_failed=failed.append)
    await until(lambda: written_version(node) >= 0)
    found, _ = await newest(store, node)
    other = msgspec.structs.replace(found, index=found.index + 5, version=found.version + 3)
    await store.put(state_key(other.cluster_id, 1, other.index), [encode_state(other)])
    await alter(node, 1)
    await until(lambda: bool(failed))
    assert isinstance(failed[0], BucketSuperseded)
    await node.close()


@pytest.mark.usefixtures("quick_rounds")
async def test_a_broker_that_knows_more_is_given_no_ids_by_an_older_copy_which_ends(tmp_path: Path) -> None:
    """The bucket has no metadata that is newer than the copy. Ids that it gives out are those of objects there."""
    network = KeptNetwork()
    node = await copied_between_two_lives(tmp_path / "new", tmp_path / "old", MemoryObjectStore(SystemClock()))
    client = make_client(node.address, network=network, heartbeat_interval_s=0.05, budget_s=1)
    await client.start()
    await client.register_broker(c.RegisterBroker(0, "c", "a", "h", 9092, "", ""))
    used = await client.prepare_objects(1, 60_000)
    await node.close()
    failed: list[Exception] = []
    store = MemoryObjectStore(SystemClock())
    copy = make_node(tmp_path / "old", settings=QUICK, state_store=store, on_failed=failed.append)
    await copy.start()
    await copy.wait_active(10)
    assert used not in copy.image.objects
    network.redirected[node.address] = copy.address
    with pytest.raises(OutcomeUnknown):
        await client.prepare_objects(1, 60_000)
    assert used not in copy.image.objects
    await client.close()
    await copy.close()


async def test_two_lives_of_one_log_give_out_no_dedupe_id_twice(tmp_path: Path) -> None:
    """Both begin the same term. Who was given its id by the first one may still ask the second one."""
    store = MemoryObjectStore(SystemClock())
    node = await copied_between_two_lives(tmp_path / "new", tmp_path / "old", store)
    given = msgspec.msgpack.decode(await ask(node, "session", None), type=SessionReply).client_id
    term = node.status()["term"]
    await node.close()
    copy = await started(tmp_path / "old", MemoryObjectStore(SystemClock()))
    again = msgspec.msgpack.decode(await ask(copy, "session", None), type=SessionReply).client_id
    assert copy.status()["term"] == term and again != given
    await copy.close()


@pytest.mark.usefixtures("quick_rounds")
async def test_an_older_copy_ends_when_a_broker_has_newer_metadata(tmp_path: Path) -> None:
    network = KeptNetwork()
    store = MemoryObjectStore(SystemClock())
    node = await started(tmp_path / "new", store)
    client = make_client(node.address, network=network, heartbeat_interval_s=0.05)
    await client.start()
    epoch = await client.register_broker(c.RegisterBroker(0, "c", "a", "h", 9092, "", ""))
    await node.close()
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    node = await started(tmp_path / "new", store)
    network.redirected[client.endpoints[0]] = node.address
    await client.put_kv("key", b"value")
    await node.close()
    failed: list[Exception] = []
    copy = make_node(
        tmp_path / "old", settings=QUICK, state_store=MemoryObjectStore(SystemClock()), on_failed=failed.append
    )
    await copy.start()
    await copy.wait_active(10)
    assert copy.image.brokers[0].registration_epoch == epoch and not failed
    network.redirected[client.endpoints[0]] = copy.address
    await until(lambda: bool(failed))
    assert isinstance(failed[0], BucketSuperseded) and "broker 0 has metadata of version" in str(failed[0])
    await client.close()
    await copy.close()


class KeepingStore(MemoryObjectStore):
    """A store whose policy allows nobody to delete."""

    async def delete(self, keys: Sequence[str]) -> None:
        raise StoreAccessDenied("denied")


@pytest.mark.usefixtures("quick_rounds")
async def test_a_controller_knows_its_own_states_however_many_the_bucket_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it may not delete, there are soon more than it remembers to have put."""
    monkeypatch.setattr(state_keeper, "KNOWN_STATES", 2)
    store, failed = KeepingStore(SystemClock()), list[Exception]()
    node = await started(tmp_path, store, on_failed=failed.append)
    for number in range(6):
        before = written_version(node)
        await alter(node, number)
        await until(lambda before=before: bool(failed) or written_version(node) > before)  # type: ignore[misc]
    assert not failed
    assert len(await states(store, node.image.cluster_id)) >= 6
    await node.close()


class MuteStore(MemoryObjectStore):
    """A store that can be had to answer no question whether an object is there."""

    is_mute = True

    async def head(self, key: str) -> ObjectInfo:
        if self.is_mute:
            raise Unavailable("mute")
        return await super().head(key)


async def keeper_beside_newer_metadata(
    store: MemoryObjectStore, log: KeptLog, reported: list[Exception]
) -> StateKeeper:
    """Of a controller that was elected for term 3 with version 5; the bucket has a state of version 9."""
    image = Image()
    image.apply(Delta(5, [RowChange("cluster", "", ClusterRecord("c", 1, 3, 0))], {}))
    state = BucketState("c", 1, 9, 9, 3, 0, False, b"")
    await store.put(state_key("c", 1, 9), [encode_state(state)])

    async def apply(_command: object) -> Any:
        raise AssertionError("nothing is written")

    role = ActiveRole(lambda: image, apply, lambda: True, lambda: 0)
    return StateKeeper(role, store, QUICK, SystemClock(), log=log, on_refused=reported.append)


async def test_nothing_is_deleted_before_a_bucket_that_was_silent_at_first_was_looked_at() -> None:
    """What the older copy takes for an object that nobody needs is another one in the bucket."""

    async def in_term() -> int:
        return 3

    store, reported = MuteStore(SystemClock()), list[Exception]()
    keeper = await keeper_beside_newer_metadata(store, KeptLog(asyncio.Future, lambda: 3, in_term), reported)
    await keeper.look_first(3)
    assert not reported
    store.is_mute = False
    with pytest.raises(BucketSuperseded, match="older copy"):
        await keeper.check_owner()
    assert len(reported) == 1


async def test_a_newer_state_that_takes_long_to_read_is_waited_for() -> None:
    """It is that of a large cluster. Without it, the older copy would begin its term."""

    class LargeStates(MemoryObjectStore):
        async def get(self, key: str) -> bytes:
            await asyncio.sleep(2 * state_keeper.FIRST_LOOK_S)
            return await super().get(key)

    async def in_term() -> int:
        return 3

    store, reported = LargeStates(SystemClock()), list[Exception]()
    keeper = await keeper_beside_newer_metadata(store, KeptLog(asyncio.Future, lambda: 3, in_term), reported)
    with pytest.raises(BucketSuperseded, match="older copy"):
        await keeper.look_first(3)
    assert len(reported) == 1


@pytest.mark.parametrize("content", [b"", b"x", encode_state(GOLDEN)[:100]])
async def test_a_state_that_cannot_be_read_stops_nothing(content: bytes) -> None:
    async def in_term() -> int:
        return 3

    store, reported = MemoryObjectStore(SystemClock()), list[Exception]()
    keeper = await keeper_beside_newer_metadata(store, KeptLog(asyncio.Future, lambda: 3, in_term), reported)
    await store.put(state_key("c", 1, 9), [content])
    await keeper.look_first(3)
    await keeper.check_owner()
    assert not reported


async def test_a_look_of_an_earlier_term_is_none_of_this_one() -> None:
    """What it has listed may be older than what made this controller a copy of another one."""
    answer, asked = asyncio.Event(), asyncio.Event()

    class SlowList(MuteStore):
        is_mute = False

        async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
            found = [info async for info in super().list(prefix, start_after=start_after) if not self.is_mute]
            if not asked.is_set():
                asked.set()
                await answer.wait()
            for info in found:
                yield info

    async def in_term() -> int:
        return 5

    store, reported = SlowList(SystemClock()), list[Exception]()
    keeper = await keeper_beside_newer_metadata(store, KeptLog(asyncio.Future, lambda: 5, in_term), reported)
    newer_state = state_key("c", 1, 9)
    data = await store.get(newer_state)
    await store.delete([newer_state])
    earlier = asyncio.create_task(keeper.check_owner())
    await asked.wait()
    await store.put(newer_state, [data])
    store.is_mute = True
    await keeper.look_first(5)
    store.is_mute = False
    answer.set()
    await earlier
    with pytest.raises(BucketSuperseded):
        await keeper.check_owner()


async def test_states_of_a_successor_do_not_end_a_controller_that_has_slept() -> None:
    async def deposed() -> int:
        return -1

    store, reported = MemoryObjectStore(SystemClock()), list[Exception]()
    keeper = await keeper_beside_newer_metadata(store, KeptLog(asyncio.Future, lambda: 3, deposed), reported)
    with pytest.raises(NotController):
        await keeper.look_first(3)
    assert not reported


def test_the_first_generation_has_no_row() -> None:
    assert generation_of({}) == 1
    assert generation_of({"generation": b"7"}) == 7
