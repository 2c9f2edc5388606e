"""Token budgets against a real server: burnt ones are noticed, raised, rescued; refused ones are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI

from tests.vllm.gateway_process import GatewayProcess
from tests.vllm.real_vllm import RealVllm

pytestmark = pytest.mark.vllm

CHAT = "/v1/chat/completions"
Chat = Callable[..., dict[str, Any]]


def _burnt(gateway: GatewayProcess, route: str = "client") -> float:
    return gateway.metric("gateway_empty_answers_total", route=route, kind="burnt_by_thinking")


def test_a_plain_answer_whose_budget_went_into_thinking_is_named(
    gateway: GatewayProcess, chat: Chat, new_id: str
) -> None:
    before = _burnt(gateway)
    response = gateway.http.post(CHAT, json=chat("你好", max_tokens=64), headers={"x-request-id": new_id})
    choice = response.json()["choices"][0]
    assert (response.status_code, choice["message"]["content"], choice["finish_reason"]) == (200, None, "length")
    record = gateway.record(new_id)
    assert (record["outcome"], record["verdict"]) == ("complete", "burnt_by_thinking")
    assert record["completion_tokens"] == record["reasoning_tokens"] == 64
    assert _burnt(gateway) == before + 1


def test_a_stream_whose_budget_went_into_thinking_is_named(
    vllm: RealVllm, gateway: GatewayProcess, new_id: str
) -> None:
    before = _burnt(gateway)
    with OpenAI(base_url=f"{gateway.url}/v1", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=vllm.model, max_tokens=64, stream=True, temperature=0,
            messages=[{"role": "user", "content": "你好"}], extra_headers={"x-request-id": new_id},
        )  # fmt: skip
        seen = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert seen == ""
    record = gateway.record(new_id)
    assert (record["outcome"], record["verdict"]) == ("complete", "burnt_by_thinking")
    assert "ttfv_ms" not in record
    assert record["ttft_ms"] + record["reasoning_ms"] == pytest.approx(record["e2e_ms"], abs=0.1)
    assert _burnt(gateway) == before + 1


def test_a_floor_leaves_the_thinking_model_room_for_an_answer(gateway: GatewayProcess, chat: Chat) -> None:
    response = gateway.http.post("/floor" + CHAT, json=chat("你好", max_tokens=64))
    assert response.headers["x-gateway-changes"] == "max_tokens=64>2048"
    assert response.json()["choices"][0]["message"]["content"].strip()


def test_a_floor_leaves_a_probes_few_tokens_alone(gateway: GatewayProcess, chat: Chat) -> None:
    response = gateway.http.post("/floor" + CHAT, json=chat("你好", max_tokens=5))
    assert "x-gateway-changes" not in response.headers
    assert response.json()["usage"]["completion_tokens"] == 5


def test_a_floor_leaves_a_request_alone_that_does_not_think(gateway: GatewayProcess, chat: Chat) -> None:
    body = chat("你好", max_tokens=64, chat_template_kwargs={"thinking": False})
    response = gateway.http.post("/floor" + CHAT, json=body)
    assert "x-gateway-changes" not in response.headers
    assert response.json()["choices"][0]["message"]["content"].strip()


def test_a_default_counts_only_where_the_caller_said_nothing(gateway: GatewayProcess, chat: Chat) -> None:
    silent = gateway.http.post("/filled-in" + CHAT, json=chat("你好"))
    assert silent.headers["x-gateway-changes"] == "max_tokens=32"
    assert silent.json()["usage"]["completion_tokens"] == 32
    explicit = gateway.http.post("/filled-in" + CHAT, json=chat("你好", max_completion_tokens=40))
    assert explicit.json()["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_ceiling_holds_whatever_the_field_is_called(gateway: GatewayProcess, chat: Chat, field: str) -> None:
    response = gateway.http.post("/ceiling" + CHAT, json=chat("你好", **{field: 4000}))
    assert response.headers["x-gateway-changes"] == "max_tokens=4000>48"
    assert response.json()["usage"]["completion_tokens"] == 48


def test_a_floor_that_does_not_fit_the_context_gives_way_to_the_callers_own_budget(
    gateway: GatewayProcess, chat: Chat, new_id: str
) -> None:
    response = gateway.http.post("/too-high" + CHAT, json=chat("你好", max_tokens=40), headers={"x-request-id": new_id})
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 40
    assert response.headers["x-gateway-attempts"] == "2"
    assert "floor_backed_off" in response.headers["x-gateway-changes"]
    assert gateway.record(new_id)["attempts"] == 2


def test_a_burnt_plain_answer_is_rescued_by_asking_again_without_thinking(
    gateway: GatewayProcess, chat: Chat, new_id: str
) -> None:
    response = gateway.http.post("/rescue" + CHAT, json=chat("你好", max_tokens=64), headers={"x-request-id": new_id})
    choice = response.json()["choices"][0]
    assert choice["message"]["content"].strip()
    assert choice["finish_reason"] == "stop"
    assert "rescue" in response.headers["x-gateway-changes"]
    assert response.headers["x-gateway-attempts"] == "2"
    record = gateway.record(new_id)
    assert (record["verdict"], record["attempts"]) == ("ok", 2)


def test_an_answer_that_is_none_the_worse_for_thinking_is_not_asked_for_again(
    gateway: GatewayProcess, chat: Chat
) -> None:
    response = gateway.http.post("/rescue" + CHAT, json=chat("你好"))
    assert response.json()["choices"][0]["message"]["content"].strip()
    assert response.headers["x-gateway-attempts"] == "1"
