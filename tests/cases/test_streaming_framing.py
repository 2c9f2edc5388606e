"""Event streams: what users saw when bytes were cut, joined or explained away."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.support.plays import sends, streams
from tests.support.raw import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    RawUpstream,
    Received,
    Wire,
    chat,
    chunk,
    framed,
    usage_chunk,
)
from tests.support.running import Running, running_gateway, settings_for, until

ROLE = chunk({"role": "assistant", "content": ""})
HELLO = chunk({"content": "hello"})
STOP = chunk(finish="stop")


async def relayed(running: Running, expected: bytes) -> dict[str, object]:
    """Asks for a stream, checks its bytes, returns its account."""
    response = await running.ask(chat())
    assert response.is_whole
    assert response.body == expected
    await running.settled()
    return await running.last_record()


async def test_a_stream_with_line_separators_inside_its_text_is_not_torn_apart() -> None:
    """C002: U+2028, U+2029, NEL, VT, FF and FS end no line of an event stream."""
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg"
    event = (
        b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"'
        + text.encode()
        + b'"},"finish_reason":"stop"}]}\n\n'
    )
    async with RawUpstream(streams(event, DONE)) as upstream, running_gateway(settings_for(upstream.url)) as running:
        record = await relayed(running, event + DONE)
        assert (record["outcome"], record["chunks"], record["verdict"]) == ("complete", 1, "ok")


async def test_bare_comments_of_a_long_prefill_stay_comments() -> None:
    """C003: llama.cpp sends `:` every 30 s of silence; they are no first token."""
    events = [b":\n\n", b":\n\n", ROLE, HELLO, STOP, DONE]
    async with (
        RawUpstream(streams(*events, pause=0.08)) as upstream,
        running_gateway(settings_for(upstream.url, route={"timeouts": {"idle_ms": 120}})) as running,
    ):
        record = await relayed(running, b"".join(events))
        assert record["outcome"] == "complete"
        assert record["ttft_ms"] is not None
        assert float(str(record["ttft_ms"])) >= 200


BEAT = re.compile(rb": keep-alive(?: estimation_ms=[0-9]+)?\n\n")
BEATS = {"ttft_ms": 60, "on_exceed": "heartbeat", "heartbeat_ms": 60}


async def test_heartbeats_are_comment_blocks_between_events_and_never_after_the_end() -> None:
    """C004: before the first token and between tokens; the bytes without them are the upstream's own."""
    events = [ROLE, HELLO, STOP, DONE]
    async with (
        RawUpstream(streams(*events, pause=0.2)) as upstream,
        running_gateway(settings_for(upstream.url, route={"budget": BEATS})) as running,
    ):
        response = await running.ask(chat())
        blocks = response.body.split(b"\n\n")
        beats = [block for block in blocks if block.startswith(b":")]
        assert all(BEAT.fullmatch(beat + b"\n\n") for beat in beats)
        assert len(beats) >= 4
        assert BEAT.sub(b"", response.body) == b"".join(events)
        assert response.body.endswith(DONE)
        assert response.header("content-type") == "text/event-stream; charset=utf-8"
        await running.settled()


async def test_heartbeats_start_the_stream_while_the_server_says_nothing() -> None:
    """C004, C029: the hop in front of us sees bytes before the first token."""
    events = [HELLO, STOP, DONE]

    async def late(request: Received, wire: Wire) -> None:
        await asyncio.sleep(0.3)
        await streams(*events)(request, wire)

    async with (
        RawUpstream(late) as upstream,
        running_gateway(settings_for(upstream.url, route={"budget": BEATS})) as running,
    ):
        response = await running.ask(chat())
        assert re.fullmatch(rb": keep-alive estimation_ms=[0-9]+\n\n", response.pieces[0][1])
        assert BEAT.sub(b"", response.body) == b"".join(events)
        assert response.header("content-type") == "text/event-stream; charset=utf-8"
        assert (await running.last_record())["budget"] == "heartbeat"
        await running.settled()


