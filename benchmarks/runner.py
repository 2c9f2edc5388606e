"""A whole run: every workload on every target, in turn, several rounds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks import targets
from benchmarks.measure import Bench, Sample, bench, one_round, warm_up
from benchmarks.processes import Failed, raise_file_limit
from benchmarks.targets import Running, Target
from benchmarks.venvs import Absent
from benchmarks.workloads import Workload, trace_source


@dataclass(slots=True)
class Results:
    """Everything that was measured, and what was not."""

    samples: list[Sample] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)  # target: reason
    notes: list[str] = field(default_factory=list)
    workloads: list[Workload] = field(default_factory=list)  # as they were run

    def of(self, workload: str, target: str) -> list[Sample]:
        """The rounds of one cell, in order."""
        return [s for s in self.samples if (s.workload, s.target) == (workload, target)]

    def targets_of(self, workload: str) -> list[str]:
        """Targets with at least one round, in the order of the table."""
        seen = {s.target for s in self.samples if s.workload == workload}
        return [name for name in targets.LABELS if name in seen]


Tell = Callable[[str], None]


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(chosen: list[Target], workloads: list[Workload], rounds: int, say: Tell = tell) -> Results:
    """Measures. What cannot be had or fails is noted, and the rest goes on."""
    results = Results()
    file_limit = raise_file_limit()
    present = _present(chosen, results)
    with bench() as around:
        if not around.programs.are_native:
            results.notes.append("No C compiler: the upstream and the load generator in Python stood in.")
        for wanted in workloads:
            work = wanted.fitted(file_limit)
            reason = _why_not(work, around)
            if reason is not None:
                results.notes.append(f"Workload {work.letter} was left out: {reason}")
                continue
            if work != wanted:
                results.notes.append(
                    f"Workload {work.letter}: {work.clients} clients, since {file_limit} files may be open."
                )
            results.workloads.append(work)
            _run_workload(around, present, work, rounds, results, say)
    return results


def _present(chosen: list[Target], results: Results) -> list[Target]:
    present = []
    for target in chosen:
        try:
            results.versions[target.name] = targets.version(target)
        except Absent as reason:
            results.absent[target.name] = str(reason)
        else:
            present.append(target)
    return present


def _why_not(work: Workload, around: Bench) -> str | None:
    if work.mode != "closed" and not around.programs.are_native:
        return "it needs the load generator in C, and there is no compiler."
    if work.mode == "trace" and not trace_source().exists():
        return "the Azure trace is not here (FIRSTTOKEN_SHARED/data/azure_llm_2023_conv.csv)."
    return None


def in_turn(found: list[Running | Target], number: int) -> list[Running | Target]:
    """A B B A: every second round goes backwards, so that a drift of the machine hits all alike."""
    return found if number % 2 == 0 else found[::-1]


def _run_workload(
    around: Bench, present: list[Target], work: Workload, rounds: int, results: Results, say: Tell
) -> None:
    say(f"{work.letter}: {work.title}")
    with ExitStack() as stack:
        found: list[Running | Target] = [around.direct()]
        for target in present:
            try:
                found.append(target if work.is_fresh else _started(stack, around, target, work))
            except Failed as problem:
                results.notes.append(f"{target.label}, workload {work.letter}: {problem}")
        for number in range(rounds):
            for candidate in in_turn(list(found), number):
                try:
                    sample = one_round(around, candidate, work)
                except Failed as problem:
                    results.notes.append(f"{candidate.name}, workload {work.letter}, round {number + 1}: {problem}")
                    found.remove(candidate)
                    continue
                sample.round = number
                results.samples.append(sample)
                say(f"  {number + 1}/{rounds} {_as_line(sample, work)}")


def _started(stack: ExitStack, around: Bench, target: Target, work: Workload) -> Running:
    running = stack.enter_context(targets.running(target, around.upstream_port))
    warm_up(around, running, work)
    return running


def _as_line(sample: Sample, work: Workload) -> str:
    cpu = "" if sample.cpu_us is None else f"{sample.cpu_us:9.1f} µs per {work.unit}"
    first = sample.ttft_ms if sample.ttft_ms.get("count") else sample.e2e_ms
    extra = f", {sample.failed} failed" if sample.failed else ""
    extra += f", own lag {sample.lag_p99_ms:.1f} ms" if sample.is_noisy else ""
    return f"{sample.target:15} {first.get('p50', 0):8.3f} / {first.get('p99', 0):8.3f} ms {cpu}{extra}"
