"""A new configuration while requests run (F12, F13, C118)."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from pathlib import Path
from typing import Any

import pytest

from gateway.reload import reload_now
from tests.support.playing import plain, streaming
from tests.support.process import served
from tests.support.raw import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    RawUpstream,
    Received,
    Wire,
    chat,
    chunk,
    framed,
)  # fmt: skip
from tests.support.running import Running, running_gateway, settings_for, until


def write(path: Path, settings: dict[str, object]) -> None:
    """YAML takes JSON."""
    path.write_text(json.dumps(settings), encoding="utf-8")


async def test_fifty_reloads_under_load_lose_no_request(tmp_path: Path) -> None:
    """F13."""
    path = tmp_path / "gateway.yaml"
    slow = [part for _ in range(4) for part in (chunk({"content": "x"}), 0.004)]
    async with RawUpstream(streaming(*slow, chunk(finish="stop"), DONE)) as upstream:
        settings = settings_for(upstream.url)
        write(path, settings)
        async with running_gateway(settings, source=path) as running:
            stop = asyncio.Event()
            statuses: list[tuple[int, bool]] = []

            async def load() -> None:
                async with running.client() as client:
                    while not stop.is_set():
                        response = await client.ask(chat())
                        statuses.append((response.status, response.body.endswith(DONE)))

            loaders = [asyncio.create_task(load()) for _ in range(4)]
            for number in range(50):
                # every other time the upstream itself changes, so that its pool is made anew
                write(
                    path,
                    settings_for(upstream.url)
                    | {"upstreams": {"up": {"url": upstream.url, "keep_alive_s": 3 + number % 2}}},
                )
                assert reload_now(running.gateway) == []
                await asyncio.sleep(0.008)
            stop.set()
            await asyncio.gather(*loaders)
            assert len(statuses) > 20
            assert set(statuses) == {(200, True)}
            await running.settled()
            assert await running.metric("gateway_config_reloads_total", result="ok") >= 50
            for state in ("busy", "connecting"):
                assert await running.metric("gateway_upstream_connections", state=state) == 0
            assert await running.metric("gateway_inflight") == 0


async def test_a_running_request_keeps_what_it_began_with(tmp_path: Path) -> None:
    """F13: the new route and the new upstream are for the next one."""
    path = tmp_path / "gateway.yaml"
    go = asyncio.Event()

    async def held(request: Received, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, framed(chunk({"content": "old"})))
        await go.wait()
        await wire.send(*map(framed, (chunk(finish="stop"), DONE)), LAST_CHUNK)

    async with RawUpstream(held) as old, RawUpstream(plain()) as new:
        write(path, settings_for({"new": new.url}, routes=[{"name": "next", "upstreams": ["new"]}]))
        async with running_gateway(settings_for(old.url), source=path) as running, running.client() as client:
            await client.post(chat())
            await client.head()
            assert b"old" in await client.piece()
            pool = running.gateway.runtime.upstreams["up"].pool
            assert reload_now(running.gateway) == []
            response = await running.ask(chat(stream=False))
            assert (response.header("x-gateway-route"), response.header("x-gateway-upstream")) == ("next", "new")
            assert pool.leases == 1
            go.set()
            rest = b""
            while piece := await client.piece():
                rest += piece
            assert rest.endswith(DONE)
            await until(lambda: pool.open == 0)  # drained: not kept for reuse
            assert [record["route"] for record in running.records] == ["next", "main"]
            page = (await running.get("/metrics")).body
            assert (
                b'upstream="up"' not in page
            )  # C108: gone with its upstream, and not brought back by the last request
            assert b'route="main"' not in page


async def test_an_upstream_that_did_not_change_keeps_its_pool_and_what_was_learned(tmp_path: Path) -> None:
    """C118, F13."""
    path = tmp_path / "gateway.yaml"
    async with RawUpstream(plain()) as upstream:
        write(path, settings_for(upstream.url, route={"max_tokens": {"ceiling": 7}}))
        async with running_gateway(settings_for(upstream.url), source=path) as running:
            await running.ask(chat(stream=False))
            before = running.gateway.runtime.upstreams["up"]
            before.refuses_usage.add("m")
            await running.settled()
            assert reload_now(running.gateway) == []
            after = running.gateway.runtime.upstreams["up"]
            assert after is before
            await running.ask(chat(stream=False))
            assert upstream.connections == 1
            assert upstream.requests[1].json["max_tokens"] == 7
            assert (await running.get("/gateway/status")).json["upstreams"]["up"]["refuses_usage"] == ["m"]
            assert await running.metric("gateway_requests_total", route="main", outcome="complete") == 2


BAD: list[tuple[str, str]] = [
    ("routes: [", "line"),
    ("upstreams: {up: {url: http://a}}\nroutess: []", "routess"),
    ("upstreams: {up: {url: ftp://a}}", "http://"),
    ("upstreams: {up: {url: http://a, api_key: '${FIRSTTOKEN_TEST_UNSET}'}}", "FIRSTTOKEN_TEST_UNSET"),
    ("upstreams: {up: {url: http://a}}\nroutes: [{name: r, upstreams: [no]}]", "no"),
    ("upstreams: {up: {url: 'https://a', tls: {ca_file: /does/not/exist.pem}}}", "No such file"),
    ("", "is missing"),
]


@pytest.mark.parametrize("text, word", BAD)
async def test_a_bad_file_is_refused_and_the_old_settings_go_on(
    text: str, word: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F12."""
    path = tmp_path / "gateway.yaml"
    path.write_text(text, encoding="utf-8")
    with caplog.at_level(logging.ERROR, "gateway"):
        async with (
            RawUpstream(plain()) as upstream,
            running_gateway(settings_for(upstream.url), source=path) as running,
        ):
            response = await running.get("/gateway/reload", method="POST")
            assert response.status == 422
            assert any(word in problem for problem in response.json["problems"])
            assert (await running.ask(chat(stream=False))).status == 200
            assert await running.metric("gateway_config_reloads_total", result="failed") == 1
            assert await running.metric("gateway_config_reloads_total", result="ok") == 0
    assert any("not reloaded" in record.getMessage() and word in record.getMessage() for record in caplog.records)


