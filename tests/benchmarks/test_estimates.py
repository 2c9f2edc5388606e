"""Each real trace holds the limits of the estimates (latency-methods §2.5)."""

from __future__ import annotations

import pytest

from benchmarks.estimates import CASES, DATA, Case, arrivals, measured


@pytest.mark.parametrize("case", [case for case in CASES if not case.is_slowed], ids=lambda case: case.name)
def test_a_trace_holds_the_limits(case: Case) -> None:
    if not DATA.is_dir():
        pytest.skip("the traces are not here; FIRSTTOKEN_SHARED names the folder that holds data/")
    assert measured(case, 1, arrivals(case.trace)).misses(case.limits) == []
