"""Every error the gateway itself answers with, and its one shape on the wire.

    GatewayError
    ├── BadRequest            400  invalid_json, json_too_deep, duplicate_key, bad_request
    │   ├── BodyTooLarge      413  body_too_large
    │   ├── ClientTooSlow     408  client_too_slow
    │   └── MethodNotAllowed  405  method_not_allowed
    ├── Unauthorized          401  unauthorized
    ├── RouteForbidden        403  route_forbidden
    ├── NoRoute               404  no_route
    ├── UpstreamUnavailable   503  upstream_unavailable   (nothing was sent: refused, DNS, TLS, connect time)
    ├── UpstreamBadResponse   502  upstream_bad_response  (something came, and it was wrong)
    ├── UpstreamTimeout       504  upstream_timeout
    ├── Overloaded            503  overloaded             (no slot within the wait)
    │   ├── CircuitOpen       503  circuit_open           (every upstream's breaker is open)
    │   └── BudgetExceeded    503  ttft_budget_exceeded   (the route says `fail`)
    └── Internal              500  internal

An error carries what happened and what to do in `message`, a machine `code`, and for our own use a bounded
`reason` (the metric and log word of fault-catalogue part 5). Exception text of libraries never reaches a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import orjson

Api = Literal["openai", "anthropic"]


class GatewayError(Exception):
    """Base. `message` is for people, `code` for programs, `reason` for logs; none holds a secret."""

    status: int = 500
    code: str = "internal"
    type: str = "gateway_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        reason: str | None = None,
        retry_after_s: int | None = None,
        should_retry: bool | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # Half a surrogate pair in a name that the caller sent must not cost the answer (C048, C109).
        self.message = message if message.isascii() else message.encode("utf-8", "replace").decode("utf-8")
        super().__init__(self.message)
        self.code = code or type(self).code
        self.status = status or type(self).status
        self.reason = reason or self.code
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry
        self.headers = dict(headers or {})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.status} {self.code}, reason={self.reason})"


class BadRequest(GatewayError):
    status, code, type = 400, "bad_request", "invalid_request_error"


class BodyTooLarge(BadRequest):
    status, code = 413, "body_too_large"


class ClientTooSlow(BadRequest):
    status, code = 408, "client_too_slow"


class MethodNotAllowed(BadRequest):
    status, code = 405, "method_not_allowed"


class Unauthorized(GatewayError):
    status, code, type = 401, "unauthorized", "authentication_error"


class RouteForbidden(GatewayError):
    status, code, type = 403, "route_forbidden", "permission_error"


class NoRoute(GatewayError):
    status, code, type = 404, "no_route", "not_found_error"


class UpstreamError(GatewayError):
    """Base of what went wrong at or before a model server."""

    type = "upstream_error"


class UpstreamUnavailable(UpstreamError):
    status, code = 503, "upstream_unavailable"


class UpstreamBadResponse(UpstreamError):
    status, code = 502, "upstream_bad_response"


class UpstreamTimeout(UpstreamError):
    status, code = 504, "upstream_timeout"


class Overloaded(GatewayError):
    status, code, type = 503, "overloaded", "overloaded_error"


class CircuitOpen(Overloaded):
    status, code = 503, "circuit_open"


class BudgetExceeded(Overloaded):
    status, code = 503, "ttft_budget_exceeded"


class Internal(GatewayError):
    status, code, type = 500, "internal", "internal_error"


# Anthropic's words for the same statuses (client-contract §12, §13).
_ANTHROPIC_TYPE = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


def body_of(error: GatewayError, api: Api, request_id: str) -> bytes:
    """The error as JSON in the shape of the caller's API."""
    return orjson.dumps({**_payload(error, api), "request_id": request_id})


def event_of(error: GatewayError, api: Api) -> bytes:
    """The error as the last thing in a started stream: one event, then OpenAI's end mark.

    Measured with the real clients (client-contract §5): without the event a clean end is taken for success,
    without `[DONE]` one client sends the request again, and `event: error` is lost on OpenAI routes.
    """
    payload = payload_of(error, api)
    if api == "anthropic":
        return b"event: error\ndata: " + payload + b"\n\n"
    return b"data: " + payload + b"\n\ndata: [DONE]\n\n"


def payload_of(error: GatewayError, api: Api) -> bytes:
    """The error alone, as JSON in the shape of an API."""
    return orjson.dumps(_payload(error, api))


def headers_of(error: GatewayError) -> list[tuple[bytes, bytes]]:
    """Response headers that belong to the error, without request id and framing."""
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, error.retry_after_s)).encode()))
    if error.should_retry is not None:
        headers.append((b"x-should-retry", b"true" if error.should_retry else b"false"))
    headers += [(name.encode("ascii"), value.encode("ascii")) for name, value in error.headers.items()]
    return headers


def _payload(error: GatewayError, api: Api) -> dict[str, object]:
    if api == "anthropic":
        other = "invalid_request_error" if 400 <= error.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPE.get(error.status, other)
        return {"type": "error", "error": {"type": kind, "message": error.message, "code": error.code}}
    return {"error": {"message": error.message, "type": error.type, "param": None, "code": error.code}}