async def test_a_file_that_vanished_changes_nothing(tmp_path: Path) -> None:
    """F14."""
    async with RawUpstream(plain()) as upstream:
        async with running_gateway(settings_for(upstream.url), source=tmp_path / "gone.yaml") as running:
            assert "there is no such file" in reload_now(running.gateway)[0]
            assert (await running.ask(chat(stream=False))).status == 200


async def test_a_reload_cannot_open_a_bound_address_to_everybody(tmp_path: Path) -> None:
    """The file names another host and drops the keys: it is judged by the address that is really bound."""
    path = tmp_path / "gateway.yaml"
    async with RawUpstream(plain()) as upstream:
        settings = settings_for(upstream.url, keys=[{"name": "k", "key": "secret-of-k-1"}])
        settings["listen"] = {"host": "0.0.0.0", "port": 0}
        async with running_gateway(settings, source=path) as running:
            write(path, settings_for(upstream.url))
            assert "keys" in reload_now(running.gateway)[0]
            assert (await running.ask(chat(stream=False))).status == 401
            write(path, {**settings_for(upstream.url), "auth": "none"})  # said in so many words
            assert reload_now(running.gateway) == []
            assert (await running.ask(chat(stream=False))).status == 200


async def test_what_needs_a_restart_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gateway.yaml"
    with caplog.at_level(logging.WARNING, "gateway"):
        async with (
            RawUpstream(plain()) as upstream,
            running_gateway(settings_for(upstream.url), source=path) as running,
        ):
            write(path, settings_for(upstream.url, listen={"port": 1234, "admin": "127.0.0.1:1235", "max_body_mb": 1}))
            assert reload_now(running.gateway) == []
            assert running.gateway.settings.listen.port == 0
            assert running.gateway.settings.listen.admin is None
            assert (await running.ask(b"x" * 1_100_000)).status == 413  # this one holds at once
    assert (
        sum("after a restart" in record.getMessage() for record in caplog.records) >= 1
    )  # the watch over the file may have looked too


async def test_keys_and_cross_origin_rules_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    async with RawUpstream(plain()) as upstream, running_gateway(settings_for(upstream.url), source=path) as running:
        assert (await running.ask(chat(stream=False))).status == 200
        write(path, settings_for(upstream.url, keys=[{"name": "k", "key": "secret-of-k-1"}], cors={"origins": ["*"]}))
        assert reload_now(running.gateway) == []
        response = await running.ask(chat(stream=False), headers={"origin": "http://a"})
        assert (response.status, response.header("access-control-allow-origin")) == (401, "*")


async def changed(running: Running, path: Path, settings: dict[str, Any]) -> None:
    write(path, settings)
    await until(lambda: running.gateway.settings.routes[0].name == "other", 3)


async def test_a_changed_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """spec §3."""
    monkeypatch.setattr("gateway.lifecycle.WATCH_FILE_EVERY", 1)
    path = tmp_path / "gateway.yaml"
    async with RawUpstream(plain()) as upstream:
        write(path, settings_for(upstream.url))
        async with running_gateway(settings_for(upstream.url), source=path) as running:
            await changed(running, path, settings_for(upstream.url, routes=[{"name": "other", "upstreams": ["up"]}]))
            path.write_text("broken: [", encoding="utf-8")
            failed = running.gateway.metrics.reloads["failed"]
            await until(lambda: failed.value == 1, 3)
            path.touch()
            await asyncio.sleep(0.25)
            assert failed.value == 1  # told once per change, not once per look


async def test_sighup_reloads_a_process(tmp_path: Path) -> None:
    """spec §3."""
    path = tmp_path / "gateway.yaml"
    async with RawUpstream(plain()) as upstream:
        write(path, settings_for(upstream.url, listen={"host": "127.0.0.1", "port": 8080}))
        async with served(tmp_path, str(path)) as running:
            write(path, settings_for(upstream.url, routes=[{"name": "other", "upstreams": ["up"]}]))
            running.send(signal.SIGHUP)
            await running.logged("configuration reloaded")
            response = await running.ask(chat(stream=False))
            assert response.header("x-gateway-route") == "other"
            running.send(signal.SIGTERM)
            assert await running.ended() == 0
