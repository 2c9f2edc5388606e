"""The connection pool: who gets which connection, who waits how long, and that everything always comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.config import Upstream
from gateway.errors import Overloaded, UpstreamUnavailable
from gateway.upstream.connection import UpstreamConnection
from gateway.upstream.pool import Lease, Pool
from tests.support.links import SECOND, Clock, FakeTransport, Meters, Recorder

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Dialled:
    """Connects to nothing, at once or when told."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps  # turns of the loop that connecting takes
        self.transports: list[FakeTransport] = []
        self.error: Exception | None = None

    async def __call__(self, factory: Callable[[], UpstreamConnection], upstream: Upstream) -> UpstreamConnection:
        for _ in range(self.steps):
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        connection = factory()
        transport = FakeTransport()
        transport.protocol = connection
        connection.connection_made(transport)
        self.transports.append(transport)
        return connection


class Fixture:
    """A pool over `Dialled`."""

    def __init__(self, steps: int = 0, **settings: object) -> None:
        self.clock = Clock()
        self.meters = Meters()
        self.dial = Dialled(steps)
        upstream = Upstream.model_validate({"url": "http://up:8000", **settings})
        self.pool = Pool("up", upstream, clock=self.clock, meters=self.meters, connect=self.dial)

    async def use(self, *, fresh: bool = False) -> Lease:
        """A connection that has just served a request, still held."""
        lease = await self.pool.acquire(fresh=fresh)
        serve(lease)
        return lease

    def is_empty(self) -> bool:
        return (self.pool.leases, self.pool.open - self.pool.idle, self.meters.now[1:]) == (0, 0, (0, 0))


def serve(lease: Lease) -> None:
    lease.connection.send(b"GET / HTTP/1.1\r\n\r\n", b"", Recorder())
    lease.connection.data_received(OK)


async def test_the_newest_idle_connection_is_taken_first() -> None:
    """LIFO, so that the rest age out."""
    f = Fixture()
    first, second = await f.use(), await f.use()
    f.pool.release(first)
    f.pool.release(second)
    assert f.meters.now == (2, 0, 0)
    lease = await f.pool.acquire()
    assert lease.connection is second.connection
    assert lease.is_reused
    assert (lease.connect_start, lease.connect_end) == (0, 0)
    f.pool.discard(lease)


async def test_a_fresh_connection_is_never_a_pooled_one() -> None:
    """R1: the reconnect after a stale connection must not meet the next stale one."""
    f = Fixture()
    f.pool.release(await f.use())
    lease = await f.use(fresh=True)
    assert not lease.is_reused
    assert f.meters.fresh == 2
    f.pool.release(lease)
    assert f.pool.idle == 2


async def test_a_connection_whose_answer_is_not_complete_is_closed() -> None:
    """C024: the rest of an interrupted answer must not reach the next request."""
    f = Fixture()
    lease = await f.pool.acquire()
    lease.connection.send(b"GET / HTTP/1.1\r\n\r\n", b"", Recorder())
    lease.connection.data_received(OK[:-1])
    f.pool.release(lease)
    assert f.dial.transports[0].closing
    assert f.pool.idle == 0
    await asyncio.sleep(0)
    assert f.is_empty()


@pytest.mark.parametrize(
    "idle_s, age_s, is_reused", [(1.0, 0.0, True), (2.9, 0.0, True), (3.0, 0.0, False), (1.0, 400.0, False)]
)
async def test_idle_and_old_connections_are_not_reused(idle_s: float, age_s: float, is_reused: bool) -> None:
    """C023: ours go before the server closes them. C026: old ones go, so that a changed address is found."""
    f = Fixture(keep_alive_s=3)
    lease = await f.pool.acquire()
    f.clock.now += int(age_s * SECOND)
    serve(lease)
    f.pool.release(lease)
    f.clock.now += int(idle_s * SECOND)
    again = await f.use()
    assert again.is_reused is is_reused
    f.pool.discard(again)
    await asyncio.sleep(0)
    assert f.is_empty()


async def test_no_connection_is_kept_when_keep_alive_is_off() -> None:
    f = Fixture(keep_alive_s=0)
    f.pool.release(await f.use())
    assert f.pool.idle == 0


async def test_idle_connections_are_closed_without_traffic() -> None:
    f = Fixture(keep_alive_s=0.03)
    leases = [await f.use(), await f.use()]
    f.pool.release(leases[0])
    f.clock.now += SECOND // 100
    f.pool.release(leases[1])
    for _ in range(40):
        if f.pool.idle == 0:
            break
        f.clock.now += SECOND // 100
        await asyncio.sleep(0.01)
    assert f.pool.open == 0
    assert f.meters.now == (0, 0, 0)


async def test_an_idle_connection_that_the_server_closes_is_forgotten() -> None:
    f = Fixture()
    f.pool.release(await f.use())
    f.dial.transports[0].abort()
    await asyncio.sleep(0)
    assert (f.pool.idle, f.pool.open) == (0, 0)
    assert not (await f.use()).is_reused


async def test_no_more_connections_than_the_cap_and_the_wait_has_an_end() -> None:
    """C030, A9: the excess is told in its own words, after `queue_wait_ms`."""
    f = Fixture(max_connections=2, queue_wait_ms=20)
    leases = [await f.use(), await f.use()]
    with pytest.raises(Overloaded, match="queue_wait_ms") as refused:
        await f.pool.acquire()
    assert refused.value.reason == "queue_timeout"
    assert refused.value.retry_after_s == 1
    assert f.pool.leases == 2
    for lease in leases:
        f.pool.release(lease)
    assert f.is_empty()


