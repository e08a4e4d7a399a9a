"""The live slices of a stream against a plain list of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidelog.controller.machine.slices import added, find, object_ids, removed, trimmed, unpack

OFFSETS = st.integers(0, 60)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 9)),
        st.tuples(st.just("take out"), st.integers(0, 20)),
        st.tuples(st.just("merge"), st.integers(0, 20)),
        st.tuples(st.just("trim"), OFFSETS),
    ),
    max_size=40,
)


@given(steps=STEPS, questions=st.lists(st.tuples(OFFSETS, OFFSETS, st.integers(1, 5)), max_size=5))
def test_slices_are_found_trimmed_and_replaced_as_in_a_plain_list(
    steps: list[tuple[str, int]], questions: list[tuple[int, int, int]]
) -> None:
    slices, model = b"", list[tuple[int, int, int]]()
    end = 0
    for number, (what, value) in enumerate(steps):
        if what == "append":
            slices = added(slices, end, end + value, number)
            model.append((end, end + value, number))
            end += value
        elif what == "take out" and value < len(model):
            start, _, object_id = model.pop(value)
            assert removed(slices, start, object_id + 1) == slices
            slices = removed(slices, start, object_id)
            assert removed(slices, start, object_id) == slices
        elif what == "merge" and value + 1 < len(model):
            first, second = model[value : value + 2]
            slices = removed(removed(slices, first[0], first[2]), second[0], second[2])
            model[value : value + 2] = [(first[0], second[1], number)]
            slices = added(slices, *model[value])
        elif what == "trim":
            slices, gone = trimmed(slices, value)
            assert gone == [row[2] for row in model if row[1] <= value]
            model = [row for row in model if row[1] > value]
        assert unpack(slices) == model
        assert object_ids(slices) == [row[2] for row in model]
    for start, stop, limit in questions:
        wanted = [row for row in model if row[1] > start and row[0] < stop][:limit]
        assert find(slices, start, stop, limit) == wanted
