"""Connections that are used again: never a stale one's error, never another request's bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.config import Upstream
from gateway.upstream.connection import UpstreamConnection
from gateway.upstream.pool import Dialer
from tests.support.plays import sends, streams
from tests.support.raw import DONE, STREAM_HEAD, RawUpstream, Received, Wire, answer, chat, chunk, framed, whole
from tests.support.running import Running, running_gateway, settings_for

STOP = chunk(finish="stop")


async def test_a_server_that_closes_idle_connections_costs_nobody_an_error() -> None:
    """C023: sporadic 502 after a few seconds of idleness; requests fall around the moment of the close."""
    idle = 0.02

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(answer()))
        asyncio.get_running_loop().call_later(idle, wire.close)

    async with (
        RawUpstream(play) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        for turn in range(40):
            response = await client.ask(chat(stream=False))
            assert response.status == 200, response.body
            await asyncio.sleep(idle + (turn % 9 - 4) / 2500)
        assert upstream.connections > 1
        await running.settled()


@pytest.mark.parametrize("how", ["closes", "resets"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stale_connection_is_replaced_once_and_counted(how: str, stream: bool) -> None:
    """C023, A10, R1: no byte of an answer came on a reused connection."""

    async def play(request: Received, wire: Wire) -> None:
        if wire.served == 1:
            await (streams(STOP, DONE)(request, wire) if request.json["stream"] else wire.send(whole(answer())))
        elif how == "closes":
            wire.close()
        else:
            wire.reset()

    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        assert (await running.ask(chat(stream=stream))).status == 200
        response = await running.ask(chat(stream=stream))
        assert response.status == 200
        assert response.header("x-gateway-attempts") == "2"
        assert len(upstream.requests) == 3
        assert await running.metric("gateway_attempts_total", kind="reconnect") == 1
        assert (await running.last_record())["outcome"] == "complete"
        await running.settled()


async def test_a_second_stale_connection_is_not_tried_again() -> None:
    """R1: exactly once, on a fresh connection, whose failure is a real one."""

    async def play(request: Received, wire: Wire) -> None:
        if len(upstream.requests) == 1:
            await wire.send(whole(answer()))
        else:
            wire.close()

    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        assert (await running.ask(chat(stream=False))).status == 200
        response = await running.ask(chat(stream=False))
        assert (response.status, response.error["code"]) == (502, "upstream_bad_response")
        assert len(upstream.requests) == 3
        assert (await running.last_record())["reason"] == "eof_no_bytes"
        await running.settled()


async def test_a_fresh_connection_that_dies_is_not_tried_again() -> None:
    """C023: the request itself may be what kills the server."""
    async with RawUpstream(sends(end="close")) as upstream, running_gateway(settings_for(upstream.url)) as running:
        response = await running.ask(chat())
        assert (response.status, response.error["code"]) == (502, "upstream_bad_response")
        assert len(upstream.requests) == 1
        await running.settled()


async def test_one_byte_of_an_answer_forbids_the_reconnect() -> None:
    """R4: count bytes; an exception's type does not tell."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(answer()) if wire.served == 1 else b"H")
        if wire.served == 2:
            wire.close()

    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        assert (await running.ask(chat(stream=False))).status == 200
        assert (await running.ask(chat(stream=False))).status == 502
        assert len(upstream.requests) == 2
        await running.settled()


