"""Health checks: what they learn, and that no server's answer can stop them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from gateway.config import Upstream
from gateway.metrics import Metrics
from gateway.upstream import watch as watching
from gateway.upstream.state import UpstreamState
from gateway.upstream.watch import Watch, make_client
from tests.support.links import Clock

Answer = Callable[[httpx2.Request], httpx2.Response]


def state_of(**settings: object) -> UpstreamState:
    config = Upstream.model_validate({"url": "http://up:8000", **settings})
    return UpstreamState("up", config, clock=Clock(), meters=Metrics(CollectorRegistry()).upstream("up"))


class Time:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Asked(httpx2.MockTransport):
    """A model server that answers by path and counts."""

    def __init__(self, **answers: httpx2.Response | Exception) -> None:
        super().__init__(self._answer)
        self.answers = answers
        self.paths: list[str] = []

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        self.paths.append(request.url.path)
        answer = self.answers.get(request.url.path.rpartition("/")[2], httpx2.Response(404))
        if isinstance(answer, Exception):
            raise answer
        return answer


def watch_of(transport: httpx2.MockTransport, time: Time | None = None) -> Watch:
    def client(state: UpstreamState) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=state.config.url, transport=transport)

    return Watch(loop_time=time or Time(), client=client)


MODELS = {"object": "list", "data": [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}, {"id": 7}, "x"]}


@pytest.mark.parametrize(
    "answers, is_up, problem",
    [
        ({"health": httpx2.Response(200)}, True, None),
        ({"health": httpx2.Response(401)}, True, None),
        ({"health": httpx2.Response(503)}, False, "health check answered 503"),
        ({"models": httpx2.Response(200, json=MODELS)}, True, None),
        ({}, False, "health check answered 404"),
        ({"health": httpx2.ConnectError("10.0.0.5 refused")}, False, "ConnectError"),
        ({"health": httpx2.ReadTimeout("")}, False, "ReadTimeout"),
    ],
)
async def test_a_server_is_up_when_it_answers(answers: dict[str, object], is_up: bool, problem: str | None) -> None:
    state = state_of()
    watch = watch_of(Asked(**answers))  # type: ignore[arg-type]
    assert await watch.probe(state) is is_up
    assert (state.is_up, state.last_problem) == (is_up, problem)
    await watch.close()


async def test_models_and_engine_are_learnt_and_asked_for_at_most_every_five_seconds() -> None:
    time, transport = Time(), Asked(health=httpx2.Response(200), models=httpx2.Response(200, json=MODELS))
    state, watch = state_of(), watch_of(transport, time)
    await watch.probe(state)
    assert [model["id"] for model in state.models] == ["m"]
    assert (state.engine, state.is_engine_known) == ("vllm", True)
    await watch.models(state)
    time.now = 4.9
    await watch.models(state)
    assert transport.paths.count("/v1/models") == 1
    time.now = 5.1
    await watch.models(state)
    assert transport.paths.count("/v1/models") == 2
    await watch.close()


@pytest.mark.parametrize(
    "answer",
    [
        httpx2.Response(500),
        httpx2.Response(200, content=b"<html>"),
        httpx2.Response(200, content=b"[" * 100_000),
        httpx2.Response(200, json=[1]),
        httpx2.Response(200, json={"data": 7}),
        httpx2.Response(200, content=b" " * (watching.MAX_MODELS_BYTES + 1)),
        httpx2.ReadTimeout(""),
    ],
    ids=["status", "HTML", "nesting", "list", "no list", "too large", "timeout"],
)
async def test_a_useless_model_list_leaves_the_last_one(answer: httpx2.Response | Exception) -> None:
    time, transport = Time(), Asked(models=httpx2.Response(200, json=MODELS))
    state, watch = state_of(), watch_of(transport, time)
    await watch.models(state)
    transport.answers["models"] = answer
    time.now = 9
    assert [model["id"] for model in await watch.models(state)] == ["m"]
    await watch.close()


async def test_a_reload_with_another_key_asks_with_another_client() -> None:
    clients: list[httpx2.AsyncClient] = []

    def client(state: UpstreamState) -> httpx2.AsyncClient:
        clients.append(httpx2.AsyncClient(base_url=state.config.url, transport=Asked(health=httpx2.Response(200))))
        return clients[-1]

    watch = Watch(loop_time=Time(), client=client)
    for state in (
        state_of(url="http://UP:80"),
        state_of(url="http://UP:80"),
        state_of(url="http://UP:80", api_key="k"),
    ):
        await watch.probe(state)
    assert [each.is_closed for each in clients] == [True, False]
    await watch.close()
    assert clients[1].is_closed


async def test_an_error_of_ours_does_not_end_the_watch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The health checks would otherwise stop for good, and every server keep its last state."""
    monkeypatch.setattr(watching, "PROBE_EVERY_S", 0.001)
    transport = Asked(health=RuntimeError("ours"))
    state, watch = state_of(), watch_of(transport)
    task = asyncio.create_task(watch.run(lambda: [state]))
    async with asyncio.timeout(5):
        while len(transport.paths) < 3:
            await asyncio.sleep(0.001)
    assert watch.first_round.is_set()
    transport.answers["health"] = httpx2.Response(200)
    async with asyncio.timeout(5):
        while not state.is_up:
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await watch.close()
    assert "a health check failed" in caplog.text


async def test_a_server_that_drips_its_answer_does_not_hold_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(watching, "GRACE_S", 0.05)

    async def drip(request: httpx2.Request) -> httpx2.Response:
        await asyncio.sleep(30)
        return httpx2.Response(200)

    state, watch = state_of(), watch_of(httpx2.MockTransport(drip))
    assert not await watch.probe(state)
    assert state.last_problem == "TimeoutError"
    await watch.close()


async def test_probes_use_no_proxy_of_the_environment_and_follow_no_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    """C147, C144: prompts and keys once left through the corporate proxy."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    client = make_client(state_of(api_key="secret"))
    assert client.headers["authorization"] == "Bearer secret"
    assert not client.follow_redirects
    assert not client.trust_env
    await client.aclose()
