"""Streams of chat and text completions: instants, thinking, choices, usage."""

from __future__ import annotations

from typing import get_args

import pytest

from gateway.wire import stream as stream_module
from gateway.wire.kinds import Kind
from gateway.wire.reader import (
    ServerTimes,
    Usage,
    verdict_of,
    verdicts_of,
)
from tests.support.reading import DONE, LENGTH, MS, ROLE, STOP, chunk, event, instants, read, usage_chunk

# --- instants


@pytest.mark.parametrize("content", ["", None])
def test_the_clock_does_not_stop_at_the_role_chunk(content: str | None) -> None:
    """C097: both spellings of the role chunk, a comment, then the token."""
    role = chunk({"role": "assistant", "content": content})
    reader = read((10, role), (20, b": ping\n\n"), (2020, chunk({"content": "x"})))
    assert instants(reader) == (10, 2020, 2020, 2020)
    assert reader.comments == 1


def test_role_and_first_token_may_share_a_chunk() -> None:
    """C097."""
    assert instants(read((7, chunk({"role": "assistant", "content": "x"})))) == (7, 7, 7, 7)


def test_events_of_one_read_share_its_time() -> None:
    """C097: three frames in one TCP write."""
    reader = read((5, ROLE + chunk({"content": "a"}) + chunk({"content": "b"})))
    assert instants(reader) == (5, 5, 5, 5)
    assert (reader.events, reader.token_events, reader.gaps[0]) == (3, 2, 1)


def test_comments_start_no_clock() -> None:
    """C003."""
    reader = read((200, b":\n\n"), (400, b":\n\n"), (410, ROLE), (420, chunk({"content": "x"})), (430, DONE))
    assert instants(reader) == (410, 420, 420, 420)
    assert (reader.events, reader.token_events) == (3, 1)


def test_reasoning_is_the_first_token_and_content_the_first_visible_one() -> None:
    """C098."""
    thoughts = [(second * 1000, chunk({"reasoning": "r"})) for second in range(1, 10)]
    answer = [(second * 1000, chunk({"content": "c"})) for second in range(10, 13)]
    reader = read(*thoughts, *answer, (12_001, STOP))
    assert instants(reader) == (1000, 1000, 10_000, 12_000)
    assert (reader.token_events, reader.reasoning_events) == (12, 9)


def test_nothing_visible_leaves_the_visible_instant_at_never() -> None:
    """C098, the variant capped before content; C081, the streaming twin."""
    reader = read((1000, chunk({"reasoning": "r"})), (2000, LENGTH), (2001, DONE))
    assert instants(reader) == (1000, 1000, 0, 1000)
    assert verdict_of(reader) == "burnt_by_thinking"


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "r"},
        {"reasoning": "r"},
        {"reasoning": "r", "reasoning_content": "r"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "r"}]},
        {"role": None, "content": None, "reasoning_content": "r", "tool_calls": None},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "r"}]}]},
    ],
)
def test_reasoning_is_known_under_every_name_and_counted_once(delta: dict[str, object]) -> None:
    """C083."""
    reader = read(chunk(delta), chunk({"content": "x"}))
    assert instants(reader) == (1, 1, 2, 2)
    assert (reader.token_events, reader.reasoning_events) == (2, 1)
    assert reader.has_reasoning


@pytest.mark.parametrize(
    "delta",
    [
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"function": {"arguments": "{"}}]},
        {"tool_calls": [{"type": "custom", "custom": {"name": "f", "input": "x"}}]},
        {"function_call": {"name": "f"}},
        {"function_call": {"arguments": "{}"}},
        {"refusal": "no"},
        {"audio": {"data": "UklGRg=="}},
        {"audio": {"transcript": "hi"}},
        {"content": [{"type": "text", "text": "x"}]},
        {"content": None, "refusal": "no"},
    ],
)
def test_output_other_than_text_is_a_visible_token(delta: dict[str, object]) -> None:
    """C076."""
    reader = read(chunk({"role": "assistant", "content": None}), chunk(delta), STOP, DONE)
    assert instants(reader) == (1, 2, 2, 2)
    assert verdict_of(reader, max_tokens=1) == "ok"


@pytest.mark.parametrize(
    "delta",
    [
        {}, None, [], "x", {"content": ""}, {"content": None}, {"content": 5}, {"content": []}, {"reasoning": ""},
        {"reasoning": {"text": "x"}}, {"reasoning_details": [{"type": "reasoning.encrypted"}]}, {"refusal": ""},
        {"tool_calls": [{"function": {"name": "", "arguments": ""}}]}, {"tool_calls": [None, 3, {}]},
        {"tool_calls": {"a": 1}}, {"function_call": {"name": None}}, {"audio": {"id": "a"}}, {"refusal": 5},
        {"content": [{"type": "text", "text": ""}, None]},
    ],
)  # fmt: skip
def test_what_holds_no_token_moves_no_clock(delta: object) -> None:
    """C20 of the fault catalogue."""
    reader = read(chunk(delta), DONE)
    assert instants(reader) == (1, 0, 0, 0)
    assert reader.bad_events == 0


