"""A second attempt beside the first, and what a route does when its first token is late (spec §6, fault-catalogue 3.7)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import pytest

from tests.support.fleets import HELLO, ROLE, STOP, STREAM, Fleet, after, fleet, good, refuses
from tests.support.plays import silence
from tests.support.raw import DONE, LAST_CHUNK, STREAM_HEAD, Handler, RawClient, Received, Wire, chat, framed
from tests.support.running import until

Log = pytest.LogCaptureFixture
HEDGE: Mapping[str, object] = {"budget": {"ttft_ms": 50, "on_exceed": "hedge"}}


def closes_at(times: list[float], *events: bytes) -> Handler:
    """Sends the beginning of a stream at most, and notes when the gateway closed the connection."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, *(framed(event) for event in events))
        times.append(await wire.wait_closed_by_peer())

    return play


def earn_hedges(found: Fleet) -> None:
    """As many requests as one hedge needs (5 %)."""
    for _ in range(20):
        found.gateway.runtime.fleet.extra.note_request(found.gateway.clock())


@pytest.mark.parametrize("begun", [(), (ROLE,)], ids=["nothing", "a role chunk"])
async def test_the_first_token_wins_and_the_loser_is_closed_at_once(begun: tuple[bytes, ...], caplog: Log) -> None:
    """C035 second run: not the first byte, the first token; the loser's socket closes within 200 ms of it."""
    closed: list[float] = []
    async with fleet(caplog, first=closes_at(closed, *begun), second=good, route=HEDGE) as found:
        earn_hedges(found)
        response = await found.ask(stream=True)
        won = response.pieces[-1][0]
        assert response.body.endswith(STREAM), "a heartbeat may stand before it"
        assert response.body.count(b'"role"') == 1
        await until(lambda: bool(closed))
        assert closed[0] - won < 0.2
        record = await found.running.last_record()
        assert (record["upstream"], record["attempts"], record["budget"]) == ("second", 2, "hedge")
        assert record["failures"] == []
        assert await found.running.metric("gateway_attempts_total", kind="hedge") == 1
        assert found.breaker("first")["calls"] == 0, "a hedge that is lost is nobody's failure"
        ids = {found.upstreams[name].requests[0].header("x-request-id") for name in ("first", "second")}
        assert len(ids) == 2, "C034"


async def test_the_first_may_win_after_all(caplog: Log) -> None:
    closed: list[float] = []
    begun, go = asyncio.Event(), asyncio.Event()

    async def hedge(request: Received, wire: Wire) -> None:
        begun.set()
        await closes_at(closed, ROLE)(request, wire)

    async with fleet(caplog, first=after(go), second=hedge, route=HEDGE) as found:
        earn_hedges(found)
        asking = asyncio.create_task(found.ask(stream=True))
        await begun.wait()
        go.set()
        response = await asking
        assert response.body.count(b'"role"') == 1
        assert response.body.endswith(STREAM)
        await until(lambda: bool(closed))
        assert (await found.running.last_record())["upstream"] == "first"


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "500 Internal Server Error"])
async def test_a_loser_that_refuses_does_not_beat_one_that_is_under_way(status: str, caplog: Log) -> None:
    """C035: the pending one gets its time."""
    go = asyncio.Event()

    async def hedge(request: Received, wire: Wire) -> None:
        await refuses(status)(request, wire)
        go.set()

    async with fleet(caplog, first=after(go, after(0.03)), second=hedge, route=HEDGE) as found:
        earn_hedges(found)
        response = await found.ask(stream=True)
        assert response.body.endswith(STREAM)
        assert (found.asked("first"), found.asked("second")) == (1, 1)
        assert (await found.running.last_record())["failures"] == [f"second=http_{status[0]}xx"]


async def test_when_the_first_fails_its_hedge_goes_on_alone(caplog: Log) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def fails(request: Received, wire: Wire) -> None:
        await begun.wait()
        wire.reset()
        go.set()

    async def hedge(request: Received, wire: Wire) -> None:
        begun.set()
        await after(go, after(0.05))(request, wire)

    async with fleet(caplog, first=fails, second=hedge, third=good, route=HEDGE) as found:
        earn_hedges(found)
        response = await found.ask(stream=True)
        assert response.body.endswith(STREAM)
        assert sum(found.asked(name) for name in found.upstreams) == 2, "two attempts are all there may be"


async def test_what_has_no_first_token_is_not_hedged(caplog: Log) -> None:
    async with fleet(caplog, first=good, second=good, route=HEDGE) as found:
        earn_hedges(found)
        assert (await found.running.ask(b'{"model":"m","input":"x"}', "/v1/embeddings")).status == 200
        assert (await found.ask()).status == 200
        assert found.asked("first") + found.asked("second") == 2


