"""The command line's access to a cluster: connection by one bootstrap address, and translation of errors.

The Kafka side is confluent-kafka (librdkafka). Its exceptions are converted to `TidelogError` here, so commands need no
Kafka error codes. The admin HTTP side (`/status`, `/objects`) needs no separate address: every broker publishes its URL
as the broker config `tidelog.admin.url`. Where the admin HTTP asks for the token of the cluster's secret, the secret is
read from the file of `--secret-file` or TIDELOG_CONTROLLER__SECRET_FILE or, for a broker on this machine, from the file
that the broker names.

confluent_kafka is imported when a connection is made, not with this module.

Entry: `ClusterConnection`.
"""

from __future__ import annotations

import contextlib
import difflib
import http.client
import importlib
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import urlsplit

from tidelog.cli.options import given_secret_file
from tidelog.console.client_errors import START_HINT, translate
from tidelog.controller.rpc.secret import admin_token, read_secret, read_token
from tidelog.runtime.errors import (
    AlreadyExists,
    InvalidInput,
    NotFound,
    TidelogError,
    Unavailable,
)
from tidelog.runtime.network import BROKER_HEADER, CLUSTER_HEADER

if TYPE_CHECKING:
    from confluent_kafka import Message
    from confluent_kafka.admin import AdminClient

T = TypeVar("T")

CONNECT_TIMEOUT_S = 3.0
"""Time-out for a broker to accept a connection."""
ANSWER_TIMEOUT_S = 5.0
"""Time-out for the first response; a server that accepts connections and does not respond is no broker."""
ADMIN_URL_TIMEOUT_S = 3.0
"""Time-out for a broker to return its admin URL while another broker can be tried."""
REQUEST_TIMEOUT_S = 30.0
"""Time-out for one administrative request."""
WAITED_TIMEOUT_S = 20.0
"""For each piece of an answer that is asked for again until something has happened."""
PATIENCE_S = 30.0
"""How long such an answer is asked for although nobody gives it: brokers restart, and controllers are elected."""
AGAIN_S = 0.5
ADMIN_URL_CONFIG = "tidelog.admin.url"
SECRET_FILE_CONFIG = "controller.secret_file"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class StillUnderWay(Unavailable):
    """The broker waited for as long as it was asked to (504), and what the request began goes on."""


class PartitionOffsets(NamedTuple):
    """The readable range of offsets of a partition."""

    log_start_offset: int
    high_watermark: int
    leader_epoch: int | None
    """Of the last record; None in an empty partition."""


