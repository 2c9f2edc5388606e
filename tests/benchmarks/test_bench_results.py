"""Workloads, ratios, goals, reports and the verdicts of the soak: figures in, statements out."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import chosen_targets, chosen_workloads
from benchmarks.goals import goals_of
from benchmarks.guard import LIMITS, over
from benchmarks.measure import Sample
from benchmarks.processes import ROOT
from benchmarks.report import as_json, as_markdown, ratio
from benchmarks.runner import Results, in_turn
from benchmarks.soak import Held, slope_per_minute, verdicts
from benchmarks.targets import LABELS, Running
from benchmarks.workloads import WORKLOADS, trace_file, trace_source

BY_LETTER = {work.letter: work for work in WORKLOADS}


def sample(
    target: str, workload: str, cpu_us: float | None, *, ttft: float = 1.0, split: list[int] | None = None
) -> Sample:
    quantiles = {"count": 100.0, "p50": ttft, "p90": ttft, "p99": 2 * ttft, "max": 3 * ttft}
    return Sample(
        target, workload, units=100, cpu_us=cpu_us, ttft_ms=quantiles, gap_ms=quantiles, e2e_ms=quantiles,
        kib_per_client=18.0 if cpu_us is not None else None, split=split or [], wall_s=1.0,
    )  # fmt: skip


def results(*samples: Sample) -> Results:
    versions = {name: "1" for name in LABELS if name != "direct" and any(s.target == name for s in samples)}
    workloads = [work for work in WORKLOADS if any(s.workload == work.letter for s in samples)]
    return Results(list(samples), versions, {"envoy": "it could not be installed"}, [], workloads)


# Workloads


def test_a_smaller_run_keeps_the_rate_and_the_number_of_streams() -> None:
    work = BY_LETTER["d"].scaled(0.1)
    assert (work.clients, work.chunks, work.pause_ms) == (256, 64, 50)
    assert work.requests == 256


def test_open_streams_become_fewer_in_a_smaller_run_and_where_files_are_few() -> None:
    assert BY_LETTER["e"].scaled(0.1).clients == 200
    assert BY_LETTER["g"].fitted(4096).clients == 3596
    assert BY_LETTER["e"].fitted(20_000) == BY_LETTER["e"]


def test_names_that_nobody_knows_are_told() -> None:
    with pytest.raises(SystemExit, match="no target is called apache"):
        chosen_targets("nginx,apache", with_optional=False)
    with pytest.raises(SystemExit, match="no workload is called z"):
        chosen_workloads("a,z", 1)


def test_optional_targets_are_run_when_asked_for() -> None:
    assert "litellm" not in [target.name for target in chosen_targets("", with_optional=False)]
    assert [target.name for target in chosen_targets("litellm, direct", with_optional=False)] == ["litellm"]


@pytest.mark.skipif(not trace_source().exists(), reason="the Azure trace is not here")
def test_the_trace_is_sorted_and_as_fast_as_it_says() -> None:
    path = trace_file(2.0)
    rows = [[int(number) for number in line.split()] for line in path.read_text().splitlines()]
    path.unlink()
    assert rows == sorted(rows, key=lambda row: row[0])
    assert 50 < len(rows) < 200  # 5.5 requests a second, ten times as fast
    assert all(at < 2_000_000 and prompt > 0 and chunks > 0 for at, prompt, chunks in rows)


# Ratios and goals


def test_targets_are_taken_in_turn_forth_and_back() -> None:
    found: list[Running | object] = [Running("a", 1, None), Running("b", 2, None)]
    names = [target.name for number in range(3) for target in in_turn(found, number)]  # type: ignore[arg-type]
    assert names == ["a", "b", "b", "a", "a", "b"]


def test_a_ratio_compares_within_each_round() -> None:
    seen = results(
        sample("ours", "a", 100), sample("ours", "a", 300), sample("ours", "a", 220),
        sample("nginx", "a", 100), sample("nginx", "a", 200), sample("nginx", "a", 200),
    )  # fmt: skip
    assert ratio(seen, "a", "ours", "nginx") == 1.1
    assert ratio(seen, "a", "ours", "direct") is None


def test_goals_are_judged_where_their_peers_were_measured() -> None:
    seen = results(
        sample("direct", "a", None, ttft=0.05), sample("ours", "a", 90, ttft=0.15), sample("vllm-router", "a", 100),
        sample("ours-2-workers", "e", 10, split=[70, 30]), sample("ours", "e", 10),
    )  # fmt: skip
    held = {goal.text: goal.holds for goal in goals_of(seen)}
    assert held == {
        "(a) CPU time over vllm-router's": True,
        "(a) TTFT p50 over direct, ms": True,
        "(e) KiB per open stream": True,
        "(e) largest share of connections, 2 workers": False,
    }


def test_caveats_come_first_and_what_is_absent_is_said() -> None:
    seen = results(sample("direct", "a", None), sample("nginx", "a", 100), sample("ours", "a", 120))
    seen.samples[1].is_noisy = True
    text = as_markdown(seen, "python -m benchmarks", 1)
    assert text.startswith("Caveats first:")
    assert "Absent: Envoy, it could not be installed." in text
    assert "nginx, workload a, round 1: own lag" in text
    assert "`python -m benchmarks`" in text
    assert "| (a) per streamed request | Firsttoken | 1.20 |" in text


@pytest.mark.parametrize("letter", BY_LETTER)
def test_every_row_of_a_table_has_as_many_cells_as_its_head(letter: str) -> None:
    text = as_markdown(results(sample("direct", letter, None), sample("ours", letter, 5)), "x", 1)
    tables = [block for block in text.split("\n\n") if block.startswith("| target")]
    assert len({line.count("|") for line in tables[0].splitlines()}) == 1


def test_the_json_holds_every_round() -> None:
    told = as_json(results(sample("ours", "a", 120), sample("ours", "a", 130)), "x", 2)
    rounds = told["samples"]
    assert isinstance(rounds, list)
    assert [one["cpu_us"] for one in rounds] == [120, 130]


# Guard and soak


def test_the_guard_names_what_is_over_its_limit() -> None:
    limit = LIMITS["a"]["nginx"]
    assert over({("a", "nginx"): limit}) == []
    assert over({("a", "nginx"): limit + 0.01, ("b", "nginx"): 0.1}) == [("a", "nginx")]


def held(seconds: float, memory_kib: int, files: int = 16) -> Held:
    return Held(
        seconds, memory_kib, files, threads=7, tasks=0, objects=9000, clients=0, upstream_connections=1, inflight=0
    )


def test_a_slope_is_not_moved_by_one_odd_sample() -> None:
    samples = [held(60.0 * i, 80_000 + 10 * i) for i in range(10)]
    samples[4] = held(240.0, 99_000)
    assert slope_per_minute(samples, lambda one: one.memory_kib) == pytest.approx(10)


def test_growth_is_told_and_a_short_soak_does_not_judge_memory() -> None:
    samples = [held(15.0 * i, 80_000 + 1000 * i, files=16 + 3 * i) for i in range(6)]
    memory, _, files, *_ = verdicts(samples)
    assert memory[1] == pytest.approx(4000)
    assert memory[3] is False
    assert files[1] > files[2]
    assert files[3] is True


def test_the_harness_keeps_its_hands_off_the_product() -> None:
    """What is measured must not know that it is."""
    for path in (ROOT / "gateway").rglob("*.py"):
        assert "benchmarks" not in path.read_text(encoding="utf-8")
