"""In which order the upstreams of a route are tried. Pure: numbers, hashes and draws arrive as arguments.

`auto` (latency-methods §2.6) takes the better of two random upstreams by predicted time to first token, but stays where
the beginning of the prompt was seen before while that costs little.

Decisions a reader would question:

- Predictions err by 11–17 % (latency-methods §2.5), so a lead of less than a tenth is a tie. Otherwise a quiet upstream
  that was once measured a little slower would never be asked, hence never measured, again. A tie goes to the one
  with fewer in flight, because long answers slow a first token down in ways no prompt tells, and then to chance:
  several gateways that all begin with the same upstream would move in step.
- Bounded load counts the tokens of the request itself into the mean, else one short prompt ahead would send a long
  conversation to an upstream that knows nothing of it. For the same reason a crowded home is kept where the prediction,
  which knows the crowd and the cache, says that it is still the faster.
- An upstream in slow start stands aside with probability 1 − share, and is still there to fail over to. Shares are
  relative to the greatest, so somebody is always ready.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil, exp
from typing import Final

from gateway.config import Balance
from gateway.wire.spans import SpliceError, after_blank, elements, members, value_end

TIE: Final = 1.1  # a ratio of predictions below which neither is better
LOAD_BOUND: Final = 1.25  # latency-methods §2.6
MAX_AFFINITY_COST_S: Final = 5.0  # latency-methods §2.6
EXPLORED: Final = 0.02  # goes anywhere: a prediction that is wrong for one upstream would else never be corrected
AFFINITY_IGNORED: Final = 0.01  # latency-methods §2.6; so that the other upstreams stay measured
PEAK_DECAY_NS: Final = 10_000_000_000  # latency-methods §2.6
KEY_CHARACTERS: Final = 2000  # latency-methods §2.6
MIN_PROMPT_BYTES: Final = 500  # about 125 tokens: reading them again costs less than sending them to a busy upstream
_SYSTEM_ROLES: Final = frozenset((b'"system"', b'"developer"'))
# A key of the body's own: inside a string its quotes would be escaped, and nothing else stands before a colon.
_PROMPTS: Final = tuple(
    (b'"%b"' % name, re.compile(rb'"%b"[ \t\r\n]*+:[ \t\r\n]*+(?=["\[])' % name).search)
    for name in (b"messages", b"prompt", b"input")
)


@dataclass(slots=True)
class Candidate:
    """One upstream as the choice sees it."""

    name: str
    is_up: bool | None  # None: not asked yet, which counts as usable
    inflight: int
    predicted_s: float | None = None  # time to first token of this request there, p50
    ahead_tokens: float = 0.0  # uncached tokens of requests there that have no first token yet
    share: float = 1.0  # of its usual traffic, in (0, 1]: below 1 in slow start
    is_full: bool = False  # no free slot
    seconds_per_ktoken: float | None = None  # `PeakEwma` of seconds per 1,000 uncached tokens


@dataclass(slots=True)
class _Wish:
    """What the request brings to the choice."""

    turn: int
    draw: Callable[[], float]
    affinity: int | None
    uncached_tokens: float
    budget_s: float | None


def order(
    strategy: Balance,
    candidates: Sequence[Candidate],
    *,
    turn: int,
    draw: Callable[[], float],
    affinity: int | None,
    uncached_tokens: float,
    budget_s: float | None,
) -> list[str]:
    """Names in the order to try: free ones, full ones, then those that failed their health check.

    Nobody is left out: when all are down, trying beats refusing. `turn` counts the route's requests, `draw` gives
    floats in [0, 1), `affinity` is `affinity_key`'s, `uncached_tokens` the request's own, `budget_s` the route's for
    a first token.
    """
    if len(candidates) == 1:
        return [candidates[0].name]
    wish = _Wish(turn, draw, affinity, uncached_tokens, budget_s)
    free: list[Candidate] = []
    full: list[Candidate] = []
    down: list[Candidate] = []
    for candidate in candidates:
        (down if candidate.is_up is False else full if candidate.is_full else free).append(candidate)
    arrange = _ARRANGE[strategy]
    return [c.name for tier in (free, full, down) for c in _in_tier(tier, arrange, wish)]


def _in_tier(tier: list[Candidate], arrange: _Arrange, wish: _Wish) -> list[Candidate]:
    """All of a tier, the one to ask first in front; those that stand aside behind the ready ones."""
    if len(tier) < 2:
        return tier
    most = max(c.share for c in tier)
    if min(c.share for c in tier) == most:
        return arrange(tier, wish)
    ready: list[Candidate] = []
    aside: list[Candidate] = []
    for candidate in tier:
        is_ready = candidate.share >= most or wish.draw() * most < candidate.share
        (ready if is_ready else aside).append(candidate)
    return arrange(ready, wish) + aside


# --- Strategies: each puts a tier in order -------------------------------------------------------------------------


def _round_robin(tier: list[Candidate], wish: _Wish) -> list[Candidate]:
    first = wish.turn % len(tier)
    return tier[first:] + tier[:first]


def _least_inflight(tier: list[Candidate], wish: _Wish) -> list[Candidate]:
    return sorted(tier, key=lambda c: (c.inflight, wish.draw()))


def _prefix(tier: list[Candidate], wish: _Wish) -> list[Candidate]:
    """Where the prompt's beginning belongs, then the least busy."""
    by_load = _least_inflight(tier, wish)
    if wish.affinity is None:
        return by_load
    home = _home(tier, wish.affinity, wish.uncached_tokens)
    return [home, *(c for c in by_load if c is not home)]