class ClusterConnection:
    """A cluster reached by `bootstrap`, `HOST:PORT` (several separated by commas). Connects on first use."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self._addresses = [_parse_address(part) for part in bootstrap.split(",")]
        self._broker: int | None = None
        """The only broker that is asked."""
        self.cluster_id = ""
        """The cluster that is meant, once the brokers at `bootstrap` have told it; no other one's broker answers."""

    def client_config(self) -> dict[str, Any]:
        """The configuration of every librdkafka client of this cluster. Raises `Unavailable` if no address accepts."""
        self._reach()
        return {
            "bootstrap.servers": self.bootstrap,
            "client.id": "tidelog-cli",
            "log_level": 0,  # librdkafka's log lines are suppressed: commands report errors
            "socket.connection.setup.timeout.ms": int(CONNECT_TIMEOUT_S * 1000),
            "allow.auto.create.topics": False,
        }

    def _reach(self) -> None:
        """Connect once directly: librdkafka would retry without reporting the cause."""
        failures = []
        for host, port in self._addresses:
            try:
                socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
            except OSError as error:
                failures.append(f"{host}:{port}: {error.strerror or error}")
            else:
                return
        raise Unavailable(f"no broker can be reached at {'; '.join(failures)}", hint=START_HINT)

    @cached_property
    def admin(self) -> AdminClient:
        """The Kafka admin client. Raises `Unavailable`."""
        from confluent_kafka.admin import AdminClient

        return AdminClient(self.client_config())

    def metadata(self) -> Any:
        """The current brokers and topics, as confluent-kafka's `ClusterMetadata`. Raises `Unavailable`."""
        from confluent_kafka import KafkaException

        admin = self.admin
        try:
            return admin.list_topics(timeout=ANSWER_TIMEOUT_S)
        except KafkaException as error:
            self._reach()  # raises the cause if nothing listens any more
            raise Unavailable(
                f"{self.bootstrap} accepts connections but does not respond as a broker", hint=START_HINT
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
        """Return the result of one admin request, with errors translated; messages begin with `what`."""
        with refusals(what):
            try:
                return future.result(REQUEST_TIMEOUT_S + ANSWER_TIMEOUT_S)
            except TimeoutError as error:
                late = f"no answer within {REQUEST_TIMEOUT_S + ANSWER_TIMEOUT_S:g} s"
                raise Unavailable(f"{what}: {late}" if what else late, hint="see `tidelog status`") from error

    def offsets(self, partitions: Iterable[tuple[str, int]]) -> dict[tuple[str, int], PartitionOffsets]:
        """Return log start offset and high watermark of each (topic, partition). Raises what `wait` raises."""
        spec = kafka_admin().OffsetSpec
        wanted = list(partitions)
        first = self._list_offsets(wanted, spec.earliest())
        last = self._list_offsets(wanted, spec.latest())
        return {one: PartitionOffsets(first[one].offset, last[one].offset, last[one].leader_epoch) for one in wanted}

    def offsets_at(self, partitions: Iterable[tuple[str, int]], timestamp_ms: int) -> dict[tuple[str, int], int | None]:
        """Return the first offset with a timestamp of at least `timestamp_ms`; None if there is no such offset."""
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
        """`http://host:port` of a broker's admin HTTP. Raises `Unavailable`, or `NotFound` for other Kafka servers."""
        brokers = self._nearest_first()
        for broker in brokers[:-1]:
            with contextlib.suppress(Unavailable):  # it may be paused, or dead and not yet declared dead
                return self._admin_url_of(broker, ADMIN_URL_TIMEOUT_S)
        return self._admin_url_of(brokers[-1], REQUEST_TIMEOUT_S)

    def at(self, admin_url: str, broker: int) -> ClusterConnection:
        """The same cluster, accessed through the broker with this id and admin HTTP. No other one answers for it."""
        other = ClusterConnection(self.bootstrap)
        other.admin_url = admin_url
        other.cluster_id = self.cluster_id
        other._broker = broker
        return other

    def _nearest_first(self) -> list[int]:
        """Broker ids: first those in --bootstrap, then the broker that responded, then the others."""
        metadata = self.metadata()
        self.cluster_id = metadata.cluster_id or ""
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
                f"broker {broker} at {self.bootstrap} has no config {ADMIN_URL_CONFIG}: it is not a Tidelog broker",
                hint="topic, produce, consume and group work with any Kafka; this command needs Tidelog",
            )
        return str(entry.value)

    def broker_config(self, name: str) -> str | None:
        """Return a configuration value of the nearest broker that has one: those of an older version know fewer.

        Raises `Unavailable` if none answers.
        """
        api = importlib.import_module("confluent_kafka.admin")
        problem: Unavailable | None = None
        answered = False
        for broker in self._nearest_first():
            resource = api.ConfigResource(api.ConfigResource.Type.BROKER, str(broker))
            futures = self.admin.describe_configs([resource], request_timeout=ADMIN_URL_TIMEOUT_S)
            try:
                entry = self.wait(futures[resource], f"configuration of broker {broker}").get(name)
            except Unavailable as error:
                problem = error
                continue
            answered = True
            if entry is not None and entry.value:
                return str(entry.value)
        if problem is not None and not answered:
            raise problem
        return None

    def get(self, path: str, timeout_s: float = REQUEST_TIMEOUT_S * 2) -> Any:
        """Send a GET to the admin HTTP of the connected broker and return the parsed JSON. See `http_json`."""
        known = "admin_url" in self.__dict__
        try:
            return self.ask(self.admin_url, path, timeout_s=timeout_s)
        except Unavailable:
            if not known or self._broker is not None:
                raise
            del self.admin_url  # the address may change when a broker restarts
            return self.ask(self.admin_url, path, timeout_s=timeout_s)

    def ask(self, admin_url: str, path: str, *, timeout_s: float, broker: int | None = None) -> Any:
        """Send a GET to the admin HTTP at an address of this cluster. `broker`: whose answer is wanted."""
        meant = self._broker if broker is None else broker
        return http_json(admin_url, path, timeout_s=timeout_s, broker=meant, cluster=self.cluster_id)

    def get_patiently(self, path: str, deadline: float) -> Any:
        """Send a GET as `get` does, for a command that waits until `deadline` for what goes on without it.

        While the broker that was asked cannot be reached, or cannot answer, the brokers that there are then are asked,
        for at most `PATIENCE_S` seconds and the last answer's time.
        """
        until = min(deadline, time.monotonic() + PATIENCE_S)
        while True:
            try:
                return self.get(path, WAITED_TIMEOUT_S)
            except Unavailable:
                if time.monotonic() > until:
                    raise
                if self._broker is None:
                    self.__dict__.pop("admin_url", None)
            time.sleep(AGAIN_S)

    def post(self, path: str, body: object = None) -> Any:
        """Send a POST to the admin HTTP of the connected broker and return parsed JSON. Raises as `http_json` does."""
        return self.post_to(self.admin_url, path, body)

    def post_to(self, admin_url: str, path: str, body: object = None, *, broker: int | None = None) -> Any:
        """Send a POST, with the token if it is asked for, to the admin HTTP at an address of this cluster."""
        return http_json(
            admin_url,
            path,
            method="POST",
            body=body,
            token=lambda: self.admin_token,
            broker=self._broker if broker is None else broker,
            cluster=self.cluster_id,
        )

    @cached_property
    def admin_token(self) -> str:
        """The token of the cluster's secret for the admin HTTP. Raises `AdminTokenNeeded`, `ConfigError`."""
        return admin_token(self._secret())

    @cached_property
    def read_token(self) -> str:
        """The token for readers outside the cluster.

        Raises `NotFound` where the cluster has no secret, `AdminTokenNeeded`, `ConfigError`.
        """
        if given_secret_file() is None and not self.broker_config(SECRET_FILE_CONFIG):
            raise NotFound(
                "this cluster has no secret: readers need no token",
                hint="leave readToken, readTokenFile and --read-token-file out",
            )
        return read_token(self._secret())

    def _secret(self) -> bytes:
        file = given_secret_file()
        if file is None and urlsplit(self.admin_url).hostname in LOOPBACK:
            told = self.broker_config(SECRET_FILE_CONFIG)
            file = Path(told) if told and Path(told).is_absolute() and Path(told).exists() else None
        if file is None:
            raise AdminTokenNeeded(
                f"the admin HTTP at {self.admin_url} needs the token of the cluster's secret",
                hint="give the secret with --secret-file FILE or in TIDELOG_CONTROLLER__SECRET_FILE",
            )
        return read_secret(file)

    def post_lines(self, path: str) -> Iterator[dict[str, Any]]:
        """Send a POST and yield the JSON lines of the response as they arrive. Raises as `http_json` does."""
        url = self.admin_url
        with _Http(url, lambda: self.admin_token, broker=self._broker, cluster=self.cluster_id) as connection:
            response = connection.request("POST", path)
            try:
                while line := response.readline():
                    yield json.loads(line, object_hook=_BrokerAnswer)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise Unavailable(
                    f"{self.admin_url}{path} closed the connection early: {error}",
                    hint="try again; see `tidelog status`",
                ) from error


