"""What replicas tell each other about a pending request, and the interface of the stores that carry it.

The process that runs the request is its *owner*: it keeps the live recording in memory and mirrors it into the
store. Any other process answers polls, replays and cancels from there. The record is in the store before the 202
leaves (C122). An owner holds a lease; when that ends, its running entries read as failed, never as running for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, get_args

import orjson

State = Literal["pending", "done", "failed", "cancelled"]
STATES: Final[frozenset[str]] = frozenset(get_args(State))


class StoreDown(Exception):
    """The store did not answer in time, or answered that it cannot serve now. Says nothing about the entry."""


class StoreUnusable(Exception):
    """The store that the settings name can never work here. The message says what to do."""


@dataclass(slots=True)
class Entry:
    """One pending request, as other replicas see it. The owner changes its own and hands it to the store again."""

    id: str
    owner_key: str  # opaque digest of the key that created it; "" when the gateway is open
    replica: str  # `Store.replica` of the owner
    state: State
    created_ms: int  # wall clock, for people
    info: dict[str, object] = field(default_factory=dict)  # JSON: route, model, phase, estimation_ms …
    status: int = 0  # of the upstream's own answer; 0 until it began
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    size: int = 0  # bytes of the answer that can be read
    error: dict[str, object] | None = None  # `reason` for programs, `message` for people
    fingerprint: str = ""  # of key and body, so that an SDK's retry finds the running one; "": none
    is_whole: bool = True  # False: the answer grew past the bound of one result, and its end is not in the store


class Store(Protocol):
    """Where replicas meet. Every call that can wait raises `StoreDown` within 50 ms rather than wait longer."""

    is_shared: bool  # False: nobody else sees what is written here
    replica: str  # this process, unique; the owner's `Entry.replica`
    on_cancel: Callable[[str], None] | None  # somebody asks for the end of an entry of ours; once per entry
    on_state: Callable[[bool], None] | None  # the store became reachable, or no longer is
    on_damaged: Callable[[str], None] | None  # the store lost an entry of ours: `restore` must follow

    @property
    def is_up(self) -> bool:
        """False while every call fails at once."""
        ...

    async def open(self) -> None:
        """Starts the work in the background. Returns whether or not the store can be reached (G1)."""
        ...

    async def close(self) -> None:
        """Writes what is queued, within a bound, and gives the lease back: entries still running are lost (C129)."""
        ...

    async def create(self, entry: Entry) -> None:
        """Announces an entry. When it raises `StoreDown` the entry does not exist and must not be promised."""
        ...

    def append(self, entry_id: str, data: bytes) -> None:
        """More bytes of the answer, in order from its start. Counts them in the entry's `size`. Never waits."""
        ...

    def update(self, entry: Entry) -> None:
        """News about a running entry. The object is read again when it is written, so several become one."""
        ...

    def finish(self, entry: Entry) -> None:
        """The terminal state, after all that was appended. The first one stays (C126)."""
        ...

    def restore(self, entry: Entry, data: bytes | None) -> None:
        """Writes an entry again from its start; `data` is all that was recorded so far, None when that is gone."""
        ...

    async def get(self, entry_id: str) -> Entry | None:
        """The entry, or None when there is none (any more)."""
        ...

    async def read(self, entry_id: str, offset: int, limit: int) -> bytes:
        """Up to `limit` bytes of the answer; fewer when there are not so many yet, or when that would take long."""
        ...

    async def wait(self, entry_id: str, size: int, timeout_s: float) -> None:
        """Returns when more than `size` bytes can be read, the entry is not running, or the time is over."""
        ...

    async def cancel(self, entry_id: str) -> bool:
        """Asks the owner to stop. False when the entry is not running."""
        ...

    async def find(self, fingerprint: str) -> str | None:
        """The id of a running entry with this fingerprint."""
        ...


def encode(entry: Entry) -> bytes:
    """The entry as JSON. `size` is the length at this moment."""
    value = {
        "id": entry.id,
        "owner_key": entry.owner_key,
        "replica": entry.replica,
        "state": entry.state,
        "created_ms": entry.created_ms,
        "info": entry.info,
        "status": entry.status,
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in entry.headers],
        "size": entry.size,
        "error": entry.error,
        "fingerprint": entry.fingerprint,
        "is_whole": entry.is_whole,
    }
    try:
        return orjson.dumps(value)
    except TypeError:  # half a surrogate pair in a name that the caller sent must not cost the answer (C048)
        return json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace")


def decode(entry_id: str, data: object) -> Entry | None:
    """The entry of that id, or None for anything that is not one: foreign values count as absent (G7)."""
    if not isinstance(data, bytes):
        return None
    try:
        value = orjson.loads(data)
        headers = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in value["headers"]]
        entry = Entry(**{**value, "headers": headers})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return entry if entry.id == entry_id and _is_sound(entry) else None


def _is_sound(entry: Entry) -> bool:
    kinds: dict[type, tuple[object, ...]] = {
        str: (entry.owner_key, entry.replica, entry.state, entry.fingerprint),
        int: (entry.created_ms, entry.status, entry.size),
        dict: (entry.info, entry.error if entry.error is not None else {}),
        bool: (entry.is_whole,),
    }
    return all(type(value) is kind for kind, values in kinds.items() for value in values) and entry.state in STATES
