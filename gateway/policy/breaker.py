"""The circuit breaker of one (upstream, model): resilience4j's machine and names (fault-catalogue 3.2). Pure.

    from          event            to            when
    ------------  ---------------  ------------  ---------------------------------------------------------------
    closed        exceeded         open          the recorded call that makes a rate reach its threshold, once
    closed        trip             open          evidence of another kind, such as silence (ejection.py)
    open          asked            half_open     the first permit asked for when the wait is over
    half_open     exceeded         open          enough results are in and a rate reaches its threshold
    half_open     below            closed        enough results are in and no rate does
    half_open     waited           open          no verdict within the maximum wait
    half_open     trip             open          as in closed
    any           force_open       forced_open   operator
    any           disable          disabled      operator
    any           metrics_only     metrics_only  operator
    any           reset            closed        operator; also empties the window of a closed breaker

    closed        admits all, counts all in a window of time
    open          refuses and counts the refusals; what was admitted before still counts in the window, without effect
    half_open     admits exactly `half_open_calls`, counts them apart; a permit given back may be handed out again
    disabled      admits all, counts nothing
    forced_open   refuses all and counts the refusals
    metrics_only  counts as closed does, and never opens

A slow error counts in both rates. Below the minimum of calls there is no rate and no verdict. The wait in open is
`wait_open_ms` × 2ⁿ with equal jitter (3.6), n = times opened in a row before, capped.

Where this is stricter than resilience4j: a result counts only in the state that admitted the call (or in the open
one right after it), so that a long call from before the opening can be no probe; half-open must have a maximum wait,
because with none one lost permit jams the machine for ever (D5). It passes when somebody next calls: open then starts
at the instant when it passed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from gateway.config import Breaker as Rules

State = Literal["closed", "open", "half_open", "disabled", "forced_open", "metrics_only"]
Event = Literal["exceeded", "below", "asked", "waited", "trip", "force_open", "disable", "metrics_only", "reset"]

STATES: Final[tuple[State, ...]] = ("closed", "open", "half_open", "disabled", "forced_open", "metrics_only")
_OPERATOR: Final[dict[Event, State]] = {
    "force_open": "forced_open",
    "disable": "disabled",
    "metrics_only": "metrics_only",
    "reset": "closed",
}
TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    ("closed", "exceeded"): "open",
    ("closed", "trip"): "open",
    ("open", "asked"): "half_open",
    ("half_open", "exceeded"): "open",
    ("half_open", "below"): "closed",
    ("half_open", "waited"): "open",
    ("half_open", "trip"): "open",
    **{(state, event): target for event, target in _OPERATOR.items() for state in STATES},
}
_INITIAL: Final[dict[str, State]] = {"on": "closed", "metrics_only": "metrics_only", "off": "disabled"}
_MS: Final = 1_000_000
_SETTLED: Final = -1  # no generation; the first one is 1
_MAX_DOUBLINGS: Final = 32  # any cap is reached long before, and the power stays small
_BUCKETS: Final = 10  # of the window; linkerd2-proxy's number


class Permit:
    """One admitted call. Settle it once, with `record` or `release`; a second time does nothing."""

    __slots__ = ("generation",)

    def __init__(self, generation: int) -> None:
        self.generation = generation

    def __repr__(self) -> str:
        return "Permit(settled)" if self.is_settled else f"Permit(generation {self.generation})"

    @property
    def is_settled(self) -> bool:
        return self.generation == _SETTLED


class Counts:
    """How many calls ended in each of the four ways: ok, error, slow ok, slow error. All of them, as in half-open."""

    __slots__ = ("calls", "errors", "slow", "slow_errors")

    def __init__(self) -> None:
        self.calls = 0
        self.errors = 0  # slow ones too
        self.slow = 0  # failed ones too
        self.slow_errors = 0

    def __repr__(self) -> str:
        return f"{self.calls} calls, {self.errors} errors, {self.slow} slow"

    @property
    def failure_rate(self) -> float:
        """% of the calls; ask only when there are some."""
        return 100 * self.errors / self.calls

    @property
    def slow_call_rate(self) -> float:
        """% of the calls; ask only when there are some."""
        return 100 * self.slow / self.calls

    def add(self, is_error: bool, is_slow: bool, now: int) -> None:  # noqa: ARG002 - a window needs the time
        """Count one call."""
        self._shift(1, is_error, is_slow, is_error and is_slow)

    def advance(self, now: int) -> None:
        """Let go of what is too old at `now`; here nothing is."""

    def _shift(self, calls: int, errors: int, slow: int, slow_errors: int) -> None:
        self.calls += calls
        self.errors += errors
        self.slow += slow
        self.slow_errors += slow_errors


class Window(Counts):
    """The calls of the last seconds, counted exactly: an exponential average would hide a tight burst.

    A ring of buckets that begin at whole multiples of their width: the current one and the nine before it are in, so
    between 0.9 and 1 of the window.
    """

    __slots__ = ("_current", "_end", "_index", "_ring", "_width")

    def __init__(self, length_ns: int) -> None:
        super().__init__()
        self._width = max(1, length_ns // _BUCKETS)
        self._ring = [[0, 0, 0, 0] for _ in range(_BUCKETS)]  # calls, errors, slow, slow errors of each
        self._index = 0
        self._current = self._ring[0]
        self._end = 0  # of the current bucket

    def add(self, is_error: bool, is_slow: bool, now: int) -> None:
        """Count one call that ended now."""
        if now >= self._end:
            self.advance(now)
        bucket = self._current
        bucket[0] += 1
        self.calls += 1
        if is_error or is_slow:
            bucket[1] += is_error
            bucket[2] += is_slow
            bucket[3] += is_error and is_slow
            self._shift(0, is_error, is_slow, is_error and is_slow)

    def advance(self, now: int) -> None:
        """Let go of the buckets that are too old at `now`: of all after an idle gap longer than the window."""
        if now < self._end:
            return
        steps = (now - self._end) // self._width + 1
        for _ in range(min(steps, _BUCKETS)):
            self._index = (self._index + 1) % _BUCKETS
            self._empty(self._ring[self._index])
        self._current = self._ring[self._index]
        self._end += steps * self._width

    def clear(self) -> None:
        """Forget all calls."""
        for bucket in self._ring:
            self._empty(bucket)

    def _empty(self, bucket: list[int]) -> None:
        calls, errors, slow, slow_errors = bucket
        self._shift(-calls, -errors, -slow, -slow_errors)
        bucket[:] = (0, 0, 0, 0)


class Breaker:
    """Admits or refuses calls, and learns from their results. `now` is monotonic ns everywhere."""

    __slots__ = (
        "_admits_all", "_attempts", "_cause", "_counts", "_deadline", "_generation", "_half_open_ns", "_jitter",
        "_minimum", "_next_wait_ns", "_not_permitted", "_on_transition", "_permits", "_rules", "_state", "_window",
    )  # fmt: skip

    def __init__(
        self,
        rules: Rules,
        *,
        half_open_wait_ms: int,
        jitter: Callable[[], float],
        on_transition: Callable[[State, State], None] | None = None,
    ) -> None:
        """`half_open_wait_ms`: longest time in half-open, 2 × the hard limit of TTFT; `jitter` gives [0, 1).

        `on_transition(old, new)` is called after each change of state. Raises ValueError for a wait below 1 ms.
        """
        if half_open_wait_ms < 1:
            raise ValueError("half_open_wait_ms must be at least 1: without it one lost permit jams the breaker")
        self._rules = rules
        self._half_open_ns = half_open_wait_ms * _MS
        self._jitter = jitter
        self._on_transition = on_transition
        self._window = Window(int(rules.window_s * 1e9))
        self._counts: Counts = self._window  # of the state; open keeps those of the state before it
        self._generation = 0
        self._not_permitted = 0
        self._attempts = 0  # times opened in a row
        self._next_wait_ns = 0  # drawn ahead, so that `is_open` can see past the end of half-open
        self._deadline = 0  # end of the wait in open, of the longest stay in half-open
        self._permits = 0  # that half-open may still hand out
        self._cause: str | None = None  # of the last opening
        self._minimum = rules.minimum_calls
        self._state: State = _INITIAL[rules.mode]
        self._admits_all = True
        self._enter(self._state, 0)

    def __repr__(self) -> str:
        return f"Breaker({self._state}, {self._counts!r}, {self._not_permitted} refused)"

    @property
    def state(self) -> State:
        """The state as of the last call that had a `now`."""
        return self._state

    def is_open(self, now: int) -> bool:
        """True if a call would be refused now. Changes nothing."""
        if self._admits_all:
            return False
        if self._state == "open":
            return now < self._deadline
        if self._state == "half_open":
            if now >= self._deadline:
                return now < self._deadline + self._next_wait_ns
            return self._permits == 0
        return True

    def acquire(self, now: int) -> Permit | None:
        """A permit for one call, to be settled whatever happens; None: refused, and counted as such."""
        if self._admits_all:
            return Permit(self._generation)
        self._end_half_open(now)
        if self._state == "open" and now >= self._deadline:
            self._fire("asked", now)
        if self._permits:
            self._permits -= 1
            return Permit(self._generation)
        self._not_permitted += 1
        return None

    def record(self, permit: Permit, *, is_error: bool, is_slow: bool, now: int, is_last: bool = False) -> None:
        """Settle with a result; `is_slow` is strictly above the threshold of TTFT.

        `is_last`: no other upstream could be used now. Then slowness alone does not open: slow service beats none.
        """
        generation = permit.generation
        permit.generation = _SETTLED
        if self._state == "half_open":
            self._end_half_open(now)
        counts = self._counts
        if generation == self._generation:
            if self._state == "disabled":
                return
            counts.add(is_error, is_slow, now)
            if counts.calls >= self._minimum and (counts.errors or counts.slow or self._state == "half_open"):
                self._judge(counts, is_last, now)
        elif self._state == "open" and generation == self._generation - 1:
            counts.add(is_error, is_slow, now)

    def release(self, permit: Permit, now: int) -> None:
        """Settle without a result: the client left, a hedge was lost, the answer was a 4xx, the fault was ours."""
        generation = permit.generation
        permit.generation = _SETTLED
        if self._state == "half_open":
            self._end_half_open(now)
            if generation == self._generation:
                self._permits += 1

    def trip(self, now: int, cause: str) -> None:
        """Open for a reason that no rate shows; only from closed and half-open."""
        self._end_half_open(now)
        self._fire("trip", now, cause)

    def force_open(self, now: int) -> None:
        """Refuse everything until `reset`, `disable` or `metrics_only`."""
        self._fire("force_open", now)

    def disable(self, now: int) -> None:
        """Admit everything and count nothing."""
        self._fire("disable", now)

    def metrics_only(self, now: int) -> None:
        """Count and never open."""
        self._fire("metrics_only", now)

    def reset(self, now: int) -> None:
        """Close with an empty window, whatever the state and the settings' `mode`."""
        self._fire("reset", now)

    def remaining_s(self, now: int) -> float:
        """After how many seconds asking again makes sense; 0 when a call would be admitted now.

        Forced open has no end that we know: the longest wait. Half-open without permits: its end, if that is nearer
        than the shortest wait, since a verdict is expected before.
        """
        if not self.is_open(now):
            return 0.0
        if self._state == "forced_open":
            return self._rules.max_wait_open_ms / 1e3
        end = self._deadline
        if self._state == "half_open":
            if now < end:
                return min((end - now) / 1e9, self._rules.wait_open_ms / 1e3)
            end += self._next_wait_ns
        return (end - now) / 1e9

    def snapshot(self, now: int) -> dict[str, object]:
        """What a status page shows. Rates are %, None below the minimum; `exceeded` also in `metrics_only`."""
        self._end_half_open(now)
        counts = self._counts
        counts.advance(now)
        has_rate = counts.calls >= self._minimum
        return {
            "state": self._state,
            "failure_rate": counts.failure_rate if has_rate else None,
            "slow_call_rate": counts.slow_call_rate if has_rate else None,
            "calls": counts.calls,
            "errors": counts.errors,
            "slow": counts.slow,
            "slow_errors": counts.slow_errors,
            "exceeded": self._exceeded(counts, is_last=False) if has_rate else None,
            "not_permitted": self._not_permitted,
            "remaining_s": self.remaining_s(now),
            "permits": self._permits,
            "opened_in_a_row": self._attempts,
            "cause": self._cause,
        }

    def _judge(self, counts: Counts, is_last: bool, now: int) -> None:
        """The verdict after a result, when there are enough."""
        cause = self._exceeded(counts, is_last)
        if self._state == "half_open":
            self._fire("below" if cause is None else "exceeded", now, cause)
        elif cause is not None and self._state == "closed":
            self._fire("exceeded", now, cause)

    def _exceeded(self, counts: Counts, is_last: bool) -> str | None:
        """The rate that reached its threshold."""
        if counts.failure_rate >= self._rules.failure_rate_threshold:
            return "failure_rate"
        if not is_last and counts.slow_call_rate >= self._rules.slow_call_rate_threshold:
            return "slow_call_rate"
        return None

    def _end_half_open(self, now: int) -> None:
        """Carry out the end of the longest stay in half-open, if it has passed."""
        if self._state == "half_open" and now >= self._deadline:
            self._fire("waited", self._deadline, "half_open_wait")

    def _fire(self, event: Event, now: int, cause: str | None = None) -> None:
        """Change the state as the table says; an event without a row does nothing."""
        old = self._state
        new = TRANSITIONS.get((old, event))
        if new is None or (new == old and event != "reset"):
            return
        if cause is not None:
            self._cause = cause
        self._enter(new, now)
        if new != old and self._on_transition is not None:
            self._on_transition(old, new)

    def _enter(self, state: State, now: int) -> None:
        self._state = state
        self._generation += 1
        self._admits_all = state in ("closed", "disabled", "metrics_only")
        self._permits = 0
        if state == "open":
            self._attempts += 1
            self._deadline = now + self._next_wait_ns
            self._next_wait_ns = self._draw_wait_ns()
        elif state == "half_open":
            self._deadline = now + self._half_open_ns
            self._permits = self._rules.half_open_calls
            self._minimum = min(self._rules.half_open_calls, self._rules.minimum_calls)
            self._counts = Counts()
        else:
            self._attempts = 0
            self._next_wait_ns = self._draw_wait_ns()
            self._minimum = self._rules.minimum_calls
            self._window.clear()
            self._counts = self._window
            self._cause = None

    def _draw_wait_ns(self) -> int:
        """How long the next opening lasts: equal jitter, half fixed and half drawn (fault-catalogue 3.6)."""
        doubled = self._rules.wait_open_ms << min(self._attempts, _MAX_DOUBLINGS)
        half = min(doubled, self._rules.max_wait_open_ms) * _MS // 2
        return half + int(half * self._jitter())
