"""How good the estimates of the first token are: real traces against a simulated first-come server.

    python -m benchmarks.estimates [--seed 1] [--out build/bench/estimates.md]

The server works on one prompt at a time, in the order of arrival: 35 ms + uncached tokens / rate, with 12 % log-normal
noise. The predictor is the product's; it knows token counts to ±10 % until the answer's usage tells the true one. Each
request is estimated on arrival, and asked once more for the time that remains when 1 to 2 s (drawn evenly) have
passed without its first token. The first 20 requests, before the line is fitted, are not judged (latency-methods §2.5).
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import os
import random
import statistics
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from gateway.timing.predict import FEWEST_UPDATES, Forecasts, Predictor, Waiting
from gateway.timing.prompts import Prompt

DATA = Path(os.environ.get("FIRSTTOKEN_SHARED", Path(__file__).parents[2] / "shared")) / "data"

SECOND = 1_000_000_000
OVERHEAD_S = 0.035
NOISE = 0.12
COUNT_ERROR = 0.10
BUDGETS_S = (1.0, 2.0)
SLOWDOWN = 1.5
TPOT_S = 0.02
CACHE_BLOCKS = 4000
BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    tokens: int
    answer_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """Shares of one."""

    error: float
    within: float | None
    least_coverage: float
    most_coverage: float = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """A trace, the server it meets, and what the estimates must reach."""

    name: str
    trace: str
    rate: float
    """Uncached tokens per second."""
    limits: Limits
    is_cache_told: bool = False
    is_slowed: bool = False
    """1.5 times slower from the middle of the trace on; only what comes after it is judged."""


CONV = Limits(0.20, 0.90, 0.85, 0.95)
MOONCAKE = Limits(0.25, 0.80, 0.85, 0.95)
UNKNOWN = Limits(0.30, None, 0.85, 0.95)
CODE = Limits(0.10, 0.90, 0.78)
CASES = (
    Case("Azure conv", "conv", 9_000, CONV),
    Case("Mooncake, cache known", "mooncake", 60_000, MOONCAKE, is_cache_told=True),
    Case("Mooncake, cache unknown", "mooncake", 60_000, UNKNOWN),
    Case("Azure code", "code", 12_000, CODE),
    Case("Azure conv, slower from the middle", "conv", 9_000, CONV, is_slowed=True),
    Case("Mooncake, slower from the middle", "mooncake", 60_000, MOONCAKE, is_cache_told=True, is_slowed=True),
    Case("Azure code, slower from the middle", "code", 12_000, CODE, is_slowed=True),
)


def arrivals(trace: str, data: Path = DATA) -> list[Arrival]:
    """One trace in order of arrival, in seconds from its first request. Raises FileNotFoundError."""
    if trace == "mooncake":
        lines = (data / "mooncake_conversation_10min.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        return [
            Arrival(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
            for row in rows
        ]
    with (data / f"azure_llm_2023_{trace}.csv").open(encoding="utf-8", newline="") as file:
        found = [
            (datetime.fromisoformat(row["TIMESTAMP"][:26]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for row in csv.DictReader(file)
        ]
    start = found[0][0]
    return [Arrival((at - start).total_seconds(), max(1, tokens), answer) for at, tokens, answer in found]


class Cache:
    """The server's prefix cache: blocks by last use."""

    def __init__(self) -> None:
        self.known: OrderedDict[int, None] = OrderedDict()

    def take(self, arrival: Arrival) -> int:
        """Tokens that were in the cache; all of the prompt's are afterwards."""
        hits = 0
        for block in arrival.blocks:
            if block not in self.known:
                break
            hits += 1
        for block in reversed(arrival.blocks):
            self.known[block] = None
            self.known.move_to_end(block)
        while len(self.known) > CACHE_BLOCKS:
            self.known.popitem(last=False)
        return min(hits * BLOCK_TOKENS, arrival.tokens - 1)


@dataclass(slots=True)
class Outcome:
    """What was told of one request, and what came true; seconds."""

    p50_s: float
    p90_s: float
    actual_s: float
    left_p50_s: float | None = None
    left_p90_s: float | None = None
    left_s: float = 0.0
    basis: str = ""


@dataclass(slots=True)
class Figures:
    """Shares of one."""

    requests: int
    error: float
    """Median of |p50 − actual| / actual, on arrival."""
    coverage: float
    """Outcomes not above p90, on arrival."""
    etas: int
    within: float | None
    """Remaining times that were at most twice or half of the true one."""
    left_coverage: float | None

    def misses(self, limits: Limits) -> list[str]:
        found = []
        if self.error > limits.error:
            found.append("error")
        if limits.within is not None and (self.within is None or self.within < limits.within):
            found.append("ETAs")
        for name, coverage in (("coverage", self.coverage), ("coverage of ETAs", self.left_coverage)):
            if coverage is not None and not limits.least_coverage <= coverage <= limits.most_coverage:
                found.append(name)
        return found


