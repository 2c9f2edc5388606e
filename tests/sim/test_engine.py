"""When things happen in the simulated engine. All times are virtual seconds."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest

from gateway.sim.cache import PrefixCache
from gateway.sim.engine import Engine, Job, QueueFull, Run, prefill_s, step_s
from gateway.sim.plan import Plan, Token
from gateway.sim.profiles import FAST
from gateway.sim.stats import Histogram, render_llamacpp, render_vllm

pytestmark = pytest.mark.looptime

SLOW = FAST.with_fields(overhead_s=0.1, prefill_tokens_per_s=100, decode_tokens_per_s=10, prefix_cache=False)


def job(prompt_tokens: int = 10, answer: int = 5, *, name: str = "w", salt: str = "") -> Job:
    tokens = [Token("content", "x") for _ in range(answer - 1)] + [Token("content", "", "stop")]
    return Job([f"{name}{n}" for n in range(prompt_tokens)], (Plan(tuple(tokens), 0),), 100, salt)


async def times(run: Run) -> list[float]:
    """The virtual time of every token."""
    clock = asyncio.get_running_loop().time
    with run:
        return [round(clock(), 6) async for _ in run.tokens()]


@pytest.mark.parametrize(
    "rate,tokens,expected", [(math.inf, 1000, 0.0), (8000, 8000, 1.0), (8000, 0, 0.0), (27.8, 278, 10.0)]
)
def test_prefill_takes_tokens_over_rate(rate: float, tokens: int, expected: float) -> None:
    assert prefill_s(FAST.with_fields(prefill_tokens_per_s=rate), tokens) == pytest.approx(expected)


@pytest.mark.parametrize("rate,expected", [(math.inf, 0.0), (27.8, 1 / 27.8)])
def test_a_step_takes_the_rates_inverse(rate: float, expected: float) -> None:
    assert step_s(FAST.with_fields(decode_tokens_per_s=rate)) == pytest.approx(expected)


async def test_first_token_after_prefill_and_overhead_then_one_per_step() -> None:
    run = Engine(SLOW).submit(job(prompt_tokens=10, answer=4))
    assert await times(run) == [0.2, 0.3, 0.4, 0.5]
    assert [run.queue_s, run.prefill_s, run.decode_s] == pytest.approx([0, 0.2, 0.3])


async def test_prefills_follow_each_other_while_decodes_share() -> None:
    engine = Engine(SLOW)
    runs = [engine.submit(job(prompt_tokens=10, answer=2)) for _ in range(3)]
    assert await asyncio.gather(*map(times, runs)) == [[0.2, 0.3], [0.3, 0.4], [0.4, 0.5]]
    assert [run.queue_s for run in runs] == [0, pytest.approx(0.1), pytest.approx(0.2)]


async def test_beyond_the_slots_requests_queue_first_come_first_served() -> None:
    engine = Engine(SLOW.with_fields(slots=1))
    runs = [engine.submit(job(prompt_tokens=10, answer=2)) for _ in range(3)]
    assert (len(engine.running), len(engine.waiting)) == (1, 2)
    assert await asyncio.gather(*map(times, runs)) == [[0.2, 0.3], [0.5, 0.6], [0.8, 0.9]]
    assert runs[2].queue_s == pytest.approx(0.6)
    assert (len(engine.running), len(engine.waiting)) == (0, 0)


async def test_a_request_that_leaves_the_queue_lets_the_next_one_pass() -> None:
    engine = Engine(SLOW.with_fields(slots=1))
    first, second, third = (engine.submit(job()) for _ in range(3))
    second.end("abort")
    first.end("abort")
    assert await times(third) == [0.2, 0.3, 0.4, 0.5, 0.6]
    assert engine.stats.finished["abort"] == 2
    assert engine.stats.finished["stop"] == 1


async def test_cancelling_in_prefill_frees_the_machine_at_once() -> None:
    engine = Engine(SLOW)
    slow = engine.submit(job(prompt_tokens=1000))
    waiting = engine.submit(job(prompt_tokens=10, answer=1))
    await asyncio.sleep(1)
    slow.end("abort")
    assert waiting.scheduled_at == 1
    assert await times(waiting) == [1.2]


async def test_leaving_a_run_early_aborts_it_once() -> None:
    engine = Engine(SLOW)
    with engine.submit(job()) as run:
        await anext(run.tokens())
        assert len(engine.running) == 1
    run.end("stop")
    assert (len(engine.running), engine.stats.finished["abort"], engine.stats.finished["stop"]) == (0, 1, 0)


async def test_more_unfinished_requests_than_allowed_are_refused() -> None:
    engine = Engine(SLOW.with_fields(slots=1, max_queued=2))
    engine.submit(job())
    engine.submit(job())
    with pytest.raises(QueueFull):
        engine.submit(job())
    assert engine.stats.rejected["max_num_queued_reqs"] == 1


async def test_a_repeated_prompt_is_prefilled_from_the_cache() -> None:
    engine = Engine(SLOW.with_fields(prefix_cache=True, block_tokens=16, overhead_s=0))
    assert (await times(engine.submit(job(prompt_tokens=100, answer=1)))) == [1.0]
    again = engine.submit(job(prompt_tokens=100, answer=1))
    assert again.cached_tokens == 96
    assert await times(again) == [1.04]
    salted = engine.submit(job(prompt_tokens=100, answer=1, salt="tenant"))
    assert salted.cached_tokens == 0


async def test_the_first_call_and_new_shapes_compile() -> None:
    engine = Engine(FAST.with_fields(jit_first_call_s=3, jit_new_shape_s=0.5, prefix_cache=False))
    assert await times(engine.submit(job(prompt_tokens=10, answer=1))) == [3.5]
    assert await times(engine.submit(job(prompt_tokens=11, answer=1))) == [3.5]
    assert await times(engine.submit(job(prompt_tokens=100, answer=1))) == [4.0]
    engine.restart()
    assert await times(engine.submit(job(prompt_tokens=10, answer=1))) == [7.5]


async def test_jitter_is_seeded_and_bounded() -> None:
    async def gaps(seed: int) -> list[float]:
        moments = await times(Engine(SLOW.with_fields(jitter=0.2), seed).submit(job(answer=50)))
        return [round(after - before, 5) for before, after in itertools.pairwise(moments)]

    first, again, other = await gaps(1), await gaps(1), await gaps(2)
    assert first == pytest.approx(again, abs=2e-5)
    assert first != pytest.approx(other, abs=2e-5)
    assert all(0.0799 <= gap <= 0.1201 for gap in first)
    assert len(set(first)) > 10


async def test_without_delays_other_tasks_still_get_their_turn() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(other())
        await times(Engine(FAST).submit(job(answer=1000)))
        task.cancel()
    assert turns > 50


async def test_two_choices_step_together() -> None:
    plans = tuple(
        Plan((*(Token("content", "x", None, choice) for _ in range(length)), Token("content", "", "stop", choice)), 0)
        for choice, length in ((0, 2), (1, 3))
    )
    run = Engine(SLOW).submit(Job(["a"] * 10, plans, 100))
    with run:
        seen = [token.choice async for token in run.tokens()]
    assert seen == [0, 1, 0, 1, 0, 1, 1]
    assert run.generated == 7


@pytest.mark.parametrize(
    "stored,asked,tokens,cached",
    [
        (0, 100, 100, 0),
        (100, 100, 100, 96),
        (96, 96, 96, 80),  # at least one token is always computed
        (96, 97, 97, 96),
        (50, 100, 100, 48),
        (15, 100, 100, 0),  # no whole block
    ],
)
def test_only_whole_blocks_from_the_start_are_shared(stored: int, asked: int, tokens: int, cached: int) -> None:
    cache = PrefixCache(100, 16)
    prompt = [f"t{n}" for n in range(200)]
    cache.remember(cache.chain(prompt[:stored]))
    assert cache.cached_tokens(cache.chain(prompt[:asked]), tokens) == cached


def test_a_difference_at_the_start_shares_nothing() -> None:
    cache = PrefixCache(100, 16)
    prompt = ["t"] * 160
    cache.remember(cache.chain(prompt))
    assert cache.cached_tokens(cache.chain(["other", *prompt[1:]]), 160) == 0
    assert cache.cached_tokens(cache.chain(prompt, salt="s"), 160) == 0


def test_the_oldest_blocks_leave_a_full_cache() -> None:
    cache = PrefixCache(4, 2)
    first, second = cache.chain(list("abcdef")), cache.chain(list("uvwx"))
    cache.remember(first)
    cache.remember(second)
    assert len(cache) == 4
    assert cache.cached_tokens(second, 10) == 4
    assert cache.cached_tokens(first, 10) == 0, "its first block is gone, so the rest is of no use"


def test_no_cache_remembers_nothing() -> None:
    cache = PrefixCache(0, 16)
    cache.remember(cache.chain(["t"] * 100))
    assert cache.cached_tokens(cache.chain(["t"] * 100), 100) == 0


def test_a_value_on_a_bound_belongs_to_that_bucket() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 6):
        histogram.observe(value)
    assert list(histogram.cumulative()) == [("1.0", 2), ("2.0", 3), ("5.0", 4), ("+Inf", 5)]
    assert (histogram.count, histogram.sum) == (5, 14.0)


async def test_the_page_shows_running_waiting_and_what_was_counted() -> None:
    engine = Engine(SLOW.with_fields(slots=1))
    run = engine.submit(job(prompt_tokens=10, answer=3))
    engine.submit(job(prompt_tokens=10, answer=3))
    page = page_of(engine)
    assert page['vllm:num_requests_running{engine="0",model_name="fast"}'] == 1
    assert page['vllm:num_requests_waiting{engine="0",model_name="fast"}'] == 1
    await times(run)
    page = page_of(engine)
    assert page['vllm:generation_tokens_total{engine="0",model_name="fast"}'] == 3
    assert page['vllm:request_success_total{engine="0",finished_reason="stop",model_name="fast"}'] == 1
    assert page['vllm:time_to_first_token_seconds_sum{engine="0",model_name="fast"}'] == pytest.approx(0.2)
    assert page['vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="fast"}'] == 0
    assert page['vllm:time_to_first_token_seconds_bucket{engine="0",le="0.25",model_name="fast"}'] == 1
    assert page['vllm:inter_token_latency_seconds_count{engine="0",model_name="fast"}'] == 2
    assert page['vllm:e2e_request_latency_seconds_sum{engine="0",model_name="fast"}'] == pytest.approx(0.4)
    assert page['vllm:prefix_cache_queries_total{engine="0",model_name="fast"}'] == 20
    assert b"llamacpp:requests_processing 1.0" in render_llamacpp(engine.stats, engine.gauges())


def page_of(engine: Engine) -> dict[str, float]:
    text = render_vllm(engine.stats, engine.gauges(), "fast").decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}
