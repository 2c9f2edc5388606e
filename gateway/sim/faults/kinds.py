"""What a fault is, and the small pieces that most of them are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.sim.endpoints import Request
from gateway.sim.steps import Head, Steps, chunk_bytes

if TYPE_CHECKING:
    from gateway.sim.http import SimProtocol
    from gateway.sim.transport import Server


class FaultError(ValueError):
    """A fault's name or argument is wrong."""


@dataclass(frozen=True, slots=True)
class Context:
    """Where a fault is played."""

    request: Request
    connection: SimProtocol
    server: Server


Fault = Callable[[Steps, Context], Steps]
Maker = Callable[[str], Fault]  # from the argument's text, "" where none was given

PLAIN_PIECES = 8  # a plain body is split into so many, so that faults "after N events" have a middle there too
ERROR_TYPE = "InternalServerError"


async def pieces(steps: Steps) -> Steps:
    """The same steps, with a plain body in several pieces."""
    plain = False
    async for step in steps:
        if type(step) is Head:
            plain = step.length is not None
        if type(step) is bytes and plain and len(step) >= PLAIN_PIECES:
            size = -(-len(step) // PLAIN_PIECES)
            for start in range(0, len(step), size):
                yield step[start : start + size]
        else:
            yield step


def framed(data: bytes, *, chunked: bool) -> bytes:
    """A piece of body as the wire would show it."""
    return chunk_bytes(data) if chunked else data


def count(argument: str, default: int) -> int:
    """A count of events; ValueError if it is none."""
    value = int(argument) if argument else default
    if value < 0:
        raise ValueError("must not be negative")
    return value


def seconds(argument: str, default: float | None) -> float | None:
    """A duration, or the default; None means for ever."""
    return float(argument) if argument else default


def is_anthropic(request: Request) -> bool:
    return request.path.startswith("/v1/messages")
