"""Two gateways as processes of their own, and one Valkey: any of them answers for a request that another one runs."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.process import Served, served
from tests.support.raw import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    RawUpstream,
    Received,
    Response,
    Wire,
    answer,
    chat,
    chunk,
    framed,
    whole,
)
from tests.support.running import settings_for, until
from tests.support.valkey_server import ValkeyServer, valkey_server

EVENTS = [chunk({"content": "a"}), chunk({"content": "b"}), chunk(finish="stop"), DONE]
ASYNC = {"prefer": "respond-async, wait=0"}


class Model:
    """Answers at once what says `quick`, everything else when the test lets it go, event by event."""

    def __init__(self) -> None:
        self.steps = asyncio.Semaphore(0)
        self.left = 0

    async def play(self, request: Received, wire: Wire) -> None:
        if request.json["messages"][0]["content"] == "quick":
            await wire.send(whole(answer()))
            return
        playing = asyncio.ensure_future(self._slowly(request, wire))
        while not playing.done() and not wire.reader.at_eof():
            await asyncio.sleep(0.005)
        if not playing.done():
            self.left += 1
            playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    async def _slowly(self, request: Received, wire: Wire) -> None:
        await self.steps.acquire()
        if not request.json["stream"]:
            await wire.send(whole(answer()))
            return
        await wire.send(STREAM_HEAD)
        for event in EVENTS:
            await wire.send(framed(event))
            await self.steps.acquire()
        await wire.send(LAST_CHUNK)

    def go(self, steps: int = 10) -> None:
        for _ in range(steps):
            self.steps.release()


class Fleet:
    """Replicas a and b, or workers of one."""

    def __init__(self, model: Model, upstream: RawUpstream, valkey: ValkeyServer, replicas: list[Served]) -> None:
        self.model, self.upstream, self.valkey, self.replicas = model, upstream, valkey, replicas


@asynccontextmanager
async def fleet(folder: Path, count: int = 2, workers: int = 1) -> AsyncIterator[Fleet]:
    model = Model()
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(RawUpstream(model.play))
        (folder / "valkey").mkdir()
        valkey = await stack.enter_async_context(valkey_server(folder / "valkey"))
        path = folder / "gateway.yaml"
        budget = {"budget": {"ttft_ms": 200, "on_exceed": "pending", "heartbeat_ms": 200}}
        settings = settings_for(upstream.url, route=budget, store=valkey.address)
        path.write_text(json.dumps({**settings, "listen": {"host": "127.0.0.1", "drain_timeout_s": 1}}), "utf-8")
        replicas = []
        for index in range(count):
            own = folder / str(index)
            own.mkdir()
            replicas.append(await stack.enter_async_context(served(own, str(path), workers=workers)))
        yield Fleet(model, upstream, valkey, replicas)
        model.go(1000)


async def promised(replica: Served, *, stream: bool) -> str:
    told = await replica.ask(chat(stream=stream), headers=ASYNC)
    assert told.status == 202, told
    url = told.header("location")
    assert url is not None
    return url


async def follows(replica: Served, url: str) -> Response:
    return await replica.get(url, {"accept": "text/event-stream"})


async def test_what_one_replica_runs_another_answers_for(tmp_path: Path) -> None:
    """C122: polled, streamed and joined on B, plain and stream; cancelled there, with the model server let go."""
    async with fleet(tmp_path) as all_:
        a, b = all_.replicas
        url = await promised(a, stream=True)
        assert (await b.get(url)).json["status"] == "pending"
        joined = await b.ask(chat(), headers={**ASYNC, "x-stainless-retry-count": "1"})
        assert joined.header("location") == url
        async with b.client() as client:
            await client.send(f"GET {url} HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n\r\n".encode())
            assert (await client.head()).status == 200
            all_.model.go(1)
            assert await client.piece() == EVENTS[0]
            all_.model.go(20)
            rest = b""
            while piece := await client.piece():
                rest += piece
            assert rest == b"".join(EVENTS[1:])
        own, other = await a.get(f"{url}?wait=5"), await b.get(f"{url}?wait=5")
        assert (other.status, other.body) == (own.status, own.body) == (200, b"".join(EVENTS))
        assert other.header("content-type") == own.header("content-type")
        assert (await b.get("/gateway/pending/" + "A" * 22)).status == 404
    assert len(all_.upstream.requests) == 1


async def test_a_request_is_cancelled_on_another_replica(tmp_path: Path) -> None:
    async with fleet(tmp_path) as all_:
        a, b = all_.replicas
        url = await promised(a, stream=False)
        asked_at = time.monotonic()
        told = await b.get(url, method="DELETE")
        assert (told.status, told.json["status"]) == (200, "cancelled")
        await until(lambda: all_.model.left == 1)
        assert time.monotonic() - asked_at < 0.5
        assert (await a.get(url)).json["status"] == "cancelled"
        plain = await promised(a, stream=False)
        polling = asyncio.ensure_future(b.get(f"{plain}?wait=10"))
        all_.model.go(1)
        assert (await polling).body == answer()


@pytest.mark.slow
async def test_what_a_killed_replica_ran_is_told_as_lost_within_5_s(tmp_path: Path) -> None:
    """C122: never silence; and what it had finished stays."""
    async with fleet(tmp_path) as all_:
        a, b = all_.replicas
        finished = await promised(a, stream=False)
        all_.model.go(1)
        assert (await b.get(f"{finished}?wait=5")).status == 200
        url = await promised(a, stream=True)
        polling = asyncio.ensure_future(b.get(f"{url}?wait=20"))
        following = asyncio.ensure_future(follows(b, url))
        await asyncio.sleep(0.3)
        killed_at = time.monotonic()
        a.send(signal.SIGKILL)
        told = await polling
        assert time.monotonic() - killed_at < 5
        assert (told.status, told.json["status"], told.json["error"]["reason"]) == (502, "failed", "replica_lost")
        assert b"replica_lost" in (await following).body
        assert (await b.get(finished)).body == answer()


class Load:
    """Plain requests on one replica, one after the other, with their times."""

    def __init__(self, replica: Served) -> None:
        self.replica = replica
        self.times: list[float] = []  # seconds
        self.statuses: list[int] = []
        self._is_over = False

    async def run(self, headers: dict[str, str]) -> None:
        async with self.replica.client() as client:
            while not self._is_over:
                started = time.monotonic()
                self.statuses.append((await client.ask(chat(stream=False, content="quick"), headers=headers)).status)
                self.times.append(time.monotonic() - started)
                await asyncio.sleep(0.005)

    def stop(self) -> None:
        self._is_over = True


async def degraded(replica: Served, wanted: float, within: float = 8) -> None:
    async with asyncio.timeout(within):
        while await replica.metric("gateway_shared_state_degraded") != wanted:
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "paused"])
async def test_the_data_path_goes_on_without_the_store(how: str, tmp_path: Path) -> None:
    """C120, G2, G4: no request fails; a gauge and one warning tell; 202 becomes heartbeats; it recovers by itself."""
    async with fleet(tmp_path) as all_:
        a, b = all_.replicas
        running = await promised(a, stream=True)
        loads = [
            (Load(replica), headers)
            for replica in all_.replicas
            for headers in ({}, ASYNC | {"prefer": "respond-async, wait=5"})
        ]
        tasks = [asyncio.ensure_future(load.run(headers)) for load, headers in loads]
        await asyncio.sleep(0.3)
        await all_.valkey.stop() if how == "stopped" else all_.valkey.pause()
        await degraded(a, 1)
        await degraded(b, 1)
        unknown = await b.get(running)
        assert (unknown.status, unknown.header("retry-after")) == (503, "2")
        assert (await a.get(running)).json["status"] == "pending"  # whoever runs it knows it
        async with a.client() as client:
            await client.post(chat(), headers=ASYNC)
            assert (await client.head()).status == 200  # heartbeats instead
            assert (await client.piece()).startswith(b":")
        for replica in all_.replicas:
            await replica.logged("the store is down")
        await all_.valkey.start() if how == "stopped" else all_.valkey.resume()
        await degraded(a, 0)
        await degraded(b, 0)
        for load, _ in loads:
            load.stop()
        await asyncio.gather(*tasks)
        assert {status for load, _ in loads for status in load.statuses} == {200}
        times = sorted(time for load, _ in loads for time in load.times)
        assert times[len(times) * 99 // 100] < 0.25  # alone on a machine the slowest takes 30 ms; a busy one hiccups
        all_.model.go(20)
        assert (await b.get(f"{running}?wait=10")).body == b"".join(EVENTS)
        for replica in all_.replicas:
            warnings = [line for line in replica.lines() if "the store is down" in json.dumps(line)]
            assert len(warnings) == 1


async def test_any_worker_answers_for_another_one(tmp_path: Path) -> None:
    """C122: `--workers 2` with a shared store; the kernel chooses who takes a poll."""
    async with fleet(tmp_path, 1, workers=2) as all_:
        (one,) = all_.replicas
        urls = [await promised(one, stream=False) for _ in range(4)]
        polls: list[Any] = [(await one.get(url)).json["status"] for url in urls for _ in range(6)]
        assert set(polls) == {"pending"}
        all_.model.go(4)
        for url in urls:
            assert {(await one.get(f"{url}?wait=5")).body for _ in range(6)} == {answer()}
        assert "each worker knows only its own" not in one.log.read_text("utf-8")
