"""Small fakes around an upstream connection: a transport without a socket, a sink that remembers, a hand-made clock."""

from __future__ import annotations

import asyncio

from gateway.upstream.connection import Lost, UpstreamConnection
from gateway.upstream.http1 import ResponseHead

MS = 1_000_000
SECOND = 1_000_000_000


class Clock:
    """Monotonic ns that move when the test says so."""

    def __init__(self) -> None:
        self.now = SECOND

    def __call__(self) -> int:
        return self.now


class FakeTransport(asyncio.Transport):
    """Keeps what is written; `stuck` bytes stay in its buffer as if the peer did not read."""

    def __init__(self, *, stuck: bool = False) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.stuck = stuck
        self.closing = False
        self.reading = True
        self.protocol: UpstreamConnection | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.written)) if self.stuck else 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0, "otherwise nobody tells when the last byte of a request has left"

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        if not self.closing:
            self.closing = True
            if self.protocol is not None:
                asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    close = abort

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


class Recorder:
    """A `Sink` that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def on_sent(self, now: int) -> None:
        self.calls.append("sent")

    def on_head(self, head: ResponseHead, now: int) -> None:
        self.calls.append(head.status)

    def on_body(self, data: bytes, now: int) -> None:
        self.calls.append(data)

    def on_end(self, now: int) -> None:
        self.calls.append("end")

    def on_lost(self, lost: Lost, now: int) -> None:
        self.calls.append(lost)

    @property
    def lost(self) -> Lost:
        assert isinstance(self.calls[-1], Lost)
        return self.calls[-1]


def linked(clock: Clock, *, stuck: bool = False) -> tuple[UpstreamConnection, FakeTransport, list[UpstreamConnection]]:
    """A connection over a fake transport, and the list of those that told of their end."""
    closed: list[UpstreamConnection] = []
    connection = UpstreamConnection(clock, closed.append)
    transport = FakeTransport(stuck=stuck)
    transport.protocol = connection
    connection.connection_made(transport)
    return connection, transport, closed


class Meters:
    """What the pool reported last."""

    def __init__(self) -> None:
        self.now = (0, 0, 0)
        self.reused = self.fresh = self.failed = 0

    def connected(self, *, reused: bool) -> None:
        if reused:
            self.reused += 1
        else:
            self.fresh += 1

    def connect_failed(self) -> None:
        self.failed += 1

    def connections(self, idle: int, busy: int, connecting: int) -> None:
        assert min(idle, busy, connecting) >= 0
        self.now = (idle, busy, connecting)
