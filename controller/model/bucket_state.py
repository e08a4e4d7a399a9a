"""The metadata in the bucket: the format and the keys of states and claims.

docs/design/0014-rebuild-from-the-bucket.md says what they are for.

    {cluster id}/metadata/state-{generation, 8 hex}-{log index, 16 hex}    one state
    {cluster id}/metadata/claim-{generation, 8 hex}                        who owns the bucket from then on
    {cluster id}/metadata/owner                                            replaced at an interval while there is one
    {cluster id}/metadata/backup                                           only in a backup: nobody owns this bucket

Keys sort by age. A state is (little-endian): magic "TLSTATE\\x01" (8), format version (uint32), body length (uint64),
CRC32C of the body (uint32), CRC32C of the header so far (uint32); body = msgpack `[cluster id, generation, log index,
metadata version, term, time, closed, state]`, the last being the versioned bytes of
`tidelog.controller.machine.state.ControllerState.dump`.

A *generation* counts the owners of a bucket: the first cluster is 1, a cluster that was rebuilt from the bucket has the
number after the largest claim. A claim is created once, conditionally, and never deleted, so that claims have no holes:
an owner is superseded if and only if the claim after its own number exists.

Does no I/O. Entry: `BucketState`, `encode_state`, `decode_state`, `version_in`; `state_key`, `parse_state_key`,
`claim_key`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
from crc32c import crc32c

from tidelog.controller.model.levels import NewerLevel
from tidelog.runtime.errors import CorruptData
from tidelog.runtime.msgpack import DECODE_ERRORS

MAGIC: Final = b"TLSTATE\x01"
FORMAT_VERSION: Final = 1
FIRST_GENERATION: Final = 1
GENERATION_ROW: Final = "generation"
"""Key in `kv`, with the number as decimal text; absent: the first generation."""
_HEADER = struct.Struct("<8sIQI")
_CRC = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size
_STATE_KEY = re.compile(r"(?P<cluster>[^/]+)/metadata/state-(?P<generation>[0-9a-f]{8})-(?P<index>[0-9a-f]{16})")
_CLAIM_KEY = re.compile(r"(?P<cluster>[^/]+)/metadata/claim-(?P<generation>[0-9a-f]{8})")

STATE_HEAD_BYTES: Final = 256
"""In so many bytes the head of a state ends, up to the metadata version."""
_ARRAY_OF_8: Final = b"\x98"
_STR_8: Final = 0xD9
_UINT_BYTES: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
"""Bytes of an unsigned number in msgpack, by its first byte."""

_OWNER = re.compile(rb"generation (?P<generation>\d{1,18}), term (?P<term>\d{1,18}),")


class BucketState(msgspec.Struct, frozen=True, array_like=True):
    """One state: all metadata at one place of the replicated log."""

    cluster_id: str
    generation: int
    index: int
    """Index of the last command that it contains (int64)."""
    version: int
    """Metadata version at that command (int64)."""
    term: int
    """Raft term of the active controller that wrote it."""
    written_ms: int
    """Wall clock of the writer; for users."""
    closed: bool
    """The last act of a controller that was stopped: nothing of it follows, unless another one became active."""
    state: bytes


class StateName(NamedTuple):
    """What the key of a state says. Sorts by age."""

    generation: int
    log_index: int


_decoder = msgspec.msgpack.Decoder(BucketState)


def encode_state(state: BucketState) -> bytes:
    """Return the object's bytes."""
    body = msgspec.msgpack.encode(state)
    header = _HEADER.pack(MAGIC, FORMAT_VERSION, len(body), crc32c(body))
    return b"".join((header, _CRC.pack(crc32c(header)), body))


