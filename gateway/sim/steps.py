"""An answer as a sequence of steps: what to write and what to do, so that faults are edits of a sequence.

A `bytes` step is one piece of the body: one SSE event, or a whole plain body. Everything else is an object below.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from http import HTTPStatus

Header = tuple[bytes, bytes]

EVENT_STREAM = b"text/event-stream; charset=utf-8"
JSON = b"application/json"


@dataclass(frozen=True, slots=True)
class Head:
    """Status line and headers. `length` None: chunked, or up to the end of the connection for HTTP/1.0."""

    status: int
    headers: tuple[Header, ...]
    length: int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The body is complete: last chunk. `trailers` go behind it; `silent`: it was already written by `Raw`."""

    trailers: tuple[Header, ...] = ()
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes for the wire as they are, outside of any framing."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing happens for so long; None: until the other side gives up."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class HangUp:
    """The connection ends here, complete or not: by FIN, or by RST."""

    reset: bool = False


Step = bytes | Head | End | Raw | Pause | HangUp
Steps = AsyncGenerator[Step, None]


def head_bytes(status: int, headers: Sequence[Header]) -> bytes:
    """A response head on the wire."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    lines = [b"HTTP/1.1 %d %s\r\n" % (status, phrase.encode())]
    lines.extend(b"%s: %s\r\n" % header for header in headers)
    return b"".join(lines) + b"\r\n"


def chunk_bytes(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


async def plain(status: int, body: bytes, content_type: bytes = JSON, headers: tuple[Header, ...] = ()) -> Steps:
    """A complete small answer."""
    yield Head(status, (*headers, (b"content-length", b"%d" % len(body)), (b"content-type", content_type)), len(body))
    yield body
    yield End()
