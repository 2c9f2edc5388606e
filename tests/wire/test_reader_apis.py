"""Streams of `/v1/responses` and `/v1/messages`, in the shapes a real vLLM sends."""

from __future__ import annotations

import json

import pytest

from gateway.wire.kinds import Kind
from gateway.wire.reader import ServerTimes, StreamReader, Usage, reader_for, verdict_of

MS = 1_000_000


def named(kind: str, **fields: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + json.dumps({"type": kind, **fields}).encode() + b"\n\n"


def read(kind: Kind, *reads: bytes) -> StreamReader:
    reader = reader_for(kind)
    for place, data in enumerate(reads, start=1):
        reader.feed(data, place * MS)
    reader.close(10**12)
    return reader


def instants(reader: StreamReader) -> tuple[float, ...]:
    return tuple(at / MS for at in (reader.t_event, reader.t_token, reader.t_visible, reader.t_last))


# --- responses

CREATED = named("response.created", response={"status": "in_progress", "usage": None})
IN_PROGRESS = named("response.in_progress", response={"status": "in_progress"})
REASONING_ITEM = named("response.output_item.added", item={"type": "reasoning", "content": None}, output_index=0)
PART = named("response.content_part.added", part={"type": "reasoning_text", "text": ""})
USAGE = {
    "input_tokens": 25, "output_tokens": 30, "input_tokens_details": {"cached_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 30},
}  # fmt: skip


def thought(text: str) -> bytes:
    return named("response.reasoning_text.delta", delta=text, content_index=0)


def text(piece: str) -> bytes:
    return named("response.output_text.delta", delta=piece, output_index=1)


def completed(**response: object) -> bytes:
    return named(
        "response.completed", response={"object": "response", "status": "completed", "error": None, **response}
    )


def test_responses_created_and_in_progress_are_no_tokens() -> None:
    """Upstream-contract §4.1: they come before the engine is asked."""
    reader = read(
        "responses", CREATED, IN_PROGRESS, REASONING_ITEM, PART, thought("Step"), text("\n\n"), text("A"), completed()
    )
    assert instants(reader) == (1, 5, 7, 7)
    assert (reader.token_events, reader.reasoning_events, reader.is_done) == (3, 1, True)
    assert reader.finish_reasons == {0: "stop"}
    assert verdict_of(reader) == "ok"


def test_responses_give_usage_and_times_at_the_end() -> None:
    metrics = {"queue_time_ms": 0.5, "time_to_first_token_ms": 4, "generation_time_ms": 52}
    reader = read("responses", text("A"), completed(usage=USAGE, metrics=metrics))
    assert reader.usage == Usage(25, 0, 30, 30)
    assert reader.server == ServerTimes(0.5, 4, 52)


@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete"])
def test_an_incomplete_response_is_cut_by_length_whatever_its_event_is_called(kind: str) -> None:
    """vLLM sends `response.completed` with status incomplete."""
    response = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "usage": USAGE}
    reader = read("responses", CREATED, thought("Step"), named(kind, response=response))
    assert reader.finish_reasons == {0: "length"}
    assert verdict_of(reader, max_tokens=30) == "burnt_by_thinking"


@pytest.mark.parametrize(
    "kind",
    ["response.reasoning_text.delta", "response.reasoning_summary_text.delta", "response.reasoning.delta"],
)
def test_reasoning_deltas_are_not_visible(kind: str) -> None:
    reader = read("responses", named(kind, delta="r"))
    assert instants(reader) == (1, 1, 0, 1)
    assert reader.has_reasoning


@pytest.mark.parametrize(
    "frame",
    [
        named("response.function_call_arguments.delta", delta="{"),
        named("response.custom_tool_call_input.delta", delta="x"),
        named("response.refusal.delta", delta="no"),
        named("response.audio.transcript.delta", delta="hi"),
        named("response.output_item.added", item={"type": "function_call", "name": "f", "arguments": ""}),
        b'data: {"type":"response.output_text.delta","delta":"x"}\n\n',
        b'event: response.output_text.delta\ndata: {"delta":"x"}\n\n',
    ],
)
def test_every_output_of_a_response_is_visible(frame: bytes) -> None:
    """C076."""
    reader = read("responses", CREATED, frame, completed())
    assert instants(reader) == (1, 2, 2, 2)
    assert verdict_of(reader) == "ok"


@pytest.mark.parametrize(
    "frame",
    [
        text(""),
        named("response.output_text.delta", delta=None),
        named("response.output_item.added", item={"type": "message", "content": []}),
        named("response.output_item.added", item=None),
        named("response.output_text.done", text="x"),
        named("response.unknown"),
    ],
)
def test_other_events_of_a_response_are_no_tokens(frame: bytes) -> None:
    assert read("responses", frame).t_token == 0


def test_a_response_that_comes_only_at_the_end_is_still_an_answer() -> None:
    message = {"type": "message", "content": [{"type": "output_text", "text": "A"}]}
    call = {"type": "function_call", "name": "f"}
    thoughts = {"type": "reasoning", "content": []}
    reader = read("responses", CREATED, completed(output=[thoughts, message]))
    assert instants(reader) == (1, 2, 2, 2)
    assert verdict_of(reader) == "ok"
    assert verdict_of(read("responses", CREATED, completed(output=[call]))) == "ok"
    assert verdict_of(read("responses", CREATED, completed(output=[thoughts, None]))) == "empty"


def test_text_that_was_streamed_is_not_taken_again_at_the_end() -> None:
    message = {"type": "message", "content": [{"type": "output_text", "text": "<think>plan"}]}
    reader = read("responses", text("<think>"), text("plan"), completed(output=[message]))
    assert (reader.token_events, reader.t_last) == (2, 2 * MS)


def test_a_failed_response_is_an_error() -> None:
    """C040."""
    failed = named("response.failed", response={"status": "failed", "error": {"code": "server_error", "message": "m"}})
    reader = read("responses", CREATED, failed)
    assert reader.error is not None
    assert (reader.error.message, reader.error.code, reader.is_done) == ("m", "server_error", True)
    assert verdict_of(reader) is None


def test_a_failed_response_that_does_not_say_why_is_an_error_too() -> None:
    assert read("responses", named("response.failed", response={"error": None})).error is not None


@pytest.mark.parametrize(
    "frame",
    [
        named("error", code="rate_limit_exceeded", message="slow down"),
        b'data: {"error":{"code":429,"message":"slow down"}}\n\n',
        b'event: error\ndata: {"message":"slow down","code":"429"}\n\n',
    ],
)
def test_error_events_of_responses_are_errors(frame: bytes) -> None:
    error = read("responses", frame).error
    assert error is not None
    assert (error.status, error.message) == (429, "slow down")


def test_an_old_end_mark_ends_responses_too() -> None:
    assert read("responses", text("A"), b"data: [DONE]\n\n").is_done


def test_late_events_of_a_response_add_usage_only() -> None:
    reader = read("responses", text("A"), completed(), text("late"), completed(usage=USAGE))
    assert (reader.t_last, reader.usage) == (1 * MS, Usage(25, 0, 30, 30))


# --- messages

START = named(
    "message_start", message={"role": "assistant", "content": [], "usage": {"input_tokens": 25, "output_tokens": 1}}
)
THINKING = named("content_block_start", content_block={"type": "thinking", "thinking": ""}, index=0)
TEXT_BLOCK = named("content_block_start", content_block={"type": "text", "text": ""}, index=1)
BLOCK_STOP = named("content_block_stop", index=0)
STOP = named("message_stop")
PING = named("ping")


def delta(kind: str, **fields: object) -> bytes:
    return named("content_block_delta", delta={"type": kind, **fields}, index=0)


def ended(reason: str, **usage: object) -> bytes:
    return named("message_delta", delta={"stop_reason": reason}, usage=usage)


def test_messages_are_timed_by_their_deltas() -> None:
    reader = read(
        "messages", START, THINKING, delta("thinking_delta", thinking="Step"), delta("signature_delta", signature="s"),
        BLOCK_STOP, TEXT_BLOCK, delta("text_delta", text="\n\n"), delta("text_delta", text="A"), BLOCK_STOP,
        ended("end_turn", input_tokens=25, output_tokens=446, cache_read_input_tokens=16), STOP,
    )  # fmt: skip
    assert instants(reader) == (1, 3, 8, 8)
    assert (reader.token_events, reader.reasoning_events) == (3, 1)
    assert reader.usage == Usage(41, 16, 446, None)
    assert (reader.finish_reasons, reader.is_done) == ({0: "stop"}, True)
    assert verdict_of(reader) == "ok"
    assert reader.server is None


def test_pings_of_messages_are_nothing() -> None:
    """Like comments (C003): with or without data, before and after the start."""
    reader = read("messages", PING, b"event: ping\n\n", START, PING, delta("text_delta", text="A"), PING)
    assert instants(reader) == (3, 5, 5, 5)
    assert reader.events == 2


def test_messages_burnt_by_thinking() -> None:
    """C081 in Anthropic's shape."""
    reader = read(
        "messages",
        START,
        THINKING,
        delta("thinking_delta", thinking="Step"),
        ended("max_tokens", output_tokens=40),
        STOP,
    )
    assert verdict_of(reader, max_tokens=40) == "burnt_by_thinking"
    assert reader.usage == Usage(25, None, 40)


@pytest.mark.parametrize(
    "frame",
    [
        delta("input_json_delta", partial_json="{"),
        named("content_block_start", content_block={"type": "tool_use", "name": "f", "input": {}}),
        named("content_block_start", content_block={"type": "text", "text": "A"}),
        delta("text_delta", text="A"),
    ],
)
def test_output_of_messages_is_visible(frame: bytes) -> None:
    """C076."""
    reader = read("messages", START, frame, ended("tool_use"), STOP)
    assert instants(reader) == (1, 2, 2, 2)
    assert verdict_of(reader) == "ok"


@pytest.mark.parametrize(
    "frame",
    [
        named("content_block_start", content_block={"type": "redacted_thinking", "data": "x"}),
        named("content_block_start", content_block={"type": "thinking", "thinking": "x"}),
        delta("thinking_delta", thinking="x"),
    ],
)
def test_thinking_of_messages_is_a_token_that_is_not_visible(frame: bytes) -> None:
    assert instants(read("messages", START, frame)) == (1, 2, 0, 2)


@pytest.mark.parametrize(
    "frame",
    [
        delta("text_delta", text=""), delta("thinking_delta", thinking=""), delta("input_json_delta", partial_json=""),
        delta("citations_delta", citation={}), named("content_block_start", content_block={"type": "tool_use"}),
        named("content_block_delta", delta=None), named("message_start", message=None), named("unknown"),
    ],
)  # fmt: skip
def test_other_events_of_messages_are_no_tokens(frame: bytes) -> None:
    reader = read("messages", frame)
    assert (reader.t_token, reader.error) == (0, None)


def test_a_cut_message_has_no_completion_count() -> None:
    reader = read("messages", START, delta("text_delta", text="A"))
    assert reader.usage == Usage(25)
    assert not reader.is_finished


def test_a_stop_reason_finishes_a_message_without_its_stop_event() -> None:
    """C007 (a) in Anthropic's shape."""
    assert read("messages", START, delta("text_delta", text="A"), ended("end_turn")).is_finished


def test_error_events_of_messages_are_errors() -> None:
    reader = read("messages", START, named("error", error={"type": "overloaded_error", "message": "busy"}))
    assert reader.error is not None
    assert (reader.error.status, reader.error.message, reader.error.code) == (529, "busy", "overloaded_error")


def test_after_the_stop_event_only_usage_counts() -> None:
    reader = read("messages", START, STOP, delta("text_delta", text="late"), ended("end_turn", output_tokens=3))
    assert (reader.t_token, reader.usage) == (0, Usage(25, None, 3))
