"""The circuit breaker: one test per row of its table, and a long random walk beside a naive model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from gateway.config import Breaker as Rules
from gateway.policy.breaker import STATES, TRANSITIONS, Breaker, Event, Permit, State

MS = 1_000_000
S = 1_000_000_000
START = 5_000 * S + 123
WAIT = 5 * S  # of the first opening: half of `wait_open_ms` below, as the jitter is 0
HALF_OPEN = 240 * S


def rules(**changes: Any) -> Rules:
    return Rules(**{"wait_open_ms": 10_000, "max_wait_open_ms": 120_000, **changes})


class Log(list[tuple[State, State]]):
    """The transitions that were told."""

    def __call__(self, old: State, new: State) -> None:
        self.append((old, new))


def breaker(
    *, jitter: Callable[[], float] = lambda: 0.0, log: Callable[[State, State], None] | None = None, **changes: Any
) -> Breaker:
    return Breaker(rules(**changes), half_open_wait_ms=HALF_OPEN // MS, jitter=jitter, on_transition=log)


def state_of(it: Breaker) -> State:
    """For asserts: a type checker would take a property compared twice for a constant."""
    return it.state


def admitted(it: Breaker, now: int) -> Permit:
    permit = it.acquire(now)
    assert permit is not None
    return permit


def call(it: Breaker, now: int, *, error: bool = False, slow: bool = False, last: bool = False) -> None:
    it.record(admitted(it, now), is_error=error, is_slow=slow, now=now, is_last=last)


def calls(it: Breaker, count: int, now: int, **outcome: bool) -> None:
    for _ in range(count):
        call(it, now, **outcome)


OPERATOR: Mapping[Event, Callable[[Breaker, int], None]] = {
    "force_open": Breaker.force_open,
    "disable": Breaker.disable,
    "metrics_only": Breaker.metrics_only,
    "reset": Breaker.reset,
}


def in_state(state: State, log: Log | None = None) -> tuple[Breaker, int]:
    """A breaker that got into a state the usual way, and the instant when it did."""
    it = breaker(log=log)
    now = START
    if state in ("open", "half_open"):
        calls(it, 10, now, error=True)
    if state == "half_open":
        now += WAIT
        it.release(admitted(it, now), now)
    for event, act in OPERATOR.items():
        if TRANSITIONS[state, event] == state and state != "closed":
            act(it, now)
    assert state_of(it) == state
    return it, now


def provoke(it: Breaker, event: Event, now: int) -> None:
    """Do what makes an event, whatever the state makes of it."""
    if event in OPERATOR:
        OPERATOR[event](it, now)
    elif event == "trip":
        it.trip(now, "silence")
    elif event == "asked":
        it.acquire(now + WAIT)
    elif event == "waited":
        it.snapshot(now + HALF_OPEN)
    else:
        for _ in range(10):
            permit = it.acquire(now)
            if permit is not None:
                it.record(permit, is_error=event == "exceeded", is_slow=False, now=now)


@pytest.mark.parametrize("state, event", list(TRANSITIONS), ids=lambda value: value)
def test_each_row_of_the_table_is_what_happens(state: State, event: Event) -> None:
    log = Log()
    it, now = in_state(state, log)
    told = len(log)
    provoke(it, event, now)
    after = TRANSITIONS[state, event]
    assert state_of(it) == after
    assert log[told:] == ([(state, after)] if after != state else [])


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", ["exceeded", "below", "asked", "waited", "trip"])
def test_what_has_no_row_changes_nothing(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        return
    it, now = in_state(state)
    provoke(it, event, now)
    assert state_of(it) == state


@pytest.mark.parametrize("mode, state", [("on", "closed"), ("metrics_only", "metrics_only"), ("off", "disabled")])
def test_the_mode_of_the_settings_is_the_first_state(mode: str, state: State) -> None:
    log = Log()
    assert breaker(mode=mode, log=log).state == state
    assert log == []


@pytest.mark.parametrize(
    "state, is_admitted, is_counted",
    [
        ("closed", True, 1),
        ("open", False, 10),
        ("half_open", True, 1),
        ("disabled", True, 0),
        ("forced_open", False, 0),
        ("metrics_only", True, 1),
    ],
)
def test_what_each_state_admits_and_counts(state: State, is_admitted: bool, is_counted: int) -> None:
    it, now = in_state(state)
    assert it.is_open(now) is not is_admitted
    permit = it.acquire(now)
    assert (permit is not None) is is_admitted
    if permit is not None:
        it.record(permit, is_error=True, is_slow=False, now=now)
    shown = it.snapshot(now)
    assert shown["calls"] == is_counted
    assert shown["not_permitted"] == (0 if is_admitted else 1)


@pytest.mark.parametrize(
    "ok, errors, slow, slow_errors, state",
    [
        (6, 4, 0, 0, "closed"),
        (5, 5, 0, 0, "open"),  # 50 %: at the threshold is enough
        (3, 0, 7, 0, "closed"),
        (2, 0, 8, 0, "open"),
        (5, 0, 0, 5, "open"),  # a slow error is an error…
        (1, 0, 5, 4, "open"),  # …and slow
        (0, 4, 0, 5, "closed"),  # below the minimum nothing opens
    ],
)
def test_a_rate_opens_at_its_threshold_and_not_before(
    ok: int, errors: int, slow: int, slow_errors: int, state: State
) -> None:
    it = breaker()
    calls(it, ok, START)
    calls(it, slow, START, slow=True)
    calls(it, slow_errors, START, slow=True, error=True)
    calls(it, errors, START, error=True)
    assert state_of(it) == state


def test_a_good_call_opens_too_when_it_completes_the_minimum() -> None:
    it = breaker()
    calls(it, 9, START, error=True)
    assert state_of(it) == "closed"
    call(it, START)
    assert state_of(it) == "open"


def test_a_threshold_with_decimals_is_reached_exactly() -> None:
    it = breaker(failure_rate_threshold=33.3, minimum_calls=1000)
    calls(it, 667, START)
    calls(it, 332, START, error=True)
    assert state_of(it) == "closed"
    call(it, START, error=True)
    assert state_of(it) == "open"


def test_it_opens_once() -> None:
    log = Log()
    it = breaker(log=log)
    late = [admitted(it, START) for _ in range(20)]
    for permit in late:
        it.record(permit, is_error=True, is_slow=False, now=START)
    assert log == [("closed", "open")]


def test_results_from_before_the_opening_are_counted_and_cause_nothing() -> None:
    it = breaker()
    good, bad, later = (admitted(it, START) for _ in range(3))
    calls(it, 10, START, error=True)
    it.record(good, is_error=False, is_slow=False, now=START + S)
    it.record(bad, is_error=True, is_slow=True, now=START + S)
    assert state_of(it) == "open"
    assert it.snapshot(START + S)["calls"] == 12
    probe = admitted(it, START + WAIT)
    it.record(later, is_error=True, is_slow=False, now=START + WAIT)
    assert it.snapshot(START + WAIT)["calls"] == 0, "a call from before the opening is no probe"
    it.record(probe, is_error=False, is_slow=False, now=START + WAIT)
    assert state_of(it) == "half_open"


def test_the_window_forgets_in_buckets() -> None:
    it = breaker()
    start = 6_000 * S  # the beginning of a bucket of 3 s
    calls(it, 4, start, error=True)
    calls(it, 3, start + 3 * S, slow=True, error=True)
    assert [it.snapshot(start + t * S)["calls"] for t in (29, 30, 32, 33)] == [7, 3, 3, 0]
    calls(it, 4, start + 33 * S, error=True)
    assert it.snapshot(start + 33 * S)["errors"] == 4


def test_an_idle_gap_longer_than_the_window_forgets_everything() -> None:
    it = breaker()
    calls(it, 9, START, error=True, slow=True)
    calls(it, 9, START + 3600 * S, error=True)
    assert state_of(it) == "closed"
    shown = it.snapshot(START + 3600 * S)
    assert (shown["calls"], shown["errors"], shown["slow"], shown["slow_errors"]) == (9, 9, 0, 0)


def test_a_window_shorter_than_its_buckets_still_counts() -> None:
    it = breaker(window_s=1e-9, minimum_calls=2)
    calls(it, 2, START, error=True)
    assert state_of(it) == "open"


def test_half_open_hands_out_exactly_its_permits() -> None:
    """C112: only so many probes at once."""
    it, now = in_state("half_open")
    first, second = admitted(it, now), admitted(it, now)
    assert it.is_open(now)
    assert it.acquire(now) is None
    it.record(first, is_error=False, is_slow=False, now=now)
    assert it.acquire(now) is None, "a result does not give its permit back"
    it.record(second, is_error=False, is_slow=False, now=now)
    assert state_of(it) == "closed"


@pytest.mark.parametrize(
    "permits, minimum, needed", [(2, 10, 2), (5, 3, 3), (1, 1, 1)], ids=["fewer permits", "fewer calls", "one"]
)
def test_the_verdict_falls_when_enough_results_are_in(permits: int, minimum: int, needed: int) -> None:
    it = breaker(half_open_calls=permits, minimum_calls=minimum)
    calls(it, minimum, START, error=True)
    now = START + WAIT
    for _ in range(needed):
        assert state_of(it) != "closed"
        call(it, now)
    assert state_of(it) == "closed"
    assert it.snapshot(now)["calls"] == 0, "closed starts with an empty window"


def test_probes_past_the_verdict_say_nothing() -> None:
    it = breaker(half_open_calls=3, minimum_calls=2)
    calls(it, 2, START, error=True)
    now = START + WAIT
    probes = [admitted(it, now) for _ in range(3)]
    for probe in probes:
        it.record(probe, is_error=False, is_slow=False, now=now)
    assert it.snapshot(now)["calls"] == 0


def test_one_bad_probe_of_two_opens_again() -> None:
    it, now = in_state("half_open")
    call(it, now)
    call(it, now, error=True)
    assert state_of(it) == "open"
    assert it.snapshot(now)["cause"] == "failure_rate"


def test_a_permit_is_settled_once() -> None:
    it, now = in_state("half_open")
    permit = admitted(it, now)
    it.release(permit, now)
    it.release(permit, now)
    it.record(permit, is_error=True, is_slow=True, now=now)
    shown = it.snapshot(now)
    assert (shown["permits"], shown["calls"], permit.is_settled) == (2, 0, True)
    other = admitted(it, now)
    it.record(other, is_error=False, is_slow=False, now=now)
    it.release(other, now)
    shown = it.snapshot(now)
    assert (shown["permits"], shown["calls"]) == (1, 1)


@pytest.mark.parametrize("lost", range(1, 6))
def test_a_lost_probe_gives_its_permit_back(lost: int) -> None:
    """D5, C112: its client left, or it was the loser of a hedge; neither success nor failure."""
    it, now = in_state("half_open")
    for _ in range(lost):
        it.release(admitted(it, now), now)
    assert not it.is_open(now)
    calls(it, 2, now)
    assert state_of(it) == "closed"


def test_half_open_ends_within_its_longest_wait_though_every_permit_is_lost() -> None:
    """D5: the worker that held them was killed."""
    log = Log()
    it, now = in_state("half_open", log)
    lost = [admitted(it, now), admitted(it, now)]
    end = now + HALF_OPEN
    assert it.is_open(end - 1)
    assert it.acquire(end - 1) is None
    assert it.is_open(end)
    assert it.acquire(end) is None
    assert state_of(it) == "open"
    assert it.is_open(end + 2 * WAIT - 1), "the second opening in a row lasts twice as long"
    assert not it.is_open(end + 2 * WAIT)
    for permit in lost:
        it.record(permit, is_error=False, is_slow=False, now=end)
    assert state_of(it) == "open"
    calls(it, 2, end + 2 * WAIT)
    assert state_of(it) == "closed"
    assert log[2:] == [("half_open", "open"), ("open", "half_open"), ("half_open", "closed")]


@pytest.mark.parametrize("act", ["record", "release", "acquire", "snapshot"])
def test_the_end_of_half_open_counts_from_when_it_was_due(act: str) -> None:
    it, now = in_state("half_open")
    permit = admitted(it, now)
    late = now + HALF_OPEN + 2 * WAIT - 1
    assert it.is_open(late)
    assert it.remaining_s(late) == pytest.approx(1e-9)
    if act == "record":
        it.record(permit, is_error=False, is_slow=False, now=late)
    elif act == "release":
        it.release(permit, late)
    elif act == "acquire":
        assert it.acquire(late) is None
    else:
        it.snapshot(late)
    assert state_of(it) == "open"
    assert it.acquire(late + 1) is not None


def test_half_open_without_an_end_is_not_possible() -> None:
    with pytest.raises(ValueError, match="half_open_wait_ms"):
        Breaker(rules(), half_open_wait_ms=0, jitter=lambda: 0.0)


def opened_again(it: Breaker, now: int) -> int:
    """Fail the probes; the instant of the opening."""
    calls(it, 2, now, error=True)
    assert state_of(it) == "open"
    return now


@pytest.mark.parametrize("jitter, part", [(0.0, 0.5), (0.5, 0.75), (0.999, 0.9995)])
def test_the_wait_doubles_up_to_its_cap(jitter: float, part: float) -> None:
    """D2: 5, 10, 20 … 60 s."""
    it = breaker(jitter=lambda: jitter, wait_open_ms=5_000, max_wait_open_ms=60_000)
    calls(it, 10, START, error=True)
    now = START
    for nominal in (5, 10, 20, 40, 60, 60):
        assert it.remaining_s(now) == pytest.approx(nominal * part)
        now = opened_again(it, now + int(nominal * part * S) + 1)
    calls(it, 2, now + 60 * S)
    assert state_of(it) == "closed"
    calls(it, 10, now + 60 * S, error=True)
    assert it.remaining_s(now + 60 * S) == pytest.approx(5 * part), "good probes end the row"


def test_a_thousand_openings_in_a_row_keep_the_cap() -> None:
    it = breaker(minimum_calls=1, half_open_calls=1)
    now = START
    for _ in range(1000):
        call(it, now, error=True)
        now += 60 * S
    assert it.snapshot(now)["opened_in_a_row"] == 1000
    assert not it.is_open(now)


def test_refused_calls_do_not_prolong_the_wait() -> None:
    """C112: 100 requests a second throughout, and back when the wait is over."""
    it = breaker()
    calls(it, 10, START, error=True)
    for step in range(500):
        assert it.acquire(START + step * 10 * MS) is None
    calls(it, 2, START + WAIT)
    assert state_of(it) == "closed"
    assert it.snapshot(START + WAIT)["not_permitted"] == 500


def test_a_probe_that_takes_long_is_waited_for() -> None:
    """C112: probes that need 20 s; meanwhile nothing else is admitted, and a lost one is replaced."""
    it, now = in_state("half_open")
    slow, lost = admitted(it, now), admitted(it, now)
    for step in range(2000):
        assert it.acquire(now + step * 10 * MS) is None
    it.release(lost, now + 15 * S)
    replacement = admitted(it, now + 15 * S)
    it.record(slow, is_error=False, is_slow=False, now=now + 20 * S)
    it.record(replacement, is_error=False, is_slow=False, now=now + 20 * S)
    assert state_of(it) == "closed"


def test_a_bad_client_opens_nothing() -> None:
    """C111: refusals of the caller's own making and cancellations are released; slow ones stay below their share."""
    it = breaker()
    for step in range(50 + 20 + 20 + 20):
        it.release(admitted(it, START), START + step)
    calls(it, 20, START, slow=True, last=True)
    call(it, START, last=True)
    assert state_of(it) == "closed"
    assert it.snapshot(START)["calls"] == 21


