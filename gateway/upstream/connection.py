"""One TCP or TLS connection to a model server: an `asyncio.Protocol` that stamps bytes the moment they arrive.

A connection serves one request at a time. Its user is a `Sink`, called straight from `data_received`: no task
switch lies between the upstream's bytes and the client's transport (the reason why this is not a stream API).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Protocol

from gateway.upstream.http1 import ProtocolViolation, ResponseHead, ResponseParser

Clock = Callable[[], int]


OUR_FAULT = "internal"  # as a reason: nobody lost anything but by a mistake in this program

log = logging.getLogger("gateway.upstream")


class Lost(Exception):
    """The exchange on this connection ended badly.

    `reason` is a word of fault-catalogue part 5; `bytes_received` counts response bytes of this exchange;
    `was_reused` tells whether the connection had served a request before (together: retry class R1 or R2).
    """

    def __init__(self, reason: str, detail: str, bytes_received: int, *, was_reused: bool) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.bytes_received = bytes_received
        self.was_reused = was_reused

    @property
    def is_stale(self) -> bool:
        """A pooled connection that the server had closed before it read our request (R1)."""
        return self.was_reused and self.bytes_received == 0


class Sink(Protocol):
    """Receives one response. `now` is the monotonic time of the read in nanoseconds."""

    def on_sent(self, now: int) -> None: ...
    def on_head(self, head: ResponseHead, now: int) -> None: ...
    def on_body(self, data: bytes, now: int) -> None: ...
    def on_end(self, now: int) -> None: ...
    def on_lost(self, lost: Lost, now: int) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """See the module. `on_closed` is called once, when the transport is gone."""

    __slots__ = (
        "_clock", "_head_given", "_is_reading", "_on_closed", "_parser", "_sink", "_transport",
        "bytes_received", "idle_since", "is_closed", "opened_at", "requests", "rtt_ns",
    )  # fmt: skip

    def __init__(self, clock: Clock, on_closed: Callable[[UpstreamConnection], None]) -> None:
        self._clock = clock
        self._on_closed = on_closed
        self._parser = ResponseParser()
        self._sink: Sink | None = None
        self._transport: asyncio.Transport | None = None
        self._head_given = False
        self._is_reading = True
        self.bytes_received = 0
        self.requests = 0
        self.opened_at = 0
        self.rtt_ns: int | None = None
        """Round trip of its TCP handshake; None when it is not known."""
        self.idle_since = 0
        self.is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "busy" if self._sink is not None else "idle"
        return f"<UpstreamConnection {state}, {self.requests} requests>"

    # What the user of the connection calls.

    def send(self, head: bytes, body: bytes, sink: Sink) -> None:
        """Writes one request; `sink` gets everything that follows, `on_sent` when the last byte left us."""
        assert self._transport is not None and self._sink is None
        self._sink = sink
        self._head_given = False
        self.bytes_received = 0
        self.requests += 1
        self._parser.start()
        transport = self._transport
        if len(body) < 65536:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        if transport.get_write_buffer_size() == 0:
            sink.on_sent(self._clock())  # else `resume_writing` tells: the high-water mark is 0

    def detach(self) -> None:
        """The user is done with a complete response; the connection may serve another request."""
        self._sink = None
        self.idle_since = self._clock()
        self.resume_reading()

    def close(self) -> None:
        """Closes at once and silently: the user gets no further call. Safe to call more than once."""
        self._sink = None
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()

    def pause_reading(self) -> None:
        """Back-pressure: the client takes no more."""
        if self._is_reading and self._transport is not None and not self._transport.is_closing():
            self._is_reading = False
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_reading and self._transport is not None:
            self._is_reading = True
            if not self._transport.is_closing():
                self._transport.resume_reading()

    @property
    def can_reuse(self) -> bool:
        """True when a complete response was read and the connection is as good as new."""
        return (
            not self.is_closed
            and self._parser.can_reuse
            and self._transport is not None
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()  # answered before the request was read to its end (A12)
        )

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self.opened_at = self._clock()
        transport.set_write_buffer_limits(high=0)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        parser = self._parser
        sink = self._sink
        violation: ProtocolViolation | None = None
        self.bytes_received += len(data)
        try:
            parser.feed(data)
        except ProtocolViolation as caught:
            violation = caught
        if sink is None:  # idle, or the user left: nothing that comes now may ever reach another request
            self.close()
            return
        try:
            if parser.head is not None and not self._head_given:
                self._head_given = True
                sink.on_head(parser.head, now)
            parts = parser.parts
            if parts and self._sink is sink:
                body = parts[0] if len(parts) == 1 else b"".join(parts)
                parts.clear()
                sink.on_body(body, now)
            if violation is not None:
                if parser.is_complete:  # its user has the whole answer and has not let go yet; what came is nobody's
                    self.close()
                else:
                    self._lose(violation.reason, violation.detail, now)
            elif parser.is_complete and self._sink is sink:
                sink.on_end(now)
        except Exception as error:  # a mistake of ours must not pass for the server's, nor leave a request waiting
            log.exception("internal error while an answer was read", exc_info=error)
            self._lose(OUR_FAULT, "the gateway failed", now)

    def eof_received(self) -> None:
        sink = self._sink
        if sink is not None and self._parser.end_of_stream() and self._head_given:
            sink.on_end(self._clock())

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if self._sink is not None and not self._parser.is_complete:
            now = self._clock()
            if exc is not None:
                self._lose("reset_mid" if self.bytes_received else "reset_no_bytes", "the connection was reset", now)
            elif not self.bytes_received:
                self._lose("eof_no_bytes", "the connection was closed before any answer", now)
            elif self._parser.head is None:
                self._lose("eof_in_head", "the connection was closed inside the response head", now)
            else:
                self._lose("body_cut", "the connection was closed before the end of the answer", now)
        self._on_closed(self)

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        if self._sink is not None:
            self._sink.on_sent(self._clock())

    def _lose(self, reason: str, detail: str, now: int) -> None:
        sink, self._sink = self._sink, None
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()
        if sink is not None:
            sink.on_lost(Lost(reason, detail, self.bytes_received, was_reused=self.requests > 1), now)


def describe_connect_error(error: BaseException) -> tuple[str, str]:
    """(reason, sentence) for whatever connecting raised; never the library's text, which may hold addresses."""
    if isinstance(error, ssl.SSLCertVerificationError):
        cause = str(getattr(error, "verify_message", "")).split(",", 1)[0]  # what follows a comma is the address
        return "tls", f"its TLS certificate was not accepted ({cause or 'verification failed'})"
    if isinstance(error, ssl.SSLError):
        return "tls", "the TLS handshake failed; does it speak https on this port?"
    if isinstance(error, ConnectionRefusedError):
        return "connect_refused", "it refused the connection; is the model server running, and still loading its model?"
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return "connect_timeout", "no connection within the connect limit"
    if isinstance(error, OSError):
        return "connect_failed", f"connecting failed ({error.strerror or 'network error'})"
    return "connect_failed", "connecting failed"
