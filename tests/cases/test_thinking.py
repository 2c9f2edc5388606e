"""Thinking that nobody asked for, answers that never came, and whether a switch worked."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.support.playing import error_body, plain, serving, streaming
from tests.support.raw import DONE, Handler, Received, Wire, answer, chat, chunk, usage_chunk, whole

OFF = {"thinking": "off"}
THOUGHTS = "I wonder. " * 150


def burnt(content: str | None = "") -> bytes:
    body = json.loads(answer(content, "length", reasoning_content=THOUGHTS))
    body["usage"] |= {"completion_tokens": 200, "completion_tokens_details": {"reasoning_tokens": 199}}
    return json.dumps(body).encode()


@pytest.mark.parametrize("content", ["", None, "\n\n"])
async def test_a_budget_burnt_by_thinking_is_seen_and_the_bytes_stay(content: str | None) -> None:
    """C081: 200, billed, and silent."""
    async with serving(plain(burnt(content))) as (_, running):
        response = await running.ask(chat(stream=False, max_tokens=200))
        assert (response.status, response.body) == (200, burnt(content))
        record = await running.last_record()
        assert (record["verdict"], record["outcome"]) == ("burnt_by_thinking", "complete")
        assert await running.metric("gateway_empty_answers_total", route="main", kind="burnt_by_thinking") == 1
        assert await running.metric("gateway_tokens_total", kind="reasoning") == 199


@pytest.mark.parametrize("blank", [[], [chunk({"content": "\n\n"})]], ids=["nothing", "blank"])
async def test_a_stream_burnt_by_thinking_is_seen_too(blank: list[bytes]) -> None:
    """C081."""
    events = [chunk({"reasoning_content": "hm "}), *blank, chunk(finish="length"), DONE]
    async with serving(streaming(*events)) as (_, running):
        response = await running.ask(chat(max_tokens=2))
        assert response.body == b"".join(events)
        assert (await running.last_record())["verdict"] == "burnt_by_thinking"
        assert await running.metric("gateway_empty_answers_total", kind="burnt_by_thinking") == 1


def rescued() -> Handler:
    async def play(request: Received, wire: Wire) -> None:
        is_off = request.json.get("chat_template_kwargs", {}).get("enable_thinking") is False
        await wire.send(whole(answer("at last") if is_off else burnt()))

    return play


async def test_a_route_that_rescues_asks_once_more_with_thinking_off_and_says_so() -> None:
    """C081: only plain requests, only where the route wants it."""
    async with serving(rescued(), route={"rescue": True}) as (upstream, running):
        response = await running.ask(chat(stream=False, max_tokens=200))
        assert response.json["choices"][0]["message"]["content"] == "at last"
        assert len(upstream.requests) == 2
        assert "sent_again=rescue" in (response.header("x-gateway-changes") or "")
        assert response.header("x-gateway-attempts") == "2"
        assert (await running.last_record())["verdict"] == "ok"
        assert await running.metric("gateway_policy_changes_total", kind="rescue") == 1
        assert await running.metric("gateway_attempts_total", kind="retry") == 1
        assert await running.metric("gateway_empty_answers_total") == 0
        await running.settled()


async def test_a_rescue_that_burns_again_is_no_loop() -> None:
    """C081."""
    async with serving(plain(burnt()), route={"rescue": True}) as (upstream, running):
        response = await running.ask(chat(stream=False, max_tokens=200))
        assert (response.status, response.body, len(upstream.requests)) == (200, burnt(), 2)
        assert (await running.last_record())["verdict"] == "burnt_by_thinking"


async def test_without_the_setting_nothing_is_sent_twice() -> None:
    """C081."""
    async with serving(rescued()) as (upstream, running):
        assert (await running.ask(chat(stream=False, max_tokens=200))).body == burnt()
        assert len(upstream.requests) == 1


def said(content: str | None, finish: str, tokens: int, **message: object) -> bytes:
    body = json.loads(answer(content, finish, **message))
    body["usage"]["completion_tokens"] = tokens
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    "body, verdict",
    [
        (said("", "stop", 200, reasoning_content=THOUGHTS), "burnt_by_thinking"),
        (said(None, "stop", 16), "burnt_by_thinking"),
        (said("", "stop", 1), "empty"),
        (said("hello", "length", 16), "ok"),
        (said("", "content_filter", 3), "empty"),
    ],
)
async def test_empty_answers_are_told_apart(body: bytes, verdict: str) -> None:
    """C082."""
    limit = 16 if b"I wonder" not in body else 200
    async with serving(plain(body)) as (_, running):
        assert (await running.ask(chat(stream=False, max_tokens=limit))).body == body
        assert (await running.last_record())["verdict"] == verdict


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
    ],
)
async def test_reasoning_under_all_its_names_is_timed_and_never_renamed(delta: dict[str, object]) -> None:
    """C083."""
    events: list[bytes | float] = [chunk(delta), 0.06, chunk({"content": "a"}), chunk(finish="stop"), DONE]
    async with serving(streaming(*events)) as (upstream, running):
        history = [{"role": "assistant", "content": "a", **delta}, {"role": "user", "content": "b"}]
        sent = json.dumps({"model": "m", "stream": True, "messages": history}).encode()
        response = await running.ask(sent)
        assert response.body == b"".join(event for event in events if isinstance(event, bytes))
        assert upstream.requests[0].body == sent
        record = await running.last_record()
        assert 0 < record["ttft_ms"] < record["ttfv_ms"]
        assert record["reasoning_ms"] > 50
        assert record["reasoning_ms"] >= 50
        assert record["chunks"] == 2


async def test_an_answer_put_into_the_reasoning_field_is_misrouted_and_not_burnt() -> None:
    """C084: thinking was off, so the parser waited for a `</think>` that never came."""
    body = said(None, "stop", 12, reasoning_content="I am a model.")
    async with serving(plain(body), route={**OFF, "rescue": True}) as (upstream, running):
        assert (await running.ask(chat(stream=False))).body == body
        assert len(upstream.requests) == 1
        assert (await running.last_record())["verdict"] == "misrouted"
        assert await running.metric("gateway_empty_answers_total", kind="misrouted") == 1
        assert await running.metric("gateway_thinking_violations_total") == 0


async def test_a_misrouted_stream_is_seen_too() -> None:
    """C084."""
    events = [
        chunk({"reasoning_content": "I am"}),
        chunk({"reasoning_content": " a model"}),
        chunk(finish="stop"),
        DONE,
    ]
    async with serving(streaming(*events), route=OFF) as (_, running):
        assert (await running.ask(chat())).body == b"".join(events)
        assert (await running.last_record())["verdict"] == "misrouted"
        assert await running.metric("gateway_thinking_violations_total") == 0


async def test_a_switch_that_the_model_ignores_is_measured_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """C085: accepted and silently ignored, the wrong key for this template."""
    thinking = [chunk({"reasoning_content": "hm"}), chunk({"content": "a"}), chunk(finish="stop"), DONE]
    with caplog.at_level(logging.WARNING, "gateway"):
        async with serving(streaming(*thinking), route=OFF) as (upstream, running):
            for _ in range(3):
                await running.ask(chat())
            kwargs = upstream.requests[0].json["chat_template_kwargs"]
            assert kwargs == {"thinking": False, "enable_thinking": False}  # both, as the family is not known
            assert await running.metric("gateway_thinking_violations_total", route="main", kind="reasoning_seen") == 3
            status = (await running.get("/gateway/status")).json
            assert status["routes"][0]["thinking_violated_at"] == ["up"]
    assert sum("not to think" in record.getMessage() for record in caplog.records) == 1


async def test_a_400_that_our_switch_caused_is_sent_once_without_it_and_remembered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C086."""

    async def play(request: Received, wire: Wire) -> None:
        if "chat_template_kwargs" in request.json:
            await wire.send(whole(error_body("Unsupported kwarg: chat_template_kwargs"), "400 Bad Request"))
        else:
            await wire.send(whole(answer()))

    with caplog.at_level(logging.WARNING, "gateway"):
        async with serving(play, route=OFF) as (upstream, running):
            first = await running.ask(chat(stream=False))
            assert (first.status, len(upstream.requests)) == (200, 2)
            assert "sent_again=without_thinking" in (first.header("x-gateway-changes") or "")
            second = await running.ask(chat(stream=False))
            assert (second.status, len(upstream.requests)) == (200, 3)
            assert upstream.requests[2].body == chat(stream=False)
            assert await running.metric("gateway_thinking_violations_total", kind="switch_rejected") == 1
            assert (await running.get("/gateway/status")).json["upstreams"]["up"]["refuses_thinking_switch"] == ["m"]
    assert sum("refuses the thinking switch" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_400_for_the_callers_own_switch_is_the_callers(stream: bool) -> None:
    """C086: no silent loop, the error as it came."""
    refusal = error_body("Unsupported kwarg: chat_template_kwargs")
    sent = chat(stream, chat_template_kwargs={"enable_thinking": False})
    async with serving(plain(refusal, "400 Bad Request")) as (upstream, running):
        response = await running.ask(sent)
        assert (response.status, response.body, len(upstream.requests)) == (400, refusal, 1)


async def test_another_400_is_not_blamed_on_the_switch() -> None:
    """C086: the error reaches the caller unchanged, with what the gateway had changed."""
    refusal = error_body("temperature must be between 0 and 2")
    async with serving(plain(refusal, "400 Bad Request"), route=OFF) as (upstream, running):
        response = await running.ask(chat(stream=False))
        assert (response.status, response.body, len(upstream.requests)) == (400, refusal, 1)
        assert response.header("x-gateway-changes") == "thinking=off"


@pytest.mark.parametrize(
    "given, kept",
    [
        ({"chat_template_kwargs": {"enable_thinking": True, "foo": 1}}, {"foo": 1}),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, {}),
        ({"reasoning_effort": "high"}, {}),
        ({"chat_template_kwargs": None}, {}),
    ],
)
async def test_the_callers_own_template_arguments_are_merged(given: dict[str, Any], kept: dict[str, object]) -> None:
    """C087: `foo` stays, the route's wish goes before, a literal `extra_body` is not interpreted."""
    async with serving(plain(), route=OFF, upstream={"family": "qwen3"}) as (upstream, running):
        response = await running.ask(chat(stream=False, **given))
        assert response.status == 200
        arrived = upstream.requests[0].json
        assert arrived["chat_template_kwargs"] == kept | {"enable_thinking": False, "thinking": False}
        assert arrived.get("extra_body") == given.get("extra_body")
        assert arrived.get("reasoning_effort") is None
        assert "thinking=off" in (response.header("x-gateway-changes") or "")


