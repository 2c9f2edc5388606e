"""The simulated server over an in-memory wire, in virtual time: when things happen, keep-alive, leaving."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import orjson
import pytest

from gateway.sim.client import Client
from gateway.sim.profiles import DEEPSEEK_V4, FAST
from tests.sim.asking import HELLO, OFF, PACED, Serving, chat, delta

pytestmark = pytest.mark.looptime


async def test_headers_come_at_once_and_the_role_chunk_with_the_first_token(serving: Serving) -> None:
    response = await chat(serving(PACED), stream=True)
    assert response.head_at == 0
    assert response.header(b"content-type") == b"text/event-stream; charset=utf-8"
    assert response.header(b"transfer-encoding") == b"chunked"
    chunks = response.chunks()
    times = [round(when, 6) for when, _ in chunks]
    assert times == [0.5, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert delta(chunks[0][1]) == {"role": "assistant", "content": ""}
    assert all(list(delta(chunk)) == ["content"] for _, chunk in chunks[1:])
    assert [chunk["choices"][0]["finish_reason"] for _, chunk in chunks] == [None] * 5 + ["stop"]  # type: ignore[index]
    assert response.body.endswith(b"data: [DONE]\n\n")


async def test_the_servers_own_metrics_split_the_wait_into_queue_and_prefill(serving: Serving) -> None:
    server = serving(PACED.with_fields(slots=1))
    responses = await asyncio.gather(
        *(chat(server, stream=True, stream_options={"include_usage": True}) for _ in range(2))
    )
    metrics: list[Any] = [response.chunks()[-1][1]["metrics"] for response in responses]
    assert metrics[0]["queue_time_ms"] == 0
    assert metrics[1]["queue_time_ms"] == pytest.approx(900)
    assert metrics[1]["time_to_first_token_ms"] == pytest.approx(500)
    assert metrics[1]["generation_time_ms"] == pytest.approx(400)
    assert metrics[1]["mean_itl_ms"] == pytest.approx(100)
    assert responses[1].head_at == 0, "a waiting request already has its headers"


async def test_the_seed_experiment_thinking_costs_forty_five_seconds(serving: Serving) -> None:
    server = serving(DEEPSEEK_V4)
    loop = asyncio.get_running_loop()
    question = [{"role": "user", "content": "用三十个字介绍一下你自己"}]
    began = loop.time()
    thinking = await chat(server, messages=question)
    on = loop.time() - began
    began = loop.time()
    plain = await chat(server, messages=question, **OFF)
    off = loop.time() - began
    assert on == pytest.approx(46.8, abs=0.2)
    assert off == pytest.approx(1.75, abs=0.05)
    on_body, off_body = thinking.json(), plain.json()
    assert on_body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1252  # type: ignore[index]
    assert off_body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0  # type: ignore[index]
    message: Any = off_body["choices"][0]["message"]  # type: ignore[index]
    assert len(message["content"]) == 30
    assert message["reasoning"] is None


async def test_switching_thinking_shares_no_prefix_where_the_switch_is_at_the_start(serving: Serving) -> None:
    long = [{"role": "user", "content": "word " * 400}]
    for profile, shared in ((DEEPSEEK_V4, False), (DEEPSEEK_V4.with_fields(switch_at="end"), True)):
        server = serving(profile)
        await chat(server, messages=long, max_tokens=1)
        response = await chat(server, messages=long, max_tokens=1, **OFF)
        cached: Any = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[index]
        assert (cached > 300) is shared


async def test_keep_alive_ends_five_idle_seconds_after_an_answer(serving: Serving) -> None:
    server = serving()
    loop = asyncio.get_running_loop()
    _, client = await server.connect(Client)
    await asyncio.sleep(60)
    assert not client.lost, "a fresh connection that never asked is left alone, as uvicorn does"
    client.ask("/health")
    await client.response()
    await asyncio.sleep(4.9)
    client.ask("/health")
    await client.response()
    answered = loop.time()
    await client.closed()
    assert loop.time() - answered == pytest.approx(5)
    assert client.lost_by is None


async def test_a_connection_serves_many_requests_and_pipelined_ones_in_order(serving: Serving) -> None:
    server = serving(PACED)
    _, client = await server.connect(Client)
    for number in range(3):
        client.ask("/v1/chat/completions", {"messages": HELLO}, headers=[(b"x-request-id", b"r%d" % number)])
    ids = [(await client.response()).json()["id"] for _ in range(3)]
    assert ids == ["chatcmpl-r0", "chatcmpl-r1", "chatcmpl-r2"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave_at", [0.1, 0.5, 0.7])
async def test_a_client_that_leaves_ends_its_request_at_once(serving: Serving, stream: bool, leave_at: float) -> None:
    server = serving(PACED)
    _, client = await server.connect(Client)
    client.ask("/v1/chat/completions", {"messages": HELLO, "stream": stream})
    await asyncio.sleep(leave_at)
    client.transport.close()
    for _ in range(10):
        await asyncio.sleep(0)
    assert (len(server.engine.running), len(server.engine.waiting)) == (0, 0)
    assert server.engine.stats.finished["abort"] == 1
    assert not server.connections


async def test_five_hundred_clients_that_leave_at_random_leave_nothing(serving: Serving) -> None:
    rng = random.Random(7)
    server = serving(PACED.with_fields(slots=8, prefill_tokens_per_s=2000, overhead_s=0.05))

    async def leave_some_time() -> None:
        await asyncio.sleep(rng.uniform(0, 3))
        _, client = await server.connect(Client)
        client.ask("/v1/chat/completions", {"messages": HELLO, "stream": rng.random() < 0.5})
        await asyncio.sleep(rng.uniform(0, 1))
        rng.choice([client.transport.close, client.transport.abort, client.transport.reset])()  # type: ignore[attr-defined]

    async with asyncio.TaskGroup() as group:
        for _ in range(500):
            group.create_task(leave_some_time())
    await asyncio.sleep(0.001)
    assert (len(server.engine.running), len(server.engine.waiting), len(server.connections)) == (0, 0, 0)
    assert server.engine.stats.finished["abort"] > 100


async def test_a_stalled_reader_stops_the_stream_and_not_the_server(serving: Serving) -> None:
    server = serving(FAST)
    _, client = await server.connect(Client, window=1000)
    client.transport.pause_reading()
    client.ask("/v1/chat/completions", {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 5000})
    await asyncio.sleep(1)
    (connection,) = server.connections
    assert connection.transport.get_write_buffer_size() < 100_000
    client.transport.resume_reading()
    response = await client.response()
    assert len(response.chunks()) == 5001


async def test_comments_fill_the_silence_where_the_server_is_set_up_so(serving: Serving) -> None:
    response = await chat(serving(PACED.with_fields(overhead_s=2.5, comment_interval_s=1)), stream=True)
    first = [(when, event) for when, event in response.events()][:3]
    assert first[:2] == [(1.0, b": keep-alive"), (2.0, b": keep-alive")]
    assert first[2][0] == 2.5


async def test_rendering_delays_the_headers(serving: Serving) -> None:
    assert (await chat(serving(PACED.with_fields(render_s=0.3)), stream=True)).head_at == pytest.approx(0.3)


async def test_bytes_that_are_not_http_get_400_and_the_end(serving: Serving) -> None:
    _, client = await serving().connect(Client)
    client.transport.write(b"\x16\x03\x01 hello\r\n\r\n")
    response = await client.response()
    assert (response.status, response.body) == (400, b"Invalid HTTP request received.")
    await client.closed()


async def test_expect_continue_connection_close_and_http10(serving: Serving) -> None:
    server = serving()
    _, client = await server.connect(Client)
    body = orjson.dumps({"model": "fast", "messages": HELLO})
    head = b"POST /v1/chat/completions HTTP/1.1\r\nexpect: 100-continue\r\ncontent-type: application/json\r\n"
    client.transport.write(head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
    await client.until(b"100 Continue")
    client.transport.write(body)
    await client.closed()
    assert b"connection: close" in client.received
    _, client = await server.connect(Client)
    old = orjson.dumps({"model": "fast", "messages": HELLO, "stream": True})
    head = b"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
    client.transport.write(head + b"content-length: %d\r\n\r\n" % len(old) + old)
    await client.closed()
    assert b"transfer-encoding" not in client.received
    assert client.received.endswith(b"data: [DONE]\n\n")


async def test_repr_tells_the_state_in_a_line(serving: Serving) -> None:
    server = serving()
    assert repr(server) == "<Server fast: 0 connections, <Engine fast: 0 running, 0 waiting>>"
