"""The connection pool over the loopback: ten thousand cancellations, and a host with two addresses."""

from __future__ import annotations

import asyncio
import random

from gateway.config import Upstream
from gateway.upstream.http1 import ResponseHead
from gateway.upstream.pool import Dialer, Pool
from tests.support.links import Clock, Meters, Recorder

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Answer(Recorder):
    """Wakes its task when the answer is there."""

    def __init__(self) -> None:
        super().__init__()
        self.done = asyncio.get_running_loop().create_future()

    def on_head(self, head: ResponseHead, now: int) -> None:
        pass

    def on_end(self, now: int) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_lost(self, lost: Exception, now: int) -> None:
        if not self.done.done():
            self.done.set_exception(lost)


class Server(asyncio.Protocol):
    """Answers every read with an empty answer, sometimes late."""

    source = random.Random(3)
    open = 0

    def connection_lost(self, exc: Exception | None) -> None:
        Server.open -= 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport
        Server.open += 1

    def data_received(self, data: bytes) -> None:
        delay = self.source.choice((0.0, 0.0, 0.002))
        asyncio.get_running_loop().call_later(delay, self._answer)

    def _answer(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(OK)


async def test_ten_thousand_requests_cancelled_at_random_moments_leave_an_empty_pool_and_no_task() -> None:
    """C020: cancelled while waiting for a slot, while connecting, while sending, while waiting for the answer."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Server, "127.0.0.1", 0, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    meters = Meters()
    upstream = Upstream.model_validate(
        {"url": f"http://127.0.0.1:{port}", "max_connections": 24, "max_queue": 50, "max_queue_wait_ms": 5000}
    )
    pool = Pool("up", upstream, clock=Clock(), meters=meters)
    source = random.Random(11)
    tasks_before = len(asyncio.all_tasks())
    outcomes = {"done": 0, "cancelled": 0}

    async def request() -> None:
        lease = await pool.acquire(timeout_s=5)
        try:
            answer = Answer()
            lease.connection.send(b"GET / HTTP/1.1\r\n\r\n", b"", answer)
            await answer.done
        finally:
            pool.release(lease)

    async def client() -> None:
        for _ in range(200):
            task = asyncio.create_task(request())
            await asyncio.sleep(source.choice((0, 0, 0.0005, 0.002, 0.02)))
            task.cancel()
            try:
                await task
                outcomes["done"] += 1
            except asyncio.CancelledError:
                outcomes["cancelled"] += 1

    async with asyncio.timeout(60):
        await asyncio.gather(*(client() for _ in range(50)))
    assert sum(outcomes.values()) == 10_000
    assert min(outcomes.values()) > 500, outcomes
    for _ in range(100):
        if pool.open == pool.idle:
            break
        await asyncio.sleep(0.01)
    assert pool.leases == 0
    assert pool.open == pool.idle
    assert meters.now[1:] == (0, 0)
    assert len(asyncio.all_tasks()) == tasks_before
    leases = [await pool.acquire(timeout_s=1) for _ in range(24)]  # every slot is there
    for lease in leases:
        pool.discard(lease)
    pool.abort()
    for _ in range(100):
        if not Server.open:
            break
        await asyncio.sleep(0.01)
    assert Server.open == 0, "a connection that belongs to nobody"
    server.close()


async def test_a_host_with_several_addresses_is_reached_through_the_one_that_answers() -> None:
    """Happy eyeballs: `localhost` resolves to ::1 first where only 127.0.0.1 listens."""
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstream = Upstream(url=f"http://localhost:{port}")
    pool = Pool("up", upstream, clock=Clock(), meters=Meters(), connect=Dialer(upstream).connect)
    lease = await pool.acquire(timeout_s=2)
    assert not lease.connection.is_closed
    pool.discard(lease)
    server.close()