async def test_template_arguments_in_a_string_are_left_for_the_server_to_judge() -> None:
    """C087: strings are not parsed, and no edit is made that would break the body."""
    sent = chat(stream=False, chat_template_kwargs='{"enable_thinking":false}')
    async with serving(plain(), route=OFF) as (upstream, running):
        assert (await running.ask(sent)).status == 200
        assert upstream.requests[0].json["chat_template_kwargs"] == '{"enable_thinking":false}'


async def test_a_model_name_can_ask_for_no_thinking() -> None:
    """spec §4: `-nothinking`."""
    async with serving(plain()) as (upstream, running):
        response = await running.ask(chat(stream=False, model="qwen3-nothinking"))
        assert response.status == 200
        arrived = upstream.requests[0].json
        assert arrived["model"] == "qwen3"
        assert arrived["chat_template_kwargs"]["enable_thinking"] is False


def texts(*pieces: str | float, finish: str = "stop") -> list[bytes | float]:
    parts = [chunk({"content": piece}) if isinstance(piece, str) else piece for piece in pieces]
    return [*parts, chunk(finish=finish), DONE]


@pytest.mark.parametrize(
    "pieces",
    [
        ("<thi", "nk>plan</th", 0.06, "ink>", "\n\nAnswer a < b"),
        ("plan", "</th", 0.06, "ink>", "\n\nAnswer a < b"),
        ("<think>\n", "</think>", 0.06, "Answer"),
    ],
    ids=["cut", "no-opening-tag", "empty-span"],
)
async def test_thoughts_inside_the_text_are_timed_and_relayed_as_they_came(pieces: tuple[str | float, ...]) -> None:
    """C088: a server without a reasoning parser; tags split over chunks."""
    events = texts(*pieces)
    async with serving(streaming(*events)) as (_, running):
        response = await running.ask(chat())
        assert response.body == b"".join(event for event in events if isinstance(event, bytes))
        record = await running.last_record()
        assert record["ttfv_ms"] - record["ttft_ms"] >= 50
        assert record["verdict"] == "ok"


