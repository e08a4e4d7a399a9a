"""What a rebuild takes of streams that were uploaded, compacted, trimmed and deleted, from any state of their lives."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.controller.rebuild.held import StreamPiece
from tidelog.controller.rebuild.plan import StreamChain, find_chain

Piece = tuple[int, int, int]
"""First offset, end offset, object id."""
UPLOAD_RECORDS = 10


class StreamLife:
    """One stream: its live objects, those in the bucket, and the states that were written meanwhile."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next_id = 1
        self._destroyed: list[int] = []
        self.start = self.end = 0
        self.live: list[Piece] = []
        self.bucket: dict[int, Piece] = {}
        self.states: list[tuple[int, int, tuple[Piece, ...]]] = []
        self.write_state()

    def _put(self, start: int, end: int) -> Piece:
        piece = (start, end, self._next_id)
        self._next_id += 1
        self.bucket[piece[2]] = piece
        return piece

    def write_state(self) -> None:
        """Write the metadata as they are."""
        self.states.append((self.start, self.end, tuple(self.live)))

    def upload(self) -> None:
        """Commit another object at the end."""
        self.live.append(self._put(self.end, self.end + self._rng.randint(1, UPLOAD_RECORDS)))
        self.end = self.live[-1][1]

    def compact(self, *, is_committed: bool) -> None:
        """Merge neighbours, from the log start on; one that is given up leaves its object in the bucket."""
        if len(self.live) < 2:
            return
        first = self._rng.randrange(len(self.live) - 1)
        last = self._rng.randrange(first + 1, len(self.live))
        inputs = self.live[first : last + 1]
        output = self._put(max(inputs[0][0], self.start), inputs[-1][1])
        if is_committed:
            self.live[first : last + 1] = [output]
            self._destroyed += [piece[2] for piece in inputs]

    def trim(self) -> None:
        """Move the log start."""
        self.start = self._rng.randint(self.start, self.end)
        self._destroyed += [piece[2] for piece in self.live if piece[1] <= self.start]
        self.live = [piece for piece in self.live if piece[1] > self.start]

    def delete(self) -> None:
        """Delete what no metadata name any more."""
        for each in self._destroyed:
            del self.bucket[each]
        self._destroyed.clear()

    def sweep(self) -> None:
        """Delete what given-up compactions left."""
        named = {piece[2] for piece in self.live} | set(self._destroyed)
        self.bucket = {each: piece for each, piece in self.bucket.items() if each in named}

    def live_on(self, steps: int) -> None:
        """Do some of this, in any order."""
        choices = [
            *[self.upload] * 4,
            *[lambda: self.compact(is_committed=True)] * 2,
            lambda: self.compact(is_committed=False),
            self.trim,
            self.delete,
            self.write_state,
        ]
        if self._rng.random() < 0.3:
            choices.append(self.sweep)
        for _ in range(steps):
            self._rng.choice(choices)()
        self.write_state()

    def rebuilt(self, state: tuple[int, int, tuple[Piece, ...]]) -> StreamChain:
        """What is taken with this state and the bucket as it is."""
        start, end, named = state
        ids = {piece[2] for piece in named}
        known = [StreamPiece(*piece, True) for piece in named]
        new = [StreamPiece(*piece, False) for each, piece in self.bucket.items() if each not in ids]
        return find_chain(start, end, known, ids - self.bucket.keys(), new)


@given(st.integers(0, 1 << 32), st.integers(5, 40))
def test_a_stream_keeps_all_that_it_has_in_the_bucket(seed: int, steps: int) -> None:
    """But where the state's end was trimmed and a gap follows: nothing tells that from an upload that was lost."""
    life = StreamLife(random.Random(seed))
    life.live_on(steps)
    for state in life.states:
        chain = life.rebuilt(state)
        if life.start <= chain.end:
            assert chain.end >= life.end
            assert chain.start <= life.start or not life.live


@pytest.mark.parametrize("seed", [20, 49, 63, 92, 93, 94, 119, 148, 173, 241, 275, 287])
def test_what_given_up_compactions_left_is_told_from_what_is_live(seed: int) -> None:
    """In each of these lives a live object begins inside of one that was left."""
    life = StreamLife(random.Random(seed))
    life.live_on(40)
    chains = [life.rebuilt(state) for state in life.states]
    assert all(chain.end >= life.end for chain in chains if life.start <= chain.end)
