"""One request at one upstream: shaped for it, sent, and sent again where a rule of `again.py` allows it, which is only
while the caller has nothing yet."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from gateway.again import Allowed, Edited, Rule, rule_for
from gateway.complaints import no_answer
from gateway.errors import Overloaded, UpstreamBadResponse, UpstreamUnavailable, body_of
from gateway.exchange import ClientGone
from gateway.judging import Verdicts
from gateway.policy.clean import clean_body, may_need_cleaning
from gateway.policy.shape import Shaped, shape
from gateway.relay import Relay, Result
from gateway.reply import Reply, masked, response_headers
from gateway.upstream.http1 import request_head
from gateway.wire.body import RequestBody, read_object
from gateway.wire.engines import wants_usage
from gateway.wire.headers import first, label_value, sane_traceparent
from gateway.wire.kinds import GENERATING, Kind
from gateway.wire.reader import reader_for
from gateway.wire.strip import UsageStripper

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.account import Account
    from gateway.config import Clean
    from gateway.exchange import Call, Exchange, Share
    from gateway.proxy import Leaving
    from gateway.runtime import RouteState
    from gateway.upstream.http1 import ResponseHead
    from gateway.upstream.state import UpstreamState
    from gateway.wire.headers import Headers

log = logging.getLogger("gateway.sending")

LARGE_BYTES = 256 * 1024  # above, a parsed body is not kept beside its bytes: one more parse per retry costs less


@dataclass(slots=True)
class Prepared:
    """What every attempt starts from: the caller's request after cleaning."""

    route: RouteState
    rest: str  # path without the route's prefix
    raw: bytes
    body: RequestBody | None  # `raw`, parsed; None: relayed unread, or large and parsed again when it is needed
    headers: Headers
    call: Call
    share: Share
    is_read: bool = False  # a JSON object that routes may change
    is_cleaned: bool = False

    def free(self) -> None:
        """The answer has begun, so nothing will be sent again: a body is not held for the length of a stream (C079)."""
        self.raw = b""
        self.body = None
        self.share.give_back()