def _auto(tier: list[Candidate], wish: _Wish) -> list[Candidate]:
    """The home of the prompt's beginning while it costs little, else the better of two; then the rest, best first."""
    if len(tier) == 1:
        return tier
    first: Candidate | None = None
    if wish.affinity is not None and wish.draw() >= AFFINITY_IGNORED:
        home = _home(tier, wish.affinity, wish.uncached_tokens)
        first = home if _is_worth_keeping(home, tier, wish) else None
    if first is None:
        first = _better_of_two(tier, wish.draw)
        if wish.draw() >= 1 - EXPLORED:
            first = tier[int(wish.draw() * len(tier))]
    rest = [c for c in tier if c is not first]
    if len(rest) > 1:
        rest.sort(key=_rank(rest))
    return [first, *rest]


_Arrange = Callable[[list[Candidate], _Wish], list[Candidate]]
_ARRANGE: Final[dict[Balance, _Arrange]] = {
    "auto": _auto,
    "round_robin": _round_robin,
    "least_inflight": _least_inflight,
    "prefix": _prefix,
}


# --- The better of two ---------------------------------------------------------------------------------------------


def _better_of_two(tier: list[Candidate], draw: Callable[[], float]) -> Candidate:
    """The first drawn wins ties, which leaves them to chance."""
    count = len(tier)
    one = int(draw() * count)
    other = int(draw() * (count - 1))
    other += other >= one
    first, second = tier[one], tier[other]
    return second if _is_better(second, first) else first


def _is_better(one: Candidate, other: Candidate) -> bool:
    """Compares like with like: predictions, else what a prompt token took of late, else requests in flight."""
    ours, theirs = one.predicted_s, other.predicted_s
    if ours is None or theirs is None:
        ours, theirs = _crowded_pace(one), _crowded_pace(other)
    if ours is not None and theirs is not None:
        if ours * TIE < theirs:
            return True
        if theirs * TIE < ours:
            return False
    return one.inflight < other.inflight


def _crowded_pace(candidate: Candidate) -> float | None:
    """Seconds per 1,000 tokens if all in flight there were ahead of us (latency-methods §2.6)."""
    pace = candidate.seconds_per_ktoken
    return None if pace is None else pace * (candidate.inflight + 1)


def _rank(rest: list[Candidate]) -> Callable[[Candidate], float]:
    """A number to sort by that all of them have."""
    if all(c.predicted_s is not None for c in rest):
        return lambda c: c.predicted_s or 0.0
    if all(c.seconds_per_ktoken is not None for c in rest):
        return lambda c: _crowded_pace(c) or 0.0
    return lambda c: c.inflight


# --- Affinity ------------------------------------------------------------------------------------------------------


def _home(tier: list[Candidate], affinity: int, uncached_tokens: float) -> Candidate:
    """The first in the key's own order (rendezvous) that is not crowded; or the very first if it is faster."""
    key = affinity.to_bytes(8, "big")
    by_hash = sorted(tier, key=lambda c: blake2b(c.name.encode(), digest_size=8, key=key).digest())
    bound = ceil(LOAD_BOUND * (sum(c.ahead_tokens for c in tier) + uncached_tokens) / len(tier))
    home = by_hash[0]
    if home.ahead_tokens <= bound:
        return home
    least = min(tier, key=lambda c: c.ahead_tokens)
    other = next((c for c in by_hash if c.ahead_tokens <= bound), least)
    if home.predicted_s is not None and other.predicted_s is not None and home.predicted_s <= other.predicted_s:
        return home
    return other


def _is_worth_keeping(home: Candidate, tier: list[Candidate], wish: _Wish) -> bool:
    """Whether home answers at most min(5 s, half the budget) later than the best. Without evidence it is kept."""
    limit = MAX_AFFINITY_COST_S if wish.budget_s is None else min(MAX_AFFINITY_COST_S, wish.budget_s / 2)
    if home.predicted_s is not None:
        return home.predicted_s - min(c.predicted_s for c in tier if c.predicted_s is not None) <= limit
    pace = _crowded_pace(home)
    if pace is None:
        return True
    best = min(other for c in tier if (other := _crowded_pace(c)) is not None)
    return (pace - best) * wish.uncached_tokens / 1000 <= limit


