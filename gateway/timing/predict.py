"""When the first token will come: before a request is sent, and while it waits (latency-methods §2).

    predict   a + b · (own + ahead), calibrated to a p50 and a p90; cheap enough to ask for every candidate upstream
    begin     the request was sent: from now on it is work ahead of others
    remaining how long it still has to wait, from its place in the line
    first_token, end, hedge_lost    what came true

One `Predictor` per (upstream, model); `Forecasts` holds those of an upstream. All instants are monotonic ns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from gateway.timing.calibration import Calibration
from gateway.timing.history import History
from gateway.timing.least_squares import START_A_S, START_B_S, LeastSquares
from gateway.timing.prompts import PrefixIndex, Prompt
from gateway.timing.shifts import Shifts
from gateway.timing.speed import Services, Speed
from gateway.timing.waiting import Basis, Estimate, Line, Told, Waiting

__all__ = ["Basis", "Estimate", "Forecasts", "Predictor", "Remaining", "Waiting"]

FEWEST_UPDATES: Final = 20  # before the fitted line is believed; §2.2
WARMUP_NS: Final = 120 * 1_000_000_000  # after a restart, in which nothing is learned; §2.2
# An outcome that took longer says how things were when it was sent: its p90 is judged, but the line has learned newer
# ones since. With 30 s the limits after a slowdown are missed in lines of minutes.
LATE_S: Final = 60.0
LEAST_S: Final = 0.25  # never less while pending; §2.3
MAX_MODELS: Final = 64  # per upstream; model names come from callers

_FACTOR_WEIGHT: Final = 0.05
_LEAST_FACTOR, _MOST_FACTOR = 0.3, 3.0


class Remaining(NamedTuple):
    """Seconds until the first token (or until the answer is complete); no number when the upstream is stalled."""

    p50_s: float | None
    p90_s: float | None
    basis: Literal["model", "history", "prior", "stalled"]


STALLED: Final = Remaining(None, None, "stalled")


class Predictor:
    """What one (upstream, model) will do, from what it did. `prior`: a (s) and b (s per 1,000 tokens) to start with."""

    __slots__ = (
        "_arrival", "_history", "_index", "_line", "_model", "_now", "_pending", "_reports_cache", "_restarted_ns",
        "_salt", "_services", "_shifts", "_speed", "cache_factor", "token_factor",
    )  # fmt: skip

    def __init__(
        self, index: PrefixIndex, model: str = "", prior: tuple[float, float] = (START_A_S, START_B_S)
    ) -> None:
        self._index = index
        self._salt = hash(model)
        self._model = LeastSquares(*prior)
        self._shifts = Shifts()
        self._arrival = Calibration()
        self._pending = Calibration()
        self._history = History()
        self._line = Line()
        self._speed = Speed()
        self._services = Services()
        self._restarted_ns: int | None = None
        self._reports_cache = False
        self._now = 0
        self.token_factor = 1.0
        """κ: tokens by the server's count over ours."""
        self.cache_factor: float | None = None
        """κ_h: cached tokens by the server's count over ours; None while it has not told any: then nothing counts."""

    def __repr__(self) -> str:
        return f"Predictor({self._line!r}, {self._model!r}, κ {self.token_factor:.2f})"

    @property
    def waiting(self) -> int:
        """Our requests there without a first token."""
        return len(self._line)

    @property
    def tokens_ahead(self) -> float:
        """Their uncached tokens."""
        return self._line.tokens

    @property
    def last_first_token_ns(self) -> int | None:
        return self._line.last_first_token_ns

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """a (s), b (s per 1,000 tokens), d (s per request ahead), c (s per 1,000 tokens squared)."""
        return self._model.coefficients

    def ahead_of(self, ticket: Waiting) -> int:
        """Our requests sent before this one that still have no first token; 0 once it has one itself or ended."""
        return self._line.before(ticket)[1] if ticket.in_line else 0

    @property
    def is_fitted(self) -> bool:
        return self._model.updates >= FEWEST_UPDATES

    # -- before it is sent ---------------------------------------------------------------------------------------------

    def predict(self, prompt: Prompt, now: int) -> Estimate:
        return self._look(prompt, now)[0]

    def p95_s(self, prompt: Prompt) -> float | None:
        """What 95 of 100 first tokens for prompts of this size took; None below 20 of them. For hedging."""
        uncached = self._uncached(prompt, self._share(prompt))
        return self._history.first_token_s(uncached, 0.95, self._now)

    def _look(self, prompt: Prompt, now: int) -> tuple[Estimate, float, float]:
        """The estimate, the raw one of the line, and the cached share by our own index."""
        self._now = now
        share = self._share(prompt)
        own = prompt.tokens * self.token_factor
        uncached = self._uncached(prompt, share)
        ahead = self._line.tokens + self._line.foreign_tokens(now)
        requests = len(self._line) + self._line.foreign(now)
        raw = self._model.predict(uncached, ahead, requests, self._speed.factor(self._model, now))
        basis: Basis = "model"
        p50 = self._arrival.p50(raw, requests)
        p90 = self._arrival.p90(p50, requests)
        if self._model.updates < FEWEST_UPDATES:
            basis, p50, p90 = "prior", raw, 2 * raw
            known = self._history.first_token_pair_s(uncached, now)
            if known is not None:
                basis, (p50, p90) = "history", known
        return Estimate(p50, p90, own, uncached, ahead, basis), raw, share

    def _share(self, prompt: Prompt) -> float:
        return self._index.cached_share(prompt, self._salt) if self._reports_cache else 0.0

    def _uncached(self, prompt: Prompt, share: float) -> float:
        hit = min(1.0, share * self.cache_factor) if self.cache_factor is not None else 0.0
        return max(1.0, prompt.tokens * self.token_factor * (1.0 - hit))

    # -- while it waits ------------------------------------------------------------------------------------------------

    def begin(self, prompt: Prompt, now: int, *, is_streaming: bool = True) -> Waiting:
        """The request was sent. `is_streaming`: its first token will be seen by us."""
        self._line.let_go(now)
        estimate, raw, share = self._look(prompt, now)
        ticket = Waiting(estimate, raw, prompt.tokens, share, now, is_streaming=is_streaming)
        ticket.requests_ahead = len(self._line) + self._line.foreign(now)
        if self._reports_cache:
            self._index.add(prompt, self._salt)
        self._line.join(ticket)
        return ticket

    def remaining(self, ticket: Waiting, now: int) -> Remaining:
        """Until its first token; 0 once it came or the request ended. Asked anew at each poll."""
        self._now = now
        if ticket.ended or ticket.first_token_ns:
            return Remaining(0.0, 0.0, "model")
        if ticket.in_line and self._line.is_stalled(now):
            return STALLED
        if not ticket.in_line:
            return self._by_history(ticket, now)
        if not self.is_fitted:
            return self._cold(ticket, now)
        bound_ns = ticket.due_ns if ticket.estimate.basis == "model" else max(ticket.cold_bound_ns, ticket.due_ns)
        if now > bound_ns:
            return self._by_history(ticket, now)
        raw = max(LEAST_S, self._work_s(ticket, now) - self._line.busy_ns(now) / 1e9)
        n = self._line.before(ticket)[1] + self._line.foreign(now)
        p50 = max(LEAST_S, self._pending.p50(raw, n))
        p90 = self._pending.p90(p50, n)
        if ticket.told is None:
            ticket.told = Told(now, raw, p50, p90, n)
        return Remaining(p50, p90, "model")

    def _cold(self, ticket: Waiting, now: int) -> Remaining:
        """Before the line is fitted: from the few services seen, else from the prior.

        Its bound is made anew at each first token of the line, which is news of how fast the line moves; when it is
        passed without any, nothing is known but how long the request has waited.
        """
        seen_ns = self._line.last_first_token_ns or 0
        tokens, requests = self._line.before(ticket)
        foreign = self._line.foreign(now)
        tokens += self._line.foreign_tokens(now) + ticket.estimate.uncached_tokens
        requests += foreign + 1
        work_s = self._services.work_s(tokens, requests)
        basis: Literal["model", "prior"] = "model"
        if work_s is None:
            basis, work_s = "prior", self._model.predict(0.0, tokens, requests)
        p50 = max(LEAST_S, work_s - self._line.busy_ns(now) / 1e9)
        if ticket.cold_seen_ns != seen_ns:
            ticket.cold_seen_ns = seen_ns
            ticket.cold_bound_ns = now + round(2 * p50 * 1e9)
        if now > ticket.cold_bound_ns:
            return self._by_history(ticket, now)
        return Remaining(p50, 2 * p50, basis)

    def _by_history(self, ticket: Waiting, now: int) -> Remaining:
        elapsed = (now - ticket.sent_ns) / 1e9
        p50, p90 = self._history.first_token_left_s(ticket.estimate.uncached_tokens, elapsed, now)
        return Remaining(max(LEAST_S, p50), max(LEAST_S, p50, p90), "history")

    def _work_s(self, ticket: Waiting, now: int) -> float:
        """What the server still has to do up to this request's first token."""
        tokens, requests = self._line.before(ticket)
        foreign = self._line.foreign(now)
        ahead = tokens + self._line.foreign_tokens(now)
        own = ticket.estimate.uncached_tokens
        return self._model.predict(own, ahead, requests + foreign, self._speed.factor(self._model, now))

    def until_complete(self, ticket: Waiting, now: int) -> Remaining:
        """Until the whole answer: the wait for its first token, then the usual length at the usual pace."""
        if ticket.ended:
            return Remaining(0.0, 0.0, "model")
        first = self.remaining(ticket, now) if ticket.in_line else Remaining(0.0, 0.0, "model")
        if first.p50_s is None or first.p90_s is None:
            return first
        since_s = 0.0
        if not ticket.in_line:  # it has its first token, or it must have it by now and cannot show it
            since_s = (now - (ticket.first_token_ns or ticket.sent_ns + round(ticket.estimate.p50_s * 1e9))) / 1e9
        decode = self._history.decode_left_s(max(0.0, since_s), now)
        if decode is None and ticket.in_line and first.basis == "model" and not self.is_fitted:
            # No answer has ended. Where there is one slot, a service holds a whole answer; else it is the least.
            service_s = self._services.work_s(ticket.estimate.uncached_tokens, 1) or 0.0
            decode = service_s, 2 * service_s
        if decode is None:
            p50, p90 = self._history.whole_left_s((now - ticket.sent_ns) / 1e9, now)
            return Remaining(max(LEAST_S, p50), max(LEAST_S, p50, p90), "history")
        p50 = max(LEAST_S, first.p50_s + decode[0])
        return Remaining(p50, max(p50, first.p90_s + decode[1]), first.basis)

    # -- what came true ------------------------------------------------------------------------------------------------

    def first_token(self, ticket: Waiting, now: int) -> None:
        """The first token was seen. Only the first call for a ticket counts, and none after its end."""
        if ticket.first_token_ns or ticket.ended:
            return
        self._now = ticket.first_token_ns = now
        seconds = (now - ticket.sent_ns) / 1e9
        is_warm = not self._is_warming(now)
        service = self._line.first_token(ticket, now)
        if service and is_warm:
            self._speed.add(service, ticket.estimate.uncached_tokens, now)
        if not self.is_fitted and (service or not ticket.requests_ahead):
            self._services.add(service or seconds, ticket.estimate.uncached_tokens, in_line=bool(service))
        if seconds <= 0:
            return
        if not is_warm:
            self._history.add_warmup(seconds, now)
            return
        self._learn(ticket, seconds, now)
        if ticket.told is not None and now > ticket.told.at_ns:
            self._learn_told(ticket.told, (now - ticket.told.at_ns) / 1e9)

    def hedge_lost(self, ticket: Waiting, now: int) -> None:
        """Ends a request that was given up because another upstream was faster.

        It would have taken longer than it did so far. Where that is more than was expected it is worth learning as it
        stands; where it is less, it says nothing.
        """
        seconds = (now - ticket.sent_ns) / 1e9
        is_news = not ticket.ended and not ticket.first_token_ns and seconds > ticket.estimate.p50_s
        if is_news and not self._is_warming(now):
            self._learn(ticket, seconds, now)
        self._close(ticket, now)

    def end(
        self, ticket: Waiting, now: int, *, prompt_tokens: int | None = None, cached_tokens: int | None = None,
        completion_tokens: int | None = None, tpot_s: float | None = None,
    ) -> None:  # fmt: skip
        """The request is over, however it went; what its usage told is learned. Calls after the first do nothing."""
        if ticket.ended:
            return
        self._close(ticket, now)
        if prompt_tokens is not None and prompt_tokens > 0:
            ratio = prompt_tokens / ticket.measured_tokens
            moved = self.token_factor + _FACTOR_WEIGHT * (ratio - self.token_factor)
            self.token_factor = min(max(moved, _LEAST_FACTOR), _MOST_FACTOR)
        if cached_tokens is not None:
            self._learn_cache(ticket, cached_tokens, prompt_tokens or ticket.estimate.own_tokens)
        if completion_tokens is not None and completion_tokens > 0:
            self._history.add_answer(completion_tokens, (now - ticket.sent_ns) / 1e9, now)
        if tpot_s is not None and tpot_s > 0:
            self._history.add_pace(tpot_s)

    def note_foreign(self, waiting: int, now: int) -> None:
        """Requests of others in the server's queue: what was scraped, less our own (`UpstreamState.note_waiting`)."""
        self._line.note_foreign(waiting, now)

    def restarted(self, now: int) -> None:
        """The upstream came back: its cache is empty, and what it does while warming up teaches nothing."""
        self._restarted_ns = now
        self._index.clear()
        self._line.restarted()

    def warmup_s(self, share: float) -> float | None:
        """A quantile of the first tokens within two minutes of the last restarts; None when there were none."""
        return self._history.warmup_s(share)

    def _is_warming(self, now: int) -> bool:
        return self._restarted_ns is not None and now - self._restarted_ns < WARMUP_NS

    def _close(self, ticket: Waiting, now: int) -> None:
        self._now = now
        self._line.leave(ticket)
        ticket.ended = True

    def _learn(self, ticket: Waiting, seconds: float, now: int) -> None:
        estimate, requests = ticket.estimate, ticket.requests_ahead
        uncached = estimate.uncached_tokens
        self._history.add_first_token(uncached, seconds, now)
        if estimate.basis == "model":
            self._arrival.learn_spread(seconds, estimate.p50_s, estimate.p90_s, requests)
            if requests and seconds > LATE_S:
                return
            verdict = self._shifts.judge(seconds, ticket.raw_s)
            if verdict == "outlier":
                return
            if verdict == "shift":
                self._model.shift()
                self._arrival.restart()
        self._model.update(uncached, estimate.ahead_tokens, requests, seconds)
        if self.is_fitted:
            by_now = self._model.predict(
                uncached, estimate.ahead_tokens, requests, self._speed.factor(self._model, now)
            )  # fmt: skip
            self._arrival.learn_bias(seconds, by_now)

    def _learn_told(self, told: Told, seconds: float) -> None:
        self._pending.learn_spread(seconds, told.p50_s, told.p90_s, told.ahead)
        if not told.ahead or seconds <= LATE_S:
            self._pending.learn_bias(seconds, told.raw_s)

    def _learn_cache(self, ticket: Waiting, cached_tokens: int, prompt_tokens: float) -> None:
        self._reports_cache = True
        expected = ticket.cached_share * prompt_tokens
        if expected < 1:
            return
        self._index.learn(expected, cached_tokens)
        ratio = cached_tokens / expected
        before = self.cache_factor
        moved = ratio if before is None else before + _FACTOR_WEIGHT * (ratio - before)
        self.cache_factor = min(moved, 1 / max(ticket.cached_share, 0.01))


class Forecasts:
    """The predictors of one upstream, one per model, over one prefix index. The least used model goes first."""

    __slots__ = ("_predictors", "_prior", "index")

    def __init__(self, prior: tuple[float, float] = (START_A_S, START_B_S)) -> None:
        self.index = PrefixIndex()
        self._prior = prior
        self._predictors: OrderedDict[str, Predictor] = OrderedDict()

    def __repr__(self) -> str:
        return f"Forecasts({len(self._predictors)} models, {self.index!r})"

    def __len__(self) -> int:
        return len(self._predictors)

    def __iter__(self) -> Iterator[Predictor]:
        return iter(list(self._predictors.values()))

    def for_model(self, model: str) -> Predictor:
        found = self._predictors.get(model)
        if found is None:
            found = self._predictors[model] = Predictor(self.index, model, self._prior)
            if len(self._predictors) > MAX_MODELS:
                self._predictors.popitem(last=False)
        else:
            self._predictors.move_to_end(model)
        return found

    def restarted(self, now: int) -> None:
        for predictor in self._predictors.values():
            predictor.restarted(now)
