"""May a failed attempt be followed by another, where, and at whose expense. Pure.

The classes of fault-catalogue 3.1, first row that fits:

    R4  part of the answer went out to the caller                            never
    R0  nothing left this host: DNS, refused, connect time, TLS, no slot     every other upstream, free of charge
    R3  a complete 429, 500, 502, 503 or 504, nothing of it forwarded        one other upstream, a token
    R6  any other complete status; an answer that breaks the rules           never
    R5  too slow                                                             never: that is what hedging is for
    R2  an answer that was cut before any of it went out (C1, C032)          one other upstream, a token
    R1  a reused connection, and not one byte came                           at once, same upstream, fresh connection
    R2  a fresh connection, and not one byte came; bytes that got stuck      one other upstream, a token
    R6  whatever else                                                        never

500 is among the statuses of R3 because the catalogue's storm of 5xx (B14) says so. Only R0 goes without the route's
permission to repeat: of everything else part may have been executed.
"""

from __future__ import annotations

import re
from calendar import monthrange, timegm
from dataclasses import dataclass
from typing import Final, Literal

from gateway.wire.headers import Headers, first
from gateway.wire.kinds import DATA_PLANE_PATHS, GENERATING

RetryClass = Literal["R0", "R1", "R2", "R3", "R4", "R5", "R6"]
Where = Literal["nowhere", "reconnect", "other", "same"]
Why = Literal[
    "allowed", "forwarded", "not_retryable", "too_slow", "not_idempotent", "attempts", "alone", "budget", "late"
]  # fmt: skip
Extra = Literal["retry", "hedge"]

MAX_ATTEMPTS: Final = 2  # sendings; the free reconnect of R1 and attempts that sent nothing do not count
BASE_MS: Final = 50.0  # backoff before the same upstream is asked again (fault-catalogue 3.6)
CAP_MS: Final = 1000.0
MAX_RETRY_AFTER_S: Final = 300.0  # what an upstream may make us wait for it

BUCKETS: Final = 11  # the current one is only begun: with ten the window would be 9 to 10 s
BUCKET_NS: Final = 1_000_000_000