@pytest.mark.parametrize("state, count", [("closed", 50), ("half_open", 2)])
def test_the_last_upstream_is_not_lost_to_slowness_alone(state: State, count: int) -> None:
    it, now = in_state(state)
    calls(it, count, now, slow=True, last=True)
    assert state_of(it) == "closed"


def test_the_last_upstream_is_lost_to_failures() -> None:
    it = breaker()
    calls(it, 10, START, error=True, last=True)
    assert state_of(it) == "open"


def test_slowness_noted_while_it_was_the_last_opens_when_it_no_longer_is() -> None:
    it = breaker()
    calls(it, 30, START, slow=True, last=True)
    call(it, START, slow=True)
    assert state_of(it) == "open"
    assert it.snapshot(START)["cause"] == "slow_call_rate"


def test_metrics_only_tells_what_would_have_opened() -> None:
    it = breaker(mode="metrics_only")
    calls(it, 40, START, error=True)
    shown = it.snapshot(START)
    assert (shown["state"], shown["exceeded"], shown["failure_rate"]) == ("metrics_only", "failure_rate", 100.0)


def test_a_tripped_breaker_comes_back_through_probes() -> None:
    """C113: a silent upstream."""
    it = breaker()
    it.trip(START, "silence")
    assert it.snapshot(START)["cause"] == "silence"
    assert it.acquire(START + WAIT - 1) is None
    calls(it, 2, START + WAIT)
    assert state_of(it) == "closed"


