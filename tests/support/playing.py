"""Model servers that always do the same, and a gateway before one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tests.support.raw import LAST_CHUNK, STREAM_HEAD, Handler, RawUpstream, Received, Wire, answer, framed, whole
from tests.support.running import Running, running_gateway, settings_for


def plain(body: bytes = answer(), status: str = "200 OK", headers: str = "content-type: application/json") -> Handler:
    """Answers every request with this body and its length."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(whole(body, status, headers))

    return play


def streaming(*events: bytes | float, head: bytes = STREAM_HEAD) -> Handler:
    """Answers every request with these chunks; a number is a pause in seconds."""

    async def play(request: Received, wire: Wire) -> None:
        await wire.send(head)
        for event in events:
            if isinstance(event, bytes):
                await wire.send(framed(event))
            else:
                await asyncio.sleep(event)
        await wire.send(LAST_CHUNK)

    return play


def error_body(message: str, code: int | str = 400, **more: object) -> bytes:
    """An error as vLLM words it."""
    import json

    error = {"message": message, "type": "BadRequestError", "param": None, "code": code, **more}
    return json.dumps({"error": error}, separators=(",", ":")).encode()


@asynccontextmanager
async def serving(
    handler: Handler,
    *,
    route: Mapping[str, object] | None = None,
    upstream: Mapping[str, object] | None = None,
    **top: object,
) -> AsyncIterator[tuple[RawUpstream, Running]]:
    """A raw upstream called `up`, and a gateway whose route `main` leads to it."""
    async with RawUpstream(handler) as server:
        async with running_gateway(settings_for(server.url, route=route, **top), upstream=upstream) as running:
            yield server, running
