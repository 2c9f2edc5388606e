"""A caller of `firsttoken demo` that takes 202 for an answer: it asks how long it will take, and comes back for it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import orjson

from gateway.cli import CommandError
from gateway.cli.caller import Answer, get, post


@dataclass(frozen=True, slots=True)
class Note:
    """What one answer told. Times in ms, `after_ms` from the first request on."""

    after_ms: float
    status: int
    left_ms: float | None  # the gateway's estimate, absent where it has none, and with the answer itself
    phase: str | None


@dataclass(frozen=True, slots=True)
class Comeback:
    """How a caller got its answer. The notes are those of the 202, of each poll, and of the answer, in this order."""

    wait_s: float  # the patience it asked with
    notes: tuple[Note, ...]
    answer_bytes: int
    stream_bytes: int | None  # read meanwhile from the start on a second connection; None: there was no 202


async def come_back(port: int, path: str, body: bytes, request_id: str, wait_s: float) -> tuple[Answer, Comeback]:
    """Asks with `Prefer: respond-async, wait=…`, polls until the answer is there, and follows its stream meanwhile.

    Raises CommandError when the stream was not, byte for byte, what the last poll brought.
    """
    started = time.monotonic()
    fields = {"x-request-id": request_id, "prefer": f"respond-async, wait={wait_s:.3f}"}
    answer = await post(port, path, body, fields)
    notes = [_note(answer, started)]
    if answer.status != 202:
        return answer, Comeback(wait_s, tuple(notes), len(answer.body), None)
    told = orjson.loads(answer.body)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(get(port, told["stream_url"], {"accept": "text/event-stream"}))
        while answer.status == 202:
            answer = await get(port, f"{told['poll_url']}?wait={wait_s:.3f}", {})
            notes.append(_note(answer, started))
    stream = following.result().body
    if stream != answer.body:
        raise CommandError(f"the stream of the call `{request_id}` was not what its poll brought")
    return answer, Comeback(wait_s, tuple(notes), len(answer.body), len(stream))


def _note(answer: Answer, started: float) -> Note:
    told = orjson.loads(answer.body) if answer.status == 202 else {}
    return Note((time.monotonic() - started) * 1000, answer.status, told.get("estimation_ms"), told.get("phase"))