class Sender:
    """Sends prepared requests. Holds no state of a request."""

    def __init__(self, account: Account, clock: Callable[[], int]) -> None:
        self._account = account
        self._clock = clock
        self._verdicts = Verdicts(account)

    async def send(self, x: Exchange, prepared: Prepared, state: UpstreamState, leaving: Leaving) -> Reply | None:
        """The answer to send, or None when it was relayed. Raises `GatewayError`, `ClientGone`."""
        x.upstream = state.name
        if prepared.route.cleans and not prepared.is_cleaned and prepared.body is not None:
            prepared.is_cleaned = True
            if may_need_cleaning(prepared.body.raw, prepared.route.config.clean):
                await self._clean(x, prepared, prepared.body)
        model = x.model or ""
        allowed = Allowed(thinking=model not in state.refuses_switch, usage=model not in state.refuses_usage)
        spare: tuple[Result, list[str]] | None = None  # an answer that a rescue may turn out to be no better than
        while True:  # ends: every rule sends again once at most
            shaped = self._shape(x, prepared, state, allowed)
            edited = Edited(shaped.is_thinking_edited, shaped.is_floor_raised, shaped.is_usage_added)
            attempt = self._attempt(x, prepared, shaped.body, edited.usage, state, allowed, leaving)
            del shaped  # a body is held where it is sent from, and by `prepared` until the answer begins
            try:
                result = await attempt
            except (UpstreamUnavailable, Overloaded):
                if spare is None:
                    raise
                result, x.changes = spare
            rule = self._rule(x, prepared, allowed, edited, result)
            if rule is None:
                if spare is not None and not _is_answer(result):
                    result, x.changes, x.plain = *spare, None
                self._learn(x, state, allowed, result)
                return self._outcome(x, prepared, state, result)
            if rule == "rescue":
                spare = (result, x.changes)
            allowed.apply(rule)

    # before

    async def _clean(self, x: Exchange, prepared: Prepared, body: RequestBody) -> None:
        """Once per request, whatever the number of attempts; large bodies beside the event loop."""
        rules = prepared.route.config.clean
        if len(body.raw) > LARGE_BYTES:
            x.cleaned, raw = await asyncio.to_thread(_cleaned, body, rules, x.kind)
        else:
            x.cleaned, raw = _cleaned(body, rules, x.kind)
        if x.cleaned:
            prepared.raw = raw
            prepared.body = RequestBody(prepared.raw, body.data)
            x.changes.append("clean=" + "+".join(f"{step}:{count}" for step, count in x.cleaned.items()))

    def _shape(self, x: Exchange, prepared: Prepared, state: UpstreamState, allowed: Allowed) -> Shaped:
        body = prepared.body
        if body is None:
            if not prepared.is_read:
                return Shaped.untouched(prepared.raw)
            body = read_object(prepared.raw, frozenset())
        if len(prepared.raw) > LARGE_BYTES:
            prepared.body = None
        shaped = shape(
            body,
            route=prepared.route.config,
            upstream=state.config,
            engine=state.engine,
            kind=x.kind,
            add_usage=allowed.usage and self._needs_usage(state),
            allow_thinking=allowed.thinking,
            allow_floor=allowed.floor,
            rescue=allowed.rescue,
        )
        cleaning = [change for change in x.changes if change.startswith("clean=")]
        x.changes = [
            *cleaning,
            *shaped.changes,
            *sorted(f"sent_again={rule}" for rule in allowed.done if rule != "reconnect"),
        ]
        if shaped.warning and prepared.route.config.name not in state.warned:
            state.warned.add(prepared.route.config.name)
            log.warning("route `%s`, upstream `%s`: %s", prepared.route.config.name, state.name, shaped.warning)
        x.thinking_asked = shaped.thinking_asked
        x.max_tokens = shaped.max_tokens
        return shaped

    def _needs_usage(self, state: UpstreamState) -> bool:
        setting = state.config.include_usage
        return setting == "always" or (setting == "auto" and wants_usage(state.engine))

    def _head(self, x: Exchange, prepared: Prepared, state: UpstreamState, length: int) -> bytes:
        call = prepared.call
        headers = [*prepared.headers, (b"x-request-id", x.attempt_id().encode("ascii"))]
        headers.append((b"traceparent", sane_traceparent(first(call.headers, b"traceparent")) or x.traceparent()))
        target = (state.config.base_path + prepared.rest).encode("latin-1")
        if call.query:
            target += b"?" + call.query
        return request_head(call.method.encode("ascii"), target, state.head_lines, headers, length)

    # one attempt

    async def _attempt(
        self,
        x: Exchange,
        prepared: Prepared,
        body: bytes,
        is_usage_added: bool,
        state: UpstreamState,
        allowed: Allowed,
        leaving: Leaving,
    ) -> Result:
        route = prepared.route
        x.plain = None  # of an earlier attempt
        lease = await state.pool.acquire(fresh=allowed.fresh, timeout_s=route.config.timeouts.connect_ms / 1000)
        try:
            timeline = x.timeline
            timeline.header = 0
            timeline.slot_wait_ns += lease.wait_ns
            if not x.attempts:
                timeline.connect_start, timeline.connect_end = lease.connect_start, lease.connect_end
            if not lease.is_reused:
                state.note_rtt(lease.connection.rtt_ns)
            x.rtt_ns = state.rtt_ns
            x.attempts += 1
            kind = "reconnect" if allowed.fresh else "first" if x.attempts == 1 else "retry"
            self._account.route(route.config.name).attempts[kind].inc()
            relay = self._relay(x, prepared, state, is_usage_added=is_usage_added)
            leaving.relay = relay
            state.meters.inflight.inc()
            try:
                running = relay.run(lease.connection, self._head(x, prepared, state, len(body)), body)
                del body
                result = await running
            finally:
                state.meters.inflight.dec()
            leaving.relay = None
            return result
        finally:
            state.pool.release(lease)

    def _relay(self, x: Exchange, prepared: Prepared, state: UpstreamState, *, is_usage_added: bool) -> Relay:
        route = prepared.route
        reader = x.reader = reader_for(x.kind)

        def head_for(head: ResponseHead | None) -> Headers:
            prepared.free()
            if head is not None and head.is_coded and x.kind != "opaque":
                state.meters.failure("content_encoding")  # relayed, but nothing in it can be read (C133)
            return response_headers(x, route, state, head, self._clock())

        wants_trailer = x.is_stream and first(prepared.call.headers, b"x-gateway-timing") == b"trailer"
        return Relay(
            x,
            prepared.call,
            route.config,
            reader,
            UsageStripper() if is_usage_added and x.is_stream else None,
            head_for,
            self._clock,
            (lambda: timing_comment(x)) if wants_trailer else None,
        )

    # after

    def _rule(self, x: Exchange, prepared: Prepared, allowed: Allowed, edited: Edited, result: Result) -> Rule | None:
        """The rule that sends it again, booked; None: this is the answer."""
        if prepared.call.is_gone or prepared.call.is_started:
            return None
        route = prepared.route.config
        status, body = _refusal_of(x, result)
        may_rescue = route.rescue and x.kind in GENERATING and not x.is_stream and result.kind == "held"
        verdict = self._verdicts.plain(x, result.body) if may_rescue and status == 200 else None
        rule = rule_for(result, status, body, edited, allowed, may_rescue=may_rescue, verdict=verdict)
        meters = self._account.route(route.name)
        if rule == "without_thinking":
            meters.violations["switch_rejected"].inc()
        elif rule == "floor_backed_off" or rule == "rescue":
            meters.policy_changes[rule].inc()
        return rule

    def _learn(self, x: Exchange, state: UpstreamState, allowed: Allowed, result: Result) -> None:
        """Remembers what the server refuses, once leaving it out has helped."""
        if not allowed.done or _refusal_of(x, result)[0] >= 400 or result.kind not in ("held", "sent"):
            return
        model = x.model or ""
        if "without_thinking" in allowed.done and model not in state.refuses_switch:
            state.refuses_switch.add(model)
            log.warning(
                "upstream `%s` refuses the thinking switch for model `%s`; it is not sent there any more "
                "(hint: set `family` of the upstream)", state.name, label_value(model),
            )  # fmt: skip
        if "without_usage" in allowed.done:
            state.refuses_usage.add(model)

    def _outcome(self, x: Exchange, prepared: Prepared, state: UpstreamState, result: Result) -> Reply | None:
        self._verdicts.budget(x, prepared.route, x.timeline.end or self._clock())
        if result.kind == "gone":
            raise ClientGone
        if result.kind == "failed":
            assert result.error is not None
            raise result.error
        if result.kind == "lost":
            assert result.lost is not None
            raise no_answer(result.lost, state.name)
        if result.kind == "sent":
            self._verdicts.stream(x, prepared.route, state)
            return None
        if result.kind == "stream_error":
            return self._reply_to_stream_error(x, prepared, state, result)
        return self._reply(x, prepared, state, result)

    def _reply_to_stream_error(self, x: Exchange, prepared: Prepared, state: UpstreamState, result: Result) -> Reply:
        """The stream's first event was an error and nothing went out: the caller gets it as a real status."""
        error = x.reader.error if x.reader is not None else None
        assert error is not None and result.head is not None
        status = error.status or 502
        if _is_nested(error.data):
            body = error.data
        else:
            told = UpstreamBadResponse(error.message, status=status, code=error.code or None, reason="stream_error")
            body = body_of(told, x.api, x.request_id)
        fields = response_headers(x, prepared.route, state, result.head, self._clock())
        headers = [(b"content-type", b"application/json"), *(field for field in fields if field[0] not in _STREAM_ONLY)]
        x.settle("refused" if status < 500 else "upstream_error", "stream_error")
        return Reply(status, headers, masked(body, state))

    def _reply(self, x: Exchange, prepared: Prepared, state: UpstreamState, result: Result) -> Reply:
        head, body = result.head, result.body
        assert head is not None
        status = head.status
        if status < 400:
            problem = self._verdicts.problem_of(x, head, body)
            if problem is not None:
                raise problem
            status = self._verdicts.status_of(x, status)
            self._verdicts.book_plain(x, prepared.route, state)
            if not x.is_stream:
                x.timeline.answer_whole(x.timeline.end)
        headers = response_headers(x, prepared.route, state, head, self._clock())
        if status < 400:
            x.settle("complete")
        else:
            x.settle("refused" if status < 500 else "upstream_error", "http_4xx" if status < 500 else "http_5xx")
            body = masked(body, state)
        return Reply(status, headers, body)


