"""The gateway stops: nothing that runs is cut without a word, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

from tests.support.plays import silence, streams
from tests.support.raw import DONE, RawClient, RawUpstream, Received, Wire, answer, chat, chunk, whole
from tests.support.running import Running, running_gateway, settings_for, until

HELLO = chunk({"content": "hello"})
STOP = chunk(finish="stop")


async def stop(running: Running) -> asyncio.Task[None]:
    """SIGTERM as the server sees it; the task ends when the server has."""

    async def serve_to_the_end() -> None:
        await running.server.main_loop()
        await running.server.shutdown([])

    task = asyncio.create_task(serve_to_the_end())
    running.server.handle_exit(signal.SIGTERM, None)
    await asyncio.sleep(0)
    return task


async def test_readiness_ends_at_once_and_requests_are_still_taken_for_a_while() -> None:
    """C128, F1: `/readyz` stayed green; in the delay new requests are served, each the last of its connection."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(answer()))

    listen = {"drain_delay_s": 0.4, "drain_timeout_s": 5}
    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url, listen=listen)) as running:
        assert (await running.get("/readyz")).status == 200
        async with running.client() as idle:
            assert (await idle.ask(chat(stream=False))).header("connection") is None
            stopping = await stop(running)
            ready = await running.get("/readyz")
            assert (ready.status, ready.json["draining"]) == (503, True)
            assert (await running.get("/health")).status == 200
            response = await running.ask(chat(stream=False))
            assert (response.status, response.header("connection")) == (200, "close")
            await stopping
            assert await idle.at_end()
        try:
            await asyncio.open_connection("127.0.0.1", running.port)
        except ConnectionRefusedError:
            pass
        else:
            raise AssertionError("still accepting")


async def test_streams_finish_and_the_endless_one_is_told_at_the_limit() -> None:
    """C128, C129, F1: SIGTERM cut all streams, or hung for ever."""

    async def play(request: Received, wire: Wire) -> None:
        if request.json["user"] == "endless":
            await streams(*[HELLO] * 2000, pause=0.02)(request, wire)
        else:
            await streams(*[HELLO] * 15, STOP, DONE, pause=0.02)(request, wire)

    async with (
        RawUpstream(play) as upstream,
        running_gateway(settings_for(upstream.url, listen={"drain_timeout_s": 1})) as running,
    ):
        finite = [asyncio.create_task(running.ask(chat(user="finite"))) for _ in range(10)]
        endless = asyncio.create_task(running.ask(chat(user="endless")))
        await until(lambda: running.gateway.proxy.running == 11)
        before = time.monotonic()
        await (await stop(running))
        assert time.monotonic() - before < 3
        for response in await asyncio.gather(*finite):
            assert response.body == HELLO * 15 + STOP + DONE
        told = await endless
        assert told.status == 200
        assert told.is_whole
        assert told.error["code"] == "overloaded"
        assert "shutting down" in told.error["message"]
        assert told.body.endswith(DONE)
        outcomes = sorted(str(record["outcome"]) for record in running.records)
        assert outcomes == ["complete"] * 10 + ["refused"]
        assert running.records[-1]["reason"] == "draining"
        await until(lambda: upstream.open == 0)


async def test_what_has_no_answer_yet_gets_a_503_at_the_limit() -> None:
    """C128: before the first byte there is still a status to send."""
    async with (
        RawUpstream(silence) as upstream,
        running_gateway(settings_for(upstream.url, listen={"drain_timeout_s": 0.2})) as running,
    ):
        asked = [asyncio.create_task(running.ask(chat(stream=stream))) for stream in (True, False)]
        await until(lambda: len(upstream.requests) == 2)
        await (await stop(running))
        for response in await asyncio.gather(*asked):
            assert (response.status, response.error["code"]) == (503, "overloaded")
            assert response.header("retry-after") == "1"
            assert response.header("connection") == "close"
        await until(lambda: upstream.open == 0)


async def test_a_second_signal_ends_everything_at_once() -> None:
    """F2."""
    async with (
        RawUpstream(streams(*[HELLO] * 2000, pause=0.02)) as upstream,
        running_gateway(settings_for(upstream.url, listen={"drain_timeout_s": 300})) as running,
    ):
        asked = asyncio.create_task(running.ask(chat()))
        await until(lambda: running.gateway.proxy.running == 1)
        stopping = await stop(running)
        await asyncio.sleep(0.2)
        assert not stopping.done()
        running.server.handle_exit(signal.SIGTERM, None)
        before = time.monotonic()
        await stopping
        assert time.monotonic() - before < 2
        assert (await asked).error["code"] == "overloaded"


async def test_idle_and_half_sent_connections_do_not_hold_the_server() -> None:
    """C128: two idle keep-alive clients, one that never finishes its head, one that connects and says nothing."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(answer()))

    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        clients = [RawClient(running.port) for _ in range(4)]
        for client in clients:
            await client.__aenter__()
        for client in clients[:2]:
            assert (await client.ask(chat(stream=False))).status == 200
        await clients[2].send(b"POST /v1/chat/comp")
        before = time.monotonic()
        await (await stop(running))
        assert time.monotonic() - before < 2
        for client in clients:
            assert await client.at_end()
            client.close()


async def test_running_requests_outlive_a_reload_that_removes_their_upstream() -> None:
    """F13: the old snapshot serves what began with it; its pool is closed afterwards."""
    from gateway.configfile import from_mapping

    async def play(request: Received, wire: Wire) -> None:
        await (
            streams(*[HELLO] * 10, STOP, DONE, pause=0.02)(request, wire)
            if request.json["stream"]
            else wire.send(whole(answer()))
        )

    async with RawUpstream(play) as old, RawUpstream(play) as new, running_gateway(settings_for(old.url)) as running:
        assert (await running.ask(chat(stream=False))).status == 200
        stream = asyncio.create_task(running.ask(chat()))
        await until(lambda: running.gateway.proxy.running == 1)
        before = running.gateway.runtime
        running.gateway.apply(from_mapping(settings_for({"other": new.url})))
        response = await running.ask(chat(stream=False))
        assert response.header("x-gateway-upstream") == "other"
        assert (await stream).body == HELLO * 10 + STOP + DONE
        await until(lambda: before.upstreams["up"].pool.open == 0)
        await running.settled()


async def connected(port: int) -> RawClient:
    """A connection to a server that may still be starting."""
    while True:
        try:
            return await RawClient(port).__aenter__()
        except ConnectionRefusedError:
            await asyncio.sleep(0.05)


async def test_the_real_process_drains_on_sigterm_and_exits_with_zero() -> None:
    """C128, C129: the whole of it, as an orchestrator sees it."""
    async with RawUpstream(streams(*[HELLO] * 20, STOP, DONE, pause=0.03)) as upstream:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "serve", "--upstream", upstream.url, "--port", str(port),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        )  # fmt: skip
        try:
            async with asyncio.timeout(20):
                client = await connected(port)
                await client.post(chat())
                await client.head()
                process.send_signal(signal.SIGTERM)
                body = b""
                while piece := await client.piece():
                    body += piece
                assert body == HELLO * 20 + STOP + DONE
                assert await client.at_end()
                client.close()
                output, _ = await process.communicate()
            assert process.returncode == 0, output.decode()
            assert b"Traceback" not in output
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