async def test_no_answer_ever_holds_another_request_s_bytes() -> None:
    """C024: connections whose answers were interrupted went back to the pool."""

    async def play(request: Received, wire: Wire) -> None:
        marker = request.json["user"]
        await wire.send(STREAM_HEAD)
        for _ in range(20):
            await wire.send(framed(chunk({"content": marker})))
            await asyncio.sleep(0.001)
        await wire.send(framed(STOP + DONE), b"0\r\n\r\n")

    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url)) as running:

        async def impatient(number: int) -> None:
            async with running.client() as client:
                await client.post(chat(user=f"gone-{number}"))
                await client.head()
                await client.piece()

        async def patient(number: int) -> None:
            await asyncio.sleep(number / 500)
            response = await running.ask(chat(user=f"mine-{number}"))
            texts = [event for event in response.events if b"content" in event]
            assert len(texts) == 20
            assert all(b'"mine-%d"' % number in event for event in texts)

        await asyncio.gather(*(impatient(n) for n in range(50)), *(patient(n) for n in range(10)))
        assert upstream.connections >= 50
        await running.settled()


SURPLUS = {
    "a whole second answer in the same segment": [whole(b'{"n":1}') + whole(b'{"stolen":true}')],
    "a whole second answer a moment later": [whole(b'{"n":1}'), whole(b'{"stolen":true}')],
    "one byte": [whole(b'{"n":1}') + b"x"],
}


@pytest.mark.parametrize("pieces", SURPLUS.values(), ids=SURPLUS)
async def test_surplus_bytes_are_nobody_s_answer(pieces: list[bytes]) -> None:
    """A11, C2, C146: httpcore hands the surplus to the next request."""

    async def play(request: Received, wire: Wire) -> None:
        if len(upstream.requests) == 1:
            await wire.send(*pieces)
        else:
            await wire.send(whole(b'{"n":2}'))

    async with (
        RawUpstream(play) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        for number in (1, 2):
            assert (await client.ask(chat(stream=False))).body == b'{"n":%d}' % number
            await asyncio.sleep(0.02)
        assert upstream.connections == 2
        await running.settled()


async def test_bytes_on_an_idle_connection_are_nobody_s_answer() -> None:
    """C146: an unsolicited answer, sent while nobody asks."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(b'{"n":%d}' % len(upstream.requests)))
        await asyncio.sleep(0.02)
        await wire.send(whole(b'{"stolen":true}'))

    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        for number in (1, 2, 3):
            assert (await running.ask(chat(stream=False))).body == b'{"n":%d}' % number
            await asyncio.sleep(0.04)
        assert upstream.connections == 3
        await running.settled()


async def test_connection_close_is_obeyed() -> None:
    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(answer(), headers="content-type: application/json\r\nconnection: close"))
        wire.close()

    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        for _ in range(3):
            response = await running.ask(chat(stream=False))
            assert response.header("x-gateway-attempts") == "1"
        assert upstream.connections == 3
        await running.settled()


async def test_a_changed_address_is_found_while_old_streams_finish() -> None:
    """C026: traffic kept going to the old address as long as it was busy."""

    def server(name: str) -> RawUpstream:
        async def play(request: Received, wire: Wire) -> None:
            events = [*[chunk({"content": name})] * 8, STOP, DONE]
            await (
                streams(*events, pause=0.05)(request, wire)
                if request.json["stream"]
                else wire.send(whole(b'{"n":"%b"}' % name.encode()))
            )

        return RawUpstream(play)

    async with server("old") as old, server("new") as new:
        where = old

        async def resolve(factory: Callable[[], UpstreamConnection], upstream: Upstream) -> UpstreamConnection:
            target = Upstream(url=where.url)
            return await Dialer(target).connect(factory, target)

        async with running_gateway(
            settings_for("http://name.test:80"), upstream={"max_connection_age_s": 0.15}, connect=resolve
        ) as running:

            async def asked(running: Running) -> bytes:
                return (await running.ask(chat(stream=False))).body

            stream = asyncio.create_task(running.ask(chat()))
            assert await asked(running) == b'{"n":"old"}'
            where = new
            seen = []
            for _ in range(20):
                seen.append(await asked(running))
                await asyncio.sleep(0.02)
            assert seen[-1] == b'{"n":"new"}'
            response = await stream
            assert response.body.count(b'"old"') == 8
            assert response.body.endswith(DONE)
            await running.settled()
