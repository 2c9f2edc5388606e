"""How long one attempt may take, and what the client hears meanwhile. One timer, set to the next thing that is due.

`policy.deadline` decides; this class keeps the facts it decides on and carries the decision to the relay.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from gateway.complaints import our_fault, too_slow
from gateway.policy.deadline import Progress, due

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.config import Route
    from gateway.errors import GatewayError
    from gateway.exchange import Exchange

log = logging.getLogger("gateway.relay")

NS = 1_000_000_000
SOONEST_S = 0.0005


class Waiting(Protocol):
    """What is being waited for: the relay."""

    @property
    def is_over(self) -> bool: ...
    def note(self, progress: Progress, now: int) -> None:
        """Writes what has happened since the last look."""

    def beat(self) -> None:
        """Sends a sign of life to the client."""

    def fail(self, error: GatewayError, now: int) -> None:
        """A limit was passed."""


class Patience:
    """The timer of one attempt."""

    __slots__ = ("_clock", "_exchange", "_loop", "_route", "_timer", "_waiting", "progress")

    def __init__(self, waiting: Waiting, exchange: Exchange, route: Route, clock: Callable[[], int]) -> None:
        self._waiting: Waiting | None = waiting
        self._exchange = exchange
        self._route = route
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.progress = Progress(received=exchange.timeline.recv, started=clock(), is_stream=exchange.is_stream)

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
        if progress.is_stream:
            waiting.note(progress, now)
        action, when = due(progress, route.timeouts, route.budget, now)
        if action != "none":
            if action == "budget":
                progress.budget_passed = True
                self._exchange.budget_action = route.budget.on_exceed
            elif action == "heartbeat":
                waiting.beat()
                progress.last_write = now
            else:
                waiting.fail(too_slow(action, route.timeouts, self._exchange.upstream), now)
            if waiting.is_over:
                return
            _, when = due(progress, route.timeouts, route.budget, now)
        self._timer = self._loop.call_later(max(SOONEST_S, (when - now) / NS), self._look_late, when)

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
