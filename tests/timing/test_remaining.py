"""What a waiting request is told: from the first services on it falls from poll to poll."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.timing.predict import LEAST_S, Forecasts, Predictor, Waiting
from gateway.timing.prompts import Prompt, measure

S = 1_000_000_000
START = 5 * S


def at(seconds: float) -> int:
    return START + round(seconds * S)


def line_of(n: int) -> tuple[Predictor, list[Waiting]]:
    made = Forecasts().for_model("m")
    return made, [made.begin(Prompt.of_tokens(12), START + i) for i in range(n)]


@given(st.floats(0.5, 4), st.integers(3, 12))
def test_on_a_cold_gateway_the_estimate_falls_from_poll_to_poll(service_s: float, n: int) -> None:
    predictor, tickets = line_of(n)
    told: list[float] = []
    for i in range(n - 1):
        predictor.first_token(tickets[i], at((i + 1) * service_s))
        assert predictor.ahead_of(tickets[-1]) == n - 2 - i
        for part in (0.1, 0.5):
            left = predictor.remaining(tickets[-1], at((i + 1 + part) * service_s))
            true = (n - 1 - i - part) * service_s
            assert left.basis == "model"
            assert left.p50_s == pytest.approx(max(LEAST_S, true), rel=0.02, abs=0.02)
            told.append(left.p50_s or 0.0)
    assert told == sorted(told, reverse=True)


def test_before_any_service_the_prior_is_told_then_that_nothing_is_known_then_the_stall() -> None:
    predictor, tickets = line_of(3)
    assert predictor.remaining(tickets[2], at(0.1)).basis == "prior"
    unknown = predictor.remaining(tickets[2], at(9))
    assert unknown.basis == "history"
    assert unknown.p50_s == pytest.approx(9, rel=0.01)
    assert predictor.remaining(tickets[2], at(31)) == (None, None, "stalled")


def test_nothing_remains_after_the_first_token_or_the_end() -> None:
    predictor, (one, two) = line_of(2)
    predictor.first_token(one, at(1))
    assert predictor.remaining(one, at(1)).p50_s == 0
    assert predictor.ahead_of(one) == 0
    predictor.end(two, at(2))
    assert predictor.until_complete(two, at(2)).p50_s == 0


def test_completion_adds_a_service_while_no_answer_has_ended() -> None:
    predictor, tickets = line_of(4)
    predictor.first_token(tickets[0], at(1))
    predictor.first_token(tickets[1], at(2))
    assert predictor.until_complete(tickets[2], at(2)).p50_s == pytest.approx(2, rel=0.01)


def test_a_fitted_line_predicts_and_corrects_itself() -> None:
    predictor, now = Forecasts().for_model("m"), START
    for i in range(60):
        prompt = Prompt.of_tokens(500 + 100 * (i % 7))
        ticket = predictor.begin(prompt, now)
        predictor.first_token(ticket, now + round((0.1 + prompt.tokens / 2000) * S))
        predictor.end(ticket, now + 2 * S, prompt_tokens=round(prompt.tokens), completion_tokens=50, tpot_s=0.02)
        now += 3 * S
    estimate = predictor.predict(Prompt.of_tokens(1000), now)
    assert estimate.basis == "model"
    assert estimate.p50_s == pytest.approx(0.6, rel=0.05)
    assert predictor.p95_s(Prompt.of_tokens(600)) is not None
    waiting = predictor.begin(Prompt.of_tokens(1000), now)
    assert predictor.remaining(waiting, now + S // 10).basis == "model"
    assert predictor.remaining(waiting, now + 5 * S).basis == "history"
    assert (predictor.until_complete(waiting, now + S // 10).p50_s or 0) == pytest.approx(1.5, rel=0.1)
    predictor.hedge_lost(waiting, now + 6 * S)
    assert predictor.waiting == 0


def test_after_a_restart_nothing_is_learned_but_the_warm_up() -> None:
    predictor, (ticket,) = line_of(1)
    predictor.restarted(at(0))
    predictor.first_token(ticket, at(3))
    assert predictor.warmup_s(0.5) == pytest.approx(3, rel=0.011)
    assert not predictor.is_fitted


@pytest.mark.parametrize(
    "body, cjk, other",
    [(b"abcd", 0, 4), ("漢字ab".encode(), 2, 2), (rb"a\nb", 0, 3), (rb"\u6f22\u0041", 1, 1), ("é😀".encode(), 1, 1)],
)
def test_characters_are_counted_as_a_reader_would_see_them(body: bytes, cjk: int, other: int) -> None:
    found = measure(body)
    assert (found.cjk, found.other) == (cjk, other)


def test_a_cache_that_the_server_tells_of_makes_a_repeated_prompt_cheaper() -> None:
    predictor = Forecasts().for_model("m")
    prompt = measure(b'{"messages": "' + b"x" * 8000 + b'"}')
    fresh = predictor.begin(prompt, START).estimate
    for cached in (0, 1900, 1900):
        ticket = predictor.begin(prompt, START)
        predictor.end(ticket, START + S, prompt_tokens=2000, cached_tokens=cached, completion_tokens=1, tpot_s=None)
    assert predictor.predict(prompt, START).uncached_tokens < fresh.uncached_tokens / 2
    predictor.restarted(START)
    assert predictor.predict(prompt, START).uncached_tokens > fresh.uncached_tokens / 2
