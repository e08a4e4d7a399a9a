"""A stand-in for a bucket on another machine: it accepts objects over a socket, at negligible cost on this machine.

A broker's cost of an upload is its S3 client: building the request and sending the bytes. The server's work happens
elsewhere in production, but on a machine with two cores any store that keeps the objects takes CPU from the broker or
its client. (A folder in memory costs the broker 0.35 CPU seconds a GB for pages and copies and 0.15 for their release,
all of it the bucket's work.) So this server lets the kernel drop the bodies of large objects instead of copying them
(`MSG_TRUNC`, tcp(7)) and keeps only their names and sizes. Objects up to `KEPT_BYTES` are stored and can be read. A GET
of a dropped object fails with 501, so that no measurement reads it by mistake.

It implements the S3 requests of a broker: PUT (with `If-None-Match: *`), GET with and without a range, HEAD, DELETE,
batch delete, list. Signatures are not checked.

Entry: `sink`, a separate process.
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from bench._common import background

KEPT_BYTES = 1 << 20
"""Larger than the objects of meta streams, smaller than those of data."""
_PIECE_BYTES = 1 << 20
_RECEIVE_BYTES = 4 << 20
"""Receive buffer of a connection, as far as the kernel allows."""
_WAKE_BYTES = 256 << 10
"""Minimum step when dropping a body, well below the size of the receive buffer."""
_HEAD_BYTES = 64 << 10
_META = "x-amz-meta-"
_KEY = re.compile(rb"<Key>(.*?)</Key>", re.DOTALL)
_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


class _Object(NamedTuple):
    size: int
    body: bytes | None
    """None if the body was dropped."""
    headers: dict[str, str]
    etag: str
    modified_s: float


class _Request(NamedTuple):
    method: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    size: int
    body: bytes | None


Response = tuple[int, dict[str, str], bytes]


class Sink:
    """The objects, and the response to each request."""

    def __init__(self) -> None:
        self._objects: dict[str, _Object] = {}
        self._lock = threading.Lock()
        self._puts = 0

    def answer(self, request: _Request) -> Response:
        """Return status, headers and body."""
        with self._lock:
            if not request.key:
                return self._bucket(request)
            if request.method == "PUT":
                return self._put(request)
            if request.method == "DELETE":
                self._objects.pop(request.key, None)
                return 204, {}, b""
            if request.method in ("GET", "HEAD"):
                return self._get(request)
        return _error(405, "MethodNotAllowed")

    def _put(self, request: _Request) -> Response:
        if request.headers.get("if-none-match") == "*" and request.key in self._objects:
            return _error(412, "PreconditionFailed")
        self._puts += 1
        meta = {name: value for name, value in request.headers.items() if name.startswith(_META)}
        found = _Object(request.size, request.body, meta, f'"{self._puts:032x}"', time.time())
        self._objects[request.key] = found
        return 200, {"ETag": found.etag}, b""

    def _get(self, request: _Request) -> Response:
        found = self._objects.get(request.key)
        if found is None:
            return _error(404, "NoSuchKey")
        headers = {
            "ETag": found.etag,
            "Last-Modified": email.utils.formatdate(found.modified_s, usegmt=True),
            **found.headers,
        }
        if request.method == "HEAD":
            return 200, {**headers, "Content-Length": str(found.size)}, b""
        if found.body is None:
            return _error(501, "NotImplemented")
        bounds = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if bounds is None:
            return 200, headers, found.body
        start, last = int(bounds[1]), min(int(bounds[2]), found.size - 1)
        if start > last:
            return _error(416, "InvalidRange")
        return 206, {**headers, "Content-Range": f"bytes {start}-{last}/{found.size}"}, found.body[start : last + 1]

    def _bucket(self, request: _Request) -> Response:
        if request.method == "POST" and "delete" in request.query:
            for name in _KEY.findall(request.body or b""):
                self._objects.pop(unescape(name.decode()), None)
            return 200, {}, f"<DeleteResult {_NAMESPACE}></DeleteResult>".encode()
        if request.method == "GET" and "uploads" in request.query:
            return 200, {}, f"<ListMultipartUploadsResult {_NAMESPACE}></ListMultipartUploadsResult>".encode()
        if request.method == "GET" and "list-type" in request.query:
            return self._list(request.query)
        return (200, {}, b"") if request.method in ("HEAD", "PUT") else _error(501, "NotImplemented")

    def _list(self, query: dict[str, list[str]]) -> Response:
        """List all objects in one page: a benchmark has some hundred."""
        prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
        out = [f"<ListBucketResult {_NAMESPACE}><IsTruncated>false</IsTruncated>"]
        for key in sorted(self._objects, key=str.encode):
            if key.startswith(prefix) and key > after:
                one = self._objects[key]
                modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(one.modified_s))
                out.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified>"
                    f"<ETag>{escape(one.etag)}</ETag><Size>{one.size}</Size></Contents>"
                )
        return 200, {}, "".join([*out, "</ListBucketResult>"]).encode()


def _error(status: int, code: str) -> Response:
    return status, {}, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


class _Connection:
    """HTTP/1.1 on one socket."""

    def __init__(self, one: socket.socket, sink: Sink) -> None:
        self._socket = one
        self._sink = sink
        self._received = bytearray()
        self._scratch = bytearray(_PIECE_BYTES)

    def serve(self) -> None:
        """Serve requests until the client disconnects."""
        while (head := self._head()) is not None:
            lines = head.decode("latin-1").split("\r\n")
            method, target, _ = lines[0].split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines[1:])}
            if "chunked" in headers.get("transfer-encoding", "") + headers.get("content-encoding", ""):
                raise ValueError("the sink takes no bodies in chunks")
            if headers.get("expect", "").lower() == "100-continue":
                self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            size = int(headers.get("content-length", "0"))
            body = None
            if size <= KEPT_BYTES:
                body = self._take(size)
            else:
                self._drop(size)
            url = urlsplit(target)
            _, _, key = url.path.lstrip("/").partition("/")
            query = parse_qs(url.query, keep_blank_values=True)
            self._send(method, self._sink.answer(_Request(method, unquote(key), query, headers, size, body)))

    def _head(self) -> bytes | None:
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            more = self._socket.recv(_HEAD_BYTES)
            if not more or len(self._received) > _HEAD_BYTES:
                return None
            self._received += more
        head = bytes(self._received[:end])
        del self._received[: end + 4]
        return head

    def _take(self, size: int) -> bytes:
        while len(self._received) < size:
            more = self._socket.recv(_PIECE_BYTES)
            if not more:
                raise ConnectionError("the client hung up in the middle of a body")
            self._received += more
        body = bytes(self._received[:size])
        del self._received[:size]
        return body

    def _drop(self, size: int) -> None:
        size -= len(self._received)
        self._received.clear()
        # Woken for every packet it would cost a client that shares its core twice as much.
        step = min(_WAKE_BYTES, self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 8)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, step)
        while size >= 2 * step:  # a call that took less than a step waits for a whole one to follow
            size -= self._drop_piece(min(size, _PIECE_BYTES))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        while size > 0:
            size -= self._drop_piece(size)

    def _drop_piece(self, size: int) -> int:
        count = self._socket.recv_into(self._scratch, size, socket.MSG_TRUNC)
        if count == 0:
            raise ConnectionError("the client hung up in the middle of a body")
        return count

    def _send(self, method: str, response: Response) -> None:
        status, headers, body = response
        headers = {"Content-Length": str(len(body)), "Content-Type": "application/xml", **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._socket.sendall(f"HTTP/1.1 {status} -\r\n{head}\r\n".encode() + (b"" if method == "HEAD" else body))


def _serve(put: Callable[[Any], None]) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)  # what it accepts has it, too
    put(listener.getsockname()[1])
    objects = Sink()
    while True:
        one, _ = listener.accept()
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_serve_quietly, args=(one, objects), daemon=True).start()


def _serve_quietly(one: socket.socket, objects: Sink) -> None:
    with one, contextlib.suppress(ConnectionError):
        _Connection(one, objects).serve()


@contextlib.contextmanager
def sink(cores: set[int] | None = None) -> Iterator[str]:
    """Run the server in a separate process; yield its endpoint. Any bucket name is accepted."""
    with background(_serve, cores=cores, ends=False) as result:
        yield f"http://127.0.0.1:{result()}"
