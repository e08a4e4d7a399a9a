"""How many examples a property test runs: its own number in the whole suite, a part of it in `make unit`.

`tests/conftest.py` registers two profiles of Hypothesis: `tidelog`, and `unit` with a tenth of its examples. The gate
runs all of them (`make coverage`, `.ci/run`).
"""

from __future__ import annotations

import hypothesis

WHOLE = 100
"""`max_examples` of the profile under which each test runs all of its examples."""
UNIT = 10
"""`max_examples` of the profile of `make unit`."""


def examples(count: int) -> int:
    """`count` examples in the whole suite; under another profile in proportion, at least five."""
    return max(min(count, 5), count * int(hypothesis.settings().max_examples) // WHOLE)
