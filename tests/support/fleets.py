"""A gateway before several model servers, each with a part to play, and what must hold when the play is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from tests.support.raw import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    Handler,
    RawUpstream,
    Received,
    Response,
    Wire,
    answer,
    chat,
    chunk,
    framed,
    whole,
)
from tests.support.running import Running, running_gateway, settings_for, until

ROLE = chunk({"role": "assistant", "content": ""})
HELLO = chunk({"content": "hello"})
STOP = chunk(finish="stop")
STREAM = ROLE + HELLO + STOP + DONE
GONE_URL = "http://127.0.0.1:1"  # nobody listens there


async def good(request: Received, wire: Wire) -> None:
    """Answers as it was asked, at once."""
    if request.json.get("stream"):
        await wire.send(STREAM_HEAD, framed(ROLE), framed(HELLO), framed(STOP + DONE), LAST_CHUNK)
    else:
        await wire.send(whole(answer()))


def after(pause: asyncio.Event | float, then: Handler = good) -> Handler:
    """Answers when the event is set, or after seconds."""

    async def play(request: Received, wire: Wire) -> None:
        await (pause.wait() if isinstance(pause, asyncio.Event) else asyncio.sleep(pause))
        await then(request, wire)

    return play


def refuses(status: str, body: bytes = b'{"error":{"message":"no"}}', headers: str = "") -> Handler:
    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(body, status, "content-type: application/json" + headers))

    return play


class Fleet:
    """The gateway and its servers. The first request goes to `first`, and with round robin so do all odd ones."""

    def __init__(self, running: Running, upstreams: dict[str, RawUpstream]) -> None:
        self.running = running
        self.upstreams = upstreams
        self.gateway = running.gateway

    def asked(self, name: str) -> int:
        return len(self.upstreams[name].requests)

    async def ask(self, *, stream: bool = False, headers: dict[str, str] | None = None, **more: Any) -> Response:
        return await self.running.ask(chat(stream=stream, **more), headers=headers)

    def breaker(self, name: str) -> dict[str, object]:
        """What the breaker of the one model shows; empty before its first use."""
        state = self.gateway.runtime.upstreams[name]
        return next((b.snapshot(self.gateway.clock()) for b in state.standing.breakers.values()), {})

    async def check(self) -> None:
        """Nothing is left: no request, lease, permit, ticket, task or connection; the gauges agree."""
        await self.running.settled()
        for name, state in self.gateway.runtime.upstreams.items():
            standing = state.standing
            assert standing.running == set()
            assert sum(predictor.waiting for predictor in standing.forecasts) == 0
            for breaker in standing.breakers.values():
                seen = breaker.snapshot(self.gateway.clock())
                if seen["state"] == "half_open":
                    permits, calls = int(str(seen["permits"])), int(str(seen["calls"]))
                    assert permits + calls == state.config.breaker.half_open_calls
            if name in self.upstreams:
                await until(lambda up=self.upstreams[name], pool=state.pool: up.open <= pool.idle)  # type: ignore[misc]
        assert [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("attempt")] == []
        assert await self.running.metric("gateway_inflight") == 0
        assert await self.running.metric("gateway_upstream_connections", state="busy") == 0
        assert await self.running.metric("gateway_requests_total") == len(self.running.records)


@asynccontextmanager
async def fleet(
    caplog: pytest.LogCaptureFixture,
    *,
    route: Mapping[str, object] | None = None,
    upstream: Mapping[str, object] | None = None,
    gone: Mapping[str, str] | None = None,
    top: Mapping[str, object] | None = None,
    **handlers: Handler,
) -> AsyncIterator[Fleet]:
    """Servers in the order of their names given, and in `gone` names with addresses at which nobody is."""
    caplog.set_level(logging.INFO, "gateway")
    asyncio.get_running_loop().set_exception_handler(_fail)
    async with AsyncExitStack() as stack:
        up = {name: await stack.enter_async_context(RawUpstream(play)) for name, play in handlers.items()}
        urls = {**{name: raw.url for name, raw in up.items()}, **(gone or {})}
        names = [name for name in urls if name != "first"]
        names.insert(1, "first")  # a route's turn begins at 1
        ordered = {name: urls[name] for name in names}
        settings = settings_for(ordered, route={"balance": "round_robin", **(route or {})}, **(top or {}))
        async with running_gateway(settings, upstream=upstream) as running:
            for state in running.gateway.runtime.upstreams.values():
                state.is_up = True  # a failed health check must not decide who is asked first
            found = Fleet(running, up)
            yield found
            await found.check()
    problems = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert problems == [], [r.getMessage() for r in problems]


def _fail(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    logging.getLogger("gateway.loop").error("%s", context.get("message"), exc_info=context.get("exception"))  # type: ignore[arg-type]
