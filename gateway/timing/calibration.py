"""What past estimates were off by, and the p50 and p90 that follow from it (latency-methods §2.2).

The last 200 residuals ln(actual / raw estimate) are kept. p50 is the raw estimate times exp(their median), p90 the one
times exp(their quantile at 1 − α). α moves with each outcome (conformal prediction under drift), so that one in ten
outcomes lies above p90 even where the residuals of yesterday do not tell those of today.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import exp, log, sqrt
from typing import Final

KEPT: Final = 200
FEWEST: Final = 30  # residuals before p90 is taken from them
TARGET_MISS: Final = 0.10
_STEP: Final = 0.01
_LEAST_ALPHA, _MOST_ALPHA = 0.005, 0.5
_UNCALIBRATED_P90: Final = 2.0  # times p50
# Found by replaying traces: with these, and with 20 and 10 as with 32 and 16, p90 stays within its limits.
_COMMON: Final = 0.1  # of the spread, in all requests of a line alike; the rest is independent and cancels
_AHEAD_PER_SKIP: Final = 24  # one more residual is left out for each so many requests ahead: they saw the same event
_MOST_SKIPPED: Final = 12  # a line of hundreds must still teach something before it has passed


class Recent:
    """Exact quantiles of the last so many values."""

    __slots__ = ("_ascending", "_bound", "_latest")

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._latest: deque[float] = deque()
        self._ascending: list[float] = []

    def __len__(self) -> int:
        return len(self._ascending)

    def add(self, value: float) -> None:
        if len(self._latest) == self._bound:
            del self._ascending[bisect_left(self._ascending, self._latest.popleft())]
        self._latest.append(value)
        insort(self._ascending, value)

    def quantile(self, share: float) -> float:
        """Between the two nearest ranks. Raises IndexError while there is no value."""
        at = share * (len(self._ascending) - 1)
        low = int(at)
        if low + 1 >= len(self._ascending):
            return self._ascending[-1]
        return self._ascending[low] + (at - low) * (self._ascending[low + 1] - self._ascending[low])

    def clear(self) -> None:
        self._latest.clear()
        self._ascending.clear()


class Calibration:
    """Factors that make the p50 and p90 of a raw estimate.

    `ahead` is how many requests stood before the one in question. The longer the line, the more their errors cancel,
    so residuals are kept and applied in units of `spread_of(ahead)`. All that wait in one line err in the same
    direction: of those only every so many-th is kept, or the last 200 would be 200 witnesses of one event.
    """

    __slots__ = ("_alpha", "_bias", "_factor_log", "_p90_log", "_residuals", "_skipped")

    def __init__(self) -> None:
        self._bias = Recent(KEPT)
        self._residuals = Recent(KEPT)
        self._alpha: float = TARGET_MISS
        self._factor_log = 0.0
        self._p90_log = 0.0
        self._skipped = 0

    def __repr__(self) -> str:
        return f"Calibration(×{self.p50(1, 0):.2f}, p90 ×{self.p90(1, 0):.2f} of it, {len(self)} residuals)"

    def __len__(self) -> int:
        return len(self._residuals)

    def p50(self, raw: float, ahead: int) -> float:
        return raw * exp(self._factor_log * spread_of(ahead))

    def p90(self, p50: float, ahead: int) -> float:
        if len(self._residuals) < FEWEST:
            return _UNCALIBRATED_P90 * p50
        return p50 * exp(self._p90_log * spread_of(ahead))

    def learn_bias(self, actual: float, raw: float) -> None:
        """What came true, and what the line would say of the request by now."""
        self._bias.add(log(actual / raw))
        self._factor_log = self._bias.quantile(0.5)

    def learn_spread(self, actual: float, p50: float, p90: float, ahead: int) -> None:
        """What came true, and what was told."""
        self._skipped += 1
        if self._skipped < min(1 + ahead // _AHEAD_PER_SKIP, _MOST_SKIPPED):
            return
        self._skipped = 0
        self._residuals.add(log(actual / p50) / spread_of(ahead))
        if len(self) > FEWEST:
            miss = 1 if actual > p90 else 0
            self._alpha = min(max(self._alpha + _STEP * (TARGET_MISS - miss), _LEAST_ALPHA), _MOST_ALPHA)
        self._p90_log = max(0.0, self._residuals.quantile(1 - self._alpha))

    def restart(self) -> None:
        """The level has changed: past residuals say nothing any more."""
        self._bias.clear()
        self._residuals.clear()
        self._alpha = TARGET_MISS
        self._factor_log = self._p90_log = 0.0
        self._skipped = 0


def spread_of(ahead: int) -> float:
    """How uncertain a wait is that has so many requests before it, against one that has none."""
    return _COMMON + (1 - _COMMON) / sqrt(1 + ahead)
