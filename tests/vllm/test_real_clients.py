"""The clients people have: `openai`, plain and async, and `langchain-openai`, unchanged but for their `base_url`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI

from tests.vllm.gateway_process import GatewayProcess
from tests.vllm.real_vllm import RealVllm

pytestmark = pytest.mark.vllm

QUESTION: Any = [{"role": "user", "content": "用三十个字介绍网关。"}]


def _langchain(vllm: RealVllm, gateway: GatewayProcess, prefix: str, **more: Any) -> Any:
    return ChatOpenAI(
        model=vllm.model, base_url=f"{gateway.url}{prefix}/v1", api_key="none", temperature=0, max_retries=0,
        include_response_headers=True, **more,
    )  # fmt: skip


def _is_told(headers: Mapping[str, str], route: str, changes: str) -> None:
    assert headers["x-gateway-route"] == route
    assert headers["x-gateway-upstream"] == "vllm"
    assert headers["x-gateway-attempts"] == "1"
    assert changes in headers["x-gateway-changes"]
    assert headers["x-request-id"]
    assert "upload;dur=" in headers["server-timing"]


def test_openai_gets_a_plain_answer_and_our_headers(vllm: RealVllm, gateway: GatewayProcess) -> None:
    with OpenAI(base_url=f"{gateway.url}/quick/v1", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(model=vllm.model, messages=QUESTION, temperature=0)
    answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    _is_told(raw.headers, "quick", "thinking=off")


def test_openai_streams_with_its_own_helper(vllm: RealVllm, gateway: GatewayProcess) -> None:
    with (
        OpenAI(base_url=f"{gateway.url}/quick/v1", max_retries=0) as client,
        client.chat.completions.stream(model=vllm.model, messages=QUESTION, temperature=0) as stream,
    ):
        kinds = [event.type for event in stream]
        answer = stream.get_final_completion()
    assert kinds.count("content.delta") >= 2
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


async def test_async_openai_streams_and_gets_our_headers(vllm: RealVllm, gateway: GatewayProcess) -> None:
    async with AsyncOpenAI(base_url=f"{gateway.url}/quick/v1", max_retries=0) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=vllm.model, messages=QUESTION, temperature=0, stream=True
        )
        chunks = [chunk async for chunk in raw.parse()]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert chunks[-1].choices[0].finish_reason == "stop"
    _is_told(raw.headers, "quick", "thinking=off, usage=added")


def test_openai_sees_the_reasoning_and_then_the_answer(vllm: RealVllm, gateway: GatewayProcess) -> None:
    with OpenAI(base_url=f"{gateway.url}/v1", max_retries=0) as client:
        stream = client.chat.completions.create(model=vllm.model, messages=QUESTION, temperature=0, stream=True)
        deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    thought = [index for index, delta in enumerate(deltas) if (delta.model_extra or {}).get("reasoning")]
    answered = [index for index, delta in enumerate(deltas) if (delta.content or "").strip()]
    assert len(thought) > 100
    assert max(thought) < min(answered)


def test_openai_lists_the_models(vllm: RealVllm, gateway: GatewayProcess) -> None:
    with OpenAI(base_url=f"{gateway.url}/v1", max_retries=0) as client:
        assert vllm.model in [model.id for model in client.models.list()]


def test_langchain_invokes_and_shows_our_headers(vllm: RealVllm, gateway: GatewayProcess) -> None:
    message = _langchain(vllm, gateway, "/quick").invoke("用三十个字介绍网关。")
    assert message.content
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.usage_metadata["output_token_details"]["reasoning"] == 0
    _is_told(message.response_metadata["headers"], "quick", "thinking=off")


@pytest.mark.parametrize("stream_usage", [False, True], ids=["no_usage", "usage"])
def test_langchain_streams_and_shows_our_headers(vllm: RealVllm, gateway: GatewayProcess, stream_usage: bool) -> None:
    chunks = list(_langchain(vllm, gateway, "/quick", stream_usage=stream_usage).stream("用三十个字介绍网关。"))
    whole = sum(chunks[1:], chunks[0])
    assert sum(bool(chunk.content) for chunk in chunks) >= 2
    assert whole.content
    assert whole.response_metadata["finish_reason"] == "stop"
    assert (whole.usage_metadata is not None) is stream_usage
    headers = next(found for chunk in chunks if (found := chunk.response_metadata.get("headers")))
    _is_told(headers, "quick", "thinking=off")


async def test_langchain_streams_asynchronously_and_shows_our_headers(vllm: RealVllm, gateway: GatewayProcess) -> None:
    async with DefaultAsyncHttpxClient() as http_client:  # its own default outlives the test's loop
        model = _langchain(vllm, gateway, "/quick", http_async_client=http_client)
        chunks = [chunk async for chunk in model.astream("用三十个字介绍网关。")]
    assert "".join(chunk.content for chunk in chunks)
    headers = next(found for chunk in chunks if (found := chunk.response_metadata.get("headers")))
    _is_told(headers, "quick", "thinking=off")


async def test_langchain_invokes_asynchronously_with_thinking(vllm: RealVllm, gateway: GatewayProcess) -> None:
    async with DefaultAsyncHttpxClient() as http_client:
        message = await _langchain(vllm, gateway, "", http_async_client=http_client).ainvoke("你好")
    assert message.content.strip()
    assert message.usage_metadata["output_token_details"]["reasoning"] > 300


def test_langchain_is_told_what_became_of_an_empty_answer(vllm: RealVllm, gateway: GatewayProcess) -> None:
    """The caller sees an empty text; the record, found by the id in the headers, says why."""
    message = _langchain(vllm, gateway, "", max_tokens=64).invoke("你好")
    assert message.content == ""
    assert message.response_metadata["finish_reason"] == "length"
    record = gateway.record(message.response_metadata["headers"]["x-request-id"])
    assert record["verdict"] == "burnt_by_thinking"
