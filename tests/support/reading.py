"""Streams as a model server sends them, fed to a reader at given instants."""

from __future__ import annotations

import json

from gateway.wire.kinds import Kind
from gateway.wire.reader import StreamReader, reader_for

MS = 1_000_000
DONE = b"data: [DONE]\n\n"


def event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def chunk(delta: object, finish: str | None = None, index: int = 0, **extra: object) -> bytes:
    return event({"id": "c", "choices": [{"index": index, "delta": delta, "finish_reason": finish}], **extra})


def usage_chunk(**extra: object) -> bytes:
    return event({"id": "c", "choices": [], **extra})


def read(*reads: bytes | tuple[int, bytes], kind: Kind = "chat", is_closed: bool = True) -> StreamReader:
    """Feed reads at 1, 2, 3 … ms, or at the ms given with them."""
    reader = reader_for(kind)
    for place, item in enumerate(reads, start=1):
        at, data = item if isinstance(item, tuple) else (place, item)
        reader.feed(data, at * MS)
    if is_closed:
        reader.close(1_000_000 * MS)
    return reader


def instants(reader: StreamReader) -> tuple[float, float, float, float]:
    """t_event, t_token, t_visible, t_last in ms."""
    return tuple(at / MS for at in (reader.t_event, reader.t_token, reader.t_visible, reader.t_last))  # type: ignore[return-value]


ROLE = chunk({"role": "assistant", "content": ""})
STOP = chunk({}, "stop")
LENGTH = chunk({}, "length")
