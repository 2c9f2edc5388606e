"""50 real prompts, each with the model's own thinking and with `thinking: off`: what it costs, and where the time goes.

The two requests of a prompt follow each other while others run beside them, so that noise of the machine meets both.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
import uvloop
from openai import AsyncOpenAI

from tests.vllm.gateway_process import GatewayProcess
from tests.vllm.real_vllm import RealVllm

pytestmark = pytest.mark.vllm

AT_ONCE = 4
MAX_TOKENS = 1024  # enough for this model to think to the end; bounds the few prompts on which it does not
SEGMENTS = ("upload_ms", "gateway_ms", "connect_ms", "wait_ms", "reasoning_ms", "decode_ms", "tail_ms")


@dataclass
class Answer:
    """What the caller saw of one stream, and the gateway's record of it."""

    topic: str
    seconds: float
    text: str
    reasoning: str
    usage: Any
    server: dict[str, float]  # vLLM's own `metrics` of this request
    headers: Any
    record: dict[str, Any]


@dataclass
class Run:
    default: list[Answer]
    quick: list[Answer]
    page_before: dict[str, float]
    page_after: dict[str, float]

    @property
    def all(self) -> list[Answer]:
        return self.default + self.quick


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """Filled by the first test that needs it."""
    return {}


@pytest.fixture
def run(runs: dict[str, Run], vllm: RealVllm, gateway: GatewayProcess, prompts: list[dict[str, Any]]) -> Run:
    if "run" not in runs:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # leaves the thread's own loop alone
            runs["run"] = runner.run(_ask_all(vllm.model, gateway, prompts))
    return runs["run"]


async def _ask_all(model: str, gateway: GatewayProcess, prompts: list[dict[str, Any]]) -> Run:
    slots = asyncio.Semaphore(AT_ONCE)
    async with (
        AsyncOpenAI(base_url=f"{gateway.url}/v1", max_retries=0, timeout=240) as default,
        AsyncOpenAI(base_url=f"{gateway.url}/quick/v1", max_retries=0, timeout=240) as quick,
    ):

        async def both(row: dict[str, Any]) -> tuple[Answer, Answer]:
            async with slots:
                return await _ask(default, gateway, model, row), await _ask(quick, gateway, model, row)

        before = _page(gateway)
        pairs = await asyncio.gather(*(both(row) for row in prompts))
        return Run([pair[0] for pair in pairs], [pair[1] for pair in pairs], before, _page(gateway))


async def _ask(client: AsyncOpenAI, gateway: GatewayProcess, model: str, row: dict[str, Any]) -> Answer:
    started = time.monotonic()
    raw = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": row["prompt"]}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reasoning, usage = "", "", None
    server: dict[str, float] = {}
    async for chunk in raw.parse():
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasoning += (choice.delta.model_extra or {}).get("reasoning") or ""
        if chunk.usage is not None:
            usage, server = chunk.usage, (chunk.model_extra or {}).get("metrics") or {}
    seconds = time.monotonic() - started
    record = await asyncio.to_thread(gateway.record, raw.headers["x-request-id"])
    return Answer(row["topic"], seconds, text, reasoning, usage, server, raw.headers, record)


def _page(gateway: GatewayProcess) -> dict[str, float]:
    """The numbers of the metrics page that these requests move."""
    causes = ("queue", "prefill", "network", "input", "unexplained")
    numbers = {
        f"{cause}_{part}": gateway.metric(f"gateway_wait_seconds_{part}", cause=cause, source="server")
        for cause in causes
        for part in ("count", "sum")
    }
    numbers |= {route: gateway.metric("gateway_tokens_total", route=route, kind="reasoning") for route in ROUTES}
    numbers["ttft_count"] = gateway.metric("gateway_ttft_seconds_count")
    numbers["violations"] = gateway.metric("gateway_thinking_violations_total")
    return numbers


ROUTES = ("client", "quick")


def test_every_prompt_of_every_language_is_answered_on_both_routes(run: Run) -> None:
    assert Counter(answer.topic for answer in run.default) == {"zh": 20, "en": 15, "code": 15}
    assert [answer.record["outcome"] for answer in run.all] == ["complete"] * 100
    assert all(answer.text.strip() for answer in run.quick)
    assert all(answer.text.strip() or answer.record["verdict"] == "burnt_by_thinking" for answer in run.default)
    assert sum(bool(answer.text.strip()) for answer in run.default) >= 40


def test_by_default_the_model_thinks_for_hundreds_of_tokens_and_with_off_for_none(run: Run) -> None:
    thought = [answer.usage.completion_tokens_details.reasoning_tokens for answer in run.default]
    assert min(thought) > 300, sorted(thought)
    assert all(answer.reasoning for answer in run.default)
    assert [answer.usage.completion_tokens_details.reasoning_tokens for answer in run.quick] == [0] * 50
    assert not any(answer.reasoning for answer in run.quick)


def test_the_answer_is_complete_at_least_five_times_sooner_with_thinking_off(run: Run) -> None:
    by_the_caller = [(a.seconds, b.seconds) for a, b in zip(run.default, run.quick, strict=True)]
    by_the_gateway = [(a.record["e2e_ms"], b.record["e2e_ms"]) for a, b in zip(run.default, run.quick, strict=True)]
    for pairs in (by_the_caller, by_the_gateway):
        assert median(slow / fast for slow, fast in pairs) >= 5
        assert median(slow for slow, _ in pairs) >= 5 * median(fast for _, fast in pairs)


