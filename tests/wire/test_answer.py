"""What servers say about an answer, in all the ways they say it, and the verdicts."""

from __future__ import annotations

import pytest

from gateway.wire.answer import (
    MAX_COUNT,
    ServerTimes,
    Usage,
    Verdict,
    error_of,
    finish_word,
    judge,
    lenient_loads,
    printable,
    server_times_of,
    split_thinking,
    usage_of,
    usage_of_timings,
    worst_of,
)


@pytest.mark.parametrize(
    "raw, expected",
    [
        ({"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}, Usage(3, None, 1, None)),
        (
            {
                "prompt_tokens": 25, "completion_tokens": 383, "prompt_tokens_details": {"cached_tokens": 16},
                "completion_tokens_details": {"reasoning_tokens": 371},
            },
            Usage(25, 16, 383, 371),
        ),
        ({"completion_tokens": 23870, "reasoning_tokens": 23871}, Usage(None, None, 23870, 23871)),
        (
            {
                "input_tokens": 25, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 30,
                "output_tokens_details": {"reasoning_tokens": 30},
            },
            Usage(25, 8, 30, 30),
        ),
        (
            {"input_tokens": 9, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 4, "output_tokens": 7},
            Usage(29, 16, 7, None),
        ),
        ({"input_tokens": 9, "cache_read_input_tokens": None, "output_tokens": 7}, Usage(9, None, 7, None)),
        ({"prompt_tokens": 5, "prompt_tokens_details": None}, Usage(5)),
        ({"prompt_tokens": -1, "completion_tokens": 2.5}, None),
        ({"prompt_tokens": True, "completion_tokens": MAX_COUNT + 1}, None),
        ({"prompt_tokens": "7"}, None),
        ({}, None),
        (None, None),
        ([1], None),
    ],
)  # fmt: skip
def test_usage_is_read_in_every_form(raw: object, expected: Usage | None) -> None:
    assert usage_of(raw) == expected


@pytest.mark.parametrize(
    "usage, visible",
    [(Usage(completion=23870, reasoning=23871), 0), (Usage(completion=10, reasoning=4), 6), (Usage(completion=3), 3)],
)
def test_visible_tokens_are_never_negative(usage: Usage, visible: int) -> None:
    """C091."""
    assert usage.visible == visible


def test_visible_tokens_are_unknown_without_a_count() -> None:
    assert Usage(prompt=3).visible is None


def test_llamacpp_timings_give_times_and_counts() -> None:
    timings = {"cache_n": 10, "prompt_n": 5, "prompt_ms": 12.5, "predicted_n": 7, "predicted_ms": 70}
    assert usage_of_timings(timings) == Usage(15, 10, 7)
    assert server_times_of(None, timings) == ServerTimes(None, 12.5, 70.0)
    assert usage_of_timings({"prompt_n": 5, "predicted_n": 7}) == Usage(None, None, 7)
    assert usage_of_timings(None) is None


def test_vllm_metrics_give_queue_prefill_and_generation() -> None:
    metrics = {"queue_time_ms": 0.5, "time_to_first_token_ms": 21, "generation_time_ms": 1458.5, "mean_itl_ms": 3.8}
    assert server_times_of(metrics) == ServerTimes(0.5, 21.0, 1458.5)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), None, "3", True, [], 10**30])
def test_times_that_are_none_are_unknown(value: object) -> None:
    assert server_times_of({"queue_time_ms": value}) is None


