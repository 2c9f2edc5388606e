"""Which upstream the next attempt of a request goes to: the route's own and, where it has one, its fallback's.

`policy` decides: `balance.py` the order, `ejection.py` who is left out, the breakers who is admitted, `queueing.py`
whether waiting for a slot makes sense. This class asks them in turn and hands out attempts that hold a permit; whoever
gets one must settle it (`settling.py`).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from gateway.attempt import Attempt
from gateway.complaints import circuit_open
from gateway.errors import Overloaded
from gateway.policy.balance import Candidate, affinity_key, order
from gateway.policy.queueing import refuse_at_door
from gateway.policy.retrying import class_of, may_retry
from gateway.settling import failure_of
from gateway.timing.predict import LEAST_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.attempt import AttemptKind
    from gateway.errors import GatewayError
    from gateway.exchange import Exchange
    from gateway.policy.breaker import Breaker
    from gateway.policy.retrying import Decision
    from gateway.runtime import Fleet, RouteState
    from gateway.sending import Prepared
    from gateway.upstream.state import UpstreamState

Pool = tuple["RouteState", tuple["UpstreamState", ...]]

NS = 1_000_000_000
MS = 1_000_000
MAX_RETRY_AFTER_S = 60  # of a refusal at the door; clients wait no longer (client-contract §7)


class Chooser:
    """Of one request."""

    __slots__ = ("_affinity", "_at_door", "_fallback", "_fleet", "_prepared", "_tried", "_x")

    def __init__(self, x: Exchange, prepared: Prepared, fleet: Fleet, fallback: Pool | None) -> None:
        self._x = x
        self._prepared = prepared
        self._fleet = fleet
        self._fallback = fallback
        self._tried: set[str] = set()
        self._affinity: int | None = None
        self._at_door: tuple[str, float] | None = None  # who was too busy, and for how many seconds

    def __repr__(self) -> str:
        return f"<Chooser {len(self._tried)} tried>"

    @property
    def has_choice(self) -> bool:
        """More than one upstream could ever be asked."""
        return len(self._prepared.route.upstreams) > 1 or self._fallback is not None

    def begin(self, kind: AttemptKind, now: int, *, with_token: bool = False, in_room: bool = False) -> Attempt | None:
        """An attempt at the best upstream that admits one, which holds a permit; None: there is none.

        `with_token`: only where the upstream's bucket allows an extra attempt; `in_room`: only where a slot is free
        and the last health check was good.
        """
        pool = self._fallback if kind == "fallback" else self._own
        if pool is None:
            return None
        route, states = pool
        for state in self._ordered(route, states, now):
            if with_token and not state.standing.bucket.is_allowed:
                continue
            if state.pool.is_full and (in_room or self._is_refused_at_door(state, now)):
                continue
            if in_room and state.is_usable is False:
                continue
            breaker = self._breaker(route, state)
            permit = breaker.acquire(now)
            if permit is None:
                continue
            self._tried.add(state.name)
            attempt = Attempt(kind, route, state)
            attempt.breaker, attempt.permit = breaker, permit
            state.standing.running.add(attempt)
            if self._prepared.prompt is not None:
                attempt.predictor = state.standing.predictor(self._label(route, state))
            return attempt
        return None

    def untried(self, now: int) -> Iterator[UpstreamState]:
        """Who could still be asked, the fallback's included."""
        for route, states in self._pools:
            names = [state.name for state in states if not self._breaker(route, state).is_open(now)]
            usable = self._fleet.ejections.usable(names, now)
            for state in states:
                if state.name in usable and state.name not in self._tried:
                    yield state

    def may_follow(self, ended: Attempt, now: int, *, is_idempotent: bool, sent: int) -> Decision:
        """Whether another attempt may follow one that failed; `sent`: attempts so far that left this host."""
        others = list(self.untried(now))
        has_token = not others or any(state.standing.bucket.is_allowed for state in others)
        return may_retry(
            class_of(failure_of(ended)),
            is_idempotent=is_idempotent,
            attempts=sent,
            other_upstream=bool(others),
            has_token=has_token and self._fleet.extra.may_retry(now),
            reconnected=True,  # `again.py` has done it
            remaining_ms=(self._x.deadline - now) / MS if self._x.deadline else None,
        )

    def refusal(self, now: int) -> GatewayError:
        """What the caller hears when nobody may be asked."""
        self._x.upstream = self._prepared.route.upstreams[0].name
        if self._at_door is not None:
            name, wait_s = self._at_door
            self._x.upstream = name
            return _too_busy(name, wait_s)
        waits = [self._breaker(route, state).remaining_s(now) for route, states in self._pools for state in states]
        return circuit_open([state.name for _, states in self._pools for state in states], min(waits))

    @property
    def _own(self) -> Pool:
        return self._prepared.route, self._prepared.route.upstreams

    @property
    def _pools(self) -> list[Pool]:
        return [self._own] if self._fallback is None else [self._own, self._fallback]

    def _label(self, route: RouteState, state: UpstreamState) -> str:
        return state.standing.label(route.config.model or self._x.model or "")

    def _breaker(self, route: RouteState, state: UpstreamState) -> Breaker:
        return state.standing.breaker(self._label(route, state))

    # The order

    def _ordered(self, route: RouteState, states: tuple[UpstreamState, ...], now: int) -> list[UpstreamState]:
        if len(states) == 1:
            return [] if states[0].name in self._tried else list(states)
        admitting = [state.name for state in states if not self._breaker(route, state).is_open(now)]
        usable = self._fleet.ejections.usable(admitting, now)
        by_name = {state.name: state for state in states if state.name in usable and state.name not in self._tried}
        if len(by_name) < 2:
            return list(by_name.values())
        route.turn += 1
        assert self._x.budget is not None
        budget_ms = self._x.budget.ttft_ms
        if self._affinity is None and route.config.balance in ("auto", "prefix") and self._prepared.prompt is not None:
            self._affinity = affinity_key(self._prepared.raw)
        candidates, uncached = [], 0.0
        for state in by_name.values():
            candidate, own = self._candidate(route, state, now)
            candidates.append(candidate)
            uncached = max(uncached, own)
        names = order(
            route.config.balance,
            candidates,
            turn=route.turn,
            draw=random.random,
            affinity=self._affinity,
            uncached_tokens=uncached,
            budget_s=budget_ms / 1000 if budget_ms is not None else None,
        )
        return [by_name[name] for name in names]

    def _candidate(self, route: RouteState, state: UpstreamState, now: int) -> tuple[Candidate, float]:
        predicted, ahead, own = None, 0.0, 0.0
        if self._prepared.prompt is not None:
            predictor = state.standing.predictor(self._label(route, state))
            estimate = predictor.predict(self._prepared.prompt, now)
            ahead, own = predictor.tokens_ahead, estimate.uncached_tokens
            if estimate.basis == "model":
                predicted = estimate.p50_s
        return Candidate(
            name=state.name,
            is_up=state.is_usable,  # also False while it warms up: asked last
            inflight=state.inflight,
            predicted_s=predicted,
            ahead_tokens=ahead,
            share=self._fleet.ejections.share(state.name, now),
            is_full=state.pool.is_full,
            seconds_per_ktoken=state.standing.cost.read(now),
        ), own

    # The door

    def _is_refused_at_door(self, state: UpstreamState, now: int) -> bool:
        """No slot is free, and none will be in the time there is: better told now than after the wait (3.4)."""
        left_s = state.config.max_queue_wait_ms / 1000
        if self._x.deadline:
            left_s = min(left_s, (self._x.deadline - now) / NS)
        wait_s = slot_wait_s(state, now)
        if not left_s or not refuse_at_door(left_s, wait_s):  # the pool itself refuses those that may not wait at all
            return False
        if self._at_door is None or (wait_s or 0.0) < self._at_door[1]:
            self._at_door = state.name, wait_s or 0.0
        return True


def slot_wait_s(state: UpstreamState, now: int) -> float | None:
    """Seconds until a slot of a full upstream is free for whoever comes now; None where nothing is known.

    Each running request leaves when its answer is likely to be whole; those who queue take the first slots.
    """
    lefts = []
    for attempt in state.standing.running:
        if attempt.predictor is not None and attempt.ticket is not None:
            left_s = attempt.predictor.until_complete(attempt.ticket, now).p50_s
            if left_s is None:  # stalled: nobody knows
                return None
            lefts.append(0.0 if left_s <= LEAST_S else left_s)  # the floor of what is told is no knowledge
    if len(lefts) < state.pool.leases:
        return None
    lefts.sort()
    rounds, place = divmod(state.pool.queued, len(lefts))
    return lefts[place] + rounds * lefts[-1]


def _too_busy(name: str, wait_s: float) -> Overloaded:
    return Overloaded(
        f"Upstream `{name}` is busy: its next free slot is about {wait_s:.1f} s away, longer than this request may "
        "wait (`max_queue_wait_ms` of the upstream, or the caller's own deadline). Try again later.",
        reason="refused_at_door",
        retry_after_s=min(MAX_RETRY_AFTER_S, max(1, round(wait_s))),
    )
