"""`/gateway/pending/ID`: polls, replays and cancels requests whose callers took 202 for an answer.

An id that is unknown, or somebody else's, is the same 404. What this process runs is read from its own memory,
everything else from the store that replicas share.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

import orjson
from fastapi import HTTPException, Request, Response
from fastapi.responses import StreamingResponse

from gateway.errors import GatewayError, event_of
from gateway.pending import RETRY_AFTER_S, error_of, owner_of, status_of
from gateway.store import StoreDown
from gateway.wire.headers import first

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fastapi import FastAPI

    from gateway.app import Gateway
    from gateway.config import Key
    from gateway.pending import PendingBook
    from gateway.recording import Recording
    from gateway.store import Entry, Store

MAX_WAIT_S: Final = 120.0  # of one long poll; most proxies between give up later
KEEP_ALIVE_S: Final = 10.0
CANCEL_S: Final = 1.0  # for a cancelled request to end, so that its end can be told
PIECE: Final = 256 * 1024
KEEP_ALIVE: Final = b": keep-alive\n\n"
_WHOLE: Final = 1 << 62  # more bytes than any answer has: waits for the end
_FRAMING: Final = frozenset((b"content-length", b"transfer-encoding", b"connection"))
_STREAM_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_EXPIRED: Final[dict[str, object]] = {
    "message": "The result was let go of while it was read.", "code": "result_expired", "status": 410,
}  # fmt: skip

_STORE_DOWN: Final[dict[str, object]] = {
    "message": "The result cannot be reached any more; ask again.", "reason": "store_down", "status": 503,
}  # fmt: skip


class Result(Protocol):
    """One request's answer, wherever it is. Whatever asks a store may raise `StoreDown`."""

    entry: Entry
    """As it was at the last `wait`."""

    @property
    def size(self) -> int: ...
    @property
    def describe(self) -> Callable[[], dict[str, object]] | None: ...
    async def wait(self, size: int, timeout_s: float) -> None:
        """Returns when there is more than `size` bytes, the end, or the time is over."""

    async def read(self, offset: int) -> bytes: ...
    async def cancel(self) -> None: ...


class OwnResult:
    """Of a request that this process runs, or ran."""

    def __init__(self, recording: Recording) -> None:
        self.entry = recording.entry
        self._recording = recording

    @property
    def size(self) -> int:
        return self._recording.size

    @property
    def describe(self) -> Callable[[], dict[str, object]] | None:
        return self._recording.describe

    async def wait(self, size: int, timeout_s: float) -> None:
        await self._recording.wait(size, timeout_s)

    async def read(self, offset: int) -> bytes:
        return self._recording.read(offset)

    async def cancel(self) -> None:
        if self._recording.call is not None:
            self._recording.call.cancel()


class SharedResult:
    """Of a request that another replica runs, or ran."""

    describe = None

    def __init__(self, store: Store, entry: Entry) -> None:
        self.entry = entry
        self._store = store

    @property
    def size(self) -> int:
        return self.entry.size

    async def wait(self, size: int, timeout_s: float) -> None:
        await self._store.wait(self.entry.id, size, timeout_s)
        found = await self._store.get(self.entry.id)
        self.entry = found or replace(self.entry, state="failed", error=_EXPIRED)

    async def read(self, offset: int) -> bytes:
        return await self._store.read(self.entry.id, offset, PIECE)

    async def cancel(self) -> None:
        await self._store.cancel(self.entry.id)


class Answers:
    """Finds results wherever they are, for whoever may read them."""

    def __init__(self, book: PendingBook) -> None:
        self._book = book

    async def find(self, entry_id: str, key: Key | None) -> Result:
        """The result. Raises 404, 410, 503."""
        owner = owner_of(key)
        recording = self._book.find(entry_id)
        if recording is not None:
            if recording.entry.owner_key != owner:
                raise _unknown()
            return OwnResult(recording)
        try:
            entry = await self._book.store.get(entry_id)
        except StoreDown:
            raise _unreachable() from None
        if entry is not None and entry.owner_key == owner:
            return SharedResult(self._book.store, entry)
        if self._book.is_expired(entry_id, owner):
            raise HTTPException(410, "This result was kept for its time and is gone (`pending.ttl_s`).")
        raise _unknown()


async def wait_for_end(result: Result, seconds: float) -> None:
    """A long poll: until the request is over, or the time is."""
    loop = asyncio.get_running_loop()
    end = loop.time() + min(seconds, MAX_WAIT_S)
    while result.entry.state == "pending" and (left := end - loop.time()) > 0:
        await result.wait(_WHOLE, left)


async def whole(result: Result) -> bytes:
    """The answer's bytes. Raises StoreDown also when they are not all there any more."""
    pieces, size = [], 0
    while piece := await result.read(size):
        pieces.append(piece)
        size += len(piece)
    if size < result.size:
        raise StoreDown("a part of the answer is gone")
    return b"".join(pieces)