def affinity_key(raw: bytes) -> int | None:
    """A hash of how the conversation begins: the first 2,000 characters of its first turn after the system prompt.

    `raw` is the JSON body as the caller sent it, before cleaning. The order of keys, blanks between them, and whether
    a text stands alone or as the one part of a list do not matter. None: no `messages`, `prompt` or `input`, or less
    than about 500 bytes of it after the system prompt. Never raises.
    """
    try:
        start = _prompt_start(raw)
        found = None if start is None else _first_turn(raw, start)
        if found is None:
            return None
        text, length, end = found
        if not text or not _is_long(raw, length, end):
            return None
    except SpliceError:
        return None
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def _prompt_start(raw: bytes) -> int | None:
    """Offset of the array or text that is the prompt."""
    for needle, find in _PROMPTS:
        position = raw.find(needle)
        found = find(raw, position) if position >= 0 else None
        if found is not None:
            return found.end()
    return None


def _first_turn(raw: bytes, start: int) -> tuple[bytes, int, int] | None:
    """How the first turn after the system prompt begins, its length and its end."""
    position: int | None = start if raw.startswith(b'"', start) else after_blank(raw, start + 1)
    while position is not None and raw.startswith(b"{", position):
        fields = members(raw, position)
        end = after_blank(raw, fields[-1].end if fields else position + 1) + 1
        if not any(f.key == "role" and raw[f.start : f.end] in _SYSTEM_ROLES for f in fields):
            content = next((f for f in fields if f.key == "content"), None)
            return (_text(raw, content.start, content.end) if content is not None else b""), end - position, end
        position = _after_comma(raw, end)
    if position is None:
        return None
    if raw.startswith(b'"', position):
        end = value_end(raw, position)
        return _cut(raw, position + 1, end - 1), end - position, end
    end = raw.find(b"]", position)  # token ids
    return _cut(raw, position, end), end - position, end


def _after_comma(raw: bytes, position: int) -> int | None:
    """Offset of the next element, where one follows."""
    position = after_blank(raw, position)
    return after_blank(raw, position + 1) if raw.startswith(b",", position) else None


def _is_long(raw: bytes, length: int, end: int) -> bool:
    """Whether a conversation whose first turn has that length and that end is worth an affinity.

    Behind a prompt that is one text, the next member's key is taken for another turn, of a few bytes.
    """
    while length < MIN_PROMPT_BYTES:
        position = _after_comma(raw, end)
        if position is None:
            return False
        end = value_end(raw, position)
        length += end - position
    return True


def _text(raw: bytes, start: int, end: int) -> bytes:
    """The beginning of a message's content: a text, or parts. A part without text counts as it is."""
    if raw.startswith(b'"', start):
        return _cut(raw, start + 1, end - 1)
    pieces: list[bytes] = []
    if raw.startswith(b"[", start):
        for part_start, part_end in elements(raw, start):
            is_object = raw.startswith(b"{", part_start)
            text = next((m for m in members(raw, part_start) if m.key == "text"), None) if is_object else None
            if text is not None and raw.startswith(b'"', text.start):
                pieces.append(_cut(raw, text.start + 1, text.end - 1))
            else:
                pieces.append(_cut(raw, part_start, part_end))
    joined = b"".join(pieces)
    return _cut(joined, 0, len(joined))


def _cut(raw: bytes, start: int, end: int) -> bytes:
    """The first 2,000 characters of a span, which are four bytes each at most."""
    text = raw[start : min(end, start + 4 * KEY_CHARACTERS)]
    if text.isascii():
        return text[:KEY_CHARACTERS]
    return text.decode("utf-8", "ignore")[:KEY_CHARACTERS].encode()


# --- How fast an upstream was of late ------------------------------------------------------------------------------


class PeakEwma:
    """Seconds per 1,000 uncached tokens, or any cost: jumps up at once and decays with τ = 10 s (latency-methods §2.6).

    Read, it decays too: one slow answer must not keep an upstream out for as long as nobody asks it.
    """

    __slots__ = ("_at", "_value")

    def __init__(self) -> None:
        self._value: float | None = None
        self._at = 0

    def __repr__(self) -> str:
        return f"<PeakEwma {self._value}>"

    def observe(self, value: float, now: int) -> None:
        """A new sample at `now`, monotonic ns."""
        if self._value is None or value >= self._value:
            self._value = value
        else:
            weight = self._weight(now)
            self._value = self._value * weight + value * (1 - weight)
        self._at = max(self._at, now)

    def read(self, now: int) -> float | None:
        """The cost as of `now`; None before the first sample."""
        return None if self._value is None else self._value * self._weight(now)

    def _weight(self, now: int) -> float:
        return exp(-max(0, now - self._at) / PEAK_DECAY_NS)
