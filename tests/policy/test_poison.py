"""A body that two servers died of is refused for a while (D8)."""

from __future__ import annotations

import pytest

from gateway.policy.poison import MAX_KILLS, MAX_SUSPECTS, REFUSED_NS, Poison

BODY = b'{"messages":[]}'


def killed(*lives: tuple[str, int], now: int = 0) -> tuple[Poison, bytes]:
    poison = Poison(b"key")
    digest = poison.digest(BODY)
    for upstream, life in lives:
        poison.note_kill(digest, upstream, life, now)
    return poison, digest


def died(upstream: str, life: int) -> bool:
    return True


@pytest.mark.parametrize("second", [("b", 0), ("a", 1)], ids=["another server", "the next life of the same"])
def test_two_deaths_are_enough_and_one_is_not(second: tuple[str, int]) -> None:
    """D8"""
    poison, digest = killed(("a", 0))
    assert not poison.is_refused(digest, 1, died)
    poison.note_kill(digest, *second, 1)
    assert poison.is_refused(digest, 2, died)
    assert not poison.is_refused(poison.digest(BODY + b" "), 2, died)


def test_what_was_under_way_in_one_death_counts_once() -> None:
    poison, digest = killed(("a", 0), ("a", 0), ("a", 0))
    assert not poison.is_refused(digest, 1, died)


def test_a_server_that_lives_was_not_killed() -> None:
    """Resets have many causes."""
    poison, digest = killed(("a", 0), ("b", 0))
    assert not poison.is_refused(digest, 1, lambda upstream, life: upstream == "a")


def test_it_is_forgotten_after_five_minutes() -> None:
    poison, digest = killed(("a", 0), ("b", 0))
    assert poison.is_refused(digest, REFUSED_NS - 1, died)
    assert not poison.is_refused(digest, REFUSED_NS, died)
    assert len(poison) == 0


def test_nothing_is_looked_at_while_nothing_is_suspected() -> None:
    poison, _ = killed(("a", 0))
    poison.note_kill(poison.digest(b"other"), "a", 0, 10)
    assert poison.has_suspects(REFUSED_NS)
    assert len(poison) == 1
    assert not poison.has_suspects(REFUSED_NS + 10)


def test_a_kill_of_another_day_does_not_add_up() -> None:
    poison, digest = killed(("a", 0))
    poison.note_kill(digest, "b", 0, REFUSED_NS)
    assert not poison.is_refused(digest, REFUSED_NS, died)


def test_an_answer_takes_the_suspicion_away() -> None:
    poison, digest = killed(("a", 0), ("b", 0))
    poison.note_answer(digest)
    poison.note_answer(digest)
    assert not poison.is_refused(digest, 1, died)
    assert repr(poison) == "<Poison 0 suspects>"


def test_memory_is_bounded_and_digests_are_keyed() -> None:
    poison = Poison(b"one")
    for number in range(MAX_SUSPECTS + 10):
        poison.note_kill(poison.digest(b"%d" % number), "a", 0, 0)
    for life in range(MAX_KILLS + 10):
        poison.note_kill(poison.digest(b"x"), "a", life, 0)
    assert len(poison) == MAX_SUSPECTS
    assert poison.digest(BODY) != Poison(b"two").digest(BODY)
