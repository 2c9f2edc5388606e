"""`AsgiCall`: the caller's side over plain ASGI, for servers that offer no link to their transport and for tests.

Writes are put into a bounded hand-over; a pump sends them. It costs a task switch per chunk, which is why it is
the fallback and not the way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from gateway.direct import no_room, too_large
from gateway.errors import GatewayError
from gateway.exchange import CallWatcher, ClientGone
from gateway.wire.headers import Headers

if TYPE_CHECKING:
    from gateway.proxy import Proxy

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PAUSE_ABOVE = 64 * 1024  # bytes handed over and not yet sent


class AsgiCall:
    """See `exchange.Call`."""

    def __init__(self, scope: Scope, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.method: str = scope["method"]
        raw_path = scope.get("raw_path") or scope["path"].encode("utf-8")
        self.path = raw_path.split(b"?", 1)[0].decode("latin-1")
        self.query: bytes = scope.get("query_string", b"")
        self.headers: Headers = [(bytes(name).lower(), bytes(value)) for name, value in scope["headers"]]
        self.received_ns = clock()
        self.body_ns = 0
        self.is_started = False
        self.is_paused = False
        self.stalled = False
        self._gone = False
        self._ended = False
        self._limit: int | None = None
        self._take_room: Callable[[int], bool] | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._body_error: GatewayError | None = None
        self._body_done = asyncio.Event()
        self._queue: deque[Message] = deque()
        self._queued = 0
        self._wake_pump = asyncio.Event()
        self._watcher: CallWatcher | None = None

    @property
    def is_gone(self) -> bool:
        return self._gone

    async def read_body(self, limit: int, take: Callable[[int], bool]) -> bytes:
        self._limit = limit
        self._take_room = take
        if self._size > limit:
            raise too_large(limit)
        if not take(self._size):
            raise no_room()
        await self._body_done.wait()
        if self._body_error is not None:
            raise self._body_error
        if not self.body_ns:
            raise ClientGone
        body = b"".join(self._body)
        self._body.clear()
        return body

    def watch(self, watcher: CallWatcher | None) -> None:
        self._watcher = watcher
        if watcher is not None and self._gone:
            watcher.on_client_gone()

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        self.is_started = True
        if length is not None:
            headers = [*headers, (b"content-length", b"%d" % length)]
        self._put({"type": "http.response.start", "status": status, "headers": headers}, 0)

    def flush(self) -> None:
        pass

    def write(self, data: bytes) -> None:
        if data and not self._gone:
            self._put({"type": "http.response.body", "body": data, "more_body": True}, len(data))

    def end(self, data: bytes = b"") -> None:
        if not self._ended:
            self._ended = True
            self._watcher = None
            self._put({"type": "http.response.body", "body": data, "more_body": False}, len(data))

    def abort(self) -> None:
        """ASGI has no cut; ending without the last message makes the server close the connection."""
        self._ended = True
        self._watcher = None
        self._wake_pump.set()

    def _put(self, message: Message, size: int) -> None:
        self._queue.append(message)
        self._queued += size
        self._wake_pump.set()
        if self._queued > PAUSE_ABOVE and not self.is_paused:
            self.is_paused = True
            if self._watcher is not None:
                self._watcher.on_client_paused()

    async def pump(self, send: Send) -> None:
        """Sends what was handed over until the end."""
        while True:
            while self._queue:
                message = self._queue.popleft()
                try:
                    await send(message)
                except OSError:  # some servers say so that the client has gone
                    self._leave()
                    return
                self._queued -= len(message.get("body", b""))
                if self.is_paused and self._queued <= PAUSE_ABOVE // 2:
                    self.is_paused = False
                    if self._watcher is not None:
                        self._watcher.on_client_resumed()
            if self._ended or self._gone:
                return
            self._wake_pump.clear()
            await self._wake_pump.wait()

    async def listen(self, receive: Receive) -> None:
        """Takes the body, then waits for the client's leaving."""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self._leave()
                return
            self._take(message)

    def _leave(self) -> None:
        if self._gone:
            return
        self._gone = True
        self._body_done.set()
        self._wake_pump.set()
        if self._watcher is not None:
            self._watcher.on_client_gone()

    def _take(self, message: Message) -> None:
        data = message.get("body", b"")
        if self._body_error is not None:
            return
        self._size += len(data)
        if self._limit is not None and self._size > self._limit:
            self._refuse_body(too_large(self._limit))
        elif self._take_room is not None and not self._take_room(len(data)):
            self._refuse_body(no_room())
        else:
            self._body.append(data)
        if not message.get("more_body", False):
            self.body_ns = self._clock()
            self._body_done.set()

    def _refuse_body(self, error: GatewayError) -> None:
        self._body_error = error
        self._body.clear()
        self._body_done.set()


async def serve(proxy: Proxy, scope: Scope, receive: Receive, send: Send, clock: Callable[[], int]) -> None:
    """One request through the proxy on any ASGI server."""
    call = AsgiCall(scope, clock)
    async with asyncio.TaskGroup() as group:
        listener = group.create_task(call.listen(receive), name="asgi-listen")
        pump = group.create_task(call.pump(send), name="asgi-pump")
        await proxy.handle(call)
        if not call.is_started:
            call.abort()
        await pump
        listener.cancel()
