"""The caller leaves: in every phase, on every route, in every way a connection can end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from tests.support.plays import silence, streams
from tests.support.raw import (
    DONE,
    STREAM_HEAD,
    RawClient,
    RawUpstream,
    Received,
    Wire,
    answer,
    chat,
    chunk,
    framed,
    whole,
)
from tests.support.running import running_gateway, settings_for, until

HELLO = chunk({"content": "hello"})
STOP = chunk(finish="stop")
SOON = 2.0  # seconds; half a second is promised, the machine is noisy

FIN: Callable[[RawClient], None] = RawClient.close
RST: Callable[[RawClient], None] = RawClient.reset
WAYS = pytest.mark.parametrize("leave", [FIN, RST], ids=["FIN", "RST"])


class Watched:
    """A model server that writes `events`, then waits to see its connection close."""

    def __init__(self, *events: bytes, head: bytes = STREAM_HEAD) -> None:
        self.head = head
        self.events = events
        self.asked = asyncio.Event()
        self.closed_at: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def play(self, request: Received, wire: Wire) -> None:
        self.asked.set()
        if self.head:
            await wire.send(self.head)
        for event in self.events:
            await wire.send(framed(event))
        at = await wire.wait_closed_by_peer(20)
        if not self.closed_at.done():
            self.closed_at.set_result(at)


@WAYS
async def test_stop_in_mid_stream_frees_the_model_server(leave: Callable[[RawClient], None]) -> None:
    """C016, E8, E9: the GPU slot stayed busy to the end of the generation."""
    server = Watched(HELLO, HELLO, HELLO)
    async with RawUpstream(server.play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        async with running.client() as client:
            await client.post(chat())
            await client.head()
            for _ in range(3):
                await client.piece()
            left_at = time.monotonic()
            leave(client)
            assert await server.closed_at - left_at < SOON
        record = await running.last_record()
        assert (record["outcome"], record["chunks"]) == ("client_cancelled", 3)
        assert await running.metric("gateway_inflight") == 0
        await running.settled()


async def test_half_a_close_is_a_leaving_by_default() -> None:
    """C016, E10: like HAProxy's `abortonclose`."""
    server = Watched(HELLO)
    async with RawUpstream(server.play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        async with running.client() as client:
            await client.post(chat())
            await client.head()
            client.half_close()
            await server.closed_at
        assert (await running.last_record())["outcome"] == "client_cancelled"
        await running.settled()


async def test_half_a_close_is_harmless_where_the_settings_say_so() -> None:
    """C016: `half_close: wait`; the answer ends with the connection, since nothing more can be asked on it."""
    async with (
        RawUpstream(streams(HELLO, STOP, DONE, pause=0.05)) as upstream,
        running_gateway(settings_for(upstream.url, listen={"half_close": "wait"})) as running,
        running.client() as client,
    ):
        await client.post(chat())
        client.half_close()
        response = await client.response()
        assert response.body == HELLO + STOP + DONE
        assert await client.at_end()
        assert (await running.last_record())["outcome"] == "complete"
        await running.settled()


async def test_half_a_request_and_half_a_close_is_nobody_any_more() -> None:
    async with (
        RawUpstream(silence) as upstream,
        running_gateway(settings_for(upstream.url, listen={"half_close": "wait"})) as running,
        running.client() as client,
    ):
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        client.half_close()
        assert await client.at_end()
        assert (await running.last_record())["outcome"] == "client_cancelled"
        assert upstream.requests == []
        await running.settled()


@WAYS
async def test_a_plain_call_that_is_given_up_is_given_up_upstream(leave: Callable[[RawClient], None]) -> None:
    """C017: the backend computed to the end, and the client's retry doubled the load."""
    server = Watched(head=b"")
    async with RawUpstream(server.play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        async with running.client() as client:
            await client.post(chat(stream=False))
            await server.asked.wait()
            left_at = time.monotonic()
            leave(client)
            assert await server.closed_at - left_at < SOON
        assert (await running.last_record())["outcome"] == "client_cancelled"
        await running.settled()


@WAYS
@pytest.mark.parametrize("head", [b"", STREAM_HEAD], ids=["before the head", "before the first event"])
async def test_leaving_during_the_wait_for_the_first_token_is_noticed(
    leave: Callable[[RawClient], None], head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """C018 (a), (b): in that window nobody used to listen."""
    server = Watched(head=head)
    async with RawUpstream(server.play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        async with running.client() as client:
            await client.post(chat())
            await server.asked.wait()
            await asyncio.sleep(0.05)
            left_at = time.monotonic()
            leave(client)
            assert await server.closed_at - left_at < SOON
        record = await running.last_record()
        assert (record["outcome"], record["ttft_ms"], record["status"]) == ("client_cancelled", None, None)
        await running.settled()
        assert [r for r in caplog.records if r.name.startswith(("gateway", "uvicorn")) and r.levelname == "ERROR"] == []


ROUTES = {
    "chat": ("/v1/chat/completions", chat()),
    "completions": ("/v1/completions", b'{"model":"m","prompt":"x","stream":true}'),
    "responses": ("/v1/responses", b'{"model":"m","input":"x","stream":true}'),
    "messages": ("/v1/messages", b'{"model":"m","max_tokens":9,"messages":[],"stream":true}'),
    "opaque": ("/v1/audio/speech", b'{"model":"m","input":"x"}'),
    "with a prefix": ("/fast/v1/chat/completions", chat()),
}


@pytest.mark.parametrize("route", ROUTES)
async def test_every_route_lets_go(route: str) -> None:
    """C019: the fix worked on one route and leaked on the others."""
    path, body = ROUTES[route]
    server = Watched(b'event: x\ndata: {"type":"x"}\n\n')
    settings = settings_for("x")
    async with RawUpstream(server.play) as upstream:
        settings = settings_for(upstream.url)
        settings["routes"] = [
            {"name": "main", "upstreams": ["up"]},
            {"name": "fast", "upstreams": ["up"], "match": {"prefix": "/fast"}},
        ]
        async with running_gateway(settings) as running:
            async with running.client() as client:
                await client.post(body, path)
                assert (await client.head()).status == 200
                await client.piece()
                client.close()
                await server.closed_at
            assert (await running.last_record())["outcome"] == "client_cancelled"
            await running.settled()


async def test_leaving_after_a_reconnect_closes_the_second_connection() -> None:
    """C019: also on the path after a first attempt failed."""
    closed = asyncio.Event()

    async def play(request: Received, wire: Wire) -> None:
        if len(upstream.requests) == 1:
            await wire.send(whole(answer()))
        elif wire.number == 0:
            wire.close()  # stale: the gateway asks again on a fresh connection
        else:
            await wire.wait_closed_by_peer(20)
            closed.set()

    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        assert (await running.ask(chat(stream=False))).status == 200
        async with running.client() as client:
            await client.post(chat())
            await until(lambda: len(upstream.requests) == 3)
            client.close()
            await closed.wait()
        record = await running.last_record(count=2)
        assert (record["outcome"], record["attempts"]) == ("client_cancelled", 2)
        await running.settled()


async def test_leaving_while_waiting_for_a_slot_never_reaches_the_model_server() -> None:
    """E18: removed from the queue; the next in line gets the slot."""
    server = Watched(HELLO)
    async with (
        RawUpstream(server.play) as upstream,
        running_gateway(settings_for(upstream.url), upstream={"max_inflight": 1, "max_queue_wait_ms": 5000}) as running,
        running.client() as first,
    ):
        await first.post(chat())
        await first.head()
        async with running.client() as second:
            await second.post(chat())
            await until(lambda: running.gateway.proxy.running == 2)
            second.close()
            record = await running.last_record()
        assert (record["outcome"], record["attempts"]) == ("client_cancelled", 0)
        assert len(upstream.requests) == 1
        first.close()
        await running.settled()


async def test_leaving_during_the_upload_contacts_nobody() -> None:
    async with RawUpstream(silence) as upstream, running_gateway(settings_for(upstream.url)) as running:
        async with running.client() as client:
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
            await until(lambda: running.gateway.proxy.running == 1)
            client.reset()
            assert (await running.last_record())["outcome"] == "client_cancelled"
        assert upstream.requests == []
        await running.settled()


async def test_a_close_right_after_the_end_is_no_leaving() -> None:
    """client-contract §1 rule 17: some clients close the connection at `[DONE]`."""
    async with (
        RawUpstream(streams(HELLO, STOP, DONE, end="open")) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
    ):
        async with running.client() as client:
            await client.post(chat())
            await client.head()
            while await client.piece() != DONE:
                pass
            client.close()
        assert (await running.last_record())["outcome"] == "complete"
        await running.settled(3)


async def test_watching_for_the_leaving_does_not_swallow_the_next_request() -> None:
    """C017: keep-alive reuse of a client that stays, ten plain and streamed requests on one connection."""

    async def play(request: Received, wire: Wire) -> None:
        await (streams(HELLO, STOP, DONE)(request, wire) if request.json["stream"] else wire.send(whole(answer())))

    async with (
        RawUpstream(play) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        for turn in range(10):
            response = await client.ask(chat(stream=turn % 2 == 0))
            assert response.body == (HELLO + STOP + DONE if turn % 2 == 0 else answer())
        assert upstream.connections == 1
        await running.settled()


ENDS: dict[str, Callable[[Received, Wire], Awaitable[None]]] = {
    "upstream_truncated": streams(HELLO, HELLO, HELLO, end="reset"),
    "upstream_timeout": streams(HELLO, end="open"),
    "complete": streams(HELLO, STOP, DONE),
}


@pytest.mark.parametrize("outcome", [*ENDS, "client_cancelled"])
async def test_an_outcome_is_decided_at_the_end_and_not_at_the_head(outcome: str) -> None:
    """C022: upstream deaths after the head were booked as 200, client walk-aways as upstream failures."""
    play = ENDS.get(outcome) or Watched(HELLO).play

    async with (
        RawUpstream(play) as upstream,
        running_gateway(settings_for(upstream.url, route={"timeouts": {"idle_ms": 200}})) as running,
    ):
        if outcome == "client_cancelled":
            async with running.client() as client:
                await client.post(chat())
                await client.head()
                await client.piece()
        else:
            await running.ask(chat())
        record = await running.last_record()
        assert (record["outcome"], record["status"]) == (outcome, 200)
        for name in [*ENDS, "client_cancelled"]:
            assert await running.metric("gateway_requests_total", outcome=name) == (name == outcome)
        await running.settled()


async def test_a_pool_survives_a_storm_of_cancelled_requests() -> None:
    """C020: after some hours every request failed, although the upstream was healthy."""

    async def play(request: Received, wire: Wire) -> None:
        await asyncio.sleep(0.004)
        await wire.send(whole(answer()))

    async with (
        RawUpstream(play) as upstream,
        running_gateway(
            settings_for(upstream.url), upstream={"max_connections": 10, "max_queue_wait_ms": 5000}
        ) as running,
    ):

        async def impatient(number: int) -> None:
            for turn in range(25):
                async with running.client() as client:
                    await client.post(chat(stream=False))
                    await asyncio.sleep(0.0005 + (number * 7 + turn * 3) % 17 / 2000)
                    client.reset()

        await asyncio.gather(*(impatient(number) for number in range(20)))
        answers = await asyncio.gather(*(running.ask(chat(stream=False)) for _ in range(20)))
        assert [response.status for response in answers] == [200] * 20
        await running.settled()
        pool = running.gateway.runtime.upstreams["up"].pool
        assert pool.open <= 10
        assert await running.metric("gateway_upstream_connections", state="busy") == 0
        assert await running.metric("gateway_upstream_connections", state="connecting") == 0
