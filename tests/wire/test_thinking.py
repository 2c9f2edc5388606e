"""What is sent to whom so that it does not think, or does: a row here for each row of the families' table."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.kinds import Kind
from gateway.wire.thinking import (
    FAMILIES,
    FAMILY_NAMES,
    UNKNOWN,
    Edit,
    Remove,
    SetIn,
    find_family,
    guess_family,
    may_think,
    plan,
    strip_nothinking,
)

BOTH_OFF = {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}
BOTH_ON = {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}}
MAX = {"reasoning_effort": "max"}  # what a caller may send against the wish


def kwargs(**values: object) -> dict[str, object]:
    return {"chat_template_kwargs": values}


def done(edits: tuple[Edit, ...], data: Mapping[str, object]) -> dict[str, Any]:
    """The body after the edits."""
    result: dict[str, Any] = copy.deepcopy(dict(data))
    for edit in edits:
        target = result
        for key in edit.path[:-1]:
            target[key] = target.get(key) or {}
            target = target[key]
        if isinstance(edit, SetIn):
            target[edit.path[-1]] = edit.value
        else:
            del target[edit.path[-1]]
    return result


def asked(
    family: str,
    want: Literal["off", "on"],
    data: Mapping[str, object],
    engine: str = "vllm",
    kind: Kind = "chat",
) -> dict[str, Any]:
    return done(plan(find_family(family, ""), want, dict(data), engine, kind).edits, data)


# name, example models, off sends, on sends, default, can be switched off
ROWS = [
    ("deepseek_r1", ["deepseek-ai/DeepSeek-R1-0528", "DeepSeek-R1-Distill-Qwen-32B", "Qwen/QwQ-32B", "Qwen3-235B-A22B-Thinking-2507", "deepseek-r1:7b", "Step-5"], {}, {}, "on", False),
    ("deepseek_v31", ["deepseek-ai/DeepSeek-V3.1", "DeepSeek-V3.1-Terminus", "deepseek-v31"], BOTH_OFF, BOTH_ON, "off", True),
    ("deepseek_v32", ["deepseek-ai/DeepSeek-V3.2-Exp"], BOTH_OFF, BOTH_ON, "off", True),
    ("deepseek_v4", ["deepseek-v4", "DeepSeek-V4-Pro", "deepseek_v4"], BOTH_OFF, BOTH_ON, "on", True),
    ("deepseek_v41", ["DeepSeek-V4.1"], BOTH_OFF, BOTH_ON, "on", True),
    ("qwen3", ["Qwen/Qwen3-8B", "Qwen3.5-35B-A3B", "qwen3:8b", "qwen3-non-thinking", "Qwen3.6-27B"], BOTH_OFF, BOTH_ON, "on", True),
    ("glm45", ["zai-org/GLM-4.5-Air", "GLM-4.6", "glm-4.7-flash", "GLM-5"], BOTH_OFF, BOTH_ON, "on", True),
    ("glm53", ["zai-org/GLM-5.3"], {}, {}, "on", False),
    ("kimi_k2_thinking", ["moonshotai/Kimi-K2-Thinking"], {}, {}, "on", False),
    ("kimi_k25", ["moonshotai/Kimi-K2.5", "kimi-k2.6", "kimi-k2p5"], BOTH_OFF, BOTH_ON, "on", True),
    ("kimi_k3", ["moonshotai/Kimi-K3"], BOTH_OFF, BOTH_ON, "on", True),
    ("minimax_m2", ["MiniMaxAI/MiniMax-M2", "MiniMax-M2.1"], {}, {}, "on", False),
    ("minimax_m3", ["MiniMaxAI/MiniMax-M3"], kwargs(thinking_mode="disabled"), kwargs(thinking_mode="enabled"), "model", True),
    ("gpt_oss", ["openai/gpt-oss-120b", "gpt-oss:20b"], {"reasoning_effort": "low"}, {}, "on", False),
    ("gemma4", ["google/gemma-4-27b-it", "gemma4:27b"], BOTH_OFF, BOTH_ON, "off", True),
    ("granite32", ["ibm-granite/granite-3.2-8b-instruct"], BOTH_OFF, BOTH_ON, "off", True),
    ("granite42", ["ibm-granite/granite-4.2-small"], BOTH_OFF, BOTH_ON, "on", True),
    ("nemotron3", ["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B"], BOTH_OFF, BOTH_ON, "on", True),
    ("hunyuan_a13b", ["tencent/Hunyuan-A13B-Instruct"], BOTH_OFF, BOTH_ON, "on", True),
    ("hunyuan_v3", ["tencent/Hunyuan-V3", "hy3"], kwargs(reasoning_effort="no_think"), kwargs(reasoning_effort="high"), "off", True),
    ("hunyuan_v4", ["tencent/Hunyuan-V4", "Hy-v4"], kwargs(reasoning_effort="no_think"), kwargs(reasoning_effort="high"), "on", True),
    ("mistral", ["mistralai/Magistral-Small-2509", "Mistral-Large-3"], {}, {}, "model", False),
    ("seed_oss", ["ByteDance-Seed/Seed-OSS-36B-Instruct"], kwargs(thinking_budget=0, enable_thinking=False), kwargs(enable_thinking=True), "on", True),
    ("ernie45", ["baidu/ERNIE-4.5-21B-A3B-Thinking"], BOTH_OFF, BOTH_ON, "on", True),
    ("mimo", ["XiaomiMiMo/MiMo-7B-RL", "pfnet/plamo-3-nict-8b", "openbmb/MiniCPM-V-4_5"], BOTH_OFF, BOTH_ON, "on", True),
    ("ling3", ["inclusionAI/Ling-3-flash"], BOTH_OFF, BOTH_ON, "on", True),
    ("holo2", ["Hcompany/Holo2-30B-A3B"], BOTH_OFF, BOTH_ON, "on", True),
    ("poolside", ["poolside/Laguna-M"], BOTH_OFF, BOTH_ON, "off", True),
    ("step3", ["stepfun-ai/step3", "Step-3.5-Flash", "allenai/Olmo-3-32B-Think"], {}, {}, "on", False),
    ("k2_horizon", ["K2-Horizon"], {"reasoning_effort": "low"}, {}, "on", False),
    ("inkling", ["Inkling-1"], {"reasoning_effort": "none"}, {}, "on", True),
    ("cohere", ["CohereLabs/command-a-reasoning-08-2025", "c4ai-command-r"], kwargs(reasoning_type="disabled"), kwargs(reasoning_type="enabled"), "model", True),
    ("hf", [], BOTH_OFF, BOTH_ON, "on", True),
    ("unknown", ["llama-3.3-70b", "my-model", "mimosa", ""], BOTH_OFF, BOTH_ON, "model", True),
]  # fmt: skip


@pytest.mark.parametrize("name,models,off,on,default,can_switch", ROWS, ids=[row[0] for row in ROWS])
def test_each_family_gets_the_keys_it_listens_to(
    name: str, models: list[str], off: dict[str, object], on: dict[str, object], default: str, can_switch: bool
) -> None:
    """C085: the wrong key is accepted and ignored."""
    for model in models:
        assert guess_family(model).name == name, model
    family = find_family(name, "") if name != "unknown" else UNKNOWN
    assert (family.name, family.default, family.can_switch) == (name, default, can_switch)
    wanted_off = plan(family, "off", {}, "vllm")
    assert done(wanted_off.edits, {}) == off
    assert wanted_off.is_possible is can_switch
    assert bool(wanted_off.reason) is not can_switch
    wanted_on = plan(family, "on", {}, "vllm")
    assert done(wanted_on.edits, {}) == on
    assert wanted_on.is_possible
    for result, want in ((off, "off"), (on, "on")):
        assert plan(family, want, result, "vllm").edits == (), "asking twice changes nothing"  # type: ignore[arg-type]


def test_every_row_of_the_table_has_a_test_row() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    assert {row[0] for row in ROWS} == {family.name for family in (*FAMILIES, UNKNOWN)}


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.can_switch and not f.off_effort], ids=lambda f: f.name)
def test_off_takes_a_contradicting_effort_out_and_on_takes_none_out(family: Any) -> None:
    """vLLM derives the switch from the effort, so the two must not contradict each other."""
    off = done(
        plan(family, "off", {**MAX, **kwargs(foo=1, reasoning_effort="high")}, "vllm").edits,
        {**MAX, **kwargs(foo=1, reasoning_effort="high")},
    )
    assert "reasoning_effort" not in off
    assert off["chat_template_kwargs"].get("reasoning_effort") in (None, "no_think")
    assert off["chat_template_kwargs"]["foo"] == 1
    body = {"reasoning_effort": "none", **kwargs(foo=1, reasoning_effort="no_think")}
    on = done(plan(family, "on", body, "vllm").edits, body)
    assert "reasoning_effort" not in on
    assert on["chat_template_kwargs"].get("reasoning_effort") in (None, "high")
    assert on["chat_template_kwargs"]["foo"] == 1


def test_a_callers_effort_that_says_the_same_stays() -> None:
    assert asked("qwen3", "off", {"reasoning_effort": "none"})["reasoning_effort"] == "none"
    assert asked("qwen3", "on", {"reasoning_effort": "high"})["reasoning_effort"] == "high"
    assert asked("hunyuan_v3", "on", {"reasoning_effort": "low"}) == {"reasoning_effort": "low"}
    assert asked("hunyuan_v3", "on", kwargs(reasoning_effort="low")) == kwargs(reasoning_effort="low")
    assert asked("hunyuan_v3", "off", {"reasoning_effort": "none"}) == kwargs(reasoning_effort="no_think")


def test_a_callers_other_template_arguments_stay() -> None:
    """C087."""
    edits = plan(find_family("qwen3", ""), "off", kwargs(enable_thinking=True, foo=1), "vllm").edits
    assert edits == (
        SetIn(("chat_template_kwargs", "thinking"), False),
        SetIn(("chat_template_kwargs", "enable_thinking"), False),
    )


@pytest.mark.parametrize("value", ['{"enable_thinking": false}', [1], 5, True])
def test_template_arguments_that_are_no_object_are_left_to_the_upstream(value: object) -> None:
    """C087: a string is not parsed."""
    result = plan(UNKNOWN, "off", {"chat_template_kwargs": value, **MAX}, "vllm")
    assert (result.edits, result.is_possible) == ((), False)
    assert "`chat_template_kwargs` is not an object" in result.reason


def test_a_nested_extra_body_is_not_interpreted() -> None:
    """C087."""
    body = {"extra_body": kwargs(enable_thinking=True)}
    assert asked("qwen3", "off", body) == {**body, **BOTH_OFF}


@pytest.mark.parametrize("effort", [None, "none", "minimal", "medium", "high", "xhigh", "max", 3])
def test_gpt_oss_gets_the_least_effort_as_it_cannot_be_off(effort: object) -> None:
    result = plan(find_family("gpt_oss", ""), "off", {"reasoning_effort": effort}, "vllm")
    assert done(result.edits, {}) == {"reasoning_effort": "low"}
    assert (result.is_possible, result.label) == (False, "low")
    assert "gpt-oss cannot stop thinking" in result.reason
    on = plan(find_family("gpt_oss", ""), "on", {"reasoning_effort": "none"}, "vllm")
    assert on.edits == (Remove(("reasoning_effort",)),)


def test_models_that_always_think_are_sent_nothing() -> None:
    """`false` would switch off their parser only, and the thoughts would leak into the answer."""
    for name in ("kimi_k2_thinking", "deepseek_r1", "minimax_m2", "step3", "glm53"):
        assert asked(name, "off", {**MAX, **kwargs(foo=1)}) == {**MAX, **kwargs(foo=1)}
    assert plan(guess_family("Qwen3-30B-A3B-Thinking-2507"), "off", {}, "vllm").label == ""


def test_mistral_is_sent_nothing_but_asked_for_no_more() -> None:
    assert asked("mistral", "off", {"reasoning_effort": "high"}) == {}
    assert asked("mistral", "off", {"reasoning_effort": "none"}) == {"reasoning_effort": "none"}


def test_seed_oss_gets_its_budget_back_with_on() -> None:
    assert asked("seed_oss", "on", kwargs(thinking_budget=0, enable_thinking=False)) == kwargs(enable_thinking=True)
    assert asked("seed_oss", "on", kwargs(thinking_budget=512)) == kwargs(thinking_budget=512, enable_thinking=True)


# --- Engines -----------------------------------------------------------------------------------------------------


def test_ollama_gets_an_effort_and_no_template_arguments() -> None:
    for name in ("qwen3", "deepseek_r1", "hunyuan_v3", "mistral", "unknown"):
        result = plan(find_family(name, ""), "off", kwargs(a=1), "ollama")
        assert (result.edits, result.is_possible, result.label) == (
            (SetIn(("reasoning_effort",), "none"),),
            True,
            "off",
        )
    assert asked("qwen3", "off", {"reasoning": {"effort": "high", "x": 1}}, "ollama") == {
        "reasoning": {"effort": "none", "x": 1},
        "reasoning_effort": "none",
    }
    assert asked("qwen3", "on", {"reasoning_effort": "none", "reasoning": {"effort": "none"}}, "ollama") == {}
    assert asked("qwen3", "on", {}, "ollama") == {}
    low = plan(find_family("gpt_oss", ""), "off", {}, "ollama")
    assert (low.edits, low.is_possible, low.label) == ((SetIn(("reasoning_effort",), "low"),), False, "low")


def test_sglang_loses_the_reasoning_object_that_contradicts() -> None:
    says_on: list[dict[str, object]] = [{"enabled": True}, {"effort": "high"}]
    says_off: list[dict[str, object]] = [{"enabled": False, "effort": "high"}, {"effort": "none"}]
    for reasoning in says_on:
        assert asked("qwen3", "off", {"reasoning": reasoning}, "sglang") == BOTH_OFF
        assert asked("qwen3", "off", {"reasoning": reasoning}, "vllm") == {**BOTH_OFF, "reasoning": reasoning}
        assert asked("qwen3", "on", {"reasoning": reasoning}, "sglang") == {**BOTH_ON, "reasoning": reasoning}
    for reasoning in says_off:
        assert asked("qwen3", "on", {"reasoning": reasoning}, "sglang") == BOTH_ON
        assert asked("qwen3", "off", {"reasoning": reasoning}, "sglang") == {**BOTH_OFF, "reasoning": reasoning}


def test_llamacpp_gets_the_keys_and_for_gpt_oss_the_effort_as_an_argument_too() -> None:
    assert asked("qwen3", "off", {}, "llamacpp") == BOTH_OFF
    assert asked("gpt_oss", "off", {}, "llamacpp") == {"reasoning_effort": "low", **kwargs(reasoning_effort="low")}


# --- APIs --------------------------------------------------------------------------------------------------------


def test_anthropics_own_form_is_used_on_messages() -> None:
    body = {"thinking": {"type": "enabled", "budget_tokens": 2048}, "output_config": {"effort": "high", "format": {}}}
    assert asked("qwen3", "off", body, kind="messages") == {
        **BOTH_OFF, "thinking": {"type": "disabled"}, "output_config": {"format": {}},
    }  # fmt: skip
    assert asked("qwen3", "on", {"thinking": {"type": "disabled"}}, kind="messages") == BOTH_ON
    assert asked("qwen3", "on", {"thinking": {"type": "adaptive"}}, kind="messages") == {
        "thinking": {"type": "adaptive"},
        **BOTH_ON,
    }
    assert asked("gpt_oss", "off", {}, kind="messages") == {"output_config": {"effort": "low"}}
    assert asked("hunyuan_v4", "off", body, kind="messages") == {
        **kwargs(reasoning_effort="no_think"),
        "output_config": {"format": {}},
    }
    assert asked("qwen3", "off", {}, "ollama", "messages") == {"thinking": {"type": "disabled"}}
    assert asked("gpt_oss", "off", {}, "ollama", "messages") == {}


def test_responses_have_their_effort_inside_reasoning() -> None:
    body = {"reasoning": {"effort": "high", "summary": "auto"}}
    assert asked("qwen3", "off", body, kind="responses") == {"reasoning": {"summary": "auto"}, **BOTH_OFF}
    assert asked("gpt_oss", "off", body, kind="responses") == {"reasoning": {"effort": "low", "summary": "auto"}}
    assert asked("qwen3", "off", {}, "ollama", "responses") == {"reasoning": {"effort": "none"}}
    assert asked("qwen3", "on", {"reasoning": {"effort": "none"}}, kind="responses") == {"reasoning": {}, **BOTH_ON}
    blocked = plan(find_family("gpt_oss", ""), "off", {"reasoning": "high"}, "vllm", "responses")
    assert (blocked.edits, blocked.is_possible) == ((), False)


@pytest.mark.parametrize("kind", ["completions", "embeddings", "opaque"])
def test_other_requests_have_nothing_to_switch(kind: Kind) -> None:
    result = plan(UNKNOWN, "off", {}, "vllm", kind)
    assert (result.edits, result.is_possible, result.label) == ((), False, "")
    assert not may_think(UNKNOWN, {}, "vllm", kind)


# --- May it think? -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family,data,engine,kind,expected",
    [
        ("unknown", {}, "vllm", "chat", True),
        ("qwen3", {}, "vllm", "chat", True),
        ("qwen3", kwargs(enable_thinking=False), "vllm", "chat", False),
        ("qwen3", kwargs(thinking=False), "vllm", "chat", True),  # the wrong key
        ("qwen3", {"reasoning_effort": "none"}, "vllm", "chat", False),
        ("deepseek_v31", {}, "vllm", "chat", False),
        ("deepseek_v31", kwargs(thinking=True), "vllm", "chat", True),
        ("deepseek_v31", {"reasoning_effort": "low"}, "vllm", "chat", True),
        ("deepseek_v4", {}, "vllm", "chat", True),
        ("deepseek_v4", {}, "sglang", "chat", False),
        ("deepseek_v4", {"reasoning": {"enabled": True}}, "sglang", "chat", True),
        ("deepseek_v4", kwargs(thinking=False, enable_thinking=True), "vllm", "chat", True),
        ("deepseek_r1", kwargs(thinking=False), "vllm", "chat", True),
        ("deepseek_r1", {"reasoning_effort": "none"}, "ollama", "chat", False),
        ("deepseek_r1", kwargs(thinking=False), "ollama", "chat", True),
        ("minimax_m3", kwargs(thinking_mode="disabled"), "vllm", "chat", False),
        ("minimax_m3", kwargs(thinking_mode="enabled"), "vllm", "chat", True),
        ("minimax_m3", {}, "vllm", "chat", True),
        ("hunyuan_v4", kwargs(reasoning_effort="no_think"), "vllm", "chat", False),
        ("hunyuan_v3", kwargs(reasoning_effort="low"), "vllm", "chat", True),
        ("hunyuan_v3", {}, "vllm", "chat", False),
        ("seed_oss", kwargs(thinking_budget=0, enable_thinking=False), "vllm", "chat", False),
        ("gpt_oss", {"reasoning_effort": "low"}, "vllm", "chat", True),
        ("qwen3", {"thinking": {"type": "disabled"}}, "vllm", "messages", False),
        ("qwen3", {"thinking": {"type": "enabled"}}, "vllm", "messages", True),
        ("gemma4", {}, "vllm", "messages", False),
        ("qwen3", {"reasoning": {"effort": "none"}}, "vllm", "responses", False),
        ("qwen3", {"chat_template_kwargs": "text", "reasoning": 5}, "sglang", "chat", True),
    ],
)
def test_whether_a_request_may_think_is_read_off_its_switches(
    family: str, data: dict[str, object], engine: str, kind: Kind, expected: bool
) -> None:
    assert may_think(find_family(family, ""), data, engine, kind) is expected


odd_values = st.recursive(
    st.none() | st.booleans() | st.sampled_from(["none", "high", "disabled", "", 0, 1, 0.5]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["thinking", "enable_thinking", "reasoning_effort", "effort", "type", "enabled"]), inner
        )
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["chat_template_kwargs", "reasoning_effort", "reasoning", "thinking", "output_config"]),
        odd_values,
    ),
    st.sampled_from([*FAMILIES, UNKNOWN]),
    st.sampled_from(["vllm", "sglang", "llamacpp", "ollama", "openai"]),
    st.sampled_from(["chat", "responses", "messages", "completions"]),
)
def test_requests_of_any_shape_get_a_plan_that_is_done_once(
    data: dict[str, object], family: Any, engine: str, kind: Kind
) -> None:
    may_think(family, data, engine, kind)
    wants: tuple[Literal["off", "on"], ...] = ("off", "on")
    for want in wants:
        first = plan(family, want, data, engine, kind)
        again = plan(family, want, done(first.edits, data), engine, kind)
        assert again.edits == ()
        if first.is_possible and want == "off":
            assert may_think(family, done(first.edits, data), engine, kind) is False


# --- Names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model,expected",
    [
        ("deepseek-v4-nothinking", ("deepseek-v4", True)),
        ("org/m-nothinking", ("org/m", True)),
        ("deepseek-v4", ("deepseek-v4", False)),
        ("-nothinking", ("-nothinking", False)),
        ("", ("", False)),
        ("a-nothinking-b", ("a-nothinking-b", False)),
    ],
)
def test_the_suffix_asks_for_no_thinking(model: str, expected: tuple[str, bool]) -> None:
    assert strip_nothinking(model) == expected


def test_a_family_is_found_by_its_name_by_its_parser_or_by_the_model() -> None:
    assert find_family("auto", "Qwen/Qwen3-8B").name == "qwen3"
    assert find_family("qwen3", "anything").name == "qwen3"
    assert find_family("glm47", "anything").name == "glm45"
    assert find_family("kimi_k2", "Kimi-K2.5").name == "kimi_k25"
    assert find_family("kimi_k2", "Kimi-K2-Thinking").name == "kimi_k2_thinking"
    assert find_family("kimi_k2", "my-alias").name == "kimi_k2_thinking", "the row that sends less"
    assert find_family("typo", "Qwen3-8B") is UNKNOWN
    assert find_family("unknown", "Qwen3-8B") is UNKNOWN
    assert {"qwen3", "unknown", "kimi_k2", "openai_gptoss"} <= FAMILY_NAMES
    assert "auto" not in FAMILY_NAMES
