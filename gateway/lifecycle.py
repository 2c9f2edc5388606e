"""From start to drain: uvicorn's server with our protocol, our sweep of deadlines, and our way to stop.

On SIGTERM or SIGINT: not ready at once, still accepting for `drain_delay_s`, then no new connections; running answers
go on for `drain_timeout_s`, after which each stream is told so in its own shape. A second signal ends all at once.
SIGHUP, and a changed file, reload the configuration.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from types import FrameType
from typing import TYPE_CHECKING, cast

from uvicorn import Config, Server

from gateway.configfile import fingerprint
from gateway.reload import reload_now
from gateway.server import GatewayProtocol

if TYPE_CHECKING:
    from gateway.app import Gateway

log = logging.getLogger("gateway.server")

BACKLOG = 2048  # 256 clients that connect at once met a full queue of 100, and each waited a second
TICK_S = 0.1  # uvicorn's own
SWEEP_EVERY = 5  # ticks
WATCH_FILE_EVERY = 20  # ticks
LAST_WORDS_S = 0.5  # for error events to leave after the drain limit


def server_config(gateway: Gateway) -> Config:
    """uvicorn as we use it: uvloop and httptools asserted, nothing between it and us."""
    listen = gateway.settings.listen
    return Config(
        app=gateway,
        host=listen.host,
        port=listen.port,
        loop="uvloop",
        http=GatewayProtocol,
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=None,
    )


class GatewayServer(Server):
    """One process's server."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(server_config(gateway))
        self.gateway = gateway
        self._drain_at: float | None = None
        self._last_tick = 0.0
        self._fingerprint = fingerprint(gateway.source) if gateway.source is not None else None
        self._reload_wanted = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        if not type(loop).__module__.startswith("uvloop"):
            raise RuntimeError("the server needs uvloop")
        await super().startup(sockets)
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self._want_reload)

    def _want_reload(self) -> None:
        self._reload_wanted = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Called as a signal handler. Not passed on: a drained process ends with 0."""
        if self.gateway.is_draining:
            self.force_exit = True
            self.should_exit = True
            return
        self.gateway.begin_drain()
        if self.gateway.settings.listen.drain_delay_s == 0:
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._last_tick:
            self.gateway.metrics.loop_lag.observe(max(0.0, now - self._last_tick - TICK_S))
        self._last_tick = now
        if self.gateway.is_one_of_many:
            self.gateway.metrics.flush()  # the page may be another worker's
        if counter % SWEEP_EVERY == 0:
            self._sweep()
        if self._reload_wanted or (counter % WATCH_FILE_EVERY == 0 and self._file_changed()):
            self._reload_wanted = False
            reload_now(self.gateway)
        if self.gateway.is_draining and not self.should_exit:
            if self._drain_at is None:
                self._drain_at = now + self.gateway.settings.listen.drain_delay_s
            self.should_exit = now >= self._drain_at
        return await super().on_tick(counter)

    def _sweep(self) -> None:
        """Ends connections whose deadline passed: one timer for all of them."""
        now = self.gateway.clock()
        connections = cast("set[GatewayProtocol]", self.server_state.connections)
        for connection in [c for c in connections if 0 < c.deadline_ns < now]:
            connection.deadline_passed()

    def _file_changed(self) -> bool:
        if self.gateway.source is None:
            return False
        current = fingerprint(self.gateway.source)
        if current is None or current == self._fingerprint:
            return False
        self._fingerprint = current
        return True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.gateway.begin_drain()
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._wait_for_requests(self.gateway.settings.listen.drain_timeout_s)
        tasks = list(self._tasks)
        if tasks:
            log.warning("ending %d requests that were still running", len(tasks))
            await self._end(list(self.gateway.pendings.tasks))  # first, so that whoever follows one reads its end
            await self._end(list(self.server_state.tasks))
        await self._wait_for_writes(LAST_WORDS_S)
        for connection in list(self.server_state.connections):
            connection.transport.close()
        await self.lifespan.shutdown()

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_WORDS_S)

    @property
    def _tasks(self) -> set[asyncio.Task[None]]:
        """Requests that run, with or without a connection that waits for them."""
        return {*self.server_state.tasks, *self.gateway.pendings.tasks}

    async def _wait_for_requests(self, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        while self._tasks and not self.force_exit and loop.time() < end:
            self._sweep()
            await asyncio.sleep(0.05)

    async def _wait_for_writes(self, limit_s: float) -> None:
        """Until what was written has left, for readers that still take it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        while loop.time() < end and any(  # noqa: ASYNC110  two dozen transports, none of which tells
            connection.transport.get_write_buffer_size() for connection in list(self.server_state.connections)
        ):
            await asyncio.sleep(0.01)


def listening_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket; `shared` for several workers on one port (SO_REUSEPORT). Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
