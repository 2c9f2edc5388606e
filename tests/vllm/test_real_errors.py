"""A real server's refusals: relayed as they are, and never a stream that begins with an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.vllm.gateway_process import GatewayProcess
from tests.vllm.real_vllm import RealVllm

pytestmark = pytest.mark.vllm

CHAT = "/v1/chat/completions"
Chat = Callable[..., dict[str, Any]]

# What vLLM notices only in its engine: it has said 200 by then, and the error is the stream's first event.
ENGINE_REFUSES: list[Mapping[str, object]] = [
    {"structured_outputs": {"regex": "((["}},
    {"logit_bias": {"999999": 5}},
]


def _refusals(model: str) -> dict[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "hi"}]
    return {
        "context_overflow": {"model": model, "messages": [{"role": "user", "content": "word " * 20_000}]},
        "budget_overflow": {"model": model, "messages": messages, "max_tokens": 100_000},
        "unknown_model": {"model": "no-such-model", "messages": messages},
        "bad_parameter": {"model": model, "messages": messages, "temperature": -3},
        "bad_messages": {"model": model, "messages": "hi"},
    }


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    "case, status",
    [
        ("context_overflow", 400), ("budget_overflow", 400), ("unknown_model", 404), ("bad_parameter", 400),
        ("bad_messages", 400),
    ],
)  # fmt: skip
def test_the_servers_own_refusal_is_relayed_as_it_is(
    vllm: RealVllm, gateway: GatewayProcess, new_id: str, case: str, status: int, stream: bool
) -> None:
    body = {**_refusals(vllm.model)[case], "stream": stream}
    direct = vllm.http.post(CHAT, json=body)
    through = gateway.http.post(CHAT, json=body, headers={"x-request-id": new_id})
    assert (through.status_code, through.content) == (direct.status_code, direct.content)
    assert through.status_code == status
    assert through.headers["content-type"] == direct.headers["content-type"]
    assert gateway.record(new_id)["outcome"] == "refused"


@pytest.mark.parametrize("more", ENGINE_REFUSES, ids=lambda more: next(iter(more)))
def test_an_error_as_the_first_event_of_a_stream_becomes_a_status(
    vllm: RealVllm, gateway: GatewayProcess, chat: Chat, new_id: str, more: dict[str, object]
) -> None:
    body = chat("hi", stream=True, **more)
    direct = vllm.http.post(CHAT, json=body)
    assert (direct.status_code, direct.content[:8]) == (200, b'data: {"'), "what vLLM does, and what this test is about"
    through = gateway.http.post(CHAT, json=body, headers={"x-request-id": new_id})
    assert through.status_code == 400
    assert through.headers["content-type"] == "application/json"
    assert direct.text.startswith(f"data: {through.text}\n")
    assert through.json()["error"]["message"]
    record = gateway.record(new_id)
    assert (record["status"], record["outcome"], record["reason"]) == (400, "refused", "stream_error")
    assert "ttft_ms" not in record


@pytest.mark.parametrize("more", ENGINE_REFUSES, ids=lambda more: next(iter(more)))
def test_openai_raises_before_the_stream_instead_of_inside_it(
    vllm: RealVllm, gateway: GatewayProcess, more: dict[str, object]
) -> None:
    with OpenAI(base_url=f"{gateway.url}/v1", max_retries=0) as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=vllm.model, stream=True, messages=[{"role": "user", "content": "hi"}], extra_body=more
        )
    assert caught.value.status_code == 400
    assert caught.value.response.headers["x-gateway-upstream"] == "vllm"


def test_openai_names_the_model_that_is_not_there(gateway: GatewayProcess) -> None:
    with OpenAI(base_url=f"{gateway.url}/v1", max_retries=0) as client, pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "hi"}])
    assert "no-such-model" in str(caught.value)


def test_an_endpoint_that_this_server_lacks_is_its_own_404(vllm: RealVllm, gateway: GatewayProcess) -> None:
    body = {"model": vllm.model, "input": "hi"}
    direct, through = vllm.http.post("/v1/embeddings", json=body), gateway.http.post("/v1/embeddings", json=body)
    assert through.status_code == direct.status_code
    assert through.status_code in (400, 404)
    told = through.json()
    assert told["error"]["message"], "flat as `detail`, some SDKs would show a bare number (client-contract §6)"
    assert {name: value for name, value in told.items() if name != "error"} == {
        name: value for name, value in direct.json().items() if name != "error"
    }


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/sleep", "/load", "/version", "/v1/load_lora_adapter"])
def test_the_servers_admin_paths_are_closed(gateway: GatewayProcess, path: str) -> None:
    response = gateway.http.post(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "no_route"


def test_invalid_json_never_reaches_the_server(gateway: GatewayProcess, new_id: str) -> None:
    response = gateway.http.post(CHAT, content=b'{"model": "x",', headers={"x-request-id": new_id})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"
    assert gateway.record(new_id)["attempts"] == 0
