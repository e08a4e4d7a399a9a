"""What consumer groups' states, lags and resets are, for the console and for `tidelog group`. Sans-I/O.

Entry: `group_state`, `lag_row`, `reset_offset`.
"""

from __future__ import annotations

from typing import Any, Final, Literal

Place = tuple[str, int]
"""Topic and partition."""
ResetTo = Literal["earliest", "latest", "offset", "time", "shift"]

STATES: Final = ("stable", "preparing-rebalance", "completing-rebalance", "empty", "dead")
INACTIVE: Final = ("empty", "dead")
"""States without members, who would overwrite what a reset commits."""
NAMELESS: Final = "the client library does not ask for the offsets of the group whose id is empty"
"""Such a group is there once a consumer without a group id, of an old client, has committed offsets."""
_STATE_NAMES: Final = {
    "PREPARING_REBALANCING": "preparing-rebalance",
    "COMPLETING_REBALANCING": "completing-rebalance",
}
"""Of confluent-kafka's names; the others are in lower case."""


def group_state(state: Any) -> str:
    """Return the name of confluent-kafka's `ConsumerGroupState`; None is `unknown`."""
    name = state.name if state is not None else "UNKNOWN"
    return _STATE_NAMES.get(name, name.lower())


def lag_row(place: Place, committed: int | None, high_watermark: int | None, member_id: str | None) -> dict[str, Any]:
    """Return a group's row of one partition; without a committed offset, or a leader, it has no lag."""
    return {
        "topic": place[0],
        "partition": place[1],
        "committed": committed,
        "high_watermark": high_watermark,
        "lag": max(0, high_watermark - committed) if high_watermark is not None and committed is not None else None,
        "member_id": member_id,
    }


def reset_offset(to: ResetTo, value: int, start: int, end: int, before: int | None, at_time: int | None) -> int:
    """Return the offset that a reset commits, within `[start, end]`.

    `value`: the offset, or by how much to shift; `before`: what is committed, which a shift needs; `at_time`: the first
    offset from the time on, None if there is none.
    """
    if to == "earliest":
        wanted = start
    elif to == "latest":
        wanted = end
    elif to == "offset":
        wanted = value
    elif to == "time":
        wanted = end if at_time is None else at_time
    else:
        assert before is not None, "there is nothing to shift"
        wanted = before + value
    return min(max(wanted, start), end)