def test_a_trip_after_the_end_of_half_open_does_not_prolong_what_followed_it() -> None:
    it, now = in_state("half_open")
    end = now + HALF_OPEN
    it.trip(end + S, "silence")
    assert it.remaining_s(end + S) == 2 * WAIT / S - 1
    assert it.snapshot(end + S)["cause"] == "half_open_wait"


def test_reset_empties_the_window_of_a_closed_breaker() -> None:
    it = breaker()
    old = admitted(it, START)
    calls(it, 9, START, error=True)
    it.reset(START)
    it.record(old, is_error=True, is_slow=False, now=START)
    assert it.snapshot(START)["calls"] == 0


def test_how_long_to_wait_is_told() -> None:
    it = breaker()
    assert it.remaining_s(START) == 0
    it.force_open(START)
    assert it.remaining_s(START) == 120
    it, now = in_state("half_open")
    assert it.remaining_s(now) == 0
    admitted(it, now)
    admitted(it, now)
    assert it.remaining_s(now) == 10
    assert it.remaining_s(now + HALF_OPEN - 2 * S) == 2


def test_rates_are_absent_below_the_minimum() -> None:
    it = breaker()
    calls(it, 9, START, error=True)
    shown = it.snapshot(START)
    assert (shown["failure_rate"], shown["slow_call_rate"], shown["exceeded"]) == (None, None, None)


