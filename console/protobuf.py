"""Messages of Protobuf, read with the descriptor of the file that defines them. Sans-I/O.

Well-known types are those of the protobuf library. A message that a schema defines and that is not in the value is
left out, as JSON of Protobuf does.

Entry: `ProtobufSchema.read`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tidelog.runtime.errors import InvalidInput

MAX_PATH: Final = 16
"""Levels of nested messages in the place of a message."""
_MAX_VARINT: Final = 10


class ProtobufSchema:
    """A file of messages, and the files that it imports."""

    def __init__(self, file: bytes, imports: Sequence[bytes]) -> None:
        """Each is a serialized `FileDescriptorProto`. Raises `InvalidInput`."""
        from google.protobuf import (
            any_pb2,
            descriptor_pb2,
            descriptor_pool,
            duration_pb2,
            empty_pb2,
            field_mask_pb2,
            struct_pb2,
            timestamp_pb2,
            wrappers_pb2,
        )
        from google.protobuf.message import DecodeError

        self._pool = descriptor_pool.DescriptorPool()
        known = (any_pb2, duration_pb2, empty_pb2, field_mask_pb2, struct_pb2, timestamp_pb2, wrappers_pb2)
        try:
            for module in known:
                self._pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
            names = {module.DESCRIPTOR.name for module in known}
            for each in (*imports, file):
                parsed = descriptor_pb2.FileDescriptorProto.FromString(each)
                if parsed.name not in names:
                    self._pool.Add(parsed)
            self._file = descriptor_pb2.FileDescriptorProto.FromString(file)
            self._pool.FindFileByName(self._file.name)
        except (DecodeError, TypeError, KeyError, ValueError) as error:
            raise InvalidInput(f"the schema is not Protobuf's: {error}") from None

    def read(self, data: bytes) -> Any:
        """Return the message as JSON has it, by the place that precedes it. Raises `InvalidInput`."""
        from google.protobuf import json_format, message_factory
        from google.protobuf.message import DecodeError

        path, at = _place(data)
        messages, names = self._file.message_type, [self._file.package] if self._file.package else []
        for index in path:
            if index >= len(messages):
                raise InvalidInput(f"the schema has no message {path}")
            names.append(messages[index].name)
            messages = messages[index].nested_type
        message = message_factory.GetMessageClass(self._pool.FindMessageTypeByName(".".join(names)))()
        try:
            message.ParseFromString(data[at:])
            return json_format.MessageToDict(message, preserving_proto_field_name=True, descriptor_pool=self._pool)
        except (DecodeError, json_format.SerializeToJsonError, TypeError, ValueError) as error:
            raise InvalidInput(f"the value is not what its schema says: {error}") from None


def _place(data: bytes) -> tuple[list[int], int]:
    """The indexes of a message and its parents, and where the message begins. A lone zero is the first message."""
    count, at = _varint(data, 0)
    if count == 0:
        return [0], at
    if not 0 < count <= MAX_PATH:
        raise InvalidInput(f"the place of the message has {count} levels")
    path = []
    for _ in range(count):
        index, at = _varint(data, at)
        if index < 0:
            raise InvalidInput(f"the place of the message has the index {index}")
        path.append(index)
    return path, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A zigzag number, and where it ends."""
    found = 0
    for shift in range(_MAX_VARINT):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        found |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return (found >> 1) ^ -(found & 1), at
    raise InvalidInput("the place of the message is no number")
