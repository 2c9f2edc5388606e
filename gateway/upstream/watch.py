"""Asks model servers how they are: health every few seconds, models on demand. Not on any request's path.

httpx2 does the asking, without proxy variables from the environment and without following redirects.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import httpx2

from gateway.config import Upstream
from gateway.upstream.state import UpstreamState
from gateway.wire.answer import lenient_loads
from gateway.wire.engines import detect_engine
from gateway.wire.headers import Headers

log = logging.getLogger("gateway.upstream")

PROBE_EVERY_S = 5.0
PROBE_TIMEOUT_S = 5.0
GRACE_S = 2.0  # for the whole of an answer, beyond the limit of each step
MODELS_CACHE_S = 5.0
MODELS_TIMEOUT_S = 3.0  # Open WebUI gives a whole model list 10 s; one slow server must not hide the others
MAX_MODELS_BYTES = 4 * 1024 * 1024
JITTER = 0.2

ClientFactory = Callable[[UpstreamState], httpx2.AsyncClient]


class Watch:
    """Keeps `UpstreamState.is_up`, `.engine` and `.models` fresh."""

    def __init__(self, *, loop_time: Callable[[], float], client: ClientFactory | None = None) -> None:
        self._time = loop_time
        self._client_for = client or make_client
        self._clients: dict[str, tuple[Upstream, httpx2.AsyncClient]] = {}
        self._models_at: dict[str, float] = {}
        self._asking: dict[str, asyncio.Lock] = {}
        self.first_round = asyncio.Event()
        """Set when every upstream was asked once."""

    async def run(self, states: Callable[[], Iterable[UpstreamState]]) -> None:
        """Probes all of them for ever; cancelled at shutdown."""
        while True:
            for result in await asyncio.gather(*(self.probe(state) for state in states()), return_exceptions=True):
                if isinstance(result, Exception):  # ours, not the server's; the next round must still come
                    log.error("a health check failed", exc_info=result)
            self.first_round.set()
            await asyncio.sleep(PROBE_EVERY_S * random.uniform(1 - JITTER, 1 + JITTER))

    async def probe(self, state: UpstreamState) -> bool:
        """One health check; finds out the engine and its models when they are not known."""
        problem: str | None = None
        try:
            status, _, _ = await self._get(state, "/health", PROBE_TIMEOUT_S)
            if status in (404, 405):
                status, _, _ = await self._get(state, "/v1/models", PROBE_TIMEOUT_S)
            if status >= 500 or status in (404, 405):
                problem = f"health check answered {status}"
        except (httpx2.HTTPError, OSError) as error:
            problem = type(error).__name__
        self._note(state, problem)
        if problem is None and (not state.is_engine_known or not state.models):
            await self.models(state)
        return problem is None

    def _note(self, state: UpstreamState, problem: str | None) -> None:
        was = state.is_up
        state.is_up = problem is None
        state.last_problem = problem
        state.meters.up.set(1 if state.is_up else 0)
        if was is not False and problem is not None:
            log.warning("upstream `%s` is down: %s", state.name, problem)
        elif problem is None and was is not True:
            log.info("upstream `%s` is up", state.name)

    async def models(self, state: UpstreamState) -> tuple[dict[str, object], ...]:
        """The server's model list, at most 5 s old; the last known one when it does not answer."""
        lock = self._asking.setdefault(state.name, asyncio.Lock())
        async with lock:
            asked = self._models_at.get(state.name)
            if asked is not None and self._time() - asked < MODELS_CACHE_S:
                return state.models
            self._models_at[state.name] = self._time()
            try:
                status, headers, body = await self._get(state, "/v1/models", MODELS_TIMEOUT_S)
                payload: Any = lenient_loads(body)[0] if status == 200 else None
            except (httpx2.HTTPError, OSError):
                return state.models
            self._learn(state, payload, headers)
            return state.models

    def _learn(self, state: UpstreamState, payload: Any, headers: Headers) -> None:
        if not isinstance(payload, dict) or not isinstance(payload.get("data"), list):
            return
        state.models = tuple(
            entry for entry in payload["data"] if isinstance(entry, dict) and isinstance(entry.get("id"), str)
        )
        if state.config.engine == "auto":
            state.engine = detect_engine(payload, headers)
            state.is_engine_known = True

    async def _get(self, state: UpstreamState, path: str, limit_s: float) -> tuple[int, Headers, bytes]:
        """Status, fields and body of one answer, each step within `limit_s`. Raises httpx2.HTTPError, OSError.

        The whole has a limit too, a later one: a TLS handshake that is cancelled from outside leaks its socket.
        """
        async with asyncio.timeout(limit_s + GRACE_S):
            client = await self._client(state)
            async with client.stream("GET", path, timeout=limit_s) as response:
                body = b""
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > MAX_MODELS_BYTES:
                        raise OSError("the answer is too large")
                return response.status_code, [(name.lower(), value) for name, value in response.headers.raw], body

    async def _client(self, state: UpstreamState) -> httpx2.AsyncClient:
        """The client of an upstream; a reload with other settings gets a new one."""
        known = self._clients.get(state.name)
        if known is not None and known[0] == state.config:
            return known[1]
        client = self._client_for(state)
        self._clients[state.name] = (state.config, client)
        if known is not None:
            await known[1].aclose()
        return client

    async def close(self) -> None:
        for _, client in self._clients.values():
            await client.aclose()
        self._clients.clear()


def make_client(state: UpstreamState) -> httpx2.AsyncClient:
    """A client for probes: no environment, no redirects, one or two connections."""
    config = state.config
    headers = {"user-agent": "firsttoken-probe", "accept-encoding": "identity"}
    if config.api_key is not None:
        headers["authorization"] = f"Bearer {config.api_key.get_secret_value()}"
    verify: Any = config.is_tls and config.tls.verify  # without TLS no authorities need to be loaded
    if config.is_tls and config.tls.verify and config.tls.ca_file:
        import ssl

        verify = ssl.create_default_context(cafile=config.tls.ca_file)
    return httpx2.AsyncClient(
        base_url=config.url,
        headers=headers,
        trust_env=False,
        follow_redirects=False,
        verify=verify,
        limits=httpx2.Limits(max_connections=2, max_keepalive_connections=1, keepalive_expiry=3),
    )
