"""Asks model servers how they are: health every few seconds, then models and a few numbers. Not on any request's path.

One probe per upstream at a time: a frozen server keeps one connection of ours, not one more every five seconds (cases
C113), and holds up nobody else's probe. What a probe shows of a restart goes to `policy/restarts.py`; an upstream that
was away or is another process than before is warmed up again before it counts as usable (`warmup.py`).

httpx2 does the asking, without proxy variables from the environment and without following redirects.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import httpx2

from gateway.config import Upstream, Warmup
from gateway.policy.restarts import RestartEvidence, Sighting
from gateway.policy.warming import body_of
from gateway.upstream.state import LOADING, UpstreamState
from gateway.upstream.warmup import Unanswered, Warmer, first_token_ns, model_of
from gateway.wire.answer import as_object, as_text, lenient_loads
from gateway.wire.engines import detect_engine
from gateway.wire.headers import Headers
from gateway.wire.scrape import HAS_NUMBERS, ServerNumbers, numbers_in

log = logging.getLogger("gateway.upstream")

PROBE_EVERY_S = 5.0
PROBE_TIMEOUT_S = 5.0
GRACE_S = 2.0  # for the whole of an answer, beyond the limit of each step
MODELS_CACHE_S = 5.0
MODELS_TIMEOUT_S = 3.0  # Open WebUI gives a whole model list 10 s; one slow server must not hide the others
NUMBERS_TIMEOUT_S = 2.0
MAX_MODELS_BYTES = 4 * 1024 * 1024
MAX_LOADING_BYTES = 4096  # of an answer that may say that the server is loading
JITTER = 0.2
PROBE_CONNECTIONS = 4  # health, models asked for by a caller, a generated token, and one to spare

ClientFactory = Callable[[UpstreamState], httpx2.AsyncClient]

_PLAIN = Warmup()  # without the fields that a warm-up adds


class _Known:
    """What is remembered of one upstream from probe to probe."""

    __slots__ = ("created", "evidence", "has_been_asked", "was_warm")

    def __init__(self) -> None:
        self.evidence = RestartEvidence()
        self.created: int | None = None  # the latest of the models, when they were asked for since the last look
        self.has_been_asked = False
        self.was_warm = False  # when it went down


class Watch:
    """Keeps `UpstreamState.is_up`, `.engine`, `.models`, `.warmth` and what it knows of restarts fresh."""

    def __init__(self, *, loop_time: Callable[[], float], client: ClientFactory | None = None) -> None:
        self._time = loop_time
        self._client_for = client or make_client
        self._clients: dict[str, tuple[Upstream, httpx2.AsyncClient]] = {}
        self._models_at: dict[str, float] = {}
        self._asking: dict[str, asyncio.Lock] = {}
        self._known: dict[UpstreamState, _Known] = {}
        self._probing: dict[UpstreamState, asyncio.Task[None]] = {}
        self._generating: set[UpstreamState] = set()
        self._warmer = Warmer(self._client_for)
        self.first_round = asyncio.Event()
        """Set when every upstream was asked once."""

    async def run(self, states: Callable[[], Iterable[UpstreamState]]) -> None:
        """Probes all of them for ever; cancelled at shutdown."""
        try:
            while True:
                current = list(states())
                self._keep_only(current)
                for state in current:
                    self._of(state)
                    if state not in self._probing:
                        task = asyncio.get_running_loop().create_task(self._probed(state), name=f"probe {state.name}")
                        self._probing[state] = task
                await asyncio.sleep(PROBE_EVERY_S * random.uniform(1 - JITTER, 1 + JITTER))
        finally:
            probing = list(self._probing.values())
            for task in probing:
                task.cancel()
            await asyncio.gather(*probing, return_exceptions=True)

    async def _probed(self, state: UpstreamState) -> None:
        try:
            await self.probe(state)
        except Exception:  # ours, not the server's; the next round must still come
            log.exception("a health check failed")
        finally:
            del self._probing[state]
            self._of(state).has_been_asked = True
            if all(known.has_been_asked for known in self._known.values()):
                self.first_round.set()

    def _of(self, state: UpstreamState) -> _Known:
        return self._known.setdefault(state, _Known())

    def _keep_only(self, states: list[UpstreamState]) -> None:
        """Forgets the upstreams that a reload took away, or made anew."""
        self._warmer.keep_only(states)
        for state in self._known.keys() - set(states):
            del self._known[state]

    async def probe(self, state: UpstreamState) -> bool:
        """One health check; finds out the engine and its models, and whether it was restarted."""
        known = self._of(state)
        problem = await self._problem(state, known)
        if problem is not None:
            self._went_down(state, known)
            self._note(state, problem)
            return False
        was_down = state.is_up is False
        is_first = not state.is_engine_known or not state.models
        self._note(state, None)  # where warm-ups are on, `warmth` still keeps it out
        await self.models(state)
        seen = await self._sighting(state, known, is_first=is_first)
        sign = known.evidence.look(seen, state.clock())
        if sign is not None:
            state.note_restart(sign)
        if was_down and sign is None and known.was_warm and known.evidence.is_same_process:
            state.warmth = "warm"  # it was only out of reach
        elif state.warmth == "cold" or sign is not None:
            self._warmer.begin(state)
        return True

    async def _problem(self, state: UpstreamState, known: _Known) -> str | None:
        """What is wrong with a server's health; None when nothing is."""
        try:
            # `/health` of SGLang generates a token, which a health check must not (latency-methods §4).
            path = "/ready" if state.engine == "sglang" else "/health"
            status, _, body = await self._get(state, path, PROBE_TIMEOUT_S)
            if status in (404, 405):
                status, _, body = await self._get(state, "/v1/models", PROBE_TIMEOUT_S)
        except (httpx2.HTTPError, OSError) as error:
            if _is_refusal(error):
                known.evidence.refused()
            return type(error).__name__
        if status == 503 and b"loading" in body[:MAX_LOADING_BYTES].lower():
            known.evidence.refused()
            return LOADING
        return f"health check answered {status}" if status >= 500 or status in (404, 405) else None

    def _went_down(self, state: UpstreamState, known: _Known) -> None:
        """Whatever comes back may be cold; a warm-up under way talks to nobody."""
        if state.is_up is not False:
            known.was_warm = state.warmth == "warm"
        self._warmer.stop(state)
        if state.config.warmup.enabled:
            state.warmth = "cold"

    async def _sighting(self, state: UpstreamState, known: _Known, *, is_first: bool) -> Sighting:
        """What this probe shows of the process behind the address. The first probe leaves out the numbers."""
        created, known.created = known.created, None
        if is_first or state.engine not in HAS_NUMBERS:
            return Sighting(created=created)
        numbers = await self._numbers(state)
        state.note_waiting(numbers.waiting)
        version = await self._version(state) if state.engine == "vllm" else None
        return Sighting(numbers.start_time_s, numbers.counters, created, version)

    async def _numbers(self, state: UpstreamState) -> ServerNumbers:
        try:
            status, headers, page = await self._get(state, "/metrics", NUMBERS_TIMEOUT_S)
        except (httpx2.HTTPError, OSError):
            return ServerNumbers()
        start = next((value for name, value in headers if name == b"process-start-time-unix"), None)
        return numbers_in(page, state.engine, start) if status == 200 else ServerNumbers()

    async def _version(self, state: UpstreamState) -> str | None:
        try:
            status, _, body = await self._get(state, "/version", NUMBERS_TIMEOUT_S)
        except (httpx2.HTTPError, OSError):
            return None
        return as_text(as_object(lenient_loads(body)[0]).get("version")) or None if status == 200 else None

    def _note(self, state: UpstreamState, problem: str | None) -> None:
        was, was_problem = state.is_up, state.last_problem
        state.is_up = problem is None
        state.last_problem = problem
        state.meters.up.set(1 if state.is_up else 0)
        if problem == LOADING:
            if was_problem != LOADING:
                log.info("upstream `%s` is loading its model", state.name)
        elif was is not False and problem is not None:
            log.warning("upstream `%s` is down: %s", state.name, problem)
        elif problem is None and was is not True:
            log.info("upstream `%s` is up", state.name)

    async def generate_one(self, state: UpstreamState, *, is_needed: bool = False) -> bool:
        """Whether the server generates a token in time: the proof that a green `/health` is not (cases C113).

        One at a time per upstream, and none while requests of ours are there unless `is_needed`: then, and when
        nobody can be asked, the answer is False.
        """
        model = model_of(state)
        if model is None or state in self._generating or (state.inflight and not is_needed):
            return False
        self._generating.add(state)
        body = body_of(
            _PLAIN,
            model=model,
            prompt="hi",
            max_tokens=1,
            max_tokens_field=state.config.max_tokens_field,
        )
        try:
            # A token that came later would be called slow anyway.
            async with asyncio.timeout(state.config.breaker.slow_call_duration_ms / 1000):
                await first_token_ns(await self._client(state), body, state.clock)
        except (Unanswered, TimeoutError):
            return False
        finally:
            self._generating.discard(state)
        return True

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
        created = [value for entry in state.models if type(value := entry.get("created")) is int]
        self._of(state).created = max(created, default=None)
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
        await self._warmer.close()
        for _, client in self._clients.values():
            await client.aclose()
        self._clients.clear()


def _is_refusal(error: BaseException) -> bool:
    """Whether nobody listened there; the client library wraps the reason more than once."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def make_client(state: UpstreamState) -> httpx2.AsyncClient:
    """A client for probes and warm-ups: no environment, no redirects, few connections."""
    config = state.config
    streams = max(config.warmup.streams, default=1) if config.warmup.enabled else 0
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
        limits=httpx2.Limits(
            max_connections=PROBE_CONNECTIONS + streams, max_keepalive_connections=1 + streams, keepalive_expiry=3
        ),
    )