async def test_hedges_stay_within_their_share(caplog: Log) -> None:
    """C035 first run: all are slow; more than one request in twenty is never doubled."""
    slow = after(0.12)
    async with fleet(caplog, first=slow, second=slow, route=HEDGE) as found:
        answers = await asyncio.gather(*(found.ask(stream=True) for _ in range(60)))
        assert all(response.body.endswith(STREAM) for response in answers)
        assert await found.running.metric("gateway_attempts_total", kind="hedge") <= 3
        assert found.asked("first") + found.asked("second") <= 63


@pytest.mark.parametrize("is_upstream", [True, False], ids=["an upstream", "a route"])
async def test_a_fallback_is_asked_when_the_first_token_is_late(is_upstream: bool, caplog: Log) -> None:
    """Spec §6; A6. Another route's own policies hold for what is sent there."""
    closed: list[float] = []
    main = {
        "name": "main", "upstreams": ["first"],
        "budget": {"ttft_ms": 50, "on_exceed": {"fallback": "second" if is_upstream else "small"}},
    }  # fmt: skip
    small = {"name": "small", "match": {"models": ["tiny"]}, "model": "tiny", "upstreams": ["second"]}
    routes = [small, main]
    async with fleet(caplog, first=closes_at(closed), second=good, top={"routes": routes}) as found:
        response = await found.ask(stream=True)
        assert response.body.endswith(STREAM)
        assert found.upstreams["second"].requests[0].json["model"] == ("m" if is_upstream else "tiny")
        record = await found.running.last_record()
        assert (record["route"], record["upstream"], record["budget"]) == ("main", "second", "fallback")
        assert await found.running.metric("gateway_attempts_total", kind="fallback") == 1
        await until(lambda: bool(closed))


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_fallback_is_asked_when_nobody_else_is_there(stream: bool, caplog: Log) -> None:
    """Budget's `fallback` without being late: the route's own upstream failed."""
    route = {"upstreams": ["first"], "budget": {"fallback": "second"}}
    async with fleet(caplog, first=refuses("503 Service Unavailable"), second=good, route=route) as found:
        response = await found.ask(stream=stream)
        assert (response.status, response.header("x-gateway-upstream")) == (200, "second")
        assert response.header("x-gateway-failures") == "first=http_5xx"


async def test_a_fallback_that_cannot_be_asked_leaves_the_first_its_time(caplog: Log) -> None:
    """The last usable attempt is never cut by the budget."""
    route = {"upstreams": ["first"], "budget": {"ttft_ms": 30, "on_exceed": {"fallback": "second"}}}
    async with fleet(caplog, first=after(0.12), second=good, route=route) as found:
        found.gateway.runtime.upstreams["second"].standing.breaker("other").force_open(found.gateway.clock())
        response = await found.ask(stream=True)
        assert response.body.endswith(STREAM)
        assert found.asked("second") == 0
        assert (await found.running.last_record())["budget"] == "heartbeat"


async def test_a_route_that_would_rather_refuse(caplog: Log) -> None:
    """`on_exceed: fail`: 503 with when to come back, and the upstream's connection is closed."""
    closed: list[float] = []
    route = {"budget": {"ttft_ms": 40, "on_exceed": "fail"}}
    async with fleet(caplog, first=closes_at(closed), second=good, route=route) as found:
        response = await found.ask(stream=True)
        assert (response.status, response.error["code"]) == (503, "ttft_budget_exceeded")
        assert int(response.header("retry-after") or 0) >= 1
        assert "first token" in response.error["message"]
        assert found.asked("second") == 0
        await until(lambda: bool(closed))
        record = await found.running.last_record()
        assert (record["outcome"], record["budget"]) == ("budget_failed", "fail")
        assert found.breaker("first")["errors"] == 0


async def test_a_route_that_waits_only_counts(caplog: Log) -> None:
    """`on_exceed: wait`"""
    route = {"budget": {"ttft_ms": 30, "on_exceed": "wait", "heartbeat_ms": 50}}
    async with fleet(caplog, first=after(0.15), second=good, route=route) as found:
        assert (await found.ask(stream=True)).body == STREAM
        assert (await found.running.last_record())["budget"] == "wait"


# The caller's own limits (3.10)


@pytest.mark.parametrize(
    "headers", [{"x-request-timeout-ms": "300"}, {"grpc-timeout": "300m"}], ids=lambda h: next(iter(h))
)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_callers_deadline_ends_it_and_goes_up_with_it(
    headers: dict[str, str], stream: bool, caplog: Log
) -> None:
    async with fleet(caplog, first=silence, second=good) as found:
        began = time.monotonic()
        response = await found.ask(stream=stream, headers=headers)
        assert 0.28 < time.monotonic() - began < 1.5
        assert (response.status, response.error["code"]) == (504, "upstream_timeout")
        told = found.upstreams["first"].requests[0]
        assert 100 < int(told.header("x-envoy-expected-rq-timeout-ms") or 0) <= 300
        assert told.header("x-request-timeout-ms") is None
        assert found.asked("second") == 0
        assert found.breaker("first")["errors"] == 0, "the caller's limit says nothing of the upstream"


