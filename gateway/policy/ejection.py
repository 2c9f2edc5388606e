"""Which upstreams of a pool are left out for what they did (fault-catalogue 3.3), and how they come back. Pure.

    from        event                                     to
    ----------  ----------------------------------------  ---------------------------------------------------------
    in          `consecutive_failures` failures in a row   ejected
    in          silence                                    ejected, silent
    ejected     its time is over                           probation
    ejected     a probe passed                             ramp
    ejected     a first token, if it was silence           ramp
    probation   a success, a first token, a probe passed   ramp
    probation   a failure, silence                         ejected, longer
    ramp        its time is over                           in
    ramp        as from in                                 ejected, longer

An ejection lasts 30 s × times in a row, at most 300 s. The row ends with the first success after an upstream was back
for as long as its last ejection was, so that one which flaps stays out longer each time. On probation it takes one
request at a time; on the ramp from one to all.

Neither for nor against an upstream: a client that left, a 4xx, the loser of a hedge, our own faults. Note nothing then.
A 429 or 503 with Retry-After is no failure: it gives the upstream a rest.

What is left out is decided per pool when it is asked for (`usable`), since an upstream may serve several: at most
max(1, ⌊N/2⌋) ejected ones, the worst, and never the last upstream. A rest is kept as long as another can be used.
When all are bad, the least bad are therefore used: trying beats refusing, and breakers do the refusing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal

from gateway.config import Breaker as Rules

Standing = Literal["in", "ejected", "probation", "ramp"]

_S: Final = 1_000_000_000
_BASE_NS: Final = 30 * _S  # Envoy's base_ejection_time
_MAX_NS: Final = 300 * _S  # Envoy's max_ejection_time; also the longest Retry-After that is believed (3.11)
_RAMP_NS: Final = 10 * _S
_MIN_SHARE: Final = 0.05  # of its traffic, for one that takes a request at a time
_EJECTION_JITTER: Final = 0.2  # shortens, so that the longest ejection stays the longest
_REST_JITTER: Final = 0.2  # lengthens: Retry-After × U(1.0, 1.2), never earlier (3.6)
_SILENT_WAITS: Final = 3  # one long prefill or a lost packet is not three
_MIN_NAMED: Final = 2  # a pool of one leaves nobody out


def first_token_limit_ns(slow_call_duration_ms: int, predicted_ns: int) -> int:
    """How long a request may wait for its first token before it is slow, and evidence of silence.

    `predicted_ns`: what was expected when it was sent, 0 for unknown. A long prompt is slow without being bad.
    """
    return max(slow_call_duration_ms * 1_000_000, 3 * predicted_ns)


def is_silent(waits: Iterable[tuple[int, int]], last_token: int, now: int, *, enough: int = _SILENT_WAITS) -> bool:
    """True if an upstream takes requests and answers none, whatever its health page says (C113).

    `waits`: for each request without a first token, when it was sent and its `first_token_limit_ns`. `last_token`:
    when the upstream last gave anybody a token, be it the first or not (C114: a busy server is alive); 0 for never.
    Only requests sent since then tell anything; `enough` of them must be over their limit.
    """
    count = 0
    for sent, limit in waits:
        if sent >= last_token and now - sent > limit:
            count += 1
            if count >= enough:
                return True
    return False


class _Record:
    """What is remembered of one upstream. Instants in monotonic ns."""

    __slots__ = (
        "ejected_at", "ejected_until", "failures", "is_counting", "is_enforced", "is_silent", "limit", "ramp_from",
        "rest_until", "times",
    )  # fmt: skip

    def __init__(self, rules: Rules) -> None:
        self.failures = 0  # in a row
        self.times = 0  # ejected in a row
        self.ejected_at: int | None = None  # the last time; kept after the return
        self.ejected_until: int | None = None  # None: not ejected, and not on probation
        self.is_silent = False  # why it was ejected
        self.ramp_from: int | None = None  # kept after the ramp: since when it is back
        self.rest_until: int | None = None
        self.follow(rules)

    def follow(self, rules: Rules) -> None:
        """Take new settings and keep what is known."""
        self.limit = rules.consecutive_failures
        self.is_counting = rules.mode != "off"
        self.is_enforced = rules.mode == "on"

    def is_calm(self, now: int, ramp_ns: int) -> bool:
        """True if there is nothing to say about it."""
        is_back = self.ramp_from is None or now - self.ramp_from >= ramp_ns
        return self.ejected_until is None and is_back and not _is_resting(self, now)

    def badness(self) -> tuple[bool, int, int]:
        """Greater is worse: silence before errors, then how often, then how long it is still out."""
        return self.is_silent, self.times, self.ejected_until or 0


class Ejections:
    """Remembers failures, silence and pressure of every upstream by name. `now` is monotonic ns.

    Names that the settings do not have are ignored: an upstream was removed while its last requests ended. With
    `mode: metrics_only` all is noted and shown, and nobody is ejected; with `mode: off` only pressure is noted. A rest
    is kept in every mode: the upstream itself asked for it.
    """

    __slots__ = ("_jitter", "_ramp_ns", "_records", "_watched")

    def __init__(self, rules: Mapping[str, Rules], *, jitter: Callable[[], float], ramp_ns: int = _RAMP_NS) -> None:
        """`rules`: of each upstream; `jitter` gives [0, 1); `ramp_ns`: from one request at a time to all."""
        self._jitter = jitter
        self._ramp_ns = max(1, ramp_ns)
        self._records: dict[str, _Record] = {}
        self._watched: dict[str, _Record] = {}  # those about which there is something to say; mostly empty
        self.follow(rules)

    def __repr__(self) -> str:
        return f"Ejections({len(self._records)} upstreams, {', '.join(self._watched) or 'none'} watched)"

    def follow(self, rules: Mapping[str, Rules]) -> None:
        """New settings: who stays keeps its record (C118), who left is forgotten (C117)."""
        old = self._records
        self._records = {}
        for name, rule in rules.items():
            record = self._records[name] = old.get(name) or _Record(rule)
            record.follow(rule)
        self._watched = {name: record for name, record in self._watched.items() if name in self._records}

    def note_success(self, name: str, now: int, *, sent: int | None = None) -> None:
        """A request that ended well. `sent`: when, so that one from before an ejection says nothing about today."""
        record = self._records.get(name)
        if record is None or _is_older(record, sent):
            return
        record.failures = 0
        if record.ejected_until is not None:
            if now >= record.ejected_until:
                self._ramp(name, record, now)
        elif record.times and record.ramp_from is not None and now - record.ramp_from >= _ejection_ns(record.times):
            record.times = 0

    def note_failure(self, name: str, now: int, *, sent: int | None = None) -> bool:
        """A request that failed through the upstream's fault (3.2). True if the upstream is ejected now for it."""
        record = self._records.get(name)
        if record is None or not record.is_counting or _is_older(record, sent) or _is_ejected(record, now):
            return False
        record.failures += 1
        if record.failures < record.limit and record.ejected_until is None:
            return False
        self._eject(name, record, now, is_silent=False)
        return True

    def note_waits(self, name: str, waits: Iterable[tuple[int, int]], last_token: int, now: int) -> bool:
        """Judge what is waiting for a first token as `is_silent` does. True if the upstream is ejected now for it.

        Requests from before the last ejection led to it, and count no more. On probation one is enough, because there
        is only one. Ask once a second or so.
        """
        record = self._records.get(name)
        if record is None or _is_ejected(record, now):
            return False
        since = max(last_token, record.ejected_at or 0)
        enough = _SILENT_WAITS if record.ejected_until is None else 1
        return is_silent(waits, since, now, enough=enough) and self.note_silence(name, now)

    def note_silence(self, name: str, now: int) -> bool:
        """It takes requests and answers none. True if the upstream is ejected now for it."""
        record = self._records.get(name)
        if record is None or not record.is_counting or _is_ejected(record, now):
            return False
        self._eject(name, record, now, is_silent=True)
        return True

    def is_silent(self, name: str, now: int) -> bool:
        """It is left out because it answered nobody."""
        record = self._watched.get(name)
        return record is not None and record.is_silent and record.is_enforced and _is_ejected(record, now)

    def note_token(self, name: str, now: int) -> None:
        """A first token came. It ends an ejection for silence at once, and a probation; cheap otherwise."""
        record = self._watched.get(name)
        if record is not None and (record.is_silent or not _is_ejected(record, now)):
            self._come_back(name, record, now)

    def note_back(self, name: str, now: int) -> None:
        """A probe passed that made the model generate (a green health page proves nothing, C113)."""
        record = self._watched.get(name)
        if record is not None:
            self._come_back(name, record, now)

    def note_return(self, name: str, now: int) -> None:
        """It comes back from elsewhere: restarted and warm (D1), or its breaker closed. Starts it slowly."""
        record = self._records.get(name)
        if record is not None:
            self._ramp(name, record, now)

    def note_pressure(self, name: str, until: int, now: int) -> None:
        """A 429 or 503 whose Retry-After ends at `until`: no requests until then, at most for 300 s."""
        record = self._records.get(name)
        if record is None or until <= now:
            return
        rest = min(int((until - now) * (1 + _REST_JITTER * self._jitter())), _MAX_NS)
        record.rest_until = max(record.rest_until or 0, now + rest)
        self._watched[name] = record

    def usable(self, names: Sequence[str], now: int) -> list[str]:
        """The upstreams of a pool that may be asked, in the same order. Never empty unless `names` is."""
        if not self._watched or len(names) < _MIN_NAMED:
            return list(names)
        self._forget_calm(now)
        watched = self._watched
        ejected = [name for name in names if (r := watched.get(name)) and r.is_enforced and _is_ejected(r, now)]
        if ejected:
            ejected.sort(key=lambda name: watched[name].badness(), reverse=True)
            out = set(ejected[: len(names) // 2])  # one of two or three; a pool of one does not come here
            names = [name for name in names if name not in out]
        rested = [name for name in names if not _is_resting(watched.get(name), now)]
        return rested or list(names)

    def share(self, name: str, now: int) -> float:
        """The part of its usual traffic that an upstream may take now, in (0, 1]."""
        record = self._watched.get(name)
        if record is None or not record.is_enforced:
            return 1.0
        if record.ejected_until is not None:
            return _MIN_SHARE
        if record.ramp_from is None:
            return 1.0
        done = (now - record.ramp_from) / self._ramp_ns
        return min(1.0, max(_MIN_SHARE, done))

    def max_inflight(self, name: str, full: int, now: int) -> int:
        """How many requests an upstream may have at a time, of `full` when nothing is wrong; never below 1.

        A reason to prefer another, not to refuse: nobody is held to it when no other of the pool has room.
        """
        share = self.share(name, now)
        return full if share >= 1 else 1 + int((full - 1) * (share if share > _MIN_SHARE else 0))

    def standing(self, name: str, now: int) -> Standing:
        """Where an upstream is in the table above; says nothing of rests."""
        record = self._watched.get(name)
        if record is None:
            return "in"
        if record.ejected_until is not None:
            return "ejected" if now < record.ejected_until else "probation"
        is_ramping = record.ramp_from is not None and now - record.ramp_from < self._ramp_ns
        return "ramp" if is_ramping else "in"

    def snapshot(self, now: int) -> dict[str, dict[str, object]]:
        """What a status page shows, by name."""
        return {
            name: {
                "standing": self.standing(name, now),
                "is_enforced": record.is_enforced,
                "is_silent": record.is_silent,
                "failures_in_a_row": record.failures,
                "ejected_in_a_row": record.times,
                "remaining_s": _seconds_left(record.ejected_until, now),
                "rest_s": _seconds_left(record.rest_until, now),
                "share": self.share(name, now),
            }
            for name, record in self._records.items()
        }

    def _eject(self, name: str, record: _Record, now: int, *, is_silent: bool) -> None:
        record.times += 1
        record.failures = 0
        record.is_silent = is_silent
        record.ejected_at = now
        record.ejected_until = now + int(_ejection_ns(record.times) * (1 - _EJECTION_JITTER * self._jitter()))
        record.ramp_from = None
        self._watched[name] = record

    def _ramp(self, name: str, record: _Record, now: int) -> None:
        record.failures = 0
        record.is_silent = False
        record.ejected_until = None
        record.ramp_from = now
        self._watched[name] = record

    def _come_back(self, name: str, record: _Record, now: int) -> None:
        if record.ejected_until is not None:
            self._ramp(name, record, now)

    def _forget_calm(self, now: int) -> None:
        """Stop watching those that are all the way back, so that the usual path is the short one again."""
        for name in [name for name, record in self._watched.items() if record.is_calm(now, self._ramp_ns)]:
            del self._watched[name]


def _ejection_ns(times: int) -> int:
    return min(_BASE_NS * times, _MAX_NS)


def _is_older(record: _Record, sent: int | None) -> bool:
    return sent is not None and record.ejected_at is not None and sent < record.ejected_at


def _is_ejected(record: _Record, now: int) -> bool:
    return record.ejected_until is not None and now < record.ejected_until


def _is_resting(record: _Record | None, now: int) -> bool:
    return record is not None and record.rest_until is not None and now < record.rest_until


def _seconds_left(until: int | None, now: int) -> float:
    return max(0, (until or now) - now) / 1e9
