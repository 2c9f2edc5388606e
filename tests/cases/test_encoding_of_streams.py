"""Characters on their way from the model to the caller, whatever the network does to their bytes."""

from __future__ import annotations

import itertools

import pytest

from tests.support.plays import sends, streams
from tests.support.raw import DONE, LAST_CHUNK, STREAM_HEAD, RawUpstream, answer, chat, chunk, framed
from tests.support.running import running_gateway, settings_for

TEXT = "北京😀é"
EVENT = chunk({"content": TEXT})
STREAM = EVENT + chunk(finish="stop") + DONE
AT = EVENT.index("北".encode())
FACE = EVENT.index("😀".encode())


def cut(*places: int) -> list[bytes]:
    edges = [0, *places, len(STREAM)]
    return [STREAM[a:b] for a, b in itertools.pairwise(edges)]


CUTS = {
    "one byte at a time": cut(*range(1, len(STREAM))),
    "inside each character": cut(AT + 1, AT + 2, FACE + 1, FACE + 2, FACE + 3),
    "in one piece": [STREAM],
}


@pytest.mark.parametrize("include_usage", ["never", "always"])
@pytest.mark.parametrize("pieces", CUTS.values(), ids=CUTS)
async def test_characters_cut_by_the_network_arrive_whole(pieces: list[bytes], include_usage: str) -> None:
    """C001: CJK and emoji turned into U+FFFD at random places; ASCII users never saw it."""
    async with (
        RawUpstream(streams(*pieces)) as upstream,
        running_gateway(settings_for(upstream.url), upstream={"include_usage": include_usage}) as running,
    ):
        response = await running.ask(chat())
        assert response.body == STREAM
        record = await running.last_record()
        assert (record["outcome"], record["chunks"], record["verdict"]) == ("complete", 1, "ok")
        assert "\ufffd" not in str(record)
        await running.settled()


async def test_a_whole_stream_in_one_write_is_the_same_stream() -> None:
    """C001: head, events and last chunk in a single segment."""
    everything = STREAM_HEAD + framed(STREAM) + LAST_CHUNK
    async with RawUpstream(sends(everything)) as upstream, running_gateway(settings_for(upstream.url)) as running:
        assert (await running.ask(chat())).body == STREAM
        await running.settled()


async def test_half_an_emoji_in_a_delta_breaks_nothing() -> None:
    """C050: a provider streams the two halves of a surrogate pair in two deltas."""
    head = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"'
    events = [
        head + b'\\ud83d"},"finish_reason":null}]}\n\n', head + b'\\ude00"},"finish_reason":null}]}\n\n',
        chunk(finish="stop"), DONE,
    ]  # fmt: skip
    async with RawUpstream(streams(*events)) as upstream, running_gateway(settings_for(upstream.url)) as running:
        assert (await running.ask(chat())).body == b"".join(events)
        record = await running.last_record()
        assert (record["outcome"], record["chunks"]) == ("complete", 2)
        assert record["ttft_ms"] is not None
        assert (await running.get("/metrics")).status == 200
        assert (await running.get("/gateway/status")).status == 200
        await running.settled()


@pytest.mark.parametrize("name", ["中文模型", "half \ud83d", "a" * 10_000, "line\nend\x00", 'quo"te\\'])
async def test_any_model_name_leaves_logs_metrics_and_pages_alive(name: str) -> None:
    """C109, C050, L7: one surrogate in a label once killed `/metrics`."""
    import json

    body = json.dumps({"model": name, "messages": [], "stream": False}).encode()
    async with (
        RawUpstream(sends(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer()), answer())) as upstream,
        running_gateway(settings_for(upstream.url)) as running,
    ):
        assert (await running.ask(body)).status in (200, 400)
        assert (await running.get("/metrics")).status == 200
        assert (await running.get("/metrics", {"accept": "application/openmetrics-text; version=1.0.0"})).status == 200
        page = await running.get("/gateway/status")
        assert page.status == 200
        page.body.decode()
        str((await running.last_record())["model"]).encode()


async def test_bytes_that_are_no_utf8_are_relayed_and_do_not_end_the_stream() -> None:
    """C15 of the fault catalogue: a relay is no judge of text."""
    bad = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"a\xff\xfeb"},"finish_reason":null}]}\n\n'
    events = [bad, chunk({"content": "c"}), chunk(finish="stop"), DONE]
    async with RawUpstream(streams(*events)) as upstream, running_gateway(settings_for(upstream.url)) as running:
        assert (await running.ask(chat())).body == b"".join(events)
        assert (await running.last_record())["outcome"] == "complete"
        await running.settled()
