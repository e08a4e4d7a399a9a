"""What a change of configs is based on.

A broker computes many changes from the configs that it knows: it leaves out what is so already, appends to a list, or
replaces everything, and it checks the result as a whole. All of that is wrong if the configs are others by the time the
change is applied. So the command has the digest of those that it was computed from, and is refused with
`ConfigsChanged` if they are not these any more; the broker reads them again.

Entry: `digest`.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import msgspec

ANY = b""
"""The change is right whatever the configs are."""
DIGEST_BYTES = 16


def digest(configs: Mapping[str, str]) -> bytes:
    """Return the digest of a set of configs, `DIGEST_BYTES` long, whatever their order."""
    return blake2b(msgspec.msgpack.encode(sorted(configs.items())), digest_size=DIGEST_BYTES).digest()
