"""Plain calls that go up as streams (`stream_upstream`): seen from inside, answered as if they had not been."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.plays import End, silence, streams
from tests.support.raw import DONE, Handler, RawUpstream, chat, chunk
from tests.support.running import Running, running_gateway, settings_for

ROLE = chunk({"role": "assistant", "content": ""})
WORDS = [chunk({"content": "你"}), chunk({"content": "好"})]
STOP = chunk(finish="stop")


@asynccontextmanager
async def gathering(handler: Handler, **route: Any) -> AsyncIterator[tuple[RawUpstream, Running]]:
    settings = {"stream_upstream": True, **route}
    async with (
        RawUpstream(handler) as upstream,
        running_gateway(settings_for(upstream.url, route=settings), upstream={"engine": "vllm"}) as running,
    ):
        yield upstream, running
        await running.settled()


async def test_the_answer_is_one_json_text_and_its_first_token_is_known() -> None:
    async with gathering(streams(ROLE, *WORDS, STOP, DONE)) as (upstream, running):
        response = await running.ask(chat(stream=False))
        assert response.status == 200
        assert response.header("content-type") == "application/json"
        assert response.json["object"] == "chat.completion"
        (choice,) = response.json["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("你好", "stop")
        assert response.header("x-gateway-changes") == "stream=upstream"
        assert "ttft;dur=" in (response.header("server-timing") or "")
        sent = json.loads(upstream.requests[0].body)
        assert (sent["stream"], sent["stream_options"]) == (True, {"include_usage": True})
        record = await running.last_record()
        assert (record["stream"], record["ttft_source"], record["outcome"]) == (False, "stream", "complete")
        assert record["ttft_ms"] is not None
        assert await running.metric("gateway_ttft_seconds_count") == 1


async def test_the_connection_is_used_again() -> None:
    async with gathering(streams(ROLE, *WORDS, STOP, DONE)) as (upstream, running):
        for _ in range(3):
            assert (await running.ask(chat(stream=False))).status == 200
        assert upstream.connections == 1


@pytest.mark.parametrize(
    "events, end, words",
    [
        ([ROLE, *WORDS], "reset", "reset the connection in the middle"),
        ([ROLE, *WORDS], "half", "broke off in the middle"),
        ([ROLE, *WORDS], "last_chunk", "without finishing the answer"),
        ([], "last_chunk", "ended before its first event"),
        (
            [ROLE, b'data: {"error":{"message":"the engine died","code":500}}\n\n', DONE],
            "last_chunk",
            "the engine died",
        ),
    ],
)
async def test_a_stream_that_breaks_is_an_error_and_never_half_an_answer(
    events: list[bytes], end: End, words: str
) -> None:
    async with gathering(streams(*events, end=end)) as (_, running):
        response = await running.ask(chat(stream=False))
        assert response.status >= 500
        assert words in response.error["message"]


async def test_a_stream_that_ends_but_is_not_closed_is_answered_all_the_same() -> None:
    async with gathering(streams(ROLE, *WORDS, STOP, DONE, end="open")) as (_, running):
        response = await running.ask(chat(stream=False))
        assert response.json["choices"][0]["message"]["content"] == "你好"


async def test_an_answer_that_stops_half_way_is_asked_for_elsewhere() -> None:
    """C1, R2: part of it is here, and none of it went out."""
    stops = streams(ROLE, *WORDS, end="open")
    route = {"stream_upstream": True, "balance": "round_robin", "timeouts": {"idle_ms": 150}}
    async with RawUpstream(streams(ROLE, *WORDS, STOP, DONE)) as good, RawUpstream(stops) as bad:
        settings = settings_for({"a": good.url, "b": bad.url}, route=route)
        async with running_gateway(settings, upstream={"engine": "vllm"}) as running:
            response = await running.ask(chat(stream=False))
            assert response.json["choices"][0]["message"]["content"] == "你好"
            assert response.header("x-gateway-attempts") == "2"
            assert response.header("x-gateway-failures") == "b=stall"
            await running.settled()


async def test_its_first_token_has_a_limit() -> None:
    async with gathering(silence, timeouts={"first_token_ms": 150}) as (_, running):
        response = await running.ask(chat(stream=False))
        assert (response.status, response.error["code"]) == (504, "upstream_timeout")
        assert "first_token_ms" in response.error["message"]


async def test_what_cannot_be_put_together_goes_up_as_it_came() -> None:
    async with gathering(streams(ROLE, *WORDS, STOP, DONE)) as (upstream, running):
        body = json.loads(chat(stream=False)) | {"prompt_logprobs": 1}
        await running.ask(json.dumps(body).encode())
        assert upstream.requests[0].body == json.dumps(body).encode()
