"""The real gateway on a real socket, in the test's own event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.app import Gateway
from gateway.configfile import from_mapping
from gateway.lifecycle import GatewayServer, listening_socket
from gateway.upstream.pool import Connect
from tests.support.callers import Caller


class Running(Caller):
    """A gateway that serves; what a test may ask of it."""

    def __init__(self, gateway: Gateway, port: int, records: list[dict[str, object]], server: GatewayServer) -> None:
        self.gateway = gateway
        self.server = server
        self.port = port
        self.records = records  # finished requests, as they go to the log
        self.url = f"http://127.0.0.1:{port}"

    async def last_record(self, timeout: float = 5.0, count: int = 1) -> dict[str, Any]:
        """The account of the last request, once `count` are there."""
        await until(lambda: len(self.records) >= count, timeout)
        return self.records[-1]

    async def settled(self, timeout: float = 2.0) -> None:
        """Waits until nothing is in flight: no request, no lease, no task, no open connection but idle ones."""
        pools = [state.pool for state in self.gateway.runtime.upstreams.values()]
        await until(
            lambda: (
                self.gateway.proxy.running == 0
                and self.gateway.proxy.buffered_bytes == 0
                and all(pool.leases == 0 and pool.open == pool.idle for pool in pools)
            ),
            timeout,
        )


async def until(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    """Waits for a condition, looking often; fails after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.002)


def settings_for(
    url: str | Mapping[str, str], *, route: Mapping[str, object] | None = None, **top: object
) -> dict[str, object]:
    """Settings with one upstream (or several by name) and one route; `top` replaces or adds top-level sections."""
    upstreams: dict[str, object] = (
        {"up": {"url": url}} if isinstance(url, str) else {n: {"url": u} for n, u in url.items()}
    )
    data: dict[str, object] = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "upstreams": upstreams,
        "routes": [{"name": "main", "upstreams": list(upstreams), **(route or {})}],
    }
    return {**data, **top}


@asynccontextmanager
async def running_gateway(
    settings: Mapping[str, object],
    *,
    upstream: Mapping[str, object] | None = None,
    connect: Connect | None = None,
    source: Path | None = None,
) -> AsyncIterator[Running]:
    """Serves `settings` (see `settings_for`) on a free port; `upstream` adds settings to every upstream.

    `source` is the file that a reload reads.
    """
    data: dict[str, Any] = {"listen": {"host": "127.0.0.1", "port": 0}, **settings}
    data["listen"] = {"host": "127.0.0.1", "port": 0, **data["listen"]}
    if upstream:
        data["upstreams"] = {name: {**values, **upstream} for name, values in data["upstreams"].items()}
    records: list[dict[str, object]] = []
    gateway = Gateway(
        from_mapping(data), registry=CollectorRegistry(), write_log=records.append, connect=connect, source=source
    )
    server = GatewayServer(gateway)
    sock = listening_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([sock])
    ticking = asyncio.create_task(server.main_loop())
    try:
        yield Running(gateway, port, records, server)
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        server.force_exit = True
        await server.shutdown([sock])


Scenario = Callable[[Running], Awaitable[None]]
