"""How fast the server works right now, against what the fitted line says (latency-methods §2.3, `rho`).

When a request was waiting already as the one before it got its first token, the time between the two first tokens is
the work of one request. That is known at once, while the wait of a request is known only at its end: in a line of
minutes the fitted line lags by minutes, and all that wait in it are wrong together. The last hundred such times, as
decaying sums, over what the line says of the same requests are a factor near 1 that follows a change within seconds.
"""

from __future__ import annotations

from typing import Final

from gateway.timing.least_squares import LeastSquares

_KEEP: Final = 0.98
_FEWEST: Final = 5  # services
STALE_NS: Final = 120 * 1_000_000_000
_RANGE: Final = (0.1, 10.0)
OVERHEAD_TOKENS: Final = (
    300  # what a request costs besides its prompt, as so many tokens: 35 ms at 9,000 tokens/s; §2.5
)


class Services:
    """The first services of a server, for estimates before a line is fitted (latency-methods §2.3).

    One service in a line is the time between two first tokens; it holds whatever the server did in it, as the decoding
    of the answer before where there is one slot. As long as none is known, requests that met no line stand in for it.
    Sums, not a median: from a server that takes several prompts at once first tokens come in bunches.
    """

    __slots__ = ("_alone", "_in_line")

    def __init__(self) -> None:
        self._alone = self._in_line = (0.0, 0.0)  # seconds, and tokens with the overhead of each request

    def __repr__(self) -> str:
        return f"Services(in line {self._in_line}, alone {self._alone})"

    def add(self, seconds: float, tokens: float, *, in_line: bool) -> None:
        before = self._in_line if in_line else self._alone
        after = before[0] + seconds, before[1] + tokens + OVERHEAD_TOKENS
        if in_line:
            self._in_line = after
        else:
            self._alone = after

    def work_s(self, tokens: float, requests: int) -> float | None:
        """How long so many requests with so many tokens in all will take; None while no service is known."""
        seconds, done = self._in_line if self._in_line[1] else self._alone
        return seconds / done * (tokens + OVERHEAD_TOKENS * requests) if done else None


class Speed:
    """Sums over services, each half as heavy as one 35 later."""

    __slots__ = ("_count", "_latest_ns", "_seconds", "_squares", "_thousands")

    def __init__(self) -> None:
        self._count = self._seconds = self._thousands = self._squares = 0.0
        self._latest_ns = 0

    def __repr__(self) -> str:
        return f"Speed({self._thousands:.1f}k tokens in {self._seconds:.2f} s)"

    def add(self, seconds: float, tokens: float, now: int) -> None:
        thousands = tokens / 1000
        self._count = self._count * _KEEP + 1
        self._seconds = self._seconds * _KEEP + seconds
        self._thousands = self._thousands * _KEEP + thousands
        self._squares = self._squares * _KEEP + thousands * thousands
        self._latest_ns = now

    def factor(self, line: LeastSquares, now: int) -> float:
        """How many times longer work takes than the line says."""
        if self._count < _FEWEST or now - self._latest_ns > STALE_NS:
            return 1.0
        _, b, d, c = line.coefficients
        said = d * self._count + b * self._thousands + c * self._squares
        if said <= 0:
            return 1.0
        low, high = _RANGE
        return min(max(self._seconds / said, low), high)
