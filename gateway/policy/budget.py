"""What a request does when its first token is late, an attempt fails or its caller leaves. A pure state machine.

    waiting     attempts run, the caller has nothing
    beating     the same, and the caller hears signs of life: its status is committed, the upstream is not
    detached    the caller has its 202; attempts go on in the background
    answering   a first token went out to the caller: nothing else may be tried any more (class R4)
    recording   a first token went into the recording of a detached request
    over        nothing is left to decide

| state     | event     | when                 | action   | then      |
|-----------|-----------|----------------------|----------|-----------|
| waiting   | token     |                      | answer   | answering |
| waiting   | failed    | others run           | none     | waiting   |
| waiting   | failed    | can retry            | retry    | waiting   |
| waiting   | failed    | can fall back        | fallback | waiting   |
| waiting   | failed    |                      | give_up  | over      |
| waiting   | hedge_due | can hedge            | hedge    | waiting   |
| waiting   | hedge_due |                      | none     | waiting   |
| waiting   | cancel    |                      | stop     | over      |
| waiting   | deadline  |                      | expire   | over      |
| waiting   | budget    | opted in             | detach   | detached  |
| waiting   | budget    | wants fail           | refuse   | over      |
| waiting   | budget    | wants, can fall back | fallback | beating   |
| waiting   | budget    | wants wait           | none     | waiting   |
| waiting   | budget    |                      | beat     | beating   |
| waiting   | left      | opted in             | detach   | detached  |
| waiting   | left      |                      | stop     | over      |
| beating   | token     |                      | answer   | answering |
| beating   | failed    | others run           | none     | beating   |
| beating   | failed    | can retry            | retry    | beating   |
| beating   | failed    | can fall back        | fallback | beating   |
| beating   | failed    |                      | give_up  | over      |
| beating   | hedge_due | can hedge            | hedge    | beating   |
| beating   | hedge_due |                      | none     | beating   |
| beating   | cancel    |                      | stop     | over      |
| beating   | deadline  |                      | expire   | over      |
| beating   | budget    |                      | none     | beating   |
| beating   | left      |                      | stop     | over      |
| detached  | token     |                      | answer   | recording |
| detached  | failed    | others run           | none     | detached  |
| detached  | failed    | can retry            | retry    | detached  |
| detached  | failed    | can fall back        | fallback | detached  |
| detached  | failed    |                      | give_up  | over      |
| detached  | hedge_due | can hedge            | hedge    | detached  |
| detached  | hedge_due |                      | none     | detached  |
| detached  | cancel    |                      | stop     | over      |
| detached  | deadline  |                      | expire   | over      |
| detached  | budget    |                      | none     | detached  |
| detached  | left      |                      | none     | detached  |
| answering | token     |                      | none     | answering |
| answering | failed    |                      | give_up  | over      |
| answering | hedge_due |                      | none     | answering |
| answering | budget    |                      | none     | answering |
| answering | cancel    |                      | stop     | over      |
| answering | deadline  |                      | expire   | over      |
| answering | left      |                      | stop     | over      |
| recording | token     |                      | none     | recording |
| recording | failed    |                      | give_up  | over      |
| recording | hedge_due |                      | none     | recording |
| recording | budget    |                      | none     | recording |
| recording | cancel    |                      | stop     | over      |
| recording | deadline  |                      | expire   | over      |
| recording | left      |                      | none     | recording |

Of the rows of one state and event the first whose condition holds counts. `wants` is the route's `on_exceed`. A plain
answer that came whole counts as its first token.

The last usable attempt is never cut by the budget, except where the route says `fail`: it ends by `first_token_ms`
and `total_ms`, which are `deadline` here.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.config import OnExceed

State = Literal["waiting", "beating", "detached", "answering", "recording", "over"]
Event = Literal["token", "failed", "hedge_due", "budget", "left", "cancel", "deadline"]
Action = Literal[
    "none", "answer", "retry", "fallback", "hedge", "beat", "detach", "refuse", "give_up", "stop", "expire"
]
Guard = Literal[
    "always", "others_run", "can_retry", "can_fall_back", "can_hedge", "opted_in", "to_fail", "to_fall_back", "to_wait"
]


class Row(NamedTuple):
    """One line of the table."""

    state: State
    event: Event
    guard: Guard
    action: Action
    then: State


def _failures(state: State) -> tuple[Row, ...]:
    return (
        Row(state, "failed", "others_run", "none", state),
        Row(state, "failed", "can_retry", "retry", state),
        Row(state, "failed", "can_fall_back", "fallback", state),
        Row(state, "failed", "always", "give_up", "over"),
        Row(state, "hedge_due", "can_hedge", "hedge", state),
        Row(state, "hedge_due", "always", "none", state),
        Row(state, "cancel", "always", "stop", "over"),
        Row(state, "deadline", "always", "expire", "over"),
    )


def _begun(state: State) -> tuple[Row, ...]:
    """After the first token: only the end is left to decide."""
    return (
        Row(state, "token", "always", "none", state),
        Row(state, "failed", "always", "give_up", "over"),
        Row(state, "hedge_due", "always", "none", state),
        Row(state, "budget", "always", "none", state),
        Row(state, "cancel", "always", "stop", "over"),
        Row(state, "deadline", "always", "expire", "over"),
    )


TRANSITIONS: Final[tuple[Row, ...]] = (
    Row("waiting", "token", "always", "answer", "answering"),
    *_failures("waiting"),
    Row("waiting", "budget", "opted_in", "detach", "detached"),
    Row("waiting", "budget", "to_fail", "refuse", "over"),
    Row("waiting", "budget", "to_fall_back", "fallback", "beating"),
    Row("waiting", "budget", "to_wait", "none", "waiting"),
    Row("waiting", "budget", "always", "beat", "beating"),
    Row("waiting", "left", "opted_in", "detach", "detached"),
    Row("waiting", "left", "always", "stop", "over"),
    Row("beating", "token", "always", "answer", "answering"),
    *_failures("beating"),
    Row("beating", "budget", "always", "none", "beating"),
    Row("beating", "left", "always", "stop", "over"),
    Row("detached", "token", "always", "answer", "recording"),
    *_failures("detached"),
    Row("detached", "budget", "always", "none", "detached"),
    Row("detached", "left", "always", "none", "detached"),
    *_begun("answering"),
    Row("answering", "left", "always", "stop", "over"),
    *_begun("recording"),
    Row("recording", "left", "always", "none", "recording"),
)


def _by_cause() -> Mapping[tuple[State, Event], tuple[Row, ...]]:
    table: dict[tuple[State, Event], tuple[Row, ...]] = {}
    for row in TRANSITIONS:
        table[row.state, row.event] = (*table.get((row.state, row.event), ()), row)
    return MappingProxyType(table)


_TABLE: Final = _by_cause()


@dataclass(slots=True)
class Facts:
    """What the table's conditions ask for, as it is at the event."""

    on_exceed: OnExceed = "heartbeat"
    is_opted_in: bool = False
    others_run: bool = False
    can_retry: bool = False
    can_fall_back: bool = False
    can_hedge: bool = False

    def holds(self, guard: Guard) -> bool:
        if guard == "always":
            return True
        if guard == "opted_in":
            return self.is_opted_in
        if guard == "to_fall_back":
            return self.on_exceed == "fallback" and self.can_fall_back
        if guard in ("to_fail", "to_wait"):
            return self.on_exceed == guard.removeprefix("to_")
        return bool(getattr(self, guard))


class BudgetMachine:
    """One request's. `since` is when it came into its state, monotonic ns."""

    __slots__ = ("since", "state")

    def __init__(self, now: int) -> None:
        self.state: State = "waiting"
        self.since = now

    def __repr__(self) -> str:
        return f"<BudgetMachine {self.state}>"

    @property
    def is_promised(self) -> bool:
        """A byte of an answer is out: no other attempt may be made."""
        return self.state in ("answering", "recording", "over")

    def on(self, event: Event, now: int, facts: Facts) -> Action:
        """The one action that the event asks for."""
        for row in _TABLE.get((self.state, event), ()):
            if facts.holds(row.guard):
                if row.then != self.state:
                    self.state, self.since = row.then, now
                return row.action
        return "none"  # over: whatever comes late changes nothing
