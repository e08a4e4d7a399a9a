"""How two processes of a cluster prove to each other that they know its secret, and protect what follows.

Frames of `runtime.wire`, msgpack inside (docs/formats/controller.md):

    client → HELLO      [version, purpose, node id, nonce]
    server → CHALLENGE  [node id, nonce, HMAC("server", T)]      T = HELLO's and CHALLENGE's ids and nonces
    client → PROOF      [HMAC("client", T)]
    server → WELCOME    []   or, at any point, REFUSED [reason]

Both sides derive a key for each direction from T. Every later frame ends with 16 bytes: keyed BLAKE2b over the frame's
number, kind and payload, so nothing can be changed, repeated, left out or moved to another connection.

Invariants: before its proof a peer can make us keep at most `MAX_FRAME_BYTES`, and nothing of it is decoded but these
four messages; the secret itself never crosses; a proof is compared in constant time.

No I/O here: bytes in, bytes out. Entry: `ClientHandshake`, `ServerHandshake`, `Session`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from runtime.errors import ConfigError, CorruptData, Unavailable
from runtime.msgpack import DECODE_ERRORS
from runtime.wire import Frame, FrameDecoder, encode_frame

VERSION: Final = 1
HELLO, CHALLENGE, PROOF, WELCOME, REFUSED = 16, 17, 18, 19, 20
MAX_FRAME_BYTES: Final = 1024
"""Of a handshake's frames."""
NONCE_BYTES: Final = 32
MAC_BYTES: Final = 16
MIN_SECRET_BYTES: Final = 16
NO_NODE: Final = -1
"""Node id of a client that is no node of the cluster (a tool)."""


class NotAuthentic(Unavailable):
    """The other side does not know the cluster's secret, or refused ours."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What the client wants."""

    version: int
    purpose: str
    """`rpc` or `raft`."""
    node_id: int
    nonce: bytes


class _Challenge(msgspec.Struct, frozen=True, array_like=True):
    node_id: int
    nonce: bytes
    proof: bytes


class _Proof(msgspec.Struct, frozen=True, array_like=True):
    proof: bytes


class _Refused(msgspec.Struct, frozen=True, array_like=True):
    reason: str


class Credentials(NamedTuple):
    """What a process needs to take part."""

    secret: bytes
    node_id: int


def read_secret(path: Path) -> bytes:
    """The cluster's secret from its file (blanks around it do not count). Raises `ConfigError`."""
    try:
        secret = path.read_bytes().strip()
        readable_by_others = path.stat().st_mode & 0o077
    except OSError as error:
        raise ConfigError(
            f"cannot read the cluster secret {path}: {error.strerror}", hint="set controller.secret_file"
        ) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the cluster secret in {path} has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed",
            hint="`openssl rand -hex 32` makes a good one",
        )
    if readable_by_others:
        raise ConfigError(f"the cluster secret {path} can be read by others", hint=f"chmod 600 {path}")
    return secret


def write_secret(path: Path) -> None:
    """Draw a secret and store it, readable by the owner only; one that exists stays."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(fd, "wb") as file:
        file.write(os.urandom(32).hex().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


class Session:
    """Seals and opens the frames of one authenticated connection; numbers count from zero in each direction."""

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0

    def seal(self, kind: int, payload: bytes) -> bytes:
        """The bytes of one frame to send. Raises `FrameTooLarge`."""
        mac = _mac(self._send_key, self._sent, kind, payload)
        self._sent += 1
        return encode_frame(kind, payload + mac)

    def open(self, frame: Frame) -> bytes:
        """The payload of a received frame. Raises `CorruptData` if it is not what the other side sent next."""
        split = len(frame.payload) - MAC_BYTES
        if split < 0:
            raise CorruptData("a frame has no authentication code")
        payload = frame.payload[:split]
        mac = _mac(self._receive_key, self._received, frame.kind, payload)
        if not hmac.compare_digest(mac, frame.payload[split:]):
            raise CorruptData("a frame fails its authentication", hint="somebody on the network changes our traffic")
        self._received += 1
        return payload


def _mac(key: bytes, number: int, kind: int, payload: bytes) -> bytes:
    digest = hashlib.blake2b(number.to_bytes(8, "big") + bytes([kind]), key=key, digest_size=MAC_BYTES)
    digest.update(payload)
    return digest.digest()


class _Transcript:
    """T, and what is derived of it."""

    def __init__(self, secret: bytes, hello: Hello, server_id: int, server_nonce: bytes) -> None:
        facts = msgspec.msgpack.encode(
            (hello.version, hello.purpose, hello.node_id, hello.nonce, server_id, server_nonce)
        )
        self._secret = secret
        self._digest = hashlib.sha256(facts).digest()

    def proof(self, side: str) -> bytes:
        return hmac.digest(self._secret, f"tidelog {side}:".encode() + self._digest, "sha256")

    def session(self, *, is_client: bool) -> Session:
        to_server, to_client = self.proof("to server"), self.proof("to client")
        return Session(to_server, to_client) if is_client else Session(to_client, to_server)


class _Side:
    """What both sides share: one small frame at a time."""

    def __init__(self) -> None:
        self._decoder = FrameDecoder(max_bytes=MAX_FRAME_BYTES)
        self.session: Session | None = None
        """Set once the other side has proved itself and, for a client, has accepted us."""

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; returns what to send. Raises `NotAuthentic`, `CorruptData`."""
        answer = b""
        for frame in self._decoder.feed(data):
            if self.session is not None:
                raise CorruptData("the peer sent more than its handshake")
            try:
                answer += self._take(frame)
            except DECODE_ERRORS as error:
                raise CorruptData(f"a handshake message does not decode: {error}") from error
        if self.session is not None and self._decoder.buffered_bytes:
            raise CorruptData("the peer sent more than its handshake")
        return answer

    def _take(self, frame: Frame) -> bytes:
        raise NotImplementedError


