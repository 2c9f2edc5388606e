"""What the simulated model says, and what switches its thinking."""

from __future__ import annotations

import dataclasses
import random

import pytest

from gateway.sim import text
from gateway.sim.plan import Plan, Switches, Wish, make_plan, switch_state, thinking_of
from gateway.sim.profiles import DEEPSEEK_V4, FAST, PROFILES, QWEN3, Profile

BOTH = ("thinking", "enable_thinking")


@pytest.mark.parametrize(
    "keys,kwargs,effort,default,expected",
    [
        (BOTH, {}, None, True, True),
        (BOTH, {"thinking": False}, None, True, False),
        (BOTH, {"enable_thinking": False}, None, True, False),
        (BOTH, {"thinking": False, "enable_thinking": False}, None, True, False),
        (BOTH, {"thinking": False, "enable_thinking": True}, None, True, True),  # DeepSeek V4: any true key wins
        (BOTH, {"thinking": False}, "high", True, True),  # the effort injects enable_thinking: true
        (BOTH, {"thinking": False, "enable_thinking": False}, "high", True, False),  # an explicit key stops that
        (BOTH, {}, "none", True, False),
        (BOTH, {}, "low", False, True),
        (BOTH, {"thinking": None, "enable_thinking": "auto"}, None, True, True),  # both count as unset
        (("enable_thinking",), {"thinking": False}, None, True, True),  # Qwen3 does not know `thinking`
        (("enable_thinking",), {"enable_thinking": False}, None, True, False),
        (("thinking",), {"enable_thinking": True}, None, False, False),  # DeepSeek V3.1's template
        (("thinking_mode",), {"thinking_mode": "disabled"}, None, True, False),
        (("reasoning_effort",), {"enable_thinking": False}, "none", True, False),  # Ollama
        (("reasoning_effort",), {"enable_thinking": False}, None, True, True),
        ((), {"thinking": False}, "none", True, True),  # R1 cannot be switched
    ],
)
def test_a_switch_works_only_through_the_keys_the_model_reads(
    keys: tuple[str, ...], kwargs: dict[str, object], effort: str | None, default: bool, expected: bool
) -> None:
    assert switch_state(keys, Switches(kwargs, effort), default) is expected


def plan_of(profile: Profile, max_tokens: int = 10_000, prompt: str = "hello", **wish: object) -> Plan:
    thinks, parses = thinking_of(profile, Switches({}))
    fields = {"thinks": thinks, "parses": parses, "max_tokens": max_tokens, **wish}
    return make_plan(profile, Wish(**fields), prompt, seed=1)  # type: ignore[arg-type]


def test_a_thinking_model_says_its_thoughts_then_a_blank_then_the_answer() -> None:
    plan = plan_of(DEEPSEEK_V4, prompt="你好")
    assert plan.reasoning_tokens == 1252
    assert plan.text_of("reasoning").startswith("Step 1: ")
    content = plan.text_of("content")
    assert content.startswith("\n\n")
    assert len(content.strip()) == 30
    assert content.endswith("。")
    assert len(plan.tokens) == 1252 + 1 + 1 + 30 + 1  # thoughts, </think>, blank, answer, end of sequence
    assert (plan.tokens[-1].text, plan.finish) == ("", "stop")


def test_a_small_budget_is_burnt_by_thinking() -> None:
    plan = plan_of(DEEPSEEK_V4, max_tokens=64)
    assert plan.finish == "length"
    assert plan.text_of("content") == ""
    assert plan.reasoning_tokens == len(plan.tokens) == 64
    assert plan.tokens[-1].text, "the finish reason sits on the last word"


@pytest.mark.parametrize("max_tokens", [1, 2, 15, 16, 17, 18, 100])
def test_no_plan_is_longer_than_its_budget(max_tokens: int) -> None:
    plan = plan_of(FAST, max_tokens=max_tokens)
    assert len(plan.tokens) == min(max_tokens, 17)
    assert plan.finish == ("stop" if max_tokens >= 17 else "length")
    assert [token.finish for token in plan.tokens[:-1]] == [None] * (len(plan.tokens) - 1)


def test_ignoring_the_end_of_sequence_uses_the_whole_budget() -> None:
    assert len(plan_of(FAST, max_tokens=500, ignore_eos=True).tokens) == 500
    assert len(plan_of(DEEPSEEK_V4, max_tokens=2000, ignore_eos=True).tokens) == 2000


def test_hidden_reasoning_is_thought_and_paid_but_not_shown() -> None:
    plan = plan_of(QWEN3, include_reasoning=False)
    assert plan.text_of("reasoning") == ""
    assert plan.reasoning_tokens > 200


