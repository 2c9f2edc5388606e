"""One request at one upstream: shaped for it, sent, and sent again where a rule of `again.py` allows it, which is only
while the caller has nothing of an answer yet. Whether another upstream is asked is `trying.py`'s to decide."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.again import Allowed, Edited, Rule, rule_for
from gateway.answering import is_answer, refusal_of, timing_comment
from gateway.complaints import too_slow
from gateway.errors import Overloaded, UpstreamUnavailable
from gateway.gathering import GatheringRelay
from gateway.policy.clean import clean_body, may_need_cleaning
from gateway.policy.shape import Shaped, shape
from gateway.relay import Relay, Result
from gateway.reply import response_headers
from gateway.upstream.http1 import request_head
from gateway.wire.assemble import Assembler, can_assemble, stream_fields
from gateway.wire.body import RequestBody, read_object
from gateway.wire.engines import wants_usage
from gateway.wire.headers import first, label_value, sane_traceparent
from gateway.wire.kinds import GENERATING, JSON_KINDS, Kind
from gateway.wire.plain import read_plain
from gateway.wire.reader import reader_for
from gateway.wire.strip import UsageStripper

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.account import Account
    from gateway.attempt import Attempt, Gate
    from gateway.config import Clean
    from gateway.exchange import Call, Exchange, Share
    from gateway.judging import Verdicts
    from gateway.runtime import RouteState
    from gateway.timing.prompts import Prompt
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
    prompt: Prompt | None = None

    def free(self) -> None:
        """The answer has begun, so nothing will be sent again: a body is not held for the length of a stream (C079)."""
        self.raw = b""
        self.body = None
        self.share.give_back()


@dataclass(slots=True, frozen=True)
class Terms:
    """How one attempt stands beside others."""

    holds: bool = False  # something else could be tried: nothing goes out before the first token
    hedge_at: int = 0


class Sender:
    """Sends prepared requests. Holds no state of a request."""

    def __init__(self, account: Account, verdicts: Verdicts, clock: Callable[[], int]) -> None:
        self._account = account
        self._clock = clock
        self._verdicts = verdicts

    async def ask(self, x: Exchange, prepared: Prepared, attempt: Attempt, gate: Gate, terms: Terms) -> None:
        """One attempt from its shaping to its end: sets `attempt.result`, or `attempt.error` when it got no answer."""
        state = attempt.state
        if gate.leads(attempt):
            x.upstream = state.name
        if prepared.route.cleans and not prepared.is_cleaned and prepared.body is not None:
            prepared.is_cleaned = True
            if may_need_cleaning(prepared.body.raw, prepared.route.config.clean):
                await self._clean(x, prepared, prepared.body)
        model = x.model or ""
        allowed = Allowed(thinking=model not in state.refuses_switch, usage=model not in state.refuses_usage)
        spare: tuple[Result, list[str]] | None = None  # an answer that a rescue may turn out to be no better than
        while True:  # ends: every rule sends again once at most
            shaped = self._shape(x, prepared, attempt, allowed)
            edited = Edited(shaped.is_thinking_edited, shaped.is_floor_raised, shaped.is_usage_added)
            if gate.leads(attempt):
                x.adopt(attempt)
            sending = self._send_once(x, prepared, attempt, shaped.body, edited.usage, allowed, gate, terms)
            del shaped  # a body is held where it is sent from, and by `prepared` until the answer begins
            try:
                attempt.result = await sending
            except (UpstreamUnavailable, Overloaded) as error:
                if spare is None:
                    is_late = 0 < x.deadline <= self._clock()
                    attempt.error = (
                        too_slow("deadline", attempt.route.config.timeouts, state.name) if is_late else error
                    )
                    return
                attempt.result, attempt.changes = spare
            if not gate.wants(attempt):  # another one answers, and the body is gone
                attempt.result = Result("outrun")
                return
            rule = self._rule(x, prepared, attempt, allowed, edited)
            if rule is None:
                if spare is not None and not is_answer(attempt.result):
                    (attempt.result, attempt.changes), attempt.plain = spare, None
                self._learn(x, attempt, allowed)
                _read(x, attempt)
                return
            if rule == "rescue":
                spare = (attempt.result, attempt.changes)
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

    def _shape(self, x: Exchange, prepared: Prepared, attempt: Attempt, allowed: Allowed) -> Shaped:
        body, state, route = prepared.body, attempt.state, attempt.route.config
        cleaned = "+".join(f"{step}:{count}" for step, count in x.cleaned.items())
        attempt.changes = ["clean=" + cleaned] if cleaned else []
        if body is None:
            if not prepared.is_read:
                return Shaped.untouched(prepared.raw)
            body = read_object(prepared.raw, frozenset())
        if len(prepared.raw) > LARGE_BYTES:
            prepared.body = None
        attempt.is_seen = x.is_stream
        if route.stream_upstream and not x.is_stream and x.kind in ("chat", "completions"):
            attempt.asked = {**route.defaults, **body.data, **route.override}
            attempt.is_seen = can_assemble(x.kind, attempt.asked, state.engine)
        shaped = shape(
            body,
            route=route,
            upstream=state.config,
            engine=state.engine,
            kind=x.kind,
            add_usage=allowed.usage and x.is_stream and self._needs_usage(state),
            allow_thinking=allowed.thinking,
            allow_floor=allowed.floor,
            rescue=allowed.rescue,
            stream=stream_fields(body.data) if attempt.is_seen and not x.is_stream else None,
        )
        attempt.changes += shaped.changes
        attempt.changes += sorted(f"sent_again={rule}" for rule in allowed.done if rule != "reconnect")
        if shaped.warning and route.name not in state.warned:
            state.warned.add(route.name)
            log.warning("route `%s`, upstream `%s`: %s", route.name, state.name, shaped.warning)
        attempt.thinking_asked = shaped.thinking_asked
        attempt.max_tokens = shaped.max_tokens
        return shaped

    def _needs_usage(self, state: UpstreamState) -> bool:
        setting = state.config.include_usage
        return setting == "always" or (setting == "auto" and wants_usage(state.engine))

    def _head(self, x: Exchange, prepared: Prepared, state: UpstreamState, length: int) -> bytes:
        call = prepared.call
        headers = [*prepared.headers, (b"x-request-id", x.attempt_id().encode("ascii"))]
        headers.append((b"traceparent", sane_traceparent(first(call.headers, b"traceparent")) or x.traceparent()))
        if x.deadline:
            left_ms = max(1, (x.deadline - self._clock()) // 1_000_000)
            headers = [field for field in headers if field[0] not in _DEADLINES]
            headers.append((b"x-envoy-expected-rq-timeout-ms", b"%d" % left_ms))
        target = (state.config.base_path + prepared.rest).encode("latin-1")
        if call.query:
            target += b"?" + call.query
        return request_head(call.method.encode("ascii"), target, state.head_lines, headers, length)

    # one sending

    async def _send_once(
        self,
        x: Exchange,
        prepared: Prepared,
        attempt: Attempt,
        body: bytes,
        is_usage_added: bool,
        allowed: Allowed,
        gate: Gate,
        terms: Terms,
    ) -> Result:
        state = attempt.state
        attempt.plain = None  # of an earlier sending
        attempt.header = 0
        connect_s = attempt.route.config.timeouts.connect_ms / 1000
        left_s = (x.deadline - self._clock()) / 1e9 if x.deadline else None
        if left_s is not None:
            connect_s = max(0.0, min(connect_s, left_s))
        lease = await state.pool.acquire(fresh=allowed.fresh, timeout_s=connect_s, wait_limit_s=left_s)
        try:
            if not gate.wants(attempt):  # another attempt was first meanwhile, and the body is gone
                return Result("outrun")
            timeline = x.timeline
            timeline.slot_wait_ns += lease.wait_ns
            if not x.attempts:
                timeline.connect_start, timeline.connect_end = lease.connect_start, lease.connect_end
            if not lease.is_reused:
                state.note_rtt(lease.connection.rtt_ns)
            x.rtt_ns = state.rtt_ns
            x.attempts += 1
            kind = "reconnect" if allowed.fresh else "retry" if allowed.done else attempt.kind
            self._account.route(prepared.route.config.name).attempts[kind].inc()
            if attempt.predictor is not None and attempt.ticket is None and prepared.prompt is not None:
                attempt.ticket = attempt.predictor.begin(prepared.prompt, self._clock(), is_streaming=attempt.is_seen)
            relay = attempt.relay = self._relay(x, prepared, attempt, gate, terms, is_usage_added=is_usage_added)
            state.meters.inflight.inc()
            try:
                running = relay.run(lease.connection, self._head(x, prepared, state, len(body)), body)
                del body
                result = await running
                attempt.relay = None  # not when it was cancelled: whoever did so has something to tell the caller
                return result
            finally:
                state.meters.inflight.dec()
        finally:
            state.pool.release(lease)

    def _relay(
        self, x: Exchange, prepared: Prepared, attempt: Attempt, gate: Gate, terms: Terms, *, is_usage_added: bool
    ) -> Relay:
        state = attempt.state
        reader = attempt.reader = reader_for(x.kind)
        if gate.leads(attempt):
            x.reader = reader

        def head_for(head: ResponseHead | None) -> Headers:
            if head is not None and head.is_coded and x.kind != "opaque":
                state.meters.failure("content_encoding")  # relayed, but nothing in it can be read (C133)
            return response_headers(x, attempt.route, state, head, self._clock())

        wants_trailer = x.is_stream and first(prepared.call.headers, b"x-gateway-timing") == b"trailer"
        gathers = attempt.is_seen and not x.is_stream
        relay = (GatheringRelay if gathers else Relay)(
            x,
            attempt,
            gate,
            prepared.call,
            attempt.route.config,
            reader,
            head_for=head_for,
            clock=self._clock,
            stripper=UsageStripper() if is_usage_added and x.is_stream else None,
            trailer=(lambda: timing_comment(x)) if wants_trailer else None,
            holds=terms.holds,
            hedge_at=terms.hedge_at,
        )
        if isinstance(relay, GatheringRelay):
            relay.assembler = Assembler(x.kind, attempt.asked, state.engine)
        return relay

    # after

    def _rule(self, x: Exchange, prepared: Prepared, attempt: Attempt, allowed: Allowed, edited: Edited) -> Rule | None:
        """The rule that sends it again, booked; None: this is the answer."""
        result = attempt.result
        assert result is not None
        if prepared.call.is_gone or result.kind in ("sent", "gone", "outrun"):
            return None
        route = attempt.route.config
        status, body = refusal_of(attempt)
        may_rescue = route.rescue and x.kind in GENERATING and not x.is_stream and result.kind == "held"
        verdict = None
        if may_rescue and status == 200:
            x.adopt(attempt)
            verdict = self._verdicts.plain(x, result.body)
            attempt.plain = x.plain
        rule = rule_for(result, status, body, edited, allowed, may_rescue=may_rescue, verdict=verdict)
        meters = self._account.route(prepared.route.config.name)
        if rule == "without_thinking":
            meters.violations["switch_rejected"].inc()
        elif rule == "floor_backed_off" or rule == "rescue":
            meters.policy_changes[rule].inc()
        return rule

    def _learn(self, x: Exchange, attempt: Attempt, allowed: Allowed) -> None:
        """Remembers what the server refuses, once leaving it out has helped."""
        result, state = attempt.result, attempt.state
        assert result is not None
        if not allowed.done or refusal_of(attempt)[0] >= 400 or result.kind not in ("held", "sent"):
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


_DEADLINES = frozenset((b"x-request-timeout-ms", b"grpc-timeout", b"x-envoy-expected-rq-timeout-ms"))


def _read(x: Exchange, attempt: Attempt) -> None:
    """A whole answer is looked into here, so that the breaker hears of an error that came with status 200 (B19)."""
    result = attempt.result
    if result is None or result.kind != "held" or result.head is None or result.head.status >= 400:
        return
    if attempt.plain is None and x.kind in JSON_KINDS and not result.head.is_coded:
        is_off = attempt.thinking_asked == "off"
        attempt.plain = read_plain(x.kind, result.body, max_tokens=attempt.max_tokens, is_thinking_off=is_off)


def _cleaned(body: RequestBody, rules: Clean, kind: Kind) -> tuple[dict[str, int], bytes]:
    document = body.document()
    return clean_body(document, body.data, rules, kind), document.apply()
