"""The HTTP/1.1 server side on httptools: one `asyncio.Protocol` per connection, as uvicorn behaves.

One request is answered at a time; further ones wait in order. A connection that idles after an answer is closed
after the profile's keep-alive. When the client goes away, the task of its request is cancelled at once.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from contextlib import aclosing
from email.utils import formatdate
from typing import TYPE_CHECKING, assert_never, cast

import httptools

from gateway.sim.endpoints import Request
from gateway.sim.steps import End, HangUp, Head, Header, Pause, Raw, Step, Steps, chunk_bytes, head_bytes

if TYPE_CHECKING:
    from gateway.sim.transport import Server

LAST_CHUNK = b"0\r\n\r\n"
MAX_WAITING = 64  # pipelined requests held before reading stops
BAD_REQUEST = b"Invalid HTTP request received."
LINGER_ZERO = struct.pack("ii", 1, 0)


class SimProtocol(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.keep_alive_s = server.profile.keep_alive_s  # a fault may shorten it for this connection
        self.closes_on_reuse = False
        self._answered = 0
        self._number = 0
        self._start_message()

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._number = self._server.connected(self)
        if self._server.deaf:
            self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self._stop_idle_timer()
        if self.closes_on_reuse and self._answered:
            self.hang_up(reset=False)
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the request is answered as if it had asked for nothing else
        except httptools.HttpParserError:
            self._refuse_framing()

    def eof_received(self) -> None:
        """A half-close counts as leaving, as in uvicorn."""

    def connection_lost(self, _exc: Exception | None) -> None:
        self._server.disconnected(self)
        self._stop_idle_timer()
        self._waiting.clear()
        self._writable.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # httptools

    def on_message_begin(self) -> None:
        self._start_message()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._headers.append((name, value))
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True

    def on_headers_complete(self) -> None:
        if self._expects_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path, _, query = self._url.decode("latin-1").partition("?")
        request = Request(
            method=self._parser.get_method().decode("latin-1"),
            path=path,
            query=query,
            headers=tuple(self._headers),
            body=b"".join(self._body),
            keep_alive=self._parser.should_keep_alive(),
            version=self._parser.get_http_version(),
            arrived_at=self._loop.time(),
            connection=self._number,
        )
        self._waiting.append(request)
        if len(self._waiting) >= MAX_WAITING:
            self.transport.pause_reading()
        self._answer_next()

    def _start_message(self) -> None:
        self._url = b""
        self._headers: list[Header] = []
        self._body: list[bytes] = []
        self._expects_continue = False

    # Answering

    def hang_up(self, *, reset: bool) -> None:
        """Ends the connection now: everything written is still sent, then FIN; or RST."""
        transport = self.transport
        if not reset:
            transport.close()
            return
        end = transport.get_extra_info("socket")
        if end is not None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_ZERO)
        getattr(transport, "reset", transport.abort)()

    def _answer_next(self) -> None:
        if self._task is None and self._waiting and not self.transport.is_closing():
            request = self._waiting.popleft()
            self._task = self._server.spawn(self._answer(request), f"sim {request.method} {request.path}")

    async def _answer(self, request: Request) -> None:
        try:
            player = _Player(self, request)
            async with aclosing(self._server.answer(request, self)) as steps:
                await player.play(steps)
            if not player.reusable:
                self.hang_up(reset=False)
        except Exception:
            self.hang_up(reset=True)
            raise
        finally:
            self._task = None
            self._answered += 1
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self._answer_next()
            if self._task is None:
                self._start_idle_timer()

    def _start_idle_timer(self) -> None:
        self._stop_idle_timer()
        self._idle_timer = self._loop.call_later(self.keep_alive_s, self.transport.close)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _refuse_framing(self) -> None:
        headers = ((b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close"))
        length = (b"content-length", b"%d" % len(BAD_REQUEST))
        self.transport.write(head_bytes(400, (*headers, length)) + BAD_REQUEST)
        self.transport.close()

    async def writable(self) -> None:
        """Returns when the other side has taken enough of what was written."""
        if not self._writable.is_set():
            await self._writable.wait()


class _Player:
    """Writes the steps of one answer."""

    def __init__(self, protocol: SimProtocol, request: Request) -> None:
        self._protocol = protocol
        self._request = request
        self._chunked = False
        self._ended = False
        self._closes = not request.keep_alive

    @property
    def reusable(self) -> bool:
        """Whether the connection may take another request: asked for, and the answer ended by its framing."""
        return self._ended and not self._closes

    async def play(self, steps: Steps) -> None:
        """Until the steps end, the connection is hung up, or the task is cancelled."""
        protocol, write = self._protocol, self._protocol.transport.write
        async for step in steps:
            if type(step) is bytes:
                write(chunk_bytes(step) if self._chunked else step)
                await protocol.writable()
            elif await self._act(step):
                return

    async def _act(self, step: Step) -> bool:
        """Does one step that is not body; True if it was the last."""
        protocol, transport = self._protocol, self._protocol.transport
        match step:
            case bytes():
                raise TypeError("bytes are written by play()")
            case Head():
                transport.write(head_bytes(step.status, self._headers(step)))
            case End():
                self._ended = True
                if self._chunked and not step.silent:
                    trailers = b"".join(b"%s: %s\r\n" % trailer for trailer in step.trailers)
                    transport.write(b"0\r\n" + trailers + b"\r\n" if trailers else LAST_CHUNK)
            case Raw():
                transport.write(step.data)
                await protocol.writable()
            case Pause():
                await (asyncio.sleep(step.seconds) if step.seconds is not None else asyncio.Event().wait())
            case HangUp():
                protocol.hang_up(reset=step.reset)
                self._ended = True
                return True
            case _:
                assert_never(step)
        return False

    def _headers(self, head: Head) -> tuple[Header, ...]:
        headers: tuple[Header, ...] = ((b"date", _date()), (b"server", b"uvicorn"), *head.headers)
        if head.length is None and self._request.version == "1.1":
            self._chunked = True
            headers += ((b"transfer-encoding", b"chunked"),)
        elif head.length is None:
            self._closes = True  # HTTP/1.0: the end of the connection is the end of the body
        if self._closes:
            headers += ((b"connection", b"close"),)
        return headers


def _date() -> bytes:
    return formatdate(usegmt=True).encode()
