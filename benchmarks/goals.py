"""What the hop may cost, as limits on one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from benchmarks.measure import Sample
from benchmarks.runner import Results

STREAMS = ("a", "c", "d")
ROUTER, NGINX, OURS, TWO, DIRECT = "vllm-router", "nginx", "ours", "ours-2-workers", "direct"


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of this run that must not be above its limit."""

    text: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.value <= self.limit

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "holds": self.holds}


Read = Callable[[Sample], float | None]


def _by_round(
    results: Results, workload: str, ours: str, other: str, read: Read, join: Callable[[float, float], float]
) -> float | None:
    """The median over rounds of a comparison within each round."""
    found = []
    for mine, theirs in zip(results.of(workload, ours), results.of(workload, other), strict=False):
        a, b = read(mine), read(theirs)
        if a is not None and b is not None and (b or join is _less):
            found.append(join(a, b))
    return statistics.median(found) if found else None


def _over(a: float, b: float) -> float:
    return a / b


def _less(a: float, b: float) -> float:
    return a - b


def _cpu(sample: Sample) -> float | None:
    return sample.cpu_us


def _ttft(key: str) -> Read:
    return lambda sample: sample.ttft_ms.get(key)


def _gap(key: str) -> Read:
    return lambda sample: sample.gap_ms.get(key)


def _median(results: Results, workload: str, target: str, read: Read) -> float | None:
    values = [value for sample in results.of(workload, target) if (value := read(sample)) is not None]
    return statistics.median(values) if values else None


def goals_of(results: Results) -> list[Goal]:
    """The goals that this run can judge."""
    return [Goal(text, value, limit) for text, value, limit in _all(results) if value is not None]


def _all(results: Results) -> Iterator[tuple[str, float | None, float]]:
    for letter in ("a", "b", "c", "d"):
        value = _by_round(results, letter, OURS, ROUTER, _cpu, _over)
        yield f"({letter}) CPU time over vllm-router's", value, 1.0
    for letter in STREAMS:
        added = _by_round(results, letter, OURS, DIRECT, _ttft("p50"), _less)
        yield f"({letter}) TTFT p50 over direct, ms", added, 0.2
        tail = _by_round(results, letter, OURS, NGINX, _ttft("p99"), _less)
        yield f"({letter}) TTFT p99 over nginx's, ms", tail, 1.0
    for letter in ("c", "d"):
        yield f"({letter}) gap p50 over direct's", _by_round(results, letter, OURS, DIRECT, _gap("p50"), _over), 1.05
        yield f"({letter}) gap p99 over direct's", _by_round(results, letter, OURS, DIRECT, _gap("p99"), _over), 1.2
    few, many = _median(results, "c", OURS, _cpu), _median(results, "e", OURS, _cpu)
    yield "CPU per chunk, (e) over (c)", many / few if few and many else None, 1.5
    yield "(e) KiB per open stream", _median(results, "e", OURS, lambda s: s.kib_per_client), 20.0
    yield "(g) KiB per idle client", _median(results, "g", OURS, lambda s: s.kib_per_client), 25.0
    for letter in ("a", "b"):
        value = _by_round(results, letter, TWO, OURS, _cpu, _over)
        yield f"({letter}) CPU time, 2 workers over 1", value, 1.05
    for letter in ("e", "g"):
        yield f"({letter}) largest share of connections, 2 workers", _median(results, letter, TWO, _largest_share), 0.6


def _largest_share(sample: Sample) -> float | None:
    return max(sample.split) / sum(sample.split) if len(sample.split) > 0 else None