async def test_max_inflight_is_a_cap_too() -> None:
    f = Fixture(max_inflight=1, queue_wait_ms=0)
    await f.use()
    with pytest.raises(Overloaded):
        await f.pool.acquire()


async def test_an_idle_connection_makes_room_for_a_fresh_one_at_the_cap() -> None:
    f = Fixture(max_connections=2)
    held = await f.use()
    f.pool.release(await f.use())
    fresh = await f.use(fresh=True)
    await asyncio.sleep(0)
    assert f.pool.open == 2
    assert f.dial.transports[1].closing
    f.pool.release(held)
    f.pool.release(fresh)


async def test_waiters_are_served_in_the_order_in_which_they_came() -> None:
    """A9; a waiter whose client left is skipped."""
    f = Fixture(max_connections=1)
    held = await f.use()
    served: list[int] = []

    async def wait(number: int) -> None:
        lease = await f.use()
        served.append(number)
        await asyncio.sleep(0)
        f.pool.release(lease)

    tasks = []
    for number in range(6):
        tasks.append(asyncio.create_task(wait(number)))
        await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[4].cancel()
    await asyncio.sleep(0)
    f.pool.release(held)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert served == [0, 2, 3, 5]
    assert f.is_empty()


async def test_waiting_for_a_slot_is_measured() -> None:
    f = Fixture(max_connections=1)
    held = await f.use()
    waiter = asyncio.create_task(f.pool.acquire())
    await asyncio.sleep(0)
    f.clock.now += 7
    f.pool.release(held)
    assert (await waiter).wait_ns == 7


@pytest.mark.parametrize("error", [ConnectionRefusedError(), TimeoutError(), OSError(1, "x"), ValueError("x")])
async def test_a_failed_connect_gives_its_slot_back(error: Exception) -> None:
    f = Fixture(max_connections=1, queue_wait_ms=0)
    f.dial.error = error
    for _ in range(3):
        with pytest.raises(UpstreamUnavailable, match="`up`"):
            await f.pool.acquire()
    assert f.is_empty()
    assert f.meters.failed == 3


async def test_a_connect_that_hangs_ends_at_its_limit_and_says_which() -> None:
    """C028: the error names the limit that fired and its value."""
    f = Fixture(steps=10**9)
    with pytest.raises(UpstreamUnavailable, match=r"20 ms \(`timeouts.connect_ms`\)") as refused:
        await f.pool.acquire(timeout_s=0.02)
    assert refused.value.reason == "connect_timeout"
    assert f.is_empty()


async def test_a_server_that_closes_at_once_is_unavailable() -> None:
    f = Fixture()

    async def dead(factory: Callable[[], UpstreamConnection], upstream: Upstream) -> UpstreamConnection:
        connection = await f.dial(factory, upstream)
        connection.connection_lost(None)
        return connection

    f.pool._connect = dead
    with pytest.raises(UpstreamUnavailable):
        await f.pool.acquire()
    assert f.is_empty()


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("has_to_wait", [False, True])
async def test_cancelling_at_any_moment_gives_everything_back(turns: int, has_to_wait: bool) -> None:
    """C020: a slot that does not come back is an outage some hours later."""
    f = Fixture(steps=3, max_connections=1)
    held = await f.use() if has_to_wait else None

    async def request() -> None:
        lease = await f.pool.acquire()
        try:
            await asyncio.sleep(0)
            serve(lease)
            await asyncio.sleep(0)
        finally:
            f.pool.release(lease)

    task = asyncio.create_task(request())
    for turn in range(turns):
        await asyncio.sleep(0)
        if turn == 2 and held is not None:
            f.pool.release(held)
            held = None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if held is not None:
        f.pool.release(held)
    await asyncio.sleep(0)
    assert f.is_empty()
    f.pool.release(await f.use())


async def test_a_slot_handed_over_in_the_moment_of_cancellation_goes_to_the_next() -> None:
    """C020: release and cancel in the same turn of the loop."""
    f = Fixture(max_connections=1)
    held = await f.use()
    first = asyncio.create_task(f.pool.acquire())
    second = asyncio.create_task(f.pool.acquire())
    await asyncio.sleep(0)
    f.pool.release(held)
    first.cancel()
    lease = await second
    assert first.cancelled()
    f.pool.release(lease)
    assert f.pool.leases == 0


async def test_closing_the_pool_lets_running_requests_end() -> None:
    """F13: a reload drains what it removes."""
    f = Fixture()
    running, idle = await f.use(), await f.use()
    f.pool.release(idle)
    f.pool.close()
    assert [t.closing for t in f.dial.transports] == [False, True]
    f.pool.release(running)
    assert f.dial.transports[0].closing
    await asyncio.sleep(0)
    assert f.is_empty()
    assert repr(f.pool) == "<Pool up: 0 in use, 0 idle, 0 connecting, 0 open>"


async def test_aborting_the_pool_closes_what_is_in_use() -> None:
    f = Fixture()
    lease = await f.use()
    f.pool.abort()
    assert f.dial.transports[0].closing
    f.pool.release(lease)
    await asyncio.sleep(0)
    assert f.is_empty()
