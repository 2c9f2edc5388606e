"""Agents: tool calls in requests, in streams and in whole answers."""

from __future__ import annotations

import json

import pytest

from tests.support.playing import plain, serving, streaming
from tests.support.raw import DONE, answer, chat, chunk

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ROLE = chunk({"role": "assistant", "content": None})
POLICY = {"thinking": "off", "max_tokens": {"default": 512}}


def deltas(*calls: dict[str, object]) -> list[bytes]:
    return [chunk({"tool_calls": [call]}) for call in calls]


@pytest.mark.parametrize(
    "turn",
    [
        {"content": None, "tool_calls": [CALL]},
        {"content": "", "tool_calls": [CALL]},
        {"tool_calls": [CALL]},
        {"content": "", "tool_calls": []},
        {"content": None},
    ],
)
@pytest.mark.parametrize("route", [{}, POLICY], ids=["as-is", "policies"])
async def test_the_second_round_of_a_tool_call_arrives_as_it_was_sent(
    turn: dict[str, object], route: dict[str, object]
) -> None:
    """C074: null stays null, "" stays "", nothing is dropped or invented."""
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", **turn},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    sent = json.dumps({"model": "m", "messages": messages})
    async with serving(plain(), route=route) as (upstream, running):
        assert (await running.ask(sent.encode())).status == 200
        assert json.dumps(messages) in upstream.requests[0].body.decode()


@pytest.mark.parametrize(
    "calls",
    [
        [
            {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x":'}},
            {"index": 0, "function": {"arguments": "1}"}},
            {"index": 0, "id": "b", "function": {"name": "g", "arguments": "{}"}},
        ],
        [{"id": "a", "function": {"name": "f", "arguments": "{}"}}, {"function": {"arguments": ""}}],
        [{"index": 0, "function": {"name": "f"}}, {"index": 0, "id": "a", "function": {"arguments": "{}"}}],
    ],
    ids=["reused-index", "no-index", "late-id"],
)
async def test_odd_tool_call_deltas_are_relayed_untouched(calls: list[dict[str, object]]) -> None:
    """C075."""
    events = [ROLE, *deltas(*calls), chunk(finish="tool_calls"), DONE]
    async with serving(streaming(*events)) as (_, running):
        response = await running.ask(chat())
        assert response.body == b"".join(events)
        record = await running.last_record()
        assert (record["outcome"], record["verdict"]) == ("complete", "ok")


TOOL_DELTAS = [
    {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":1}'}}]},
]


@pytest.mark.parametrize(
    "first, finish",
    [
        (TOOL_DELTAS[0], "tool_calls"),
        (TOOL_DELTAS[1], "stop"),
        ({"function_call": {"name": "f", "arguments": ""}}, "function_call"),
        ({"refusal": "No."}, "stop"),
        ({"audio": {"data": "AAAA"}}, "stop"),
    ],
    ids=["name", "arguments", "legacy", "refusal", "audio"],
)
async def test_a_turn_without_text_has_a_first_token_and_is_not_empty(first: dict[str, object], finish: str) -> None:
    """C076: no sample, and flagged as an empty answer."""
    events: list[bytes | float] = [ROLE, 0.06, chunk(first), 0.02, chunk(finish=finish), DONE]
    async with serving(streaming(*events)) as (_, running):
        await running.ask(chat())
        record = await running.last_record()
        assert record["ttft_ms"] >= 55
        assert record["ttfv_ms"] == record["ttft_ms"]
        assert record["verdict"] == "ok"
        assert await running.metric("gateway_ttft_seconds_count") == 1
        assert await running.metric("gateway_empty_answers_total") == 0


@pytest.mark.parametrize(
    "message, finish",
    [
        ({"tool_calls": [CALL]}, "tool_calls"),
        ({"function_call": {"name": "f", "arguments": "{}"}}, "function_call"),
        ({"refusal": "No."}, "stop"),
        ({"audio": {"id": "a", "data": "AAAA", "transcript": "hi"}}, "stop"),
    ],
)
async def test_a_whole_answer_without_text_is_not_empty_and_not_asked_again(
    message: dict[str, object], finish: str
) -> None:
    """C076."""
    body = answer(None, finish, **message)
    async with serving(plain(body), route={"rescue": True}) as (upstream, running):
        assert (await running.ask(chat(stream=False, max_tokens=2))).body == body
        assert len(upstream.requests) == 1
        assert (await running.last_record())["verdict"] == "ok"
        assert await running.metric("gateway_empty_answers_total") == 0
