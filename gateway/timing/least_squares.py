"""Seconds to the first token as a line in the work before it, fitted as outcomes arrive (latency-methods §2.2).

    seconds = a + b · (own + ahead)/1000 + d · requests ahead [+ c · (own/1000)²]        tokens not cached, all ≥ 0

The term in d is ours: servers spend time on a request however short it is, and in a long line of chat turns that adds
up to a fifth of the wait, which no b can stand for when sizes vary.

Least squares with forgetting 0.99 and weight 1/max(seconds, 0.05)², which minimises the relative error. The sums are
kept, and after each outcome the coefficients go a few steps of coordinate descent from where they were. That is the
same minimum as the textbook recursion, but coefficients stay ≥ 0 at the right place, there is no covariance that
grows without bound while all prompts are alike, and what the outcomes cannot tell apart stays as it was.
"""

from __future__ import annotations

from typing import Final

FORGETTING: Final = 0.99
FLOOR_S: Final = 0.05
START_A_S: Final = 0.05
START_B_S: Final = 0.125  # per 1,000 tokens: 8,000 tokens/s
SQUARE_FROM_TOKENS: Final = 32_000  # attention's square shows in prompts as long as this; §2.2
SQUARE_FROM_UPDATES: Final = 50

_SWEEPS: Final = 4
_SHIFT_KEEPS: Final = 0.02  # of the old evidence when the level has changed for good


class LeastSquares:
    """The line of one (upstream, model)."""

    __slots__ = ("_coefficients", "_gram", "_longest", "_right", "updates")

    def __init__(self, a_s: float = START_A_S, b_s: float = START_B_S) -> None:
        self._coefficients: tuple[float, float, float, float] = (a_s, b_s, 0.0, 0.0)
        self._gram: tuple[float, ...] = (0.0,) * 10  # upper half of the normal equations' matrix, row by row
        self._right: tuple[float, ...] = (0.0,) * 4
        self._longest = 0.0
        self.updates = 0

    def __repr__(self) -> str:
        a, b, d, c = self._coefficients
        return f"LeastSquares({a:.4f} s + {b:.5f} s/1k + {d:.4f} s each + {c:.6f} s/1k², {self.updates} updates)"

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """a (s), b (s per 1,000 tokens), d (s per request ahead), c (s per 1,000 tokens squared)."""
        return self._coefficients

    def predict(self, own: float, ahead: float, requests: int, factor: float = 1.0) -> float:
        """Seconds, above 0. `factor`: of the work, as it takes now."""
        a, b, d, c = self._coefficients
        own_k = own / 1000
        return max(0.001, a + factor * (b * (own_k + ahead / 1000) + d * requests + c * own_k * own_k))

    def work_s(self, tokens: float) -> float:
        """For how long one request keeps the server from the next one; above 0."""
        _, b, d, c = self._coefficients
        thousands = tokens / 1000
        return max(1e-6, d + b * thousands + c * thousands * thousands)

    def update(self, own: float, ahead: float, requests: int, seconds: float) -> None:
        """One outcome. Written out, because it is most of what a request costs here."""
        w = 1 / max(seconds, FLOOR_S) ** 2
        own_k = own / 1000
        x, q = own_k + ahead / 1000, own_k * own_k
        wx, wn, wq = w * x, w * requests, w * q
        aa, ax, an, aq, xx, xn, xq, nn, nq, qq = self._gram
        keep = FORGETTING
        self._gram = (
            aa * keep + w, ax * keep + wx, an * keep + wn, aq * keep + wq,
            xx * keep + wx * x, xn * keep + wx * requests, xq * keep + wx * q,
            nn * keep + wn * requests, nq * keep + wn * q, qq * keep + wq * q,
        )  # fmt: skip
        ra, rx, rn, rq = self._right
        self._right = (
            ra * keep + w * seconds, rx * keep + wx * seconds, rn * keep + wn * seconds, rq * keep + wq * seconds,
        )  # fmt: skip
        self.updates += 1
        if own > self._longest:
            self._longest = own
        self._descend()

    def shift(self) -> None:
        """The level has changed: what was learned before hardly counts from here on."""
        self._right = tuple(value * _SHIFT_KEEPS for value in self._right)
        self._gram = tuple(value * _SHIFT_KEEPS for value in self._gram)

    def _descend(self) -> None:
        aa, ax, an, aq, xx, xn, xq, nn, nq, qq = self._gram
        ra, rx, rn, rq = self._right
        a, b, d, c = self._coefficients
        is_curved = self._longest >= SQUARE_FROM_TOKENS and self.updates >= SQUARE_FROM_UPDATES and qq > 0
        for _ in range(_SWEEPS):
            a = max(0.0, (ra - ax * b - an * d - aq * c) / aa)
            b = max(0.0, (rx - ax * a - xn * d - xq * c) / xx)
            if nn > 0:
                d = max(0.0, (rn - an * a - xn * b - nq * c) / nn)
            if is_curved:
                c = max(0.0, (rq - aq * a - xq * b - nq * d) / qq)
        self._coefficients = a, b, d, c
