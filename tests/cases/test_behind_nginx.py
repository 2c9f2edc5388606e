"""A real nginx with its default settings in front of the gateway: HTTP/1.0 towards us, buffering on, a read timeout."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.plays import streams
from tests.support.process import free_port
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
from tests.support.running import running_gateway, settings_for

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
pytestmark = [pytest.mark.service, pytest.mark.skipif(NGINX is None, reason="nginx is not installed here")]

CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://127.0.0.1:{gateway}; proxy_read_timeout {read_timeout}; }}
  }}
}}
"""


@asynccontextmanager
async def nginx(folder: Path, gateway: int, read_timeout: str = "60s") -> AsyncIterator[int]:
    """nginx in front of the gateway; the port to ask."""
    assert NGINX is not None
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, port=port, gateway=gateway, read_timeout=read_timeout))
    process = await asyncio.create_subprocess_exec(
        NGINX, "-c", str(config), "-e", str(folder / "error.log"), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(10):
            while True:
                try:
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0.02)
        yield port
    finally:
        process.terminate()
        await process.wait()


async def test_tokens_are_live_through_nginx_with_its_defaults(tmp_path: Path) -> None:
    """C012: they arrived in one lump; held bytes would stop this exchange for good."""
    events = [chunk({"content": f"word {i}"}) for i in range(5)]
    arrived = asyncio.Semaphore(0)

    async def in_step(request: Received, wire: Wire) -> None:
        await wire.send(STREAM_HEAD)
        for event in events:
            await wire.stream(event)
            await arrived.acquire()
        await wire.send(framed(DONE), b"0\r\n\r\n")

    async with RawUpstream(in_step) as upstream, running_gateway(settings_for(upstream.url)) as running:
        async with nginx(tmp_path, running.port) as port, RawClient(port) as client:
            await client.post(chat())
            assert (await client.head()).status == 200
            for event in events:
                assert await client.piece() == event
                arrived.release()
            assert await client.piece() == DONE
            await running.settled()


async def test_heartbeats_outlive_the_read_timeout_of_the_hop_in_front(tmp_path: Path) -> None:
    """C029: nginx answered 504 while the model was thinking."""

    async def thinking(request: Received, wire: Wire) -> None:
        await asyncio.sleep(1.6)
        await streams(chunk({"content": "x"}), chunk(finish="stop"), DONE)(request, wire)

    route = {"budget": {"ttft_ms": 300, "heartbeat_ms": 300}}
    async with RawUpstream(thinking) as upstream, running_gateway(settings_for(upstream.url, route=route)) as running:
        async with nginx(tmp_path, running.port, read_timeout="1s") as port, RawClient(port) as client:
            response = await client.ask(chat())
            assert response.status == 200
            assert response.body.endswith(DONE)
            assert (await running.last_record())["outcome"] == "complete"


async def test_plain_answers_and_refusals_pass_nginx(tmp_path: Path) -> None:
    """HTTP/1.0 without keep-alive, with a length: nothing special, and nothing lost."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(answer()))

    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        async with nginx(tmp_path, running.port) as port, RawClient(port) as client:
            assert (await client.ask(chat(stream=False))).body == answer()
            assert (await client.ask(b"{", "/v1/chat/completions")).status == 400
            assert (await client.ask(chat(), "/v1/nothing")).status == 404
            assert (await client.ask(chat(stream=False))).body == answer()
