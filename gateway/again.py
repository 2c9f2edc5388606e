"""Which answers are asked for a second time, and with which of our edits left out. Each rule applies at most once.

    reconnect           a pooled connection that the server had closed before reading (class R1 of the fault catalogue)
    without_thinking    a 400 that our thinking switch caused
    floor_backed_off    a 400 about context length after our floor raised the value
    without_usage       a 400 about `stream_options` that we added
    rescue              an answer burnt by thinking, on a plain request of a route with `rescue: true`

What a server refuses is remembered only when leaving it out helped: a 400 may be about something else after all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from gateway.policy.refusals import is_context_overflow, is_switch_rejected, is_usage_rejected

if TYPE_CHECKING:
    from gateway.relay import Result

Rule = Literal["reconnect", "without_thinking", "floor_backed_off", "without_usage", "rescue"]


class Edited(NamedTuple):
    """Which of our edits went into a sending, should the server refuse one."""

    thinking: bool
    floor: bool
    usage: bool


@dataclass(slots=True)
class Allowed:
    """Which of our edits may go into the next sending, and what it is for."""

    thinking: bool = True
    floor: bool = True
    usage: bool = True
    fresh: bool = False
    rescue: bool = False
    done: set[Rule] = field(default_factory=set)

    def apply(self, rule: Rule) -> None:
        """Prepares the next sending."""
        self.done.add(rule)
        self.fresh = rule == "reconnect"
        if rule == "without_thinking":
            self.thinking = False
        elif rule == "floor_backed_off":
            self.floor = False
        elif rule == "without_usage":
            self.usage = False
        elif rule == "rescue":
            self.rescue = True


def rule_for(
    result: Result, status: int, body: bytes, edited: Edited, allowed: Allowed, *, may_rescue: bool, verdict: str | None
) -> Rule | None:
    """The rule that sends it again, or None. `status` and `body` are those of a complete answer, 0 when there is none;
    `may_rescue`: the route wants it and thinking can be switched off."""
    if result.kind == "lost":
        rule: Rule | None = "reconnect" if result.lost is not None and result.lost.is_stale else None
    elif 400 <= status < 500:
        rule = _refused_edit(status, body, edited)
    else:
        rule = "rescue" if may_rescue and verdict == "burnt_by_thinking" else None
    return rule if rule is not None and rule not in allowed.done else None


def _refused_edit(status: int, body: bytes, edited: Edited) -> Rule | None:
    if edited.thinking and is_switch_rejected(status, body):
        return "without_thinking"
    if edited.floor and is_context_overflow(status, body):
        return "floor_backed_off"
    if edited.usage and is_usage_rejected(status, body):
        return "without_usage"
    return None
