"""What is due for a waiting request, and when to look again. Pure: facts and `now` in, one action out.

Limits (config.Timeouts) and what each measures:

    write_stall   request bytes that do not leave us                      (fault-catalogue A7)
    first_token   request sent → first token; streams only                (A6, B22)
    idle          silence of a started stream, counted in events, so that dripping bytes do not hide it (C7, C8)
    total         the whole request
    heartbeat     silence towards the client of a stream that may be kept alive

A plain answer has no first token that we could see: only `total` ends it, because a long answer is not a stall.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.config import Budget, Timeouts

MS = 1_000_000
WRITE_STALL_NS = 30_000 * MS

Action = Literal["none", "budget", "heartbeat", "write_stall", "first_token", "idle", "total"]


@dataclass(slots=True)
class Progress:
    """Facts about one running attempt; instants in monotonic ns, 0 = has not happened."""

    received: int
    started: int  # this attempt began
    sent: int = 0
    token: int = 0
    last_event: int = 0
    last_write: int = 0  # towards the client, heartbeats included
    is_stream: bool = False
    is_paused: bool = False  # the client takes no more: its fault, not the upstream's
    can_beat: bool = False  # a heartbeat may be written now
    budget_passed: bool = False


def due(progress: Progress, timeouts: Timeouts, budget: Budget, now: int) -> tuple[Action, int]:
    """(action, when to ask again). The action must be carried out before asking again."""
    soonest = progress.received + timeouts.total_ms * MS
    if now >= soonest:
        return "total", soonest
    if not progress.sent:
        limit = progress.started + WRITE_STALL_NS
        if now >= limit:
            return "write_stall", limit
        soonest = min(soonest, limit)
    if not progress.is_stream:
        return "none", soonest
    limit = _silence_limit(progress, timeouts)
    if limit > now:
        soonest = min(soonest, limit)
    elif limit and progress.sent:
        return ("idle" if progress.token else "first_token"), limit
    soonest = min(soonest, now + timeouts.idle_ms * MS)  # what arrives meanwhile may set an earlier limit than these
    if budget.ttft_ms is not None and not progress.token and not progress.budget_passed:
        limit = progress.received + budget.ttft_ms * MS
        if now >= limit:
            return "budget", limit
        soonest = min(soonest, limit)
    if budget.on_exceed == "heartbeat":
        limit = _beat_limit(progress, budget)
        if now >= limit:
            return ("heartbeat", limit) if progress.can_beat else ("none", min(soonest, now + budget.heartbeat_ms * MS))
        soonest = min(soonest, limit)
    return "none", soonest


def _silence_limit(progress: Progress, timeouts: Timeouts) -> int:
    """When the upstream has been silent too long, 0 for never; before the request left, when it could be soonest."""
    if progress.is_paused:
        return 0
    if progress.token:
        return max(progress.token, progress.last_event) + timeouts.idle_ms * MS
    return (progress.sent or progress.started) + timeouts.first_token_ms * MS


def _beat_limit(progress: Progress, budget: Budget) -> int:
    """First beat when the budget passed (or after one interval without a budget), then one per interval of silence."""
    if progress.last_write:
        return progress.last_write + budget.heartbeat_ms * MS
    return progress.received + (budget.ttft_ms or budget.heartbeat_ms) * MS