async def follow(result: Result) -> AsyncIterator[bytes]:
    """The stream from its start, then live, to the end; comments while there is nothing. Never ends without a word:
    what is no stream, an error page or a plain answer, comes as one event."""
    async for beat in _until(result, 0):
        yield beat
    if not _is_event_stream(result.entry):
        async for beat in _until(result, _WHOLE):
            yield beat
        if result.entry.state == "done":
            yield _as_event(result.entry, await whole(result))
        else:
            yield _error_event(result.entry)
        return
    offset = 0
    while not _is_over(result) or offset < result.size:
        data = await result.read(offset)
        offset += len(data)
        if data:
            yield data
        elif _is_over(result):
            raise StoreDown("a part of the answer is gone")
        else:
            async for beat in _until(result, offset):
                yield beat
    if result.entry.state != "done" and not result.entry.info.get("is_complete"):
        yield b"\n\n" + _error_event(result.entry)


def _is_over(result: Result) -> bool:
    return result.entry.state != "pending"


async def _until(result: Result, size: int) -> AsyncIterator[bytes]:
    """Waits for more than `size` bytes or the end, with signs of life."""
    while not _is_over(result) and result.size <= size:
        await result.wait(size, KEEP_ALIVE_S)
        if not _is_over(result) and result.size <= size:
            yield KEEP_ALIVE


def add_pending(app: FastAPI, gateway: Gateway, caller: Callable[[Request], Key | None]) -> None:
    """The three ways to ask. `caller` gives the request's key, None when the gateway is open; raises 401."""
    answers = Answers(gateway.pendings)

    @app.get(
        "/gateway/pending/{entry_id}", tags=["pending"], response_class=Response, summary="How is it, or the answer"
    )
    @app.head("/gateway/pending/{entry_id}", include_in_schema=False)
    async def poll(entry_id: str, request: Request, wait: float = 0) -> Response:
        """202 while it runs; then the model server's own status, headers and bytes. `wait`: long poll, seconds.

        With `Accept: text/event-stream` the stream from its start, followed live.
        """
        result = await answers.find(entry_id, caller(request))
        if request.method == "GET" and "text/event-stream" in request.headers.get("accept", ""):
            return StreamingResponse(_quietly(result), media_type="text/event-stream", headers=_STREAM_HEADERS)
        try:
            await wait_for_end(result, wait)
            return await _answer(result)
        except StoreDown:
            raise _unreachable() from None
        except asyncio.CancelledError:  # the drain limit: nothing else cancels a poll
            raise HTTPException(503, "The gateway is shutting down; ask again.", {"retry-after": "1"}) from None

    @app.delete(
        "/gateway/pending/{entry_id}", tags=["pending"], response_class=Response, summary="Nobody wants it any more"
    )
    async def cancel(entry_id: str, request: Request) -> Response:
        """Closes the connection to the model server. A request that is over stays as it is."""
        result = await answers.find(entry_id, caller(request))
        try:
            if result.entry.state == "pending":
                await result.cancel()
                await wait_for_end(result, CANCEL_S)
        except StoreDown:
            raise _unreachable() from None
        body = orjson.dumps(status_of(result.entry, result.describe))
        return Response(body, 202 if result.entry.state == "pending" else 200, media_type="application/json")


async def _answer(result: Result) -> Response:
    entry = result.entry
    if entry.state == "done":
        response = Response(await whole(result), entry.status)
        response.raw_headers = [
            *(field for field in entry.headers if field[0] not in _FRAMING),
            (b"content-length", b"%d" % len(response.body)),
        ]
        return response
    body = orjson.dumps(status_of(entry, result.describe))
    if entry.state == "pending":
        return Response(body, 202, {"retry-after": str(RETRY_AFTER_S), "cache-control": "no-store"}, "application/json")
    status = 410 if entry.state == "cancelled" else _status_of_error(entry)
    return Response(body, status, {"x-should-retry": "false", "cache-control": "no-store"}, "application/json")


def _status_of_error(entry: Entry) -> int:
    told = error_of(entry).get("status")
    return told if isinstance(told, int) and 400 <= told < 600 else 502


async def _quietly(result: Result) -> AsyncIterator[bytes]:
    """A store that goes away in the middle ends the stream with an error event, not with a traceback."""
    try:
        async for piece in follow(result):
            yield piece
    except StoreDown:
        yield b"\n\n" + _error_event(replace(result.entry, error=_STORE_DOWN))


def _is_event_stream(entry: Entry) -> bool:
    return (first(entry.headers, b"content-type") or b"").startswith(b"text/event-stream")


def _as_event(entry: Entry, body: bytes) -> bytes:
    """A plain answer for somebody who reads events."""
    is_anthropic = entry.info.get("api") == "anthropic"
    name = b"event: error\n" if is_anthropic and entry.status >= 400 else b""
    lines = b"".join(b"data: %b\n" % line for line in body.strip().splitlines())
    return name + lines + (b"\n" if is_anthropic else b"\ndata: [DONE]\n\n")


def _error_event(entry: Entry) -> bytes:
    if entry.state == "cancelled":
        entry = replace(entry, error={"message": "The request was cancelled.", "code": "cancelled", "status": 410})
    told = error_of(entry)
    error = GatewayError(str(told["message"]), code=str(told["code"]), status=_status_of_error(entry))
    error.type = str(told["type"])
    return event_of(error, "anthropic" if entry.info.get("api") == "anthropic" else "openai")


def _unknown() -> HTTPException:
    return HTTPException(404, "There is no such pending request here.")


def _unreachable() -> HTTPException:
    return HTTPException(
        503,
        "The store that replicas share cannot be reached, so only the replica that took this request knows it. "
        "Try again.",
        headers={"retry-after": "2"},
    )
