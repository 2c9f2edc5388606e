"""Quantiles of the last minutes are within one per cent, merge, and forget."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.timing.history import History
from gateway.timing.sketch import GENERATION_NS, Sketch, bucket, middle

VALUES = st.lists(st.floats(0.2, 3_000_000), min_size=1, max_size=80)


def sketch_of(values: list[float], now: int = 1) -> Sketch:
    made = Sketch()
    for value in values:
        made.add(value, now)
    return made


@given(VALUES, st.sampled_from([0.1, 0.5, 0.9, 0.99]))
def test_a_quantile_is_within_about_one_per_cent(values: list[float], share: float) -> None:
    true = sorted(values)[max(1, ceil(share * len(values))) - 1]
    assert sketch_of(values).quantile(share) == pytest.approx(true, rel=0.0102)


@given(VALUES, VALUES)
def test_merged_sketches_answer_as_one_would(left: list[float], right: list[float]) -> None:
    merged = sketch_of(left)
    merged.merge(sketch_of(right).counts(), 1)
    assert merged.counts() == sketch_of(left + right).counts()
    assert merged.quantiles((0.5, 0.9)) == sketch_of(left + right).quantiles((0.5, 0.9))
    assert "values" in repr(merged)


@pytest.mark.parametrize("age, left", [(0, 1), (GENERATION_NS, 1), (2 * GENERATION_NS - 1, 1), (2 * GENERATION_NS, 0)])
def test_values_are_forgotten_after_two_generations(age: int, left: int) -> None:
    assert sketch_of([5.0], 7).count(7 + age) == left


def test_values_out_of_range_are_clamped() -> None:
    assert bucket(0) == bucket(0.1)
    assert bucket(1e12) == bucket(3_600_000)
    assert middle(bucket(100)) == pytest.approx(100, rel=0.0102)


def test_too_few_beyond_the_elapsed_time_promise_as_much_again() -> None:
    few = sketch_of([100.0] * 5)
    assert few.remaining(0.5, 40.0) == pytest.approx(40.0)
    assert sketch_of([100.0] * 20).remaining(0.5, 40.0) == pytest.approx(60, abs=1.1)
    assert few.quantile(0.5, fewest=6) is None


def test_a_pair_is_told_again_until_enough_came_or_five_seconds_passed() -> None:
    history = History()
    assert history.first_token_pair_s(10, 0) is None
    for _ in range(5):
        history.add_first_token(10, 1.0, 1)
    first = history.first_token_pair_s(10, 1)
    assert first is not None
    assert first == pytest.approx((1.0, 1.0), rel=0.011)
    for _ in range(7):
        history.add_first_token(10, 4.0, 2)
    assert history.first_token_pair_s(10, 2) == first
    later = history.first_token_pair_s(10, 6_000_000_000)
    assert later is not None
    assert later[1] == pytest.approx(4.0, rel=0.011)
    assert history.first_token_pair_s(5_000, 2) is None