def decode_state(data: bytes, *, key: str) -> BucketState:
    """Check and decode an object's bytes, and compare them with its key.

    Raises `NewerLevel` for one of a newer format, which may be whole, and `CorruptData`.
    """
    if len(data) < HEADER_BYTES:
        raise _damaged(key, f"it has {len(data)} bytes; the header alone has {HEADER_BYTES}")
    magic, version, length, crc = _HEADER.unpack_from(data)
    if magic != MAGIC or _CRC.unpack_from(data, _HEADER.size)[0] != crc32c(data[: _HEADER.size]):
        raise _damaged(key, "it is no state, or its header is damaged")
    if version != FORMAT_VERSION:
        raise NewerLevel(
            f"the metadata state {key} has format version {version}; this process reads {FORMAT_VERSION}",
            hint="start the version that wrote it, or a newer one",
        )
    body = memoryview(data)[HEADER_BYTES:]
    if len(body) != length or crc32c(body) != crc:
        raise _damaged(key, f"its body ({len(body)} of {length} bytes) fails its checksum")
    try:
        found = _decoder.decode(body)
    except DECODE_ERRORS as error:
        raise _damaged(key, f"its body does not decode: {error}") from error
    if state_key(found.cluster_id, found.generation, found.index) != key:
        raise _damaged(key, f"it is the state of {state_key(found.cluster_id, found.generation, found.index)}")
    return found


def version_in(head: bytes) -> int | None:
    """Return the metadata version in the first `STATE_HEAD_BYTES` of a state; None if they are none of this format.

    Nothing is checked but the format: what follows from it must not depend on a damaged byte.
    """
    if head[: len(MAGIC)] != MAGIC or head[HEADER_BYTES : HEADER_BYTES + 1] != _ARRAY_OF_8:
        return None
    at = HEADER_BYTES + 1
    try:
        length, at = _short_text(head, at)
        at += length
        for _ in range(3):
            version, at = _unsigned(head, at)
    except (IndexError, KeyError):
        return None
    return version


def _short_text(data: bytes, at: int) -> tuple[int, int]:
    """Return the length of a msgpack string of at most 255 bytes, and where these begin."""
    first = data[at]
    if first >> 5 == 0b101:
        return first & 31, at + 1
    if first != _STR_8:
        raise KeyError(first)
    return data[at + 1], at + 2


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    """Return a msgpack number that is not negative, and where the next value begins."""
    first = data[at]
    if first < 0x80:
        return first, at + 1
    end = at + 1 + _UINT_BYTES[first]
    if end > len(data):
        raise IndexError(end)
    return int.from_bytes(data[at + 1 : end], "big"), end


def _damaged(key: str, what: str) -> CorruptData:
    return CorruptData(f"the metadata state {key} is damaged: {what}", hint="an older state may be whole")


def metadata_prefix(cluster_id: str) -> str:
    """Return the prefix of all states and claims of a cluster."""
    return f"{cluster_id}/metadata/"


def state_key(cluster_id: str, generation: int, index: int) -> str:
    """Return the key of a state."""
    assert 0 < generation < 1 << 32 and 0 <= index < 1 << 63, (generation, index)
    return f"{metadata_prefix(cluster_id)}state-{generation:08x}-{index:016x}"


def parse_state_key(key: str) -> StateName | None:
    """Return what a key made by `state_key` says; None for any other key."""
    match = _STATE_KEY.fullmatch(key)
    return StateName(int(match["generation"], 16), int(match["index"], 16)) if match is not None else None


def owner_key(cluster_id: str) -> str:
    """Return the key of the object whose time shows that the bucket has a living owner."""
    return f"{metadata_prefix(cluster_id)}owner"


def owner_text(generation: int, term: int, now_ms: int) -> bytes:
    """Return the content of the owner's object."""
    return b"generation %d, term %d, at %d ms\n" % (generation, term, now_ms)


def parse_owner(text: bytes) -> tuple[int, int] | None:
    """Return the generation and the term in an owner's object; None if it does not say them."""
    match = _OWNER.match(text)
    return (int(match["generation"]), int(match["term"])) if match is not None else None


def backup_key(cluster_id: str) -> str:
    """Return the key of the object that marks a backup (`tidelog.process.backup`)."""
    return f"{metadata_prefix(cluster_id)}backup"


def claim_key(cluster_id: str, generation: int) -> str:
    """Return the key of a claim."""
    assert 0 < generation < 1 << 32, generation
    return f"{metadata_prefix(cluster_id)}claim-{generation:08x}"


def parse_claim_key(key: str) -> int | None:
    """Return the generation of a key made by `claim_key`; None for any other key."""
    match = _CLAIM_KEY.fullmatch(key)
    return int(match["generation"], 16) if match is not None else None


def generation_of(kv: Mapping[str, bytes]) -> int:
    """Return the generation that the metadata's table `kv` names."""
    row = kv.get(GENERATION_ROW)
    return int(row) if row is not None else FIRST_GENERATION
