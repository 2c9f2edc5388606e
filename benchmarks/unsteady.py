"""One of two model servers turns bad, in six ways: `python -m benchmarks.unsteady`, at most four minutes.

10,000 requests, streams and plain calls mixed, at a steady rate through one gateway. One server answers 500, cuts in
mid-stream, resets connections, never answers, stalls in mid-stream, or gives its first token late: one after the other,
and it recovers in between. What every caller saw is counted by kind, and each failure must be one that a rule of
fault-catalogue 3 and 5 allows:

- behind text that went out nothing can be repeated (R4): an error event in the stream is right (C1, C3, C5, C7),
- before it, the other server must have answered, unless the retry budget was used up (3.5) or the request was not
  failed but only slow (R5; A6 and B22: an error at the hard limit of the first token),
- an answer without an error that is not whole is never right.

Exit code 1 when a limit is missed, 2 when the machine stood still for so long that nothing was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.open_loop import Connections, Outcome, arrivals, ask, body_of, lateness, quantile, send
from benchmarks.processes import BUILD, free_port, listener_count, raise_file_limit, started, wait_until
from gateway.sim.endpoints import Request
from gateway.sim.http import SimProtocol
from gateway.sim.profiles import Profile
from gateway.sim.steps import Steps
from gateway.sim.transport import Server

MODEL: Final = Profile(
    name="unsteady", models=("m",), slots=1000, overhead_s=0.04, decode_tokens_per_s=200, answer_tokens=(10, 30),
    jitter=0.2,
)  # fmt: skip
PROBE: Final = b"firsttoken-probe"
EXTRA: Final = ("retry", "hedge", "fallback")
IN_BAND_FAULTS: Final = frozenset(("cuts", "stalls", "resets"))
SLOW_FAULTS: Final = frozenset(("silence", "late first tokens", "stalls"))  # R5: nothing failed until a limit passed
TICK_S: Final = 0.25
STANDSTILL_S: Final = 1.0  # of this process, which is also both model servers

MOST_EXTRA: Final = 0.10
OUT_SHARE: Final = 0.10  # of the traffic: below it, a server is out
BACK_SHARE: Final = 0.20  # from it on, it is back


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


FULL: Final = Plan(
    faults=(
        Fault("errors 500", "status=500"),
        Fault("cuts", "cut=4"),
        Fault("resets", "reset_before"),
        Fault("silence", "stall_headers"),
        Fault("stalls", "stall=4"),
        Fault("late first tokens", "stall_first=12"),
    ),
    rate=55, requests=10_000, steady_s=5, bad_s=(12, 30), after_out_s=3, back_s=60, after_back_s=6,
)  # fmt: skip
# Slow first tokens and stalls must end within a run of four minutes; breakers, waits and ejections are the defaults.
# `stream_upstream`: else nothing tells a plain call that waits for its first token from one whose answer is long.
ROUTE: Final = {
    "stream_upstream": True,
    "budget": {"ttft_ms": 1000, "on_exceed": "hedge"},
    "timeouts": {"first_token_ms": 20_000, "idle_ms": 5_000, "total_ms": 30_000},  # the last for plain calls
}


class Counted(Server):
    """A simulated server that counts what callers, not probes, ask of it."""

    asked: list[float]

    def answer(self, request: Request, connection: SimProtocol) -> Steps:
        if request.method == "POST" and request.header(b"user-agent") != PROBE.decode():
            self.asked.append(time.monotonic())
        return super().answer(request, connection)


async def counted(seed: int) -> Counted:
    """One that listens on a free port."""
    server = Counted(MODEL, seed=seed)
    server.asked = []
    await server.listen("127.0.0.1", 0)
    return server


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

    def windows(self) -> Iterator[tuple[float, float, float]]:
        """(end, first attempts, extra attempts) of each window."""
        start = 0
        for sample in self.samples:
            while (
                sample.at - self.samples[start + 1].at >= self.plan.window_s if start + 1 < len(self.samples) else False
            ):
                start += 1
            before = self.samples[start]
            if sample.at - before.at >= self.plan.window_s * 0.9:
                yield sample.at, sample.first - before.first, sample.extra - before.extra

    def most_extra(self) -> float:
        """The largest share of extra attempts in any window."""
        return max((extra / first for _, first, extra in self.windows() if first), default=0.0)

    def is_budget_spent(self, began: float, ended: float) -> bool:
        """Whether in the time of a request a further extra attempt would have gone beyond the ceiling, but for one."""
        return any(
            extra + 2 > MOST_EXTRA * first for at, first, extra in self.windows() if began - 1 <= at <= ended + 1
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


# Driving it


class Drive:
    """One run. `port`: the gateway's; `bad` and `good`: its two servers."""

    def __init__(self, plan: Plan, port: int, bad: Counted, good: Counted) -> None:
        self.plan, self._port, self._bad, self._good = plan, port, bad, good
        self.story = Story(plan)
        self._began = time.monotonic()
        self._is_over = False

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    async def run(self) -> Story:
        """All requests and all faults."""
        self._began = time.monotonic()
        connections = Connections(self._port)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            ticking = group.create_task(self._tick())
            playing = group.create_task(self._play())
            await send(arrivals(self.plan.rate, 1), self._has_ended, lambda at, due: self._one(connections, at, due))
            playing.cancel()
            await asyncio.sleep(2 * TICK_S)
            watching.cancel()
            ticking.cancel()
        connections.close()
        return self.story

    def _has_ended(self, at: float) -> bool:
        is_enough = self._is_over and len(self.story.outcomes) >= self.plan.requests
        return is_enough or at > self.plan.last_s

    async def _one(self, connections: Connections, at: float, due: float) -> None:
        number = len(self.story.outcomes)
        outcome = Outcome(at, is_stream=number % 2 == 0)
        self.story.outcomes.append(outcome)
        body = body_of(f"question {number}", stream=outcome.is_stream)
        await ask(connections, outcome, body, due, self.plan.patience_s)

    async def _play(self) -> None:
        await asyncio.sleep(self.plan.steady_s)
        for fault in self.plan.faults:
            phase = Phase(fault, self._now)
            self.story.phases.append(phase)
            self._bad.default_fault = fault.script
            await self._until_out(phase)
            self._bad.default_fault = None
            phase.recovered = self._now
            phase.asked_while_bad = self._asked(self._bad, phase.began, phase.recovered)
            await self._until_back(phase)
        self._is_over = True

    async def _until_out(self, phase: Phase) -> None:
        least, most = self.plan.bad_s
        while (now := self._now) < phase.began + most:
            if phase.out is None and now - phase.began >= self.plan.share_s and self._share() < OUT_SHARE:
                phase.out = now - self.plan.share_s  # little came in all of that time
            if phase.out is not None and now >= max(phase.began + least, phase.out + self.plan.after_out_s):
                return
            await asyncio.sleep(TICK_S)

    async def _until_back(self, phase: Phase) -> None:
        while (now := self._now) < phase.recovered + self.plan.back_s:
            if phase.back is None and now - phase.recovered >= self.plan.share_s and self._share() >= BACK_SHARE:
                phase.back = now
            if phase.back is not None and now >= phase.back + self.plan.after_back_s:
                return
            await asyncio.sleep(TICK_S)

    def _share(self) -> float:
        """The bad server's part of what was asked of late."""
        now = self._now
        bad, good = (self._asked(server, now - self.plan.share_s, now) for server in (self._bad, self._good))
        return bad / (bad + good) if bad + good else 0.0

    def _asked(self, server: Counted, start: float, end: float) -> int:
        return sum(start < when - self._began <= end for when in reversed(server.asked))

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            late = time.monotonic() - before - TICK_S
            self.story.standstill_s = max(self.story.standstill_s, late)

    async def _watch(self) -> None:
        connections = Connections(self._port)
        while True:
            client = await connections.take()
            client.ask("/metrics")
            response = await client.response()
            connections.give_back(client, response)
            kinds = attempts_of(response.body)
            self.story.samples.append(Sample(self._now, kinds["first"], sum(kinds[kind] for kind in EXTRA)))
            await asyncio.sleep(TICK_S)


