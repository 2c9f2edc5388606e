"""Who waits, who goes first, who is refused at the door."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.queueing import WaitQueue, refuse_at_door


def filled(limit: int, count: int) -> WaitQueue[int]:
    queue: WaitQueue[int] = WaitQueue(limit)
    for number in range(count):
        assert queue.offer(number)
    return queue


def drained(queue: WaitQueue[int]) -> list[int]:
    taken = []
    while (item := queue.take()) is not None:
        taken.append(item)
    return taken


@pytest.mark.parametrize(
    "limit, count, taken",
    [
        (10, 0, []),
        (10, 4, [0, 1, 2, 3]),
        (10, 5, [4, 0, 1, 2, 3]),
        (10, 7, [6, 5, 4, 0, 1, 2, 3]),
        (4, 4, [3, 2, 1, 0]),
        (1, 1, [0]),
    ],
)
def test_first_come_first_served_until_half_full_then_newest_first(limit: int, count: int, taken: list[int]) -> None:
    """fault-catalogue 3.4."""
    assert drained(filled(limit, count)) == taken


def test_a_full_queue_takes_nobody() -> None:
    queue = filled(2, 2)
    assert not queue.offer(2)
    assert repr(queue) == "<WaitQueue 2 of 2>"
    assert not WaitQueue[int](0).offer(0)


def test_whoever_leaves_makes_room_and_is_not_served() -> None:
    """E18."""
    queue = filled(2, 2)
    assert queue.remove(0)
    assert not queue.remove(0)
    assert queue.offer(2)
    assert drained(queue) == [2, 1]


@given(st.integers(0, 6), st.lists(st.sampled_from(["offer", "take", "remove"])))
def test_everyone_who_was_let_in_comes_out_once_and_the_bound_holds(limit: int, steps: list[str]) -> None:
    """Against a list as the model."""
    queue: WaitQueue[int] = WaitQueue(limit)
    waiting: list[int] = []
    for number, step in enumerate(steps):
        if step == "offer":
            is_in = queue.offer(number)
            assert is_in == (len(waiting) < limit)
            waiting += [number] * is_in
        elif step == "take":
            expected = waiting.pop(-1 if 2 * len(waiting) >= limit else 0) if waiting else None
            assert queue.take() == expected
        else:
            leaver = waiting[number % len(waiting)] if waiting else number
            assert queue.remove(leaver) == bool(waiting)
            waiting = [item for item in waiting if item != leaver]
        assert len(queue) == len(waiting) <= limit


@pytest.mark.parametrize(
    "deadline_left_s, estimated_wait_s, is_refused",
    [
        (None, None, False),
        (None, 1e9, False),
        (1.0, None, False),
        (0.0, None, True),
        (-1.0, 0.0, True),
        (1.0, 0.9, False),
        (1.0, 1.0, False),
        (1.0, 1.1, True),
    ],
)
def test_a_request_whose_turn_would_come_too_late_is_refused_at_the_door(
    deadline_left_s: float | None, estimated_wait_s: float | None, is_refused: bool
) -> None:
    """fault-catalogue 3.4; without a deadline or an estimate there is nothing to judge by."""
    assert refuse_at_door(deadline_left_s, estimated_wait_s) is is_refused
