"""Every client gets the whole answer, whatever goes on meanwhile, and its leaving and returning are understood."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.clients.coming import cases
from tests.clients.model_plays import (
    FULL,
    THOUGHTS,
    Asked,
    answers,
    answers_emptily,
    gives,
    says_status,
    thinks_first,
)
from tests.clients.real_clients import KINDS, OPENAI_KINDS, Kind
from tests.clients.scenes import MARK, Mode, Played, chat_body, scene, stage
from tests.support.raw import STREAM_HEAD, Received, Wire
from tests.support.running import Running, until

IMPATIENT = {"budget": {"ttft_ms": 60, "heartbeat_ms": 50}}
HOLD_S = 3.0


async def _holds_the_body_open(request: Received, wire: Wire) -> None:
    """The whole answer, and no end of its body."""
    asked = Asked(request)
    if not asked.is_stream:
        await gives(wire, request)
        return
    await wire.send(STREAM_HEAD)
    await wire.stream(asked.opening(), *asked.words(), *asked.closing())
    await asyncio.sleep(HOLD_S)


ANSWERS = scene("answers", answers())
SLOW = scene("slow", answers(wait=0.4), route=IMPATIENT)
PAUSING = scene("pausing", answers(pause=0.15), route=IMPATIENT)
THINKING = scene("thinking", thinks_first(pause=0.15), route=IMPATIENT)
HELD_OPEN = scene("held_open", _holds_the_body_open)


@pytest.mark.parametrize("mode, kind", cases(KINDS))
async def test_the_answer_is_whole_and_booked_as_complete(played: Played, mode: Mode, kind: Kind) -> None:
    """client-contract §14.10: closing the connection after `[DONE]`, as some do, is not an abort."""
    seen = await played.see(ANSWERS, mode, kind)
    assert seen.said.message == ""
    assert seen.said.text == FULL
    assert seen.said.finish in (("stop", "end_turn", None) if kind.name == "dify" else ("stop", "end_turn"))
    assert [record["outcome"] for record in seen.records] == ["complete"]
    assert len(seen.requests) == 1


@pytest.mark.parametrize("mode, kind", cases(KINDS))
async def test_signs_of_life_before_the_first_token_harm_nobody(played: Played, mode: Mode, kind: Kind) -> None:
    """client-contract §14.1."""
    seen = await played.see(SLOW, mode, kind)
    assert (seen.said.text, seen.said.message) == (FULL, "")
    assert [record["outcome"] for record in seen.records] == ["complete"]


@pytest.mark.parametrize("mode, kind", cases(KINDS, modes=("stream",)))
async def test_signs_of_life_between_tokens_harm_nobody(played: Played, mode: Mode, kind: Kind) -> None:
    seen = await played.see(PAUSING, mode, kind)
    assert (seen.said.text, seen.said.message) == (FULL, "")


@pytest.mark.parametrize("mode, kind", cases(OPENAI_KINDS, modes=("stream",)))
async def test_signs_of_life_between_thoughts_leave_them_in_one_piece(played: Played, mode: Mode, kind: Kind) -> None:
    """client-contract §14.2: one think block in Dify."""
    seen = await played.see(THINKING, mode, kind)
    assert (seen.said.text, seen.said.message) == (FULL, "")
    assert seen.said.reasoning == ("".join(THOUGHTS) if kind.shows_reasoning else "")


@pytest.mark.parametrize("path, sign", [("chat/completions", b": keep-alive"), ("messages", b"event: ping\n")])
async def test_there_were_signs_of_life(path: str, sign: bytes) -> None:
    """What the tests above are about goes out, in the form of each API, before the first token."""
    async with stage(SLOW) as (gateway, _):
        response = await gateway.ask(chat_body(stream=True), f"/raw/v1/{path}")
    first_token = next(
        index for index, event in enumerate(response.events) if "你好".encode() in event or b"\\u4f60" in event
    )
    assert sum(event.startswith(sign) for event in response.events[:first_token]) >= 2


@pytest.mark.parametrize("mode, kind", cases(KINDS))
async def test_the_answer_ends_with_its_end_mark(played: Played, mode: Mode, kind: Kind) -> None:
    """client-contract §14.3: several clients read to the end of the body, which the upstream holds open."""
    seen = await played.see(HELD_OPEN, mode, kind)
    assert (seen.said.text, seen.said.message) == (FULL, "")
    assert seen.seconds < HOLD_S / 2


async def test_the_body_ends_within_100_ms_of_its_end_mark() -> None:
    async with stage(HELD_OPEN) as (gateway, _), gateway.client() as client:
        response = await client.ask(chat_body(stream=True), "/raw/v1/chat/completions")
        ended = time.monotonic()
    done = next(at for at, piece in response.pieces if b"[DONE]" in piece)
    assert ended - done <= 0.1


RETURNING = scene(
    "returning",
    says_status("503 Service Unavailable", "the model is being loaded", headers="retry-after: 1"),
    job={"retries": None},
)


@pytest.mark.parametrize("mode, kind", cases(KINDS))
async def test_503_with_retry_after_brings_each_client_back_as_often_as_it_does(
    played: Played, mode: Mode, kind: Kind
) -> None:
    """client-contract §7, §14.8."""
    seen = await played.see(RETURNING, mode, kind)
    assert len(seen.records) == kind.attempts[mode]
    assert "the model is being loaded" in seen.said.message
    assert seen.seconds >= kind.attempts[mode] - 1


LEFT: dict[str, float] = {}  # when the upstream was left, by client


async def _waits_to_be_left(request: Received, wire: Wire) -> None:
    asked = Asked(request)
    await wire.send(STREAM_HEAD)
    await wire.stream(asked.opening(), asked.words()[0])
    LEFT[request.header(MARK) or ""] = await wire.wait_closed_by_peer(10)


LEAVING = scene("leaving", _waits_to_be_left, job={"leave_after": 1})


@pytest.mark.parametrize("mode, kind", cases(KINDS, modes=("stream",)))
async def test_leaving_in_mid_answer_cancels_the_upstream(played: Played, mode: Mode, kind: Kind) -> None:
    """client-contract §14.10."""
    seen = await played.see(LEAVING, mode, kind)
    assert seen.said.has_left
    assert [record["outcome"] for record in seen.records] == ["client_cancelled"]
    assert LEFT[kind.name] - seen.said.ended_ns / 1e9 < 2.0  # LlamaIndex's connection waits for a garbage collection


@asynccontextmanager
async def _the_only_place_is_taken(gateway: Running) -> AsyncIterator[None]:
    async with gateway.client() as client:
        await client.post(chat_body(stream=False), "/raw/v1/chat/completions")
        (state,) = gateway.gateway.runtime.upstreams.values()
        await until(lambda: state.inflight == 1)
        yield


OVERLOADED = scene(
    "overloaded",
    answers(wait=10),
    upstream={"max_inflight": 1, "max_queue_wait_ms": 50},
    around=_the_only_place_is_taken,
)


@pytest.mark.parametrize("mode, kind", cases(KINDS))
async def test_a_full_upstream_is_told_in_words(played: Played, mode: Mode, kind: Kind) -> None:
    seen = await played.see(OVERLOADED, mode, kind)
    assert [record["status"] for record in seen.records] == [503]
    assert "`up`" in seen.said.message
    assert seen.said.text == ""


async def _thinks_too_long(request: Received, wire: Wire) -> None:
    """Answers only where thinking was switched off."""
    is_off = (request.json.get("chat_template_kwargs") or {}).get("enable_thinking") is False
    await (answers() if is_off else answers_emptily("length", thoughts=THOUGHTS))(request, wire)


RESCUED = scene("rescued", _thinks_too_long, route={"rescue": True}, kinds=OPENAI_KINDS)
BURNT = scene("burnt", answers_emptily("length", thoughts=THOUGHTS), kinds=OPENAI_KINDS)


@pytest.mark.parametrize("mode, kind", cases(OPENAI_KINDS, modes=("plain",)))
async def test_an_answer_burnt_by_thinking_is_rescued(played: Played, mode: Mode, kind: Kind) -> None:
    seen = await played.see(RESCUED, mode, kind)
    assert (seen.said.text, seen.said.message) == (FULL, "")


@pytest.mark.parametrize("mode, kind", cases([kind for kind in OPENAI_KINDS if kind.name != "dify"]))
async def test_an_answer_burnt_by_thinking_says_so_in_its_finish_reason(played: Played, mode: Mode, kind: Kind) -> None:
    """Without a rescue the words are the model server's own. (Dify's blocking mode shows no finish reason at all.)"""
    seen = await played.see(BURNT, mode, kind)
    assert (seen.said.text, seen.said.finish) == ("", "length")
    assert [record["verdict"] for record in seen.records] == ["burnt_by_thinking"]
