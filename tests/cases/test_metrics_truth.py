"""Numbers that say what happened: first tokens, speeds, outcomes."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support.playing import error_body, plain, serving, streaming
from tests.support.raw import (
    DONE,
    STREAM_HEAD,
    RawUpstream,
    Received,
    Wire,
    answer,
    chat,
    chunk,
    framed,
    usage_chunk,
    whole,
)  # fmt: skip
from tests.support.running import running_gateway, settings_for

ROLE = chunk({"role": "assistant", "content": ""})
END = [chunk(finish="stop"), DONE]
WAIT = 0.15  # of the scripted model, in seconds


@pytest.mark.parametrize(
    "first",
    [
        [ROLE, 0.01, b": ping\n\n", WAIT, chunk({"content": "x"})],
        [chunk({"role": "assistant", "content": None}), 0.01, WAIT, chunk({"content": "x"})],
        [WAIT, chunk({"role": "assistant", "content": "x"})],
        [WAIT, ROLE + chunk({"content": "x"}) + chunk({"content": "y"})],
    ],
    ids=["role-and-ping", "null", "with-the-role", "in-one-write"],
)
async def test_the_clock_stops_at_the_first_token_and_not_at_a_role(first: list[bytes | float]) -> None:
    """C097: it read 1 ms."""
    async with serving(streaming(*first, *END)) as (_, running):
        await running.ask(chat())
        record = await running.last_record()
        assert record["ttft_ms"] >= WAIT * 1000 - 5
        assert record["ttfv_ms"] == record["ttft_ms"]
        assert record["ttft_source"] == "stream"
        await running.settled()


async def test_thoughts_count_for_the_first_token_and_not_for_the_first_visible_one() -> None:
    """C098: 183 s instead of 1.2 s, as reasoning was not counted."""
    thoughts = [part for _ in range(4) for part in (chunk({"reasoning_content": "hm"}), 0.05)]
    words = [part for _ in range(3) for part in (chunk({"content": "a"}), 0.02)]
    async with serving(streaming(0.1, *thoughts, *words, *END)) as (_, running):
        await running.ask(chat())
        record = await running.last_record()
        assert record["ttft_ms"] >= 95
        assert record["ttfv_ms"] - record["ttft_ms"] >= 180
        assert record["reasoning_ms"] == pytest.approx(record["ttfv_ms"] - record["ttft_ms"], abs=0.1)
        assert record["decode_ms"] >= 35
        segments = ("upload", "gateway", "connect", "wait", "reasoning", "decode", "tail")
        assert sum(record[f"{name}_ms"] for name in segments) == pytest.approx(record["e2e_ms"], abs=0.1)


async def test_an_answer_that_only_thought_has_no_first_visible_token() -> None:
    """C098: absent, not zero."""
    events = [chunk({"reasoning_content": "hm"}), chunk({"reasoning_content": "hm"}), chunk(finish="length"), DONE]
    async with serving(streaming(*events)) as (_, running):
        await running.ask(chat())
        record = await running.last_record()
        assert record["ttft_ms"] is not None
        assert record["ttfv_ms"] is None
        assert await running.metric("gateway_ttft_seconds_count") == 1
        assert await running.metric("gateway_ttfv_seconds_count") == 0


async def tpot_of(events: list[bytes | float]) -> tuple[float, float]:
    """Count and sum of the time per output token after this stream."""
    async with serving(streaming(*events)) as (_, running):
        await running.ask(chat(stream_options={"include_usage": True}))
        await running.last_record()
        return await running.metric("gateway_tpot_seconds_count"), await running.metric("gateway_tpot_seconds_sum")


def bundles(count: int, pause: float) -> list[bytes | float]:
    return [part for _ in range(count) for part in (chunk({"content": "five words in one piece"}), pause)]


async def test_tokens_come_from_usage_and_not_from_the_number_of_frames() -> None:
    """C099: 10 frames of 5 tokens made 5.5 tokens/s out of 25."""
    count, total = await tpot_of([*bundles(10, 0.02), chunk(finish="stop"), usage_chunk(completion=50), DONE])
    assert count == 1
    assert 0.003 < total < 0.015  # 9 gaps of 20 ms for 49 tokens; by frames it would be above 0.02


async def test_without_usage_no_speed_is_claimed() -> None:
    """C099."""
    count, _ = await tpot_of([*bundles(3, 0.005), *END])
    assert count == 0


async def test_tokens_of_a_bundled_first_frame_were_not_waited_for() -> None:
    """C099."""
    first = chunk({"content": "x" * 64}, usage={"prompt_tokens": 3, "completion_tokens": 64, "total_tokens": 67})
    events: list[bytes | float] = [
        first,
        0.05,
        chunk({"content": "y"}),
        0.05,
        chunk({"content": "z"}),
        chunk(finish="stop"),
    ]
    count, total = await tpot_of([*events, usage_chunk(completion=66), DONE])
    assert count == 1
    assert total > 0.04  # two gaps of 50 ms for two tokens; for all 66 it would be 0.002


async def test_one_token_has_no_speed() -> None:
    """C099: no division by zero, no sample."""
    count, _ = await tpot_of([chunk({"content": "x"}), chunk(finish="stop"), usage_chunk(completion=1), DONE])
    assert count == 0


@pytest.mark.parametrize(
    "usage",
    [
        {"completion_tokens": 23870, "reasoning_tokens": 23871},
        {"completion_tokens": 23870, "completion_tokens_details": {"reasoning_tokens": 23871}},
        {"completion_tokens": -5, "prompt_tokens": -1, "reasoning_tokens": -2},
        {"completion_tokens": 10**30, "prompt_tokens": "7"},
    ],
)
async def test_odd_counts_break_nothing(usage: dict[str, object]) -> None:
    """C091: more reasoning than completion, and what else servers have sent."""
    body = json.loads(answer())
    body["usage"] = usage
    async with serving(plain(json.dumps(body).encode())) as (_, running):
        assert (await running.ask(chat(stream=False))).status == 200
        assert (await running.last_record())["outcome"] == "complete"
        page = (await running.get("/metrics")).body.decode()
        assert all(float(line.rsplit(" ", 1)[1]) >= 0 for line in page.splitlines() if line.startswith("gateway_"))
        assert await running.metric("gateway_tokens_total", kind="reasoning") in (0, 23871)


async def test_only_streams_have_a_first_token() -> None:
    """C103: whole answers put their full duration, and errors their nothing, into the histogram."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(error_body("no"), "400 Bad Request") if b"bad" in request.body else whole(answer()))

    async with serving(play) as (upstream, running):
        for _ in range(10):
            await running.ask(chat(stream=False))
            await running.ask(chat(content="bad"))
            await running.ask(b"no json")
        upstream._server.close()
        await running.settled()
        for state in running.gateway.runtime.upstreams.values():
            state.pool._idle.clear()
        await running.ask(chat())
        assert await running.metric("gateway_ttft_seconds_count") == 0
        assert await running.metric("gateway_ttfv_seconds_count") == 0
        assert await running.metric("gateway_e2e_seconds_count") >= 20
        assert await running.metric("gateway_requests_total", outcome="complete") == 10
        assert await running.metric("gateway_requests_total", outcome="refused") == 20


