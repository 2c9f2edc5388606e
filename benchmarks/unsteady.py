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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.open_loop import Connections, Outcome, arrivals, ask, body_of, send
from benchmarks.processes import BUILD, free_port, listener_count, raise_file_limit, started, wait_until
from benchmarks.unsteady_story import SAMPLE_S, Fault, Phase, Plan, Sample, Story, problems, table
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
STANDSTILL_S: Final = 1.0  # of this process, which is also both model servers

OUT_SHARE: Final = 0.10  # of the traffic: below it, a server is out
BACK_SHARE: Final = 0.20  # from it on, it is back

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
            await asyncio.sleep(2 * SAMPLE_S)
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
            await asyncio.sleep(SAMPLE_S)

    async def _until_back(self, phase: Phase) -> None:
        while (now := self._now) < phase.recovered + self.plan.back_s:
            if phase.back is None and now - phase.recovered >= self.plan.share_s and self._share() >= BACK_SHARE:
                phase.back = now
            if phase.back is not None and now >= phase.back + self.plan.after_back_s:
                return
            await asyncio.sleep(SAMPLE_S)

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
            await asyncio.sleep(SAMPLE_S)
            late = time.monotonic() - before - SAMPLE_S
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
            await asyncio.sleep(SAMPLE_S)


def attempts_of(page: bytes) -> Counter[str]:
    """`gateway_attempts_total` by kind."""
    found: Counter[str] = Counter()
    for line in page.decode().splitlines():
        if line.startswith("gateway_attempts_total{"):
            kind = line.partition('kind="')[2].partition('"')[0]
            found[kind] += round(float(line.rpartition(" ")[2]))
    return found


@contextmanager
def gateway_before(urls: dict[str, str]) -> Iterator[int]:
    """The gateway as a process of its own; gives its port."""
    port, log = free_port(), BUILD / "logs" / "unsteady.log"
    config = BUILD / "targets" / "unsteady" / f"{port}.yaml"  # one per run: a gateway reloads what another run writes
    config.parent.mkdir(parents=True, exist_ok=True)
    upstreams = {name: {"url": url} for name, url in urls.items()}
    route = {"name": "main", "upstreams": list(urls), **ROUTE}
    config.write_text(json.dumps({"upstreams": upstreams, "routes": [route]}))  # JSON is YAML
    command = [sys.executable, "-m", "gateway", "serve", str(config), "--port", str(port)]
    with started(command, log) as process:
        wait_until(lambda: listener_count(port) > 0, process, 20, log)
        yield port
    config.unlink()


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
