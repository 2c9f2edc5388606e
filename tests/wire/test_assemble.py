"""Which plain requests can be sent as streams, and the bounds of putting their answers together."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.assemble import Assembler, can_assemble, stream_fields
from gateway.wire.assemble_layout import LAYOUTS
from gateway.wire.kinds import Kind

CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, object] = {"prompt": "hi"}

DONE = b"data: [DONE]\n\n"
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m"}


def event(payload: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(payload, ensure_ascii=False).encode()


def chunk(delta: object, index: int = 0, **more: object) -> bytes:
    return event(
        {**HEAD, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}]}
    )


USAGE = event({**HEAD, "choices": [], "usage": {"prompt_tokens": 1, "total_tokens": 3, "completion_tokens": 2}})
ORDINARY = (
    chunk({"role": "assistant", "content": ""})
    + chunk({"content": "你"})
    + chunk({"content": "好 😀"}, finish_reason="stop", stop_reason=None)
    + USAGE
    + DONE
)


def assembled(stream: bytes, data: dict[str, object] = CHAT, kind: Kind = "chat", engine: str = "vllm") -> Assembler:
    assembler = Assembler(kind, data, engine)
    assembler.feed(stream)
    return assembler


@pytest.mark.parametrize(
    "kind, data, engine",
    [
        ("chat", CHAT, "vllm"),
        ("chat", {**CHAT, "stream": False, "stream_options": None, "n": 2}, "vllm"),
        ("chat", {**CHAT, "stream": None, "stream_options": {}, "n": None}, "vllm"),
        ("chat", {**CHAT, "logprobs": True, "top_logprobs": 5, "return_token_ids": True}, "vllm"),
        ("chat", {**CHAT, "tools": [{}], "tool_choice": "required", "modalities": ["text"]}, "vllm"),
        ("chat", {**CHAT, "tools": [{}]}, "ollama"),
        ("chat", {**CHAT, "logprobs": True, "n": 2}, "llamacpp"),
        ("completions", TEXT, "vllm"),
        ("completions", {"prompt": ["hi"]}, "vllm"),
        ("completions", {"prompt": [[1, 2]]}, "vllm"),
        ("completions", {"prompt": [1, 2]}, "vllm"),
        ("completions", {**TEXT, "echo": True, "n": 1}, "vllm"),
        ("completions", {**TEXT, "logprobs": 0, "echo": False}, "ollama"),
    ],
)
def test_a_request_whose_plain_answer_a_stream_tells_is_assembled(
    kind: Kind, data: dict[str, object], engine: str
) -> None:
    assert can_assemble(kind, data, engine)


@pytest.mark.parametrize(
    "kind, data, engine",
    [
        ("chat", CHAT, "sglang"),  # its plain answers have `metadata`
        ("chat", CHAT, "openai"),
        ("chat", CHAT, "nothing known"),
        ("responses", {"input": "hi"}, "vllm"),
        ("messages", CHAT, "vllm"),
        ("embeddings", {"input": "hi"}, "vllm"),
        ("chat", {**CHAT, "stream": True}, "vllm"),
        ("chat", {**CHAT, "stream": 0}, "vllm"),
        ("chat", {**CHAT, "stream_options": {"include_usage": True}}, "vllm"),  # a 400 that the server must say
        ("chat", {**CHAT, "prompt_logprobs": 0}, "vllm"),
        ("chat", {**CHAT, "use_beam_search": True}, "vllm"),
        ("chat", {**CHAT, "kv_transfer_params": {"do_remote_decode": True}}, "vllm"),
        ("chat", {**CHAT, "echo": True}, "vllm"),
        ("chat", {**CHAT, "functions": [{}]}, "vllm"),
        ("chat", {**CHAT, "modalities": ["text", "audio"]}, "vllm"),
        ("chat", {**CHAT, "audio": {"voice": "x"}}, "vllm"),
        ("chat", {**CHAT, "n": 0}, "vllm"),
        ("chat", {**CHAT, "n": True}, "vllm"),
        ("chat", {**CHAT, "n": "2"}, "vllm"),
        ("chat", {**CHAT, "n": 257}, "vllm"),
        ("chat", {**CHAT, "n": 2}, "ollama"),
        ("chat", {**CHAT, "tools": [{}]}, "llamacpp"),
        ("completions", {}, "vllm"),
        ("completions", {"prompt": ["a", "b"]}, "vllm"),
        ("completions", {"prompt": []}, "vllm"),
        ("completions", {**TEXT, "best_of": 3}, "vllm"),
        ("completions", {**TEXT, "echo": True, "logprobs": 0}, "vllm"),
        ("completions", {**TEXT, "echo": True, "n": 2}, "vllm"),
        ("completions", {**TEXT, "echo": True}, "llamacpp"),
    ],
)
def test_a_request_whose_plain_answer_says_more_goes_up_as_it_came(
    kind: Kind, data: dict[str, object], engine: str
) -> None:
    assert not can_assemble(kind, data, engine)


def test_the_request_becomes_a_stream_that_tells_its_usage() -> None:
    assert stream_fields(CHAT) == {"stream": True, "stream_options": {"include_usage": True}}


def test_there_is_a_layout_for_both_kinds_of_every_engine() -> None:
    assert len(LAYOUTS) == 10
    with pytest.raises(ValueError, match="cannot be assembled"):
        Assembler("messages", CHAT, "vllm")


@given(st.lists(st.integers(0, len(ORDINARY)), max_size=8))
def test_any_split_of_the_bytes_gives_the_same_answer(cuts: list[int]) -> None:
    assembler = Assembler("chat", CHAT, "vllm")
    edges = [0, *sorted(cuts), len(ORDINARY)]
    for start, end in pairwise(edges):
        assembler.feed(ORDINARY[start:end])
    assert assembler.is_done
    assert assembler.finish() == assembled(ORDINARY).finish() != None  # noqa: E711


def test_an_answer_is_whole_without_the_end_mark_if_all_of_it_was_said() -> None:
    """C007."""
    assert assembled(ORDINARY.removesuffix(DONE)).finish() == assembled(ORDINARY).finish()
    assert assembled(ORDINARY.removesuffix(b"\n" + b"\n" + DONE)).finish() == assembled(ORDINARY).finish()


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        DONE,
        b": keep-alive\n\n",
        ORDINARY.removesuffix(USAGE + DONE),
        ORDINARY[:200],
        ORDINARY.removesuffix(USAGE + DONE) + USAGE[:60],
    ],
)
def test_a_stream_that_was_cut_has_no_body(stream: bytes) -> None:
    assembler = assembled(stream)
    assert assembler.finish() is None
    assert not assembler.is_lost
    assert assembler.error is None


@pytest.mark.parametrize(
    "odd", [b": keep-alive\n\n", b"data: \n\n", b"data: 3\n\n", b'data: {"choices": [7]}\n\n', b"retry: 10\n\n", event({**HEAD, "choices": 3})]
)  # fmt: skip
def test_what_says_nothing_changes_nothing(odd: bytes) -> None:
    assert assembled(odd + ORDINARY).finish() == assembled(ORDINARY).finish()


@pytest.mark.parametrize("after", [chunk({"content": "more"}), event({"error": {"message": "late"}}), DONE])
def test_after_the_end_mark_only_usage_is_taken(after: bytes) -> None:
    """Fault-catalogue C12."""
    late = ORDINARY.replace(USAGE, b"") + after + USAGE
    assert assembled(late).finish() == assembled(ORDINARY).finish()


@pytest.mark.parametrize(
    "stream, status",
    [
        (event({"error": {"message": "bad grammar", "type": "BadRequestError", "code": 400}}) + DONE, 400),
        (ORDINARY.removesuffix(USAGE + DONE) + event({"error": {"message": "died", "code": 500}}) + DONE, 500),
        (b'event: error\ndata: {"message": "no"}\n\n', 0),
    ],
)
def test_an_error_inside_the_stream_is_told_and_has_no_body(stream: bytes, status: int) -> None:
    assembler = assembled(stream)
    assert assembler.finish() is None
    assert assembler.error is not None
    assert assembler.error.status == status
    assert "failed" in repr(assembler)


@pytest.mark.parametrize(
    "odd",
    [
        b"data: {nonsense\n\n",
        b'data: {"choices": "\xff"}\n\n',
        event({**HEAD, "choices": [{"index": 0, "delta": {"content": [{"type": "text", "text": "x"}]}}]}),
        b"data: " + b"[" * 100_000 + b"\n\n",
        b"".join(chunk({"content": "x"}, index) for index in range(300)),
    ],
)
def test_what_cannot_be_joined_is_lost_and_not_guessed(odd: bytes) -> None:
    assembler = assembled(odd + ORDINARY)
    assert assembler.is_lost
    assert assembler.finish() is None
    assert "lost" in repr(assembler)


@pytest.mark.parametrize(
    "piece",
    [
        {"delta": {"content": "x" * 50}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "x" * 50}}]}},
        {"delta": {"unknown": ["x" * 50]}},
        {"delta": {}, "token_ids": [1000] * 10},
        {"delta": {}, "logprobs": {"content": [{"token": "x" * 50, "logprob": 0.5}]}},
    ],
)
def test_memory_is_bounded_whatever_grows(piece: dict[str, object]) -> None:
    assembler = Assembler("chat", CHAT, "vllm", max_bytes=5000)
    one = event({**HEAD, "choices": [{"index": 0, **piece}]})
    fed = 0
    while not assembler.is_lost and fed < 300:
        assembler.feed(one)
        fed += 1
    assert 30 < fed < 150
    assert assembler.finish() is None


def test_running_usage_does_not_count_up() -> None:
    assembler = Assembler("chat", CHAT, "vllm", max_bytes=5000)
    for count in range(1000):
        assembler.feed(chunk({}).replace(b'"choices"', b'"usage": {"completion_tokens": %d}, "choices"' % count))
    assert not assembler.is_lost


def test_numbers_come_out_as_they_were_spelled() -> None:
    numbers = b'{"a":1.50,"b":1e-05,"c":123456789012345678901234567890,"d":-0,"e":1E400,"f":-7,"g":[0.10]}'
    stream = ORDINARY.replace(b'"choices": []', b'"numbers": %b, "choices": []' % numbers)
    whole = assembled(stream).finish()
    assert whole is not None
    assert numbers in whole


def test_half_a_surrogate_pair_survives_and_two_halves_in_two_chunks_meet() -> None:
    """C050."""
    stream = chunk({"content": "a"}).replace(b'"a"', rb'"a\ud83d"') + chunk({"content": "b"}).replace(
        b'"b"', rb'"\ude00\ud800"'
    )
    whole = assembled(stream + DONE).finish()
    assert whole is not None
    assert rb'"content":"a\ud83d\ude00\ud800"' in whole
    assert json.loads(whole)["choices"][0]["message"]["content"] == "a😀\ud800"


def test_an_answer_deeper_than_one_writer_can_is_written_by_the_other() -> None:
    deep = b"[" * 400 + b"true" + b"]" * 400
    whole = assembled(ORDINARY.replace(b'"choices": []', b'"deep": %b, "choices": []' % deep)).finish()
    assert whole is not None
    assert deep in whole


def test_its_representation_tells_the_state() -> None:
    assert "open" in repr(assembled(b""))
    assert "done, 1 choices" in repr(assembled(ORDINARY))
