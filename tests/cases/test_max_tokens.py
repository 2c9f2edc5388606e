"""Token budgets: what the rules change, and that no rule of ours makes a good request fail."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.playing import error_body, plain, serving, streaming
from tests.support.raw import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    Received,
    Wire,
    answer,
    chat,
    chunk,
    framed,
    usage_chunk,
    whole,
)
from tests.support.running import until

FLOOR = {"max_tokens": {"floor": 1024}}
TOO_LONG = error_body(
    "This model's maximum context length is 4096 tokens. However, you requested 4524 tokens (3500 in the messages, "
    "1024 in the completion). Please reduce the length of the messages or completion."
)


async def play_4096(request: Received, wire: Wire) -> None:
    """A model with 4096 tokens of context, 3500 of which the prompt takes."""
    wanted = request.json.get("max_tokens") or request.json.get("max_completion_tokens") or 0
    if wanted + 3500 > 4096:
        await wire.send(whole(TOO_LONG, "400 Bad Request"))
    elif request.json.get("stream"):
        await wire.send(
            STREAM_HEAD, framed(chunk({"content": "x"})), framed(chunk(finish="stop")), framed(DONE), LAST_CHUNK
        )
    else:
        await wire.send(whole(answer()))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_floor_never_makes_a_request_fail_that_was_good_without_it(stream: bool) -> None:
    """C092."""
    async with serving(play_4096, route=FLOOR) as (upstream, running):
        response = await running.ask(chat(stream, max_tokens=300))
        assert response.status == 200
        assert [request.json["max_tokens"] for request in upstream.requests] == [1024, 300]
        assert "sent_again=floor_backed_off" in (response.header("x-gateway-changes") or "")
        assert await running.metric("gateway_policy_changes_total", kind="floor_backed_off") == 1
        await running.settled()


async def test_a_request_that_is_too_long_by_itself_gets_the_servers_own_words() -> None:
    """C092, C037: the caller's own 700 tokens did not fit either."""
    async with serving(play_4096, route=FLOOR) as (upstream, running):
        response = await running.ask(chat(stream=False, max_tokens=700))
        assert (response.status, response.body) == (400, TOO_LONG)
        assert [request.json["max_tokens"] for request in upstream.requests] == [1024, 700]


async def test_a_default_that_is_too_long_is_taken_back() -> None:
    """C092, for a caller who named no number."""
    async with serving(play_4096, route={"max_tokens": {"default": 2048}}) as (upstream, running):
        assert (await running.ask(chat(stream=False))).status == 200
        assert [request.json.get("max_tokens") for request in upstream.requests] == [2048, None]


async def test_a_context_error_that_is_not_ours_is_not_sent_again() -> None:
    """C092."""
    async with serving(play_4096) as (upstream, running):
        assert (await running.ask(chat(stream=False, max_tokens=2000))).body == TOO_LONG
        assert len(upstream.requests) == 1


@pytest.mark.parametrize(
    "path, given, arrived",
    [
        ("/v1/chat/completions", {"max_tokens": 100}, {"max_tokens": 1024}),
        ("/v1/chat/completions", {"max_completion_tokens": 100}, {"max_completion_tokens": 1024}),
        (
            "/v1/chat/completions",
            {"max_tokens": 100, "max_completion_tokens": 200},
            {"max_tokens": 1024, "max_completion_tokens": 1024},
        ),
        ("/v1/chat/completions", {}, {"max_tokens": 2048}),
        ("/v1/chat/completions", {"max_tokens": None}, {"max_tokens": 2048}),
        ("/v1/chat/completions", {"max_tokens": 9999}, {"max_tokens": 4096}),
        ("/v1/completions", {"prompt": "p", "max_tokens": 9999}, {"max_tokens": 4096}),
        ("/v1/responses", {"input": "p", "max_output_tokens": 9999}, {"max_output_tokens": 4096}),
        ("/v1/responses", {"input": "p"}, {"max_output_tokens": 2048}),
        ("/v1/messages", {"max_tokens": 9999}, {"max_tokens": 4096}),
    ],
)
async def test_the_field_that_the_caller_used_is_the_one_that_is_edited(
    path: str, given: dict[str, object], arrived: dict[str, object]
) -> None:
    """C093: a strict server refuses two, and two different values mean nothing."""
    rules = {"max_tokens": {"default": 2048, "floor": 1024, "ceiling": 4096}}
    async with serving(plain(), route=rules) as (upstream, running):
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **given}
        await running.ask(json.dumps(body).encode(), path)
        sent = upstream.requests[0].json
        assert {key: value for key, value in sent.items() if "tokens" in key} == arrived


