"""Each limit with its own error, in its own time, and no limit where waiting is right."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.config import Timeouts, Upstream
from tests.support.plays import finish, silence, streams
from tests.support.raw import DONE, STREAM_HEAD, RawUpstream, Received, Wire, answer, chat, chunk, framed, whole
from tests.support.running import running_gateway, settings_for, until

HELLO = chunk({"content": "hello"})
STOP = chunk(finish="stop")


async def test_a_pause_is_no_failure() -> None:
    """C027: one 5 s default for connect, read, write and pool ended 39 of 114 calls; here the connect limit is tiny."""

    async def play(request: Received, wire: Wire) -> None:
        await asyncio.sleep(0.3)
        await wire.send(STREAM_HEAD, framed(HELLO))
        await asyncio.sleep(0.3)
        await wire.send(framed(STOP + DONE))
        await finish(wire, "last_chunk")

    route = {"timeouts": {"connect_ms": 100}}
    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url, route=route)) as running:
        response = await running.ask(chat())
        assert response.body == HELLO + STOP + DONE
        await running.settled()


def test_the_defaults_let_a_model_think() -> None:
    """C027, C028: prefill, thinking and long answers take minutes; connecting does not."""
    limits = Timeouts()
    assert limits.connect_ms <= 5_000
    assert limits.first_token_ms >= 120_000
    assert limits.idle_ms >= 60_000
    assert limits.total_ms >= 600_000
    upstream = Upstream(url="http://x")
    assert upstream.max_queue_wait_ms <= 5_000
    assert upstream.keep_alive_s < 5, "vLLM closes idle connections after 5 s"


async def test_a_long_prefill_is_not_a_failed_connect() -> None:
    """C028: a plain request has no first-token limit; it may take as long as its total."""

    async def play(request: Received, wire: Wire) -> None:
        await asyncio.sleep(0.4)
        await wire.send(whole(answer()))

    route = {"timeouts": {"connect_ms": 50, "first_token_ms": 100, "idle_ms": 100}}
    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url, route=route)) as running:
        assert (await running.ask(chat(stream=False))).status == 200
        await running.settled()


@contextmanager
def full_accept_queue() -> Iterator[int]:
    """The port of a server that is too busy to accept: a SYN to it gets no answer."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port: int = server.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        try:
            yield port
        finally:
            for filler in fillers:
                filler.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_too_busy_to_accept_fails_within_the_connect_limit(stream: bool) -> None:
    """C028, A5: the error names the limit that fired and its value."""
    with full_accept_queue() as port:
        await asyncio.sleep(0.05)
        settings = settings_for(f"http://127.0.0.1:{port}", route={"timeouts": {"connect_ms": 200}})
        async with running_gateway(settings) as running:
            before = time.monotonic()
            response = await running.ask(chat(stream=stream))
            assert time.monotonic() - before < 2
            assert (response.status, response.error["code"]) == (503, "upstream_unavailable")
            assert "200 ms (`timeouts.connect_ms`)" in response.error["message"]
            assert (await running.last_record())["reason"] == "connect_timeout"
            await running.settled()


LIMITS = {
    "first_token_timeout": ("first_token_ms", streams(end="open")),
    "stall": ("idle_ms", streams(HELLO, end="open")),
    "total_timeout": ("total_ms", streams(*[HELLO] * 300, pause=0.02, end="open")),
}


@pytest.mark.parametrize("reason", LIMITS)
@pytest.mark.parametrize("on_exceed", ["wait", "heartbeat"])
async def test_each_limit_of_a_stream_fires_in_its_time_with_its_name(reason: str, on_exceed: str) -> None:
    """A6, B22, C7, C17: 504 while nothing was promised, an error event afterwards; the server is let go."""
    setting, play = LIMITS[reason]
    route = {"timeouts": {setting: 300}, "budget": {"on_exceed": on_exceed}}
    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url, route=route)) as running:
        before = time.monotonic()
        response = await running.ask(chat())
        took = time.monotonic() - before
        assert 0.25 < took < 2
        assert response.status == (504 if reason == "first_token_timeout" else 200)
        assert response.error["code"] == "upstream_timeout"
        assert " 300 ms" in response.error["message"]
        assert f"`timeouts.{setting}`" in response.error["message"]
        assert response.is_whole
        record = await running.last_record()
        assert (record["outcome"], record["reason"]) == ("upstream_timeout", reason)
        await running.settled()
        await until(lambda: upstream.open == 0)