_REFUSALS: Final = frozenset((429, 500, 502, 503, 504))
_BY_REASON: Final[dict[str, RetryClass]] = {
    # broken rules: the same request would get the same answer, or the answer cannot be trusted
    "bad_framing": "R6", "bad_header": "R6", "bad_status": "R6", "head_too_large": "R6", "interim_flood": "R6",
    "not_http": "R6", "eof_in_head": "R6", "unexpected_101": "R6", "surplus_bytes": "R6", "redirect": "R6",
    "content_type": "R6", "content_encoding": "R6", "mode_mismatch": "R6", "response_too_large": "R6",
    "bad_event": "R6", "bad_utf8": "R6", "line_too_long": "R6", "internal": "R6",
    # too slow
    "first_byte_timeout": "R5", "first_token_timeout": "R5", "total_timeout": "R5",
    # accepted and never answered by a server that answers nobody (C113): as good as no server
    "silent": "R2",
    # A7: part of the request left, none of it was answered
    "write_stall": "R2",
}  # fmt: skip
_REPEATABLE: Final = (
    frozenset(path for path, kind in DATA_PLANE_PATHS.items() if kind != "responses")
    | (GENERATING - {"responses"})
    | {"embeddings", "/v1/models"}
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Facts about an attempt that failed."""

    nothing_sent: bool = False  # no byte of the request left this host
    is_reused: bool = False  # the connection had served a request before
    response_bytes: int = 0  # of this exchange, head included
    forwarded: bool = False  # a header or a byte of the answer went out to the caller
    status: int = 0  # of a complete answer; 0: there is none
    reason: str = ""  # word of fault-catalogue part 5
    cut_before_forwarding: bool = False  # the answer's body had begun, then the connection was lost
    retry_after_s: float | None = None  # what the answer asked for, see `retry_after_of`


@dataclass(frozen=True, slots=True)
class Decision:
    """Where the next attempt goes. `why` is `allowed`, or the bounded word for logs of what forbids it."""

    where: Where
    why: Why
    needs_token: bool = False  # to be booked: `ExtraAttempts.note_extra("retry", now)`
    wait_ms: float = 0.0

    @property
    def is_allowed(self) -> bool:
        return self.where != "nowhere"


RECONNECT: Final = Decision("reconnect", "allowed")
ELSEWHERE_FREE: Final = Decision("other", "allowed")
ELSEWHERE: Final = Decision("other", "allowed", needs_token=True)
_NEVER: Final[dict[RetryClass, Decision]] = {
    "R4": Decision("nowhere", "forwarded"),
    "R5": Decision("nowhere", "too_slow"),
    "R6": Decision("nowhere", "not_retryable"),
}


def class_of(failure: Failure) -> RetryClass:
    """The class of fault-catalogue 3.1; the table of this module's docstring, row by row."""
    if failure.forwarded:
        return "R4"
    if failure.nothing_sent:
        return "R0"
    if failure.status:
        return "R3" if failure.status in _REFUSALS else "R6"
    known = _BY_REASON.get(failure.reason)
    if known is not None:
        return known
    if failure.cut_before_forwarding:
        return "R2"
    if failure.response_bytes == 0:
        return "R1" if failure.is_reused else "R2"
    return "R6"


def may_retry(
    retry_class: RetryClass,
    *,
    is_idempotent: bool,
    attempts: int,
    other_upstream: bool,
    has_token: bool,
    reconnected: bool = False,
    same_upstream: bool = False,
    fraction: float = 0.0,
    remaining_ms: float | None = None,
) -> Decision:
    """Whether and where the request is sent again.

    `attempts`: sendings so far of which something left, without the reconnect of R1. `other_upstream`: one that this
    request has not been at, and that may take it. `has_token`: its bucket and the ceiling both allow one more.
    `reconnected`: the free reconnect is used up, so that a second failure counts as R2 (A10). `same_upstream`: where
    nothing left and no other upstream is there, the same one may be asked after a backoff (from `fraction`, [0, 1)).
    `remaining_ms`: of the caller's or the route's deadline, which covers all attempts and waits.
    """
    if retry_class in _NEVER:
        return _NEVER[retry_class]
    decision = _where(
        "R2" if retry_class == "R1" and reconnected else retry_class,
        is_idempotent=is_idempotent,
        attempts=attempts,
        other_upstream=other_upstream,
        has_token=has_token,
        backoff_ms=full_jitter(max(0, attempts - 1), BASE_MS, CAP_MS, fraction) if same_upstream else None,
    )
    if decision.is_allowed and remaining_ms is not None and decision.wait_ms >= remaining_ms:
        return Decision("nowhere", "late")
    return decision


def _where(
    retry_class: RetryClass,
    *,
    is_idempotent: bool,
    attempts: int,
    other_upstream: bool,
    has_token: bool,
    backoff_ms: float | None,
) -> Decision:
    if retry_class != "R0" and not is_idempotent:
        return Decision("nowhere", "not_idempotent")
    if retry_class == "R1":
        return RECONNECT
    if attempts >= MAX_ATTEMPTS:
        return Decision("nowhere", "attempts")
    if retry_class != "R0":
        if not other_upstream:
            return Decision("nowhere", "alone")
        return ELSEWHERE if has_token else Decision("nowhere", "budget")
    if other_upstream:
        return ELSEWHERE_FREE
    return Decision("nowhere", "alone") if backoff_ms is None else Decision("same", "allowed", wait_ms=backoff_ms)


def default_idempotent(endpoint: str, *, stores: bool = True) -> bool:
    """Whether a request may be sent twice where the route does not say so (fault-catalogue 3.1).

    `endpoint` is a canonical path or a kind that stands for one. What the data plane's paths compute depends on the
    body alone and is kept nowhere, `/v1/responses` excepted unless the body says `store: false` (`stores`). Unknown
    paths, which a route may open, are files, batches, jobs: not repeated.
    """
    if endpoint in ("responses", "/v1/responses"):
        return not stores
    return endpoint in _REPEATABLE


# At whose expense


class TokenBucket:
    """How many failures one upstream may have before it gets no extra attempts: gRPC A6 (fault-catalogue 3.5).

    One per upstream, shared by retries and hedges: the upstream that would *get* the extra attempt is asked, so that a
    bad neighbour does not cost a good one its retries. Full at first; a failure takes one token, a success gives a
    tenth back; half or less means no. First attempts are always sent. To be booked: outcomes of classes R2, R3 and R5
    as failures and answers as successes; R0, R1, 4xx, leaving callers and hedges that lost are neither.
    """

    __slots__ = ("_limit", "_ratio", "_tokens")

    def __init__(self, max_tokens: int = 10, token_ratio: float = 0.1) -> None:
        self._limit = max_tokens * 1000  # thousandths, as gRPC counts: ten tenths are one
        self._ratio = round(token_ratio * 1000)
        self._tokens = self._limit

    def __repr__(self) -> str:
        return f"<TokenBucket {self.tokens:g} of {self._limit / 1000:g}>"

    @property
    def tokens(self) -> float:
        return self._tokens / 1000

    @property
    def is_allowed(self) -> bool:
        """An extra attempt may be sent to this upstream."""
        return 2 * self._tokens > self._limit

    def note_success(self) -> None:
        self._tokens = min(self._limit, self._tokens + self._ratio)

    def note_failure(self) -> None:
        self._tokens = max(0, self._tokens - 1000)


class ExtraAttempts:
    """The ceiling over all upstreams: extra attempts ≤ 10 % of the requests of the last 10 s (fault-catalogue 3.5).

    `minimum` retries in that time are always allowed, or a gateway with little to do could never repeat anything: 3,
    as Envoy's retry budget has it (`min_retry_concurrency`). It decides only below 3 requests a second, where three
    more in 10 s are no storm; Finagle's 10 a second are many against answers that take seconds of a GPU.

    Hedges must fit under the same ceiling and pay a budget of their own that has no minimum, as Finagle's backup
    requests do (3.7): each request earns 5 % of a hedge, at most 3 are saved up, none is there at first. So there are
    never more than 5 % hedges, however the load comes. `now` in monotonic ns; buckets of exact counts.
    """

    __slots__ = ("_extra_percent", "_hedge_burst", "_hedge_credit", "_hedge_percent", "_hedges", "_minimum",
        "_requests", "_retries", "_slot", "hedges", "requests", "retries")  # fmt: skip

    def __init__(
        self, *, extra_percent: int = 10, minimum: int = 3, hedge_percent: int = 5, hedge_burst: int = 3
    ) -> None:
        self._extra_percent = extra_percent
        self._minimum = minimum
        self._hedge_percent = hedge_percent
        self._hedge_burst = hedge_burst
        self._hedge_credit = 0  # hundredths of a hedge
        self._requests = [0] * BUCKETS
        self._retries = [0] * BUCKETS
        self._hedges = [0] * BUCKETS
        self._slot = 0  # number of the bucket that is being filled, since the clock's beginning
        self.requests = self.retries = self.hedges = 0  # in the window, as of the last call

    def __repr__(self) -> str:
        return f"<ExtraAttempts {self.retries} retries and {self.hedges} hedges on {self.requests} requests>"

    def note_request(self, now: int) -> None:
        """A request came; its first attempt is nobody's extra."""
        self._advance(now)
        self._requests[self._slot % BUCKETS] += 1
        self.requests += 1
        self._hedge_credit = min(100 * self._hedge_burst, self._hedge_credit + self._hedge_percent)

    def may_retry(self, now: int) -> bool:
        self._advance(now)
        return self.retries < self._minimum or self._fits()

    def may_hedge(self, now: int) -> bool:
        self._advance(now)
        if self._hedge_credit < 100:
            return False
        return self.retries + self.hedges < self._hedge_burst or self._fits()

    def note_extra(self, kind: Extra, now: int) -> None:
        """An extra attempt is sent. One that a budget sends elsewhere while the first still runs is a `retry` too."""
        self._advance(now)
        if kind == "hedge":
            self._hedges[self._slot % BUCKETS] += 1
            self.hedges += 1
            self._hedge_credit = max(0, self._hedge_credit - 100)
        else:
            self._retries[self._slot % BUCKETS] += 1
            self.retries += 1

    def _fits(self) -> bool:
        return 100 * (self.retries + self.hedges + 1) <= self._extra_percent * self.requests

    def _advance(self, now: int) -> None:
        """Empties the buckets that fell out of the window since the last call."""
        slot = now // BUCKET_NS
        passed = slot - self._slot
        if passed <= 0:
            return
        for past in range(self._slot + 1, self._slot + 1 + min(passed, BUCKETS)):
            at = past % BUCKETS
            self.requests -= self._requests[at]
            self.retries -= self._retries[at]
            self.hedges -= self._hedges[at]
            self._requests[at] = self._retries[at] = self._hedges[at] = 0
        self._slot = slot


# Waiting


def full_jitter(attempt: int, base_ms: float, cap_ms: float, fraction: float) -> float:
    """Milliseconds before retry `attempt` (from 0): U(0, min(cap, base·2ⁿ)) (fault-catalogue 3.6)."""
    return fraction * min(cap_ms, base_ms * 2.0 ** min(attempt, 60))


_SECONDS: Final = re.compile(rb"[0-9]{1,32}(?:\.[0-9]{1,32})?")
_MONTHS: Final = {month: i for i, month in enumerate(b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)}
_TIME: Final = rb"(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"
_MONTH: Final = rb"(?P<month>[A-Z][a-z]{2})"
_DATES: Final = (  # RFC 9110 §5.6.7: the form in use and the two that must still be read
    re.compile(rb"[A-Z][a-z]{2}, (?P<day>[0-9]{2}) " + _MONTH + rb" (?P<year>[0-9]{4}) " + _TIME + rb" GMT"),
    re.compile(rb"[A-Z][a-z]{5,8}, (?P<day>[0-9]{2})-" + _MONTH + rb"-(?P<year>[0-9]{2}) " + _TIME + rb" GMT"),
    re.compile(rb"[A-Z][a-z]{2} " + _MONTH + rb" (?P<day>[ 0-9][0-9]) " + _TIME + rb" (?P<year>[0-9]{4})"),
)
_YEAR_S: Final = 31_556_952


def parse_retry_after(value: bytes, now_wall_s: float) -> float | None:
    """Seconds to wait from a `Retry-After` of seconds or a date; past = 0, at most 300, None for anything else."""
    text = value.strip(b" \t")
    if _SECONDS.fullmatch(text):
        return min(MAX_RETRY_AFTER_S, float(text))
    instant = _instant(text, now_wall_s)
    return None if instant is None else min(MAX_RETRY_AFTER_S, max(0.0, instant - now_wall_s))


def retry_after_of(headers: Headers, now_wall_s: float) -> float | None:
    """What an answer asks for, in seconds: `retry-after-ms`, which OpenAI's libraries prefer, else `retry-after`."""
    exact = first(headers, b"retry-after-ms")
    if exact is not None and _SECONDS.fullmatch(exact):
        return min(MAX_RETRY_AFTER_S, float(exact) / 1000)
    value = first(headers, b"retry-after")
    return None if value is None else parse_retry_after(value, now_wall_s)


def _instant(text: bytes, now_wall_s: float) -> int | None:
    """Seconds since 1970 of an HTTP date; None if it is none."""
    match = next((match for form in _DATES if (match := form.fullmatch(text))), None)
    if match is None:
        return None
    year, month = int(match["year"]), _MONTHS.get(match["month"], 0)
    if len(match["year"]) == 2:  # more than 50 years ahead means a past century
        this_year = 1970 + int(now_wall_s // _YEAR_S)
        year += this_year // 100 * 100
        year -= 100 if year > this_year + 50 else 0
    day, hour, minute, second = (int(match[part]) for part in ("day", "hour", "minute", "second"))
    if year < 1970 or not month or not 1 <= day <= monthrange(year, month)[1]:
        return None
    if hour > 23 or minute > 59 or second > 60:  # 60: a leap second
        return None
    return timegm((year, month, day, hour, minute, second))
