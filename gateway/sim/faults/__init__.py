"""Scripted faults: what goes wrong, chosen per request, as edits of the answer's steps.

A fault is named `NAME` or `NAME=ARGUMENT`, several joined by `+`. It is taken from, in this order: the header
`x-sim-fault`, the model name (`model!fault`), the server's script (one entry per request, None for "nothing"),
the server's default. Letters in brackets refer to the project's fault catalogue.
"""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Iterable
from contextlib import aclosing

from gateway.sim.endpoints import Request
from gateway.sim.faults import body, connection, head
from gateway.sim.faults.kinds import Context, Fault, FaultError, Maker
from gateway.sim.faults.replay import CLOSE, RESET, replay, stream
from gateway.sim.steps import Steps

__all__ = [
    "CLOSE",
    "FAULTS",
    "RESET",
    "Context",
    "Fault",
    "FaultError",
    "Script",
    "chosen_fault",
    "describe",
    "parse_fault",
    "play",
    "replay",
    "stream",
]

FAULTS: dict[str, Maker] = {**connection.FAULTS, **head.FAULTS, **body.FAULTS}
_MODEL_SUFFIX = re.compile(rb'("model"\s*:\s*"[^"\\!]*)!([^"\\]*)"')


class Script:
    """Faults to come, one per inference request. An empty script means no fault."""

    def __init__(self, entries: Iterable[str | Fault | None] = ()) -> None:
        self._entries: deque[str | Fault | None] = deque(entries)

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, *entries: str | Fault | None) -> None:
        """Adds entries at the end. FaultError for an unknown name."""
        for entry in entries:
            _made(entry)
            self._entries.append(entry)

    def take(self) -> tuple[bool, Fault | None]:
        """(whether there was an entry, its fault)."""
        return (True, _made(self._entries.popleft())) if self._entries else (False, None)


def parse_fault(text: str) -> Fault:
    """The fault of a description such as `stall=3:10` or `crlf+comments=2`; FaultError says what is wrong."""
    faults = [_parse_one(part) for part in text.split("+") if part]
    if not faults:
        raise FaultError("no fault named")
    fault = faults[0]
    for following in faults[1:]:
        fault = _composed(fault, following)
    return fault


def describe() -> list[tuple[str, str]]:
    """(name, what it does) of all faults, for help texts."""
    return [(name, (maker.__doc__ or "").strip()) for name, maker in FAULTS.items()]


def chosen_fault(request: Request, script: Script, default: str | Fault | None) -> tuple[Request, Fault | None]:
    """The fault for a request, and the request as the server should see it. An unknown fault answers 400."""
    request, named = _without_suffix(request)
    named = request.header(b"x-sim-fault") or named
    try:
        if named:
            return request, parse_fault(named)
        found, fault = script.take()
        return request, fault if found else _made(default)
    except FaultError as error:
        return request, head.refusing(400, str(error))


async def play(fault: Fault, steps: Steps, context: Context) -> Steps:
    """The steps with the fault in them; closes both when it is closed."""
    async with aclosing(steps), aclosing(fault(steps, context)) as edited:
        async for step in edited:
            yield step


def _made(entry: str | Fault | None) -> Fault | None:
    return parse_fault(entry) if isinstance(entry, str) else entry


def _parse_one(text: str) -> Fault:
    name, _, argument = text.partition("=")
    maker = FAULTS.get(name.strip())
    if maker is None:
        raise FaultError(f"unknown fault `{name}`; known: {', '.join(FAULTS)}")
    try:
        return maker(argument.strip())
    except ValueError as error:
        raise FaultError(f"fault `{name}`: bad argument `{argument}`: {error}") from None


def _composed(first: Fault, second: Fault) -> Fault:
    def both(steps: Steps, context: Context) -> Steps:
        return play(second, play(first, steps, context), context)

    return both


def _without_suffix(request: Request) -> tuple[Request, str | None]:
    """Cuts `!fault` off the model name."""
    found = _MODEL_SUFFIX.search(request.body) if b"!" in request.body else None
    if found is None:
        return request, None
    rest = request.body[: found.start()] + found[1] + b'"' + request.body[found.end() :]
    return dataclasses.replace(request, body=rest), found[2].decode()
