"""Tokens arrive when the model makes them, and a reader that stops does not fill our memory."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.support.plays import streams
from tests.support.raw import DONE, LAST_CHUNK, STREAM_HEAD, RawUpstream, Received, Wire, chat, chunk, framed
from tests.support.running import running_gateway, settings_for, until

STOP = chunk(finish="stop")


class LockStep:
    """Writes the next event only when the test says that it has the last one: held bytes would stop it for good."""

    def __init__(self, head: bytes, events: list[bytes]) -> None:
        self.head = head
        self.events = events
        self.arrived = asyncio.Semaphore(0)

    async def play(self, request: Received, wire: Wire) -> None:
        await wire.send(self.head)
        for event in self.events:
            await wire.stream(event)
            await self.arrived.acquire()
        await wire.send(LAST_CHUNK)


EVENTS = [chunk({"role": "assistant", "content": ""}), *(chunk({"content": f"word {i}"}) for i in range(10)), STOP]


@pytest.mark.parametrize("include_usage", ["never", "always"])
@pytest.mark.parametrize("accept", [None, "gzip, br, zstd"])
async def test_each_event_is_at_the_caller_before_the_next_is_made(accept: str | None, include_usage: str) -> None:
    """C012, C013: tokens in one lump; compression that holds 32 kB back."""
    steps = LockStep(STREAM_HEAD, EVENTS)
    async with (
        RawUpstream(steps.play) as upstream,
        running_gateway(settings_for(upstream.url), upstream={"include_usage": include_usage}) as running,
        running.client() as client,
    ):
        await client.post(chat(), headers={"accept-encoding": accept} if accept else None)
        head = await client.head()
        assert head.header("content-encoding") is None
        for event in EVENTS:
            assert await client.piece() == event
            steps.arrived.release()
        assert await client.piece() == b""
        assert upstream.requests[0].header("accept-encoding") == "identity"
        await running.settled()


async def test_every_stream_tells_proxies_not_to_buffer() -> None:
    """C012: the one header that switches nginx' buffering off; the upstream did not send it."""
    async with RawUpstream(streams(STOP, DONE)) as upstream, running_gateway(settings_for(upstream.url)) as running:
        response = await running.ask(chat())
        assert response.all("x-accel-buffering") == ["no"]
        assert response.all("cache-control") == ["no-cache"]
        assert response.header("transfer-encoding") == "chunked"


async def test_other_streaming_types_are_not_held_either() -> None:
    """C013: NDJSON, as Ollama's own API sends it, on a path that the route opens."""
    lines = [b'{"message":{"content":"%d"},"done":false}\n' % i for i in range(5)]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
    steps = LockStep(head, lines)
    async with (
        RawUpstream(steps.play) as upstream,
        running_gateway(settings_for(upstream.url, route={"open_paths": ["/api/chat"]})) as running,
        running.client() as client,
    ):
        await client.post(b'{"model":"m"}', "/api/chat", {"accept-encoding": "gzip"})
        assert (await client.head()).header("content-type") == "application/x-ndjson"
        for line in lines:
            assert await client.piece() == line
            steps.arrived.release()
        assert await client.piece() == b""
        await running.settled()


async def test_a_reader_that_never_reads_holds_a_bounded_part_and_is_dropped() -> None:
    """C015, E11: one such client once held 646 MB; the upstream is slowed, then let go."""
    event = chunk({"content": "x" * 60_000})
    sent = 0

    async def endless(request: Received, wire: Wire) -> None:
        nonlocal sent
        await wire.send(STREAM_HEAD)
        while True:
            await wire.send(framed(event))
            sent += len(event)

    async with (
        RawUpstream(endless) as upstream,
        running_gateway(
            settings_for(upstream.url, listen={"write_stall_s": 0.4}, route={"timeouts": {"idle_ms": 300}})
        ) as running,
    ):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", running.port))
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(chat()) + chat()
        )
        most = 0

        def dropped() -> bool:
            nonlocal most
            held = [c.transport.get_write_buffer_size() for c in running.server.server_state.connections]
            most = max(most, *held, 0)
            return bool(running.records)

        await until(dropped)
        assert 4096 < most <= 256 * 1024
        assert sent < 32 * 2**20, "the upstream was not slowed"
        record = await running.last_record()
        assert (record["outcome"], record["reason"]) == ("client_cancelled", "client_stalled")
        await running.settled()
        await until(lambda: upstream.open == 0)
        sock.close()


async def test_a_slow_reader_that_does_read_is_not_dropped() -> None:
    """E11: no progress is the fault, not slowness; and our own pause is not the upstream's silence (C7)."""
    event = chunk({"content": "x" * 60_000})
    events = [*[event] * 20, STOP, DONE]
    async with (
        RawUpstream(streams(*events)) as upstream,
        running_gateway(
            settings_for(upstream.url, listen={"write_stall_s": 0.5}, route={"timeouts": {"idle_ms": 400}})
        ) as running,
        running.client() as client,
    ):
        raw = client.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.reader._limit = 8192  # type: ignore[attr-defined]  # the test's own buffer must not read ahead
        await client.post(chat())
        body = b""
        head = await client.head()
        assert head.status == 200
        while len(body) < 600_000:
            body += await client.reader.read(40_000)
            await asyncio.sleep(0.05)
        client.reader._limit = 2**22  # type: ignore[attr-defined]
        while not body.endswith(b"0\r\n\r\n"):
            piece = await client.reader.read(2**20)
            assert piece, "dropped"
            body += piece
        assert (await running.last_record())["outcome"] == "complete"
        await running.settled()