class AdminTokenNeeded(InvalidInput):
    """The admin HTTP asks for the token of the cluster's secret, and got none or a wrong one."""


class _BrokerAnswer(dict[str, Any]):
    """An object of what a broker told, which may run another version and not tell all that this one shows."""

    def __missing__(self, key: str) -> NoReturn:
        raise NotFound(
            f"the broker tells nothing of {key!r}: it runs another version than this command",
            hint="ask a broker of this version (--bootstrap), or use the `tidelog` of the broker's",
        )


Token = Callable[[], str]
"""Returns the token that proves the cluster's secret; called only when the server asks for it."""


def http_json(
    url: str,
    path: str,
    *,
    method: str = "GET",
    body: object = None,
    token: Token | None = None,
    timeout_s: float = REQUEST_TIMEOUT_S * 2,
    broker: int | None = None,
    cluster: str = "",
) -> Any:
    """Send `body` as JSON to `url` + `path` and return the parsed JSON of the response.

    `timeout_s`: for connecting, and for each piece of the answer. `broker`: whose answer is wanted; None: anyone's.
    `cluster`: of which cluster it is wanted; empty: of any.

    Raises the `TidelogError` for the status, `Unavailable` if there is no response, or another broker answers.
    """
    with _Http(url, token, timeout_s, broker, cluster) as connection:
        response = connection.request(method, path, body)
        try:
            return json.loads(response.read(), object_hook=_BrokerAnswer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"{url}{path} returned invalid JSON: {error}", hint="see `tidelog status`") from error


