"""Values that a schema registry describes: Confluent's framing, with schemas of Avro, Protobuf and JSON.

A framed value is a zero byte, the schema's id (4 bytes), for Protobuf the place of the message in its file, and the
payload. The address of the registry is the operator's; nothing of a request reaches it but ids out of records.

Invariants (rule 12): at most `MAX_SCHEMAS` schemas are kept, each of at most `MAX_SCHEMA_BYTES`; one that was not
answered for is not asked for again for `FAILED_FOR_S`. A value that cannot be read is shown as bytes, with the reason.
Text is made only as far as it is shown: indentation, and names that a schema gives to many items, make a gigabyte of a
value that is read in no time. Values are read in a thread, for a large one takes longer than an event loop may stand.

Entry: `SchemaRegistry.shown`.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import aiohttp

from tidelog.console.avro import AvroSchema
from tidelog.console.decode import shown
from tidelog.console.protobuf import ProtobufSchema
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import InvalidInput, NotFound, TidelogError, Unavailable

MAX_SCHEMAS: Final = 256
MAX_SCHEMA_BYTES: Final = 1 << 20
MAX_REFERENCES: Final = 50
MAX_VALUE_BYTES: Final = 1 << 20
FAILED_FOR_S: Final = 30.0
ASK_TIMEOUT_S: Final = 5.0
FRAME_BYTES: Final = 5

_ENCODER: Final = json.JSONEncoder(indent=2, ensure_ascii=False)

Read = Callable[[bytes], Any]
"""A payload as JSON has it. Raises `InvalidInput`."""


class _ToldSchema(NamedTuple):
    kind: str
    text: str
    files: dict[str, str]
    """Texts of the schemas that it refers to, by name."""


class SchemaRegistry:
    """The schemas of one registry. `url` without a slash at its end."""

    def __init__(self, url: str, clock: Clock) -> None:
        self._url = url
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._schemas: OrderedDict[int, tuple[str, Read]] = OrderedDict()
        self._failed: OrderedDict[int, tuple[float, TidelogError]] = OrderedDict()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def shown(self, data: bytes | None, limit: int) -> dict[str, Any] | None:
        """Return a framed value as `tidelog.console.decode.shown` does, with `schema`; None for one without a frame."""
        if data is None or len(data) < FRAME_BYTES or data[0] or len(data) > MAX_VALUE_BYTES:
            return None
        schema_id = int.from_bytes(data[1:FRAME_BYTES], "big")
        try:
            kind, read = await self._schema(schema_id)
            text = await asyncio.to_thread(_rendered, read, data[FRAME_BYTES:], limit)
        except NotFound:
            return None  # the bytes only look like a frame
        except (TidelogError, RecursionError) as error:
            return {**shown(data, limit), "schema": schema_id, "problem": str(error)}
        cut = len(text) > limit
        about = {"size_bytes": len(data), "cut": cut, "schema": schema_id}
        return {"kind": kind, "text": text[:limit], **about}

    async def _schema(self, schema_id: int) -> tuple[str, Read]:
        if schema_id in self._schemas:
            self._schemas.move_to_end(schema_id)
            return self._schemas[schema_id]
        since, error = self._failed.get(schema_id, (0.0, None))
        if error is not None and self._clock.monotonic() - since < FAILED_FOR_S:
            raise _anew(error)
        try:
            found = _reader(await self._told(schema_id))
        except TidelogError as failed:
            self._failed[schema_id] = self._clock.monotonic(), _anew(failed)
            while len(self._failed) > MAX_SCHEMAS:
                self._failed.popitem(last=False)
            raise
        self._schemas[schema_id] = found
        while len(self._schemas) > MAX_SCHEMAS:
            self._schemas.popitem(last=False)
        return found

    async def _told(self, schema_id: int) -> _ToldSchema:
        found = await self._ask(f"/schemas/ids/{schema_id}")
        kind = str(found.get("schemaType") or "AVRO").lower()
        query = "?format=serialized" if kind == "protobuf" else ""
        if query:
            found = {**found, "schema": (await self._ask(f"/schemas/ids/{schema_id}{query}"))["schema"]}
        files: dict[str, str] = {}
        try:
            await self._refer(found, files, query)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"the references of schema {schema_id} are not as expected: {error!r}") from None
        return _ToldSchema(kind, str(found["schema"]), files)

    async def _refer(self, found: dict[str, Any], files: dict[str, str], query: str) -> None:
        """Get the schemas that one refers to, those deepest down first."""
        for each in found.get("references") or ():
            name, subject, version = str(each["name"]), str(each["subject"]), int(each["version"])
            if name in files:
                continue
            if len(files) >= MAX_REFERENCES:
                raise InvalidInput(f"the schema refers to more than {MAX_REFERENCES} others")
            files[name] = ""
            part = await self._ask(f"/subjects/{_segment(subject)}/versions/{version}{query}")
            await self._refer(part, files, query)
            del files[name]
            files[name] = str(part["schema"])

    async def _ask(self, path: str) -> dict[str, Any]:
        """GET a document. Raises `NotFound`, `Unavailable`, `InvalidInput`."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
        try:
            async with self._session.get(self._url + path, timeout=timeout, allow_redirects=False) as response:
                raw = bytearray()
                async for chunk in response.content.iter_chunked(64 << 10):
                    raw += chunk
                    if len(raw) > MAX_SCHEMA_BYTES:
                        raise InvalidInput(f"{path} of the registry is longer than {MAX_SCHEMA_BYTES >> 20} MiB")
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise Unavailable(f"the schema registry does not answer: {error or 'no answer in time'}") from error
        if status == 404:
            raise NotFound(f"the schema registry has no {path}")
        if status != 200:
            raise Unavailable(f"the schema registry answered {path} with {status}")
        try:
            found = json.loads(raw)
        except ValueError:
            found = None
        if not isinstance(found, dict) or "schema" not in found:
            raise InvalidInput(f"{path} of the schema registry is no schema")
        return found


def _anew(error: TidelogError) -> TidelogError:
    """The same error without its traceback, which keeps the values of all frames, and grows whenever it is raised."""
    return type(error)(error.message, hint=error.hint)


def _rendered(read: Read, payload: bytes, limit: int) -> str:
    """The payload as indented JSON, which is cut at some point after `limit` characters. Raises `InvalidInput`."""
    parts: list[str] = []
    size = 0
    for part in _ENCODER.iterencode(read(payload)):
        parts.append(part)
        size += len(part)
        if size > limit:
            break
    return "".join(parts)


def _segment(text: str) -> str:
    """A subject as one segment of a path."""
    return "".join(each if (each.isascii() and each.isalnum()) or each in "-_" else _escaped(each) for each in text)


def _escaped(each: str) -> str:
    return "".join(f"%{byte:02X}" for byte in each.encode("utf-8", "replace"))


def _reader(told: _ToldSchema) -> tuple[str, Read]:
    if told.kind == "avro":
        return "avro", AvroSchema(told.text, told.files).read
    if told.kind == "json":
        return "json", _read_json
    if told.kind == "protobuf":
        try:
            files = [base64.b64decode(text) for text in told.files.values()]
            return "protobuf", ProtobufSchema(base64.b64decode(told.text), files).read
        except ValueError as error:
            raise InvalidInput(f"the schema is not base64: {error}") from None
    raise InvalidInput(f"schemas of type {told.kind[:20]!r} are not known")


def _read_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the value is not JSON: {error}") from None
