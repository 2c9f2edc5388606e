"""Which upstream of a route is asked first. Pure; later versions choose by predicted time to first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Candidate:
    """One upstream as the choice sees it."""

    name: str
    is_up: bool | None  # None: not asked yet, which counts as usable
    inflight: int


def order(candidates: Sequence[Candidate], turn: int) -> list[str]:
    """Names in the order to try: usable ones first, fewest in flight first, ties in turn.

    A failed health check puts an upstream last and never out: when all are down, trying beats refusing.
    """
    count = len(candidates)
    if count == 1:
        return [candidates[0].name]
    rotated = [candidates[(turn + i) % count] for i in range(count)]
    return [c.name for c in sorted(rotated, key=lambda c: (c.is_up is False, c.inflight))]
