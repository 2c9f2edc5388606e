"""What we say when a model server cannot be used: the sentences, with the reason that logs and metrics carry."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Final

from gateway.errors import (
    BudgetExceeded,
    CircuitOpen,
    GatewayError,
    Internal,
    UpstreamBadResponse,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.upstream.connection import OUR_FAULT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.config import Budget, Timeouts
    from gateway.metrics import Outcome
    from gateway.policy.deadline import Action
    from gateway.upstream.connection import Lost
    from gateway.upstream.http1 import ResponseHead

LONGEST_WAIT_S: Final = 60  # clients wait this long for a Retry-After, and no longer (client-contract §7)
CUTS: Final = frozenset(("body_cut", "reset_mid", "no_finish", "bad_framing"))
"""Reasons that mean: an answer began and did not come to its end."""

_TIMEOUT_REASONS: Final = {
    "first_token": "first_token_timeout", "idle": "stall", "total": "total_timeout", "write_stall": "write_stall",
    "deadline": "caller_deadline",
}  # fmt: skip
_LOST: Final = {
    "eof_no_bytes": "closed the connection without an answer",
    "reset_no_bytes": "reset the connection without an answer",
    "eof_in_head": "broke off inside its response head",
    "not_http": "does not answer in HTTP; is `url` right, and http or https?",
    "body_cut": "broke off in the middle of its answer",
    "reset_mid": "reset the connection in the middle of its answer",
}


def unusable_head(head: ResponseHead, *, is_stream: bool, is_opaque: bool, is_committed: bool) -> GatewayError | None:
    """Why an answer with this head cannot be relayed, if so. `is_committed`: a heartbeat made it a stream already."""
    if 300 <= head.status < 400:
        return UpstreamBadResponse(
            "The model server answered with a redirect, which is never followed; check `url` of the upstream.",
            reason="redirect",
        )
    if head.status >= 400:
        return None
    if is_committed and head.is_coded:
        return UpstreamBadResponse(
            "The model server compressed its stream although `identity` was asked for.", reason="content_encoding"
        )
    if head.media_type == b"text/html":
        return UpstreamBadResponse(
            "The upstream answered with a web page instead of JSON; is `url` really a model server's?",
            reason="content_type",
        )
    if not is_opaque and not is_stream and head.is_event_stream:
        return UpstreamBadResponse(
            "The model server answered with a stream although none was asked for.", reason="mode_mismatch"
        )
    return None


def no_stream() -> UpstreamBadResponse:
    """A stream was asked for and something else came."""
    return UpstreamBadResponse(
        "The model server did not answer with a stream although one was asked for.", reason="mode_mismatch"
    )


def refused_with(status: int) -> UpstreamBadResponse:
    """An error answer too large to be repeated inside a started stream."""
    return UpstreamBadResponse(f"The model server answered with status {status}; its log says why.", reason="http_5xx")


def unfinished() -> UpstreamBadResponse:
    """The body ended in good order, the answer did not."""
    return UpstreamBadResponse("The model server ended its stream without finishing the answer.", reason="no_finish")


def too_large_to_assemble() -> UpstreamBadResponse:
    return UpstreamBadResponse(
        "The answer is too large to be put together; ask for it as a stream, or switch `stream_upstream` off.",
        reason="response_too_large",
    )


def nothing_came() -> UpstreamBadResponse:
    return UpstreamBadResponse("The model server's stream ended before its first event.", reason="no_finish")


def our_fault() -> Internal:
    """A mistake in this program; the log has it."""
    return Internal("The gateway failed on this request; its log says where.", reason="internal")


def broken_off(lost: Lost) -> GatewayError:
    """The connection ended after part of the answer went out."""
    if lost.reason == OUR_FAULT:
        return our_fault()
    return UpstreamBadResponse(
        "The model server broke off in the middle of its answer; what came before this is incomplete.",
        reason=lost.reason,
    )


def no_answer(lost: Lost, upstream: str) -> GatewayError:
    """The connection ended and nothing of an answer went out."""
    if lost.reason == OUR_FAULT:
        return our_fault()
    what = _LOST.get(lost.reason, f"broke the rules of HTTP: {lost.detail}")
    return UpstreamBadResponse(f"Upstream `{upstream}` {what}. It may have crashed; see its log.", reason=lost.reason)


def too_slow(action: Action, limits: Timeouts, upstream: str | None) -> UpstreamTimeout:
    """A limit of the route was passed; names the limit and its value."""
    sentence = {
        "first_token": f"no first token from upstream `{upstream}` within {limits.first_token_ms} ms "
        "(`timeouts.first_token_ms`)",
        "idle": f"upstream `{upstream}` was silent for {limits.idle_ms} ms in the middle of its answer "
        "(`timeouts.idle_ms`)",
        "total": f"the request took longer than {limits.total_ms} ms (`timeouts.total_ms`)",
        "deadline": "the time that the caller gave this request is over (`x-request-timeout-ms`, "
        "`x-stainless-read-timeout` and the like)",
        "write_stall": f"upstream `{upstream}` did not take the request within 30 s",
    }[action]
    return UpstreamTimeout(
        f"The model server was too slow: {sentence}. Is it overloaded, or still warming up?",
        reason=_TIMEOUT_REASONS[action],
    )


def our_reason(reason: str) -> bool:
    """Whether a failure is this program's or the caller's own doing, which says nothing about the upstream."""
    return reason in (OUR_FAULT, "caller_deadline", "ttft_budget_exceeded", "draining")


def circuit_open(upstreams: Sequence[str], wait_s: float) -> CircuitOpen:
    """Every breaker that could let this request through is open; names them and when to come back."""
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(upstreams))
    seconds = max(1, ceil(wait_s))
    return CircuitOpen(
        f"The circuit breaker of upstream {names} is open after repeated failures; nothing was sent there. "
        f"Try again in about {seconds} s; `/gateway/status` says why it opened.",
        retry_after_s=min(seconds, 120),
        should_retry=seconds <= LONGEST_WAIT_S,
    )


def gone_silent(upstream: str) -> UpstreamTimeout:
    """An upstream that answers nobody; said to the caller only when the other one fails, too."""
    return UpstreamTimeout(
        f"Upstream `{upstream}` took the request and answers nobody; it was left out, and another one was asked.",
        reason="silent",
    )


def budget_exceeded(budget: Budget, upstream: str) -> BudgetExceeded:
    """The route would rather refuse than wait (`on_exceed: fail`)."""
    return BudgetExceeded(
        f"Upstream `{upstream}` gave no first token within {budget.ttft_ms} ms (`budget.ttft_ms`), and this route "
        "answers then instead of waiting. Try again later.",
        retry_after_s=2,
    )


def outcome_of(error: GatewayError) -> Outcome:
    """What a request that ends in this error is booked as."""
    if isinstance(error, BudgetExceeded):
        return "budget_failed"
    if isinstance(error, UpstreamTimeout):
        return "upstream_timeout"
    if isinstance(error, UpstreamBadResponse) and error.reason in CUTS:
        return "upstream_truncated"
    if isinstance(error, UpstreamError):
        return "upstream_error"
    return "internal_error" if isinstance(error, Internal) else "refused"
