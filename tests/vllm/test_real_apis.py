"""The other APIs of the same server: completions, Responses, Anthropic's messages, tokenize."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from tests.vllm.gateway_process import GatewayProcess
from tests.vllm.real_vllm import RealVllm

pytestmark = pytest.mark.vllm


@pytest.fixture
def openai_client(gateway: GatewayProcess) -> Any:
    with OpenAI(base_url=f"{gateway.url}/v1", max_retries=0) as client:
        yield client


def _events(body: bytes) -> list[dict[str, Any]]:
    """The JSON payloads of a stream."""
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def test_completions_answer_plainly(vllm: RealVllm, gateway: GatewayProcess, openai_client: Any, new_id: str) -> None:
    answer = openai_client.completions.create(
        model=vllm.model, prompt="Hello", max_tokens=8, temperature=0, extra_headers={"x-request-id": new_id}
    )
    assert answer.choices[0].text
    record = gateway.record(new_id)
    assert (record["verdict"], record["completion_tokens"]) == ("ok", answer.usage.completion_tokens)


def test_completions_stream(vllm: RealVllm, gateway: GatewayProcess, openai_client: Any, new_id: str) -> None:
    stream = openai_client.completions.create(
        model=vllm.model, prompt="Hello", max_tokens=8, temperature=0, stream=True,
        extra_headers={"x-request-id": new_id},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks)
    record = gateway.record(new_id)
    assert record["ttft_ms"] == record["ttfv_ms"] > 0
    assert record["completion_tokens"] <= 8
    assert record["outcome"] == "complete"


def test_responses_answer_plainly(vllm: RealVllm, gateway: GatewayProcess, openai_client: Any, new_id: str) -> None:
    answer = openai_client.responses.create(
        model=vllm.model, input="你好", temperature=0, extra_headers={"x-request-id": new_id}
    )
    assert answer.output_text.strip()
    record = gateway.record(new_id)
    assert record["reasoning_tokens"] == answer.usage.output_tokens_details.reasoning_tokens > 300
    assert record["verdict"] == "ok"


def test_responses_stream(vllm: RealVllm, gateway: GatewayProcess, openai_client: Any, new_id: str) -> None:
    stream = openai_client.responses.create(
        model=vllm.model, input="你好", temperature=0, stream=True, extra_headers={"x-request-id": new_id}
    )
    kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds
    record = gateway.record(new_id)
    assert (record["outcome"], record["verdict"]) == ("complete", "ok")
    assert 0 < record["ttft_ms"] < record["ttfv_ms"] <= record["e2e_ms"]
    assert record["reasoning_tokens"] > 300


def test_messages_answer_plainly_in_anthropics_shape(vllm: RealVllm, gateway: GatewayProcess, new_id: str) -> None:
    body = {
        "model": vllm.model,
        "max_tokens": 2000,
        "temperature": 0,
        "messages": [{"role": "user", "content": "你好"}],
    }
    response = gateway.http.post("/v1/messages", json=body, headers={"x-request-id": new_id})
    answer = response.json()
    assert (answer["type"], answer["stop_reason"]) == ("message", "end_turn")
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    record = gateway.record(new_id)
    assert (record["verdict"], record["completion_tokens"]) == ("ok", answer["usage"]["output_tokens"])


def test_messages_stream_in_anthropics_shape(vllm: RealVllm, gateway: GatewayProcess, new_id: str) -> None:
    body = {
        "model": vllm.model, "max_tokens": 2000, "temperature": 0, "stream": True,
        "messages": [{"role": "user", "content": "你好"}],
    }  # fmt: skip
    response = gateway.http.post("/v1/messages", json=body, headers={"x-request-id": new_id})
    kinds = [event["type"] for event in _events(response.content)]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    record = gateway.record(new_id)
    assert (record["outcome"], record["verdict"]) == ("complete", "ok")
    assert 0 < record["ttft_ms"] < record["ttfv_ms"] <= record["e2e_ms"]
    assert record["completion_tokens"] > 300


def test_responses_think_not_at_all_where_the_route_says_off(vllm: RealVllm, gateway: GatewayProcess) -> None:
    body = {"model": vllm.model, "input": "你好", "temperature": 0}
    response = gateway.http.post("/quick/v1/responses", json=body)
    assert response.json()["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    assert "thinking=off" in response.headers["x-gateway-changes"]


def test_messages_think_not_at_all_where_the_route_says_off(vllm: RealVllm, gateway: GatewayProcess) -> None:
    body = {"model": vllm.model, "max_tokens": 500, "temperature": 0, "messages": [{"role": "user", "content": "你好"}]}
    response = gateway.http.post("/quick/v1/messages", json=body)
    assert [block["type"] for block in response.json()["content"]] == ["text"]
    assert "thinking=off" in response.headers["x-gateway-changes"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_burnt_budget_is_named_on_every_api(
    vllm: RealVllm, gateway: GatewayProcess, new_id: str, path: str, stream: bool
) -> None:
    body: dict[str, Any] = {"model": vllm.model, "temperature": 0, "stream": stream}
    if path == "/v1/responses":
        body |= {"input": "你好", "max_output_tokens": 64}
    else:
        body |= {"messages": [{"role": "user", "content": "你好"}], "max_tokens": 64}
    response = gateway.http.post(path, json=body, headers={"x-request-id": new_id})
    assert response.status_code == 200
    assert gateway.record(new_id)["verdict"] == "burnt_by_thinking"


@pytest.mark.parametrize("path, more", [("/tokenize", {"prompt": "你好, world"}), ("/detokenize", {"tokens": [5, 6]})])
def test_tokenizing_passes_as_it_is(
    vllm: RealVllm, gateway: GatewayProcess, path: str, more: dict[str, object]
) -> None:
    body = {"model": vllm.model, **more}
    direct, through = vllm.http.post(path, json=body), gateway.http.post(path, json=body)
    assert (through.status_code, through.content) == (200, direct.content)