def http_text(
    url: str, path: str, *, limit_bytes: int, timeout_s: float = REQUEST_TIMEOUT_S * 2, cluster: str = ""
) -> str:
    """Send a GET to `url` + `path` and return the text of the response: whole lines, at most `limit_bytes`.

    Raises as `http_json` does.
    """
    with _Http(url, None, timeout_s, cluster=cluster) as connection:
        response = connection.request("GET", path)
        try:
            data = response.read(limit_bytes + 1)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{url}{path} closed the connection early: {error}", hint="try again") from error
    if len(data) > limit_bytes:
        data = data[:limit_bytes].rpartition(b"\n")[0]
    return data.decode("utf-8", "replace")


class _Http:
    """A connection to an admin HTTP server, closed at the end of the block."""

    def __init__(
        self,
        url: str,
        token: Token | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S * 2,
        broker: int | None = None,
        cluster: str = "",
    ) -> None:
        self._url = url
        self._token = token
        self._headers = {} if broker is None else {BROKER_HEADER: str(broker)}
        if cluster:
            self._headers[CLUSTER_HEADER] = cluster
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)

    def __enter__(self) -> _Http:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.close()

    def request(self, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
        text = None if body is None else json.dumps(body)
        response = self._send(method, path, text, {})
        if response.status == http.client.UNAUTHORIZED and self._token is not None:
            response.close()
            self._connection.close()  # the next request connects again
            response = self._send(method, path, text, {"Authorization": f"Bearer {self._token()}"})
        if response.status >= 400:
            raise _http_error(response, f"{method} {self._url}{path}")
        return response

    def _send(self, method: str, path: str, body: str | None, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        try:
            self._connection.request(method, path, body, {**self._headers, **headers})
            return self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(
                f"the admin HTTP at {self._url} cannot be reached: {error}",
                hint="it listens on admin.host, by default loopback: run this on the broker's machine",
            ) from error


def _http_error(response: http.client.HTTPResponse, request: str) -> TidelogError:
    message, hint = f"{request} returned {response.status} {response.reason}", None
    try:
        body = json.loads(response.read())
        message, hint = str(body["error"]), body.get("hint")
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        pass  # not a Tidelog error body: the status line is all the information
    kinds: Mapping[int, type[TidelogError]] = {
        400: InvalidInput,
        401: AdminTokenNeeded,
        404: NotFound,
        409: Unavailable,
        412: AlreadyExists,
        421: Unavailable,
        504: StillUnderWay,
    }
    kind = kinds.get(response.status, Unavailable if response.status in (502, 503) else TidelogError)
    return kind(message, hint=hint)


@contextlib.contextmanager
def refusals(what: str = "") -> Iterator[None]:
    """Translate the errors of confluent-kafka, which checks arguments when a request is made, and in its future."""
    from confluent_kafka import KafkaException

    try:
        yield
    except KafkaException as error:
        raise translate(error, what) from error
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidInput(f"{what}: {error}" if what else str(error)) from error


def kafka_admin() -> Any:
    """The module `confluent_kafka.admin`, whose names a type checker does not see as exported."""
    return importlib.import_module("confluent_kafka.admin")


# --- errors ------------------------------------------------------------------------------------------------------


def unknown(kind: str, name: str, known: Iterable[str], *, otherwise: str) -> NotFound:
    """Return the error for an unknown name; the hint is the nearest existing name, or `otherwise`."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? `tidelog {kind} list` shows them all" if close else otherwise
    return NotFound(f"{kind} {name!r} does not exist", hint=hint)


def message_error(message: Message) -> TidelogError | None:
    """Return the error in a message of a consumer or a delivery report; None for a record."""
    error = message.error()
    return None if error is None else translate(error, f"{message.topic()} [{message.partition()}]")


def _parse_address(text: str) -> tuple[str, int]:
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_536:
        raise InvalidInput(f"--bootstrap takes HOST:PORT, not {text!r}", hint="for example --bootstrap 127.0.0.1:9092")
    return host.strip("[]"), int(port)
