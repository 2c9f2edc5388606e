"""The engine's clock: who waits, who is in prefill, who decodes, and when each token is there.

A request waits (`queue`) until it is the first in line, a slot is free and nobody else is in prefill; its prefill
then costs a constant, the tokens that the prefix cache does not hold, and at times a compilation. After that its
tokens come at the profile's rate until its plan is at its end. All time is the event loop's, so that it runs
under virtual time as well.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import TracebackType

from gateway.sim.cache import PrefixCache
from gateway.sim.plan import Plan, Token
from gateway.sim.profiles import Profile
from gateway.sim.stats import Finished, Gauges, Stats

YIELD_EVERY = 16  # steps without any wait after which other tasks get their turn


class QueueFull(Exception):
    """The server takes no more requests: `max_queued` are unfinished."""


@dataclass(slots=True)
class Job:
    """A request as the engine sees it."""

    prompt: list[str]  # tokens of the rendered prompt
    plans: tuple[Plan, ...]  # one per choice
    max_tokens: int
    salt: str = ""


def prefill_s(profile: Profile, uncached_tokens: int) -> float:
    """Seconds of the GPU's prefill for so many tokens; the time that requests cannot share."""
    return 0.0 if math.isinf(profile.prefill_tokens_per_s) else uncached_tokens / profile.prefill_tokens_per_s


def step_s(profile: Profile) -> float:
    """Seconds from one token of a stream to the next."""
    return 0.0 if math.isinf(profile.decode_tokens_per_s) else 1.0 / profile.decode_tokens_per_s


class Engine:
    """One model on one machine. Create it inside a running event loop."""

    def __init__(self, profile: Profile, seed: int = 0) -> None:
        self.profile = profile
        self.seed = seed
        self.loop = asyncio.get_running_loop()
        # uvloop's own time counts whole milliseconds. Virtual time exists only for asyncio's loops.
        self.now = self.loop.time if isinstance(self.loop, asyncio.BaseEventLoop) else time.monotonic
        self.rng = random.Random(seed)
        self.waiting: deque[Run] = deque()
        self.running: set[Run] = set()
        self._in_prefill: Run | None = None
        self.restart()

    def __repr__(self) -> str:
        return f"<Engine {self.profile.name}: {len(self.running)} running, {len(self.waiting)} waiting>"

    def restart(self) -> None:
        """A fresh process: counters at zero, nothing cached, nothing compiled."""
        profile = self.profile
        self.stats = Stats(profile.max_model_len)
        self.cache = PrefixCache(profile.cache_blocks if profile.prefix_cache else 0, profile.block_tokens)
        self._compiled: set[int] = set()

    def submit(self, job: Job) -> Run:
        """Puts a request in line. Use the run as a context manager: leaving it early aborts the request."""
        limit = self.profile.max_queued
        if limit is not None and len(self.running) + len(self.waiting) >= limit:
            self.stats.rejected["max_num_queued_reqs"] += 1
            raise QueueFull
        run = Run(self, job, self.now())
        self.waiting.append(run)
        self.advance()
        return run

    def advance(self) -> None:
        """Takes from the line whoever may start now."""
        while self.waiting and self._in_prefill is None and len(self.running) < self.profile.slots:
            run = self.waiting.popleft()
            self.running.add(run)
            if run.schedule(self.now()) > 0:
                self._in_prefill = run

    def prefilled(self, run: Run) -> None:
        """The run no longer needs the machine for itself."""
        if self._in_prefill is run:
            self._in_prefill = None
            self.advance()

    def ended(self, run: Run) -> None:
        """The run is over, at whatever point it was."""
        if run in self.running:
            self.running.discard(run)
        else:
            self.waiting.remove(run)
        self.prefilled(run)
        self.advance()

    def jittered(self, seconds: float) -> float:
        """`seconds` with the profile's seeded noise."""
        jitter = self.profile.jitter
        return seconds * (1 + self.rng.uniform(-jitter, jitter)) if jitter and seconds else seconds

    def compile_s(self, uncached_tokens: int) -> float:
        """What the just-in-time compiler takes for a prompt of this size, once."""
        first = not self._compiled
        shape = uncached_tokens.bit_length()
        new = shape not in self._compiled
        self._compiled.add(shape)
        return self.profile.jit_first_call_s * first + self.profile.jit_new_shape_s * new

    def gauges(self) -> Gauges:
        """The state that /metrics shows as gauges."""
        profile = self.profile
        blocks = sum(math.ceil(run.held_tokens / profile.block_tokens) for run in self.running)
        usage = min(1.0, blocks / profile.cache_blocks) if profile.cache_blocks else 0.0
        waiting = len(self.waiting)
        return Gauges(
            len(self.running), waiting, usage, profile.block_tokens, profile.cache_blocks, profile.prefix_cache
        )


