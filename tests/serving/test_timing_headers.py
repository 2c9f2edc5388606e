"""What an answer tells about itself: times, changes, where it came from."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.playing import plain, serving, streaming
from tests.support.raw import DONE, RawUpstream, Received, Wire, answer, chat, chunk, framed, whole
from tests.support.running import running_gateway, settings_for

STREAM: list[bytes | float] = [chunk({"content": "x"}), 0.03, chunk({"content": "y"}), chunk(finish="stop"), DONE]
TRAILER = {"x-gateway-timing": "trailer"}


def server_timing(value: str | None) -> dict[str, float]:
    assert value is not None
    parts = [re.fullmatch(r"(\w+);dur=(\d+(?:\.\d+)?)", part) for part in value.split(", ")]
    return {part[1]: float(part[2]) for part in parts if part is not None}


async def test_a_stream_tells_what_is_known_when_its_head_leaves() -> None:
    async with serving(streaming(0.05, *STREAM)) as (_, running):
        response = await running.ask(chat())
        timing = server_timing(response.header("server-timing"))
        assert set(timing) == {"upload", "gateway", "connect", "wait", "ttft", "reasoning"}
        assert 45 <= timing["wait"] <= timing["ttft"]
        assert timing["reasoning"] == 0


async def test_a_plain_answer_has_no_first_token_to_tell_of() -> None:
    async with serving(plain()) as (_, running):
        timing = server_timing((await running.ask(chat(stream=False))).header("server-timing"))
        assert {"upload", "gateway", "connect"} <= set(timing)
        assert "ttft" not in timing


async def test_a_reused_connection_took_no_time_to_connect() -> None:
    async with serving(plain()) as (_, running):
        await running.ask(chat(stream=False))
        response = await running.ask(chat(stream=False))
        assert server_timing(response.header("server-timing"))["connect"] == 0


async def test_an_upstreams_own_timing_is_not_mixed_with_ours() -> None:
    headers = "content-type: application/json\r\nserver-timing: db;dur=53\r\nx-gateway-route: forged"
    async with serving(plain(headers=headers)) as (_, running):
        response = await running.ask(chat(stream=False))
        assert len(response.all("server-timing")) == 1
        assert "db" not in (response.header("server-timing") or "")
        assert response.all("x-gateway-route") == ["main"]


async def test_every_answer_tells_its_route_upstream_attempts_and_id() -> None:
    async with serving(plain()) as (_, running):
        response = await running.ask(chat(stream=False))
        assert response.header("x-gateway-route") == "main"
        assert response.header("x-gateway-upstream") == "up"
        assert response.header("x-gateway-attempts") == "1"
        assert response.header("x-gateway-changes") is None
        assert re.fullmatch(r"[0-9a-f]{32}", response.header("x-request-id") or "")


async def test_an_error_tells_how_far_it_got() -> None:
    async with running_gateway(settings_for("http://127.0.0.1:9")) as running:
        response = await running.ask(chat(stream=False))
        assert response.status == 503
        assert response.header("x-gateway-route") == "main"
        assert response.header("x-gateway-upstream") == "up"
        assert response.json["request_id"] == response.header("x-request-id")


async def test_changes_are_told_in_one_header() -> None:
    route = {
        "thinking": "off", "max_tokens": {"ceiling": 64}, "defaults": {"temperature": 0.3}, "override": {"top_p": 0.9},
        "drop": ["logit_bias"], "model": "n",
    }  # fmt: skip
    async with serving(plain(), route=route) as (_, running):
        sent = chat(stream=False, content="bell \x07 ———", max_tokens=256, logit_bias={})
        response = await running.ask(sent)
        changes = (response.header("x-gateway-changes") or "").split(", ")
        assert changes == [
            "clean=control:1+dashes:1", "drop=logit_bias", "default=temperature", "override=top_p", "model=n",
            "thinking=off", "max_tokens=256>64",
        ]  # fmt: skip
        for kind in ("drop", "default", "override", "model", "thinking", "max_tokens"):
            assert await running.metric("gateway_policy_changes_total", route="main", kind=kind) == 1


async def test_a_refused_answer_tells_the_changes_too() -> None:
    """An edit of ours may be why."""

    async def play(request: Received, wire: Wire) -> None:
        wire.close()

    async with serving(play, route={"thinking": "off"}) as (_, running):
        response = await running.ask(chat(stream=False))
        assert response.status == 502
        assert response.header("x-gateway-changes") == "thinking=off"


async def test_a_caller_can_ask_for_all_times_behind_the_stream() -> None:
    """`x-gateway-timing: trailer`: a comment block after `[DONE]`, which every client ignores."""
    async with serving(streaming(0.03, *STREAM)) as (_, running):
        response = await running.ask(chat(), headers=TRAILER)
        before, mark, trailer = response.body.partition(b": timing ")
        assert before == b"".join(event for event in STREAM if isinstance(event, bytes))
        assert mark
        assert trailer.endswith(b"\n\n")
        times = json.loads(trailer)
        record = await running.last_record()
        assert times["request_id"] == response.header("x-request-id")
        names = ("upload", "gateway", "connect", "wait", "reasoning", "decode", "tail")
        assert sum(times[f"{name}_ms"] for name in names) == pytest.approx(times["e2e_ms"], abs=0.1)
        for name in ("ttft_ms", "ttfv_ms", "e2e_ms", "wait_ms", "decode_ms"):
            assert times[name] == pytest.approx(record[name], abs=0.01)


async def test_without_asking_nothing_is_added() -> None:
    async with serving(streaming(*STREAM)) as (_, running):
        assert b": timing" not in (await running.ask(chat())).body
        assert b": timing" not in (await running.ask(chat(), headers={"x-gateway-timing": "no"})).body


async def test_a_plain_answer_stays_json_also_when_times_were_asked_for() -> None:
    async with serving(plain()) as (upstream, running):
        assert (await running.ask(chat(stream=False), headers=TRAILER)).body == answer()
        assert upstream.requests[0].header("x-gateway-timing") is None


async def test_a_failed_stream_has_its_times_after_the_error() -> None:
    async def play(request: Received, wire: Wire) -> None:
        await wire.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
            framed(chunk({"content": "x"})),
        )
        wire.close()

    async with serving(play) as (_, running):
        response = await running.ask(chat(), headers=TRAILER)
        assert response.error["code"] == "upstream_bad_response"
        assert b"data: [DONE]\n\n: timing {" in response.body


async def test_attempts_at_other_upstreams_are_told() -> None:
    async with RawUpstream(plain()) as good, RawUpstream(plain()) as gone:
        settings = settings_for({"a": gone.url, "b": good.url})
        gone._server.close()
        await gone._server.wait_closed()
        async with running_gateway(settings) as running:
            answers = [await running.ask(chat(stream=False)) for _ in range(3)]
            assert {response.header("x-gateway-upstream") for response in answers} == {"b"}
            assert {response.status for response in answers} == {200}


async def test_the_cause_of_a_wait_is_told_where_the_server_measured_it() -> None:
    """spec §8, latency-methods §3: vLLM's per-request metrics."""
    metrics = {"queue_time_ms": 20.0, "time_to_first_token_ms": 25.0, "generation_time_ms": 5.0}
    last = chunk(finish="stop", metrics=metrics, usage={"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3})
    async with serving(streaming(0.06, chunk({"content": "x"}), chunk({"content": "y"}), last, DONE)) as (_, running):
        await running.ask(chat(stream_options={"include_usage": True}))
        causes = (await running.last_record())["wait_causes"]
        assert causes["queue_ms"] == pytest.approx(20, abs=1)
        assert causes["prefill_ms"] == pytest.approx(25, abs=1)
        for cause in ("queue", "prefill"):
            assert await running.metric("gateway_wait_seconds_count", upstream="up", cause=cause, source="server") == 1


async def test_a_whole_answer_says_where_its_time_went_too() -> None:
    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(answer()))

    async with serving(play) as (_, running):
        await running.ask(chat(stream=False))
        record = await running.last_record()
        names = ("upload", "gateway", "connect", "wait", "reasoning", "decode", "tail")
        assert sum(record[f"{name}_ms"] for name in names) == pytest.approx(record["e2e_ms"], abs=0.1)
        assert record["ttft_source"] == "none"
