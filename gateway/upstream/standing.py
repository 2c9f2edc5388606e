"""What an upstream has shown so far: a breaker and a predictor per model, and the tokens that extra attempts cost."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from gateway.policy.balance import PeakEwma
from gateway.policy.breaker import Breaker
from gateway.policy.ejection import first_token_limit_ns
from gateway.policy.retrying import TokenBucket
from gateway.timing.predict import Forecasts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gateway.attempt import Attempt
    from gateway.config import Upstream
    from gateway.policy.breaker import State
    from gateway.timing.predict import Predictor

MAX_MODELS = 64  # per upstream; what is beyond shares one breaker and predictor
OTHER = "other"
PLAIN_SILENCE_NS = 60_000_000_000  # longer than most whole answers take


class Standing:
    """Of one upstream. `names`: models that the configuration names, the only ones that become label values."""

    __slots__ = (
        "_config", "_half_open_wait_ms", "_known", "_on_breaker", "_on_transition", "breakers", "bucket", "cost",
        "forecasts", "last_end_ns", "names", "on_return", "running",
    )  # fmt: skip

    def __init__(
        self,
        config: Upstream,
        *,
        half_open_wait_ms: int,
        on_breaker: Callable[[str], None] | None = None,
        on_transition: Callable[[str, State, State], None] | None = None,
        names: Collection[str] = frozenset(),
    ) -> None:
        self._config = config
        self._half_open_wait_ms = half_open_wait_ms
        self._on_breaker = on_breaker
        self._on_transition = on_transition
        self._known: set[str] = set()
        self.on_return: Callable[[], None] | None = None
        """Called when a breaker closes after its probes: traffic comes back slowly."""
        self.names = names
        self.breakers: dict[str, Breaker] = {}
        self.forecasts = Forecasts()
        self.bucket = TokenBucket()
        self.cost = PeakEwma()
        self.running: set[Attempt] = set()
        self.last_end_ns = 0  # when an answer last came to its end

    def label(self, model: str) -> str:
        """The model as a key and label: its name where the configuration or the server names it, else `other`."""
        if model in self._known:
            return model
        if model in self.names and len(self._known) < MAX_MODELS:
            self._known.add(model)
            return model
        return OTHER

    def breaker(self, label: str) -> Breaker:
        known = self.breakers.get(label)
        if known is None:
            if self._on_breaker is not None:
                self._on_breaker(label)
            known = self.breakers[label] = Breaker(
                self._config.breaker,
                half_open_wait_ms=self._half_open_wait_ms,
                jitter=random.random,
                on_transition=self._teller(label),
            )
        return known

    def predictor(self, label: str) -> Predictor:
        return self.forecasts.for_model(label)

    def waiting(self) -> int:
        """Our requests there without a first token."""
        return sum(predictor.waiting for predictor in self.forecasts)

    def last_sign_ns(self) -> int:
        """When the upstream last gave anybody anything: a token, the first or not (C114), or the end of an answer."""
        tokens = (a.reader.t_last for a in self.running if a.reader is not None)
        return max(self.last_end_ns, max(tokens, default=0))

    def waits(self) -> list[tuple[int, int]]:
        """Requests that have got nothing yet: when each was sent, and how long it may take before it is slow."""
        slow_ms = self._config.breaker.slow_call_duration_ms
        found = []
        for attempt in self.running:
            ticket, reader = attempt.ticket, attempt.reader
            if ticket is not None and attempt.sent and (reader is None or not reader.t_event):
                limit = first_token_limit_ns(slow_ms, int(ticket.estimate.p50_s * 1e9))
                if not ticket.is_streaming:  # a plain answer shows nothing before its end
                    limit = max(limit, PLAIN_SILENCE_NS)
                found.append((attempt.sent, limit))
        return found

    def stalled(self, now: int) -> list[tuple[int, int]]:
        """Streams that began and said nothing for longer than a first token may take: since when, and that limit.

        To be judged against the last end of an answer: a server that stops in the middle of each still begins new ones.
        """
        limit = self._config.breaker.slow_call_duration_ms * 1_000_000
        return [
            (attempt.reader.t_last, limit)
            for attempt in self.running
            if attempt.reader is not None and 0 < attempt.reader.t_last < now - limit
        ]

    def _teller(self, label: str) -> Callable[[State, State], None]:
        def tell(old: State, new: State) -> None:
            if self._on_transition is not None:
                self._on_transition(label, old, new)
            if (old, new) == ("half_open", "closed") and self.on_return is not None:
                self.on_return()

        return tell