async def test_no_heartbeat_where_the_server_numbers_its_events() -> None:
    """C004: after an `id:` line some clients take any blank line for an event and fail on it."""
    events = [b"id: 7\n" + ROLE, HELLO, STOP, DONE]
    async with (
        RawUpstream(streams(*events, pause=0.15)) as upstream,
        running_gateway(settings_for(upstream.url, route={"budget": BEATS | {"ttft_ms": 1000}})) as running,
    ):
        await relayed(running, b"".join(events))


async def test_no_heartbeat_inside_an_event_that_has_come_in_part() -> None:
    """C004: a comment in the middle of a JSON text would end it."""
    pieces = [ROLE, HELLO[:30], HELLO[30:], STOP, DONE]
    async with (
        RawUpstream(streams(*pieces, pause=0.2)) as upstream,
        running_gateway(settings_for(upstream.url, route={"budget": BEATS})) as running,
    ):
        response = await running.ask(chat())
        assert HELLO in response.body
        assert BEAT.sub(b"", response.body) == b"".join(pieces)
        await running.settled()


async def test_comments_names_ids_and_retry_times_survive() -> None:
    """C005: `: PROCESSING` must not become a payload."""
    events = [b": PROCESSING\n\n", b": PROCESSING\n\n", b"event: message\nid: 3\nretry: 500\n" + HELLO, STOP, DONE]
    async with RawUpstream(streams(*events)) as upstream, running_gateway(settings_for(upstream.url)) as running:
        assert (await relayed(running, b"".join(events)))["outcome"] == "complete"


CONTENT, FINISH = HELLO[6:-2], STOP[6:-2]
FORMS = {
    "no space, CRLF": [b"data:" + CONTENT + b"\r\n\r\n", b"data:" + FINISH + b"\r\n\r\n", b"data: [DONE]\r\n\r\n"],
    "CR only": [b"data: " + CONTENT + b"\r\r", b"data: " + FINISH + b"\r\r", b"data: [DONE]\r\r"],
    "CR and LF apart": [b"data: " + CONTENT + b"\r", b"\n\r", b"\ndata: " + FINISH + b"\r", b"\n\r", b"\n", b"data: [DONE]\r\n\r\n"],
    "mixed": [b"data: " + CONTENT + b"\r\n\n", b"data: " + FINISH + b"\n\r\n", b"data: [DONE]\n\n"],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
async def test_every_legal_line_end_is_relayed_as_it_is_and_understood(form: str) -> None:
    """C006: zero events, or half of them, though curl showed data."""
    pieces = FORMS[form]
    async with RawUpstream(streams(*pieces)) as upstream, running_gateway(settings_for(upstream.url)) as running:
        record = await relayed(running, b"".join(pieces))
        assert (record["outcome"], record["chunks"], record["verdict"]) == ("complete", 1, "ok")


async def test_a_finished_answer_without_done_is_complete_and_nothing_is_added() -> None:
    """C007 (a)."""
    async with RawUpstream(streams(HELLO, STOP)) as upstream, running_gateway(settings_for(upstream.url)) as running:
        assert (await relayed(running, HELLO + STOP))["outcome"] == "complete"


async def test_usage_in_a_last_event_without_its_blank_line_is_read() -> None:
    """C007 (b)."""
    last = usage_chunk(7, 5)[:-1]
    async with (
        RawUpstream(streams(HELLO, STOP, last)) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
    ):
        body = chat(stream_options={"include_usage": True})
        response = await running.ask(body)
        assert response.body == HELLO + STOP + last
        record = await running.last_record()
        assert (record["outcome"], record["completion_tokens"]) == ("complete", 5)
        await running.settled()


@pytest.mark.parametrize("cut", [0, 40], ids=["between events", "inside an event"])
async def test_a_stream_that_ends_without_finishing_is_told_as_broken(cut: int) -> None:
    """C007 (c), C9: the transport ended cleanly; a half-written event is closed before ours begins."""
    half = chunk({"content": "and so"})[:cut]
    events = [HELLO, half] if half else [HELLO]
    async with RawUpstream(streams(*events)) as upstream, running_gateway(settings_for(upstream.url)) as running:
        response = await running.ask(chat())
        assert response.body.startswith(HELLO + (half + b"\n\n" if half else b"") + b'data: {"error"')
        assert response.body.endswith(b"\n\n" + DONE)
        assert response.is_whole
        assert "choices" not in response.events[-2].decode()
        assert response.error["code"] == "upstream_bad_response"
        record = await running.last_record()
        assert (record["outcome"], record["reason"]) == ("upstream_truncated", "no_finish")
        await running.settled()


async def test_events_without_choices_do_not_disturb() -> None:
    """C008: a content filter's first event, usage with empty `choices`, an event with only `usage: null`."""
    events = [
        b'data: {"choices":[],"prompt_filter_results":[]}\n\n', b'data: {"usage":null}\n\n', HELLO, STOP,
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}\n\n', DONE,
    ]  # fmt: skip
    async with RawUpstream(streams(*events)) as upstream, running_gateway(settings_for(upstream.url)) as running:
        record = await relayed(running, b"".join(events))
        assert (record["outcome"], record["completion_tokens"], record["chunks"]) == ("complete", 1, 1)


