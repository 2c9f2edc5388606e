"""What an attempt that ended means for breaker, ejection, predictor and retry tokens, and for a second attempt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Literal

from gateway.answering import refusal_of
from gateway.complaints import our_reason
from gateway.errors import BadRequest
from gateway.policy.retrying import Failure, retry_after_of

if TYPE_CHECKING:
    from gateway.attempt import Attempt
    from gateway.exchange import Exchange
    from gateway.relay import Result
    from gateway.runtime import Fleet

Verdict = Literal["ok", "error", "pressure", "neutral"]

NS: Final = 1_000_000_000
MS: Final = 1_000_000
_CUT_SHORT: Final = frozenset(("no_finish", "body_cut", "reset_mid", "stall"))
SLOW_FACTOR: Final = 3  # × what was predicted: a long prompt is no slow upstream


def settle(attempt: Attempt, x: Exchange, fleet: Fleet, now: int) -> None:
    """Books one ended attempt with everything that learns from attempts."""
    state, name = attempt.state, attempt.state.name
    state.standing.running.discard(attempt)
    verdict = verdict_of(attempt, x)
    ttft_ns = _upstream_ttft_ns(attempt)
    is_slow = verdict != "neutral" and ttft_ns is not None and ttft_ns > _slow_limit_ns(attempt)
    breaker, permit = attempt.breaker, attempt.permit
    if breaker is not None and permit is not None:
        attempt.permit = None
        if verdict in ("ok", "error"):
            is_last = _is_last(attempt, x, now)
            breaker.record(permit, is_error=verdict == "error", is_slow=is_slow, now=now, is_last=is_last)
        else:
            breaker.release(permit, now)
    if verdict == "ok":
        state.standing.last_end_ns = now
        fleet.ejections.note_success(name, now, sent=attempt.sent or None)
        state.standing.bucket.note_success()
    elif verdict == "error":
        fleet.ejections.note_failure(name, now, sent=attempt.sent or None)
        if attempt.sent:
            state.standing.bucket.note_failure()
    elif verdict == "pressure":
        head = attempt.result.head if attempt.result is not None else None
        after = retry_after_of(head.headers, time.time()) if head is not None else None
        if after:
            fleet.ejections.note_pressure(name, now + int(after * NS), now)
    _teach(attempt, now, ttft_ns)


def _is_last(attempt: Attempt, x: Exchange, now: int) -> bool:
    """No other upstream of its route could be asked now: down, not warm, or its own breaker is open."""
    route = attempt.route
    for other in route.upstreams:
        standing = other.standing
        is_open = standing.breaker(standing.label(route.config.model or x.model or "")).is_open(now)
        if other is not attempt.state and other.is_usable and not is_open:
            return False
    return True


def _teach(attempt: Attempt, now: int, ttft_ns: int | None) -> None:
    predictor, ticket = attempt.predictor, attempt.ticket
    if predictor is None or ticket is None:
        return
    attempt.ticket = None
    if attempt.result is not None and attempt.result.kind == "outrun":
        predictor.hedge_lost(ticket, now)
        return
    reader, plain = attempt.reader, attempt.plain
    usage = reader.usage if reader is not None and attempt.is_seen else plain.usage if plain is not None else None
    tpot_s = None
    if usage is not None and reader is not None and attempt.is_seen and usage.completion and usage.completion > 1:
        tokens = usage.completion - max(1, reader.first_chunk_tokens)
        if tokens > 0 and reader.t_last > reader.t_token:
            tpot_s = (reader.t_last - reader.t_token) / tokens / NS
    predictor.end(
        ticket,
        now,
        prompt_tokens=usage.prompt if usage is not None else None,
        cached_tokens=usage.cached if usage is not None else None,
        completion_tokens=usage.completion if usage is not None else None,
        tpot_s=tpot_s,
    )
    if ttft_ns is not None:
        attempt.state.standing.cost.observe(ttft_ns / NS / max(0.1, ticket.estimate.uncached_tokens / 1000), now)


def verdict_of(attempt: Attempt, x: Exchange) -> Verdict:
    """`ok`, `error`, `pressure` or `neutral`, as fault-catalogue 3.2 has it: by the answer's end, not its start."""
    error, result = attempt.error, attempt.result
    if error is not None:
        return "error" if error.reason not in ("queue_timeout", "queue_full") else "neutral"
    if result is None or result.kind in ("gone", "outrun"):
        return "neutral"
    if result.kind == "lost":
        return "neutral" if result.lost is not None and our_reason(result.lost.reason) else "error"
    if result.kind == "failed":
        reason = result.error.reason if result.error is not None else ""
        return "neutral" if our_reason(reason) else "error"
    if result.kind == "sent":
        if result.error is not None and our_reason(result.error.reason):
            return "neutral"
        if x.outcome in ("complete", "pending_done"):
            return "ok"
        return "neutral" if x.outcome in ("client_cancelled", "internal_error", "refused") else "error"
    return _verdict_of_answer(attempt, result)


