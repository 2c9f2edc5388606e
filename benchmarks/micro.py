"""Our own Python per request and per chunk, without sockets: fake transports on both sides, in one process.

    python -m benchmarks.micro [--profile=plain]

What the kernel does is left out, so the figures only compare versions of this code with each other.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import time
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry
from uvicorn.server import ServerState

from benchmarks.upstream import END, HEAD, LAST, PLAIN, TOKEN
from gateway.app import GC_THRESHOLD, Gateway
from gateway.configfile import from_mapping
from gateway.lifecycle import server_config
from gateway.server import GatewayProtocol
from gateway.upstream.connection import UpstreamConnection

BODY = (
    b'{"model": "m", "stream": %b, "messages": [{"role": "system", "content": "You are a helpful assistant."}, '
    b'{"role": "user", "content": "Tell me something. Tell me something. Tell me something. Tell me something."}]}'
)


def request(*, stream: bool) -> bytes:
    body = BODY % (b"true" if stream else b"false")
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"user-agent: OpenAI/Python 2.54.0\r\naccept: application/json\r\naccept-encoding: gzip, deflate\r\n"
        b"authorization: Bearer EMPTY\r\nx-stainless-lang: python\r\nx-stainless-retry-count: 0\r\n"
        b"connection: keep-alive\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )


class FakeTransport(asyncio.Transport):
    """Takes writes and gives them to `peer`."""

    def __init__(self, on_write: Any) -> None:
        super().__init__()
        self.on_write = on_write

    def write(self, data: Any) -> None:
        self.on_write(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...
    def abort(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Bench:
    """The gateway between a canned upstream and a counting client."""

    def __init__(self, chunks: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.chunks = chunks
        self.reads = [HEAD + TOKEN, *[TOKEN] * (chunks - 2), LAST + END] if chunks else [
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(PLAIN), PLAIN)
        ]  # fmt: skip
        settings = from_mapping({"upstreams": {"up": {"url": "http://127.0.0.1:1"}}})
        self.gateway = Gateway(settings, registry=CollectorRegistry(), connect=self.connect)
        config = server_config(self.gateway)
        config.load()
        self.protocol = GatewayProtocol(config, ServerState(), {}, self.loop)
        self.protocol.connection_made(FakeTransport(self.to_client))
        self.request = request(stream=chunks > 0)
        self.done: asyncio.Future[None] | None = None

    async def connect(self, factory: Any, _: Any) -> UpstreamConnection:
        connection: UpstreamConnection = factory()
        connection.connection_made(FakeTransport(lambda _: self.loop.call_soon(self.answer, connection)))
        return connection

    def answer(self, connection: UpstreamConnection) -> None:
        for data in self.reads:
            connection.data_received(data)

    def to_client(self, data: bytes) -> None:
        if self.chunks == 0 or data.endswith(b"0\r\n\r\n"):
            assert self.done is not None
            self.done.set_result(None)

    async def run(self, count: int) -> float:
        before = time.process_time()
        for _ in range(count):
            self.done = self.loop.create_future()
            self.protocol.data_received(self.request)
            await self.done
        return (time.process_time() - before) / count * 1e6


async def main(args: argparse.Namespace) -> None:
    for name, chunks in (("plain", 0), ("stream of 16", 16), ("stream of 216", 216)):
        bench = Bench(chunks)
        await bench.run(200)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        best = min([await bench.run(args.count) for _ in range(args.rounds)])
        print(f"{name}: {best:.1f} µs per request")
        if args.profile and name == args.profile:
            profile = cProfile.Profile()
            profile.enable()
            await bench.run(args.count)
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", default="", help="name of the workload to profile")
    uvloop.run(main(parser.parse_args()))
