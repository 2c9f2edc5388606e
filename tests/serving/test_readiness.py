"""`/readyz` waits for the warm-up, and status says how it goes (cases C149, fault-catalogue D7)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.playing import plain
from tests.support.raw import DONE, LAST_CHUNK, STREAM_HEAD, Handler, RawUpstream, Received, Wire, chat, chunk, framed
from tests.support.running import Running, running_gateway, settings_for, until

WARMUP = {"enabled": True, "prompt_tokens": [16], "streams": [2], "body": {"chat_template_kwargs": {"thinking": True}}}


def gated(gate: asyncio.Event) -> Handler:
    """A server that answers every chat at once, but the first one only when the gate is open."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(STREAM_HEAD)
        await gate.wait()
        await wire.send(framed(chunk({"content": "x"}) + chunk(finish="length") + DONE), LAST_CHUNK)

    return play


@asynccontextmanager
async def warming(handler: Handler, **upstream: object) -> AsyncIterator[tuple[RawUpstream, Running]]:
    async with RawUpstream(handler) as server:
        settings = settings_for(server.url)
        async with running_gateway(settings, upstream={"warmup": WARMUP, **upstream}) as running:
            yield server, running


async def test_a_gateway_is_ready_when_its_upstream_is_warm() -> None:
    """C149: the start does not wait, readiness does; the first token before and after is in the status."""
    gate = asyncio.Event()
    async with warming(gated(gate)) as (server, running):
        await until(lambda: bool(server.requests))
        assert (await running.get("/readyz")).status == 503
        assert (await running.get("/health")).status == 200
        status = (await running.get("/gateway/status")).json["upstreams"]["up"]
        assert (status["up"], status["warmth"], status["warmup"]) == (True, "warming", None)
        gate.set()
        await until(lambda: running.gateway.runtime.upstreams["up"].warmth == "warm")
        assert (await running.get("/readyz")).status == 200
        status = (await running.get("/gateway/status")).json["upstreams"]["up"]
        assert (status["warmth"], status["restarts"], status["last_restart"]) == ("warm", 0, None)
        report = status["warmup"]
        assert report["first_ttft_ms"] == report["slowest_ttft_ms"] > 0
        assert report["last_ttft_ms"] > 0
        assert (report["shapes"], report["problem"], report["refused"]) == (3, None, [])
        assert report["requests"] == len(server.requests)
        bodies = [json.loads(request.body) for request in server.requests]
        assert all(body["chat_template_kwargs"] == {"thinking": True} for body in bodies)


async def test_a_request_that_finds_only_a_cold_upstream_is_served_all_the_same() -> None:
    """C149: slow service beats none."""
    gate = asyncio.Event()
    async with warming(gated(gate)) as (server, running):
        await until(lambda: bool(server.requests))
        asked = asyncio.create_task(running.ask(chat()))
        await until(lambda: len(server.requests) == 2)
        gate.set()
        assert (await asked).status == 200


async def test_a_warm_up_that_is_given_up_holds_readiness_up_no_longer() -> None:
    """D7: the operator sees why, the start is not blocked, and the only upstream serves."""
    async with warming(plain(b'{"detail":"Not Found"}', "404 Not Found")) as (_, running):
        await until(lambda: running.gateway.runtime.upstreams["up"].warmth == "failed")
        assert (await running.get("/readyz")).status == 200
        report = (await running.get("/gateway/status")).json["upstreams"]["up"]["warmup"]
        assert (report["problem"], report["first_ttft_ms"]) == ("the server answered 404", None)


async def test_a_restart_is_in_the_status() -> None:
    """C150."""
    async with warming(plain(), warmup=False) as (_, running):
        assert (await running.get("/readyz")).status == 200
        running.gateway.runtime.upstreams["up"].note_restart("version")
        status = (await running.get("/gateway/status")).json["upstreams"]["up"]
        assert (status["restarts"], status["warmth"], status["warmup"]) == (1, "warm", None)
        assert status["last_restart"]["sign"] == "version"
        assert 0 <= status["last_restart"]["seconds_ago"] < 5