async def test_two_interleaved_answers_keep_their_own_state() -> None:
    """C011: with `n` > 1 one choice's end is not the other's."""
    both = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"y"},"finish_reason":null},{"index":1,"delta":{"content":"z"},"finish_reason":null}]}\n\n'
    events = [
        chunk({"reasoning": "a"}), chunk({"content": "X"}, index=1), both, chunk({"content": "b"}),
        chunk(finish="stop", index=1), chunk(finish="length"), usage_chunk(), DONE,
    ]  # fmt: skip
    async with RawUpstream(streams(*events)) as upstream, running_gateway(settings_for(upstream.url)) as running:
        record = await relayed(running, b"".join(events))
        assert (record["outcome"], record["verdict"], record["chunks"]) == ("complete", "ok", 4)


async def test_one_of_two_answers_missing_its_end_is_not_complete() -> None:
    """C011, C007: every choice that was seen needs its finish reason when `[DONE]` is missing."""
    events = [chunk({"content": "a"}), chunk({"content": "b"}, index=1), chunk(finish="stop")]
    async with RawUpstream(streams(*events)) as upstream, running_gateway(settings_for(upstream.url)) as running:
        response = await running.ask(chat())
        assert response.error["code"] == "upstream_bad_response"
        assert (await running.last_record())["outcome"] == "upstream_truncated"


@pytest.mark.parametrize("include_usage", ["never", "always"])
@pytest.mark.parametrize("together", [True, False], ids=["in one write", "in writes of their own"])
async def test_nothing_leaves_after_the_end_mark(include_usage: str, together: bool) -> None:
    """C11, C12 of the fault catalogue: a second `[DONE]`, a late delta, late usage."""
    late = [DONE, chunk({"content": "late"}), DONE]
    events = [HELLO, STOP, DONE, *late]
    pieces = [framed(b"".join(events))] if together else [framed(event) for event in events]
    handler = sends(STREAM_HEAD + pieces[0] if together else STREAM_HEAD, *([] if together else pieces), LAST_CHUNK)
    async with (
        RawUpstream(handler) as upstream,
        running_gateway(settings_for(upstream.url), upstream={"include_usage": include_usage}) as running,
    ):
        assert (await relayed(running, HELLO + STOP + DONE))["outcome"] == "complete"


async def test_a_server_that_lingers_after_done_keeps_nobody_waiting() -> None:
    """C22 of the fault catalogue: the answer ends at once; the connection is not used again."""
    async with (
        RawUpstream(streams(HELLO, STOP, DONE, end="open")) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
    ):
        async with running.client() as client:
            response = await client.ask(chat())
            assert response.body == HELLO + STOP + DONE
            assert (await client.ask(chat())).body == HELLO + STOP + DONE
        assert upstream.connections == 2
        await running.settled(5)
        await until(lambda: upstream.open == 0)
