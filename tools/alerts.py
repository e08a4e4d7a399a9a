"""The alerts: when something that users feel, or will feel, wants a person. `tools.monitoring` makes files of them.

Each says what it means for users, and what to do, with the section of docs/operations.md that has more. An expression
is per cluster where the fault is the cluster's (`CLUSTER`), else per broker, so that a page names what is broken once.
Thresholds are of the defaults of docs/configuration.md; their reasons are beside them.

Entry: `alerts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from tools.promql import BYTES, RATIO, SECONDS, Amount, Catalogue, Query, Span

CLUSTER: Final = ("job", "cluster")
"""What a cluster has in common: the scrape job, and the label `cluster` if there are several in one job."""
MINUTE: Final = Span(60)
WINDOW: Final = Span(300)
"""Of rates: several scrapes at the usual intervals of 15 to 60 s."""
VALUE: Final = "$VALUE"
"""In texts: the value of the expression, written as its unit demands."""

TROUBLE = (
    "CORRUPT_MESSAGE",
    "KAFKA_STORAGE_ERROR",
    "NOT_ENOUGH_REPLICAS",
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
    "REQUEST_TIMED_OUT",
    "UNKNOWN_SERVER_ERROR",
)
"""Errors of partitions that are no usual answers: those that tell of moves, old offsets or wrong requests are."""


@dataclass(frozen=True)
class Alert:
    """One alerting rule."""

    name: str
    severity: Literal["critical", "warning", "info"]
    """critical: users feel it or data are at stake, wake somebody; warning: in working hours; info: worth a look."""
    when: Query
    hold: Span
    """For how long it must be so."""
    summary: str
    description: str
    """What it means, then what to do."""
    anchor: str
    """Section of docs/operations.md."""


def alerts(known: Catalogue, job: str) -> dict[str, list[Alert]]:
    """Return the alerts by group, over these metrics, for brokers that are scraped as `job`. Raises `Nonsense`."""
    groups = {
        "tidelog-availability": _availability(known, job),
        "tidelog-durability": _durability(known),
        "tidelog-bucket": _bucket(known),
        "tidelog-clients": _clients(known),
        "tidelog-transactions": _transactions(known),
        "tidelog-hosts": _hosts(known),
        "tidelog-background": _background(known),
    }
    names = sorted(alert.name for group in groups.values() for alert in group)
    assert all(one != other for one, other in pairwise(names)), f"two alerts have one name: {names}"
    return groups


def _availability(known: Catalogue, job: str) -> list[Alert]:
    up = known.series("up", job=job)
    state = known.series
    return [
        Alert(
            "TidelogBrokerDown",
            "critical",
            up.is_(Amount(0)),
            MINUTE,
            "{{ $labels.instance }} does not answer",
            "Its process is gone, hangs, or cannot be reached. Others take over its partitions unless their WAL is on"
            " its disk alone. See whether it runs, and its last log lines; start it again over its data directory.",
            "when-a-broker-dies",
        ),
        Alert(
            "TidelogBrokerRestarts",
            "warning",
            state("process_start_time_seconds", job=job).changes(Span(900)) > Amount(2),
            Span(0),
            "{{ $labels.instance }} was started $VALUE times in 15 minutes",
            "It ends again and again, and each end moves its partitions. Its log says with which exit code and why:"
            " docs/cli.md lists the codes.",
            "when-something-is-wrong",
        ),
        Alert(
            "TidelogNoActiveController",
            "critical",
            up.total("max", *CLUSTER).is_(Amount(1)).unless(state("tidelog_brokers").total("max", *CLUSTER), *CLUSTER),
            MINUTE,
            "No controller is active",
            "Topics and leaders cannot change, uploads wait, and nobody is declared dead. A majority of the controllers"
            " must be up and reach each other: `tidelog controller status` names those that are away. Start them.",
            "when-something-is-wrong",
        ),
        Alert(
            "TidelogPartitionsLeaderless",
            "critical",
            state("tidelog_partitions_leaderless").total("max", *CLUSTER, "state") > Amount(0),
            MINUTE,
            "$VALUE partitions have no living broker ({{ $labels.state }})",
            "Clients of these partitions wait. `tidelog status` lists under `failovers` whose they are. State waiting:"
            " start their broker again over its disk, or give up what only it had (`tidelog broker remove ID"
            " --accept-loss --dry-run` says what). State electing: `tidelog status` says whose WALs the election needs."
            " State due or recovering: others are at it; see the bucket if it lasts.",
            "when-a-broker-dies",
        ),
        Alert(
            "TidelogPartitionsNotOpen",
            "critical",
            state("tidelog_partitions", state="led").total("sum", "job", "cluster", "instance")
            - state("tidelog_partitions", state="open").total("sum", "job", "cluster", "instance")
            > Amount(0),
            Span(120),
            "$VALUE partitions of {{ $labels.instance }} are not open",
            "Clients of these partitions wait. `tidelog status` says of each why it does not open: the bucket does not"
            " answer, or what must be read first is damaged or quarantined.",
            "when-something-is-wrong",
        ),
        Alert(
            "TidelogOperationFails",
            "critical",
            state("tidelog_operation_healthy").is_(Amount(0)),
            MINUTE,
            "{{ $labels.operation }} fails or hangs on {{ $labels.instance }}",
            "WAL append: the disk, or the bucket with wal.kind s3; producers wait. Upload: the bucket; what is written"
            " stays in the WAL. Controller command: no controller answers. `tidelog status` has the error.",
            "when-something-is-wrong",
        ),
        Alert(
            "TidelogUnexpectedErrors",
            "warning",
            state("tidelog_unexpected_errors_total").grown(WINDOW) > Amount(0),
            Span(0),
            "Unexpected errors on {{ $labels.instance }} ({{ $labels.place }})",
            "A defect of Tidelog or of what it stands on; the work is tried again where that is possible. The log has"
            " the traceback: please report it.",
            "when-something-is-wrong",
        ),
    ]


def _durability(known: Catalogue) -> list[Alert]:
    state = known.series
    pending = state("tidelog_storage_log_cache_pending_bytes")
    return [
        Alert(
            "TidelogReplicaSetRefuses",
            "critical",
            state("tidelog_replica_set_refuses").is_(Amount(1)),
            Span(30),
            "Replica set {{ $labels.replica_set }} refuses writes with acks=all",
            "Too few of its members are in sync, so producers get NOT_ENOUGH_REPLICAS and retry. `tidelog replica-set"
            " describe {{ $labels.replica_set }}` names the members that are away: start their brokers.",
            "when-a-broker-dies",
        ),
        Alert(
            "TidelogReplicaSetDegraded",
            "warning",
            state("tidelog_replica_set_degraded").is_(Amount(1)),
            WINDOW,
            "Replica set {{ $labels.replica_set }} confirms on fewer brokers than its policy asks for",
            "What is acknowledged now is on fewer disks (auto-degrade). Start the brokers that are away; `tidelog"
            " replica-set describe {{ $labels.replica_set }}` names them.",
            "when-a-broker-dies",
        ),
        Alert(
            "TidelogReplicasMissing",
            "warning",
            state("tidelog_replica_set_in_sync") < state("tidelog_replica_set_replicas"),
            Span(600),
            "Only $VALUE members of replica set {{ $labels.replica_set }} are in sync",
            "Another lost disk may stop its writes or lose records. A member is down, or does not catch up: compare"
            " tidelog_replica_connected and tidelog_replica_lag_bytes. After controller.replica_repair_after_ms a dead"
            " member is replaced if there is another broker.",
            "when-a-broker-dies",
        ),
        Alert(
            "TidelogUploadsStalled",
            "critical",
            state("tidelog_storage_upload_pending_age_seconds") > Amount(120, SECONDS, is_span=True),
            MINUTE,
            "{{ $labels.instance }} has not uploaded for $VALUE",
            "Nothing is lost: records stay in the WAL and in memory until producers have to wait. The bucket does not"
            " answer or denies writes, or no controller is active. `tidelog status` has the error.",
            "when-something-is-wrong",
        ),
        Alert(
            "TidelogProducersWillWait",
            "critical",
            pending / state("tidelog_storage_log_cache_bound_bytes") > Amount(0.8, RATIO),
            MINUTE,
            "The log cache of {{ $labels.instance }} is to $VALUE full of what is not uploaded",
            "At 100 % producers wait, and then get KAFKA_STORAGE_ERROR. Mend the bucket first; a larger cache.log_bytes"
            " gives more time in the next outage, if there is memory.",
            "how-much-memory-it-takes",
        ),
        Alert(
            "TidelogDataDamaged",
            "critical",
            state("tidelog_storage_damaged_places") > Amount(0),
            Span(0),
            "$VALUE damaged places in the bucket are known to {{ $labels.instance }}",
            "Reads of them are refused with CORRUPT_MESSAGE; everything else goes on. `tidelog object verify` lists all"
            " with their offsets. Restore the objects from a version or a backup of the bucket.",
            "when-something-is-wrong",
        ),
        Alert(
            "TidelogStreamsQuarantined",
            "critical",
            state("tidelog_storage_quarantined_streams") > Amount(0),
            Span(0),
            "$VALUE streams are quarantined on {{ $labels.instance }}",
            "Their partitions take no records until somebody decides. `tidelog object quarantine list` shows why and"
            " what was set aside; `tidelog object quarantine release` lets them go on without it.",
            "when-something-is-wrong",
        ),
    ]


def _bucket(known: Catalogue) -> list[Alert]:
    errors = known.series("tidelog_object_store_errors_total").rate(WINDOW)
    slow = known.quantile(0.99, "tidelog_object_store_seconds", WINDOW, [*CLUSTER, "instance", "operation"])
    return [
        Alert(
            "TidelogBucketErrors",
            "warning",
            errors > Amount(0, "count/s"),
            WINDOW,
            "The bucket refuses {{ $labels.operation }} of {{ $labels.instance }}",
            "Calls fail for good, after their retries: a key was rotated, a policy is wrong (403), or the server is"
            " down. Writes go on from the WAL meanwhile. `tidelog status` has the error; deploy/aws/iam-policy.json the"
            " rights that are needed.",
            "when-something-is-wrong",
        ),
        Alert(
            "TidelogBucketSlow",
            "warning",
            slow > Amount(5, SECONDS),
            WINDOW,
            "{{ $labels.operation }} of the bucket takes $VALUE (p99) on {{ $labels.instance }}",
            "Reads of history are slow, uploads fall behind, and with wal.kind s3 so do producers. Look at the bucket's"
            " own figures, at the network to it, and at tidelog_object_store_retries_total (throttling).",
            "when-something-is-wrong",
        ),
    ]


def _clients(known: Catalogue) -> list[Alert]:
    state = known.series
    produce = known.quantile(0.99, "tidelog_request_seconds", WINDOW, [*CLUSTER, "instance"], api="Produce")
    trouble = state("tidelog_partition_errors_total", error="~" + "|".join(TROUBLE)).rate(WINDOW)
    place = (*CLUSTER, "topic", "partition")
    end = state("tidelog_partition_high_watermark").total("max", *place)
    committed = state("tidelog_group_committed_offset").total("max", "group", *place)
    lag = end.less_each(committed, *place).total("sum", *CLUSTER, "group", "topic")
    return [
        Alert(
            "TidelogProduceSlow",
            "warning",
            produce > Amount(1, SECONDS),
            WINDOW,
            "Produce takes $VALUE (p99) on {{ $labels.instance }}",
            "The WAL's disk is slow, followers do not keep up, the log cache is full (TidelogProducersWillWait), or,"
            " with wal.kind s3, the bucket is slow. The dashboard of requests has the other quantiles.",
            "when-something-is-wrong",
        ),
        Alert(
            "TidelogClientErrors",
            "critical",
            trouble.total("sum", *CLUSTER, "instance", "api", "error") > Amount(0, "count/s"),
            Span(120),
            "{{ $labels.api }} gets {{ $labels.error }} from {{ $labels.instance }}",
            "KAFKA_STORAGE_ERROR, REQUEST_TIMED_OUT: the WAL, its bounds or the quorum. NOT_ENOUGH_REPLICAS: members"
            " are away. CORRUPT_MESSAGE: damage in the bucket, or a producer that sends damaged batches. `tidelog"
            " status` tells which.",
            "when-something-is-wrong",
        ),
        Alert(
            "TidelogConnectionsNearLimit",
            "warning",
            state("tidelog_connections") / state("tidelog_connections_bound") > Amount(0.8, RATIO),
            WINDOW,
            "$VALUE of the connections that {{ $labels.instance }} takes are open",
            "At the bound new clients are refused. Find out who opens so many (clients that are made for each request"
            " are the usual reason), or raise kafka.max_connections and `ulimit -n`.",
            "admission-limits",
        ),
        Alert(
            "TidelogConnectionsRefused",
            "critical",
            state("tidelog_connections_refused_total").increase(WINDOW) > Amount(0),
            Span(0),
            "{{ $labels.instance }} refuses clients",
            "kafka.max_connections or kafka.max_connections_per_address is reached; the log names the address. Raise"
            " the bound that is meant to be higher, and `ulimit -n` with it.",
            "admission-limits",
        ),
        Alert(
            "TidelogConsumerLagGrows",
            "warning",
            (lag > Amount(10_000)).also(lag.slope(Span(900)) > Amount(0, "count/s")),
            Span(900),
            "Group {{ $labels.group }} is $VALUE records of {{ $labels.topic }} behind, and falls back further",
            "It reads more slowly than is produced, or not at all. `tidelog group describe` shows its members and"
            " partitions: start its consumers, or add some, or partitions. A group that nobody needs any more is"
            " deleted by `tidelog group delete`.",
            "watching-it",
        ),
    ]


def _transactions(known: Catalogue) -> list[Alert]:
    return [
        Alert(
            "TidelogTransactionsHanging",
            "warning",
            known.series("tidelog_transactions_hanging") > Amount(0),
            MINUTE,
            "$VALUE transactions on {{ $labels.instance }} are ended by nobody",
            "Consumers with read_committed wait at their first record: the last stable offset does not move. `tidelog"
            " status` names them; make sure that the application is gone, then `kafka-transactions abort`.",
            "transactions",
        ),
        Alert(
            "TidelogTransactionMarkersWait",
            "warning",
            known.series("tidelog_transaction_markers_waiting") > Amount(0),
            WINDOW,
            "$VALUE partitions wait for the end of a transaction that {{ $labels.instance }} coordinates",
            "The transactions are decided, and their partitions cannot be told: they have no leader, or it does not"
            " answer. Consumers with read_committed wait there. Bring the partitions' broker back.",
            "transactions",
        ),
    ]


def _hosts(known: Catalogue) -> list[Alert]:
    state = known.series
    clock = state("tidelog_clock_seconds")
    skew = clock - clock.time()
    free = state("tidelog_disk_free_bytes") / state("tidelog_disk_bytes")
    return [
        Alert(
            "TidelogDiskNearlyFull",
            "critical",
            free < Amount(0.1, RATIO),
            MINUTE,
            "The disk of {{ $labels.instance }} has $VALUE left",
            "When it is full, producers wait, and a controller on it acknowledges nothing. The WAL is bounded"
            " (wal.max_bytes for each replica set); see what else is on the disk, and whether uploads go on.",
            "disks-and-clocks",
        ),
        Alert(
            "TidelogClocksDiffer",
            "warning",
            skew.total("max", *CLUSTER) - skew.total("min", *CLUSTER) > Amount(5, SECONDS),
            MINUTE,
            "The clocks of two brokers differ by $VALUE",
            "Timestamps that brokers give, retention and the time-outs of transactions follow them; elections and what"
            " is acknowledged do not. See that each host's clock is synchronised.",
            "disks-and-clocks",
        ),
        Alert(
            "TidelogCertificateExpires",
            "warning",
            state("tidelog_certificate_left_seconds") < Amount(14 * 86_400, SECONDS),
            Span(0),
            "The certificate of {{ $labels.instance }} expires in $VALUE",
            "When it has expired, no new connection between brokers is accepted with it, and replicas fall out of sync."
            " Replace the files: they are read again without a restart.",
            "security",
        ),
    ]


def _background(known: Catalogue) -> list[Alert]:
    state = known.series
    wanted, brokers = (state(name).total("max", *CLUSTER) for name in ("tidelog_brokers_wanted", "tidelog_brokers"))
    return [
        Alert(
            "TidelogPartitionsUncleanable",
            "warning",
            state("tidelog_log_compaction_uncleanable_partitions") > Amount(0),
            Span(0),
            "$VALUE compacted partitions of {{ $labels.instance }} cannot be compacted",
            "They grow without bound. `tidelog topic describe` says why of each: a damaged object, most often.",
            "log-compaction",
        ),
        Alert(
            "TidelogObjectsNotCompacted",
            "warning",
            state("tidelog_compaction_excluded") > Amount(0),
            Span(0),
            "$VALUE objects are left out of the compaction on {{ $labels.instance }}",
            "They are damaged or missing; everything around them is compacted. `tidelog object verify` names them."
            " Restore them from a version or a backup of the bucket.",
            "compaction",
        ),
        Alert(
            "TidelogCompactionBehind",
            "info",
            state("tidelog_compaction_tasks_left") > Amount(0),
            Span(21_600),
            "The compaction of {{ $labels.instance }} does not get done",
            "Small objects gather, so that reads of history and the metadata cost more. A larger"
            " compaction.throttle_bytes_per_s or compaction.busy_bytes_per_s lets it catch up.",
            "compaction",
        ),
        Alert(
            "TidelogBrokersWanted",
            "info",
            wanted - brokers > Amount(0),
            Span(900),
            "$VALUE more brokers are wanted for the load",
            "Brokers are above scale.utilization_percent of what they are configured to carry. Add brokers, or let the"
            " autoscaler do it; the balancer gives them partitions if its mode is on.",
            "scaling-by-a-signal",
        ),
    ]


def written(alert: Alert) -> tuple[str, str]:
    """Return summary and description with the value written as the unit of the expression demands."""
    form = {
        SECONDS: "{{ $value | humanizeDuration }}",
        BYTES: "{{ $value | humanize1024 }}B",
        RATIO: "{{ $value | humanizePercentage }}",
    }.get(alert.when.unit, "{{ $value }}")
    return alert.summary.replace(VALUE, form), alert.description.replace(VALUE, form)
