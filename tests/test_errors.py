"""Every error has one shape per API, the same for every failure."""

from __future__ import annotations

import json

import pytest

from gateway import errors
from gateway.errors import Api, GatewayError, body_of, event_of, headers_of


def classes(base: type[GatewayError] = GatewayError) -> list[type[GatewayError]]:
    return [found for own in base.__subclasses__() for found in (own, *classes(own))]


STATUSES = {
    "BadRequest": 400, "BodyTooLarge": 413, "ClientTooSlow": 408, "MethodNotAllowed": 405, "Unauthorized": 401,
    "RouteForbidden": 403, "NoRoute": 404, "UpstreamUnavailable": 503, "UpstreamBadResponse": 502,
    "UpstreamTimeout": 504, "Overloaded": 503, "CircuitOpen": 503, "BudgetExceeded": 503, "Internal": 500,
    "UpstreamError": 500,
}  # fmt: skip
ANTHROPIC = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "invalid_request_error", 413: "request_too_large", 500: "api_error",
    502: "api_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    named = {kind.__name__ for kind in classes()} - {"UpstreamError"}  # a base without a code of its own
    assert named == set(STATUSES) - {"UpstreamError"}
    assert [name for name in named if name not in (errors.__doc__ or "")] == []


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_every_error_is_told_in_the_shape_of_the_api(kind: type[GatewayError], api: Api) -> None:
    """client-contract §6, rule 18: strings, a null, and nothing that a strict client cannot parse."""
    error = kind("It broke. Send it again.", retry_after_s=3)
    assert error.status == STATUSES[kind.__name__]
    body = json.loads(body_of(error, api, "id-1"))
    streamed = event_of(error, api)
    inner = body["error"]
    assert inner["message"] == "It broke. Send it again."
    assert inner["code"] == error.code
    assert body["request_id"] == "id-1"
    if api == "anthropic":
        assert body["type"] == "error"
        assert inner["type"] == ANTHROPIC[error.status]
        assert streamed.startswith(b"event: error\ndata: {")
        assert streamed.count(b"\n\n") == 1
    else:
        assert (set(inner), inner["param"]) == ({"message", "type", "param", "code"}, None)
        assert isinstance(inner["type"], str)
        assert isinstance(inner["code"], str)
        assert streamed.startswith(b"data: {")
        assert streamed.endswith(b"\n\ndata: [DONE]\n\n")
        assert b"choices" not in streamed
    data = streamed.split(b"data: ", 1)[1].split(b"\n", 1)[0]
    assert json.loads(data)["error"] == inner
    assert dict(headers_of(error)) == {b"content-type": b"application/json", b"retry-after": b"3"}


def test_a_retry_that_is_pointless_is_told() -> None:
    """C033: the SDKs honour the header."""
    error = errors.Unauthorized("No.", should_retry=False, headers={"www-authenticate": "Bearer"})
    assert dict(headers_of(error)) == {
        b"content-type": b"application/json",
        b"x-should-retry": b"false",
        b"www-authenticate": b"Bearer",
    }
    assert (b"x-should-retry", b"true") in headers_of(errors.Overloaded("Wait.", should_retry=True))


def test_a_wait_is_never_zero_seconds() -> None:
    assert (b"retry-after", b"1") in headers_of(errors.Overloaded("Wait.", retry_after_s=0))


def test_half_a_surrogate_pair_in_a_name_costs_no_answer() -> None:
    """C048, C109."""
    error = errors.NoRoute("No route takes `m\ud83d`.")
    for api in ("openai", "anthropic"):
        assert json.loads(body_of(error, api, "id"))["error"]["message"] == "No route takes `m?`."


def test_an_error_says_what_it_is_without_its_words() -> None:
    error = errors.UpstreamTimeout("secret words", reason="stall")
    assert repr(error) == "UpstreamTimeout(504 upstream_timeout, reason=stall)"
    assert errors.BadRequest("x", code="invalid_json", status=415).reason == "invalid_json"
