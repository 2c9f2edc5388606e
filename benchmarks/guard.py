"""Keeps the cost of our hop where it is: `python -m benchmarks.guard`, at most a minute.

Compares CPU time with two peers in the same run, so that the machine's speed cancels out; each ratio is the best of up
to three tries, so that a busy machine does not fail it. Exit code 1 when a ratio is above its limit in all of them.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

from benchmarks import targets
from benchmarks.measure import Bench, bench, measure, warm_up
from benchmarks.processes import Failed, raise_file_limit
from benchmarks.targets import TARGETS, Running
from benchmarks.venvs import Absent
from benchmarks.workloads import WORKLOADS, Workload

# Highest CPU time of ours over a peer's: 20 % above what was reached, see docs/performance.md.
LIMITS: dict[str, dict[str, float]] = {
    "a": {"plain": 0.50, "nginx": 4.5},  # per streamed request of 16 chunks, one client
    "b": {"plain": 0.20, "nginx": 12.0},  # per plain request, 16 clients
    "c": {"plain": 0.50, "nginx": 3.5},  # per chunk, 32 streams at 5 ms
}
SCALES = {"a": 0.25, "b": 0.3, "c": 0.2}  # of the workloads: one to two seconds each
TRIES = 3
NO_TRY_AFTER_S = 36.0  # a try takes about 14 s, starting about 10 s
OURS = "ours"

Ratios = dict[tuple[str, str], float]  # workload, peer


def guarded() -> list[Workload]:
    return [work.scaled(SCALES[work.letter]) for work in WORKLOADS if work.letter in LIMITS]


def one_try(around: Bench, running: dict[str, Running]) -> Ratios:
    """Every ratio once. Raises Failed when requests failed: their CPU time would say nothing."""
    found: Ratios = {}
    for work in guarded():
        cost: dict[str, float] = {}
        for name, target in running.items():
            sample = measure(around, target, work)
            if sample.failed or not sample.cpu_us:
                raise Failed(f"{name}, workload {work.letter}: {sample.failures or 'no CPU time'}")
            cost[name] = sample.cpu_us
        found |= {(work.letter, peer): cost[OURS] / cost[peer] for peer in LIMITS[work.letter] if peer in cost}
    return found


def start_all(stack: ExitStack, around: Bench) -> dict[str, Running]:
    """Ours and the peers that can be had; what cannot is told."""
    peers = {peer for limits in LIMITS.values() for peer in limits}
    running = {}
    for target in TARGETS:
        if target.name != OURS and target.name not in peers:
            continue
        try:
            running[target.name] = stack.enter_context(targets.running(target, around.upstream_port))
        except Absent as reason:
            print(f"without {target.label}: {reason}")
            continue
        for work in guarded():
            warm_up(around, running[target.name], work)
    return running


def over(best: Ratios) -> list[tuple[str, str]]:
    return [key for key, value in best.items() if value > LIMITS[key[0]][key[1]]]


def show(best: Ratios) -> None:
    for (letter, peer), value in sorted(best.items()):
        limit = LIMITS[letter][peer]
        print(f"({letter}) CPU time over {targets.LABELS[peer]:28} {value:6.2f}  limit {limit:5.2f}  "
              f"{'ok' if value <= limit else 'TOO MUCH'}")  # fmt: skip


def main() -> int:
    raise_file_limit()
    best: Ratios = {}
    with ExitStack() as stack:
        around = stack.enter_context(bench())
        running = start_all(stack, around)
        if len(running) < 2:
            print("nothing to compare with")
            return 2
        began = time.monotonic()
        for number in range(TRIES):
            if number and time.monotonic() - began > NO_TRY_AFTER_S:
                break
            for key, value in one_try(around, running).items():
                best[key] = min(value, best.get(key, value))
            if not over(best):
                break
    show(best)
    return 1 if over(best) else 0


if __name__ == "__main__":
    sys.exit(main())
