"""One of two model servers turns bad and recovers: the short form of `benchmarks.unsteady`."""

from __future__ import annotations

import pytest

from benchmarks.unsteady import measure
from benchmarks.unsteady_story import Fault, Plan, problems, table

SHORT = Plan(
    faults=(Fault("errors 500", "status=500"), Fault("cuts", "cut=4")),
    rate=40, requests=100, steady_s=1, bad_s=(2, 20), after_out_s=1, back_s=40, after_back_s=1, last_s=90,
)  # fmt: skip


@pytest.mark.slow
async def test_nobody_sees_a_failure_that_no_rule_allows_and_the_bad_server_comes_back() -> None:
    """Out within 30 s, back within 60 s of its recovery, at most 10 % sent twice: with all settings at their defaults."""
    story = await measure(SHORT)
    assert problems(story) == [], table(story)
