"""How long one attempt may take, and what the client hears meanwhile. One timer, set to the next thing that is due.

`policy.deadline` decides about limits, `policy.heartbeat` about signs of life; this class keeps the facts they decide
on and carries the decisions to the relay.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from gateway.complaints import our_fault, too_slow
from gateway.policy.deadline import Progress, due
from gateway.policy.heartbeat import NEVER, BeatClock, beat_bytes, client_kind, earliest_ms, plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.config import Route
    from gateway.errors import GatewayError
    from gateway.exchange import Exchange
    from gateway.policy.heartbeat import Form

log = logging.getLogger("gateway.relay")

NS = 1_000_000_000
SOONEST_S = 0.0005


class Waiting(Protocol):
    """What is being waited for: the relay."""

    @property
    def is_over(self) -> bool: ...
    def note(self, progress: Progress, now: int) -> None:
        """Writes what has happened since the last look."""

    def beat(self, data: bytes) -> None:
        """Sends a sign of life to the client."""

    def estimate_ms(self, now: int) -> int | None:
        """Time to the first token as far as is known."""

    def budget_passed(self, now: int) -> None:
        """The first-token budget is over; whoever waits may hear something else from now on."""

    def hedge_due(self, now: int) -> None:
        """So late that a second upstream is worth asking."""

    def fail(self, error: GatewayError, now: int) -> None:
        """A limit was passed."""


class Patience:
    """The timer of one attempt."""

    __slots__ = ("_beats_from", "_budget", "_clock", "_exchange", "_loop", "_route", "_timer", "_waiting", "progress")

    def __init__(
        self, waiting: Waiting, exchange: Exchange, route: Route, clock: Callable[[], int], *, is_seen: bool
    ) -> None:
        self._waiting: Waiting | None = waiting
        self._exchange = exchange
        self._route = route
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        assert exchange.budget is not None
        self._budget = exchange.budget
        self._beats_from = self._first_beat()
        self.progress = Progress(
            received=exchange.timeline.recv,
            started=clock(),
            is_stream=is_seen,
            is_opted_in=exchange.is_opted_in,
            budget_passed=exchange.budget_action is not None,
            deadline=exchange.deadline,
            first_byte_deadline=exchange.first_byte_deadline,
        )

    def begin(self) -> None:
        self._look(self.progress.started)

    def end(self) -> None:
        """For good. Lets go of what was waited for: the two hold each other, and what only the garbage collector can
        free costs a request more than its share of the collector's time."""
        self._cancel()
        self._waiting = None

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        """The client takes more again; the silence until now was not the upstream's."""
        self.progress.is_paused = False
        self.progress.last_event = self._clock()

    def call_later(self, seconds: float, act: Callable[[], None]) -> None:
        """Replaces whatever was due by one last thing."""
        self._cancel()
        self._timer = self._loop.call_later(seconds, act)

    def _look(self, now: int) -> None:
        """Does what is due and sets the timer for the next look."""
        waiting, progress, route = self._waiting, self.progress, self._route
        if waiting is None:
            return
        waiting.note(progress, now)
        action, when = due(progress, route.timeouts, self._budget, now)
        if action != "none":
            if action == "budget":
                progress.budget_passed = True
                waiting.budget_passed(now)
            elif action == "hedge":
                progress.hedge_at = 0
                waiting.hedge_due(now)
            else:
                waiting.fail(too_slow(action, route.timeouts, self._exchange.upstream), now)
            if waiting.is_over:
                return
            waiting.note(progress, now)  # a caller that was answered 202 just now hears no heartbeat
            _, when = due(progress, route.timeouts, self._budget, now)
        if self._beats_from <= now:
            when = min(when, self._beat(waiting, now))
        else:
            when = min(when, self._beats_from)
        self._cancel()
        self._timer = self._loop.call_later(max(SOONEST_S, (when - now) / NS), self._look_late, when)

    def look_again(self) -> None:
        """Something came that a timer does not know of."""
        if self._waiting is not None:
            self._cancel()
            self._timer = self._loop.call_later(0, self._look_late, 0)

    # Signs of life

    def _first_beat(self) -> int:
        """Before this nobody hears anything; who the caller is needs no answer until then."""
        x, budget = self._exchange, self._budget
        if budget.on_exceed in ("wait", "fail") or x.kind == "opaque":
            return NEVER
        return x.timeline.recv + NS // 1000 * earliest_ms(
            is_stream=x.is_stream,
            read_timeout_ms=x.read_timeout_ms,
            ttft_ms=budget.ttft_ms,
            heartbeat_ms=budget.heartbeat_ms,
        )

    def _beat(self, waiting: Waiting, now: int) -> int:
        """Sends what is due; when to look again."""
        x, progress = self._exchange, self.progress
        clock = x.beats
        if clock is None:
            clock = x.beats = BeatClock(
                plan(
                    client_kind(x.headers, x.api),
                    request=x.kind,
                    is_stream=x.is_stream,
                    read_timeout_ms=x.read_timeout_ms,
                    include_usage=x.wants_usage,
                    ttft_ms=self._budget.ttft_ms,
                    heartbeat_ms=self._budget.heartbeat_ms,
                )
            )
        while True:  # ends: a beat that was written is not due again at once
            form, when = clock.due(
                progress.received,
                now,
                last_write=progress.last_write,
                last_event=progress.last_event,
                token=progress.token,
                visible=progress.visible,
                can_beat=progress.can_beat,
            )
            if form is None:
                return when
            waiting.beat(_bytes_of(form, x, waiting.estimate_ms(now)))
            progress.last_write = now
            clock.wrote(form, now)

    def _look_late(self, when: int) -> None:
        """The loop's clock is coarser than ours: never act before the instant itself."""
        waiting = self._waiting
        if waiting is None or waiting.is_over:
            return
        try:
            self._look(max(when, self._clock()))
        except Exception as error:  # else nothing would ever end this request
            log.exception("internal error in a request's timer", exc_info=error)
            waiting.fail(our_fault(), self._clock())


def _bytes_of(form: Form, x: Exchange, estimation_ms: int | None = None) -> bytes:
    return beat_bytes(
        form,
        request=x.kind,
        model=x.model or "",
        estimation_ms=estimation_ms,
        answer_id=f"chatcmpl-{x.request_id}",
        created=int(datetime.now(UTC).timestamp()),
    )


def closing_beat(x: Exchange) -> bytes:
    """What must go out before a started stream ends in an error: a status line that says "waiting" is taken back."""
    if x.beats is None or not x.beats.owes_status_done:
        return b""
    x.beats.wrote("status_done", 0)
    return _bytes_of("status_done", x)