def _is_answer(result: Result) -> bool:
    """A complete answer with a good status, or one that went out, or nobody there to have it."""
    is_good = result.head is not None and result.head.status < 400
    return result.kind in ("sent", "gone") or (result.kind == "held" and is_good)


def _cleaned(body: RequestBody, rules: Clean, kind: Kind) -> tuple[dict[str, int], bytes]:
    document = body.document()
    return clean_body(document, body.data, rules, kind), document.apply()


_STREAM_ONLY = frozenset((b"content-type", b"cache-control", b"x-accel-buffering"))


def timing_comment(x: Exchange) -> bytes:
    """The request's times as a comment block after the end of its stream (`x-gateway-timing: trailer`)."""
    timeline, reader = x.timeline, x.reader
    if reader is not None:
        timeline.event, timeline.token = reader.t_event, reader.t_token
        timeline.visible, timeline.last = reader.t_visible, reader.t_last
    segments = timeline.segments()
    fields = {f"{name}_ms": round(value / 1e6, 3) for name, value in segments._asdict().items()}
    total: dict[str, object] = {"request_id": x.request_id, "e2e_ms": round(segments.total / 1e6, 3)}
    for name, value in (("ttft_ms", timeline.ttft_ns), ("ttfv_ms", timeline.ttfv_ns)):
        if value is not None:
            total[name] = round(value / 1e6, 3)
    return b": timing " + orjson.dumps({**total, **fields}) + b"\n\n"


def _refusal_of(x: Exchange, result: Result) -> tuple[int, bytes]:
    """Status and body of an answer that is complete and unsent, also of an error that came inside a stream."""
    if result.kind == "held" and result.head is not None:
        return result.head.status, result.body
    if result.kind == "stream_error" and x.reader is not None and x.reader.error is not None:
        return x.reader.error.status, x.reader.error.data
    return 0, b""


def _is_nested(data: bytes) -> bool:
    """Whether an error is already `{"error": {…}}`, the one shape that every SDK can read."""
    try:
        payload = orjson.loads(data)
    except ValueError:
        return False
    return isinstance(payload, dict) and isinstance(payload.get("error"), dict)