@pytest.mark.parametrize(
    "given, thinking, arrived, changes",
    [
        ({"max_tokens": 1, "logprobs": True, "top_logprobs": 5}, "client", 1, None),
        ({"max_tokens": 5}, "client", 5, None),
        ({"max_tokens": 16}, "off", 16, "thinking=off"),
        ({"max_tokens": 256}, "off", 256, "thinking=off"),
        ({"max_tokens": 256}, "client", 1024, "max_tokens=256>1024"),
        ({"max_tokens": 256}, "on", 1024, "thinking=on, max_tokens=256>1024"),
        ({"max_tokens": 256, "n": 3}, "client", 256, None),
        ({"max_tokens": 256, "top_logprobs": 3, "logprobs": True}, "client", 256, None),
        ({"max_tokens": 17}, "client", 1024, "max_tokens=17>1024"),
    ],
)
async def test_small_budgets_on_purpose_stay_small(
    given: dict[str, Any], thinking: str, arrived: int, changes: str | None
) -> None:
    """C094: one-token classifiers and Dify's credential probe became long generations."""
    route = {**FLOOR, "thinking": thinking}
    async with serving(plain(), route=route, upstream={"family": "qwen3"}) as (upstream, running):
        response = await running.ask(chat(stream=False, **given))
        assert upstream.requests[0].json["max_tokens"] == arrived
        assert response.header("x-gateway-changes") == changes


ALWAYS = {"include_usage": "always"}
EVENTS = [chunk({"content": "x"}), chunk(finish="stop"), usage_chunk(), DONE]


async def test_a_plain_request_gets_no_stream_options() -> None:
    """C096a: it was a 400."""
    async with serving(plain(), upstream=ALWAYS) as (upstream, running):
        assert (await running.ask(chat(stream=False))).status == 200
        assert upstream.requests[0].body == chat(stream=False)


async def test_the_usage_frame_that_we_asked_for_does_not_reach_a_caller_who_did_not() -> None:
    """C096b: clients crash on the frame without choices; the rest is byte for byte."""
    async with serving(streaming(*EVENTS), upstream=ALWAYS) as (upstream, running):
        response = await running.ask(chat())
        assert upstream.requests[0].json["stream_options"] == {"include_usage": True}
        assert response.body == b"".join(event for event in EVENTS if event != usage_chunk())
        record = await running.last_record()
        assert (record["prompt_tokens"], record["completion_tokens"], record["outcome"]) == (3, 2, "complete")
        assert "usage=added" in (response.header("x-gateway-changes") or "")


async def test_a_caller_who_asked_for_usage_gets_it() -> None:
    """C096b."""
    sent = chat(stream_options={"include_usage": True})
    async with serving(streaming(*EVENTS), upstream=ALWAYS) as (upstream, running):
        response = await running.ask(sent)
        assert upstream.requests[0].body == sent
        assert response.body == b"".join(EVENTS)
        assert response.header("x-gateway-changes") is None


@pytest.mark.parametrize("options", [{"include_usage": False}, {"continuous_usage_stats": True}, {"vendor": 1}])
async def test_the_callers_own_stream_options_are_kept(options: dict[str, object]) -> None:
    """C096c."""
    async with serving(streaming(*EVENTS), upstream=ALWAYS) as (upstream, running):
        await running.ask(chat(stream_options=options))
        assert upstream.requests[0].json["stream_options"] == {**options, "include_usage": True}


async def test_usage_on_every_chunk_is_not_summed() -> None:
    """C096c."""
    running_totals = [
        chunk({"content": "x"}, usage={"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count})
        for count in (1, 2, 3)
    ]
    events = [*running_totals, chunk(finish="stop"), usage_chunk(3, 3), DONE]
    async with serving(streaming(*events)) as (_, running):
        await running.ask(chat(stream_options={"include_usage": True, "continuous_usage_stats": True}))
        assert (await running.last_record())["completion_tokens"] == 3
        assert await running.metric("gateway_tokens_total", kind="completion") == 3


@pytest.mark.parametrize("status", ["400 Bad Request", "422 Unprocessable Entity"])
async def test_a_server_that_refuses_the_field_is_asked_without_it_and_remembered(status: str) -> None:
    """C096d: strict and older servers."""

    async def play(request: Received, wire: Wire) -> None:
        if "stream_options" in request.json:
            await wire.send(whole(error_body("Unrecognized request argument: stream_options"), status))
        else:
            await wire.send(STREAM_HEAD, *map(framed, (EVENTS[0], EVENTS[1], DONE)), LAST_CHUNK)

    async with serving(play, upstream=ALWAYS) as (upstream, running):
        for _ in range(2):
            assert (await running.ask(chat())).status == 200
        assert ["stream_options" in request.json for request in upstream.requests] == [True, False, False]
        assert (await running.get("/gateway/status")).json["upstreams"]["up"]["refuses_usage"] == ["m"]
        await running.settled()


async def test_several_refusals_after_one_another_end() -> None:
    """C086, C092, C096 together: each of our edits is taken back once, and then the error is the caller's."""

    async def play(request: Received, wire: Wire) -> None:
        data = request.json
        for key, message in (
            ("stream_options", "stream_options is not supported"),
            ("chat_template_kwargs", "chat_template_kwargs is not supported"),
        ):
            if key in data:
                await wire.send(whole(error_body(message), "400 Bad Request"))
                return
        await wire.send(whole(TOO_LONG, "400 Bad Request"))

    async with serving(play, route={**FLOOR, "thinking": "on"}, upstream=ALWAYS) as (upstream, running):
        response = await running.ask(chat(max_tokens=300))
        assert (response.status, response.body) == (400, TOO_LONG)
        assert len(upstream.requests) == 4
        assert upstream.requests[-1].json["max_tokens"] == 300
        await until(lambda: len(running.records) == 1)
        await running.settled()
