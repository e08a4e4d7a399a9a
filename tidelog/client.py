"""A cluster as the command line sees it: reached by one bootstrap address, its errors in words a person can act on.

The Kafka side is confluent-kafka (librdkafka). Everything it raises becomes a `TidelogError` here, so that a command
needs no knowledge of its codes. The admin HTTP side (`/status`, `/objects`) needs no address of its own: any broker
tells its URL as the broker config `tidelog.admin.url`.

confluent_kafka is imported when a cluster is reached for, not when this module is.

Entry: `Cluster`.
"""

from __future__ import annotations

import contextlib
import difflib
import http.client
import importlib
import json
import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from runtime.errors import (
    AlreadyExists,
    CorruptData,
    InvalidInput,
    NotFound,
    StorageFailed,
    TidelogError,
    Unavailable,
)

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, KafkaException, Message
    from confluent_kafka.admin import AdminClient

T = TypeVar("T")

CONNECT_TIMEOUT_S = 3.0
"""How long a broker may take to accept a connection."""
ANSWER_TIMEOUT_S = 5.0
"""How long the first answer may take; what accepts connections and stays silent longer is no broker."""
ADMIN_URL_TIMEOUT_S = 3.0
"""How long a broker may take to tell its admin URL while there is another one to ask."""
REQUEST_TIMEOUT_S = 30.0
"""How long one administrative request may take."""
ADMIN_URL_CONFIG = "tidelog.admin.url"

_START_HINT = "start one with `tidelog up`, or name a broker with --bootstrap HOST:PORT"


class PartitionOffsets(NamedTuple):
    """The range of offsets of a partition that can be read."""

    log_start_offset: int
    high_watermark: int
    leader_epoch: int | None
    """Of the last record; None in an empty partition."""


