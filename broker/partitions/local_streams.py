"""Local metadata of one replica set's streams for storage, read from the image.

Entry: `ImageStreams`.
"""

from __future__ import annotations

from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.records import StreamState


class ImageStreams:
    """The streams placed on a replica set. See `tidelog.storage.inputs.LocalStreams`."""

    def __init__(self, controller: ControllerClient, replica_set: int) -> None:
        self._controller = controller
        self._replica_set = replica_set

    def is_placed(self, stream_id: int) -> bool:
        """Return whether the stream exists and belongs to the replica set, open or closed."""
        record = self._controller.image.stream(stream_id)
        return record is not None and record.replica_set == self._replica_set

    def is_open(self, stream_id: int) -> bool:
        """Return whether the replica set has the stream open."""
        return self.facts(stream_id) is not None

    def facts(self, stream_id: int) -> tuple[int, int] | None:
        """Return committed end and owner-since epoch of a stream that the replica set has open; None for others."""
        record = self._controller.image.stream(stream_id)
        if record is None or record.replica_set != self._replica_set or record.state != StreamState.OPENED:
            return None
        return record.end_offset, record.owner_since_epoch
