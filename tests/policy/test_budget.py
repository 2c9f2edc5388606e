"""The first-token budget's machine: its table row by row, and against a model that says the same in other words."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from gateway.config import OnExceed
from gateway.policy import budget
from gateway.policy.budget import TRANSITIONS, Action, BudgetMachine, Event, Facts, Guard, Row, State

GUARDS: dict[str, Guard] = {
    "": "always", "others run": "others_run", "can retry": "can_retry", "can fall back": "can_fall_back",
    "can hedge": "can_hedge", "opted in": "opted_in", "wants fail": "to_fail", "wants, can fall back": "to_fall_back",
    "wants wait": "to_wait",
}  # fmt: skip
HOLDING: dict[Guard, dict[str, object]] = {
    "always": {},
    "others_run": {"others_run": True},
    "can_retry": {"can_retry": True},
    "can_fall_back": {"can_fall_back": True},
    "can_hedge": {"can_hedge": True},
    "opted_in": {"is_opted_in": True},
    "to_fail": {"on_exceed": "fail"},
    "to_fall_back": {"on_exceed": "fallback", "can_fall_back": True},
    "to_wait": {"on_exceed": "wait"},
}


def machine_in(state: State) -> BudgetMachine:
    machine = BudgetMachine(0)
    machine.state = state
    return machine


def written_rows() -> list[tuple[str, ...]]:
    """The table of the module's docstring: state, event, when, action, then."""
    lines = [line.strip() for line in (budget.__doc__ or "").splitlines() if line.strip().startswith("|")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]


def test_the_table_in_words_is_the_table_in_force() -> None:
    written = [Row(s, e, GUARDS[when], a, then) for s, e, when, a, then in written_rows()]  # type: ignore[arg-type]
    assert written == list(TRANSITIONS)


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda row: "-".join(row[:3]))
def test_each_row_does_what_it_says(row: Row) -> None:
    machine = machine_in(row.state)
    assert machine.on(row.event, 7, Facts(**HOLDING[row.guard])) == row.action  # type: ignore[arg-type]
    assert machine.state == row.then
    assert machine.since == (7 if row.then != row.state else 0)


@pytest.mark.parametrize("guard", get_args(Guard))
def test_a_guard_holds_for_its_facts_and_not_without_them(guard: Guard) -> None:
    assert Facts(**HOLDING[guard]).holds(guard)  # type: ignore[arg-type]
    assert Facts().holds(guard) == (guard == "always")


def test_a_fallback_that_nobody_wants_or_nobody_can_give_is_none() -> None:
    assert not Facts(on_exceed="fallback").holds("to_fall_back")
    assert not Facts(can_fall_back=True).holds("to_fall_back")


@pytest.mark.parametrize("state", get_args(State))
@pytest.mark.parametrize("event", get_args(Event))
def test_every_event_in_every_state_has_an_answer(state: State, event: Event) -> None:
    """Only `over` has no rows at all; a guarded row is never the last of its cause."""
    rows = [row for row in TRANSITIONS if (row.state, row.event) == (state, event)]
    if state == "over":
        assert rows == []
        assert machine_in(state).on(event, 1, Facts()) == "none"
    else:
        assert rows
        assert rows[-1].guard == "always"
        assert all(row.guard != "always" for row in rows[:-1])


@pytest.mark.parametrize("on_exceed", [value for value in get_args(OnExceed) if value != "fail"])
@pytest.mark.parametrize("is_opted_in", [False, True])
@pytest.mark.parametrize("state", get_args(State))
def test_the_last_usable_attempt_is_never_cut_by_the_budget(
    state: State, on_exceed: OnExceed, is_opted_in: bool
) -> None:
    """Whatever the route does when its budget passes, but refuse, the request goes on."""
    machine = machine_in(state)
    action = machine.on("budget", 1, Facts(on_exceed=on_exceed, is_opted_in=is_opted_in))
    assert action in ("none", "beat", "detach")
    assert (machine.state == "over") == (state == "over")


def test_a_state_says_whether_something_of_an_answer_is_out() -> None:
    promised = {state for state in get_args(State) if machine_in(state).is_promised}
    assert promised == {"answering", "recording", "over"}
    assert repr(machine_in("beating")) == "<BudgetMachine beating>"


def test_the_table_is_the_one_of_the_pure_words() -> None:
    assert {row.action for row in TRANSITIONS} == set(get_args(Action))
    assert all(re.fullmatch(r"[a-z_]+", row.guard) for row in TRANSITIONS)


class AgainstAModel(RuleBasedStateMachine):
    """The same story told by four flags: an answer is there, the caller has its 202, it has had a beat, it is over."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.machine = BudgetMachine(0)
        self.now = 0
        self.has_answer = self.is_detached = self.is_over = self.has_beaten = False

    @rule(
        event=st.sampled_from(get_args(Event)),
        on_exceed=st.sampled_from(get_args(OnExceed)),
        flags=st.tuples(*[st.booleans()] * 5),
    )
    def something_happens(self, event: Event, on_exceed: OnExceed, flags: tuple[bool, ...]) -> None:
        opted_in, others_run, can_retry, can_fall_back, can_hedge = flags
        facts = Facts(on_exceed, opted_in, others_run, can_retry, can_fall_back, can_hedge)
        self.now += 1
        AgainstAModel.steps += 1
        expected = self.expected(event, facts)
        assert self.machine.on(event, self.now, facts) == expected
        assert self.machine.since <= self.now

    def expected(self, event: Event, facts: Facts) -> Action:
        if self.is_over:
            return "none"
        match event:
            case "token":
                is_first, self.has_answer = not self.has_answer, True
                return "answer" if is_first else "none"
            case "failed":
                return self.expected_after_failure(facts)
            case "hedge_due":
                return "hedge" if facts.can_hedge and not self.has_answer else "none"
            case "budget":
                return self.expected_at_the_budget(facts)
            case "left":
                return self.expected_when_left(facts)
            case "cancel" | "deadline":
                self.is_over = True
                return "stop" if event == "cancel" else "expire"

    def expected_after_failure(self, facts: Facts) -> Action:
        if not self.has_answer:
            if facts.others_run:
                return "none"
            if facts.can_retry:
                return "retry"
            if facts.can_fall_back:
                return "fallback"
        self.is_over = True
        return "give_up"

    def expected_at_the_budget(self, facts: Facts) -> Action:
        if self.has_answer or self.is_detached or self.has_beaten:
            return "none"
        if facts.is_opted_in:
            self.is_detached = True
            return "detach"
        if facts.on_exceed == "fail":
            self.is_over = True
            return "refuse"
        if facts.on_exceed == "wait":
            return "none"
        self.has_beaten = True
        return "fallback" if facts.on_exceed == "fallback" and facts.can_fall_back else "beat"

    def expected_when_left(self, facts: Facts) -> Action:
        if self.is_detached:
            return "none"
        if facts.is_opted_in and not self.has_answer and not self.has_beaten:
            self.is_detached = True
            return "detach"
        self.is_over = True
        return "stop"

    @invariant()
    def both_know_whether_something_is_out(self) -> None:
        assert self.machine.is_promised == (self.has_answer or self.is_over)
        assert (self.machine.state == "over") == self.is_over


def test_random_stories_end_as_the_model_says() -> None:
    """At least 10,000 steps in all."""
    AgainstAModel.steps = 0
    run_state_machine_as_test(AgainstAModel, settings=settings(max_examples=300, stateful_step_count=60, deadline=None))
    assert AgainstAModel.steps >= 10_000
