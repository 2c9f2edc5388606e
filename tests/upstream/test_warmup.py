"""Warming servers up: what is sent, what is measured, and what happens when it fails (cases C149, fault-catalogue D7).

Against the simulated server with a cold start, in virtual time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from gateway.config import Upstream
from gateway.metrics import Metrics
from gateway.sim.profiles import FAST, Profile
from gateway.sim.transport import Server
from gateway.upstream.state import UpstreamState
from gateway.upstream.warmup import Warmer, warm_up
from tests.support.simlink import SimTransport, in_virtual_time, now_ns

COLD = FAST.with_fields(
    overhead_s=0.05, prefill_tokens_per_s=20_000, decode_tokens_per_s=100, jit_first_call_s=12, jit_new_shape_s=2
)
SMALL = {"enabled": True, "prompt_tokens": [16, 512], "streams": [2], "decode_tokens": 8}
LOGGER = "gateway.upstream"


def state_of(warmup: object = SMALL, *, models: Sequence[dict[str, object]] = ({"id": "fast"},)) -> UpstreamState:
    config = Upstream.model_validate({"url": "http://up:8000", "engine": "vllm", "warmup": warmup})
    meters = Metrics(CollectorRegistry()).upstream("a")
    state = UpstreamState("a", config, clock=now_ns, meters=meters)
    state.models = tuple(models)
    return state


class Bench:
    """A state, its server and a warmer of the two."""

    def __init__(self, state: UpstreamState, server: Server) -> None:
        self.state = state
        self.server = server
        self.warmer = Warmer(self.client, chance=lambda: 0.5)
        self.clients = 0

    def client(self, state: UpstreamState) -> httpx2.AsyncClient:
        self.clients += 1
        return httpx2.AsyncClient(base_url=state.config.url, transport=SimTransport(self.server))

    @property
    def warmth(self) -> str:
        return self.state.warmth

    async def until(self, condition: Callable[[], bool], limit_s: float = 2000) -> float:
        """Seconds until the condition holds, in virtual time."""
        began = asyncio.get_running_loop().time()
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.1)
        return asyncio.get_running_loop().time() - began

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.body) for request in self.server.requests]


@asynccontextmanager
async def bench(
    profile: Profile = COLD,
    warmup: object = SMALL,
    *,
    models: Sequence[dict[str, object]] = ({"id": "fast"},),
    **more: Any,
) -> AsyncIterator[Bench]:
    server = Server(profile, **more)
    made = Bench(state_of(warmup, models=models), server)
    yield made
    await made.warmer.close()
    await server.close()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("warm up")]


@in_virtual_time
async def test_a_cold_server_is_warm_when_every_shape_costs_the_same_three_times() -> None:
    """C149: 12 s for the first request although `/health` is 200, and again for every new shape."""
    async with bench() as made:
        async with made.client(made.state) as client:
            report, _ = await warm_up(made.state, client, limit_s=300)
        assert report.problem is None
        assert report.first_s == pytest.approx(14.05, abs=0.1)
        assert report.slowest_s == report.first_s
        assert report.last_s == pytest.approx(0.05, abs=0.02)
        assert (report.shapes, report.refused, report.unsteady) == (4, (), ())
        # The first of each length is cold; the second of the repeated ones is the first that the cache holds.
        assert report.requests == 4 + 4 + 5 + 3 * 2 + 1
        assert report.seconds == pytest.approx(14 + 2 + 2 + 2, rel=0.3)
        assert all(body["stream"] is True and body["model"] == "fast" for body in made.bodies)
        assert {body["max_tokens"] for body in made.bodies} == {2, 8}


@in_virtual_time
async def test_the_streams_of_a_shape_decode_together(caplog: pytest.LogCaptureFixture) -> None:
    running: list[int] = []
    async with bench(COLD, {**SMALL, "prompt_tokens": [16], "streams": [8]}) as made:
        made.warmer.begin(made.state)
        while made.state.warmth == "warming":
            running.append(len(made.server.engine.running))
            await asyncio.sleep(0.01)
        assert max(running) == 8


@in_virtual_time
async def test_being_warm_is_one_line_in_the_log() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        async with bench(warmup={**SMALL, "prompt_tokens": [16], "streams": []}) as made:
            made.warmer.begin(made.state)
            assert (made.state.warmth, made.state.is_usable, made.state.is_last_resort) == ("warming", False, True)
            await made.until(lambda: made.state.warmth == "warm")
            assert made.state.is_usable
            assert made.state.warmup_report is not None
            assert repr(made.warmer) == "<Warmer 0 at work>"
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert len(lines) == 1
    assert lines[0].startswith("upstream `a` is warm: first token 14")
    assert " before, 0.052 s after, 10 requests in " in lines[0]


@in_virtual_time
async def test_prompts_are_cut_to_what_the_model_takes() -> None:
    """Or its refusal would keep a small model out for ever."""
    profile = COLD.with_fields(max_model_len=400, context_overflow="refuse")
    async with bench(profile, models=[{"id": "other"}, {"id": "fast", "max_model_len": 400}]) as made:
        made.state.config.warmup.__dict__["model"] = "fast"
        async with made.client(made.state) as client:
            report, _ = await warm_up(made.state, client, limit_s=300)
        assert (report.problem, report.refused) == (None, ())


@in_virtual_time
async def test_a_shape_that_the_server_does_not_take_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp tells no limit in its list."""
    caplog.set_level(logging.INFO, LOGGER)
    async with bench(COLD.with_fields(max_model_len=400, context_overflow="refuse")) as made:
        made.warmer.begin(made.state)
        await made.until(lambda: made.state.warmth == "warm")
        report = made.state.warmup_report
        assert report is not None
        assert report.refused == ("512 tokens × 1", "512 tokens × 1, repeated")
        assert report.shapes == 2
        assert "refused in its warm-up: 512 tokens × 1; 512 tokens" in caplog.text