@pytest.mark.parametrize(
    "thinks,parses,field,reasoning,content_has",
    [
        (True, True, "reasoning", True, None),
        (True, False, "reasoning", False, "</think>"),  # parser off, model on: the thoughts leak
        (False, True, "reasoning", True, ""),  # parser on, model off: the answer passes for a thought
        (False, False, "reasoning", False, None),
        (True, True, "inline", False, "<think>"),
        (True, True, "inline_unopened", False, "</think>"),
    ],
)
def test_who_parses_decides_where_thoughts_end_up(
    thinks: bool, parses: bool, field: str, reasoning: bool, content_has: str | None
) -> None:
    profile = QWEN3.with_fields(reasoning_field=field)
    plan = plan_of(profile, thinks=thinks, parses=parses)
    assert bool(plan.text_of("reasoning")) is reasoning
    content = plan.text_of("content")
    if content_has == "":
        assert content == ""
    elif content_has is not None:
        assert content_has in content
    else:
        assert content
        assert "think>" not in content


def test_a_called_tool_gets_arguments_for_what_it_requires() -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    }
    plan = plan_of(FAST, tool={"name": "weather", "parameters": schema})
    assert plan.text_of("tool_name") == "weather"
    assert plan.text_of("tool_arguments") == '{"city":"Paris"}'
    assert plan.finish == "tool_calls"


def test_the_same_seed_says_the_same_and_another_prompt_something_else() -> None:
    wish = Wish(thinks=True, parses=True, max_tokens=5000)
    assert make_plan(QWEN3, wish, "a", 7) == make_plan(QWEN3, wish, "a", 7)
    lengths = {len(make_plan(QWEN3, wish, f"prompt {n}", 7).tokens) for n in range(20)}
    assert len(lengths) > 5


@pytest.mark.parametrize(
    "sample", ["", "hello world", "你好，世界", "a" * 1000, "多" * 999, "mixed 混合\n\t123456", "😀é\u2028"]
)
def test_pretend_tokens_join_to_the_text(sample: str) -> None:
    tokens = text.tokenize(sample)
    assert "".join(tokens) == sample
    assert all(tokens)


def test_a_chinese_character_costs_about_two_thirds_of_a_token() -> None:
    assert 0.45 <= len(text.tokenize("今天天气很好，我们去公园散步吧。" * 50)) / (16 * 50) <= 0.8
    english = "The quick brown fox jumps over the lazy dog and runs away. " * 50
    assert 0.18 <= len(text.tokenize(english)) / len(english) <= 0.3


@pytest.mark.parametrize("count", [0, 1, 2, 3, 29, 30, 31, 500])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_words_come_in_exactly_the_asked_number(count: int, language: text.Language) -> None:
    assert len(text.answer(count, language, random.Random(1))) == count
    assert len(text.thoughts(count, language, random.Random(1))) == count


def test_profiles_scale_their_times_and_keep_their_counts() -> None:
    demo = PROFILES["demo"]
    assert demo.decode_tokens_per_s == pytest.approx(10 * DEEPSEEK_V4.decode_tokens_per_s)
    assert demo.overhead_s == pytest.approx(DEEPSEEK_V4.overhead_s / 10)
    assert demo.thinking_tokens == DEEPSEEK_V4.thinking_tokens
    assert demo.keep_alive_s == 5
    with pytest.raises(ValueError, match="above 0"):
        FAST.scaled(0)


@pytest.mark.parametrize(
    "assignment,field,value",
    [
        ("slots=4", "slots", 4),
        ("decode_tokens_per_s=27.5", "decode_tokens_per_s", 27.5),
        ("thinking=on", "thinking", True),
        ("answer_tokens=3,9", "answer_tokens", (3, 9)),
        ("switch_keys=", "switch_keys", ()),
        ("parser_keys=thinking", "parser_keys", ("thinking",)),
        ("max_queued=none", "max_queued", None),
        ("max_queued=2", "max_queued", 2),
        ("reasoning_field=inline", "reasoning_field", "inline"),
        ("version=0.9", "version", "0.9"),
    ],
)
def test_a_field_of_a_profile_is_set_by_text(assignment: str, field: str, value: object) -> None:
    assert dataclasses.asdict(FAST.with_text(assignment))[field] == value


@pytest.mark.parametrize(
    "assignment,complaint",
    [
        ("slot=4", "one of: name, models"),
        ("slots", "NAME=VALUE"),
        ("slots=many", "slots"),
        ("slots=0", "above 0"),
        ("thinking=perhaps", "one of on, off"),
        ("engine=tgi", "vllm, llamacpp"),
        ("answer_tokens=9,3", "smaller first"),
        ("jitter=1", "jitter"),
        ("models=", "at least one"),
    ],
)
def test_a_wrong_field_or_value_is_explained(assignment: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        FAST.with_text(assignment)
