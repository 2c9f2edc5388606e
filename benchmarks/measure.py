"""One measurement: a load on a target, and what it cost the target."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from benchmarks import native, targets
from benchmarks.processes import (
    BUILD,
    Failed,
    accepted_by_process,
    cpu_us,
    free_port,
    peak_kib,
    resident_kib,
    started,
    tail_of,
    wait_until,
)
from benchmarks.targets import Running, Target
from benchmarks.workloads import Workload

MAX_LAG_MS = 5.0  # p99 of the load generator's own lateness; above it a round says nothing
TRIES = 3
SPARE_S = 30.0  # beyond a workload's own limits, until the load generator is ended
WARM_REQUESTS = 200
LATE_WORK_S = 0.15  # a target may log and sum up a moment later; that is part of the cost
Quantiles = dict[str, float]  # count, p50, p90, p99, max; milliseconds


@dataclass(slots=True)
class Sample:
    """One round of one workload on one target."""

    target: str
    workload: str
    round: int = 0
    units: int = 0
    cpu_us: float | None = None  # per unit; None where there is no process between
    ttft_ms: Quantiles = field(default_factory=dict)
    gap_ms: Quantiles = field(default_factory=dict)
    e2e_ms: Quantiles = field(default_factory=dict)
    late_ms: Quantiles = field(default_factory=dict)
    coalesced: float = 0.0  # share of events that came in one read with an earlier one
    failures: dict[str, int] = field(default_factory=dict)
    peak_mib: float | None = None
    base_mib: float | None = None  # before the load
    kib_per_client: float | None = None  # `hold` and `idle`: growth per connection
    idle_cpu_us: float | None = None  # `idle`: per client and second, with nothing to do
    split: list[int] = field(default_factory=list)  # connections by process, when all are open
    wall_s: float = 0.0
    lag_p99_ms: float = 0.0
    upstream_busy: float = 0.0  # share of one core
    load_busy: float = 0.0
    discarded: int = 0  # rounds before this one whose own lag was too large
    is_noisy: bool = False  # and so was this one's

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Bench:
    """The programs around the targets."""

    programs: native.Programs
    upstream_port: int
    upstream_pid: int

    def direct(self) -> Running:
        return Running("direct", self.upstream_port, None)


@contextmanager
def bench() -> Iterator[Bench]:
    """The simulated upstream, while the block runs."""
    programs, port, log = native.programs(), free_port(), BUILD / "logs" / "upstream.log"
    with started([*programs.upstream, str(port)], log) as process:
        wait_until(lambda: targets.answers(port), process, 10, log)
        yield Bench(programs, port, process.pid)


# The load generator

Mark = Callable[[str], None]


def _load(bench: Bench, running: Running, work: Workload, on_mark: Mark) -> dict[str, object]:
    """Runs the load generator to its end. Raises Failed."""
    log = BUILD / "logs" / "load.log"
    command = [*bench.programs.load, *work.arguments(running.port, targets.KEY)]
    if work.is_fresh:
        command.append("--wait=1")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, cwd=targets.CONFIGS.parent.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
    watchdog = threading.Timer(work.limit_s + work.hold_s + work.seconds + SPARE_S, process.kill)
    watchdog.start()
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            told: dict[str, object] = json.loads(line)
            if "mark" not in told:
                return told
            on_mark(str(told["mark"]))
            process.stdin.write(b"\n")
            process.stdin.flush()
        raise Failed(f"the load generator gave no result: {tail_of(log)}")
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def _quantiles(told: dict[str, object], name: str) -> Quantiles:
    value = told.get(name)
    assert isinstance(value, dict)
    return {str(key): float(number) for key, number in value.items()}


def _count(told: dict[str, object], name: str) -> int:
    value = told[name]
    assert isinstance(value, int)
    return value


def _number(told: dict[str, object], name: str) -> float:
    value = told[name]
    assert isinstance(value, int | float)
    return float(value)


# Measuring


@dataclass(slots=True)
class Watch:
    """What is read from the kernel before, at the marks, and after."""

    running: Running
    cpu: dict[str, float] = field(default_factory=dict)
    resident: dict[str, int] = field(default_factory=dict)
    split: list[int] = field(default_factory=list)

    def at(self, mark: str) -> None:
        pid = self.running.pid
        if pid is None:
            return
        self.cpu[mark] = cpu_us(pid)
        self.resident[mark] = resident_kib(pid)
        if mark == "held":  # after the window, since it takes some time
            self.split = accepted_by_process(pid, self.running.port)

    def used(self, first: str, last: str) -> float | None:
        return self.cpu[last] - self.cpu[first] if self.running.pid is not None else None


def measure(bench: Bench, running: Running, work: Workload) -> Sample:
    """One round. Raises Failed when there is nothing to tell."""
    watch = Watch(running)
    watch.at("before")
    upstream_before = cpu_us(bench.upstream_pid)
    told = _load(bench, running, work, watch.at)
    time.sleep(LATE_WORK_S)
    watch.at("after")
    upstream_used = cpu_us(bench.upstream_pid) - upstream_before
    sample = _sample_of(told, running, work)
    sample.upstream_busy = round(upstream_used / 1e6 / sample.wall_s, 3)
    _add_cost(sample, watch, work, _count(told, "alive"))
    return sample


def _sample_of(told: dict[str, object], running: Running, work: Workload) -> Sample:
    failures = told["failures"]
    assert isinstance(failures, dict)
    events, requests, wall_s = _count(told, "events"), _count(told, "requests"), _number(told, "wall_s")
    units = {"chunk": events, "idle client": _count(told, "alive")}.get(work.unit, requests)
    if work.mode == "hold":
        units = _count(told, "window_events")
    return Sample(
        target=running.name, workload=work.letter, units=units, wall_s=wall_s,
        ttft_ms=_quantiles(told, "ttft_ms"), gap_ms=_quantiles(told, "gap_ms"), e2e_ms=_quantiles(told, "e2e_ms"),
        late_ms=_quantiles(told, "late_ms"), coalesced=round(_count(told, "coalesced") / max(1, events), 5),
        failures={str(kind): int(count) for kind, count in failures.items() if count},
        lag_p99_ms=_quantiles(told, "lag_ms").get("p99", 0.0),
        load_busy=round(_number(told, "cpu_s") / wall_s, 3),
    )  # fmt: skip


def _add_cost(sample: Sample, watch: Watch, work: Workload, alive: int) -> None:
    pid = watch.running.pid
    if pid is None:
        return
    first, last = {"hold": ("open", "held"), "idle": ("before", "open")}.get(work.mode, ("before", "after"))
    used = watch.used(first, last)
    sample.cpu_us = used / sample.units if used is not None and sample.units else None
    sample.peak_mib = round(peak_kib(pid) / 1024, 1)
    sample.base_mib = round(watch.resident["before"] / 1024, 1)
    if work.is_fresh and alive:
        grown = max(watch.resident["open"], watch.resident["held"]) - watch.resident["before"]
        sample.kib_per_client = round(grown / alive, 2)
        sample.split = watch.split
    if work.mode == "idle" and alive:
        sample.idle_cpu_us = round((watch.used("open", "held") or 0.0) / alive / work.hold_s, 3)


def measure_quietly(run: Callable[[Workload], Sample], work: Workload) -> Sample:
    """A round whose own lag is small enough; after some tries, the best of those there were."""
    seen: list[Sample] = []
    while len(seen) < TRIES:
        sample = run(work)
        seen.append(sample)
        if sample.lag_p99_ms <= MAX_LAG_MS:
            break
    best = min(seen, key=lambda sample: sample.lag_p99_ms)
    best.discarded = len(seen) - 1
    best.is_noisy = best.lag_p99_ms > MAX_LAG_MS
    return best


def warm_up(bench: Bench, running: Running, work: Workload) -> None:
    """So that no round pays for first connections, lazy imports and the like."""
    chunks = min(work.chunks, 16)
    small = Workload(
        work.letter, "warm-up", work.unit, clients=16, requests=WARM_REQUESTS, seconds=3, chunks=chunks,
        pause_ms=min(work.pause_ms, 1), limit_s=20,
    )  # fmt: skip
    measure(bench, running, small)


def one_round(bench: Bench, target: Running | Target, work: Workload) -> Sample:
    """A round on a target that runs, or on a new process of one."""
    if isinstance(target, Running):
        return measure_quietly(lambda work: measure(bench, target, work), work)

    def on_new_process(work: Workload) -> Sample:
        with targets.running(target, bench.upstream_port) as running:
            warm_up(bench, running, work)
            return measure(bench, running, work)

    return measure_quietly(on_new_process, work)
