"""The graph of objects that make one gateway process. Everything is made here, once, and passed in."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from gateway import asgi
from gateway.account import Account
from gateway.metrics import Metrics
from gateway.pending import PendingBook
from gateway.proxy import Proxy
from gateway.runtime import Runtime
from gateway.store import make_store
from gateway.tending import tend
from gateway.upstream.watch import Watch
from gateway.web.api import control_plane
from gateway.wire.headers import header_value

if TYPE_CHECKING:
    from gateway.config import Settings
    from gateway.upstream.pool import Connect
    from gateway.upstream.watch import ClientFactory

log = logging.getLogger("gateway.app")

HEALTH_PATHS = frozenset(("/health", "/healthz", "/readyz"))
PENDING_PATH = "/gateway/pending/"
CONTROL_PATHS = HEALTH_PATHS | {"/metrics", "/gateway"}
FIRST_PROBES_S = 1.0  # to know each upstream's engine before the first request, when it can be known
GC_THRESHOLD = 50_000  # allocations between collections; requests leave few cycles behind (latency-methods §8)


class Gateway:
    """One gateway. An ASGI application; under our own server the data plane does not pass through ASGI."""

    def __init__(
        self,
        settings: Settings,
        *,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        connect: Connect | None = None,
        probe_client: ClientFactory | None = None,
        source: Path | None = None,
        listen_arguments: Mapping[str, object] | None = None,
        auth: str | None = None,
        write_log: Callable[[dict[str, object]], None] | None = None,
        worker: int = 0,
    ) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.clock = clock
        self.source = source
        self.listen_arguments = listen_arguments or {}  # what the command line says instead of the file, also later
        self.auth = auth
        self.worker = worker
        self.is_draining = False
        self.is_one_of_many = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self.started_at = time.time()
        self._connect = connect
        self.metrics = Metrics(self.registry)
        self.account = Account(self.metrics, write=write_log)
        self.watch = Watch(loop_time=lambda: asyncio.get_running_loop().time(), client=probe_client)
        runtime = Runtime(settings, self.account, clock, connect=connect, header=header_value)
        self.store = make_store(settings.store, settings.pending)
        self.store.on_state = self._store_changed
        self.pendings = PendingBook(settings.pending, self.store, self.metrics.pending, clock)
        self.proxy = Proxy(runtime, self.account, self.watch, self.pendings, clock)
        self._control = control_plane(self)
        self._background: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Gateway {self.proxy.running} running, {len(self.runtime.upstreams)} upstreams>"

    @property
    def runtime(self) -> Runtime:
        return self.proxy.runtime

    @property
    def settings(self) -> Settings:
        return self.proxy.runtime.settings

    @property
    def admin_port(self) -> int | None:
        """Port of the second listener, when there is one."""
        address = self.settings.listen.admin
        return int(address.rpartition(":")[2]) if address else None

    def is_control(self, path: str, port: int | None = None) -> bool:
        """Whether a path belongs to the control plane on the listener it came to."""
        path = _canonical(path)
        is_known = path in CONTROL_PATHS or path.startswith("/gateway/")
        admin = self.admin_port
        if admin is None or port is None:
            return is_known
        if port == admin:
            return True
        return path in HEALTH_PATHS or path.startswith(PENDING_PATH)  # callers come back where they were told so

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] != "http":
            raise RuntimeError(f"only http is served, not {scope['type']}")
        elif self.is_control(scope["path"]) or (scope.get("server") or (None, None))[1] == self.admin_port is not None:
            await self._control({**scope, "path": _canonical(scope["path"])}, receive, send)
        else:
            await asgi.serve(self.proxy, scope, receive, send, self.clock)

    # Life

    async def start(self) -> None:
        """Starts probing; returns when each upstream was asked once or a second has passed."""
        loop = asyncio.get_running_loop()
        await self.store.open()
        self._background = [
            loop.create_task(
                self.watch.run(lambda: self.runtime.upstreams.values()),  # noqa: PLW0108  a reload changes the runtime
                name="watch",
            ),
            loop.create_task(tend(lambda: self.runtime, self.watch, self.clock), name="tend"),
            loop.create_task(self.pendings.run(), name="pending"),
        ]
        try:
            async with asyncio.timeout(FIRST_PROBES_S):
                await self.watch.first_round.wait()
        except TimeoutError:
            log.warning("some upstreams did not answer their first health check within %g s", FIRST_PROBES_S)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)

    async def stop(self) -> None:
        """Stops probing and closes every upstream connection."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._background = []
        await self.pendings.stop()
        await self.store.close()
        for state in self.runtime.upstreams.values():
            state.pool.abort()
        await self.watch.close()
        self.metrics.flush()

    def _store_changed(self, is_up: bool) -> None:
        self.metrics.degraded.set(0 if is_up else 1)

    def begin_drain(self) -> None:
        """From now on not ready; what runs goes on."""
        self.is_draining = True

    def apply(self, settings: Settings) -> None:
        """Takes a new configuration. Running requests keep the old one."""
        old = self.runtime
        self.proxy.runtime = Runtime(
            settings, self.account, self.clock, connect=self._connect, previous=old, header=header_value
        )
        old.retire(self.proxy.runtime)
        self.pendings.limits = settings.pending
        self.account.keep_only(self.runtime.routes.keys(), self.runtime.upstreams.keys())
        self.metrics.reloads["ok"].inc()
        log.info("configuration reloaded: %d routes, %d upstreams", len(settings.routes), len(settings.upstreams))

    def reload_failed(self) -> None:
        self.metrics.reloads["failed"].inc()

    async def _lifespan(self, receive: asgi.Receive, send: asgi.Send) -> None:
        steps: dict[str, Callable[[], Awaitable[None]]] = {"startup": self.start, "shutdown": self.stop}
        while True:
            message = await receive()
            step = str(message["type"]).removeprefix("lifespan.")
            await steps[step]()
            await send({"type": f"lifespan.{step}.complete"})
            if step == "shutdown":
                return


def _canonical(path: str) -> str:
    """A control path without doubled or trailing slashes, which people's probes and browsers add."""
    if "//" not in path and not path.endswith("/"):
        return path
    return "/" + "/".join(part for part in path.split("/") if part)