@dataclass(slots=True, eq=False)
class Run:
    """One request in the engine. Times are the loop's, None until they have come."""

    engine: Engine
    job: Job
    arrived_at: float
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    cached_tokens: int = 0
    generated: int = 0
    _chain: list[int] = field(default_factory=list)
    _lane_s: float = 0.0
    _first_due: float | None = None
    _timer: asyncio.TimerHandle | None = None
    _started: asyncio.Future[None] | None = None
    _over: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.job.prompt)

    @property
    def held_tokens(self) -> int:
        return self.prompt_tokens + self.generated

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end("abort")

    def schedule(self, now: float) -> float:
        """Leaves the queue. Returns the seconds for which the machine is taken."""
        engine, profile = self.engine, self.engine.profile
        self.scheduled_at = now
        self._chain = engine.cache.chain(self.job.prompt, self.job.salt)
        self.cached_tokens = engine.cache.cached_tokens(self._chain, self.prompt_tokens)
        uncached = self.prompt_tokens - self.cached_tokens
        engine.stats.scheduled(self.prompt_tokens, self.cached_tokens)
        self._lane_s = engine.jittered(prefill_s(profile, uncached)) + engine.compile_s(uncached)
        if self._lane_s > 0:
            self._timer = engine.loop.call_later(self._lane_s, self._computed)
        else:
            engine.cache.remember(self._chain)
        if self._started is not None and not self._started.done():
            self._started.set_result(None)
        return self._lane_s

    def _computed(self) -> None:
        self.engine.cache.remember(self._chain)
        self.engine.prefilled(self)

    async def first_token(self) -> None:
        """Returns when queue and prefill are over. May be cancelled and called again."""
        if self.first_token_at is not None:
            return
        if self.scheduled_at is None:
            self._started = self.engine.loop.create_future()
            await self._started
        if self._first_due is None:
            assert self.scheduled_at is not None
            self._first_due = self.scheduled_at + self._lane_s + self.engine.jittered(self.engine.profile.overhead_s)
        await asyncio.sleep(max(0.0, self._first_due - self.engine.now()))
        now = self.engine.now()
        self.first_token_at = self.last_token_at = now
        self.engine.stats.first_token(now - self.arrived_at)

    async def tokens(self) -> AsyncGenerator[Token, None]:
        """All tokens of all choices, each when it is due. Ends the run at the last one."""
        await self.first_token()
        clock, stats, step = self.engine.now, self.engine.stats, step_s(self.engine.profile)
        assert self.first_token_at is not None
        due = previous = self.first_token_at
        last = max(len(plan.tokens) for plan in self.job.plans) - 1
        for number in range(last + 1):
            if number:
                due += self.engine.jittered(step)
                if (wait := due - clock()) > 0:
                    await asyncio.sleep(wait)
                elif number % YIELD_EVERY == 0:
                    await asyncio.sleep(0)
            said = [plan.tokens[number] for plan in self.job.plans if number < len(plan.tokens)]
            self.generated += len(said)
            self.last_token_at = now = clock()
            stats.stepped(now - previous if number else None, len(said))
            previous = now
            if number == last:
                self.end(said[0].finish or "stop")
            for token in said:
                yield token

    def end(self, reason: str) -> None:
        """Gives slot and machine back; safe to call twice, the first reason counts."""
        if self._over:
            return
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self.engine.ended(self)
        now = self.engine.now()
        self.engine.stats.ended(
            Finished(
                reason="stop" if reason == "tool_calls" else reason,
                prompt_tokens=self.prompt_tokens,
                cached_tokens=self.cached_tokens,
                generated=self.generated,
                max_tokens=self.job.max_tokens,
                choices=len(self.job.plans),
                e2e_s=now - self.arrived_at,
                queue_s=self.queue_s,
                prefill_s=self.prefill_s,
                decode_s=self.decode_s,
            )
        )

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled_at is None else self.scheduled_at - self.arrived_at

    @property
    def prefill_s(self) -> float | None:
        if self.scheduled_at is None or self.first_token_at is None:
            return None
        return self.first_token_at - self.scheduled_at

    @property
    def decode_s(self) -> float | None:
        if self.first_token_at is None or self.last_token_at is None:
            return None
        return self.last_token_at - self.first_token_at
