"""What is due for a waiting request, as tables of facts, instants and the one right action."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Budget, Timeouts
from gateway.policy.deadline import MS, WRITE_STALL_NS, Action, Progress, due

START = 1_000_000 * MS
LIMITS = Timeouts(first_token_ms=1000, idle_ms=600, total_ms=5000)
SILENT = Budget(on_exceed="wait")
BUDGETED = Budget(ttft_ms=200)


def at(ms: float) -> int:
    return START + int(ms * MS)


def progress(*, stream: bool = True, **facts: Any) -> Progress:
    """A request received and started at `START`; other facts in ms after it."""
    instants: dict[str, Any] = {
        name: at(value) if not isinstance(value, bool) else value for name, value in facts.items()
    }
    return Progress(received=START, started=START, is_stream=stream, **instants)


@pytest.mark.parametrize(
    "facts, now_ms, action, next_ms",
    [
        # nothing sent yet: the next look is when the first token could be late, were it sent at once
        ({}, 0, "none", 600),
        ({}, 400, "none", 1000),
        ({}, 1000, "none", 1600),
        # sent, no token
        ({"sent": 10}, 20, "none", 620),
        ({"sent": 10}, 500, "none", 1010),
        ({"sent": 10}, 1009, "none", 1010),
        ({"sent": 10}, 1010, "first_token", 1010),
        # C3, C003: a comment does not move the first-token limit
        ({"sent": 10, "last_event": 900}, 1010, "first_token", 1010),
        # tokens: silence counts from the last event
        ({"sent": 10, "token": 100}, 200, "none", 700),
        ({"sent": 10, "token": 100}, 700, "idle", 700),
        ({"sent": 10, "token": 100, "last_event": 650}, 700, "none", 1250),
        ({"sent": 10, "token": 100, "last_event": 650}, 1250, "idle", 1250),
        # the client takes nothing: not the upstream's silence (E11)
        ({"sent": 10, "token": 100, "is_paused": True}, 2000, "none", 2600),
        ({"sent": 10, "is_paused": True}, 2000, "none", 2600),
        # the whole request
        ({"sent": 10, "token": 100, "last_event": 4990}, 4999, "none", 5000),
        ({"sent": 10, "token": 100, "last_event": 4990}, 5000, "total", 5000),
        ({}, 5000, "total", 5000),
    ],
)
def test_a_stream_without_budget(facts: dict[str, Any], now_ms: int, action: Action, next_ms: int) -> None:
    assert due(progress(**facts), LIMITS, SILENT, at(now_ms)) == (action, at(next_ms))


@pytest.mark.parametrize(
    "facts, now_ms, action, next_ms",
    [
        ({}, 0, "none", 5000),
        ({"sent": 10}, 1010, "none", 5000),
        ({"sent": 10}, 4999, "none", 5000),
        ({"sent": 10}, 5000, "total", 5000),
    ],
)
def test_a_plain_answer_has_no_limit_but_the_total(
    facts: dict[str, Any], now_ms: int, action: Action, next_ms: int
) -> None:
    """C027: a long answer is not a stall."""
    assert due(progress(stream=False, **facts), LIMITS, BUDGETED, at(now_ms)) == (action, at(next_ms))


@pytest.mark.parametrize(
    "facts, now_ms, action, next_ms",
    [
        ({"sent": 10}, 199, "none", 200),
        ({"sent": 10}, 200, "budget", 200),
        # a token that came in time: no budget to exceed
        ({"sent": 10, "token": 150, "last_event": 150}, 210, "none", 750),
        ({"sent": 10, "budget_passed": True}, 300, "none", 900),
        # a hedge is due once, before the first token only
        ({"sent": 10, "hedge_at": 150}, 100, "none", 150),
        ({"sent": 10, "hedge_at": 150}, 150, "hedge", 150),
        ({"sent": 10, "hedge_at": 150, "token": 120, "last_event": 120}, 150, "none", 720),
        # what the caller gave the request, and what it gives us to say anything at all
        ({"sent": 10, "deadline": 180}, 100, "none", 180),
        ({"sent": 10, "deadline": 180}, 180, "deadline", 180),
        ({"sent": 10, "deadline": 180, "token": 100, "last_event": 170}, 180, "deadline", 180),
        ({"sent": 10, "first_byte_deadline": 150}, 150, "deadline", 150),
        ({"sent": 10, "first_byte_deadline": 150, "last_write": 140}, 150, "none", 200),
        ({"sent": 10, "first_byte_deadline": 150, "deadline": 120}, 120, "deadline", 120),
    ],
)
def test_a_stream_with_a_budget_a_hedge_or_a_caller_in_a_hurry(
    facts: dict[str, Any], now_ms: int, action: Action, next_ms: int
) -> None:
    assert due(progress(**facts), LIMITS, BUDGETED, at(now_ms)) == (action, at(next_ms))


def test_the_budget_of_a_plain_answer_counts_where_the_caller_comes_back_for_it() -> None:
    budget = Budget(ttft_ms=200)
    assert due(progress(stream=False, sent=1), LIMITS, budget, at(300))[0] == "none"
    waits = progress(stream=False, sent=1, is_opted_in=True)
    assert due(waits, LIMITS, budget, at(199)) == ("none", at(200))
    assert due(waits, LIMITS, budget, at(200)) == ("budget", at(200))


def test_a_request_that_does_not_leave_us_is_given_up() -> None:
    """A7: the upstream accepted the connection and does not read."""
    limits = Timeouts(first_token_ms=120_000, idle_ms=60_000, total_ms=1_800_000)
    stall = WRITE_STALL_NS // MS
    assert due(progress(stream=False), limits, SILENT, at(stall - 1)) == ("none", at(stall))
    assert due(progress(stream=False), limits, SILENT, at(stall)) == ("write_stall", at(stall))
    assert due(progress(stream=False, sent=5), limits, SILENT, at(stall))[0] == "none"


FACTS = st.fixed_dictionaries(
    {},
    optional={
        "sent": st.integers(1, 6000),
        "token": st.integers(1, 6000),
        "last_event": st.integers(1, 6000),
        "last_write": st.integers(1, 6000),
        "is_paused": st.booleans(),
        "can_beat": st.booleans(),
        "budget_passed": st.booleans(),
    },
)


@given(
    FACTS,
    st.integers(0, 40_000),
    st.booleans(),
    st.sampled_from([SILENT, BUDGETED, Budget(ttft_ms=1, on_exceed="wait")]),
)
def test_the_next_look_always_lies_ahead_when_nothing_is_due(
    facts: dict[str, Any], now_ms: int, stream: bool, budget: Budget
) -> None:
    """Otherwise the timer would spin."""
    action, when = due(progress(stream=stream, **facts), LIMITS, budget, at(now_ms))
    assert when > at(now_ms) if action == "none" else when <= at(now_ms)


@given(st.lists(st.integers(1, 550), max_size=20), st.integers(1, 900))
def test_a_stall_is_found_at_its_limit_whenever_it_begins(gaps: list[int], first: int) -> None:
    """The timer looks only when it was told to; tokens that come meanwhile do not wake it (relay.py)."""
    tokens = [first]
    for gap in gaps:
        tokens.append(tokens[-1] + gap)
    limits = Timeouts(first_token_ms=1000, idle_ms=600, total_ms=100_000)
    facts = progress(sent=1)
    now = START
    while True:
        seen = [t for t in tokens if at(t) <= now]
        facts.token = at(seen[0]) if seen else 0
        facts.last_event = at(seen[-1]) if seen else 0
        action, when = due(facts, limits, SILENT, now)
        if action != "none":
            break
        now = when
    assert (action, now) == ("idle", at(tokens[-1] + 600))