async def test_a_limit_after_heartbeats_is_told_inside_the_stream() -> None:
    """A6 after C029: 200 has gone out; the error is the last event."""
    route = {"timeouts": {"first_token_ms": 300}, "budget": {"ttft_ms": 100, "heartbeat_ms": 60}}
    async with RawUpstream(silence) as upstream, running_gateway(settings_for(upstream.url, route=route)) as running:
        response = await running.ask(chat())
        assert response.status == 200
        assert response.body.startswith(b": keep-alive estimation_ms=")
        assert response.body.endswith(b"}\n\n" + DONE)
        assert response.error["code"] == "upstream_timeout"
        assert (await running.last_record())["reason"] == "first_token_timeout"
        await running.settled()
        await until(lambda: upstream.open == 0)


async def test_a_plain_call_ends_at_its_total() -> None:
    route = {"timeouts": {"total_ms": 200}}
    async with RawUpstream(silence) as upstream, running_gateway(settings_for(upstream.url, route=route)) as running:
        response = await running.ask(chat(stream=False))
        assert (response.status, response.error["code"]) == (504, "upstream_timeout")
        assert "200 ms (`timeouts.total_ms`)" in response.error["message"]
        await running.settled()
        await until(lambda: upstream.open == 0)


async def test_a_drip_of_bytes_is_a_stall() -> None:
    """C8: the idle limit counts events, not bytes."""

    async def drip(request: Received, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, framed(HELLO))
        for byte in chunk({"content": "x" * 500}):
            await wire.send(framed(bytes([byte])))
            await asyncio.sleep(0.02)

    route = {"timeouts": {"idle_ms": 250}}
    async with RawUpstream(drip) as upstream, running_gateway(settings_for(upstream.url, route=route)) as running:
        before = time.monotonic()
        response = await running.ask(chat())
        assert time.monotonic() - before < 2
        assert response.error["code"] == "upstream_timeout"
        assert (await running.last_record())["reason"] == "stall"
        await running.settled()


async def test_heartbeats_bridge_a_pause_in_the_middle_of_an_answer() -> None:
    """C7: `: keep-alive` blocks until the idle limit, counted from the last event and not from the last look."""
    route = {"timeouts": {"idle_ms": 500}, "budget": {"heartbeat_ms": 100}}
    async with (
        RawUpstream(streams(HELLO, end="open")) as upstream,
        running_gateway(settings_for(upstream.url, route=route)) as running,
    ):
        response = await running.ask(chat())
        beats = [piece for piece in response.pieces if piece[1] == b": keep-alive\n\n"]
        assert 2 <= len(beats) <= 5
        assert response.error["code"] == "upstream_timeout"
        await running.settled()


async def test_a_hung_model_server_does_not_hang_the_others() -> None:
    """C030: one shared pool without a limit of its own."""

    async def quick(request: Received, wire: Wire) -> None:
        await wire.send(whole(answer()))

    async with RawUpstream(silence) as hung, RawUpstream(quick) as healthy:
        settings = settings_for({"a": hung.url, "b": healthy.url})
        settings["upstreams"] = {
            "a": {"url": hung.url, "max_inflight": 5, "max_queue_wait_ms": 50},
            "b": {"url": healthy.url},
        }
        settings["routes"] = [
            {"name": "a", "upstreams": ["a"], "match": {"models": ["a"]}, "timeouts": {"total_ms": 1200}},
            {"name": "b", "upstreams": ["b"]},
        ]
        async with running_gateway(settings) as running:
            to_a = [asyncio.create_task(running.ask(chat(stream=False, model="a"))) for _ in range(20)]
            await asyncio.sleep(0.2)
            before = time.monotonic()
            to_b = await asyncio.gather(*(running.ask(chat(stream=False, model="b")) for _ in range(20)))
            assert [response.status for response in to_b] == [200] * 20
            assert time.monotonic() - before < 1
            refused = [task.result() for task in to_a if task.done()]
            assert len(refused) == 15, "the excess is told at once"
            for response in refused:
                assert (response.status, response.error["code"]) == (503, "overloaded")
                assert response.header("retry-after") == "1"
            assert [r.status for r in await asyncio.gather(*to_a)].count(504) == 5
            await running.settled()


async def test_a_server_that_does_not_read_the_request_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A7: a server that accepts and never reads; the bytes that do not leave have a limit of their own."""
    monkeypatch.setattr("gateway.policy.deadline.WRITE_STALL_NS", 300_000_000)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        async with running_gateway(settings_for(f"http://127.0.0.1:{server.getsockname()[1]}")) as running:
            response = await running.ask(chat(stream=False, content="x" * 6_000_000))
            assert (response.status, response.error["code"]) == (504, "upstream_timeout")
            assert (await running.last_record())["reason"] == "write_stall"
            await running.settled()
