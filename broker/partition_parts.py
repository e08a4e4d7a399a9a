"""Creates a broker's partition components: membership, partition logs, moves, takeovers, groups and transactions.

Each registers its metrics, problems and sections where it is created.

Entry: `build_partition_parts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tidelog.broker.base import BrokerBase
from tidelog.broker.data_parts import DataParts
from tidelog.broker.groups.coordinator import GroupCoordinator
from tidelog.broker.membership import BrokerMembership
from tidelog.broker.partitions.checkpoints import write_checkpoints
from tidelog.broker.partitions.hand_overs import HandOverPreparation
from tidelog.broker.partitions.hints import HintBox
from tidelog.broker.partitions.log_cleaner import LogCleaner
from tidelog.broker.partitions.manager import PartitionManager
from tidelog.broker.partitions.moves import HintExchange
from tidelog.broker.partitions.peer_calls import PeerCalls
from tidelog.broker.partitions.peers import HintSender, PeerListener
from tidelog.broker.partitions.snapshot_taker import SnapshotTaker
from tidelog.broker.partitions.storages import MasterStorages
from tidelog.broker.partitions.takeover import TakeoverRunner
from tidelog.broker.telemetry import figures
from tidelog.broker.txn.hanging import HangingTransactions
from tidelog.broker.txn.parts import TxnParts


@dataclass(frozen=True, slots=True)
class PartitionParts:
    """The partition components of a broker."""

    membership: BrokerMembership
    hints: HintBox
    peers: PeerListener
    peer_calls: PeerCalls
    hint_sender: HintSender
    hand_overs: HandOverPreparation
    manager: PartitionManager
    takeovers: TakeoverRunner
    groups: GroupCoordinator
    txn: TxnParts
    log_cleaner: LogCleaner
    snapshots: SnapshotTaker

    def not_ready(self) -> list[str]:
        """Return why the broker is not ready, one sentence each; empty when it is."""
        if not self.membership.serves:
            return ["the broker is still starting"]
        counts = self.manager.counts()
        opening = counts["led"] - counts["open"]
        return [f"{opening} of {counts['led']} partitions are not open"] if opening > 0 else []


def build_partition_parts(base: BrokerBase, data: DataParts) -> PartitionParts:
    """Create the components that serve the partitions of the storages that will be added."""
    storages = data.storages
    world, controller, credentials = base.world, base.controller, base.controllers.credentials
    membership = BrokerMembership(base.identity, controller, world.clock, base.failure, storages.terms)
    hints = HintBox(world.clock.monotonic)
    base.registry.add_figures("hints", lambda: hints.counts, figures.hint_families)
    peer_calls = PeerCalls(controller, world.between_brokers, credentials)
    hint_sender = HintSender(hints, controller, peer_calls, world.clock)
    if world.tls is not None:
        base.registry.add_problems("tls", world.tls.problems)
    manager = _manager(base, storages, hints, hint_sender)
    takeovers = _takeovers(base)
    groups = GroupCoordinator(manager, controller, world.clock, base.settings.group, world.rng)
    base.registry.add_figures("groups", groups.stats, figures.group_families)
    base.registry.add_problems("groups", groups.problems)
    _export_offsets(base, manager, groups)
    peers = PeerListener(
        hints,
        world.between_brokers,
        world.clock,
        credentials,
        membership.hint_reply,
        adopt_wal=data.door.adopt,
        cluster_id=lambda: controller.image.cluster_id,
    )
    txn = TxnParts(
        base.broker_id,
        partitions=manager,
        groups=groups,
        controller=controller,
        calls=peer_calls,
        clock=world.clock,
        settings=base.settings.group,
        rng=world.rng,
    )
    txn.serve(peers)
    hand_overs = HandOverPreparation(
        base.broker_id, controller, peer_calls, world.clock, lambda each: write_checkpoints(manager.of_set(each))
    )
    hand_overs.serve(peers)
    hanging = HangingTransactions(manager.all, base.settings.group.transaction_max_timeout_ms, world.clock)
    base.registry.add_figures(
        "transactions",
        lambda: {**txn.stats(), "hanging": hanging.count()},
        figures.transaction_families,
    )
    base.registry.add_section("transactions", hanging.report)
    base.registry.add_problems("transactions", lambda: [*txn.coordinator.problems(), *hanging.problems()])
    return PartitionParts(
        membership=membership,
        hints=hints,
        peers=peers,
        peer_calls=peer_calls,
        hint_sender=hint_sender,
        hand_overs=hand_overs,
        manager=manager,
        takeovers=takeovers,
        groups=groups,
        txn=txn,
        log_cleaner=_log_cleaner(base, data, manager),
        snapshots=_snapshots(base, manager, peer_calls, peers),
    )


def _snapshots(base: BrokerBase, manager: PartitionManager, calls: PeerCalls, peers: PeerListener) -> SnapshotTaker:
    clock, rng = base.world.clock, base.world.rng
    taker = SnapshotTaker(
        base.broker_id, controller=base.controller, manager=manager, calls=calls, clock=clock, rng=rng
    )
    taker.serve(peers)
    return taker


def _is_internal(base: BrokerBase, name: str) -> bool:
    topic = base.image().topic(name)
    return topic is None or topic.internal


def _export_offsets(base: BrokerBase, manager: PartitionManager, groups: GroupCoordinator) -> None:
    """Show in `/metrics` how far partitions and groups are. Nobody but brokers consumes the internal topics."""

    def ends() -> Iterator[tuple[str, int, int]]:
        for log in manager.all():
            if not _is_internal(base, log.topic):
                yield log.topic, log.partition, log.high_watermark

    def committed() -> Iterator[tuple[str, str, int, int]]:
        for key, offset in groups.all_committed():
            yield key.group, key.topic, key.partition, offset

    base.registry.add_figures("offsets", lambda: (ends(), committed()), figures.offset_families)


def _log_cleaner(base: BrokerBase, data: DataParts, manager: PartitionManager) -> LogCleaner:
    cleaner = LogCleaner(
        logs=manager.all,
        is_internal=lambda name: _is_internal(base, name),
        objects=base.controller,
        compactor=data.compactor,
        clock=base.world.clock,
        rng=base.world.rng,
        settings=base.settings.log,
        processes=True,
    )
    base.registry.add_figures("log compaction", cleaner.figures, figures.log_compaction_families)
    base.registry.add_problems("log compaction", cleaner.problems)
    base.registry.add_section("log_compaction", cleaner.report)
    return cleaner


def _manager(base: BrokerBase, storages: MasterStorages, hints: HintBox, hint_sender: HintSender) -> PartitionManager:
    manager = PartitionManager(
        node_id=base.broker_id,
        controller=base.controller,
        storages=storages,
        clock=base.world.clock,
        kafka=base.settings.kafka,
        defaults=base.settings.log,
        rng=base.world.rng,
        hints=HintExchange(hints, hint_sender.send),
    )
    base.registry.add_figures("partitions", manager.counts, figures.partition_families)
    base.registry.add_figures("moves", lambda: manager.moves.counts, figures.move_families)
    base.registry.add_problems("partitions", manager.problems)
    base.registry.add_section("partitions", manager.counts)
    return manager


def _takeovers(base: BrokerBase) -> TakeoverRunner:
    takeovers = TakeoverRunner(
        node_id=base.broker_id,
        controller=base.controller,
        open_wal=base.wal.open_in_bucket,
        store=base.world.store,
        clock=base.world.clock,
        rng=base.world.rng,
        settings=base.settings.storage,
        on_deposed=base.failure.fail,
    )
    base.registry.add_figures("takeovers", lambda: takeovers.counts, figures.takeover_families)
    base.registry.add_figures("leaderless", takeovers.waiting, figures.leaderless_families)
    base.registry.add_problems("takeovers", takeovers.problems)
    base.registry.add_section("failover", takeovers.report)
    return takeovers
