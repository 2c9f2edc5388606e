"""Which outcomes are freaks and which are a new level (latency-methods §2.2)."""

from __future__ import annotations

from math import log
from typing import Final, Literal

FACTOR: Final = log(4)
IN_A_ROW: Final = 5

Verdict = Literal["usual", "outlier", "shift"]


class Shifts:
    """An outcome four times off is not learned from, unless five such come in a row: then the level has changed."""

    __slots__ = ("_row",)

    def __init__(self) -> None:
        self._row = 0

    def judge(self, actual: float, predicted: float) -> Verdict:
        """`shift` once, at the fifth; from there on all is usual until the prediction has followed."""
        if abs(log(actual / predicted)) <= FACTOR:
            self._row = 0
            return "usual"
        self._row += 1
        if self._row < IN_A_ROW:
            return "outlier"
        return "shift" if self._row == IN_A_ROW else "usual"
