"""Table E of the fault catalogue, first part: clients that are slow, huge, old, or stop reading."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from tests.support.plays import sends, streams
from tests.support.raw import DONE, RawClient, RawUpstream, Received, Response, Wire, answer, chat, chunk, whole
from tests.support.requests import BODY, CHUNKED, GOOD, HEAD, answers, told
from tests.support.running import running_gateway, settings_for, until

LISTEN = {"header_timeout_s": 0.3, "body_idle_timeout_s": 0.3, "body_timeout_s": 0.9, "keep_alive_s": 30}


async def test_slow_heads_are_ended_and_disturb_nobody() -> None:
    """E1: uvicorn keeps such connections for ever."""
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url, listen=LISTEN)) as running:
        clients = [RawClient(running.port) for _ in range(50)]
        for client in clients:
            await client.__aenter__()
            await client.send(GOOD[:20])

        async def drip(client: RawClient) -> Response:
            for byte in GOOD[20:30]:
                await asyncio.sleep(0.1)
                if client.reader.at_eof():
                    break
                client.writer.write(bytes([byte]))
            return await told(client)

        tasks = [asyncio.create_task(drip(client)) for client in clients]
        for _ in range(5):
            assert (await running.ask(BODY)).status == 200
        for response in await asyncio.gather(*tasks):
            assert (response.status, response.error["code"]) == (408, "client_too_slow")
        for client in clients:
            client.close()
        await until(lambda: not running.server.server_state.connections)
        await running.settled()


async def test_a_connection_that_says_nothing_is_closed_silently() -> None:
    """E2."""
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url, listen=LISTEN)) as running:
        async with running.client() as client:
            assert await client.at_end()
        await until(lambda: not running.server.server_state.connections)
        assert running.records == []


@pytest.mark.parametrize("pause, least", [(5.0, 0.25), (0.1, 0.8)], ids=["idle", "in total"])
async def test_a_slow_body_is_refused_and_contacts_nobody(pause: float, least: float) -> None:
    """E3: idle, and dripping just fast enough not to be idle."""
    async with (
        RawUpstream(answers) as upstream,
        running_gateway(settings_for(upstream.url, listen=LISTEN)) as running,
        running.client() as client,
    ):
        await client.send(HEAD + b"content-length: 10000\r\n\r\n{")
        before = time.monotonic()

        async def drip() -> None:
            while True:
                await asyncio.sleep(pause)
                await client.send(b" ")

        dripping = asyncio.create_task(drip())
        response = await client.response()
        assert least < time.monotonic() - before < 4
        assert (response.status, response.error["code"]) == (408, "client_too_slow")
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        assert upstream.requests == []
        assert (await running.last_record())["reason"] == "body_timeout"
        await running.settled()


async def test_a_kept_connection_is_not_told_that_it_is_slow() -> None:
    """A body that came in two reads once left its time to the next head: an idle connection got a 408 nobody asked for."""
    async with (
        RawUpstream(answers) as upstream,
        running_gateway(settings_for(upstream.url, listen=LISTEN)) as running,
        running.client() as client,
    ):
        for _ in range(2):
            await client.send(GOOD[:-10])
            await asyncio.sleep(0.05)
            await client.send(GOOD[-10:])
            assert (await client.response()).status == 200
            await asyncio.sleep(1.0)
        upload = float(str((await running.last_record(count=2))["upload_ms"]))
        assert upload < 800, "the idle second before the request is not part of it"
        assert not client.reader.at_eof()


LARGE_HEADS = {
    "one value": (HEAD + b"x: " + b"a" * 200_000 + b"\r\n\r\n", 431),
    "many fields": (HEAD + b"x: a\r\n" * 20_000 + b"\r\n", 431),
    "101 fields": (HEAD + b"x: a\r\n" * 100 + b"content-length: 0\r\n\r\n", 431),
    "the target": (b"POST /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
    "a target of 9 kB": (b"POST /" + b"a" * 9_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
}


@pytest.mark.parametrize("data, status", LARGE_HEADS.values(), ids=LARGE_HEADS)
@pytest.mark.parametrize("is_second", [False, True], ids=["first request", "after another"])
async def test_a_huge_head_is_refused_wherever_it_comes(data: bytes, status: int, is_second: bool) -> None:
    """E4: httptools accepts an 8 MiB value and 20 000 fields."""
    async with (
        RawUpstream(answers) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        if is_second:
            await client.send(GOOD)
            assert (await client.response()).status == 200
        await client.send(data)
        response = await client.response()
        assert response.status == status
        assert response.error["code"] == ("head_too_large" if status == 431 else "target_too_long")
        assert await client.at_end()
        assert len(upstream.requests) == int(is_second)
        await running.settled()


LIMIT = {"max_body_mb": 0.01}  # 10 485 bytes
BIG = b"x" * 20_000
OVERSIZE = {
    "an honest length": HEAD + b"content-length: 20000\r\n\r\n" + BIG,
    "an honest length, nothing sent": HEAD + b"content-length: 20000\r\n\r\n",
    "chunks": CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BIG), BIG),
    "chunks without an end": CHUNKED + b"fffffff\r\n" + BIG,
}


@pytest.mark.parametrize("data", OVERSIZE.values(), ids=OVERSIZE)
async def test_a_body_over_the_limit_is_refused_and_the_answer_can_be_read(data: bytes) -> None:
    """E5: 413 before reading on; the connection closes where the rest of the body may still come."""
    async with (
        RawUpstream(answers) as upstream,
        running_gateway(settings_for(upstream.url, listen=LIMIT)) as running,
        running.client() as client,
    ):
        await client.send(data)
        response = await client.response()
        assert (response.status, response.error["code"]) == (413, "body_too_large")
        assert upstream.requests == []
        if response.header("connection") == "close":
            assert await client.at_end()
        else:  # it was all there before anybody looked, so the next request is where it should be
            assert (await client.ask(BODY)).status == 200
        await running.settled()


async def test_an_old_client_gets_a_stream_it_can_read() -> None:
    """HTTP/1.0 (nginx' default towards us until 1.29) knows no chunks: the body ends with the connection."""
    events = [chunk({"content": "hello"}), chunk(finish="stop"), DONE]
    async with (
        RawUpstream(streams(*events)) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        body = chat()
        await client.send(
            b"POST /v1/chat/completions HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        head = await client.head()
        assert (head.status, head.header("transfer-encoding"), head.header("connection")) == (200, None, "close")
        assert await client.reader.read() == b"".join(events)
        await running.settled()


async def test_an_old_client_sees_that_a_plain_answer_was_cut() -> None:
    """Where only the end of the connection ends a body, a cut must not look like one."""
    large = b'{"x":"' + b"a" * 400_000
    handler = sends(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(large), large), end="close"
    )
    async with (
        RawUpstream(handler) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        await client.send(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY)
        assert (await client.head()).status == 200
        with pytest.raises(ConnectionResetError):
            await client.reader.read()
        await running.settled()


async def test_a_reader_that_stops_at_the_end_of_its_answer_is_let_go() -> None:
    """E11: the answer is complete for us and not for the network."""

    async def large(request: Received, wire: Wire) -> None:
        await wire.send(whole(answer("x" * 8_000_000)))

    async with (
        RawUpstream(large) as upstream,
        running_gateway(settings_for(upstream.url, listen={"write_stall_s": 0.3})) as running,
    ):
        for extra in (b"", b"connection: close\r\n"):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", running.port))
            sock.sendall(HEAD + extra + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
            await until(lambda: bool(running.server.server_state.connections))
            await until(lambda: not running.server.server_state.connections)
            sock.close()
        await running.settled()


async def test_a_scraper_that_never_reads_is_dropped() -> None:
    """F16: the control plane's answers are bounded and timed too."""
    listen = {"write_stall_s": 0.3}
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url, listen=listen)) as running:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", running.port))
            sock.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 400)
            await until(lambda: bool(running.server.server_state.connections))
            await until(lambda: not running.server.server_state.connections, 10)
        await until(lambda: not running.server.server_state.tasks)
        assert (await running.ask(BODY)).status == 200


async def test_a_caller_of_the_control_plane_may_leave_at_any_moment() -> None:
    async with RawUpstream(answers) as upstream, running_gateway(settings_for(upstream.url)) as running:
        for turns in range(12):
            async with running.client() as client:
                await client.send(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 3 + GOOD)
                for _ in range(turns):
                    await asyncio.sleep(0)
                client.reset()
        await until(lambda: not running.server.server_state.connections)
        await until(lambda: not running.server.server_state.tasks)
        await running.settled()


async def test_a_second_answer_is_not_piled_upon_one_that_is_not_read() -> None:
    """C015, E11: the pause of the first answer is the second one's too."""
    event = chunk({"content": "x" * 60_000})
    body = chat()
    ask = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    most = 0

    async def play(request: Received, wire: Wire) -> None:
        count = 20 if len(upstream.requests) == 1 else 400
        await streams(*[event] * count, chunk(finish="stop"), DONE)(request, wire)

    listen = {"write_stall_s": 0.5}
    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url, listen=listen)) as running:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", running.port))
            sock.sendall(ask * 2)

            def dropped() -> bool:
                nonlocal most
                held = [c.transport.get_write_buffer_size() for c in running.server.server_state.connections]
                most = max(most, *held, 0)
                return bool(running.records) and not held

            await until(dropped, 10)
        assert most <= 512 * 1024, "what is left of the first, and one read"
        await running.settled()


async def test_an_answer_that_begins_while_the_client_takes_nothing_waits_for_it() -> None:
    """C015: the transport tells of its pause once, and that may have been during the answer before."""
    events = [chunk({"content": "hello"}), chunk(finish="stop"), DONE]
    async with RawUpstream(streams(*events)) as upstream, running_gateway(settings_for(upstream.url)) as running:
        async with running.client() as client:
            assert (await client.get("/healthz")).status == 200
            connections: set[Any] = running.server.server_state.connections
            (connection,) = connections
            connection.pause_writing()
            await client.post(chat())
            await until(lambda: len(upstream.requests) == 1)
            (link,) = running.gateway.runtime.upstreams["up"].pool._open
            await until(lambda: not link._is_reading)
            assert running.records == []
            connection.resume_writing()
            assert (await client.response()).body == b"".join(events)
        await running.settled()
