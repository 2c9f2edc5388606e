"""Results as JSON, and as Markdown with its caveats first."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.goals import goals_of
from benchmarks.measure import MAX_LAG_MS, Quantiles, Sample
from benchmarks.runner import Results
from benchmarks.targets import LABELS, TARGETS
from benchmarks.workloads import Workload

BUSY = 0.8  # of a core; above it the upstream or the load generator may be the bottleneck
OURS = tuple(target.name for target in TARGETS if target.is_ours)
CAVEATS = (
    "Latencies of one machine whose cores also run the upstream and the load generator: they compare targets of this"
    " run with each other, and say nothing of yours. CPU time depends less on what else runs, but is no constant"
    " either: compare ratios within a run, never figures of two.",
    "CPU time is user + system of the target's whole process tree, `/proc/*/task/*/schedstat`. Memory is resident"
    " memory; buffers of sockets are the kernel's and not in it.",
    "Targets do different things. nginx, HAProxy and Envoy relay bytes; the routers pick a server; Firsttoken also"
    " reads every event, keeps times and metrics of each request and logs it. Access logs of the others are off.",
    "Each target keeps its defaults except for limits that a workload would meet: numbers of connections, open"
    " requests and sizes of bodies (`benchmarks/configs`). HAProxy has `option http-no-delay`, nginx no buffering, the"
    " routers `round_robin`, the cheapest of their policies.",
    "Two cores cannot show the throughput of two workers, only what they cost and how connections split.",
    "p99 of a few hundred requests is one of the three slowest of them: read it with its spread in the JSON.",
)


def machine() -> dict[str, str]:
    """What the figures depend on."""
    models = (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name"))
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": next(models, "unknown processor"), "cores": str(os.cpu_count()), "memory": f"{memory / 2**20:.1f} GiB",
        "kernel": platform.release(), "system": _system(), "python": platform.python_version(),
    }  # fmt: skip


def _lines(path: str) -> list[str]:
    return Path(path).read_text(errors="replace").splitlines() if Path(path).exists() else []


def _system() -> str:
    names = (line.partition("=")[2].strip('"') for line in _lines("/etc/os-release") if line.startswith("PRETTY_NAME="))
    return next(names, sys.platform)


def as_json(results: Results, command: str, rounds: int) -> dict[str, object]:
    """Everything, round by round."""
    return {
        "command": command, "rounds": rounds, "machine": machine(), "versions": results.versions,
        "absent": results.absent, "notes": results.notes,
        "workloads": {work.letter: {"title": work.title, "unit": work.unit} for work in results.workloads},
        "goals": [goal.as_json() for goal in goals_of(results)],
        "samples": [sample.as_json() for sample in results.samples],
    }  # fmt: skip


# Markdown


def as_markdown(results: Results, command: str, rounds: int) -> str:
    """One section for each workload, then ratios, then the goals."""
    where = machine()
    lines = ["Caveats first:", "", *(f"- {caveat}" for caveat in [*CAVEATS, *_notes(results)]), ""]
    lines += [f"Command: `{command}`; rounds: {rounds}, medians of them, targets in turn A B B A.", ""]
    lines += [
        f"Machine: {where['cpu']}, {where['cores']} cores, {where['memory']}, {where['system']},"
        f" Linux {where['kernel']}, Python {where['python']}.", "",
        "Versions: " + "; ".join(f"{LABELS[name]} {text}" for name, text in results.versions.items()) + ".", "",
    ]  # fmt: skip
    for work in results.workloads:
        lines += [f"**({work.letter}) {work.title}**", "", *_table(results, work), ""]
    lines += [*_ratios(results), "", *_goals(results), ""]
    return "\n".join(lines)


def _notes(results: Results) -> list[str]:
    notes = [f"Absent: {LABELS[name]}, {reason}." for name, reason in results.absent.items()] + results.notes
    for sample in results.samples:
        where = f"{LABELS[sample.target]}, workload {sample.workload}, round {sample.round + 1}"
        if sample.is_noisy:
            notes.append(f"{where}: own lag p99 {sample.lag_p99_ms:.1f} ms, over {MAX_LAG_MS:g}, in every try.")
        if max(sample.upstream_busy, sample.load_busy) > BUSY:
            shares = f"upstream {sample.upstream_busy:.0%}, load generator {sample.load_busy:.0%}"
            notes.append(f"{where}: {shares} of a core.")
    return notes


def middle(samples: list[Sample], read: Callable[[Sample], float | None]) -> float | None:
    """The median over rounds of what they know."""
    values = [value for sample in samples if (value := read(sample)) is not None]
    return statistics.median(values) if values else None


def _cell(value: float | None, form: str = ".1f") -> str:
    return "–" if value is None else format(value, form)


def _spread(samples: list[Sample]) -> str:
    values = [sample.cpu_us for sample in samples if sample.cpu_us is not None]
    if not values:
        return "–"
    form = ".0f" if min(values) >= 100 else ".1f"
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def _four(samples: list[Sample], read: Callable[[Sample], Quantiles]) -> str:
    """p50 / p90 / p99 / max, each the median over rounds."""
    values = [middle(samples, lambda s, key=key: read(s).get(key)) for key in ("p50", "p90", "p99", "max")]  # type: ignore[misc]
    return " / ".join(_cell(value, ".2f") for value in values) if values[0] is not None else "–"


def _joined(samples: list[Sample]) -> str:
    """Share of events that arrived in one read with the event before."""
    if not any(sample.gap_ms.get("count") for sample in samples):
        return "–"
    return f"{middle(samples, lambda s: s.coalesced):.1%}"


def _table(results: Results, work: Workload) -> list[str]:
    per_client = {"hold": " | KiB per stream", "idle": " | KiB per client | idle µs/s per client"}.get(work.mode, "")
    cost = "µs to take one" if work.mode == "idle" else f"CPU µs per {work.unit}"
    head = f"| target | {cost} (min–max) | TTFT ms p50 / p90 / p99 / max | gap ms | joined | E2E ms | peak MiB"
    head += f"{per_client} | failed |"
    lines = [head, "|---" * (head.count(" | ") + 1) + "|"]
    for name in results.targets_of(work.letter):
        samples = results.of(work.letter, name)
        cells = [
            LABELS[name], _spread(samples), _four(samples, lambda s: s.ttft_ms), _four(samples, lambda s: s.gap_ms),
            _joined(samples), _four(samples, lambda s: s.e2e_ms), _cell(middle(samples, lambda s: s.peak_mib)),
        ]  # fmt: skip
        if per_client:
            cells.append(_cell(middle(samples, lambda s: s.kib_per_client)))
        if work.mode == "idle":
            cells.append(_cell(middle(samples, lambda s: s.idle_cpu_us), ".2f"))
        cells.append(str(sum(sample.failed for sample in samples)))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def ratio(results: Results, workload: str, ours: str, peer: str) -> float | None:
    """CPU time of ours over a peer's: the median of the ratios of each round."""
    pairs = zip(results.of(workload, ours), results.of(workload, peer), strict=False)
    values = [a.cpu_us / b.cpu_us for a, b in pairs if a.cpu_us is not None and b.cpu_us]
    return statistics.median(values) if values else None


def _ratios(results: Results) -> list[str]:
    peers = [name for name in LABELS if name not in OURS and name in results.versions]
    ours = [name for name in OURS if name in results.versions]
    if not peers or not ours:
        return []
    lines = ["CPU time of Firsttoken over a peer's, below 1 is less (median of each round's ratio):", ""]
    lines.append("| workload | ours | " + " | ".join(LABELS[peer] for peer in peers) + " |")
    lines.append("|---" * (len(peers) + 2) + "|")
    for work in results.workloads:
        for name in ours:
            cells = [_cell(ratio(results, work.letter, name, peer), ".2f") for peer in peers]
            lines.append(f"| ({work.letter}) per {work.unit} | {LABELS[name]} | " + " | ".join(cells) + " |")
    return lines


def _goals(results: Results) -> list[str]:
    goals = goals_of(results)
    if not goals:
        return []
    lines = ["Goals:", "", "| goal | reached | limit | holds |", "|---|---|---|---|"]
    return lines + [
        f"| {goal.text} | {goal.value:.2f} | {goal.limit:g} | {'yes' if goal.holds else '**no**'} |" for goal in goals
    ]