def test_a_line_shows_the_state() -> None:
    it = breaker()
    permit = admitted(it, START)
    assert repr(permit) == "Permit(generation 1)"
    it.record(permit, is_error=True, is_slow=True, now=START)
    assert repr(permit) == "Permit(settled)"
    assert repr(it) == "Breaker(closed, 1 calls, 1 errors, 1 slow, 0 refused)"


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 40))
def test_a_wait_is_between_half_and_all_of_its_nominal_length(jitter: float, openings: int) -> None:
    it = breaker(jitter=lambda: jitter, minimum_calls=1, half_open_calls=1)
    now = START
    for _ in range(openings):
        call(it, now, error=True)
        now += 120 * S
    call(it, now, error=True)
    waited = it.remaining_s(now)
    nominal = min(10 * 2**openings, 120)
    assert nominal / 2 <= waited <= nominal


class Model:
    """The breaker as one would write it without a thought for cost: lists of everything, looked through each time."""

    def __init__(self, settings_: Rules, jitter: float) -> None:
        self.rules = settings_
        self.part = 0.5 + jitter / 2
        self.state: State = "closed"
        self.times = 0
        self.since = 0
        self.window: list[tuple[int, bool, bool]] = []
        self.out = 0  # permits of this stay in half-open that are out or used
        self.visits = 0  # one more with each change, so that a permit's own visit is known
        self.refused = 0
        self.changes: list[tuple[State, State]] = []

    def wait(self, times: int) -> int:
        nominal: int = min(self.rules.wait_open_ms * 2 ** (times - 1), self.rules.max_wait_open_ms) * MS
        return nominal // 2 + int(nominal // 2 * (self.part * 2 - 1))

    def go(self, state: State, now: int) -> None:
        if state != self.state:
            self.changes.append((self.state, state))
        self.state, self.since, self.out = state, now, 0
        self.visits += 1
        if state == "open":
            self.times += 1
        elif state == "half_open":
            self.window = []
        else:
            self.times, self.window = 0, []

    def look(self, now: int) -> None:
        if self.state == "half_open" and now - self.since >= HALF_OPEN:
            self.go("open", self.since + HALF_OPEN)

    def would_refuse(self, now: int) -> bool:
        state, since, times = self.state, self.since, self.times
        if state == "half_open" and now - since >= HALF_OPEN:
            state, since, times = "open", since + HALF_OPEN, times + 1
        if state == "open":
            return now - since < self.wait(times)
        if state == "half_open":
            return self.out >= self.rules.half_open_calls
        return state == "forced_open"

    def acquire(self, now: int) -> int | None:
        self.look(now)
        if self.would_refuse(now):
            self.refused += 1
            return None
        if self.state == "open":
            self.go("half_open", now)
        self.out += self.state == "half_open"
        return self.visits

    def counted(self, now: int) -> list[tuple[int, bool, bool]]:
        if self.state in ("half_open", "open") and self.is_from_half_open:
            return self.window
        width = int(self.rules.window_s * S) // 10
        return [entry for entry in self.window if now // width - entry[0] // width < 10]

    @property
    def is_from_half_open(self) -> bool:
        return self.state == "half_open" or (bool(self.changes) and self.changes[-1] == ("half_open", "open"))

    def record(self, visit: int, is_error: bool, is_slow: bool, is_last: bool, now: int) -> None:
        self.look(now)
        is_current = visit == self.visits and self.state != "disabled"
        if is_current or (visit == self.visits - 1 and self.state == "open"):
            self.window.append((now, is_error, is_slow))
        if not is_current:
            return
        seen = self.counted(now)
        minimum = self.rules.minimum_calls
        if self.state == "half_open":
            minimum = min(minimum, self.rules.half_open_calls)
        if len(seen) < minimum:
            return
        is_failing = 100 * sum(e for _, e, _ in seen) / len(seen) >= self.rules.failure_rate_threshold
        is_lagging = 100 * sum(s for _, _, s in seen) / len(seen) >= self.rules.slow_call_rate_threshold
        if self.state in ("closed", "half_open") and (is_failing or (is_lagging and not is_last)):
            self.go("open", now)
        elif self.state == "half_open":
            self.go("closed", now)

    def release(self, visit: int, now: int) -> None:
        self.look(now)
        if visit == self.visits and self.state == "half_open":
            self.out -= 1

    def operate(self, state: State, now: int) -> None:
        if state != self.state or state == "closed":
            self.go(state, now)


Pair = tuple[Permit, int]


class Walk(RuleBasedStateMachine):
    """The breaker and the model, given the same."""

    held = Bundle[Pair]("held")
    settled = Bundle[Pair]("settled")
    steps = 0
    visited: set[tuple[State, State]] = set()

    @initialize(
        minimum=st.integers(1, 6),
        permits=st.integers(1, 4),
        failing=st.sampled_from([1, 33.3, 50, 100]),
        lagging=st.sampled_from([20, 80, 100]),
        jitter=st.sampled_from([0.0, 0.5, 0.75]),
    )
    def start(self, minimum: int, permits: int, failing: float, lagging: float, jitter: float) -> None:
        chosen = rules(
            minimum_calls=minimum,
            half_open_calls=permits,
            failure_rate_threshold=failing,
            slow_call_rate_threshold=lagging,
        )
        self.log = Log()
        self.real = Breaker(chosen, half_open_wait_ms=HALF_OPEN // MS, jitter=lambda: jitter, on_transition=self.log)
        self.model = Model(chosen, jitter)
        self.now = START

    @rule(target=held, count=st.integers(1, 5))
    def acquire(self, count: int) -> Any:
        pairs: list[Pair] = []
        for _ in range(count):
            real, model = self.real.acquire(self.now), self.model.acquire(self.now)
            assert (real is None) == (model is None)
            if real is not None and model is not None:
                pairs.append((real, model))
        return multiple(*pairs)

    @rule(target=settled, pair=consumes(held), error=st.booleans(), slow=st.booleans(), last=st.booleans())
    def record(self, pair: Pair, error: bool, slow: bool, last: bool) -> Pair:
        self.real.record(pair[0], is_error=error, is_slow=slow, now=self.now, is_last=last)
        self.model.record(pair[1], error, slow, last, self.now)
        return pair

    @rule(count=st.integers(1, 8), error=st.booleans(), slow=st.booleans())
    def call(self, count: int, error: bool, slow: bool) -> None:
        for _ in range(count):
            real, model = self.real.acquire(self.now), self.model.acquire(self.now)
            assert (real is None) == (model is None)
            if real is not None and model is not None:
                self.real.record(real, is_error=error, is_slow=slow, now=self.now)
                self.model.record(model, error, slow, False, self.now)

    @rule(target=settled, pair=consumes(held))
    def release(self, pair: Pair) -> Pair:
        self.real.release(pair[0], self.now)
        self.model.release(pair[1], self.now)
        return pair

    @rule(pair=settled, is_error=st.booleans())
    def settle_again(self, pair: Pair, is_error: bool) -> None:
        self.real.record(pair[0], is_error=is_error, is_slow=True, now=self.now)
        self.real.release(pair[0], self.now)
        self.model.look(self.now)

    @rule(by=st.sampled_from([1, 7 * MS, S, 3 * S, WAIT, 2 * WAIT - 1, 30 * S, 60 * S, HALF_OPEN, 3600 * S]))
    def wait(self, by: int) -> None:
        self.now += by

    @rule()
    def wait_until_it_would_admit(self) -> None:
        self.now += round(self.real.remaining_s(self.now) * 1e9)

    @rule(state=st.sampled_from(["forced_open", "disabled", "metrics_only", "closed", "closed", "closed"]))
    def operate(self, state: State) -> None:
        event = next(event for event in OPERATOR if TRANSITIONS["open", event] == state)
        OPERATOR[event](self.real, self.now)
        self.model.operate(state, self.now)

    @rule()
    def trip(self) -> None:
        self.real.trip(self.now, "silence")
        self.model.look(self.now)
        if self.model.state in ("closed", "half_open"):
            self.model.go("open", self.now)

    @rule()
    def show(self) -> None:
        shown = self.real.snapshot(self.now)
        self.model.look(self.now)
        seen = self.model.counted(self.now)
        assert shown["calls"] == len(seen)
        assert shown["errors"] == sum(error for _, error, _ in seen)
        assert shown["slow"] == sum(slow for _, _, slow in seen)
        assert shown["slow_errors"] == sum(error and slow for _, error, slow in seen)
        assert shown["not_permitted"] == self.model.refused
        assert shown["opened_in_a_row"] == self.model.times

    @invariant()
    def both_say_the_same(self) -> None:
        if not hasattr(self, "real"):
            return
        Walk.steps += 1
        assert self.real.state == self.model.state
        assert self.real.is_open(self.now) == self.model.would_refuse(self.now)
        assert (self.real.remaining_s(self.now) > 0) == self.real.is_open(self.now)
        assert self.log == self.model.changes

    def teardown(self) -> None:
        Walk.visited.update(getattr(self, "log", ()))


def test_ten_thousand_random_steps_agree_with_a_naive_model() -> None:
    Walk.steps = 0
    Walk.visited = set()
    run_state_machine_as_test(Walk, settings=settings(max_examples=150, stateful_step_count=80, deadline=None))
    assert Walk.steps >= 10_000
    usual: set[tuple[State, State]] = {
        ("closed", "open"),
        ("open", "half_open"),
        ("half_open", "open"),
        ("half_open", "closed"),
    }
    assert usual <= Walk.visited, "the walk must go everywhere"