def attempts_of(page: bytes) -> Counter[str]:
    """`gateway_attempts_total` by kind."""
    found: Counter[str] = Counter()
    for line in page.decode().splitlines():
        if line.startswith("gateway_attempts_total{"):
            kind = line.partition('kind="')[2].partition('"')[0]
            found[kind] += round(float(line.rpartition(" ")[2]))
    return found


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


def _slowest(times: Iterator[float | None] | Sequence[float | None]) -> str:
    known = list(times)
    return "never" if None in known else f"{max((s for s in known if s is not None), default=0.0):.1f} s"


@contextmanager
def gateway_before(urls: dict[str, str]) -> Iterator[int]:
    """The gateway as a process of its own; gives its port."""
    port, log = free_port(), BUILD / "logs" / "unsteady.log"
    config = BUILD / "targets" / "unsteady" / "gateway.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    upstreams = {name: {"url": url} for name, url in urls.items()}
    route = {"name": "main", "upstreams": list(urls), **ROUTE}
    config.write_text(json.dumps({"upstreams": upstreams, "routes": [route]}))  # JSON is YAML
    command = [sys.executable, "-m", "gateway", "serve", str(config), "--port", str(port)]
    with started(command, log) as process:
        wait_until(lambda: listener_count(port) > 0, process, 20, log)
        yield port


async def measure(plan: Plan) -> Story:
    bad, good = await counted(1), await counted(2)
    try:
        with gateway_before({"bad": bad.url, "good": good.url}) as port:
            return await Drive(plan, port, bad, good).run()
    finally:
        await bad.close()
        await good.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unsteady", description=__doc__)
    parser.add_argument("--out", type=Path, default=BUILD / "unsteady.md")
    args = parser.parse_args()
    raise_file_limit()
    story = asyncio.run(measure(FULL))
    text = "\n".join([table(story), *(f"\n- {problem}" for problem in problems(story))])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text + "\n")
    print(text)
    if story.standstill_s > STANDSTILL_S:
        print(f"\nThis process stood still for {story.standstill_s:.1f} s: the figures say nothing of the gateway.")
        return 2
    return 1 if problems(story) else 0


if __name__ == "__main__":
    sys.exit(main())
