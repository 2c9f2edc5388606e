"""Ordinary chunks are recognised without parsing, and nothing that is read of a stream may depend on it."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.openai import ChatReader, CompletionsReader
from gateway.wire.stream import REASONING, TOKEN
from gateway.wire.template import MAX_TRIES, learn


def chunk(delta: Mapping[str, object], finish: str | None = None, index: int = 0, **top: object) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": None}
    payload = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps({**payload, **top}, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def test_a_template_is_what_stands_around_the_text() -> None:
    template = learn(chunk({"content": "你好"}), TOKEN)
    assert template is not None
    assert template.before.endswith(b'"content":"')
    assert template.after.startswith(b'"},"logprobs"')
    assert template.kind == TOKEN


@pytest.mark.parametrize(
    "data",
    [
        chunk({"content": 'a "b"'}),
        chunk({"content": "a\\b"}),
        chunk({"content": "a<b"}),
        chunk({"content": ""}),
        chunk({"content": "a", "reasoning": "b"}),
        chunk({"content": "a"}, usage={"prompt_tokens": 1}),
        chunk({"content": "a"}) * 2,
        chunk({"content": "a"}).replace(b"\n", b"\r\n"),
        chunk({"content": "a"}, system="x" * 5000),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
        b": keep-alive\n\n",
        b"data: [DONE]\n\n",
    ],
)
def test_what_is_not_ordinary_gives_no_template(data: bytes) -> None:
    assert learn(data, TOKEN) is None


def seen(reader: ChatReader) -> dict[str, object]:
    choices = {
        index: (c.phase, c.t_visible, c.has_reasoning, c.has_tool, c.is_late_close, c.carry)
        for index, c in reader.choices.items()
    }
    names = (
        "t_event",
        "t_token",
        "t_visible",
        "t_last",
        "events",
        "token_events",
        "reasoning_events",
        "finish_reasons",
    )
    more = ("is_done", "is_finished", "gaps", "usage", "server", "bad_events", "inspect_lost", "has_reasoning", "error")
    return {"choices": choices, **{name: getattr(reader, name) for name in (*names, *more)}}


texts = st.one_of(
    st.sampled_from(["a", " b", "你", "<", "</th", "ink>", "</think>", "<think>", "\n", " ", "", '"', "\\", "a<b"]),
    st.text(max_size=4),
)
deltas = st.one_of(
    st.builds(lambda t: {"content": t}, texts),
    st.builds(lambda t: {"reasoning": t}, texts),
    st.builds(lambda t: {"reasoning_content": t, "content": None}, texts),
    st.builds(lambda t: {"content": t, "reasoning_content": None}, texts),
    st.just({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}),
    st.just({"role": "assistant", "content": ""}),
)
events = st.one_of(
    st.builds(chunk, deltas),
    st.builds(lambda d: chunk(d, index=1), deltas),
    st.builds(chunk, deltas, st.sampled_from(["stop", "length"])),
    st.builds(lambda d: chunk(d, usage={"prompt_tokens": 1, "completion_tokens": 2}), deltas),
    st.sampled_from(
        [b": keep-alive\n\n", b"data: [DONE]\n\n", b"data: {oops\n\n", b'data: {"error":{"message":"x"}}\n\n']
    ),
)


@given(
    st.lists(st.one_of(events, st.builds(chunk, st.builds(lambda t: {"content": t}, texts))), max_size=30), st.data()
)
def test_a_stream_reads_the_same_with_and_without_templates(stream: list[bytes], data: st.DataObject) -> None:
    reads: list[bytes] = []
    for event in stream:
        cut = data.draw(st.integers(0, len(event) if data.draw(st.booleans()) else 0))
        reads += [part for part in (event[:cut], event[cut:]) if part]
    quick, slow = ChatReader(), ChatReader()
    slow._tries = MAX_TRIES
    for number, read in enumerate(reads, 1):
        quick.feed(read, number * 1000)
        slow.feed(read, number * 1000)
        assert seen(quick) == seen(slow)
    quick.close(10**9)
    slow.close(10**9)
    assert seen(quick) == seen(slow)


def test_long_thinking_and_the_answer_after_it_each_get_a_template() -> None:
    reader = ChatReader()
    for number, delta in enumerate([{"reasoning": "a"}, {"reasoning": "b"}, {"content": "c"}, {"content": "d"}], 1):
        reader.feed(chunk(delta), number)
        assert reader._template is not None
        assert reader._template.kind == (REASONING if number <= 2 else TOKEN)
    assert (reader.reasoning_events, reader.token_events, reader.t_visible) == (2, 4, 3)


def test_text_completions_are_ordinary_too() -> None:
    reader = CompletionsReader()
    payload = {"id": "c", "choices": [{"index": 0, "text": "hello", "finish_reason": None}]}
    for number in (1, 2, 3):
        reader.feed(b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n", number)
    assert reader._template is not None
    assert (reader.token_events, reader.t_last) == (3, 3)


def test_streams_that_never_repeat_are_not_tried_for_ever() -> None:
    reader = ChatReader()
    for number in range(1, 50):
        reader.feed(chunk({"content": "a"}, created=number), number)
    assert reader._tries == MAX_TRIES
    assert reader.token_events == 49
