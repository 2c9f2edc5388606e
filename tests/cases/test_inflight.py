"""Gauges that are right while requests run, and exactly zero when none does (C100)."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.playing import serving
from tests.support.raw import DONE, LAST_CHUNK, STREAM_HEAD, Received, Wire, answer, chat, chunk, framed, whole
from tests.support.running import Running, until

KINDS = (
    "plain", "stream", "slow", "reset_before_head", "close_before_head", "reset_after_head", "reset_mid", "garbage",
    "error_400", "error_500", "error_first", "stall", "leave_at_once", "leave_waiting", "leave_mid", "reset_mid_client",
    "bad_json", "half_body",
)  # fmt: skip


async def play(request: Received, wire: Wire) -> None:
    kind = request.json["messages"][0]["content"]
    if kind == "plain":
        await wire.send(whole(answer()))
    elif kind == "reset_before_head":
        wire.reset()
    elif kind == "close_before_head":
        wire.close()
    elif kind == "garbage":
        await wire.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    elif kind in ("error_400", "error_500"):
        await wire.send(whole(b'{"error":{"message":"no"}}', f"{kind[-3:]} No"))
    elif kind == "leave_waiting":
        await wire.wait_closed_by_peer()
    else:
        await play_stream(kind, wire)


async def play_stream(kind: str, wire: Wire) -> None:
    await wire.send(STREAM_HEAD)
    if kind == "reset_after_head":
        wire.reset()
        return
    if kind == "error_first":
        await wire.send(framed(b'data: {"error":{"message":"no","code":500}}\n\n'), framed(DONE), LAST_CHUNK)
        return
    await wire.stream(chunk({"content": "a"}), chunk({"content": "b"}))
    if kind == "reset_mid":
        wire.reset()
    elif kind in ("stall", "leave_mid", "reset_mid_client"):
        await wire.wait_closed_by_peer()
    else:
        await asyncio.sleep(0.1 if kind == "slow" else 0)
        await wire.stream(chunk(finish="stop"), DONE)
        await wire.send(LAST_CHUNK)


async def request(running: Running, kind: str) -> None:
    async with running.client() as client:
        if kind == "half_body":
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 500\r\n\r\n{")
            await asyncio.sleep(0.01)
            return
        await client.post(
            b"{" if kind == "bad_json" else chat(stream=kind not in ("plain", "leave_waiting"), content=kind)
        )
        if kind == "leave_at_once":
            return
        if kind == "leave_waiting":
            await asyncio.sleep(random.uniform(0.01, 0.05))
        elif kind in ("leave_mid", "reset_mid_client"):
            await client.head()
            await client.piece()
            if kind == "reset_mid_client":
                client.reset()
        else:
            await client.response()


async def gauges(running: Running) -> dict[str, float]:
    return {
        "inflight": await running.metric("gateway_inflight"),
        "busy": await running.metric("gateway_upstream_connections", state="busy"),
        "connecting": await running.metric("gateway_upstream_connections", state="connecting"),
    }


async def test_after_every_way_to_end_the_gauges_are_zero() -> None:
    """C100: −9, or climbing for ever."""
    upstream = {"max_inflight": 16, "max_queue": 1000, "breaker": {"mode": "off"}}  # so that every kind gets there
    async with serving(play, route={"timeouts": {"idle_ms": 100}}, upstream=upstream) as (_, running):
        kinds = [kind for kind in KINDS for _ in range(8)]
        random.Random(7).shuffle(kinds)
        await asyncio.gather(*(request(running, kind) for kind in kinds))
        await running.settled(5)
        await until(lambda: len(running.records) >= len(kinds) - 8)  # some that left at once were never a request
        assert await gauges(running) == {"inflight": 0, "busy": 0, "connecting": 0}
        total = await running.metric("gateway_requests_total")
        assert total == len(running.records)
        assert await running.metric("gateway_requests_total", outcome="internal_error") == 0


@pytest.mark.parametrize("count", [1, 7])
async def test_while_they_run_the_gauge_is_their_number(count: int) -> None:
    """C100: 0 while streams ran."""
    async with serving(play) as (_, running):
        clients = [running.client() for _ in range(count)]
        for client in clients:
            await client.__aenter__()
            await client.post(chat(content="leave_mid"))
            await client.head()
            await client.piece()
        assert await gauges(running) == {"inflight": count, "busy": count, "connecting": 0}
        assert (await running.get("/gateway/status")).json["upstreams"]["up"]["inflight"] == count
        for client in clients:
            client.close()
        await running.settled()
        assert await running.metric("gateway_inflight") == 0
