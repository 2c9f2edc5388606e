"""Messages, tool calls and completions, as each engine writes them when it does not stream.

The streams and plain answers of vLLM 0.32 and llama.cpp were copied from running servers and shortened.
"""

from __future__ import annotations

import json

import pytest

from gateway.wire.assemble import Assembler
from gateway.wire.kinds import Kind

DONE = b"data: [DONE]\n\n"
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
NAMED = {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}
PARSER = {"completion_tokens_details": {"reasoning_tokens": 0}}  # vLLM says it where a reasoning parser runs


def events(*payloads: object) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(payload).encode() for payload in payloads) + DONE


def answer_of(
    stream: bytes, data: dict[str, object] | None = None, kind: Kind = "chat", engine: str = "vllm"
) -> dict[str, object]:
    assembler = Assembler(kind, data or {}, engine)
    assembler.feed(stream)
    whole = assembler.finish()
    assert whole is not None
    answer: dict[str, object] = json.loads(whole)
    return answer


def choice_of(
    *deltas: object, finish: str | None = "stop", data: dict[str, object] | None = None, engine: str = "vllm", usage: object = None
) -> dict[str, object]:  # fmt: skip
    """The assembled choice of a stream with these deltas."""
    parts = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
    choices = answer_of(events(*parts, last, {"choices": [], "usage": usage or {"x": 1}}), data, engine=engine)[
        "choices"
    ]
    assert isinstance(choices, list)
    choice: dict[str, object] = choices[0]
    return choice


def message_of(*deltas: object, **more: object) -> dict[str, object]:
    message = choice_of(*deltas, **more)["message"]  # type: ignore[arg-type]
    assert isinstance(message, dict)
    return message


ROLE = {"role": "assistant", "content": ""}
VLLM_STREAM = events(
    {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "m",
     "choices": [{"index": 0, "delta": ROLE, "logprobs": None, "finish_reason": None}],
     "prompt_token_ids": None, "prompt_text": None},
    {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "m",
     "choices": [{"index": 0, "delta": {"reasoning": "Hm"}, "logprobs": {"content": [{"token": "Hm", "logprob": -0.5,
      "bytes": [72, 109], "top_logprobs": []}]}, "finish_reason": None, "token_ids": None}]},
    {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "m",
     "choices": [{"index": 0, "delta": {"content": "Hi"}, "logprobs": {"content": [{"token": "Hi", "bytes": [72, 105]}]},
      "finish_reason": "stop", "stop_reason": None, "token_ids": None}]},
    {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "m", "choices": [],
     "usage": {"prompt_tokens": 17, "total_tokens": 19, "completion_tokens": 2,
      "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0},
      "completion_tokens_details": {"reasoning_tokens": 1}},
     "system_fingerprint": "vllm-0.32.0-1dcb83a8", "metrics": {"time_to_first_token_ms": 3.5, "queue_time_ms": 0.1}},
)  # fmt: skip
VLLM_PLAIN = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 5, "model": "m",
    "choices": [{
        "index": 0,
        "message": {"role": "assistant", "content": "Hi", "refusal": None, "annotations": None, "audio": None,
                    "function_call": None, "reasoning": "Hm"},
        "logprobs": {"content": [
            {"token": "Hm", "logprob": -0.5, "bytes": [72, 109], "top_logprobs": []},
            {"token": "Hi", "logprob": -9999.0, "bytes": [72, 105], "top_logprobs": []},
        ]},
        "finish_reason": "stop", "stop_reason": None, "token_ids": None, "routed_experts": None,
    }],
    "service_tier": None, "system_fingerprint": "vllm-0.32.0-1dcb83a8",
    "usage": {"prompt_tokens": 17, "total_tokens": 19, "completion_tokens": 2,
              "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0, "multimodal_tokens": None},
              "completion_tokens_details": {"reasoning_tokens": 1}},
    "prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None, "kv_transfer_params": None,
    "ec_transfer_params": None,
    "metrics": {"time_to_first_token_ms": 3.5, "generation_time_ms": None, "queue_time_ms": 0.1, "mean_itl_ms": None,
                "tokens_per_second": None, "speculative_decoding": None},
}  # fmt: skip

