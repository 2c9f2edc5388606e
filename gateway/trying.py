"""All attempts of one request: which upstream first, which next, when a second beside the first, and which one answers.

`policy` decides (`budget.py` what an event asks for, `retrying.py` what may be sent again, `balance.py` who is asked);
this class keeps the facts, carries the decisions out and tells breakers, predictors and budgets what came of it.

Attempts run one after the other in the request's own task; only one that is started beside another (hedge, fallback at
the budget) gets a task of its own, held here. Whichever has the beginning of an answer first, claims the caller; the
connections of all others close in that same call of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING

from gateway.answering import is_answer
from gateway.choosing import Chooser
from gateway.complaints import budget_exceeded, gone_silent
from gateway.policy.budget import BudgetMachine, Facts
from gateway.policy.poison import Poison
from gateway.policy.retrying import default_idempotent
from gateway.prospects import first_token_ms, prospects
from gateway.relay import Result
from gateway.sending import LARGE_BYTES, Terms
from gateway.settling import book_failures, is_kill, poisonous, settle, the_telling_one
from gateway.timing.prompts import measure
from gateway.wire.kinds import GENERATING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.account import Account
    from gateway.answering import Answering
    from gateway.attempt import Attempt
    from gateway.choosing import Pool
    from gateway.errors import GatewayError
    from gateway.exchange import Exchange
    from gateway.policy.budget import Event
    from gateway.reply import Reply
    from gateway.runtime import Fleet
    from gateway.sending import Prepared, Sender

log = logging.getLogger("gateway.trying")

NS = 1_000_000_000
MS = 1_000_000
HEDGE_LIMIT_BYTES = 128 * 1024  # a long prefill is too dear to be done twice (fault-catalogue 3.7)


class Crew:
    """What every trial needs, made once. Holds no state of a request but what all of them learn of deadly ones."""

    def __init__(self, account: Account, sender: Sender, answering: Answering, clock: Callable[[], int]) -> None:
        self.account = account
        self.sender = sender
        self.answering = answering
        self.clock = clock
        self.poison = Poison(secrets.token_bytes(16))


class Trial:
    """One request's attempts. Implements `attempt.Gate` and `exchange.CallWatcher`."""

    __slots__ = (
        "_chooser", "_crew", "_detach", "_digest", "_ended", "_facts", "_fleet", "_hedge_at", "_inline",
        "_is_idempotent", "_machine", "_others", "_prepared", "_task", "_winner", "_x",
    )  # fmt: skip

    def __init__(
        self,
        x: Exchange,
        prepared: Prepared,
        crew: Crew,
        fleet: Fleet,
        fallback: Pool | None,
        detach: Callable[[], bool] | None = None,
    ) -> None:
        """`fallback`: where else to ask; `detach`: frees the caller's connection with a 202, False if it cannot."""
        self._x = x
        self._prepared = prepared
        self._crew = crew
        self._fleet = fleet
        self._chooser = Chooser(x, prepared, fleet, fallback)
        self._detach = detach
        route = prepared.route.config
        assert x.budget is not None
        self._machine = BudgetMachine(x.timeline.recv)
        self._facts = Facts(on_exceed=x.budget.on_exceed, is_opted_in=x.is_opted_in)
        stores = prepared.body is None or prepared.body.data.get("store") is not False
        self._is_idempotent = (
            route.idempotent if route.idempotent is not None else default_idempotent(prepared.rest, stores=stores)
        )
        self._task = asyncio.current_task()
        self._inline: Attempt | None = None
        self._others: dict[asyncio.Task[None], Attempt] = {}
        self._winner: Attempt | None = None
        self._ended: list[Attempt] = []  # losers excepted
        self._hedge_at = 0
        self._digest: bytes | None = None  # of the body, while any body is suspected of killing servers

    def __repr__(self) -> str:
        return f"<Trial {self._machine.state}, {len(self._ended)} attempts ended, {len(self._others)} beside>"

    async def run(self) -> Reply | None:
        """The answer to send, or None when it was relayed. Raises `GatewayError`, `ClientGone`."""
        x, prepared = self._x, self._prepared
        now = self._crew.clock()
        self._fleet.extra.note_request(now)
        if self._crew.poison.has_suspects(now):
            self._digest = self._crew.poison.digest(prepared.raw)
            if self._crew.poison.is_refused(self._digest, now, self._has_died):
                raise poisonous()
        if x.kind in GENERATING and prepared.is_read:
            prepared.prompt = measure(prepared.raw)
            if len(prepared.raw) > LARGE_BYTES:
                _ = prepared.prompt.blocks  # else it holds on to the bytes until somebody asks
        try:
            attempt: Attempt | None = self._first()
            while attempt is not None:
                await self._ask(attempt)
                attempt = await self._next(attempt)
            decides = self._winner or the_telling_one(self._ended)
            book_failures(x, self._ended, decides)
            return self._crew.answering.outcome(x, decides)
        finally:
            if self._others:
                await self._stop_others()

    # The order of things

    def _first(self) -> Attempt:
        now = self._crew.clock()
        attempt = self._chooser.begin("first", now) or self._chooser.begin("fallback", now)
        if attempt is None:
            raise self._chooser.refusal(now)
        self._plan_hedge(attempt)
        return attempt

    async def _ask(self, attempt: Attempt) -> None:
        """In the request's own task."""
        self._inline = attempt
        try:
            await self._carry(attempt)
        finally:
            self._inline = None

    async def _carry(self, attempt: Attempt) -> None:
        terms = Terms(holds=self._holds(attempt), hedge_at=self._hedge_at)
        try:
            await self._crew.sender.ask(self._x, self._prepared, attempt, self, terms)
        finally:
            self._settle(attempt)

    async def _next(self, ended: Attempt) -> Attempt | None:
        """The attempt to make now, after this one ended; None: it is decided."""
        while True:
            if is_answer(ended.result):
                if self.claim(ended, self._crew.clock()):
                    self._ended.append(ended)
                    return None
            elif ended.has_failed:
                self._ended.append(ended)
                following = self._after_failure(ended)
                if following is not None:
                    return following
            if not self._others:
                return None
            ended = await self._one_of_the_others()

    async def _one_of_the_others(self) -> Attempt:
        done, _ = await asyncio.wait(self._others, return_when=asyncio.FIRST_COMPLETED)
        task = done.pop()
        attempt = self._others.pop(task)
        if task.cancelled():  # it had no connection yet when another one won
            self._settle(attempt)
            attempt.result = Result("outrun")
        else:
            task.result()
        return attempt

    def _after_failure(self, ended: Attempt) -> Attempt | None:
        """What the table says to a failed attempt."""
        if self._machine.is_promised or self._x.outcome is not None:
            return None
        now, facts = self._crew.clock(), self._facts
        self._note_kill(ended, now)
        decision = self._chooser.may_follow(ended, now, is_idempotent=self._is_idempotent, sent=self._sent)
        facts.others_run = bool(self._others)
        following = None
        if not facts.others_run and decision.is_allowed:
            following = self._chooser.begin("retry", now, with_token=decision.needs_token)
            facts.can_retry = following is not None
            if following is None:
                following = self._chooser.begin("fallback", now, with_token=decision.needs_token)
                facts.can_fall_back = following is not None
        self._on("failed", now)  # `retry` or `fallback` exactly where there is one
        facts.can_retry = facts.can_fall_back = False
        if following is not None and decision.needs_token:
            self._fleet.extra.note_extra("retry", now)
        return following

    @property
    def _sent(self) -> int:
        """Ended attempts of which something left this host."""
        return sum(1 for attempt in self._ended if attempt.sent)

    def _note_kill(self, ended: Attempt, now: int) -> None:
        if is_kill(ended) and not self._x.cleaned:  # what cleaning changed is not what the next one will bring
            self._digest = self._digest or self._crew.poison.digest(self._prepared.raw)
            self._crew.poison.note_kill(self._digest, ended.state.name, ended.state.restarts, now)

    def _has_died(self, upstream: str, life: int) -> bool:
        state = self._fleet.upstreams.get(upstream)
        return state is not None and (state.restarts > life or state.is_up is False)

    def _holds(self, attempt: Attempt) -> bool:
        """Whether somebody else could still answer: then nothing goes out before the first token (B22)."""
        if self._x.is_opted_in or attempt is not self._inline:  # one beside another wins by a token (3.7)
            return True
        if not self._chooser.has_choice or not self._is_idempotent or self._ended:
            return False
        return next(self._chooser.untried(self._crew.clock()), None) is not None

    # Hedging

    def _plan_hedge(self, attempt: Attempt) -> None:
        """A second upstream is asked after the p95 of upstream TTFT and not before the budget."""
        x, prepared = self._x, self._prepared
        assert x.budget is not None
        if x.budget.on_exceed != "hedge" or attempt.kind != "first" or len(prepared.raw) > HEDGE_LIMIT_BYTES:
            return
        if attempt.predictor is None or prepared.prompt is None:  # nothing with a first token
            return
        p95_s = attempt.predictor.p95_s(prepared.prompt)
        due = x.timeline.recv + (x.budget.ttft_ms or 0) * MS
        if p95_s is not None:
            due = max(due, self._crew.clock() + int(p95_s * NS))
        elif x.budget.ttft_ms is None:
            return
        self._hedge_at = due

    def on_hedge_due(self, now: int) -> None:
        self._hedge_at = 0
        attempt = self._chooser.begin("hedge", now, with_token=True, in_room=True) if self._may_hedge(now) else None
        self._facts.can_hedge = attempt is not None
        self._on("hedge_due", now)
        if attempt is not None:
            self._fleet.extra.note_extra("hedge", now)
            self._x.budget_action = "hedge"
            self._spawn(attempt)

    def _may_hedge(self, now: int) -> bool:
        """Both budgets, upstreams that are not slow all together, and a request that may run twice (3.7)."""
        if not self._may_double() or not self._fleet.extra.may_hedge(now):
            return False
        return not self._fleet.are_most_slow([state.name for state in self._prepared.route.upstreams], now)

    def _may_double(self) -> bool:
        """A second attempt beside the first, which shows its first token, and is the only one so far."""
        is_alone = not self._others and not self._sent and not self._machine.is_promised
        return is_alone and self._is_idempotent and self._x.is_seen

    def on_silence(self, attempt: Attempt, now: int) -> None:
        """Asks another upstream, where one repetition is allowed; else goes on waiting: the last one is never cut."""
        is_first = attempt is self._inline and not self._others and not self._sent and not self._machine.is_promised
        if not is_first or not self._is_idempotent or not self._fleet.extra.may_retry(now) or attempt.relay is None:
            return
        if any(state.standing.bucket.is_allowed for state in self._chooser.untried(now)):
            attempt.relay.fail(gone_silent(attempt.state.name), now)

    def _spawn(self, attempt: Attempt) -> None:
        task = asyncio.get_running_loop().create_task(self._carry(attempt), name=f"attempt-{attempt.kind}")
        self._others[task] = attempt

    def describe(self) -> dict[str, object]:
        """Phase and estimates of the running request, for whoever waits for it."""
        attempt = self._winner or self._inline or next(iter(self._others.values()), None)
        return prospects(self._x, attempt, self._crew.clock())

    @property
    def has_answered(self) -> bool:
        """Something of an upstream's answer is out."""
        return self._winner is not None

    # attempt.Gate

    def claim(self, attempt: Attempt, now: int) -> bool:
        if self._winner is not None:
            return self._winner is attempt
        self._winner = attempt
        self._on("token", now)
        if self._inline is not None and self._inline is not attempt and self._inline.relay is not None:
            self._inline.relay.outrun()
        for task, other in self._others.items():
            if other is not attempt:
                _stop(task, other)
        if self._digest is not None and (attempt.result is None or attempt.result.kind == "held"):
            self._crew.poison.note_answer(self._digest)
        beside = [a for a in self._others.values() if a.is_settled and a.has_failed]
        book_failures(self._x, [*self._ended, *beside], attempt)  # before the head goes out, which names them
        self._prepared.free()
        self._x.adopt(attempt)
        return True

    def wants(self, attempt: Attempt) -> bool:
        return self._winner is None or self._winner is attempt

    def leads(self, attempt: Attempt) -> bool:
        if self._winner is not None:
            return self._winner is attempt
        return self._inline is attempt or (self._inline is None and next(iter(self._others.values()), None) is attempt)

    def on_budget(self, attempt: Attempt, now: int) -> None:
        if not self.leads(attempt) or self._x.budget_action is not None:
            return
        x, facts = self._x, self._facts
        assert x.budget is not None
        if facts.is_opted_in and (self._detach is None or not self._detach()):
            facts.is_opted_in = x.is_opted_in = False
        beside = None
        if x.budget.on_exceed == "fallback" and not facts.is_opted_in and self._may_double():
            beside = self._chooser.begin("fallback", now, with_token=True) if self._fleet.extra.may_retry(now) else None
        facts.can_fall_back = beside is not None
        action = self._on("budget", now)
        facts.can_fall_back = False
        x.budget_action = {
            "detach": "pending", "beat": "heartbeat", "refuse": "fail", "fallback": "fallback",
        }.get(action, "wait")  # fmt: skip
        if action == "refuse" and attempt.relay is not None:
            attempt.relay.fail(budget_exceeded(x.budget, attempt.state.name), now)
        elif beside is not None:
            self._fleet.extra.note_extra("retry", now)
            self._spawn(beside)

    def estimate_ms(self, attempt: Attempt, now: int) -> int | None:
        return first_token_ms(attempt, now)

    def on_token(self, attempt: Attempt, now: int) -> None:
        if attempt.predictor is not None and attempt.ticket is not None and not attempt.token_noted:
            attempt.token_noted = True
            attempt.predictor.first_token(attempt.ticket, now)
            self._fleet.ejections.note_token(attempt.state.name, now)
            actual = (now - attempt.sent) / NS
            expected = attempt.ticket.estimate.p50_s
            if expected > 0:
                self._crew.account.route(self._prepared.route.config.name).estimate_ratio.observe(actual / expected)

    # exchange.CallWatcher

    def on_client_gone(self) -> None:
        self._on("left", self._crew.clock())
        waiting = self._inline is not None and self._inline.relay is None
        for attempt in self._running():
            if attempt.relay is not None:
                attempt.relay.on_client_gone()
            elif attempt is not self._inline:
                waiting = True
        if waiting and self._task is not None and self._winner is None:
            self._task.cancel()

    def on_client_paused(self) -> None:
        for relay in [attempt.relay for attempt in self._running() if attempt.relay is not None]:
            relay.on_client_paused()

    def on_client_resumed(self) -> None:
        for relay in [attempt.relay for attempt in self._running() if attempt.relay is not None]:
            relay.on_client_resumed()

    def break_off(self, error: GatewayError, now: int) -> bool:
        """Ends from outside. True when the caller was told inside its started answer."""
        winner = self._winner
        return winner is not None and winner.relay is not None and winner.relay.break_off(error, now)

    def _running(self) -> list[Attempt]:
        inline = [self._inline] if self._inline is not None else []
        return [*inline, *self._others.values()]

    async def _stop_others(self) -> None:
        """The request is over: what still runs ends now, and is waited for, so that no task is left."""
        for task, attempt in self._others.items():
            _stop(task, attempt)
            task.cancel()
        for ended in await asyncio.gather(*self._others, return_exceptions=True):
            if isinstance(ended, Exception):
                log.error("internal error in an attempt that lost", exc_info=ended)
        for attempt in self._others.values():
            self._settle(attempt)  # a task that was cancelled before its first step has not
        self._others.clear()

    def _on(self, event: Event, now: int) -> str:
        return self._machine.on(event, now, self._facts)

    def _settle(self, attempt: Attempt) -> None:
        """Tells breaker, ejection, predictor and bucket. Always, once per attempt."""
        if not attempt.is_settled:
            attempt.is_settled = True
            settle(attempt, self._x, self._fleet, self._crew.clock())


def _stop(task: asyncio.Task[None], attempt: Attempt) -> None:
    """Closes its connection now; one that waits for a connection waits no longer."""
    if attempt.relay is not None:
        attempt.relay.outrun()
    elif attempt.result is None:
        task.cancel()
