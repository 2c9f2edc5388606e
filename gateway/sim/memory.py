"""Connected pairs of asyncio transports without sockets, and a small network of them.

Any two `asyncio.Protocol`s can be joined. A side's written bytes lie in its outgoing queue until the event loop
delivers them; `window` of them count as "in the kernel", the rest as the transport's write buffer, which is what
pauses and resumes the writer. The order of bytes, end of file and reset is kept. Nothing here starts a task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

DEFAULT_WINDOW = 64 * 1024  # bytes that an unread socket takes before the writer's own buffer fills
DEFAULT_HIGH_WATER = 64 * 1024  # asyncio's default
MAX_READ = 256 * 1024  # asyncio's and uvloop's largest read

P = TypeVar("P", bound=asyncio.BaseProtocol)
Buffer = bytes | bytearray | memoryview


class MemoryTransport(asyncio.Transport):
    """One end of a pipe. Behaves as a socket transport does, and has `reset()` for an RST."""

    def __init__(
        self,
        protocol: asyncio.BaseProtocol,
        loop: asyncio.AbstractEventLoop,
        extra: dict[str, object],
        *,
        window: int = DEFAULT_WINDOW,
        latency_s: float = 0.0,
        largest_read: int = MAX_READ,
    ) -> None:
        super().__init__(extra)
        self._protocol = protocol
        self._loop = loop
        self._peer: MemoryTransport | None = None
        self._window = window
        self._latency_s = latency_s
        self._largest_read = largest_read
        self._outgoing: deque[tuple[float, memoryview]] = deque()  # (due, bytes)
        self._queued = 0
        self._high = DEFAULT_HIGH_WATER
        self._low = DEFAULT_HIGH_WATER // 4
        self._writer_paused = False
        self._reading = True
        self._pump_scheduled = False
        self._closing = False  # by close() or abort(): nothing more is written, nothing is read
        self._eof_written = False
        self._end_due: float | None = None  # when the other end may hear that no more bytes come
        self._end_delivered = False
        self._gone = False  # connection_lost was called or is about to be
        self._reset = False

    def __repr__(self) -> str:
        state = "closed" if self._gone else "closing" if self._closing else "open"
        return f"<MemoryTransport {state}, {self._queued} bytes out>"

    def join(self, peer: MemoryTransport) -> None:
        """Makes `peer` the other end."""
        self._peer = peer

    # Reading

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading and not self._closing:
            self._reading = True
            self._other._schedule_pump()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    # Writing

    def write(self, data: Buffer) -> None:
        if self._eof_written:
            raise RuntimeError("Cannot call write() after write_eof()")
        if not data or self._closing:
            return
        self._outgoing.append((self._loop.time() + self._latency_s, memoryview(bytes(data))))
        self._queued += len(data)
        self._pause_writer()
        self._schedule_pump()

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._closing and not self._eof_written:
            self._eof_written = True
            self._announce_end()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = DEFAULT_HIGH_WATER if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high, self._low = high, low
        self._pause_writer()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        return max(0, self._queued - self._window)

    # Ending

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Delivers what was written, then the end of file."""
        if not self._closing:
            self._closing = True
            self._announce_end()

    def abort(self) -> None:
        """Drops what is in the write buffer; the other end still reads what the kernel had, then end of file."""
        self._drop_write_buffer()
        self._closing = True
        self._lose(None)
        self._announce_end()

    def reset(self) -> None:
        """As `abort()`, but the other end gets ConnectionResetError after what it could read."""
        self._reset = True
        self.abort()

    # Delivery, outgoing side

    @property
    def _other(self) -> MemoryTransport:
        assert self._peer is not None, "join() was not called"
        return self._peer

    def _announce_end(self) -> None:
        if self._end_due is None:
            self._end_due = self._loop.time() + self._latency_s
        self._schedule_pump()

    def _schedule_pump(self) -> None:
        if self._pump_scheduled:
            return
        due = self._outgoing[0][0] if self._outgoing else self._end_due
        if due is None:
            return
        self._pump_scheduled = True
        if self._latency_s and due > self._loop.time():
            self._loop.call_at(due, self._pump)
        else:
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """One read of the other end, or the news that there will be none."""
        self._pump_scheduled = False
        other = self._other
        if other._closing:
            self._deliver_to_nobody()
            return
        if other._reading:
            if data := self._take():
                self._resume_writer()
                other._receive(data)
            if self._outgoing or not self._end_has_come():
                self._schedule_pump()
            elif not self._end_delivered:
                self._end_delivered = True
                other._hear_the_end(self._reset)
        self._finish_closing()

    def _deliver_to_nobody(self) -> None:
        """The other end reads no more: bytes for it are lost, and once it is gone they are answered by a reset."""
        lost, self._queued = bool(self._outgoing), 0
        self._outgoing.clear()
        self._resume_writer()
        if lost and self._other._gone and not self._other._outgoing:
            self._lose(ConnectionResetError("the other end has closed"))
        self._finish_closing()

    def _end_has_come(self) -> bool:
        return self._end_due is not None and self._end_due <= self._loop.time()

    def _take(self) -> bytes:
        """What has arrived by now, up to one read's size; writes close in time become one read, as with TCP."""
        now, taken, size = self._loop.time(), [], 0
        while self._outgoing and self._outgoing[0][0] <= now and size < self._largest_read:
            due, data = self._outgoing.popleft()
            room = self._largest_read - size
            if len(data) > room:
                self._outgoing.appendleft((due, data[room:]))
                data = data[:room]
            taken.append(data)
            size += len(data)
        self._queued -= size
        return b"".join(taken)

    def _pause_writer(self) -> None:
        if not self._writer_paused and self.get_write_buffer_size() > self._high:
            self._writer_paused = True
            self._protocol.pause_writing()

    def _resume_writer(self) -> None:
        if self._writer_paused and self.get_write_buffer_size() <= self._low:
            self._writer_paused = False
            self._protocol.resume_writing()

    def _drop_write_buffer(self) -> None:
        while self.get_write_buffer_size() and self._outgoing:
            due, data = self._outgoing.pop()
            excess = min(len(data), self.get_write_buffer_size())
            if excess < len(data):
                self._outgoing.append((due, data[: len(data) - excess]))
            self._queued -= excess

    def _finish_closing(self) -> None:
        """A closed end is done when its own buffer is empty; the kernel delivers the rest without it."""
        if self._closing and not self.get_write_buffer_size():
            self._lose(None)

    # Delivery, incoming side

    def _receive(self, data: bytes) -> None:
        protocol = self._protocol
        if isinstance(protocol, asyncio.BufferedProtocol):
            view = memoryview(data)
            while view and not self._closing:
                buffer = memoryview(protocol.get_buffer(len(view)))
                size = min(len(buffer), len(view))
                buffer[:size] = view[:size]
                protocol.buffer_updated(size)
                view = view[size:]
        elif isinstance(protocol, asyncio.Protocol):
            protocol.data_received(data)

    def _hear_the_end(self, reset: bool) -> None:
        if self._closing:
            return
        if reset:
            self._closing = True
            self._outgoing.clear()
            self._queued = 0
            self._lose(ConnectionResetError("reset by the other end"))
            return
        protocol = self._protocol
        keep_open = (
            protocol.eof_received() if isinstance(protocol, asyncio.Protocol | asyncio.BufferedProtocol) else None
        )
        if not keep_open:
            self.close()

    def _lose(self, error: Exception | None) -> None:
        if not self._gone:
            self._gone = self._closing = True
            self._loop.call_soon(self._protocol.connection_lost, error)


