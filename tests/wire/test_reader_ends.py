"""How streams end and break: end marks, errors, odd bytes, gaps, verdicts, any bytes at all."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.kinds import Kind
from gateway.wire.reader import (
    GAP_BOUNDS_NS,
    ServerTimes,
    Usage,
    reader_for,
    verdict_of,
    verdicts_of,
)
from tests.support.reading import DONE, MS, ROLE, STOP, chunk, event, instants, read, usage_chunk

# --- the end


def test_a_finish_reason_is_enough_for_the_end() -> None:
    """C007 (a), fault-catalogue C10."""
    reader = read(chunk({"content": "x"}), STOP)
    assert (reader.is_done, reader.is_finished) == (False, True)


def test_a_clean_end_without_finish_reason_is_no_end() -> None:
    """C007 (c), fault-catalogue C9."""
    reader = read(chunk({"content": "x"}))
    assert not reader.is_finished
    assert verdict_of(reader) is None


def test_nothing_at_all_is_not_finished() -> None:
    assert not read().is_finished
    assert instants(read()) == (0, 0, 0, 0)


@pytest.mark.parametrize("mark", [DONE, b"data:[DONE]\r\n\r\n", b"data: [DONE]", b"data:  [DONE] \n\n"])
def test_the_end_mark_is_known_in_every_spelling(mark: bytes) -> None:
    assert read(mark).is_done


def test_after_the_end_mark_only_usage_counts() -> None:
    """C12 and C11 of the fault catalogue."""
    reader = read(
        chunk({"content": "x"}), STOP, DONE, chunk({"content": "late"}), event({"error": {"message": "late"}}), b"data: {oops\n\n",
        usage_chunk(usage={"completion_tokens": 4}), DONE,
    )  # fmt: skip
    assert instants(reader) == (1, 1, 1, 1)
    assert (reader.token_events, reader.error, reader.inspect_lost) == (1, None, False)
    assert reader.usage == Usage(completion=4)


def test_an_event_that_was_cut_is_dropped_at_the_end() -> None:
    reader = read(chunk({"content": "x"}), chunk({"content": "y"})[:40])
    assert (reader.token_events, reader.bad_events, reader.is_open) == (1, 0, False)


def test_the_state_of_the_relay_can_be_asked() -> None:
    reader = read(b"id: 1\ndata: x", is_closed=False)
    assert (reader.is_open, reader.saw_id) == (True, True)


# --- errors


@pytest.mark.parametrize(
    "frame, status",
    [
        (event({"error": {"code": "server_error", "message": "template failed", "type": "server_error"}}), 0),
        (event({"object": "error", "message": "bad", "code": 400}), 400),
        (event({"error": "Unauthorized"}), 0),
        (b'event: error\ndata: {"message": "flat", "status": 503}\n\n', 503),
        (event({"error": {"code": 500, "message": "x"}, "choices": [{"index": 0, "delta": {"content": ""}}]}), 500),
    ],
)
def test_an_error_in_the_stream_is_an_error_wherever_it_stands(frame: bytes, status: int) -> None:
    """C040: first, after content, and with an end mark behind it."""
    for before in ([], [ROLE] + [chunk({"content": "x"})] * 5):
        reader = read(*before, frame, DONE)
        assert reader.error is not None
        assert reader.error.status == status
        assert reader.error.data in frame
        assert verdict_of(reader) is None
        assert "error" in repr(reader)


def test_the_first_error_stays() -> None:
    reader = read(event({"error": {"message": "a"}}), event({"error": {"message": "b"}}))
    assert reader.error is not None
    assert reader.error.message == "a"


# --- odd bytes


def test_half_an_emoji_is_a_token() -> None:
    """C050: the two halves in two deltas."""
    halves = [
        b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d"},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"\\ude00"},"finish_reason":null}]}\n\n',
    ]
    reader = read(*halves, STOP, DONE)
    assert instants(reader) == (1, 1, 1, 2)
    assert (reader.token_events, reader.bad_events, verdict_of(reader)) == (2, 0, "ok")


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"Infinity"])
def test_numbers_that_json_does_not_know_hide_nothing(number: bytes) -> None:
    """C047, the streaming variant."""
    frame = (
        b'data: {"choices":[{"index":0,"delta":{"content":"y"},"logprobs":{"content":[{"logprob":'
        + number
        + b"}]}}]}\n\n"
    )
    reader = read(frame, STOP, DONE)
    assert instants(reader) == (1, 1, 1, 1)
    assert reader.bad_events == 0


def test_invalid_utf8_is_counted_and_still_read() -> None:
    """C15 of the fault catalogue."""
    reader = read(b'data: {"choices":[{"index":0,"delta":{"content":"\xff"}}]}\n\n', STOP)
    assert instants(reader) == (1, 1, 1, 1)
    assert (reader.bad_events, reader.inspect_lost) == (1, False)


@pytest.mark.parametrize(
    "data, t_token, t_visible, finish",
    [
        (b'{"choices":[{"index":0,"delta":{"content":"y"', 1, 1, {}),
        (b'{"choices":[{"index":0,"delta":{"reasoning_content": "y"', 1, 0, {}),
        (b'{"choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"', 0, 0, {0: "stop"}),
        (b'{"choices":[{"index":0,"finish_reason":"length","delta":{"content":"y"', 1, 1, {0: "length"}),
    ],
)
def test_broken_json_is_scanned_for_what_matters(
    data: bytes, t_token: int, t_visible: int, finish: dict[int, str]
) -> None:
    """C14 of the fault catalogue: counted, and not taken for silence."""
    reader = read(b"data: " + data + b"\n\n")
    assert instants(reader)[1:3] == (t_token, t_visible)
    assert reader.finish_reasons == finish
    assert (reader.bad_events, reader.inspect_lost) == (1, False)


@pytest.mark.parametrize("data", [b"{oops", b"<html>", b"\x00\xff", b'{"choices":[{"delta":{"content":"', b"[" * 5000])
def test_bytes_without_anything_to_recognise_end_the_judging(data: bytes) -> None:
    reader = read(chunk({"content": "\n"}), b"data: " + data + b"\n\n", STOP, DONE)
    assert (reader.bad_events, reader.inspect_lost) == (1, True)
    assert verdict_of(reader) is None


def test_empty_pings_are_no_bad_events() -> None:
    """C004: `data: ` without anything."""
    reader = read(b"data: \n\n", chunk({"content": "x"}), STOP)
    assert (reader.bad_events, reader.inspect_lost, reader.t_token) == (0, False, 2 * MS)


def test_an_event_over_the_bound_is_given_up() -> None:
    """C010."""
    reader = read(b"data: ", *[b"x" * 65536] * 160, STOP)
    assert reader.inspect_lost
    assert reader.events == 0


def test_separators_that_are_text_keep_the_finish_reason() -> None:
    """C002: LS and NEL inside the last chunk."""
    text = "a\u2028b\x85c"
    frame = json.dumps(
        {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}, ensure_ascii=False
    )
    reader = read(b"data: " + frame.encode() + b"\n\n" + DONE)
    assert (reader.events, reader.finish_reasons, reader.is_done) == (2, {0: "stop"}, True)


def test_characters_cut_anywhere_are_one_content_event() -> None:
    """C001: CJK and emoji, one byte per read."""
    frame = json.dumps({"choices": [{"index": 0, "delta": {"content": "北京😀é"}}]}, ensure_ascii=False).encode()
    data = b"data: " + frame + b"\n\n"
    whole = read(data)
    cut = read(*[data[place : place + 1] for place in range(len(data))])
    assert (whole.token_events, cut.token_events) == (1, 1)
    assert (whole.bad_events, cut.bad_events) == (0, 0)


# --- gaps


@pytest.mark.parametrize(
    "gap_ns, bucket",
    [
        (0, 0),
        (1_000_000, 0),
        (1_000_001, 1),
        (2_500_000, 1),
        (4_999_999_999, 14),
        (5_000_000_000, 14),
        (5_000_000_001, 15),
    ],
)
def test_gaps_fall_into_their_buckets(gap_ns: int, bucket: int) -> None:
    reader = reader_for("chat")
    reader.feed(chunk({"content": "a"}), 7)
    reader.feed(ROLE, 8)
    reader.feed(chunk({"content": "b"}), 7 + gap_ns)
    assert [place for place, count in enumerate(reader.gaps) if count] == [bucket]
    assert (reader.gap_count, reader.gap_sum_ns) == (1, gap_ns)
    assert len(reader.gaps) == len(GAP_BOUNDS_NS) + 1


def test_there_is_no_gap_before_the_second_token() -> None:
    reader = read(ROLE, chunk({"content": "a"}))
    assert (reader.gap_count, reader.gap_sum_ns, sum(reader.gaps)) == (0, 0, 0)


# --- verdicts


def test_misrouted_answers_are_told_from_burnt_ones() -> None:
    """C084, the streaming twin: policy off, every delta is reasoning, finish stop."""
    reader = read(ROLE, chunk({"reasoning_content": "I am"}), STOP, DONE)
    assert verdict_of(reader, is_thinking_off=True) == "misrouted"
    assert verdict_of(reader) == "empty"


def test_the_budget_tells_hidden_thinking() -> None:
    """C082 (b): no reasoning field at all."""
    reader = read(ROLE, STOP, usage_chunk(usage={"completion_tokens": 16}), DONE)
    assert verdict_of(reader, max_tokens=16) == "burnt_by_thinking"
    assert verdict_of(reader, max_tokens=200) == "empty"


def test_an_aborted_answer_is_not_judged() -> None:
    assert verdict_of(read(ROLE, chunk({}, "abort"), DONE)) is None


def test_an_end_mark_without_any_choice_gives_no_verdict() -> None:
    assert verdict_of(read(DONE)) is None


def test_a_turn_that_only_calls_tools_is_ok_and_timed_at_its_first_delta() -> None:
    """C076: content null, three deltas, finish tool_calls."""
    calls = [{"name": "f", "arguments": ""}, {"arguments": '{"x":'}, {"arguments": "1}"}]
    deltas = [chunk({"tool_calls": [{"index": 0, "function": call}]}) for call in calls]
    reader = read(chunk({"role": "assistant", "content": None}), *deltas, chunk({}, "tool_calls"), DONE)
    assert instants(reader) == (1, 2, 2, 4)
    assert (reader.token_events, reader.reasoning_events, verdict_of(reader)) == (3, 0, "ok")


# --- any bytes at all

PARTS = st.sampled_from([
    ROLE, STOP, DONE, chunk({"content": "x"}), chunk({"content": "<think>"}), chunk({"content": "</think>"}),
    chunk({"reasoning": "r"}, index=1), chunk({"tool_calls": [{"function": {"name": "f"}}]}), b"data: {oops\n\n",
    event({"error": "x"}), usage_chunk(usage={"completion_tokens": 3}), b": c\n\n", b"event: error\n", b"\r\n", b"\xff",
    b'data: {"choices":[{"delta":{"content":"\\ud83d"}}]}\n\n', b'event: ping\ndata: {"type":"ping"}\n\n', b"data: \n\n",
    b'data: {"type":"response.completed","response":{"output":[5]}}\n\n', b'data: {"type":"message_delta","delta":3}\n\n',
])  # fmt: skip


@given(st.lists(PARTS, max_size=14), st.lists(st.integers(0, 5000), max_size=6), st.sampled_from(get_args(Kind)))
def test_any_split_counts_the_same_and_nothing_raises(parts: list[bytes], offsets: list[int], kind: Kind) -> None:
    data = b"".join(parts)
    edges = [0, *sorted(offset % (len(data) + 1) for offset in offsets), len(data)]
    whole = read(data, kind=kind)
    for pieces in ([data[a:b] for a, b in pairwise(edges)], [bytes([byte]) for byte in data]):
        reader = read(*pieces, kind=kind)
        assert (
            reader.events, reader.token_events, reader.reasoning_events, reader.finish_reasons, reader.usage, reader.is_done,
            reader.bad_events, reader.inspect_lost, bool(reader.t_visible), reader.error, verdicts_of(reader),
        ) == (
            whole.events, whole.token_events, whole.reasoning_events, whole.finish_reasons, whole.usage, whole.is_done,
            whole.bad_events, whole.inspect_lost, bool(whole.t_visible), whole.error, verdicts_of(whole),
        )  # fmt: skip
        assert sum(reader.gaps) == reader.gap_count
        assert reader.gap_sum_ns >= 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from([
            "choices", "delta", "content", "index", "finish_reason", "usage", "error", "text", "type", "response", "output",
            "item", "message", "content_block", "tool_calls", "function", "reasoning", "metrics", "timings", "code", "name",
            "audio", "prompt_tokens_details", "completion_tokens", "status", "incomplete_details", "reason", "object",
        ]),
        inner, max_size=5,
    ),
    max_leaves=20,
)  # fmt: skip


@given(st.lists(JSON, max_size=4), st.sampled_from(get_args(Kind)), st.sampled_from([
    "response.completed", "response.output_text.delta", "response.output_item.added", "content_block_delta", "message_start",
    "content_block_start", "message_delta", "text_delta", "error", None,
]))  # fmt: skip
def test_json_of_any_shape_never_raises(payloads: list[object], kind: Kind, name: str | None) -> None:
    frames = [
        event({**payload, "type": name} if isinstance(payload, dict) and name else payload) for payload in payloads
    ]
    reader = read(*frames, kind=kind)
    verdict_of(reader, max_tokens=10)
    assert reader.usage is None or isinstance(reader.usage, Usage)
    assert reader.server is None or isinstance(reader.server, ServerTimes)
