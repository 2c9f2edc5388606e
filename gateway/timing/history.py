"""What happened lately at one (upstream, model): the sketches behind every estimate that no model can give.

First tokens are kept by the size of the prompt (classes of latency-methods §7, by uncached tokens), answers by their
length in tokens and their whole duration.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from gateway.timing.sketch import Sketch

_CLASS_ENDS: Final = (1_000, 8_000, 32_000)  # short, medium, long, very long; §7
_FEWEST_FIRST_TOKENS: Final = 5  # before a median of them is better than a prior
_FEWEST_FOR_P95: Final = 20
_PACE_WEIGHT: Final = 0.1  # EWMA of TPOT; §2.3


_REFRESH_NS: Final = 5 * 1_000_000_000  # the longest that a pair is told again
_REFRESH_COUNT, _REFRESH_SHARE = 8, 16  # or until so many more came, and as many as this part of all


class FirstTokens:
    """First tokens of prompts of one size. Their p50 and p90 are asked for with every request, so they are kept."""

    __slots__ = ("_due_ns", "_pair", "_unread", "sketch")

    def __init__(self) -> None:
        self.sketch = Sketch()
        self._pair: tuple[float, float] | None = None
        self._due_ns = 0
        self._unread = 0  # may come before the pair is stale

    def __repr__(self) -> str:
        return f"FirstTokens({self.sketch!r})"

    def add(self, milliseconds: float, now: int) -> None:
        self.sketch.add(milliseconds, now)
        self._unread -= 1

    def pair_s(self, now: int) -> tuple[float, float] | None:
        """p50 and p90, at most 5 s or a sixteenth of the values old; None with fewer than five."""
        if now < self._due_ns and self._unread > 0:
            return self._pair
        found = self.sketch.quantiles((0.5, 0.9), now, fewest=_FEWEST_FIRST_TOKENS)
        self._due_ns = now + _REFRESH_NS
        if found is None:
            self._pair, self._unread = None, 1  # the next one may be the fifth
        else:
            self._pair = found[0] / 1000, found[1] / 1000
            self._unread = max(_REFRESH_COUNT, self.sketch.count() // _REFRESH_SHARE)
        return self._pair


class History:
    """Sketches are in ms or tokens inside, seconds outside."""

    __slots__ = ("_answers", "_first_tokens", "_pace_s", "_warmup", "_whole")

    def __init__(self) -> None:
        self._first_tokens = tuple(FirstTokens() for _ in range(len(_CLASS_ENDS) + 1))
        self._warmup = Sketch()
        self._answers = Sketch()
        self._whole = Sketch()
        self._pace_s: float | None = None

    def add_first_token(self, uncached: float, seconds: float, now: int) -> None:
        self._of(uncached).add(seconds * 1000, now)

    def add_warmup(self, seconds: float, now: int) -> None:
        self._warmup.add(seconds * 1000, now)

    def add_answer(self, tokens: int, seconds: float, now: int) -> None:
        self._answers.add(tokens, now)
        self._whole.add(seconds * 1000, now)

    def add_pace(self, tpot_s: float) -> None:
        self._pace_s = tpot_s if self._pace_s is None else self._pace_s + _PACE_WEIGHT * (tpot_s - self._pace_s)

    def first_token_s(self, uncached: float, share: float, now: int) -> float | None:
        """A quantile for prompts of this size; None with fewer than 20."""
        value = self._of(uncached).sketch.quantile(share, now, fewest=_FEWEST_FOR_P95)
        return None if value is None else value / 1000

    def first_token_pair_s(self, uncached: float, now: int) -> tuple[float, float] | None:
        """p50 and p90; None with fewer than five."""
        return self._of(uncached).pair_s(now)

    def first_token_left_s(self, uncached: float, elapsed_s: float, now: int) -> tuple[float, float]:
        return _left(self._of(uncached).sketch, elapsed_s, now)

    def whole_left_s(self, elapsed_s: float, now: int) -> tuple[float, float]:
        return _left(self._whole, elapsed_s, now)

    def decode_left_s(self, since_s: float, now: int) -> tuple[float, float] | None:
        """What is left of an answer whose first token came so long ago; None while lengths or pace are not known."""
        pace = self._pace_s
        if pace is None or not self._answers.count(now):
            return None
        passed = since_s / pace
        found: list[float] = []
        for share in (0.5, 0.9):
            tokens = self._answers.quantile(share, now) or 0.0
            left = tokens - passed
            found.append((left if left > 0 else self._answers.remaining(share, passed, now)) * pace)
        return found[0], found[1]

    def warmup_s(self, share: float) -> float | None:
        value = self._warmup.quantile(share)
        return None if value is None else value / 1000

    def _of(self, uncached: float) -> FirstTokens:
        return self._first_tokens[bisect_left(_CLASS_ENDS, uncached)]


def _left(sketch: Sketch, elapsed_s: float, now: int) -> tuple[float, float]:
    elapsed = elapsed_s * 1000
    return sketch.remaining(0.5, elapsed, now) / 1000, sketch.remaining(0.9, elapsed, now) / 1000
