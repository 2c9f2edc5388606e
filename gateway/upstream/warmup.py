"""Warms model servers up before they take live traffic: sends what `policy/warming.py` plans, and measures.

A server that restarted says 200 on `/health` and then needs 14 to 60 s for its first token, and again for every new
shape (cases C149). While that lasts, the upstream stays out wherever another one serves. A warm-up that fails or hangs
is tried again, later each time, and blocks nothing (fault-catalogue D7). Its client is like the probes', not the data
path's.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import httpx2

from gateway.policy.warming import (
    Shape,
    WarmupReport,
    body_of,
    is_over,
    is_steady,
    plan,
    prompt_of,
    retry_wait_s,
)
from gateway.wire.openai import ChatReader

if TYPE_CHECKING:
    from gateway.upstream.state import UpstreamState

log = logging.getLogger("gateway.upstream")

KNOWS_IGNORE_EOS = frozenset(("vllm", "sglang", "llamacpp"))
PASSING_4XX = frozenset((408, 409, 425, 429))
SHAPE_REFUSALS = frozenset((400, 413, 422))  # the server takes others, maybe
MAX_ANSWER_BYTES = 4 * 1024 * 1024  # 32 tokens take some kilobytes


class Unanswered(Exception):
    """No token came. `status` is that of a refusal, 0 where there was none."""

    def __init__(self, problem: str, status: int = 0) -> None:
        super().__init__(problem)
        self.problem = problem
        self.status = status

    @property
    def is_final(self) -> bool:
        """Trying again in a moment will not help: a name, a key or a path is wrong."""
        return 400 <= self.status < 500 and self.status not in PASSING_4XX


async def first_token_ns(client: httpx2.AsyncClient, body: dict[str, object], clock: Callable[[], int]) -> int:
    """Time from sending a chat request to its first token of any channel; reads the stream to its end.

    Where a parser keeps the only token to itself, it is the time of the finish reason. Raises Unanswered. Set the
    limit around it.
    """
    began, reader = clock(), ChatReader()
    came = size = 0
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body, timeout=None) as response:
            if response.status_code != 200:
                raise Unanswered(f"the server answered {response.status_code}", response.status_code)
            async for piece in response.aiter_bytes():
                reader.feed(piece, clock())
                if not came and (reader.t_token or reader.finish_reasons):
                    came = clock()
                size += len(piece)
                if size > MAX_ANSWER_BYTES:
                    break
    except (httpx2.HTTPError, OSError) as error:
        raise Unanswered(f"{type(error).__name__} while the answer was awaited") from error
    if reader.error is not None:
        raise Unanswered("the server answered with an error inside the stream", reader.error.status)
    if not came:
        raise Unanswered("an answer came without any token")
    return (reader.t_token or came) - began


def model_of(state: UpstreamState) -> str | None:
    """The model to ask for: the configured one, else the first of the server's own list."""
    listed = state.models[0].get("id") if state.models else None
    return state.config.warmup.model or (listed if isinstance(listed, str) else None)


def max_model_len_of(state: UpstreamState) -> int | None:
    """What the server's list says of that model's context, in tokens."""
    name = model_of(state)
    found = next((entry.get("max_model_len") for entry in state.models if entry.get("id") == name), None)
    return found if isinstance(found, int) and found > 0 else None


@dataclass(slots=True)
class _Run:
    """One pass over the plan. `report` grows as it goes."""

    state: UpstreamState
    client: httpx2.AsyncClient
    salt: float
    report: WarmupReport = field(default_factory=WarmupReport)

    async def all_shapes(self) -> None:
        """Raises Unanswered for what is wrong with the server, not for shapes that it refuses."""
        shapes = plan(self.state.config.warmup, max_model_len_of(self.state))
        refusal: Unanswered | None = None
        for shape in shapes:
            try:
                await self._shape(shape)
            except Unanswered as unanswered:
                if unanswered.status not in SHAPE_REFUSALS:
                    raise
                refusal = unanswered
                self.report = replace(self.report, refused=(*self.report.refused, str(shape)))
        if refusal is not None and not self.report.shapes:
            raise refusal
        first = next(shape for shape in shapes if str(shape) not in self.report.refused)
        last_s = await self._one(first)
        self.report = replace(self.report, last_s=last_s)

    async def _shape(self, shape: Shape) -> None:
        costs_s: list[float] = []
        while not is_over(costs_s):
            costs_s.append(await self._round(shape))
        unsteady = self.report.unsteady if is_steady(costs_s) else (*self.report.unsteady, str(shape))
        self.report = replace(self.report, shapes=self.report.shapes + 1, unsteady=unsteady)

    async def _round(self, shape: Shape) -> float:
        """As many requests at a time as the shape has streams; the cost is that of the slowest. Raises Unanswered."""
        if shape.streams == 1:
            return await self._one(shape)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(shape), name="warm-up") for _ in range(shape.streams)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return max(task.result() for task in tasks)

    async def _one(self, shape: Shape) -> float:
        config, report = self.state.config, self.report
        model = model_of(self.state)
        if model is None:
            raise Unanswered("the server lists no model; name one with `warmup.model`")
        self.report = replace(report, requests=report.requests + 1)
        body = body_of(
            config.warmup,
            model=model,
            prompt=prompt_of(shape, self.report.requests, self.salt),
            max_tokens=shape.decode_tokens,
            max_tokens_field=config.max_tokens_field,
            can_ignore_end=self.state.engine in KNOWS_IGNORE_EOS,
        )
        took_s = await first_token_ns(self.client, body, self.state.clock) / 1e9
        first = took_s if self.report.first_s is None else self.report.first_s
        slowest = max(took_s, self.report.slowest_s or 0.0)
        self.report = replace(self.report, first_s=first, slowest_s=slowest)
        return took_s


