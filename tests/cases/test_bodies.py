"""Bodies that are large, or no JSON at all."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.support.playing import plain, serving, streaming
from tests.support.raw import DONE, Received, Wire, answer, chat, chunk, whole
from tests.support.running import until

BOUNDARY = b"----WebKitFormBoundary7MA4YWxk"
AUDIO = bytes(range(256)) * 12_000  # 3 MB with zeros, line ends and bytes that are no UTF-8


def form(*, model: str = "whisper", end: bytes = b"--\r\n") -> bytes:
    parts = [
        b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n' + AUDIO,
        b'Content-Disposition: form-data; name="response_format"\r\n\r\nsrt',
        b'Content-Disposition: form-data; name="model"\r\n\r\n' + model.encode(),
    ]
    return b"".join(b"--" + BOUNDARY + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + BOUNDARY + end


TYPE = {"content-type": "multipart/form-data; boundary=" + BOUNDARY.decode()}
SRT = b"1\r\n00:00:00,000 --> 00:00:01,000\r\nhi\r\n"
ROUTES = [
    {"name": "speech", "upstreams": ["up"], "match": {"models": ["whisper"]}},
    {"name": "main", "upstreams": ["up"], "match": {"models": ["m"]}},
]


async def test_an_upload_arrives_byte_for_byte_and_its_model_chooses_the_route() -> None:
    """C078: the model stands behind the file; the answer is no JSON and stays what it is."""
    async with serving(plain(SRT, headers="content-type: text/plain; charset=utf-8"), routes=ROUTES) as (
        upstream,
        running,
    ):
        response = await running.ask(form(), "/v1/audio/transcriptions", TYPE)
        assert (response.status, response.body) == (200, SRT)
        assert response.header("content-type") == "text/plain; charset=utf-8"
        assert response.header("x-gateway-route") == "speech"
        assert upstream.requests[0].body == form()
        assert upstream.requests[0].header("content-type") == TYPE["content-type"]
        await running.settled()


async def test_an_upload_in_chunks_arrives_whole() -> None:
    """C078."""
    sent = form()
    async with serving(plain(SRT), routes=ROUTES) as (upstream, running), running.client() as client:
        await client.send(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n"
            b"content-type: multipart/form-data; boundary=%b\r\n\r\n" % BOUNDARY
        )
        for start in range(0, len(sent), 700_001):
            piece = sent[start : start + 700_001]
            await client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await client.send(b"0\r\n\r\n")
        assert (await client.response()).status == 200
        assert upstream.requests[0].body == sent


async def test_a_malformed_form_is_the_upstreams_to_refuse() -> None:
    """C078."""
    refusal = b'{"detail":"There was an error parsing the body"}'
    async with serving(plain(refusal, "400 Bad Request")) as (_, running):
        response = await running.ask(b"--x\r\nnonsense", "/v1/audio/transcriptions", TYPE)
        assert (response.status, response.body) == (400, refusal)


async def test_an_answer_of_audio_bytes_is_relayed() -> None:
    """C078, the other way round."""
    async with serving(plain(AUDIO, headers="content-type: audio/mpeg")) as (_, running):
        response = await running.ask(b'{"model":"tts","input":"hi"}', "/v1/audio/speech")
        assert response.body == AUDIO
        assert response.header("content-type") == "audio/mpeg"


def with_images(megabytes: int) -> bytes:
    image = "data:image/png;base64," + "iVBORw0KGgo" * 7_000  # 77 kB
    parts = [{"type": "image_url", "image_url": {"url": image}} for _ in range(megabytes * 1_000_000 // 77_000)]
    return chat(content=[*parts, {"type": "text", "text": "what is this?"}])


@pytest.mark.parametrize("policy", [{}, {"thinking": "off", "max_tokens": {"default": 99}}], ids=["as-is", "policies"])
async def test_screenshots_cost_memory_only_until_the_answer_begins(policy: dict[str, object]) -> None:
    """C079: bodies are counted, and freed when the answer has begun, not when it ends."""
    go = asyncio.Event()
    sizes: list[int] = []

    async def play(request: Received, wire: Wire) -> None:
        sizes.append(len(request.body))
        request.body = b""
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await wire.stream(chunk({"content": "a"}))
        await go.wait()
        await wire.stream(chunk({"content": "b"}), chunk(finish="stop"), DONE)
        await wire.send(b"0\r\n\r\n")

    sent = with_images(8)
    async with serving(play, route=policy) as (_, running):
        clients = [running.client() for _ in range(3)]
        for client in clients:
            await client.__aenter__()
            await client.post(sent)
        for client in clients:
            await client.head()
            assert b'"a"' in await client.piece()
        assert len(sizes) == 3
        assert min(sizes) >= len(sent)
        assert running.gateway.proxy.buffered_bytes == 0  # while the answers still run
        assert running.gateway.proxy.running == 3
        go.set()
        for client in clients:
            while await client.piece():
                pass
            client.close()
        await running.settled()


async def test_a_body_is_counted_while_its_answer_is_awaited() -> None:
    """C079: it may have to be sent again until then."""
    release = asyncio.Event()

    async def play(request: Received, wire: Wire) -> None:
        await release.wait()
        await wire.send(whole(answer()))

    sent = with_images(2).replace(b'"stream": true', b'"stream": false')
    async with serving(play, route={"thinking": "off"}) as (upstream, running):
        asking = asyncio.create_task(running.ask(sent))
        await until(lambda: len(upstream.requests) == 1)
        assert running.gateway.proxy.buffered_bytes == len(sent)
        release.set()
        assert (await asking).status == 200
        await running.settled()


async def test_a_body_over_the_limit_is_refused_by_its_announced_length() -> None:
    """C079: before a byte of it is kept."""
    async with serving(plain(), listen={"max_body_mb": 1}) as (upstream, running), running.client() as client:
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 200000000\r\n\r\n")
        response = await client.response()
        assert (response.status, response.error["code"]) == (413, "body_too_large")
        assert "listen.max_body_mb" in response.error["message"]
        assert upstream.requests == []
        assert running.gateway.proxy.buffered_bytes == 0


async def test_a_body_that_does_not_say_its_length_is_refused_at_the_limit() -> None:
    """C079."""
    async with serving(plain(), listen={"max_body_mb": 1}) as (upstream, running), running.client() as client:
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        piece = b"%x\r\n%b\r\n" % (300_000, b"x" * 300_000)
        await client.send(*[piece] * 5)
        response = await client.response()
        assert (response.status, response.error["code"]) == (413, "body_too_large")
        assert upstream.requests == []
        await running.settled()


async def test_all_bodies_together_have_a_limit_too() -> None:
    """C079: admission by bytes in flight, also of uploads that are still under way."""
    async with serving(plain(), listen={"max_body_mb": 2, "max_buffered_mb": 3}) as (_, running):
        slow = [running.client() for _ in range(2)]
        for client in slow:
            await client.__aenter__()
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1500000\r\n\r\n")
            await client.send(b"x" * 1_400_000)
        await until(lambda: running.gateway.proxy.buffered_bytes >= 2_800_000)
        response = await running.ask(chat(stream=False, content="y" * 800_000))
        assert (response.status, response.error["code"]) == (503, "overloaded")
        assert "max_buffered_mb" in response.error["message"]
        assert response.header("retry-after") == "1"
        assert (await running.ask(chat(stream=False))).status == 200  # small ones still find room
        for client in slow:
            client.close()
        await running.settled()
        assert (await running.ask(chat(stream=False, content="y" * 800_000))).status == 200


@pytest.mark.parametrize("size", [1_000_000, 3_000_000])
async def test_a_big_plain_answer_streams_through(size: int) -> None:
    """C079, of answers: vectors of embeddings are not held whole."""
    big = b'{"object":"list","data":[{"embedding":[%b0.1]}]}' % (b"0.123456789," * (size // 12))
    async with serving(plain(big)) as (_, running):
        response = await running.ask(b'{"model":"m","input":"x"}', "/v1/embeddings")
        assert response.body == big
        assert response.header("content-length") == str(len(big))
        assert (await running.last_record())["outcome"] == "complete"


async def test_what_was_in_a_body_is_in_no_record() -> None:
    """C079: never in logs."""
    canary = "canary-" + os.urandom(8).hex()
    async with serving(streaming(chunk({"content": canary}), chunk(finish="stop"), DONE)) as (_, running):
        await running.ask(chat(content=canary, user=canary))
        assert canary not in repr(await running.last_record())
        assert canary.encode() not in (await running.get("/gateway/status")).body
