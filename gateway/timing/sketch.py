"""Quantiles of the last minutes, in buckets whose widths are a fixed share of their values (latency-methods §2.4).

A bucket spans 2.02 %, so a quantile read from its middle is within 1 % of the true one. Two generations of five
minutes are kept and both answer; at each turn the older one is dropped, so a sketch remembers five to ten minutes.
Sketches merge by adding counts, which quantiles themselves never do: hours, replicas and routes may be joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, log
from typing import Final

GENERATION_NS: Final = 300 * 1_000_000_000
FEWEST_BEYOND: Final = 10  # samples above the elapsed time that make a conditional quantile; latency-methods §2.4

_GROWTH: Final = 1.0202
_LOG_GROWTH: Final = log(_GROWTH)
_MIDDLE: Final = 2 / (1 + _GROWTH)  # of a bucket, as a share of its upper end: off by 1 % on both sides
_LEAST, _MOST = 0.1, 3_600_000.0  # ms


def bucket(value: float) -> int:
    """The bucket of a value in ms (or of another positive quantity); clamped to 0.1 … 3,600,000."""
    return ceil(log(min(max(value, _LEAST), _MOST)) / _LOG_GROWTH)


def middle(index: int) -> float:
    """The value that stands for a bucket."""
    return float(_MIDDLE * _GROWTH**index)


class Sketch:
    """Counts of values by bucket. `now` is monotonic ns; a reader that leaves it out gets what the last one saw."""

    __slots__ = ("_born", "_new", "_old")

    def __init__(self) -> None:
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._born: int | None = None

    def __repr__(self) -> str:
        return f"Sketch({self.count()} values in {len(self._new | self._old)} buckets)"

    def add(self, value: float, now: int) -> None:
        self._turn(now)
        index = bucket(value)
        self._new[index] = self._new.get(index, 0) + 1

    def merge(self, counts: Mapping[int, int], now: int) -> None:
        """Adds another sketch's `counts()` to the present generation."""
        self._turn(now)
        for index, count in counts.items():
            self._new[index] = self._new.get(index, 0) + count

    def counts(self, now: int | None = None) -> dict[int, int]:
        """Both generations together, as `merge` and a store's HINCRBY take them."""
        self._turn(now)
        joined = dict(self._old)
        for index, count in self._new.items():
            joined[index] = joined.get(index, 0) + count
        return joined

    def count(self, now: int | None = None) -> int:
        self._turn(now)
        return sum(self._new.values()) + sum(self._old.values())

    def quantile(self, share: float, now: int | None = None, above: float = 0.0, fewest: int = 1) -> float | None:
        """The value below which `share` of those above `above` lie; None with fewer than `fewest` of these."""
        found = self.quantiles((share,), now, above, fewest)
        return None if found is None else found[0]

    def quantiles(
        self, shares: Sequence[float], now: int | None = None, above: float = 0.0, fewest: int = 1
    ) -> list[float] | None:
        """Several of them in one pass; `shares` ascend."""
        lowest = bucket(above) if above > 0 else -1_000_000
        # A bucket that holds `above` itself is left out: its values are as good as reached.
        beyond = sorted(item for item in self.counts(now).items() if item[0] > lowest)
        total = sum(count for _, count in beyond)
        if total < max(1, fewest):
            return None
        found: list[float] = []
        ranks = iter([max(1, ceil(share * total)) for share in shares])
        rank, passed = next(ranks, 0), 0
        for index, count in beyond:
            passed += count
            while 0 < rank <= passed:
                found.append(middle(index))
                rank = next(ranks, 0)
        return found

    def remaining(self, share: float, elapsed: float, now: int | None = None) -> float:
        """What is left of a value that has reached `elapsed`: that share of the excess of those that went further.

        With fewer than ten such, as much again as has passed (latency-methods §2.4), stretched for other shares than
        the median as the tail of an exponential would be.
        """
        value = self.quantile(share, now, above=elapsed, fewest=FEWEST_BEYOND)
        if value is None:
            return elapsed * (log(1 - share) / log(0.5))
        return max(0.0, value - elapsed)

    def _turn(self, now: int | None) -> None:
        if now is None:
            return
        if self._born is None:
            self._born = now
        age = now - self._born
        if age >= GENERATION_NS:
            self._old = self._new if age < 2 * GENERATION_NS else {}
            self._new = {}
            self._born += age // GENERATION_NS * GENERATION_NS