class Cluster:
    """A cluster reached by `bootstrap`, `HOST:PORT` (several with commas). Nothing is connected before it is needed."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self._addresses = [_parse_address(part) for part in bootstrap.split(",")]

    def client_config(self) -> dict[str, Any]:
        """What every librdkafka client of this cluster is made with. Raises `Unavailable` if no address accepts."""
        self._reach()
        return {
            "bootstrap.servers": self.bootstrap,
            "client.id": "tidelog-cli",
            "log_level": 0,  # its lines are not for users: errors are reported by the commands
            "socket.connection.setup.timeout.ms": int(CONNECT_TIMEOUT_S * 1000),
            "allow.auto.create.topics": False,
        }

    def _reach(self) -> None:
        """Connect once by hand: librdkafka would keep trying, and not say why it fails."""
        failures = []
        for host, port in self._addresses:
            try:
                socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
            except OSError as error:
                failures.append(f"{host}:{port}: {error.strerror or error}")
            else:
                return
        raise Unavailable(f"no broker can be reached at {'; '.join(failures)}", hint=_START_HINT)

    @cached_property
    def admin(self) -> AdminClient:
        """The Kafka admin client. Raises `Unavailable`."""
        from confluent_kafka.admin import AdminClient

        return AdminClient(self.client_config())

    def metadata(self) -> Any:
        """Brokers and topics now, as confluent-kafka's `ClusterMetadata`. Raises `Unavailable`."""
        from confluent_kafka import KafkaException

        admin = self.admin
        try:
            return admin.list_topics(timeout=ANSWER_TIMEOUT_S)
        except KafkaException as error:
            self._reach()  # raises what is wrong, if nothing listens any more
            raise Unavailable(
                f"{self.bootstrap} accepts connections and does not answer as a broker", hint=_START_HINT
            ) from error

    def topics(self, names: Iterable[str]) -> dict[str, list[int]]:
        """The partitions of each named topic. Raises `NotFound` with the nearest name for one that does not exist."""
        known = self.metadata().topics
        found = {}
        for name in names:
            if name not in known:
                raise unknown("topic", name, known, otherwise=f"create it with `tidelog topic create {name}`")
            found[name] = sorted(known[name].partitions)
        return found

    def wait(self, future: Future[T], what: str = "") -> T:
        """The result of one admin request, its errors translated; `what` begins the message."""
        from confluent_kafka import KafkaException

        try:
            return future.result(REQUEST_TIMEOUT_S + ANSWER_TIMEOUT_S)
        except KafkaException as error:
            raise translate(error, what) from error
        except (TypeError, ValueError) as error:  # confluent-kafka checks arguments in the future, too
            raise InvalidInput(f"{what}: {error}" if what else str(error)) from error

    def offsets(self, partitions: Iterable[tuple[str, int]]) -> dict[tuple[str, int], PartitionOffsets]:
        """Log start and high watermark of each (topic, partition). Raises what `wait` raises."""
        spec = kafka_admin().OffsetSpec
        wanted = list(partitions)
        first = self._list_offsets(wanted, spec.earliest())
        last = self._list_offsets(wanted, spec.latest())
        return {one: PartitionOffsets(first[one].offset, last[one].offset, last[one].leader_epoch) for one in wanted}

    def offsets_at(self, partitions: Iterable[tuple[str, int]], timestamp_ms: int) -> dict[tuple[str, int], int | None]:
        """The first offset whose timestamp is at least `timestamp_ms`; None where there is none."""
        found = self._list_offsets(list(partitions), kafka_admin().OffsetSpec.for_timestamp(timestamp_ms))
        return {one: info.offset if info.offset >= 0 else None for one, info in found.items()}

    def _list_offsets(self, partitions: list[tuple[str, int]], spec: Any) -> dict[tuple[str, int], Any]:
        from confluent_kafka import TopicPartition

        if not partitions:
            return {}
        asked = {TopicPartition(topic, partition): spec for topic, partition in partitions}
        futures = self.admin.list_offsets(asked, request_timeout=REQUEST_TIMEOUT_S)
        return {
            (one.topic, one.partition): self.wait(future, f"offsets of {one.topic} [{one.partition}]")
            for one, future in futures.items()
        }

    # --- admin HTTP ----------------------------------------------------------------------------------------------

    @cached_property
    def admin_url(self) -> str:
        """`http://host:port` of a broker's admin HTTP. Raises `Unavailable`, or `NotFound` if this is no Tidelog."""
        brokers = self._nearest_first()
        for broker in brokers[:-1]:
            with contextlib.suppress(Unavailable):  # it may be paused, or dead and not declared so yet
                return self._admin_url_of(broker, ADMIN_URL_TIMEOUT_S)
        return self._admin_url_of(brokers[-1], REQUEST_TIMEOUT_S)

    def at(self, admin_url: str) -> Cluster:
        """The same cluster, as the broker with this admin HTTP tells it."""
        other = Cluster(self.bootstrap)
        other.admin_url = admin_url
        return other

    def _nearest_first(self) -> list[int]:
        """The ids of the brokers: those that were named, then who answered (any that is connected), then the others."""
        metadata = self.metadata()
        named = {"{}:{}".format(*address) for address in self._addresses}

        def rank(broker: int) -> tuple[bool, bool, int]:
            found = metadata.brokers[broker]
            return f"{found.host}:{found.port}" not in named, broker != metadata.orig_broker_id, broker

        return sorted(metadata.brokers, key=rank) or [-1]

    def _admin_url_of(self, broker: int, timeout_s: float) -> str:
        api = kafka_admin()
        resource = api.ConfigResource(api.ConfigResource.Type.BROKER, str(broker))
        futures = self.admin.describe_configs([resource], request_timeout=timeout_s)
        configs = self.wait(futures[resource], f"configuration of broker {broker}")
        entry = configs.get(ADMIN_URL_CONFIG)
        if entry is None or not entry.value:
            raise NotFound(
                f"broker {broker} at {self.bootstrap} tells no {ADMIN_URL_CONFIG}: it is not a Tidelog broker",
                hint="topic, produce, consume and group work with any Kafka; this command needs Tidelog",
            )
        return str(entry.value)

    def broker_config(self, name: str) -> str | None:
        """A configuration value of one broker of the cluster. Raises `Unavailable`."""
        api = importlib.import_module("confluent_kafka.admin")
        broker = next(iter(self.metadata().brokers))
        resource = api.ConfigResource(api.ConfigResource.Type.BROKER, str(broker))
        futures = self.admin.describe_configs([resource], request_timeout=ADMIN_URL_TIMEOUT_S)
        entry = self.wait(futures[resource], f"configuration of broker {broker}").get(name)
        return None if entry is None else entry.value

    def get(self, path: str) -> Any:
        """GET of the admin HTTP of the broker that was asked, as parsed JSON. See `http_json`."""
        known = "admin_url" in self.__dict__
        try:
            return http_json(self.admin_url, path)
        except Unavailable:
            if not known:
                raise
            del self.admin_url  # a broker that was started anew may have another one
            return http_json(self.admin_url, path)

    def post(self, path: str, body: object = None) -> Any:
        """POST of the admin HTTP of the broker that was asked, as parsed JSON. Raises as `http_json` does."""
        return http_json(self.admin_url, path, method="POST", body=body)

    def post_lines(self, path: str) -> Iterator[dict[str, Any]]:
        """POST that answers with JSON lines, each as it comes. Raises as `http_json` does."""
        with _Http(self.admin_url) as connection:
            response = connection.request("POST", path)
            try:
                while line := response.readline():
                    yield json.loads(line)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise Unavailable(
                    f"{self.admin_url}{path} ended in the middle: {error}", hint="try again; see `tidelog status`"
                ) from error


def http_json(url: str, path: str, *, method: str = "GET", body: object = None) -> Any:
    """What `url` + `path` answers to `body` (sent as JSON), as parsed JSON.

    Raises the `TidelogError` that fits the status, `Unavailable` if no answer came.
    """
    with _Http(url) as connection:
        response = connection.request(method, path, body)
        try:
            return json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"{url}{path} answered no JSON: {error}", hint="see `tidelog status`") from error


