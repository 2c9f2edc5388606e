"""The connection pool: who gets which connection, who waits how long, and that everything always comes back."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    """C030, A9: the excess is told in its own words, after `max_queue_wait_ms`."""
    f = Fixture(max_connections=2, max_queue_wait_ms=20)
    leases = [await f.use(), await f.use()]
    with pytest.raises(Overloaded, match="within 20 ms") as refused:
        await f.pool.acquire()
    assert refused.value.reason == "queue_timeout"
    assert refused.value.retry_after_s == 1
    for setting in ("max_inflight", "max_queue", "max_queue_wait_ms"):
        assert f"`{setting}`" in refused.value.message
    assert (f.pool.leases, f.pool.queued) == (2, 0)
    for lease in leases:
        f.pool.release(lease)
    assert f.is_empty()


async def test_max_inflight_is_a_cap_too() -> None:
    f = Fixture(max_inflight=1, max_queue_wait_ms=0)
    assert (f.pool.capacity, f.pool.is_full) == (1, False)
    await f.use()
    assert f.pool.is_full
    with pytest.raises(Overloaded) as refused:
        await f.pool.acquire()
    assert refused.value.reason == "queue_timeout"


@pytest.mark.parametrize(
    "limits, capacity, queue",
    [
        ({}, 1024, 1024),
        ({"max_connections": 8}, 8, 8),
        ({"max_inflight": 4}, 4, 4),
        ({"max_inflight": 4, "max_queue": 9}, 4, 9),
        ({"max_inflight": 40, "max_connections": 8}, 8, 40),
        ({"max_inflight": 4, "max_queue": 0}, 4, 0),
    ],
)
async def test_as_many_may_wait_as_may_run_unless_told_otherwise(
    limits: dict[str, int], capacity: int, queue: int
) -> None:
    """fault-catalogue 3.4. One more is refused at once, in words of its own."""
    f = Fixture(**limits)
    assert f.pool.capacity == capacity
    leases = [await f.use() for _ in range(capacity)]
    waiters = [asyncio.create_task(f.pool.acquire()) for _ in range(queue)]
    await asyncio.sleep(0)
    assert f.pool.queued == queue
    refused = asyncio.create_task(f.pool.acquire())
    await asyncio.sleep(0)
    assert refused.done()  # no turn of the loop was spent on waiting
    error = refused.exception()
    assert isinstance(error, Overloaded)
    assert (error.reason, error.status, error.retry_after_s) == ("queue_full", 503, 1)
    for setting in ("max_inflight", "max_queue", "max_queue_wait_ms"):
        assert f"`{setting}`" in error.message
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    for lease in leases:
        f.pool.release(lease)
    assert f.is_empty()


@pytest.mark.parametrize(
    "wait_limit_s, told",
    [(0.01, "10 ms, which is all"), (0.0, "0 ms, which is all"), (-3.0, "0 ms,"), (9.0, "20 ms. Try")],
)
async def test_a_caller_who_has_less_time_waits_less(wait_limit_s: float, told: str) -> None:
    f = Fixture(max_inflight=1, max_queue_wait_ms=20)
    held = await f.use()
    with pytest.raises(Overloaded, match=told) as refused:
        await f.pool.acquire(wait_limit_s=wait_limit_s)
    assert refused.value.reason == "queue_timeout"
    assert f.pool.queued == 0
    f.pool.release(held)
    f.pool.release(await f.use())
    assert f.is_empty()


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
    """A9, E18: while the queue is less than half full. A waiter whose client left is skipped."""
    f = Fixture(max_connections=1, max_queue=13)
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


async def test_the_newest_is_served_first_while_the_queue_is_half_full() -> None:
    """fault-catalogue 3.4: under overload the oldest is the nearest to its limit."""
    f = Fixture(max_inflight=1, max_queue=4)
    held = await f.use()
    served: list[int] = []

    async def wait(number: int) -> None:
        lease = await f.use()
        served.append(number)
        f.pool.release(lease)

    tasks = [asyncio.create_task(wait(number)) for number in range(4)]
    await asyncio.sleep(0)
    f.pool.release(held)
    await asyncio.gather(*tasks)
    assert served == [3, 2, 1, 0]
    assert f.is_empty()


async def test_nothing_of_a_waiter_who_was_served_stays_behind() -> None:
    """A timer of two seconds for each would hold some thousand futures on a busy upstream."""
    f = Fixture(max_inflight=1)
    held = await f.use()
    waiter = asyncio.create_task(f.pool.acquire())
    await asyncio.sleep(0)
    (future,) = map(weakref.ref, f.pool._waiting._items)
    f.pool.release(held)
    f.pool.discard(await waiter)
    del waiter
    gc.collect()
    assert future() is None


async def test_a_newcomer_does_not_overtake_the_one_who_was_just_given_the_slot() -> None:
    f = Fixture(max_inflight=1)
    held = await f.use()
    waiter = asyncio.create_task(f.pool.acquire())
    await asyncio.sleep(0)
    f.pool.release(held)
    assert (f.pool.leases, f.pool.queued, f.pool.is_full) == (1, 0, True)
    newcomer = asyncio.create_task(f.pool.acquire())
    lease = await waiter
    assert not newcomer.done()
    serve(lease)
    f.pool.release(lease)
    f.pool.discard(await newcomer)
    await asyncio.sleep(0)
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
    f = Fixture(max_connections=1, max_queue_wait_ms=0)
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
    """C020: release and cancel in the same turn of the loop, in either order."""
    for is_cancelled_first in (False, True):
        f = Fixture(max_connections=1, max_queue=5)
        held = await f.use()
        first = asyncio.create_task(f.pool.acquire())
        second = asyncio.create_task(f.pool.acquire())
        await asyncio.sleep(0)
        if is_cancelled_first:
            first.cancel()
        f.pool.release(held)
        first.cancel()
        lease = await second
        assert first.cancelled()
        assert (f.pool.leases, f.pool.queued) == (1, 0)
        f.pool.release(lease)
        assert f.pool.leases == 0


async def test_a_wait_that_ends_in_the_moment_of_cancellation_gives_nothing_back_twice() -> None:
    f = Fixture(max_connections=1, max_queue_wait_ms=10)
    held = await f.use()
    waiter = asyncio.create_task(f.pool.acquire())
    await asyncio.sleep(0)
    (future,) = f.pool._waiting._items
    f.pool._stop_waiting(future)
    waiter.cancel()
    f.pool._stop_waiting(future)
    await asyncio.gather(waiter, return_exceptions=True)
    assert (f.pool.leases, f.pool.queued) == (1, 0)
    f.pool.release(held)
    assert f.is_empty()


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
    assert repr(f.pool) == "<Pool up: 0 in use, 0 idle, 0 connecting, 0 open, 0 queued>"


async def test_aborting_the_pool_closes_what_is_in_use() -> None:
    f = Fixture()
    lease = await f.use()
    f.pool.abort()
    assert f.dial.transports[0].closing
    f.pool.release(lease)
    await asyncio.sleep(0)
    assert f.is_empty()


STEPS = st.lists(st.tuples(st.sampled_from("aaarrdct."), st.integers(0, 50)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.integers(0, 4), st.integers(0, 2), STEPS)
def test_whatever_happens_nothing_leaks_and_no_slot_is_idle_while_somebody_waits(
    capacity: int, places: int, turns: int, steps: list[tuple[str, int]]
) -> None:
    """C020, C117, E18: never negative, never above the limits, all back to zero."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # leaves pytest's own loop alone
        runner.run(_play(Fixture(turns, max_inflight=capacity, max_queue=places), steps))


