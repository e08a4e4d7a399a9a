"""What each finding of `tidelog doctor` means: its level, why it matters, and the cure.

Entry: `ADVICE`; `tidelog doctor --list` prints it.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Level = Literal["problem", "warning", "unknown", "ok"]


class Advice(NamedTuple):
    """About one finding."""

    level: Level
    why: str
    cure: str


def _problem(why: str, cure: str) -> Advice:
    return Advice("problem", why, cure)


def _warning(why: str, cure: str) -> Advice:
    return Advice("warning", why, cure)


def _unknown(why: str, cure: str) -> Advice:
    return Advice("unknown", why, cure)


_START: Final = "A process with this configuration does not start."
_WAL_SYNC: Final = "Each acknowledged write waits for a sync of the WAL on this disk."

_CONFIG: Final = {
    "config.unreadable": _problem(_START, "correct the file, or name another with --config"),
    "config.unknown-key": _problem(
        "The setting that was meant has its default. " + _START, "correct the key; `tidelog config` lists every one"
    ),
    "config.invalid-value": _problem(_START, "set a value of the type and range that docs/configuration.md has"),
    "config.at-bound": _warning(
        "A value at the end of its range leaves nothing to go to, and is often a slip of a unit (bytes, milliseconds).",
        "compare it with docs/configuration.md; keep it if it is meant",
    ),
    "config.memory-wal": _warning(
        "Acknowledged records are in the memory of one process until they are uploaded: if it dies, they are lost.",
        "set wal.kind = disk, or s3 without a disk",
    ),
    "config.async-flush": _warning(
        "A write is acknowledged before it is on the disk: a power loss takes the last wal.flush_interval_ms of them.",
        "set wal.flush = sync, or keep each WAL on several brokers (replication.total_replicas)",
    ),
    "config.replicas-need-disk": _problem(
        "Replicas of a WAL are files of several brokers. " + _START,
        "set wal.kind = disk, or replication.total_replicas = 1",
    ),
    "config.secret-missing": _problem(
        "Nodes prove to each other with the cluster's secret that they belong together. " + _START,
        "`openssl rand -hex 32 > FILE; chmod 600 FILE`, the same file on all nodes, and controller.secret_file = FILE",
    ),
    "config.quorum-too-large": _problem(
        "More brokers must have a write than keep the WAL: nothing would ever be acknowledged.",
        "set replication.in_sync_replicas to at most total_replicas; 0 is a majority",
    ),
    "config.single-ack": _warning(
        "One broker alone acknowledges: if its disk is lost before the others have the write, it is lost.",
        "set replication.in_sync_replicas = 0 (a majority)",
    ),
    "config.even-replicas": _warning(
        "With two replicas both must have each write: the loss of either stops writes, which one replica less or one"
        " more would not.",
        "set replication.total_replicas = 3, or enable_auto_in_sync_replicas if one copy may do for a while",
    ),
    "config.degrades-to-one": _warning(
        "While brokers are missing, one copy is enough for an acknowledgement: the next lost disk loses records.",
        "set replication.min_in_sync_replicas = 2, or enable_auto_in_sync_replicas = false",
    ),
    "config.quorum-size": _warning(
        "An even quorum survives no more failures than one with a member less, and five are the most that help.",
        "use 1, 3 or 5 controllers in controller.members",
    ),
    "config.heartbeat": _problem(
        "A broker that is well is declared dead as soon as a heartbeat or two are late.",
        "set controller.session_timeout_ms to at least three times heartbeat_interval_ms (defaults: 10000 and 1000)",
    ),
    "config.memory-exceeded": _problem(
        "The caches alone may take more than this machine or container has: the kernel kills the process when they"
        " are full.",
        "make cache.log_bytes and cache.block_bytes smaller, or give it more memory"
        " (docs/operations.md, How much memory it takes)",
    ),
    "config.memory-tight": _warning(
        "If all bounds are reached at once, which takes clients that misbehave, there is not enough memory.",
        "make kafka.max_in_flight_bytes, kafka.max_unread_bytes or the caches smaller"
        " (docs/operations.md, How much memory it takes)",
    ),
    "config.upload-larger-than-cache": _warning(
        "What is not uploaded must fit into the log cache: producers wait before uploads have the size that is wanted.",
        "set cache.log_bytes to several times upload.size_bytes",
    ),
    "config.wal-too-small": _warning(
        "The WAL is full before an upload is due or a file of it can be removed: producers wait.",
        "set wal.max_bytes to several times wal.segment_bytes and upload.size_bytes",
    ),
    "config.message-too-large": _problem(
        "A record batch of the allowed size does not fit into a request: its producer's connection is closed.",
        "set kafka.max_request_bytes larger than kafka.message_max_bytes",
    ),
    "config.any-address": _problem(
        "Clients and other brokers are told this address, and it means their own machine to them.",
        "set kafka.advertised_host (and admin.advertised_host) to a name at which others reach this machine",
    ),
    "config.loopback-advertised": _problem(
        "The controllers are on several machines, and clients on the others are told to connect to themselves.",
        "set kafka.host or kafka.advertised_host to a name at which others reach this machine",
    ),
    "config.admin-unreachable": _warning(
        "Clients on other machines reach this broker; `tidelog status` and most commands from there do not.",
        "set admin.host to an address of a private network, or admin.advertised_host",
    ),
    "config.plain-http": _warning(
        "Records travel to the bucket unencrypted, over a network that is not this machine's.",
        "use an https:// endpoint, or keep the way to the bucket on a private network",
    ),
    "config.tracing-library": _problem(
        _START, "install it with pip install 'tidelog[tracing]', or leave tracing.endpoint empty"
    ),
    "config.tracing-plain-http": _warning(
        "Names of topics and clients, and the texts of errors, travel to the collector unencrypted.",
        "use an https:// endpoint, or a collector on the same machine",
    ),
    "config.tracing-much": _warning(
        "A traced request costs several times the CPU of one that is not (docs/performance.md).",
        "set tracing.sample_ratio = 0.01; requests whose records name a sampled trace are traced anyway",
    ),
    "config.tracing-mixed": _warning(
        "Moves between brokers with and without traces have half a trace, and requests to the others none.",
        "set tracing.endpoint on all brokers, or on none",
    ),
    "tracing.unreachable": _warning(
        "Traces are dropped until a collector answers there. Clients do not notice it.",
        "start the collector, correct tracing.endpoint, or open the way to it",
    ),
    "config.embedded-shared": _problem(
        "Without s3.bucket each machine has a bucket of its own: a broker does not find what another has uploaded.",
        "set s3.endpoint and s3.bucket, the same on all nodes",
    ),
    "config.orphan-age": _warning(
        "The search for orphans may delete an object whose upload is still under way: it is younger than the time"
        " that an upload may take.",
        "set clean.orphan_age_ms to more than upload.prepare_ttl_ms",
    ),
    "config.exposed-secret": _warning(
        "Whoever has the key has all data of the cluster.",
        "put it alone into a file of mode 600, and name that in the setting that ends in _file",
    ),
    "config.relative-directory": _warning(
        "A relative path depends on where the process is started: from elsewhere it begins with an empty directory.",
        "set node.data_dir to an absolute path",
    ),
    "config.temporary-directory": _warning(
        "The system may empty this directory, at a restart at the latest, and the WAL with it.",
        "set node.data_dir to a directory that lasts",
    ),
    "config.tls-mixed": _problem(
        "Brokers with TLS between them and brokers without do not connect: replicas do not follow, moves are slow.",
        "set replication.tls_cert_file, tls_key_file and tls_ca_file on all brokers, or on none",
    ),
    "config.differs": _warning(
        "These settings count on whichever controller is active: what holds changes with it.",
        "set them the same on all controllers, or once for all with `tidelog controller config set`",
    ),
    "config.buckets-differ": _problem(
        "A broker does not find what another has uploaded.",
        "set s3.endpoint, s3.bucket and s3.prefix the same on all nodes, and restart them",
    ),
}

_DISK: Final = {
    "disk.unusable": _problem(
        "Nothing can be written there: the node does not start, or acknowledges nothing.",
        "check the path, its owner and mode, whether the disk is mounted and in order (`dmesg`), and is not read-only",
    ),
    "disk.in-memory": _problem(
        "What is written there is gone when the machine restarts, although it was synced.",
        "put node.data_dir on a disk; for tests set wal.kind = memory and expect the loss",
    ),
    "disk.container-layer": _warning(
        "This is the writable layer of a container: it is removed with it, and the WAL and metadata are, too.",
        "mount a volume at node.data_dir",
    ),
    "disk.network": _warning(
        "Locks and syncs of a network file system are often weaker than a disk's, and it fails in other ways.",
        "use a local or block device for the WAL, or wal.kind = s3 without a disk",
    ),
    "disk.sync-slow": _warning(
        _WAL_SYNC, "use a disk with a protected write cache for the data directory, and nothing else on it"
    ),
    "disk.sync-very-slow": _problem(
        _WAL_SYNC + " At this pace clients run into their time-outs.",
        "look at the disk's health and at what else uses it (`iostat -x 1`); use a faster one, or wal.kind = s3",
    ),
    "disk.sync-implausible": _warning(
        "No disk is that fast: something on the way acknowledges syncs and keeps the data in memory. A power loss"
        " takes acknowledged records.",
        "look for a disk cache without a battery, or a virtual disk with cache=unsafe; ignore it in a test",
    ),
    "disk.full": _problem(
        "There is no room for another file of the WAL: producers wait, controllers acknowledge nothing.",
        "make room on the file system, or move the data directory to a larger one",
    ),
    "disk.nearly-full": _warning(
        "The WAL may grow to wal.max_bytes while the bucket does not answer; the disk is full before that.",
        "make room, or set wal.max_bytes to what the disk can hold",
    ),
    "disk.few-files": _warning(
        "When no file (inode) is free, nothing can be created there, however many bytes are.",
        "remove small files, or make the file system anew with more inodes",
    ),
    "disk.open-to-others": _warning(
        "Other users of this machine can read what the data directory holds: records, metadata.",
        "chmod 700 the directory; `tidelog up` and `tidelog serve` create new ones so",
    ),
    "data.damaged": _problem(
        "The node does not start over a damaged file, because it would lose what is in it silently.",
        "`tidelog wal verify --data-dir DIR` lists every damaged file; restore those named from a copy",
    ),
    "data.other-node": _problem(
        "The directory is another node's: the process is refused (exit code 9).",
        "set node.id to the directory's, or choose this node's own directory",
    ),
    "port.in-use": _problem(
        "The node cannot listen there, and does not start (exit code 8).",
        "`ss -tlnp` shows the process that does; stop it, or choose another port",
    ),
    "port.host": _problem(
        "The address is not one of this machine: the node cannot listen there.",
        "set the host to an address of this machine, and the name for others as advertised_host",
    ),
}

_FILES: Final = {
    "secret.unreadable": _problem(_START, "check the path in the setting, and that the process's user may read it"),
    "secret.open": _problem(
        "Others than its owner can read the cluster's secret, with which everything may be changed. " + _START,
        "chmod 600 the file, and draw a new secret if others may have read it",
    ),
    "secret.key-open": _warning(
        "Others than its owner can read this key.", "chmod 600 the file, and replace the key if others may have read it"
    ),
    "secret.short": _problem(
        "A secret that is missing or short can be guessed. " + _START,
        "write the value into the file, alone on one line; a cluster's secret by `openssl rand -hex 32 > FILE`",
    ),
    "tls.unusable": _problem(
        "Brokers with these files do not start, or refuse each other.",
        "replace the files: certificate, its key without a password, and the authority that signed it",
    ),
    "tls.expired": _problem(
        "No new connection between brokers is accepted with it.",
        "replace the certificate's file; brokers read it again by themselves",
    ),
    "tls.expires-soon": _warning(
        "When it has expired, no new connection between brokers is accepted with it.",
        "replace the certificate's file; brokers read it again by themselves",
    ),
    "limits.open-files": _warning(
        "The listener is bounded below the limit of open files: fewer clients than configured can connect.",
        "raise `ulimit -n` (systemd: LimitNOFILE=65536), or set kafka.max_connections to what fits",
    ),
    "limits.open-files-low": _problem(
        "WAL files, requests to the bucket and clients together need more open files than are allowed.",
        "raise `ulimit -n` to 4096 at least (systemd: LimitNOFILE=65536)",
    ),
    "limits.open-files-used": _problem(
        "When the last open file is used, connections, the WAL and the bucket fail in turn.",
        "raise `ulimit -n`, look for clients that open many connections (tidelog_connections), restart the broker",
    ),
    "limits.memory-used": _warning(
        "The kernel kills the process at the limit.",
        "give it more memory, or make the caches smaller (docs/operations.md, How much memory it takes)",
    ),
}

_BUCKET_USE: Final = "Without it uploads, reads of old records or clean-up fail, and the WAL grows."

_BUCKET: Final = {
    "bucket.settings": _problem(_START, "correct the section [s3] (docs/configuration.md)"),
    "bucket.denied": _problem(
        _BUCKET_USE, "allow it in the policy of these credentials, for all keys below s3.prefix (or rotate the key)"
    ),
    "bucket.missing": _problem(_BUCKET_USE, "create the bucket, or correct s3.bucket and s3.endpoint"),
    "bucket.to-be-created": _warning(
        "The first start creates the bucket, if its credentials may; a mistyped name makes a second bucket.",
        "check s3.bucket; create it yourself and set s3.create_bucket = false",
    ),
    "bucket.wrong-region": _problem(_BUCKET_USE, "set s3.region to the bucket's region, and s3.endpoint to match"),
    "bucket.unreachable": _problem(
        _BUCKET_USE, "check that the server runs and s3.endpoint is its address, as this machine reaches it"
    ),
    "bucket.timeout": _problem(_BUCKET_USE, "look at the server's load and at the network between"),
    "bucket.refused": _problem(_BUCKET_USE, "see what the server says; check the section [s3]"),
    "bucket.short": _problem(
        "An answer that is cut off makes reads fail; what cuts it is between this machine and the server.",
        "look at proxies between this machine and the bucket; try without them",
    ),
    "bucket.wrong-bytes": _problem(
        "The store gives back other bytes than it was given. Objects have checksums, so reads fail.",
        "use another server or another way to it: caches and proxies between must not change bodies",
    ),
    "bucket.stale": _problem(
        "Tidelog relies on reading what it has just written, and on listings that are complete.",
        "use a server with strong consistency (AWS S3, MinIO); switch caches between off",
    ),
    "bucket.unsupported": _problem(_BUCKET_USE, "use a server with the S3 API that docs/libraries.md names"),
    "bucket.cannot-fence": _problem(
        "With the WAL in the bucket a conditional put keeps two brokers from writing the same WAL. " + _START,
        "use a server with conditional creates (AWS S3, MinIO, LocalStack) and allow s3:PutObject, or wal.kind = disk",
    ),
    "bucket.no-conditions": _warning(
        "The rebuild of a cluster and the owner's claim of the bucket are not protected against two at once;"
        " wal.kind = s3 is not possible.",
        "use a server with conditional creates (AWS S3, MinIO, LocalStack)",
    ),
    "bucket.no-clean-up": _warning(
        "Parts of interrupted uploads stay in the bucket, and are paid for.",
        "allow s3:ListBucketMultipartUploads and s3:AbortMultipartUpload, or add a lifecycle rule that aborts them",
    ),
    "bucket.slow": _warning(
        "Consumers of old records wait this long for each block, and with wal.kind = s3 producers for each write.",
        "run brokers in the bucket's region; look at the server's load",
    ),
    "bucket.clock": _warning(
        "S3 refuses requests that are signed with a time 15 minutes off, and ages of objects are misjudged.",
        "let this machine and the server follow a time server (chrony, systemd-timesyncd)",
    ),
    "bucket.leftover": _warning(
        "The probe could not remove its own objects; they are small, and for nothing.",
        "allow s3:DeleteObject, and delete the objects that are named (the next doctor does it if it may)",
    ),
}

_CLUSTER: Final = {
    "cluster.unreachable": _problem(
        "Clients that use this address get no answer, and nothing of the running cluster could be looked at.",
        "start a broker, or name another one with --bootstrap HOST:PORT",
    ),
    "cluster.not-asked": _unknown(
        "Nothing of a running cluster was looked at.", "start a broker, or name one with --bootstrap HOST:PORT"
    ),
    "cluster.no-token": _unknown(
        "Disks, bucket and addresses were not tried by the nodes themselves.",
        "give the cluster's secret with --secret-file FILE",
    ),
    "node.silent": _problem(
        "The cluster takes this broker for alive, and its admin HTTP does not answer from here: it hangs, or the"
        " address is of no use on this machine.",
        "check admin.host and admin.advertised_host of this broker, its process and the network",
    ),
    "node.older": _unknown(
        "It runs a version that cannot look at itself.", "upgrade it (docs/operations.md, Upgrades and backups)"
    ),
    "node.not-examined": _unknown(
        "What this node would have said of its disks, bucket and the other nodes is missing.",
        "see the error; run the doctor again, or on that machine with its --config",
    ),
    "clock.apart": _warning(
        "Timestamps of records, and so retention and searches by time, differ by this much between brokers.",
        "let all machines follow a time server (chrony, systemd-timesyncd)",
    ),
    "clock.far-apart": _problem(
        "Records expire too early or too late, and S3 refuses requests signed 15 minutes off.",
        "set the clock of the node that is off, and let it follow a time server (chrony, systemd-timesyncd)",
    ),
    "reach.refused": _problem(
        "Clients, or other brokers, that are told this address cannot use it: nothing listens there.",
        "check that the node listens on that host and port, or correct its advertised host and port",
    ),
    "reach.timeout": _problem(
        "Clients, or other brokers, that are told this address wait and get no connection.",
        "open the port in the firewall between, or correct the advertised host and port",
    ),
    "reach.unresolved": _problem(
        "The name that the node advertises has no address on that machine.",
        "add the name to DNS or /etc/hosts there, or advertise an address",
    ),
    "reach.unreachable": _problem(
        "There is no way from that machine to the advertised address, or TLS between them fails.",
        "check routes, and replication.tls_* of both brokers; or correct the advertised host",
    ),
    "reach.silent": _problem(
        "Connections are accepted, questions not answered: a proxy without the broker behind it, or one that hangs.",
        "look at what listens there (`ss -tlnp`), and at that broker",
    ),
    "reach.wrong": _problem(
        "Another node or program answers at the advertised address: clients would talk to the wrong one.",
        "correct the advertised host and port; loopback and 0.0.0.0 mean another machine to each machine",
    ),
    "reach.from-here": _warning(
        "Programs on this machine cannot use that broker; the other nodes reach it.",
        "open the port for this machine, or run clients elsewhere",
    ),
    "reach.controller": _problem(
        "A broker that reaches too few controllers loses its session, and a controller its quorum.",
        "open the controllers' ports between all nodes; check controller.members and the secret",
    ),
    "members.versions": _warning(
        "Guarantees are those of the older version while versions are mixed.",
        "finish the upgrade: `tidelog cluster restart --rolling`, then the other controllers",
    ),
    "members.level": _warning(
        "What came with the higher feature level is off (docs/operations.md, Upgrades and backups).",
        "`tidelog cluster upgrade --dry-run`, then without it; there is no way back",
    ),
    "members.level-unknown": _unknown(
        "An active controller of an older release does not know of feature levels, and one that is away tells none.",
        "finish the upgrade, or ask again when a controller is active",
    ),
    "members.unable": _warning(
        "While a member does not support the newest feature level, it cannot be raised.",
        "upgrade or restart the member, or remove it",
    ),
    "health.problem": _problem(
        "The cluster itself reports it.",
        "see docs/operations.md, When something is wrong; `tidelog debug bundle` writes what a maintainer needs",
    ),
}

ADVICE: Final[dict[str, Advice]] = {**_CONFIG, **_DISK, **_FILES, **_BUCKET, **_CLUSTER}
"""By the finding's name."""