@pytest.mark.parametrize(
    "payload, status, message, code",
    [
        ({"error": {"code": "server_error", "message": "template failed", "type": "server_error"}}, 0, "template failed", "server_error"),
        ({"error": {"message": "bad", "type": "BadRequestError", "param": None, "code": 400}}, 400, "bad", "400"),
        ({"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}, 503, "Loading model", "503"),
        ({"error": {"code": "429", "message": "slow"}}, 429, "slow", "429"),
        ({"error": {"message": "full", "status": 503}}, 503, "full", ""),
        ({"error": {"object": "error", "message": "m", "code": 500}}, 500, "m", "500"),
        ({"error": "Unauthorized"}, 0, "Unauthorized", ""),
        ({"error": "gone", "code": 410}, 410, "gone", "410"),
        ({"error": True, "message": "m"}, 0, "m", ""),
        ({"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}, 400, "too long", "400"),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}, 529, "busy", "overloaded_error"),
        ({"type": "error", "error": {"type": "invalid_request_error", "message": "x"}}, 400, "x", "invalid_request_error"),
        ({"type": "error", "code": "rate_limit_exceeded", "message": "x"}, 429, "x", "rate_limit_exceeded"),
        ({"error": {"code": 200, "message": 5}}, 0, "", "200"),
        ({"error": {"code": 10**5000, "message": "\ud83d"}}, 0, "?", ""),
        ({"error": {"code": True}}, 0, "", ""),
    ],
)  # fmt: skip
def test_errors_are_read_in_every_shape(payload: dict[str, object], status: int, message: str, code: str) -> None:
    """C040, fault-catalogue B19, client-contract §5."""
    error = error_of(payload, b"raw")
    assert error is not None
    assert (error.status, error.message, error.code, error.data) == (status, message, code, b"raw")


@pytest.mark.parametrize("payload", [{"error": None}, {"error": {}}, {"error": ""}, {"object": "chat.completion"}, {}])
def test_no_error_is_seen_where_there_is_none(payload: dict[str, object]) -> None:
    assert error_of(payload, b"") is None


def test_an_error_event_is_one_whatever_its_data() -> None:
    error = error_of({"message": "flat"}, b"", is_error_event=True)
    assert error is not None
    assert error.message == "flat"


@pytest.mark.parametrize(
    "data, value, is_sound",
    [
        (b'{"a":1}', {"a": 1}, True),
        (b'"\\ud83d"', "\ud83d", True),
        (b"[-Infinity]", [float("-inf")], True),
        (b'"\xff"', "\ufffd", False),
        (b"{oops", None, False),
        (b"", None, False),
        (b"[" * 100_000, None, False),
        (b"\xff\xfe" + b"[" * 100_000, None, False),
        (b"1" * 5000, None, False),
    ],
)
def test_lenient_reading_never_raises(data: bytes, value: object, is_sound: bool) -> None:
    """C047, C050, C15 of the fault catalogue."""
    found, sound = lenient_loads(data)
    if data[:1] != b"1":  # orjson turns long integers into floats; only that it reads or refuses them matters
        assert (found, sound) == (value, is_sound)


def test_deep_nesting_is_read_or_refused_but_never_raises() -> None:
    lenient_loads(b'{"a":' * 2000 + b"1" + b"}" * 2000)


@pytest.mark.parametrize(
    "word, expected",
    [
        ("stop", "stop"), ("length", "length"), ("tool_calls", "tool_calls"), ("abort", "abort"),
        ("repetition", "repetition"), ("end_turn", "stop"), ("max_tokens", "length"), ("tool_use", "tool_calls"),
        ("max_output_tokens", "length"), ("completed", "stop"), ("x" * 100, "x" * 64), ("", ""),
    ],
)  # fmt: skip
def test_finish_words_are_openai_words(word: str, expected: str) -> None:
    assert finish_word(word) == expected


def test_printable_replaces_lone_surrogates_only() -> None:
    assert printable("a\ud83d b😀") == "a? b😀"


@pytest.mark.parametrize(
    "finish, has_reasoning, usage, max_tokens, is_off, expected",
    [
        pytest.param("length", True, Usage(completion=200, reasoning=199), 200, False, "burnt_by_thinking", id="C081"),
        pytest.param("length", True, None, None, False, "burnt_by_thinking", id="C081 without usage"),
        pytest.param("stop", True, Usage(completion=9), 200, False, "empty", id="C082a"),
        pytest.param("stop", False, Usage(completion=16), 16, False, "burnt_by_thinking", id="C082b"),
        pytest.param("stop", False, Usage(completion=1), 200, False, "empty", id="C082c, C082d"),
        pytest.param("stop", False, None, None, False, "empty", id="nothing known"),
        pytest.param("stop", True, None, 200, True, "misrouted", id="C084"),
        pytest.param("stop", True, Usage(completion=200), 200, True, "misrouted", id="C084 at its budget"),
        pytest.param("length", True, None, 200, True, "burnt_by_thinking", id="policy off, cut by the budget"),
        pytest.param("stop", False, Usage(reasoning=5), None, True, "empty", id="policy off, hidden reasoning"),
        pytest.param("length", False, Usage(completion=50, reasoning=50), 200, False, "burnt_by_thinking", id="hidden"),
        pytest.param("length", False, Usage(completion=50), 200, False, "empty", id="context full"),
        pytest.param("length", False, None, 64, False, "burnt_by_thinking", id="hidden, no usage"),
        pytest.param(None, True, None, None, False, "burnt_by_thinking", id="no finish reason"),
        pytest.param(None, False, None, None, False, "empty", id="nothing at all"),
        pytest.param("abort", True, None, None, False, None, id="server shut down"),
        pytest.param("error", True, None, None, False, None, id="failed"),
        pytest.param("tool_calls", False, None, None, False, "ok", id="C076"),
        pytest.param("function_call", True, None, 64, False, "ok", id="C076 legacy"),
        pytest.param("content_filter", False, None, None, False, "empty", id="filtered"),
    ],
)
def test_verdict_of_an_answer_without_output(
    finish: str | None,
    has_reasoning: bool,
    usage: Usage | None,
    max_tokens: int | None,
    is_off: bool,
    expected: Verdict,
) -> None:
    """C081, C082, C084 and latency-methods §4."""
    found = judge(
        finish=finish, has_output=False, has_reasoning=has_reasoning, usage=usage, max_tokens=max_tokens,
        is_thinking_off=is_off,
    )  # fmt: skip
    assert found == expected


@pytest.mark.parametrize("finish", [None, "stop", "length", "abort"])
def test_output_is_always_ok(finish: str | None) -> None:
    assert judge(finish=finish, has_output=True, has_reasoning=True, max_tokens=1, is_thinking_off=True) == "ok"


def test_the_worst_verdict_is_the_first_that_is_not_ok() -> None:
    """C011."""
    assert worst_of({}) is None
    assert worst_of({0: "ok", 1: "ok"}) == "ok"
    assert worst_of({1: "empty", 0: "ok", 2: "misrouted"}) == "empty"


@pytest.mark.parametrize(
    "text, thinking, answer",
    [
        ("<think>plan</think>\n\nAnswer a < b", "plan", "\n\nAnswer a < b"),
        ("\n <think>plan", "plan", ""),
        ("plan</think>Answer", "plan", "Answer"),
        ("use the <think> tag and </think>", "", "use the <think> tag and </think>"),
        ("plain", "", "plain"),
        ("", "", ""),
    ],
)
def test_thinking_is_split_from_a_whole_text(text: str, thinking: str, answer: str) -> None:
    """C088."""
    assert split_thinking(text) == (thinking, answer)
