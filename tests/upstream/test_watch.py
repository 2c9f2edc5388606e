"""Health checks: what they learn, and that no server's answer can stop them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from gateway.config import Upstream
from gateway.metrics import Metrics
from gateway.sim.profiles import FAST, Profile
from gateway.sim.transport import Server
from gateway.upstream import watch as watching
from gateway.upstream.state import UpstreamState
from gateway.upstream.watch import Watch, make_client
from tests.support.links import SECOND, Clock
from tests.support.simlink import SimTransport, in_virtual_time, now_ns

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
        ({"health": httpx2.Response(503, json={"error": {"message": "Loading model"}})}, False, "loading"),
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


# -- restarts (cases C150) -----------------------------------------------------------------------------------------

VLLM = {"data": [{"id": "m", "owned_by": "vllm", "created": 1}]}
LLAMACPP = {"data": [{"id": "m", "owned_by": "llamacpp", "created": 1}]}
OTHER = {"data": [{"id": "m", "owned_by": "somebody", "created": 1}]}


class Restarting:
    """A server that can be asked, and what its upstream was told of restarts."""

    def __init__(self, models: object = VLLM, **settings: object) -> None:
        self.time = Time()
        self.transport = Asked(health=httpx2.Response(200), models=httpx2.Response(200, json=models))
        self.state = state_of(**settings)
        self.watch = watch_of(self.transport, self.time)
        self.told = 0
        self.state.on_restart.append(self._tell)

    def _tell(self) -> None:
        self.told += 1

    @property
    def sign(self) -> str | None:
        return self.state.restart_sign

    def page(self, text: str, **headers: str) -> None:
        self.transport.answers["metrics"] = httpx2.Response(200, text=text, headers=headers)

    async def probe(self, **answers: httpx2.Response | Exception) -> int:
        """Restarts known after one more probe, five seconds later."""
        self.transport.answers.update(answers)
        await self.watch.probe(self.state)
        self.time.now += 5
        clock = self.state.clock
        assert isinstance(clock, Clock)
        clock.now += 5 * SECOND
        assert self.told == self.state.restarts
        return self.state.restarts


@asynccontextmanager
async def restarting(models: object = VLLM, **settings: object) -> AsyncIterator[Restarting]:
    made = Restarting(models, **settings)
    yield made
    await made.watch.close()


def refused() -> httpx2.ConnectError:
    error = httpx2.ConnectError("All connection attempts failed")
    error.__cause__ = OSError("several")
    error.__cause__.__context__ = ConnectionRefusedError(111, "refused")
    return error


async def test_a_refused_connection_and_then_an_answer_is_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    """C150."""
    caplog.set_level(logging.INFO, "gateway.upstream")
    async with restarting(OTHER) as server:
        assert await server.probe() == 0
        assert await server.probe(health=refused()) == 0
        assert await server.probe(health=httpx2.Response(200)) == 1
        assert await server.probe() == 1
        assert (server.state.restart_sign, server.state.restarted_at_ns) == ("refused", 11 * SECOND)
    assert "upstream `up` was restarted: it refused connections and answers again" in caplog.text


async def test_a_server_that_was_only_slow_was_not_restarted() -> None:
    async with restarting(OTHER) as server:
        await server.probe()
        for error in (httpx2.ReadTimeout(""), httpx2.ConnectTimeout(""), httpx2.ConnectError("no such host")):
            assert await server.probe(health=error) == 0
            assert await server.probe(health=httpx2.Response(200)) == 0


async def test_a_server_that_loads_its_model_is_no_failure_and_a_new_process(caplog: pytest.LogCaptureFixture) -> None:
    """B17."""
    caplog.set_level(logging.INFO, "gateway.upstream")
    loading = httpx2.Response(503, json={"error": {"code": 503, "message": "Loading model"}})
    async with restarting(OTHER) as server:
        await server.probe()
        for _ in range(2):
            await server.probe(health=loading)
            assert (server.state.is_up, server.state.last_problem, server.state.is_loading) == (False, "loading", True)
        assert await server.probe(health=httpx2.Response(200)) == 1
        assert not server.state.is_loading
    assert caplog.text.count("upstream `up` is loading its model") == 1
    assert "is down" not in caplog.text


async def test_a_restart_behind_a_load_balancer_is_seen_in_the_numbers() -> None:
    """C150, the variant without a refused connection; the first probe asks for no numbers."""
    async with restarting() as server:
        server.page("process_start_time_seconds 100\nvllm:generation_tokens_total 50\nvllm:num_requests_waiting 3\n")
        assert await server.probe() == 0
        assert server.transport.paths == ["/health", "/v1/models"]
        assert await server.probe() == 0
        assert server.transport.paths[2:] == ["/health", "/v1/models", "/metrics", "/version"]
        server.page("process_start_time_seconds 200\nvllm:generation_tokens_total 1\n")
        assert await server.probe() == 1
        assert server.sign == "start_time"
        server.page("vllm:generation_tokens_total 9\n")
        assert await server.probe() == 1
        server.page("vllm:generation_tokens_total 2\n")
        assert await server.probe() == 2
        assert server.sign == "counter"


@pytest.mark.parametrize(
    "answer", [httpx2.Response(404), httpx2.Response(200, content=b"x" * 5_000_000), httpx2.ReadTimeout("")]
)
async def test_a_server_without_numbers_is_as_good_as_any(answer: httpx2.Response | Exception) -> None:
    async with restarting() as server:
        for _ in range(3):
            assert await server.probe(metrics=answer, version=answer) == 0
        assert server.state.is_up
        assert server.state.foreign_waiting is None


async def test_a_new_version_and_new_created_times_are_restarts() -> None:
    """C150. `created` counts where it stands still: on vLLM it is the time of the call."""
    async with restarting() as server:
        for number, version in enumerate(("0.33.0", "0.33.0", "0.33.1")):
            models = {"data": [{"id": "m", "owned_by": "vllm", "created": 100 + number}]}
            await server.probe(
                version=httpx2.Response(200, json={"version": version}), models=httpx2.Response(200, json=models)
            )
        assert (server.state.restarts, server.state.restart_sign) == (1, "version")
    async with restarting(OTHER) as server:
        for _ in range(3):
            assert await server.probe() == 0
        anew = {"data": [{"id": "m", "created": 9}, {"id": "n", "created": "x"}]}
        assert await server.probe(models=httpx2.Response(200, json=anew)) == 1
        assert server.state.restart_sign == "created"


async def test_llama_cpp_tells_its_start_in_a_header() -> None:
    async with restarting(LLAMACPP) as server:
        for start in ("100", "100", "100", "200"):
            server.page("llamacpp:requests_deferred 0\n", **{"Process-Start-Time-Unix": start})
            await server.probe()
        assert (server.state.restarts, server.state.restart_sign) == (1, "start_time")


async def test_the_queue_of_others_is_noted_with_its_instant() -> None:
    """latency-methods §2.1: less our own."""
    async with restarting() as server:
        server.page("vllm:num_requests_waiting 5\n")
        await server.probe()
        assert server.state.foreign_waiting_at_ns == 0
        await server.probe()
        assert (server.state.foreign_waiting, server.state.foreign_waiting_at_ns) == (5, 6 * SECOND)
        server.state.count_own_waiting = lambda: 2
        await server.probe()
        assert server.state.foreign_waiting == 3
        server.state.count_own_waiting = lambda: 9
        await server.probe()
        assert server.state.foreign_waiting == 0


async def test_the_health_check_of_sglang_generates_nothing() -> None:
    """upstream-contract §9: its `/health` generates a token."""
    async with restarting({"data": [{"id": "m", "owned_by": "sglang"}]}, engine="sglang") as server:
        await server.probe(ready=httpx2.Response(200))
        assert server.transport.paths == ["/ready", "/v1/models"]


# -- warm-up (cases C149) ------------------------------------------------------------------------------------------

COLD = FAST.with_fields(jit_first_call_s=12, overhead_s=0.05)
WARMUP = {"enabled": True, "prompt_tokens": [16], "streams": []}


class Simulated:
    """A watch before a simulated server, in virtual time."""

    def __init__(self, server: Server, warmup: object) -> None:
        self.server = server
        config = Upstream.model_validate({"url": "http://up:8000", "engine": "vllm", "warmup": warmup})
        self.state = UpstreamState("up", config, clock=now_ns, meters=Metrics(CollectorRegistry()).upstream("up"))
        self.watch = Watch(loop_time=asyncio.get_running_loop().time, client=self.client)
        self.states = [self.state]
        self.task = asyncio.create_task(self.watch.run(lambda: self.states))

    @property
    def warmth(self) -> str:
        return self.state.warmth

    def client(self, state: UpstreamState) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=state.config.url, transport=SimTransport(self.server))

    async def until(self, condition: Callable[[], bool], limit_s: float = 100) -> float:
        began = asyncio.get_running_loop().time()
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.01)
        return asyncio.get_running_loop().time() - began

    @property
    def generated(self) -> int:
        return sum(request.method == "POST" for request in self.server.requests)


@asynccontextmanager
async def simulated(profile: Profile = COLD, warmup: object = WARMUP) -> AsyncIterator[Simulated]:
    server = Server(profile)
    made = Simulated(server, warmup)
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)
    await made.watch.close()
    await server.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_a_cold_server_is_up_at_once_and_usable_when_it_is_warm() -> None:
    """C149. Nothing waits for it: not the first round of probes, not the next ones."""
    async with simulated() as sim:
        assert await sim.until(sim.watch.first_round.is_set) < 1
        assert (sim.state.is_up, sim.state.warmth, sim.state.is_usable) == (True, "warming", False)
        assert 12 < await sim.until(lambda: sim.state.is_usable) < 15
        asked = sim.generated
        await asyncio.sleep(60)
        assert sim.generated == asked


@in_virtual_time
async def test_a_restart_is_noticed_and_warmed_up_again() -> None:
    """C150: down for three seconds between two probes, so that no connection was refused."""
    async with simulated() as sim:
        await sim.until(lambda: sim.state.is_usable)
        await asyncio.sleep(20)
        await sim.server.restart(0.0)
        sim.server.engine.stats.started_at += 1000
        assert await sim.until(lambda: not sim.state.is_usable) < 8
        assert (sim.state.is_up, sim.state.warmth, sim.state.restart_sign) == (True, "warming", "start_time")
        assert 12 < await sim.until(lambda: sim.state.is_usable) < 16
        assert sim.state.restarts == 1


@in_virtual_time
async def test_a_server_that_comes_back_is_warmed_before_it_is_usable() -> None:
    """D1: the first requests after a restart are ours."""
    async with simulated() as sim:
        await sim.until(lambda: sim.state.is_usable)
        was_usable_cold = False
        back = asyncio.create_task(sim.server.restart(20))
        await sim.until(lambda: sim.state.is_up is False)
        sim.server.engine.stats.started_at += 1000
        assert sim.warmth == "cold"
        while sim.warmth != "warm":
            was_usable_cold = was_usable_cold or sim.state.is_usable
            await asyncio.sleep(0.01)
        await back
        assert not was_usable_cold
        assert sim.state.restarts == 1


@in_virtual_time
async def test_the_same_process_that_was_only_out_of_reach_is_still_warm() -> None:
    """A health check that times out under load must not bring a hundred more requests."""
    async with simulated() as sim:
        await sim.until(lambda: sim.state.is_usable)
        await asyncio.sleep(10)
        asked = sim.generated
        sim.server._down = True
        await sim.until(lambda: sim.state.is_up is False)
        assert not sim.state.is_usable
        sim.server._down = False
        await sim.until(lambda: sim.state.is_usable)
        assert (sim.generated, sim.state.restarts) == (asked, 0)


@in_virtual_time
async def test_a_server_that_goes_down_while_it_is_warmed_starts_again() -> None:
    async with simulated() as sim:
        await asyncio.sleep(3)
        assert sim.warmth == "warming"
        back = asyncio.create_task(sim.server.restart(20))
        await sim.until(lambda: sim.state.is_up is False)
        assert sim.warmth == "cold"
        assert 12 < await sim.until(lambda: sim.state.is_usable) < 40
        await back


@in_virtual_time
async def test_an_upstream_that_a_reload_took_away_is_left_alone() -> None:
    async with simulated() as sim:
        await asyncio.sleep(3)
        sim.states = []
        await asyncio.sleep(10)
        assert sim.state.warmth == "cold"
        assert sim.generated == 1


@in_virtual_time
async def test_a_frozen_server_has_one_probe_and_holds_nobody_up() -> None:
    """C113."""
    asked = {"frozen": 0, "well": 0}

    async def answer(request: httpx2.Request) -> httpx2.Response:
        asked[request.url.host] += 1
        if request.url.host == "frozen" and request.url.path == "/health":
            await asyncio.sleep(1000)
        return httpx2.Response(200, json=OTHER)

    def client(state: UpstreamState) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=state.config.url, transport=httpx2.MockTransport(answer))

    states = [state_of(url="http://frozen"), state_of(url="http://well")]
    states[1].name = "well"
    watch = Watch(loop_time=asyncio.get_running_loop().time, client=client)
    task = asyncio.create_task(watch.run(lambda: states))
    await asyncio.sleep(6.5)
    assert (asked["frozen"], asked["well"] >= 3, watch.first_round.is_set()) == (1, True, False)
    await asyncio.sleep(2)
    assert (states[0].last_problem, watch.first_round.is_set()) == ("TimeoutError", True)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await watch.close()


# -- one generated token (cases C113) ------------------------------------------------------------------------------


@in_virtual_time
async def test_one_token_tells_a_frozen_engine_from_a_green_health_check() -> None:
    """C113: GETs answer, a POST gets headers and never a byte."""
    async with simulated(FAST, False) as sim:
        await sim.until(lambda: bool(sim.state.models))
        assert await sim.watch.generate_one(sim.state)
        assert json.loads(sim.server.requests[-1].body)["max_tokens"] == 1
        sim.server.default_fault = "stall_first"
        probe = asyncio.create_task(sim.watch.generate_one(sim.state))
        await asyncio.sleep(1)
        asked = sim.generated
        assert not await sim.watch.generate_one(sim.state, is_needed=True)  # one at a time
        assert sim.generated == asked
        assert not await probe
        assert asyncio.get_running_loop().time() < 1012
        sim.server.default_fault = "status=500"
        assert not await sim.watch.generate_one(sim.state)
        sim.server.default_fault = None
        assert await sim.watch.generate_one(sim.state)


@in_virtual_time
async def test_no_token_is_generated_beside_live_requests_unless_it_must_be() -> None:
    """latency-methods §4."""
    async with simulated(FAST, False) as sim:
        assert not await sim.watch.generate_one(sim.state)  # no model is known yet
        await sim.until(lambda: bool(sim.state.models))
        sim.state.pool._leases = 1
        assert not await sim.watch.generate_one(sim.state)
        assert sim.generated == 0
        assert await sim.watch.generate_one(sim.state, is_needed=True)


async def test_a_client_has_room_for_the_streams_of_a_warm_up() -> None:
    client = make_client(state_of(warmup={"enabled": True, "streams": [1, 16]}))
    assert isinstance(client._transport, httpx2.AsyncHTTPTransport)
    assert client._transport._pool._max_connections >= 16
    await client.aclose()
