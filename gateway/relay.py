"""The link between an upstream connection and the client: one attempt's answer, relayed as it arrives.

Called straight from the upstream's `data_received`. Until something is certain, bytes are held:

    HELD      plain answers and error statuses (up to `HOLD_LIMIT`), and a stream until its first event: an error there
              is an upstream error, not a token, and nothing of the upstream's has been promised to the caller yet.
              While another upstream could still be asked, until its first token (fault-catalogue B22): a role chunk
              that is out would forbid that
    PASSING   the head is out; each read costs one write to the client's transport, then a look at the bytes
    ENDED     the client has its answer; the upstream may still owe us its last chunk

A heartbeat that goes out while bytes are held commits the status, not the upstream. Of several attempts the first
one to commit answers: the gate decides.

The request's task sleeps on `result` meanwhile. What it wakes up to is a `Result`; only what is still uncommitted
then may be retried or turned into an error response.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gateway.complaints import (
    broken_off,
    no_stream,
    nothing_came,
    outcome_of,
    refused_with,
    unfinished,
    unusable_head,
)
from gateway.errors import GatewayError, event_of
from gateway.patience import Patience, closing_beat
from gateway.readable import with_readable_event
from gateway.wire.headers import Headers
from gateway.wire.sse import until_done

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.attempt import Attempt, Gate
    from gateway.config import Route
    from gateway.exchange import Call, Exchange
    from gateway.policy.deadline import Progress
    from gateway.upstream.connection import Lost, UpstreamConnection
    from gateway.upstream.http1 import ResponseHead
    from gateway.wire.stream import StreamReader
    from gateway.wire.strip import UsageStripper

HOLD_LIMIT = 256 * 1024  # a plain answer up to here is judged before it is sent; beyond, it streams through
DRAIN_S = 1.0  # for the last chunk of an upstream that already said [DONE]

State = Literal["held", "passing", "ended"]
Kind = Literal["sent", "held", "stream_error", "failed", "lost", "gone", "outrun"]


@dataclass(slots=True)
class Result:
    """How an attempt came out.

    sent          the client has the answer, or as much of it as there was (see the exchange's outcome)
    held          a complete answer, nothing of it sent: `head`, `body`
    stream_error  the stream began with an error event, nothing sent: `body` is what was held
    failed        an answer that cannot be used, nothing sent: `error`
    lost          the connection broke before anything was sent: `lost`
    gone          the client left
    outrun        another attempt was first; nothing of this one was sent
    """

    kind: Kind
    head: ResponseHead | None = None
    body: bytes = b""
    error: GatewayError | None = None
    lost: Lost | None = None


class Relay:
    """One attempt. Implements `upstream.connection.Sink`, `exchange.CallWatcher` and `patience.Waiting`."""

    __slots__ = (
        "_attempt", "_awaits_token", "_body_size", "_call", "_connection", "_exchange", "_gate", "_head",
        "_head_for", "_held", "_holds", "_is_error_told", "_patience", "_raw", "_seen_others", "_state", "_stripper",
        "_to_trailer", "reader", "result",
    )  # fmt: skip

    def __init__(
        self,
        exchange: Exchange,
        attempt: Attempt,
        gate: Gate,
        call: Call,
        route: Route,
        reader: StreamReader,
        *,
        head_for: Callable[[ResponseHead | None], Headers],
        clock: Callable[[], int],
        stripper: UsageStripper | None = None,
        trailer: Callable[[], bytes] | None = None,
        holds: bool = False,
        hedge_at: int = 0,
    ) -> None:
        self._exchange = exchange
        self._attempt = attempt
        self._gate = gate
        self._call = call
        self._holds = holds
        self._awaits_token = attempt.is_seen
        self.reader = reader
        self._stripper = stripper
        self._head_for = head_for
        self._to_trailer = trailer
        self.result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._connection: UpstreamConnection | None = None
        self._state: State = "held"
        self._head: ResponseHead | None = None
        self._held: list[bytes] = []
        self._body_size = 0
        self._raw = False  # compressed or of no kind that we read: relayed, not looked at
        self._seen_others = 0
        self._is_error_told = False
        self._patience = Patience(self, exchange, route, clock, is_seen=attempt.is_seen)
        self._patience.progress.hedge_at = hedge_at

    def __repr__(self) -> str:
        return f"<Relay {self._state}, {self._body_size} bytes>"

    @property
    def is_committed(self) -> bool:
        """Something of the upstream's answer is out: nothing else may be tried."""
        return self._state != "held"

    @property
    def is_over(self) -> bool:
        """Nothing is waited for any more."""
        return self._state == "ended" or self.result.done()

    async def run(self, connection: UpstreamConnection, head: bytes, body: bytes) -> Result:
        """Sends the request and waits for the end. The caller's leaving and every limit end it, never an exception."""
        self._connection = connection
        try:
            self._patience.begin()
            if not self.result.done():
                connection.send(head, body, self)
                if self._call.is_paused:
                    self.on_client_paused()
            del body
            return await self.result
        finally:
            self._patience.end()
            self._connection = None

    # From the upstream's connection

    def on_sent(self, now: int) -> None:
        self._patience.progress.sent = self._attempt.sent = now
        timeline = self._exchange.timeline
        if not timeline.sent:  # what is sent again is waited for, not gateway time
            timeline.sent = now

    def on_head(self, head: ResponseHead, now: int) -> None:
        self._head = head
        self._attempt.header = now
        if not self._patience.progress.sent:
            self.on_sent(now)  # an early answer, while the request was still being written
        is_opaque = self._exchange.kind == "opaque"
        self._raw = is_opaque or head.is_coded
        problem = unusable_head(
            head, is_stream=self._attempt.is_seen, is_opaque=is_opaque, is_committed=self._is_sse_committed
        )
        if problem is not None:
            self.fail(problem, now)

    def on_body(self, data: bytes, now: int) -> None:
        if self._state == "passing":
            self._body_size += len(data)
            if self._raw:
                self._call.write(data)
                return
            stripper = self._stripper
            passed = data if stripper is None else stripper.feed(data)
            if b"[DONE]" in passed or b'"error"' in passed:
                self._pass_odd(passed, data, now)
                return
            self._call.write(passed)
            reader = self.reader
            reader.feed(data, now)
            if self._awaits_token and reader.t_token:
                self._note_token(now)
            if reader.is_done:
                self._end_stream(now)
        elif self._state == "held":
            self._hold(data, now)

    def _note_token(self, now: int) -> None:
        self._awaits_token = False
        self._gate.on_token(self._attempt, now)
        beats = self._exchange.beats
        if beats is not None and beats.owes_status_done:
            self._patience.look_again()

    def _pass_odd(self, passed: bytes, data: bytes, now: int) -> None:
        """A read that may hold an end mark or an error: looked at first, so that the one leaves in one write with the
        end of the body, and the other in the shape that SDKs can read."""
        reader = self.reader
        reader.feed(data, now)
        if self._awaits_token and reader.t_token:
            self._note_token(now)
        if reader.error is not None and not self._is_error_told and self._exchange.api == "openai":
            readable = with_readable_event(passed, reader.error, is_open=reader.is_open)
            if readable is not None:
                self._is_error_told, passed = True, readable
        if b"[DONE]" in passed:
            passed = until_done(passed)
        if reader.is_done:
            self._end_stream(now, passed)
        else:  # the words of an answer
            self._call.write(passed)

    def on_end(self, now: int) -> None:
        if self._state == "ended":
            self._finish(Result("sent"))
        elif self._head is not None and self._head.is_event_stream:
            self._stream_ended(now)
        elif self._state == "held":
            self._finish_unsent(Result("held", self._head, b"".join(self._held)), now)
        else:
            self._exchange.timeline.end = now
            if not self._exchange.is_stream:
                self._exchange.timeline.answer_whole(now)
            self._exchange.settle("complete")
            self._call.end()
            self._finish(Result("sent"))

    def on_lost(self, lost: Lost, now: int) -> None:
        if self._state == "ended":
            self._finish(Result("sent"))
        elif self._state == "held":
            self._finish_unsent(Result("lost", self._head, lost=lost), now)
        else:
            self._break(broken_off(lost), now)

    # From the client's connection

    def on_client_gone(self) -> None:
        if self._state != "ended":
            self._exchange.settle("client_cancelled", "client_stalled" if self._call.stalled else None)
            self._finish(Result("gone"), close=True)

    def outrun(self) -> None:
        """Another attempt was first, or nobody wants this one any more: its connection closes at once."""
        if not self.is_over:
            self._state = "ended"
            self._finish(Result("outrun"), close=True)

    def on_client_paused(self) -> None:
        self._patience.progress.is_paused = True
        if self._connection is not None and self._state != "ended":
            self._connection.pause_reading()

    def on_client_resumed(self) -> None:
        self._patience.resume()
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
    def _is_sse_committed(self) -> bool:
        """A heartbeat committed the response to be a stream before the upstream said anything."""
        return self._call.is_started and self._exchange.is_stream

    def _hold(self, data: bytes, now: int) -> None:
        self._body_size += len(data)
        self._held.append(data)
        head = self._head
        assert head is not None
        if head.status < 400 and (self._exchange.kind == "opaque" or (head.is_event_stream and self._raw)):
            self._commit(now)
        elif head.status < 400 and head.is_event_stream:
            self._hold_event(data, now)
        elif self._body_size > HOLD_LIMIT:
            if self._exchange.is_stream and head.status < 400:
                self.fail(no_stream(), now)
            elif self._call.is_started and head.status >= 400:  # a heartbeat said 200: no page can be told any more
                self.fail(refused_with(head.status), now)
            else:
                self._raw = True
                self._commit(now)

    def _hold_event(self, data: bytes, now: int) -> None:
        """The beginning of a stream: held until its first event (or comment) is whole, or its first token came."""
        reader = self.reader
        reader.feed(data, now)
        if self._awaits_token and reader.t_token:
            self._note_token(now)
        if reader.error is not None:
            self._finish_unsent(Result("stream_error", self._head, b"".join(self._held)), now, close=True)
        elif reader.is_done and reader.events == 1:  # nothing but the end mark
            self.fail(nothing_came(), now)
        elif self._may_commit() and self._commit(now) and reader.is_done:
            self._end_stream(now)

    def _may_commit(self) -> bool:
        reader = self.reader
        if self._body_size > HOLD_LIMIT:
            return True
        if self._holds:
            return bool(reader.t_token) or reader.is_finished
        return bool(reader.events or reader.comments) or self._is_sse_committed

    def _commit(self, now: int) -> bool:
        """The head goes out, and with it what was held. False: another attempt was first."""
        head = self._head
        assert head is not None
        if not self._gate.claim(self._attempt, now):
            self.outrun()
            return False
        if not self._call.is_started:
            length = None if head.is_event_stream or self._stripper is not None else head.content_length
            self._exchange.status = head.status
            self._call.start(head.status, self._head_for(head), length)
        data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        self._held.clear()
        self._state = "passing"
        if self._raw or not head.is_event_stream:  # bytes that must not be looked into, nor added to
            self._stripper = self._to_trailer = None
        passed = data if self._stripper is None else self._stripper.feed(data)
        self._call.write(passed if self._raw or b"[DONE]" not in passed else until_done(passed))
        self._patience.progress.last_write = now
        return True

    # Ends

    def _end_stream(self, now: int, last: bytes = b"") -> None:
        """The stream said that it is done: the client's answer ends at once, whatever the upstream does then."""
        self._settle_read(now)
        self._close_client_stream(last)
        self._state = "ended"
        self._patience.call_later(DRAIN_S, self._stop_draining)

    def _stream_ended(self, now: int) -> None:
        """End of the upstream's body without its end mark."""
        reader = self.reader
        was_open = reader.is_open  # closing it forgets
        reader.close(now)
        if self._state == "held":
            if reader.error is not None:
                self._finish_unsent(Result("stream_error", self._head, b"".join(self._held)), now)
                return
            is_cut = not (self._raw or reader.is_finished or reader.inspect_lost)
            if not reader.events or (self._holds and is_cut):  # somebody else may still answer
                self.fail(unfinished() if reader.events else nothing_came(), now)
                return
            if not self._commit(now):
                return
        is_whole = self._raw or reader.is_done or reader.is_finished or reader.inspect_lost
        if not is_whole and reader.error is None:
            self._break(unfinished(), now, is_open=was_open)
            return
        self._settle_read(now)
        if not is_whole:  # an error that ended the stream without its end mark, which one client waits for
            self._flush_stripper()
            done = b"data: [DONE]\n\n" if self._exchange.api == "openai" else b""
            self._call.write(b"\n\n" + done if was_open else done)
        self._close_client_stream()
        self._finish(Result("sent"))

    def _settle_read(self, now: int) -> None:
        """The outcome of a stream that was read to its end."""
        self._exchange.timeline.end = now
        if self.reader.error is not None:
            self._exchange.settle("upstream_error", "stream_error")
        else:
            self._exchange.settle("complete")

    def _flush_stripper(self) -> None:
        if self._stripper is not None:
            self._call.write(self._stripper.finish())

    def _close_client_stream(self, last: bytes = b"") -> None:
        if self._stripper is not None:
            last += self._stripper.finish()
        if self._to_trailer is not None:
            last += self._to_trailer()
        self._call.end(last)

    def _stop_draining(self) -> None:
        self._finish(Result("sent"), close=True)

    def fail(self, error: GatewayError, now: int) -> None:
        """An answer that cannot be used: told in the answer that went out already, else left to the task."""
        if self.is_committed:
            self._break(error, now)
        else:
            self._finish_unsent(Result("failed", self._head, error=error), now, close=True)

    def _break(self, error: GatewayError, now: int, *, is_open: bool = False) -> None:
        """A started answer goes wrong: one error event for a stream, a visible cut for anything else."""
        exchange = self._exchange
        exchange.timeline.end = now
        exchange.error = error
        exchange.settle(outcome_of(error), error.reason)
        is_stream = (self._head is not None and self._head.is_event_stream) or self._is_sse_committed
        if is_stream and not (self._raw and self._state == "passing"):
            opening = b"\n\n" if is_open or self.reader.is_open else b""
            self._call.write(opening + closing_beat(exchange) + event_of(error, exchange.api))
            if self._to_trailer is not None:
                self._call.write(self._to_trailer())
            self._call.end()
        else:
            self._call.abort()
        self._state = "ended"
        self._finish(Result("sent", error=error), close=True)

    def _finish_unsent(self, result: Result, now: int, *, close: bool = False) -> None:
        self._exchange.timeline.end = now
        self._finish(result, close=close)

    def _finish(self, result: Result, *, close: bool = False) -> None:
        if close and self._connection is not None:
            self._connection.close()
        if not self.result.done():
            self.result.set_result(result)

    # For the timer

    def note(self, progress: Progress, now: int) -> None:
        """Tokens are stamped as they come; whatever else came since the last look is taken to have come just now."""
        reader, head = self.reader, self._head
        is_passing = self._state == "passing"
        progress.token = reader.t_token or (now if self._raw and is_passing else 0)
        progress.visible = reader.t_visible
        if self._exchange.is_detached:  # its caller was answered: nobody listens to silence any more
            progress.first_byte_deadline = 0
        last, others = reader.t_last, reader.events - reader.token_events + reader.comments
        if self._raw:
            others = self._body_size
        if others != self._seen_others:
            self._seen_others = others
            last = now
        if last > progress.last_event:
            progress.last_event = last
            if is_passing:
                progress.last_write = max(progress.last_write, last)
        progress.can_beat = (
            not self._raw
            and (head is None or head.status < 400)
            and (not is_passing or (self._exchange.is_stream and not reader.is_open and not reader.saw_id))
            and not progress.is_paused
            and not self._exchange.is_detached
            and self._gate.leads(self._attempt)
        )

    def budget_passed(self, now: int) -> None:
        self._gate.on_budget(self._attempt, now)

    def on_silence(self, now: int) -> None:
        """From outside: its upstream was left out because it answers nobody."""
        if self._state == "held" and not self.reader.t_event:
            self._gate.on_silence(self._attempt, now)

    def hedge_due(self, now: int) -> None:
        self._gate.on_hedge_due(now)

    def estimate_ms(self, now: int) -> int | None:
        return self._gate.estimate_ms(self._attempt, now)

    def beat(self, data: bytes) -> None:
        """Keeps the caller's and every hop's idle timers quiet; the first one commits the status."""
        if not self._call.is_started:
            self._exchange.status = 200
            self._call.start(200, self._head_for(None), None)
        self._call.write(data)
