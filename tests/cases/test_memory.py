"""What the gateway holds: bounded, whatever is poured through it."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path

import pytest

from tests.support.plays import streams
from tests.support.raw import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    RawUpstream,
    Received,
    Wire,
    answer,
    chat,
    chunk,
    framed,
    whole,
)
from tests.support.running import Running, running_gateway, settings_for, until

MB = 1024 * 1024
HELLO = chunk({"content": "hello"})
STOP = chunk(finish="stop")


def resident() -> int:
    """Resident bytes of this process, which is gateway, model server and client at once."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def drained(running: Running, body: bytes, expected: int) -> int:
    """Reads an answer of `expected` bytes without keeping it; how much memory grew meanwhile, at most."""
    gc.collect()
    before, most, seen = resident(), 0, 0
    async with running.client() as client:
        await client.post(body)
        assert (await client.head()).status == 200
        while seen < expected:
            async with asyncio.timeout(20):
                piece = await client.reader.read(256 * 1024)
            assert piece
            seen += len(piece)
            most = max(most, resident() - before)
    return most


@pytest.mark.parametrize("include_usage", ["never", "always"])
async def test_an_event_without_an_end_is_relayed_and_not_kept(include_usage: str) -> None:
    """C010, C16: the parser's buffer grew until a blank line that never came; here 96 MiB of it."""
    block = framed(b"x" * MB)

    async def endless(request: Received, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, framed(HELLO + b"data: "))
        for _ in range(96):
            wire.writer.write(block)
            await wire.writer.drain()
        await wire.send(LAST_CHUNK)

    async with (
        RawUpstream(endless) as upstream,
        running_gateway(settings_for(upstream.url), upstream={"include_usage": include_usage}) as running,
    ):
        grown = await drained(running, chat(), 96 * MB)
        assert grown < 40 * MB, "twice the bound of one event, and the sockets"
        record = await running.last_record()
        assert record["outcome"] == "complete", "inspection was given up, not the answer"
        await running.settled()


async def test_a_plain_answer_larger_than_what_is_held_streams_through() -> None:
    """C25: pass-through routes stream it."""
    body = answer("x" * MB)

    async def large(request: Received, wire: Wire) -> None:
        await wire.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (len(body) + 80 * MB)
        )
        wire.writer.write(body)
        for _ in range(80):
            wire.writer.write(b" " * MB)
            await wire.writer.drain()

    async with RawUpstream(large) as upstream, running_gateway(settings_for(upstream.url)) as running:
        grown = await drained(running, chat(stream=False), 80 * MB)
        assert grown < 24 * MB
        await running.settled()


async def test_many_tiny_events_in_one_read_arrive_in_order_and_delay_nobody() -> None:
    """C18: a 6 MB segment of 100 000 events, scaled; another request runs meanwhile."""
    events = b"".join(b'data: {"choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n' % i for i in range(20_000))

    async def burst(request: Received, wire: Wire) -> None:
        if request.json["stream"]:
            await wire.send(STREAM_HEAD + framed(events + STOP + DONE) + LAST_CHUNK)
        else:
            await wire.send(whole(answer()))

    async with RawUpstream(burst) as upstream, running_gateway(settings_for(upstream.url)) as running:
        stream, *others = await asyncio.gather(
            running.ask(chat()), *(running.ask(chat(stream=False)) for _ in range(5))
        )
        assert stream.body == events + STOP + DONE
        assert [other.status for other in others] == [200] * 5
        assert (await running.last_record(count=6))["outcome"] == "complete"
        await running.settled()


ROUNDS, CLIENTS = 10, 1000


@pytest.mark.slow
async def test_a_thousand_clients_killed_at_random_moments_leave_nothing() -> None:
    """Issue 2: every gauge back at zero within 1 s, no upstream connection but idle ones, memory flat over ten rounds."""

    async def play(request: Received, wire: Wire) -> None:
        await asyncio.sleep(source.choice((0, 0.003)))
        if request.json["stream"]:
            await streams(*[HELLO] * 12, STOP, DONE, pause=0.002)(request, wire)
        else:
            await wire.send(whole(answer()))

    source = random.Random(5)

    async def client(running: Running) -> None:
        async with running.client() as client:
            body = chat(stream=source.random() < 0.7, user="x" * source.choice((10, 5000)))
            asked = asyncio.create_task(_ask(client, body))
            await asyncio.sleep(source.uniform(0, 0.6))
            client.reset() if source.random() < 0.5 else client.close()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async with (
        RawUpstream(play) as upstream,
        running_gateway(
            settings_for(upstream.url), upstream={"max_connections": 100, "max_queue_wait_ms": 3000}
        ) as running,
    ):
        pool = running.gateway.runtime.upstreams["up"].pool
        sizes: list[int] = []
        outcomes: set[object] = set()
        for _ in range(ROUNDS):
            await asyncio.gather(*(client(running) for _ in range(CLIENTS)))
            await running.settled(3.0)
            assert await running.metric("gateway_inflight") == 0
            for state in ("busy", "connecting"):
                assert await running.metric("gateway_upstream_connections", state=state) == 0
            await until(lambda: upstream.open == pool.idle, 2)
            await until(lambda: len(running.server.server_state.connections) == 0, 2)
            assert len(running.server.server_state.tasks) == 0
            outcomes |= {record["outcome"] for record in running.records}
            running.records.clear()
            upstream.requests.clear()
            gc.collect()
            sizes.append(resident())
        assert outcomes == {"complete", "client_cancelled"}
        assert sizes[-1] - sizes[3] < 4 * MB, [size // MB for size in sizes]
        assert (await running.ask(chat(stream=False))).status == 200


async def _ask(client: object, body: bytes) -> None:
    await client.post(body)  # type: ignore[attr-defined]
    await client.response()  # type: ignore[attr-defined]
