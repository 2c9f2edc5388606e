"""In which order the upstreams of a route are tried."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.balance import Candidate, order

UP, DOWN, UNKNOWN = True, False, None


def candidates(*facts: tuple[bool | None, int]) -> list[Candidate]:
    return [Candidate("abcdef"[i], is_up, inflight) for i, (is_up, inflight) in enumerate(facts)]


@pytest.mark.parametrize(
    "facts, turn, expected",
    [
        ([(UP, 0)], 0, "a"),
        ([(DOWN, 9)], 5, "a"),
        ([(UP, 0), (UP, 0)], 0, "ab"),
        ([(UP, 0), (UP, 0)], 1, "ba"),
        ([(UP, 0), (UP, 0), (UP, 0)], 7, "bca"),
        ([(UP, 3), (UP, 1), (UP, 2)], 0, "bca"),
        ([(UP, 3), (UP, 1), (UP, 2)], 1, "bca"),
        ([(DOWN, 0), (UP, 50)], 0, "ba"),
        ([(DOWN, 0), (UP, 50)], 1, "ba"),
        ([(UNKNOWN, 0), (UP, 1)], 1, "ab"),
        ([(DOWN, 2), (DOWN, 1)], 0, "ba"),
    ],
)
def test_usable_first_then_fewest_in_flight_then_in_turn(
    facts: list[tuple[bool | None, int]], turn: int, expected: str
) -> None:
    assert "".join(order(candidates(*facts), turn)) == expected


FACTS = st.lists(st.tuples(st.sampled_from([UP, DOWN, UNKNOWN]), st.integers(0, 5)), min_size=1, max_size=6)


@given(FACTS, st.integers(0, 10**9))
def test_nobody_is_left_out(facts: list[tuple[bool | None, int]], turn: int) -> None:
    """When all are down, trying beats refusing."""
    names = order(candidates(*facts), turn)
    assert sorted(names) == sorted("abcdef"[: len(facts)])


@given(st.integers(1, 6), st.integers(0, 1000))
def test_ties_are_shared_out_evenly(count: int, start: int) -> None:
    firsts = Counter(order(candidates(*[(UP, 0)] * count), start + i)[0] for i in range(count * 4))
    assert set(firsts.values()) == {4}
