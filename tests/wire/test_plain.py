"""Whole JSON answers: usage, times, verdicts, and errors under status 200."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire import plain
from gateway.wire.answer import ServerTimes, Usage, Verdict
from gateway.wire.kinds import Kind
from gateway.wire.plain import LARGE_BYTES, PlainAnswer, read_plain


def chat(message: object, finish: object = "stop", **extra: object) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": finish}], **extra}).encode()


def test_a_vllm_answer_tells_usage_times_and_lengths() -> None:
    answer = read_plain("chat", chat(
        {"role": "assistant", "content": "\n\nShort.", "reasoning": "Step 1: think.", "refusal": None, "audio": None},
        usage={"prompt_tokens": 25, "completion_tokens": 450, "completion_tokens_details": {"reasoning_tokens": 440}},
        metrics={"queue_time_ms": 0.5, "time_to_first_token_ms": 4, "generation_time_ms": 1648},
    ))  # fmt: skip
    assert answer.usage == Usage(25, None, 450, 440)
    assert answer.server == ServerTimes(0.5, 4, 1648)
    assert (answer.verdict, answer.finish_reasons) == ("ok", {0: "stop"})
    assert (answer.reasoning_chars, answer.content_chars) == (14, 8)
    assert (answer.has_visible, answer.has_reasoning, answer.is_json) == (True, True, True)


@pytest.mark.parametrize(
    "message, finish, usage, max_tokens, is_off, expected",
    [
        pytest.param(
            {"content": "", "reasoning_content": "x" * 1500}, "length",
            {"completion_tokens": 200, "completion_tokens_details": {"reasoning_tokens": 199}}, 200, False,
            "burnt_by_thinking", id="C081",
        ),
        pytest.param({"content": "\n\n", "reasoning": "r"}, "length", None, None, False, "burnt_by_thinking", id="C081 blank"),
        pytest.param({"content": None, "reasoning": "r"}, None, None, None, False, "burnt_by_thinking", id="no reason"),
        pytest.param({"content": "", "reasoning": "full"}, "stop", None, None, False, "empty", id="C082a"),
        pytest.param({"content": None}, "stop", {"completion_tokens": 16}, 16, False, "burnt_by_thinking", id="C082b"),
        pytest.param({"content": ""}, "stop", {"completion_tokens": 1}, 200, False, "empty", id="C082c"),
        pytest.param({"content": None, "reasoning_content": "I am"}, "stop", None, None, True, "misrouted", id="C084"),
        pytest.param({"content": None, "tool_calls": [{"function": {"name": "f"}}]}, "tool_calls", None, 1, False, "ok", id="C076"),
        pytest.param({"content": None, "function_call": {"name": "f"}}, "function_call", None, 1, False, "ok", id="C076 legacy"),
        pytest.param({"content": None, "refusal": "no"}, "stop", None, None, False, "ok", id="C076 refusal"),
        pytest.param({"content": None, "audio": {"data": "x"}}, "stop", None, None, False, "ok", id="C076 audio"),
        pytest.param({"content": "<think>plan"}, "length", None, None, False, "burnt_by_thinking", id="C088 never closed"),
        pytest.param({"content": "plan</think>A"}, "stop", None, None, False, "ok", id="C088 only the close"),
        pytest.param({"content": [{"type": "text", "text": "A"}]}, "stop", None, None, False, "ok", id="parts"),
        pytest.param({"content": "", "reasoning": "r"}, "abort", None, None, False, None, id="aborted"),
        pytest.param(None, "stop", None, None, False, "empty", id="no message"),
    ],
)  # fmt: skip
def test_verdict_of_a_chat_answer(
    message: object, finish: str | None, usage: object, max_tokens: int | None, is_off: bool, expected: Verdict | None
) -> None:
    body = chat(message, finish, usage=usage)
    assert read_plain("chat", body, max_tokens=max_tokens, is_thinking_off=is_off).verdict == expected


@pytest.mark.parametrize(
    "message, chars",
    [
        ({"reasoning": "abc", "reasoning_content": "abc"}, 3),
        ({"reasoning": "", "reasoning_content": "abcd"}, 4),
        ({"reasoning_details": [{"text": "ab"}, {"summary": "c"}, {"data": "de"}]}, 5),
        ({"content": "<think>plan</think>A"}, 4),
        ({"content": [{"type": "thinking", "thinking": [{"text": "ab"}]}, {"type": "thinking", "thinking": "c"}]}, 3),
        ({"content": "x"}, 0),
    ],
)
def test_reasoning_is_measured_once_under_any_name(message: dict[str, object], chars: int) -> None:
    """C083."""
    answer = read_plain("chat", chat(message))
    assert answer.reasoning_chars == chars
    assert answer.has_reasoning is (chars > 0)


def test_reasoning_tokens_alone_tell_hidden_reasoning() -> None:
    answer = read_plain("chat", chat({"content": "A"}, usage={"completion_tokens": 9, "reasoning_tokens": 8}))
    assert answer.has_reasoning


def test_every_choice_has_a_verdict_of_its_own() -> None:
    """C011."""
    choices = [
        {"index": 0, "message": {"content": "A"}, "finish_reason": "stop"},
        {"index": 1, "message": {"content": None, "reasoning": "r"}, "finish_reason": "length"},
        {"message": {"content": "C"}, "finish_reason": "stop"},
    ]
    body = json.dumps({"choices": choices, "usage": {"completion_tokens": 99}}).encode()
    answer = read_plain("chat", body, max_tokens=10)
    assert answer.verdicts == {0: "ok", 1: "burnt_by_thinking", 2: "ok"}
    assert answer.verdict == "burnt_by_thinking"


def test_text_completions_are_read() -> None:
    body = json.dumps(
        {"choices": [{"index": 0, "text": " done.", "finish_reason": "stop"}], "usage": {"prompt_tokens": 5}}
    )
    answer = read_plain("completions", body.encode())
    assert (answer.verdict, answer.usage, answer.content_chars) == ("ok", Usage(5), 6)


def test_llamacpp_timings_are_read() -> None:
    timings = {"cache_n": 1, "prompt_n": 2, "prompt_ms": 3, "predicted_n": 4, "predicted_ms": 5}
    answer = read_plain("chat", chat({"content": "A"}, timings=timings))
    assert (answer.usage, answer.server) == (Usage(3, 1, 4), ServerTimes(None, 3, 5))


@pytest.mark.parametrize(
    "response, expected, finish",
    [
        (
            {"status": "completed", "output": [
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "abc"}]},
                {"type": "message", "content": [{"type": "output_text", "text": "A"}]},
            ]},
            "ok", {0: "stop"},
        ),
        ({"status": "completed", "output": [{"type": "message", "content": [{"refusal": "no"}]}]}, "ok", {0: "stop"}),
        ({"status": "completed", "output": [{"type": "function_call", "name": "f"}]}, "ok", {0: "stop"}),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "abc"}]},
            ]},
            "burnt_by_thinking", {0: "length"},
        ),
        ({"status": "completed", "output": [{"type": "reasoning", "content": []}, None]}, "empty", {0: "stop"}),
        ({"status": "queued", "output": []}, "empty", {}),
    ],
)  # fmt: skip
def test_responses_are_read(response: dict[str, object], expected: Verdict, finish: dict[int, str]) -> None:
    answer = read_plain("responses", json.dumps({"object": "response", "error": None, **response}).encode())
    assert (answer.verdict, answer.finish_reasons) == (expected, finish)


@pytest.mark.parametrize(
    "content, reason, expected, chars",
    [
        ([{"type": "thinking", "thinking": "abc"}, {"type": "text", "text": "A"}], "end_turn", "ok", 3),
        ([{"type": "tool_use", "name": "f"}], "tool_use", "ok", 0),
        ([{"type": "thinking", "thinking": "abc"}], "max_tokens", "burnt_by_thinking", 3),
        ([{"type": "redacted_thinking", "data": "xy"}, 7], "max_tokens", "burnt_by_thinking", 2),
        ([], "end_turn", "empty", 0),
    ],
)
def test_messages_are_read(content: list[object], reason: str, expected: Verdict, chars: int) -> None:
    body = json.dumps({"type": "message", "content": content, "stop_reason": reason, "usage": {"output_tokens": 5}})
    answer = read_plain("messages", body.encode())
    assert (answer.verdict, answer.reasoning_chars, answer.usage) == (expected, chars, Usage(completion=5))


@pytest.mark.parametrize(
    "body, status, message",
    [
        (b'{"error":{"message":"m","code":503}}', 503, "m"),
        (b'{"object":"error","message":"m","code":400}', 400, "m"),
        (b'{"error":"m"}', 0, "m"),
        (b'{"type":"error","error":{"type":"overloaded_error","message":"m"}}', 529, "m"),
    ],
)
@pytest.mark.parametrize("kind", get_args(Kind))
def test_an_error_in_a_200_is_an_error(kind: Kind, body: bytes, status: int, message: str) -> None:
    """B19 of the fault catalogue, C040."""
    answer = read_plain(kind, body)
    assert answer.error is not None
    assert (answer.error.status, answer.error.message, answer.error.data) == (status, message, body)
    assert answer.verdict is None


def test_infinities_do_not_hide_the_answer() -> None:
    """C047."""
    body = (
        b'{"choices":[{"index":0,"message":{"role":"assistant","content":"y"},"logprobs":{"content":[{"token":"y",'
        b'"logprob":-Infinity,"top_logprobs":[]}]},"finish_reason":"stop"}],"usage":{"completion_tokens":1}}'
    )
    answer = read_plain("chat", body)
    assert (answer.verdict, answer.usage, answer.is_json) == ("ok", Usage(completion=1), True)


def test_half_an_emoji_does_not_hide_the_answer() -> None:
    """C050."""
    assert read_plain("chat", b'{"choices":[{"message":{"content":"\\ud83d"},"finish_reason":"stop"}]}').verdict == "ok"


@pytest.mark.parametrize("body", [b"", b"<html>", b"{oops", b"\xff\xfe", b"[" * 100_000])
def test_what_is_not_json_says_nothing(body: bytes) -> None:
    answer = read_plain("chat", body)
    assert answer == PlainAnswer(is_json=False)
    assert (answer.verdict, answer.has_visible, answer.has_reasoning) == (None, False, False)


def test_json_that_is_no_object_says_nothing() -> None:
    assert read_plain("opaque", b"[1]") == PlainAnswer()


def test_embeddings_tell_their_usage() -> None:
    answer = read_plain("embeddings", b'{"data":[{"embedding":[0.1]}],"usage":{"prompt_tokens":7,"total_tokens":7}}')
    assert (answer.usage, answer.verdict, answer.parts) == (Usage(7), None, {})


def test_of_large_vectors_only_the_end_is_read() -> None:
    vector = b'{"data":[{"embedding":[' + b"0.1," * LARGE_BYTES + b"0.1]}]"
    answer = read_plain("embeddings", vector + b',"usage":{"prompt_tokens":7,"total_tokens":7}}')
    assert answer.usage == Usage(7)
    assert read_plain("embeddings", vector + b"}").usage is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from([
            "choices", "message", "content", "index", "finish_reason", "usage", "text", "output", "type", "reasoning",
            "reasoning_details", "tool_calls", "function", "audio", "thinking", "stop_reason", "metrics", "timings",
        ]),
        inner, max_size=4,
    ),
    max_leaves=25,
)  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(["choices", "output", "content", "usage", "error", "status"]), JSON),
    st.sampled_from(get_args(Kind)),
)
def test_json_of_any_shape_never_raises(payload: dict[str, object], kind: Kind) -> None:
    answer = read_plain(kind, json.dumps(payload).encode(), max_tokens=8)
    assert answer.content_chars >= 0


@given(st.binary(max_size=60), st.sampled_from(get_args(Kind)))
def test_bytes_of_any_kind_never_raise(body: bytes, kind: Kind) -> None:
    read_plain(kind, body)


@pytest.mark.parametrize("finish", ["stop", "length", None])
@pytest.mark.parametrize("content", ["hi", "", " \n", "<think>a</think>b", "a</think>b", "a < b", None, ["x"], 5])
@pytest.mark.parametrize(
    "more",
    [{}, {"reasoning": "r"}, {"reasoning": None}, {"tool_calls": [{"function": {"name": "f"}}]}, {"refusal": "no"}],
)
def test_the_short_way_for_ordinary_answers_sees_what_the_long_one_sees(
    finish: str | None, content: object, more: dict[str, object]
) -> None:
    payload: dict[str, object] = {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content, **more}, "finish_reason": finish}]
    }
    short = plain._ordinary_part(payload)
    assert short is None or short == plain._any_chat_parts(payload)
