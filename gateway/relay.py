"""The link between an upstream connection and the client: one attempt's answer, relayed as it arrives.

Called straight from the upstream's `data_received`. Until something is certain, bytes are held:

    HELD      plain answers and error statuses (up to `HOLD_LIMIT`), and a stream until its first event: an error there
              is an upstream error, not a token, and nothing has been promised to the caller yet
    PASSING   the head is out; each read costs one write to the client's transport, then a look at the bytes
    ENDED     the client has its answer; the upstream may still owe us its last chunk

The request's task sleeps on `result` meanwhile. What it wakes up to is a `Result`; only what is still uncommitted
then may be retried or turned into an error response.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gateway.errors import GatewayError, Internal, UpstreamBadResponse, UpstreamError, UpstreamTimeout, event_of
from gateway.policy.deadline import Progress, due
from gateway.wire.headers import Headers

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.config import Route
    from gateway.exchange import Call, Exchange
    from gateway.upstream.connection import Lost, UpstreamConnection
    from gateway.upstream.http1 import ResponseHead
    from gateway.wire.stream import StreamReader
    from gateway.wire.strip import UsageStripper

HOLD_LIMIT = 256 * 1024  # a plain answer up to here is judged before it is sent; beyond, it streams through
DRAIN_S = 1.0  # for the last chunk of an upstream that already said [DONE]
NS = 1_000_000_000
KEEP_ALIVE = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'

State = Literal["held", "passing", "ended"]
Kind = Literal["sent", "held", "stream_error", "failed", "lost", "gone"]


@dataclass(slots=True)
class Result:
    """How an attempt came out.

    sent          the client has the answer, or as much of it as there was (see the exchange's outcome)
    held          a complete answer, nothing of it sent: `head`, `body`
    stream_error  the stream began with an error event, nothing sent: `body` is what was held
    failed        an answer that cannot be used, nothing sent: `error`
    lost          the connection broke before anything was sent: `lost`
    gone          the client left
    """

    kind: Kind
    head: ResponseHead | None = None
    body: bytes = b""
    error: GatewayError | None = None
    lost: Lost | None = None


class Relay:
    """One attempt. Implements `upstream.connection.Sink` and `exchange.CallWatcher`."""

    __slots__ = (
        "_body_size", "_call", "_clock", "_connection", "_exchange", "_head", "_head_for", "_held", "_loop", "_opaque", "_progress",
        "_raw", "_route", "_seen_others", "_state", "_stripper", "_timer", "_to_trailer", "reader", "result",
    )  # fmt: skip

    def __init__(
        self,
        exchange: Exchange,
        call: Call,
        route: Route,
        reader: StreamReader,
        stripper: UsageStripper | None,
        head_for: Callable[[ResponseHead | None], Headers],
        clock: Callable[[], int],
        trailer: Callable[[], bytes] | None = None,
    ) -> None:
        self._clock = clock
        self._exchange = exchange
        self._call = call
        self._route = route
        self.reader = reader
        self._stripper = stripper
        self._head_for = head_for
        self._to_trailer = trailer
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Result] = self._loop.create_future()
        self._connection: UpstreamConnection | None = None
        self._state: State = "held"
        self._head: ResponseHead | None = None
        self._held: list[bytes] = []
        self._body_size = 0
        self._raw = False  # compressed or of no kind that we read: relayed, not looked at
        self._opaque = exchange.kind == "opaque"
        self._seen_others = 0
        self._timer: asyncio.TimerHandle | None = None
        self._progress = Progress(received=exchange.timeline.recv, started=clock(), is_stream=exchange.is_stream)

    def __repr__(self) -> str:
        return f"<Relay {self._state}, {self._body_size} bytes>"

    @property
    def is_committed(self) -> bool:
        """Something of an answer is out: nothing else may be tried."""
        return self._state != "held" or self._call.is_started

    async def run(self, connection: UpstreamConnection, head: bytes, body: bytes) -> Result:
        """Sends the request and waits for the end. The caller's leaving and every limit end it, never an exception."""
        self._connection = connection
        try:
            self._tick(self._progress.started)
            if not self.result.done():
                connection.send(head, body, self)
                if getattr(self._call, "is_paused", False):
                    self.on_client_paused()
            del body
            return await self.result
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._connection = None

    # From the upstream's connection

    def on_sent(self, now: int) -> None:
        self._progress.sent = now
        if not self._exchange.timeline.header:
            self._exchange.timeline.sent = now

    def on_head(self, head: ResponseHead, now: int) -> None:
        self._head = head
        self._exchange.timeline.header = now
        if not self._progress.sent:
            self.on_sent(now)  # an early answer, while the request was still being written
        problem = self._judge(head)
        if problem is not None:
            self._fail(problem, now)

    def on_body(self, data: bytes, now: int) -> None:
        if self._state == "passing":
            self._body_size += len(data)
            if self._raw:
                self._call.write(data)
                return
            stripper = self._stripper
            passed = data if stripper is None else stripper.feed(data)
            self._call.write(passed if b"[DONE]" not in passed else _until_done(passed))
            reader = self.reader
            reader.feed(data, now)
            if reader.is_done:
                self._end_stream(now)
            return
        if self._state == "held":
            self._hold(data, now)

    def on_end(self, now: int) -> None:
        if self._state == "ended":
            self._finish(Result("sent"))
        elif self._is_event_stream:
            self._stream_ended(now)
        elif self._state == "held":
            if self._is_sse_committed and self._head is not None and self._head.status < 400:
                self._fail(_mode_mismatch(), now)
                return
            self._exchange.timeline.end = now
            self._finish(Result("held", self._head, b"".join(self._held)))
        else:
            self._exchange.timeline.end = now
            self._exchange.settle("complete")
            self._call.end()
            self._finish(Result("sent"))

    def on_lost(self, lost: Lost, now: int) -> None:
        if self._state == "ended":
            self._finish(Result("sent"))
            return
        if not self._is_sse_committed and self._state == "held":
            self._exchange.timeline.end = now
            self._finish(Result("lost", self._head, lost=lost))
            return
        sentence = "The model server broke off in the middle of its answer; what came before this is incomplete."
        self._break(UpstreamBadResponse(sentence, reason=lost.reason, code="upstream_bad_response"), now)

    # From the client's connection

    def on_client_gone(self) -> None:
        if self._state != "ended":
            if getattr(self._call, "stalled", False):
                self._exchange.settle("client_cancelled", "client_stalled")
            else:
                self._exchange.settle("client_cancelled")
            if self._connection is not None:
                self._connection.close()
            self._finish(Result("gone"))

    def on_client_paused(self) -> None:
        self._progress.is_paused = True
        if self._connection is not None and self._state != "ended":
            self._connection.pause_reading()

    def on_client_resumed(self) -> None:
        self._progress.is_paused = False
        self._progress.last_event = self._clock()  # the silence until now was not the upstream's
        if self._connection is not None:
            self._connection.resume_reading()

    def break_off(self, error: GatewayError, now: int) -> bool:
        """Ends from outside (drain, our own bug). True when the client was told inside its started answer."""
        if self._state == "ended" or not self.is_committed:
            return False
        self._break(error, now)
        return True

    # Holding and committing

    @property
    def _is_event_stream(self) -> bool:
        content_type = self._head.get(b"content-type") if self._head is not None else None
        return content_type is not None and content_type.lower().startswith(b"text/event-stream")

    @property
    def _is_sse_committed(self) -> bool:
        """A heartbeat committed the response to be a stream before the upstream said anything."""
        return self._call.is_started and self._exchange.is_stream

    def _judge(self, head: ResponseHead) -> GatewayError | None:
        """Why this head cannot be relayed, if so."""
        encoding = head.get(b"content-encoding")
        is_coded = encoding is not None and encoding.lower() != b"identity"
        self._raw = self._opaque or is_coded
        if is_coded and self._is_sse_committed and head.status < 400:
            return UpstreamBadResponse(
                "The model server compressed its stream although `identity` was asked for.", reason="content_encoding"
            )
        if 300 <= head.status < 400:
            return UpstreamBadResponse(
                "The model server answered with a redirect, which is never followed; check `url` of the upstream.",
                reason="redirect",
            )
        if head.status >= 400:
            return None
        content_type = head.get(b"content-type")
        if content_type is not None and content_type.lower().startswith(b"text/html"):
            return UpstreamBadResponse(
                "The upstream answered with a web page instead of JSON; is `url` really a model server's?",
                reason="content_type",
            )
        if not self._opaque and not self._exchange.is_stream and self._is_event_stream:
            return UpstreamBadResponse(
                "The model server answered with a stream although none was asked for.", reason="mode_mismatch"
            )
        return None

    def _hold(self, data: bytes, now: int) -> None:
        self._body_size += len(data)
        self._held.append(data)
        assert self._head is not None
        if self._is_event_stream and self._head.status < 400:
            if self._raw:
                self._commit(now)
                return
            reader = self.reader
            reader.feed(data, now)
            if reader.error is not None and not self._is_sse_committed:
                self._exchange.timeline.end = now
                self._finish(Result("stream_error", self._head, b"".join(self._held)), close=True)
            elif reader.events or reader.comments or self._body_size > HOLD_LIMIT or self._is_sse_committed:
                self._commit(now)
                if reader.is_done:
                    self._end_stream(now)
        elif self._opaque and self._head.status < 400:
            self._commit(now)
        elif self._body_size > HOLD_LIMIT:
            if self._exchange.is_stream and self._head.status < 400:
                self._fail(_mode_mismatch(), now)
            else:
                self._raw = True
                self._commit(now)

    def _commit(self, now: int) -> None:
        """The head goes out, and with it what was held."""
        assert self._head is not None
        if not self._call.is_started:
            length = None if self._is_event_stream or self._stripper is not None else self._head.content_length
            self._exchange.status = self._head.status
            self._call.start(self._head.status, self._head_for(self._head), length)
        data = b"".join(self._held) if len(self._held) != 1 else self._held[0]
        self._held.clear()
        self._state = "passing"
        if self._raw or not self._is_event_stream:  # bytes that must not be looked into, nor added to
            self._stripper = self._to_trailer = None
        passed = data if self._stripper is None else self._stripper.feed(data)
        self._call.write(passed if self._raw or b"[DONE]" not in passed else _until_done(passed))
        self._progress.last_write = now

    # Ends

    def _end_stream(self, now: int) -> None:
        """The stream said that it is done: the client's answer ends at once, whatever the upstream does then."""
        self._exchange.timeline.end = now
        self._exchange.settle("upstream_error" if self.reader.error is not None else "complete", self._error_reason())
        self._close_client_stream()
        self._state = "ended"
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(DRAIN_S, self._stop_draining)

    def _stream_ended(self, now: int) -> None:
        """End of the upstream's body without its end mark."""
        reader = self.reader
        was_open = reader.is_open  # closing it forgets
        reader.close(now)
        if self._state == "held":
            if reader.error is not None and not self._is_sse_committed:
                self._exchange.timeline.end = now
                self._finish(Result("stream_error", self._head, b"".join(self._held)))
                return
            if not reader.events and not self._is_sse_committed:
                self._fail(
                    UpstreamBadResponse("The model server's stream ended before its first event.", reason="no_finish"),
                    now,
                )
                return
            self._commit(now)
        if self._raw or reader.is_done or reader.is_finished or reader.inspect_lost:
            self._exchange.timeline.end = now
            self._exchange.settle("upstream_error" if reader.error is not None else "complete", self._error_reason())
            self._close_client_stream()
            self._finish(Result("sent"))
        elif reader.error is not None:
            self._exchange.timeline.end = now
            self._exchange.settle("upstream_error", "stream_error")
            self._flush_stripper()
            done = b"data: [DONE]\n\n" if self._exchange.api == "openai" else b""
            self._call.write(b"\n\n" + done if was_open else done)
            self._close_client_stream()
            self._finish(Result("sent"))
        else:
            self._break(
                UpstreamBadResponse(
                    "The model server ended its stream without finishing the answer.", reason="no_finish"
                ),
                now,
                outcome="upstream_truncated",
                is_open=was_open,
            )

    def _error_reason(self) -> str | None:
        return "stream_error" if self.reader.error is not None else None

    def _flush_stripper(self) -> None:
        if self._stripper is not None:
            self._call.write(self._stripper.finish())

    def _close_client_stream(self) -> None:
        self._flush_stripper()
        if self._to_trailer is not None:
            self._call.write(self._to_trailer())
        self._call.end()

    def _stop_draining(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._finish(Result("sent"))

    def _fail(self, error: GatewayError, now: int) -> None:
        """An answer that cannot be used; told in the stream if a heartbeat committed it, else left to the task."""
        if self.is_committed:
            self._break(error, now)
        else:
            self._exchange.timeline.end = now
            self._finish(Result("failed", self._head, error=error), close=True)

    def _break(self, error: GatewayError, now: int, outcome: str | None = None, *, is_open: bool = False) -> None:
        """A started answer goes wrong: one error event for a stream, a visible cut for anything else."""
        exchange = self._exchange
        exchange.timeline.end = now
        exchange.error = error
        if outcome == "upstream_truncated" or (isinstance(error, UpstreamBadResponse) and error.reason in _CUTS):
            exchange.settle("upstream_truncated", error.reason)
        elif isinstance(error, UpstreamTimeout):
            exchange.settle("upstream_timeout", error.reason)
        elif isinstance(error, Internal):
            exchange.settle("internal_error", error.reason)
        else:
            exchange.settle("upstream_error" if isinstance(error, UpstreamError) else "refused", error.reason)
        if (self._is_event_stream or self._is_sse_committed) and not (self._raw and self._state == "passing"):
            opening = b"\n\n" if is_open or self.reader.is_open else b""
            self._call.write(opening + event_of(error, exchange.api))
            if self._to_trailer is not None:
                self._call.write(self._to_trailer())
            self._call.end()
        else:
            self._call.abort()
        self._state = "ended"
        if self._connection is not None:
            self._connection.close()
        self._finish(Result("sent", error=error))

    def _finish(self, result: Result, *, close: bool = False) -> None:
        if close and self._connection is not None:
            self._connection.close()
        if not self.result.done():
            self.result.set_result(result)

    # Time

    def _tick(self, now: int) -> None:
        """Does what is due and sets one timer for the next look."""
        progress = self._progress
        self._note_progress(now)
        action, when = due(progress, self._route.timeouts, self._route.budget, now)
        if action == "budget":
            progress.budget_passed = True
            self._exchange.budget_action = self._route.budget.on_exceed
        elif action == "heartbeat":
            self._beat(now)
        elif action != "none":
            self._time_out(action, now)
        if self.result.done() or self._state == "ended":
            return
        if action != "none":
            _, when = due(progress, self._route.timeouts, self._route.budget, now)
        delay = max(0.0005, (when - now) / NS)
        self._timer = self._loop.call_later(delay, self._tick_late, when)

    def _tick_late(self, when: int) -> None:
        if not self.result.done() and self._state != "ended":
            self._tick(max(when, self._clock()))

    def _note_progress(self, now: int) -> None:
        reader, progress = self.reader, self._progress
        if not progress.is_stream:
            return
        progress.token = reader.t_token or (now if self._raw and self._state == "passing" else 0)
        # Tokens are stamped as they come; whatever else came since the last look is taken to have come just now.
        last, others = reader.t_last, reader.events - reader.token_events + reader.comments
        if self._raw:
            others = self._body_size
        if others != self._seen_others:
            self._seen_others = others
            last = now
        if last > progress.last_event:
            progress.last_event = last
            if self._state == "passing":
                progress.last_write = max(progress.last_write, last)
        progress.can_beat = (
            not self._raw
            and (self._head is None or (self._is_event_stream and self._head.status < 400))
            and not reader.is_open
            and not reader.saw_id
            and self._exchange.kind in ("chat", "completions", "messages", "responses")
            and not progress.is_paused
        )

    def _beat(self, now: int) -> None:
        """Keeps the caller's and every hop's idle timers quiet; the first one commits the response to be a stream."""
        if not self._call.is_started:
            self._exchange.status = 200
            self._call.start(200, self._head_for(self._head), None)
        self._call.write(PING if self._exchange.api == "anthropic" else KEEP_ALIVE)
        self._progress.last_write = now

    def _time_out(self, action: str, now: int) -> None:
        limits = self._route.timeouts
        name = self._exchange.upstream
        sentence = {
            "first_token": f"no first token from upstream `{name}` within {limits.first_token_ms} ms (`timeouts.first_token_ms`)",
            "idle": f"upstream `{name}` was silent for {limits.idle_ms} ms in the middle of its answer (`timeouts.idle_ms`)",
            "total": f"the request took longer than {limits.total_ms} ms (`timeouts.total_ms`)",
            "write_stall": f"upstream `{name}` did not take the request within 30 s",
        }[action]
        reason = {
            "first_token": "first_token_timeout",
            "idle": "stall",
            "total": "total_timeout",
            "write_stall": "write_stall",
        }[action]
        text = f"The model server was too slow: {sentence}. Is it overloaded, or still warming up?"
        self._fail(UpstreamTimeout(text, reason=reason), now)


_CUTS = frozenset(("body_cut", "reset_mid", "no_finish", "bad_framing"))


def _until_done(data: bytes) -> bytes:
    """Nothing leaves after the end mark, whatever the upstream still says (fault-catalogue C11, C12)."""
    start = 0 if data.startswith(b"data: [DONE]") else data.find(b"\ndata: [DONE]")
    if start < 0:
        return data  # the words of an answer
    end = data.find(b"\n\n", start)
    return data if end < 0 else data[: end + 2]


def _mode_mismatch() -> UpstreamBadResponse:
    return UpstreamBadResponse(
        "The model server did not answer with a stream although one was asked for.", reason="mode_mismatch"
    )
