"""A model server and a client on raw sockets: every byte that they write is the test's own."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(delta: dict[str, object] | None = None, *, finish: str | None = None, index: int = 0, **top: object) -> bytes:
    """One event of an OpenAI chat stream."""
    choice = {"index": index, "delta": delta or {}, "logprobs": None, "finish_reason": finish}
    payload: dict[str, object] = {
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **top,
    }  # fmt: skip
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage_chunk(prompt: int = 3, completion: int = 2, **more: object) -> bytes:
    """The last event of a stream whose usage was asked for."""
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **more}
    payload = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [],
        "usage": usage,
    }
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def framed(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(body: bytes, status: str = "200 OK", headers: str = "content-type: application/json") -> bytes:
    """A complete response with Content-Length."""
    lines = f"HTTP/1.1 {status}\r\n{headers}\r\n" if headers else f"HTTP/1.1 {status}\r\n"
    return lines.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def answer(content: str | None = "hello", finish: str = "stop", **message: object) -> bytes:
    """The JSON of a plain chat answer."""
    return json.dumps({
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }).encode()  # fmt: skip


def chat(stream: bool = True, model: str = "m", content: object = "hi", **more: object) -> bytes:
    """The body of a chat request."""
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": model, "stream": stream, "messages": messages, **more}, ensure_ascii=False).encode()


@dataclass
class Received:
    """A request as it arrived at the raw upstream."""

    head: bytes
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """One accepted connection of the raw upstream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.reader = reader
        self.writer = writer
        self.number = number  # of the connection, from 0
        self.served = 0

    async def send(self, *pieces: bytes) -> None:
        """Writes each piece on its own, so that each is a read of its own at the other side (mostly)."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def stream(self, *events: bytes, pause: float = 0.0) -> None:
        """Chunked pieces with a pause after each."""
        for event in events:
            await self.send(framed(event))
            if pause:
                await asyncio.sleep(pause)

    def reset(self) -> None:
        """RST at once."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()

    async def wait_closed_by_peer(self, timeout: float = 5.0) -> float:
        """When the peer closed (monotonic seconds); anything it sends meanwhile is dropped."""
        async with asyncio.timeout(timeout):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass
        return time.monotonic()


Handler = Callable[[Received, Wire], Awaitable[None]]


class RawUpstream:
    """Plays `handler` for every request. Health checks and model lists are answered by itself, and not counted."""

    def __init__(
        self,
        handler: Handler,
        *,
        models: Sequence[str] = ("m",),
        owned_by: str = "test",
        listing: bytes | None = None,
        listing_delay: float = 0,
    ) -> None:
        self._handler = handler
        data = [{"id": m, "object": "model", "created": 1, "owned_by": owned_by} for m in models]
        self._listing = listing or json.dumps({"object": "list", "data": data}).encode()
        self._listing_delay = listing_delay
        self.listings = 0  # how often the model list was asked for
        self.requests: list[Received] = []
        self.connections = 0
        self.open = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=2**26)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        wire = Wire(reader, writer, -1)
        try:
            while (request := await read_request(reader)) is not None:
                if request.target in ("/metrics", "/version") and request.header("user-agent") == "firsttoken-probe":
                    await wire.send(whole(b"", "404 Not Found", headers=""))  # what probes ask, and no test is about
                elif request.target == "/health" and request.method == "GET":
                    await wire.send(whole(b"", headers=""))
                elif request.target == "/v1/models" and request.method == "GET":
                    self.listings += 1
                    await asyncio.sleep(self._listing_delay)
                    await wire.send(whole(self._listing))
                else:
                    if wire.number < 0:
                        wire.number = self.connections
                        self.connections += 1
                        self.open += 1
                    self.requests.append(request)
                    wire.served += 1
                    await self._handler(request, wire)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        except RuntimeError:  # uvloop's word for writing to a connection that is gone
            if not writer.transport.is_closing():
                raise
        finally:
            if wire.number >= 0:
                self.open -= 1
            writer.close()


async def read_request(reader: asyncio.StreamReader) -> Received | None:
    """One request with its body, Content-Length only; None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ", 2)
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines[1:] if line)]
    length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
    return Received(head, method, target, headers, await reader.readexactly(length))


@dataclass
class Response:
    """A response as the raw client read it."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # of a chunked body, with when they came
    is_whole: bool = True  # False: the connection ended before the body did

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[bytes]:
        return [block for block in self.body.split(b"\n\n") if block]

    @property
    def error(self) -> Any:
        """The error object, from a JSON body or from the last error event of a stream."""
        if (self.header("content-type") or "").startswith("text/event-stream"):
            datas = [event.split(b"data: ", 1)[1] for event in self.events if b"data: {" in event]
            return next(json.loads(data)["error"] for data in reversed(datas) if b'"error"' in data)
        return self.json["error"]


class RawClient:
    """A client connection on which every byte is the test's own."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**26)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def post(
        self, body: bytes, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None
    ) -> None:
        fields = {
            "host": "gateway.test",
            "content-type": "application/json",
            "content-length": str(len(body)),
            **(headers or {}),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        await self.send(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body)

    async def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> Response:
        fields = {"host": "gateway.test", **(headers or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        await self.send(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
        return await self.response(bodiless=method == "HEAD")

    async def head(self) -> Response:
        """Status and headers of the next response."""
        async with asyncio.timeout(20):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        lines = raw.decode("latin-1").split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines[1:] if line)]
        return Response(int(lines[0].split(" ")[1]), headers)

    async def piece(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        async with asyncio.timeout(20):
            size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
            data = await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        return data

    async def response(self, *, bodiless: bool = False) -> Response:
        """The next response to its end, or to the end of the connection."""
        found = await self.head()
        while found.status < 200:
            found = await self.head()
        if bodiless:
            return found
        try:
            if (found.header("transfer-encoding") or "").lower() == "chunked":
                while piece := await self.piece():
                    found.pieces.append((time.monotonic(), piece))
                    found.body += piece
            else:
                async with asyncio.timeout(20):
                    found.body = await self.reader.readexactly(int(found.header("content-length") or 0))
        except asyncio.IncompleteReadError as error:
            found.is_whole = False
            if not found.pieces:
                found.body += error.partial
        except ConnectionError:
            found.is_whole = False
        return found

    async def ask(
        self, body: bytes, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None
    ) -> Response:
        await self.post(body, path, headers)
        return await self.response()

    async def at_end(self, timeout: float = 5.0) -> bool:
        """Whether the gateway closed the connection, with nothing more to read."""
        async with asyncio.timeout(timeout):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def half_close(self) -> None:
        self.writer.write_eof()