def _verdict_of_answer(attempt: Attempt, result: Result) -> Verdict:
    """Of an answer that is complete and not sent yet."""
    status, body = refusal_of(attempt)
    if result.kind == "stream_error":
        status = status or 502
    elif status < 400 and attempt.plain is not None and attempt.plain.error is not None:
        status = attempt.plain.error.status or 502  # an error that came with a good status (B19)
    if status == 503 and (attempt.state.is_loading or attempt.state.is_last_resort or b"oading model" in body[:2000]):
        return "neutral"  # on its way up, which is no failure (B17)
    if status == 429 or (status == 503 and _has_head(attempt) and _asks_to_wait(attempt)):
        return "pressure"
    if status >= 500 and status not in (501, 505):
        return "error"
    return "neutral" if status >= 400 else "ok"


def failure_of(attempt: Attempt) -> Failure:
    """The facts of a failed attempt that its retry class depends on."""
    if attempt.error is not None:
        return Failure(nothing_sent=True, reason=attempt.error.reason)
    result = attempt.result
    assert result is not None
    if result.kind == "lost" and result.lost is not None:
        return Failure(
            is_reused=result.lost.was_reused,
            response_bytes=result.lost.bytes_received,
            reason=result.lost.reason,
            cut_before_forwarding=attempt.header > 0,
        )
    if result.kind == "failed" and result.error is not None:
        cut = result.error.reason in _CUT_SHORT  # it had begun, and none of it went out
        return Failure(response_bytes=1, reason=result.error.reason, cut_before_forwarding=cut)
    if result.kind in ("sent", "gone"):
        return Failure(forwarded=True)
    status, _ = refusal_of(attempt)
    return Failure(status=status or 502, response_bytes=1)


def is_kill(attempt: Attempt) -> bool:
    """A fresh connection ended without a byte: the server may have died of the request (D8)."""
    result = attempt.result
    lost = result.lost if result is not None else None
    return lost is not None and not lost.was_reused and lost.reason in ("eof_no_bytes", "reset_no_bytes")


def poisonous() -> BadRequest:
    """Why a request is not sent again that servers died of (D8)."""
    return BadRequest(
        "Model servers died twice when they were sent exactly this request, so it is not sent again for "
        "5 minutes. Change it, or look into the model servers' logs.",
        code="poison_request",
        should_retry=False,
    )


def the_telling_one(ended: list[Attempt]) -> Attempt:
    """Of failed attempts the one whose result the caller gets: the last that has an answer to tell, else the last."""
    told = [a for a in ended if a.result is not None and a.result.kind in ("held", "stream_error")]
    return told[-1] if told else ended[-1]


def book_failures(x: Exchange, ended: list[Attempt], decides: Attempt) -> None:
    """Attempts that did not decide and are not booked yet; the one that did is booked with the request."""
    for attempt in ended:
        if attempt is not decides and not attempt.is_booked:
            attempt.is_booked = True
            reason = reason_of(attempt)
            attempt.state.meters.failure(reason)
            x.failures.append(f"{attempt.state.name}={reason}")


def reason_of(attempt: Attempt) -> str:
    """The bounded word for what went wrong with an attempt."""
    result = attempt.result
    if attempt.error is not None:
        return attempt.error.reason
    if result is None:
        return "other"
    if result.lost is not None:
        return result.lost.reason
    if result.error is not None:
        return result.error.reason
    if result.kind == "stream_error":
        return "stream_error"
    return "http_5xx" if result.head is not None and result.head.status >= 500 else "http_4xx"


def _upstream_ttft_ns(attempt: Attempt) -> int | None:
    reader = attempt.reader
    if reader is None or not reader.t_token or not attempt.sent:
        return None
    return max(0, reader.t_token - attempt.sent)


def _slow_limit_ns(attempt: Attempt) -> int:
    limit = attempt.state.config.breaker.slow_call_duration_ms * MS
    ticket = attempt.ticket
    return max(limit, int(SLOW_FACTOR * ticket.estimate.p50_s * NS)) if ticket is not None else limit


def _has_head(attempt: Attempt) -> bool:
    return attempt.result is not None and attempt.result.head is not None


def _asks_to_wait(attempt: Attempt) -> bool:
    assert attempt.result is not None and attempt.result.head is not None
    return attempt.result.head.get(b"retry-after") is not None