@dataclass(slots=True)
class Replay:
    """One trace through one server, with the predictor looking on. Events are taken in the order of their instants."""

    case: Case
    trace: list[Arrival]
    dice: random.Random
    predictor: Predictor = field(default_factory=lambda: Forecasts().for_model("m"))
    outcomes: list[Outcome] = field(default_factory=list)
    cache: Cache = field(default_factory=Cache)
    free_s: float = 0.0

    def run(self) -> None:
        events: list[tuple[float, int, int]] = [(arrival.at_s, 2, i) for i, arrival in enumerate(self.trace)]
        heapq.heapify(events)  # at one instant: first tokens, ends, arrivals, polls
        tickets: dict[int, Waiting] = {}
        cached: dict[int, int] = {}
        first: dict[int, float] = {}
        while events:
            at_s, kind, i = heapq.heappop(events)
            now = SECOND + round(at_s * SECOND)
            if kind == 0:
                self.predictor.first_token(tickets[i], now)
            elif kind == 1:
                self._end(i, tickets.pop(i), now, cached[i])
            elif kind == 2:
                tickets[i] = self.predictor.begin(self._prompt(self.trace[i]), now)
                first[i], cached[i] = self._serve(i)
                estimate = tickets[i].estimate
                self.outcomes.append(Outcome(estimate.p50_s, estimate.p90_s, first[i] - at_s, basis=estimate.basis))
                heapq.heappush(events, (first[i], 0, i))
                heapq.heappush(events, (first[i] + TPOT_S * self.trace[i].answer_tokens, 1, i))
                poll_s = at_s + self.dice.uniform(*BUDGETS_S)
                if poll_s < first[i]:
                    heapq.heappush(events, (poll_s, 3, i))
            else:
                self._poll(i, tickets[i], now, first[i] - at_s)

    def _serve(self, i: int) -> tuple[float, int]:
        """The instant of the first token, and the cached tokens."""
        arrival = self.trace[i]
        hit = self.cache.take(arrival) if arrival.blocks else 0
        seconds = OVERHEAD_S + (arrival.tokens - hit) / self.case.rate
        start_s = max(self.free_s, arrival.at_s)
        if self.case.is_slowed and start_s >= self.trace[len(self.trace) // 2].at_s:
            seconds *= SLOWDOWN
        self.free_s = start_s + seconds * self.dice.lognormvariate(0, NOISE)
        return self.free_s, hit

    def _prompt(self, arrival: Arrival) -> Prompt:
        tokens = arrival.tokens * self.dice.uniform(1 - COUNT_ERROR, 1 + COUNT_ERROR)
        return Prompt.of_tokens(tokens, arrival.blocks, BLOCK_TOKENS)

    def _poll(self, i: int, ticket: Waiting, now: int, left_s: float) -> None:
        told = self.predictor.remaining(ticket, now)
        outcome = self.outcomes[i]
        outcome.left_p50_s, outcome.left_p90_s, outcome.left_s = told.p50_s, told.p90_s, left_s
        outcome.basis = told.basis

    def _end(self, i: int, ticket: Waiting, now: int, cached: int) -> None:
        self.predictor.end(
            ticket, now, prompt_tokens=self.trace[i].tokens, cached_tokens=cached if self.case.is_cache_told else None,
            completion_tokens=self.trace[i].answer_tokens, tpot_s=TPOT_S,
        )  # fmt: skip

    def figures(self) -> Figures:
        judged = self.outcomes[len(self.trace) // 2 if self.case.is_slowed else FEWEST_UPDATES :]
        etas = [(o.left_p50_s, o.left_p90_s or 0.0, o.left_s) for o in judged if o.left_p50_s is not None]
        return Figures(
            requests=len(judged),
            error=statistics.median(abs(o.p50_s - o.actual_s) / o.actual_s for o in judged),
            coverage=statistics.fmean(o.actual_s <= o.p90_s for o in judged),
            etas=len(etas),
            within=statistics.fmean(0.5 <= p50 / left <= 2 for p50, _, left in etas) if etas else None,
            left_coverage=statistics.fmean(left <= p90 for _, p90, left in etas) if etas else None,
        )


def measured(case: Case, seed: int, trace: list[Arrival]) -> Figures:
    replay = Replay(case, trace, random.Random(seed))
    replay.run()
    return replay.figures()


def as_markdown(rows: list[tuple[Case, Figures]]) -> Iterator[str]:
    yield "| trace | requests | median error on arrival | p90 held on arrival | ETAs | within 2× | p90 held by ETAs |"
    yield "|---|---|---|---|---|---|---|"
    for case, found in rows:
        limits = case.limits
        held = f"{limits.least_coverage:.0%}–{limits.most_coverage:.0%}"
        within = "–" if limits.within is None else f"≥ {limits.within:.0%}"
        yield (
            f"| {case.name} | {found.requests:,} | {found.error:.1%} (≤ {limits.error:.0%}) "
            f"| {found.coverage:.1%} ({held}) | {found.etas:,} | {_share(found.within)} ({within}) "
            f"| {_share(found.left_coverage)} ({held}) |"
        )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the table there")
    args = parser.parse_args()
    try:
        traces = {name: arrivals(name) for name in ("conv", "code", "mooncake")}
    except FileNotFoundError as error:
        raise SystemExit(f"{error}\nhint: FIRSTTOKEN_SHARED names the folder that holds data/") from None
    rows = [(case, measured(case, args.seed, traces[case.trace])) for case in CASES]
    table = "\n".join(as_markdown(rows))
    print(table)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(table + "\n", encoding="utf-8")
    missed = [f"{case.name}: {name}" for case, found in rows for name in found.misses(case.limits)]
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
