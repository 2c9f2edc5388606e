"""Mistakes of ours, injected: the caller gets an answer, the upstream no blame, the log no words (C115, F15)."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.playing import plain, serving, streaming
from tests.support.raw import DONE, chat, chunk
from tests.support.running import Running

CANARY = "kanarienvogel"


def failing(*_: Any, **__: Any) -> Any:
    raise RuntimeError(CANARY)


async def blamed(running: Running) -> float:
    return await running.metric("gateway_upstream_failures_total") + await running.metric(
        "gateway_requests_total", outcome="upstream_error"
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "place",
    [
        "gateway.sending.shape", "gateway.sending.may_need_cleaning", "gateway.sending.reader_for",
        "response_headers", "gateway.proxy.for_upstream", "gateway.proxy.read_object",
        "gateway.sending.request_head", "gateway.relay.unusable_head",
    ],
)  # fmt: skip
async def test_a_mistake_before_the_answer_is_a_500_of_ours(
    place: str, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handler = streaming(chunk({"content": "x"}), chunk(finish="stop"), DONE) if stream else plain()
    if place == "response_headers":  # used where the answer's head is made: for a stream while it is relayed
        place = "gateway.sending.response_headers" if stream else "gateway.answering.response_headers"
    async with serving(handler) as (_, running):
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr(place, failing)
            response = await running.ask(chat(stream))
            assert (response.status, response.error["code"]) == (500, "internal")
            assert response.json["request_id"] == response.header("x-request-id")
            assert CANARY not in response.body.decode()
        record = await running.last_record()
        assert (record["outcome"], record["reason"]) == ("internal_error", "internal")
        assert await blamed(running) == 0
        assert any(entry.exc_info for entry in caplog.records)
        await running.settled()
        assert (await running.ask(chat(stream))).status == 200


async def test_a_mistake_in_the_middle_of_a_stream_is_told_in_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handler = streaming(chunk({"content": "x"}), 0.05, chunk({"content": "y"}), chunk(finish="stop"), DONE)
    async with serving(handler) as (_, running), running.client() as client:
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            await client.post(chat())
            await client.head()
            first = await client.piece()
            patch.setattr("gateway.wire.openai.ChatReader.feed", failing)
            rest = b""
            while piece := await client.piece():
                rest += piece
        assert first == chunk({"content": "x"})
        assert b'"code":"internal"' in rest
        assert rest.endswith(DONE)
        assert CANARY.encode() not in rest
        record = await running.last_record()
        assert (record["outcome"], record["reason"]) == ("internal_error", "internal")
        assert await blamed(running) == 0
        await running.settled()
        assert (await running.ask(chat())).body.endswith(DONE)


async def test_a_mistake_in_the_timer_ends_the_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would wait without any limit."""
    handler = streaming(0.4, chunk({"content": "x"}), chunk(finish="stop"), DONE)
    async with serving(handler, route={"budget": {"heartbeat_ms": 50}}) as (_, running):
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr("gateway.relay.Relay.beat", failing)
            response = await running.ask(chat())
            assert (response.status, response.error["code"]) == (500, "internal")
        assert (await running.last_record())["outcome"] == "internal_error"
        await running.settled()


async def test_a_request_that_cannot_be_booked_is_answered_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(plain()) as (_, running), running.client() as client:
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr("gateway.account.record_of", failing)
            assert (await client.ask(chat(stream=False))).status == 200
            assert (await client.ask(b"no json")).status == 400
        assert (await client.ask(chat(stream=False))).status == 200
        assert sum("could not be booked" in entry.getMessage() for entry in caplog.records) == 2
        await running.settled()
        assert await running.metric("gateway_inflight") == 0
