"""What overload does: `python -m benchmarks.overload`, about a minute and a half.

A simulated model server with 16 slots that each serve a request in 0.4 s, hence 40 requests a second and not one more,
first come first served. Poisson arrivals at 0.8, 1, 2 and 10 times that, through the gateway, which holds 16 requests
there and a short queue; and at 2 times past it, to show what is avoided. Exit code 1 when a limit is missed, 2 when the
load generator could not keep up, so that nothing was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.open_loop import (
    LATE_LIMIT_S,
    Connections,
    Outcome,
    arrivals,
    ask,
    body_of,
    lateness,
    quantile,
    send,
)
from benchmarks.processes import BUILD, cpu_us, free_port, listener_count, raise_file_limit, started, wait_until
from gateway.sim.profiles import Profile

SLOTS: Final = 16
TTFT_S: Final = 0.15
ANSWER_TOKENS: Final = 25  # 10 ms each
SERVER: Final = Profile(
    name="overload", models=("m",), slots=SLOTS, overhead_s=TTFT_S, decode_tokens_per_s=100,
    answer_tokens=(ANSWER_TOKENS, ANSWER_TOKENS), jitter=0.1,
)  # fmt: skip
SERVICE_S: Final = TTFT_S + ANSWER_TOKENS / 100  # the end of the sequence is a step of its own
CAPACITY: Final = SLOTS / SERVICE_S  # requests per second
QUEUE: Final = 4
QUEUE_WAIT_MS: Final = 30  # what a refused caller waits at most, and what a queue may add to a TTFT
OBJECTIVE_S: Final = 2 * TTFT_S
LEVELS: Final = (0.8, 1.0, 2.0, 10.0)
OVERLOADED: Final = (2.0, 10.0)
CALLER_PATIENCE_S: Final = 10.0
DIRECT_S: Final = 8.0  # of load without the gateway: the wait grows by half a second each second

LEAST_GOODPUT: Final = 0.9  # of the highest of the run
MOST_REFUSAL_S: Final = 0.05  # p99
MOST_TTFT: Final = 1.5  # × the higher of 0.8× and 1×


@dataclass(frozen=True, slots=True)
class Level:
    """One load and what came of it. Seconds; rates per second."""

    factor: float
    is_direct: bool
    wanted: float
    offered: float
    goodput: float
    answered: float
    refused: float
    refusal_p99_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    failed: int  # neither answered nor refused
    late_p99_s: float
    gateway_busy: float  # of one core

    @property
    def is_measured(self) -> bool:
        """The generator kept up."""
        return self.late_p99_s <= LATE_LIMIT_S


@dataclass(frozen=True, slots=True)
class Check:
    """A figure beside its limit; `is_measured` False: the generator could not keep up."""

    what: str
    value: float
    limit: float
    unit: str
    holds: bool
    is_measured: bool

    @property
    def verdict(self) -> str:
        return "not measured" if not self.is_measured else "yes" if self.holds else "**no**"


def summed(outcomes: Sequence[Outcome], factor: float, seconds: float, busy: float, *, is_direct: bool) -> Level:
    """Goodput counts requests by their arrival, so that a backlog served later is not credited to this second."""
    done = [outcome for outcome in outcomes if outcome.kind == "complete" and outcome.first_s is not None]
    firsts = [outcome.first_s or 0.0 for outcome in done]
    refusals = [outcome.end_s for outcome in outcomes if outcome.kind == "refused"]
    return Level(
        factor=factor, is_direct=is_direct, wanted=factor * CAPACITY, offered=len(outcomes) / seconds,
        goodput=sum(first <= OBJECTIVE_S for first in firsts) / seconds, answered=len(done) / seconds,
        refused=len(refusals) / seconds, refusal_p99_s=quantile(refusals, 0.99),
        ttft_p50_s=quantile(firsts, 0.5), ttft_p99_s=quantile(firsts, 0.99),
        failed=len(outcomes) - len(done) - len(refusals), late_p99_s=lateness(outcomes), gateway_busy=busy,
    )  # fmt: skip


def checks(levels: Sequence[Level]) -> list[Check]:
    """The limits of overload, each as a ratio within the run."""
    through = {level.factor: level for level in levels if not level.is_direct}
    peak = max(level.goodput for level in through.values())
    calm = [through[0.8], through[1.0]]
    p50, p99 = max(level.ttft_p50_s for level in calm), max(level.ttft_p99_s for level in calm)
    found = []
    for level in (through[factor] for factor in OVERLOADED):
        share = level.goodput / peak if peak else 0.0
        rows: list[tuple[str, float, float, str, bool]] = [
            ("goodput over its peak", share, LEAST_GOODPUT, "", share >= LEAST_GOODPUT),
            ("refusals, p99", level.refusal_p99_s * 1000, MOST_REFUSAL_S * 1000, "ms", level.refused > 0),
            ("TTFT p50 over that at 0.8–1×", level.ttft_p50_s / p50 if p50 else math.inf, MOST_TTFT, "", True),
            ("TTFT p99 over that at 0.8–1×", level.ttft_p99_s / p99 if p99 else math.inf, MOST_TTFT, "", True),
            ("neither answered nor refused", level.failed, 0, "", True),
        ]
        for what, value, limit, unit, holds in rows:
            is_least = what.startswith("goodput")
            found.append(
                Check(f"{level.factor:g}×: {what}", value, limit, unit, holds and (is_least or value <= limit),
                      level.is_measured and all(one.is_measured for one in calm))
            )  # fmt: skip
    return found


def table(levels: Sequence[Level], found: Sequence[Check]) -> str:
    """Both tables in Markdown."""
    lines = [
        f"{SLOTS} slots × {SERVICE_S:g} s = {CAPACITY:.0f} requests/s; TTFT of an idle server {TTFT_S * 1000:.0f} ms, "
        f"objective {OBJECTIVE_S * 1000:.0f} ms; `max_inflight: {SLOTS}`, `max_queue: {QUEUE}`, "
        f"`max_queue_wait_ms: {QUEUE_WAIT_MS}`.",
        "",
        "| load | offered/s | goodput/s | answered/s | refused/s | refusal p99 ms | TTFT p50 / p99 ms | failed "
        "| sent late p99 ms | gateway, of a core |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for level in levels:
        name = f"{level.factor:g}×{', without gateway' if level.is_direct else ''}"
        refusal = f"{level.refusal_p99_s * 1000:.1f}" if level.refused else "–"
        busy = "–" if level.is_direct else f"{level.gateway_busy:.0%}"
        lines.append(
            f"| {name} | {level.offered:.1f} | {level.goodput:.1f} | {level.answered:.1f} | {level.refused:.1f} "
            f"| {refusal} | {level.ttft_p50_s * 1000:.0f} / {level.ttft_p99_s * 1000:.0f} | {level.failed} "
            f"| {level.late_p99_s * 1000:.1f} | {busy} |"
        )
    lines += ["", "| limit | reached | limit | holds |", "|---|---|---|---|"]
    for check in found:
        places = 1 if check.unit else 0 if check.limit == 0 else 2
        unit = f" {check.unit}" if check.unit else ""
        bound = "≥" if "goodput" in check.what else "≤"
        lines.append(
            f"| {check.what} | {check.value:.{places}f}{unit} | {bound} {check.limit:g}{unit} | {check.verdict} |"
        )
    return "\n".join(lines)


def machine_limits(levels: Sequence[Level]) -> list[str]:
    """What this machine could not do, in words."""
    return [
        f"At {level.factor:g}× the load generator itself could not keep up: of {level.wanted:.0f} requests/s one in a "
        f"hundred was sent {level.late_p99_s * 1000:.0f} ms late or more (limit {LATE_LIMIT_S * 1000:.0f} ms). That is "
        "this machine's limit; the figures of this load say nothing of the gateway."
        for level in levels
        if not level.is_measured and not level.is_direct
    ]


# Running it


@contextmanager
def around() -> Iterator[tuple[int, int, int]]:
    """The simulated server and the gateway before it: (its port, the gateway's port and process id)."""
    sim_port, port = free_port(), free_port()
    fields = ("slots", "overhead_s", "decode_tokens_per_s", "jitter")
    command = [sys.executable, "-m", "gateway", "sim", "--profile", "fast", "--model", "m", "--port", str(sim_port)]
    for name in fields:
        command += ["--set", f"{name}={getattr(SERVER, name)}"]
    command += ["--set", f"answer_tokens={ANSWER_TOKENS},{ANSWER_TOKENS}"]
    config = BUILD / "targets" / "overload" / f"{port}.yaml"  # one per run: a gateway reloads what another run writes
    config.parent.mkdir(parents=True, exist_ok=True)
    upstream = {
        "url": f"http://127.0.0.1:{sim_port}",
        "max_inflight": SLOTS,
        "max_queue": QUEUE,
        "max_queue_wait_ms": QUEUE_WAIT_MS,
    }
    config.write_text(json.dumps({"upstreams": {"model": upstream}}))  # JSON is YAML
    sim_log, log = BUILD / "logs" / "overload-sim.log", BUILD / "logs" / "overload.log"
    serve = [sys.executable, "-m", "gateway", "serve", str(config), "--port", str(port)]
    with started(command, sim_log) as sim, started(serve, log) as process:
        wait_until(lambda: listener_count(sim_port) > 0, sim, 20, sim_log)
        wait_until(lambda: listener_count(port) > 0, process, 20, log)
        yield sim_port, port, process.pid
    config.unlink()


async def load(port: int, factor: float, seconds: float, seed: int) -> list[Outcome]:
    """Everything that was asked at one load, when all of it is over."""
    connections, body, outcomes = Connections(port), body_of("hello", stream=True), list[Outcome]()

    async def begin(at: float, due: float) -> None:
        outcome = Outcome(at, is_stream=True)
        outcomes.append(outcome)
        await ask(connections, outcome, body, due, CALLER_PATIENCE_S)

    await send(arrivals(factor * CAPACITY, seed), lambda at: at >= seconds, begin)
    connections.close()
    return outcomes


def one_level(port: int, pid: int | None, factor: float, seconds: float, seed: int) -> Level:
    before = cpu_us(pid) if pid is not None else 0.0
    # asyncio's own loop: uvloop's clock, by which bytes are stamped, counts whole milliseconds.
    outcomes = asyncio.run(load(port, factor, seconds, seed))
    busy = (cpu_us(pid) - before) / 1e6 / seconds if pid is not None else 0.0
    return summed(outcomes, factor, seconds, busy, is_direct=pid is None)


def measure_all(seconds: float, seed: int) -> list[Level]:
    with around() as (sim_port, port, pid):
        one_level(port, pid, 0.5, 2, seed)  # connections, caches and the interpreter's first time
        levels = [one_level(port, pid, factor, seconds, seed) for factor in LEVELS]
        return [*levels, one_level(sim_port, None, 2.0, min(seconds, DIRECT_S), seed)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=14, help="of load at each level (default: 14)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=BUILD / "overload")
    args = parser.parse_args()
    raise_file_limit()
    levels = measure_all(args.seconds, args.seed)
    found = checks(levels)
    text = "\n".join([table(levels, found), *(f"\n{line}" for line in machine_limits(levels))])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".md").write_text(text + "\n")
    args.out.with_suffix(".json").write_text(json.dumps([asdict(level) for level in levels], indent=1))
    print(text)
    if any(check.is_measured and not check.holds for check in found):
        return 1
    return 0 if all(check.is_measured for check in found) else 2


if __name__ == "__main__":
    sys.exit(main())