VLLM_COMPLETION_STREAM = events(
    {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m", "choices": [
        {"index": 0, "text": "Here", "logprobs": {"text_offset": [0], "token_logprobs": [-1.25], "tokens": ["Here"],
         "top_logprobs": [{"Here": -1.25}]}, "finish_reason": None, "stop_reason": None, "prompt_token_ids": [585],
         "token_ids": None}]},
    {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m", "choices": [
        {"index": 0, "text": " it", "logprobs": {"text_offset": [4], "token_logprobs": [None], "tokens": [" it"],
         "top_logprobs": [None]}, "finish_reason": "length", "stop_reason": None, "prompt_token_ids": None,
         "token_ids": None}]},
    {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m", "choices": [],
     "usage": {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}},
)  # fmt: skip
VLLM_COMPLETION_PLAIN = {
    "id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m",
    "choices": [{
        "index": 0, "text": "Here it",
        "logprobs": {"text_offset": [0, 4], "token_logprobs": [-1.25, None], "tokens": ["Here", " it"],
                     "top_logprobs": [{"Here": -1.25}, None]},
        "finish_reason": "length", "stop_reason": None, "token_ids": None, "prompt_logprobs": None,
        "prompt_token_ids": None, "routed_experts": None,
    }],
    "service_tier": None, "system_fingerprint": None,
    "usage": {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": None,
              "completion_tokens_details": None},
    "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None,
}  # fmt: skip

