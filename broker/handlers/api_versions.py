"""ApiVersions (18): what this broker serves.

The answer is made from the server's own table, so `broker.server` adds this API by itself: `api_versions(apis)`.

Produce is advertised from version 0 on although 0–2 are refused: librdkafka before 2.11 stops compressing otherwise
(KAFKA-18659). Finalized features: `metadata.version` only, which admin tools read to know what a cluster can do;
without `transaction.version` clients keep to the first transaction protocol.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from broker.errors import INVALID_REQUEST, UNSUPPORTED_VERSION
from broker.services import ApiHandler, RequestContext
from broker.wire import schema
from broker.wire.codec import API_VERSIONS

MIN_VERSION = 0
MAX_VERSION = 4
METADATA_VERSION_LEVEL = 21
"""3.9-IV0, the level whose request versions are served."""

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")

APIS: list[ApiHandler] = []
"""Empty: `broker.server` adds ApiVersions itself."""


class ApiVersions:
    """Answers from the table of all APIs."""

    def __init__(self, apis: Sequence[ApiHandler]) -> None:
        self.api = ApiHandler(API_VERSIONS, MIN_VERSION, MAX_VERSION, self.handle)
        self._apis = sorted([*apis, self.api], key=lambda api: api.api_key)
        self._answers: dict[tuple[int, int], Any] = {}

    async def handle(self, context: RequestContext, request: Any) -> Any:
        """Note what the client says of itself (v3+, KIP-511) and answer."""
        if context.api_version >= 3:
            name, version = request.client_software_name, request.client_software_version
            if not (_SOFTWARE.fullmatch(name) and _SOFTWARE.fullmatch(version)):
                return self.response(context.api_version, INVALID_REQUEST)
            context.extra["client_software_name"] = name
            context.extra["client_software_version"] = version
        return self.response(context.api_version, 0)

    def unsupported(self) -> Any:
        """The v0 answer to a version that is not served; it carries all ranges, so that any client can go on."""
        return self.response(0, UNSUPPORTED_VERSION)

    def response(self, version: int, error_code: int) -> Any:
        """The response entity of a version; one is made for each and kept."""
        found = self._answers.get((version, error_code))
        if found is None:
            found = self._answers[version, error_code] = self._build(version, error_code)
        return found

    def _build(self, version: int, error_code: int) -> Any:
        make = schema.response(API_VERSIONS, version).make
        keys = [
            make(
                "ApiVersion",
                api_key=api.api_key,
                min_version=api.min_version if api.advertised_min is None else api.advertised_min,
                max_version=api.max_version,
            )
            for api in self._apis
        ]
        features = {}
        if version >= 3:
            name, level = "metadata.version", METADATA_VERSION_LEVEL
            features = {
                "supported_features": [make("SupportedFeatureKey", name=name, min_version=1, max_version=level)],
                "finalized_features": [
                    make("FinalizedFeatureKey", name=name, max_version_level=level, min_version_level=level)
                ],
                "finalized_features_epoch": 0,
            }
        return make("ApiVersionsResponse", error_code=error_code, throttle_time=0, api_keys=keys, **features)
