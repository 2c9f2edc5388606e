"""The requests at one upstream and model that have no first token yet, in the order in which they were sent.

A server takes prompts in turn, so what stands before a request is the work of those sent earlier, less what the
server has done since it last showed a first token (latency-methods §2.1, §2.3).

A plain answer shows its first token to nobody. Such a request leaves the line when one that was sent later gets its
first token, or when its own was due at its p90; it would else count as work for as long as its answer is decoded.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

STALLED_NS: Final = 30 * 1_000_000_000
FOREIGN_TTL_NS: Final = 5 * 1_000_000_000
_MEAN_WEIGHT: Final = 0.05

Basis = Literal["model", "history", "prior"]


class Estimate(NamedTuple):
    """Seconds from the sending of a request to its first token, as they look before it is sent."""

    p50_s: float
    p90_s: float
    own_tokens: float
    uncached_tokens: float
    ahead_tokens: float
    basis: Basis


class Told(NamedTuple):
    """A remaining time that was told, to be judged when the first token comes."""

    at_ns: int
    raw_s: float
    p50_s: float
    p90_s: float
    ahead: int


class Waiting:
    """One request that was sent. Made by `Predictor.begin`; its fields belong to the predictor."""

    __slots__ = (
        "cached_share", "cold_bound_ns", "cold_seen_ns", "ended", "estimate", "first_token_ns", "in_line",
        "is_streaming", "measured_tokens", "raw_s", "requests_ahead", "sent_ns", "told",
    )  # fmt: skip

    def __init__(
        self, estimate: Estimate, raw_s: float, measured_tokens: float, cached_share: float, sent_ns: int,
        *, is_streaming: bool,
    ) -> None:  # fmt: skip
        self.estimate = estimate
        """As it was when the request was sent."""
        self.raw_s = raw_s
        """What the line alone said, before calibration."""
        self.measured_tokens = measured_tokens
        """Before the factor of the upstream."""
        self.cached_share = cached_share
        """Of the prompt, by our own index."""
        self.requests_ahead = 0
        self.sent_ns = sent_ns
        self.is_streaming = is_streaming
        self.first_token_ns = 0
        self.in_line = False
        self.ended = False
        self.cold_bound_ns = 0
        """Before the line is fitted: until when its estimate may be believed; 0 while there was none."""
        self.cold_seen_ns = -1
        """Before the line is fitted: the last first token of the line when that estimate was made."""
        self.told: Told | None = None
        """Its remaining time as the line gave it first."""

    def __repr__(self) -> str:
        state = "ended" if self.ended else "answering" if self.first_token_ns else "waiting"
        return f"Waiting({state}, {self.estimate.uncached_tokens:.0f} tokens, p50 {self.estimate.p50_s:.2f} s)"

    @property
    def due_ns(self) -> int:
        """When its first token will very likely have come."""
        return self.sent_ns + round(self.estimate.p90_s * 1e9)


class Line:
    """Who waits, how much work that is, and how fast it is done."""

    __slots__ = ("_foreign", "_foreign_ns", "_mean_tokens", "_waiting", "last_first_token_ns", "tokens")

    def __init__(self) -> None:
        self._waiting: dict[Waiting, None] = {}
        self._mean_tokens = 0.0
        self._foreign = 0
        self._foreign_ns = 0
        self.tokens = 0.0
        """Uncached tokens of all that wait."""
        self.last_first_token_ns: int | None = None

    def __repr__(self) -> str:
        return f"Line({len(self._waiting)} waiting, {self.tokens:.0f} tokens)"

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest_ns(self) -> int | None:
        """When the first of those that wait was sent."""
        return next(iter(self._waiting)).sent_ns if self._waiting else None

    def join(self, ticket: Waiting) -> None:
        tokens = ticket.estimate.uncached_tokens
        self._waiting[ticket] = None
        ticket.in_line = True
        self.tokens += tokens
        weight = _MEAN_WEIGHT if self._mean_tokens else 1.0
        self._mean_tokens += weight * (tokens - self._mean_tokens)

    def leave(self, ticket: Waiting) -> None:
        """However it ended; without effect when it is not in the line."""
        if ticket.in_line:
            del self._waiting[ticket]
            ticket.in_line = False
            self.tokens = max(0.0, self.tokens - ticket.estimate.uncached_tokens) if self._waiting else 0.0

    def let_go(self, now: int) -> None:
        """Those whose first token nobody will see leave once it was due."""
        for ticket in [*self._waiting]:
            if ticket.is_streaming or ticket.due_ns > now:
                return
            self.leave(ticket)

    def first_token(self, ticket: Waiting, now: int) -> float | None:
        """Seconds since the first token before it, if the request waited then already; else None."""
        before = self.last_first_token_ns
        service = (now - before) / 1e9 if before is not None and before >= ticket.sent_ns else None
        self.last_first_token_ns = max(before or 0, now)
        if ticket.in_line and not self._is_first(ticket):
            for other in [*self._waiting]:
                if other is ticket:
                    break
                if not other.is_streaming:
                    self.leave(other)
        self.leave(ticket)
        return service

    def _is_first(self, ticket: Waiting) -> bool:
        return next(iter(self._waiting)) is ticket

    def restarted(self) -> None:
        """Whoever else waited there does no longer."""
        self._foreign = 0

    def note_foreign(self, waiting: int, now: int) -> None:
        self._foreign = max(0, waiting)
        self._foreign_ns = now

    def foreign_tokens(self, now: int) -> float:
        """Work that others have sent there, as far as was seen in the last 5 s."""
        return self.foreign(now) * self._mean_tokens

    def foreign(self, now: int) -> int:
        """Requests of others that wait there."""
        return self._foreign if self._foreign and now - self._foreign_ns <= FOREIGN_TTL_NS else 0

    def busy_ns(self, now: int) -> int:
        """For how long the server has worked without showing a first token; 0 when nobody waits."""
        oldest = self.oldest_ns
        return 0 if oldest is None else max(0, now - max(self.last_first_token_ns or 0, oldest))

    def is_stalled(self, now: int) -> bool:
        return self.busy_ns(now) >= STALLED_NS

    def before(self, ticket: Waiting) -> tuple[float, int]:
        """Tokens and requests that stand before this one in the line."""
        tokens, requests = 0.0, 0
        for other in self._waiting:
            if other is ticket:
                break
            tokens += other.estimate.uncached_tokens
            requests += 1
        return tokens, requests
