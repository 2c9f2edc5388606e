"""Requests that come when they come: arrivals do not wait for answers, as those of many callers do not.

A closed loop of N clients slows down with the server and hides what overload does. Here every request has its time from
a seeded Poisson process, and its latencies count from that time, whatever the generator was doing. How late it really
was sent is kept apart (`late_s`): above a few milliseconds the generator is what is measured.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import orjson

from gateway.sim.client import Client, Response

PATH: Final = "/v1/chat/completions"
LATE_LIMIT_S: Final = 0.02  # p99; later, and what is measured is the generator
_CONTENT: Final = b'"content":"'
_EMPTY: Final = b'"content":""'

Kind = Literal["complete", "refused", "in_band", "error_first", "silent", "no_answer"]
Keep = Callable[["Outcome"], None]


@dataclass(slots=True)
class Outcome:
    """One request as its caller saw it. Seconds since its own time of arrival; `at` since the beginning of the run."""

    at: float
    is_stream: bool
    late_s: float = 0.0
    first_s: float | None = None  # the first event with text in it; of a plain answer its end
    end_s: float = 0.0
    status: int = 0
    code: str = ""  # of the error, where there is one
    upstream: str = ""
    attempts: int = 0
    kind: Kind = "no_answer"


class Connections:
    """Keep-alive connections to one port, made as they are needed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Client] = []

    async def take(self) -> Client:
        """An idle one that is still open, or a new one. OSError when nobody listens."""
        while self._idle:
            client = self._idle.pop()
            if not client.lost and not client.at_eof:
                client.received = b""
                return client
        _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", self._port)
        return client

    def give_back(self, client: Client, response: Response) -> None:
        if response.complete and not client.at_eof and not client.lost:
            self._idle.append(client)
        else:
            client.transport.close()

    def close(self) -> None:
        for client in self._idle:
            client.transport.close()
        self._idle.clear()


def body_of(text: str, *, stream: bool) -> bytes:
    return orjson.dumps({"model": "m", "stream": stream, "messages": [{"role": "user", "content": text}]})


async def ask(connections: Connections, outcome: Outcome, body: bytes, due: float, limit_s: float) -> None:
    """Sends one request and fills in what came of it; never raises for what a server does. `due`: monotonic time."""
    client: Client | None = None
    response = Response()
    try:
        async with asyncio.timeout(limit_s):
            client = await connections.take()
            outcome.late_s = time.monotonic() - due
            client.ask(PATH, body)
            response = await client.response()
    except TimeoutError:
        outcome.code = "the caller gave up"
    except OSError as error:
        outcome.code = type(error).__name__
    outcome.end_s = time.monotonic() - due
    if client is None:
        return
    connections.give_back(client, response)
    if response.status:
        judge(outcome, response, due)


def judge(outcome: Outcome, response: Response, due: float) -> None:
    """What an answer was. The client's times are those of asyncio's loop, which are monotonic time."""
    outcome.status = response.status
    outcome.upstream = (response.header(b"x-gateway-upstream") or b"").decode()
    outcome.attempts = int(response.header(b"x-gateway-attempts") or 0)
    if response.status != 200:
        outcome.code = _code(response.body) or outcome.code
        outcome.kind = "refused" if outcome.code == "overloaded" else "error_first"
    elif (response.header(b"content-type") or b"").startswith(b"text/event-stream"):
        _judge_stream(outcome, response, due)
    elif response.complete and b'"choices"' in response.body:
        outcome.kind, outcome.first_s = "complete", outcome.end_s
    else:  # behind a heartbeat an error has status 200 too
        outcome.code = _code(response.body)
        outcome.kind = "error_first" if outcome.code else "silent"


def _judge_stream(outcome: Outcome, response: Response, due: float) -> None:
    has_finish = has_done = False
    for when, block in response.events():
        if outcome.first_s is None and _CONTENT in block and _EMPTY not in block:
            outcome.first_s = when - due
        if b'"error"' in block:
            outcome.code = _code(block.partition(b"data:")[2])
        has_finish |= b'"finish_reason":"' in block
        has_done |= block == b"data: [DONE]"
    if outcome.code:
        outcome.kind = "in_band" if outcome.first_s is not None else "error_first"
    else:
        outcome.kind = "complete" if has_finish and has_done and response.complete else "silent"


def _code(body: bytes) -> str:
    """The code of an error body; its type, or `unknown`, where it has none; nothing where it is no error."""
    try:
        error = orjson.loads(body.strip())["error"]
        return str(error.get("code") or error.get("type") or "unknown")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return "unknown" if b'"error"' in body else ""


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds since the beginning, without an end."""
    draw, at = random.Random(seed), 0.0
    while True:
        at += draw.expovariate(rate)
        yield at


async def send(
    times: Iterator[float], until: Callable[[float], bool], begin: Callable[[float, float], Coroutine[None, None, None]]
) -> None:
    """Starts `begin(at, due)` as a task at each time until `until(at)`; then waits for all of them."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as running:
        for at in times:
            if until(at):
                break
            wait = began + at - time.monotonic()
            # Also without a wait: a generator that is late must still read what comes.
            await asyncio.sleep(max(0.0, wait))
            running.create_task(begin(at, began + at))


def quantile(values: Sequence[float], q: float) -> float:
    """Of unsorted values; 0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))] if ordered else 0.0


def lateness(outcomes: Sequence[Outcome]) -> float:
    """p99 of how late requests were sent, in seconds."""
    return quantile([outcome.late_s for outcome in outcomes], 0.99)
