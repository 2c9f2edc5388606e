"""What this process has told the store, and has yet to tell it, about its own entries.

No I/O here: `batch` gives the commands of one round trip, `acknowledge` takes the replies. Until a write is
acknowledged its bytes stay queued, and it is repeated after an outage. What cannot be kept, because the queue is full
or because the store itself forgot an entry, makes the entry *damaged*: nothing more is written of it until the owner
restores it from its recording. An entry that ends damaged and cannot be restored ends as failed, never as half done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from gateway import config
from gateway.store import keys
from gateway.store.entry import Entry, encode
from gateway.store.link import Command

MEGABYTE: Final = 1024 * 1024
BATCH_BYTES: Final = 256 * 1024  # one round trip; far below what 50 ms allow
BATCH_COMMANDS: Final = 64  # the same: a server takes some 50 µs for each
MAX_QUEUE_BYTES: Final = 32 * MEGABYTE
RUNNING_TTL_S: Final = 300.0  # at least, and renewed at a third of it: a dead owner's entries do not stay for ever
_LOST: Final[dict[str, object]] = {
    "reason": "store_lost",
    "message": "the shared store lost this answer; send the request again",
}
_NOT_CREATED: Final[dict[str, object]] = {"reason": "not_created", "message": "the request was answered otherwise"}


@dataclass(slots=True, eq=False)
class Copy:
    """One own entry on its way to the store."""

    entry: Entry
    chunks: deque[bytes] = field(default_factory=deque)  # not acknowledged
    written: int = 0  # bytes acknowledged
    starts: int = 0  # how often it was begun anew: replies to what was sent before mean nothing any more
    is_opening: bool = True  # `create` is under way: nothing else may be written
    is_afresh: bool = True  # the next write replaces whatever lies there
    has_news: bool = True
    is_ended: bool = False
    is_closed: bool = False  # a terminal state is in the store
    closed_at: float = 0.0  # seconds of the caller's clock
    is_damaged: bool = False
    was_cancelled: bool = False  # somebody's wish was passed on


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one command of a batch carries."""

    copy: Copy
    starts: int
    count: int  # chunks
    size: int  # their bytes
    has_end: bool


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Commands that go out together, and what each of them carries."""

    commands: list[Command]
    parts: list[Part]


class Mirror:
    """The own entries. `queued` counts bytes that the store has not acknowledged."""

    def __init__(self, limits: config.Pending) -> None:
        self._max_result = int(limits.max_result_mb * MEGABYTE)
        self._max_queue = min(MAX_QUEUE_BYTES, int(limits.max_total_mb * MEGABYTE))
        self._ttl_s = limits.ttl_s
        self._running_ttl_s = max(RUNNING_TTL_S, limits.ttl_s)
        self._copies: dict[str, Copy] = {}
        self._dirty: dict[str, None] = {}  # in the order in which they are written
        self._damaged: dict[str, None] = {}  # not told yet
        self.queued = 0

    def __repr__(self) -> str:
        return f"Mirror({len(self._copies)} entries, {len(self._dirty)} to write, {self.queued} bytes queued)"

    @property
    def renew_every_s(self) -> float:
        """How often the time to live of running entries is renewed."""
        return self._running_ttl_s / 3

    @property
    def is_written(self) -> bool:
        """True when the store was told everything."""
        return not self._dirty

    def running(self) -> Iterator[str]:
        """Ids of own entries without a terminal state in the store."""
        return (entry_id for entry_id, copy in self._copies.items() if not copy.is_closed)

    def add(self, entry: Entry) -> Command:
        """A new entry, and the command that announces it. `created` or `abandon` must follow."""
        entry.size, entry.is_whole = 0, True
        copy = self._copies[entry.id] = Copy(entry)
        command = self._command(copy, b"", None)
        copy.has_news = False
        return command

    def created(self, entry_id: str) -> None:
        """The announcement is in the store."""
        copy = self._copies[entry_id]
        copy.is_opening = copy.is_afresh = False
        self._settle(copy)

    def abandon(self, entry_id: str) -> None:
        """The announcement may have arrived or not; whoever finds it shall not wait for it."""
        copy = self._copies[entry_id]
        self._end_without_data(copy, _NOT_CREATED)

    def append(self, entry_id: str, data: bytes) -> bool:
        """Queues more bytes. True when there is something to write now."""
        copy = self._copies.get(entry_id)
        if copy is None or copy.is_ended or copy.is_damaged or not copy.entry.is_whole:
            return False
        if copy.entry.size + len(data) > self._max_result:
            copy.entry.is_whole = False
            return self._touch(copy)
        if self.queued + len(data) > self._max_queue:
            self._damage(copy)
            return False
        self._queue(copy, data)
        return self._touch(copy, is_news=False)

    def update(self, entry: Entry) -> bool:
        """News of a running entry. True when there is something to write now."""
        copy = self._copies.get(entry.id)
        if copy is None or copy.is_ended:
            return False
        self._adopt(copy, entry)
        return self._touch(copy)

    def finish(self, entry: Entry) -> bool:
        """The end of an entry. True when there is something to write now."""
        copy = self._copies.get(entry.id)
        if copy is None or copy.is_ended:
            return False
        self._adopt(copy, entry)
        copy.entry = replace(entry)  # what the owner does to its own from now on is not told
        copy.is_ended = True
        if copy.is_damaged:
            self._damaged[entry.id] = None  # asked again: the last chance for a whole answer
            return True
        return self._touch(copy)

    def restore(self, entry: Entry, data: bytes | None) -> None:
        """Starts an entry over with what its owner recorded, or gives it up as failed."""
        copy = self._copies.get(entry.id)
        if copy is None:
            return
        self._forget_chunks(copy)
        is_ended = copy.is_ended or entry.state != "pending"
        copy.entry = replace(entry) if is_ended else entry
        copy.is_ended, copy.is_closed = is_ended, False
        copy.is_damaged = copy.is_opening = False
        self._damaged.pop(entry.id, None)
        if data is None:
            self._end_without_data(copy, _LOST)
            return
        copy.entry.is_whole = len(data) <= self._max_result
        data = data[: self._max_result]
        copy.entry.size = 0
        self._queue(copy, data)
        copy.is_afresh = True
        self._touch(copy)

    def cancelled(self, entry_id: str) -> bool:
        """Notes a wish to stop. True when the owner should hear it: for a running entry, once."""
        copy = self._copies.get(entry_id)
        if copy is None or copy.is_ended or copy.was_cancelled:
            return False
        copy.was_cancelled = True
        return True

    def forgotten(self) -> None:
        """The store lost what it knew: everything in it is damaged."""
        for copy in self._copies.values():
            self._damage(copy)

    def next_damaged(self) -> str | None:
        """One entry that its owner should restore, each once; none while earlier ones fill the queue."""
        if not self._damaged or self.queued > self._max_queue // 2:
            return None
        entry_id = next(iter(self._damaged))
        del self._damaged[entry_id]
        return entry_id

    def give_up(self, entry_id: str) -> None:
        """Nobody can restore a damaged entry. One that runs on fails now; one that ended is left as it was."""
        copy = self._copies[entry_id]
        if copy.is_closed:
            copy.is_damaged = False
        else:
            self._end_without_data(copy, _LOST)

    def renew(self) -> None:
        """Writes the records of running entries again, so that they do not expire under a quiet owner."""
        for copy in self._copies.values():
            if not copy.is_ended and not copy.is_opening:
                self._touch(copy)

    def expire(self, now: float) -> None:
        """Forgets entries whose time to live in the store is over. `now` is in seconds, as for `acknowledge`."""
        for entry_id, copy in list(self._copies.items()):
            if copy.is_ended and copy.is_damaged and not copy.closed_at:
                copy.closed_at = now  # its owner was asked to restore it, and may never do so
            if (copy.is_closed or copy.is_damaged) and copy.closed_at and now - copy.closed_at > self._ttl_s:
                del self._copies[entry_id]
                self._damaged.pop(entry_id, None)

    def batch(self) -> Batch:
        """What goes out next, at most about `BATCH_BYTES` and `BATCH_COMMANDS`."""
        batch, room = Batch([], []), BATCH_BYTES
        for entry_id in list(self._dirty):
            copy = self._copies.get(entry_id)
            if copy is None or copy.is_damaged or copy.is_opening or copy.is_closed:
                del self._dirty[entry_id]
                continue
            count, size = _fitting(copy.chunks, room)
            room -= size
            chunk = b"".join(copy.chunks[index] for index in range(count))
            end = encode(copy.entry) if copy.is_ended and count == len(copy.chunks) else None
            batch.commands.append(self._command(copy, chunk, end))
            batch.parts.append(Part(copy, copy.starts, count, size, end is not None))
            copy.has_news = False
            if room <= 0 or len(batch.commands) == BATCH_COMMANDS:
                break
        return batch

    def acknowledge(self, batch: Batch, replies: list[object], now: float) -> None:
        """What the store made of a batch."""
        for part, reply in zip(batch.parts, replies, strict=True):
            copy = part.copy
            if part.starts != copy.starts:
                continue
            if reply == keys.ENDED or (part.has_end and _is_size(reply)):
                self._forget_chunks(copy)
                copy.is_closed, copy.closed_at = True, now
            elif _is_size(reply):
                for _ in range(part.count):
                    copy.chunks.popleft()
                copy.written += part.size
                copy.is_afresh = False
                self.queued -= part.size
            else:
                self._damage(copy)
            self._settle(copy)

    def refuse(self, batch: Batch) -> None:
        """The batch may have arrived or not: it is sent again."""
        for part in batch.parts:
            part.copy.has_news = True

    def _settle(self, copy: Copy) -> None:
        """Out of the line when there is nothing more to write, else to its end, so that all get their turn."""
        self._dirty.pop(copy.entry.id, None)
        if copy.is_closed or copy.is_damaged:
            return
        if copy.chunks or copy.has_news or copy.is_ended:
            self._dirty[copy.entry.id] = None

    def _command(self, copy: Copy, chunk: bytes, end: bytes | None) -> Command:
        entry_id = copy.entry.id
        needs_record = copy.has_news or copy.is_afresh
        ttl_s = self._running_ttl_s if end is None else self._ttl_s
        return (
            "EVAL",
            keys.WRITE,
            2,
            keys.entry_key(entry_id),
            keys.data_key(entry_id),
            encode(copy.entry) if needs_record else b"",
            copy.written,
            chunk,
            end or b"",
            int(ttl_s * 1000),
            keys.changed_channel(entry_id),
            int(copy.is_afresh),
        )

    def _adopt(self, copy: Copy, entry: Entry) -> None:
        """The owner's newer object for the entry; what was counted here stays right."""
        entry.size, entry.is_whole = copy.entry.size, copy.entry.is_whole
        copy.entry = entry

    def _queue(self, copy: Copy, data: bytes) -> None:
        if len(data) > BATCH_BYTES:
            copy.chunks.extend(data[start : start + BATCH_BYTES] for start in range(0, len(data), BATCH_BYTES))
        else:
            copy.chunks.append(data)
        copy.entry.size += len(data)
        self.queued += len(data)

    def _touch(self, copy: Copy, *, is_news: bool = True) -> bool:
        copy.has_news |= is_news
        if copy.is_damaged or copy.is_opening:
            return False
        self._dirty[copy.entry.id] = None
        return True

    def _damage(self, copy: Copy) -> None:
        if copy.is_damaged or copy.is_opening:
            return
        self._forget_chunks(copy)
        if not copy.entry.size:  # nothing that only the owner has
            copy.is_afresh, copy.is_closed = True, False
            self._touch(copy)
            return
        copy.is_damaged = True
        self._damaged[copy.entry.id] = None

    def _end_without_data(self, copy: Copy, error: dict[str, object]) -> None:
        self._forget_chunks(copy)
        copy.entry = replace(copy.entry, state="failed", error=error, size=0)
        copy.is_ended = copy.is_afresh = True
        copy.is_damaged = copy.is_opening = copy.is_closed = False
        self._touch(copy)

    def _forget_chunks(self, copy: Copy) -> None:
        self.queued -= sum(map(len, copy.chunks))
        copy.chunks.clear()
        copy.written = 0
        copy.starts += 1


def _is_size(reply: object) -> bool:
    return isinstance(reply, int) and reply >= 0


def _fitting(chunks: deque[bytes], room: int) -> tuple[int, int]:
    """How many chunks fit, and their bytes; always one, however large."""
    size = 0
    for count, chunk in enumerate(chunks):
        if count and size + len(chunk) > room:
            return count, size
        size += len(chunk)
    return len(chunks), size
