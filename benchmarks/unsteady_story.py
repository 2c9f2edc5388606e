"""What was seen of a server that turned bad, what of it a rule allows, and both as tables; see `unsteady.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from benchmarks.open_loop import Outcome, lateness, quantile

IN_BAND_FAULTS: Final = frozenset(("cuts", "stalls", "resets"))
SLOW_FAULTS: Final = frozenset(("silence", "late first tokens"))  # R5: nothing failed until a limit passed
MOST_EXTRA: Final = 0.10
LEAST_EXTRA: Final = 3  # retries in ten seconds that are never too many (3.5)
SAMPLE_S: Final = 0.25  # between two looks at the gateway's counters


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to be bad; `script` is the simulated server's own word for it."""

    name: str
    script: str


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how much. Seconds."""

    faults: tuple[Fault, ...]
    rate: float
    requests: int
    steady_s: float  # before the first fault
    bad_s: tuple[float, float]  # at least; at most, when it is not out by then
    after_out_s: float  # how long it stays bad when it is out
    back_s: float  # longest wait for its return
    after_back_s: float
    share_s: float = 2.0  # over which shares of traffic are taken
    window_s: float = 10.0  # over which extra attempts are taken
    patience_s: float = 60.0
    out_limit_s: float = 30.0
    back_limit_s: float = 60.0
    last_s: float = 215.0  # nothing is sent after that


@dataclass(slots=True)
class Phase:
    """One fault, from turning bad to being back. Times since the beginning of the run, None: it did not happen."""

    fault: Fault
    began: float
    out: float | None = None
    recovered: float = 0.0
    back: float | None = None
    asked_while_bad: int = 0

    @property
    def out_s(self) -> float | None:
        return None if self.out is None else self.out - self.began

    @property
    def back_s(self) -> float | None:
        return None if self.back is None else self.back - self.recovered


@dataclass(frozen=True, slots=True)
class Sample:
    """Attempts by kind so far, as the gateway counts them."""

    at: float
    first: float
    extra: float


@dataclass(slots=True)
class Story:
    """Everything that was seen."""

    plan: Plan
    outcomes: list[Outcome] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    standstill_s: float = 0.0  # how late a timer of ours was at most

    def phase_of(self, outcome: Outcome) -> Phase | None:
        """The fault whose time the request touched: it may have come before the server turned bad, or ended after."""
        end = outcome.at + outcome.end_s
        return next((p for p in reversed(self.phases) if p.began <= end and outcome.at <= p.recovered + 1), None)

    def windows(self, *, least_s: float) -> Iterator[tuple[float, float, float]]:
        """(end, first attempts, extra attempts) of each window that holds so much time. The gateway begins with us."""
        start = 0
        for sample in self.samples:
            while sample.at - self.samples[start].at > self.plan.window_s + SAMPLE_S:
                start += 1
            before = self.samples[start]
            if sample.at - before.at >= least_s:
                yield sample.at, sample.first - before.first, sample.extra - before.extra

    def most_extra(self) -> float:
        """The largest share of extra attempts in any whole window."""
        whole = self.windows(least_s=0.9 * self.plan.window_s)
        return max((extra / first for _, first, extra in whole if first), default=0.0)

    def is_budget_spent(self, began: float, ended: float) -> bool:
        """Whether in the time of a request a further extra attempt would have gone beyond the ceiling, but for one."""
        return any(
            extra + 1 >= LEAST_EXTRA and extra + 2 > MOST_EXTRA * first
            for at, first, extra in self.windows(least_s=0)
            if began - 1 <= at <= ended + 1
        )


def allowed(outcome: Outcome, story: Story) -> str | None:
    """The rule that allows a failure; None: there is none."""
    phase = story.phase_of(outcome)
    if phase is None:
        return None
    if outcome.kind == "in_band":
        return "R4, after the first byte" if outcome.is_stream and phase.fault.name in IN_BAND_FAULTS else None
    if outcome.kind != "error_first":
        return None
    if phase.fault.name in SLOW_FAULTS and outcome.status in (200, 504):
        return "R5, at the hard limit"
    return "retry budget used up" if story.is_budget_spent(outcome.at, outcome.at + outcome.end_s) else None


# Judging it


def problems(story: Story) -> list[str]:
    """What was not as it must be, in words."""
    plan, found = story.plan, list[str]()
    bad = [outcome for outcome in story.outcomes if outcome.kind != "complete" and allowed(outcome, story) is None]
    kinds = Counter((o.kind, o.status, o.code, p.fault.name if (p := story.phase_of(o)) else "no fault") for o in bad)
    found += [
        f"{count} × {kind} ({status}, `{code}`) during {name}: no rule allows it"
        for (kind, status, code, name), count in kinds.items()
    ]
    if story.most_extra() > MOST_EXTRA:
        found.append(f"extra attempts {story.most_extra():.1%} of a {plan.window_s:g} s window")
    for phase in story.phases:
        if phase.out_s is None or phase.out_s > plan.out_limit_s:
            found.append(f"{phase.fault.name}: not out within {plan.out_limit_s:g} s")
        if phase.back_s is None or phase.back_s > plan.back_limit_s:
            found.append(f"{phase.fault.name}: not back within {plan.back_limit_s:g} s")
    if len(story.phases) < len(plan.faults):
        found.append(f"only {len(story.phases)} of {len(plan.faults)} faults fitted into the run")
    return found


def table(story: Story) -> str:
    """Two tables in Markdown: by fault, and the limits."""
    lines = [
        "| fault | out after s | back after s | asked while bad | failures seen by callers, and the rule |",
        "|---|---|---|---|---|",
    ]
    for phase in story.phases:
        own = [o for o in story.outcomes if o.kind != "complete" and story.phase_of(o) is phase]
        seen = Counter(f"{o.kind}, {allowed(o, story) or '**no rule**'}" for o in own)
        told = "; ".join(f"{count} {what}" for what, count in seen.most_common()) or "none"
        out, back = (f"{s:.1f}" if s is not None else "**never**" for s in (phase.out_s, phase.back_s))
        lines.append(
            f"| {phase.fault.name} (`{phase.fault.script}`) | {out} | {back} | {phase.asked_while_bad} | {told} |"
        )
    whole = [o for o in story.outcomes if o.kind == "complete"]
    firsts = [o.first_s or 0.0 for o in whole if o.is_stream]
    none = sum(o.kind != "complete" and allowed(o, story) is None for o in story.outcomes)
    last = story.samples[-1]
    share = last.extra / max(1, last.first)
    p50, p99 = (quantile(firsts, part) * 1000 for part in (0.5, 0.99))
    lines += [
        "",
        "| what | reached | limit |",
        "|---|---|---|",
        f"| requests, of which whole answers | {len(story.outcomes)}, {len(whole)} | |",
        f"| failures that no rule allows | {none} | 0 |",
        f"| extra attempts, worst {story.plan.window_s:g} s | {story.most_extra():.1%} | {MOST_EXTRA:.0%} |",
        f"| extra attempts, whole run | {last.extra:.0f} of {last.first:.0f} ({share:.1%}) | |",
        f"| out, slowest | {_slowest(p.out_s for p in story.phases)} | {story.plan.out_limit_s:g} s |",
        f"| back, slowest | {_slowest(p.back_s for p in story.phases)} | {story.plan.back_limit_s:g} s |",
        f"| TTFT of streams p50 / p99 | {p50:.0f} / {p99:.0f} ms | |",
        f"| our own timers late, at most | {story.standstill_s * 1000:.0f} ms | |",
        f"| sent late, p99 | {lateness(story.outcomes) * 1000:.1f} ms | |",
    ]
    return "\n".join(lines)


def _slowest(times: Iterable[float | None]) -> str:
    known = list(times)
    return "never" if None in known else f"{max((s for s in known if s is not None), default=0.0):.1f} s"