def test_the_route_that_switches_thinking_off_says_so_and_the_other_changes_nothing(run: Run) -> None:
    assert all("thinking=off" in answer.headers["x-gateway-changes"] for answer in run.quick)
    assert not any("thinking" in answer.headers.get("x-gateway-changes", "") for answer in run.default)
    assert {answer.headers["x-gateway-route"] for answer in run.default} == {"client"}
    assert run.page_after["violations"] == run.page_before["violations"]


def test_the_segments_of_every_request_add_up_to_its_time(run: Run) -> None:
    for answer in run.all:
        record = answer.record
        assert sum(record[name] for name in SEGMENTS) == pytest.approx(record["e2e_ms"], abs=0.1)
        to_token = sum(record[name] for name in ("upload_ms", "gateway_ms", "connect_ms", "wait_ms"))
        assert to_token == pytest.approx(record["ttft_ms"], abs=0.1)
        if answer.text.strip():
            assert to_token + record["reasoning_ms"] == pytest.approx(record["ttfv_ms"], abs=0.1)


def test_the_recorded_time_lies_within_what_the_caller_measured(run: Run) -> None:
    """Both clocks are this machine's monotonic one; the caller's starts before ours and stops after it."""
    assert all(answer.record["e2e_ms"] <= answer.seconds * 1000 for answer in run.all)
    assert median(answer.record["e2e_ms"] / answer.seconds / 1000 for answer in run.default) > 0.8


def test_with_thinking_the_time_is_named_reasoning_and_without_there_is_none(run: Run) -> None:
    assert median(answer.record["reasoning_ms"] / answer.record["e2e_ms"] for answer in run.default) > 0.5
    assert all(answer.record["reasoning_ms"] == 0 for answer in run.quick)
    assert all(answer.record["ttfv_ms"] == answer.record["ttft_ms"] for answer in run.quick)


def test_the_wait_is_split_into_queue_and_prefill_by_the_servers_own_numbers(run: Run) -> None:
    """A part is cut where the server's numbers, taken by its own clock, are more than the whole wait."""
    for answer in run.all:
        causes, wait = answer.record["wait_causes"], answer.record["wait_ms"]
        queue, prefill = answer.server["queue_time_ms"], answer.server["time_to_first_token_ms"]
        assert causes["queue_ms"] == pytest.approx(min(queue, wait), abs=0.01)
        assert causes["prefill_ms"] == pytest.approx(min(prefill, wait - causes["queue_ms"]), abs=0.01)
        assert sum(causes.values()) == pytest.approx(wait, abs=0.01)
        assert min(causes.values()) >= 0


def test_the_metrics_page_holds_the_same_split(run: Run) -> None:
    before, after = run.page_before, run.page_after
    assert after["ttft_count"] - before["ttft_count"] == 100
    for cause in ("queue", "prefill"):
        total = sum(answer.record["wait_causes"][f"{cause}_ms"] for answer in run.all) / 1000
        assert after[f"{cause}_count"] - before[f"{cause}_count"] == 100
        assert after[f"{cause}_sum"] - before[f"{cause}_sum"] == pytest.approx(total, abs=0.001)


def test_token_counts_are_those_of_the_server(run: Run) -> None:
    for answer in run.all:
        record, usage = answer.record, answer.usage
        assert record["prompt_tokens"] == usage.prompt_tokens
        assert record["completion_tokens"] == usage.completion_tokens
        assert record["reasoning_tokens"] == usage.completion_tokens_details.reasoning_tokens
    thought = sum(answer.record["reasoning_tokens"] for answer in run.default)
    assert run.page_after["client"] - run.page_before["client"] == thought
    assert run.page_after["quick"] == run.page_before["quick"]


def test_a_caller_that_asks_for_no_thinking_is_overruled_where_the_route_says_on(
    vllm: RealVllm, gateway: GatewayProcess
) -> None:
    body = {
        "model": vllm.model, "temperature": 0, "max_tokens": MAX_TOKENS,
        "messages": [{"role": "user", "content": "你好"}], "chat_template_kwargs": {"thinking": False},
    }  # fmt: skip
    left_alone = gateway.http.post("/v1/chat/completions", json=body)
    overruled = gateway.http.post("/deep/v1/chat/completions", json=body)
    assert left_alone.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert overruled.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] > 300
    assert "thinking=on" in overruled.headers["x-gateway-changes"]


def test_a_model_name_that_ends_in_nothinking_asks_for_off(vllm: RealVllm, gateway: GatewayProcess) -> None:
    body = {"model": f"{vllm.model}-nothinking", "messages": [{"role": "user", "content": "你好"}]}
    response = gateway.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert "thinking=off" in response.headers["x-gateway-changes"]


def test_a_caller_may_see_the_times_of_its_own_request(vllm: RealVllm, gateway: GatewayProcess, new_id: str) -> None:
    body = {"model": vllm.model, "stream": True, "messages": [{"role": "user", "content": "你好"}]}
    headers = {"x-request-id": new_id, "x-gateway-timing": "trailer"}
    response = gateway.http.post("/quick/v1/chat/completions", json=body, headers=headers)
    stream, _, trailer = response.text.partition("data: [DONE]\n\n")
    assert stream.endswith("\n\n")
    assert trailer.startswith(": timing {")
    told = json.loads(trailer.removeprefix(": timing "))
    assert sum(told[name] for name in SEGMENTS) == pytest.approx(told["e2e_ms"], abs=0.1)
    record = gateway.record(new_id)
    assert [told[name] for name in SEGMENTS] == pytest.approx([record[name] for name in SEGMENTS], abs=0.002)
    assert gateway.http.get(f"/gateway/requests/{new_id}").json()["wait_causes"] == record["wait_causes"]
