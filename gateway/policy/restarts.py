"""Whether a model server is another process than before (cases C150; upstream-contract §8).

No single sign is always there. `process_start_time_seconds` tells it exactly, but is missing where several processes
serve one `/metrics`; counters then fall back. `created` of `/v1/models` is the time of the call itself on vLLM, SGLang
and llama.cpp, so it counts only where it stood still before. A refused connection followed by an answer always counts.

Behind one address there may be several servers. A start time, a version or a `created` that was seen before is
therefore no restart but the other server, and counters that keep going up and down are not believed any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Sign = Literal["refused", "start_time", "counter", "created", "version"]

SIGNS: Final[Mapping[Sign, str]] = {
    "refused": "it refused connections and answers again",
    "start_time": "the start time of its process changed",
    "counter": "its counters began anew",
    "created": "the `created` times of its models changed",
    "version": "its version changed",
}

START_SLACK_S: Final = 1.0  # a start time is computed from the clock of the machine, which may be corrected
STOOD_STILL_NS: Final = 2_000_000_000  # `created` is in whole seconds: two calls in one second say nothing
DROPS: Final = 3
DROPS_WITHIN_NS: Final = 60_000_000_000  # no server loads a model three times in a minute
MAX_VERSIONS: Final = 16


@dataclass(frozen=True, slots=True)
class Sighting:
    """What one look at a server showed; None or empty where it does not tell."""

    start_time_s: float | None = None  # Unix time
    counters: Mapping[str, float] = field(default_factory=dict)
    created: int | None = None  # the latest of the model list
    version: str | None = None


def increase(before: float, after: float) -> float:
    """How much a counter grew; after a restart all that it counted since. Never negative (cases C150)."""
    return after - before if after >= before else max(0.0, after)


class RestartEvidence:
    """Remembers of one server what a restart would change."""

    __slots__ = (
        "_counters", "_created", "_created_at", "_drops", "_newest_created", "_newest_start", "_versions",
        "_was_refused", "is_same_process",
    )  # fmt: skip

    def __init__(self) -> None:
        self._was_refused = False
        self._newest_start: float | None = None
        self._counters: dict[str, float] = {}
        self._drops: deque[int] = deque(maxlen=DROPS)
        self._created: int | None = None
        self._created_at = 0
        self._newest_created: int | None = None  # of those that stood still
        self._versions: dict[str, None] = {}
        self.is_same_process = False
        """The last look proved that the process is one known before, whatever happened in between."""

    def __repr__(self) -> str:
        return f"<RestartEvidence started {self._newest_start}, {len(self._versions)} versions>"

    def refused(self) -> None:
        """A connection was refused, or the server said that it is loading."""
        self._was_refused = True

    def look(self, seen: Sighting, now: int) -> Sign | None:
        """The sign of a restart since the last look, or None. Call it once per successful probe."""
        sign = self._sign(seen, now)
        if sign is not None:
            self._begin_anew(seen)
        return sign

    def _sign(self, seen: Sighting, now: int) -> Sign | None:
        started = self._start_changed(seen.start_time_s)
        dropped = self._counter_dropped(seen.counters, now)
        created = self._created_changed(seen.created, now)
        version = self._version_changed(seen.version)
        was_refused, self._was_refused = self._was_refused, False
        if self.is_same_process and not version:
            return None  # a listener may refuse for a moment (a full backlog) without any restart
        if started:
            return "start_time"
        if was_refused:
            return "refused"
        if dropped and seen.start_time_s is None:
            return "counter"
        return "version" if version else "created" if created else None

    def _begin_anew(self, seen: Sighting) -> None:
        """One restart is told once: what this look did not show is not compared with the old process later."""
        self._newest_start = seen.start_time_s
        self._counters = dict(seen.counters)
        if seen.created is None:
            self._created = self._newest_created = None
        if seen.version is None:
            self._versions.clear()

    def _start_changed(self, start: float | None) -> bool:
        newest = self._newest_start
        self.is_same_process = start is not None and newest is not None and start <= newest + START_SLACK_S
        if start is None or self.is_same_process:
            return False
        self._newest_start = start
        return newest is not None

    def _counter_dropped(self, counters: Mapping[str, float], now: int) -> bool:
        is_lower = any(value < self._counters.get(name, 0.0) for name, value in counters.items())
        self._counters.update(counters)
        if not is_lower:
            return False
        self._drops.append(now)
        return len(self._drops) < DROPS or now - self._drops[0] > DROPS_WITHIN_NS

    def _created_changed(self, created: int | None, now: int) -> bool:
        if created is None:
            return False
        if created != self._created:
            newest = self._newest_created
            is_newer = newest is not None and self._created == newest and created > newest
            self._created, self._created_at = created, now
            return is_newer
        if now - self._created_at >= STOOD_STILL_NS:
            self._newest_created = max(created, self._newest_created or created)
        return False

    def _version_changed(self, version: str | None) -> bool:
        if version is None or version in self._versions:
            return False
        is_first = not self._versions
        self._versions[version] = None
        while len(self._versions) > MAX_VERSIONS:
            del self._versions[next(iter(self._versions))]
        return not is_first
