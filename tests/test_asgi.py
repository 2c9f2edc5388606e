"""The gateway on any ASGI server: the fallback to our own link to the client's transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from gateway.app import Gateway
from gateway.asgi import PAUSE_ABOVE
from gateway.configfile import from_mapping
from tests.support.playing import plain, streaming
from tests.support.raw import (
    DONE,
    STREAM_HEAD,
    Handler,
    RawUpstream,
    Received,
    Wire,
    answer,
    chat,
    chunk,
    framed,
)  # fmt: skip
from tests.support.running import settings_for, until

Message = dict[str, Any]


class Asking:
    """One request to an ASGI application, with everything in the test's hands."""

    def __init__(
        self, gateway: Gateway, *body: bytes, path: str = "/v1/chat/completions", method: str = "POST"
    ) -> None:
        self.sent: list[Message] = []
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.failing = False
        for number, piece in enumerate(body):
            self._incoming.put_nowait({"type": "http.request", "body": piece, "more_body": number < len(body) - 1})
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
            "raw_path": path.encode(), "query_string": b"", "headers": [(b"Host", b"gateway.test")], "scheme": "http",
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "root_path": "",
        }  # fmt: skip
        self.task = asyncio.get_running_loop().create_task(gateway(scope, self._incoming.get, self._send))

    async def _send(self, message: Any) -> None:
        if self.failing:
            raise OSError("gone")
        await self.may_send.wait()
        self.sent.append(message)

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    def more(self, data: bytes, *, is_last: bool = False) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": data, "more_body": not is_last})

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    async def done(self) -> None:
        async with asyncio.timeout(5):
            await self.task


@asynccontextmanager
async def application(
    handler: Handler, **top: Any
) -> AsyncIterator[tuple[RawUpstream, Gateway, list[dict[str, object]]]]:
    records: list[dict[str, object]] = []
    async with RawUpstream(handler) as upstream:
        gateway = Gateway(from_mapping(settings_for(upstream.url, **top)), write_log=records.append)
        yield upstream, gateway, records
        await until(lambda: gateway.proxy.running == 0)
        pool = gateway.runtime.upstreams["up"].pool
        assert pool.leases == 0
        await gateway.stop()


async def test_a_stream_is_sent_on_message_by_message() -> None:
    go = asyncio.Event()

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, framed(chunk({"content": "x"})))
        await go.wait()
        await wire.send(framed(chunk(finish="stop")), framed(DONE), b"0\r\n\r\n")

    async with application(play) as (_, gateway, records):
        asking = Asking(gateway, chat())
        await until(lambda: len(asking.sent) == 2)
        assert asking.status == 200
        assert asking.body == chunk({"content": "x"})
        go.set()
        await asking.done()
        assert asking.body == chunk({"content": "x"}) + chunk(finish="stop") + DONE
        assert asking.sent[-1]["more_body"] is False
        assert records[0]["outcome"] == "complete"


async def test_a_plain_answer_has_its_length() -> None:
    async with application(plain()) as (upstream, gateway, _):
        body = chat(stream=False)
        asking = Asking(gateway, body[:10], body[10:])
        await asking.done()
        assert (asking.status, asking.body) == (200, answer())
        assert (b"content-length", b"%d" % len(answer())) in asking.sent[0]["headers"]
        assert upstream.requests[0].body == body


async def test_the_control_plane_is_there_too() -> None:
    async with application(plain()) as (_, gateway, records):
        asking = Asking(gateway, b"", path="/health/", method="GET")
        await asking.done()
        assert asking.status == 200
        assert records == []


async def left(asking: Asking, when: Callable[[], bool]) -> None:
    await until(when)
    asking.leave()
    await asking.done()


async def test_a_client_that_leaves_ends_the_request_in_every_phase() -> None:
    """C016, C017, C018."""

    async def play(request: Received, wire: Wire) -> None:
        if request.json["stream"]:
            await wire.send(STREAM_HEAD, framed(chunk({"content": "x"})))
        await wire.wait_closed_by_peer()

    async with application(play) as (upstream, gateway, records):
        reading = Asking(gateway, b"{", b"")
        reading._incoming.get_nowait()
        reading._incoming.get_nowait()
        reading.more(b"{")
        await left(reading, lambda: gateway.proxy.running == 1)
        waiting = Asking(gateway, chat(stream=False))
        await left(waiting, lambda: len(upstream.requests) == 1)
        relaying = Asking(gateway, chat())
        await left(relaying, lambda: len(relaying.sent) == 2)
        failing = Asking(gateway, chat())
        failing.failing = True
        await failing.done()
        assert [record["outcome"] for record in records] == ["client_cancelled"] * 4
        await until(lambda: upstream.open == 0)


async def test_a_body_over_the_limit_is_refused_whenever_that_shows() -> None:
    """C079."""
    async with application(plain(), listen={"max_body_mb": 0.001}) as (upstream, gateway, _):
        for body in ([b"x" * 2000], [b"x" * 600, b"x" * 600, b"x"]):
            asking = Asking(gateway, *body)
            await asking.done()
            assert asking.status == 413
        assert upstream.requests == []
        assert gateway.proxy.buffered_bytes == 0


async def test_all_bodies_together_have_a_limit() -> None:
    """C079."""
    async with application(plain(), listen={"max_buffered_mb": 0.001}) as (_, gateway, _records):
        for body in ([b"x" * 2000], [b"x" * 600, b"x" * 600, b"x"]):
            asking = Asking(gateway, *body)
            await asking.done()
            assert asking.status == 503


async def test_a_slow_server_pauses_the_upstream() -> None:
    """C015."""
    big = chunk({"content": "x" * 8000})
    async with application(streaming(*[big] * 200, chunk(finish="stop"), DONE)) as (_, gateway, records):
        asking = Asking(gateway, chat())
        await until(lambda: len(asking.sent) > 2)
        asking.may_send.clear()
        await asyncio.sleep(0.2)
        assert len(asking.body) < 200 * len(big)
        asking.may_send.set()
        await asking.done()
        assert asking.body == big * 200 + chunk(finish="stop") + DONE
        assert records[0]["outcome"] == "complete"
        assert 200 * len(big) > PAUSE_ABOVE


async def test_an_answer_that_breaks_off_has_no_last_message() -> None:
    """C039, for answers that are no streams: the server then cuts the connection."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 900000\r\ncontent-type: audio/mpeg\r\n\r\n" + b"x" * 1000)
        await asyncio.sleep(0.02)
        wire.close()

    async with application(play) as (_, gateway, records):
        asking = Asking(gateway, b'{"model":"m"}', path="/v1/audio/speech")
        await asking.done()
        assert asking.status == 200
        assert all(message.get("more_body", True) for message in asking.sent)
        assert records[0]["outcome"] == "upstream_truncated"


async def test_the_application_lives_and_ends() -> None:
    async with RawUpstream(plain()) as upstream:
        gateway = Gateway(from_mapping(settings_for(upstream.url)))
        incoming: asyncio.Queue[Message] = asyncio.Queue()
        told: list[str] = []

        async def send(message: Any) -> None:
            told.append(message["type"])

        incoming.put_nowait({"type": "lifespan.startup"})
        incoming.put_nowait({"type": "lifespan.shutdown"})
        await gateway({"type": "lifespan"}, incoming.get, send)
        assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert "0 running" in repr(gateway)
