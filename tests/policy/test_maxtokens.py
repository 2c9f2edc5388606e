"""Token budgets: which field gets which number, and which requests are left alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import MaxTokens, Upstream
from gateway.policy.maxtokens import TokenPlan, caller_value, plan_max_tokens, whole_number
from gateway.wire.families import UNKNOWN, find_family
from gateway.wire.kinds import Kind

RULES = MaxTokens(default=1024, floor=256, ceiling=8192)
OFF = {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}


def planned(
    data: dict[str, object],
    rules: MaxTokens = RULES,
    *,
    field: str = "max_tokens",
    engine: str = "vllm",
    kind: Kind = "chat",
    family: str = "qwen3",
    allow_raise: bool = True,
) -> TokenPlan:
    upstream = Upstream.model_validate({"url": "http://127.0.0.1:8000", "max_tokens_field": field})
    return plan_max_tokens(
        rules,
        data,
        upstream=upstream,
        engine=engine,
        kind=kind,
        family=find_family(family, ""),
        allow_raise=allow_raise,
    )


A, B = "max_tokens", "max_completion_tokens"


@pytest.mark.parametrize(
    "data,fields,value,was",
    [
        ({A: 64}, (A,), 256, 64),
        ({B: 64}, (B,), 256, 64),
        ({A: 64, B: 64}, (B, A), 256, 64),
        ({A: 64, B: 100}, (B, A), 256, 100),
        ({A: 100, B: 300}, (A,), 300, 100),  # the one that servers prefer decides, and both say the same
        ({A: 99999, B: 300}, (A,), 300, 99999),
        ({A: 300}, (), 300, None),
        ({A: 99999}, (A,), 8192, 99999),
        ({A: 1e5}, (A,), 8192, 100000),
        ({A: 1e30}, (A,), 8192, int(1e30)),
        ({A: 8192.0}, (), 8192, None),
        ({}, (A,), 1024, None),
        ({A: None}, (A,), 1024, None),
        ({A: None, B: 64}, (B,), 256, 64),
        ({A: "64"}, (), None, None),
        ({A: 10.5}, (), None, None),
        ({A: True}, (), None, None),
        ({A: [1]}, (), None, None),
        ({A: float("inf")}, (), None, None),
        ({A: "64", B: 99999}, (B,), 8192, 99999),
        ({A: 0}, (), 0, None),
        ({A: -1}, (), -1, None),
    ],
)
def test_the_callers_field_is_edited(
    data: dict[str, object], fields: tuple[str, ...], value: int | None, was: int | None
) -> None:
    """C093."""
    result = planned(data)
    assert (set(result.fields), result.value, result.was) == (set(fields), value, was)


@given(
    st.dictionaries(st.sampled_from([A, B]), st.none() | st.integers(-5, 20000) | st.floats(1, 20000)),
    st.sampled_from(["vllm", "ollama"]),
)
def test_two_fields_never_end_up_different(data: dict[str, Any], engine: str) -> None:
    """C093."""
    result = planned(data, engine=engine)
    after = {**data, **dict.fromkeys(result.fields, result.value)}
    numbers = {number for name in (A, B) if (number := whole_number(after.get(name))) is not None}
    assert len(numbers) <= 1 or result.value is None


@pytest.mark.parametrize(
    "data",
    [
        {A: 1, "logprobs": True, "top_logprobs": 5},
        {A: 64, "logprobs": True},
        {A: 64, "top_logprobs": 2},
        {A: 64, "n": 2},
        {A: 5},
        {A: 16},
        {A: 16, **OFF},
        {A: 64, **OFF},
        {A: 64, "reasoning_effort": "none"},
    ],
)
def test_a_small_budget_that_is_meant_stays_small(data: dict[str, object]) -> None:
    """C094: classifiers, probes such as Dify's, and requests that do not think."""
    assert planned(data).fields == ()
    assert planned(data).value == data[A]


