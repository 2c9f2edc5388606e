"""When a model server counts as restarted, and when not (cases C150)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.restarts import MAX_VERSIONS, SIGNS, RestartEvidence, Sighting, Sign, increase

STEP = 5_000_000_000  # between two looks, ns


def signs(*seen: Sighting | str) -> list[Sign | None]:
    """What each look says; the word "refused" stands for a probe that was."""
    evidence, found = RestartEvidence(), []
    for number, sighting in enumerate(seen):
        if isinstance(sighting, str):
            evidence.refused()
        else:
            found.append(evidence.look(sighting, number * STEP))
    return found


def started(at: float, tokens: float = 5) -> Sighting:
    return Sighting(start_time_s=at, counters={"tokens": tokens})


def counted(*tokens: float) -> list[Sighting]:
    return [Sighting(counters={"tokens": value}) for value in tokens]


def created(*times: int | None) -> list[Sighting]:
    return [Sighting(created=time) for time in times]


def versions(*names: str | None) -> list[Sighting]:
    return [Sighting(version=name) for name in names]


NOTHING = Sighting()


@pytest.mark.parametrize(
    "seen, expected",
    [
        ([NOTHING, NOTHING], [None, None]),
        ([NOTHING, "refused", NOTHING, NOTHING], [None, "refused", None]),
        (["refused", "refused", NOTHING, NOTHING], ["refused", None]),
        ([started(100), started(100), started(100.4)], [None, None, None]),
        ([started(100), started(200), started(200)], [None, "start_time", None]),
        ([started(100), "refused", started(200)], [None, "start_time"]),
        ([started(100), "refused", started(100)], [None, None]),
        ([started(100), started(200), started(100), started(200)], [None, "start_time", None, None]),
        ([started(100, 900), started(100, 20), started(100, 900)], [None, None, None]),
        ([*counted(5, 9, 9, 2, 4)], [None, None, None, "counter", None]),
        ([*counted(9), "refused", *counted(2, 3)], [None, "refused", None]),
        ([*counted(9), "refused", NOTHING, *counted(2, 3)], [None, "refused", None, None]),
        ([started(100), "refused", NOTHING, started(200)], [None, "refused", None]),
        ([*counted(9, 1, 9, 1, 9, 1, 9, 1)], [None, "counter", None, "counter", None, None, None, None]),
        ([*created(7, 7, 7, 8, 8)], [None, None, None, "created", None]),
        ([*created(1, 6, 11, 16)], [None] * 4),
        ([*created(7, 7, 3, 7, 3)], [None] * 5),
        ([*created(7, 7), "refused", NOTHING, *created(9, 9)], [None, None, "refused", None, None]),
        ([*created(7, None, 7, None, 8)], [None, None, None, None, "created"]),
        ([*versions("1", "1", "2", None, "1", "2")], [None, None, "version", None, None, None]),
        ([*versions("1"), "refused", NOTHING, *versions("2")], [None, "refused", None]),
        (
            [Sighting(100, {}, None, "1"), Sighting(100, {}, None, "2")],
            [None, "version"],
        ),
    ],
)
def test_a_restart_is_told_once_by_whatever_shows_it(seen: list[Sighting | str], expected: list[Sign | None]) -> None:
    """C150: refused then ok, start time, counters, `created`, version. Several servers behind one address are none."""
    assert signs(*seen) == expected


def test_a_created_time_that_is_the_time_of_the_call_says_nothing_even_within_one_second() -> None:
    """upstream-contract §1: `created` is now on vLLM, and two calls in one second give the same."""
    evidence = RestartEvidence()
    for second in range(1, 20):
        for part in (0, 400_000_000):
            assert evidence.look(Sighting(created=second), second * 1_000_000_000 + part) is None


def test_the_process_is_known_to_be_the_same_only_from_its_start_time() -> None:
    evidence = RestartEvidence()
    proofs = []
    for seen in (started(100), started(100), NOTHING, started(300)):
        evidence.look(seen, 0)
        proofs.append(evidence.is_same_process)
    assert proofs == [False, True, False, False]
    assert repr(evidence) == "<RestartEvidence started 300, 0 versions>"


def test_versions_are_remembered_within_a_bound() -> None:
    evidence = RestartEvidence()
    for number in range(MAX_VERSIONS * 2):
        assert evidence.look(Sighting(version=str(number)), 0) == ("version" if number else None)
    assert repr(evidence) == f"<RestartEvidence started None, {MAX_VERSIONS} versions>"


@pytest.mark.parametrize("before, after, grown", [(3, 5, 2), (5, 5, 0), (5, 2, 2), (5, 0, 0), (5, -1, 0)])
def test_a_counter_never_shrinks(before: float, after: float, grown: float) -> None:
    """C150."""
    assert increase(before, after) == grown


@given(st.lists(st.floats(0, 1e12), min_size=2))
def test_increases_are_never_negative(values: list[float]) -> None:
    """C150."""
    assert all(increase(before, after) >= 0 for before, after in itertools.pairwise(values))


def test_every_sign_has_its_words() -> None:
    assert set(SIGNS) == {"refused", "start_time", "counter", "created", "version"}