async def test_a_span_that_never_closes_is_an_empty_answer() -> None:
    """C088."""
    async with serving(streaming(*texts("<think>plan", " and plan", finish="length"))) as (_, running):
        await running.ask(chat())
        record = await running.last_record()
        assert (record["verdict"], record["ttfv_ms"]) == ("burnt_by_thinking", None)


async def test_a_tag_in_the_middle_of_an_answer_is_text() -> None:
    """C088."""
    async with serving(streaming(*texts("use the <think> tag", 0.05, " and </think> it"))) as (_, running):
        await running.ask(chat())
        record = await running.last_record()
        assert record["ttft_ms"] == record["ttfv_ms"]
        assert record["verdict"] == "ok"


async def test_two_choices_think_apart() -> None:
    """C088, C011: `</think>` of one must not end the thoughts of the other."""
    events: list[bytes | float] = [
        chunk({"content": "<think>a"}, index=0), chunk({"content": "<think>b"}, index=1),
        chunk({"content": "</think>"}, index=0), 0.05, chunk({"content": "A"}, index=0),
        chunk(finish="stop", index=0), chunk({"content": "c"}, index=1), chunk(finish="length", index=1),
        usage_chunk(), DONE,
    ]  # fmt: skip
    async with serving(streaming(*events)) as (_, running):
        await running.ask(chat(n=2))
        record = await running.last_record()
        assert record["ttfv_ms"] - record["ttft_ms"] >= 40
        assert record["verdict"] == "burnt_by_thinking"  # of the second choice