@pytest.mark.parametrize(
    "fault, problem",
    [
        ("status=400", "the server answered 400"),
        ("status=401", "the server answered 401"),
        ("status=404", "the server answered 404"),
    ],
)
def test_a_refusal_is_given_up_at_once_and_tried_again_from_time_to_time(fault: str, problem: str) -> None:
    """D7: it stays out, the operator sees why, and it comes back by itself."""

    @in_virtual_time
    async def story() -> None:
        async with bench(fault=fault) as made:
            made.warmer.begin(made.state)
            await made.until(lambda: made.state.warmth == "failed")
            assert made.state.warmup_report is not None
            assert made.state.warmup_report.problem == problem
            assert (made.state.is_usable, made.state.is_last_resort) == (False, True)
            asked = made.clients
            await asyncio.sleep(600)
            assert 8 <= made.clients - asked <= 20
            made.server.default_fault = None
            assert await made.until(lambda: made.state.warmth == "warm") < 90
            assert made.state.warmup_report.problem is None

    story()


@pytest.mark.parametrize(
    "fault", ["status=503", "loading", "reset", "close_before", "error_200=500", "html=502", "error_first"]
)
def test_a_failure_that_passes_is_tried_again_soon(fault: str) -> None:
    """D7, B17: a server that is still loading is no failure of the warm-up."""

    @in_virtual_time
    async def story() -> None:
        async with bench(fault=fault) as made:
            made.warmer.begin(made.state)
            await made.until(lambda: made.state.warmup_report is not None)
            assert made.state.warmth == "warming"
            assert made.state.warmup_report is not None
            assert made.state.warmup_report.problem is not None
            await asyncio.sleep(20)
            made.server.default_fault = None
            assert await made.until(lambda: made.state.warmth == "warm") < 80

    story()


@in_virtual_time
async def test_a_warm_up_that_hangs_is_given_up_in_time_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """D7, C113: 200 for every GET, headers for the POST, and never a token."""
    async with bench(fault="stall_first", warmup={**SMALL, "timeout_s": 300}) as made:
        made.warmer.begin(made.state)
        assert await made.until(lambda: made.state.warmth == "failed") == pytest.approx(300, abs=1)
        assert "upstream `a` is not warm: not done after 300 s; it takes requests only when no other" in caplog.text
        made.server.default_fault = None
        assert await made.until(lambda: made.state.warmth == "warm") < 400
        await made.until(lambda: not made.server.engine.running)
    assert (
        len([record for record in caplog.records if record.name == LOGGER and record.levelno >= logging.WARNING]) == 1
    )


