"""A load generator that reads streams event by event. Run by hop.py; prints one JSON object."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time

import uvloop


class Client(asyncio.Protocol):
    """One keep-alive connection that asks, reads to the end, and asks again."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.buffer = b""
        self.started = 0.0
        self.first = 0.0
        self.last = 0.0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.ask()

    def ask(self) -> None:
        if not self.run.take():
            self.transport.close()
            self.run.client_done()
            return
        self.buffer, self.first = b"", 0.0
        self.started = time.perf_counter()
        self.transport.write(self.run.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.buffer = (self.buffer + data)[-4096:] if self.run.is_stream else self.buffer + data
        if self.run.is_stream:
            if not self.first and b"data: " in data:
                self.first = now
                self.run.ttft.append(now - self.started)
            elif self.first:
                self.run.gaps.append(now - self.last)
            self.last = now
            self.run.reads += 1
            finished = self.buffer.endswith(b"0\r\n\r\n")
        else:
            head, _, body = self.buffer.partition(b"\r\n\r\n")
            at = head.lower().find(b"content-length:")
            finished = at > 0 and len(body) >= int(head[at + 15 :].split(b"\r\n", 1)[0])
        if finished:
            if (
                not data.startswith(b"HTTP/1.1 200")
                and not self.run.is_stream
                and not self.buffer.startswith(b"HTTP/1.1 200")
            ):
                self.run.failed += 1
            self.run.e2e.append(now - self.started)
            self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.run.failed += 1


class Run:
    """One measurement."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.left: int = args.requests
        self.is_stream = args.chunks > 0
        body = json.dumps({
            "model": "m", "stream": self.is_stream,
            "messages": [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Tell me something. " * 8}],
        }).encode()  # fmt: skip
        bench = f"x-bench: chunks={args.chunks},pause_ms={args.pause_ms}\r\n" if self.is_stream else ""
        self.request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n{bench}"
            f"user-agent: bench\r\naccept: */*\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.ttft: list[float] = []
        self.gaps: list[float] = []
        self.e2e: list[float] = []
        self.reads = 0
        self.failed = 0
        self.clients = args.clients
        self.done = asyncio.Event()

    def take(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def client_done(self) -> None:
        self.clients -= 1
        if self.clients == 0:
            self.done.set()


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p90, p99 and max in ms."""
    if not values:
        return {}
    ordered = sorted(values)
    pick = {
        name: ordered[min(len(ordered) - 1, int(len(ordered) * q))]
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }
    return {name: round(value * 1000, 4) for name, value in {**pick, "max": ordered[-1]}.items()}


async def lag(samples: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.01)
        samples.append(time.perf_counter() - before - 0.01)


async def main(args: argparse.Namespace) -> None:
    gc.freeze()
    gc.disable()
    run, lags = Run(args), []  # type: Run, list[float]
    loop = asyncio.get_running_loop()
    watcher = loop.create_task(lag(lags))
    for _ in range(args.clients):
        await loop.create_connection(lambda: Client(run), "127.0.0.1", args.port)
    async with asyncio.timeout(args.limit_s):
        await run.done.wait()
    watcher.cancel()
    print(json.dumps({
        "requests": len(run.e2e), "failed": run.failed, "reads": run.reads, "ttft_ms": quantiles(run.ttft),
        "gap_ms": quantiles(run.gaps), "e2e_ms": quantiles(run.e2e), "lag_ms": quantiles(lags),
    }))  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=16, help="0: plain answers")
    parser.add_argument("--pause-ms", type=float, default=1.0)
    parser.add_argument("--limit-s", type=float, default=120.0)
    uvloop.run(main(parser.parse_args()))
