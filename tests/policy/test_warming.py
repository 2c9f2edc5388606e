"""Which requests warm a server up, and when it is warm."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Warmup
from gateway.policy.warming import (
    MAX_ROUNDS,
    MAX_WAIT_S,
    Shape,
    WarmupReport,
    body_of,
    is_over,
    is_steady,
    plan,
    prompt_of,
    retry_wait_s,
)
from gateway.sim.text import tokenize


def test_every_length_goes_first_then_every_number_of_streams_with_a_long_decode() -> None:
    """latency-methods §4; cases C149."""
    assert plan(Warmup()) == (
        Shape(16, 1, 2), Shape(512, 1, 2), Shape(2049, 1, 2), Shape(2049, 1, 2, is_repeated=True),
        Shape(16, 1, 32), Shape(16, 2, 32), Shape(16, 3, 32), Shape(16, 8, 32), Shape(16, 16, 32),
    )  # fmt: skip


@pytest.mark.parametrize(
    "settings, limit, expected",
    [
        ({"prompt_tokens": [], "streams": []}, None, (Shape(1, 1, 2), Shape(1, 1, 2, is_repeated=True))),
        (
            {"prompt_tokens": [9, 9], "streams": [1]},
            None,
            (Shape(9, 1, 2), Shape(9, 1, 2, is_repeated=True), Shape(9, 1, 32)),
        ),
        (
            {"prompt_tokens": [16, 4096], "streams": []},
            2048,
            (Shape(16, 1, 2), Shape(1952, 1, 2), Shape(1952, 1, 2, is_repeated=True)),
        ),
        (
            {"prompt_tokens": [16], "streams": [0]},
            10,
            (Shape(1, 1, 2), Shape(1, 1, 2, is_repeated=True), Shape(1, 1, 32)),
        ),
    ],
    ids=["nothing given", "twice the same", "longer than the model takes", "hardly a context"],
)
def test_the_plan_fits_what_was_set_and_what_the_server_takes(
    settings: dict[str, object], limit: int | None, expected: tuple[Shape, ...]
) -> None:
    assert plan(Warmup.model_validate(settings), limit) == expected


@pytest.mark.parametrize("tokens", [16, 512, 2049])
def test_a_prompt_has_at_least_its_tokens(tokens: int) -> None:
    """One more than the batched-token limit must not be one less."""
    chat = f"<|user|>\n{prompt_of(Shape(tokens, 1, 2), 1, 0.5)}\n<|assistant|>\n"
    assert tokens <= len(tokenize(chat)) <= tokens + 40


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 5000), st.integers(1, 5000))
def test_prompts_differ_from_their_start_on_unless_the_shape_is_a_repetition(
    chance: float, one: int, other: int
) -> None:
    fresh, repeated = Shape(16, 1, 2), Shape(16, 1, 2, is_repeated=True)
    first, second = (prompt_of(fresh, number, chance).split(" ")[0] for number in (one, other))
    assert re.fullmatch(r"\d{12}", first)
    assert (first == second) == (one == other)
    assert prompt_of(repeated, one, chance) == prompt_of(repeated, other, chance)


def test_the_settings_add_fields_and_cannot_switch_streaming_off() -> None:
    settings = Warmup(body={"tools": [1], "temperature": 1, "stream": False})
    body = body_of(settings, model="m", prompt="p", max_tokens=2, max_tokens_field="max_completion_tokens")
    assert body == {
        "model": "m", "messages": [{"role": "user", "content": "p"}], "max_completion_tokens": 2, "temperature": 1,
        "tools": [1], "stream": True,
    }  # fmt: skip
    assert body_of(settings, model="m", prompt="p", max_tokens=2, can_ignore_end=True)["ignore_eos"] is True


@pytest.mark.parametrize(
    "costs, steady",
    [
        ([], False),
        ([1.0, 1.0], False),
        ([1.0, 1.0, 1.0], True),
        ([12.0, 1.0, 1.0], False),
        ([12.0, 1.0, 1.0, 1.2], True),
        ([1.0, 1.0, 1.31], False),
        ([1.3, 1.0, 1.0], True),
        ([1.0, 1.0, 0.5], False),
        ([0.001, 0.0, 0.02], True),  # a fast server: nothing compiles in 20 ms
        ([0.001, 0.0, 0.04], False),
    ],
)
def test_three_in_a_row_near_their_median_are_steady(costs: list[float], steady: bool) -> None:
    """latency-methods §4."""
    assert is_steady(costs) is steady
    assert is_over(costs) is steady


def test_a_shape_that_never_becomes_steady_ends() -> None:
    costs = [1.0, 9.0] * MAX_ROUNDS
    assert not is_over(costs[: MAX_ROUNDS - 1])
    assert is_over(costs[:MAX_ROUNDS])


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_waits_grow_up_to_a_minute_and_never_come_near_zero(failures: int, chance: float) -> None:
    """fault-catalogue 3.6: equal jitter."""
    whole = min(MAX_WAIT_S, 2.0 ** min(failures - 1, 10))
    assert whole / 2 <= retry_wait_s(failures, lambda: chance) <= whole


@pytest.mark.parametrize(
    "report, sentence",
    [
        (
            WarmupReport(12.1, 0.05, 12.1, 9, 3, seconds=30.2),
            "upstream `a` is warm: first token 12.1 s before, 0.05 s after, 9 requests in 30 s",
        ),
        (WarmupReport(requests=1), "upstream `a` is warm: first token unknown before, unknown after, 1 request in 0 s"),
        (WarmupReport(problem="the server answered 404"), "upstream `a` is not warm: the server answered 404"),
    ],
)
def test_a_report_reads_as_one_line(report: WarmupReport, sentence: str) -> None:
    assert report.sentence("a") == sentence
    assert str(Shape(16, 8, 32)) == "16 tokens × 8"
    assert str(Shape(16, 1, 2, is_repeated=True)) == "16 tokens × 1, repeated"
