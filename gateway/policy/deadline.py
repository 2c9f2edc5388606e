"""What is due for a waiting request, and when to look again. Pure: facts and `now` in, one action out.

Limits (config.Timeouts) and what each measures:

    write_stall   request bytes that do not leave us                      (fault-catalogue A7)
    first_token   request sent → first token; streams only                (A6, B22)
    idle          silence of a started stream, counted in events, so that dripping bytes do not hide it (C7, C8)
    total         the whole request
    deadline      what the caller itself gave the request (fault-catalogue 3.10), or gave us to send a first byte
    hedge         when a second upstream is worth asking

A plain answer has no first token that we could see: only `total` and `deadline` end it, because a long answer is not
a stall. Its budget counts only where the caller takes 202 for an answer. What a waiting caller hears meanwhile is
`heartbeat.py`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.config import Budget, Timeouts

MS = 1_000_000
WRITE_STALL_NS = 30_000 * MS

Action = Literal["none", "budget", "hedge", "write_stall", "first_token", "idle", "total", "deadline"]


@dataclass(slots=True)
class Progress:
    """Facts about one running attempt; instants in monotonic ns, 0 = has not happened."""

    received: int
    started: int  # this attempt began
    sent: int = 0
    token: int = 0
    visible: int = 0
    last_event: int = 0
    last_write: int = 0  # towards the client, heartbeats included
    is_stream: bool = False
    is_paused: bool = False  # the client takes no more: its fault, not the upstream's
    can_beat: bool = False  # a heartbeat may be written now
    budget_passed: bool = False
    is_opted_in: bool = False  # the caller takes 202 and comes back
    hedge_at: int = 0
    deadline: int = 0  # the caller's own
    first_byte_deadline: int = 0  # of a caller that gives up on silence


def due(progress: Progress, timeouts: Timeouts, budget: Budget, now: int) -> tuple[Action, int]:
    """(action, when to ask again). The action must be carried out before asking again."""
    soonest = progress.received + timeouts.total_ms * MS
    if now >= soonest:
        return "total", soonest
    limit = _caller_limit(progress)
    if limit:
        if now >= limit:
            return "deadline", limit
        soonest = min(soonest, limit)
    if not progress.sent:
        limit = progress.started + WRITE_STALL_NS
        if now >= limit:
            return "write_stall", limit
        soonest = min(soonest, limit)
    if progress.is_stream:
        limit = _silence_limit(progress, timeouts)
        if limit > now:
            soonest = min(soonest, limit)
        elif limit and progress.sent:
            return ("idle" if progress.token else "first_token"), limit
        soonest = min(soonest, now + timeouts.idle_ms * MS)  # what arrives meanwhile may set an earlier limit
    elif not progress.is_opted_in:
        return "none", soonest
    return ("none", soonest) if progress.token else _before_token(progress, budget, now, soonest)


def _before_token(progress: Progress, budget: Budget, now: int, soonest: int) -> tuple[Action, int]:
    if budget.ttft_ms is not None and not progress.budget_passed:
        limit = progress.received + budget.ttft_ms * MS
        if now >= limit:
            return "budget", limit
        soonest = min(soonest, limit)
    if progress.hedge_at:
        if now >= progress.hedge_at:
            return "hedge", progress.hedge_at
        soonest = min(soonest, progress.hedge_at)
    return "none", soonest


def _caller_limit(progress: Progress) -> int:
    if progress.first_byte_deadline and not progress.last_write:
        return min(progress.deadline or progress.first_byte_deadline, progress.first_byte_deadline)
    return progress.deadline


def _silence_limit(progress: Progress, timeouts: Timeouts) -> int:
    """When the upstream has been silent too long, 0 for never; before the request left, when it could be soonest."""
    if progress.is_paused:
        return 0
    if progress.token:
        return max(progress.token, progress.last_event) + timeouts.idle_ms * MS
    return (progress.sent or progress.started) + timeouts.first_token_ms * MS
