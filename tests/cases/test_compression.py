"""Compressed answers: as they came, with the fields that say what they are."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest

from tests.support.playing import error_body, plain, serving, streaming
from tests.support.raw import DONE, answer, chat, chunk

ANSWER = answer()
EVENTS = chunk({"content": "x"}) + chunk(finish="stop") + DONE


def coded(coding: str) -> str:
    return f'content-type: application/json\r\ncontent-encoding: {coding}\r\nvary: accept-encoding\r\netag: "7"'


@pytest.mark.parametrize(
    "coding, body",
    [
        ("gzip", gzip.compress(ANSWER)),
        ("deflate", zlib.compress(ANSWER)),
        ("gzip, gzip", gzip.compress(gzip.compress(ANSWER))),
        ("identity", ANSWER),
        ("gzip", ANSWER),
        ("br", b"\x0b\x02\x80not really brotli\x03"),
        ("zstd", b"\x28\xb5\x2f\xfd not really zstd"),
    ],
    ids=["gzip", "deflate", "twice", "identity", "lying", "br", "zstd"],
)
@pytest.mark.parametrize("status", ["200 OK", "400 Bad Request", "503 Service Unavailable"])
async def test_a_compressed_answer_keeps_its_bytes_and_its_fields(coding: str, body: bytes, status: str) -> None:
    """C131, C132: the header must never say something else than the body is, for errors as for successes."""
    async with serving(plain(body, status, coded(coding))) as (_, running):
        response = await running.ask(chat(stream=False), headers={"accept-encoding": "gzip, br, zstd"})
        assert (response.status, response.body) == (int(status[:3]), body)
        assert response.header("content-encoding") == coding
        assert response.header("content-length") == str(len(body))
        assert (response.header("vary"), response.header("etag")) == ("accept-encoding", '"7"')
        await running.settled()


async def test_the_upstream_is_asked_for_no_compression() -> None:
    """C133: what the gateway cannot read it cannot time."""
    async with serving(plain()) as (upstream, running):
        await running.ask(chat(stream=False), headers={"accept-encoding": "zstd, br, gzip"})
        assert upstream.requests[0].header("accept-encoding") == "identity"
        await running.ask(chat(stream=False))
        assert upstream.requests[1].header("accept-encoding") == "identity"


@pytest.mark.parametrize("coding", ["gzip", "br"])
@pytest.mark.parametrize("wants", [{}, {"x-gateway-timing": "trailer"}], ids=["", "trailer"])
async def test_a_stream_that_comes_compressed_all_the_same_is_relayed_raw(coding: str, wants: dict[str, str]) -> None:
    """C133: nothing is read from it, added to it or taken out of it; that it was not read is counted."""
    packed = gzip.compress(EVENTS) + b"\n\n" + b"half"
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: %b\r\ntransfer-encoding: chunked\r\n\r\n"
        % coding.encode()
    )
    handler = streaming(packed[:20], 0.01, packed[20:], head=head)
    async with serving(handler, upstream={"include_usage": "always"}) as (_, running):
        response = await running.ask(chat(), headers=wants)
        assert (response.status, response.body) == (200, packed)
        assert response.header("content-encoding") == coding
        record = await running.last_record()
        assert (record["outcome"], record["ttft_ms"], record["verdict"]) == ("complete", None, None)
        assert await running.metric("gateway_upstream_failures_total", reason="content_encoding") == 1
        assert await running.metric("gateway_ttft_seconds_count") == 0
        await running.settled()


@pytest.mark.parametrize("media", ["text/event-stream", "application/x-ndjson"])
async def test_frames_arrive_one_by_one_whatever_the_client_accepts(media: str) -> None:
    """C013: streams are never compressed here."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % media.encode()
    frames = [chunk({"content": str(number)}) for number in range(5)]
    handler = streaming(*(part for frame in frames for part in (frame, 0.03)), chunk(finish="stop"), DONE, head=head)
    path, body = ("/v1/chat/completions", chat()) if media == "text/event-stream" else ("/v1/audio/speech", b"{}")
    async with serving(handler) as (_, running):
        response = await running.ask(body, path, {"accept-encoding": "gzip, br"})
        assert response.header("content-encoding") is None
        times = [when for when, _ in response.pieces]
        assert len(times) >= 5
        assert times[4] - times[0] > 0.08


async def test_a_compressed_error_is_not_taken_for_one_that_we_caused() -> None:
    """C131: a 400 that cannot be read is relayed, not sent again."""
    body = gzip.compress(error_body("chat_template_kwargs is not supported"))
    async with serving(plain(body, "400 Bad Request", coded("gzip")), route={"thinking": "off"}) as (upstream, running):
        response = await running.ask(chat(stream=False))
        assert (response.status, response.body) == (400, body)
        assert len(upstream.requests) == 1
        assert json.loads(gzip.decompress(response.body))["error"]["code"] == 400
