"""Who of a pool is left out, for how long, and how it comes back; then the breaker and the pool together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Breaker as Rules
from gateway.policy.breaker import Breaker
from gateway.policy.ejection import Ejections, first_token_limit_ns, is_silent

MS = 1_000_000
S = 1_000_000_000
START = 5_000 * S
NAMES = ["a", "b", "c", "d"]


def pool(names: list[str] = NAMES, *, jitter: float = 0.0, **changes: Any) -> Ejections:
    return Ejections({name: Rules(**changes) for name in names}, jitter=lambda: jitter)


def fail(it: Ejections, name: str, now: int, count: int = 3) -> bool:
    """Whether the last of them ejected it."""
    return [it.note_failure(name, now) for _ in range(count)][-1]


def test_three_failures_in_a_row_leave_an_upstream_out() -> None:
    it = pool()
    assert not fail(it, "b", START, 2)
    assert it.usable(NAMES, START) == NAMES
    assert it.note_failure("b", START)
    assert it.usable(NAMES, START) == ["a", "c", "d"]
    assert it.standing("b", START) == "ejected"
    assert not it.note_failure("b", START), "it is out already"


def test_a_success_between_starts_the_count_anew() -> None:
    it = pool()
    for _ in range(5):
        assert not fail(it, "b", START, 2)
        it.note_success("b", START)
    assert it.usable(NAMES, START) == NAMES


def test_the_number_of_failures_is_the_upstreams_own() -> None:
    it = Ejections({"a": Rules(consecutive_failures=1), "b": Rules(consecutive_failures=5)}, jitter=lambda: 0.0)
    assert it.note_failure("a", START)
    assert not fail(it, "b", START, 4)
    assert it.note_failure("b", START)


@pytest.mark.parametrize("size, most", [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (16, 8)])
def test_at_most_half_are_out_and_never_the_last(size: int, most: int) -> None:
    names = [f"u{i}" for i in range(size)]
    it = pool(names)
    for name in names:
        fail(it, name, START)
    usable = it.usable(names, START)
    assert len(usable) == size - most
    assert usable == [name for name in names if name in usable], "the order is kept"


def test_when_too_many_are_bad_the_least_bad_are_used() -> None:
    """Silence is worse than errors, an old offender than a new one, a long time to go than a short one."""
    it = pool()
    fail(it, "a", START)
    it.note_back("a", START)
    now = START + S
    fail(it, "a", now)
    fail(it, "b", now + S)
    fail(it, "c", now)
    it.note_silence("d", now)
    assert it.usable(NAMES, now + S) == ["b", "c"]
    assert it.usable(["a", "b", "c"], now + S) == ["b", "c"]
    assert it.usable(["b", "c"], now + S) == ["c"]


def test_each_pool_of_a_shared_upstream_decides_for_itself() -> None:
    it = pool()
    fail(it, "a", START)
    fail(it, "b", START)
    assert it.usable(["a", "c"], START) == ["c"]
    assert it.usable(["a"], START) == ["a"]
    assert len(it.usable(["a", "b"], START)) == 1
    assert it.usable([], START) == []


def back_again(it: Ejections, name: str, now: int) -> int:
    """Eject, let the time pass, pass the probation; the nominal length in s."""
    before = now
    fail(it, name, now)
    while it.standing(name, now) == "ejected":
        now += S
    it.note_success(name, now)
    return (now - before) // S


def test_each_ejection_in_a_row_is_longer_up_to_five_minutes() -> None:
    it = pool()
    now, lengths = START, []
    for _ in range(12):
        lengths.append(back_again(it, "a", now))
        now += (lengths[-1] + 1) * S
    assert lengths == [30, 60, 90, 120, 150, 180, 210, 240, 270, 300, 300, 300]


def test_the_row_ends_when_it_stayed_as_long_as_it_was_out() -> None:
    it = pool()
    now = START + back_again(it, "a", START) * S
    now += 29 * S
    it.note_success("a", now)
    length = back_again(it, "a", now)
    assert length == 60
    now += length * S + 60 * S
    it.note_success("a", now)
    assert back_again(it, "a", now) == 30


@pytest.mark.parametrize("jitter, seconds", [(0.0, 30.0), (0.5, 27.0), (0.999, 24.006)])
def test_jitter_shortens_an_ejection(jitter: float, seconds: float) -> None:
    it = pool(jitter=jitter)
    fail(it, "a", START)
    assert it.snapshot(START)["a"]["remaining_s"] == pytest.approx(seconds)


def test_probation_is_one_request_and_one_failure_ends_it() -> None:
    it = pool()
    fail(it, "a", START)
    now = START + 30 * S
    assert it.standing("a", now) == "probation"
    assert it.usable(NAMES, now) == NAMES
    assert it.max_inflight("a", 100, now) == 1
    assert it.note_failure("a", now)
    assert it.standing("a", now + 59 * S) == "ejected"
    assert it.standing("a", now + 60 * S) == "probation"


def test_what_was_sent_before_an_ejection_says_nothing_afterwards() -> None:
    """The stuck requests of a frozen engine time out one after the other, also during its probation."""
    it = pool()
    fail(it, "a", START)
    now = START + 30 * S
    assert not it.note_failure("a", now, sent=START - 1)
    it.note_success("a", now, sent=START - 1)
    assert it.standing("a", now) == "probation"
    it.note_success("a", now, sent=now)
    assert it.standing("a", now) == "ramp"
    assert not any(it.note_failure("a", now, sent=START - 1) for _ in range(10))


def test_the_way_back_goes_from_one_request_to_all() -> None:
    """D1, 3.3: slow start after the probe."""
    it = pool()
    fail(it, "a", START)
    it.note_back("a", START + S)
    now = START + S
    assert it.usable(NAMES, now) == NAMES
    allowed = [it.max_inflight("a", 101, now + t * S) for t in range(12)]
    assert allowed == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 101, 101]
    assert 0 < it.share("a", now) < it.share("a", now + 5 * S) < it.share("a", now + 10 * S) == 1.0
    assert it.standing("a", now + 9 * S) == "ramp"
    assert it.standing("a", now + 10 * S) == "in"
    assert it.max_inflight("b", 101, now) == 101


def test_failures_on_the_ramp_count_as_usual() -> None:
    it = pool()
    fail(it, "a", START)
    it.note_back("a", START)
    assert not fail(it, "a", START + S, 2)
    assert it.note_failure("a", START + S)
    assert it.snapshot(START + S)["a"]["ejected_in_a_row"] == 2


def test_a_restarted_upstream_starts_slowly_though_it_was_not_ejected() -> None:
    """D1: warm-up first, then slow start."""
    it = pool()
    it.note_return("a", START)
    assert it.standing("a", START) == "ramp"
    assert it.max_inflight("a", 16, START) == 1
    assert it.usable(NAMES, START + 10 * S) == NAMES
    assert it.standing("a", START + 10 * S) == "in"


@pytest.mark.parametrize("note", ["note_back", "note_token"])
def test_good_news_about_one_that_is_in_changes_nothing(note: str) -> None:
    it = pool()
    getattr(it, note)("a", START)
    it.note_pressure("a", START + S, START)
    getattr(it, note)("a", START)
    assert it.standing("a", START) == "in"
    assert it.share("a", START) == 1.0


# Back-pressure


def test_a_rest_is_no_failure() -> None:
    """C111: 429 with Retry-After, twenty times."""
    it = pool()
    for _ in range(20):
        it.note_pressure("a", START + 7 * S, START)
    assert it.usable(NAMES, START) == ["b", "c", "d"]
    assert it.usable(NAMES, START + 7 * S) == NAMES
    assert it.standing("a", START) == "in"
    assert it.snapshot(START)["a"]["failures_in_a_row"] == 0


def test_a_rest_is_never_shorter_than_asked_and_never_longer_than_five_minutes() -> None:
    it = pool(jitter=0.999)
    it.note_pressure("a", START + 10 * S, START)
    rest = it.snapshot(START)["a"]["rest_s"]
    assert isinstance(rest, float)
    assert 10 <= rest < 12
    it.note_pressure("a", START + 2 * S, START)
    assert it.snapshot(START)["a"]["rest_s"] == rest, "a shorter word later does not undo the longer one"
    it.note_pressure("a", START + 86_400 * S, START)
    assert it.snapshot(START)["a"]["rest_s"] == 300
    it.note_pressure("b", START - S, START)
    assert it.snapshot(START)["b"]["rest_s"] == 0, "a date in the past is no rest"


def test_when_all_rest_none_does() -> None:
    it = pool(["a", "b"])
    it.note_pressure("a", START + 9 * S, START)
    it.note_pressure("b", START + 9 * S, START)
    assert it.usable(["a", "b"], START) == ["a", "b"]
    assert it.usable(["a"], START) == ["a"]


def test_one_that_rests_is_better_than_one_that_is_ejected() -> None:
    it = pool(["a", "b"])
    fail(it, "a", START)
    it.note_pressure("b", START + 9 * S, START)
    assert it.usable(["a", "b"], START) == ["b"]


# Silence


@pytest.mark.parametrize(
    "slow_ms, predicted_ns, limit", [(10_000, 0, 10 * S), (10_000, 2 * S, 10 * S), (10_000, 5 * S, 15 * S)]
)
def test_a_long_prompt_may_wait_longer(slow_ms: int, predicted_ns: int, limit: int) -> None:
    assert first_token_limit_ns(slow_ms, predicted_ns) == limit


LIMIT = 10 * S


@pytest.mark.parametrize(
    "ages, token_age, verdict",
    [
        ([11, 12, 13], None, True),
        ([11, 12], None, False),
        ([10, 12, 13], None, False),  # strictly above
        ([1, 2, 3, 11, 12, 13], None, True),  # fresh ones neither help nor harm
        ([11, 12, 13], 5, False),  # somebody got a token since
        ([11, 12, 13], 12.5, False),  # …since the oldest was sent
        ([11, 12, 13, 40], 13.5, True),  # three were sent after the last sign of life
        ([11, 12, 13], 60, True),
    ],
)
def test_silence_is_many_waiting_and_nobody_served(ages: list[float], token_age: float | None, verdict: bool) -> None:
    """C113."""
    now = START
    waits = [(now - int(age * S), LIMIT) for age in ages]
    last = 0 if token_age is None else now - int(token_age * S)
    assert is_silent(waits, last, now) is verdict


def test_each_request_has_the_limit_it_was_given() -> None:
    waits = [(START - 20 * S, LIMIT), (START - 20 * S, LIMIT), (START - 20 * S, 45 * S)]
    assert not is_silent(waits, 0, START)
    assert is_silent(waits, 0, START + 26 * S)


def test_a_frozen_engine_is_out_in_bounded_time() -> None:
    """C113: green pages, requests accepted, not a byte. One request a second; looked at once a second."""
    it = pool(["a", "b"])
    waits: list[tuple[int, int]] = []
    for second in range(60):
        now = START + second * S
        if it.note_waits("a", waits, START, now):
            break
        waits.append((now, LIMIT))
    else:
        pytest.fail("never ejected")
    assert second <= 10 + 3
    assert it.usable(["a", "b"], now) == ["b"]
    assert not it.note_waits("a", waits, START, now)
    shown = it.snapshot(now)["a"]
    assert (shown["is_silent"], shown["standing"]) == (True, "ejected")


def test_one_probe_at_a_time_goes_to_a_frozen_engine() -> None:
    """C113: probes do not pile up; the one on probation is enough to eject again, and those from before are not."""
    it = pool(["a", "b"])
    old = [(START - 11 * S, LIMIT)] * 3
    assert it.note_waits("a", old, 0, START)
    now = START + 30 * S
    assert it.max_inflight("a", 100, now) == 1
    assert not it.note_waits("a", old, 0, now)
    probe = (now, LIMIT)
    assert not it.note_waits("a", [*old, probe], 0, now + 10 * S)
    assert it.note_waits("a", [*old, probe], 0, now + 10 * S + 1)
    assert it.snapshot(now + 10 * S + 1)["a"]["ejected_in_a_row"] == 2


@pytest.mark.parametrize("note", ["note_token", "note_back"])
def test_a_frozen_engine_that_thaws_comes_back_at_once(note: str) -> None:
    it = pool(["a", "b"])
    it.note_silence("a", START)
    assert not it.note_silence("a", START)
    getattr(it, note)("a", START + 2 * S)
    assert it.usable(["a", "b"], START + 2 * S) == ["a", "b"]
    assert it.standing("a", START + 2 * S) == "ramp"


def test_a_token_does_not_excuse_errors() -> None:
    it = pool(["a", "b"])
    fail(it, "a", START)
    it.note_token("a", START + S)
    assert it.standing("a", START + S) == "ejected"
    it.note_token("a", START + 30 * S)
    assert it.standing("a", START + 30 * S) == "ramp", "on probation it is the success that was waited for"


def test_a_busy_upstream_whose_streams_progress_is_alive() -> None:
    """C114: new requests wait beyond their limit while 50 streams go on."""
    it = pool(["a", "b"])
    waits = [(START + i * S, LIMIT) for i in range(20)]
    for second in range(20, 60):
        now = START + second * S
        assert not it.note_waits("a", waits, now - 50 * MS, now)


# Settings


def test_metrics_only_shows_what_would_be_and_leaves_nobody_out() -> None:
    it = pool(mode="metrics_only")
    assert fail(it, "a", START)
    assert it.usable(NAMES, START) == NAMES
    assert it.share("a", START) == 1.0
    shown = it.snapshot(START)["a"]
    assert (shown["standing"], shown["is_enforced"]) == ("ejected", False)
    it.note_pressure("a", START + S, START)
    assert it.usable(NAMES, START) == ["b", "c", "d"], "a rest is the upstream's own wish"


def test_off_notes_nothing_but_rests() -> None:
    it = pool(mode="off")
    assert not fail(it, "a", START, 10)
    assert not it.note_silence("a", START)
    it.note_pressure("a", START + S, START)
    assert it.usable(NAMES, START) == ["b", "c", "d"]


def test_new_settings_keep_those_who_stay() -> None:
    """C117, C118."""
    it = pool()
    fail(it, "a", START)
    fail(it, "b", START)
    it.follow({"a": Rules(), "c": Rules(), "e": Rules()})
    assert it.standing("a", START) == "ejected"
    assert it.usable(["a", "c", "e"], START) == ["c", "e"]
    assert it.snapshot(START)["a"]["ejected_in_a_row"] == 1
    fail(it, "c", START, 2)
    it.follow({"a": Rules(), "c": Rules(consecutive_failures=5)})
    assert not fail(it, "c", START, 2)
    assert it.note_failure("c", START), "the third, fourth and fifth in a row, under the new number"
    it.follow({"a": Rules(), "b": Rules()})
    assert it.standing("b", START) == "in", "removed and added again is new"


def test_late_results_of_a_removed_upstream_touch_nothing() -> None:
    """C117."""
    it = pool(["a"])
    it.note_success("gone", START)
    it.note_token("gone", START)
    it.note_back("gone", START)
    it.note_return("gone", START)
    it.note_pressure("gone", START + S, START)
    assert not it.note_failure("gone", START)
    assert not it.note_silence("gone", START)
    assert not it.note_waits("gone", [(0, 1)] * 3, 0, START)
    assert list(it.snapshot(START)) == ["a"]


def test_a_line_shows_who_is_watched() -> None:
    it = pool()
    assert repr(it) == "Ejections(4 upstreams, none watched)"
    fail(it, "a", START)
    assert repr(it) == "Ejections(4 upstreams, a watched)"
    it.note_back("a", START)
    it.usable(NAMES, START + 10 * S)
    assert repr(it) == "Ejections(4 upstreams, none watched)"


# Properties

EVENTS = ["success", "failure", "silence", "token", "back", "return", "pressure", "wait"]


@given(
    st.lists(
        st.tuples(st.sampled_from(EVENTS), st.integers(0, 5), st.integers(0, 90)),
        max_size=80,
    ),
    st.integers(1, 6),
    st.floats(0, 1, exclude_max=True),
    st.sets(st.integers(0, 5)),
)
def test_whatever_happens_somebody_is_left(
    events: list[tuple[str, int, int]], size: int, jitter: float, shared: set[int]
) -> None:
    """Never all out, never more than half ejected, order kept, shares in (0, 1]; of every pool."""
    names = [f"u{i}" for i in range(size)]
    pools = [names, [name for i, name in enumerate(names) if i in shared]]
    it = pool(names, jitter=jitter)
    now = START
    rested = False
    for event, index, seconds in events:
        name = names[index % size]
        if event == "wait":
            now += seconds * S
        elif event == "pressure":
            rested = True
            it.note_pressure(name, now + seconds * S, now)
        elif event == "failure":
            fail(it, name, now, 1 + seconds % 4)
        else:
            getattr(it, f"note_{event}")(name, now)
        for members in pools:
            usable = it.usable(members, now)
            assert usable == [name for name in members if name in usable]
            assert bool(usable) == bool(members)
            if not rested:
                assert len(members) - len(usable) <= len(members) // 2
        for name, shown in it.snapshot(now).items():
            share = it.share(name, now)
            assert 0 < share <= 1
            assert 1 <= it.max_inflight(name, 32, now) <= 32
            assert (share == 1.0) == (shown["standing"] == "in")
            assert it.max_inflight(name, 1, now) == 1


# The breaker and the pool together, as the caller puts them: admitted by breaker and pool, in turn


class Fleet:
    """Two upstreams; `ask` sends one request to the first that admits it."""

    def __init__(self, names: list[str], *, jitter: float = 0.5) -> None:
        self.rules = Rules()
        self.names = names
        self.pool = Ejections(dict.fromkeys(names, self.rules), jitter=lambda: jitter)
        self.breakers = {name: Breaker(self.rules, half_open_wait_ms=240_000, jitter=lambda: jitter) for name in names}
        self.turn = 0

    def ask(self, now: int, bad: dict[str, str]) -> str:
        """`ok`, `error`, `slow`, or `refused`; a failed one is tried once more elsewhere."""
        self.turn += 1
        order = self.names[self.turn % len(self.names) :] + self.names[: self.turn % len(self.names)]
        open_ones = [name for name in order if not self.breakers[name].is_open(now)]
        result = "refused"
        for name in self.pool.usable(open_ones, now)[:2]:
            permit = self.breakers[name].acquire(now)
            if permit is None:
                continue
            result = bad.get(name, "ok")
            is_last = len(open_ones) == 1
            self.breakers[name].record(
                permit, is_error=result == "error", is_slow=result == "slow", now=now, is_last=is_last
            )
            if result != "error":
                self.pool.note_success(name, now)
                break
            self.pool.note_failure(name, now)
        return result


def test_a_flapping_upstream_harms_few() -> None:
    """D2: up 2 s, down 2 s for 60 s, 50 requests a second, a second upstream."""
    fleet = Fleet(["a", "b"])
    results: list[str] = []
    failed_at_a = 0
    for step in range(60 * 50):
        now = START + step * 20 * MS
        is_down = (now // (2 * S)) % 2 == 1
        before = fleet.breakers["a"].snapshot(now)["errors"]
        results.append(fleet.ask(now, {"a": "error"} if is_down else {}))
        failed_at_a += fleet.breakers["a"].snapshot(now)["errors"] != before
    assert results.count("ok") / len(results) >= 0.95
    assert failed_at_a <= 20


def test_a_grey_upstream_is_out_within_30_seconds_and_back_within_two_windows() -> None:
    """D3: ten times slower, no errors, for two minutes; ten requests a second."""
    fleet = Fleet(["a", "b"])
    grey_from, grey_until = 60, 180
    opened, closed, late = 0, 0, 0
    for step in range(300 * 10):
        now, second = START + step * 100 * MS, step // 10
        is_slow = fleet.ask(now, {"a": "slow"} if grey_from <= second < grey_until else {}) == "slow"
        state = fleet.breakers["a"].state
        if second >= grey_from and not opened and state == "open":
            opened = second
        if second >= grey_until and not closed and state == "closed":
            closed = second
        late += bool(opened) and is_slow
    assert opened - grey_from <= 30
    assert 0 <= closed - grey_until <= 60
    assert late <= 2 * 5, "two probes for each time it was half open: after 5, 10, 20, 40 and 60 s"
    assert fleet.breakers["b"].state == "closed"


def test_when_all_are_down_breakers_refuse_and_probes_are_few() -> None:
    """D4: no retry storm."""
    fleet = Fleet(["a", "b"])
    results = [fleet.ask(START + step * 10 * MS, {"a": "error", "b": "error"}) for step in range(60 * 100)]
    assert results.count("error") <= 60
    assert results[-1] == "refused"
    now = START + 60 * S
    assert all(breaker.remaining_s(now) <= 60 for breaker in fleet.breakers.values())
    assert len(fleet.pool.usable(["a", "b"], now)) == 1, "the pool itself leaves somebody"
    recovered = [fleet.ask(now + step * 100 * MS, {}) for step in range(900)]
    assert recovered[-1] == "ok"
    assert all(breaker.state == "closed" for breaker in fleet.breakers.values())
