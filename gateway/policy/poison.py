"""Requests whose body makes a model server die: "queries of death" (fault-catalogue D8). Pure.

A server that closes a fresh connection without a byte may have died of the request. After the second death with the
same body, that body is refused for five minutes, so that one caller who tries again and again cannot take the fleet
down. A reset alone is no death, as equal bodies are usual (a probe, a benchmark) and connections are reset for many
reasons: the server must have been seen down afterwards, or as another process. What was under way in one death counts
once. An answer to the same body takes the suspicion away.

Bodies are known by a keyed digest only. Bounded: the oldest suspicion goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

REFUSED_NS: Final = 300 * 1_000_000_000  # D8: five minutes
ENOUGH_KILLS: Final = 2  # D8
MAX_KILLS: Final = 16  # remembered of one body
MAX_SUSPECTS: Final = 1024  # bodies; a crash suspects all that were under way


class _Suspect:
    __slots__ = ("killed", "until")

    def __init__(self) -> None:
        self.killed: set[tuple[str, int]] = set()  # upstream, and which of its lives
        self.until = 0


class Poison:
    """Suspected bodies. `key`: secret of this process, so that nobody can aim at a digest; `now` in monotonic ns."""

    __slots__ = ("_key", "_suspects")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Poison {len(self._suspects)} suspects>"

    def __len__(self) -> int:
        return len(self._suspects)

    def has_suspects(self, now: int) -> bool:
        """False: no body need be looked at. Forgets those whose time is over."""
        while self._suspects and now >= next(iter(self._suspects.values())).until:
            self._suspects.popitem(last=False)
        return bool(self._suspects)

    def digest(self, body: bytes) -> bytes:
        return blake2b(body, digest_size=16, key=self._key).digest()

    def note_kill(self, digest: bytes, upstream: str, life: int, now: int) -> None:
        """An upstream broke off without a byte on a fresh connection; `life`: how often it was restarted before."""
        suspect = self._suspects.setdefault(digest, _Suspect())
        if suspect.until and now >= suspect.until:
            suspect.killed.clear()  # of another day
        if len(suspect.killed) < MAX_KILLS:
            suspect.killed.add((upstream, life))
        suspect.until = now + REFUSED_NS
        self._suspects.move_to_end(digest)
        while len(self._suspects) > MAX_SUSPECTS:
            self._suspects.popitem(last=False)

    def note_answer(self, digest: bytes) -> None:
        """It was answered: whatever the servers died of, it was not this."""
        self._suspects.pop(digest, None)

    def is_refused(self, digest: bytes, now: int, has_died: Callable[[str, int], bool]) -> bool:
        """True if servers died of it twice and five minutes are not over. Forgets what is older.

        `has_died(upstream, life)`: whether that life of the upstream is known to have ended.
        """
        suspect = self._suspects.get(digest)
        if suspect is None:
            return False
        if now >= suspect.until:
            del self._suspects[digest]
            return False
        return sum(has_died(*killed) for killed in suspect.killed) >= ENOUGH_KILLS
