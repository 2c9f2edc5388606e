"""Ready-made behaviour for `RawUpstream`: what a model server does with every request."""

from __future__ import annotations

import asyncio
from typing import Literal

from tests.support.raw import LAST_CHUNK, STREAM_HEAD, Handler, Received, Wire

End = Literal["last_chunk", "open", "close", "reset", "half"]


def streams(*events: bytes, pause: float = 0.0, end: End = "last_chunk", head: bytes = STREAM_HEAD) -> Handler:
    """A chunked event stream; `end` says what follows the events."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(head)
        await wire.stream(*events, pause=pause)
        await finish(wire, end)

    return play


def sends(*pieces: bytes, end: End = "open") -> Handler:
    """Exactly these bytes, each in a write of its own."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(*pieces)
        await finish(wire, end)

    return play


async def finish(wire: Wire, end: End) -> None:
    """How a response ends: `half` announces a chunk and leaves, `open` keeps the connection as it is."""
    if end == "last_chunk":
        await wire.send(LAST_CHUNK)
    elif end == "half":
        await wire.send(b"32\r\n")
        wire.close()
    elif end in ("close", "reset"):
        await asyncio.sleep(0.02)  # so that what was sent is read before a reset throws it away
        wire.close() if end == "close" else wire.reset()


async def silence(request: Received, wire: Wire) -> None:
    """Reads the request and never answers."""
    await wire.wait_closed_by_peer(30)
