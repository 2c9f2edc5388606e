"""A raw HTTP/1.1 client for stories and tests: it sends what it is told and notes when each byte came.

It works over anything that takes an `asyncio.Protocol` factory: `Server.connect`, `MemoryNetwork.create_connection`,
`loop.create_connection`. Times are the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools
import orjson

from gateway.sim.steps import Header


@dataclass(slots=True)
class Response:
    """What came of one answer. `pieces` are the parts of the body as they were read, each with its time."""

    status: int = 0
    headers: list[Header] = field(default_factory=list)
    head_at: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    complete: bool = False  # ended by its own framing

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def json(self) -> dict[str, object]:
        """The body as an object."""
        return cast(dict[str, object], orjson.loads(self.body))

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header, or None."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def events(self) -> list[tuple[float, bytes]]:
        """The blocks of an event stream, each with the time of its last byte."""
        found: list[tuple[float, bytes]] = []
        rest = b""
        for when, piece in self.pieces:
            *whole, rest = (rest + piece).split(b"\n\n")
            found.extend((when, block) for block in whole)
        return found

    def chunks(self) -> list[tuple[float, dict[str, object]]]:
        """The JSON of all `data:` events but `[DONE]`, with their times."""
        lines = [(when, line) for when, block in self.events() for line in block.split(b"\n")]
        data = [(when, line[5:].strip()) for when, line in lines if line.startswith(b"data:")]
        return [(when, orjson.loads(text)) for when, text in data if text != b"[DONE]"]


class Client(asyncio.Protocol):
    """One connection. Ask, then await `response()`; or look at `received`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._changed = asyncio.Event()
        self._response = Response()
        self._done: list[Response] = []
        self.transport: asyncio.Transport
        self.received = b""
        self.at_eof = False
        self.lost = False
        self.lost_by: Exception | None = None
        self.framing_error: Exception | None = None

    def ask(
        self,
        path: str,
        body: Mapping[str, object] | bytes | None = None,
        *,
        method: str | None = None,
        headers: Sequence[Header] = (),
    ) -> None:
        """Writes a request; POST with a JSON body, GET without one."""
        data = b"" if body is None else body if isinstance(body, bytes) else orjson.dumps(body)
        lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1".encode(), b"host: sim"]
        if body is not None:
            lines += [b"content-type: application/json", b"content-length: %d" % len(data)]
        lines += [name + b": " + value for name, value in headers]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + data)

    async def response(self) -> Response:
        """The next whole answer, or what there is of it when the connection ends."""
        while not self._done and not self.lost and not self.at_eof and self.framing_error is None:
            await self._change()
        return self._done.pop(0) if self._done else self._response

    async def until(self, text: bytes) -> bytes:
        """Everything received, once `text` is in it; ConnectionError if the connection ends before."""
        while text not in self.received:
            if self.lost or self.at_eof:
                raise ConnectionError(f"the connection ended without {text!r}")
            await self._change()
        return self.received

    async def closed(self) -> None:
        """Returns when the connection is lost."""
        while not self.lost:
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.framing_error is None:
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                self.framing_error = error
        self._changed.set()

    def eof_received(self) -> None:
        self.at_eof = True
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost, self.lost_by = True, exc
        self._changed.set()

    # httptools

    def on_message_begin(self) -> None:
        self._response = Response()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()
        self._response.head_at = self._loop.time()

    def on_body(self, body: bytes) -> None:
        self._response.pieces.append((self._loop.time(), body))

    def on_message_complete(self) -> None:
        self._response.complete = True
        if self._response.status != 100:
            self._done.append(self._response)
