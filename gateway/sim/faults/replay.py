"""Answers written down by a test, byte for byte: transcripts instead of a model."""

from __future__ import annotations

from gateway.sim.faults.kinds import Context, Fault
from gateway.sim.steps import EVENT_STREAM, End, HangUp, Head, Pause, Raw, Steps

RESET = HangUp(reset=True)
CLOSE = HangUp()

Item = bytes | float | HangUp  # bytes to write, seconds to wait, an end


def replay(*items: Item) -> Fault:
    """Exactly these bytes on the wire, head included, one write per item. The connection stays open behind them
    unless an item ends it.
    """

    async def played(_steps: Steps, _context: Context) -> Steps:
        for item in items:
            yield item if isinstance(item, HangUp) else Raw(item) if isinstance(item, bytes) else Pause(item)
        yield End(silent=True)

    return played


def stream(*items: Item, status: int = 200, content_type: bytes = EVENT_STREAM, complete: bool = True) -> Fault:
    """A chunked answer with a proper head: each `bytes` item is one chunk. `complete`: ends with the last chunk."""

    async def played(_steps: Steps, _context: Context) -> Steps:
        yield Head(status, ((b"content-type", content_type),))
        for item in items:
            yield Pause(item) if isinstance(item, int | float) else item
        yield End() if complete else CLOSE

    return played
