"""A caller that leaves: the server stops working for it within a second.

The answers asked for here would take many seconds: the model is told to go on after its end.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI

from tests.support.raw import RawClient
from tests.vllm.gateway_process import GatewayProcess
from tests.vllm.real_vllm import RealVllm

pytestmark = pytest.mark.vllm

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {"max_tokens": 6000, "extra_body": {"ignore_eos": True}}
LONG_BODY: dict[str, object] = {"max_tokens": 6000, "ignore_eos": True}
QUESTION: Any = [{"role": "user", "content": "hi"}]
Chat = Callable[..., dict[str, Any]]


def seconds_until_idle(vllm: RealVllm, left_at: float, limit: float = 20.0) -> float:
    """From `left_at` to the first question that the server answers with: nothing runs, nothing waits.

    When it was asked, not when it answered: on a busy machine its page alone takes a while.
    """
    while True:
        asked_at = time.monotonic()
        assert asked_at < left_at + limit, "the server went on after the caller had left"
        if vllm.load == (0, 0):
            return asked_at - left_at
        time.sleep(0.02)


def test_openai_closes_its_stream_in_the_middle(vllm: RealVllm, gateway: GatewayProcess, new_id: str) -> None:
    with OpenAI(base_url=f"{gateway.url}/v1", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=vllm.model, messages=QUESTION, stream=True, extra_headers={"x-request-id": new_id}, **LONG
        )
        for _ in range(20):
            next(stream)
        assert vllm.load == (1, 0)
        left_at = time.monotonic()
        stream.close()
        assert seconds_until_idle(vllm, left_at) < 1
    record = gateway.record(new_id)
    assert (record["outcome"], record["status"]) == ("client_cancelled", 200)
    assert record["chunks"] >= 19


async def test_an_openai_task_is_cancelled_in_the_middle_of_a_stream(
    vllm: RealVllm, gateway: GatewayProcess, new_id: str
) -> None:
    started = asyncio.Event()

    async def read(client: AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model=vllm.model, messages=QUESTION, stream=True, extra_headers={"x-request-id": new_id}, **LONG
        )
        async with stream:
            async for _ in stream:
                started.set()

    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", max_retries=0) as client:
        task = asyncio.create_task(read(client))
        await started.wait()
        left_at = time.monotonic()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await asyncio.to_thread(seconds_until_idle, vllm, left_at) < 1
    assert gateway.record(new_id)["outcome"] == "client_cancelled"


def test_langchain_breaks_out_of_its_stream(vllm: RealVllm, gateway: GatewayProcess) -> None:
    model: Any = ChatOpenAI(model=vllm.model, base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, **LONG)
    stream = model.stream("hi")
    next(stream)
    left_at = time.monotonic()
    stream.close()
    assert seconds_until_idle(vllm, left_at) < 1


@pytest.mark.parametrize("how", ["reset", "close"])
async def test_a_connection_breaks_in_the_middle_of_a_stream(
    vllm: RealVllm, gateway: GatewayProcess, chat: Chat, new_id: str, how: str
) -> None:
    async with RawClient(gateway.port) as client:
        body = json.dumps(chat("hi", stream=True, **LONG_BODY)).encode()
        await client.post(body, headers={"x-request-id": new_id})
        await client.head()
        for _ in range(20):
            await client.piece()
        left_at = time.monotonic()
        client.reset() if how == "reset" else client.close()
        assert await asyncio.to_thread(seconds_until_idle, vllm, left_at) < 1
    assert gateway.record(new_id)["outcome"] == "client_cancelled"


def test_a_plain_call_times_out_on_the_callers_side(
    vllm: RealVllm, gateway: GatewayProcess, chat: Chat, new_id: str
) -> None:
    with httpx2.Client(base_url=gateway.url, timeout=0.5, trust_env=False) as client:
        with pytest.raises(httpx2.ReadTimeout):
            client.post(CHAT, json=chat("hi", **LONG_BODY), headers={"x-request-id": new_id})
        left_at = time.monotonic()
    assert seconds_until_idle(vllm, left_at) < 1
    assert gateway.record(new_id)["outcome"] == "client_cancelled"


async def test_many_leave_at_once_and_nothing_stays_behind(vllm: RealVllm, gateway: GatewayProcess, chat: Chat) -> None:
    body = json.dumps(chat("hi", stream=True, **LONG_BODY)).encode()

    async def leave(count: int) -> None:
        async with RawClient(gateway.port) as client:
            await client.post(body)
            await client.head()
            for _ in range(count):
                await client.piece()
            client.reset()

    await asyncio.gather(*(leave(count) for count in range(1, 17)))
    assert await asyncio.to_thread(seconds_until_idle, vllm, time.monotonic()) < 1
    assert await asyncio.to_thread(gateway.metric, "gateway_inflight", upstream="vllm") == 0
    assert (await asyncio.to_thread(gateway.http.get, "/gateway/status")).json()["running"] == 0