async def warm_up(
    state: UpstreamState,
    client: httpx2.AsyncClient,
    *,
    limit_s: float,
    chance: Callable[[], float] = random.random,
) -> tuple[WarmupReport, bool]:
    """One pass over the plan, within `limit_s`. Returns what it found, and whether trying again soon can help."""
    began = state.clock()
    run = _Run(state, client, chance())
    problem, is_passing = None, True
    try:
        async with asyncio.timeout(limit_s):
            await run.all_shapes()
    except TimeoutError:
        problem, is_passing = f"not done after {limit_s:g} s", False
    except Unanswered as unanswered:
        problem, is_passing = unanswered.problem, not unanswered.is_final
    seconds = (state.clock() - began) / 1e9
    return replace(run.report, seconds=seconds, problem=problem), is_passing


class Warmer:
    """Holds the warm-up of each upstream that has one: at most one at a time, begun, stopped and retried here."""

    def __init__(
        self, client_for: Callable[[UpstreamState], httpx2.AsyncClient], *, chance: Callable[[], float] = random.random
    ) -> None:
        self._client_for = client_for
        self._chance = chance
        self._tasks: dict[UpstreamState, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Warmer {len(self._tasks)} at work>"

    def begin(self, state: UpstreamState) -> None:
        """Begins the warm-up, from its start if it is under way. Nothing happens where it is off."""
        if not state.config.warmup.enabled:
            return
        self.stop(state)
        state.warmth = "warming"
        task = asyncio.get_running_loop().create_task(self._until_warm(state), name=f"warm up {state.name}")
        self._tasks[state] = task
        task.add_done_callback(lambda done: self._ended(state, done))

    def stop(self, state: UpstreamState) -> None:
        """Ends a warm-up that is under way; the upstream is cold again."""
        task = self._tasks.pop(state, None)
        if task is not None:
            task.cancel()
            state.warmth = "cold"

    def keep_only(self, states: Iterable[UpstreamState]) -> None:
        """Ends the warm-ups of upstreams that a reload took away."""
        for state in self._tasks.keys() - set(states):
            self.stop(state)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for state in list(self._tasks):
            self.stop(state)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, state: UpstreamState, task: asyncio.Task[None]) -> None:
        if self._tasks.get(state) is task:
            del self._tasks[state]
        if not task.cancelled() and task.exception() is not None:  # ours, not the server's; the next probe begins anew
            log.error("the warm-up of upstream `%s` failed", state.name, exc_info=task.exception())
            state.warmth = "cold"

    async def _until_warm(self, state: UpstreamState) -> None:
        """Tries until it is done. After `timeout_s` the upstream counts as failed, and the trying goes on."""
        limit_s = state.config.warmup.timeout_s
        began, failures = state.clock(), 0
        first_s: float | None = None  # of the first try: later ones find the server half warm
        while True:
            left_s = limit_s - (state.clock() - began) / 1e9
            async with self._client_for(state) as client:  # its own: probes go on beside it, and a reload ends theirs
                report, is_passing = await warm_up(
                    state, client, limit_s=left_s if left_s > 0 else limit_s, chance=self._chance
                )
            first_s = report.first_s if first_s is None else first_s
            report = replace(report, first_s=first_s)
            if report.problem is None:
                self._done(state, report)
                return
            failures += 1
            wait_s = retry_wait_s(failures, self._chance)
            has_given_up = not is_passing or (state.clock() - began) / 1e9 >= limit_s
            self._failed(state, report, wait_s, has_given_up=has_given_up)
            await asyncio.sleep(wait_s)

    def _done(self, state: UpstreamState, report: WarmupReport) -> None:
        state.warmup_report = report
        state.warmth = "warm"
        log.info("%s", report.sentence(state.name))
        for what, shapes in (("refused", report.refused), ("still varied after the last round of", report.unsteady)):
            if shapes:
                log.info("upstream `%s` %s in its warm-up: %s", state.name, what, "; ".join(shapes))

    def _failed(self, state: UpstreamState, report: WarmupReport, wait_s: float, *, has_given_up: bool) -> None:
        """Says it when there is news: another problem, or that it is given up for now."""
        known = state.warmup_report
        is_news = known is None or known.problem != report.problem
        state.warmup_report = report
        if has_given_up and state.warmth != "failed":
            state.warmth = "failed"
            is_news = True
        if is_news:
            log.warning(
                "%s; it takes requests only when no other upstream can, next try in %.0f s",
                report.sentence(state.name),
                wait_s,
            )