@pytest.mark.parametrize("data", [{A: 17}, {A: 255, "n": 1}, {A: 64, "logprobs": False}, {A: 64, "n": None}])
def test_a_small_budget_is_raised_where_thinking_may_run(data: dict[str, object]) -> None:
    """C094."""
    result = planned(data)
    assert (result.value, result.is_raised) == (256, True)


@pytest.mark.parametrize(
    "family,engine,raised",
    [
        ("unknown", "vllm", True),
        ("deepseek_v31", "vllm", False),
        ("deepseek_r1", "vllm", True),
        ("deepseek_v4", "sglang", False),
    ],
)
def test_the_floor_follows_the_familys_default(family: str, engine: str, raised: bool) -> None:
    assert planned({A: 64}, family=family, engine=engine).is_raised is raised


def test_a_larger_budget_that_made_the_prompt_too_long_can_be_taken_back() -> None:
    """C092: the second sending carries the caller's own value; the ceiling still holds."""
    assert planned({A: 300}, MaxTokens(floor=1024)).is_raised
    assert planned({A: 300}, MaxTokens(floor=1024), allow_raise=False) == TokenPlan(300)
    assert planned({}, allow_raise=False) == TokenPlan(None)
    assert planned({}).is_raised
    assert planned({A: 99999}, allow_raise=False) == TokenPlan(8192, (A,), 99999)
    assert not planned({A: 99999}).is_raised


def test_without_a_field_the_upstreams_own_is_added() -> None:
    """C093."""
    assert planned({}, field=B).fields == (B,)
    assert planned({}, field=B, engine="ollama").fields == (A,)
    assert planned({}, kind="responses").fields == ("max_output_tokens",)
    assert planned({}, kind="messages", field=B).fields == (A,)
    assert planned({}, kind="completions", field=B).fields == (A,)


def test_no_limit_at_all_is_above_the_ceiling() -> None:
    assert planned({}, MaxTokens(ceiling=500)) == TokenPlan(500, (A,), None, is_raised=True)
    assert planned({}, MaxTokens(ceiling=500), kind="completions") == TokenPlan(None)  # ends at 16 by itself
    assert planned({}, MaxTokens(floor=500)) == TokenPlan(None)
    assert planned({A: -1}, engine="llamacpp") == TokenPlan(8192, (A,), -1, is_raised=True)


def test_a_small_default_is_raised_to_the_floor_where_thinking_may_run() -> None:
    rules = MaxTokens(default=100, floor=200)
    assert planned({}, rules).value == 200
    assert planned(dict(OFF), rules).value == 100


def test_each_api_has_its_own_field() -> None:
    """C093."""
    assert planned({"max_output_tokens": 64}, kind="responses").fields == ("max_output_tokens",)
    assert planned({"max_output_tokens": 64, A: 5}, kind="responses").value == 256
    assert planned({A: 64}, kind="messages").value == 256
    assert planned({A: 64}, kind="completions").value == 64, "no chat template, no thinking"
    assert planned({A: 99999}, kind="completions").value == 8192


def test_ollama_gets_the_one_field_it_knows() -> None:
    assert planned({B: 99999}, engine="ollama") == TokenPlan(8192, (A, B), 99999)
    assert planned({B: 300}, engine="ollama") == TokenPlan(300, (A,), None)
    assert planned({A: 300, B: 500}, engine="ollama") == TokenPlan(300, (B,), 500)


def test_the_callers_own_budget_is_read_by_the_field_that_counts() -> None:
    assert caller_value({A: 5, B: 7}, "vllm", "chat") == 7
    assert caller_value({A: 5, B: 7}, "ollama", "chat") == 5
    assert caller_value({"max_output_tokens": 9}, "vllm", "responses") == 9
    assert caller_value({A: "x"}, "vllm", "chat") is None
    assert caller_value({}, "vllm", "chat") is None
    assert caller_value({A: 5}, "vllm", "embeddings") is None
    assert UNKNOWN.default == "model"
