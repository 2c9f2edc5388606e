"""What a predictor learns, and what it leaves alone."""

from __future__ import annotations

import pytest

from gateway.timing.calibration import Calibration
from gateway.timing.least_squares import LeastSquares
from gateway.timing.predict import MAX_MODELS, Forecasts
from gateway.timing.prompts import PrefixIndex, Prompt, measure
from gateway.timing.shifts import Shifts

S = 1_000_000_000


def test_a_line_finds_its_coefficients_and_follows_a_new_level() -> None:
    line = LeastSquares()
    for i in range(300):
        own, ahead = 200.0 + 137 * (i % 11), 500.0 * (i % 5)
        line.update(own, ahead, i % 3, 0.1 + 0.2 * (own + ahead) / 1000 + 0.03 * (i % 3))
    a, b, d, c = line.coefficients
    assert (a, b, d, c) == pytest.approx((0.1, 0.2, 0.03, 0), abs=0.02)
    assert line.work_s(1000) == pytest.approx(d + b)
    line.shift()
    for _ in range(30):
        line.update(1000, 0, 0, 0.6)
    assert line.predict(1000, 0, 0) == pytest.approx(0.6, rel=0.05)


def test_the_fifth_freak_in_a_row_is_a_new_level() -> None:
    shifts = Shifts()
    assert [shifts.judge(9, 1) for _ in range(6)] == ["outlier"] * 4 + ["shift", "usual"]
    assert shifts.judge(1, 1) == "usual"


def test_forty_outcomes_ten_times_slower_bring_the_prediction_within_a_factor_of_two() -> None:
    predictor, now, prompt = Forecasts().for_model("m"), S, Prompt.of_tokens(1000)
    for i in range(80):
        ticket = predictor.begin(prompt, now)
        predictor.first_token(ticket, now + (S // 5 if i < 40 else 2 * S))
        predictor.end(ticket, now + 3 * S)
        now += 4 * S
    assert 1 < predictor.predict(prompt, now).p50_s < 4


def test_p90_covers_nine_in_ten_and_a_restart_forgets() -> None:
    found = Calibration()
    for i in range(200):
        found.learn_spread(1 + (i % 10) / 10, 1.0, found.p90(1.0, 0), 0)
    assert 1.7 <= found.p90(1.0, 0) <= 1.91
    found.restart()
    assert len(found) == 0
    assert found.p90(1.0, 0) == 2.0


def test_foreign_requests_count_as_work_ahead_for_five_seconds() -> None:
    predictor, prompt = Forecasts().for_model("m"), Prompt.of_tokens(1000)
    predictor.begin(prompt, S)
    predictor.note_foreign(3, S)
    assert predictor.predict(prompt, S).ahead_tokens == 4000, "our own and three of others"
    assert predictor.predict(prompt, 7 * S).ahead_tokens == 1000
    predictor.restarted(S)
    assert predictor.predict(prompt, S).ahead_tokens == 1000


def test_plain_requests_leave_the_line_when_due_or_overtaken() -> None:
    predictor, prompt = Forecasts().for_model("m"), Prompt.of_tokens(1000)
    predictor.begin(prompt, S, is_streaming=False)
    predictor.begin(prompt, 20 * S, is_streaming=False)
    assert predictor.waiting == 1
    seen = predictor.begin(prompt, 20 * S)
    predictor.first_token(seen, 20 * S + 1)
    assert predictor.waiting == 0
    assert predictor.last_first_token_ns == 20 * S + 1


def test_usage_teaches_tokens_and_the_cache() -> None:
    predictor, prompt = Forecasts().for_model("m"), measure(b'{"messages": "' + b"x" * 8000 + b'"}')
    for i in range(5):
        ticket = predictor.begin(prompt, i * S)
        predictor.end(ticket, i * S + 1, prompt_tokens=round(prompt.tokens * 2), cached_tokens=0 if i < 2 else 1500)
        predictor.end(ticket, i * S + 2, prompt_tokens=1)
    assert predictor.token_factor > 1.1
    assert predictor.cache_factor is not None


def test_images_count_as_tokens_of_their_own_and_an_index_is_bounded() -> None:
    image = b'{"input": "data:image/png;base64,' + b"A" * 40_000 + b'"}'
    assert 900 < measure(image).tokens < 1100
    assert measure(b"\\u6f22" * 40_000).cjk == pytest.approx(40_000, rel=0.01)
    index = PrefixIndex(300)
    index.learn(100, 0)
    index.learn(100, 1000)
    index.add(Prompt.of_tokens(500_000, range(1, 400)))
    assert len(index) <= 300


def test_the_least_used_model_is_forgotten_first() -> None:
    forecasts = Forecasts()
    first = forecasts.for_model("0")
    for i in range(MAX_MODELS + 1):
        forecasts.for_model(str(i))
    assert len(forecasts) == MAX_MODELS
    assert first not in forecasts
    forecasts.restarted(S)
