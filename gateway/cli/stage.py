"""The set of `firsttoken demo`: two simulated model servers and the gateway in front of them, on free ports."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from gateway.app import Gateway
from gateway.cli import CommandError
from gateway.configfile import from_mapping
from gateway.lifecycle import GatewayServer, listening_socket
from gateway.sim.profiles import DEMO, Profile
from gateway.sim.transport import serve

HOST: Final = "127.0.0.1"
COMPILE_S: Final = 2.5  # of the first call after a start; real servers take a minute and more
BUDGET_MS: Final = 500
LEAST_HEARTBEAT_MS: Final = 50  # what the settings take
ACCOUNT_LIMIT_S: Final = 5.0  # from the end of an answer to its record


@dataclass(frozen=True, slots=True)
class Stage:
    """A gateway that serves."""

    port: int
    ledger: Ledger


class Ledger:
    """Takes the records of finished requests, and hands them out by request id."""

    def __init__(self) -> None:
        self._records: dict[str, dict[str, object]] = {}
        self._came = asyncio.Event()

    def write(self, record: dict[str, object]) -> None:
        self._records[str(record.get("request_id"))] = record
        self._came.set()

    async def record(self, request_id: str) -> dict[str, object]:
        """The record of a request, once it is there. Raises CommandError when it does not come."""
        try:
            async with asyncio.timeout(ACCOUNT_LIMIT_S):
                while request_id not in self._records:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            raise CommandError(f"the gateway has no account of the call `{request_id}`") from None
        return self._records[request_id]


def profiles(speed: float) -> tuple[Profile, Profile]:
    """The model server, and the same one as it is right after a start. Raises ValueError for a speed that is none."""
    warm = DEMO.scaled(speed)
    return warm, dataclasses.replace(warm, jit_first_call_s=COMPILE_S / speed)


def settings_for(model_url: str, fresh_url: str, speed: float) -> dict[str, object]:
    """The gateway's configuration; the advice of the story shows parts of it with everyday values."""
    heartbeat_ms = max(LEAST_HEARTBEAT_MS, round(BUDGET_MS / speed))
    budget = {"ttft_ms": max(1, round(BUDGET_MS / speed)), "on_exceed": "heartbeat", "heartbeat_ms": heartbeat_ms}
    fresh = {"upstreams": "fresh", "thinking": "off", "budget": budget}
    urls = {"model": model_url, "fresh": fresh_url}
    return {
        "listen": {"host": HOST, "port": 0, "drain_timeout_s": 1},
        # The engine is named: the first call comes before the gateway's own question for it was answered.
        "upstreams": {name: {"url": url, "engine": "vllm"} for name, url in urls.items()},
        "routes": [
            {"name": "fast", "match": {"prefix": "/fast"}, "upstreams": "model", "thinking": "off"},
            {"name": "rescue", "match": {"prefix": "/rescue"}, "upstreams": "model", "rescue": True},
            {"name": "fresh", "match": {"prefix": "/fresh"}, **fresh},
            {"name": "default", "upstreams": "model"},
        ],
    }


@asynccontextmanager
async def staged(speed: float) -> AsyncIterator[Stage]:
    """Two simulated servers and the gateway on free ports, while the block runs."""
    async with AsyncExitStack() as stack:
        urls = []
        for profile in profiles(speed):
            server = await serve(profile, HOST, 0)
            stack.push_async_callback(server.close)
            urls.append(server.url)
        ledger = Ledger()
        gateway = Gateway(from_mapping(settings_for(urls[0], urls[1], speed)), write_log=ledger.write)
        port = await stack.enter_async_context(_served(gateway))
        yield Stage(port, ledger)


@asynccontextmanager
async def _served(gateway: Gateway) -> AsyncIterator[int]:
    """The gateway's own server on a free port. Not `Server.serve`, which would take Ctrl-C for a wish to drain."""
    server = GatewayServer(gateway)
    sock = listening_socket(HOST, 0)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([sock])
    if not server.started:
        sock.close()
        raise CommandError("the gateway did not start")
    ticking = asyncio.get_running_loop().create_task(server.main_loop(), name="demo gateway")
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        await server.shutdown([sock])