def test_blank_text_is_a_token_but_not_visible() -> None:
    """C081, the variant whose content is only line ends."""
    reader = read(chunk({"content": "\n\n"}), chunk({"content": " "}), STOP, DONE)
    assert instants(reader) == (1, 1, 0, 2)
    assert verdict_of(reader) == "empty"


def test_a_message_in_place_of_a_delta_is_read() -> None:
    reader = read(event({"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}))
    assert instants(reader) == (1, 1, 1, 1)
    assert reader.is_finished


# --- thinking inside the text


def test_think_tags_inside_the_text_are_reasoning() -> None:
    """C088."""
    pieces = ["<thi", "nk>plan</th", "ink>", "\n\nAnswer a < b"]
    reader = read(*[chunk({"content": piece}) for piece in pieces], STOP, DONE)
    assert instants(reader) == (1, 1, 4, 4)
    assert reader.reasoning_events == 2
    assert verdict_of(reader) == "ok"


def test_a_think_tag_that_never_closes_burns_the_budget() -> None:
    """C088, variant 3."""
    reader = read(chunk({"content": "<think>"}), chunk({"content": "plan"}), LENGTH, DONE)
    assert instants(reader) == (1, 1, 0, 2)
    assert verdict_of(reader) == "burnt_by_thinking"


def test_a_think_tag_in_the_middle_is_text() -> None:
    """C088, variant 4."""
    reader = read(chunk({"content": "use the <think> tag"}), chunk({"content": " and </think>"}), STOP, DONE)
    assert instants(reader) == (1, 1, 1, 2)
    assert not reader.has_reasoning


def test_a_closing_tag_alone_moves_the_visible_instant() -> None:
    """C088, variant 2: the opening tag was in the prompt."""
    reader = read(chunk({"content": "plan"}), chunk({"content": " b"}), is_closed=False)
    assert instants(reader) == (1, 1, 1, 2)
    assert not reader.late_think_close
    reader.feed(chunk({"content": "</think>"}), 3 * MS)
    assert instants(reader) == (1, 1, 0, 3)
    reader.feed(chunk({"content": "Answer"}) + STOP, 4 * MS)
    assert instants(reader) == (1, 1, 4, 4)
    assert (reader.late_think_close, reader.reasoning_events, reader.token_events) == (True, 3, 4)
    assert verdict_of(reader) == "ok"


def test_thinking_is_followed_per_choice() -> None:
    """C088 with n=2, C011: the tag of one choice ends nothing in the other."""
    reader = read(
        chunk({"content": "<think>a"}, index=0),
        chunk({"content": "<think>b"}, index=1),
        chunk({"content": "</think>A"}, index=1),
        chunk({"content": "</think>"}, index=0),
        chunk({}, "length", index=0),
        chunk({}, "stop", index=1),
    )
    assert instants(reader) == (1, 1, 3, 4)
    assert verdicts_of(reader) == {0: "burnt_by_thinking", 1: "ok"}


def test_a_late_close_in_one_choice_leaves_the_visible_instant_of_the_other() -> None:
    reader = read(
        chunk({"content": "plan"}, index=0),
        chunk({"content": "text"}, index=1),
        chunk({"content": "</think>"}, index=0),
        chunk({"content": "answer"}, index=0),
    )
    assert reader.t_visible == 2 * MS
    assert reader.choices[0].t_visible == 4 * MS


# --- choices


def test_two_choices_are_judged_and_finished_apart() -> None:
    """C011."""
    both = event({"choices": [
        {"index": 0, "delta": {"reasoning": "c"}}, {"index": 1, "delta": {"content": "Y"}}, None, 5,
    ]})  # fmt: skip
    reader = read(
        chunk({"reasoning": "a"}, index=0), chunk({"content": "X"}, index=1), chunk({"reasoning": "b"}, index=0), both,
        chunk({}, "stop", index=1), is_closed=False,
    )  # fmt: skip
    assert not reader.is_finished
    reader.feed(chunk({}, "length", index=0), 6 * MS)
    assert reader.is_finished
    reader.feed(usage_chunk(usage={"prompt_tokens": 3, "completion_tokens": 9}) + DONE, 7 * MS)
    assert instants(reader) == (1, 1, 2, 4)
    assert reader.token_events == 4
    assert reader.finish_reasons == {0: "length", 1: "stop"}
    assert verdicts_of(reader, max_tokens=9) == {0: "burnt_by_thinking", 1: "ok"}
    assert verdict_of(reader, max_tokens=9) == "burnt_by_thinking"


@pytest.mark.parametrize("index", [None, "0", [], {}, 1.5, True])
def test_an_index_that_is_none_means_the_first_choice(index: object) -> None:
    reader = read(event({"choices": [{"index": index, "delta": {"content": "x"}, "finish_reason": "stop"}]}))
    assert reader.finish_reasons == {0: "stop"}


def test_endless_indices_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_CHOICES", 4)
    reader = read(*[chunk({"content": "x"}, "stop", index=place) for place in range(20)])
    assert set(reader.choices) == {0, 1, 2, 3, -1}
    assert reader.is_finished


@pytest.mark.parametrize("finish", [5, [], {}, True])
def test_a_finish_reason_that_is_no_word_is_none(finish: object) -> None:
    assert read(event({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})).finish_reasons == {}


def test_the_first_finish_reason_stays() -> None:
    assert read(chunk({}, "tool_calls"), chunk({}, "stop")).finish_reasons == {0: "tool_calls"}


# --- frames without choices


def test_frames_with_empty_or_without_choices_are_no_trouble() -> None:
    """C008."""
    reader = read(
        usage_chunk(prompt_filter_results=[]),
        event({"usage": None}),
        chunk({"content": "x"}),
        usage_chunk(usage={"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}),
        DONE,
    )
    assert instants(reader) == (1, 3, 3, 3)
    assert reader.usage == Usage(3, None, 1, None)
    assert reader.error is None


@pytest.mark.parametrize("payload", [5, "text", None, [], [{"choices": []}], {"choices": 7}, {"choices": {"a": 1}}])
def test_payloads_of_any_shape_are_taken(payload: object) -> None:
    reader = read(event(payload), DONE)
    assert (reader.events, reader.bad_events, reader.is_done) == (2, 0, True)


# --- usage and server times


def test_vllm_metrics_and_usage_come_with_the_last_chunk() -> None:
    reader = read(
        chunk({"content": "x"}),
        STOP,
        usage_chunk(
            usage={
                "prompt_tokens": 25,
                "completion_tokens": 383,
                "completion_tokens_details": {"reasoning_tokens": 371},
            },
            metrics={"queue_time_ms": 0.5, "time_to_first_token_ms": 21, "generation_time_ms": 1458},
        ),
        DONE,
    )
    assert reader.usage == Usage(25, None, 383, 371)
    assert reader.server == ServerTimes(0.5, 21, 1458)


def test_llamacpp_timings_stand_in_for_usage() -> None:
    timings = {"cache_n": 10, "prompt_n": 5, "prompt_ms": 12.5, "predicted_n": 7, "predicted_ms": 70}
    reader = read(chunk({"content": "x"}), chunk({}, "stop", timings=timings), DONE)
    assert reader.usage == Usage(15, 10, 7)
    assert reader.server == ServerTimes(None, 12.5, 70)


def test_running_usage_is_not_summed() -> None:
    """C096 (c): `continuous_usage_stats`."""
    chunks = [chunk({"content": "x"}, usage={"completion_tokens": count}) for count in (5, 10, 15)]
    reader = read(*chunks, STOP, DONE)
    assert reader.usage == Usage(completion=15)
    assert reader.first_chunk_tokens == 5


def test_usage_without_a_blank_line_at_the_end_is_read() -> None:
    """C007 (b)."""
    frame = usage_chunk(usage={"prompt_tokens": 3, "completion_tokens": 1})
    reader = read(chunk({"content": "x"}), STOP, frame[:-1])
    assert reader.is_finished
    assert reader.usage == Usage(3, None, 1)


def test_what_came_in_part_has_the_time_of_its_last_read() -> None:
    reader = read(chunk({"content": "x"})[:-1])
    assert instants(reader) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    "extra, choice, tokens",
    [
        ({}, {}, 1),
        ({"usage": {"completion_tokens": 64}}, {}, 64),
        ({"usage": {"completion_tokens": 0}}, {}, 1),
        ({}, {"token_ids": [1, 2, 3]}, 3),
        ({}, {"token_ids": None, "logprobs": {"content": [{}, {}]}}, 2),
    ],
)
def test_tokens_of_the_first_chunk_are_counted_where_the_server_tells(
    extra: dict[str, object], choice: dict[str, object], tokens: int
) -> None:
    """C099."""
    reader = read(event({"choices": [{"index": 0, "delta": {"content": "x"}, **choice}], **extra}))
    assert reader.first_chunk_tokens == tokens


# --- text completions and kinds without tokens


def test_text_completions_have_no_role_chunk() -> None:
    def text(value: object, finish: str | None = None) -> bytes:
        return event({"choices": [{"index": 0, "text": value, "finish_reason": finish}]})

    reader = read(text(" done"), text("."), text("", "stop"), text(None), text(["x"]), DONE, kind="completions")
    assert instants(reader) == (1, 1, 1, 2)
    assert verdict_of(reader) == "ok"


@pytest.mark.parametrize("kind", ["embeddings", "opaque"])
def test_kinds_without_tokens_know_events_errors_and_the_end(kind: Kind) -> None:
    reader = read(event({"error": {"code": 500, "message": "x"}}), b"data: {oops\n\n", DONE, event({"a": 1}), kind=kind)
    assert (reader.events, reader.is_done, reader.bad_events) == (4, True, 1)
    assert (reader.usage, reader.server, reader.t_token) == (None, None, 0)
    assert reader.error is not None


def test_every_kind_has_a_reader() -> None:
    for kind in get_args(Kind):
        assert repr(read(b"data: {}\n\n", kind=kind)).endswith("(open, 1 events, 0 with tokens)")
    assert "done" in repr(read(DONE))
    assert "finished" in repr(read(STOP))
