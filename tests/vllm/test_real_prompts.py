"""What the model gets to read: cleaned prompts, the same on every turn, so that the prefix cache still works."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.gateway_process import GatewayProcess
from tests.vllm.real_vllm import RealVllm

pytestmark = pytest.mark.vllm

CHAT = "/v1/chat/completions"
Chat = Callable[..., dict[str, Any]]


def _prompt_tokens(http: Any, body: dict[str, Any]) -> int:
    count: int = http.post(CHAT, json={**body, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    return count


def test_a_run_of_dashes_reaches_the_model_as_one_chinese_dash(
    vllm: RealVllm, gateway: GatewayProcess, chat: Chat
) -> None:
    clean, noisy = chat("第一章——开始"), chat(f"第一章{'—' * 300}开始")
    assert _prompt_tokens(vllm.http, noisy) > _prompt_tokens(vllm.http, clean) + 100
    assert _prompt_tokens(gateway.http, noisy) == _prompt_tokens(vllm.http, clean)
    response = gateway.http.post(CHAT, json={**noisy, "max_tokens": 1})
    assert response.headers["x-gateway-changes"] == "clean=dashes:1"


def test_control_characters_do_not_reach_the_model(vllm: RealVllm, gateway: GatewayProcess, chat: Chat) -> None:
    clean, noisy = chat("read this"), chat("read\x00\x1b\x07 this")
    assert _prompt_tokens(gateway.http, noisy) == _prompt_tokens(vllm.http, clean)
    assert _prompt_tokens(vllm.http, noisy) > _prompt_tokens(vllm.http, clean)


def test_code_reaches_the_model_with_its_dashes(vllm: RealVllm, gateway: GatewayProcess, chat: Chat) -> None:
    code = chat(f"look:\n```text\n{'—' * 40}\n```\n")
    assert _prompt_tokens(gateway.http, code) == _prompt_tokens(vllm.http, code)


def test_the_second_turn_finds_the_first_in_the_prefix_cache(
    vllm: RealVllm, gateway: GatewayProcess, chat: Chat
) -> None:
    """Dashes in the first turn are cleaned on both, and in the same way."""
    first = chat(f"{uuid.uuid4()} {'—' * 30} " + "remember these words and answer. " * 40, max_tokens=8)
    ids = [uuid.uuid4().hex for _ in range(2)]
    gateway.http.post(CHAT, json=first, headers={"x-request-id": ids[0]})
    second = {
        **first,
        "stream": True,
        "messages": [
            *first["messages"],
            {"role": "assistant", "content": "yes."},
            {"role": "user", "content": "and now?"},
        ],
    }
    gateway.http.post(CHAT, json=second, headers={"x-request-id": ids[1]})
    cold, warm = (gateway.record(request_id) for request_id in ids)
    assert cold["cached_tokens"] == 0
    assert warm["cached_tokens"] >= cold["prompt_tokens"] // 2
    assert "clean=dashes:1" in warm["changes"]