async def test_the_deadline_covers_the_second_attempt(caplog: Log) -> None:
    async with fleet(caplog, first=after(0.15, refuses("503 Service Unavailable")), second=silence) as found:
        began = time.monotonic()
        response = await found.ask(headers={"x-request-timeout-ms": "300"})
        assert time.monotonic() - began < 1.0
        assert response.status in (503, 504)
        left = int(found.upstreams["second"].requests[0].header("x-envoy-expected-rq-timeout-ms") or 0)
        assert 0 < left <= 150


async def test_a_library_that_only_limits_silence_is_kept_by_heartbeats(caplog: Log) -> None:
    """`x-stainless-read-timeout` counts from byte to byte."""
    route = {"budget": {"ttft_ms": 30, "heartbeat_ms": 50}}
    async with fleet(caplog, first=after(1.2), route=route) as found:
        response = await found.ask(stream=True, headers={"x-stainless-read-timeout": "1"})
        assert response.status == 200
        assert response.body.endswith(STREAM)


# Leaving


async def leaves(found: Fleet, when: Callable[[], bool], route: str = "/v1/chat/completions") -> float:
    """A caller that asks for a stream and goes as soon as `when`; when it went."""
    async with RawClient(found.running.port) as client:
        await client.post(chat(stream=True), route)
        await until(when)
        client.reset()
        return time.monotonic()


@pytest.mark.parametrize("begun", [(), (ROLE,)], ids=["nothing", "a role chunk"])
async def test_a_caller_that_leaves_takes_both_attempts_with_it(begun: tuple[bytes, ...], caplog: Log) -> None:
    """E8, E9 with a hedge under way: both connections close within 100 ms."""
    closed: list[float] = []
    play = closes_at(closed, *begun)
    async with fleet(caplog, first=play, second=play, route=HEDGE) as found:
        earn_hedges(found)
        gone = await leaves(found, lambda: found.asked("first") + found.asked("second") == 2)
        await until(lambda: len(closed) == 2)
        assert max(closed) - gone < 0.1
        assert (await found.running.last_record())["outcome"] == "client_cancelled"
        assert found.breaker("first")["calls"] == found.breaker("second")["calls"] == 0


async def test_a_caller_that_leaves_while_the_winner_speaks(caplog: Log) -> None:
    first: list[float] = []
    second: list[float] = []
    async with fleet(caplog, first=closes_at(first), second=closes_at(second, ROLE, HELLO), route=HEDGE) as found:
        earn_hedges(found)
        gone = await leaves(found, lambda: bool(first))
        await until(lambda: bool(second))
        assert second[0] - gone < 0.1
        assert (await found.running.last_record())["outcome"] == "client_cancelled"


async def test_a_caller_that_leaves_while_the_hedge_waits_for_a_connection(caplog: Log) -> None:
    """Whatever await point the hedge is at: here the address of its server is being looked up for ever."""
    closed: list[float] = []
    connecting = asyncio.Event()

    async def never(*args: object) -> object:
        connecting.set()
        return await asyncio.Event().wait()

    async with fleet(caplog, first=closes_at(closed), second=good, route=HEDGE) as found:
        earn_hedges(found)
        pool = found.gateway.runtime.upstreams["second"].pool
        pool._connect = never  # type: ignore[assignment]
        gone = await leaves(found, connecting.is_set)
        await until(lambda: bool(closed))
        assert closed[0] - gone < 0.1
        await found.running.settled()
        assert pool.leases == 0


async def test_a_hedge_that_waits_for_a_connection_ends_when_the_first_speaks(caplog: Log) -> None:
    go, connecting = asyncio.Event(), asyncio.Event()
    more = asyncio.Event()

    async def speaks(request: Received, wire: Wire) -> None:
        await go.wait()
        await wire.send(STREAM_HEAD, framed(ROLE + HELLO))
        await more.wait()
        await wire.send(framed(STOP + DONE), LAST_CHUNK)

    async def never(*args: object) -> object:
        connecting.set()
        go.set()
        return await asyncio.Event().wait()

    async with fleet(caplog, first=speaks, second=good, route=HEDGE) as found:
        earn_hedges(found)
        pool = found.gateway.runtime.upstreams["second"].pool
        pool._connect = never  # type: ignore[assignment]
        asking = asyncio.create_task(found.ask(stream=True))
        await connecting.wait()
        await until(lambda: pool.leases == 0)  # while the winner still speaks
        more.set()
        assert (await asking).body.endswith(HELLO + STOP + DONE)