async def test_a_switch_is_only_given_up_where_leaving_it_out_helped() -> None:
    """A 400 that names the switch and comes again without it was about something else: the next request has it."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(b'{"error":{"message":"unknown chat_template_kwargs","code":400}}', "400 Bad Request"))

    async with serving(play, route={"thinking": "off"}) as (upstream, running):
        for _ in range(2):
            assert (await running.ask(chat(stream=False))).status == 400
        sent = ["chat_template_kwargs" in request.json for request in upstream.requests]
        assert sent == [True, False, True, False]
        assert not running.gateway.runtime.upstreams["up"].refuses_switch.names()


@pytest.mark.parametrize("second", ["500", "reset", "html"])
async def test_a_rescue_that_fails_leaves_the_caller_the_answer_it_had(second: str) -> None:
    """Asking once more is a favour: it may not turn an empty answer into an error."""
    bodies = burnt()

    async def play(request: Received, wire: Wire) -> None:
        if len(upstream.requests) == 1:
            await wire.send(whole(bodies))
        elif second == "500":
            await wire.send(whole(b'{"error":{"message":"boom"}}', "500 Internal Server Error"))
        elif second == "html":
            await wire.send(whole(b"<html>", headers="content-type: text/html"))
        else:
            wire.reset()

    async with serving(play, route={"rescue": True}) as (upstream, running):
        response = await running.ask(chat(stream=False))
        assert (response.status, response.body) == (200, bodies)
        assert len(upstream.requests) >= 2
        record = await running.last_record()
        assert (record["outcome"], record["verdict"]) == ("complete", "burnt_by_thinking")
        assert "thinking=off" not in record["changes"]
        await running.settled()
