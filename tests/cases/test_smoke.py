"""A stream and a plain answer, byte for byte."""

from __future__ import annotations

from tests.support.raw import DONE, LAST_CHUNK, STREAM_HEAD, RawUpstream, Received, Wire, answer, chat, chunk, whole
from tests.support.running import running_gateway, settings_for


async def test_a_stream_arrives_byte_for_byte() -> None:
    events = [chunk({"role": "assistant", "content": ""}), chunk({"content": "你好"}), chunk(finish="stop"), DONE]

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(STREAM_HEAD)
        await wire.stream(*events)
        await wire.send(LAST_CHUNK)

    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        response = await running.ask(chat())
        assert response.status == 200
        assert response.body == b"".join(events)
        assert upstream.requests[0].body == chat()
        assert (await running.last_record())["outcome"] == "complete"
        await running.settled()


async def test_a_plain_answer_arrives_byte_for_byte() -> None:
    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(answer()))

    async with RawUpstream(play) as upstream, running_gateway(settings_for(upstream.url)) as running:
        response = await running.ask(chat(stream=False))
        assert response.body == answer()
        await running.settled()
        assert (await running.last_record())["verdict"] == "ok"
