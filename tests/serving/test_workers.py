"""Several processes on one port: one metrics page, one life (C101, F3)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.support.pages import open_page
from tests.support.playing import plain, streaming
from tests.support.process import Served, served
from tests.support.raw import DONE, STREAM_HEAD, RawUpstream, Received, Wire, chat, chunk, framed
from tests.support.running import settings_for

SUM = "gateway_requests_total"


async def settled_at(running: Served, wanted: float) -> list[float]:
    """Scrapes until the page shows what was asked, then ten more: each may be answered by another worker."""
    async with asyncio.timeout(5):
        while await running.metric(SUM, outcome="complete") < wanted:
            await asyncio.sleep(0.05)
    return [await running.metric(SUM, outcome="complete") for _ in range(10)]


async def test_every_scrape_shows_the_sum_of_all_workers(tmp_path: Path) -> None:
    """C101: counters jumped back and forth, and `rate()` made requests of it."""
    async with RawUpstream(streaming(chunk({"content": "x"}), chunk(finish="stop"), DONE)) as upstream:
        async with served(tmp_path, "--upstream", upstream.url, workers=2) as running:
            assert len(await running.workers()) == 2
            await asyncio.gather(*(running.ask(chat()) for _ in range(40)))
            assert set(await settled_at(running, 40)) == {40}
            assert await running.metric("gateway_ttft_seconds_count") == 40
            assert await running.metric("gateway_inflight") == 0
            assert await running.metric("gateway_build_info") == 1
            page = await running.get("/metrics", {"accept": "application/openmetrics-text"})
            assert len(open_page(page.body)) >= 20
            served_by = {str(record["worker"]) for record in await recent(running)}
            assert len(served_by) == 2


async def recent(running: Served) -> list[dict[str, object]]:
    """Which workers served requests, by the status of each."""
    pages = [(await running.get("/gateway/status")).json for _ in range(12)]
    return [{"worker": page["worker"]["pid"]} for page in pages if page["recent"]]


async def test_gauges_of_all_workers_are_added_up_while_requests_run(tmp_path: Path) -> None:
    """C100, C101."""
    go = asyncio.Event()

    async def hold(request: Received, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, framed(chunk({"content": "x"})))
        await go.wait()
        wire.close()

    async with RawUpstream(hold) as upstream, served(tmp_path, "--upstream", upstream.url, workers=2) as running:
        asking = [asyncio.create_task(running.ask(chat())) for _ in range(8)]
        async with asyncio.timeout(5):
            while await running.metric("gateway_inflight") != 8:
                await asyncio.sleep(0.05)
        go.set()
        await asyncio.gather(*asking)
        async with asyncio.timeout(5):
            while await running.metric("gateway_inflight") != 0:
                await asyncio.sleep(0.05)


async def test_a_killed_worker_is_replaced_and_no_counter_goes_down(tmp_path: Path) -> None:
    """F3, C101."""
    async with RawUpstream(plain()) as upstream, served(tmp_path, "--upstream", upstream.url, workers=2) as running:
        await asyncio.gather(*(running.ask(chat(stream=False)) for _ in range(20)))
        await settled_at(running, 20)
        before = await running.workers()
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        seen = []
        async with asyncio.timeout(20):
            while len(now := await alive(running)) < 2 or victim in now:
                seen.append(await scrape(running))
                await asyncio.sleep(0.05)
        assert [value for value in seen if value is not None and value < 20] == []
        assert "ended with -9" in (await running.logged("starting another"))["message"]
        await asyncio.gather(*(running.ask(chat(stream=False)) for _ in range(20)))
        assert set(await settled_at(running, 40)) == {40}
        assert await running.metric("gateway_upstream_up") == 1
        assert await running.metric("gateway_upstream_connections", state="busy") == 0


async def scrape(running: Served) -> float | None:
    try:
        return await running.metric(SUM, outcome="complete")
    except (OSError, asyncio.IncompleteReadError):
        return None  # it hit the dead worker's queue


async def alive(running: Served) -> set[int]:
    try:
        return await running.workers()
    except (OSError, asyncio.IncompleteReadError):
        return set()


async def test_sighup_reaches_all_workers(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    async with RawUpstream(plain()) as upstream:
        path.write_text(json.dumps(settings_for(upstream.url)), encoding="utf-8")
        async with served(tmp_path, str(path), workers=2) as running:
            changed = settings_for(upstream.url, routes=[{"name": "other", "upstreams": ["up"]}])
            path.write_text(json.dumps(changed), encoding="utf-8")
            running.send(signal.SIGHUP)
            async with asyncio.timeout(5):
                while await running.metric("gateway_config_reloads_total", result="ok") < 2:
                    await asyncio.sleep(0.05)
            routes = {(await running.ask(chat(stream=False))).header("x-gateway-route") for _ in range(10)}
            assert routes == {"other"}


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_all_with_0_and_running_answers_are_finished(sig: signal.Signals, tmp_path: Path) -> None:
    """F1."""
    handler = streaming(chunk({"content": "x"}), 0.3, chunk(finish="stop"), DONE)
    async with RawUpstream(handler) as upstream, served(tmp_path, "--upstream", upstream.url, workers=2) as running:
        workers = await running.workers()
        async with running.client() as client:
            await client.post(chat())
            await client.head()
            await client.piece()
            running.send(sig)
            rest = b""
            while piece := await client.piece():
                rest += piece
            assert rest.endswith(DONE)
        assert await running.ended() == 0
        assert [pid for pid in workers if is_running(pid)] == []
        assert "Traceback" not in running.log.read_text(encoding="utf-8")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="ascii")


async def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    async with RawUpstream(plain()) as upstream, served(tmp_path, "--upstream", upstream.url, workers=2) as running:
        workers = await running.workers()
        running.process.kill()
        await running.ended()
        async with asyncio.timeout(5):
            while any(is_running(pid) for pid in workers):
                await asyncio.sleep(0.05)


async def test_a_port_in_use_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    """F11: also with workers, which could share the port with a stranger."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AssertionError, match=r"cannot listen on 127\.0\.0\.1"):
            async with served(tmp_path, "--upstream", "http://127.0.0.1:9", port=taken.getsockname()[1], workers=2):
                pass
        lines = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
        assert [line.split(":")[0].strip() for line in lines] == ["error", "hint"]