@pytest.mark.parametrize(
    "content, outcome, reason",
    [
        ("reset", "upstream_truncated", "reset_mid"),
        ("cut", "upstream_truncated", "body_cut"),
        ("stall", "upstream_timeout", "stall"),
        ("normal", "complete", None),
        ("leave", "client_cancelled", None),
    ],
)
async def test_how_it_ended_is_told_by_the_end_and_not_by_the_head(
    content: str, outcome: str, reason: str | None
) -> None:
    """C022: deaths after the head were booked as 200, and leaving clients as failures of the upstream."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(STREAM_HEAD)
        for _ in range(3):
            await wire.send(framed(chunk({"content": "x"})))
        if content == "reset":
            await asyncio.sleep(0.02)
            wire.reset()
        elif content == "cut":
            wire.close()
        elif content == "normal":
            await wire.send(*map(framed, END), b"0\r\n\r\n")
        else:
            await wire.wait_closed_by_peer()

    async with serving(play, route={"timeouts": {"idle_ms": 100}}) as (_, running):
        async with running.client() as client:
            await client.post(chat())
            if content == "leave":
                await client.head()
                await client.piece()
                client.close()
            else:
                await client.response()
        record = await running.last_record()
        assert (record["outcome"], record["reason"], record["status"]) == (outcome, reason, 200)
        assert await running.metric("gateway_requests_total", outcome=outcome) == 1
        assert await running.metric("gateway_requests_total") == 1
        failures = await running.metric("gateway_upstream_failures_total")
        assert failures == (0 if outcome in ("complete", "client_cancelled") else 1)
        await running.settled()


async def test_errors_of_callers_are_no_failures_of_the_upstream_and_good_requests_go_on() -> None:
    """C111, as far as there is no breaker: 4xx of any number leave the upstream usable and uncounted as failing."""

    async def play(request: Received, wire: Wire) -> None:
        status = request.json["messages"][0]["content"]
        await wire.send(whole(answer()) if status == "200" else whole(error_body("no", int(status)), f"{status} No"))

    async with serving(play) as (_, running):
        for status in ["400", "404", "413", "422", "401", "429"] * 5:
            assert (await running.ask(chat(stream=False, content=status))).status == int(status)
        assert (await running.ask(chat(stream=False, content="200"))).status == 200
        assert await running.metric("gateway_requests_total", outcome="refused") == 30
        assert await running.metric("gateway_requests_total", outcome="upstream_error") == 0
        assert running.gateway.runtime.is_ready


async def test_a_hung_upstream_does_not_make_others_wait() -> None:
    """C030: one pool for all filled up with the requests of the hung server."""

    async def hang(request: Received, wire: Wire) -> None:
        await wire.wait_closed_by_peer()

    routes = [
        {"name": "hung", "upstreams": ["hung"], "match": {"models": ["h"]}},
        {"name": "good", "upstreams": ["good"], "match": {"models": ["g"]}},
    ]
    async with RawUpstream(hang) as hung, RawUpstream(plain()) as good:
        settings = settings_for({"hung": hung.url, "good": good.url}, routes=routes)
        async with running_gateway(settings, upstream={"max_inflight": 8, "max_queue_wait_ms": 50}) as running:
            waiting = [asyncio.create_task(running.ask(chat(stream=False, model="h"))) for _ in range(24)]
            refused = 0
            async with asyncio.timeout(5):
                while refused < 16:
                    await asyncio.sleep(0.02)
                    refused = sum(task.done() for task in waiting)
            for _ in range(20):
                assert (await running.ask(chat(stream=False, model="g"))).status == 200
            for task in waiting:
                if task.done():
                    assert (task.result().status, task.result().error["code"]) == (503, "overloaded")
                    assert task.result().header("retry-after") is not None
            assert await running.metric("gateway_inflight", upstream="hung") == 8
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await running.settled()
            assert await running.metric("gateway_inflight") == 0


async def test_a_refused_connection_is_one_failure_of_one_upstream() -> None:
    """C031: counted once, also when another upstream then takes the request."""
    async with RawUpstream(plain()) as good:
        for upstreams, status in (
            ({"gone": "http://127.0.0.1:9"}, 503),
            ({"gone": "http://127.0.0.1:9", "up": good.url}, 200),
        ):
            async with running_gateway(settings_for(upstreams, route={"balance": "round_robin"})) as running:
                running.gateway.runtime.upstreams["gone"].is_up = True  # as it was a moment ago
                running.gateway.runtime.routes["main"].turn = 1
                assert (await running.ask(chat(stream=False))).status == status
                name = "gateway_upstream_failures_total"
                assert await running.metric(name, upstream="gone", reason="connect_refused") == 1
                assert await running.metric(name) == 1
                assert await running.metric("gateway_upstream_connects_total", upstream="gone", failed="true") == 1


@pytest.mark.parametrize("action", ["wait", "heartbeat"])
async def test_a_budget_that_was_exceeded_is_counted_by_what_was_done(action: str) -> None:
    """spec §6, §8."""
    route = {"budget": {"ttft_ms": 30, "on_exceed": action}}
    async with serving(streaming(0.1, chunk({"content": "x"}), *END), route=route) as (_, running):
        await running.ask(chat())
        assert (await running.last_record())["budget"] == action
        assert await running.metric("gateway_budget_exceeded_total", route="main", action=action) == 1
        assert await running.metric("gateway_budget_exceeded_total") == 1


async def test_a_budget_that_was_kept_is_not_counted() -> None:
    async with serving(streaming(chunk({"content": "x"}), *END), route={"budget": {"ttft_ms": 5000}}) as (_, running):
        await running.ask(chat())
        assert (await running.last_record())["budget"] is None
        assert await running.metric("gateway_budget_exceeded_total") == 0


async def test_what_we_refuse_for_reasons_of_our_own_is_no_failure_of_an_upstream() -> None:
    """C115: a full pool is one, our shutdown is none."""

    async def hang(request: Received, wire: Wire) -> None:
        await wire.wait_closed_by_peer()

    async with serving(hang) as (_, running):
        asking = asyncio.create_task(running.ask(chat(stream=False)))
        while not running.gateway.proxy.running:
            await asyncio.sleep(0.01)
        for task in list(running.server.server_state.tasks):
            task.cancel()
        assert (await asking).status == 503
        record = await running.last_record()
        assert (record["outcome"], record["reason"]) == ("refused", "draining")
        assert await running.metric("gateway_upstream_failures_total") == 0


@pytest.mark.parametrize("budget, counted", [({"ttfv_ms": 30}, 1), ({"ttfv_ms": 5000}, 0), ({"ttft_ms": 5000}, 0)])
async def test_a_late_visible_token_is_over_the_budget_for_visible_tokens(
    budget: dict[str, object], counted: int
) -> None:
    """`budget.ttfv_ms`: thinking may begin in time and the answer still come late."""
    events: list[bytes | float] = [chunk({"reasoning": "a"}), 0.06, chunk({"content": "b"}), chunk(finish="stop"), DONE]
    async with serving(streaming(*events), route={"budget": budget}) as (_, running):
        await running.ask(chat())
        assert (await running.last_record())["budget"] == ("heartbeat" if counted else None)
        assert await running.metric("gateway_budget_exceeded_total", route="main") == counted


async def test_a_plain_answer_is_waited_for_until_its_end_and_has_no_first_token() -> None:
    """latency-methods §1: its instants are its end, its TTFT is nobody's."""
    timed = json.loads(answer())
    timed["metrics"] = {"queue_time_ms": 1.0, "time_to_first_token_ms": 2.0, "generation_time_ms": 3.0}

    async def play(request: Received, wire: Wire) -> None:
        await asyncio.sleep(0.05)
        await wire.send(whole(json.dumps(timed).encode()))

    async with serving(play) as (_, running):
        response = await running.ask(chat(stream=False))
        assert "wait;dur=" in (response.header("server-timing") or "")
        assert "ttft" not in (response.header("server-timing") or "")
        record = await running.last_record()
        assert record["ttft_source"] == "none"
        assert {"queue_ms", "prefill_ms"} <= record["wait_causes"].keys()
        assert await running.metric("gateway_ttft_seconds_count") == 0
        assert await running.metric("gateway_wait_seconds_count", cause="queue") == 1