class _Http:
    """One connection to an admin HTTP server, closed at the end of the block."""

    def __init__(self, url: str) -> None:
        self._url = url
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=REQUEST_TIMEOUT_S * 2)

    def __enter__(self) -> _Http:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.close()

    def request(self, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
        try:
            self._connection.request(method, path, None if body is None else json.dumps(body))
            response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(
                f"the admin HTTP at {self._url} cannot be reached: {error}",
                hint="it listens on admin.host, by default loopback: run this on the broker's machine",
            ) from error
        if response.status >= 400:
            raise _http_error(response, f"{method} {self._url}{path}")
        return response


def _http_error(response: http.client.HTTPResponse, request: str) -> TidelogError:
    message, hint = f"{request} answered {response.status} {response.reason}", None
    try:
        body = json.loads(response.read())
        message, hint = str(body["error"]), body.get("hint")
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        pass  # not one of our error bodies: the status line says what there is to say
    kinds: Mapping[int, type[TidelogError]] = {400: InvalidInput, 404: NotFound, 409: Unavailable}
    kind = kinds.get(response.status, Unavailable if response.status in (502, 503, 504) else TidelogError)
    return kind(message, hint=hint)


def kafka_admin() -> Any:
    """The module `confluent_kafka.admin`, whose names are not exported in the eyes of a type checker."""
    return importlib.import_module("confluent_kafka.admin")


# --- errors ------------------------------------------------------------------------------------------------------


def unknown(kind: str, name: str, known: Iterable[str], *, otherwise: str) -> NotFound:
    """The error for a name that does not exist; its hint is the nearest one that does, or `otherwise`."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? `tidelog {kind} list` shows them all" if close else otherwise
    return NotFound(f"{kind} {name!r} does not exist", hint=hint)


def translate(error: KafkaException | KafkaError, what: str = "") -> TidelogError:
    """The `TidelogError` for one of confluent-kafka's; `what` begins the message."""
    from confluent_kafka import KafkaException

    cause: KafkaError = error.args[0] if isinstance(error, KafkaException) else error
    kind, hint = _kinds().get(cause.code(), (TidelogError, None))
    if kind is TidelogError and cause.retriable():
        kind = Unavailable
    text = cause.str() or cause.name()
    return kind(f"{what}: {text}" if what else text, hint=hint)


def _kinds() -> dict[int, tuple[type[TidelogError], str | None]]:
    """Kafka code → what it is to a command, and the next step."""
    from confluent_kafka import KafkaError as K

    rows: list[tuple[type[TidelogError], str | None, tuple[int, ...]]] = [
        (NotFound, "`tidelog topic list` shows the topics", (K.UNKNOWN_TOPIC_OR_PART, K._UNKNOWN_TOPIC)),
        (NotFound, "`tidelog topic describe` shows the partitions", (K._UNKNOWN_PARTITION,)),
        (NotFound, "`tidelog group list` shows the groups", (K.GROUP_ID_NOT_FOUND,)),
        (AlreadyExists, "`tidelog topic describe` shows it; --if-not-exists accepts it", (K.TOPIC_ALREADY_EXISTS,)),
        (InvalidInput, None, (K.TOPIC_EXCEPTION, K.INVALID_PARTITIONS, K.INVALID_REPLICATION_FACTOR, K._INVALID_ARG)),
        (InvalidInput, None, (K.INVALID_REPLICA_ASSIGNMENT, K.INVALID_REQUEST, K.POLICY_VIOLATION, K.INVALID_GROUP_ID)),
        (InvalidInput, "`tidelog topic describe NAME --configs` shows what a topic has", (K.INVALID_CONFIG,)),
        (InvalidInput, "see max.message.bytes in `tidelog topic describe`", (K.MSG_SIZE_TOO_LARGE,)),
        (InvalidInput, "see message.timestamp.*.max.ms in `tidelog topic describe`", (K.INVALID_TIMESTAMP,)),
        (Unavailable, "its members must stop first; `tidelog group describe` shows them", (K.NON_EMPTY_GROUP,)),
        (Unavailable, _START_HINT, (K._TRANSPORT, K._ALL_BROKERS_DOWN, K._RESOLVE)),
        (Unavailable, "try again; see `tidelog status`", (K._TIMED_OUT, K._MSG_TIMED_OUT, K.REQUEST_TIMED_OUT)),
        (Unavailable, "try again; see `tidelog status`", (K.LEADER_NOT_AVAILABLE, K.NOT_LEADER_FOR_PARTITION)),
        (StorageFailed, "see `tidelog status`", (K.KAFKA_STORAGE_ERROR,)),
        (CorruptData, "see `tidelog status`", (K.INVALID_MSG, K._BAD_MSG)),
    ]
    return {code: (kind, hint) for kind, hint, codes in rows for code in codes}


def message_error(message: Message) -> TidelogError | None:
    """The error that a consumer or a delivery report brings in a message's place; None for a real record."""
    error = message.error()
    return None if error is None else translate(error, f"{message.topic()} [{message.partition()}]")


def _parse_address(text: str) -> tuple[str, int]:
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_536:
        raise InvalidInput(f"--bootstrap takes HOST:PORT, not {text!r}", hint="for example --bootstrap 127.0.0.1:9092")
    return host.strip("[]"), int(port)