@in_virtual_time
async def test_the_first_wait_is_remembered_when_the_first_try_fails_later() -> None:
    """What a caller would have met is what the log says, not what the second try found half warm."""
    async with bench(script=[None, None, "reset"]) as made:
        made.warmer.begin(made.state)
        await made.until(lambda: made.state.warmth == "warm")
        assert made.state.warmup_report is not None
        assert made.state.warmup_report.first_s == pytest.approx(14, abs=0.5)


@in_virtual_time
async def test_without_a_model_nothing_is_asked() -> None:
    async with bench(models=[]) as made:
        made.warmer.begin(made.state)
        await made.until(lambda: made.state.warmup_report is not None)
        assert made.state.warmup_report is not None
        assert made.state.warmup_report.problem == "the server lists no model; name one with `warmup.model`"
        assert not made.server.requests
        made.state.models = ({"id": "fast"},)
        await made.until(lambda: made.state.warmth == "warm")


@in_virtual_time
async def test_what_varies_without_end_ends_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    profile = COLD.with_fields(overhead_s=2, jitter=0.95)
    async with bench(profile, {**SMALL, "prompt_tokens": [16], "streams": []}, seed=2) as made:
        made.warmer.begin(made.state)
        await made.until(lambda: made.state.warmth == "warm")
        assert made.state.warmup_report is not None
        assert made.state.warmup_report.unsteady
        assert "still varied after the last round of" in caplog.text


@in_virtual_time
async def test_beginning_again_starts_from_the_beginning_and_stopping_leaves_it_cold() -> None:
    async with bench() as made:
        made.warmer.begin(made.state)
        await asyncio.sleep(5)
        made.warmer.begin(made.state)
        assert repr(made.warmer) == "<Warmer 1 at work>"
        await asyncio.sleep(1)
        made.warmer.keep_only([made.state])
        assert made.warmth == "warming"
        made.warmer.keep_only([])
        assert made.warmth == "cold"
        await made.until(lambda: not made.server.engine.running, 5)
        made.warmer.stop(made.state)


@in_virtual_time
async def test_where_it_is_off_the_upstream_is_warm_from_the_start() -> None:
    async with bench(warmup=False) as made:
        made.warmer.begin(made.state)
        assert (made.state.warmth, made.state.is_usable) == ("warm", True)
        assert repr(made.warmer) == "<Warmer 0 at work>"


@in_virtual_time
async def test_an_error_of_ours_is_told_and_leaves_the_upstream_cold(caplog: pytest.LogCaptureFixture) -> None:
    """The next health check then begins again."""
    async with bench() as made:

        def broken(state: UpstreamState) -> httpx2.AsyncClient:
            raise RuntimeError("ours")

        warmer = Warmer(broken)
        warmer.begin(made.state)
        await made.until(lambda: made.state.warmth == "cold")
        assert "the warm-up of upstream `a` failed" in caplog.text


def events(*deltas: object, finish: str | None = "length") -> bytes:
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "body, problem",
    [
        (events({"reasoning": "x"}), None),
        (events({"role": "assistant", "content": ""}), None),  # the parser kept the only token
        (events({"content": ""}, finish=None), "an answer came without any token"),
        (b'data: {"error": {"message": "m", "code": 500}}\n\n', "the server answered with an error inside the stream"),
        (events({"content": "x" * 1000}) * 5000, None),
        (b"", "an answer came without any token"),
    ],
    ids=["reasoning", "hidden", "nothing", "error", "endless", "empty"],
)
async def test_what_counts_as_a_first_token(body: bytes, problem: str | None) -> None:
    client = httpx2.AsyncClient(
        base_url="http://up", transport=httpx2.MockTransport(lambda _: httpx2.Response(200, content=body))
    )
    report, _ = await warm_up(state_of({**SMALL, "prompt_tokens": [16], "streams": []}), client, limit_s=5)
    await client.aclose()
    assert report.problem == problem
