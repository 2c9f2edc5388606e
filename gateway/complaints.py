"""What we say when a model server cannot be used: the sentences, with the reason that logs and metrics carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gateway.errors import GatewayError, Internal, UpstreamBadResponse, UpstreamError, UpstreamTimeout
from gateway.upstream.connection import OUR_FAULT

if TYPE_CHECKING:
    from gateway.config import Timeouts
    from gateway.metrics import Outcome
    from gateway.policy.deadline import Action
    from gateway.upstream.connection import Lost
    from gateway.upstream.http1 import ResponseHead

CUTS: Final = frozenset(("body_cut", "reset_mid", "no_finish", "bad_framing"))
"""Reasons that mean: an answer began and did not come to its end."""

_TIMEOUT_REASONS: Final = {
    "first_token": "first_token_timeout", "idle": "stall", "total": "total_timeout", "write_stall": "write_stall",
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
        "write_stall": f"upstream `{upstream}` did not take the request within 30 s",
    }[action]
    return UpstreamTimeout(
        f"The model server was too slow: {sentence}. Is it overloaded, or still warming up?",
        reason=_TIMEOUT_REASONS[action],
    )


def outcome_of(error: GatewayError) -> Outcome:
    """What a request that ends in this error is booked as."""
    if isinstance(error, UpstreamTimeout):
        return "upstream_timeout"
    if isinstance(error, UpstreamBadResponse) and error.reason in CUTS:
        return "upstream_truncated"
    if isinstance(error, UpstreamError):
        return "upstream_error"
    return "internal_error" if isinstance(error, Internal) else "refused"
