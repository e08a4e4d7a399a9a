"""ApiVersions (18): the APIs and versions that this broker serves.

The response is built from the server's own table, so `tidelog.broker.kafka.server` adds this API itself:
`ApiVersions(apis)`.

Produce is advertised from version 0 on although 0–2 are refused: librdkafka before 2.11 stops compressing otherwise
(KAFKA-18659). Features (KIP-584, `tidelog.controller.model.features`): `metadata.version`, which admin tools read to
determine a cluster's capabilities; `tidelog.level`, the cluster's feature level, which UpdateFeatures raises (level 0
is none, as in Kafka); and `transaction.version`, without which clients use the first transaction protocol.

The APIs of client telemetry are listed while there is a subscription. Otherwise nobody wants what clients would push,
and librdkafka writes a line to the user's terminal for each client that asks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tidelog.broker.kafka.errors import INVALID_REQUEST, NONE, UNSUPPORTED_VERSION
from tidelog.broker.kafka.handlers import client_telemetry
from tidelog.broker.kafka.services import ApiHandler, RequestContext, serve
from tidelog.broker.kafka.wire.messages.cluster import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    FinalizedFeatureKey,
    ServedApi,
    SupportedFeatureKey,
)
from tidelog.controller.image.image import Image
from tidelog.controller.model.features import SUPPORTED_FEATURES, finalized

MIN_VERSION = 0
MAX_VERSION = 4
ZERO_MINIMUM_VERSION = 4
"""The first version whose clients decode a supported feature with the minimum 0 (KIP-1022)."""

MAX_SOFTWARE_CHARS = 249
"""Of a client's name, and of its version: they are kept as long as its connection."""
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")

APIS: list[ApiHandler] = []
"""Empty: `tidelog.broker.kafka.server` adds ApiVersions itself."""


class ApiVersions:
    """Answers from the table of all APIs."""

    def __init__(self, apis: Sequence[ApiHandler]) -> None:
        self.api = serve(ApiVersionsRequest, MIN_VERSION, MAX_VERSION, self.handle)
        self._keys = [
            ServedApi(api_key=api.api_key, min_version=api.min_version, max_version=api.max_version)
            for api in sorted([*apis, self.api], key=lambda api: api.api_key)
        ]
        telemetry = {api.api_key for api in client_telemetry.APIS}
        self._without_telemetry = [key for key in self._keys if key.api_key not in telemetry]

    async def handle(self, context: RequestContext, request: ApiVersionsRequest) -> ApiVersionsResponse:
        """Record the client's name and version (v3+, KIP-511) and return the table."""
        if context.api_version >= 3:
            name, version = request.client_software_name, request.client_software_version
            if max(len(name), len(version)) > MAX_SOFTWARE_CHARS:
                return self._response(INVALID_REQUEST, context)
            if not (_SOFTWARE.fullmatch(name) and _SOFTWARE.fullmatch(version)):
                return self._response(INVALID_REQUEST, context)
            context.extra["client_software_name"] = name
            context.extra["client_software_version"] = version
        return self._response(NONE, context)

    def unsupported(self) -> ApiVersionsResponse:
        """Return the v0 response to an unsupported version; it has all ranges, so that any client can retry."""
        return self._response(UNSUPPORTED_VERSION, None)

    def _response(self, error_code: int, context: RequestContext | None) -> ApiVersionsResponse:
        if context is None:
            return ApiVersionsResponse(error_code=error_code, api_keys=self._keys)
        image: Image = context.services.controller.image
        return ApiVersionsResponse(
            error_code=error_code,
            api_keys=self._keys if context.services.telemetry.is_wanted else self._without_telemetry,
            supported_features=[
                SupportedFeatureKey(name=name, min_version=levels.oldest, max_version=levels.newest)
                for name, levels in SUPPORTED_FEATURES.items()
                if levels.oldest > 0 or context.api_version >= ZERO_MINIMUM_VERSION
            ],
            finalized_features=[
                FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=level)
                for name, level in finalized(image.level, image.kv).items()
            ],
            finalized_features_epoch=image.version,
        )
