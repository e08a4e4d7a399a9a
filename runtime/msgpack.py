"""The exceptions of msgspec for bytes that are not msgpack of the wanted type.

Besides `msgspec.DecodeError`, invalid UTF-8 in a string raises `UnicodeDecodeError`, and deep nesting `RecursionError`
(both found by `make fuzz`). Code that decodes bytes of a peer or a file catches `DECODE_ERRORS`.
"""

from __future__ import annotations

import msgspec

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
