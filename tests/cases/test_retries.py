"""What is sent a second time, and above all what is not."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.support.faulty import faulty
from tests.support.plays import silence, streams
from tests.support.raw import DONE, RawUpstream, Received, Wire, answer, chat, chunk, whole
from tests.support.running import running_gateway, settings_for

ROLE = chunk({"role": "assistant", "content": ""})
HELLO = chunk({"content": "hello"})
STOP = chunk(finish="stop")


@pytest.mark.parametrize("events", [[ROLE, HELLO], [ROLE]], ids=["after text", "after the role alone"])
async def test_the_beginning_of_an_answer_never_appears_twice(
    events: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """C032: even a forwarded role chunk is part of an answer."""
    async with faulty(streams(*events, end="reset"), caplog) as fault:
        response = await fault.ask(stream=True)
        assert response.body.startswith(b"".join(events) + b'data: {"error"')
        assert response.body.count(b'"role"') == 1
        assert response.body.endswith(DONE)
        assert len(fault.upstream.requests) == 1
        assert response.header("x-gateway-attempts") == "1"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_too_slow_is_generated_once(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """C033: SDK × gateway × router once made 27 generations of one prompt; ours makes none more."""
    route = {"timeouts": {"first_token_ms": 200, "total_ms": 200}}
    async with faulty(silence, caplog, route=route) as fault:
        response = await fault.ask(stream=stream)
        assert response.status == 504
        assert len(fault.upstream.requests) == 1


async def test_a_model_server_that_is_down_is_passed_over_before_anything_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R0: refused connections cost nothing; the next upstream answers, and the caller is not told."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(answer()))

    async with RawUpstream(play) as down, RawUpstream(play) as up:
        down._server.close()
        await down._server.wait_closed()
        async with running_gateway(settings_for({"down": down.url, "up": up.url})) as running:
            responses = [await running.ask(chat(stream=False)) for _ in range(4)]
            assert [response.status for response in responses] == [200] * 4
            assert {response.header("x-gateway-upstream") for response in responses} == {"up"}
            assert len(up.requests) == 4
            await running.settled()


@pytest.mark.parametrize("status, asked", [("503 Service Unavailable", 2), ("400 Bad Request", 1)])
async def test_only_a_server_that_cannot_serve_now_is_a_reason_to_ask_another_one(status: str, asked: int) -> None:
    """R3: one other upstream. R6: what was refused is refused."""

    async def refuse(request: Received, wire: Wire) -> None:
        await wire.send(whole(b'{"error":{"message":"busy"}}', status))

    async with RawUpstream(refuse) as a, RawUpstream(refuse) as b:
        async with running_gateway(settings_for({"a": a.url, "b": b.url})) as running:
            assert (await running.ask(chat(stream=False))).status == int(status[:3])
            assert len(a.requests) + len(b.requests) == asked
            await running.settled()


async def test_two_requests_with_one_id_have_ids_of_their_own_upstream() -> None:
    """C034: the engine misbehaves when an id runs twice; the caller's own id comes back to it."""

    async def play(request: Received, wire: Wire) -> None:
        await asyncio.sleep(0.05)
        await wire.send(whole(answer()))

    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        mine = {"x-request-id": "abc"}
        responses = await asyncio.gather(*(running.ask(chat(stream=False), headers=mine) for _ in range(2)))
        assert {response.header("x-request-id") for response in responses} == {"abc"}
        ids = [request.header("x-request-id") or "" for request in upstream.requests]
        assert len(set(ids)) == 2
        assert all(re.fullmatch(r"abc-[0-9a-f]{8}", sent) for sent in ids)
        assert [record["request_id"] for record in running.records] == ["abc", "abc"]
        await running.settled()


async def test_a_reconnect_has_an_id_of_its_own_too() -> None:
    """C034: the first attempt may still be being aborted."""

    async def play(request: Received, wire: Wire) -> None:
        if wire.served == 1:
            await wire.send(whole(answer()))
        else:
            wire.close()

    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        for _ in range(2):
            assert (await running.ask(chat(stream=False), headers={"x-request-id": "abc"})).status == 200
        assert len({request.header("x-request-id") for request in upstream.requests}) == 3
        traces = [(request.header("traceparent") or "").split("-") for request in upstream.requests]
        assert traces[1][1] == traces[2][1], "one trace for all attempts of a request"
        await running.settled()


@pytest.mark.parametrize("sent", ["x" * 5000, "a b", "日本", "a;b", ""])
async def test_an_odd_request_id_is_replaced(sent: str) -> None:
    """C034, C140: length-capped; nothing a client sends may break a header."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(answer()))

    async with (
        RawUpstream(play) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
        running.client() as client,
    ):
        body = chat(stream=False)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {sent}\r\ncontent-length: {len(body)}\r\n\r\n"
        await client.send(head.encode() + body)
        response = await client.response()
        assert response.status == 200
        assert re.fullmatch(r"[0-9a-f]{32}", response.header("x-request-id") or "")
        await running.settled()