def memory_pipe(
    client: asyncio.BaseProtocol,
    server: asyncio.BaseProtocol,
    *,
    client_extra: dict[str, object] | None = None,
    server_extra: dict[str, object] | None = None,
    window: int = DEFAULT_WINDOW,
    latency_s: float = 0.0,
    largest_read: int = MAX_READ,
) -> tuple[MemoryTransport, MemoryTransport]:
    """Two joined transports; each protocol's `connection_made` is called soon, the server's first.

    `latency_s` is one-way. `largest_read` bounds one `data_received`: 1 feeds byte by byte.
    """
    loop = asyncio.get_running_loop()
    addresses: dict[str, object] = {"sockname": ("127.0.0.1", 50000), "peername": ("127.0.0.1", 80)}
    reverse: dict[str, object] = {"sockname": ("127.0.0.1", 80), "peername": ("127.0.0.1", 50000)}
    ends = [
        MemoryTransport(protocol, loop, extra, window=window, latency_s=latency_s, largest_read=largest_read)
        for protocol, extra in ((client, addresses | (client_extra or {})), (server, reverse | (server_extra or {})))
    ]
    ends[0].join(ends[1])
    ends[1].join(ends[0])
    loop.call_soon(server.connection_made, ends[1])
    loop.call_soon(client.connection_made, ends[0])
    return ends[0], ends[1]


async def made_soon() -> None:
    """Returns when every `connection_made` that was called for before has run."""
    loop = asyncio.get_running_loop()
    made = loop.create_future()
    loop.call_soon(_finish, made)
    await made


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class MemoryNetwork:
    """Names and ports without a kernel. `create_connection` takes the place of the event loop's."""

    def __init__(self, *, window: int = DEFAULT_WINDOW, latency_s: float = 0.0, largest_read: int = MAX_READ) -> None:
        self._listeners: dict[tuple[str, int], Callable[[], asyncio.BaseProtocol]] = {}
        self.window, self.latency_s, self.largest_read = window, latency_s, largest_read
        self.connects = 0

    def listen(self, host: str, port: int, protocol_factory: Callable[[], asyncio.BaseProtocol]) -> None:
        """Whoever connects to this address gets a protocol of this factory. OSError if the address is taken."""
        if (host, port) in self._listeners:
            raise OSError(98, "Address already in use")
        self._listeners[(host, port)] = protocol_factory

    def unlisten(self, host: str, port: int) -> None:
        """From now on connections to this address are refused."""
        self._listeners.pop((host, port), None)

    async def create_connection(
        self, protocol_factory: Callable[[], P], host: str | None = None, port: int | None = None, **_options: Any
    ) -> tuple[MemoryTransport, P]:
        """Connects; ConnectionRefusedError where nobody listens. Takes one round trip. TLS is not offered."""
        self.connects += 1
        if self.latency_s:
            await asyncio.sleep(2 * self.latency_s)
        server_factory = self._listeners.get((host or "", port or 0))
        if server_factory is None:
            raise ConnectionRefusedError(111, f"Connect call failed ({host!r}, {port})")
        client = protocol_factory()
        transport, _ = memory_pipe(
            client,
            server_factory(),
            client_extra={"peername": (host, port)},
            window=self.window,
            latency_s=self.latency_s,
            largest_read=self.largest_read,
        )
        await made_soon()
        return transport, client