class Play:
    """Plays steps: a request comes, returns or discards its connection, is cancelled, has waited too long."""

    def __init__(self, f: Fixture) -> None:
        self.f = f
        self.tasks: list[asyncio.Task[Lease]] = []
        self.held: list[Lease] = []

    def step(self, step: str, number: int) -> None:
        self.collect()
        pool = self.f.pool
        if step == "a":
            self.tasks.append(asyncio.create_task(pool.acquire()))
        elif step == "c" and self.tasks:
            self.tasks[number % len(self.tasks)].cancel()
        elif step in "rd" and self.held:
            lease = self.held.pop(number % len(self.held))
            if step == "r":
                serve(lease)
            (pool.discard if step == "d" else pool.release)(lease)
        elif step == "t" and pool.queued:
            pool._stop_waiting(next(iter(pool._waiting._items)))

    def collect(self) -> None:
        """Takes over the connections of those who got one."""
        done = [task for task in self.tasks if task.done()]
        self.tasks = [task for task in self.tasks if not task.done()]
        self.held += [task.result() for task in done if not task.cancelled() and task.exception() is None]


async def _play(f: Fixture, steps: list[tuple[str, int]]) -> None:
    play, pool = Play(f), f.pool
    for step, number in steps:
        if step == ".":
            await asyncio.sleep(0)
        play.step(step, number)
        assert 0 <= pool.leases <= pool.capacity
        assert 0 <= pool.queued <= pool._waiting.limit
        assert pool.is_full or not pool.queued
    while play.tasks or play.held:
        play.step("d", 0)
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # a connection tells of its end in the next turn
    assert pool.queued == 0
    assert f.is_empty()


async def test_counters_of_a_thousand_requests_return_to_zero_and_a_removed_upstream_touches_none_of_the_new() -> None:
    """C117: 30 % cancelled in each phase, 5 % connect errors, one upstream removed and added while its requests end."""
    source = random.Random(117)
    pools = {name: Fixture(2, max_inflight=8, max_queue=400) for name in "abc"}

    async def request(f: Fixture) -> None:
        f.dial.error = ConnectionRefusedError() if source.random() < 0.05 else None
        lease = await f.pool.acquire(fresh=source.random() < 0.5)
        try:
            for _ in range(source.randrange(4)):
                await asyncio.sleep(0)
            serve(lease)
        finally:
            f.pool.release(lease)

    async def batch(count: int) -> list[asyncio.Task[None]]:
        tasks = []
        for _ in range(count):
            tasks.append(asyncio.create_task(request(pools[source.choice("abc")])))
            if source.random() < 0.5:
                await asyncio.sleep(0)
            if source.random() < 0.3:
                source.choice(tasks).cancel()
            assert all(0 <= f.pool.leases <= f.pool.capacity for f in pools.values())
        return tasks

    tasks = await batch(1000)
    removed = pools["b"]
    held = await removed.pool.acquire()
    removed.pool.close()
    pools["b"] = Fixture(2, max_inflight=8, max_queue=400)
    tasks += await batch(300)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (removed.pool.leases, pools["b"].pool.leases) == (1, 0)
    serve(held)
    removed.pool.release(held)
    await asyncio.sleep(0)
    for f in (*pools.values(), removed):
        assert f.is_empty()
        assert f.pool.queued == 0
    assert removed.pool.open == 0
