"""`DirectCall`: the caller's side over uvicorn's connection, written without a task switch.

Everything here runs inside callbacks of the event loop. Status line, headers and the first body bytes leave in one
write; a chunk costs one `%` and one `transport.write`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.errors import BodyTooLarge, GatewayError, Overloaded
from gateway.exchange import CallWatcher, ClientGone
from gateway.wire.headers import Headers

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.server import GatewayProtocol

_LAST_CHUNK = b"0\r\n\r\n"


class DirectCall:
    """See `exchange.Call`."""

    __slots__ = (
        "_body", "_body_error", "_chunked", "_head", "_is_open_ended", "_limit", "_protocol", "_size", "_take",
        "_waiter", "_watcher",
        "body_ns", "disconnected", "expects_continue", "headers", "is_http10", "is_paused", "is_started", "keep_alive",
        "method", "more_body", "path", "query", "received_ns", "response_complete", "stalled",
    )  # fmt: skip

    def __init__(
        self, protocol: GatewayProtocol, method: str, path: str, query: bytes, headers: Headers, received_ns: int
    ) -> None:
        self._protocol = protocol
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.received_ns = received_ns
        self.body_ns = 0
        self.more_body = True
        self.keep_alive = True
        self.is_http10 = False
        self.expects_continue = False
        self.disconnected = False
        self.response_complete = False
        self.is_started = False
        self.is_paused = False
        self.stalled = False
        self._body: list[bytes] = []
        self._size = 0
        self._limit = protocol._listen.max_body_bytes
        self._body_error: GatewayError | None = None
        self._take: Callable[[int], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._watcher: CallWatcher | None = None
        self._head = b""
        self._chunked = False
        self._is_open_ended = False  # neither length nor chunks: the body ends with the connection

    def __repr__(self) -> str:
        return f"<DirectCall {self.method} {self.path}{' gone' if self.disconnected else ''}>"

    @property
    def is_gone(self) -> bool:
        return self.disconnected

    # Reading

    async def read_body(self, limit: int, take: Callable[[int], bool]) -> bytes:
        """The whole body, joined once. The caller's announced length is judged before a byte is kept."""
        self._limit = limit
        self._take = take
        announced = self._announced_length()
        if announced is not None and announced > limit:
            raise too_large(limit)
        if self._size > limit:
            self._body_error = too_large(limit)
        elif not take(self._size):
            self._body_error = no_room()
        while self.more_body:
            if self.disconnected:
                raise ClientGone
            if self._body_error is not None:
                raise self._body_error
            if self.expects_continue and not self._size:
                self.expects_continue = False
                self._protocol.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._waiter = self._protocol.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._body_error is not None:
            raise self._body_error
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return body

    def _announced_length(self) -> int | None:
        for name, value in self.headers:
            if name == b"content-length":
                return int(value)
        return None

    def body_arrived(self, data: bytes) -> None:
        if self._body_error is not None:
            return
        self._size += len(data)
        if self._size > self._limit:
            self._body.clear()
            self.refuse_body(too_large(self._limit))
            return
        if self._take is not None and not self._take(len(data)):
            self._body.clear()
            self.refuse_body(no_room())
            return
        self._body.append(data)
        self._protocol.body_progressed(self)

    def body_complete(self, now: int) -> None:
        self.more_body = False
        self.body_ns = now
        self._protocol.body_finished(self)
        self._wake()

    def refuse_body(self, error: GatewayError) -> None:
        """The body will not be read to its end, for the reason given."""
        self._body_error = self._body_error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The client's connection

    def watch(self, watcher: CallWatcher | None) -> None:
        self._watcher = watcher
        if watcher is not None and self.disconnected:
            watcher.on_client_gone()

    def connection_lost(self) -> None:
        if self.response_complete or self.disconnected:
            return
        self.disconnected = True
        self._wake()
        if self._watcher is not None:
            self._watcher.on_client_gone()

    def writing_paused(self) -> None:
        self.is_paused = True
        if self._watcher is not None:
            self._watcher.on_client_paused()

    def writing_resumed(self) -> None:
        self.is_paused = False
        if self._watcher is not None:
            self._watcher.on_client_resumed()

    # Writing

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        """Prepares the head; it leaves with the first body bytes."""
        self.is_started = True
        lines = [STATUS_LINE[status], self._protocol.start_head()]
        lines += [b"%b: %b\r\n" % field for field in headers]
        bodiless = status in (204, 304)
        if length is not None and not bodiless:
            lines.append(b"content-length: %d\r\n" % length)
        elif self.is_http10 and not bodiless:
            self._is_open_ended = True
        elif not bodiless:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive or self.more_body or self._protocol.is_last(self):
            self.keep_alive = False
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    def flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self.disconnected:
            self._protocol.transport.write(head)

    def write(self, data: bytes) -> None:
        if self.disconnected or not data or self.method == "HEAD":
            return
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head:
            data = self._head + data
            self._head = b""
        self._protocol.transport.write(data)

    def end(self, data: bytes = b"") -> None:
        if self.response_complete:
            return
        self.response_complete = True
        self._watcher = None
        if self.disconnected:
            return
        if self.method == "HEAD":
            data = b""
        elif self._chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else _LAST_CHUNK
        if self._head or data:
            self._protocol.transport.write(self._head + data)
            self._head = b""
        if self.more_body:
            self._protocol.call = None
            self._protocol.linger()
        elif not self.keep_alive:
            self._protocol.transport.close()
            self._protocol.on_response_complete()
        else:
            self._protocol.on_response_complete()

    def abort(self) -> None:
        if self.response_complete:
            return
        self.response_complete = True
        self._watcher = None
        if self.disconnected:
            return
        self.flush()
        if self._is_open_ended:  # only a reset tells this caller that something is missing
            self._protocol.reset()
        else:
            self._protocol.transport.close()
        self._protocol.on_response_complete()


def no_room() -> Overloaded:
    """503: the bodies of all requests together are at their limit."""
    return Overloaded(
        "The gateway holds as many request bytes as it may (`listen.max_buffered_mb`); try again.",
        reason="buffered_bytes",
        retry_after_s=1,
    )


def too_large(limit: int) -> BodyTooLarge:
    """413 with the setting to change."""
    megabytes = limit / 1024 / 1024
    return BodyTooLarge(f"The request body is larger than {megabytes:g} MB. Send less, or raise `listen.max_body_mb`.")
