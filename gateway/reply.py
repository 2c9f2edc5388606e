"""Answers that are sent in one piece, and the headers that every answer carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.errors import GatewayError, UpstreamBadResponse, event_of
from gateway.patience import closing_beat
from gateway.timing.timeline import server_timing
from gateway.wire.headers import Headers, for_client, header_value

if TYPE_CHECKING:
    from gateway.exchange import Call, Exchange
    from gateway.runtime import RouteState, Runtime
    from gateway.upstream.http1 import ResponseHead
    from gateway.upstream.state import UpstreamState

STREAM_HEADERS: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
JSON = (b"content-type", b"application/json")


def response_headers(
    x: Exchange, route: RouteState, state: UpstreamState, head: ResponseHead | None, now: int
) -> Headers:
    """The upstream's own fields that may pass, and ours. `head` None: a heartbeat starts the answer before it came."""
    passed = for_client(head.headers) if head is not None else [EVENT_STREAM if x.is_stream else JSON]
    if x.is_stream and (head is None or head.status < 400):
        passed = [field for field in passed if field[0] != b"cache-control"] + STREAM_HEADERS
    if x.is_seen and x.reader is not None:
        x.timeline.event, x.timeline.token = x.reader.t_event, x.reader.t_token
        x.timeline.visible = x.reader.t_visible
    passed += [
        (b"x-request-id", x.request_id.encode("ascii")),
        (b"x-gateway-route", route.name_header),
        (b"x-gateway-upstream", header_value(state.name)),
        (b"x-gateway-attempts", b"%d" % x.attempts),
    ]
    if x.failures:
        passed.append((b"x-gateway-failures", header_value(", ".join(x.failures))))
    if x.changes:
        passed.append((b"x-gateway-changes", header_value(", ".join(x.changes))))
    timing = server_timing(x.timeline, now)
    if timing:
        passed.append((b"server-timing", timing))
    if x.cors is not None:
        passed += x.cors
    return passed


def known_fields(x: Exchange, runtime: Runtime) -> Headers:
    """What is known of a refused request: its route and upstream, if it got that far."""
    fields: Headers = list(x.cors or ())
    if x.route is not None and x.route in runtime.routes:
        fields.append((b"x-gateway-route", runtime.routes[x.route].name_header))
    if x.upstream is not None:
        fields.append((b"x-gateway-upstream", header_value(x.upstream)))
        fields.append((b"x-gateway-attempts", b"%d" % x.attempts))
    if x.failures:
        fields.append((b"x-gateway-failures", header_value(", ".join(x.failures))))
    if x.changes:
        fields.append((b"x-gateway-changes", header_value(", ".join(x.changes))))
    return fields


@dataclass(slots=True)
class Reply:
    """A whole answer, not sent yet."""

    status: int
    headers: Headers
    body: bytes

    def send(self, x: Exchange, call: Call, now: int) -> None:
        """Head and body in one write; inside a stream that a heartbeat started, an error becomes its last event."""
        if call.is_gone:
            return
        if call.is_started and x.is_stream:
            call.write(closing_beat(x) + event_of(self.as_error(), x.api))
        elif call.is_started and self.status >= 400:  # after newlines: only a cut is no empty answer to an SDK
            call.abort()
            return
        elif call.is_started:
            call.write(self.body)
        else:
            x.status = self.status
            call.start(self.status, self.headers, len(self.body))
            call.write(self.body)
        call.end()
        x.timeline.end = max(now, x.timeline.end)

    def as_error(self) -> GatewayError:
        """An upstream's error answer as one of ours, with its own words."""
        from gateway.wire.plain import read_plain

        told = read_plain("chat", self.body).error
        sentence = told.message if told is not None else f"The model server answered with status {self.status}."
        return UpstreamBadResponse(sentence, status=self.status if self.status >= 400 else 502, reason="http_5xx")


def masked(body: bytes, state: UpstreamState) -> bytes:
    """An error body without the upstream's key, should the server have echoed it (C143)."""
    key = state.config.api_key.get_secret_value() if state.config.api_key is not None else ""
    return body.replace(key.encode(), b"***") if len(key) >= 8 and key.encode() in body else body
