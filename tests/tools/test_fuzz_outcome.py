"""What counts as a failure of `make fuzz`."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import Outcome


@pytest.mark.parametrize(("code", "inputs", "fails"), [(0, 1, False), (77, 1, True), (0, 0, True)])
def test_a_target_fails_that_finds_something_or_tries_nothing(code: int, inputs: int, fails: bool) -> None:
    assert Outcome("wire", code, inputs, 0, [], "").has_failed is fails
