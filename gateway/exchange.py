"""One request and its answer: what is known of it, from the first byte to the account. No I/O.

`Call` is the caller's side as the proxy sees it. Two things implement it: `server.DirectCall` (uvicorn's httptools
protocol, writes go straight to the transport) and `asgi.AsgiCall` (any ASGI server, in-memory tests).
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Protocol

from gateway.errors import Api, GatewayError
from gateway.timing.timeline import Timeline
from gateway.wire.headers import Headers, first, sane_request_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.attempt import Attempt
    from gateway.config import Budget
    from gateway.metrics import Outcome
    from gateway.policy.heartbeat import BeatClock
    from gateway.wire.kinds import Kind
    from gateway.wire.plain import PlainAnswer
    from gateway.wire.stream import StreamReader


class ClientGone(Exception):
    """The caller closed its connection. Not an error of anybody's."""


class CallWatcher(Protocol):
    """Told by a call what happens to the client's connection; called from the event loop, must not block."""

    def on_client_gone(self) -> None: ...
    def on_client_paused(self) -> None: ...
    def on_client_resumed(self) -> None: ...


class Call(Protocol):
    """The caller's side of one exchange. Writes never block; `on_client_paused` asks for silence."""

    method: str
    path: str  # decoded as latin-1 bytes, as it came, without the query
    query: bytes
    headers: Headers  # names in lower case
    received_ns: int
    body_ns: int  # 0 until the body is complete

    @property
    def is_started(self) -> bool: ...
    @property
    def is_paused(self) -> bool:
        """The client takes nothing at the moment."""

    @property
    def stalled(self) -> bool:
        """It took nothing for so long that its connection was cut."""

    @property
    def is_gone(self) -> bool: ...
    async def read_body(self, limit: int, take: Callable[[int], bool]) -> bytes:
        """The whole body. `take` is told of bytes as they come and says whether there is room for them.

        Raises `ClientGone`, `BodyTooLarge`, `ClientTooSlow`, `Overloaded`.
        """

    def watch(self, watcher: CallWatcher | None) -> None: ...
    def start(self, status: int, headers: Headers, length: int | None) -> None:
        """The response head; `length` None means chunked. Leaves with the first body bytes or `flush`."""

    def flush(self) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self, data: bytes = b"") -> None:
        """The end of the body, after its last bytes."""

    def abort(self) -> None:
        """Cuts the connection so that the caller sees an incomplete answer."""


class Room:
    """Request bytes that are held now, those of all requests together."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = 0


class Share:
    """One request's part of the room: taken as its body arrives, given back once nobody needs the body any more."""

    __slots__ = ("_limit", "_room", "size")

    def __init__(self, room: Room, limit: int) -> None:
        self._room = room
        self._limit = limit
        self.size = 0

    def take(self, size: int) -> bool:
        """False: the room is full, and the request must be refused."""
        self.size += size
        self._room.held += size
        return self._room.held <= self._limit

    def give_back(self) -> None:
        self._room.held -= self.size
        self.size = 0


class Exchange:
    """Everything known about one request. Filled by the phases of `proxy.py`, read by `account.py`."""

    __slots__ = (
        "api", "attempts", "beats", "budget", "budget_action", "changes", "cleaned", "cors", "deadline",
        "error", "failures", "first_byte_deadline", "headers", "is_detached", "is_opted_in", "is_seen",
        "is_stream", "key_name", "kind", "max_tokens", "model", "outcome", "path", "plain", "read_timeout_ms",
        "reader", "reason", "request_id", "route", "rtt_ns", "status", "thinking_asked", "timeline", "trace_id",
        "upstream", "verdict", "wants_usage",
    )  # fmt: skip

    def __init__(self, call: Call) -> None:
        self.timeline = Timeline(call.received_ns)
        self.request_id = sane_request_id(first(call.headers, b"x-request-id")) or new_request_id()
        self.trace_id = ""
        self.path = call.path
        self.kind: Kind = "opaque"
        self.api: Api = "openai"
        self.is_stream = False
        self.is_seen = False
        """The upstream answers as a stream, so that its tokens can be seen, whatever the caller gets."""
        self.is_opted_in = False
        """The caller takes 202 and comes back for the answer."""
        self.is_detached = False
        self.budget: Budget | None = None  # None until a route was found
        self.headers = call.headers
        self.beats: BeatClock | None = None  # made when the first sign of life may be due
        self.read_timeout_ms: int | None = None  # what the caller's library bears between two bytes
        self.wants_usage = False  # the caller asked for a usage chunk
        self.deadline = 0  # the caller's own, monotonic ns; 0: none
        self.first_byte_deadline = 0  # of a caller that only limits silence
        self.model: str | None = None  # as the caller named it
        self.route: str | None = None
        self.upstream: str | None = None
        self.key_name: str | None = None
        self.max_tokens: int | None = None  # what went upstream
        self.changes: list[str] = []
        self.cleaned: dict[str, int] = {}
        self.thinking_asked = "client"
        self.attempts = 0
        self.failures: list[str] = []  # `upstream=reason` of attempts that did not answer
        self.budget_action: str | None = None
        self.reader: StreamReader | None = None
        self.plain: PlainAnswer | None = None
        self.rtt_ns: int | None = None
        self.status = 0
        self.outcome: Outcome | None = None
        self.reason: str | None = None
        self.cors: Headers | None = None  # fields for pages of other origins; None: nothing to add
        self.error: GatewayError | None = None
        self.verdict: str | None = None

    def __repr__(self) -> str:
        return f"<Exchange {self.request_id} {self.route}/{self.upstream} {self.outcome or 'running'}>"

    def attempt_id(self) -> str:
        """The request id that this attempt sends upstream. Never the caller's own: it may be in use there (C034)."""
        return f"{self.request_id[:100]}-{random.getrandbits(32):08x}"

    def traceparent(self) -> bytes:
        """A W3C trace context of our own, the same trace for every attempt."""
        self.trace_id = self.trace_id or f"{random.getrandbits(128) or 1:032x}"
        return f"00-{self.trace_id}-{random.getrandbits(64) or 1:016x}-01".encode("ascii")

    def settle(self, outcome: Outcome, reason: str | None = None) -> None:
        """Decides how the request ended: once, the first word counts."""
        if self.outcome is None:
            self.outcome = "pending_done" if outcome == "complete" and self.is_detached else outcome
            self.reason = reason

    def adopt(self, attempt: Attempt) -> None:
        """This attempt's answer is the one that is judged, sent and booked."""
        self.upstream = attempt.state.name
        self.is_seen = attempt.is_seen
        self.reader = attempt.reader
        self.plain = attempt.plain
        self.changes = attempt.changes
        self.thinking_asked = attempt.thinking_asked
        self.max_tokens = attempt.max_tokens
        self.timeline.header = attempt.header


def new_request_id() -> str:
    """128 random bits as 32 hex digits."""
    return os.urandom(16).hex()
