"""The simulated server over real sockets: httpx2 as its client, real resets, the command `firsttoken sim`."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import IO, Any

import httpx2
import orjson
import pytest
import uvloop

from gateway.cli import CommandError, main
from gateway.cli import sim as command
from gateway.sim.client import Client
from gateway.sim.profiles import FAST, Profile
from gateway.sim.transport import Server, serve

BODY = {"model": "fast", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@asynccontextmanager
async def running(profile: Profile = FAST, **options: Any) -> AsyncIterator[Server]:
    server = await serve(profile, **options)
    try:
        yield server
    finally:
        await server.close()
        assert not server.connections


async def test_httpx2_reads_a_stream_as_an_sdk_does() -> None:
    async with running() as server, httpx2.AsyncClient(base_url=server.url) as client:
        text, finish, usage = "", None, None
        body = {**BODY, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = orjson.loads(line[6:])
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
        assert text.endswith(".")
        assert finish == "stop"
        assert usage is not None
        assert usage["completion_tokens"] == 17
        plain = await client.post("/v1/chat/completions", json={**BODY, "stream": False})
        assert plain.json()["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_faults_reset_and_leaving_work_over_sockets_on_both_loops(loop_factory: Any) -> None:
    async def story() -> None:
        async with running(FAST.with_fields(decode_tokens_per_s=200)) as server:
            loop = asyncio.get_running_loop()
            for fault, by in (("reset", ConnectionResetError), ("cut", type(None)), ("close_before", type(None))):
                _, client = await loop.create_connection(Client, server.host, server.port)
                client.ask("/v1/chat/completions", BODY, headers=[(b"x-sim-fault", fault.encode())])
                await client.closed()
                assert isinstance(client.lost_by, by), fault
            _, client = await loop.create_connection(Client, server.host, server.port)
            client.ask("/v1/chat/completions", BODY)
            await client.until(b"data: ")
            assert len(server.engine.running) == 1
            client.transport.abort()
            async with asyncio.timeout(1):
                while server.engine.running:
                    await asyncio.sleep(0.001)
            assert server.engine.stats.finished["abort"] >= 1

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(story())


async def test_a_restarted_server_comes_back_on_its_port() -> None:
    async with running() as server, httpx2.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/health")).status_code == 200
        port = server.port
        restart = asyncio.get_running_loop().create_task(server.restart(0.05))
        await asyncio.sleep(0.01)
        with pytest.raises(httpx2.ConnectError):
            await client.get("/health")
        await restart
        assert server.port == port
        assert (await client.get("/health")).status_code == 200


async def test_a_fast_profile_streams_at_least_five_thousand_chunks_a_second() -> None:
    """Slow sims make slow suites. Measured on a 2-core machine: 150,000/s over a socket."""
    async with running() as server:
        _, client = await asyncio.get_running_loop().create_connection(Client, server.host, server.port)
        began = time.perf_counter()
        client.ask("/v1/chat/completions", {**BODY, "ignore_eos": True, "max_tokens": 5000})
        response = await client.response()
        assert response.body.count(b"data: ") == 5002
        assert time.perf_counter() - began < 1


def test_a_port_in_use_is_one_line_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["sim", "--port", str(taken.getsockname()[1])]) == 1
    error = capsys.readouterr().err
    assert "is already in use" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "argument,complaint", [("--fault=nope", "unknown fault"), ("--set=slots=0", "above 0"), ("--speed=0", "above 0")]
)
def test_a_wrong_argument_is_explained(argument: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", argument]) == 1
    assert complaint in capsys.readouterr().err


def profile_for(*arguments: str) -> Profile:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.profile_of(parser.parse_args(arguments))


def test_arguments_shape_the_profile() -> None:
    profile = profile_for("--profile=qwen3", "--model=a", "--model=b", "--speed=2", "--set=slots=3", "--set=jitter=0")
    assert (profile.models, profile.slots, profile.jitter, profile.decode_tokens_per_s) == (("a", "b"), 3, 0, 120)
    with pytest.raises(CommandError):
        profile_for("--set=nothing=1")


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`firsttoken sim` as its own process, and the line it prints."""
    started = subprocess.Popen(
        [sys.executable, "-m", "gateway", "sim", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert isinstance(started.stderr, IO) or started.stderr is not None
        yield started, started.stderr.readline()
    finally:
        started.kill()
        started.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_stopped_and_exits_cleanly(number: signal.Signals) -> None:
    with process("--profile", "fast", "--fault", "no_done", "--api-key", "k") as (started, line):
        found = re.search(r"simulated fast at (http://127\.0\.0\.1:\d+)/v1, try: curl -N ", line)
        assert found
        url = found[1]
        assert httpx2.get(f"{url}/v1/models").status_code == 401
        answer = httpx2.post(f"{url}/v1/chat/completions", json=BODY, headers={"authorization": "Bearer k"})
        assert answer.status_code == 200
        assert "[DONE]" not in answer.text
        started.send_signal(number)
        out, err = started.communicate(timeout=5)
    assert (started.returncode, out, err) == (0, "", "")
