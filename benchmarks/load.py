"""The stand-in for native/load.c where there is no compiler: its `closed` mode, its arguments, its one JSON object."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import time

import uvloop

TICK_S = 0.01
MAX_TAIL = 32


class Client(asyncio.Protocol):
    """One keep-alive connection that asks, reads to the end, and asks again. Takes only answers as they should be."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.tail = b""  # the last bytes of a stream
        self.head = b""
        self.left = -1  # bytes of a plain body that are still to come; -1: its length is not known yet
        self.events = 0
        self.asked = self.previous = 0.0
        self.is_asking = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.ask()

    def ask(self) -> None:
        if not self.run.take():
            self.transport.close()
            return
        self.tail, self.head, self.left, self.events = b"", b"", -1, 0
        self.is_asking = True
        self.asked = time.perf_counter()
        self.transport.write(self.run.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.head:
            self.head = data[:12]
        if self.run.chunks:
            self.take_events(data, now)
            finished = self.tail.endswith(b"\r\n0\r\n\r\n")
        else:
            finished = self.take_plain(data)
        if finished:
            self.finish(now)

    def take_events(self, data: bytes, now: float) -> None:
        arrived = data.count(b"data: {")
        for index in range(arrived):
            if self.events:
                self.run.gaps.append(now - self.previous)
            else:
                self.run.ttft.append(now - self.asked)
            self.events += 1
            self.previous = now
            self.run.coalesced += index > 0
        self.run.reads += arrived > 0
        self.run.events += arrived
        self.tail = (self.tail + data)[-MAX_TAIL:]

    def take_plain(self, data: bytes) -> bool:
        if self.left < 0:
            head, _, body = data.partition(b"\r\n\r\n")
            at = head.lower().find(b"content-length:")
            self.left = int(head[at + 15 :].split(b"\r\n", 1)[0]) - len(body) if at > 0 else 0
        else:
            self.left -= len(data)
        return self.left <= 0

    def finish(self, now: float) -> None:
        self.is_asking = False
        if not self.head.startswith(b"HTTP/1.1 200"):
            self.run.failures["bad_status"] += 1
        elif self.events != self.run.chunks:
            self.run.failures["wrong_events"] += 1
        else:
            self.run.e2e.append(now - self.asked)
        self.ask()

    def connection_lost(self, _: Exception | None) -> None:
        self.run.failures["cut_short"] += self.is_asking
        self.run.clients_left -= 1
        if self.run.clients_left == 0:
            self.run.done.set()


class Run:
    """One measurement."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.requests_left: int = args.requests
        self.ends_at: float = time.perf_counter() + args.seconds
        self.chunks: int = args.chunks
        self.request = request_of(args)
        self.ttft: list[float] = []
        self.gaps: list[float] = []
        self.e2e: list[float] = []
        self.lags: list[float] = []
        self.reads = self.events = self.coalesced = 0
        self.failures = {"no_connection": 0, "bad_status": 0, "cut_short": 0, "wrong_events": 0, "timed_out": 0}
        self.clients_left: int = args.clients
        self.done = asyncio.Event()

    def take(self) -> bool:
        self.requests_left -= 1
        return self.requests_left >= 0 and time.perf_counter() < self.ends_at


def request_of(args: argparse.Namespace) -> bytes:
    """The bytes of one request; see make_request in native/asking.h."""
    marker = f"chunks={args.chunks},pause_ms={args.pause_ms:g}"
    stream = ',"stream":true' if args.chunks else ""
    text = ("the model answers slowly when its queue is long\\n" * (args.prompt_bytes // 49 + 1))[: args.prompt_bytes]
    body = (
        f'{{"messages":[{{"role":"system","content":"You are a helpful assistant. x-bench: {marker}"}},'
        f'{{"role":"user","content":"{text.rstrip(chr(92))}"}}],"model":"m"{stream}}}'
    )
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{args.port}\r\ncontent-type: application/json\r\n"
        f"user-agent: OpenAI/Python 2.54.0\r\naccept: application/json\r\naccept-encoding: gzip, deflate\r\n"
        f"authorization: Bearer {args.key}\r\nx-stainless-lang: python\r\nx-stainless-retry-count: 0\r\n"
        f"x-bench: {marker}\r\nconnection: keep-alive\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()


def quantiles(values: list[float]) -> dict[str, float]:
    """Count, p50, p90, p99 and max in milliseconds."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {name: ordered[min(len(ordered) - 1, int(len(ordered) * q))] for name, q in places.items()}
    in_ms = {name: round(value * 1000, 4) for name, value in {**found, "max": ordered[-1]}.items()}
    return {"count": len(ordered), **in_ms}


async def watch_lag(samples: list[float]) -> None:
    """How late a timer of ours runs."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        samples.append(time.perf_counter() - before - TICK_S)


async def start_clients(run: Run, args: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(args.clients):
        try:
            await loop.create_connection(lambda: Client(run), "127.0.0.1", args.port)
        except OSError:
            run.failures["no_connection"] += 1
            run.clients_left -= 1
        await asyncio.sleep(args.spread_s / args.clients)


async def main(args: argparse.Namespace) -> None:
    gc.freeze()
    gc.disable()
    run, started = Run(args), time.perf_counter()
    watcher = asyncio.get_running_loop().create_task(watch_lag(run.lags))
    try:
        async with asyncio.timeout(args.limit_s):
            await start_clients(run, args)
            if run.clients_left:
                await run.done.wait()
    except TimeoutError:
        run.failures["timed_out"] = run.clients_left
    watcher.cancel()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({
        "generator": "python", "requests": len(run.e2e), "events": run.events, "window_events": 0, "window_s": 0.0,
        "begun": len(run.ttft), "reads": run.reads, "coalesced": run.coalesced, "reconnects": 0,
        "connections": args.clients, "alive": 0, "ttft_ms": quantiles(run.ttft), "gap_ms": quantiles(run.gaps),
        "e2e_ms": quantiles(run.e2e), "lag_ms": quantiles(run.lags), "late_ms": quantiles([]),
        "failures": run.failures, "wall_s": time.perf_counter() - started, "cpu_s": used.ru_utime + used.ru_stime,
    }))  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--mode", choices=["closed"], default="closed")
    parser.add_argument("--key", default="EMPTY")
    for name, default in (("port", 0), ("clients", 1), ("requests", 100), ("chunks", 16), ("prompt-bytes", 160)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, seconds in (("seconds", 60.0), ("pause-ms", 1.0), ("spread-s", 0.0), ("hold-s", 0.0), ("limit-s", 120.0)):
        parser.add_argument(f"--{name}", type=float, default=seconds)
    return parser.parse_args()


if __name__ == "__main__":
    uvloop.run(main(arguments()))
