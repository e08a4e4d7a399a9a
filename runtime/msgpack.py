"""What msgspec raises for bytes that are no msgpack of the wanted type.

`msgspec.DecodeError` is not all: invalid UTF-8 in a string is a `UnicodeDecodeError`, and deep nesting a
`RecursionError` (both found by `make fuzz`). Whoever decodes bytes of a peer or a file catches `DECODE_ERRORS`.
"""

from __future__ import annotations

import msgspec

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