class ClientHandshake(_Side):
    """The side that connects. Send `hello` first. `expected_id`: whom it means to reach, if it knows."""

    def __init__(self, credentials: Credentials, purpose: str, expected_id: int | None = None) -> None:
        super().__init__()
        self._credentials = credentials
        self._expected_id = expected_id
        self._hello = Hello(VERSION, purpose, credentials.node_id, os.urandom(NONCE_BYTES))
        self._proved: _Transcript | None = None
        self.server_id = NO_NODE

    def hello(self) -> bytes:
        """The first message."""
        return encode_frame(HELLO, msgspec.msgpack.encode(self._hello))

    def _take(self, frame: Frame) -> bytes:
        if frame.kind == REFUSED:
            reason = msgspec.msgpack.decode(frame.payload, type=_Refused).reason
            raise NotAuthentic(f"the controller refuses this connection: {reason[:200]}")
        if frame.kind == CHALLENGE and self._proved is None:
            return self._answer(msgspec.msgpack.decode(frame.payload, type=_Challenge))
        if frame.kind == WELCOME and self._proved is not None:
            self.session = self._proved.session(is_client=True)
            return b""
        raise CorruptData(f"frame kind {frame.kind} is not expected in a handshake")

    def _answer(self, challenge: _Challenge) -> bytes:
        if self._expected_id not in (None, challenge.node_id):
            raise NotAuthentic(f"node {challenge.node_id} answers where node {self._expected_id} should be")
        transcript = _Transcript(self._credentials.secret, self._hello, challenge.node_id, challenge.nonce)
        if len(challenge.nonce) != NONCE_BYTES or not hmac.compare_digest(transcript.proof("server"), challenge.proof):
            raise NotAuthentic(
                "the controller does not know this cluster's secret",
                hint="controller.secret_file must have the same content on all nodes",
            )
        self._proved = transcript
        self.server_id = challenge.node_id
        return encode_frame(PROOF, msgspec.msgpack.encode(_Proof(transcript.proof("client"))))


class ServerHandshake(_Side):
    """The side that listens. When `session` is set the peer is authentic: send `welcome()` (or `refusal`)."""

    def __init__(self, credentials: Credentials) -> None:
        super().__init__()
        self._credentials = credentials
        self._transcript: _Transcript | None = None
        self.hello: Hello | None = None

    def _take(self, frame: Frame) -> bytes:
        if frame.kind == HELLO and self._transcript is None:
            return self._challenge(msgspec.msgpack.decode(frame.payload, type=Hello))
        if frame.kind == PROOF and self._transcript is not None:
            proof = msgspec.msgpack.decode(frame.payload, type=_Proof).proof
            if not hmac.compare_digest(proof, self._transcript.proof("client")):
                raise NotAuthentic("the peer does not know this cluster's secret")
            self.session = self._transcript.session(is_client=False)
            return b""
        raise CorruptData(f"frame kind {frame.kind} is not expected in a handshake")

    def _challenge(self, hello: Hello) -> bytes:
        if hello.version != VERSION:
            raise CorruptData(f"handshake version {hello.version} is not known; this process speaks {VERSION}")
        if len(hello.nonce) != NONCE_BYTES:
            raise CorruptData(f"a nonce has {NONCE_BYTES} bytes, not {len(hello.nonce)}")
        self.hello = hello
        nonce = os.urandom(NONCE_BYTES)
        self._transcript = _Transcript(self._credentials.secret, hello, self._credentials.node_id, nonce)
        challenge = _Challenge(self._credentials.node_id, nonce, self._transcript.proof("server"))
        return encode_frame(CHALLENGE, msgspec.msgpack.encode(challenge))


def welcome() -> bytes:
    """The last message of a handshake."""
    return encode_frame(WELCOME, b"\x90")


def refusal(reason: str) -> bytes:
    """The last message to a peer that may not take part; the connection is closed after it."""
    return encode_frame(REFUSED, msgspec.msgpack.encode(_Refused(reason[:200])))