LLAMA_STREAM = events(
    {"choices": [{"finish_reason": None, "index": 0, "delta": {"role": "assistant", "content": None}}], "created": 5,
     "id": "chatcmpl-1", "model": "g", "system_fingerprint": "b1", "object": "chat.completion.chunk"},
    {"choices": [{"finish_reason": None, "index": 0, "delta": {"content": "Hi"}}], "created": 5,
     "id": "chatcmpl-1", "model": "g", "system_fingerprint": "b1", "object": "chat.completion.chunk"},
    {"choices": [{"finish_reason": "stop", "index": 0, "delta": {}}], "created": 5,
     "id": "chatcmpl-1", "model": "g", "system_fingerprint": "b1", "object": "chat.completion.chunk"},
    {"choices": [], "created": 5, "id": "chatcmpl-1", "model": "g", "system_fingerprint": "b1",
     "object": "chat.completion.chunk", "usage": {"completion_tokens": 1, "prompt_tokens": 25},
     "timings": {"cache_n": 20}},
)  # fmt: skip
LLAMA_PLAIN = {
    "choices": [{"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "Hi"}}],
    "created": 5, "model": "g", "system_fingerprint": "b1", "object": "chat.completion",
    "usage": {"completion_tokens": 1, "prompt_tokens": 25}, "id": "chatcmpl-1", "timings": {"cache_n": 20},
}  # fmt: skip


@pytest.mark.parametrize(
    "kind, engine, stream, plain",
    [
        ("chat", "vllm", VLLM_STREAM, VLLM_PLAIN),
        ("completions", "vllm", VLLM_COMPLETION_STREAM, VLLM_COMPLETION_PLAIN),
        ("chat", "llamacpp", LLAMA_STREAM, LLAMA_PLAIN),
    ],
    ids=["vllm chat", "vllm completions", "llama.cpp chat"],
)
def test_an_answer_has_the_fields_and_their_order_of_the_servers_own(
    kind: Kind, engine: str, stream: bytes, plain: dict[str, object]
) -> None:
    assert json.dumps(answer_of(stream, kind=kind, engine=engine)) == json.dumps(plain)


@pytest.mark.parametrize(
    "deltas, more, content",
    [
        ([ROLE], {"usage": PARSER}, None),
        ([ROLE], {}, ""),
        ([ROLE, {"reasoning": "Hm"}], {}, None),
        ([ROLE, {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}], {"data": TOOLS}, None),
        ([ROLE], {"usage": PARSER, "data": {**TOOLS, "tool_choice": "required"}}, ""),
        ([ROLE], {"usage": PARSER, "data": NAMED}, ""),
        ([ROLE], {"usage": PARSER, "data": {"tool_choice": "required"}}, None),
        ([ROLE, {"content": None}], {"engine": "llamacpp"}, ""),
        ([ROLE], {"engine": "ollama"}, ""),
        ([ROLE], {"engine": "sglang"}, ""),
        ([ROLE], {"engine": "openai"}, None),
        ([ROLE, {"content": " "}, {"content": "x"}], {}, " x"),
    ],
)
def test_content_without_text_is_null_or_empty_as_the_server_has_it(
    deltas: list[object], more: dict[str, object], content: str | None
) -> None:
    assert message_of(*deltas, **more)["content"] == content


CALLED = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    "delta, finish, data, expected",
    [
        (CALLED, "tool_calls", TOOLS, "tool_calls"),
        (CALLED, "length", TOOLS, "tool_calls"),
        ({}, "stop", TOOLS, "stop"),
        ({}, "stop", {**TOOLS, "tool_choice": "required"}, "tool_calls"),
        (CALLED, "length", {**TOOLS, "tool_choice": "required"}, "length"),
        (CALLED, "stop", NAMED, "stop"),
        (CALLED, "stop", {**TOOLS, "tool_choice": "none"}, "stop"),
        ({}, None, {}, None),
    ],
)
def test_finish_reasons_follow_the_plain_answers_rules(
    delta: object, finish: str | None, data: dict[str, object], expected: str | None
) -> None:
    assert choice_of(delta, finish=finish, data=data)["finish_reason"] == expected


def test_tool_calls_are_joined_by_index_without_it() -> None:
    calls = message_of(
        ROLE,
        {"tool_calls": [{"id": "b", "type": "function", "index": 1, "function": {"name": "g"}}]},
        {"tool_calls": [{"id": "a", "type": "function", "index": 0, "function": {"name": "f"}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": '{"x":'}},
                {"index": 1, "function": {"arguments": "{}"}},
            ]
        },
        {"tool_calls": [{"index": 0, "id": None, "function": {"name": None, "arguments": " 1}"}}, 7]},
        {"tool_calls": None},
        data=TOOLS,
    )["tool_calls"]
    assert json.dumps(calls) == json.dumps([
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ])  # fmt: skip


@pytest.mark.parametrize(
    "pieces, expected",
    [
        ([{"function": {"name": "f", "arguments": "{"}}, {"function": {"name": "f", "arguments": "}"}}], {"function": {"name": "f", "arguments": "{}"}}),
        ([{"function": {"name": "get_"}}, {"function": {"name": "it"}}], {"function": {"name": "get_it", "arguments": ""}}),
        ([{"function": {"name": "f", "extra": 1}, "own": 2}, {"own": 3}], {"function": {"name": "f", "arguments": "", "extra": 1}, "own": 3}),
        ([{"custom": {"name": "f", "input": "a"}}, {"custom": {"input": "b"}}], {"custom": {"name": "f", "input": "ab"}}),
    ],
    ids=["the name with every piece", "the name in pieces", "fields of their own", "a custom tool"],
)  # fmt: skip
def test_a_call_is_joined_whatever_its_pieces_say(pieces: list[object], expected: dict[str, object]) -> None:
    calls = message_of(*({"tool_calls": [piece]} for piece in pieces))["tool_calls"]
    assert calls == [{"type": "function", **expected}]


def test_ollama_keeps_the_index_of_a_call() -> None:
    calls = message_of(CALLED, engine="ollama", data=TOOLS)["tool_calls"]
    assert calls == [{"id": "a", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize("arguments, is_doubtful", [('{"x": 1}', False), ('{"x": "', True), ("", True)])
def test_a_call_that_was_cut_is_doubtful(arguments: str, is_doubtful: bool) -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": arguments}}
    assembler = Assembler("chat", TOOLS, "vllm")
    assembler.feed(
        events({"choices": [{"index": 0, "delta": {"tool_calls": [call, {"index": 1, "custom": {"input": "x"}}]}}]})
    )
    assert assembler.finish() is not None
    assert assembler.is_doubtful is is_doubtful


def test_a_completion_is_never_doubtful() -> None:
    assembler = Assembler("completions", {}, "vllm")
    assembler.feed(VLLM_COMPLETION_STREAM)
    assert not assembler.is_doubtful


def test_the_older_function_call_is_joined() -> None:
    message = message_of(
        ROLE, {"function_call": {"name": "f", "arguments": "{"}}, {"function_call": {"arguments": "}"}}
    )
    assert message["function_call"] == {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    "deltas, expected",
    [
        ([{"reasoning": "a"}, {"reasoning": "b"}], {"reasoning": "ab"}),
        ([{"reasoning": "a", "reasoning_content": "a"}], {"reasoning": "a", "reasoning_content": "a"}),
        ([{"reasoning_content": "a"}], {"reasoning_content": "a"}),
        ([{"reasoning_content": None}], {"reasoning_content": None}),
        ([{}], {"reasoning": None}),
    ],
)
def test_reasoning_has_the_name_that_the_server_gives_it(deltas: list[object], expected: dict[str, object]) -> None:
    """upstream-contract §3.1."""
    message = message_of(ROLE, *deltas)
    assert {key: value for key, value in message.items() if key.startswith("reasoning")} == expected


def test_unknown_fields_are_kept_the_last_value_stays_and_lists_grow() -> None:
    choice = choice_of(
        {"role": "assistant", "mark": 1, "citations": ["a"], "refusal": "No"},
        {"role": "x", "mark": 2, "citations": ["b"], "refusal": "."},
    )
    message = choice["message"]
    assert isinstance(message, dict)
    assert (message["role"], message["mark"], message["citations"], message["refusal"]) == (
        "assistant",
        2,
        ["a", "b"],
        "No.",
    )
    chunks = [
        {"id": "1", "created": 1, "own": 1, "service_tier": "default", "obfuscation": "x", "choices": [{"delta": {"content": "a"}, "own": None}]},
        {"id": "2", "created": 2, "own": {"b": [1]}, "service_tier": None, "choices": [{"message": {"content": "b"}, "delta": 3, "own": 4}]},
    ]  # fmt: skip
    answer = answer_of(events(*chunks))
    assert (answer["id"], answer["created"], answer["own"], answer["service_tier"]) == ("1", 1, {"b": [1]}, "default")
    assert "obfuscation" not in answer
    choices = answer["choices"]
    assert isinstance(choices, list)
    assert (choices[0]["own"], choices[0]["message"]["content"]) == (4, "ab")


def test_several_choices_are_in_the_order_of_their_indices() -> None:
    parts = [
        {"choices": [{"index": index, "delta": {"content": text}}]} for index, text in ((1, "b"), (0, "a"), (1, "B"))
    ]
    choices = answer_of(events(*parts))["choices"]
    assert isinstance(choices, list)
    assert [(choice["index"], choice["message"]["content"]) for choice in choices] == [(0, "a"), (1, "bB")]


@pytest.mark.parametrize(
    "logprobs, expected",
    [
        ([None, None], None),
        ([{"content": [], "refusal": None}, None], {"content": [], "refusal": None}),
        ([{"content": None}, {"content": [1]}, {"content": [2, 3]}], {"content": [1, 2, 3]}),
    ],
)
def test_log_probabilities_are_joined(logprobs: list[object], expected: object) -> None:
    parts = [{"choices": [{"index": 0, "delta": {}, "logprobs": part}]} for part in logprobs]
    choices = answer_of(events(*parts))["choices"]
    assert isinstance(choices, list)
    assert choices[0]["logprobs"] == expected


@pytest.mark.parametrize("wants, expected", [(True, [[1, 2, 3], [7]]), (None, [[1, 2, 3], None])])
def test_token_ids_are_joined_and_those_of_the_prompt_are_shown_if_asked_for(
    wants: object, expected: list[object]
) -> None:
    parts = [
        {"choices": [{"index": 0, "text": "a", "token_ids": [1, 2], "prompt_token_ids": [7]}]},
        {"choices": [{"index": 0, "text": None, "token_ids": [3], "prompt_token_ids": None}]},
    ]
    choices = answer_of(events(*parts), {"return_token_ids": wants}, "completions")["choices"]
    assert isinstance(choices, list)
    assert [choices[0]["token_ids"], choices[0]["prompt_token_ids"]] == expected
